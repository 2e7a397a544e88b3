"""A block of rows for each sequence: what goes into a forward pass, and what comes out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.paged_kv import LayerKV


@struct.dataclass
class Rows:
    """A block of consecutive rows for each of B sequences.

    ids: [B, T] int32. start: [B] int32, the position of a sequence's first row, which is also how many positions its cache holds.
    count: [B] int32, how many of the T rows are real; the others cost time and change nothing. slots: [B] int32, where the
    sequence lives in the cache; an id >= slots stands for no sequence and must come with count 0.
    """

    ids: jax.Array
    start: jax.Array
    count: jax.Array
    slots: jax.Array

    @property
    def positions(self) -> jax.Array:
        return self.start[:, None] + jnp.arange(self.ids.shape[1], dtype=jnp.int32)[None, :]


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
    there, so that none are fresh; it must have places for them beside all that they see.
    """

    pools: LayerKV | None
    table: jax.Array | None
    length: jax.Array
    fresh: tuple[jax.Array, jax.Array] | None
    count: jax.Array
    weight: jax.Array | None
    store_first: bool = struct.field(pytree_node=False, default=False)


def take_row(x: jax.Array, index: jax.Array) -> jax.Array:
    """One row of each sequence. x: [B, T, ...], index: [B] int32 -> [B, 1, ...]."""
    return jnp.take_along_axis(x, index.reshape((-1,) + (1,) * (x.ndim - 1)), axis=1)
