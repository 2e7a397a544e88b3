"""The check that compiles for GPUs that are not there, as far as it goes without a compiler for them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from jaxspec import compile_check
from jaxspec.compile_check import GPUS, Case
from pallas_kernels import device


def test_every_kernel_has_cases():
    found = {path.parent.name for path in Path(pallas_kernels.__file__).parent.glob("*/triton.py")}
    cases = list(compile_check.kernel_cases())
    assert {case.kernel for case in cases} == found
    assert len({(case.kernel, case.name) for case in cases if case.kernel != "centroid_head"}) == sum(
        c.kernel != "centroid_head" for c in cases
    )


def test_a_gpu_without_kernels_and_one_with(capsys):
    assert compile_check.main(["--gpus", "t4,l4", "--kernels", "add_norm E2B assistant", "--steps", ""]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines == [
        "No CUDA plug-in to compile with: programs are only lowered.",
        "Tesla T4, compute capability 7.5, 65,536 bytes of shared memory a program",
        "  no kernels: the Tesla T4 has compute capability 7.5; kernels need at least 8.0",
        "NVIDIA L4, compute capability 8.9, 101,376 bytes of shared memory a program",
        f"  {'kernel':24} {'programs':>8} {'shared bytes':>12} {'registers':>9} {'spilled bytes':>13}",
        f"  {'add_norm':24} {1:8} {'-':>12} {'-':>9} {'-':>13}",
        "All programs were lowered.",
    ]


def test_what_fails_is_said(capsys, monkeypatch):
    def refuse(x):
        raise ValueError("one\n  or another reason")

    cases = [Case("some", "shape", refuse, (jax.ShapeDtypeStruct((1,), jnp.float32),))]
    monkeypatch.setattr(compile_check, "kernel_cases", lambda: cases)
    assert compile_check.main(["--gpus", "a100", "--steps", ""]) == 1
    said = capsys.readouterr().out
    assert "  FAILED some: shape: one or another reason\n" in said and said.endswith("1 programs failed.\n")
    with pytest.raises(SystemExit):
        compile_check.main(["--gpus", "v100"])
    assert "unknown GPU v100; available: t4, a100, l4, h200" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("gpu", "dtype", "found"), [("t4", "auto", "bfloat16"), ("h200", "auto", "bfloat16"), ("h200", "float32", "float32")]
)
def test_a_step_in_what_a_gpu_runs(gpu, dtype, found):
    described = device.Described(GPUS[gpu].kind, ".".join(map(str, GPUS[gpu].capability)))
    with device.described_as(described):
        case = compile_check.step_case("pocket", dtype)
    assert case.name == f"pocket, {found}" and case.args[0].dtype == case.args[2].cache.layers[0].k.dtype == jnp.dtype(found)


def test_descriptions_agree_with_what_devices_may_use():
    for gpu in GPUS.values():
        assert device.SHARED_MEMORY[".".join(map(str, gpu.capability))] == gpu.program_shared
        assert f"shared_memory_per_block_optin: {gpu.program_shared}\n" in gpu.description()
