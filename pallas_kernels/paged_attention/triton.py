"""Paged attention as a split-KV kernel in the Triton dialect.

A program serves a tile of query rows of one KV head (its G query heads x T positions) over one part of the keys that the tile can see:
pages first, then fresh rows. We split the visible keys, not the whole length, so with a window or a short sequence all programs still
have the same amount of work. A second, small kernel merges the partial results; with one part it is not needed.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl, plgpu
from pallas_kernels.paged_attention.reference import MASKED

LOG2_E = math.log2(math.e)
MOST_SPLITS = 32
# Of a program that merges, which is one warp: most columns, with which a thread loads 16 bytes at a time, and most numbers.
MERGE_COLUMNS, MERGE_NUMBERS = 128, 4096
PROGRAMS = 512  # about four for each of an H200's 132 multiprocessors, which keeps its memory busy


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut."""

    rows: int  # query rows of a program
    keys: int  # keys of a step
    splits: int  # parts of the visible keys
    num_warps: int
    num_stages: int


def unsupported(head_dim: int, page: int | None) -> str | None:
    """Why the kernel cannot serve heads of this size and a cache with pages of that size (None: no cache), or None."""
    if page is not None and page % 16:
        return f"pages hold {page} positions, the kernel needs a multiple of 16"
    if head_dim > 512:
        return f"head_dim is {head_dim}, the kernel holds at most 512"
    return None


