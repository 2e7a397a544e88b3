"""Paged attention in the Mosaic GPU dialect for keys that are stored whole.

A program has two warpgroups. One copies pages to shared memory, several blocks ahead. The other computes. Programs stay: each serves one
item after the other, and copies an item's first keys while it still computes the item before.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention import mosaic_blocks as shared
from pallas_kernels.paged_attention.mosaic_blocks import KEYS, ROWS

DIM = 256
SLOTS = 6  # blocks of keys or values in shared memory


def attend(inputs, outputs, *, at_once, rows, splits, causal, window, scale, slots=SLOTS, programs=None, compute=None):
    """inputs, outputs: the kernel's arguments, and the shapes of its results, by name. at_once: queries of a program. rows: of a query."""
    mosaic = dialect.mosaic()
    batch, queries, heads, _, _ = inputs["q"].shape
    tiles = pl.cdiv(queries, at_once)
    items = tiles * splits * batch * heads
    # Partial results take the place of the pages, so a program with partial results serves one item.
    if programs is None:
        programs = items if splits > 1 else min(items, dialect.MULTIPROCESSORS)
    pages = shared.tiled(slots, KEYS, DIM)
    results = (shared.tiled(ROWS, DIM, dtype=jnp.float32), mosaic.SMEM((2, ROWS), jnp.float32))
    scratch = {
        "queries": shared.tiled(ROWS, DIM),  # and the final results
        "pages": pages if splits == 1 else mosaic.RefUnion((pages,), results),
        "loaded": mosaic.Barrier(num_arrivals=at_once),
        "full": mosaic.Barrier(num_barriers=slots),
        "empty": mosaic.Barrier(num_barriers=slots),
    }
    names = (*inputs, *outputs)

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True)) | scratch
        program, warpgroup = jax.lax.axis_index("program"), jax.lax.axis_index("warpgroup")
        mine = jax.lax.div(items - 1 - program, programs) + 1

        def each_item(step):
            def run(n, count):
                item = program + n * programs
                tile, rest = jax.lax.rem(item, tiles), jax.lax.div(item, tiles)
                split, pair = jax.lax.rem(rest, splits), jax.lax.div(rest, splits)
                b, head = jax.lax.div(pair, heads), jax.lax.rem(pair, heads)
                first = tile * at_once
                at = [jnp.minimum(first + t, queries - 1) for t in range(at_once)]
                position = [refs["positions"][b, t] for t in at]
                found = shared.span(refs, b, position, causal=causal, window=window)
                start, stop = found.part(split, splits)
                step(refs, b, head, split, first, position, found, start, stop, count)
                return count + (stop - start)

            jax.lax.fori_loop(0, mine, run, jnp.int32(0))

        settings = dict(rows=rows, splits=splits, causal=causal, window=window, scale=scale)

        @pl.when(warpgroup == 1)
        def _():
            each_item(lambda *args: _copy(*args, splits=splits))

        @pl.when(warpgroup == 0)
        def _():
            each_item(lambda *args: (compute or _compute)(*args, **settings))

    out = mosaic.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        compiler_params=mosaic.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane),
    )(*inputs.values())
    return out


def _shared(refs, splits):
    """Where the pages lie in shared memory, and the results."""
    if splits == 1:
        return refs["pages"], (refs["queries"],)
    (pages,), results = refs["pages"]
    return pages, results


def _copy(refs, b, head, split, first, position, found, start, stop, count, *, splits):
    mosaic = dialect.mosaic()
    pages, _ = _shared(refs, splits)
    slots = pages.shape[0]

    def copy(block, k_source, v_source, major, rows):
        for n, source in enumerate((k_source, v_source)):
            unit = 2 * (count + block - start) + n
            slot = jax.lax.rem(unit, slots)

            @pl.when(unit >= slots)
            def _():
                mosaic.barrier_wait(refs["empty"].at[slot])

            mosaic.copy_gmem_to_smem(source.at[major, rows, head], pages.at[slot, pl.ds(0, rows.size)], refs["full"].at[slot])

    shared.each_block(refs, b, found, start, stop, copy)


def _compute(refs, b, head, split, first, position, found, start, stop, count, *, rows, splits, causal, window, scale):
    mosaic = dialect.mosaic()
    pages, (results, *stats) = _shared(refs, splits)
    slots, queries_ref, full, empty = pages.shape[0], refs["queries"], refs["full"], refs["empty"]
    _, queries, heads, group, _ = refs["q"].shape
    at_once = len(position)
    zero = first * 0  # TODO

    for t in range(at_once):
        source = refs["q"].at[b, jnp.minimum(first + t, queries - 1), head, pl.ds(zero, rows)]
        mosaic.copy_gmem_to_smem(source, queries_ref.at[pl.ds(t * rows, rows)], refs["loaded"])
    softmax = shared.Softmax(position, rows, causal=causal, window=window)
    mosaic.barrier_wait(refs["loaded"])

    def step(block, carry):
        k_slot, v_slot = (jax.lax.rem(2 * (count + block - start) + n, slots) for n in range(2))
        base, low, high = found.seen(block)
        mosaic.barrier_wait(full.at[k_slot])

        def product(scores):
            mosaic.wgmma(scores, queries_ref, dialect.mosaic_transposed(pages.at[k_slot]))
            return scores[...]

        scores = pl.run_scoped(product, mosaic.ACC((ROWS, KEYS), jnp.float32)) * scale
        mosaic.barrier_arrive(empty.at[k_slot])
        weights, (acc, top, total) = softmax.step(scores, carry, base, low, high)
        weights = weights.astype(pages.dtype)
        mosaic.barrier_wait(full.at[v_slot])
        softmax.clear(pages.at[v_slot], low, high)
        acc = pl.run_state(lambda acc: mosaic.wgmma(acc, weights, pages.at[v_slot]))(mosaic.ACC.init(acc))
        mosaic.barrier_arrive(empty.at[v_slot])
        return acc, top, total

    acc, top, total = jax.lax.fori_loop(start, stop, step, softmax.start(DIM))
    _finish(refs, b, head, split, first, position, acc, top, total, rows=rows, splits=splits)


def _finish(refs, b, head, split, first, position, acc, top, total, *, rows, splits):
    mosaic = dialect.mosaic()
    _, (results, *stats) = _shared(refs, splits)
    _, queries, heads, _, _ = refs["q"].shape
    at_once, zero = len(position), first * 0
    if splits == 1:
        acc = shared.normalised(acc, total)
    results[...] = acc.astype(results.dtype)
    for ref in stats:
        ref.at[0][...] = top
        ref.at[1][...] = total
    mosaic.commit_smem()
    tile = jax.lax.div(first, at_once)
    pair = (b * heads + head) * splits + split
    for t in range(at_once):

        @pl.when(first + t < queries)
        def _(t=t):
            if splits == 1:
                target = refs["out"].at[b, first + t, head, pl.ds(zero, rows)]
            else:
                target = refs["acc"].at[pair, first + t, pl.ds(zero, rows)]
            mosaic.copy_smem_to_gmem(results.at[pl.ds(t * rows, rows)], target)

    for ref in stats:
        for n, name in enumerate(("top", "total")):
            mosaic.copy_smem_to_gmem(ref.at[n], refs[name].at[pair, pl.ds(tile * ROWS, ROWS)])
    mosaic.wait_smem_to_gmem(0)
