"""The choice of K on made-up costs and acceptance, and of an LLM."""

import itertools
import types

import numpy as np
import pytest

import jaxspec
from jaxspec.engine.buckets import Buckets
from jaxspec.engine.draft_count import MARGIN, Adaptive, counts_up_to
from jaxspec.engine.programs import Programs
from jaxspec.engine.settings import Settings
from jaxspec.engine.warmup import measured

pytestmark = pytest.mark.usefixtures("unoptimised")
CHEAP = {0: 1.0, 2: 1.1, 4: 1.2}  # a round's cost by K, where the target's weights are all that counts
DEAR = {0: 1.0, 2: 2.4, 4: 3.9}  # where every row costs


def costs(**sizes):
    return {(int(name[1:]), k): cost for name, by_k in sizes.items() for k, cost in by_k.items()}


def rounds(rng, shares, k, count):
    """A histogram of rounds of K drafts, of which draft i is accepted after all before it with shares[i]."""
    accepted = np.cumprod(rng.random((count, k)) < np.asarray(shares)[:k], axis=1).sum(1) if k else np.zeros(count, int)
    return np.bincount(accepted, minlength=k + 1)


def run(chooser, shares, size, calls, rng, count=64):
    """The K of each call."""
    chosen = []
    for _ in range(calls):
        chosen.append(chooser.choose(size))
        chooser.see(rounds(rng, shares, chosen[-1], count), chosen[-1])
    return chosen


def best(shares, by_k):
    """By definition: tokens a round over its cost."""
    return max(by_k, key=lambda k: (1 + sum(np.cumprod(shares)[:k])) / by_k[k])


@pytest.mark.parametrize("by_k", [CHEAP, DEAR])
@pytest.mark.parametrize("shares", [(0.9,) * 4, (0.7, 0.5, 0.2, 0.1), (0.3,) * 4, (0.05,) * 4, (0.9, 0.9, 0.1, 0.1)])
def test_it_settles_where_tokens_a_second_are_most(shares, by_k):
    """All but a few of the last 100 calls, those that see whether another K has become better."""
    chooser = Adaptive((0, 2, 4), costs(b1=by_k))
    chosen = run(chooser, shares, 1, 150, np.random.default_rng(0))
    speed = {k: (1 + sum(np.cumprod(shares)[:k])) / by_k[k] for k in by_k}
    good = [speed[k] * MARGIN >= max(speed.values()) for k in chosen[50:]]
    assert np.mean(good) >= 0.95


def test_the_first_call_guesses_as_many_as_the_drafter_says():
    assert Adaptive((0, 2, 4), costs(b1=CHEAP)).choose(1) == 4


def test_rates_are_those_of_the_rounds_that_tried():
    """Rounds of 2 drafts and of 4 together: each share is of all rounds that got so far."""
    chooser = Adaptive((0, 2, 4), costs(b1=CHEAP))
    count, rng, shares = 600, np.random.default_rng(1), (0.8, 0.6, 0.7, 0.5)
    for k in (2, 4, 0) * 3:
        chooser.see(rounds(rng, shares, k, count), k)
    np.testing.assert_allclose(chooser.rates, np.cumprod(shares), atol=0.05)


def test_batches_have_their_own_choice():
    """What acceptance makes of one batch size holds for all, each with its own costs."""
    chooser = Adaptive((0, 2, 4), costs(b1=CHEAP, b8=DEAR))
    run(chooser, (0.6,) * 4, 1, 30, np.random.default_rng(2))
    assert (chooser.choose(1), chooser.choose(8)) == (4, 0) == (best((0.6,) * 4, CHEAP), best((0.6,) * 4, DEAR))


def test_no_change_for_little():
    """A K that promises 4 % more is not taken, one that promises 6 % more is."""
    for gain, chosen in ((1.04, 4), (1.06, 2)):
        chooser = Adaptive((0, 2, 4), costs(b1=CHEAP))
        rates = chooser.rates
        even = CHEAP[4] * (1 + sum(rates[:2])) / (1 + sum(rates))
        chooser = Adaptive((0, 2, 4), costs(b1={0: 100.0, 2: even / gain, 4: CHEAP[4]}))
        assert chooser.choose(1) == chosen


def test_it_wakes_up_when_the_text_changes():
    """After a thousand calls at which drafts were hopeless, and K = 0 at most of them, drafts become good."""
    chooser, rng = Adaptive((0, 2, 4), costs(b1=CHEAP)), np.random.default_rng(3)
    asleep = run(chooser, (0.02,) * 4, 1, 1000, rng)
    assert np.mean(np.asarray(asleep[20:]) == 0) > 0.85 and set(asleep[100:]) > {0}
    awake = run(chooser, (0.9,) * 4, 1, 200, rng)
    assert awake.index(4) < 150 and set(awake[-20:]) == {4}


