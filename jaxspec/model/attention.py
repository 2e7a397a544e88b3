"""What every family's layers do alike: attention over pages and fresh rows, and where keys come from and go to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxspec.model import paged_kv as paged
from jaxspec.model.layer_spec import LayerSpec
from jaxspec.model.paged_kv import LayerKV, PagedKV
from jaxspec.model.rows import Keys, Rows, take_row
from pallas_kernels.float8_rows import Rounded
from pallas_kernels.paged_attention import by_kernel, paged_attention
from pallas_kernels.qkv import Pages

Normed = jax.Array | Rounded  # rows after a norm, which may have rounded them for the product that reads them
Heads = tuple[jax.Array, jax.Array | None, jax.Array | None]
# Of a layer's keys and of its values, what those of float8 are divided by: (layer, scale of keys, scale of values).
KVScales = tuple[tuple[int, float, float], ...]


class AttentionWeights(Protocol):
    """A layer's attention, as `attend` takes it."""

    @property
    def spec(self) -> LayerSpec: ...

    def heads(self, normed: Normed, positions: jax.Array, pages: Pages | None, implementation: str, read_by_kernel: bool) -> Heads:
        """Normed and rotated queries [B, T, KV, G, D] of rows [B, T, H], and the keys and values, or the pools that hold them, in the rows'
        dtype: see `pallas_kernels.qkv`. read_by_kernel: whether a kernel reads them, and no operation of XLA does."""
        ...


def attend(
    weights: AttentionWeights,
    normed: Normed,
    positions: jax.Array,
    keys: Keys,
    attention: str,
    scale: float = 1.0,
    read_by_kernel: bool = False,
    row: jax.Array | None = None,
) -> tuple[jax.Array, Keys]:
    """Attention of a layer's rows. normed: [B, T, H], what `weights.heads` takes; positions: [B, T]; scale: of the scores; attention: the
    implementation; read_by_kernel: whether a kernel reads the heads, and no operation of XLA does. row: [B] int32, which row of each
    sequence attends, up to its own position; None if all do. Returns the heads, [B, T, KV, G, D] or [B, 1, KV, G, D], and the keys that
    they attended to: those given, with the rows' own if the layer owns any."""
    q, keys = with_own(weights, normed, positions, keys, attention, read_by_kernel=row is None)
    if row is not None:
        q, positions = take_row(q, row), take_row(positions, row)
    table, length, packing = keys.table, keys.length, keys.packing
    if packing is not None:  # its rows are in the pages by now
        assert table is not None and keys.store_first
        q, positions, table = packing.unpacked(q), packing.positions, jnp.take(table, packing.begin, axis=0, mode="clip")
        length = packing.start + packing.count
    heads = paged_attention(
        q,
        positions,
        None if keys.pools is None else (keys.pools.k, keys.pools.v),
        table,
        length,
        keys.fresh,
        keys.count,
        keys.weight,
        None if keys.pools is None else keys.pools.scales,
        keys.through,
        window=weights.spec.window,
        scale=scale,
        ancestors=None if keys.tree is None or keys.fresh is None else keys.tree.words,
        launch_dependents=read_by_kernel and packing is None,
        read_once=keys.read_once,
        implementation=attention,
    )
    if keys.fresh is not None and keys.pools is not None:
        keys = dataclasses.replace(keys, after=heads)
    return heads if packing is None else packing.packed(heads), keys


def with_own(
    weights: AttentionWeights, normed: Normed, positions: jax.Array, keys: Keys, attention: str, read_by_kernel: bool = False
) -> tuple[jax.Array, Keys]:
    """A layer's queries, [B, T, KV, G, D], and what they attend to: the keys with the rows' own, if the layer owns any. The arguments are
    those of `attend`. read_by_kernel: whether attention takes the queries as they are."""
    spec, pages, pools = weights.spec, None, keys.pools
    if spec.owns_kv and keys.store_first and pools is not None and pools.k.dtype == normed.dtype and pools.scales is None:
        assert keys.table is not None
        pages = Pages(pools.k, pools.v, keys.table, keys.length, keys.count)
    page = None if keys.pools is None else keys.pools.k.shape[1]
    kept = keys.packing is None and (pages is not None or not spec.owns_kv)  # no operation of XLA moves or stores what is computed here
    kept = kept and read_by_kernel and by_kernel(spec.head_dim, page, attention)
    q, k, v = weights.heads(normed, positions, pages, attention, kept)
    if pages is not None:
        assert k is not None and v is not None
        keys = dataclasses.replace(keys, pools=LayerKV(k, v), length=keys.length + keys.count)
    elif k is not None and v is not None:
        # Rounded as the cache stores them, so that a token sees the same keys in a prefill and in a later step.
        k, v = (k, v) if pools is None else pools.as_stored(k, v)
        if keys.store_first:
            assert pools is not None and keys.table is not None
            pools = paged.write(pools, keys.table, keys.length, keys.count, k, v, implementation=attention)
            keys = dataclasses.replace(keys, pools=pools, length=keys.length + keys.count)
        else:
            keys = dataclasses.replace(keys, fresh=(k, v))
    return q, keys


