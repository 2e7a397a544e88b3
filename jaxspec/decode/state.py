"""DecodeState: the sequences of all slots, and how they come and go."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.drafters.base import Drafter
from jaxspec.model import paged_kv as paged
from jaxspec.model.paged_kv import PagedKV
from jaxspec.model.target import TargetModel
from jaxspec.sampling import logit_edits as edits
from jaxspec.sampling.filters import Filters
from jaxspec.sampling.logit_edits import Edits
from jaxspec.sampling.logprobs import MAX_LOGPROBS, Logprobs, ring_rows

EMPTY, RUNNING, STOPPED, FULL_LENGTH, FAILED = 0, 1, 2, 3, 4
VERIFIED_ROUNDS = 64  # the newest rounds of a sequence of which the state tells how many drafts they verified


@struct.dataclass
class DecodeState:
    """All slots' sequences. Donate it to every call.

    tokens: [S, max_len] int32. from_draft: [S, max_len] bool, tokens that were accepted drafts. length: [S] int32, known tokens. computed:
    [S] int32, rows whose K and V are in the cache. prompt: [S] int32, prompt tokens. limit: [S] int32, length at which to stop, at most
    max_len. status: [S] int32, EMPTY, RUNNING, STOPPED (by a stop id), FULL_LENGTH or FAILED (the logits of the next token are no numbers).
    stop_ids: [S, N] int32, padded with -1. seed: [S, 2] uint32, temperature: [S] float32, filters and edits: how each slot chooses, see
    `Sampling` and `Edits`. automaton, automaton_start: [S] int32, the state of what a structured text must be and the one that it begins
    in, see `Constraint`; 0 for other texts. rounds: [S] int32, draft/verify rounds so far. drafted: [S] int32, tokens drafted so far,
    without those that were not verified. beyond: [S] int32, drafts that the newest round accepted past the text's end. verified:
    [S, 64, 2] int32, how many drafts round r verified, and how many of them were guesses, at r modulo 64, of rounds that tell: see
    `Round.tells`. acceptance: [S, 2] float32, how many of the newest drafts were tried and how many accepted, see `verification.seen`.
    logprobs: [S, 256, ...], of the token at position p in row p modulo 256, of calls that were asked for them. starved: [] bool, the
    last call needed more full-attention pages than were free and left every sequence as it was.
    drafter: the drafter's state. mail: of a state on a mesh, what kernels that sum over its devices have to know, or None; see
    `sharding`."""

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
    automaton: jax.Array
    automaton_start: jax.Array
    rounds: jax.Array
    drafted: jax.Array
    beyond: jax.Array
    verified: jax.Array
    acceptance: jax.Array
    logprobs: Logprobs
    starved: jax.Array
    mail: Any = None

    @property
    def slots(self) -> int:
        return self.tokens.shape[0]


@struct.dataclass
class Requests:
    """B sequences to put into slots. tokens: [B, L] int32 with L <= max_len, the first `length` of them known and the first `prompt`
    of those the prompt (more only for a sequence that is resumed). limit, stop_ids, seed, temperature: as in DecodeState, and so are
    filters and edits, None where nobody has any. rounds, drafted: [B] int32, of a resumed sequence what it had, so that no noise is
    drawn again; None for all 0. computed: [B] int32, rows of the slot's last sequence that serve this one
    too: they and the drafter's view of them stay, if the slot was not released and its rings still hold them; None for all 0.
    automaton, automaton_start: as in DecodeState, after the known tokens; None where no text is structured."""

    tokens: jax.Array
    length: jax.Array
    prompt: jax.Array
    limit: jax.Array
    stop_ids: jax.Array
    seed: jax.Array
    temperature: jax.Array
    rounds: jax.Array | None = None
    drafted: jax.Array | None = None
    filters: Filters | None = None
    edits: Edits | None = None
    computed: jax.Array | None = None
    automaton: jax.Array | None = None
    automaton_start: jax.Array | None = None


def init_state(
    target: TargetModel,
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
    """A state of empty slots.

    slots: S, sequences at a time. max_len: tokens of a sequence at most, its prompt's among them. num_draft_tokens: the largest K, or
    depth of a tree, to be used with it. page_size: rows of a page of K and V. full_pages: pages that the full layers of all
    slots share; by default every slot can grow to max_len. max_stop_ids: N, stop ids of a sequence at most. kv_dtype: of the cache, the
    target's dtype by default. Raises ValueError for more drafts than the drafter can make.
    """
    cache = target.init_cache(
        slots=slots,
        max_len=max_len,
        num_draft_tokens=num_draft_tokens,
        page_size=page_size,
        full_pages=full_pages,
        dtype=target.dtype if kv_dtype is None else kv_dtype,
    )

    rows = ring_rows(num_draft_tokens)

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
        automaton=per_slot(),
        automaton_start=per_slot(),
        rounds=per_slot(),
        drafted=per_slot(),
        beyond=per_slot(),
        verified=per_slot(VERIFIED_ROUNDS, 2),
        acceptance=per_slot(2, dtype=jnp.float32),
        logprobs=Logprobs(
            chosen=per_slot(rows, dtype=jnp.float32),
            rank=per_slot(rows),
            top=per_slot(rows, MAX_LOGPROBS, dtype=jnp.float32),
            ids=per_slot(rows, MAX_LOGPROBS),
        ),
        starved=jnp.zeros((), jnp.bool_),
    )


def nobody_past(count: int, slots: jax.Array) -> jax.Array:
    """Slot ids where all that stand for no sequence are `count` or more: an index below 0 would be counted from the end."""
    return jnp.where(slots < 0, count, slots)


def admit(state: DecodeState, slots: jax.Array, requests: Requests) -> DecodeState:
    """Puts sequences into empty slots; `prefill` then computes them. slots: [B] int32, each at most once; ids below 0 and >= slots are
    ignored.

    A sequence that has its `limit` of tokens already has ended; so has one of max_len tokens. One whose slot holds no page has computed
    nothing, whatever is said.
    """

    def put(field: jax.Array, value: jax.Array) -> jax.Array:
        return field.at[slots].set(value.astype(field.dtype), mode="drop")

    slots, limit = nobody_past(state.slots, slots), jnp.minimum(requests.limit, state.tokens.shape[1])
    zero, count = jnp.zeros_like(slots), slots.shape[0]
    filters = _no_filters(count) if requests.filters is None else requests.filters
    edited = edits.defaults(count) if requests.edits is None else requests.edits
    computed = zero if requests.computed is None else requests.computed
    computed = jnp.where(jnp.take(state.cache.held, slots, mode="fill", fill_value=0) > 0, computed, 0)
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[slots, : requests.tokens.shape[1]].set(requests.tokens, mode="drop"),
        from_draft=put(state.from_draft, jnp.zeros((count, state.from_draft.shape[1]), jnp.bool_)),
        length=put(state.length, requests.length),
        computed=put(state.computed, computed),
        prompt=put(state.prompt, requests.prompt),
        limit=put(state.limit, limit),
        status=put(state.status, jnp.where(requests.length < limit, RUNNING, FULL_LENGTH)),
        stop_ids=put(state.stop_ids, requests.stop_ids),
        seed=put(state.seed, requests.seed),
        temperature=put(state.temperature, requests.temperature),
        filters=jax.tree.map(put, state.filters, dataclasses.replace(filters, scope=state.filters.scope)),
        edits=jax.tree.map(put, state.edits, edited),
        automaton=put(state.automaton, zero if requests.automaton is None else requests.automaton),
        automaton_start=put(state.automaton_start, zero if requests.automaton_start is None else requests.automaton_start),
        rounds=put(state.rounds, zero if requests.rounds is None else requests.rounds),
        drafted=put(state.drafted, zero if requests.drafted is None else requests.drafted),
        beyond=put(state.beyond, zero),
        acceptance=put(state.acceptance, jnp.zeros((count, 2), jnp.float32)),
    )


def release(state: DecodeState, slots: jax.Array) -> DecodeState:
    """Empties slots and returns their pages. slots: [B] int32, each at most once; ids below 0 and >= slots are ignored."""
    slots = nobody_past(state.slots, slots)
    return dataclasses.replace(
        state,
        cache=paged.release(state.cache, slots),
        status=state.status.at[slots].set(EMPTY, mode="drop"),
        starved=jnp.zeros_like(state.starved),
    )


def fork(state: DecodeState, sources: jax.Array, slots: jax.Array, rows: jax.Array) -> DecodeState:
    """Gives slots, which hold no pages, the first `rows` computed rows of other slots: the cache's and the drafter's view of them.

    A source must have computed `rows` positions and no more, so that its rings and its drafter are where the copy is to go on; the tokens
    before, and the one after, must be those of both. sources, slots, rows: [B] int32, ids below 0 and >= slots are ignored. Where there are
    no pages for it, or a source has computed something else, the slots have computed nothing. May come before or after `admit` of the
    slots.
    """
    sources, slots = (nobody_past(state.slots, ids) for ids in (sources, slots))
    as_said = jnp.take(state.computed, sources, mode="clip") == rows
    cache, ok = paged.share(state.cache, jnp.where(as_said, sources, state.slots), slots, rows)
    into = jnp.where(sources < state.slots, slots, state.slots)

    def copy(part: Any) -> Any:
        if isinstance(part, PagedKV):
            return paged.duplicate(part, sources, into)
        return part.at[into].set(jnp.take(part, sources, axis=0, mode="clip"), mode="drop")

    return dataclasses.replace(
        state,
        cache=cache,
        drafter=jax.tree.map(copy, state.drafter, is_leaf=lambda part: isinstance(part, PagedKV)),
        computed=state.computed.at[into].set(jnp.where(ok & as_said, rows, 0), mode="drop"),
    )


@struct.dataclass
class Report:
    """What the host learns of B slots after a call, in one array since each has its cost. rows: [B, 8 + W] int32, of each slot the length,
    computed, status, rounds, drafted and beyond, see DecodeState; of all, how many full pages are unused and whether the call was
    starved; then the tokens at the positions that the host did not know, as many as the length grew, at most W, and ~token where it was
    a draft. With `verified` 128 more columns are that field of the state. logprobs: of the same tokens, or None."""

    rows: jax.Array
    logprobs: Logprobs | None
    verified: bool = struct.field(pytree_node=False, default=False)

    @property
    def free_pages(self) -> int:
        return int(self.rows[0, 6])

    @property
    def starved(self) -> bool:
        return bool(self.rows[0, 7])

    def verified_by(self, row: int, first: int, last: int) -> list[list[int]] | None:
        """Of each of a slot's rounds first .. last - 1, at most the newest 64, how many drafts it verified and how many of them were
        guesses; None where that is not told. row: the slot's."""
        if not self.verified:
            return None
        ring = self.rows[row, -2 * VERIFIED_ROUNDS :].reshape(VERIFIED_ROUNDS, 2)
        return ring[np.arange(first, last) % VERIFIED_ROUNDS].tolist()


