"""Paged attention in the Mosaic GPU dialect for keys that are stored whole.

A program has two warpgroups. One copies keys and values to shared memory, several blocks ahead; the other computes. Few rows compute in
less time than their keys take to arrive, so what counts is that copies never stop: a program serves one item after the other, and the
next item's keys arrive while it still computes.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention import mosaic_parts as parts
from pallas_kernels.paged_attention.mosaic_parts import KEYS, ROWS

DIM = 256
SLOTS = 6  # blocks of keys or of values in shared memory


def attend(plan: parts.Plan, inputs, outputs, pipelines=None, compute=None, slots=None):
    """The kernel's results. inputs, outputs: its arguments, and the shapes of its results, by name."""
    mosaic = dialect.mosaic()
    if pipelines is None:
        pipelines = 1 if plan.splits > 1 or plan.items <= dialect.MULTIPROCESSORS else 2
    slots = (6 if pipelines == 1 else 2) if slots is None else slots
    programs = pl.cdiv(plan.items, pipelines) if plan.splits > 1 else min(pl.cdiv(plan.items, pipelines), dialect.MULTIPROCESSORS)
    workers = programs * pipelines
    # Partial results take the place of the pages, final results that of the queries. So with partial results, a program has one item.
    pages = parts.tiled(pipelines * slots, KEYS, DIM)
    partial = parts.tiled(ROWS, DIM, dtype=jnp.float32), mosaic.SMEM((2, ROWS), jnp.float32)
    scratch = {
        "queries": parts.tiled(pipelines, ROWS, DIM),
        "pages": pages if plan.splits == 1 else mosaic.RefUnion((pages,), partial),
        "loaded": mosaic.Barrier(num_arrivals=plan.at_once, num_barriers=pipelines),
        "full": mosaic.Barrier(num_barriers=pipelines * slots),
        "empty": mosaic.Barrier(num_barriers=pipelines * slots),
    }
    names = (*inputs, *outputs)

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True)) | scratch
        warpgroup, program = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program")

        @pl.when(warpgroup < pipelines)
        def _():
            if pipelines > 1:
                mosaic.set_max_registers(REGISTERS[1], action="increase")
            mine = refs | {name: refs[name].at[warpgroup] for name in ("queries", "loaded")}
            worker = program * pipelines + warpgroup

            def step(n, blocks):
                item = plan.item(refs, worker + n * workers)
                (compute or _compute)(plan, mine, item, lambda block, n: slot_of(warpgroup, blocks + block - item.start, n))
                return blocks + item.stop - item.start

            jax.lax.fori_loop(0, jax.lax.div(plan.items - 1 - worker + workers, workers), step, jnp.int32(0))

        @pl.when(warpgroup == pipelines)
        def _():
            if pipelines > 1:
                mosaic.set_max_registers(REGISTERS[0], action="decrease")

            def step(n, blocks):
                items = [plan.item(refs, program * pipelines + lane + n * workers) for lane in range(pipelines)]
                copies = []
                for lane, item in enumerate(items):

                    def place(block, n, lane=lane, item=item):
                        number = blocks[lane] + block - item.start
                        return slot_of(lane, number, n), 2 * number + n >= slots

                    copies.append((item, functools.partial(_copy, plan, refs, item, place)))
                parts.each_block(refs, *copies)
                return tuple(count + item.stop - item.start for count, item in zip(blocks, items, strict=True))

            first = program * pipelines
            jax.lax.fori_loop(0, jax.lax.div(plan.items - 1 - first + workers, workers), step, (jnp.int32(0),) * pipelines)

    def slot_of(lane, number, n):
        return lane * slots + jax.lax.rem(2 * number + n, slots)

    return mosaic.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=pipelines + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        compiler_params=mosaic.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane),
    )(*inputs.values())


REGISTERS = 40, 232


def _memory(plan, refs):
    """Shared memory for the pages, for the results, and for the numbers of partial results."""
    if plan.splits == 1:
        return refs["pages"], refs["queries"], None
    (pages,), (results, numbers) = refs["pages"]
    return pages, results, numbers


def _copy(plan, refs, item, place, block, k_source, v_source, major, rows):
    mosaic, (pages, _, _) = dialect.mosaic(), _memory(plan, refs)
    for n, source in enumerate((k_source, v_source)):
        slot, used = place(block, n)
        pl.when(used)(lambda slot=slot: mosaic.barrier_wait(refs["empty"].at[slot]))
        mosaic.copy_gmem_to_smem(source.at[major, rows, item.head], pages.at[slot, pl.ds(0, rows.size)], refs["full"].at[slot])


def _compute(plan, refs, item, slot_of):
    mosaic, (pages, results, numbers) = dialect.mosaic(), _memory(plan, refs)
    queries, columns = refs["queries"], pl.ds(0, DIM)
    parts.load_queries(plan, refs, item, queries, columns)
    softmax = parts.Softmax(plan, item)
    mosaic.barrier_wait(refs["loaded"])

    def step(block, state):
        k, v = (slot_of(block, n) for n in range(2))

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
    finish(plan, refs, item, softmax, acc, top, total)


def finish(plan, refs, item, softmax, acc, top, total):
    mosaic, (pages, results, numbers) = dialect.mosaic(), _memory(plan, refs)
    columns = pl.ds(0, DIM)
    results[...] = softmax.result(acc, total).astype(results.dtype)
    mosaic.commit_smem()
    parts.store_results(plan, refs, item, results, columns)
    if numbers is not None:
        parts.store_numbers(plan, refs, item, numbers, top, total)
    mosaic.wait_smem_to_gmem(0)
