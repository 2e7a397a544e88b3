"""Paged attention in the Mosaic GPU dialect for keys of which only the rotary dims are stored.

A program serves one item. It has two warpgroups. Each accumulates half of V's columns, and each computes all scores: (queries * weight) . V
outside the rotary dims plus queries . K in them, so that one copy of V serves both products. The two take turns: while one computes
products, the other computes its softmax. FlashMLA (https://github.com/deepseek-ai/FlashMLA) and FlashAttention-3 (Shah et al., 2024) have
the same structure, but a third warpgroup that copies pages to shared memory. Here each copies its own half. With three warpgroups a thread
has 168 registers (see `packed.mosaic.registers`), with two 255; the sums take 128 and the scores 32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention import mosaic_parts as parts
from pallas_kernels.paged_attention.mosaic_parts import KEYS, ROWS

DIM, ROTARY = 512, 128
HALF, TURNS = DIM // 2, ROTARY // 2  # columns of a warpgroup, and how many of the first of them rotate
STAGES = 2  # blocks of keys in shared memory


def attend(plan: parts.Plan, inputs, outputs, launch_dependents: bool):
    """The kernel's results. inputs, outputs: its arguments, and the shapes of its results, by name. launch_dependents: whether only kernels
    read them: see `dialect.launching`."""
    mosaic = dialect.mosaic()
    pages = (parts.tiled(STAGES, 2, KEYS, HALF), parts.tiled(STAGES, 2, KEYS, TURNS))
    partial = (parts.tiled(2, ROWS, HALF, dtype=jnp.float32), mosaic.SMEM((2, ROWS), jnp.float32))
    scratch = {
        "queries": parts.tiled(2, ROWS, HALF),
        # Partial results take the place of the pages, final results that of the queries.
        "pages": pages if plan.splits == 1 else mosaic.RefUnion(pages, partial),
        "loaded": mosaic.Barrier(num_arrivals=2 * plan.at_once),
        "full": mosaic.Barrier(num_arrivals=2, num_barriers=2 * STAGES),
        "empty": mosaic.Barrier(num_barriers=2 * STAGES),
        "turn": mosaic.Barrier(num_arrivals=2),
        "both": mosaic.Barrier(num_arrivals=2),
    }
    return launch(plan, inputs, outputs, scratch, _compute, launch_dependents)


def launch(plan: Any, inputs, outputs, scratch, compute, launch_dependents: bool = False, **settings):
    """The results of a kernel with a program for each item. plan: says how many `items` there are, and gives an `item` by number. inputs,
    outputs, launch_dependents: as for `attend`. scratch: shared memory and barriers, by name. compute: a function of the plan, all
    references, the item and a warpgroup's number. settings: further ones of the compiler."""
    mosaic, names = dialect.mosaic(), (*inputs, *outputs)

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True)) | scratch
        dialect.mosaic_wait(launch_dependents)
        compute(plan, refs, plan.item(refs, jax.lax.axis_index("item")), jax.lax.axis_index("warpgroup"))

    return mosaic.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=scratch,
        grid=(plan.items,),
        grid_names=("item",),
        num_threads=2,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        compiler_params=mosaic.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane, **settings),
    )(*inputs.values())


def _memory(plan, refs):
    """Shared memory for V, for the rotary dims of K, for the results, and for the numbers of partial results."""
    (values, rotary), (results, numbers) = refs["pages"] if plan.splits > 1 else (refs["pages"], (refs["queries"], None))
    return values, rotary, results, numbers


def copy_half(refs, item, block, page, slot, half, values, rotary) -> None:
    """Copies half of the columns of a block's V and rotary dims to `values` and `rotary`, in shared memory, or those of one if the other is
    None. page: see `parts.page_of`. Each copy arrives at `refs["full"]`."""

    def copy(k_source, v_source, major, rows):
        for source, held, columns in ((k_source, rotary, TURNS), (v_source, values, HALF)):
            if held is not None:
                source = source.at[major, rows, item.head, pl.ds(half * columns, columns)]
                dialect.mosaic().copy_gmem_to_smem(source, held.at[slot, half, pl.ds(0, rows.size)], refs["full"].at[2 * slot + half])

    parts.copy_block(refs, item, block, page, copy)


