"""Residual sums and their norms: the reference against plain formulas in float64, and the kernel against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import for_cuda

from pallas_kernels.add_norm import Stepwise, add_norm
from pallas_kernels.add_norm.bench import inputs
from pallas_kernels.add_norm.shapes import SHAPES, Shape
from pallas_kernels.moe import Choices

pytestmark = pytest.mark.usefixtures("unoptimised")

EPS = 1e-3  # large enough for a wrong one to show

# Widths beside, at and below a power of two; a sum of one output and of several; no norm, one and two.
SMALL = [Shape(3, 96, scaled=True), Shape(2, 37, norms=0), Shape(5, 64, parts=2, norms=2), Shape(1, 50, parts=3, scaled=True)]


def normed(x, weight):
    return x if weight is None else x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def formula(x, y, weight, scalar, next_weights):
    x, y, weight, scalar, next_weights = jax.tree.map(lambda a: np.asarray(a, np.float64), (x, y, weight, scalar, next_weights))
    if isinstance(y, tuple):
        y = sum(normed(*part) for part in y)
    x = (x + (y if weight is None else normed(y, weight))) * (1 if scalar is None else scalar)
    return (x, *(normed(x, w) for w in next_weights))


# XLA may leave out a rounding between operations that it fuses, unless told not to.
@functools.partial(jax.jit, static_argnames="implementation", compiler_options={"xla_allow_excess_precision": False})
def run(x, y, weight, scalar, next_weights, implementation):
    return add_norm(x, y, weight, scalar=scalar, next_weights=next_weights, eps=EPS, implementation=implementation)


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
@pytest.mark.parametrize("shape", SMALL)
def test_sums_and_norms_as_the_formulas_have_them(shape, implementation):
    arguments = inputs(shape, jnp.float32)
    found, wanted = run(*arguments, implementation), formula(*arguments)
    assert len(found) == len(wanted) == 1 + shape.norms
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [*SMALL, Shape(4, 1536, scaled=True), Shape(5, 2816, parts=2, scaled=True), Shape(3, 5376, norms=2)])
def test_the_kernel_rounds_where_the_reference_does(shape):
    arguments = inputs(shape, jnp.bfloat16)
    for a, b in zip(*(run(*arguments, name) for name in ("triton-interpret", "xla")), strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("dtype, limit", [(jnp.float32, 2e-6), (jnp.bfloat16, 0.05)])
@pytest.mark.parametrize("parts", [1, 2])
def test_what_has_no_norm_is_added_as_it_is(parts, dtype, limit):
    """One output or two, the second in parts, and the norm of the sum. The kernel rounds where the reference does."""
    x, y, _, scalar, next_weights = inputs(Shape(3, 96, parts=parts), dtype)
    if parts > 1:
        y = (y[0][0], None), (jnp.stack([y[1][0].astype(jnp.float32)] * 2), None)
    found = [run(x, y, None, scalar, next_weights, name) for name in ("xla", "triton-interpret")]
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    plain = y if parts == 1 else y[0][0].astype(jnp.float32) + y[1][0].sum(0)
    for a, b in zip(found[0], formula(x, plain, None, scalar, next_weights), strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=limit, atol=limit)


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
@pytest.mark.parametrize("parts", [1, 3])
def test_an_output_may_come_in_parts(parts, implementation):
    """Their sum is rounded once, before it is normed: the same numbers as of the whole output."""
    rng = np.random.default_rng(1)
    for shape in (Shape(4, 70, scaled=True), Shape(4, 70, parts=2)):
        x, y, *rest = inputs(shape, jnp.bfloat16)
        # Multiples of 1/64 below 4: sums of three are exact in float32, and need rounding to bfloat16.
        split = jnp.asarray(rng.integers(-256, 256, (parts, *x.shape)) / 64, jnp.float32)
        whole = jnp.sum(split, axis=0).astype(jnp.bfloat16)
        (given, wanted) = (split, whole) if shape.parts == 1 else (((part, y[0][1]), y[1]) for part in (split, whole))
        for a, b in zip(run(x, given, *rest, implementation), run(x, wanted, *rest, "xla"), strict=True):
            assert a.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_an_output_may_lie_with_each_rows_experts():
    """The weighted sum of their outputs is rounded before it is normed; where there is no expert, what is stored counts for nothing."""
    x, ((dense, first), (_, second)), *rest = inputs(Shape(4, 70, parts=2), jnp.bfloat16)
    rng = np.random.default_rng(2)
    ids, weights = jnp.asarray(rng.integers(0, 6, (4, 3)), jnp.int32).at[1, 2].set(6), jnp.asarray(rng.uniform(0, 1, (4, 3)), jnp.float32)
    out = jnp.asarray(rng.standard_normal((12, 70)), jnp.bfloat16).at[5].set(jnp.nan)
    terms = np.asarray(weights, np.float64)[..., None] * np.nan_to_num(np.asarray(out, np.float64)).reshape(4, 3, 70)
    whole = jnp.asarray(terms.sum(1)).astype(jnp.bfloat16)
    for implementation in ("xla", "triton-interpret"):
        found = run(x, ((dense, first), (Choices(out, weights, ids, 6), second)), *rest, implementation)
        for a, b in zip(found, run(x, ((dense, first), (whole, second)), *rest, "xla"), strict=True):
            np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_norm_may_be_rounded_step_by_step(dtype):
    """The norm, its product with the weight and that by the factor, which is itself not rounded."""
    x, y, weight, *_ = inputs(Shape(3, 70), dtype)
    scale = jnp.asarray(np.random.default_rng(3).uniform(0.5, 2, 70), dtype)
    for implementation in ("xla", "triton-interpret"):
        total, found = run(x, y, weight, None, (Stepwise(scale, 70**-0.5),), implementation)
        wide = np.asarray(total, np.float64)
        steps = jnp.asarray(wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS), jnp.float32).astype(dtype)
        steps = (steps.astype(jnp.float32) * scale.astype(jnp.float32)[None]).astype(dtype)
        np.testing.assert_allclose(found, (steps.astype(jnp.float32) * 70**-0.5).astype(dtype), rtol=1e-6 if dtype == jnp.float32 else 0)


def test_axes_before_the_last_are_rows():
    x, y, weight, scalar, next_weights = inputs(Shape(6, 20, parts=2, scaled=True), jnp.float32)
    flat = run(x, y, weight, scalar, next_weights, "xla")
    x, y = jax.tree.map(lambda a: a.reshape(2, 3, 20) if a.ndim == 2 else a, (x, y))
    for implementation in ("xla", "triton-interpret"):
        for a, b in zip(run(x, y, weight, scalar, next_weights, implementation), flat, strict=True):
            np.testing.assert_allclose(a, b.reshape(2, 3, 20), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_it_lowers_for_cuda_as_one_kernel(name):
    arguments = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), inputs(SHAPES[name], jnp.bfloat16))
    text = for_cuda(run, *arguments, "triton")
    assert text.count("__gpu$xla.gpu.triton") == text.count('name = "add_norm"') == 1


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="implementation is 'cuda'; expected 'auto' or one of 'xla', 'triton'"):
        run(*inputs(SMALL[0], jnp.float32), "cuda")
