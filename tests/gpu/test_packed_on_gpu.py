"""Kernels for packed matrices, compiled for the GPU that is there, against the unpacked weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_matrices import FORMS, packed

from pallas_kernels import dialect, linear, moe
from pallas_kernels.linear import packed_triton
from pallas_kernels.packed import unpack

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def device():
    if reason := dialect.obstacle():
        pytest.skip(reason)


def normal(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def assert_close(found, expected):
    found, expected = (np.asarray(a.astype(jnp.float32)) for a in (found, expected))
    assert np.abs(found - expected).max() <= 1e-2 * np.abs(expected).max()


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_unpack_to_the_last_bit(form):
    """Rows of the identity pick them one by one; two blocks each way, the last ones not full."""
    w = packed(form, (100, 120))
    (got,) = jax.jit(functools.partial(packed_triton.partials, splits=1))(jnp.eye(120, dtype=jnp.bfloat16), w)
    np.testing.assert_array_equal(got.T, unpack(w, jnp.float32))


@pytest.mark.parametrize("rows", [1, 5, 40, 160, 256])
@pytest.mark.parametrize("form", ["int4", "int4 zeros", "int8", "fp8", "fp8 blocks", "fp4"])
def test_products_equal_those_of_unpacked_weights(form, rows):
    x, w, gate_up = normal(rows, 704), packed(form, (1000, 704)), packed(form, (2, 512, 704), 2)
    for splits in (1, 3):
        parts = jax.jit(functools.partial(linear.partials, splits=splits, implementation="triton"))(x, w)
        assert_close(parts.sum(0), linear.reference.linear(x, unpack(w), jnp.float32))
    got = jax.jit(functools.partial(linear.gated, implementation="triton"))(x, gate_up)
    assert_close(got, linear.reference.gated(x, unpack(gate_up)))


@pytest.mark.parametrize("rows", [1, 5, 40, 160, 700])
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_experts_equal_those_of_unpacked_weights(form, rows):
    gate_up, down = packed(form, (16, 2, 704, 384), 2), packed(form, (16, 384, 704), 3)
    ids = np.stack([np.random.default_rng(row).permutation(16)[:4] for row in range(rows)]).astype(np.int32)
    x, weights = normal(rows, 384), normal(rows, 4, seed=4)
    got, plain = (
        jax.jit(functools.partial(moe.experts, implementation=name))(x, gate_up, down, weights, ids) for name in ("triton", "xla")
    )
    expected = moe.reference.experts(x, unpack(gate_up), unpack(down), weights, ids)
    assert_close(got, expected)
    assert_close(plain, expected)
