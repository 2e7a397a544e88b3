"""Paged attention as a split-KV kernel in the Mosaic GPU dialect, for Hopper and for keys of which only the rotary dims are stored.

A program serves up to 64 query rows of one KV head over one part of the keys that they can see, as in `triton`. It has three
warpgroups. One copies pages to shared memory. The other two each accumulate half of V's columns, and each compute all scores:
(queries * weight) . V outside the rotary dims plus queries . K in them, so that one copy of V serves both products. The two take turns:
while one computes products, the other computes its softmax. FlashMLA (https://github.com/deepseek-ai/FlashMLA) and FlashAttention-3 (Shah
et al., 2024) have the same structure.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention import triton
from pallas_kernels.paged_attention.reference import MASKED

ROWS, KEYS, DIM, ROTARY = 64, 64, 512, 128
HALF, TURNS = DIM // 2, ROTARY // 2  # columns of a warpgroup, and how many of the first of them rotate
STAGES = 2  # blocks of keys in shared memory
START = 4  # the time of a program's start and end, in units of the time for a block of keys
MOST_SPLITS = 64


def unsupported(q, cached, fresh, key_weight, scales, window, ancestors=None) -> str | None:
    """Why the kernel cannot serve these arguments of `paged_attention`, or None."""
    if reason := dialect.mosaic_obstacle():
        return reason
    if cached is None or key_weight is None:
        return "it reads pages of keys of which only the rotary dims are stored"
    k, v = cached
    if (q.shape[-1], k.shape[-1]) != (DIM, ROTARY):
        return f"head_dim is {q.shape[-1]} with {k.shape[-1]} rotary dims stored, the kernel needs {DIM} with {ROTARY}"
    if any(x.dtype != jnp.bfloat16 for x in (q, k, v, *(fresh or ()))) or scales is not None:
        return f"queries and keys are {q.dtype} and {k.dtype}{' with scales' if scales is not None else ''}, the kernel needs bfloat16"
    if q.shape[3] not in (8, 16, 32, 64):
        return f"a KV head has {q.shape[3]} query heads, the kernel needs 8, 16, 32 or 64"
    if k.shape[1] % KEYS:
        return f"pages hold {k.shape[1]} positions, the kernel needs a multiple of {KEYS}"
    if window is not None:
        return f"the window is {window}, the kernel has none"
    if ancestors is not None:
        return "the rows are those of a tree, the kernel's are consecutive"
    return None


def is_faster(q: jax.Array) -> bool:
    """Whether the kernel is faster than `triton`. On an H200 it is, by a tenth or more, if `triton` needs several tiles of 16 query rows,
    since each tile reads the keys again."""
    return q.shape[1] * q.shape[3] > 16


def paged_attention(q, positions, cached, table, lengths, fresh, fresh_count, key_weight, *, causal, scale, splits=None):
    """See `pallas_kernels.paged_attention.paged_attention`."""
    mosaic = dialect.mosaic()
    batch, queries, heads, group, dim = q.shape
    at_once = min(queries, ROWS // group)  # positions of a program's rows
    tiles = pl.cdiv(queries, at_once)
    if splits is None:
        splits = splits_for(tiles * batch * heads, table.shape[1] * cached[0].shape[1] // KEYS)
    inputs = {"lengths": lengths, "positions": positions, "q": q, "weight": key_weight, "table": table, "k": cached[0], "v": cached[1]}
    if fresh is not None:
        # Rows are copied in tiles of eight, so there must be fewer than eight, or a multiple.
        missing = -fresh[0].shape[1] % 8 if fresh[0].shape[1] > 8 else 0
        fresh = tuple(jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in fresh) if missing else fresh
        inputs |= {"count": fresh_count, "fresh_k": fresh[0], "fresh_v": fresh[1]}
    if splits == 1:
        outputs = {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    else:
        parts = (batch, heads, splits)
        numbers = jax.ShapeDtypeStruct((*parts, tiles * ROWS), jnp.float32)
        outputs = {"acc": jax.ShapeDtypeStruct((*parts, queries * group, dim), jnp.float32), "top": numbers, "total": numbers}

    def tiled(*shape, dtype=q.dtype):
        swizzle = 128  # bytes
        tiling = mosaic.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))
        return mosaic.SMEM(shape, dtype, transforms=(tiling, mosaic.SwizzleTransform(swizzle)))

    pages = (tiled(STAGES, 2, KEYS, HALF), tiled(STAGES, 2, KEYS, TURNS))
    results = (tiled(2, ROWS, HALF, dtype=jnp.float32), mosaic.SMEM((2, ROWS), jnp.float32))
    scratch = {
        "queries": tiled(2, ROWS, HALF),
        # Partial results take the place of the pages, final results that of the queries.
        "pages": pages if splits == 1 else mosaic.RefUnion(pages, results),
        "loaded": mosaic.Barrier(num_arrivals=2 * at_once),
        "full": mosaic.Barrier(num_arrivals=2, num_barriers=2 * STAGES),
        "empty": mosaic.Barrier(num_arrivals=2, num_barriers=2 * STAGES),
        "turn": mosaic.Barrier(num_arrivals=2),
        "both": mosaic.Barrier(num_arrivals=2),
    }
    names = (*inputs, *outputs)

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True)) | scratch
        _attend(mosaic, refs, at_once=at_once, splits=splits, causal=causal, scale=scale * triton.LOG2_E)

    out = mosaic.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=scratch,
        grid=(tiles, splits, batch * heads),
        grid_names=("tile", "split", "pair"),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        compiler_params=mosaic.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane),
    )(*inputs.values())
    return out[0] if splits == 1 else triton.merged(out, q, splits, interpret=False)


def splits_for(programs: int, blocks: int) -> int:
    """The best number of parts for `blocks` blocks of keys. Each part takes `programs` programs; a multiprocessor runs one at a time."""

    def time(splits: int) -> float:  # in units of the time for a block of keys, if every sequence is as long as its table
        return pl.cdiv(programs * splits, dialect.MULTIPROCESSORS) * (blocks / splits + START)

    return min(range(1, min(blocks, MOST_SPLITS) + 1), key=time)


def _attend(mosaic, refs, *, at_once, splits, causal, scale):
    lengths_ref, positions_ref, q_ref, weight_ref, table_ref, k_ref, v_ref = (
        refs[name] for name in ("lengths", "positions", "q", "weight", "table", "k", "v")
    )
    full, empty, both, queries_ref = (refs[name] for name in ("full", "empty", "both", "queries"))
    (values, rotary), (results, *stats) = refs["pages"] if splits > 1 else (refs["pages"], (queries_ref,))
    _, queries, heads, group, _ = q_ref.shape
    page, places = k_ref.shape[1], table_ref.shape[1]
    warpgroup, split, pair = (jax.lax.axis_index(name) for name in ("warpgroup", "split", "pair"))
    tile = pl.cdiv(queries, at_once) - 1 - jax.lax.axis_index("tile")  # in a prefill, tiles that see the most keys come first
    b, head = jax.lax.div(pair, heads), jax.lax.rem(pair, heads)
    first_query = tile * at_once
    at = [jnp.minimum(first_query + t, queries - 1) for t in range(at_once)]

    # The blocks of keys that some row sees: first `cached` blocks of pages, from number `first` on, then blocks of fresh keys.
    position = [positions_ref[b, t] for t in at]
    length = lengths_ref[b]
    horizon = functools.reduce(jnp.maximum, position) + 1
    begin = jnp.maximum(length - page * places, 0)
    end = jnp.minimum(length, horizon) if causal else length
    first = jax.lax.div(begin, KEYS)
    cached = jnp.maximum(_blocks(end) - first, 0)
    fresh_end = jnp.int32(0)
    if "count" in refs:
        fresh_end = jnp.minimum(refs["count"][b], refs["fresh_k"].shape[1])
        if causal:
            fresh_end = jnp.minimum(fresh_end, horizon - length)
    blocks = cached + _blocks(jnp.maximum(fresh_end, 0))
    share = jax.lax.div(blocks + (splits - 1), splits)
    start = jnp.minimum(split * share, blocks)
    stop = jnp.minimum(start + share, blocks)

    def half_of(block, half):
        """The index of a half of the buffer that holds a block."""
        return 2 * jax.lax.rem(block - start, STAGES) + half

    @pl.when(warpgroup == 2)
    def _copy():
        mosaic.set_max_registers(40, action="decrease")

        def copy(block, k_source, v_source, major, rows):
            slot = jax.lax.rem(block - start, STAGES)
            for half in range(2):
                number = half_of(block, half)
                pl.when(block - start >= STAGES)(functools.partial(mosaic.barrier_wait, empty.at[number]))
                for source, held, columns in ((k_source, rotary, TURNS), (v_source, values, HALF)):
                    source = source.at[major, rows, head, pl.ds(half * columns, columns)]
                    mosaic.copy_gmem_to_smem(source, held.at[slot, half, pl.ds(0, rows.size)], full.at[number])

        def step(block, _):
            place = (first + block) * KEYS
            entry = table_ref[b, jax.lax.rem(jax.lax.div(place, page), places)]
            from_page = functools.partial(copy, block, k_ref, v_ref, entry, pl.ds(jax.lax.rem(place, page), KEYS))
            if "count" in refs:
                fresh = refs["fresh_k"], refs["fresh_v"]
                most = pl.cdiv(min(fresh[0].shape[1], KEYS), 8) * 8  # rows past the last one read as zeros
                rows = pl.ds((block - cached) * KEYS, most)
                pl.when(block < cached)(from_page)
                pl.when(block >= cached)(functools.partial(copy, block, *fresh, b, rows))
            else:
                from_page()

        jax.lax.fori_loop(start, stop, step, None)

    @pl.when(warpgroup < 2)
    def _compute():
        mosaic.set_max_registers(232, action="increase")
        rows_layout = mosaic.Layout.WGMMA.reduce(1)
        other = 1 - warpgroup

        def across(x, width):
            return jax.lax.broadcast_in_dim(x, (ROWS, width), (0,))

        def meet(barrier=refs["turn"]):
            mosaic.barrier_arrive(barrier)
            mosaic.barrier_wait(barrier)

        # Each warpgroup loads half of the queries' columns, and multiplies those that do not rotate by the weight.
        for t in range(at_once):
            source = q_ref.at[b, at[t], head, :, pl.ds(warpgroup * HALF, HALF)]
            mosaic.copy_gmem_to_smem(source, queries_ref.at[warpgroup, pl.ds(t * group, group)], refs["loaded"])
        mosaic.barrier_wait(refs["loaded"])
        for column in range(TURNS, HALF, TURNS):
            part = queries_ref.at[warpgroup, :, pl.ds(column, TURNS)]
            weight = dialect.mosaic_load(weight_ref.at[pl.ds(warpgroup * HALF + column, TURNS)], mosaic.Layout.WGMMA.reduce(0))
            weight = jax.lax.broadcast_in_dim(weight.astype(jnp.float32), (ROWS, TURNS), (1,))
            part[...] = (part[...].astype(jnp.float32) * weight).astype(part.dtype)
        mosaic.commit_smem()
        meet(both)

        # We compare positions in float32, which holds them exactly, because int32 vectors would be compared as uint32.
        row, key = (mosaic.broadcasted_iota(jnp.int32, (ROWS, KEYS), d, layout=mosaic.Layout.WGMMA) for d in range(2))
        lane = key.astype(jnp.float32)
        seen = mosaic.layout_cast(jnp.full((ROWS, KEYS), (position[0] + 1).astype(jnp.float32)), mosaic.Layout.WGMMA)
        for t in range(1, at_once):
            seen = jnp.where(row >= t * group, (position[t] + 1).astype(jnp.float32), seen)
        seen = jnp.max(seen, axis=1)

        pl.when(warpgroup == 1)(meet)  # from here on this warpgroup is half a step behind the other

        def step(block, carry):
            acc, top, total = carry
            slot = jax.lax.rem(block - start, STAGES)
            # Rows may see keys low .. high - 1 of the block.
            is_cached = block < cached
            base = jnp.where(is_cached, (first + block) * KEYS, length + (block - cached) * KEYS)
            low = jnp.maximum(begin - base, 0)
            high = jnp.minimum(jnp.where(is_cached, end, length + fresh_end) - base, KEYS)

            def product(scores):
                for half in range(2):
                    mosaic.barrier_wait(full.at[half_of(block, half)])
                    still = pl.ds(TURNS, HALF - TURNS)
                    mosaic.wgmma(scores, queries_ref.at[half, :, still], dialect.mosaic_transposed(values.at[slot, half, :, still]))
                    turning = queries_ref.at[half, :, pl.ds(0, TURNS)]
                    mosaic.wgmma(scores, turning, dialect.mosaic_transposed(rotary.at[slot, half]))
                meet()
                return scores[...]

            scores = pl.run_scoped(product, mosaic.ACC((ROWS, KEYS), jnp.float32)) * scale
            mosaic.barrier_arrive(empty.at[half_of(block, other)])
            limit = mosaic.layout_cast(jnp.full((ROWS,), high.astype(jnp.float32)), rows_layout)
            if causal:
                limit = jnp.minimum(limit, seen - base.astype(jnp.float32))
            visible = (lane >= low.astype(jnp.float32)) & (lane < across(limit, KEYS))
            scores = jnp.where(visible, scores, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(scores, axis=1))
            shrink = jnp.exp2(top - new_top)
            weights = jnp.exp2(scores - across(new_top, KEYS))
            total = total * shrink + jnp.sum(weights, axis=1)
            acc = acc * across(shrink, HALF)
            weights = weights.astype(q_ref.dtype)

            @pl.when((low > 0) | (high < KEYS))
            def _clear():  # other keys may be NaN, and a weight of 0 times NaN is NaN
                for column in range(0, HALF, TURNS):
                    part = values.at[slot, warpgroup, :, pl.ds(column, TURNS)]
                    part[...] = jnp.where((row >= low) & (row < high), part[...], jnp.zeros((), part.dtype))
                mosaic.commit_smem()

            meet()
            acc = pl.run_state(lambda acc: mosaic.wgmma(acc, weights, values.at[slot, warpgroup]))(mosaic.ACC.init(acc))
            mosaic.barrier_arrive(empty.at[half_of(block, warpgroup)])
            return acc, new_top, total

        carry = (
            mosaic.layout_cast(jnp.zeros((ROWS, HALF), jnp.float32), mosaic.Layout.WGMMA),
            mosaic.layout_cast(jnp.full((ROWS,), MASKED, jnp.float32), rows_layout),
            mosaic.layout_cast(jnp.zeros((ROWS,), jnp.float32), rows_layout),
        )
        acc, top, total = jax.lax.fori_loop(start, stop, step, carry)
        pl.when(warpgroup == 0)(meet)

        meet(both)  # after this no warpgroup reads queries or pages
        if splits == 1:
            acc = acc * across(1.0 / jnp.maximum(total, 1e-30), HALF)
        results.at[warpgroup][...] = acc.astype(results.dtype)
        for ref in stats:

            @pl.when(warpgroup == 0)
            def _(ref=ref):
                ref.at[0][...] = top
                ref.at[1][...] = total

        mosaic.commit_smem()
        for t in range(at_once):

            @pl.when(first_query + t < queries)
            def _(t=t):
                part, wide = results.at[warpgroup, pl.ds(t * group, group)], pl.ds(warpgroup * HALF, HALF)
                if splits == 1:
                    target = refs["out"].at[b, first_query + t, head, :, wide]
                else:
                    target = refs["acc"].at[b, head, split, pl.ds((first_query + t) * group, group), wide]
                mosaic.copy_smem_to_gmem(part, target)

        for ref in stats:

            @pl.when(warpgroup == 0)
            def _(ref=ref):
                for n, name in enumerate(("top", "total")):
                    target = refs[name].at[b, head, split, pl.ds(tile * ROWS, ROWS)]
                    mosaic.copy_smem_to_gmem(ref.at[n], target)

        mosaic.wait_smem_to_gmem(0)


def _blocks(keys):
    return jax.lax.div(keys + (KEYS - 1), KEYS)
