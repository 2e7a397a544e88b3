"""Log-probabilities of tokens: the target's own, before temperature, filters and edits (vLLM's `raw_logprobs`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.sampling.filters import CANDIDATES, top_candidates

MAX_LOGPROBS = 20  # most likely tokens that the loop can report with each token
ROWS = 256  # tokens of a sequence whose log-probabilities the state holds at a time, or as many as one round can add


@struct.dataclass
class Logprobs:
    """Of tokens [...]. chosen: [...] float32, their own. rank: [...] int32, from 1. top, ids: [..., N], the N most likely tokens."""

    chosen: jax.Array
    rank: jax.Array
    top: jax.Array
    ids: jax.Array


def ring_rows(num_draft_tokens: int) -> int:
    """Rows of a sequence's ring of log-probabilities: the token at position i has row i % rows."""
    return max(ROWS, num_draft_tokens + 1)


def logprobs_of(logits: jax.Array, tokens: jax.Array, count: int) -> Logprobs:
    """logits: [B, T, V] float32; tokens: [B, T] int32. Of a vocabulary smaller than `count` the rest is -inf.

    rank is how many tokens are at least as likely as the token itself.
    """
    norm = jax.nn.logsumexp(logits, axis=-1)
    own = jnp.take_along_axis(logits, tokens[..., None], axis=-1, mode="clip")
    wide = min(max(count, CANDIDATES), logits.shape[-1])  # as many as the filters ask for, so that both are found in one pass
    values, ids = top_candidates(logits, wide)
    pad = ((0, 0), (0, 0), (0, max(count - wide, 0)))
    values, ids = jnp.pad(values, pad, constant_values=-jnp.inf)[..., :count], jnp.pad(ids, pad)[..., :count]
    return Logprobs(own[..., 0] - norm, jnp.sum(logits >= own, axis=-1, dtype=jnp.int32), values - norm[..., None], ids)
