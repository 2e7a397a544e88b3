"""PagedKV: keys and values of all slots in pages, with a ring of pages for sliding layers and paged full attention.

Two groups, because head_dim, KV heads and lifetime differ. A page table is a ring: logical page i of slot b is `table[b, i % width]`.
Sliding tables are as wide as the window and a verify block need, and their pages belong to their slot for good. Full tables are as
wide as max_len and never wrap; their pages come from a free list when a sequence grows, and may be held by several slots whose
sequences begin alike. Only layers that own K and V have pools. Nothing is ever erased: rejecting rows is lowering a length.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.layer_spec import FULL, SLIDING, LayerSpec
from pallas_kernels import qkv
from pallas_kernels.qkv.reference import stored


@struct.dataclass
class LayerKV:
    """One layer's pools: k [pages, page, KV, key_dims], v [pages, page, KV, D]. scales: [2] float32, what stored keys and stored
    values are to be multiplied by, or None for one; whoever reads the pools reads them with it."""

    k: jax.Array
    v: jax.Array
    scales: jax.Array | None = None

    def as_stored(self, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values as the pools hold them; those that have the pools' dtype already are."""
        if (k.dtype, v.dtype) == (self.k.dtype, self.v.dtype):
            return k, v
        k_scale, v_scale = (None, None) if self.scales is None else self.scales
        return stored(k, self.k.dtype, k_scale), stored(v, self.v.dtype, v_scale)


@struct.dataclass
class PagedKV:
    """The cache of all slots; donate it to every jitted call.

    layers: one LayerKV for each layer that owns K and V, None for others. tables: kind of layer -> [slots, width] int32 page ids.
    free: [full pages] int32, a stack of unused full pages; free_count: [] int32, how many. held: [slots] int32, full pages of each
    slot, which are logical pages 0 .. held - 1. refs: [full pages] int32, how many slots hold each. kinds: of each layer.
    """

    layers: tuple[LayerKV | None, ...]
    tables: dict[str, jax.Array]
    free: jax.Array
    free_count: jax.Array
    held: jax.Array
    refs: jax.Array
    kinds: tuple[str, ...] = struct.field(pytree_node=False)

    @property
    def slots(self) -> int:
        return self.held.shape[0]

    def pages_of(self, layer: int, slots: jax.Array) -> tuple[LayerKV, jax.Array]:
        """The pools of a layer that owns K and V, and the slots' page tables: [B, W] int32, those of any slot for ids >= slots."""
        pools = self.layers[layer]
        assert pools is not None
        return pools, jnp.take(self.tables[self.kinds[layer]], slots, axis=0, mode="clip")


def page_size_of(cache: PagedKV) -> int:
    """Positions in a page."""
    return next(layer.k.shape[1] for layer in cache.layers if layer is not None)


def init(
    layers: tuple[LayerSpec, ...],
    *,
    slots: int,
    max_len: int,
    num_draft_tokens: int,
    page_size: int = 64,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    full_pages: int | None = None,
) -> PagedKV:
    """An empty cache. max_len: positions a sequence may have. num_draft_tokens: the largest K that will be drafted.

    full_pages: pages shared by all slots' full layers; by default every slot can grow to max_len.
    """
    window = max((spec.window or 0 for spec in layers), default=0)
    widths = {SLIDING: math.ceil((window + num_draft_tokens) / page_size), FULL: math.ceil(max_len / page_size)}
    pages = {SLIDING: slots * widths[SLIDING], FULL: slots * widths[FULL] if full_pages is None else full_pages}

    def pools(spec: LayerSpec) -> LayerKV | None:
        if not spec.owns_kv:
            return None
        shape = (pages[spec.kind], page_size, spec.num_kv_heads)
        return LayerKV(jnp.zeros((*shape, spec.key_dims), dtype), jnp.zeros((*shape, spec.head_dim), dtype))

    return PagedKV(
        layers=tuple(pools(spec) for spec in layers),
        tables={
            SLIDING: jnp.arange(pages[SLIDING], dtype=jnp.int32).reshape(slots, widths[SLIDING]),
            FULL: jnp.zeros((slots, widths[FULL]), jnp.int32),
        },
        free=jnp.arange(pages[FULL], dtype=jnp.int32)[::-1],
        free_count=jnp.asarray(pages[FULL], jnp.int32),
        held=jnp.zeros((slots,), jnp.int32),
        refs=jnp.zeros((pages[FULL],), jnp.int32),
        kinds=tuple(spec.kind for spec in layers),
    )


