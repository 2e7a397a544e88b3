"""The draft/verify loop: pure functions of (weights, state), to be jitted, donated and sharded by the caller.

Of every slot, `length` tokens are known and the target has computed the first `computed` of them. While a sequence decodes,
computed == length - 1: the last known token, the anchor, has no K and V yet. One `spec_step` drafts K tokens after the anchor, runs
the target on [anchor, drafts], keeps the drafts that the acceptance rule accepts (by default those that the target chooses too),
and adds the target's own next choice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec import cache as paged
from jaxspec import edits
from jaxspec.accept import COUPLED, Rule
from jaxspec.cache import PagedKV
from jaxspec.drafters.base import Drafter, Drafts, Observed, Target
from jaxspec.edits import Edits
from jaxspec.filters import Filters
from jaxspec.gemma4 import Gemma4, Rows, init_cache, take_row
from jaxspec.logprobs import MAX_LOGPROBS, ROWS, Logprobs, logprobs_of
from jaxspec.sampling import PLAIN, Needs, Sampling, choose

EMPTY, RUNNING, STOPPED, FULL_LENGTH = 0, 1, 2, 3


@struct.dataclass
class DecodeState:
    """All slots' sequences. Donate it to every call.

    tokens: [S, max_len] int32. from_draft: [S, max_len] bool, tokens that were accepted drafts. length: [S] int32, known tokens.
    computed: [S] int32, rows whose K and V are in the cache. prompt: [S] int32, prompt tokens. limit: [S] int32, length at which to
    stop, at most max_len. status: [S] int32, EMPTY, RUNNING, STOPPED (by a stop id) or FULL_LENGTH. stop_ids: [S, N] int32, padded
    with -1. seed: [S, 2] uint32, temperature: [S] float32, filters and edits: how each slot chooses, see `Sampling` and `Edits`.
    rounds: [S] int32, draft/verify rounds so far. drafted: [S] int32, tokens drafted so far. logprobs: [S, 256, ...], of the token at
    position p in row p modulo 256, of calls that were asked for them. starved: [] bool, the last call needed more full-attention
    pages than were free and left every sequence as it was. drafter: the drafter's state.
    """

    cache: PagedKV
    drafter: Any
    tokens: jax.Array
    from_draft: jax.Array
    length: jax.Array
    computed: jax.Array
    prompt: jax.Array
    limit: jax.Array
    status: jax.Array
    stop_ids: jax.Array
    seed: jax.Array
    temperature: jax.Array
    filters: Filters
    edits: Edits
    rounds: jax.Array
    drafted: jax.Array
    logprobs: Logprobs
    starved: jax.Array

    @property
    def slots(self) -> int:
        return self.tokens.shape[0]


@struct.dataclass
class Requests:
    """B sequences to put into slots. tokens: [B, L] int32 with L <= max_len, the first `length` of them known and the first `prompt`
    of those the prompt (more only for a sequence that is resumed). limit, stop_ids, seed, temperature: as in DecodeState, and so are
    filters and edits, None where nobody has any. rounds: [B] int32, of a resumed sequence the rounds it had, so that none of their
    noise is drawn again; None for all 0."""

    tokens: jax.Array
    length: jax.Array
    prompt: jax.Array
    limit: jax.Array
    stop_ids: jax.Array
    seed: jax.Array
    temperature: jax.Array
    rounds: jax.Array | None = None
    filters: Filters | None = None
    edits: Edits | None = None


def init_state(
    target: Gemma4,
    drafter: Drafter,
    *,
    slots: int,
    max_len: int,
    num_draft_tokens: int,
    page_size: int = 64,
    full_pages: int | None = None,
    max_stop_ids: int = 16,
    kv_dtype: Any = None,
) -> DecodeState:
    """A state of empty slots. num_draft_tokens: the largest K to be used with it. kv_dtype: the target's dtype by default."""
    cache = init_cache(
        target.config,
        slots=slots,
        max_len=max_len,
        num_draft_tokens=num_draft_tokens,
        page_size=page_size,
        full_pages=full_pages,
        dtype=target.dtype if kv_dtype is None else kv_dtype,
    )

    def per_slot(*shape: int, dtype: Any = jnp.int32) -> jax.Array:
        return jnp.zeros((slots, *shape), dtype)

    return DecodeState(
        cache=cache,
        drafter=drafter.init(slots, max_len, num_draft_tokens),
        tokens=per_slot(max_len),
        from_draft=per_slot(max_len, dtype=jnp.bool_),
        length=per_slot(),
        computed=per_slot(),
        prompt=per_slot(),
        limit=per_slot(),
        status=per_slot(),
        stop_ids=per_slot(max_stop_ids) - 1,
        seed=per_slot(2, dtype=jnp.uint32),
        temperature=per_slot(dtype=jnp.float32),
        filters=_no_filters(slots),
        edits=edits.defaults(slots),
        rounds=per_slot(),
        drafted=per_slot(),
        logprobs=Logprobs(
            chosen=per_slot(ROWS, dtype=jnp.float32),
            rank=per_slot(ROWS),
            top=per_slot(ROWS, MAX_LOGPROBS, dtype=jnp.float32),
            ids=per_slot(ROWS, MAX_LOGPROBS),
        ),
        starved=jnp.zeros((), jnp.bool_),
    )


