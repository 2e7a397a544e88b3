"""Acceptance: the longest prefix of drafts that the target chooses too."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import accept


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_coupled_keeps_the_common_prefix_of_every_pair_of_blocks(count):
    blocks = np.array(list(itertools.product(range(3), repeat=2 * count + 1)), np.int32)
    drafts, choices = blocks[:, :count], blocks[:, count:]
    expected = [next((i for i in range(count) if d[i] != c[i]), count) for d, c in zip(drafts, choices, strict=True)]
    accepted = jax.jit(accept.coupled)(jnp.asarray(drafts), jnp.asarray(choices))
    assert accepted.dtype == jnp.int32 and accepted.tolist() == expected
    assert count == 0 or set(expected) == set(range(count + 1))


def test_a_draft_that_no_target_chooses_ends_the_block():
    choices = jnp.asarray([[4, 5, 6, 7]], jnp.int32)
    for wrong, accepted in ((0, 0), (1, 1), (2, 2), (None, 3)):
        drafts = [-1 if i == wrong else 4 + i for i in range(3)]
        assert accept.coupled(jnp.asarray([drafts], jnp.int32), choices).tolist() == [accepted]
