"""The mixture of experts against a loop over rows and choices in float64; the kernels, interpreted, and lowered for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import for_cuda

from jaxspec.model.layers import Linear
from jaxspec.model.moe import Experts, Router
from pallas_kernels import moe
from pallas_kernels.activation import Activation
from pallas_kernels.add_norm import add_norm
from pallas_kernels.moe import triton
from pallas_kernels.moe.shapes import SHAPES
from pallas_kernels.moe.triton import Blocks, Tiles

pytestmark = pytest.mark.usefixtures("unoptimised")

# Unoptimised code compiles in half the time, and computes the same.
OPTIONS = {"xla_backend_optimization_level": 0}
experts = jax.jit(moe.experts, static_argnames="implementation", compiler_options=OPTIONS)
route = jax.jit(moe.route, static_argnames=("top_k", "scale", "implementation"), compiler_options=OPTIONS)
group = jax.jit(triton.group, static_argnames=("experts", "interpret"), compiler_options=OPTIONS)
# Relative to the largest output.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}


def plain(x, gate_up, down, weights, ids):
    """[N, H] in float64, one row and choice at a time."""
    x, gate_up, down, weights = (np.asarray(a, np.float64) for a in (x, gate_up, down, weights))
    out = np.zeros(x.shape)
    for n, k in np.ndindex(*ids.shape):
        if ids[n, k] < len(down):
            gate, up = gate_up[ids[n, k]] @ x[n]
            gelu = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
            out[n] += weights[n, k] * (down[ids[n, k]] @ (gelu * up))
    return out


def problem(seed, rows, count, inner, hidden, ids, dtype="float32"):
    """x, gate_up_proj, down_proj and weights for given ids; experts that nobody chose are all NaN."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(jnp.dtype(dtype))

    gate_up, down = normal(count, 2, inner, hidden, scale=hidden**-0.5), normal(count, hidden, inner, scale=inner**-0.5)
    idle = np.setdiff1d(np.arange(count), ids)
    gate_up[idle], down[idle] = np.nan, np.nan
    return normal(rows, hidden), gate_up, down, normal(*ids.shape)