def admit(state: DecodeState, slots: jax.Array, requests: Requests) -> DecodeState:
    """Puts sequences into empty slots; `prefill` then computes them. slots: [B] int32, ids >= slots are ignored.

    A sequence that has its `limit` of tokens already has ended.
    """

    def put(field: jax.Array, value: jax.Array) -> jax.Array:
        return field.at[slots].set(value.astype(field.dtype), mode="drop")

    zero, count = jnp.zeros_like(slots), slots.shape[0]
    filters = _no_filters(count) if requests.filters is None else requests.filters
    edited = edits.defaults(count) if requests.edits is None else requests.edits
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[slots, : requests.tokens.shape[1]].set(requests.tokens, mode="drop"),
        from_draft=put(state.from_draft, jnp.zeros((count, state.from_draft.shape[1]), jnp.bool_)),
        length=put(state.length, requests.length),
        computed=put(state.computed, zero),
        prompt=put(state.prompt, requests.prompt),
        limit=put(state.limit, requests.limit),
        status=put(state.status, jnp.where(requests.length < requests.limit, RUNNING, FULL_LENGTH)),
        stop_ids=put(state.stop_ids, requests.stop_ids),
        seed=put(state.seed, requests.seed),
        temperature=put(state.temperature, requests.temperature),
        filters=jax.tree.map(put, state.filters, dataclasses.replace(filters, scope=state.filters.scope)),
        edits=jax.tree.map(put, state.edits, edited),
        rounds=put(state.rounds, zero if requests.rounds is None else requests.rounds),
        drafted=put(state.drafted, zero),
    )


def release(state: DecodeState, slots: jax.Array) -> DecodeState:
    """Empties slots and returns their pages. slots: [B] int32, each at most once; ids >= slots are ignored."""
    return dataclasses.replace(
        state,
        cache=paged.release(state.cache, slots),
        status=state.status.at[slots].set(EMPTY, mode="drop"),
        starved=jnp.zeros_like(state.starved),
    )


