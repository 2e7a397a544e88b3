"""Log-probabilities of tokens, by the target's logits before temperature, filters and edits (vLLM's `raw_logprobs`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.sampling.filters import CANDIDATES, best_candidates

MAX_LOGPROBS = 20  # how many likely tokens the loop can report with each token
RING_ROWS = 256  # how many tokens' log-probabilities the state holds for a sequence, at least


@struct.dataclass
class Logprobs:
    """The log-probabilities of tokens, and the most likely tokens in their places."""

    chosen: jax.Array  # [...] float32: of the token itself
    rank: jax.Array  # [...] int32: how many tokens are at least as likely, itself included
    top: jax.Array  # [..., N] float32: of the N most likely tokens, best first
    ids: jax.Array  # [..., N] int32: those tokens


def ring_rows(num_draft_tokens: int) -> int:
    """The length of a sequence's ring of log-probabilities, in which the token at position i has row i % length.

    It has room for what one round can add.
    """
    return max(RING_ROWS, num_draft_tokens + 1)


def token_logprobs(logits: jax.Array, tokens: jax.Array, count: int) -> Logprobs:
    """The log-probabilities of tokens, with the `count` most likely ones. If the vocabulary is smaller, the rest of `top` is -inf.

    logits: [B, T, V] float32; tokens: [B, T] int32.
    """
    norm = jax.nn.logsumexp(logits, axis=-1)
    own = jnp.take_along_axis(logits, tokens[..., None], axis=-1, mode="clip")
    wide = min(max(count, CANDIDATES), logits.shape[-1])  # as wide as the filters' search, so that XLA does both in one
    values, ids = best_candidates(logits, wide)
    pad = ((0, 0), (0, 0), (0, max(count - wide, 0)))
    values, ids = jnp.pad(values, pad, constant_values=-jnp.inf)[..., :count], jnp.pad(ids, pad)[..., :count]
    return Logprobs(own[..., 0] - norm, jnp.sum(logits >= own, axis=-1, dtype=jnp.int32), values - norm[..., None], ids)