def load_queries(plan, refs, item, half):
    """Loads half of the queries' columns, and multiplies those that do not rotate by the weight."""
    mosaic, held = dialect.mosaic(), refs["queries"].at[half]
    parts.load_queries(plan, refs, item, held, pl.ds(half * HALF, HALF))
    mosaic.barrier_wait(refs["loaded"])
    for column in range(TURNS, HALF, TURNS):
        part = held.at[:, pl.ds(column, TURNS)]
        weight = dialect.mosaic_load(refs["weight"].at[pl.ds(half * HALF + column, TURNS)], mosaic.Layout.WGMMA.reduce(0))
        weight = jax.lax.broadcast_in_dim(weight.astype(jnp.float32), (ROWS, TURNS), (1,))
        part[...] = (part[...].astype(jnp.float32) * weight).astype(part.dtype)
    mosaic.commit_smem()


def multiply(refs, scores, values, rotary, slot, zero) -> None:
    """Adds the products of queries and a block's keys to `scores`, as the halves of the block arrive. zero: `parts.hidden_zero`."""
    mosaic, queries, still, turning = dialect.mosaic(), refs["queries"], pl.ds(TURNS, HALF - TURNS), pl.ds(0, TURNS)
    for half in range(2):
        mosaic.barrier_wait(refs["full"].at[2 * slot + half])
        mosaic.wgmma(scores, queries.at[half + zero, :, still], dialect.mosaic_transposed(values.at[slot + zero, half, :, still]))
        mosaic.wgmma(scores, queries.at[half + zero, :, turning], dialect.mosaic_transposed(rotary.at[slot + zero, half]))


def _compute(plan, refs, item, warpgroup):
    mosaic, (values, rotary, results, numbers) = dialect.mosaic(), _memory(plan, refs)
    columns = pl.ds(warpgroup * HALF, HALF)

    def meet(barrier=refs["turn"]):
        mosaic.barrier_arrive(barrier)
        mosaic.barrier_wait(barrier)

    def slot_of(block):
        return jax.lax.rem(block - item.start, STAGES)

    def page_of(block):
        return parts.page_of(refs, item, jnp.minimum(block, item.stop - 1))

    def copy(block, page):
        copy_half(refs, item, block, page, slot_of(block), warpgroup, values, rotary)

    for block in (item.start + n for n in range(STAGES)):
        pl.when(block < item.stop)(functools.partial(copy, block, page_of(block)))
    load_queries(plan, refs, item, warpgroup)
    meet(refs["both"])
    softmax = plan.softmax(item)
    pl.when(warpgroup == 1)(meet)  # from here on this warpgroup is half a step behind the other

    def step(block, carry):
        state, page = carry
        slot, later, zero = slot_of(block), block + STAGES - 1, parts.hidden_zero(item, block)
        next_page = page_of(later + 1)  # read one step ahead, so that nothing waits for it

        def product(scores):
            multiply(refs, scores, values, rotary, slot, zero)
            mosaic.barrier_arrive(refs["turn"])

            @pl.when((block > item.start) & (later < item.stop))
            def _():  # while products run
                mosaic.barrier_wait(refs["empty"].at[2 * slot_of(later) + warpgroup])
                copy(later, page)

            found = scores[...]
            # Before the next wait, past which the compiler moves no arrival.
            mosaic.barrier_arrive(refs["empty"].at[2 * slot + 1 - warpgroup])
            mosaic.barrier_wait(refs["turn"])
            return found

        scores = pl.run_scoped(product, mosaic.ACC((ROWS, KEYS), jnp.float32))
        weights, (acc, *state) = softmax.step(scores, state, item.span.seen(block))
        parts.clear(values.at[slot, warpgroup], parts.inside(item.span, block))
        meet()
        acc = pl.run_state(lambda acc: mosaic.wgmma(acc, weights, values.at[slot, warpgroup]))(mosaic.ACC.init(acc))
        return (acc, *state), next_page

    carry = softmax.start(HALF), page_of(item.start + STAGES - 1)
    (acc, top, total), _ = jax.lax.fori_loop(item.start, item.stop, step, carry)
    pl.when(warpgroup == 0)(meet)
    meet(refs["both"])  # after this no warpgroup reads queries or pages
    results.at[warpgroup][...] = softmax.result(acc, total).astype(results.dtype)
    mosaic.commit_smem()
    parts.store_results(plan, refs, item, results.at[warpgroup], columns)
    if numbers is not None:
        pl.when(warpgroup == 0)(lambda: parts.store_numbers(plan, refs, item, numbers, top, total))
    mosaic.wait_smem_to_gmem(0)
