"""Rows rounded to float8, and products with packed matrices that want them so."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from lowering import for_cuda
from packed_matrices import packed

from pallas_kernels import device, float8_rows, linear
from pallas_kernels.add_norm import Float8, add_norm
from pallas_kernels.linear import packed_mosaic, triton
from pallas_kernels.linear.shapes import ROUNDED, SHAPES
from pallas_kernels.packed import abstract, mosaic, pack, unpack
from pallas_kernels.packed.words import CODES

pytestmark = pytest.mark.usefixtures("unoptimised")

A100, H200, L4 = (device.Described(*x) for x in (("NVIDIA A100-SXM4-40GB", "8.0"), ("NVIDIA H200", "9.0"), ("NVIDIA L4", "8.9")))
IMPLEMENTATIONS = ["xla", "triton-interpret"]
ROUNDING = {"xla_allow_excess_precision": False}  # else XLA may leave out a rounding between operations that it fuses


def rows(width, dtype, seed=0):
    """Rows of many sizes: with subnormals of e4m3 among them, of zeros, of a largest number on either side of 448 scales, of large and of
    small ones."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((9, width)) * np.exp2(rng.uniform(-12, 12, (9, width)))
    x[3] = 0
    x[4, 1:] *= 448 * 4 / (2 * np.abs(x[4]).max())
    x[4, 0] = 448 * 4
    x[5] *= 450 * 4 / np.abs(x[5]).max()
    x[6] *= 1e-25
    x[7] *= 1e25
    return jnp.asarray(x, dtype)


def by_ml_dtypes(x):
    """The definition, in float64."""
    wide = np.asarray(x, np.float64)
    largest = np.abs(wide).max(axis=-1, keepdims=True)
    scale = np.exp2(np.ceil(np.log2(np.where(largest == 0, 1, largest) / 448)))
    return (wide / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [16, 160, 576])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_become_multiples_of_the_least_power_of_two(implementation, width, dtype):
    x = rows(width, dtype)
    found = float8_rows.rounded(x, implementation=implementation)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(found, np.float64), by_ml_dtypes(x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_codes_and_scales_are_the_same_numbers(implementation, dtype):
    x = rows(160, dtype)
    codes, scales = float8_rows.codes(x, implementation=implementation)
    assert codes.dtype == jnp.float8_e4m3fn and codes.shape == (16, 160) and scales.shape == (16,)
    numbers = np.asarray(float8_rows.codes_in_order(codes), np.float64) * np.asarray(scales, np.float64)[:, None]
    np.testing.assert_array_equal(numbers[:9], by_ml_dtypes(x))
    np.testing.assert_array_equal(numbers[9:], np.repeat(numbers[8:9], 7, axis=0))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_no_number_stays_none(implementation):
    x = jnp.ones((2, 32)).at[0, 5].set(jnp.nan).at[1, 7].set(jnp.inf)
    found = float8_rows.rounded(x, implementation=implementation)
    assert not np.isfinite(found[0, 5]) and not np.isfinite(found[1, 7])


def test_a_row_that_the_kernel_cannot_serve():
    x = jnp.ones((2, 24))
    np.testing.assert_array_equal(float8_rows.rounded(x), x)
    with pytest.raises(ValueError, match="'triton' cannot serve this: rows have 24 numbers; the kernel takes multiples of 16$"):
        float8_rows.rounded(x, implementation="triton")
    with device.described_as(A100), pytest.raises(ValueError, match="the device has compute capability 8.0; the kernel needs 8.9$"):
        float8_rows.codes(jnp.ones((2, 32)), implementation="triton")


def rounding(shape, seed=0):
    return dataclasses.replace(packed("fp8", shape, seed), inputs="fp8")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("count", [1, 5, 40])
def test_products_take_rounded_rows(implementation, count):
    """Rows whose largest numbers differ, so that a scale of another row would show."""
    x = jnp.asarray(np.random.default_rng(1).standard_normal((count, 192)) * np.exp2(np.arange(count) % 7)[:, None], jnp.bfloat16)
    near = jnp.asarray(by_ml_dtypes(x), jnp.float32)
    assert np.abs(np.asarray(near - x.astype(jnp.float32))).max() > 0
    w, pair = rounding((128, 192)), rounding((2, 64, 192))
    full = [unpack(m, jnp.float32) for m in (w, pair)]
    found = linear.linear(x, w, implementation=implementation)
    np.testing.assert_allclose(found.astype(jnp.float32), near @ full[0].T, rtol=1e-2, atol=1e-2 * float(jnp.abs(near @ full[0].T).max()))
    parts = linear.partials(x, w, splits=2, implementation=implementation)
    np.testing.assert_allclose(parts.sum(0), near @ full[0].T, rtol=1e-5, atol=1e-5 * float(jnp.abs(parts).max()))
    wanted = linear.reference.gated(near, full[1], linear.GELU)
    found = linear.gated(x, pair, implementation=implementation)
    np.testing.assert_allclose(found.astype(jnp.float32), wanted, rtol=2e-2, atol=1e-2 * float(jnp.abs(wanted).max()))


def test_a_row_of_several_axes_has_one_scale():
    """As heads have, which are the inputs of an output projection."""
    x = rows(192, "float32")[:3].reshape(3, 2, 96)
    codes = jnp.asarray(np.random.default_rng(5).integers(0, 127, (64, 2, 96)), jnp.uint8)
    w = dataclasses.replace(pack(codes, jnp.ones((64, 1, 1)), kind="fp8", over=2), inputs="fp8")
    near = jnp.asarray(by_ml_dtypes(x.reshape(3, 192)), jnp.float32).reshape(3, 2, 96)
    found, wanted = linear.product(x, w, over=2), jnp.einsum("nkd,okd->no", near, unpack(w, jnp.float32))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * float(jnp.abs(wanted).max()))


