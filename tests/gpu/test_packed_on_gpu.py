"""Kernels for packed matrices, compiled for the GPU that is there, against the unpacked weights."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_matrices import FORMS, SMALL_FORMS, packed, small

import jaxspec
from pallas_kernels import device, dialect, float8_rows, linear, lm_head, moe
from pallas_kernels.activation import GELU
from pallas_kernels.add_norm import Float8, add_norm
from pallas_kernels.linear import packed_mosaic, packed_triton
from pallas_kernels.moe import packed_mosaic as experts_mosaic
from pallas_kernels.packed import KINDS, unpack

pytestmark = pytest.mark.gpu
AFFINE = ("int4 affine float16", "int8 affine float16")
# Forms whose scales are not in bfloat16, as checkpoints have them.
OTHER_SCALES = ("int4 float16", "int4 zeros float16", "int8 zeros float16", *AFFINE, "int8 of 16 float16", "fp8 float32", "fp4 float32")


@pytest.fixture(autouse=True)
def kernels():
    if reason := dialect.obstacle():
        pytest.skip(reason)


def normal(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def assert_close(found, expected, limit=1e-2):
    found, expected = (np.asarray(a.astype(jnp.float32)) for a in (found, expected))
    assert np.abs(found - expected).max() <= limit * np.abs(expected).max()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_unpack_to_the_last_bit(form, dtype):
    """Rows of the identity pick them one by one; two blocks each way, the last ones not full."""
    w = packed(form, (100, 120))
    (got,) = jax.jit(functools.partial(packed_triton.partials, splits=1))(jnp.eye(120, dtype=dtype), w)
    np.testing.assert_array_equal(got.T, unpack(w, dtype).astype(jnp.float32))


@pytest.mark.parametrize("form", FORMS)
def test_whole_matrices_are_those_of_unpack_to_the_last_bit(form):
    """An even and an odd number of blocks of inputs."""
    for shape, dtype in (((640, 2048), "bfloat16"), ((2, 64, 192), "float32")):
        w = packed(form, shape)
        np.testing.assert_array_equal(jax.jit(linear.unpacked)(w, jnp.ones((8, 1), dtype)), unpack(w, dtype))


@pytest.mark.parametrize("form", SMALL_FORMS)
def test_small_weights_are_those_of_unpack_to_the_last_bit(form):
    """Scales, and products, that are subnormal in float16."""
    w = small(form, (100, 120))
    (got,) = jax.jit(functools.partial(packed_triton.partials, splits=1))(jnp.eye(120, dtype=jnp.bfloat16), w)
    np.testing.assert_array_equal(got.T, unpack(w, jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("rows", [1, 5, 40, 160, 256])
@pytest.mark.parametrize("form", ["int4", "int4 zeros", "int8", "fp8", "fp8 blocks", "fp4", *OTHER_SCALES])
def test_products_equal_those_of_unpacked_weights(form, rows):
    x, w, gate_up = normal(rows, 704), packed(form, (1000, 704)), packed(form, (2, 512, 704), 2)
    for splits in (1, 3):
        parts = jax.jit(functools.partial(linear.partials, splits=splits, implementation="triton"))(x, w)
        assert_close(parts.sum(0), linear.reference.linear(x, unpack(w, x.dtype), jnp.float32))
    got = jax.jit(functools.partial(linear.gated, implementation="triton"))(x, gate_up)
    # In float32: in bfloat16 the reference rounds gate, up and their product, and the kernel the last alone.
    wide = (a.astype(jnp.float32) for a in (x, unpack(gate_up, x.dtype)))
    assert_close(got, linear.reference.gated(*wide, GELU))


# Widths of which no power of two is a factor, and matrices large enough for Hopper's kernel.
@pytest.mark.parametrize("rows", [1, 5, 20, 40, 64, 130, 160, 256])
@pytest.mark.parametrize("form", ["int4", "int4 zeros", "int8", "int8 zeros", "fp8", "fp8 blocks", "fp4", *OTHER_SCALES])
def test_the_kernel_of_this_gpu_multiplies_with_unpacked_weights(form, rows):
    x = normal(rows, 2112)
    for shape in ((2816, 2112), (5376, 2112), (2, 832, 2112)):
        w = packed(form, shape, rows)
        wanted = jnp.einsum("nh,...h->n...", x.astype(jnp.float32), unpack(w, x.dtype).astype(jnp.float32), precision="highest")
        if len(shape) == 3:
            found, limit = jax.jit(linear.gated)(x, w), 3e-3
            wanted = GELU(*(wanted[:, i].astype(jnp.bfloat16) for i in range(2)))
        else:
            found, limit = jax.jit(linear.partials)(x, w).sum(0), 1e-5
        assert largest_gap(found, wanted) <= limit, shape


@pytest.mark.parametrize("rows", [96, 168, 192, 200, 216, 232, 248])
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_a_wide_matrix_is_multiplied_with_any_number_of_rows(form, rows):
    """Which fill the registers of three warpgroups, and then of two."""
    x, w = normal(rows, 2560), packed(form, (20_480, 2560), rows)
    wanted = jnp.einsum("nh,oh->no", x, unpack(w, x.dtype), preferred_element_type=jnp.float32)
    assert largest_gap(jax.jit(linear.linear)(x, w), wanted) <= 5e-3


@pytest.mark.parametrize("rows", [5, 9, 40])
@pytest.mark.parametrize("form", ["int4", "int4 zeros", "int8", "fp8"])
def test_programs_that_share_a_tile_add_their_sums(form, rows):
    """Enough outputs for more than one tile a program, but not for two. Calls that follow one another wait for their own parts."""
    x = normal(rows, 2304)
    for shape in ((2, 150 * 128, 2304), (150 * 128, 2304)):
        w = packed(form, shape, rows)
        if reason := packed_mosaic.unsupported(x, w):
            pytest.skip(reason)
        assert packed_mosaic.choose_tiles(rows, 150 * 128, 2304, KINDS[w.kind].bits, matrices=len(shape) - 1).joined
        wanted = jnp.einsum("nh,...h->n...", x.astype(jnp.float32), unpack(w, x.dtype).astype(jnp.float32), precision="highest")
        if len(shape) == 3:
            wanted = GELU(*(wanted[:, i].astype(jnp.bfloat16) for i in range(2)))
        run = jax.jit(lambda x, w: [(linear.gated if len(w.shape) == 3 else linear.linear)(x * scale, w) for scale in (1, 2, 1)])
        first, _, last = run(x, w)
        assert largest_gap(first, wanted) <= 3e-3, shape
        np.testing.assert_array_equal(first, last)


@pytest.mark.parametrize("width", [576, 1536, 5376, 21504])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_are_rounded_to_float8_as_by_xla(dtype, width):
    x = normal(9, width).astype(jnp.float32) * jnp.exp2(jnp.arange(9, dtype=jnp.float32) * 3 - 12)[:, None]
    x = x.at[3].set(0).astype(dtype)
    np.testing.assert_array_equal(jax.jit(float8_rows.rounded)(x), float8_rows.reference.rounded(x))
    if (device.capability() or 0) >= 8.9:
        codes, scales = jax.jit(float8_rows.codes)(x)
        numbers = float8_rows.codes_in_order(codes).astype(jnp.float32) * scales[:, None]
        np.testing.assert_array_equal(numbers[:9].astype(dtype), float8_rows.reference.rounded(x))


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 20, 40, 64, 70, 96, 130, 160, 250, 256])
def test_products_round_their_rows_to_float8(rows):
    """Scales are powers of two, so that a weight is the same number in 8 bits and in 16. Sums of codes have 13 bits or so, and where a gate
    is next to 0 an activation has fewer that are right."""
    x = normal(rows, 2304)
    for shape in ((2816, 2304), (5376, 2304), (160 * 128, 2304), (2, 832, 2304), (2, 160 * 128, 2304)):
        w = packed("fp8", shape, rows)
        w = dataclasses.replace(w, scale=jnp.exp2(jnp.round(jnp.log2(w.scale))), inputs="fp8")
        wide = float8_rows.reference.rounded(x).astype(jnp.float32)
        wanted = jnp.einsum("nh,...h->n...", wide, unpack(w, x.dtype).astype(jnp.float32), precision="highest")
        if len(shape) == 3:
            found, wanted, limit = jax.jit(linear.gated)(x, w), GELU(*(wanted[:, i].astype(jnp.bfloat16) for i in range(2))), 1e-2
        else:
            found, limit = jax.jit(linear.partials)(x, w).sum(0), 4e-3
        assert largest_gap(found, wanted) <= limit, shape


@pytest.mark.parametrize("rows", [1, 5, 16, 17, 40, 100, 160])
def test_kernels_before_a_product_round_as_its_own_does(rows):
    """Norms to the last bit, and what products make of their results, and activations."""
    width = 5376
    x, y, weight = normal(rows, width), normal(rows, width, seed=2), normal(width, seed=3)
    w, pair = (dataclasses.replace(packed("fp8", shape, rows), inputs="fp8") for shape in ((2816, width), (2, 21504, width)))
    form = linear.rounding(x, w)
    assert form is not None

    @jax.jit
    def run(x, y, weight, w, pair):
        settings = {"eps": 1e-6, "launch_dependents": True}
        _, rounded, normed = add_norm(x, y, weight, next_weights=(Float8(weight, form == "codes"), weight), **settings)
        both = [linear.partials(a, w) for a in (rounded, normed)]
        gated = [linear.gated(a, pair, codes=codes) for a, codes in ((rounded, form == "codes"), (normed, False))]
        return rounded, normed, both, gated

    rounded, normed, both, gated = run(x, y, weight, w, pair)
    np.testing.assert_array_equal(numbers_of(rounded), float8_rows.reference.rounded(normed).astype(jnp.float32))
    np.testing.assert_array_equal(*both)
    made, wanted = numbers_of(gated[0]), float8_rows.reference.rounded(gated[1]).astype(jnp.float32)
    assert np.mean(made != wanted) < 0.01  # the last bit of an activation may be another in another kernel, and be what decides
    np.testing.assert_allclose(made, wanted, rtol=0.15, atol=1e-3 * float(jnp.abs(wanted).max()))


def numbers_of(rows):
    """Rows, rounded ones among them or codes, in float32; those that are not rounded are."""
    if not isinstance(rows, float8_rows.Rounded):
        return float8_rows.reference.rounded(rows).astype(jnp.float32)
    if rows.scales is None:
        return rows.rows.astype(jnp.float32)
    return (float8_rows.codes_in_order(rows.rows).astype(jnp.float32) * rows.scales[:, None])[: rows.shape[0]]


def largest_gap(found, wanted):
    """The largest norm of a row's error, relative to the row's."""
    found, wanted = found.astype(jnp.float32), wanted.astype(jnp.float32)
    return float((jnp.linalg.norm(found - wanted, axis=1) / jnp.linalg.norm(wanted, axis=1)).max())


@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
def test_logits_of_pocket_by_kernels_and_by_xla(quantize):
    params = jaxspec.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    prompts = ["def main():\n    print(", "The quick brown fox", "class Point:\n    def __init__(self, x, y):"]
    scores = []
    for attention in ("xla", "auto"):
        llm = jaxspec.load("pocket", quantize=quantize, attention=attention, max_slots=4, progress=False)
        outs = llm.generate(prompts, params)
        scores.append([next(iter(entry.values())).logprob for out in outs for entry in out.prompt_logprobs[1:]])
    gap = np.abs(np.subtract(*scores))
    assert np.median(gap) < 0.05 and gap.max() < 0.5, (np.median(gap), gap.max())


@pytest.mark.parametrize("rows", [1, 8, 40, 64, 70])
@pytest.mark.parametrize("form", ["int8", "int4", "int4 zeros", "fp8", "int8 of 16 float16", "int8 affine float16"])
def test_heads_choose_as_from_unpacked_tables(form, rows):
    """Greedy and sampled rows mixed. A token may be another where two values are as good as equal."""
    hidden, table = normal(rows, 1024) * 0.2, packed(form, (128 * 150, 1024))
    keys = jax.random.bits(jax.random.key(0), (rows, 2), jnp.uint32)
    temperature = jnp.where(jnp.arange(rows) % 3 == 0, 0.0, 0.7)
    settings = {"softcap": 30.0, "suppressed": (5, 131), "first_id": jnp.int32(3)}
    run = jax.jit(lm_head.lm_head, static_argnames=("softcap", "suppressed", "implementation"))
    found, values = run(hidden, table, keys, temperature, **settings)
    wanted, maxima = run(hidden, unpack(table, jnp.bfloat16), keys, temperature, **settings, implementation="xla")
    np.testing.assert_allclose(values, maxima, rtol=0, atol=2e-2)
    assert np.mean(np.asarray(found) == np.asarray(wanted)) > 0.95


@pytest.mark.parametrize("rows", [1, 5, 40, 96, 160, 700])
@pytest.mark.parametrize("form", ["int8", "int4", "int4 zeros", "fp8", "fp8 blocks", "fp4", *OTHER_SCALES])
def test_experts_equal_those_of_unpacked_weights(form, rows):
    gate_up, down = packed(form, (16, 2, 704, 384), 2), packed(form, (16, 384, 704), 3)
    ids = np.stack([np.random.default_rng(row).permutation(16)[:4] for row in range(rows)]).astype(np.int32)
    x, weights = normal(rows, 384), normal(rows, 4, seed=4)
    got, plain = (
        jax.jit(functools.partial(moe.experts, implementation=name))(x, gate_up, down, weights, ids) for name in ("triton", "xla")
    )
    expected = moe.reference.outputs(x, unpack(gate_up, x.dtype), unpack(down, x.dtype), weights, ids).summed()
    assert_close(got, expected)
    assert_close(plain, expected)
    if not experts_mosaic.unsupported(x, gate_up, down, ids.size):
        assert_close(jax.jit(functools.partial(moe.experts, implementation="mosaic"))(x, gate_up, down, weights, ids), expected)
