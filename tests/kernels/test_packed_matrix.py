"""Affine packed matrices: their weights, against NumPy in more bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_matrices import in_one_program

from pallas_kernels.packed import KINDS, abstract, pack, unpack
from pallas_kernels.packed.matrix import codes_of

unpacked = jax.jit(unpack, static_argnums=1)


def affine(kind, group, dtype, shape, over=1, seed=0):
    """Random codes [*out, *in], scales of both signs, and minimums of sizes from far below a weight's to above it."""
    rng = np.random.default_rng(seed)
    numbers = (*shape[:-1], -(-shape[-1] // group)) if group else (*shape[: len(shape) - over], *[1] * over)
    codes = rng.integers(0, 2 ** KINDS[kind].bits, shape).astype(np.uint8)
    scale = rng.uniform(0.5, 2, numbers) * rng.choice([-1, 1], numbers) / 16
    zero = rng.standard_normal(numbers) * 2.0 ** rng.integers(-24, 2, numbers)
    return codes, jnp.asarray(scale, dtype), jnp.asarray(zero, dtype)


def weights(codes, scale, zero, kind, group):
    """What `unpack` should give, from numbers of 64 bits, which hold every sum."""
    values = codes.view(np.int8) if kind == "int8" else codes
    wide = [np.asarray(x, np.float64).astype(np.longdouble) for x in (scale, zero)]
    spread, least = [np.repeat(x, group, -1)[..., : codes.shape[-1]] if group else x for x in wide]
    fraction, exponent = np.frexp(values * spread + least)
    bits = jnp.finfo(scale.dtype).nmant + 1
    return np.ldexp(np.rint(np.ldexp(fraction, bits)), exponent - bits)


@pytest.mark.parametrize(
    ("kind", "group", "dtype", "shape", "over"),
    [
        ("int4", 32, "float16", (100, 120), 1),
        ("int4", 16, "bfloat16", (64, 200), 1),
        ("int4", None, "float32", (70, 64), 1),
        ("int4", 32, "float16", (70, 3, 100), 2),
        ("int8", 64, "float16", (2, 100, 150), 1),
        ("int8", 128, "float32", (64, 300), 1),
        ("int8", 8, "bfloat16", (70, 2, 100), 2),
        ("int8", None, "bfloat16", (70, 2, 100), 2),
    ],
)
def test_affine_weights_are_rounded_once(kind, group, dtype, shape, over):
    """Blocks that are not full, groups in a block and over blocks, and none."""
    codes, scale, zero = affine(kind, group, dtype, shape, over)
    w = in_one_program(codes, scale, zero, kind=kind, over=over, group=group, affine=True)
    like = abstract(shape, kind, over=over, group=group, zeros=True, affine=True, scale_dtype=dtype)
    assert jax.tree.structure(w) == jax.tree.structure(like) and w.affine
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(w)] == [(x.shape, x.dtype) for x in jax.tree.leaves(like)]
    np.testing.assert_array_equal(codes_of(w)[tuple(slice(size) for size in shape)], codes)
    np.testing.assert_array_equal(unpacked(w, jnp.float32), weights(codes, scale, zero, kind, group))
    np.testing.assert_array_equal(unpacked(w, None), unpacked(w, jnp.float32).astype(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_minimums_that_float32_loses_decide_ties(dtype):
    """3 (1 + u) lies between two numbers whose last bits are 2 u, and the minimum is far below the last bit of a float32."""
    u = float(jnp.finfo(dtype).eps)
    codes = np.full((2, 64), 3, np.uint8)
    zero = jnp.asarray([[2.0**-24], [-(2.0**-24)]], dtype) * (1 if dtype == "float16" else 2.0**-30)
    w = in_one_program(codes, jnp.full((2, 1), 1 + u, dtype), jnp.asarray(zero, dtype), kind="int4", affine=True)
    np.testing.assert_array_equal(unpacked(w, jnp.float32), np.broadcast_to([[3 + 4 * u], [3 + 2 * u]], (2, 64)))


def test_blocks_of_affine_matrices_are_filled_with_zeros():
    codes, scale, zero = affine("int4", 32, "bfloat16", (100, 96))
    w = in_one_program(codes, scale, zero, kind="int4", group=32, affine=True)
    whole = unpacked(dataclasses.replace(w, cut=(0, 0)), None)
    assert whole.shape == (128, 128) and not whole[100:].any() and not whole[:, 96:].any()


def test_flat_affine_matrices_have_the_same_weights():
    codes, scale, zero = affine("int4", 16, "float16", (2, 64, 3, 128), 2)
    w = in_one_program(codes, scale, zero, kind="int4", over=2, group=16, affine=True)
    np.testing.assert_array_equal(unpacked(w.flat(), None), unpacked(w, None).reshape(128, 384))


@pytest.mark.parametrize(
    ("kind", "zeros", "message"),
    [
        ("int4", False, "the matrix is affine and has no zeros; expected for each scale the number that a code of 0 stands for"),
        ("fp8", True, "the matrix is affine and has codes of fp8; expected int4 or int8"),
        ("fp4", True, "the matrix is affine and has codes of fp4; expected int4 or int8"),
    ],
)
def test_what_cannot_be_affine_is_refused(kind, zeros, message):
    scale = jnp.ones((64, 1))
    with pytest.raises(ValueError, match=f"^{message}$"):
        abstract((64, 64), kind, group=None, zeros=zeros, affine=True, scale_dtype=jnp.float32)
    with pytest.raises(ValueError, match=f"^{message}$"):
        pack(jnp.zeros((64, 64), jnp.uint8), scale, scale if zeros else None, kind=kind, affine=True)
