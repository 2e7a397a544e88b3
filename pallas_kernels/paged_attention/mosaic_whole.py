"""Paged attention in the Mosaic GPU dialect for keys that are stored whole.

A program has two warpgroups. One copies keys and values to shared memory, up to three blocks ahead; the other computes. A program serves
one item after the other, and the next item's keys arrive while it still computes. One warpgroup takes about as long for a block as the
block takes to arrive if all multiprocessors read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention import mosaic_parts as parts
from pallas_kernels.paged_attention.mosaic_parts import KEYS, ROWS

DIM = 256
SLOTS = 6  # blocks of keys or of values in shared memory


def attend(plan: parts.Plan, inputs, outputs):
    """The kernel's results. inputs, outputs: its arguments, and the shapes of its results, by name."""
    mosaic = dialect.mosaic()
    # Partial results take the place of the pages, so programs with partial results have one item each. Final results take that of the
    # queries.
    programs = min(plan.items, dialect.MULTIPROCESSORS) if plan.splits == 1 else plan.items
    pages, partial = parts.tiled(SLOTS, KEYS, DIM), (parts.tiled(ROWS, DIM, dtype=jnp.float32), mosaic.SMEM((2, ROWS), jnp.float32))
    scratch = {
        "queries": parts.tiled(ROWS, DIM),
        "pages": pages if plan.splits == 1 else mosaic.RefUnion((pages,), partial),
        "loaded": mosaic.Barrier(num_arrivals=plan.at_once),
        "full": mosaic.Barrier(num_barriers=SLOTS),
        "empty": mosaic.Barrier(num_barriers=SLOTS),
    }
    names = (*inputs, *outputs)

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True)) | scratch
        warpgroup, program = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program")

        def serve(role):
            def step(n, before):
                item = plan.item(refs, program + n * programs)

                def place(block, kind):
                    """Counts the blocks of keys and of values before a block's; and its slot. kind: 0 for keys, 1 for values."""
                    number = 2 * (before + block - item.start) + kind
                    return number, jax.lax.rem(number, SLOTS)

                role(plan, refs, item, place)
                return before + item.stop - item.start

            jax.lax.fori_loop(0, jax.lax.div(plan.items - 1 - program, programs) + 1, step, jnp.int32(0))

        pl.when(warpgroup == 0)(lambda: serve(_compute))
        pl.when(warpgroup == 1)(lambda: serve(_copy))

    return mosaic.kernel(
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


def _memory(plan, refs):
    """Shared memory for the pages, for the results, and for the numbers of partial results."""
    if plan.splits == 1:
        return refs["pages"], refs["queries"], None
    (pages,), (results, numbers) = refs["pages"]
    return pages, results, numbers


def _copy(plan, refs, item, place):
    mosaic, (pages, _, _) = dialect.mosaic(), _memory(plan, refs)

    def copy(block, k_source, v_source, major, rows):
        for kind, source in enumerate((k_source, v_source)):
            number, slot = place(block, kind)
            pl.when(number >= SLOTS)(lambda slot=slot: mosaic.barrier_wait(refs["empty"].at[slot]))
            mosaic.copy_gmem_to_smem(source.at[major, rows, item.head], pages.at[slot, pl.ds(0, rows.size)], refs["full"].at[slot])

    parts.each_block(refs, item, copy)


def _compute(plan, refs, item, place):
    mosaic, (pages, results, numbers) = dialect.mosaic(), _memory(plan, refs)
    queries, columns = refs["queries"], pl.ds(0, DIM)
    parts.load_queries(plan, refs, item, queries, columns)
    softmax = plan.softmax(item)
    mosaic.barrier_wait(refs["loaded"])

    def step(block, state):
        (_, k), (_, v) = place(block, 0), place(block, 1)

        def product(scores):
            mosaic.wgmma(scores, queries, dialect.mosaic_transposed(pages.at[k]))
            return scores[...]

        mosaic.barrier_wait(refs["full"].at[k])
        scores = pl.run_scoped(product, mosaic.ACC((ROWS, KEYS), jnp.float32))
        mosaic.barrier_arrive(refs["empty"].at[k])
        seen = item.span.seen(block)
        weights, (acc, *state) = softmax.step(scores, state, seen)
        mosaic.barrier_wait(refs["full"].at[v])
        softmax.clear(pages.at[v], seen)
        acc = pl.run_state(lambda acc: mosaic.wgmma(acc, weights, pages.at[v]))(mosaic.ACC.init(acc))
        mosaic.barrier_arrive(refs["empty"].at[v])
        return acc, *state

    acc, top, total = jax.lax.fori_loop(item.start, item.stop, step, softmax.start(DIM))
    results[...] = softmax.result(acc, total).astype(results.dtype)
    mosaic.commit_smem()
    parts.store_results(plan, refs, item, results, columns)
    if numbers is not None:
        parts.store_numbers(plan, refs, item, numbers, top, total)
    mosaic.wait_smem_to_gmem(0)
