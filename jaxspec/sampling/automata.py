"""What texts must look like, on the device: automata over bytes, which tokens each of their states allows, and sequences' states.

A token moves an automaton by its bytes. Which tokens are allowed in a state is computed once, when the automaton is put into the pool, and
is a row of bits; states that allow the same tokens share a row.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.collectives import Shard, shard_of
from pallas_kernels.byte_walk import byte_walk

# States that belong to no automaton: of a sequence without one; of a thought, where everything but an end is allowed; and of a sequence
# that may begin with a thought.
FREE, THINKING, MAY_THINK = 0, 1, 2
BLOCK = 128  # states that are put into the pool together
SAME = 256  # stands for "no byte"
FILLED = 32  # rows of bits that are computed together
EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 255)  # tokens are walked with others of about their length


@struct.dataclass
class Automata:
    """A pool of automata, and the bytes of the vocabulary of V tokens. States are numbered across the pool."""

    next: jax.Array  # [N, 257] uint16: the state after a byte, 0 for none; the state itself after SAME
    row: jax.Array  # [N] int32: where in `bits` a state's allowed tokens are
    accepting: jax.Array  # [N] bool: whether the text may end
    bits: jax.Array  # [M, ceil(V / 32)] uint32: bit i % 32 of word i // 32 is set if token i is allowed; row 0 allows all
    data: jax.Array  # [V, L] uint8: the bytes of each token
    length: jax.Array  # [V] int32: how many they are; 0 for a token without text, which no automaton allows
    order: jax.Array  # [V] int32: the tokens by length
    thought: jax.Array  # [2] int32: the tokens around a thought, -1 for none
    # (first, last, bytes): runs of `order`, and the most bytes that a token of the run has.
    runs: tuple[tuple[int, int, int], ...] = struct.field(pytree_node=False)

    @classmethod
    def empty(cls, data: np.ndarray, length: np.ndarray, thought: tuple[int, int], *, blocks: int, rows: int) -> Automata:
        """A pool of so many blocks of states and rows of bits, the first of each in use. data, length: of the tokens."""
        states, vocab = blocks * BLOCK, len(length)
        order = np.argsort(length, kind="stable").astype(np.int32)
        ends = np.searchsorted(length[order], (0, *EDGES), side="right")
        runs = zip(ends[:-1].tolist(), ends[1:].tolist(), EDGES, strict=True)
        following = (
            jnp.zeros((states, SAME + 1), jnp.uint16).at[THINKING].set(THINKING).at[:, SAME].set(jnp.arange(states, dtype=jnp.uint16))
        )
        return cls(
            next=following,
            row=jnp.zeros((states,), jnp.int32),
            accepting=jnp.zeros((states,), bool).at[FREE].set(True),
            bits=jnp.zeros((rows, -(-vocab // 32)), jnp.uint32).at[0].set(jnp.uint32(0xFFFFFFFF)),
            data=jnp.asarray(data),
            length=jnp.asarray(length),
            order=jnp.asarray(order),
            thought=jnp.asarray(thought, jnp.int32),
            runs=tuple((a, b, n) for a, b, n in runs if a < b),
        )


def place(automata: Automata, block: jax.Array, following: jax.Array, row: jax.Array, accepting: jax.Array) -> Automata:
    """Puts a block of states into the pool. block: [] int32. following: [BLOCK, 257] uint16; row: [BLOCK] int32; accepting: [BLOCK]
    bool."""
    at = block * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)
    return dataclasses.replace(
        automata,
        next=automata.next.at[at].set(following),
        row=automata.row.at[at].set(row),
        accepting=automata.accepting.at[at].set(accepting),
    )


def fill(automata: Automata, states: jax.Array, rows: jax.Array) -> Automata:
    """Computes rows of bits: the tokens that states allow. states, rows: [FILLED] int32; a row past the last is for nothing."""
    flat, found = automata.next.reshape(-1), list[jax.Array]()
    first = automata.runs[0][0] if automata.runs else automata.length.shape[0]
    found.append(jnp.zeros((*states.shape, first), bool))  # tokens without text
    for begin, end, most in automata.runs:
        ids = automata.order[begin:end]
        length, data = automata.length[ids], automata.data[ids].astype(jnp.int32)

        def step(i: jax.Array, state: jax.Array, length: jax.Array = length, data: jax.Array = data) -> jax.Array:
            byte = jnp.where(i < length, data[:, jnp.minimum(i, data.shape[1] - 1)], SAME)
            return flat.at[state * (SAME + 1) + byte[None, :]].get(mode="clip").astype(jnp.int32)

        begun = jnp.broadcast_to(states[:, None], (*states.shape, end - begin))
        found.append(jax.lax.fori_loop(0, most, step, begun) > 0)
    sizes = automata.bits.shape[1]
    last = automata.runs[-1][1] if automata.runs else first
    alive = jnp.concatenate([*found, jnp.zeros((*states.shape, automata.length.shape[0] - last), bool)], axis=1)
    allowed = jnp.zeros((*states.shape, sizes * 32), jnp.uint32).at[:, automata.order].set(alive.astype(jnp.uint32))
    words = jnp.sum(allowed.reshape(*states.shape, sizes, 32) << _bit_places(3), axis=-1, dtype=jnp.uint32)
    return dataclasses.replace(automata, bits=automata.bits.at[rows].set(words, mode="drop"))


@struct.dataclass
class Constraint:
    """What B sequences' next tokens must be."""

    automata: Automata
    state: jax.Array  # [B] int32
    begin: jax.Array  # [B] int32: the state in which the text begins, after a thought if there is one
    stop_ids: jax.Array  # [B, N] int32, padded with -1: allowed in accepting states, and only as an end

    def after(self, tokens: jax.Array) -> Constraint:
        """After one more token each, [B] int32. A token that is not allowed, or an id below 0, leaves a sequence where it is."""
        automata, state = self.automata, self.state
        reached = byte_walk(automata.next, automata.data, automata.length, self._own(state), tokens)
        text = (tokens >= 0) & (jnp.take(automata.length, tokens, mode="clip") > 0)
        after = jnp.where(text & (reached > 0), reached, state)
        opening, closing = automata.thought[0], automata.thought[1]
        after = jnp.where((state == THINKING) & (tokens == closing), self.begin, after)
        after = jnp.where((state == MAY_THINK) & (tokens == opening) & (tokens >= 0), THINKING, after)
        return dataclasses.replace(self, state=after)

    def along(self, tokens: jax.Array) -> jax.Array:
        """The states before and after each of some tokens. [B, K] int32 -> [B, K + 1]."""
        at, states = self, [self.state]
        for k in range(tokens.shape[1]):
            at = at.after(tokens[:, k])
            states.append(at.state)
        return jnp.stack(states, axis=1)

    def along_tree(self, tokens: jax.Array, parents: tuple[int, ...]) -> jax.Array:
        """The same of a tree of tokens: the states before all of them and after each. [B, N] int32 -> [B, N + 1].

        parents: of each token the number of the one before it, counted from 1, or 0; lower than its own."""
        states, done = self.state[:, None], 0
        while done < len(parents):
            known = states.shape[1]
            end = next((i for i in range(done, len(parents)) if parents[i] >= known), len(parents))
            begun = states[:, parents[done:end]]
            after = self.at(begun).after(tokens[:, done:end].reshape(-1)).state
            states, done = jnp.concatenate([states, after.reshape(begun.shape)], axis=1), end
        return states

    def at(self, states: jax.Array) -> Constraint:
        """That of each of T states of the sequences, one sequence after the other. [B, T] int32 -> of B * T."""
        begin, stop_ids = (jnp.repeat(field, states.shape[1], axis=0) for field in (self.begin, self.stop_ids))
        return Constraint(self.automata, states.reshape(-1), begin, stop_ids)

    def masked(self, logits: jax.Array, states: jax.Array, shard: Shard | None, ids: jax.Array | None = None) -> jax.Array:
        """Logits with -inf for what may not come in each row's state.

        logits: [B, T, C] float32, over the vocabulary, the device's shard of it, or candidates. states: [B, T] int32. ids: [B, T, C]
        int32, the candidates' token ids; None if candidate i is token i."""
        words = self._words(states)
        if ids is not None:
            return jnp.where(_bits(words, ids), logits, -jnp.inf)
        size, shard = logits.shape[-1], shard_of(logits, None, shard)
        bit = ((words[..., None] >> _bit_places(4)) & jnp.uint32(1)).reshape(*states.shape, -1)
        if shard is None:
            bit = bit[..., :size]
        else:
            more = max(shard.size * jax.lax.axis_size(shard.axis) - bit.shape[-1], 0)
            bit = jax.lax.dynamic_slice_in_dim(jnp.pad(bit, ((0, 0), (0, 0), (0, more))), shard.first, size, axis=-1)
        return jnp.where(bit > 0, logits, -jnp.inf)

    def allowed(self, ids: jax.Array) -> jax.Array:
        """Which of some tokens may come next. [C] int32 -> [B, C] bool."""
        return _bits(self._words(self.state[:, None]), jnp.broadcast_to(ids, (self.state.shape[0], 1, *ids.shape)))[:, 0]

    def _words(self, states: jax.Array) -> jax.Array:
        """The rows of bits of states, [B, T] int32 -> [B, T, W] uint32. What a state's row does not say is in them: whether the text may
        end, and whether a thought may begin."""
        automata, own = self.automata, self._own(states)
        words = jnp.take(automata.bits, jnp.take(automata.row, own, mode="clip"), axis=0, mode="clip")
        ends = jnp.take(automata.accepting, own, mode="clip")
        opening = jnp.broadcast_to(automata.thought[:1], self.state.shape)
        special = [*((self.stop_ids[:, i], ends) for i in range(self.stop_ids.shape[1])), (opening, states <= MAY_THINK)]
        word = jnp.arange(words.shape[-1], dtype=jnp.int32)[None]
        said = free = jnp.zeros((1, 1, 1), jnp.uint32)
        for token, may in special:  # one kernel, since nothing but elementwise work is in it; a token below 0 is in no word
            bit = jnp.where((token >> 5)[:, None] == word, (jnp.uint32(1) << (token & 31).astype(jnp.uint32))[:, None], jnp.uint32(0))
            said = said | bit[:, None, :]
            free = free | jnp.where(may[..., None], bit[:, None, :], jnp.uint32(0))
        return (words & ~said) | free

    def _own(self, states: jax.Array) -> jax.Array:
        """The states of automata behind states: a text that may begin with a thought may begin without."""
        begin = self.begin.reshape(-1, *[1] * (states.ndim - 1))
        return jnp.where(states == MAY_THINK, begin, states)


def _bits(words: jax.Array, ids: jax.Array) -> jax.Array:
    """The bits of tokens in rows of bits. words: [B, T, W] uint32; ids: [B, T, C] int32 -> [B, T, C] bool."""
    word = jnp.take_along_axis(words, ids >> 5, axis=-1, mode="clip")
    return (word >> (ids & 31).astype(jnp.uint32)) & jnp.uint32(1) > 0


def _bit_places(ndim: int) -> jax.Array:
    return jnp.arange(32, dtype=jnp.uint32).reshape(*[1] * (ndim - 1), 32)