def report(state: DecodeState, slots: jax.Array, start: jax.Array, width: int, logprobs: bool = False, verified: bool = False) -> Report:
    """slots: [B] int32, an id >= slots reports nonsense. start: [B] int32, how many tokens of each the host knows. width (static): how
    many more it can have. logprobs, verified (static): whether to report them."""

    def of(field: jax.Array) -> jax.Array:
        return field.at[slots].get(mode="clip")

    at = start[:, None] + jnp.arange(width, dtype=jnp.int32)[None, :]
    rows = state.logprobs.chosen.shape[1]
    kept = at[:, :rows] % rows
    pages = (jnp.broadcast_to(x, slots.shape) for x in (state.cache.free_count, state.starved.astype(jnp.int32)))
    fields = state.length, state.computed, state.status, state.rounds, state.drafted, state.beyond
    numbers = jnp.stack([*map(of, fields), *pages], axis=1)
    tokens, from_draft = (x.at[slots[:, None], at].get(mode="clip") for x in (state.tokens, state.from_draft))
    more = [of(state.verified).reshape(len(slots), -1)] if verified else []
    return Report(
        jnp.concatenate([numbers, jnp.where(from_draft, ~tokens, tokens), *more], axis=1),
        verified=verified,
        logprobs=jax.tree.map(lambda x: x.at[slots[:, None], kept].get(mode="clip"), state.logprobs) if logprobs else None,
    )


def _no_filters(count: int) -> Filters:
    one = jnp.ones((count,), jnp.float32)
    return Filters(jnp.zeros((count,), jnp.int32), one, one - 1)
