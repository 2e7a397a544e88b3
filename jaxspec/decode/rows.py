"""What prefill, scoring and decoding have in common: the fields of a call's slots, pages for their rows, the target's choices, and
appending them."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.collectives import Shard, full_logits, shard_of, suppress
from jaxspec.decode.round import Round
from jaxspec.decode.state import (
    FAILED,
    FULL_LENGTH,
    RUNNING,
    STOPPED,
    DecodeState,
)
from jaxspec.drafters.base import Drafts
from jaxspec.model import paged_kv as paged
from jaxspec.model.draft_tree import DraftTree
from jaxspec.model.layers import head_logits
from jaxspec.model.rows import Packing, take_row, take_rows
from jaxspec.model.target import TargetModel
from jaxspec.sampling import logit_edits as edits
from jaxspec.sampling.automata import Automata, Constraint
from jaxspec.sampling.choice import Needs, Sampling, choose, choose_among_likeliest, choose_by_head, likely_logits
from jaxspec.sampling.logprobs import MAX_LOGPROBS, Logprobs, token_logprobs


@struct.dataclass
class SlotRows:
    """What a call reads of its B slots. The fields that are not explained are those of DecodeState."""

    live: jax.Array  # [B] bool, whether the slot holds a running sequence
    computed: jax.Array  # [B] int32
    prompt: jax.Array  # [B] int32
    limit: jax.Array  # [B] int32
    length: jax.Array  # [B] int32
    stop_ids: jax.Array  # [B, N] int32
    rounds: jax.Array  # [B] int32
    sampling: Sampling  # how each slot chooses

    @property
    def ready(self) -> jax.Array:
        """Whether the slot can decode: all of its known tokens but the last have K and V. [B] bool."""
        return self.live & (self.computed == self.length - 1)


def gather_slots(state: DecodeState, slots: jax.Array, needs: Needs, target: TargetModel, automata: Automata | None = None) -> SlotRows:
    """The fields of a list of slots. slots: [B] int32, an id >= slots stands for no sequence and is not live. automata: those that the
    slots' states are of, needed if `needs.structured`."""

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
    if needs.structured:
        assert automata is not None, "structured texts need their automata"
        sampling = dataclasses.replace(sampling, constraint=Constraint(automata, of(state.automaton), of(state.automaton_start), stop_ids))
    return SlotRows(live, computed, prompt, limit, length, stop_ids, rounds, sampling)


def edited(
    logits: jax.Array,
    sampling: Sampling,
    needs: Needs,
    drafts: jax.Array | None = None,
    states: jax.Array | None = None,
    first: jax.Array | None = None,
) -> jax.Array:
    """The logits that tokens are chosen by. logits: [B, T, V], the target's after the known tokens and after each draft. drafts: [B, K]
    int32, or None. states: [B, T] int32, of the automata at each row, None without a constraint. first: as for `Tables.verified`."""
    if sampling.constraint is not None and states is not None:
        logits = sampling.constraint.masked(logits, states, sampling.shard)
    if needs.suppress_tokens:
        logits = suppress(logits, needs.suppress_tokens, sampling.shard)
    if sampling.tables is None:
        return logits
    drafts = jnp.zeros((logits.shape[0], 0), jnp.int32) if drafts is None else drafts
    return sampling.tables.verified(full_logits(logits, sampling.shard), drafts, first)


def edited_tree(
    logits: jax.Array, sampling: Sampling, needs: Needs, drafts: jax.Array, states: jax.Array | None, tree: DraftTree
) -> jax.Array:
    """The same of the rows of a tree: each has the drafts before it on its path. logits: [B, N + 1, V]. drafts: [B, N] int32. states:
    [B, N + 1] int32, or None."""
    batch, width = logits.shape[:2]
    owner = jnp.repeat(jnp.arange(batch, dtype=jnp.int32), width)
    path = jnp.pad(drafts, ((0, 0), (1, 0)), constant_values=-1)[:, tree.before].reshape(batch * width, -1)
    depths = jnp.tile(jnp.asarray(tree.depths, jnp.int32), batch)
    states = None if states is None else states.reshape(-1, 1)
    return edited(logits.reshape(-1, 1, logits.shape[-1]), sampling.taken(owner), needs, path, states, depths).reshape(batch, width, -1)


