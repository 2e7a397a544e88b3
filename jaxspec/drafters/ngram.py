"""N-gram lookup: no model guesses, texts that are known already do.

The last n tokens are looked for earlier in the sequence, in the prompt and in what was generated, and in an index of what other sequences
said; what followed them there is the guess. The longest n wins; of equals the sequence itself, then the latest occurrence. The sequence
alone is vLLM's `ngram_gpu` proposer; the index is what its suffix decoding has (arXiv 2411.04975), as arrays on the device instead of
trees on the host. Two things differ from `ngram_gpu`. Where the occurrence lies so near the end that fewer than K tokens follow it, the
guess goes on with itself, as a text that repeats does, where vLLM repeats the last token. And the shortest match is one token by default,
where vLLM's is five: a round computes K + 1 rows whether or not there is a guess, so a poor guess costs no more than none.

The index is a ring of windows. Whenever a sequence grows past a multiple of the stride, the window that ends there goes into the ring, in
place of the oldest. Windows overlap by as much as a match and a guess take, so that each place of a text is looked up in exactly one.
Longer steps than a stride, those of prompts, leave only their last window: answers are what jobs repeat. All sequences of a data shard
share an index.

With an acceptance rule that draws noise of its own, a sequence that samples looks in itself alone. What another one of the same seed has
said tells of the noise by which the rule keeps guesses, and a guess that depends on that noise changes the distribution of the text.
"""

from __future__ import annotations

import dataclasses
import numbers
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafters.base import Drafts, Observed, Target
from jaxspec.drafters.kind import kind_without_weights
from jaxspec.sampling.choice import Sampling

STRIDE = 8  # tokens between two windows of a sequence, where a round guesses fewer


@struct.dataclass
class NGramState:
    """tokens: [slots, max_len] int32, each slot's sequence, anchor included. windows: [1, N, longest + stride + K] int32, the index, with
    -1 for places before a text; oldest: [1] int32, the window that is replaced next. The axis of length 1 is no slot: see
    `base.Drafter.init`. stride: tokens between two windows of a sequence."""

    tokens: jax.Array
    windows: jax.Array
    oldest: jax.Array
    stride: int = struct.field(pytree_node=False)


