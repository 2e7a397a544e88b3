"""The k largest logits are those that `jax.lax.top_k` gives, values and ids, without a sort of the vocabulary. What is chosen
among them is what the definition of the filters and the noise says."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import for_cuda

from pallas_kernels.noise import gumbel, row_keys
from pallas_kernels.top_candidates import choose, top_candidates, triton
from pallas_kernels.top_candidates.reference import tile_width
from pallas_kernels.top_candidates.shapes import SHAPES, filters

pytestmark = pytest.mark.usefixtures("unoptimised")
BOTH = ("xla", "triton-interpret")
run = jax.jit(top_candidates, static_argnames=("k", "implementation"))

KINDS = {
    "spread": lambda rng, shape: rng.standard_normal(shape) * 5,
    "few values": lambda rng, shape: rng.integers(-2, 3, shape),
    "all equal": lambda rng, shape: np.zeros(shape),
    "mostly filtered": lambda rng, shape: np.where(rng.random(shape) < 0.95, -np.inf, rng.standard_normal(shape)),
    "any bits": lambda rng, shape: rng.integers(-(2**31), 2**31, shape, dtype=np.int32).view(np.float32),
}


def sorted_by_numpy(logits, k):
    order = np.argsort(-logits.astype(np.float64), axis=1, kind="stable")[:, :k]
    return np.take_along_axis(logits, order, axis=1), order


def check(logits, k):
    values, ids = sorted_by_numpy(logits, k)
    for implementation in BOTH:
        found, where = run(logits, k, implementation=implementation)
        np.testing.assert_array_equal(where, ids, err_msg=implementation)
        np.testing.assert_array_equal(found, values, err_msg=implementation)
        assert found.dtype == jnp.float32 and where.dtype == jnp.int32


@settings(max_examples=10)
@given(
    rows=st.integers(1, 5),
    vocab=st.integers(1, 3000),
    part=st.floats(0, 1),
    kind=st.sampled_from(sorted(KINDS)),
    seed=st.integers(0, 2**32 - 1),
)
def test_both_give_the_first_k_in_order(rows, vocab, part, kind, seed):
    logits = np.asarray(KINDS[kind](np.random.default_rng(seed), (rows, vocab)), np.float32)
    logits = np.where(np.isnan(logits), np.float32(0), logits)
    check(logits + np.float32(0), k=max(1, round(part * min(vocab, 128))))  # + 0: minus zero, which NumPy holds equal to zero, is gone


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_row_at_one_shape(kind):
    rng = np.random.default_rng(5)
    for _ in range(4):
        logits = np.asarray(KINDS[kind](rng, (3, 1000)), np.float32)
        check(np.where(np.isnan(logits), np.float32(1), logits) + np.float32(0), k=37)


def test_signed_zeros_infinities_and_nan_stand_where_jax_puts_them():
    logits = np.array([[0.0, -0.0, 0.0, -0.0, 1.0, np.nan, -np.inf, np.inf, 0.0, -1.0, -3.0, -2.0]], np.float32)
    values, ids = jax.lax.top_k(logits, 9)
    for implementation in BOTH:
        found, where = run(logits, 9, implementation=implementation)
        np.testing.assert_array_equal(where, ids)
        np.testing.assert_array_equal(np.asarray(found).view(np.int32), np.asarray(values).view(np.int32))


def test_equal_values_in_many_tiles_go_to_the_lowest_ids():
    # More tiles share the largest value than are selected; the first ones must be, and the last of them only in part.
    logits = np.zeros((2, 2000), np.float32)
    logits[0, 7::11] = 3.0
    logits[1, 5::400] = 2.0
    check(logits, k=20)


def test_selection_finds_the_set_of_top_k_in_ascending_order():
    rng = np.random.default_rng(3)
    for size, k in ((1, 1), (33, 33), (100, 7), (2048, 32)):
        values = rng.integers(0, 50, (3, size)).astype(np.float32)
        found = jax.jit(functools.partial(triton.select_largest, k=k, interpret=True))(jnp.asarray(values))
        assert np.array_equal(found, np.sort(sorted_by_numpy(values, k)[1], axis=1)), (size, k)


def test_tiles_make_the_two_stages_about_equally_wide():
    assert tile_width(262_144, 64) == 64 and tile_width(262_144, 128) == 64 and tile_width(262_144, 1) == 512
    for vocab in (1, 2, 100, 262_144, 1_000_000):
        for k in (1, 20, 128):
            if k <= vocab:
                width = tile_width(vocab, k)
                assert width & (width - 1) == 0 and vocab / k <= width**2 < 4 * vocab / k


def chosen_by_numpy(logits, ids, positions, seed, temperature, top_k, top_p, min_p, k, softcap):
    """Row by row, the token ids that come near the choice among the k largest logits."""
    logits, ids = (x.reshape(positions.size, -1) for x in (logits, ids))
    logits, places = sorted_by_numpy(logits, k)
    ids, logits = np.take_along_axis(ids, places, axis=1), np.float32(30) * np.tanh(logits / np.float32(30)) if softcap else logits
    noise = np.asarray(gumbel(row_keys(jnp.repeat(seed, positions.shape[1], 0), jnp.ravel(positions)), ids))
    found = []
    for row, (values, names, extra) in enumerate(zip(logits, ids, noise, strict=True)):
        request = row // positions.shape[1]
        most, t, at_least = values[0], float(temperature[request]), max(float(min_p[request]), 1e-300)
        if t == 0:
            found.append({int(names[values == most].min())})
            continue
        kept = values >= max(values[max(1, int(top_k[request])) - 1], most + t * np.log(at_least))
        weights = np.where(kept, np.exp((values.astype(np.float64) - most) / t), 0)
        nucleus, before = float(top_p[request]) * weights.sum(), np.array([weights[values > value].sum() for value in values])
        sure, maybe = (kept & (before < nucleus * (1 + slack)) for slack in (-1e-5, 1e-5))
        scores = values / np.float32(t) + extra
        found.append(set(names[maybe & (scores >= np.where(sure, scores, -np.inf).max() - 1e-4)].tolist()))
    return found


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("kind", ["spread", "few values", "mostly filtered"])
@pytest.mark.parametrize("named", [False, True])
def test_the_choice_among_the_largest(kind, named, implementation):
    """Of rows with and without a temperature and each filter, logits that are tokens' or candidates'; a softcap makes some equal."""
    rng = np.random.default_rng(11)
    requests, each, vocab, k = 12, 3, 700, 128
    logits = np.asarray(KINDS[kind](rng, (requests, each, vocab)), np.float32)
    logits[..., 40:44] += 2000  # exactly 30 with a softcap
    ids = np.broadcast_to(np.arange(vocab, dtype=np.int32), logits.shape)
    ids = np.asarray(rng.permuted(ids * 3 + 1, axis=-1), np.int32) if named else ids
    positions = jnp.asarray(rng.integers(0, 9000, (requests, each)), jnp.int32)
    seed = jnp.asarray(rng.integers(0, 2**32, (requests, 2)), jnp.uint32)
    at = np.arange(requests)
    temperature, top_k = (jnp.asarray(np.where(at % 4 == 0, 0, 4), jnp.float32), jnp.asarray(rng.integers(0, 129, requests), jnp.int32))
    top_p = jnp.asarray(np.where(at % 3 == 1, rng.uniform(0, 1, requests), 1), jnp.float32)
    min_p = jnp.asarray(np.where(at % 3 == 2, rng.uniform(0, 1, requests), 0), jnp.float32)
    settings = positions, seed, temperature, top_k, top_p, min_p
    run = jax.jit(choose, static_argnames=("k", "softcap", "implementation"))
    for softcap in (None, 30.0):
        named_by = jnp.asarray(ids) if named else None
        found, most = run(jnp.asarray(logits), *settings, k=k, ids=named_by, softcap=softcap, implementation=implementation)
        near = chosen_by_numpy(logits, ids, *settings, k, softcap)
        assert all(token in tokens for token, tokens in zip(np.ravel(found).tolist(), near, strict=True))
        assert np.mean([len(tokens) == 1 for tokens in near]) > 0.9
        largest = logits.max(-1)
        np.testing.assert_allclose(most, 30 * np.tanh(largest / 30) if softcap else largest, rtol=1e-6)


def test_a_choice_is_always_a_token_and_a_broken_row_shows():
    logits = np.zeros((1, 5, 300), np.float32)
    logits[0, 0] = -np.inf
    logits[0, 1, 7], logits[0, 2, 7], logits[0, 3], logits[0, 4, 7] = np.nan, np.inf, np.nan, -np.nan
    settings = np.zeros((1, 5), np.int32), np.zeros((1, 2), np.uint32), np.ones(1, np.float32), np.full(1, 5, np.int32)
    for top_p, min_p in ((1.0, 0.0), (1e-46, 0.0), (0.5, 0.5)):
        filters = np.full(1, top_p, np.float32), np.full(1, min_p, np.float32)
        for implementation in BOTH:
            found, most = choose(jnp.asarray(logits), *map(jnp.asarray, (*settings, *filters)), k=128, implementation=implementation)
            shown = slice(4 if implementation == "triton-interpret" else 5)  # the kernel may miss a NaN whose sign is set
            assert ((found >= 0) & (found < 300)).all() and not np.isfinite(most[:, shown]).any()


@pytest.mark.parametrize("implementation", BOTH)
def test_what_is_suppressed_stays_so_under_a_softcap(implementation):
    """Also where a vocabulary has fewer tokens than are looked at, so that it is among these."""
    logits = np.full((1, 50, 60), -90, np.float32)
    logits[..., 3:], logits[0, 49] = -np.inf, -np.inf
    settings = np.arange(50, dtype=np.int32)[None], np.zeros((1, 2), np.uint32), np.ones(1, np.float32), np.full(1, 60, np.int32)
    filters = np.ones(1, np.float32), np.zeros(1, np.float32)
    arrays = map(jnp.asarray, (logits, *settings, *filters))
    found, most = choose(*arrays, k=60, softcap=30.0, implementation=implementation)
    assert (found[0, :49] < 3).all() and most[0, 49] == -np.inf


@pytest.mark.parametrize("name", SHAPES)
def test_every_real_shape_lowers_for_cuda_as_three_kernels_without_a_sort(name):
    shape = SHAPES[name]
    logits = jax.ShapeDtypeStruct((shape.rows, shape.vocab), jnp.float32)
    text = for_cuda(run, logits, shape.k, implementation="triton")
    for kernel in ("select", "top_candidates", "order"):
        assert text.count(f'name = "{kernel}"') == 1
    assert "sort" not in text and "top_k" not in text


def test_a_choice_lowers_for_cuda_as_three_kernels():
    """XLA adds the largest values of tiles alone: the noise, the filters and the order of the candidates are the last kernel's."""
    run = jax.jit(functools.partial(choose, k=128, softcap=30.0, implementation="triton"))
    text = for_cuda(run, jax.ShapeDtypeStruct((32, 1, 262_144), jnp.float32), *jax.eval_shape(lambda: filters(32)))
    for kernel in ("select", "top_candidates", "filtered_choice"):
        assert text.count(f'name = "{kernel}"') == 1
    assert not {"sort", "top_k", "cumsum", "log", "tanh"} & set(re.findall(r"(?:stablehlo|chlo)\.(\w+)", text))


def test_what_cannot_be_served_is_refused_by_name():
    logits = jax.ShapeDtypeStruct((2, 4000), jnp.float32)

    def trace(k, implementation="auto", logits=logits):
        return jax.eval_shape(functools.partial(top_candidates, k=k, implementation=implementation), logits)

    for k in (0, 4001):
        with pytest.raises(ValueError, match=rf"k is {k}; expected 1 .. 4000, the width of the logits"):
            trace(k)
    with pytest.raises(ValueError, match="implementation is 'sort'; expected 'auto' or one of"):
        trace(4, "sort")
    with pytest.raises(ValueError, match="implementation 'triton' cannot serve this: k is 129; the kernel gives at most 128"):
        trace(129, "triton")
    wide = jax.ShapeDtypeStruct((1, 2**28), jnp.float32)
    with pytest.raises(ValueError, match="k = 4 of 268435456 values makes a stage of 32768; the kernel holds at most 16384"):
        trace(4, "triton", wide)
    assert [x.shape for x in trace(129)] == [(2, 129), (2, 129)]
