"""Adaptive verification: which drafts of a round are worth a row of the target's pass, where there are fewer rows than drafts.

Every draft has a chance to survive: that it and all drafts before it are accepted. The rows of a round go to the drafts with the best
chances, whichever sequences they are of. Chances fall along a sequence, so that what is verified of its drafts is a prefix, and drafts that
are not verified are never accepted: with a rule that shares noise the text is the same. After DSpark (arXiv 2607.05147) and vLLM's
`enable_adaptive_verification`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.drafters.base import Drafts

# What a sequence that is not known yet is taken for: so many drafts that were tried, and so many of them that were accepted.
PRIOR_TRIED, PRIOR_KEPT = 16.0, 11.2
HALF_LIFE = 64.0  # rounds of a sequence after which what it tried counts half


def survival(drafts: Drafts, acceptance: jax.Array) -> jax.Array:
    """The chance that each draft and all before it are accepted: [B, K] float32, falling along K.

    By the drafter's confidence where it has one, else by what was accepted of the sequence's drafts so far. acceptance: [B, 2] float32,
    see `seen`. What is no token has no chance.
    """
    if drafts.confidence is None:
        rate = (acceptance[:, 1:] + PRIOR_KEPT) / (acceptance[:, :1] + PRIOR_TRIED)
        chances = jnp.broadcast_to(rate, drafts.tokens.shape)
    else:
        chances = jnp.clip(jnp.nan_to_num(drafts.confidence), 0.0, 1.0)
    return jnp.cumprod(jnp.where(drafts.tokens >= 0, chances, 0.0), axis=1)


def best_prefixes(survival: jax.Array, most: jax.Array, rows: int) -> jax.Array:
    """How many drafts of each sequence are verified, so that the sum of their chances is the largest: [B] int32.

    survival: [B, K] float32, falling along K. most: [B] int32, how many drafts of a sequence may be verified, below 0 where there is no
    sequence. rows (static): of the target's pass, at least one for each sequence, which is its anchor's. Of equal chances those of earlier
    drafts come first, then those of earlier sequences.
    """
    batch, count = survival.shape
    draft = jnp.arange(count, dtype=jnp.int32)[:, None]
    chances = jnp.where(draft < most[None, :], survival.T, -1.0).reshape(-1)
    index = jnp.arange(count * batch, dtype=jnp.int32)
    # Comparing all pairs is one kernel; sorting so few is several.
    ahead = (chances[None, :] > chances[:, None]) | ((chances[None, :] == chances[:, None]) & (index[None, :] < index[:, None]))
    left = rows - jnp.sum(most >= 0, dtype=jnp.int32)
    taken = (chances >= 0) & (jnp.sum(ahead, axis=1, dtype=jnp.int32) < left)
    return jnp.sum(taken.reshape(count, batch), axis=0, dtype=jnp.int32)


def seen(acceptance: jax.Array, verified: jax.Array, accepted: jax.Array) -> jax.Array:
    """What is known of each sequence's drafts after one more round: [B, 2] float32, how many were tried and how many of them accepted, of
    older rounds ever less. A draft after a rejected one was not tried, and one that was not verified was not either.

    acceptance: before the round, 0 for a new sequence. verified, accepted: [B] int32, of the round's drafts.
    """
    tried = jnp.stack([jnp.minimum(accepted + 1, verified), jnp.minimum(accepted, verified)], axis=1)
    return acceptance * jnp.float32(0.5 ** (1 / HALF_LIFE)) + tried.astype(jnp.float32)
