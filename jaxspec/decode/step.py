"""The draft/verify loop: pure functions of (weights, state), to be jitted, donated and sharded by the caller.

Of every slot, `length` tokens are known and the target has computed the first `computed` of them. While a sequence decodes,
computed == length - 1: the last known token, the anchor, has no K and V yet. One `spec_step` drafts K tokens after the anchor, runs
the target on [anchor, drafts], keeps the drafts that the acceptance rule accepts (by default those that the target chooses too),
and adds the target's own next choice. Of a tree of drafts it keeps the path that the target chooses.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decode.accept import coupled_path
from jaxspec.decode.round import Round
from jaxspec.decode.rows import append_tokens, gather_slots, reserve_rows, target_choices
from jaxspec.decode.state import VERIFIED_ROUNDS, DecodeState, nobody_past
from jaxspec.decode.verification import best_prefixes, seen, survival
from jaxspec.drafters.base import Drafter, Drafts, Observed, Target, check_tree, drafted
from jaxspec.model.attention import store_path
from jaxspec.model.paged_kv import has_room
from jaxspec.model.rows import Rows, take_row, take_rows
from jaxspec.model.target import TargetModel
from jaxspec.sampling.automata import Automata
from jaxspec.sampling.choice import PLAIN


def spec_step(
    target: TargetModel, drafter: Drafter, state: DecodeState, slots: jax.Array, *, round: Round, automata: Automata | None = None
) -> DecodeState:
    """One round for each slot of the list that is ready to decode: draft, verify, accept, append, observe. The others stay as they are.

    slots: [B] int32, each at most once; ids below 0 and >= slots stand for no sequence. round: static. automata: of the structured texts,
    needed if `round.needs.structured`. Where full pages run out the state is `starved` and no slot changes. Raises ValueError where the
    acceptance rule has no rate for a draft, for a `round` that does not fit itself, the drafter, the target or the state, and for a drafter
    that gives something else than the tokens that it was asked for.
    """
    return _step(target, drafter, state, nobody_past(state.slots, slots), round=round, automata=automata)


def _step(
    target: TargetModel, drafter: Drafter, state: DecodeState, slots: jax.Array, *, round: Round, automata: Automata | None
) -> DecodeState:
    round.check(len(slots))
    rows, k, tree = gather_slots(state, slots, round.needs, target, automata), round.num_draft_tokens, round.tree
    if tree is not None:
        check_tree(drafter, tree, target.config)
    if not all(has_room(state.cache, spec, k + 1) for spec in target.config.layers):
        raise ValueError(f"the round has {k} draft tokens; the state was made for fewer: see `init_state`")
    start, room = rows.computed, state.tokens.shape[1] - rows.computed
    count = jnp.where(rows.ready, jnp.minimum(room, k + 1), 0)
    state, count = reserve_rows(state, slots, start, count, k + 1)
    live, acceptance = count > 0, state.acceptance.at[slots].get(mode="clip")

    with jax.named_scope("draft"):
        anchor = state.tokens.at[slots, start].get(mode="clip")
        view = Target(target, state.cache, slots, anchor, start, round.attention, round.draft_attention)
        drafting = round.accept.drafting(rows.sampling, rows.rounds)
        drafts, drafter_state = Drafts.joined((), len(slots)), state.drafter
        if k:
            drafts, drafter_state = drafted(drafter, state.drafter, view, drafting, k if tree is None else tree)
        if drafts.tokens.shape != (len(slots), round.drafts) or drafts.tokens.dtype != jnp.int32:
            raise ValueError(
                f"the drafter {type(drafter).__name__} gives tokens {drafts.tokens.dtype} {list(drafts.tokens.shape)}; expected int32 "
                f"{[len(slots), round.drafts]}"
            )
        # An id below 0 is no token, which nothing accepts; one past the vocabulary is none either.
        drafts = dataclasses.replace(drafts, tokens=jnp.where(drafts.tokens < target.config.vocab_size, drafts.tokens, -1))
    with jax.named_scope("verify"):
        at = jnp.arange(k, dtype=jnp.int32)[None, :]
        if round.rows is not None:
            count = jnp.where(live, 1 + best_prefixes(survival(drafts, acceptance), count - 1, round.rows), 0)
            drafts = dataclasses.replace(drafts, tokens=jnp.where(at < count[:, None] - 1, drafts.tokens, -1))
        # Rows of a tree are in the order of their depths, so that those at the first `count` positions come first.
        real = count if tree is None else jnp.take(jnp.asarray(np.searchsorted(tree.depths, range(k + 2)), jnp.int32), count)
        block = Rows(jnp.concatenate([anchor[:, None], drafts.tokens], axis=1), start, real, slots, tree=tree)
        verified = block if round.rows is None else block.packed(round.rows)
        out, cache = target(verified, state.cache, taps=drafter.taps, attention=round.attention)
        assert cache is not None
        positions, packing = block.positions + 1, verified.packing
        choices = target_choices(target, rows, out.hidden, positions, round, drafts, packing)
        hidden, taps = out.hidden, out.taps
        if packing is not None:
            hidden, *taps = map(packing.unpacked, (hidden, *taps))
    with jax.named_scope("accept"):
        if tree is None:
            tokens, accepted = round.accept(drafts, choices.logits, positions, rows.sampling, rows.rounds, choices.tokens)
        else:
            assert choices.tokens is not None
            path, accepted = coupled_path(tree, drafts.tokens, choices.tokens)
            cache = store_path(cache, out.keys, start, jnp.minimum(accepted + 1, count), path, round.attention)
            block = dataclasses.replace(block, ids=take_rows(block.ids, path), tree=None)
            choices, hidden, taps = choices.along(path), take_rows(hidden, path), [take_rows(tap, path) for tap in taps]
            tokens = choices.tokens
            assert tokens is not None

    state = dataclasses.replace(state, cache=cache, drafter=drafter_state)
    state, kept = append_tokens(state, slots, rows, tokens, jnp.where(live, accepted + 1, 0), accepted, choices, round.needs)
    last = jnp.maximum(kept - 1, 0)
    newest = take_row(tokens, last)[:, 0]
    hidden = take_row(hidden, last)[:, 0]
    observed = Observed(target, slots, block.ids, block.positions, hidden, tuple(taps), kept, newest, round.draft_attention)
    checked = jnp.maximum(count - 1, 0)
    beyond = jnp.where(kept > 0, jnp.minimum(accepted, checked) - jnp.minimum(accepted, kept), 0)
    guessed = jnp.full_like(checked, round.drafts) if round.rows is None else checked
    if k and tree is None:
        real = jnp.sum(jnp.cumprod((drafts.tokens >= 0) & (at < checked[:, None]), axis=1, dtype=jnp.int32), axis=1)
        after = jnp.where(live[:, None], seen(acceptance, real, accepted), acceptance)
        state = dataclasses.replace(state, acceptance=state.acceptance.at[slots].set(after, mode="drop"))
        guessed = real if round.abstains(drafter) else guessed
    if round.tells(drafter):
        both = jnp.stack([checked, guessed], axis=1)
        state = dataclasses.replace(state, verified=state.verified.at[slots, rows.rounds % VERIFIED_ROUNDS].set(both, mode="drop"))
    return dataclasses.replace(
        state,
        drafter=drafter.observe(state.drafter, observed),
        computed=state.computed.at[slots].add(kept, mode="drop"),
        rounds=state.rounds.at[slots].add(live.astype(jnp.int32), mode="drop"),
        drafted=state.drafted.at[slots].add(jnp.where(live, guessed, 0), mode="drop"),
        beyond=state.beyond.at[jnp.where(live, slots, state.slots)].set(beyond, mode="drop"),
    )


def decode_loop(
    target: TargetModel,
    drafter: Drafter,
    state: DecodeState,
    slots: jax.Array,
    max_steps: jax.Array | int,
    until_ended: jax.Array | int = 0,
    *,
    round: Round,
    automata: Automata | None = None,
) -> DecodeState:
    """Repeats `spec_step` on the device until the host is needed.

    That is when no slot of the list is ready to decode any more, after `max_steps` steps, when full pages ran out
    (`state.starved`), or as soon as `until_ended` more slots have ended or failed; 0 waits for none. A slot whose known tokens `prefill`
    has not computed to the end is not ready. Other arguments and errors: as for `spec_step`.
    """
    slots = nobody_past(state.slots, slots)
    if not len(slots):
        return state

    def running(state: DecodeState) -> jax.Array:
        return jnp.sum(gather_slots(state, slots, PLAIN, target).ready)

    begun = running(state)

    def more(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        step, state = carry
        now = running(state)
        return (step < max_steps) & (now > 0) & ~state.starved & ~((until_ended > 0) & (begun - now >= until_ended))

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        step, state = carry
        return step + 1, _step(target, drafter, state, slots, round=round, automata=automata)

    state = dataclasses.replace(state, starved=jnp.zeros_like(state.starved))
    return jax.lax.while_loop(more, body, (jnp.zeros((), jnp.int32), state))[1]
