"""Paged attention in the Mosaic GPU dialect for few rows, with keys of which only the rotary dims are stored.

A program serves one item. Its two warpgroups take turns at the blocks of keys, and neither waits for the other: each copies its own blocks,
computes their scores and weights, and accumulates all of V's columns. At the end they add up their sums.

Scores are (queries * weight) . V outside the rotary dims plus queries . K in them, as in `mosaic_rotary`. For the sums, V's columns are
the tensor core's left operand, of which it takes 64 rows, and the weights are the right one, of which it takes as few as there are rows of
queries. So the registers of one warpgroup hold the sums of all columns.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention import mosaic_parts as parts
from pallas_kernels.paged_attention.mosaic_parts import KEYS, ROWS
from pallas_kernels.paged_attention.mosaic_rotary import HALF, TURNS, copy_half, launch, load_queries, multiply
from pallas_kernels.registers import exchange

WARPGROUPS = 2
MOST_ROWS = 40  # of an item: the sums take four registers of each thread for a row


def rows_of(plan: parts.Plan) -> int:
    return plan.at_once * plan.rows


def serves(plan: parts.Plan) -> bool:
    return plan.tiles == 1 and rows_of(plan) <= MOST_ROWS


def attend(plan: parts.Plan, inputs, outputs, launch_dependents: bool):
    """The kernel's results. The arguments are those of `mosaic_rotary.attend`, and `serves` is true of the plan."""
    mosaic, rows = dialect.mosaic(), rows_of(plan)
    pages = parts.tiled(WARPGROUPS, 2, KEYS, HALF), parts.tiled(WARPGROUPS, 2, KEYS, TURNS)
    partial = [parts.tiled(2, rows, HALF, dtype=jnp.float32)] if plan.splits > 1 else []
    scratch = {
        "queries": parts.tiled(2, ROWS, HALF),  # where final results are put together later
        # Sums of the other warpgroup take the place of the pages, and so do partial results.
        "pages": mosaic.RefUnion(pages, (mosaic.SMEM((2, rows, HALF), jnp.float32), *partial)),
        "numbers": mosaic.SMEM((WARPGROUPS, 2, ROWS), jnp.float32),
        "loaded": mosaic.Barrier(num_arrivals=2 * plan.at_once),
        "full": mosaic.Barrier(num_arrivals=2, num_barriers=2 * WARPGROUPS),
        "both": mosaic.Barrier(num_arrivals=WARPGROUPS),
    }

    # Rows are reduced within a warp, which needs no shared memory; by default 2 KiB would be kept for that.
    return launch(plan, inputs, outputs, scratch, _compute, launch_dependents, reduction_scratch_bytes=1024)


def _compute(plan, refs, item, own):
    """own: the warpgroup's number."""
    mosaic, rows, queries, ((values, rotary), (sums, *partial)) = dialect.mosaic(), rows_of(plan), refs["queries"], refs["pages"]
    numbers, other = refs["numbers"].at[own], 1 - own
    first = item.start + own

    def meet():
        mosaic.barrier_arrive(refs["both"])
        mosaic.barrier_wait(refs["both"])

    def page_of(block):
        return parts.page_of(refs, item, jnp.minimum(block, item.stop - 1))

    def copy(block, page, half, *held):
        pl.when(block < item.stop)(lambda: copy_half(refs, item, block, page, own, half, *held))

    def each_column(x, *index):
        """Numbers of the rows, after a turn through shared memory: for each column of [HALF, rows]."""
        numbers.at[index][...] = x
        mosaic.commit_smem()
        x = dialect.mosaic_load(numbers.at[(*index, pl.ds(0, rows))], mosaic.Layout.WGMMA.reduce(0))
        return jax.lax.broadcast_in_dim(x, (HALF, rows), (1,))

    for half in range(2):
        copy(first, page_of(first), half, values, rotary)
    load_queries(plan, refs, item, own)
    meet()
    softmax = plan.softmax(item)
    least, most = (functools.reduce(extreme, item.position) for extreme in (jnp.minimum, jnp.maximum))

    def step(n, carry):
        sums, top, total, page = carry
        block = first + WARPGROUPS * n
        zero = parts.hidden_zero(item, block)
        slot = own + zero
        weights = rotary.at[slot, 0]
        later, seen = block + WARPGROUPS, item.span.seen(block)
        next_page = page_of(later + WARPGROUPS)  # read one step ahead, so that nothing waits for it

        def product(scores):
            multiply(refs, scores, values, rotary, own, zero)
            return scores[...]

        scores = pl.run_scoped(product, mosaic.ACC((ROWS, KEYS), jnp.float32))
        copy(later, page, 1, None, rotary)
        found, shrink, top, total = softmax.weigh(scores, top, total, seen, plan.plain(item, seen, least, most))
        # The weights take the place of rotary columns of the keys, which nobody needs any more.
        weights[...] = found
        for half in range(2):
            parts.clear(values.at[slot, half], parts.within(item.span.begin, seen))
        shrink = each_column(shrink, 0)
        right, added = dialect.mosaic_transposed(weights.at[pl.ds(0, rows)]), []
        for half, acc in zip((own, other), sums, strict=True):
            left = dialect.mosaic_transposed(values.at[slot, half])
            acc = pl.run_state(lambda acc, left=left: mosaic.wgmma(acc, left, right))(mosaic.ACC.init(acc * shrink))
            copy(later, page, half, values, None)
            added.append(acc)
        copy(later, page, 0, None, rotary)
        return tuple(added), top, total, next_page

    _, top, total = softmax.start(KEYS)
    zeros = mosaic.layout_cast(jnp.zeros((HALF, rows), jnp.float32), mosaic.Layout.WGMMA)
    turns = jax.lax.div(jnp.maximum(item.stop - first, 0) + WARPGROUPS - 1, WARPGROUPS)
    (kept, given), top, total, _ = jax.lax.fori_loop(0, turns, step, ((zeros, zeros), top, total, page_of(first + WARPGROUPS)))

    # Each keeps the half of the columns that has its number.
    put, take = exchange(mosaic, rows, jnp.float32, rows=HALF)
    meet()  # after this no warpgroup reads queries or pages
    put(given, sums.at[other])
    for n, value in enumerate((top, total)):
        numbers.at[n][...] = value
    mosaic.commit_smem()
    meet()
    other_top, other_total = (dialect.mosaic_load(refs["numbers"].at[other, n], mosaic.Layout.WGMMA.reduce(1)) for n in range(2))
    most_of_both = jnp.maximum(top, other_top)
    shares = [jnp.exp2(t - most_of_both) for t in (top, other_top)]
    total = total * shares[0] + other_total * shares[1]
    if not partial:
        shares = [share / jnp.maximum(total, 1e-30) for share in shares]
    meet()  # before numbers that the other one reads are written over
    shares = [each_column(share, n) for n, share in enumerate(shares)]
    value = kept * shares[0] + take(sums.at[own]) * shares[1]
    held = partial[0].at[own] if partial else queries.at[own]
    parts.store_transposed(held.at[pl.ds(0, rows)], value.astype(held.dtype))
    mosaic.commit_smem()
    parts.store_results(plan, refs, item, held, pl.ds(own * HALF, HALF))
    if partial:
        pl.when(own == 0)(lambda: parts.store_numbers(plan, refs, item, numbers, most_of_both, total))
    mosaic.wait_smem_to_gmem(0)
