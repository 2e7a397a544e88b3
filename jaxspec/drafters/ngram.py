"""N-gram lookup: no model guesses, the sequence's own past does.

The last n tokens are looked for earlier in the sequence, in the prompt and in what was generated; what followed them there is the
guess. The longest n wins, then the latest occurrence, as in vLLM's `ngram_gpu` proposer. Two things differ from it. Where the
occurrence lies so near the end that fewer than K tokens follow it, the guess goes on with itself, as a text that repeats does, where
vLLM repeats the last token. And the shortest match is one token by default, where vLLM's is five: a round computes K + 1 rows whether
or not there is a guess, so a poor guess costs no more than none.
"""

from __future__ import annotations

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafters.base import Drafts, Observed, Target
from jaxspec.drafters.kind import kind_without_weights
from jaxspec.sampling.choice import Sampling


@struct.dataclass
class NGramState:
    """tokens: [slots, max_len] int32, each slot's sequence, anchor included."""

    tokens: jax.Array


@struct.dataclass
class NGram:
    """Looks up the last `longest` to `shortest` tokens (vLLM's prompt_lookup_max and prompt_lookup_min). Has no weights.

    Raises ValueError unless 1 <= shortest <= longest.
    """

    longest: int = struct.field(pytree_node=False, default=5)
    shortest: int = struct.field(pytree_node=False, default=1)
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())

    watched: ClassVar[bool] = False  # text that does not repeat itself gives it nothing to go by

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"n-grams of {self.shortest} to {self.longest} tokens were asked for; expected 1 <= shortest <= longest")

    def init(self, slots: int, max_len: int, num_draft_tokens: int) -> NGramState:
        return NGramState(jnp.zeros((slots, max_len), jnp.int32))

    def observe(self, state: NGramState, rows: Observed) -> NGramState:
        nowhere = state.tokens.shape[1]
        row = jnp.arange(rows.ids.shape[1], dtype=jnp.int32)[None, :]
        at = jnp.where(row < rows.committed[:, None], rows.positions, nowhere)
        newest = jnp.where(rows.committed > 0, rows.positions[:, 0] + rows.committed, nowhere)
        tokens = state.tokens.at[rows.slots[:, None], at].set(rows.ids, mode="drop")
        return NGramState(tokens.at[rows.slots, newest].set(rows.anchor, mode="drop"))

    def draft(self, state: NGramState, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, NGramState]:
        tokens = jnp.take(state.tokens, target.slots, axis=0, mode="clip")
        return Drafts(lookup(tokens, target.length + 1, num_draft_tokens, self.longest, self.shortest)), state


def lookup(tokens: jax.Array, length: jax.Array, count: int, longest: int, shortest: int) -> jax.Array:
    """The `count` tokens that follow the best earlier occurrence of each sequence's end, or -1, which no target chooses.

    tokens: [B, L] int32, of which the first `length` ([B] int32, at least 1) are known. Returns [B, count] int32.
    """
    size = tokens.shape[1]
    place = jnp.arange(size, dtype=jnp.int32)[None, :]
    # matched[b, j]: how many tokens right before place j equal the sequence's last ones, up to `longest`.
    matched, whole = jnp.zeros_like(tokens), place < length[:, None]
    for i in range(1, min(longest, size) + 1):
        suffix = jnp.take_along_axis(tokens, length[:, None] - i, axis=1, mode="clip")
        whole &= (jnp.roll(tokens, i, axis=1) == suffix) & (place >= i)
        matched += whole.astype(jnp.int32)
    # The longest match, and of equals the latest: places are compared once the match lengths are.
    best = jnp.max(matched, axis=1, keepdims=True)
    start = jnp.max(jnp.where(matched == best, place, 0), axis=1, keepdims=True)
    ahead = jnp.arange(count, dtype=jnp.int32)[None, :]
    at = start + jnp.mod(ahead, jnp.maximum(length[:, None] - start, 1))
    return jnp.where(best >= shortest, jnp.take_along_axis(tokens, at, axis=1, mode="clip"), -1)


KIND = kind_without_weights("ngram", NGram)