def choices(seed, rows, count, top_k, pool=None):
    """[rows, top_k] different experts a row, of the first `pool`."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(pool or count)[:top_k] for _ in range(rows)]).astype(np.int32)


def check(arguments, ids, dtype="float32", groups=None, implementation="triton-interpret", run=experts):
    want = plain(*arguments, ids)
    got = np.asarray(run(*arguments, ids, groups, implementation=implementation), np.float64)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE[dtype] * max(np.abs(want).max(), 1e-6))


# Rows, experts, inner, hidden, choices, and how many experts are ever chosen.
CASES = {
    "one row": (1, 6, 32, 48, 2, 6),
    "odd rows": (7, 5, 48, 80, 3, 5),
    "all rows to one expert, several tiles": (37, 5, 16, 32, 1, 1),
    "many pairs, few experts": (33, 12, 16, 32, 2, 3),
    "spread over all experts, none full": (12, 24, 16, 16, 4, 24),
    "widths of no block": (5, 3, 20, 24, 2, 3),
}


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
@pytest.mark.parametrize("case", CASES)
def test_equals_a_loop_over_rows(case, implementation):
    """An expert that nobody chose holds NaN: it must reach no output."""
    rows, count, inner, hidden, top_k, pool = CASES[case]
    ids = choices(1, rows, count, top_k, pool)
    arguments = problem(2, rows, count, inner, hidden, ids)
    if implementation == "xla":
        # Where there is no grouped product, XLA multiplies with every expert and masks: NaN would spread there.
        arguments = tuple(np.nan_to_num(a) for a in arguments)
    check(arguments, ids, implementation=implementation)


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
def test_experts_of_another_activation(implementation):
    ids = choices(15, 5, 4, 2)
    arguments = tuple(np.nan_to_num(a) for a in problem(16, 5, 4, 16, 32, ids))
    x, gate_up, down, weights = (np.asarray(a, np.float64) for a in arguments)
    gate, up = np.einsum("nh,egih->gnei", x, gate_up)
    act = np.minimum(gate / (1 + np.exp(-gate)), 0.3) * np.clip(up, -0.3, 0.3)
    each = np.einsum("nei,ehi->neh", act, down)
    wanted = (weights[..., None] * np.take_along_axis(each, ids[..., None], axis=1)).sum(1)
    got = jax.jit(functools.partial(moe.experts, activation=Activation("silu", 0.3), implementation=implementation))(*arguments, ids)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
@pytest.mark.parametrize("rows, count, top_k", [(1, 6, 6), (5, 9, 3), (20, 288, 8)])
def test_route_by_sigmoids_with_a_bias(rows, count, top_k, implementation):
    """The bias chooses, and plays no part in the weights; groups are those of the choice."""
    rng = np.random.default_rng(rows)
    scores, bias = rng.standard_normal((rows, count)).astype(np.float32), (0.5 * rng.standard_normal(count)).astype(np.float32)
    weights, ids, groups = route(scores, bias, top_k=top_k, scale=3.0, implementation=implementation)
    shares = 1 / (1 + np.exp(-scores.astype(np.float64)))
    want_ids = np.argsort(-(shares + bias), axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(ids, want_ids)
    assert count == top_k or (np.sort(want_ids) != np.sort(np.argsort(-shares, axis=1)[:, :top_k])).any(), "the bias changes nothing"
    chosen = np.take_along_axis(shares, want_ids, axis=1)
    np.testing.assert_allclose(weights, 3 * chosen / chosen.sum(1, keepdims=True), rtol=1e-5)
    if implementation != "xla" and rows <= triton.ALONE:
        check_groups(groups, want_ids, count)


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(dtype, implementation):
    ids = choices(3, 9, 4, 2)
    check(problem(4, 9, 4, 32, 64, ids, dtype), ids, dtype, implementation=implementation)


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
def test_ids_past_the_experts_stand_for_none(implementation):
    """Two halves of the experts, each with the other half's ids out of its range, sum to the whole."""
    ids = choices(5, 6, 8, 3)
    arguments = tuple(np.nan_to_num(a) for a in problem(6, 6, 8, 16, 32, ids))
    x, gate_up, down, weights = arguments
    total = np.zeros(x.shape, np.float64)
    for low in (0, 4):
        local = np.where((ids >= low) & (ids < low + 4), ids - low, 4).astype(np.int32)
        part = experts(x, gate_up[low : low + 4], down[low : low + 4], weights, local, implementation=implementation)
        total += np.asarray(part, np.float64)
    np.testing.assert_allclose(total, plain(*arguments, ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "tiles", [Tiles(32, Blocks(16, 32, 4, 2), Blocks(32, 16, 4, 2)), Tiles(16, Blocks(64, 64, 4, 2), Blocks(16, 64, 4, 2))]
)
def test_any_tiles_give_the_same(tiles):
    """Widths that blocks divide and widths that they do not, tiles of more rows and of fewer than an expert has."""
    ids = choices(7, 40, 3, 2)
    arguments = problem(8, 40, 3, 48, 80, ids)
    run = jax.jit(lambda *args: triton.outputs(*args, tiles=tiles, interpret=True).summed(), compiler_options=OPTIONS)
    check(arguments, ids, run=lambda *args, implementation: run(*args))


def check_groups(groups, ids, count):
    counts, pairs = (np.asarray(a) for a in groups)
    flat = ids.reshape(-1)
    np.testing.assert_array_equal(counts, np.bincount(flat[flat < count], minlength=count))
    for expert in range(count):
        np.testing.assert_array_equal(pairs[expert, : counts[expert]], np.flatnonzero(flat == expert))


@pytest.mark.parametrize(
    "rows, count, top_k, dtype", [(1, 6, 6, "float32"), (5, 6, 2, "float32"), (33, 128, 8, "bfloat16"), (70, 20, 3, "bfloat16")]
)
def test_route_equals_top_k(rows, count, top_k, dtype):
    """Scores in steps of 1/4 tie often, and so do -inf: the lower index comes first. Up to 64 rows come with their groups."""
    rng = np.random.default_rng(rows)
    scores = rng.integers(-8, 8, (rows, count)) / 4
    scores[0, 2:] = -np.inf
    scores = jnp.asarray(scores, dtype)
    scale = jnp.asarray(rng.uniform(0.5, 2, count), dtype)
    weights, ids, groups = route(scores, scale, top_k=top_k, implementation="triton-interpret")
    probabilities = np.asarray(jax.nn.softmax(scores.astype(jnp.float32), axis=-1), np.float64)
    want_ids = np.asarray(jax.lax.top_k(scores, top_k)[1])
    np.testing.assert_array_equal(ids, want_ids)
    top = np.take_along_axis(probabilities, want_ids, axis=1)
    want = top / top.sum(1, keepdims=True) * np.asarray(scale, np.float64)[want_ids]
    tolerance = 1e-6 if dtype == "float32" else 2.0**-8
    np.testing.assert_allclose(np.asarray(weights, np.float64), want, rtol=tolerance)
    other, other_ids, none = route(scores, scale, top_k=top_k, implementation="xla")
    assert none is None and weights.dtype == other.dtype == np.float32
    np.testing.assert_array_equal(other_ids, want_ids)
    np.testing.assert_allclose(np.asarray(other, np.float64), want, rtol=tolerance)
    assert (groups is not None) == (rows <= triton.ALONE)
    if groups is not None:
        check_groups(groups, want_ids, count)


def test_groups_of_any_ids():
    """More pairs than one step looks at, the same expert twice in a row, and ids past the experts."""
    ids = np.random.default_rng(9).integers(0, 9, (900, 3)).astype(np.int32)
    check_groups(group(ids, 7, interpret=True), ids, 7)


@pytest.mark.parametrize("scale", [None, 3.0])
def test_scores_of_nan_stay_in_their_row(scale):
    scores = np.asarray(np.random.default_rng(10).standard_normal((3, 6)), np.float32)
    scores[1, 2] = np.nan
    weights, ids, groups = route(scores, np.ones(6, np.float32), top_k=2, scale=scale, implementation="triton-interpret")
    assert np.isnan(weights[1]).all() and not np.isnan(np.asarray(weights)[[0, 2]]).any()
    arguments = problem(11, 3, 6, 16, 32, np.arange(6))[:3]
    out = np.asarray(experts(*arguments, weights, ids, groups, implementation="triton-interpret"))
    assert np.isnan(out[1]).all() and not np.isnan(out[[0, 2]]).any()


def test_the_layer_is_the_same_with_kernels():
    """Router and experts of a layer, with the kernels and without."""
    ids = np.arange(6)
    x, gate_up, down, _ = problem(12, 5, 6, 32, 64, ids)
    rng = np.random.default_rng(13)
    proj, scale = (np.asarray(rng.standard_normal(shape), np.float32) for shape in ((6, 64), (64,)))

    @functools.partial(jax.jit, static_argnames="implementation", compiler_options=OPTIONS)
    def layer(x, implementation):
        router = Router(Linear(proj), scale, np.ones(6, np.float32), 2)
        (_, scored) = add_norm(x, jnp.zeros_like(x), None, next_weights=(router.norm,), eps=1e-6, implementation=implementation)
        routed = Experts(gate_up, down).parts(x, *router(scored, implementation), implementation)
        return add_norm(x, ((routed, scale), (x, None)), scale, eps=1e-6, implementation=implementation)[0]

    want = layer(x, "xla")
    np.testing.assert_allclose(layer(x, "triton-interpret"), want, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(layer(x, "auto"), want)  # no GPU here


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.integers(0, 2**31), st.integers(1, 50), st.integers(1, 20), st.integers(1, 4), st.sampled_from([16, 32, 48, 80]),
    st.sampled_from([16, 32, 96]), st.sampled_from(["float32", "bfloat16"]),
)  # fmt: skip
def test_random_shapes(seed, rows, count, top_k, inner, hidden, dtype):
    top_k = min(top_k, count)
    ids = choices(seed, rows, count, top_k, np.random.default_rng(seed).integers(top_k, count + 1))
    check(problem(seed, rows, count, inner, hidden, ids, dtype), ids, dtype)


@pytest.mark.parametrize("name", SHAPES)
def test_lowers_for_cuda(name):
    shape = SHAPES[name]

    def layer(x, gate_up, down, scores, scale):
        weights, ids, groups = moe.route(scores, scale, shape.top_k, scale=shape.scale, implementation="triton")
        return moe.experts(x, gate_up, down, weights, ids, groups, activation=shape.activation, implementation="triton")

    text = for_cuda(jax.jit(layer), *shape.layer(jnp.bfloat16))
    kernels = ["moe_route", "moe_gate_up", "moe_down"] + ["moe_group"] * (shape.rows > triton.ALONE)
    assert text.count("__gpu$xla.gpu.triton") == len(kernels)
    assert all(text.count(f'name = "{kernel}"') == 1 for kernel in kernels)


def test_refusals():
    x, gate_up, down, weights = problem(14, 2, 3, 16, 32, np.arange(3)[None])
    ids = np.zeros((2, 1), np.int32)
    with pytest.raises(ValueError, match="implementation is 'cuda'; expected 'auto' or one of"):
        moe.experts(x, gate_up, down, weights, ids, implementation="cuda")
    with pytest.raises(ValueError, match="x, gate_up_proj and down_proj are float32, float16, float32; the kernel needs one dtype"):
        moe.experts(x, gate_up.astype(np.float16), down, weights, ids, implementation="triton")
    with pytest.raises(ValueError, match="x is float64; the kernel takes bfloat16, float16 and float32"):
        moe.experts(*(a.astype(np.float64) for a in (x, gate_up, down)), weights, ids, implementation="triton")
    with pytest.raises(ValueError, match="top_k is 4; expected 1 to 3, the number of experts"):
        moe.route(x[:, :3], weights[0], 4)
