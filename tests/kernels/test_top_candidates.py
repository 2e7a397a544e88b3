"""The k largest logits are those that `jax.lax.top_k` gives, values and ids, without a sort of the vocabulary."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import for_cuda

from pallas_kernels.top_candidates import top_candidates, triton
from pallas_kernels.top_candidates.reference import tile_width
from pallas_kernels.top_candidates.shapes import SHAPES

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


@pytest.mark.parametrize("name", SHAPES)
def test_every_real_shape_lowers_for_cuda_as_three_kernels_without_a_sort(name):
    shape = SHAPES[name]
    logits = jax.ShapeDtypeStruct((shape.rows, shape.vocab), jnp.float32)
    text = for_cuda(run, logits, shape.k, implementation="triton")
    for kernel in ("select", "top_candidates", "order"):
        assert text.count(f'name = "{kernel}"') == 1
    assert "sort" not in text and "top_k" not in text


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
