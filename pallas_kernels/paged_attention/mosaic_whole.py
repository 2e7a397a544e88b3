"""Paged attention in the Mosaic GPU dialect for keys that are stored whole.

A program has three warpgroups. One copies keys and values to shared memory. The other two compute, each every other block, with sums of
its own, which are added at an item's end. A program serves one item after the other, and the next item's keys arrive while it computes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention import mosaic_parts as parts
from pallas_kernels.paged_attention.mosaic_parts import KEYS, ROWS

DIM = 256
SLOTS = 4  # blocks of keys or of values in shared memory: two of each warpgroup that computes


def attend(plan: parts.Plan, inputs, outputs):
    """The kernel's results. inputs, outputs: its arguments, and the shapes of its results, by name."""
    mosaic = dialect.mosaic()
    programs = min(plan.items, dialect.MULTIPROCESSORS)
    scratch = {
        # The results, and before them the sums of the second warpgroup, take the place of the queries.
        "rows": mosaic.RefUnion((parts.tiled(ROWS, DIM),), (parts.tiled(ROWS, DIM, dtype=jnp.float32),)),
        "numbers": mosaic.SMEM((2, ROWS), jnp.float32),  # each row's largest score and its sum of weights
        "pages": parts.tiled(SLOTS, KEYS, DIM),
        "loaded": mosaic.Barrier(num_arrivals=plan.at_once),
        "full": mosaic.Barrier(num_barriers=SLOTS),
        "empty": mosaic.Barrier(num_barriers=SLOTS),
        "computed": mosaic.Barrier(num_arrivals=2),
        "summed": mosaic.Barrier(),
    }
    names = (*inputs, *outputs)

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True)) | scratch
        warpgroup, program = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program")

        def serve(role):
            def step(n, number):
                item = plan.item(refs, program + n * programs)
                role(plan, refs, item, number, warpgroup)
                return number + item.stop - item.start

            jax.lax.fori_loop(0, jax.lax.div(plan.items - 1 - program, programs) + 1, step, jnp.int32(0))

        @pl.when(warpgroup == 2)
        def _():
            mosaic.set_max_registers(40, action="decrease")
            serve(_copy)

        @pl.when(warpgroup < 2)
        def _():
            mosaic.set_max_registers(232, action="increase")
            serve(_compute)

    return mosaic.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=3,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        compiler_params=mosaic.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane),
    )(*inputs.values())


def _copy(plan, refs, item, number, warpgroup):
    """number: of the item's first block among all of the program's. So is it below."""
    mosaic, pages = dialect.mosaic(), refs["pages"]

    def copy(block, k_source, v_source, major, rows):
        for n, source in enumerate((k_source, v_source)):
            use = 2 * (number + block - item.start) + n
            slot = jax.lax.rem(use, SLOTS)
            pl.when(use >= SLOTS)(lambda slot=slot: mosaic.barrier_wait(refs["empty"].at[slot]))
            mosaic.copy_gmem_to_smem(source.at[major, rows, item.head], pages.at[slot, pl.ds(0, rows.size)], refs["full"].at[slot])

    parts.each_block(refs, (item, copy))


def _compute(plan, refs, item, number, warpgroup):
    mosaic, pages, columns = dialect.mosaic(), refs["pages"], pl.ds(0, DIM)
    (queries,), (sums,) = refs["rows"]
    pl.when(warpgroup == 0)(lambda: parts.load_queries(plan, refs, item, queries, columns))
    softmax = parts.Softmax(plan, item)
    mosaic.barrier_wait(refs["loaded"])
    first = jax.lax.rem(number + warpgroup, 2)  # from the item's first block

    def step(n, state):
        ahead = first + 2 * n
        block = item.start + ahead
        k, v = (jax.lax.rem(2 * (number + ahead) + m, SLOTS) for m in range(2))

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

    steps = jax.lax.div(jnp.maximum(item.stop - item.start - first + 1, 0), 2)
    acc, top, total = jax.lax.fori_loop(0, steps, step, softmax.start(DIM))
    mosaic.barrier_arrive(refs["computed"])
    mosaic.barrier_wait(refs["computed"])  # after this no warpgroup reads queries
    numbers = refs["numbers"]

    @pl.when(warpgroup == 1)
    def _():
        sums[...] = acc
        numbers.at[0][...] = top
        numbers.at[1][...] = total
        mosaic.barrier_arrive(refs["summed"])

    @pl.when(warpgroup == 0)
    def _():
        mosaic.barrier_wait(refs["summed"])
        layout = mosaic.Layout.WGMMA.reduce(1)
        other_top, other_total = (dialect.mosaic_load(numbers.at[n], layout) for n in range(2))
        new_top = jnp.maximum(top, other_top)
        own, others = jnp.exp2(top - new_top), jnp.exp2(other_top - new_top)
        both = acc * parts.across(own, DIM) + sums[...] * parts.across(others, DIM)
        both_total = total * own + other_total * others
        mosaic.commit_smem()
        results = queries if plan.splits == 1 else sums
        results[...] = softmax.result(both, both_total).astype(results.dtype)
        mosaic.commit_smem()
        parts.store_results(plan, refs, item, results, columns)
        if plan.splits > 1:
            parts.store_numbers(plan, refs, item, numbers, new_top, both_total)
        mosaic.wait_smem_to_gmem(0)
