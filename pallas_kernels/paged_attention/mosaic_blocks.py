"""What both kernels in the Mosaic GPU dialect share: which keys a program reads, how it copies them, and one step of the softmax."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention.reference import MASKED

ROWS, KEYS = 64, 64  # query rows of a program, keys of a block


@dataclasses.dataclass(frozen=True)
class Span:
    """The blocks of keys that some row of a program sees: those of fresh keys, then those of pages from the newest to the oldest.

    The order keeps the blocks that have keys which nobody sees away from a program's end, where nothing hides the time to clear them.
    """

    length: jax.Array
    begin: jax.Array  # the first position that a row may see
    cached_end: jax.Array  # the first position that no row sees in the pages
    fresh_end: jax.Array  # and among the fresh keys
    first: jax.Array  # the number of the first block in the pages
    cached: jax.Array  # blocks of pages
    fresh_first: jax.Array
    fresh: jax.Array  # blocks of fresh keys

    @property
    def blocks(self) -> jax.Array:
        return self.fresh + self.cached

    def place(self, block: jax.Array) -> jax.Array:
        """The position of the first key of a block of pages."""
        return (self.first + self.cached - 1 - (block - self.fresh)) * KEYS

    def fresh_row(self, block: jax.Array) -> jax.Array:
        """The row of the first key of a block of fresh keys."""
        return (self.fresh_first + block) * KEYS

    def seen(self, block: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The position of a block's first key, and the numbers of the first key that a row may see and of that after the last one."""
        is_fresh = block < self.fresh
        base = jnp.where(is_fresh, self.length + self.fresh_row(block), self.place(block))
        end = jnp.where(is_fresh, self.fresh_end, self.cached_end)
        return base, jnp.maximum(self.begin - base, 0), jnp.minimum(end - base, KEYS)

    def part(self, split: jax.Array, splits: int) -> tuple[jax.Array, jax.Array]:
        """The first block of a part, and that after its last one."""
        share = jax.lax.div(self.blocks + (splits - 1), splits)
        start = jnp.minimum(split * share, self.blocks)
        return start, jnp.minimum(start + share, self.blocks)


def span(refs, b, position, *, causal: bool, window: int | None) -> Span:
    """The span of rows at these positions of sequence b. refs: the kernel's arguments by name."""
    length, ring = refs["lengths"][b], refs["k"].shape[1] * refs["table"].shape[1]
    horizon = functools.reduce(jnp.maximum, position) + 1
    oldest = jnp.int32(0) if window is None else jnp.maximum(functools.reduce(jnp.minimum, position) - (window - 1), 0)
    begin = jnp.maximum(length - ring, oldest)
    end = jnp.minimum(length, horizon) if causal else length
    first = jax.lax.div(begin, KEYS)
    fresh_end, fresh_first = length, jnp.int32(0)
    if "count" in refs:
        fresh_end = length + jnp.minimum(refs["count"][b], refs["fresh_k"].shape[1])
        fresh_end = jnp.minimum(fresh_end, horizon) if causal else fresh_end
        fresh_first = jax.lax.div(jnp.maximum(oldest - length, 0), KEYS)
    cached = jnp.maximum(_blocks(end) - first, 0)
    fresh = jnp.maximum(_blocks(jnp.maximum(fresh_end - length, 0)) - fresh_first, 0)
    return Span(length, begin, end, fresh_end, first, cached, fresh_first, fresh)


def each_block(refs, b, found: Span, start, stop, copy) -> None:
    """Calls copy(block, K, V, major, rows) for every block from start to stop - 1; its keys are [major, rows] of K and V."""
    page, places = refs["k"].shape[1], refs["table"].shape[1]

    def step(block, _):
        def from_page():
            place = found.place(block)
            entry = refs["table"][b, jax.lax.rem(jax.lax.div(place, page), places)]
            copy(block, refs["k"], refs["v"], entry, pl.ds(jax.lax.rem(place, page), KEYS))

        if "count" in refs:
            most = pl.cdiv(min(refs["fresh_k"].shape[1], KEYS), 8) * 8  # rows past the last one read as zeros
            rows = pl.ds(found.fresh_row(block), most)
            pl.when(block >= found.fresh)(from_page)
            pl.when(block < found.fresh)(functools.partial(copy, block, refs["fresh_k"], refs["fresh_v"], b, rows))
        else:
            from_page()

    jax.lax.fori_loop(start, stop, step, None)