def tiles_for(q, cached, table, fresh, key_weight, window) -> Tiles:
    """The tiles for these arguments of `paged_attention`."""
    batch, queries, heads, group, dim = q.shape
    rows, rotary = queries * group, key_weight is not None
    stored = cached if cached is not None else fresh
    wide_numbers = max(q.dtype.itemsize, stored[0].dtype.itemsize) > 2
    page = 0 if cached is None else cached[0].shape[1]
    visible = 0 if cached is None else table.shape[1] * page
    visible = visible if window is None else min(visible, window)
    visible += 0 if fresh is None else fresh[0].shape[1]

    # Measured on an H200 over `shapes.py`; see `bench.py`.
    tile, keys, warps = 16, 64, 4
    if wide_numbers:
        keys = 16
    elif dim > 256:
        small, narrow = dialect.shared_memory() <= 104_448, stored[0].dtype.itemsize == 1  # narrow K and V are also held widened
        tile, keys = (32, 32) if rows > 64 and not (small and narrow) else (16, 64 if rotary and not small else 32)
    elif rows > 16:
        tile, keys = (64 if rows > 64 else 32), 32
        keys = 64 if cached is None and dim <= 64 and rows > 64 else keys  # an image tower's
    programs = batch * heads * pl.cdiv(rows, tile)

    def blocks(keys):  # two more, since the oldest key may lie inside a block and fresh rows have blocks of their own
        return visible // keys + 2

    if dim <= 256 and tile <= 32 and not wide_numbers:
        # The fewest keys with which all blocks are computed at once, each by a program of its own.
        keys = next((n for n in (32, 64) if programs * blocks(n) <= dialect.MULTIPROCESSORS), keys)
    keys = min(keys, page & -page if page else keys, max(16, pl.next_power_of_2(visible)))
    parts = pl.cdiv(PROGRAMS, programs) if cached is not None else max(PROGRAMS // programs, 1)
    splits = min(parts, blocks(keys), MOST_SPLITS)
    if splits == 1 and tile == 16 and dim == 256 and not wide_numbers:
        keys, warps = min(keys, 32), 2
    return Tiles(tile, keys, splits, warps, num_stages=2)


def paged_attention(
    q, positions, cached, table, lengths, fresh, fresh_count, key_weight, scales, through=None, *, causal, window, scale, ancestors=None,
    launch_dependents=False, interpret=False, tiles=None,
):  # fmt: skip
    """See `pallas_kernels.paged_attention.paged_attention`."""
    batch, queries, heads, group, dim = q.shape
    if tiles is None:
        tiles = tiles_for(q, cached, table, fresh, key_weight, window)
    row_tiles = pl.cdiv(queries * group, tiles.rows)

    inputs = {"lengths": lengths, "positions": positions, "q": q}
    if key_weight is not None:
        inputs["weight"] = key_weight
    if scales is not None:
        inputs["scales"] = scales
    if through is not None:
        inputs["through"] = through
    if cached is not None:
        inputs |= {"table": table, "k": cached[0], "v": cached[1]}
    if fresh is not None:
        inputs |= {"count": fresh_count, "fresh_k": fresh[0], "fresh_v": fresh[1]}
    if ancestors is not None:
        inputs["ancestors"] = jnp.asarray(ancestors, jnp.uint32)
    if tiles.splits == 1:
        outputs = {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    else:
        parts = (batch, heads, tiles.splits, row_tiles * tiles.rows)
        numbers = jax.ShapeDtypeStruct(parts, jnp.float32)
        outputs = {"acc": jax.ShapeDtypeStruct((*parts, dim), jnp.float32), "top": numbers, "total": numbers}
    out = dialect.call(
        functools.partial(_attend, names=(*inputs, *outputs), tiles=tiles, causal=causal, window=window, scale=scale * LOG2_E),
        name="paged_attention",
        grid=(row_tiles, tiles.splits, batch * heads),
        out_shape=list(outputs.values()),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
        launch_dependents=launch_dependents or tiles.splits > 1,
    )(*inputs.values())
    return out[0] if tiles.splits == 1 else merged(out, q, tiles.splits, interpret, launch_dependents=launch_dependents)


def _attend(*refs, names, tiles, causal, window, scale):
    refs = dict(zip(names, refs, strict=True))
    has_weight, has_cache, has_fresh = (name in refs for name in ("weight", "k", "fresh_k"))
    lengths_ref, positions_ref, q_ref = refs["lengths"], refs["positions"], refs["q"]
    _, queries, heads, group, dim = q_ref.shape
    tile, split, b, head = pl.program_id(0), pl.program_id(1), pl.program_id(2) // heads, pl.program_id(2) % heads

    row = tile * tiles.rows + jnp.arange(tiles.rows, dtype=jnp.int32)
    real = row < queries * group
    at, member = jnp.minimum(row // group, queries - 1), row % group
    position = plgpu.load(positions_ref.at[b, at])
    length = lengths_ref[b]
    # The rows of the tile see keys from `oldest` to `horizon` - 1. Fresh keys stand at `length` and after it.
    through = plgpu.load(refs["through"].at[b, at]) if "through" in refs else position
    newest = jnp.max(through)
    tree = "ancestors" in refs  # of which all rows have keys of their own, and all cached keys are before them
    horizon = newest + 1 if causal and not tree else jnp.int32(2**30)
    oldest = jnp.int32(0) if window is None else jnp.maximum(jnp.min(position) - window + 1, 0)

    width, wide = _padded(dim), jnp.arange(_padded(dim), dtype=jnp.int32)

    def load_q(columns, inside):
        where = q_ref.at[b, at[:, None], head, member[:, None], columns[None, :]]
        return plgpu.load(where, mask=real[:, None] & inside[None, :], other=jnp.zeros((), q_ref.dtype))

    dot = functools.partial(plgpu.dot, precision="highest" if q_ref.dtype == jnp.float32 else None)
    if has_weight:
        # K is V times a weight outside the rotary dims, so one tile of V serves both products.
        rotary = refs["k" if has_cache else "fresh_k"].shape[-1]
        half = rotary // 2
        turns = (wide < half) | ((wide >= dim // 2) & (wide < dim // 2 + half))
        weight = plgpu.load(
            refs["weight"].at[jnp.minimum(wide, dim - 1)], mask=(wide < dim) & ~turns, other=jnp.zeros((), refs["weight"].dtype)
        )
        q = (load_q(jnp.minimum(wide, dim - 1), wide < dim).astype(jnp.float32) * weight.astype(jnp.float32)[None, :]).astype(q_ref.dtype)
        narrow = jnp.arange(_padded(rotary), dtype=jnp.int32)
        column = jnp.where(narrow < half, narrow, jnp.minimum(narrow + dim // 2 - half, dim - 1))
        q_rotary = load_q(column, narrow < rotary)
    else:
        q, q_rotary = load_q(jnp.minimum(wide, dim - 1), wide < dim), None

    def load_rows(ref, index, kept, count):
        """Keys or values of one step from a pool or from fresh rows: [keys, padded dim] in q's dtype."""
        columns, mask = jnp.arange(_padded(count), dtype=jnp.int32), kept[:, None]
        if _padded(count) != count:
            mask, columns = mask & (columns < count)[None, :], jnp.minimum(columns, count - 1)
        where = ref.at[index[0], index[1][:, None], head, columns[None, :]]
        return _widened(plgpu.load(where, mask=mask, other=jnp.zeros((), ref.dtype)), q_ref.dtype)

    def step(key_position, k_source, v_source, index, kept, carry, seen=None):
        top, total, acc = carry
        v = load_rows(v_source, index, kept, dim)
        k = load_rows(k_source, index, kept, k_source.shape[-1])
        scores = dot(q_rotary if has_weight else q, k.T) * k_scale
        if has_weight:
            scores = scores + dot(q, v.T) * v_scale
        visible = kept[None, :]
        if seen is not None:
            visible = visible & seen
        if causal and seen is None:
            visible = visible & (key_position[None, :] <= through[:, None])
        if window is not None and seen is None:
            visible = visible & (position[:, None] - key_position[None, :] < window)
        scores = jnp.where(visible, scores * scale, MASKED)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.where(visible, jnp.exp2(scores - new_top[:, None]), 0.0)
        total = total * shrink + jnp.sum(weights, axis=1)
        acc = acc * shrink[:, None] + dot(weights.astype(v.dtype), v)
        return new_top, total, acc

    k_scale, v_scale = (refs["scales"][0], refs["scales"][1]) if "scales" in refs else (1.0, 1.0)
    keys = tiles.keys
    lane = jnp.arange(keys, dtype=jnp.int32)
    first = cached_blocks = fresh_first = fresh_blocks = jnp.int32(0)
    if has_cache:
        table_ref, k_ref, v_ref = refs["table"], refs["k"], refs["v"]
        page, places = k_ref.shape[1], table_ref.shape[1]
        begin = jnp.maximum(oldest, length - page * places)
        end = jnp.minimum(length, horizon)
        first = begin // keys
        cached_blocks = jnp.maximum(pl.cdiv(end, keys) - first, 0)
    if has_fresh:
        count_ref, fresh_k_ref, fresh_v_ref = refs["count"], refs["fresh_k"], refs["fresh_v"]
        count = jnp.minimum(count_ref[b], fresh_k_ref.shape[1])
        fresh_end = jnp.minimum(count, horizon - length)
        fresh_first = jnp.int32(0) if tree else jnp.maximum(oldest - length, 0) // keys
        words = plgpu.load(refs["ancestors"].at[at]) if tree else position
        fresh_blocks = jnp.maximum(pl.cdiv(fresh_end, keys) - fresh_first, 0)
    share = pl.cdiv(cached_blocks + fresh_blocks, tiles.splits)
    start = split * share
    stop = jnp.minimum(start + share, cached_blocks + fresh_blocks)

    carry = (
        jnp.full((tiles.rows,), MASKED, jnp.float32),
        jnp.zeros((tiles.rows,), jnp.float32),
        jnp.zeros((tiles.rows, width), jnp.float32),
    )
    if has_cache:

        def cached_step(i, carry):
            base = (first + i) * keys
            key_position = base + lane
            entry = table_ref[b, (base // page) % places]
            index = (entry, base % page + lane)
            return step(key_position, k_ref, v_ref, index, (key_position >= begin) & (key_position < end), carry)

        carry = jax.lax.fori_loop(start, jnp.minimum(stop, cached_blocks), cached_step, carry)
    if has_fresh:

        def fresh_step(i, carry):
            number = (fresh_first + i - cached_blocks) * keys + lane
            index = (b, jnp.minimum(number, fresh_k_ref.shape[1] - 1))
            seen = None
            if tree:
                seen = (words[:, None] >> jnp.minimum(number, 31).astype(jnp.uint32)[None, :]) & jnp.uint32(1) > 0
            return step(length + number, fresh_k_ref, fresh_v_ref, index, number < fresh_end, carry, seen)

        carry = jax.lax.fori_loop(jnp.maximum(start, cached_blocks), stop, fresh_step, carry)

    top, total, acc = carry
    acc = acc * v_scale
    inside = (wide < dim)[None, :]
    if tiles.splits == 1:
        value = jnp.where(total[:, None] > 0, acc / jnp.maximum(total, 1e-30)[:, None], 0.0).astype(q_ref.dtype)
        where = refs["out"].at[b, (row // group)[:, None], head, member[:, None], wide[None, :]]
        plgpu.store(where, value, mask=real[:, None] & inside)
    else:
        plgpu.store(refs["acc"].at[b, head, split, row[:, None], wide[None, :]], acc, mask=real[:, None] & inside)
        plgpu.store(refs["top"].at[b, head, split, row], top, mask=real)
        plgpu.store(refs["total"].at[b, head, split, row], total, mask=real)


def merged(parts, q, splits, interpret, rows=None, launch_dependents=False):
    """Merges the partial results of all splits: [B, T, KV, G, D] in q's dtype. A program merges some columns of one query row.

    parts: for each split, the weighted sums of V [B, KV, splits, rows, D] float32, the largest score of each row and the sum of its
    weights, [B, KV, splits, rows] float32 each. There are T * G rows, or more. rows: from one query to the next in the last two, G by
    default.
    """
    batch, queries, heads, group, dim = q.shape
    rows = group if rows is None else rows
    width = min(MERGE_COLUMNS, MERGE_NUMBERS // pl.next_power_of_2(splits), _padded(dim))

    return dialect.call(
        functools.partial(_merge, splits=splits, rows=rows, width=width),
        name="paged_attention_merge",
        grid=(queries * group, pl.cdiv(dim, width), batch * heads),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        num_warps=1,
        num_stages=1,
        interpret=interpret,
        launch_dependents=launch_dependents,
    )(*parts)


def _merge(acc_ref, top_ref, total_ref, out_ref, *, splits, rows, width):
    _, _, heads, group, dim = out_ref.shape
    row, b, head = pl.program_id(0), pl.program_id(2) // heads, pl.program_id(2) % heads
    part = jnp.arange(pl.next_power_of_2(splits), dtype=jnp.int32)
    column = pl.program_id(1) * width + jnp.arange(width, dtype=jnp.int32)
    real, inside = part < splits, column < dim
    mask = real[:, None] & inside[None, :]
    acc = plgpu.load(acc_ref.at[b, head, part[:, None], row, column[None, :]], mask=mask, other=jnp.float32(0.0))
    number = row // group * rows + row % group
    top = plgpu.load(top_ref.at[b, head, part, number], mask=real, other=jnp.float32(MASKED))
    total = plgpu.load(total_ref.at[b, head, part, number], mask=real, other=jnp.float32(0.0))
    share = jnp.exp2(top - jnp.max(top))
    total = jnp.sum(share * total)
    value = jnp.where(total > 0, jnp.sum(acc * share[:, None], axis=0) / jnp.maximum(total, 1e-30), 0.0)
    plgpu.store(out_ref.at[b, row // group, head, row % group, column], value.astype(out_ref.dtype), mask=inside)


def _widened(x, dtype):
    """x in dtype. We convert e4m3 by its bits, since GPUs before compute capability 8.9 cannot."""
    if x.dtype != jnp.float8_e4m3fn:
        return x.astype(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint16)
    sign, rest = (bits & jnp.uint16(0x80)) << jnp.uint16(8), (bits & jnp.uint16(0x7F)) << jnp.uint16(7)
    return (jax.lax.bitcast_convert_type(sign | rest, jnp.float16) * jnp.float16(256)).astype(dtype)  # the exponents' biases differ by 8


def _padded(dim: int) -> int:
    """The width of a tile that holds `dim` columns: a power of two, and at least 16, as products need."""
    return max(16, pl.next_power_of_2(dim))
