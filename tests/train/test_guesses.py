"""What training makes of a drafter along a text is what the drafter does at inference, for every kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from small import KINDS, STEPS

from jaxspec import decode
from jaxspec.drafters.base import Target
from jaxspec.drafters.training import whole_rows
from jaxspec.sampling.choice import Sampling

PLACES = np.asarray([0, 1, 2, 3, 7, 8, 13], np.int32)  # the window is 8
LENGTH = int(PLACES[-1]) + STEPS + 2
pytestmark = pytest.mark.usefixtures("unoptimised")


@jax.jit
def drafts(model, drafter, requests):
    """The drafts of every slot behind a prefill, by the drafter's own `observe` and `draft`."""
    slots = jnp.arange(len(PLACES), dtype=jnp.int32)
    state = decode.init_state(model, drafter, slots=len(PLACES), max_len=LENGTH, num_draft_tokens=STEPS, page_size=8)
    state = decode.prefill(model, drafter, decode.admit(state, slots, requests), slots, chunk=LENGTH)
    anchor = jnp.take_along_axis(state.tokens, state.computed[:, None], axis=1)[:, 0]
    view = Target(model, state.cache, slots, anchor, state.computed)
    return drafter.draft(state.drafter, view, Sampling(state.seed, state.temperature), STEPS)[0]


@jax.jit
def guessed(model, drafter, ids, at):
    out, _ = model(whole_rows(ids), None, taps=drafter.taps)
    return list(drafter.guesses(model, out, ids, at, STEPS))


# Drafts one after the other, and all in one pass; test_losses.py goes through the guesses of other kinds.
FEW = ("mtp", "mtp-modules", "dflash")


@pytest.mark.parametrize("kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_guesses_along_a_drafters_own_drafts_are_those_drafts(kind):
    """Logits of every step, from places before, at and behind the window's end, in rows that go on with other tokens."""
    model, drafter, count = small.target(), small.drafter(kind), len(PLACES)
    rng = np.random.default_rng(0)
    texts = rng.integers(0, small.VOCAB, (count, LENGTH)).astype(np.int32)
    requests = decode.Requests(
        tokens=jnp.asarray(texts),
        length=jnp.asarray(PLACES + 2),  # the rows up to P are computed; token P + 1 is the anchor
        prompt=jnp.ones(count, jnp.int32),
        limit=jnp.full(count, LENGTH, jnp.int32),
        stop_ids=jnp.full((count, 16), -1, jnp.int32),
        seed=jnp.zeros((count, 2), jnp.uint32),
        temperature=jnp.zeros(count, jnp.float32),
    )
    found = drafts(model, drafter, requests)
    for row, place, tokens in zip(texts, PLACES, np.asarray(found.tokens), strict=True):
        row[place + 2 : place + 2 + STEPS] = tokens
    # A second place of every text, so that places must not be taken for each other.
    at = np.stack([PLACES, np.roll(PLACES, 1)], axis=1)
    steps = guessed(model, drafter, jnp.asarray(texts), jnp.asarray(at))
    assert len(steps) == STEPS
    for k, guess in enumerate(steps):
        expected, logits = np.asarray(found.logits[:, k]), np.asarray(guess.logits[:, 0])
        if guess.ids is not None:
            np.testing.assert_array_equal(np.asarray(found.ids[:, k]), np.broadcast_to(guess.ids, expected.shape))
        elif found.ids is not None:  # of a centroid head: the candidates that it chose
            logits = np.take_along_axis(logits, np.asarray(found.ids[:, k]), axis=1)
        np.testing.assert_allclose(logits, expected, atol=2e-4, err_msg=f"step {k + 1}")
    assert np.ptp(expected) > 0.1