def padded_fresh(fresh):
    """Fresh K and V with a number of rows that can be copied. Copies take tiles of eight rows, so fewer than eight will do, or a multiple."""
    missing = -fresh[0].shape[1] % 8 if fresh[0].shape[1] > 8 else 0
    return tuple(jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in fresh) if missing else fresh


def tiled(*shape: int, dtype=jnp.bfloat16):
    """An array in shared memory in the layout that products read."""
    mosaic, swizzle = dialect.mosaic(), 128  # bytes
    tiling = mosaic.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
    return mosaic.SMEM(shape, dtype, transforms=(tiling, mosaic.SwizzleTransform(swizzle)))


def across(x, width: int):
    """A number of each row, in `width` columns."""
    return jax.lax.broadcast_in_dim(x, (ROWS, width), (0,))


class Softmax:
    """Steps of the softmax of a program's rows, over the keys that each row sees. Scores are in units of log2."""

    def __init__(self, position, rows: int, *, causal: bool, window: int | None):
        """position: of each query; it has `rows` rows."""
        self.mosaic, self.causal, self.window = dialect.mosaic(), causal, window
        layout = self.mosaic.Layout.WGMMA
        self.row, key = (self.mosaic.broadcasted_iota(jnp.int32, (ROWS, KEYS), d, layout=layout) for d in range(2))
        # We compare positions in float32, which holds them exactly, because int32 vectors would be compared as uint32.
        self.lane = key.astype(jnp.float32)
        after = self.mosaic.layout_cast(jnp.full((ROWS, KEYS), (position[0] + 1).astype(jnp.float32)), layout)
        for t in range(1, len(position)):
            after = jnp.where(self.row >= t * rows, (position[t] + 1).astype(jnp.float32), after)
        self.after = jnp.max(after, axis=1)  # the position after each row's

    def per_row(self, value):
        return self.mosaic.layout_cast(jnp.full((ROWS,), value, jnp.float32), self.mosaic.Layout.WGMMA.reduce(1))

    def start(self, width: int):
        """Of no keys: sums of V's columns, each row's largest score and its sum of weights."""
        acc = self.mosaic.layout_cast(jnp.zeros((ROWS, width), jnp.float32), self.mosaic.Layout.WGMMA)
        return acc, self.per_row(MASKED), self.per_row(0.0)

    def step(self, scores, carry, base, low, high):
        """The weights of a block's keys, and the carry before its V is added. Arguments after carry: as `Span.seen` gives them."""
        acc, top, total = carry
        limit, least = self.per_row(high.astype(jnp.float32)), self.per_row(low.astype(jnp.float32))
        after = self.after - base.astype(jnp.float32)
        if self.causal:
            limit = jnp.minimum(limit, after)
        if self.window is not None:
            least = jnp.maximum(least, after - float(self.window))
        visible = (self.lane >= across(least, KEYS)) & (self.lane < across(limit, KEYS))
        scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - across(new_top, KEYS))
        total = total * shrink + jnp.sum(weights, axis=1)
        return weights, (acc * across(shrink, acc.shape[1]), new_top, total)

    def clear(self, values, low, high):
        """Clears V of keys that no row sees. They may be NaN, and a weight of 0 times NaN is NaN."""

        @pl.when((low > 0) | (high < KEYS))
        def _clear():
            for column in range(0, values.shape[1], KEYS):
                part = values.at[:, pl.ds(column, KEYS)]
                part[...] = jnp.where((self.row >= low) & (self.row < high), part[...], jnp.zeros((), part.dtype))
            self.mosaic.commit_smem()


def normalised(acc, total):
    """Zeros for a row that saw no key."""
    return acc * across(1.0 / jnp.maximum(total, 1e-30), acc.shape[1])


def _blocks(keys):
    return jax.lax.div(keys + (KEYS - 1), KEYS)
