"""What prefill and decode have in common: the fields of a call's slots, and appending the tokens that were chosen."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.collectives import Shard, whole, without
from jaxspec.decode.state import (
    FAILED,
    FULL_LENGTH,
    RUNNING,
    STOPPED,
    DecodeState,
)
from jaxspec.drafters.base import Drafts
from jaxspec.model.gemma4 import Gemma4
from jaxspec.sampling import logit_edits as edits
from jaxspec.sampling.choice import Needs, Sampling
from jaxspec.sampling.logprobs import MAX_LOGPROBS, logprobs_of


@struct.dataclass
class SlotRows:
    """The per-slot fields that a call reads, gathered for its B slots."""

    computed: jax.Array
    prompt: jax.Array
    limit: jax.Array
    length: jax.Array
    stop_ids: jax.Array
    rounds: jax.Array
    sampling: Sampling

    def edited(self, logits: jax.Array, needs: Needs, drafts: Drafts | None = None) -> jax.Array:
        """The logits that tokens are chosen by. logits: [B, K + 1, V], the target's after the known tokens and after each draft."""
        if needs.suppress_tokens:
            logits = without(logits, needs.suppress_tokens, self.sampling.shard)
        if self.sampling.tables is None:
            return logits
        none = jnp.zeros((logits.shape[0], 0), jnp.int32)
        return self.sampling.tables.verified(whole(logits, self.sampling.shard), none if drafts is None else drafts.tokens)


def gather_slots(state: DecodeState, slots: jax.Array, needs: Needs, target: Gemma4) -> tuple[SlotRows, jax.Array, jax.Array]:
    """(fields, known tokens, whether the slot holds a running sequence) of a list of slots."""

    def of(field: jax.Array) -> jax.Array:
        return field.at[slots].get(mode="clip")

    live = (slots < state.slots) & (of(state.status) == RUNNING)
    computed, prompt, limit, length, stop_ids, rounds = map(
        of, (state.computed, state.prompt, state.limit, state.length, state.stop_ids, state.rounds)
    )
    sampling = Sampling(of(state.seed), of(state.temperature), shard=target.shard)
    if needs.scope != "plain":
        sampling = dataclasses.replace(sampling, filters=dataclasses.replace(jax.tree.map(of, state.filters), scope=needs.scope))
    if needs.edits:
        asked = jax.tree.map(of, state.edits)
        tables = edits.tables(asked, of(state.tokens), prompt, length, stop_ids, target.config.vocab_size)
        sampling = dataclasses.replace(sampling, tables=tables)
    return SlotRows(computed, prompt, limit, length, stop_ids, rounds, sampling), length, live


def append_tokens(
    state: DecodeState,
    slots: jax.Array,
    rows: SlotRows,
    choices: jax.Array,
    count: jax.Array,
    accepted: jax.Array,
    sound: jax.Array,
    raw: jax.Array | None,
    needs: Needs,
) -> DecodeState:
    """Appends the first `count` choices of each slot, cut after a stop id and at the limit. A slot of which a choice that is not
    `sound` is left has failed, and is cut before it.

    choices: [B, T] int32; count: [B] int32, 0 appends nothing; the first `accepted` of them were drafts. sound: [B, T] bool. raw:
    [B, T, V], the logits that log-probabilities are reported of, or None where none are.
    """
    row = jnp.arange(choices.shape[1], dtype=jnp.int32)[None, :]
    stops = jnp.any(choices[:, :, None] == rows.stop_ids[:, None, :], axis=-1)
    first_stop = jnp.min(jnp.where(stops, row, choices.shape[1]), axis=1)
    count = jnp.minimum(jnp.minimum(count, first_stop + 1), jnp.maximum(rows.limit - rows.length, 0))
    bad = jnp.min(jnp.where(sound, choices.shape[1], row), axis=1)
    failed, count = bad < count, jnp.minimum(count, bad)
    length = rows.length + count
    status = jnp.where(first_stop < count, STOPPED, jnp.where(length >= rows.limit, FULL_LENGTH, RUNNING))
    status = jnp.where(failed, FAILED, status)
    changed = jnp.where(failed | (count > 0), slots, state.slots)
    at = jnp.where(row < count[:, None], rows.length[:, None] + row, state.tokens.shape[1])
    if needs.logprobs is not None:
        assert raw is not None
        slot = jnp.where(row < count[:, None], slots[:, None], state.slots)
        ring = jax.tree.map(
            lambda kept, new: kept.at[slot, (rows.length[:, None] + row) % kept.shape[1]].set(new, mode="drop"),
            state.logprobs,
            logprobs_of(whole(raw, rows.sampling.shard), choices, MAX_LOGPROBS),
        )
        state = dataclasses.replace(state, logprobs=ring)
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[slots[:, None], at].set(choices, mode="drop"),
        from_draft=state.from_draft.at[slots[:, None], at].set(row < accepted[:, None], mode="drop"),
        length=state.length.at[changed].set(length, mode="drop"),
        status=state.status.at[changed].set(status, mode="drop"),
    )


def sound_choices(most: jax.Array, shard: Shard | None, hidden: jax.Array | None = None) -> jax.Array:
    """Whether tokens can be chosen by logits of which these are the largest: [B, T] bool. A NaN anywhere makes the largest one a NaN
    (a kernel may miss it: then the hidden states [B, T, H] tell); single tokens may be at -inf, not all. shard: of the logits, if they
    are of one."""
    bad, some = jnp.isnan(most) | jnp.isposinf(most), most > -jnp.inf
    if hidden is not None:
        bad |= ~jnp.all(jnp.isfinite(hidden), axis=-1)
    if shard is not None:
        bad, some = jax.lax.psum(jnp.stack([bad, some]).astype(jnp.int32), shard.axis) > 0
    return some & ~bad