def fixed(cache: PagedKV) -> PagedKV:
    """An empty cache in which every page belongs to its slot for good: a drafter's own, of which nothing is reserved or released.

    cache: empty, with full pages for every slot. `held` then says that each slot has them all.
    """
    full = cache.tables[FULL]
    return dataclasses.replace(
        cache,
        tables={**cache.tables, FULL: jnp.arange(full.size, dtype=jnp.int32).reshape(full.shape)},
        free_count=jnp.zeros_like(cache.free_count),
        held=jnp.full_like(cache.held, full.shape[1]),
    )


def has_room(cache: PagedKV, spec: LayerSpec, rows: int) -> bool:
    """Whether a layer's pages have places for `rows` more positions beside all that the first of these rows may see."""
    return spec.window is None or cache.tables[spec.kind].shape[1] * page_size_of(cache) >= spec.window + rows - 1


def write(
    layer: LayerKV,
    table: jax.Array,
    start: jax.Array,
    count: jax.Array,
    k: jax.Array,
    v: jax.Array,
    path: jax.Array | None = None,
    *,
    after: jax.Array | None = None,
    implementation: str = "xla",
) -> LayerKV:
    """Stores rows start .. start + count - 1 of each sequence in its pages.

    table: [B, W] int32. start, count: [B] int32. k: [B, T, KV, key_dims], v: [B, T, KV, D]; rows from `count` on are dropped. path:
    [B, N] int32, which of the rows are stored, None for all. Of more rows than the ring holds, the last are kept. after, implementation:
    see `pallas_kernels.qkv.write`.
    """
    pages = qkv.Pages(layer.k, layer.v, table, start, count)
    pools = qkv.write(pages, *layer.as_stored(k, v), path, after=after, implementation=implementation)
    return LayerKV(*pools, layer.scales)


def write_all(
    cache: PagedKV,
    slots: jax.Array,
    start: jax.Array,
    count: jax.Array,
    keys: Iterable[tuple[jax.Array, jax.Array]],
    after: jax.Array | None = None,
) -> PagedKV:
    """Stores rows of these slots in every layer. keys: K and V of each; the rest as in `write`."""
    layers = tuple(write(*cache.pages_of(i, slots), start, count, k, v, after=after) for i, (k, v) in enumerate(keys))
    assert len(layers) == len(cache.layers)
    return dataclasses.replace(cache, layers=layers)


