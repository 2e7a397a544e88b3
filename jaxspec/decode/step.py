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
from flax import struct

from jaxspec.collectives import Shard, part, whole, without
from jaxspec.decode.accept import COUPLED, Rule
from jaxspec.decode.state import (
    EMPTY,
    FAILED,
    FULL_LENGTH,
    RUNNING,
    STOPPED,
    DecodeState,
    Report,
    Requests,
    admit,
    fork,
    init_state,
    release,
    report,
)
from jaxspec.drafters.base import Drafter, Drafts, Observed, Target
from jaxspec.model import paged_kv as paged
from jaxspec.model.gemma4 import Gemma4, Rows, take_row
from jaxspec.sampling import logit_edits as edits
from jaxspec.sampling.choice import PLAIN, Needs, Sampling, choose
from jaxspec.sampling.logprobs import MAX_LOGPROBS, ROWS, Logprobs, logprobs_of

__all__ = [
    "EMPTY",
    "FAILED",
    "FULL_LENGTH",
    "RUNNING",
    "STOPPED",
    "DecodeState",
    "Report",
    "Requests",
    "admit",
    "decode_loop",
    "fork",
    "init_state",
    "prefill",
    "release",
    "report",
    "score",
    "spec_step",
]


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
    rows, known, live = _rows(state, slots, needs, target)
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
        sound = _sound(most, None, out.hidden)
    else:
        raw = target.unembed(out.hidden)
        edited = rows.edited(raw, needs)
        first = choose(edited, computed[:, None], dataclasses.replace(rows.sampling, tables=None))
        sound = _sound(jnp.max(edited, axis=-1), part(edited, None, rows.sampling.shard))
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
    return _append(state, slots, rows, first, chosen.astype(jnp.int32), jnp.zeros_like(count), sound, raw, needs)


def score(
    target: Gemma4, state: DecodeState, slots: jax.Array, *, chunk: int, count: int, attention: str = "auto"
) -> tuple[DecodeState, Logprobs]:
    """Computes up to `chunk` more rows of each slot's known tokens, and the log-probabilities of the tokens after them.

    For sequences that are admitted to be read, not continued: the drafter sees nothing of them. slots: [B] int32, ids >= slots stand
    for no sequence. count (static): most likely tokens to report at each position. Returns the state and Logprobs of [B, chunk]: entry
    j is of position computed + 1 + j, as far as the token there is known.
    """
    rows, known, _ = _rows(state, slots, PLAIN, target)
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
    rows, known, live = _rows(state, slots, needs, target)
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
            sound = _sound(most, None, out.hidden)
        else:
            raw = target.unembed(out.hidden)
    with jax.named_scope("accept"):
        if raw is not None:
            edited = rows.edited(raw, needs, drafts)
            sound = _sound(jnp.max(edited, axis=-1), part(edited, None, rows.sampling.shard))
        tokens, accepted = accept(drafts, edited, positions, rows.sampling, rows.rounds, choices)

    state = dataclasses.replace(state, cache=cache, drafter=drafter_state, starved=~ok)
    state = _append(state, slots, rows, tokens, jnp.where(live, accepted + 1, 0), accepted, sound, raw, needs)
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
        rows, known, live = _rows(state, slots, PLAIN, target)
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


@struct.dataclass
class _SlotRows:
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


def _rows(state: DecodeState, slots: jax.Array, needs: Needs, target: Gemma4) -> tuple[_SlotRows, jax.Array, jax.Array]:
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
    return _SlotRows(computed, prompt, limit, length, stop_ids, rounds, sampling), length, live


def _append(
    state: DecodeState,
    slots: jax.Array,
    rows: _SlotRows,
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
            lambda kept, new: kept.at[slot, (rows.length[:, None] + row) % ROWS].set(new, mode="drop"),
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


def _sound(most: jax.Array, shard: Shard | None, hidden: jax.Array | None = None) -> jax.Array:
    """Whether tokens can be chosen by logits of which these are the largest: [B, T] bool. A NaN anywhere makes the largest one a NaN
    (a kernel may miss it: then the hidden states [B, T, H] tell); single tokens may be at -inf, not all. shard: of the logits, if they
    are of one."""
    bad, some = jnp.isnan(most) | jnp.isposinf(most), most > -jnp.inf
    if hidden is not None:
        bad |= ~jnp.all(jnp.isfinite(hidden), axis=-1)
    if shard is not None:
        bad, some = jax.lax.psum(jnp.stack([bad, some]).astype(jnp.int32), shard.axis) > 0
    return some & ~bad
