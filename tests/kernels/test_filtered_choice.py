"""The filtered choice is that of its definition in NumPy, and both implementations agree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import triton_kernels

from pallas_kernels.filtered_choice import filtered_choice
from pallas_kernels.filtered_choice.shapes import SHAPES
from pallas_kernels.noise import gumbel

pytestmark = pytest.mark.usefixtures("unoptimised")
BOTH = ("xla", "triton-interpret")
run = jax.jit(filtered_choice, static_argnames=("count", "implementation"))


def defined(logits, keys, temperature, top_k, top_p, min_p, count, ids):
    """The choice of one row, in float64."""
    order = np.argsort(-logits, kind="stable")[:count]
    values = logits[order].astype(np.float64)
    left = values >= values[np.clip(top_k, 1, count) - 1]
    if temperature > 0:
        with np.errstate(divide="ignore"):
            left &= values >= values[0] + np.float64(temperature) * np.log(np.float64(min_p))
        weights = np.where(left, np.exp((values - values[0]) / np.float64(temperature)), 0)
        larger = np.array([weights[values > value].sum() for value in values])
        left &= (larger < np.float64(top_p) * weights.sum()) | (top_p >= 1)
    else:
        left = values == values[0]
    tokens = order if ids is None else ids[order]
    noise = np.asarray(gumbel(jnp.asarray(keys)[None], jnp.asarray(tokens, jnp.int32)[None])[0], np.float64)
    noisy = values / np.float64(temperature) + noise if temperature > 0 else values
    return tokens[np.argmax(np.where(left, noisy, -np.inf))]


@settings(max_examples=12)
@given(
    sequences=st.integers(1, 3),
    each=st.integers(1, 3),  # rows of a sequence
    vocab=st.integers(1, 3000),
    count=st.integers(1, 128),
    steps=st.sampled_from([0.0, 0.5]),  # logits in steps are often equal
    among=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_both_choose_as_defined(sequences, each, vocab, count, steps, among, seed):
    rng, rows = np.random.default_rng(seed), sequences * each
    logits = rng.standard_normal((rows, vocab)).astype(np.float32) * 3
    logits = np.where(rng.random(logits.shape) < 0.1, -np.inf, np.round(logits / steps) * steps if steps else logits).astype(np.float32)
    logits[:, rng.integers(vocab)] = 4  # one may be chosen
    count = min(count, vocab)
    keys = rng.integers(0, 2**32, (rows, 2), np.uint32)
    values = {
        "temperature": rng.choice([0, 0.5, 1, 2], sequences).astype(np.float32),
        "top_k": rng.integers(0, count + 3, sequences).astype(np.int32),
        "top_p": rng.choice([1, 0.95, 0.5, 0.1, 1e-9], sequences).astype(np.float32),
        "min_p": rng.choice([0, 0.01, 0.3, 1], sequences).astype(np.float32),
    }
    ids = rng.permutation(10 * vocab)[: rows * vocab].reshape(rows, vocab).astype(np.int32) if among else None
    of_rows = [{name: value[i // each] for name, value in values.items()} for i in range(rows)]
    wanted = [defined(logits[i], keys[i], **of_rows[i], count=count, ids=None if ids is None else ids[i]) for i in range(rows)]
    for implementation in BOTH:
        found = run(logits, keys, **values, count=count, ids=ids, implementation=implementation)
        np.testing.assert_array_equal(found, wanted, err_msg=implementation)
        assert found.dtype == jnp.int32


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_row_of_no_numbers_gets_some_token_and_leaves_the_others_alone(bad):
    logits = np.zeros((2, 300), np.float32)
    logits[0], logits[1, 7] = bad, 5
    one = np.ones(2, np.float32)
    for temperature, implementation in ((t, i) for t in (0, 1) for i in BOTH):
        arguments = np.zeros((2, 2), np.uint32), one * temperature, np.full(2, 1, np.int32), one * 0.5, one * 0
        found = np.asarray(run(logits, *arguments, count=20, implementation=implementation))
        assert 0 <= found[0] < 300 and found[1] == 7


@pytest.mark.parametrize("name", SHAPES)
def test_every_real_shape_lowers_for_cuda_as_three_kernels(name):
    shape = SHAPES[name]
    arguments = shape.arguments(lambda *size, dtype: jax.ShapeDtypeStruct(size, dtype))
    found = triton_kernels(run, *arguments, count=shape.count, implementation="triton")
    assert [kernel for kernel, *_ in found] == ["select", "top_candidates", "filtered_choice"]


def test_what_cannot_be_served_is_refused_by_name():
    arguments = SHAPES["a draft"].arguments(lambda *size, dtype: jax.ShapeDtypeStruct(size, dtype))
    for count in (0, 262_145):
        with pytest.raises(ValueError, match=rf"count is {count}; expected 1 .. 262144, the width of the logits"):
            jax.eval_shape(functools.partial(filtered_choice, count=count), *arguments)
    with pytest.raises(ValueError, match="implementation 'triton' cannot serve this: k is 129; the kernel gives at most 128"):
        jax.eval_shape(functools.partial(filtered_choice, count=129, implementation="triton"), *arguments)
