"""Updates of a sleeping LLM, and updates and sleep that an error or an interrupt ends: the LLM is as before, or as after."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jaxspec
from jaxspec import Learn, SamplingParams
from jaxspec.engine import new_weights
from jaxspec.engine.programs import Programs
from jaxspec.engine.runner import Runner

pytestmark = pytest.mark.usefixtures("quick_to_compile", "shared_programs")
SIZES = {"max_slots": 2, "max_len": 64, "progress": False}
PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LEARN = {"share": 0.9, "batch": 2, "length": 32, "anchors": 4, "rate": 1e-2, "every": 1, "patience": 1000}
PROMPTS = np.random.default_rng(0).integers(100, 4000, (4, 20)).tolist()


def texts(llm):
    return [made.token_ids for made in llm.generate(PROMPTS, PARAMS)]


def other(folder):
    return {key: 1.5 * x for key, x in load_file(folder / "model.safetensors").items()}


@pytest.mark.parametrize("weights", [pytest.param("host", marks=pytest.mark.slow), "drop"])
def test_a_drafter_comes_while_the_llm_sleeps(weights, folders):
    with jaxspec.load(*folders, **SIZES) as llm:
        expected, drafter = texts(llm), jax.tree.map(jnp.copy, llm.drafter)
        llm.sleep(weights)
        llm.update_weights(None if weights == "host" else folders[0], drafter)
        llm.wake_up()
        assert texts(llm) == expected
        assert jax.tree.leaves(llm.drafter)[0] is jax.tree.leaves(drafter)[0]


def test_learning_ends_while_the_llm_sleeps(folders):
    """In the middle of a trial, with the weights on trial next in line."""
    with jaxspec.load(*folders, learn=Learn(**LEARN), **SIZES) as llm:
        expected, drafting = texts(llm), llm._runner.drafting
        for _ in range(100):
            if drafting.trial is not None and llm._runner.programs.drafter is not drafting.drafter:
                break
            texts(llm)
        assert llm._runner.programs.drafter is not drafting.drafter
        llm.sleep("host")
        llm.learning.close()
        llm.wake_up()
        assert llm._runner.programs.drafter is drafting.drafter
        assert texts(llm) == expected


def test_what_the_host_kept_is_dropped(folders):
    with jaxspec.load(folders[0], **SIZES) as llm:
        llm.sleep("host")
        llm.sleep("drop")
        with pytest.raises(RuntimeError, match="the target's weights were dropped"):
            llm.wake_up()


def test_learning_that_is_closed_holds_no_weights(folders):
    llm = jaxspec.load(*folders, learn=Learn(**LEARN), **SIZES)
    llm.learning.close()
    llm.update_weights(other(folders[0]))
    assert llm.learning._learner.target is None
    llm.close()


@pytest.mark.slow  # it loads and compiles a learner twice
def test_a_drafter_of_a_checkpoint_learns_after_a_tree(folders, tmp_path):
    """Its config is known again, so that learning goes on from what it wrote."""
    with jaxspec.load(*folders, **SIZES) as llm:
        llm.update_weights(drafter=jax.tree.map(jnp.copy, llm.drafter))
        llm.update_weights(drafter=folders[1])
        for _ in range(2):
            with llm.learn(Learn(out=tmp_path / "out", resume=True, **LEARN)) as learning:
                while learning.stats.updates < 2:
                    texts(llm)


def test_a_target_that_cannot_be_read_leaves_the_drafter_too(folders, monkeypatch):
    def fails():
        raise OSError("the disk is gone")

    with jaxspec.load(*folders, **SIZES) as llm:
        before = llm.drafter
        monkeypatch.setattr(new_weights, "planned_target", lambda *args, **more: fails)
        with pytest.raises(OSError, match="the disk is gone"):
            llm.update_weights(folders[0], jax.tree.map(jnp.copy, before))
        assert llm.drafter is before


def interrupting(monkeypatch, owner, name):
    """Interrupts the process in the first call of a method, before it does anything."""
    method, left = getattr(owner, name), [0]

    def first(*args):
        if left:
            left.pop()
            os.kill(os.getpid(), signal.SIGINT)
        return method(*args)

    monkeypatch.setattr(owner, name, first)


@pytest.mark.slow  # test_new_weights.py has such meshes, and interrupts of one device
def test_an_interrupt_leaves_no_shard_behind(folders, monkeypatch):
    """All have the new weights, and nothing that was kept of the old ones serves a prompt."""
    new = other(folders[0])
    with jaxspec.load(folders[0], **SIZES) as alone:
        alone.update_weights(new)
        expected = texts(alone)
    with jaxspec.load(*folders, mesh=jaxspec.mesh(data=2), **SIZES) as llm:
        assert texts(llm) != expected
        interrupting(monkeypatch, Runner, "use_target")
        with pytest.raises(KeyboardInterrupt):
            llm.update_weights(new)
        assert texts(llm) == expected


def test_an_interrupt_of_sleep_leaves_no_half_of_a_state(folders, monkeypatch):
    with jaxspec.load(*folders, **SIZES) as llm:
        expected, array = texts(llm), type(jnp.zeros(()))
        monkeypatch.setattr(Programs, "give_back", _interrupted(Programs.give_back, array))
        with pytest.raises(KeyboardInterrupt):
            llm.sleep()
        monkeypatch.undo()
        assert texts(llm) == expected


def _interrupted(give_back, array):
    def call(self):
        with pytest.MonkeyPatch.context() as patch:
            left, delete = [0, 0], array.delete

            def some(x):
                if not left:
                    raise KeyboardInterrupt
                left.pop()
                delete(x)

            patch.setattr(array, "delete", some)
            give_back(self)

    return call
