"""The check that compiles for GPUs that are not there, as far as it goes without a compiler for them."""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from jaxspec.compile_check import cases, check
from jaxspec.compile_check.cases import Case
from jaxspec.compile_check.check import GPUS
from pallas_kernels import device


@pytest.fixture(autouse=True)
def no_plugin(monkeypatch):
    """What a machine without a CUDA plug-in does, on any machine."""
    monkeypatch.setattr(check, "_has_plugin", lambda: False)


def described(gpu):
    return device.described_as(device.Described(GPUS[gpu].kind, ".".join(map(str, GPUS[gpu].capability))))


def test_every_kernel_has_cases_and_no_program_two():
    with described("h200"):
        distinct, named = cases.kernel_cases(), list(cases.named_cases())
    packages = {path.parent.name for name in ("triton", "mosaic") for path in Path(pallas_kernels.__file__).parent.glob(f"*/{name}.py")}
    assert {case.kernel for case in distinct} == packages - {"packed"}  # of which other packages' kernels are made
    assert {case.kernel for case in distinct if not case.further} == {case.kernel for case in distinct}
    names = {(case.kernel, case.name) for case in distinct}
    assert len(names) == len(distinct) == len({case.program() for case in named}) < len(named)
    # Layers that the 12B and the 26B have in common; what serves on Hopper in either dialect.
    assert ("paged_attention", "12b-sliding x 1") in names and ("paged_attention", "26b-sliding x 1") not in names
    assert {("paged_attention", name) for name in ("31b-full x 1", "31b-full x 1, Triton", "31b-full x 1, fp8")} <= names
    with described("a100"):
        assert not any(case.name.endswith("Triton") for case in cases.kernel_cases())


def test_a_gpu_without_kernels_and_one_with(capsys):
    assert check.main(["--gpus", "t4,l4", "--kernels", "add_norm E2B assistant"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines == [
        "No CUDA plug-in to compile with: programs are only lowered.",
        "Tesla T4, compute capability 7.5, 65,536 bytes of shared memory a program",
        "  no kernels: the Tesla T4 has compute capability 7.5; kernels need at least 8.0",
        "NVIDIA L4, compute capability 8.9, 101,376 bytes of shared memory a program",
        f"  {'kernel':24} {'programs':>8} {'shared bytes':>12} {'registers':>9} {'waiting':>7} {'spilled bytes':>13}",
        f"  {'add_norm':24} {1:8} {'-':>12} {'-':>9} {'-':>7} {'-':>13}",
        "1 programs were lowered.",
    ]


def test_where_xla_serves_no_kernel_is_counted(capsys):
    assert check.main(["--gpus", "a100", "--kernels", "layer_end E2B 32"]) == 0
    assert "spilled bytes" not in capsys.readouterr().out


def test_figures_are_the_most_of_all_programs():
    """Compiled where there is a plug-in alone, so the printing is tested on what compiling would give."""
    figures = check.KernelFigures()
    figures.add(shared=5, registers=7)
    figures.add(shared=3, registers=9, spilled=None)
    assert figures == check.KernelFigures(5, 9, None)


def test_by_default_steps_are_of_models_that_fit_and_shapes_differ():
    def wanted(gpu, **options):
        given = {"kernels": "", "steps": None, "all": False, "dtype": "auto", **options}
        return check.wanted_cases(gpu, argparse.Namespace(**given))

    assert list(wanted("t4")) == ["pocket", "e2b"]
    assert list(wanted("t4", all=True)) == list(check.STEP_MODELS)
    assert wanted("t4", steps="31b") == {"31b": "step of 31b, bfloat16"}
    few, everything = wanted("l4"), wanted("l4", all=True)
    assert few.items() < everything.items() and "paged_attention: 31b-full x 32" in set(everything.values()) - set(few.values())
    some = wanted("l4", kernels="31b-full")
    assert "paged_attention: 31b-full x 32" in some.values() and not set(some) & set(check.STEP_MODELS)


def test_what_fails_is_said(capsys, monkeypatch):
    def refuse(x):
        raise ValueError("one\n  or another reason")

    refused = [Case("some", "shape", refuse, (jax.ShapeDtypeStruct((1,), jnp.float32),))]
    monkeypatch.setattr(cases, "kernel_cases", lambda: refused)
    check.compiler_and_cases.cache_clear()
    assert check.main(["--gpus", "a100", "--steps", ""]) == 1
    check.compiler_and_cases.cache_clear()
    said = capsys.readouterr().out
    assert "  FAILED some: shape: one or another reason\n" in said and said.endswith("1 of 1 programs failed.\n")
    for options, message in (
        (["--gpus", "v100"], "unknown GPU v100; available: t4, a100, l4, h200"),
        (["--jobs", "0"], "--jobs is 0, expected at least 1"),
    ):
        with pytest.raises(SystemExit):
            check.main(options)
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpu", "dtype", "found"), [("t4", "auto", "bfloat16"), ("h200", "auto", "bfloat16"), ("h200", "float32", "float32")]
)
def test_a_step_in_what_a_gpu_runs(gpu, dtype, found):
    with described(gpu):
        case = cases.step_case("pocket", dtype)
    assert case.name == f"pocket, {found}" and case.args[0].dtype == case.args[2].cache.layers[0].k.dtype == jnp.dtype(found)


def test_descriptions_agree_with_what_devices_may_use():
    for gpu in GPUS.values():
        assert device.SHARED_MEMORY[".".join(map(str, gpu.capability))] == gpu.program_shared
        assert f"shared_memory_per_block_optin: {gpu.program_shared}\n" in gpu.description()


def test_what_the_assembler_reports():
    said = """
ptxas info    : (C7504) Potential Performance Loss: 'setmaxnreg' ignored to maintain compatibility across compilation units.
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register \
resources for the function 'gated_mosaic_gpu_kernel'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gated_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for gated_mosaic_gpu_kernel
ptxas         .     568 bytes stack frame, 1072 bytes spill stores, 1248 bytes spill loads
ptxas info    : Used 255 registers, used 16 barriers, 17 bytes smem
ptxas info    : Compiling entry function 'add_norm' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
"""
    figures = check.KernelFigures
    assert check.reported(said) == {
        "gated_mosaic_gpu_kernel": figures(registers=255, spilled=1072, waiting=1), "add_norm": figures(registers=40, spilled=0, waiting=0)
    }  # fmt: skip


def test_commands_of_a_loop_s_body():
    dumped = """001: kCopy  [source | next=002 (1)] kCopy
002: kWhile [prev=001 (1) | sink]
condition:
    003: kCustomKernel [source | sink] loop_and_fusion
  body:
    000: kCommandBuffer [source | sink]
        004: kCopy [source | next=005 (1)] kCopy
        005: kCustomKernel [prev=004 (1) | sink] linear
"""
    assert check.loop_commands(dumped) == [check.GRAPH]
    assert check.loop_commands(dumped + "    006: kCopy [source | sink] kCopy\n") == [check.GRAPH, "kCopy"]
    assert check.loop_commands("001: kCopy [source | sink] kCopy\n") == []
