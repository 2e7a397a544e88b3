"""A drafter that learns is written as a checkpoint, resumes where it was, and its memory is planned."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from locks import free
from quick import few_programs
from safetensors.numpy import load_file, save_file
from tiny import tiny_assistant

import jaxspec
from jaxspec import Learn, SamplingParams, loading, released
from jaxspec.engine import learn as engine_learn
from jaxspec.engine import llm as llm_module
from jaxspec.engine import memory, trials
from jaxspec.learning.update import split
from jaxspec.model import gemma4

SIZES = {"num_draft_tokens": 2, "max_slots": 4, "max_len": 64, "progress": False}
LEARN = Learn(share=0.9, batch=2, length=32, anchors=4, rate=1e-2, every=1, patience=1000)


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile(unoptimised, shared_programs):
    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        yield


def texts(llm):
    prompts = np.random.default_rng(0).integers(100, 4000, (6, 9)).tolist()
    return [c.token_ids for c in llm.generate(prompts, SamplingParams(max_tokens=24, seed=1, temperature=1.0, ignore_eos=True))]


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(arrays(a), arrays(b), strict=True))


@pytest.mark.slow  # below an LLM learns, is interrupted and goes on
def test_what_was_learnt_is_kept_and_learning_resumes(folders, tmp_path, monkeypatch):
    """A run that is killed after a save goes on from there: its weights in use, master weights and moments are the same."""
    monkeypatch.setattr(trials, "LEAST", 1)
    monkeypatch.setattr(trials, "ALIKE", 1e9)
    out, killed = tmp_path / "drafter", tmp_path / "killed"
    learn = dataclasses.replace(LEARN, out=out)
    with jaxspec.load(*folders, learn=learn, **SIZES) as llm:
        learning = llm.learning
        first = texts(llm)
        while not learning.stats.taken:
            assert texts(llm) == first
        learning.save()
        shutil.copytree(out, killed)
        state, weights, updates = jax.device_get(learning._learner.state), jax.device_get(llm.drafter), learning.stats.updates
    with pytest.raises(FileExistsError, match="holds a drafter that learnt before; give resume=True"):
        jaxspec.load(*folders, learn=learn, **SIZES)
    with jaxspec.load(*folders, **SIZES) as llm, llm.learn(dataclasses.replace(learn, out=killed, resume=True)) as learning:
        assert same(learning._learner.state, state) and learning.stats.updates == updates
        assert same(llm.drafter, weights)
        assert texts(llm) == first
    with jaxspec.load(folders[0], killed, **SIZES) as llm:
        assert texts(llm) == first and type(llm.drafter).__name__ == "Gemma4MTP"
    other = tiny_assistant(tmp_path / "other", intermediate_size=48)
    with jaxspec.load(folders[0], other, **SIZES) as llm:
        with pytest.raises(ValueError, match="killed holds a Gemma4MTP that learnt, of another size or config .* or move the folder away$"):
            llm.learn(dataclasses.replace(learn, out=killed, resume=True))


def test_no_checkpoint_is_written_over(folders, tmp_path, monkeypatch):
    """Such as the drafter that it began with. `load` says so before it reads weights."""
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = shutil.copytree(folders[1], tmp_path / "mine")
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    with jaxspec.load(folders[0], mine, **SIZES) as llm:
        with pytest.raises(FileExistsError, match="mine holds another checkpoint .*, which stays; take another folder"):
            llm.learn(dataclasses.replace(LEARN, out=mine))
        with pytest.raises(FileExistsError, match="mine holds another checkpoint"):
            llm.learn(dataclasses.replace(LEARN, out="~/mine"))
        with pytest.raises(TypeError, match="out, rate and a Learn are given; expected all settings in the Learn, or the share and these"):
            llm.learn(LEARN, out=tmp_path / "new", rate=1e-3)
        assert llm.learning is None
        with pytest.raises(NotADirectoryError, match="config.json is a file; expected a folder, or nothing"):
            llm.learn(dataclasses.replace(LEARN, out=mine / "config.json", resume=True))
    monkeypatch.setattr(loading, "load_target", lambda *args, **more: pytest.fail("weights are read"))
    with pytest.raises(FileExistsError, match="mine holds another checkpoint"):
        jaxspec.load(folders[0], mine, learn=dataclasses.replace(LEARN, out=mine), **SIZES)
    other = tiny_assistant(tmp_path / "other", intermediate_size=48)
    with pytest.raises(ValueError, match="other holds a Gemma4MTP that learnt, of another size or config than the Gemma4MTP that was"):
        jaxspec.load(folders[0], mine, learn=dataclasses.replace(LEARN, out=other, resume=True), **SIZES)
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before


def test_a_drafter_that_learnt_is_gone_on_from_where_its_state_is_lost(folders, tmp_path, monkeypatch):
    """With all of its weights, also those that no update changes, and moments anew. A config.json alone, which comes first, is none."""
    out, begun, other, closed = tmp_path / "out", tmp_path / "begun", tmp_path / "other", []
    tiny_assistant(out)
    weights = {name: np.roll(x, 1, 0) for name, x in load_file(out / "model.safetensors").items()}
    save_file(weights, out / "model.safetensors")
    shutil.copytree(out, begun)
    (begun / "model.safetensors").unlink()
    learn = dataclasses.replace(LEARN, resume=True)
    with jaxspec.load(*folders, **SIZES) as llm:
        given = llm.drafter
        with llm.learn(dataclasses.replace(learn, out=begun)):
            assert same(llm.drafter, given)
        with llm.learn(dataclasses.replace(learn, out=out)) as learning:
            learner = learning._learner
            assert same(learner.candidate(), llm.drafter) and not same(llm.drafter, given)
            assert learning.stats.updates == 0 and not any(x.any() for x in arrays(learner.moments))
        left = load_file(out / "model.safetensors")
        assert all(np.array_equal(left[name], weights[name]) for name in weights)
        tiny_assistant(other, intermediate_size=48)
        with pytest.raises(ValueError, match="other holds a Gemma4MTP that learnt, of another size or config than the Gemma4MTP that was"):
            llm.learn(dataclasses.replace(learn, out=other))
        shutil.rmtree(out / "learning")
        (out / "learning" / "7").mkdir(parents=True)
        before = llm.drafter
        with pytest.raises(ValueError, match=r"learning/7 cannot be read .*; remove .*learning to begin anew"):
            llm.learn(dataclasses.replace(learn, out=out))
        assert llm.drafter is before and not llm._runner.drafting.watching
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="cannot be read"):
        patch.setattr(llm_module.LLM, "close", lambda llm, close=llm_module.LLM.close: closed.append(llm) or close(llm))
        jaxspec.load(*folders, learn=dataclasses.replace(learn, out=out), **SIZES)
    assert len(closed) == 1


def test_learning_goes_on_after_an_interrupt_in_an_update(folders, tmp_path, monkeypatch):
    """An update takes the master weights along, also those that time it after it was compiled. Learning begins again at the weights in use,
    in steps as large as before."""

    def interrupted(update):
        def call(*args):
            jax.block_until_ready(update(*args))
            raise KeyboardInterrupt

        return call

    class Interrupted:
        def __init__(self, update):
            self.update = update

        def lower(self, *args):
            return self

        def compile(self):
            return interrupted(self.update)

    with jaxspec.load(*folders, learn=dataclasses.replace(LEARN, out=tmp_path), **SIZES) as llm:
        learner, update = llm.learning._learner, llm.learning._learner._update
        learner._update = Interrupted(update)
        with pytest.raises(KeyboardInterrupt):
            texts(llm), texts(llm)
        learner._update = update
        assert learner.lost and learner.step_seconds == 0
        expected = texts(llm)
        while not llm.learning.stats.updates:
            assert texts(llm) == expected
        assert not same(learner.masters, split(llm.learning.origin.weights)[0])
        compiled, learner.compiled = learner.compiled, interrupted(learner.compiled)
        with pytest.raises(KeyboardInterrupt):
            while True:
                assert texts(llm) == expected
        learner.compiled, updates = compiled, llm.learning.stats.updates
        assert learner.lost
        llm.learning.save()
        assert same(learner.masters, split(llm.learning.origin.weights)[0]) and not learner.lost
        while llm.learning.stats.updates == updates:
            assert texts(llm) == expected
        updates = learner.steps

        def interrupted_fetch(metrics):
            raise KeyboardInterrupt

        with llm._lock(), monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(jax, "device_get", interrupted_fetch)
            learner.step()
        # What was learnt is there, and counts.
        assert not learner.lost and learner.steps == updates + 1


@pytest.mark.slow  # above an LLM learns, is interrupted and goes on
def test_learning_that_ended_by_itself_resumes_from_its_end(folders, tmp_path, monkeypatch):
    """Also if the job is killed later: weights and state of that time are there. Where a loss was no number, the state is the weights."""
    monkeypatch.setattr(trials, "LEAST", 1)
    monkeypatch.setattr(trials, "ALIKE", 1e9)
    learn = dataclasses.replace(LEARN, out=tmp_path / "out", patience=1, save_seconds=1e9)

    def killed_once_it_ended(llm):
        expected = texts(llm)
        while llm.learning.going:
            assert texts(llm) == expected
        return shutil.copytree(tmp_path / "out", tmp_path / "killed", dirs_exist_ok=True)

    with jaxspec.load(*folders, learn=learn, **SIZES) as llm:
        llm.learning.save()
        killed = killed_once_it_ended(llm)
        state, weights = jax.device_get(llm.learning._learner.state), jax.device_get(llm.drafter)
        llm.learning.close()
        learn = dataclasses.replace(learn, resume=True)
        with llm.learn(dataclasses.replace(learn, out=killed)) as learning:
            assert learning.stats.updates > 0 and same(learning._learner.state, state) and same(llm.drafter, weights)
        learner = llm.learn(learn)._learner
        learner.compile()
        update = learner.compiled
        learner.compiled = lambda *args: jax.tree.map(lambda x: x * np.nan if x.dtype == np.float32 else x, update(*args))
        with pytest.warns(RuntimeWarning, match="the drafter learns no more: the loss of update"):
            killed = killed_once_it_ended(llm)
        with llm.learn(dataclasses.replace(learn, out=killed)) as learning:
            assert same(learning._learner.masters, split(llm.drafter)[0])
            assert learner.masters is None  # so there is room for the next


def test_who_learns_writes_or_ends_holds_the_lock(folders, tmp_path, monkeypatch):
    held, check_room, save = [], llm_module.check_room, engine_learn.save_trained
    with jaxspec.load(*folders, **SIZES) as llm:
        monkeypatch.setattr(llm_module, "check_room", lambda *args: held.append(not free(llm._lock)) or check_room(*args))
        monkeypatch.setattr(engine_learn, "save_trained", lambda *args: held.append(not free(llm._lock)) or save(*args))
        with llm.learn(dataclasses.replace(LEARN, out=tmp_path / "out")) as learning:
            learning.save()
            with pytest.raises(RuntimeError, match="learns already"):
                llm.learn(LEARN)
        assert held == [True] * 3


def test_an_llm_is_closed_even_if_its_drafter_cannot_be_written(folders, tmp_path):
    """Neither are texts lost."""
    llm = jaxspec.load(*folders, learn=dataclasses.replace(LEARN, out=tmp_path / "out", save_seconds=0), **SIZES)
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    (tmp_path / "out").write_text("a file now")
    with pytest.warns(RuntimeWarning, match="the drafter that learns could not be written to .*out; learning.save.. tries again: "):
        [completion] = llm.generate("x", SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(completion.token_ids) == 3
    with pytest.raises(OSError, match="out"):
        llm.close()
    assert not llm.learning.going and llm.learning._learner.masters is None
    llm.close()
    with pytest.raises(RuntimeError, match="is closed"):
        llm.generate("x")


@pytest.mark.slow
def test_a_drafter_learns_beside_a_quantised_target(folders, monkeypatch):
    """Matrices and embedding in int8, which stay packed: texts are those without learning, whatever weights are tried and taken."""
    monkeypatch.setattr(trials, "LEAST", 1)
    monkeypatch.setattr(trials, "ALIKE", 1e9)
    packed = {"quantize": "int8", "quantize_embedding": "int8", **SIZES}
    with jaxspec.load(*folders, learn=LEARN, **packed) as llm:
        kinds = llm.text_settings["quantised"]
        assert "int8" in kinds and "int8 embedding" in kinds
        begun, first = arrays(llm.drafter), texts(llm)
        while not llm.learning.stats.taken:
            assert texts(llm) == first
        assert texts(llm) == first and not all(map(np.array_equal, begun, arrays(llm.drafter)))
    with jaxspec.load(*folders, **packed) as llm:
        assert texts(llm) == first


def test_only_what_can_learn_is_loaded_to_learn(folders):
    with pytest.raises(ValueError, match="the drafter is a NGram, which has nothing to learn"):
        jaxspec.load(folders[0], "ngram", learn=0.1, **SIZES)
    with pytest.raises(ValueError, match="the acceptance rule is 'block', with which texts depend on the drafter"):
        jaxspec.load(*folders, learn=0.1, accept="block", **SIZES)
    with pytest.raises(ValueError, match=r"share is 1.5, expected more than 0 and less than 1"):
        jaxspec.load(*folders, learn=1.5, **SIZES)


def test_what_learning_takes_is_planned():
    """Three float32 of each weight, and two more copies as the drafter has them; slots make room."""
    target = gemma4.abstract(released.target_config("31b"), jnp.bfloat16)
    drafter = released.abstract_drafter("mtp", "31b", target.config, jnp.bfloat16)
    sizes = {"max_len": 4096, "num_draft_tokens": 4}
    plain, learns = (memory.sizes_of(target, drafter, learn=learn, **sizes) for learn in (None, Learn()))
    count = sum(x.size for x in jax.tree.leaves(drafter) if x.dtype == jnp.bfloat16)
    assert learns.learnt == (3 * 4 + 2 * 2) * count and (plain.learnt, plain.learning) == (0, 0)
    # XLA's program for an H200 takes 2.55 GiB of temporaries.
    assert 2.55 * 2**30 < learns.learning < 2 * 2.55 * 2**30
    assert learns.kept(5, 9) == plain.kept(5, 9) + learns.learnt
    room = plain.kept(16, 600) + plain.work(16)
    assert memory.fit(learns, room).slots < memory.fit(plain, room).slots
    with pytest.raises(ValueError, match=r"the weights take .*, learning .* and the state .* \(slots: 64, "):
        memory.fit(learns, room, 64)
    halves = memory.learning_bytes(target.config, drafter, Learn(batch=2, anchors=16), 4, 4096, memory.ONE_DEVICE)
    assert halves[0] == learns.learnt and halves[1] < learns.learning


def test_a_device_without_room_says_so(folders, monkeypatch):
    with jaxspec.load(*folders, **SIZES) as llm:
        monkeypatch.setattr(engine_learn, "memory_limit", lambda device: 1000)
        with pytest.raises(MemoryError, match="learning takes .* of the device's .*`load` with `learn` plans slots beside it"):
            llm.learn(0.1)
