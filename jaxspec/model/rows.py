"""A block of rows for each sequence: what goes into a forward pass, and what comes out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.draft_tree import DraftTree
from jaxspec.model.paged_kv import LayerKV


@struct.dataclass
class Rows:
    """A block of consecutive rows for each of B sequences, or one of the rows of a tree.

    ids: [B, T] int32. start: [B] int32, the position of a sequence's first row, which is also how many positions its cache holds.
    count: [B] int32, how many of the T rows are real; the others cost time and change nothing. slots: [B] int32, where the
    sequence lives in the cache; an id >= slots stands for no sequence and must come with count 0. packing: of rows that `packed` gave,
    else None. tree: whose rows these are, or None; then each row stands as far after `start` as it is deep, and sees of these rows its
    ancestors and itself, and none of them is written to the cache: see `attention.store_path`. inserted: the media among them;
    None if all are tokens.
    """

    ids: jax.Array
    start: jax.Array
    count: jax.Array
    slots: jax.Array
    packing: Packing | None = None
    tree: DraftTree | None = struct.field(pytree_node=False, default=None)
    inserted: Inserted | None = None

    @property
    def positions(self) -> jax.Array:
        if self.tree is not None:
            return self.start[:, None] + jnp.asarray(self.tree.depths, jnp.int32)[None, :]
        return self.start[:, None] + jnp.arange(self.ids.shape[1], dtype=jnp.int32)[None, :]

    def packed(self, size: int) -> Rows:
        """The real rows alone, one after the other: `size` blocks of one row, of which those that are left over are nobody's.

        size: at least the sum of `count`. All that a layer computes of single rows takes them as they are; attention, which can read a
        sequence's keys once for all of its rows, puts them back into blocks by `packing`.
        """
        ends = jnp.cumsum(self.count)
        at = jnp.arange(size, dtype=jnp.int32)
        owner = jnp.sum(ends[None, :] <= at[:, None], axis=1, dtype=jnp.int32)
        real, owner = owner < len(ends), jnp.minimum(owner, len(ends) - 1)
        begin = ends - self.count
        place = jnp.where(real, at - jnp.take(begin, owner), 0)
        packing = Packing(self.start, self.count, begin, owner, place, self.ids.shape[1])
        return Rows(
            ids=jnp.where(real[:, None], packing.packed(self.ids), 0),
            start=packing.of_owners(self.start) + place,
            count=real.astype(jnp.int32),
            slots=jnp.where(real, packing.of_owners(self.slots), jnp.iinfo(jnp.int32).max),
            packing=packing,
        )


@struct.dataclass
class Inserted:
    """Images, frames of videos, and parts of sounds among the rows of each of B sequences, at most S: all rows of each.

    rows: [B, R, H], what stands in place of embeddings, of one after the other. begin: [B, S] int32, the position of the first row of each.
    count: [B, S] int32, how many rows it has; 0 for none. together: [B, S] bool, whether these see one another in targets that let images
    do so.
    """

    rows: jax.Array
    begin: jax.Array
    count: jax.Array
    together: jax.Array

    def at(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which of the positions [B, T] are such rows, and what stands there, [B, T, H]; for the others anything."""
        place, within = self._places(positions)
        row = jnp.sum(jnp.where(within, place + (jnp.cumsum(self.count, axis=1) - self.count)[:, None, :], 0), axis=2)
        return jnp.any(within, axis=2), take_rows(self.rows, jnp.clip(row, 0, self.rows.shape[1] - 1))

    def through(self, positions: jax.Array) -> jax.Array:
        """Up to which position the rows at these see keys, where images see one another: [B, T] int32."""
        last = (self.begin + self.count - 1)[:, None, :]
        together = self._places(positions)[1] & self.together[:, None, :]
        return jnp.max(jnp.where(together, last, positions[:, :, None]), axis=2)

    def _places(self, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of each position and each of the S: which of its rows that is, and whether it is one. [B, T, S]"""
        place = positions[:, :, None] - self.begin[:, None, :]
        return place, (place >= 0) & (place < self.count[:, None, :])


@struct.dataclass
class Packing:
    """Where M packed rows belong among blocks of T rows of B sequences. A sequence's rows lie side by side.

    start, count: [B] int32, as in `Rows`. begin: [B] int32, the packed row that is a sequence's first. owner: [M] int32, the sequence
    that a packed row is of, and place: [M] int32, its place in the block; some sequence's first row for a row that is nobody's. width: T.
    """

    start: jax.Array
    count: jax.Array
    begin: jax.Array
    owner: jax.Array
    place: jax.Array
    width: int = struct.field(pytree_node=False)

    @property
    def positions(self) -> jax.Array:
        """Of the rows in blocks: [B, T] int32, -1 where there is none, so that it sees no key."""
        at = jnp.arange(self.width, dtype=jnp.int32)[None, :]
        return jnp.where(at < self.count[:, None], self.start[:, None] + at, -1)

    def of_owners(self, x: jax.Array) -> jax.Array:
        """What each packed row's sequence has. [B, ...] -> [M, ...]"""
        return jnp.take(x, self.owner, axis=0, mode="clip")

    def packed(self, x: jax.Array) -> jax.Array:
        """[B, T, ...] -> [M, 1, ...]"""
        return x.at[self.owner, self.place].get(mode="clip")[:, None]

    def unpacked(self, x: jax.Array) -> jax.Array:
        """[M, 1, ...] -> [B, T, ...], with any other row's numbers where a block has no row."""
        at = self.begin[:, None] + jnp.arange(self.width, dtype=jnp.int32)[None, :]
        return jnp.take(x[:, 0], at, axis=0, mode="clip")


@struct.dataclass
class Hidden:
    """What a forward pass returns. hidden: [B, T, H] after the final norm, or [B, 1, H] where only the last row was asked for.
    taps: one [B, T, H] for each tap asked for; tap i is the output of layer i - 1, tap 0 the scaled embedding.
    keys: for each layer that owns K and V, what its queries attended to, fresh rows included."""

    hidden: jax.Array
    taps: tuple[jax.Array, ...]
    keys: dict[int, Keys]


@struct.dataclass
class Keys:
    """What a layer's queries attend to: positions 0 .. length - 1 in pages, then `count` fresh rows.

    pools, table ([B, W] int32): the owning layer's pages, or None. length: [B] int32. fresh: K [B, T, KV, key_dims] and V
    [B, T, KV, D] of rows that are not in the pages yet, or None; count: [B] int32. weight: [D], the owner's k_norm where its keys
    are stored in part (`LayerSpec.key_dims`), else None. store_first: the owner puts its rows into the pages and then reads them
    there, so that none are fresh; it must have places for them beside all that they see. packing: of packed rows, for which B is the
    number of rows; else None. tree: of the fresh rows, None where they are consecutive. read_once: whether only this layer reads the
    pages. through: [B, T] int32, up to which position each row sees keys; None for its own. after: what the last layer that read the pages
    made of them, if the fresh rows are written after that.
    """

    pools: LayerKV | None
    table: jax.Array | None
    length: jax.Array
    fresh: tuple[jax.Array, jax.Array] | None
    count: jax.Array
    weight: jax.Array | None
    store_first: bool = struct.field(pytree_node=False, default=False)
    packing: Packing | None = None
    tree: DraftTree | None = struct.field(pytree_node=False, default=None)
    read_once: bool = struct.field(pytree_node=False, default=False)
    through: jax.Array | None = None
    after: jax.Array | None = None


def take_row(x: jax.Array, index: jax.Array) -> jax.Array:
    """One row of each sequence. x: [B, T, ...], index: [B] int32 -> [B, 1, ...]."""
    return take_rows(x, index[:, None])


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Some rows of each sequence. x: [B, T, ...], index: [B, N] int32 -> [B, N, ...]."""
    return jnp.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1)
