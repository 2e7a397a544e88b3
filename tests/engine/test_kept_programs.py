"""Programs that are kept between runs: found again by what they are made from, and compiled anew where anything differs or a file is bad.

They are kept on GPUs. XLA can also write the programs for a CPU, but for those with a sort, so the tests take the CPU for one."""

import dataclasses
import errno
import os
import tempfile
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from quick import few_programs

import jaxspec
from jaxspec.engine import kept_programs, programs

SETTINGS = {"max_slots": 2, "max_len": 64, "num_draft_tokens": 2, "adaptive_verification": False, "progress": False}
PARAMS = jaxspec.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


pytestmark = pytest.mark.usefixtures("unoptimised")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch, tmp_path):
    """JAX's cache is in a folder of its own and the CPU counts as a GPU. Gives the folder of kept programs."""
    few_programs(monkeypatch)
    monkeypatch.setattr(kept_programs, "_serves", lambda device: True)
    changed = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 1e9}  # so JAX keeps nothing
    before = {name: getattr(jax.config, name) for name in changed}
    for name, value in changed.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # a cache that is open stays in its folder; on a CPU what it gives cannot be written again
    yield tmp_path / kept_programs.FOLDER
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def lowered(monkeypatch):
    """The programs that are lowered."""
    seen, lower = [], programs.Programs._lowered

    def counted(self, program, pool):
        seen.append(str(program))
        return lower(self, program, pool)

    monkeypatch.setattr(programs.Programs, "_lowered", counted)
    return seen


def run(folders, params=PARAMS, **settings):
    """A text, by an engine that has compiled nothing yet."""
    with jaxspec.load(*folders, **SETTINGS | settings) as llm:
        (done,) = llm.generate(["def f(x):"], params)
        return done.token_ids


def files(folder):
    return {path.name for path in folder.iterdir()}


def test_a_second_start_lowers_nothing_that_was_kept(folders, as_on_a_gpu, lowered):
    """A file that cannot be used is told of and removed, so that the start after that one writes it again."""
    first, once = run(folders), list(lowered)
    kept = files(as_on_a_gpu)
    lowered.clear()
    assert kept and run(folders) == first
    assert set(lowered) <= set(once) and len(lowered) == len(once) - len(kept)
    cut = next(as_on_a_gpu.iterdir())
    size = cut.stat().st_size
    cut.write_bytes(cut.read_bytes()[: size // 2])
    lowered.clear()
    with pytest.warns(RuntimeWarning, match="the kept program .* cannot be used and is compiled anew"):
        assert run(folders) == first
    assert len(lowered) == len(once) - len(kept) + 1 and files(as_on_a_gpu) == kept - {cut.name}
    assert run(folders) == first and files(as_on_a_gpu) == kept and cut.stat().st_size > size // 2


@pytest.mark.slow  # above are those of one device
@pytest.mark.parametrize("structured", [False, True])
def test_programs_on_a_mesh_and_of_structured_texts_are_kept_too(folders, as_on_a_gpu, lowered, structured):
    settings = {"mesh": None if structured else jaxspec.mesh(data=2, tensor=2)}
    params = dataclasses.replace(PARAMS, structured_outputs={"regex": "[a-d]{8}"}) if structured else PARAMS
    first, once = run(folders, params, **settings), list(lowered)
    kept = files(as_on_a_gpu)
    lowered.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert run(folders, params, **settings) == first
    assert kept and len(lowered) == len(once) - len(kept) and len(lowered) <= len(once) // 2


def test_programs_are_known_by_all_that_they_are_made_from(folders, monkeypatch):
    """Settings, shapes, the source, JAX's settings and the environment; not by what changes no program."""

    def facts(**settings):
        with jaxspec.load(*folders, **SETTINGS | settings) as llm:
            kept = llm._shards.runners[0].programs._kept
            return None if kept is None else kept.path("a program")

    same = facts()
    assert facts(seed=7) == same
    found = [facts(**change) for change in ({"max_len": 128}, {"kv_dtype": "bfloat16"}, {"attention": "xla"})]
    with jax.default_matmul_precision("tensorfloat32"):  # of this thread alone
        found.append(facts())
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=false")
    found.append(facts())
    monkeypatch.setattr(kept_programs, "_source", lambda: "other")
    found.append(facts())
    assert len({same, *found}) == 1 + len(found)


def test_the_least_used_files_go_first(as_on_a_gpu, monkeypatch):
    keeps = kept_programs.KeptPrograms(as_on_a_gpu, jax.devices()[:1], ["a fact"])
    made = jax.jit(lambda x: x + 1).lower(jnp.zeros(4)).compile()
    first, second, third = map(keeps.path, ("first", "second", "third"))
    keeps.keep(first, made)
    monkeypatch.setattr(kept_programs, "MOST_BYTES", int(2.5 * first.stat().st_size))
    keeps.keep(second, made)
    os.utime(first, (0, 1000))
    os.utime(second, (0, 2000))
    assert keeps.read(first)(jnp.ones(4)).tolist() == [2.0] * 4  # which makes it the newest
    keeps.keep(third, made)
    assert first.exists() and third.exists() and not second.exists()


def test_a_folder_that_may_only_be_read_gives_its_programs(as_on_a_gpu, monkeypatch):
    keeps = kept_programs.KeptPrograms(as_on_a_gpu, jax.devices()[:1], ["a fact"])
    kept, bad = map(keeps.path, ("kept", "bad"))
    keeps.keep(kept, jax.jit(lambda x: x + 1).lower(jnp.zeros(4)).compile())
    bad.write_bytes(b"no program")

    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refused)
    monkeypatch.setattr(Path, "unlink", refused)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert keeps.read(kept)(jnp.ones(4)).tolist() == [2.0] * 4
    with pytest.warns(RuntimeWarning, match="cannot be used and is compiled anew"):
        assert keeps.read(bad) is None


def test_a_full_disk_keeps_no_pieces(as_on_a_gpu, monkeypatch):
    keeps = kept_programs.KeptPrograms(as_on_a_gpu, jax.devices()[:1], ["a fact"])
    made = jax.jit(lambda x: x + 1).lower(jnp.zeros(4)).compile()
    named = tempfile.NamedTemporaryFile

    def no_room():
        raise OSError(errno.ENOSPC, "No space left on device")

    def full(*arguments, **settings):
        monkeypatch.setattr(file := named(*arguments, **settings), "flush", no_room)
        return file

    monkeypatch.setattr(tempfile, "NamedTemporaryFile", full)
    keeps.keep(keeps.path("a program"), made)
    assert files(as_on_a_gpu) == set()


def test_where_programs_are_kept(folders, monkeypatch, tmp_path):
    """With JAX's cache, for models of this package."""
    llm = jaxspec.load(*folders, **SETTINGS)
    of = kept_programs.kept_programs
    device = jax.devices()[0]
    assert of(llm.target, llm.drafter, [device], ["fact"]) is not None
    assert of(llm.target, llm.drafter, [device], [object()]) is None  # it shows itself by its address

    @dataclasses.dataclass
    class Own:
        pass

    assert of(llm.target, Own(), [device], ["fact"]) is None
    jax.config.update("jax_enable_compilation_cache", False)
    assert of(llm.target, llm.drafter, [device], ["fact"]) is None
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", None)
    assert of(llm.target, llm.drafter, [device], ["fact"]) is None
    jax.config.update("jax_compilation_cache_dir", "gs://bucket/cache")
    assert of(llm.target, llm.drafter, [device], ["fact"]) is None
    monkeypatch.undo()
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    assert of(llm.target, llm.drafter, [device], ["fact"]) is None  # a CPU