def test_it_knows_nothing_of_rounds_without_drafts():
    chooser = Adaptive((0, 3), costs(b1={0: 1.0, 3: 1.1}))
    before = chooser.rates
    chooser.see([500], 0)
    assert chooser.rates == before and chooser.choose(1) == 3


@pytest.mark.parametrize(("k", "chosen"), [(0, (0,)), (1, (0, 1)), (2, (0, 1, 2)), (4, (0, 2, 4)), (7, (0, 4, 7)), (15, (0, 8, 15))])
def test_what_there_is_to_choose_among(k, chosen):
    assert counts_up_to(k) == chosen


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({(1, 0): 1.0}, "a round of 1 sequences with 2 drafts costs None"),
        ({(1, 0): 1.0, (1, 2): 0.0}, "costs 0.0; expected a number of sec"),
    ],
)
def test_costs_must_be_known(table, message):
    with pytest.raises(ValueError, match=message):
        Adaptive((0, 2), table)


@pytest.mark.parametrize(("max_len", "found"), [(4096, {(1, 0): 1.0, (1, 3): 2.5}), (40, None)])
def test_a_round_costs_what_it_adds_to_a_call(monkeypatch, max_len, found):
    """Not what a call takes beside its rounds, nor what the first ones take; None where a sequence ends before enough were timed."""
    now, calls = [0.0], []
    request = types.SimpleNamespace(rounds=0, ready=True)

    def decode(active, rounds, *, needs, num_draft_tokens):
        now[0] += 7.0 + 100.0 * (len(calls) < 2) + rounds * (1.0 + 0.5 * num_draft_tokens)
        request.rounds += rounds
        return calls.append(rounds)

    runner = types.SimpleNamespace(
        settings=Settings(num_draft_tokens=3, max_slots=1, max_len=max_len),
        free_slots=1,
        buckets=Buckets(1, max_len),
        admit=lambda active: None,
        end=lambda active: None,
        decode=decode,
        read=lambda calls: False,
    )
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    costs = measured(runner, (0, 3), None, lambda count: [request] * count)
    assert costs == (found and pytest.approx(found))


def params(seed):
    return jaxspec.SamplingParams(max_tokens=40, temperature=float(seed % 2), seed=seed, ignore_eos=True, top_k=0, top_p=1.0)


def test_an_llm_chooses_once_it_is_warm(folders, monkeypatch):
    """Its tokens are those of a fixed K, its counts those of the rounds as they were, and nothing is compiled on the way."""
    llm = jaxspec.load(*folders, max_slots=1, max_len=128, progress=False)
    prompts, each = [[5, 6, 7], [8, 9], [10]], [params(0), params(1), params(2)]
    fixed = llm.generate(prompts, each)  # K = 3, as the drafter says: nothing is known of costs yet
    assert {out.stats.drafted for out in fixed} == {3 * out.stats.steps for out in fixed}
    llm.warmup(each[1])
    runner, made = llm._runner, llm.stats.compilations
    assert set(runner.adaptive.costs) == {(1, 0), (1, 2), (1, 3)} and all(c > 0 for c in runner.adaptive.costs.values())
    assert llm.stats.steps == sum(out.stats.steps for out in fixed)  # what was timed counts nowhere

    turns, begun = itertools.cycle([3, 0, 2]), llm.stats
    monkeypatch.setattr(Adaptive, "choose", lambda self, size, among: next(turns))
    monkeypatch.setattr(Programs, "steps_for", lambda self, needs, steps: min(steps, 3))
    outs = llm.generate(prompts, each)
    assert [out.token_ids for out in outs] == [out.token_ids for out in fixed] and llm.stats.compilations == made
    part = llm.stats - begun
    assert part.rounds_by_draft[0] < part.steps and part.rounds_by_draft[2] < part.rounds_by_draft[0]
    assert part.drafted == sum(part.rounds_by_draft) == sum(out.stats.drafted for out in outs)
    assert part.stepped_tokens == part.steps + part.accepted == 3 * 39
    monkeypatch.undo()

    for _ in range(3):  # of a drafter that guesses nothing right
        assert [out.token_ids for out in llm.generate(prompts, each)] == [out.token_ids for out in fixed]
    assert runner.adaptive.rates[0] < 0.5


@pytest.mark.parametrize("settings", [{"num_draft_tokens": 3}, {"accept": "standard"}])
def test_a_number_that_was_asked_for_stays(folders, settings):
    llm = jaxspec.load(*folders, max_slots=1, max_len=64, progress=False, **settings)
    assert llm.draft_counts == ()