def keys_of(
    cache: PagedKV | None, owner: int, slots: jax.Array, length: jax.Array, count: jax.Array, weight: jax.Array | None = None
) -> Keys:
    """The cached positions of layer `owner` for these slots, with no fresh rows yet. slots, length, count: [B] int32; weight: see
    `Keys`."""
    pages = (None, None) if cache is None else cache.pages_of(owner, slots)
    return Keys(*pages, length, None, count, weight)


def keys_for(
    cache: PagedKV | None,
    layer: int,
    spec: LayerSpec,
    rows: Rows,
    weight: jax.Array | None = None,
    *,
    read_once: bool,
    through: jax.Array | None = None,
) -> Keys:
    """The keys before these rows of a layer that owns K and V, to which it adds the rows' own. read_once: whether no other layer reads
    them. through: see `Keys`."""
    keys, width = keys_of(cache, layer, rows.slots, rows.start, rows.count, weight), rows.ids.shape[1]
    if rows.packing is not None:
        assert cache is not None
        width = rows.packing.width
    store_first = cache is not None and rows.tree is None and paged.has_room(cache, spec, width)
    read_once = read_once and rows.packing is None  # packed rows of a sequence each read its pages
    return dataclasses.replace(keys, store_first=store_first, packing=rows.packing, tree=rows.tree, read_once=read_once, through=through)


def stored(cache: PagedKV, rows: Rows, fresh: Mapping[int, Keys], attention: str) -> PagedKV:
    """The cache with every owning layer's rows. Those that are still fresh are written once all layers have read the pools as they
    were: a chunk longer than a ring's spare places overwrites what its first rows see. Those of a tree are left to `store_path`.
    attention: the implementation."""
    if rows.tree is not None:
        return cache
    layers = list(cache.layers)
    for i, keys in fresh.items():
        assert keys.pools is not None and keys.table is not None
        layers[i] = keys.pools
        if keys.fresh is not None:
            where = keys.table, rows.start, keys.count
            layers[i] = paged.write(keys.pools, *where, *keys.fresh, after=keys.after, implementation=attention)
    return dataclasses.replace(cache, layers=tuple(layers))


def store_path(cache: PagedKV, fresh: Mapping[int, Keys], start: jax.Array, count: jax.Array, path: jax.Array, attention: str) -> PagedKV:
    """The cache with some rows of a tree, as positions start, start + 1, ... of each sequence.

    fresh: `Hidden.keys` of the pass over the tree. start, count: [B] int32, 0 stores nothing. path: [B, N] int32, a tree's row for each of
    the positions, of which the first `count` are stored. attention: the implementation."""
    layers = list(cache.layers)
    for i, keys in fresh.items():
        pools = layers[i]
        assert pools is not None and keys.table is not None and keys.fresh is not None
        layers[i] = paged.write(pools, keys.table, start, count, *keys.fresh, path, implementation=attention)
    return dataclasses.replace(cache, layers=tuple(layers))


def empty_cache(layers: tuple[LayerSpec, ...], kv_scales: KVScales, **settings: Any) -> PagedKV:
    """An empty cache for layers, with these scales where it is one of float8; `settings` are those of `paged_kv.init`."""
    cache = paged.init(layers, **settings)
    pools = list(cache.layers)
    for i, *scales in kv_scales:
        own = pools[i]
        if own is not None and own.k.dtype == jnp.float8_e4m3fn:
            pools[i] = dataclasses.replace(own, scales=jnp.asarray(scales, jnp.float32))
    return dataclasses.replace(cache, layers=tuple(pools))


def scales_by_layer(scales: Mapping[int, tuple[float, float]], count: int) -> KVScales:
    """The scales of the first `count` layers, in order."""
    return tuple((i, *of) for i, of in sorted(scales.items()) if i < count)


def check_taps(taps: tuple[int, ...], count: int) -> None:
    """Raises ValueError for indices outside 0 .. count, the hidden states of a target of so many layers."""
    bad = [i for i in taps if not 0 <= i <= count]
    if bad:
        raise ValueError(f"taps {bad} are outside 0 .. {count}, the target's hidden states")