def reserve_rows(state: DecodeState, slots: jax.Array, start: jax.Array, count: jax.Array, most: int) -> tuple[DecodeState, jax.Array]:
    """Gives each slot pages for its next `count` rows. All slots get them, or none does: then the state is `starved` and all counts are 0.

    slots: [B] int32. start: [B] int32, the position of a slot's first row. count: [B] int32, 0 asks for nothing. most (static): no count
    is larger. Returns the state and the counts.
    """
    cache, ok = paged.reserve(state.cache, slots, jnp.where(count > 0, start + count, 0), most)
    return dataclasses.replace(state, cache=cache, starved=~ok), jnp.where(ok, count, 0)


@struct.dataclass
class Choices:
    """What the target says of the token after each of T rows of B slots."""

    tokens: jax.Array | None  # [B, T] int32, the one that it chooses; None for a rule that draws from the logits
    sound: jax.Array  # [B, T] bool, whether one can be chosen: see `sound_choices`
    logits: jax.Array | None  # [B, T, V] float32, what it is chosen by, edits included; None where the head alone chose
    raw: jax.Array | None  # the same without edits, of which log-probabilities are reported
    states: jax.Array | None = None  # [B, T] int32, of the automata before each token; None without a constraint
    packing: Packing | None = None  # of packed rows: then `logits` and `raw` are of those, [M, 1, V]

    def along(self, path: jax.Array) -> Choices:
        """Those after some of the rows. path: [B, N] int32."""
        return jax.tree.map(lambda x: take_rows(x, path), self)

    def logprobs(self, tokens: jax.Array, shard: Shard | None) -> Logprobs:
        """Of tokens [B, T]."""
        assert self.raw is not None
        raw = full_logits(self.raw, shard)
        if self.packing is None:
            return token_logprobs(raw, tokens, MAX_LOGPROBS)
        return jax.tree.map(self.packing.unpacked, token_logprobs(raw, self.packing.packed(tokens), MAX_LOGPROBS))


def target_choices(
    target: TargetModel,
    rows: SlotRows,
    hidden: jax.Array,
    positions: jax.Array,
    round: Round,
    drafts: Drafts | None = None,
    packing: Packing | None = None,
) -> Choices:
    """Chooses the tokens at `positions`: by the head alone, without a row of logits in memory, where nothing else needs the logits.

    hidden: [B, T, H], after the final norm, of the rows before. positions: [B, T] int32. drafts: the T - 1 guesses that the rows after
    the first are of, or the nodes of `round.tree`; without them the token is a text's first, which every acceptance rule chooses alike.
    packing: of packed rows: then hidden is [M, 1, H], and so much is computed; tokens where no row is are any.
    """
    chosen, sampling = drafts is None or round.accept.shares_noise, rows.sampling
    tree = None if drafts is None else round.tree
    guesses, first, states = None if drafts is None else drafts.tokens, None, None
    if sampling.constraint is not None:
        constraint = sampling.constraint
        if guesses is None:
            states = constraint.state[:, None]
        else:
            states = constraint.along(guesses) if tree is None else constraint.along_tree(guesses, tree.parents)
    of_rows = states
    if packing is not None:
        sampling, positions, first = sampling.taken(packing.owner), packing.packed(positions), packing.place
        guesses = None if guesses is None else packing.of_owners(guesses)
        of_rows = None if states is None else packing.packed(states)
    if chosen and round.needs.choice_alone:
        weight, cap = target.head
        tokens, most = choose_by_head(
            hidden,
            weight,
            positions,
            sampling,
            softcap=cap,
            suppressed=round.needs.suppress_tokens,
            guide=target.head_guide,
            implementation=round.attention,
        )
        sound, logits, raw = sound_choices(most, None, hidden), None, None
    elif chosen and round.needs.likeliest_alone:
        (weight, cap), suppressed = target.head, round.needs.suppress_tokens
        if target.head_guide is None:
            logits = head_logits(hidden, weight, round.attention)
        else:
            settings = {"suppressed": suppressed, "implementation": round.attention}
            logits = likely_logits(hidden, weight, target.head_guide, sampling, **settings)
        logits = suppress(logits, suppressed, sampling.shard) if suppressed else logits
        tokens, most = choose_among_likeliest(logits, positions, sampling, softcap=cap)
        sound, logits, raw = sound_choices(most, None, hidden), None, None
    else:
        raw = target.unembed(hidden, round.attention)
        if tree is None:
            logits = edited(raw, sampling, round.needs, guesses, of_rows, first)
        else:
            assert guesses is not None
            logits = edited_tree(raw, sampling, round.needs, guesses, states, tree)
        sound = sound_choices(jnp.max(logits, axis=-1), shard_of(logits, None, sampling.shard))
        tokens = choose(logits, positions, dataclasses.replace(sampling, tables=None)) if chosen else None
    if packing is not None:
        tokens, sound = None if tokens is None else packing.unpacked(tokens), packing.unpacked(sound)
    return Choices(tokens, sound, logits, raw, states, packing)