def reserve(cache: PagedKV, slots: jax.Array, lengths: jax.Array, rows: int) -> tuple[PagedKV, jax.Array]:
    """Gives each slot full pages for `lengths` positions. All slots get them, or none does and `ok` is false.

    slots, lengths: [B] int32; an id >= slots or a length of 0 asks for nothing. rows: how far lengths may exceed what a
    slot already holds (static). Returns the cache and ok: [] bool.
    """
    page = page_size_of(cache)
    held = jnp.take(cache.held, slots, mode="fill", fill_value=0)
    missing = jnp.where(slots < cache.slots, jnp.maximum(-(-lengths // page) - held, 0), 0)
    ok = jnp.sum(missing) <= cache.free_count
    missing = jnp.where(ok, missing, 0)
    new = jnp.arange(rows // page + 2, dtype=jnp.int32)[None, :]
    order = (jnp.cumsum(missing) - missing)[:, None] + new
    pages = jnp.take(cache.free, cache.free_count - 1 - order, mode="clip")
    logical = jnp.where(new < missing[:, None], held[:, None] + new, cache.tables[FULL].shape[1])
    table = cache.tables[FULL].at[slots[:, None], logical].set(pages, mode="drop")
    return dataclasses.replace(
        cache,
        tables={**cache.tables, FULL: table},
        free_count=cache.free_count - jnp.sum(missing),
        held=cache.held.at[slots].add(missing, mode="drop"),
        refs=cache.refs.at[jnp.where(new < missing[:, None], pages, cache.refs.shape[0])].set(1, mode="drop"),
    ), ok


def release(cache: PagedKV, slots: jax.Array) -> PagedKV:
    """Lets go of all full pages of these slots; those that no other slot holds return to the free list.

    slots: [B] int32, each at most once; ids >= slots are ignored.
    """
    count = cache.refs.shape[0]
    refs = cache.refs.at[_held_pages(cache, slots, jnp.take(cache.held, slots, mode="clip"))].add(-1, mode="drop")
    unused = (refs == 0) & (cache.refs > 0)
    place = jnp.where(unused, cache.free_count + jnp.cumsum(unused, dtype=jnp.int32) - 1, count)
    return dataclasses.replace(
        cache,
        free=cache.free.at[place].set(jnp.arange(count, dtype=jnp.int32), mode="drop"),
        free_count=cache.free_count + jnp.sum(unused, dtype=jnp.int32),
        held=cache.held.at[slots].set(0, mode="drop"),
        refs=refs,
    )


def share(cache: PagedKV, sources: jax.Array, slots: jax.Array, rows: jax.Array) -> tuple[PagedKV, jax.Array]:
    """Lets slots that hold no pages begin with the first `rows` positions of other slots. All do, or none does and `ok` is false.

    Full pages that end before `rows` are held by both from then on. The one that `rows` ends inside, which both will write to, and the
    ring are copied: a source must have computed no more than `rows` positions, or its ring still hold the window before them.
    sources, slots, rows: [B] int32; a slot id >= slots is ignored. Returns the cache and ok: [] bool.
    """
    page = page_size_of(cache)
    live = (slots < cache.slots) & (sources < cache.slots)
    split = live & (jnp.mod(rows, page) > 0)
    ok = jnp.sum(split, dtype=jnp.int32) <= cache.free_count
    live, split = live & ok, split & ok
    whole, into = jnp.where(live, rows // page, 0), jnp.where(live, slots, cache.slots)
    begins = jnp.take(cache.tables[FULL], sources, axis=0, mode="clip")
    shared = dataclasses.replace(
        cache,
        tables={**cache.tables, FULL: cache.tables[FULL].at[into].set(begins, mode="drop")},
        held=cache.held.at[into].set(whole, mode="drop"),
        refs=cache.refs.at[_held_pages(cache, sources, whole)].add(1, mode="drop"),
    )
    shared, _ = reserve(shared, into, jnp.where(split, rows, 0), page)
    everywhere = jnp.arange(cache.tables[SLIDING].shape[1], dtype=jnp.int32)[None, :]
    shared = _copied(shared, FULL, sources, into, whole[:, None], split)
    return _copied(shared, SLIDING, sources, into, everywhere, live), ok


def duplicate(cache: PagedKV, sources: jax.Array, slots: jax.Array) -> PagedKV:
    """Copies slots of a cache in which every page belongs to its slot for good. sources, slots: as in `share`."""
    live = (slots < cache.slots) & (sources < cache.slots)
    for kind, table in cache.tables.items():
        cache = _copied(cache, kind, sources, slots, jnp.arange(table.shape[1], dtype=jnp.int32)[None, :], live)
    return cache


def _held_pages(cache: PagedKV, slots: jax.Array, count: jax.Array) -> jax.Array:
    """Ids of the first `count` ([B]) full pages of each slot: [B, width], elsewhere and for ids >= slots one that no page has."""
    table = jnp.take(cache.tables[FULL], slots, axis=0, mode="clip")
    logical = jnp.arange(table.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where((logical < count[:, None]) & (slots < cache.slots)[:, None], table, cache.refs.shape[0])


def _copied(cache: PagedKV, kind: str, sources: jax.Array, slots: jax.Array, logical: jax.Array, live: jax.Array) -> PagedKV:
    """The cache with pages `logical` ([B, N] or [1, N]) of each source in the places of the slot's own, where `live` ([B])."""
    table = cache.tables[kind]
    logical = jnp.broadcast_to(logical, (slots.shape[0], logical.shape[1]))
    old, new = (jnp.take_along_axis(jnp.take(table, ids, axis=0, mode="clip"), logical, axis=1, mode="clip") for ids in (sources, slots))

    def copy(pool: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
        to = jnp.where(live[:, None], new, pool.shape[0])
        pool = pool.at[to].set(jnp.take(pool, old, axis=0, mode="clip"), mode="drop")
        return jax.lax.optimization_barrier((pool, old))  # one after the other, or XLA reads the pages of all layers before it writes any

    layers = list(cache.layers)
    for i, (layer, own) in enumerate(zip(cache.layers, cache.kinds, strict=True)):
        if layer is not None and own == kind:
            k, old = copy(layer.k, old)
            v, old = copy(layer.v, old)
            layers[i] = dataclasses.replace(layer, k=k, v=v)
    return dataclasses.replace(cache, layers=tuple(layers))
