"""LLMs whose drafters learn while they work: every text is the one that it is without, whatever befalls its sequence."""

import dataclasses
import functools
import logging

import engines
import jax
import kinds
import numpy as np
import pytest
import rounds
from engines import PLAIN, fixed, llm_of, only
from kinds import KINDS
from test_requests import alone, prompts, same

from jaxspec import Learn, SamplingParams
from jaxspec.drafters.dflash import DFlashConfig
from jaxspec.engine import learn as engine_learn
from jaxspec.engine import trials
from jaxspec.learning.learner import Learner

LEARN = Learn(share=0.9, batch=2, length=48, anchors=8, rate=0.05, every=2, patience=1000)
LEARNERS = [kind for kind in KINDS if kind != "ngram"]


@pytest.fixture(scope="module", autouse=True)
def small(unoptimised):
    with engines.few_programs():
        yield


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Trials of one pair of short turns, so that weights change often."""
    monkeypatch.setattr(trials, "LEAST", 1)
    monkeypatch.setattr(trials, "ALIKE", 1e9)
    monkeypatch.setattr(trials, "PAIRS", 1)
    monkeypatch.setattr(engine_learn, "Trial", functools.partial(trials.Trial, turn=6))


def asked_for(rng):
    asked = []
    for i, prompt in enumerate([*fixed(3, 120), *prompts(rng, 6, 60)]):
        settings = {**PLAIN, "temperature": float(rng.integers(2)), "max_tokens": 48 if i < 3 else int(rng.integers(8, 50)), "seed": i}
        asked.append((prompt, SamplingParams(**{**settings, "n": 2 if settings["temperature"] and i % 4 == 0 else 1})))
    return asked


@pytest.mark.slow  # tests/engine/test_learn.py and tests/batch/test_learning.py compare an assistant's texts
@pytest.mark.parametrize("kind", LEARNERS)
def test_texts_are_the_same_and_nothing_is_compiled_anew(kind, caplog):
    """Prompts that begin alike, few pages, sampled texts and several samples of a prompt, while weights are updated, tried and taken."""
    llm, rng = llm_of(kind), np.random.default_rng(5)
    asked = asked_for(rng)
    expected = [[alone(prompt, dataclasses.replace(p, n=1, seed=p.seed + i)) for i in range(p.n)] for prompt, p in asked]
    before = jax.device_get(llm.drafter)
    with only(llm, pages=52):
        with llm.learn(LEARN) as learning:
            llm.warmup()
            llm.generate([p for p, _ in asked], [p for _, p in asked])
            compiled = llm.stats.compilations
            with caplog.at_level(logging.WARNING, "jax"), jax.log_compiles():
                found = llm.generate([p for p, _ in asked], [p for _, p in asked])
            while not learning.stats.taken:  # how often updates come depends on the machine
                llm.generate([p for p, _ in asked], [p for _, p in asked])
            stats = llm.stats
        assert not [r.message for r in caplog.records if "ompil" in r.message and "jit(update)" in r.message]
        assert stats.compilations == compiled and stats.preemptions
        for c in found:
            same(c, expected[c.prompt_index][c.index])
        told = learning.stats
        assert told.updates > 1 and told.taken and told.ended == "closed" and told.loss < np.inf
        assert stats.learning is not None and stats.learning.updates == told.updates
        now = jax.device_get(llm.drafter)
        changed = [not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(now), strict=True)]
        assert any(changed) and llm._runner.drafting.trial is None
        # Learning has ended, and what was learnt stays in use.
        for c in llm.generate([p for p, _ in asked[:3]], [dataclasses.replace(p, n=1) for _, p in asked[:3]]):
            same(c, expected[c.prompt_index][0])
        assert learning.stats.updates == told.updates


def work(llm, seeds=range(8)):
    """Some texts, and their ids."""
    params = [SamplingParams(**{**PLAIN, "max_tokens": 30, "seed": i}) for i in seeds]
    return [c.token_ids for c in llm.generate([[3, 5, 7, 11]] * len(params), params)]


@pytest.mark.slow  # tests/engine/test_trials.py has trials that are lost
@pytest.mark.parametrize(("clear", "trials_in_all"), [(True, 6), (False, 4)])
def test_lost_trials_go_back(monkeypatch, clear, trials_in_all):
    """The weights in use stay, and those that lost are learnt on. If they are clearly worse for the third time, and no better than the last
    time, the master weights begin from those in use again, at half the rate. After some trials without gain, it ends."""
    llm = engines.llm_of.__wrapped__("assistant")
    lost = {"verdict": engine_learn.CURRENT, "_count": 4, "_sum": 4.0, "_squares": 4.0 if clear else 64.0}
    monkeypatch.setattr(trials.Comparison, "add", lambda self, *_: vars(self).update(lost))
    before, went = jax.device_get(llm.drafter), []
    back = Learner.go_back

    def seen(self, drafter):
        back(self, drafter)
        masters = jax.device_get(jax.tree.leaves(self.masters))
        went.append((self._scale, all(np.array_equal(a, b) for a, b in zip(masters, _floats(before), strict=True))))

    monkeypatch.setattr(Learner, "go_back", seen)
    learning = llm.learn(dataclasses.replace(LEARN, patience=trials_in_all))
    while learning.going and len(went) < 9:
        work(llm)
    assert went == ([(0.5, True), (0.25, True)] if clear else [])
    assert learning.stats.ended == f"{trials_in_all} comparisons in a row gained nothing"
    assert learning.stats.taken == 0 and learning.stats.tried == trials_in_all
    # Updates between trials: 2, 4, 8 and 16, and 2 again after a step back.
    assert learning.stats.updates >= (28 if clear else 30)
    assert all(np.array_equal(a, b) for a, b in zip(_floats(before), _floats(llm.drafter), strict=True))
    updates = learning.stats.updates
    work(llm)
    assert learning.stats.updates == updates and learning.stats.start is not None and learning.stats.now is not None


def _floats(tree):
    return [x for x in map(np.asarray, jax.tree.leaves(tree)) if x.dtype.kind == "f"]


@pytest.mark.slow  # tests/engine/test_learn.py has an LLM that learns
def test_a_loss_that_is_not_finite_ends_learning_and_not_the_job(monkeypatch):
    llm = engines.llm_of.__wrapped__("assistant")
    expected, step = work(llm), Learner.step

    def broken(self):
        if self.steps == 3:
            self.masters = jax.tree.map(lambda x: x * np.float32("nan"), self.masters)
        step(self)

    monkeypatch.setattr(Learner, "step", broken)
    learning = llm.learn(LEARN)
    with pytest.warns(RuntimeWarning, match="the drafter learns no more: the loss of update 4 is nan; the weights in use stay"):
        for _ in range(20):
            assert work(llm) == expected
            if not learning.going:
                break
    assert learning.stats.ended == "the loss of update 4 is nan" and "ended" in str(llm.stats)
    assert work(llm) == expected and all(np.isfinite(x).all() for x in _floats(llm.drafter))


@pytest.mark.parametrize(
    "kind, changes, told",
    [
        ("ngram", {}, "the drafter is a NGram, which has nothing to learn"),
        (None, {}, "the drafter is a NoDraft, which has nothing to learn"),
        ("assistant", {"num_draft_tokens": 0}, "num_draft_tokens is 0, so that no draft would be accepted"),
        ("assistant", {"accept": "standard"}, "the acceptance rule is 'standard', with which texts depend on the drafter"),
    ],
)
def test_what_cannot_learn_is_refused(kind, changes, told):
    from jaxspec.decode.accept import rule_of

    changes = {**changes, "accept": rule_of(changes["accept"])} if "accept" in changes else changes
    llm = engines.llm_of.__wrapped__(kind, **changes)
    with pytest.raises(ValueError, match=told):
        llm.learn(0.1)


def test_a_drafter_whose_reading_is_open_is_refused():
    config = {**kinds.DFLASH["z-lab"], "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2]}}
    drafter = dataclasses.replace(kinds.drafter("dflash"), config=DFlashConfig.from_hf(config, rounds.target().config))
    with pytest.raises(ValueError, match=r"the drafter's config.json leaves open input_embedding_scale=1.0 or"):
        engine_learn.check(Learn(), drafter, "coupled", 4)


@pytest.mark.slow  # tests/engine/test_learn.py has an LLM that learns, and what is refused
def test_an_llm_learns_once_at_a_time_and_a_drafter_without_a_folder_is_not_written(tmp_path):
    llm = engines.llm_of.__wrapped__("assistant")
    with pytest.raises(ValueError, match="but the drafter comes from no checkpoint"):
        llm.learn(dataclasses.replace(LEARN, out=tmp_path))
    with llm.learn(LEARN) as learning:
        with pytest.raises(RuntimeError, match="learns already"):
            llm.learn(LEARN)
        with pytest.raises(ValueError, match="out is None"):
            learning.save()
        work(llm)
    with llm.learn(LEARN):  # and from where it was
        work(llm)
    llm.close()
    assert llm.stats.learning is not None and llm.stats.learning.ended == "closed"