def sound_choices(most: jax.Array, shard: Shard | None, hidden: jax.Array | None = None) -> jax.Array:
    """Whether tokens can be chosen by logits of which these are the largest: [B, T] bool. A NaN anywhere makes the largest one a NaN
    (a kernel may miss it: then the hidden states [B, T, H] tell); single tokens may be at -inf, not all. shard: of the logits, if they
    are of one."""
    bad, some = jnp.isnan(most) | jnp.isposinf(most), most > -jnp.inf
    if hidden is not None:
        bad |= ~jnp.all(jnp.isfinite(hidden), axis=-1)
    if shard is not None:
        bad, some = shard.any(jnp.stack([bad, some]))
    return some & ~bad


def append_tokens(
    state: DecodeState,
    slots: jax.Array,
    rows: SlotRows,
    tokens: jax.Array,
    count: jax.Array,
    accepted: jax.Array,
    choices: Choices,
    needs: Needs,
) -> tuple[DecodeState, jax.Array]:
    """Appends the first `count` tokens of each slot, cut after a stop id and at the limit. A slot of which a token that is not
    `choices.sound` is left has failed, and is cut before it.

    tokens: [B, T] int32; count: [B] int32, 0 appends nothing; the first `accepted` of them were drafts. Returns the state and how many
    tokens each slot got: [B] int32.
    """
    row = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]
    stops = jnp.any(tokens[:, :, None] == rows.stop_ids[:, None, :], axis=-1)
    first_stop = jnp.min(jnp.where(stops, row, tokens.shape[1]), axis=1)
    count = jnp.minimum(jnp.minimum(count, first_stop + 1), jnp.maximum(rows.limit - rows.length, 0))
    bad = jnp.min(jnp.where(choices.sound, tokens.shape[1], row), axis=1)
    failed, count = bad < count, jnp.minimum(count, bad)
    length = rows.length + count
    status = jnp.where(first_stop < count, STOPPED, jnp.where(length >= rows.limit, FULL_LENGTH, RUNNING))
    status = jnp.where(failed, FAILED, status)
    changed = jnp.where(failed | (count > 0), slots, state.slots)
    at = jnp.where(row < count[:, None], rows.length[:, None] + row, state.tokens.shape[1])
    if needs.logprobs is not None:
        slot = jnp.where(row < count[:, None], slots[:, None], state.slots)
        ring = jax.tree.map(
            lambda kept, new: kept.at[slot, (rows.length[:, None] + row) % kept.shape[1]].set(new, mode="drop"),
            state.logprobs,
            choices.logprobs(tokens, rows.sampling.shard),
        )
        state = dataclasses.replace(state, logprobs=ring)
    if choices.states is not None:
        assert rows.sampling.constraint is not None
        last = jnp.maximum(count - 1, 0)
        before, newest = take_row(choices.states, last)[:, 0], take_row(tokens, last)[:, 0]
        after = dataclasses.replace(rows.sampling.constraint, state=before).after(newest)
        kept = state.automaton.at[jnp.where(count > 0, slots, state.slots)].set(after.state, mode="drop")
        state = dataclasses.replace(state, automaton=kept)
    return dataclasses.replace(
        state,
        tokens=state.tokens.at[slots[:, None], at].set(tokens, mode="drop"),
        from_draft=state.from_draft.at[slots[:, None], at].set(row < accepted[:, None], mode="drop"),
        length=state.length.at[changed].set(length, mode="drop"),
        status=state.status.at[changed].set(status, mode="drop"),
    ), count
