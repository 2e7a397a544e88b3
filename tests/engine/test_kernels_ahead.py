"""Kernels that are compiled beside a program, as both are lowered for an H200."""

import types

import jax
import jax.numpy as jnp
import pytest
from lowering import lowered_for_cuda

from jaxspec.engine import kernels_ahead
from pallas_kernels import device, linear
from pallas_kernels.packed import abstract

H200 = device.Described("NVIDIA H200", "9.0")
GPU, CPU = (types.SimpleNamespace(platform=platform) for platform in ("gpu", "cpu"))


def loop(few, many, weight):
    def product(x):
        return jnp.sum(linear.partials(x, weight), axis=0).astype(x.dtype)

    def step(carry):
        few, many, count = carry
        return product(few), product(many), count + 1

    return jax.lax.while_loop(lambda carry: carry[2] < 3, step, (few, many, jnp.int32(0)))


@pytest.fixture
def program(monkeypatch):
    """A loop with two kernels in the Mosaic GPU dialect."""
    monkeypatch.setattr(kernels_ahead, "_begun", set())
    weight = abstract((1024, 1024), "fp8", group=None, scale_dtype=jnp.bfloat16)
    with device.described_as(H200):
        return lowered_for_cuda(jax.jit(loop), *(jax.ShapeDtypeStruct((count, 1024), jnp.bfloat16) for count in (17, 40)), weight)


def test_each_kernel_is_compiled_once(program):
    assert program.as_text().count("@mosaic_gpu_v2") == 2
    assert kernels_ahead.compilers(program, [GPU, CPU]) == []
    assert len(kernels_ahead.compilers(program, [GPU, GPU])) == 2
    assert kernels_ahead.compilers(program, [GPU]) == [], "they have been begun"


def test_a_program_of_its_own_calls_the_same_kernel(program):
    calls = list(kernels_ahead._calls(program.compiler_ir().operation))
    for attributes in calls:
        alone = lowered_for_cuda(kernels_ahead._program(attributes))
        assert list(kernels_ahead._calls(alone.compiler_ir().operation)) == [attributes]
        assert len(attributes["kernel_hash"]) == 32 and len(attributes["module"]) > 1000
    assert len({attributes["kernel_hash"] for attributes in calls}) == 2


def test_what_cannot_be_compiled_is_left_to_the_program(program):
    """Here, as the CPU knows no such call."""
    for compile_kernel in kernels_ahead.compilers(program, [GPU]):
        assert compile_kernel() is None
