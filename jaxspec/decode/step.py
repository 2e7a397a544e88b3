"""The draft/verify loop: pure functions of (weights, state), to be jitted, donated and sharded by the caller.

Of every slot, `length` tokens are known and the target has computed the first `computed` of them. While a sequence decodes,
computed == length - 1: the last known token, the anchor, has no K and V yet. One `spec_step` drafts K tokens after the anchor, runs
the target on [anchor, drafts], keeps the drafts that the acceptance rule accepts (by default those that the target chooses too),
and adds the target's own next choice.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxspec.collectives import part
from jaxspec.decode.accept import COUPLED, Rule
from jaxspec.decode.rows import append_tokens, gather_slots, sound_choices
from jaxspec.decode.state import DecodeState
from jaxspec.drafters.base import Drafter, Observed, Target
from jaxspec.model import paged_kv as paged
from jaxspec.model.gemma4 import Gemma4
from jaxspec.model.rows import Rows, take_row
from jaxspec.sampling.choice import PLAIN, Needs


def spec_step(
    target: Gemma4,
    drafter: Drafter,
    state: DecodeState,
    slots: jax.Array,
    *,
    num_draft_tokens: int,
    accept: Rule = COUPLED,
    needs: Needs = PLAIN,
    attention: str = "auto",
    draft_attention: str = "auto",
) -> DecodeState:
    """One round for each running slot of the list: draft, verify, accept, append, observe.

    slots: [B] int32, ids >= slots stand for no sequence; slots that are not ready to decode stay as they are. accept: the rule by
    which drafts become tokens. needs: what the slots' requests need; what it leaves out is not applied. Both static.
    """
    rows, known, live = gather_slots(state, slots, needs, target)
    live &= rows.computed == known - 1
    start, room = rows.computed, state.tokens.shape[1] - rows.computed
    count = jnp.where(live, jnp.minimum(room, num_draft_tokens + 1), 0)
    cache, ok = paged.reserve(state.cache, slots, jnp.where(live, start + count, 0), num_draft_tokens + 1)
    live, count = live & ok, jnp.where(ok, count, 0)

    anchor = state.tokens.at[slots, start].get(mode="clip")
    with jax.named_scope("draft"):
        view = Target(target, cache, slots, anchor, start, attention, draft_attention)
        drafts, drafter_state = drafter.draft(state.drafter, view, accept.drafting(rows.sampling, rows.rounds), num_draft_tokens)
    with jax.named_scope("verify"):
        block = Rows(jnp.concatenate([anchor[:, None], drafts.tokens], axis=1), start, count, slots)
        out, cache = target(block, cache, taps=drafter.taps, attention=attention)
        assert cache is not None
        positions, raw, edited, choices = block.positions + 1, None, None, None
        if needs.choice_alone and accept.shares_noise:
            choices, most = target.choose(out.hidden, positions, rows.sampling, needs.suppress_tokens, attention)
            sound = sound_choices(most, None, out.hidden)
        else:
            raw = target.unembed(out.hidden)
    with jax.named_scope("accept"):
        if raw is not None:
            edited = rows.edited(raw, needs, drafts)
            sound = sound_choices(jnp.max(edited, axis=-1), part(edited, None, rows.sampling.shard))
        tokens, accepted = accept(drafts, edited, positions, rows.sampling, rows.rounds, choices)

    state = dataclasses.replace(state, cache=cache, drafter=drafter_state, starved=~ok)
    state = append_tokens(state, slots, rows, tokens, jnp.where(live, accepted + 1, 0), accepted, sound, raw, needs)
    committed = jnp.where(live, state.length.at[slots].get(mode="clip") - known, 0)
    last = jnp.maximum(committed - 1, 0)
    hidden = take_row(out.hidden, last)[:, 0]
    newest = take_row(tokens, last)[:, 0]
    observed = Observed(target, slots, block.ids, block.positions, hidden, out.taps, committed, newest, draft_attention)
    spent = live.astype(jnp.int32)
    return dataclasses.replace(
        state,
        drafter=drafter.observe(state.drafter, observed),
        computed=state.computed.at[slots].add(committed, mode="drop"),
        rounds=state.rounds.at[slots].add(spent, mode="drop"),
        drafted=state.drafted.at[slots].add(spent * num_draft_tokens, mode="drop"),
    )


def decode_loop(
    target: Gemma4,
    drafter: Drafter,
    state: DecodeState,
    slots: jax.Array,
    max_steps: jax.Array | int,
    until_any: jax.Array | bool = False,
    *,
    num_draft_tokens: int,
    accept: Rule = COUPLED,
    needs: Needs = PLAIN,
    attention: str = "auto",
    draft_attention: str = "auto",
) -> DecodeState:
    """Repeats `spec_step` on the device until the host is needed.

    That is when no slot of the list is ready to decode any more, after `max_steps` steps, when full pages ran out
    (`state.starved`), or, with `until_any`, as soon as one more slot has ended or failed.
    """

    def running(state: DecodeState) -> jax.Array:
        rows, known, live = gather_slots(state, slots, PLAIN, target)
        return jnp.sum(live & (rows.computed == known - 1))

    begun = running(state)
    one_round = functools.partial(
        spec_step, num_draft_tokens=num_draft_tokens, accept=accept, needs=needs, attention=attention, draft_attention=draft_attention
    )

    def more(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        step, state = carry
        now = running(state)
        return (step < max_steps) & (now > 0) & ~state.starved & ~(until_any & (now < begun))

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        step, state = carry
        return step + 1, one_round(target, drafter, state, slots)

    state = dataclasses.replace(state, starved=jnp.zeros_like(state.starved))
    return jax.lax.while_loop(more, body, (jnp.zeros((), jnp.int32), state))[1]
