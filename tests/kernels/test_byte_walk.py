"""Where tokens lead in an automaton over bytes, against a walk in Python, by XLA and by the kernel step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import for_cuda

from pallas_kernels.byte_walk import byte_walk
from pallas_kernels.byte_walk.shapes import SHAPES

pytestmark = pytest.mark.usefixtures("unoptimised")
run = jax.jit(byte_walk, static_argnames="implementation")
STATES, VOCAB, LONGEST = 300, 17, 6


def tables(seed):
    rng = np.random.default_rng(seed)
    following = rng.integers(0, STATES, (STATES, 257)).astype(np.uint16)
    following[:, 200:] += np.uint16(65_535 - STATES)  # bytes that the tokens do not have: a state of the upper half is never read
    return following, rng.integers(0, 200, (VOCAB, LONGEST)).astype(np.uint8), rng.integers(0, LONGEST + 1, VOCAB).astype(np.int32)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 9))
def test_both_walk_as_python_does(seed, rows):
    following, data, length = tables(seed)
    rng = np.random.default_rng([seed, 1])
    states, tokens = rng.integers(0, STATES, rows).astype(np.int32), rng.integers(-3, VOCAB + 3, rows).astype(np.int32)
    expected = []
    for state, token in zip(states.tolist(), np.clip(tokens, 0, VOCAB - 1).tolist(), strict=True):
        for byte in data[token, : length[token]].tolist():
            state = int(following[state, byte])
        expected.append(state)
    for implementation in ("xla", "triton-interpret"):
        found = run(following, data, length, states, tokens, implementation=implementation)
        assert found.dtype == jnp.int32 and found.tolist() == expected, implementation


def test_states_of_the_upper_half_have_no_sign():
    following = np.full((65_536, 256), 65_535, np.uint16)
    data, length = np.zeros((1, 2), np.uint8) + np.uint8(255), np.asarray([2], np.int32)
    for implementation in ("xla", "triton-interpret"):
        found = run(following, data, length, np.zeros(1, np.int32), np.zeros(1, np.int32), implementation=implementation)
        assert found.tolist() == [65_535], implementation


@pytest.mark.parametrize("name", SHAPES)
def test_every_real_shape_lowers_for_cuda_as_one_kernel(name):
    shape, leaf = SHAPES[name], jax.ShapeDtypeStruct
    tables = leaf((shape.states, 257), jnp.uint16), leaf((shape.vocab, shape.longest), jnp.uint8), leaf((shape.vocab,), jnp.int32)
    text = for_cuda(run, *tables, *[leaf((shape.rows,), jnp.int32)] * 2, implementation="triton")
    assert text.count('name = "byte_walk"') == 1 and "gather" not in text


def test_what_does_not_fit_is_refused_by_name():
    following, data, length = tables(0)
    one = np.zeros(1, np.int32)
    for arrays in (
        (following[:, :255], data, length, one, one),
        (following, data[1:], length, one, one),
        (following, data, length, one, np.zeros(2, np.int32)),
        (following[0], data, length, one, one),
    ):
        with pytest.raises(ValueError, match=r"the arrays are .*; expected \[N, 256 or more\], \[V, L\], \[V\], \[B\] and \[B\]"):
            byte_walk(*arrays)
    with pytest.raises(ValueError, match="implementation is 'cuda'"):
        byte_walk(following, data, length, one, one, implementation="cuda")
