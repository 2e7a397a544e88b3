"""Trials on made-up acceptance, and of an LLM whose drafter is compared with another on its own calls."""

import collections
import functools
import itertools
import math

import jax
import numpy as np
import pytest

import jaxspec
from jaxspec.engine.trials import ALIKE, ERROR, LEAST, PAIRS, TURN, Comparison, Tally, Trial, log_evidence

pytestmark = pytest.mark.usefixtures("unoptimised")


def calls(trial, rate, rounds=TURN, most=10_000):
    """Makes calls of a trial until it has a verdict, and returns the variant of each. rate: (name, number of the call) -> accepted."""
    made = []
    while trial.verdict is None:
        assert len(made) < most, "the trial does not end"
        made.append(trial.name)
        trial.see(trial.name, Tally(rounds, rate(trial.name, len(made))))
    return made


def trial_of(first="a", second="b", **settings):
    return Trial({first: first.upper(), second: second.upper()}, Comparison(first, second), **settings)


def test_evidence_is_the_bayes_factor_of_the_t_test():
    """Rouder et al. 2009, equation 1 with its prior integrated: a g-prior of unit information."""
    x = np.random.default_rng(0).normal(0.7, 1, 9)
    n, t2 = len(x), len(x) * x.mean() ** 2 / x.var(ddof=1)
    expected = (1 + n) ** -0.5 * ((1 + t2 / (n - 1)) / (1 + t2 / ((1 + n) * (n - 1)))) ** (n / 2)
    assert math.exp(log_evidence(n, x.sum(), (x**2).sum())) == pytest.approx(expected)


def test_equal_variants_seldom_end_it_early():
    """By more than four standard errors, the share of trials that ever pass the limit is at most ERROR."""
    trials, x = 4000, np.random.default_rng(1).normal(0, 0.3, (4000, PAIRS))
    n, sums, squares = np.arange(1, PAIRS + 1), x.cumsum(axis=1), (x**2).cumsum(axis=1)
    passed = [any(log_evidence(*at) >= -math.log(ERROR) for at in zip(n, s, q, strict=True)) for s, q in zip(sums, squares, strict=True)]
    assert np.mean(passed) <= ERROR + 4 * (ERROR / trials) ** 0.5


@pytest.mark.parametrize("better", ["a", "b"])
def test_the_better_one_is_kept_and_soon(better):
    rng, trial = np.random.default_rng(2), trial_of()
    made = calls(trial, lambda name, _: rng.binomial(4 * TURN, 0.6 if name == better else 0.4))
    assert trial.verdict == trial.name == better and trial.weights == better.upper()
    assert len(made) <= 2 * 12
    assert set(made[:4]) == {"a", "b"} and abs(made.count("a") - made.count("b")) <= 1


def test_a_steady_drift_favours_neither():
    """Text that gets easier with each call: the differences of pairs alternate."""
    trial = trial_of()
    made = calls(trial, lambda _, call: call)
    assert made[:8] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert abs(trial.comparison.findings.gain) <= 1 / TURN / (len(made) / 2)


def test_equal_variants_keep_the_first():
    """As soon as they are known to be alike."""
    trial = trial_of()
    made = calls(trial, lambda *_: 50)
    assert trial.verdict == "a" and len(made) == 2 * LEAST
    assert trial.comparison.tallies == {"a": Tally(LEAST * TURN, 50 * LEAST), "b": Tally(LEAST * TURN, 50 * LEAST)}


