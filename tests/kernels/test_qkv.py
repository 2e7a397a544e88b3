"""Heads of a layer: norms, rotation and storing, against plain formulas in float64, and the kernel against the XLA reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import for_cuda

from pallas_kernels.qkv import Pages, qkv

pytestmark = pytest.mark.usefixtures("unoptimised")


def normed(x, weight=None):
    out = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
    return out if weight is None else out * weight


def turned(x, angles):
    """x: [..., D], a rotation of pairs (d, d + D / 2) by angles [..., D / 2]: a product of complex numbers."""
    half = x.shape[-1] // 2
    out = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)
    return np.concatenate([out.real, out.imag], -1)


def case(seed, *, batch=3, rows=5, kv=2, group=2, owned=2, dim=16, key_dims=None, page=4, width=3, dtype=np.float32):
    """(arguments, static settings) with the pools full of NaN."""
    rng = np.random.default_rng(seed)
    key_dims = dim if key_dims is None else key_dims
    total = batch * width + 2
    pages = Pages(
        jnp.full((total, page, kv, key_dims), jnp.nan, dtype),
        jnp.full((total, page, kv, dim), jnp.nan, dtype),
        jnp.asarray(rng.permutation(total)[: batch * width].reshape(batch, width), jnp.int32),
        jnp.asarray(rng.integers(0, 60, batch), jnp.int32),
        jnp.asarray([rows, 0, rows - 2][:batch], jnp.int32),
    )
    projected = jnp.asarray(rng.normal(size=(batch, rows, kv, group + owned, dim)), dtype)
    angles = rng.normal(size=(batch, rows, dim // 2)).astype(np.float32)
    weights = [jnp.asarray(1 + 0.1 * rng.normal(size=dim), dtype) for _ in range(2)]
    settings = {"group": group, "key_dims": key_dims, "eps": 1e-6}
    return (projected, jnp.cos(angles), jnp.sin(angles), *weights, pages), settings, angles


@functools.partial(jax.jit, static_argnames=("group", "key_dims", "eps", "value_norm", "dtype", "implementation"))
def run(*arguments, **settings):
    return qkv(*arguments, **settings)


IMPLEMENTATIONS = ["xla", "triton-interpret"]
VARIANTS = [{}, {"owned": 1, "key_dims": 6}, {"group": 5, "dim": 24, "owned": 1}, {"rows": 12, "kv": 3, "width": 4}]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_as_the_formulas_have_them(variant, implementation):
    """With fresh keys and values, and stored in pages: the same numbers at their places, and nothing anywhere else."""
    (projected, cos, sin, q_weight, k_weight, pages), settings, angles = case(0, **variant)
    x, group, dim = np.asarray(projected, np.float64), settings["group"], projected.shape[-1]
    angles = angles[:, :, None].astype(np.float64)
    wanted_q = turned(normed(x[..., :group, :], np.asarray(q_weight)), angles[:, :, :, None])
    wanted_k, wanted_v = turned(normed(x[..., group, :], np.asarray(k_weight)), angles), normed(x[..., -1, :])
    half = settings["key_dims"] // 2
    wanted_k = np.concatenate([wanted_k[..., :half], wanted_k[..., dim // 2 : dim // 2 + half]], -1)

    q, k, v = run(projected, cos, sin, q_weight, k_weight, **settings, implementation=implementation)
    for found, wanted in ((q, wanted_q), (k, wanted_k), (v, wanted_v)):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)

    again, k_pool, v_pool = run(projected, cos, sin, q_weight, k_weight, pages, **settings, implementation=implementation)
    np.testing.assert_array_equal(again, q)
    for pool, empty, rows in ((k_pool, pages.k, wanted_k), (v_pool, pages.v, wanted_v)):
        expected = np.array(empty)
        for b, (start, count) in enumerate(zip(np.asarray(pages.start), np.asarray(pages.count), strict=True)):
            for t in range(count):
                at = start + t
                expected[pages.table[b, at // 4 % pages.table.shape[1]], at % 4] = rows[b, t]
        np.testing.assert_allclose(pool, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_queries_alone(implementation):
    """A layer that owns no keys and values."""
    (projected, cos, sin, q_weight, _, _), settings, angles = case(1, owned=0)
    q, k, v = run(projected, cos, sin, q_weight, **settings, implementation=implementation)
    wanted = turned(normed(np.asarray(projected, np.float64), np.asarray(q_weight)), angles[:, :, None, None].astype(np.float64))
    np.testing.assert_allclose(q, wanted, rtol=1e-5, atol=1e-5)
    assert k is None and v is None


def test_the_kernel_rounds_where_the_reference_does():
    arguments, settings, _ = case(2, dtype=jnp.bfloat16)
    found, wanted = (run(*arguments, **settings, implementation=name) for name in reversed(IMPLEMENTATIONS))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_projections_may_come_in_parts(implementation):
    """Their sum is rounded once: the same numbers as of the whole projection."""
    (projected, *rest), settings, _ = case(5, dtype=jnp.bfloat16)
    parts = jnp.asarray(np.random.default_rng(5).integers(-256, 256, (3, *projected.shape)) / 64, jnp.float32)
    whole = jnp.sum(parts, axis=0).astype(jnp.bfloat16)
    for a, b in zip(*(run(p, *rest, **settings, implementation=implementation) for p in (parts, whole)), strict=True):
        assert a.dtype == b.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_without_a_norm_and_weights_wider_than_the_heads(implementation):
    """Values are stored as they are. Norm weights of float32 stay so beside bfloat16 heads, which are rounded after the norm alone."""
    (projected, *rest, pages), settings, _ = case(6, group=12, dtype=jnp.bfloat16)
    cos, sin, q_weight, k_weight = (a.astype(jnp.float32) for a in rest)
    q_weight = q_weight + 2.0**-10  # lost in bfloat16
    settings = {**settings, "value_norm": False, "dtype": jnp.bfloat16, "implementation": implementation}
    q, k, v = run(projected, cos, sin, q_weight, k_weight, **settings)
    assert q.dtype == k.dtype == v.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(v, np.float32), np.asarray(projected[..., -1, :], np.float32))
    wide = run(projected.astype(jnp.float32), cos, sin, q_weight, k_weight, **{**settings, "dtype": None, "implementation": "xla"})
    assert wide[0].dtype == jnp.float32
    for a, b in ((q, wide[0]), (k, wide[1])):
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=2**-7, atol=2**-7)
    _, _, pool = run(projected, cos, sin, q_weight, k_weight, pages, **settings)
    page, at = pages.table[0, int(pages.start[0]) // 4 % 3], int(pages.start[0]) % 4
    np.testing.assert_array_equal(np.asarray(pool[page, at], np.float32), np.asarray(v[0, 0], np.float32))


def test_it_lowers_for_cuda_in_place():
    arguments, settings, _ = case(3, dim=512, group=8, owned=1, key_dims=128, page=64, dtype=jnp.bfloat16)
    text = for_cuda(run, *arguments, **settings, implementation="triton")
    assert text.count('name = "qkv"') == 1 and text.count("output_operand_alias") >= 1


def test_an_unknown_implementation_is_refused():
    arguments, settings, _ = case(4)
    with pytest.raises(ValueError, match="implementation is 'cuda'; expected 'auto' or one of 'xla', 'triton'"):
        qkv(*arguments, **settings, implementation="cuda")
