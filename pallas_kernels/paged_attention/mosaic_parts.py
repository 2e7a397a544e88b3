"""What both attention kernels in the Mosaic GPU dialect share: the cut into items, which keys an item reads, its softmax and its results.

An item is up to 64 query rows of one KV head over one part of the keys that they can see.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention.reference import MASKED

ROWS, KEYS = 64, 64  # query rows of an item, keys of a block


@dataclasses.dataclass(frozen=True)
class Call:
    """What is the same for all items of a call."""

    shape: tuple[int, ...]  # of the queries: [B, T, KV, G, D]
    causal: bool
    window: int | None
    scale: float  # of scores, in units of log2

    def plain(self, item: Work, seen, least, most) -> jax.Array:
        """Whether every row sees every key of a block. seen: of the block. least, most: positions of the item's queries."""
        base, end = seen
        limit = jnp.minimum(end, least + 1) if self.causal else end
        begin = item.span.begin if self.window is None else jnp.maximum(item.span.begin, most + 1 - self.window)
        return (base >= begin) & (base + KEYS <= limit)


@dataclasses.dataclass(frozen=True)
class Plan(Call):
    """How a call is cut into items."""

    splits: int = 1  # parts of the visible keys

    @property
    def rows(self) -> int:
        """Rows of a query's heads. Eight is the least that is copied, so some may stay unused."""
        return max(8, pl.next_power_of_2(self.shape[3]))

    @property
    def at_once(self) -> int:
        """Queries of an item."""
        return min(self.shape[1], max(1, ROWS // self.rows))

    @property
    def height(self) -> int:
        """Rows of an item's tile."""
        return ROWS

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.shape[1], self.at_once)

    @property
    def items(self) -> int:
        return self.tiles * self.splits * self.shape[0] * self.shape[2]

    def results(self, dtype) -> dict[str, jax.ShapeDtypeStruct]:
        """The kernel's results: final ones, or else sums of V, largest scores and sums of weights for each part."""
        batch, queries, heads, group, dim = self.shape
        if self.splits == 1:
            return {"out": jax.ShapeDtypeStruct(self.shape, dtype)}
        parts = batch * heads * self.splits
        numbers = jax.ShapeDtypeStruct((parts, self.tiles * self.height), jnp.float32)
        return {"acc": jax.ShapeDtypeStruct((parts, queries, group, dim), jnp.float32), "top": numbers, "total": numbers}

    def softmax(self, item: Item) -> Softmax:
        settings = {"causal": self.causal, "window": self.window, "scale": self.scale, "partial": self.splits > 1}
        return Softmax(item.after(self), item.span.begin, **settings)

    def item(self, refs, number) -> Item:
        """refs: the kernel's arguments by name. number: below `items`; those with the same keys are neighbours."""
        _, queries, heads, _, _ = self.shape
        tile, part = jax.lax.rem(number, self.tiles), jax.lax.div(number, self.tiles)
        first = (self.tiles - 1 - tile) * self.at_once  # in a prefill, the rows that see the most keys come first
        pair = jax.lax.div(part, self.splits)
        b, head = jax.lax.div(pair, heads), jax.lax.rem(pair, heads)
        at = [jnp.minimum(first + t, queries - 1) for t in range(self.at_once)]
        position = [refs["positions"][b, t] for t in at]
        span = span_of(refs, b, position, self.causal, self.window)
        share = jax.lax.div(span.blocks + (self.splits - 1), self.splits)
        start = jnp.minimum(jax.lax.rem(part, self.splits) * share, span.blocks)
        return Item(b, head, first, span, start, jnp.minimum(start + share, span.blocks), part, at, position)


@dataclasses.dataclass(frozen=True)
class Span:
    """The blocks of keys that some row sees: those of fresh keys, then those of pages from the newest to the oldest.

    So a block with keys that must be cleared is seldom an item's last one, after which nothing hides the time for it.
    """

    length: jax.Array
    begin: jax.Array  # the first position that a row may see
    cached_end: jax.Array  # the position after the last one that a row may see in the pages
    fresh_end: jax.Array  # the same for fresh keys
    first: jax.Array  # the number of the oldest block of pages
    cached: jax.Array  # blocks of pages
    fresh_first: jax.Array  # the number of the first block of fresh keys
    fresh: jax.Array  # blocks of fresh keys

    @property
    def blocks(self) -> jax.Array:
        return self.fresh + self.cached

    def place(self, block: jax.Array) -> jax.Array:
        """The position of the first key of a block of pages."""
        return (self.first + self.cached - 1 - (block - self.fresh)) * KEYS

    def row(self, block: jax.Array) -> jax.Array:
        """The row of the first key of a block of fresh keys."""
        return (self.fresh_first + block) * KEYS

    def seen(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The position of a block's first key, and the position after the last key of its kind that a row may see."""
        is_fresh = block < self.fresh
        base = jnp.where(is_fresh, self.length + self.row(block), self.place(block))
        return base, jnp.where(is_fresh, self.fresh_end, self.cached_end)


@dataclasses.dataclass(frozen=True)
class Work:
    b: jax.Array  # the sequence
    head: jax.Array
    first: jax.Array  # its first query
    span: Span
    start: jax.Array  # its blocks of the span are start .. stop - 1
    stop: jax.Array


@dataclasses.dataclass(frozen=True)
class Item(Work):
    part: jax.Array  # its number among all parts of all heads and sequences
    at: list[jax.Array]  # its queries; the last one several times if there are fewer
    position: list[jax.Array]  # of the queries

    def after(self, plan: Plan) -> jax.Array:
        """The position after each row's own."""
        layout = dialect.mosaic().Layout.WGMMA
        row = dialect.mosaic().broadcasted_iota(jnp.int32, (ROWS, KEYS), 0, layout=layout)
        after = dialect.mosaic().layout_cast(jnp.full((ROWS, KEYS), (self.position[0] + 1).astype(jnp.float32)), layout)
        for t in range(1, plan.at_once):
            after = jnp.where(row >= t * plan.rows, (self.position[t] + 1).astype(jnp.float32), after)
        return jnp.max(after, axis=1)


def span_of(refs, b, position, causal, window) -> Span:
    """The span of queries of a sequence. position: theirs, or the least and the largest."""
    length, ring = refs["lengths"][b], refs["k"].shape[1] * refs["table"].shape[1]
    horizon = functools.reduce(jnp.maximum, position) + 1
    oldest = jnp.int32(0) if window is None else jnp.maximum(functools.reduce(jnp.minimum, position) - (window - 1), 0)
    begin = jnp.maximum(length - ring, oldest)
    cached_end = jnp.minimum(length, horizon) if causal else length
    first = jax.lax.div(begin, KEYS)
    cached = jnp.maximum(_blocks(cached_end) - first, 0)
    fresh_end, fresh_first, fresh = length, jnp.int32(0), jnp.int32(0)
    if "count" in refs:
        fresh_end = length + jnp.minimum(refs["count"][b], refs["fresh_k"].shape[1])
        fresh_end = jnp.minimum(fresh_end, horizon) if causal else fresh_end
        fresh_first = jax.lax.div(jnp.maximum(oldest - length, 0), KEYS)
        fresh = jnp.maximum(_blocks(jnp.maximum(fresh_end - length, 0)) - fresh_first, 0)
    return Span(length, begin, cached_end, fresh_end, first, cached, fresh_first, fresh)


def _blocks(keys):
    return jax.lax.div(keys + (KEYS - 1), KEYS)


def each_block(refs, item: Work, copy) -> None:
    """Calls copy(block, K, V, major, rows) for each block of an item: see `copy_block`."""

    def step(block, _):
        copy_block(refs, item, block, page_of(refs, item, block), functools.partial(copy, block))

    jax.lax.fori_loop(item.start, item.stop, step, None)


def page_of(refs, item: Work, block) -> jax.Array:
    """The number of the page that holds a block, or of any page if it is one of fresh keys."""
    page, places = refs["k"].shape[1], refs["table"].shape[1]
    return refs["table"][item.b, jax.lax.rem(jax.lax.div(item.span.place(block), page), places)]


def hidden_zero(item: Work, step) -> jax.Array:
    """Zero, which the compiler does not know. step: the number of a loop's step, at least zero.

    Added to an index, it lets the compiler find the place in shared memory that a product reads in each step anew. Else it computes all
    these places before the loop and keeps them in registers, of which the sums leave too few, and spills them.
    """
    return jnp.minimum(item.span.length + step, 0)


def copy_block(refs, item: Work, block, page, copy) -> None:
    """Calls copy(K, V, major, rows) for a block of an item. Its keys are K[major, rows], where copies read zeros past the last row. page:
    as `page_of` says."""

    def from_page():
        copy(refs["k"], refs["v"], page, pl.ds(jax.lax.rem(item.span.place(block), refs["k"].shape[1]), KEYS))

    if "count" in refs:
        most = pl.cdiv(min(refs["fresh_k"].shape[1], KEYS), 8) * 8
        rows = pl.ds(item.span.row(block), most)
        pl.when(block >= item.span.fresh)(from_page)
        pl.when(block < item.span.fresh)(functools.partial(copy, refs["fresh_k"], refs["fresh_v"], item.b, rows))
    else:
        from_page()


def tiled(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    """An array in shared memory in the layout that products read."""
    mosaic, swizzle = dialect.mosaic(), 128  # bytes
    tiling = mosaic.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return mosaic.SMEM(shape, dtype, transforms=(tiling, mosaic.SwizzleTransform(swizzle)))


def load_queries(plan: Plan, refs, item: Item, held, columns) -> None:
    """Copies these columns of an item's queries to rows of `held`, in shared memory. A copy of each query arrives at `refs["loaded"]`."""
    for n, query in enumerate(item.at):
        source = refs["q"].at[item.b, query, item.head, _heads(plan, item), columns]
        dialect.mosaic().copy_gmem_to_smem(source, held.at[pl.ds(n * plan.rows, plan.rows)], refs["loaded"])


def store_transposed(ref, value) -> None:
    """Stores a product's numbers [columns, rows] as the rows of shared memory."""
    mosaic = dialect.mosaic()
    dialect.mosaic_transposed(ref)[...] = mosaic.layout_cast(value, mosaic.Layout.WGMMA_TRANSPOSED)


def store_results(plan: Plan, refs, item: Item, held, columns) -> None:
    """Copies these columns of an item's results from shared memory. `wait_smem_to_gmem` waits until that is done."""
    for n in range(plan.at_once):
        query = item.first + n

        @pl.when(query < plan.shape[1])
        def _(n=n, query=query):
            if plan.splits == 1:
                target = refs["out"].at[item.b, query, item.head, _heads(plan, item), columns]
            else:
                target = refs["acc"].at[item.part, query, _heads(plan, item), columns]
            dialect.mosaic().copy_smem_to_gmem(held.at[pl.ds(n * plan.rows, plan.rows)], target)


def _heads(plan: Plan, item: Item) -> Any:
    """The heads of a query as a copy takes them. It reads zeros for heads that there are not, and does not write them, but a static slice
    may not have them."""
    return pl.ds(item.first * 0, plan.rows)


def store_numbers(plan: Plan, refs, item: Item, held, top, total) -> None:
    """Copies an item's largest scores and sums of weights, if its results are partial, through `held` in shared memory."""
    mosaic, rows = dialect.mosaic(), pl.ds(jax.lax.div(item.first, plan.at_once) * plan.height, plan.height)
    for n, value in enumerate((top, total)):
        held.at[n][...] = value
    mosaic.commit_smem()
    for n, name in enumerate(("top", "total")):
        mosaic.copy_smem_to_gmem(held.at[n], refs[name].at[item.part, rows])


def inside(span: Span, block) -> tuple[jax.Array, jax.Array]:
    """The first key of a block that some row may see, and the one after the last."""
    return within(span.begin, span.seen(block))


def within(begin, seen) -> tuple[jax.Array, jax.Array]:
    """The same, given the first position that a row may see and `Span.seen` of the block."""
    base, end = seen
    return jnp.maximum(begin - base, 0), jnp.minimum(end - base, KEYS)


def clear(values, seen) -> None:
    """Clears V of keys that no row may see, those outside `seen`. They may be NaN, and a weight of 0 times NaN is NaN."""
    mosaic, (low, high) = dialect.mosaic(), seen

    @pl.when((low > 0) | (high < KEYS))
    def _():
        row = mosaic.broadcasted_iota(jnp.int32, (KEYS, KEYS), 0, layout=mosaic.Layout.WGMMA)
        for column in range(0, values.shape[1], KEYS):
            part = values.at[:, pl.ds(column, KEYS)]
            part[...] = jnp.where((row >= low) & (row < high), part[...], jnp.zeros((), part.dtype))
        mosaic.commit_smem()


def across(x, width: int):
    """A number of each row, in `width` columns."""
    return jax.lax.broadcast_in_dim(x, (ROWS, width), (0,))


class Softmax:
    """The softmax of 64 rows, a block of keys after the other."""

    def __init__(self, after, begin, limit=None, *, causal: bool, window: int | None, scale: float, partial: bool = False):
        """after: the position after each row's own; begin: the first position that a row may see; limit: the position after the last that
        each row sees, if that is not its own; partial: whether only a part of the keys comes. The others are those of a plan."""
        mosaic = dialect.mosaic()
        self.key = mosaic.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=mosaic.Layout.WGMMA)
        # We compare positions in float32, which holds them exactly, because int32 vectors would be compared as uint32.
        self.after, self.begin, self.limit = after, begin, after if limit is None else limit
        self.causal, self.window, self.scale, self.partial = causal, window, scale, partial

    def start(self, width: int):
        """The state before the first block: sums of `width` columns of V, each row's largest score and its sum of weights."""
        acc = dialect.mosaic().layout_cast(jnp.zeros((ROWS, width), jnp.float32), dialect.mosaic().Layout.WGMMA)
        return acc, self._each_row(MASKED), self._each_row(0.0)

    def step(self, scores, state, seen, plain=None):
        """The weights of a block's keys, and the state before V is added. The rest as in `weigh`."""
        acc, top, total = state
        weights, shrink, top, total = self.weigh(scores, top, total, seen, plain)
        return weights, (acc * across(shrink, acc.shape[1]), top, total)

    def weigh(self, scores, top, total, seen, plain=None):
        """The weights of a block's keys, by what to multiply all sums before it, and the largest score and the sum of weights with it.

        scores: products of queries and keys. seen: of the block. plain: whether every row sees every key of it, if that is known."""
        scores = self.masked(scores, seen, plain)
        new_top = self.raised(scores, top)
        weights, shrink, total = self.weights(scores, top, new_top, total)
        return weights, shrink, new_top, total

    def masked(self, scores, seen, plain=None):
        """Minus infinity for keys that a row does not see. The arguments are those of `weigh`."""
        return self._masked(scores, seen) if plain is None else jax.lax.cond(plain, lambda x: x, lambda x: self._masked(x, seen), scores)

    def raised(self, scores, top):
        """Each row's largest score, with these masked ones."""
        return jnp.maximum(top, jnp.max(scores, axis=1) * self.scale)

    def weights(self, scores, top, new_top, total):
        """The weights of masked scores, by what to multiply all sums before them, and the sum of weights with theirs."""
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores * self.scale - across(new_top, KEYS))
        return weights.astype(jnp.bfloat16), shrink, total * shrink + jnp.sum(weights, axis=1)

    def _masked(self, scores, seen):
        base, end = seen
        # Computed for every such block, so that fewer registers are held for long.
        position = (self.key + base).astype(jnp.float32)
        limit = self._each_row(end.astype(jnp.float32))
        if self.causal:
            limit = jnp.minimum(limit, self.limit)
        least = self._each_row(self.begin.astype(jnp.float32))
        if self.window is not None:
            least = jnp.maximum(least, self.after - float(self.window))
        visible = (position >= across(least, KEYS)) & (position < across(limit, KEYS))
        return jnp.where(visible, scores, -jnp.inf)

    def result(self, acc, total):
        """What is stored of the sums of V: the final result, or the sums if they are partial."""
        return acc if self.partial else acc * across(1.0 / jnp.maximum(total, 1e-30), acc.shape[1])

    def _each_row(self, value):
        return dialect.mosaic().layout_cast(jnp.full((ROWS,), value, jnp.float32), dialect.mosaic().Layout.WGMMA.reduce(1))