def prefill(
    target: Gemma4,
    drafter: Drafter,
    state: DecodeState,
    slots: jax.Array,
    *,
    chunk: int,
    needs: Needs = PLAIN,
    attention: str = "auto",
    draft_attention: str = "auto",
) -> DecodeState:
    """Computes up to `chunk` (static) more rows of each slot's known tokens; a slot whose prompt is done chooses its first token.

    slots: [B] int32, ids >= slots stand for no sequence. A slot is ready to decode once computed == length - 1. A resumed
    sequence, which knows more than its prompt, has its anchor already and chooses nothing. needs: see `spec_step`.
    """
    rows, known, live = _rows(state, slots, needs, target)
    resumed = known > rows.prompt
    todo = known - rows.computed - resumed.astype(jnp.int32)
    count = jnp.where(live, jnp.clip(todo, 0, chunk), 0)
    cache, ok = paged.reserve(state.cache, slots, jnp.where(count > 0, rows.computed + count, 0), chunk)
    count = jnp.where(ok, count, 0)
    at = rows.computed[:, None] + jnp.arange(chunk, dtype=jnp.int32)[None, :]
    ids = state.tokens.at[slots[:, None], at].get(mode="clip")
    block = Rows(ids, rows.computed, count, slots)
    out, cache = target(block, cache, taps=drafter.taps, last_only=True, attention=attention)
    assert cache is not None
    computed = rows.computed + count
    raw = target.unembed(out.hidden)
    first = choose(rows.edited(raw, needs), computed[:, None], dataclasses.replace(rows.sampling, tables=None))
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
    return _append(state, slots, rows, first, chosen.astype(jnp.int32), jnp.zeros_like(count), raw, needs)


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
        raw = target.unembed(out.hidden)
    with jax.named_scope("accept"):
        tokens, accepted = accept(drafts, rows.edited(raw, needs, drafts), block.positions + 1, rows.sampling, rows.rounds)

    state = dataclasses.replace(state, cache=cache, drafter=drafter_state, starved=~ok)
    state = _append(state, slots, rows, tokens, jnp.where(live, accepted + 1, 0), accepted, raw, needs)
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
    (`state.starved`), or, with `until_any`, as soon as one more slot has ended.
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
            logits = logits.at[..., jnp.asarray(needs.suppress_tokens, jnp.int32)].set(-jnp.inf)
        if self.sampling.tables is None:
            return logits
        none = jnp.zeros((logits.shape[0], 0), jnp.int32)
        return self.sampling.tables.verified(logits, none if drafts is None else drafts.tokens)


def _rows(state: DecodeState, slots: jax.Array, needs: Needs, target: Gemma4) -> tuple[_SlotRows, jax.Array, jax.Array]:
    """(fields, known tokens, whether the slot holds a running sequence) of a list of slots."""

    def of(field: jax.Array) -> jax.Array:
        return field.at[slots].get(mode="clip")

    live = (slots < state.slots) & (of(state.status) == RUNNING)
    computed, prompt, limit, length, stop_ids, rounds = map(
        of, (state.computed, state.prompt, state.limit, state.length, state.stop_ids, state.rounds)
    )
    sampling = Sampling(of(state.seed), of(state.temperature))
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
    raw: jax.Array,
    needs: Needs,
) -> DecodeState:
    """Appends the first `count` choices of each slot, cut after a stop id and at the limit.

    choices: [B, T] int32; count: [B] int32, 0 appends nothing; the first `accepted` of them were drafts. raw: [B, T, V], the logits
    that log-probabilities are reported of.
    """
    row = jnp.arange(choices.shape[1], dtype=jnp.int32)[None, :]
    stops = jnp.any(choices[:, :, None] == rows.stop_ids[:, None, :], axis=-1)
    first_stop = jnp.min(jnp.where(stops, row, choices.shape[1]), axis=1)
    count = jnp.minimum(jnp.minimum(count, first_stop + 1), jnp.maximum(rows.limit - rows.length, 0))
    length = rows.length + count
    status = jnp.where(first_stop < count, STOPPED, jnp.where(length >= rows.limit, FULL_LENGTH, RUNNING))
    changed = jnp.where(count > 0, slots, state.slots)
    at = jnp.where(row < count[:, None], rows.length[:, None] + row, state.tokens.shape[1])
    if needs.logprobs is not None:
        slot = jnp.where(row < count[:, None], slots[:, None], state.slots)
        ring = jax.tree.map(
            lambda kept, new: kept.at[slot, (rows.length[:, None] + row) % ROWS].set(new, mode="drop"),
            state.logprobs,
            logprobs_of(raw, choices, MAX_LOGPROBS),
        )
        state = dataclasses.replace(state, logprobs=ring)
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[slots[:, None], at].set(choices, mode="drop"),
        from_draft=state.from_draft.at[slots[:, None], at].set(row < accepted[:, None], mode="drop"),
        length=state.length.at[changed].set(length, mode="drop"),
        status=state.status.at[changed].set(status, mode="drop"),
    )


def _no_filters(count: int) -> Filters:
    one = jnp.ones((count,), jnp.float32)
    return Filters(jnp.zeros((count,), jnp.int32), one, one - 1)
