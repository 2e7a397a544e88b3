"""Prompts: computing the rows of known tokens, to decode after them (`prefill`) or to be told how likely they are (`score`)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.collectives import part, whole
from jaxspec.decode.rows import append_tokens, gather_slots, sound_choices
from jaxspec.decode.state import (
    DecodeState,
)
from jaxspec.drafters.base import Drafter, Observed
from jaxspec.model import paged_kv as paged
from jaxspec.model.gemma4 import Gemma4
from jaxspec.model.rows import Rows
from jaxspec.sampling.choice import PLAIN, Needs, choose
from jaxspec.sampling.logprobs import Logprobs, logprobs_of


def prefill(
    target: Gemma4,
    drafter: Drafter,
    state: DecodeState,
    slots: jax.Array,
    until: jax.Array | None = None,
    *,
    chunk: int,
    needs: Needs = PLAIN,
    attention: str = "auto",
    draft_attention: str = "auto",
) -> DecodeState:
    """Computes up to `chunk` (static) more rows of each slot's known tokens; a slot whose prompt is done chooses its first token.

    slots: [B] int32, ids >= slots stand for no sequence. until: [B] int32, how many rows a slot may have computed afterwards; None for
    all. A slot is ready to decode once computed == length - 1. A resumed sequence, which knows more than its prompt, has its anchor
    already and chooses nothing. needs: see `spec_step`.
    """
    rows, known, live = gather_slots(state, slots, needs, target)
    resumed = known > rows.prompt
    todo = known - resumed.astype(jnp.int32)
    todo = (todo if until is None else jnp.minimum(todo, until)) - rows.computed
    count = jnp.where(live, jnp.clip(todo, 0, chunk), 0)
    cache, ok = paged.reserve(state.cache, slots, jnp.where(count > 0, rows.computed + count, 0), chunk)
    count = jnp.where(ok, count, 0)
    at = rows.computed[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None, :]
    ids = state.tokens.at[slots[:, None], at].get(mode="clip")
    block = Rows(ids, rows.computed, count, slots)
    out, cache = target(block, cache, taps=drafter.taps, last_only=True, attention=attention)
    assert cache is not None
    computed = rows.computed + count
    if needs.choice_alone:
        raw, (first, most) = None, target.choose(out.hidden, computed[:, None], rows.sampling, needs.suppress_tokens, attention)
        sound = sound_choices(most, None, out.hidden)
    else:
        raw = target.unembed(out.hidden)
        edited = rows.edited(raw, needs)
        first = choose(edited, computed[:, None], dataclasses.replace(rows.sampling, tables=None))
        sound = sound_choices(jnp.max(edited, axis=-1), part(edited, None, rows.sampling.shard))
    chosen = (count > 0) & (computed == known)
    next_known = jnp.take_along_axis(state.tokens.at[slots].get(mode="clip"), computed[:, None], axis=1, mode="clip")
    anchor = jnp.where(chosen[:, None], first, next_known)[:, 0]
    observed = Observed(target, slots, ids, block.positions, out.hidden[:, 0], out.taps, count, anchor, draft_attention)
    state = dataclasses.replace(
        state,
        cache=cache,
        drafter=drafter.observe(state.drafter, observed),
        computed=state.computed.at[slots].set(computed, mode="drop"),
        starved=~ok,
    )
    return append_tokens(state, slots, rows, first, chosen.astype(jnp.int32), jnp.zeros_like(count), sound, raw, needs)


def score(
    target: Gemma4, state: DecodeState, slots: jax.Array, *, chunk: int, count: int, attention: str = "auto"
) -> tuple[DecodeState, Logprobs]:
    """Computes up to `chunk` more rows of each slot's known tokens, and the log-probabilities of the tokens after them.

    For sequences that are admitted to be read, not continued: the drafter sees nothing of them. slots: [B] int32, ids >= slots stand
    for no sequence. count (static): most likely tokens to report at each position. Returns the state and Logprobs of [B, chunk]: entry
    j is of position computed + 1 + j, as far as the token there is known.
    """
    rows, known, _ = gather_slots(state, slots, PLAIN, target)
    todo = jnp.where(slots < state.slots, jnp.clip(known - rows.computed, 0, chunk), 0)
    cache, ok = paged.reserve(state.cache, slots, jnp.where(todo > 0, rows.computed + todo, 0), chunk)
    todo = jnp.where(ok, todo, 0)
    at = rows.computed[:, None] + jnp.arange(chunk + 1, dtype=jnp.int32)[None, :]
    ids = state.tokens.at[slots[:, None], at].get(mode="clip")
    out, cache = target(Rows(ids[:, :-1], rows.computed, todo, slots), cache, attention=attention)
    assert cache is not None
    computed = state.computed.at[slots].add(todo, mode="drop")
    state = dataclasses.replace(state, cache=cache, computed=computed, starved=~ok)
    return state, logprobs_of(whole(target.unembed(out.hidden), target.shard), ids[:, 1:], count)
