"""What changes logits before the temperature: penalties, biases, allowed ids, bad words, and stop ids before min_tokens.

Meanings and order are vLLM's (`vllm/v1/worker/gpu/sample`): allowed ids, bias, stop ids before min_tokens, repetition, frequency and
presence penalty, bad words. For token i of a verified block, the drafts before it count as part of the output.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

NOBODY = 2**31 - 1  # pads lists of token ids; scatters drop it
MAX_IDS = 1024  # most ids in a request's logit_bias, and in its allowed_token_ids
MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 64, 16


@struct.dataclass
class Edits:
    """What B requests ask for. Lists of ids are padded with NOBODY."""

    repetition: jax.Array  # [B] float32; 1 changes nothing
    frequency: jax.Array  # [B] float32; 0 changes nothing
    presence: jax.Array  # [B] float32; 0 changes nothing
    min_tokens: jax.Array  # [B] int32
    bias_ids: jax.Array  # [B, 1024] int32
    bias: jax.Array  # [B, 1024] float32, of bias_ids
    allowed: jax.Array  # [B, 1024] int32; a row without ids allows every id
    bad_words: jax.Array  # [B, 64, 16] int32; a word's tokens stand at the end of its row, after -1


@struct.dataclass
class Tables:
    """The edits of B sequences, with what they need to know of the sequences."""

    edits: Edits
    bias: jax.Array  # [B, V] float32; -inf for ids that are not allowed
    seen: jax.Array  # [B, V] bool: whether an id is in the prompt or the output
    count: jax.Array  # [B, V] int32: how often an id is in the output
    recent: jax.Array  # [B, 15] int32: the last tokens of the output, after -2 if it has fewer
    prompt: jax.Array  # [B] int32: tokens of the prompt
    produced: jax.Array  # [B] int32: tokens of the output
    stop_ids: jax.Array  # [B, N] int32, padded with -1

    def applied(self, logits: jax.Array, ids: jax.Array | None = None, positions: jax.Array | None = None) -> jax.Array:
        """Logits with biases and penalties, for rows that see no drafts; bad words are left out.

        logits: [B, T, C] float32; ids: [B, T, C] int32, their token ids, or None for the whole vocabulary. positions: [B, T] int32, of the
        tokens that they choose, so that no stop id comes before min_tokens; None leaves stop ids alone.
        """
        if ids is None:
            value = self._value(logits, self.bias[:, None], self.seen[:, None], self.count[:, None])
        else:
            value = self._value(logits, _at(self.bias, ids), _at(self.seen, ids), _at(self.count, ids))
        if positions is None:
            return value
        stops = self._early_stops(positions - self.prompt[:, None])
        if ids is not None:
            return jnp.where(jnp.any(ids[..., None] == stops[:, :, None, :], axis=-1), -jnp.inf, value)
        slot, at = jnp.arange(len(value))[:, None, None], jnp.arange(value.shape[1])[None, :, None]
        return value.at[slot, at, stops].set(-jnp.inf, mode="drop")

    def verified(self, logits: jax.Array, drafts: jax.Array, first: jax.Array | None = None) -> jax.Array:
        """Logits with all edits, for rows of a block whose row i chooses the token after drafts 0 .. i - 1.

        logits: [B, T, V] float32; drafts: [B, K] int32, of which ids below 0 are none. first: [B] int32, which row of its block is the
        first of the T; None for 0.
        """
        (batch, count), edited = drafts.shape, self.applied(logits)
        slot, at = jnp.arange(batch)[:, None, None], jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :, None]
        row = at if first is None else at + first[:, None, None]
        if count:
            # The drafts that a row sees have other counts than `applied` took. We edit their logits again.
            earlier = jnp.arange(count, dtype=jnp.int32)[None, None, :] < row
            ids = jnp.where(earlier & (drafts >= 0)[:, None, :], drafts[:, None, :], NOBODY)
            again = jnp.sum(ids[:, :, :, None] == ids[:, :, None, :], axis=-1, dtype=jnp.int32)
            raw = jnp.take_along_axis(logits, ids, axis=-1, mode="clip")
            value = self._value(raw, _at(self.bias, ids), jnp.ones(ids.shape, bool), _at(self.count, ids) + again)
            edited = edited.at[slot, at, ids].set(value, mode="drop")
        stops = self._early_stops(self.produced[:, None] + row[..., 0])
        known = jnp.concatenate([self.recent, drafts], axis=1)
        window = row + jnp.arange(MAX_BAD_WORD_TOKENS - 1, dtype=jnp.int32)[None, None, :]
        before = known[slot, jnp.broadcast_to(window, (batch, *window.shape[1:]))][:, :, None, :]
        prefix, last = self.edits.bad_words[:, None, :, :-1], self.edits.bad_words[:, None, :, -1]
        complete = jnp.all((prefix == -1) | (prefix == before), axis=-1) & (last >= 0)
        forbidden = jnp.concatenate([stops, jnp.where(complete, last, NOBODY)], axis=-1)
        return edited.at[slot, at, forbidden].set(-jnp.inf, mode="drop")

    def _early_stops(self, at: jax.Array) -> jax.Array:
        """The stop ids that may not be token `at`, [B, T] int32, of the output, and NOBODY for others: [B, T, N]."""
        early = (at < self.edits.min_tokens[:, None])[..., None] & (self.stop_ids >= 0)[:, None, :]
        return jnp.where(early, self.stop_ids[:, None, :], NOBODY)

    def _value(self, logits: jax.Array, bias: jax.Array, seen: jax.Array, count: jax.Array) -> jax.Array:
        repetition, frequency, presence = (x[:, None, None] for x in (self.edits.repetition, self.edits.frequency, self.edits.presence))
        logits = logits + bias
        logits = jnp.where(seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits)
        return logits - frequency * count.astype(jnp.float32) - presence * (count > 0).astype(jnp.float32)


def defaults(count: int) -> Edits:
    """The edits of `count` requests that ask for none."""
    zero = jnp.zeros((count,), jnp.float32)
    return Edits(
        repetition=zero + 1,
        frequency=zero,
        presence=zero,
        min_tokens=jnp.zeros((count,), jnp.int32),
        bias_ids=jnp.full((count, MAX_IDS), NOBODY, jnp.int32),
        bias=jnp.zeros((count, MAX_IDS), jnp.float32),
        allowed=jnp.full((count, MAX_IDS), NOBODY, jnp.int32),
        bad_words=jnp.full((count, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, jnp.int32),
    )


def tables(edits: Edits, tokens: jax.Array, prompt: jax.Array, length: jax.Array, stop_ids: jax.Array, vocab_size: int) -> Tables:
    """The tables of B sequences.

    tokens: [B, L] int32, of which the first `length` are known and the first `prompt` are the prompt. prompt, length: [B] int32.
    stop_ids: [B, N] int32, padded with -1.
    """
    slot = jnp.arange(tokens.shape[0])[:, None]
    at = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    known = jnp.where(at < length[:, None], tokens, NOBODY)
    output = jnp.where(at >= prompt[:, None], known, NOBODY)
    shape = (tokens.shape[0], vocab_size)
    free = jnp.all(edits.allowed == NOBODY, axis=1, keepdims=True)
    bias = jnp.broadcast_to(jnp.where(free, 0.0, -jnp.inf), shape).at[slot, edits.allowed].set(0.0, mode="drop")
    last = length[:, None] + jnp.arange(1 - MAX_BAD_WORD_TOKENS, 0, dtype=jnp.int32)[None, :]
    recent = jnp.take_along_axis(tokens, jnp.maximum(last, 0), axis=1, mode="clip")
    return Tables(
        edits,
        bias=bias.at[slot, edits.bias_ids].add(edits.bias, mode="drop"),
        seen=jnp.zeros(shape, bool).at[slot, known].set(True, mode="drop"),
        count=jnp.zeros(shape, jnp.int32).at[slot, output].add(1, mode="drop"),
        recent=jnp.where(last >= prompt[:, None], recent, -2),
        prompt=prompt,
        produced=length - prompt,
        stop_ids=stop_ids,
    )


def _at(table: jax.Array, ids: jax.Array) -> jax.Array:
    """table: [B, V], ids: [B, T, C] -> [B, T, C]."""
    return jnp.take_along_axis(table[:, None, :], ids, axis=-1, mode="clip")
