"""A drafter learns on meshes what it learns on one device: shards train together, and texts stay the same."""

import dataclasses

import jax
import numpy as np
import pytest
from locks import free
from quick import few_programs

import jaxspec
from jaxspec import Learn, SamplingParams
from jaxspec.engine import learn as engine_learn
from jaxspec.engine import trials
from jaxspec.engine.device_lock import DeviceLock
from jaxspec.engine.learn import learner_of
from jaxspec.learning.learner import Learner

LEARN = Learn(share=0.9, batch=4, length=32, anchors=8, rate=1e-2, every=1)
SIZES = {"num_draft_tokens": 2, "max_slots": 4, "max_len": 64, "progress": False}
PROMPTS = np.random.default_rng(0).integers(100, 4000, (4, 9)).tolist()
# The assistant's one KV head of the sliding layer is repeated on two devices.
MESHES = [{"data": 2, "tensor": 2}, {"data": 2}, {"tensor": 2}]


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile(unoptimised):
    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        yield


def loaded(folders, **axes):
    return jaxspec.load(*folders, mesh=jaxspec.mesh(**axes) if axes else None, **SIZES)


def texts(llm):
    params = [SamplingParams(max_tokens=16, seed=i, temperature=float(i % 2), ignore_eos=True) for i in range(len(PROMPTS))]
    return [c.token_ids for c in llm.generate(PROMPTS, params)]


def learnt(llm, steps=3):
    """(losses, master weights) of some updates on the same texts."""
    target, origin, placement = llm._whole
    learner = learner_of(target, origin.weights, LEARN, num_draft_tokens=2, max_len=64, placement=placement)
    rng, losses = np.random.default_rng(1), []
    for _ in range(8):
        learner.add(rng.integers(100, 4000, 30).astype(np.int32), 8)
    before = jax.device_get(learner.masters)
    learner.compile()
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (before, jax.device_get(learner.masters))), strict=True))
    for _ in range(steps):
        learner.step()
        losses.append(learner.loss)
    return losses, before, jax.device_get(learner.masters), learner


@pytest.mark.slow  # tests/train/test_loop.py compares weights of several devices, tests/engine/test_learn.py the texts beside learning
@pytest.mark.parametrize("axes", MESHES)
def test_meshes_learn_what_one_device_learns(folders, axes, monkeypatch):
    monkeypatch.setattr(trials, "LEAST", 1)
    monkeypatch.setattr(trials, "ALIKE", 1e9)
    with loaded(folders) as llm:
        expected = texts(llm)
        one, before, masters, _ = learnt(llm)
    with loaded(folders, **axes) as llm:
        losses, _, found, learner = learnt(llm)
        assert losses == pytest.approx(one, rel=1e-3) and one[-1] < one[0]
        # AdamW makes large steps of small gradients, whose last digits differ.
        pairs = zip(*map(jax.tree.leaves, (before, masters, found)), strict=True)
        off, moved = np.mean([(np.abs(a - b).mean(), np.abs(a - x).mean()) for x, a, b in pairs], axis=0)
        assert off < 0.05 * moved
        drafter = learner.candidate()
        assert jax.tree.map(lambda x: x.sharding, drafter) == jax.tree.map(lambda x: x.sharding, llm._whole[1].weights)
        with llm.learn(dataclasses.replace(LEARN, patience=1000)) as learning:
            for _ in range(12):
                assert texts(llm) == expected
                if learning.stats.taken:
                    break
        assert learning.stats.taken and learning.stats.updates >= engine_learn.TOGETHER * (axes.get("data", 1) > 1)


def test_learning_resumes_where_kv_heads_are_repeated(folders, tmp_path):
    learn = dataclasses.replace(LEARN, out=tmp_path / "out", resume=True)
    with loaded(folders, tensor=2) as llm:
        begun = llm.learn(learn)
        weights = jax.device_get(begun.origin.weights)
        begun.close()  # which writes the drafter and the state
        with llm.learn(learn) as learning:
            again = jax.device_get(learning.origin.weights)
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (weights, again)), strict=True))


def test_a_verdict_that_no_call_has_seen_holds_when_learning_ends(folders, tmp_path):
    """As behind the last text of a stream. A data shard that was the first to know runs the better weights by then."""
    with loaded(folders, data=2) as llm:
        learning = llm.learn(dataclasses.replace(LEARN, out=tmp_path / "out"))
        learning._offer()
        candidate, runners = learning._candidate, llm._shards.runners
        wanted = [runner.drafting.trial.variants["candidate"] for runner in runners]
        learning._trial.verdict = "candidate"
        runners[0].drafting.settle()
        learning.close()
        assert (learning.stats.tried, learning.stats.taken) == (1, 1) and learning.origin.weights is candidate
        assert all(runner.drafting.drafter is one and runner.drafting.trial is None for runner, one in zip(runners, wanted, strict=True))


def test_a_trial_that_an_interrupt_keeps_from_beginning_is_given_up(folders, monkeypatch):
    """On the first data shard, or on the second after it. Else learning would wait for its verdict, which nobody or one shard finds."""
    with loaded(folders, data=2) as llm, llm.learn(LEARN) as learning:
        shards = [runner.drafting for runner in llm._shards.runners]
        used = [drafting.drafter for drafting in shards]
        for i, drafting in enumerate(shards):
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(drafting, "begin_trial", lambda part: (_ for _ in ()).throw(KeyboardInterrupt))
                learning._offer()
            assert [other.trial is not None for other in shards] == [i > 0, False]
            learning.between()
            assert learning._trial is None and all(other.trial is None for other in shards)
            assert all(other.drafter is one for other, one in zip(shards, used, strict=True))
        learning._offer()
        learning.between()
        assert learning._trial is not None and all(drafting.trial is not None for drafting in shards)


@pytest.mark.slow  # as above
def test_updates_that_sum_over_devices_begin_one_after_the_other(folders, monkeypatch):
    """Calls of data shards alone share no lock with those of other LLMs. Updates do: two that wait for each other's devices would hang."""
    found, step = [], Learner.step
    monkeypatch.setattr(Learner, "step", lambda self: found.append(free(DeviceLock(jax.devices()[1:2]))) or step(self))
    with loaded(folders, data=2) as llm, llm.learn(LEARN):
        assert free(DeviceLock(jax.devices()[:2]))
        for _ in range(4):
            texts(llm)
    assert found and not any(found)
