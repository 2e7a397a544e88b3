"""Prompts: computing the rows of known tokens, to decode after them (`prefill`) or to be told how likely they are (`score`)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.collectives import full_logits
from jaxspec.decode.round import NO_DRAFTS, Round
from jaxspec.decode.rows import append_tokens, gather_slots, reserve_rows, target_choices
from jaxspec.decode.state import DecodeState, nobody_past
from jaxspec.drafters.base import Drafter, Observed
from jaxspec.model.rows import Inserted, Rows
from jaxspec.model.target import TargetModel
from jaxspec.sampling.automata import Automata
from jaxspec.sampling.choice import PLAIN
from jaxspec.sampling.logprobs import Logprobs, token_logprobs


def prefill(
    target: TargetModel,
    drafter: Drafter,
    state: DecodeState,
    slots: jax.Array,
    until: jax.Array | None = None,
    offset: jax.Array | None = None,
    after: jax.Array | None = None,
    inserted: Inserted | None = None,
    *,
    chunk: int,
    ends: bool = True,
    round: Round = NO_DRAFTS,
    automata: Automata | None = None,
) -> DecodeState:
    """Computes up to `chunk` (static) more rows of each slot's known tokens; a slot whose prompt is done chooses its first token.

    slots: [B] int32; ids below 0 and >= slots stand for no sequence. until: [B] int32, how many rows a slot may have computed afterwards;
    None for all. offset: [B] int32, by how many rows an entry's begin after those that are computed; None for 0. A slot may be there once,
    or several times, with 0, `chunk`, 2 * `chunk` and so on, if every layer has room for `chunk` rows (`paged_kv.has_room`), no ring has
    come round at the last of them, and the drafter is one that `takes_parts`. after: [B] int32, nothing is computed of a slot that has not
    just so many rows, since a call before this one lacked pages; None if any will do. inserted: images and parts of sounds among the rows
    that are computed; all rows of each, as `until` must see to. A slot is ready to decode once computed == length - 1. A resumed sequence,
    which knows more than its prompt, has its anchor already and chooses nothing. round: static, of the rounds that follow; how many tokens
    they draft, and how they accept them, makes no difference here. automata: as for `spec_step`. ends (static): whether a slot may come to
    the end of its known tokens. Without it, what only that needs is left out; for a drafter that `takes_parts`.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}, expected at least 1")
    if not len(slots):
        return state
    slots = nobody_past(state.slots, slots)
    rows = gather_slots(state, slots, round.needs, target, automata)
    resumed = rows.length > rows.prompt
    todo = rows.length - resumed.astype(jnp.int32)
    todo = (todo if until is None else jnp.minimum(todo, until)) - rows.computed
    most = chunk if offset is None else chunk * len(slots)
    offset = jnp.zeros_like(todo) if offset is None else offset
    wanted = rows.live if after is None else rows.live & (rows.computed == after)
    count = jnp.where(wanted, jnp.clip(todo - offset, 0, chunk), 0)
    together = jnp.sum(jnp.where(slots[:, None] == slots[None, :], count[None, :], 0), axis=1)  # by all entries of a slot
    state, _ = reserve_rows(state, slots, rows.computed, jnp.where(offset == 0, together, 0), most)
    count = jnp.where(state.starved, 0, count)
    start, computed = rows.computed + offset, rows.computed + jnp.where(state.starved, 0, together)
    end = start + count
    at = start[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None, :]
    ids = state.tokens.at[slots[:, None], at].get(mode="clip")
    block = Rows(ids, start, count, slots, inserted=inserted)
    out, cache = target(block, state.cache, taps=drafter.taps, wanted="last" if ends else "none", attention=round.attention)
    assert cache is not None
    chosen, last, choices = (count > 0) & (end == rows.length), end == computed, None
    anchor = jnp.take_along_axis(state.tokens.at[slots].get(mode="clip"), end[:, None], axis=1, mode="clip")[:, 0]
    if ends:
        choices, hidden = target_choices(target, rows, out.hidden, end[:, None], round), out.hidden[:, 0]
        assert choices.tokens is not None
        anchor = jnp.where(chosen, choices.tokens[:, 0], anchor)
    else:  # more rows of each slot come in a later call
        hidden, last = jnp.zeros((len(slots), target.config.hidden_size), target.dtype), jnp.zeros_like(last)
    observed = Observed(target, slots, ids, block.positions, hidden, out.taps, count, anchor, round.draft_attention, last)
    state = dataclasses.replace(
        state,
        cache=cache,
        drafter=drafter.observe(state.drafter, observed),
        computed=state.computed.at[slots].set(computed, mode="drop"),
    )
    if choices is None:
        return state
    assert choices.tokens is not None
    none = jnp.zeros_like(count)
    return append_tokens(state, slots, rows, choices.tokens, chosen.astype(jnp.int32), none, choices, round.needs)[0]


def score(
    target: TargetModel, state: DecodeState, slots: jax.Array, *, chunk: int, count: int, attention: str = "auto"
) -> tuple[DecodeState, Logprobs]:
    """Computes up to `chunk` more rows of each slot's known tokens, and the log-probabilities of the tokens after them.

    For sequences that are admitted to be read, not continued: the drafter sees nothing of them. slots: as for `prefill`. count (static):
    most likely tokens to report at each position. Returns the state and Logprobs of [B, chunk]: entry j is of position computed + 1 + j,
    as far as the token there is known.
    """
    slots = nobody_past(state.slots, slots)
    rows = gather_slots(state, slots, PLAIN, target)
    todo = jnp.where(slots < state.slots, jnp.clip(rows.length - rows.computed, 0, chunk), 0)
    state, todo = reserve_rows(state, slots, rows.computed, todo, chunk)
    at = rows.computed[:, None] + jnp.arange(chunk + 1, dtype=jnp.int32)[None, :]
    ids = state.tokens.at[slots[:, None], at].get(mode="clip")
    out, cache = target(Rows(ids[:, :-1], rows.computed, todo, slots), state.cache, attention=attention)
    assert cache is not None
    state = dataclasses.replace(state, cache=cache, computed=state.computed.at[slots].add(todo, mode="drop"))
    return state, token_logprobs(full_logits(target.unembed(out.hidden), target.shard), ids[:, 1:], count)