@struct.dataclass
class NGram:
    """Looks up the last `longest` to `shortest` tokens (vLLM's prompt_lookup_max and prompt_lookup_min). Has no weights.

    windows: how many the index holds, for each of which a sequence grew by 8 tokens, or by K + 1 where that is more; 0 looks in the
    sequence alone.
    Raises ValueError unless 1 <= shortest <= longest and windows >= 0, TypeError for what is no integer.
    """

    longest: int = struct.field(pytree_node=False, default=5)
    shortest: int = struct.field(pytree_node=False, default=1)
    windows: int = struct.field(pytree_node=False, default=8192)
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())

    watched: ClassVar[bool] = False  # text that does not repeat itself gives it nothing to go by
    abstains: ClassVar[bool] = True  # where it finds nothing it guesses nothing
    takes_parts: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("longest", "shortest", "windows"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise TypeError(f"{name} of n-gram lookup is {value!r} of type {type(value).__name__}, expected an integer")
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"n-grams of {self.shortest} to {self.longest} tokens were asked for; expected 1 <= shortest <= longest")
        if self.windows < 0:
            raise ValueError(f"an index of {self.windows} windows was asked for; expected at least 0")

    def init(self, slots: int, max_len: int, num_draft_tokens: int) -> NGramState:
        stride = max(STRIDE, num_draft_tokens + 1)
        windows = jnp.full((1, self.windows, self.longest + stride + num_draft_tokens), -1, jnp.int32)
        return NGramState(jnp.zeros((slots, max_len), jnp.int32), windows, jnp.zeros((1,), jnp.int32), stride)

    def observe(self, state: NGramState, rows: Observed) -> NGramState:
        nowhere = state.tokens.shape[1]
        row = jnp.arange(rows.ids.shape[1], dtype=jnp.int32)[None, :]
        at = jnp.where(row < rows.committed[:, None], rows.positions, nowhere)
        newest = jnp.where(rows.committed > 0, rows.positions[:, 0] + rows.committed, nowhere)
        tokens = state.tokens.at[rows.slots[:, None], at].set(rows.ids, mode="drop")
        state = dataclasses.replace(state, tokens=tokens.at[rows.slots, newest].set(rows.anchor, mode="drop"))
        return self.indexed(state, rows) if self.windows else state

    def indexed(self, state: NGramState, rows: Observed) -> NGramState:
        """The state with a window of each sequence that grew past a multiple of the stride."""
        (slots, size), (_, count, width) = state.tokens.shape, state.windows.shape
        before = rows.positions[:, 0] + 1  # tokens, the anchor among them
        end = jnp.minimum(before + rows.committed, size) // state.stride * state.stride
        grown = (rows.committed > 0) & (rows.slots < slots) & (end > before)
        at = end[:, None] - width + jnp.arange(width, dtype=jnp.int32)[None, :]
        found = state.tokens.at[rows.slots[:, None], jnp.maximum(at, 0)].get(mode="clip")
        place = jnp.cumsum(grown.astype(jnp.int32)) - 1
        into = jnp.where(grown, jnp.mod(state.oldest + place, count), count)
        windows = state.windows.at[0, into].set(jnp.where(at >= 0, found, -1), mode="drop")
        return dataclasses.replace(state, windows=windows, oldest=jnp.mod(state.oldest + place[-1:] + 1, count))

    def draft(self, state: NGramState, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, NGramState]:
        tokens, length = jnp.take(state.tokens, target.slots, axis=0, mode="clip"), target.length + 1
        guess, matched = lookup(tokens, length, num_draft_tokens, self.longest)
        if self.windows:
            index = state.windows[0], state.oldest
            other, more = lookup_windows(*index, tokens, length, num_draft_tokens, self.longest, state.stride)
            if sampling.weighed:
                more = jnp.where(sampling.temperature[:, None] > 0, 0, more)
            guess, matched = jnp.where(more > matched, other, guess), jnp.maximum(more, matched)
        return Drafts(jnp.where(matched >= self.shortest, guess, -1)), state  # -1 is no guess


def lookup(tokens: jax.Array, length: jax.Array, count: int, longest: int) -> tuple[jax.Array, jax.Array]:
    """The `count` tokens that follow the best earlier occurrence of each sequence's end, [B, count] int32, and how many tokens, `longest`
    at most, it has in common with the end: [B, 1] int32.

    tokens: [B, L] int32, of which the first `length` ([B] int32, at least 1) are known.
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
    return jnp.take_along_axis(tokens, at, axis=1, mode="clip"), best


def lookup_windows(
    windows: jax.Array, oldest: jax.Array, tokens: jax.Array, length: jax.Array, count: int, longest: int, stride: int
) -> tuple[jax.Array, jax.Array]:
    """The same in an index. windows: [N, longest + stride + at least count] int32. oldest: [1] int32: those behind it are newer and newer,
    round to the one before it."""
    number = windows.shape[0]
    matched = jnp.zeros((tokens.shape[0], number, stride), jnp.int32)
    whole = jnp.ones(matched.shape, bool)
    for i in range(1, longest + 1):
        suffix = jnp.take_along_axis(tokens, length[:, None] - i, axis=1, mode="clip")
        whole &= (windows[None, :, longest - i : longest - i + stride] == suffix[..., None]) & (length >= i)[:, None, None]
        matched += whole.astype(jnp.int32)
    best = jnp.max(matched, axis=(1, 2))[:, None]
    age = jnp.mod(jnp.arange(number, dtype=jnp.int32) - oldest, number)[None, :, None]
    place = age * stride + jnp.arange(stride, dtype=jnp.int32)[None, None, :]
    latest = jnp.max(jnp.where(matched == best[..., None], place, 0), axis=(1, 2))
    window = jnp.take(windows, jnp.mod(latest // stride + oldest, number), axis=0)
    at = longest + (latest % stride)[:, None] + jnp.arange(count, dtype=jnp.int32)[None, :]
    return jnp.take_along_axis(window, at, axis=1), best


KIND = kind_without_weights("ngram", NGram)