def test_two_that_are_known_to_be_alike_end_it():
    """Differences of a tenth of a token to either side, with the second a little ahead: at 100 rounds a turn that takes some pairs."""
    trial, differences = trial_of(turn=100), [0.1, -0.1] * 4 + [0.01] * 60
    calls(trial, lambda name, call: 200 + (name == "b") * round(100 * differences[(call - 1) // 2]), rounds=100)
    findings = trial.comparison.findings
    assert trial.verdict == "b" and findings.gain > 0
    assert 0.009 * 3 < findings.error <= ALIKE * findings.tallies["a"].acceptance_length
    count = findings.tallies["a"].rounds // 100
    assert LEAST < count < PAIRS
    assert findings.error == pytest.approx(np.std(differences[:count], ddof=1) / count**0.5)
    expected = f"a 3.00 tokens a step ({100 * count} steps), b 3.00 tokens a step ({100 * count} steps): b is kept"
    assert str(findings) == expected and str(trial_of().comparison.findings).endswith(
        "b 1.00 tokens a step (0 steps): both are still tried"
    )


def test_a_small_advantage_decides_at_the_end():
    rng, trial = np.random.default_rng(3), trial_of()
    calls(trial, lambda name, call: (50 if call % 2 else 90) + (name == "b") + int(rng.integers(-20, 20)) // 4 * 4)
    tallies = trial.comparison.tallies
    assert trial.verdict == max(tallies, key=lambda name: tallies[name].accepted)


def test_a_turn_is_as_many_calls_as_its_rounds_take():
    made = calls(trial_of(), lambda name, _: 20 if name == "a" else 10, rounds=TURN // 4)
    assert made[:12] == ["a"] * 4 + ["b"] * 8
    assert calls(trial_of(turn=2 * TURN), lambda name, _: 20 if name == "a" else 10)[:6] == ["a"] * 2 + ["b"] * 4


def test_shards_share_a_verdict():
    """Each takes its own turns; their pairs add up, and all keep the same."""
    comparison = Comparison("a", "b")
    shards = [Trial({"a": f"A{i}", "b": f"B{i}"}, comparison) for i in range(3)]
    for _ in range(4):
        for shard in shards:
            shard.see(shard.name, Tally(TURN, 80 if shard.name == "b" else 20))
    assert comparison.verdict == "b" and [shard.weights for shard in shards] == ["B0", "B1", "B2"]
    assert comparison.tallies["b"].acceptance_length == 1 + 80 / TURN


def test_a_challenger_loses_sooner_than_it_wins():
    def pairs(worse, better, **settings):
        comparison, rng = Comparison("new", "old", **settings), np.random.default_rng(3)
        for count in itertools.count(1):
            comparison.add(*(Tally(1000, int(rng.normal(mean, 60))) for mean in (worse, better)))
            if comparison.verdict is not None:
                return comparison.verdict, count

    verdict, usual = pairs(1500, 1650)
    lost, sooner = pairs(1500, 1650, challenge=True)
    assert (verdict, lost) == ("old", "old") and sooner < usual
    assert pairs(1650, 1500, challenge=True) == pairs(1650, 1500)


def test_it_refuses_names_that_do_not_fit():
    with pytest.raises(ValueError, match="both variants are called 'a'; expected two names"):
        Comparison("a", "a")
    with pytest.raises(ValueError, match=r"variants are called \['a', 'c'\]; expected \['a', 'b'\]"):
        Trial({"a": 1, "c": 2}, Comparison("a", "b"))


def spoilt(drafter, share):
    """The drafter with noise in its weights, of this share of their size."""
    leaves, tree = jax.tree.flatten(drafter)
    rng = np.random.default_rng(0)
    changed = [x if x.dtype == np.int32 else x + share * x.std() * rng.standard_normal(x.shape).astype(np.float32) for x in leaves]
    return jax.tree.unflatten(tree, changed)


PROMPTS = ["def add(a, b):\n    return", "import os\n\n\nclass Reader:\n", "for i in range(10):\n    print(", "def main():\n    parser = "]
SAMPLED = jaxspec.SamplingParams(max_tokens=60, temperature=0.7, seed=5, ignore_eos=True)
LOADED = {"num_draft_tokens": 3, "max_slots": 2, "max_len": 160, "progress": False}


@functools.cache
def without_drafts():
    return [c.token_ids for c in jaxspec.load("pocket", **LOADED | {"num_draft_tokens": 0}).generate(PROMPTS * 9, SAMPLED)]


@pytest.mark.slow
def test_an_llm_keeps_the_better_drafter_and_its_texts():
    """The spoilt drafter is the one in use. As both keep K and V of their own, no round of a sequence counts that both have served."""
    llm = jaxspec.load("pocket", "pocket-dflash", **LOADED, kv_pages=3)
    good, runner, comparison, seen = llm.drafter, llm._runner, Comparison("spoilt", "good"), collections.Counter()
    runner.drafting.use(spoilt(good, 0.7))
    trial = Trial({"spoilt": llm.drafter, "good": good}, comparison, apart=runner.drafting.owns_kv, turn=16)
    runner.drafting.begin_trial(trial)
    with pytest.raises(ValueError, match="a trial of spoilt and good is open; expected none"):
        runner.drafting.begin_trial(Trial({"spoilt": good, "good": good}, comparison))
    see, writers = trial.see, {writer: name for name, writer in trial.writers.items()}

    def seeing(name, tally):
        running = [writers.get(request.writer) for request in runner.held.running]
        assert all(writer in (name, None) for writer in running)
        seen[name, "whole" if set(running) == {name} else "mixed"] += 1
        assert tally.rounds == 0 or name in running
        see(name, tally)

    trial.see = seeing
    assert trial.apart and llm.drafter is not good
    assert [c.token_ids for c in llm.generate(PROMPTS * 9, SAMPLED)] == without_drafts()
    assert comparison.verdict == "good" and llm.drafter is good and runner.drafting.trial is None
    assert all(seen[name, kind] for name in comparison.names for kind in ("whole", "mixed"))
    assert llm.stats.preemptions > 0
    lengths = {name: tally.acceptance_length for name, tally in comparison.tallies.items()}
    assert lengths["good"] > lengths["spoilt"] + 0.3
    assert runner.programs.drafter is good and runner.held.writer is trial.writers["good"]


def test_only_the_coupled_rule_allows_a_trial():
    llm = jaxspec.load("pocket", "pocket-mtp", **LOADED, accept="standard")
    with pytest.raises(ValueError, match="the acceptance rule is 'standard'; only with 'coupled' can drafters be tried"):
        llm._runner.drafting.begin_trial(Trial({"a": llm.drafter, "b": llm.drafter}, Comparison("a", "b")))