def sums_and_norms(rows_of, next_weights, implementation):
    """`add_norm` of a product in two parts."""
    rng = np.random.default_rng(2)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((*rows_of, 160), (160,)))
    parts = jnp.asarray(rng.standard_normal((2, *rows_of, 160)), jnp.float32)
    call = functools.partial(add_norm, eps=1e-3, implementation=implementation)
    run = jax.jit(call, compiler_options=ROUNDING)
    return run(x, parts, weight, next_weights=tuple(form(weight) for form in next_weights))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("rows_of", [(2, 5), (8,)])
def test_norms_round_their_rows(rows_of, implementation):
    """As codes and as numbers, beside norms that do not, in any order."""
    forms = functools.partial(Float8, codes=True), lambda w: w, functools.partial(Float8, codes=False)
    stream, as_codes, plain, as_numbers = sums_and_norms(rows_of, forms, implementation)
    other, normed = sums_and_norms(rows_of, (lambda w: w,), implementation)
    np.testing.assert_array_equal(stream, other)
    np.testing.assert_array_equal(plain, normed)
    wanted = by_ml_dtypes(normed).reshape(-1, 160)
    count = len(wanted)
    for rounded in (as_codes, as_numbers):
        assert rounded.shape == normed.shape and rounded.dtype == normed.dtype and rounded.flat().shape == (count, 160)
    assert as_numbers.scales is None and len(as_codes.rows) == len(as_codes.scales) == -(-count // 8) * 8
    np.testing.assert_array_equal(np.asarray(as_numbers.rows, np.float64), wanted)
    np.testing.assert_array_equal(numbers_of(as_codes)[:count], wanted)


def numbers_of(rounded):
    return np.asarray(float8_rows.codes_in_order(rounded.rows), np.float64) * np.asarray(rounded.scales, np.float64)[:, None]


@pytest.mark.parametrize("width", [64, 192])
def test_an_activation_rounds_its_rows(width):
    """Of gate and up side by side, in two parts."""
    parts = jnp.asarray(np.random.default_rng(1).standard_normal((2, 5, 2 * width)) * 3, jnp.float32)
    settings = {"activation": linear.GELU, "dtype": jnp.bfloat16, "interpret": True}
    kernels = [functools.partial(kernel, **settings) for kernel in (triton.activated, triton.activated_codes)]
    plain, found = (jax.jit(kernel, compiler_options=ROUNDING)(parts) for kernel in kernels)
    assert found.shape == (5, width) and found.rows.shape == (8, width) and found.dtype == jnp.bfloat16
    # The last bit of an activation may be another in another program, and be what decides.
    made, wanted = numbers_of(found)[:5], by_ml_dtypes(plain)
    assert np.mean(made != wanted) < 0.01
    np.testing.assert_allclose(made, wanted, rtol=0.15, atol=1e-3 * np.abs(wanted).max())


def test_products_of_rounded_rows_are_those_of_the_rows():
    x = jnp.asarray(np.random.default_rng(1).standard_normal((5, 192)), jnp.bfloat16)
    w, pair, settings = rounding((128, 192)), rounding((2, 64, 192)), {"implementation": "triton-interpret"}
    near = float8_rows.Rounded(float8_rows.rounded(x), None, (5,), x.dtype)
    assert linear.rounding(x, w, **settings) == linear.rounding(x, pair, splits=1, **settings) == "numbers"
    np.testing.assert_array_equal(linear.partials(near, w, **settings), linear.partials(x, w, **settings))
    np.testing.assert_array_equal(linear.gated(near, pair, codes=True, **settings), linear.gated(x, pair, **settings))


@pytest.mark.parametrize(
    ("count", "change", "gpu", "form"),
    [
        (40, {}, H200, "codes"),
        (39, {}, H200, "codes"),
        (16, {}, H200, "numbers"),
        (12, {}, H200, None),  # XLA pads such rows
        (257, {}, H200, None),  # served in passes
        (40, {}, L4, "numbers"),
        (40, {"inputs": None}, H200, None),
    ],
)
def test_how_a_kernel_before_may_round_rows(count, change, gpu, form):
    w = dataclasses.replace(abstract((1024, 1024), "fp8", group=None, scale_dtype=jnp.bfloat16), inputs="fp8")
    x = jax.ShapeDtypeStruct((count, 1024), jnp.bfloat16)
    with device.described_as(gpu):
        assert linear.rounding(x, dataclasses.replace(w, **change)) == form
    assert linear.rounding(x, w) is linear.rounding(x, w, implementation="xla") is None


def inputs_by_place():
    """Which of 16 inputs stands at each place of a row of codes."""
    codes, scales = float8_rows.codes(1 + jnp.arange(16, dtype=jnp.float32)[None], implementation="xla")
    return (np.asarray(codes.astype(jnp.float32))[0] * float(scales[0])).astype(int) - 1


def test_codes_of_weights_meet_those_of_their_inputs():
    """What `words.codes_in_registers` makes of words, done here with numpy, against the tensor core's left operand of 8 bits: of rows r
    and r + 8 of a warp's sixteen, thread 4 r + c has columns 4 c .. 4 c + 3 of each sixteen (PTX, the fragments of wgmma's .k32)."""
    w = packed("fp8", (64, 64), 3)
    wanted = np.asarray(unpack(dataclasses.replace(w, scale=jnp.ones_like(w.scale)), jnp.float32))
    words = np.asarray(w.words).reshape(2, 128, 4)
    for thread, s, h in itertools.product(range(128), range(4), range(2)):
        warp, row, c = thread // 32, thread % 32 // 4, thread % 4
        pair = [int(words[s // 2, thread, 2 * (s % 2) + e]) for e in range(2)]
        register = 0
        for e in range(2):
            for right, mask in CODES[h][e]:
                register |= (pair[e] >> right if right >= 0 else pair[e] << -right) & mask
        found = np.frombuffer(register.to_bytes(4, "little"), ml_dtypes.float8_e4m3fn).astype(np.float32)
        np.testing.assert_array_equal(found, wanted[16 * warp + 8 * h + row, 16 * s + inputs_by_place()[4 * c : 4 * c + 4]])


@pytest.mark.parametrize(
    ("count", "kind", "group", "inputs", "rounding"),
    [
        (17, "fp8", None, "fp8", "float8_codes"),
        (160, "fp8", None, "fp8", "float8_codes"),
        (16, "fp8", None, "fp8", "float8_numbers"),
        (40, "fp8", 128, "fp8", "float8_numbers"),
        (40, "int8", None, "fp8", "float8_numbers"),
        (40, "fp8", None, None, None),
    ],
)
def test_hoppers_kernel_multiplies_codes_where_one_scale_serves_an_output(count, kind, group, inputs, rounding):
    w = dataclasses.replace(abstract((1024, 1024), kind, group=group, scale_dtype=jnp.bfloat16), inputs=inputs)
    assert packed_mosaic.takes_codes(count, w) is (rounding == "float8_codes")
    with device.described_as(H200):
        text = for_cuda(jax.jit(linear.partials), jax.ShapeDtypeStruct((count, 1024), jnp.bfloat16), w)
    found = [name for name in ("float8_codes", "float8_numbers") if f'name = "{name}"' in text]
    assert found == ([] if rounding is None else [rounding]) and "@mosaic_gpu" in text


def test_rows_are_rounded_by_a_kernel_on_other_gpus_too():
    x, w = SHAPES["E2B down"].arguments(40, jnp.bfloat16, ROUNDED)
    with device.described_as(L4):
        text = for_cuda(jax.jit(linear.partials), x, w)
        assert linear.by_kernel(x, w)
    assert 'name = "float8_numbers"' in text and 'name = "packed_linear"' in text


def test_xla_pads_no_rows_that_become_codes():
    """A kernel reads them, and so the kernel before may have others launched early."""
    x, w = SHAPES["31B down"].arguments(39, jnp.bfloat16, ROUNDED)
    with device.described_as(H200):
        assert linear.by_kernel(x, w) and not linear.by_kernel(x, dataclasses.replace(w, inputs=None))
        assert "stablehlo.pad" not in for_cuda(jax.jit(linear.partials), x, w)


def test_tiles_of_codes_have_the_registers_and_the_memory():
    for shape in SHAPES.values():
        for count in (17, 40, 64, 80, 160, 256):
            matrices = 2 if shape.kind == "gated" else 1
            if matrices == 2 and count > packed_mosaic.MOST_GATED:
                continue
            tiles = packed_mosaic.choose_tiles(count, shape.columns, shape.width, 8, matrices=matrices, splits=1, codes=True)
            step, sums = tiles.room(matrices, 8, -(-count // 8) * 8, 1)
            assert tiles.stages * step + sums <= mosaic.SHARED_MEMORY
            assert matrices * -(-count // 8) * 4 + packed_mosaic.OPERAND // 2 <= mosaic.registers(tiles.wide * tiles.deep)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla_multiplies_codes_where_a_gpu_can(dtype):
    """Rows in another order than that of Hopper's kernel, a matrix of several pieces, scales that are no powers of two."""
    x, w = rows(192, dtype), rounding((2, 64, 192))
    program = jax.jit(functools.partial(linear.product, dtype=jnp.float32))

    def multiplies_codes():
        jax.clear_caches()
        return any("f8E4M3FN" in line for line in program.lower(x, w).as_text().splitlines() if "dot_general" in line)

    with device.described_as(L4):
        assert multiplies_codes()
        found = linear.product(x, w, dtype=jnp.float32)
    assert not multiplies_codes()
    wanted = np.einsum("nh,koh->nko", by_ml_dtypes(x), np.asarray(unpack(w, jnp.float32), np.float64))
    largest = np.maximum(np.abs(wanted).max(axis=(1, 2), keepdims=True), 1e-30)
    np.testing.assert_allclose(found / largest, wanted / largest, rtol=0, atol=4e-3)
