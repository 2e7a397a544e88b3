"""Paged attention in the Mosaic GPU dialect for many rows of a prompt, with keys of which only the rotary dims are stored.

A program serves one item. It has two warpgroups, which each copy and accumulate half of V's columns. Of two blocks of keys, each computes
the scores of one: (queries * weight) . V outside the rotary dims plus queries . K in them, so that one copy of V serves both products. They
exchange weights and largest scores through shared memory, so that no score is computed twice. FlashMLA
(https://github.com/deepseek-ai/FlashMLA) has the same structure.
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

PAIR = 2  # blocks of keys in shared memory, one for each warpgroup


def attend(plan: parts.Plan, inputs, q):
    """The result. plan: with one part of the keys. inputs: the kernel's arguments by name."""
    mosaic = dialect.mosaic()
    scratch = {
        "queries": parts.tiled(2, ROWS, HALF),  # where results are put together later
        "values": parts.tiled(PAIR, 2, KEYS, HALF),
        "rotary": parts.tiled(PAIR, 2, KEYS, TURNS),
        "tops": mosaic.SMEM((PAIR, ROWS), jnp.float32),  # each row's largest score with the first block of a pair, and with both
        "loaded": mosaic.Barrier(num_arrivals=2 * plan.at_once),
        "full": mosaic.Barrier(num_arrivals=2, num_barriers=2 * PAIR),
        "weighed": mosaic.Barrier(num_barriers=PAIR),
        "both": mosaic.Barrier(num_arrivals=2),
    }

    def compute(plan, refs, item, warpgroup):
        for own in range(2):
            pl.when(warpgroup == own)(functools.partial(_compute, plan, refs, item, own))

    # Rows are reduced within a warp, which needs no shared memory; by default 2 KiB would be kept for that.
    return launch(plan, inputs, plan.results(q.dtype), scratch, compute, reduction_scratch_bytes=1024)[0]


def _compute(plan, refs, item, own):
    """own: the number of the warpgroup, of its half of the columns, and of its block in a pair."""
    mosaic, queries, values, rotary, tops = dialect.mosaic(), refs["queries"], refs["values"], refs["rotary"], refs["tops"]
    each_row = mosaic.Layout.WGMMA.reduce(1)
    pairs = jax.lax.div(item.stop - item.start + PAIR - 1, PAIR)

    def meet():
        mosaic.barrier_arrive(refs["both"])
        mosaic.barrier_wait(refs["both"])

    def block_of(pair, n):
        """A block of a pair. After an odd number of blocks comes a copy of the last one."""
        return jnp.minimum(item.start + PAIR * pair + n, item.stop - 1)

    def pages_of(pair):
        return [parts.page_of(refs, item, block_of(pair, n)) for n in range(PAIR)]

    def copy(pair, n, page):
        copy_half(refs, item, block_of(pair, n), page, n, own, values, rotary)

    for n, page in enumerate(pages_of(0)):
        pl.when(pairs > 0)(functools.partial(copy, 0, n, page))
    load_queries(plan, refs, item, own)
    meet()
    softmax = plan.softmax(item)
    least, most = (functools.reduce(extreme, item.position) for extreme in (jnp.minimum, jnp.maximum))
    # A block's weights take the place of rotary columns of its keys, which nobody needs any more: of those that the other warpgroup copies,
    # because it reads the weights.
    weights = rotary.at[0, 1], rotary.at[1, 0]

    def step(pair, carry):
        state, pages = carry
        later_pages = pages_of(pair + 2)  # read one step ahead, so that nothing waits for them
        zero = parts.hidden_zero(item, pair)
        blocks = [item.start + PAIR * pair + n for n in range(PAIR)]
        # Of the copy of the last block no row sees a key.
        seen = [tuple(jnp.where(block < item.stop, x, 0) for x in item.span.seen(block)) for block in blocks]

        def product(scores):
            multiply(refs, scores, values, rotary, own, zero)
            return scores[...]

        scores = pl.run_scoped(product, mosaic.ACC((ROWS, KEYS), jnp.float32))

        def add(n, acc, shrink, weights):
            """Adds a block's V, and copies that of the next pair to its place: nobody else reads the own columns after that."""
            parts.clear(values.at[n, own], parts.within(item.span.begin, seen[n]))
            acc = acc * parts.across(shrink, HALF)
            acc = pl.run_state(lambda acc: mosaic.wgmma(acc, weights, values.at[n + zero, own]))(mosaic.ACC.init(acc))
            pl.when(pair + 1 < pairs)(functools.partial(copy, pair + 1, n, pages[n]))
            return acc

        def weigh(top, total):
            """The weights of the own block, which the other warpgroup gets too, and what `Softmax.weigh` returns beside them."""
            found, *rest = softmax.weigh(scores, top, total, seen[own], plan.plain(item, seen[own], least, most))
            weights[own][...] = found
            tops.at[own][...] = rest[1]
            mosaic.commit_smem()
            mosaic.barrier_arrive(refs["weighed"].at[own])
            return found, *rest

        def other_top():
            mosaic.barrier_wait(refs["weighed"].at[1 - own])
            return dialect.mosaic_load(tops.at[1 - own], each_row)

        acc, top, total = state
        if own == 0:
            found, shrink, top, total = weigh(top, total)
            acc = add(0, acc, shrink, found)
            new_top = other_top()
            shrink = jnp.exp2(top - new_top)
            state = add(1, acc, shrink, weights[1]), new_top, total * shrink
        else:
            # The other warpgroup waits for these weights, so they come before the sums of the first block.
            first_top = other_top()
            first_shrink = jnp.exp2(top - first_top)
            found, shrink, top, total = weigh(first_top, total * first_shrink)
            acc = add(0, acc, first_shrink, weights[0])
            state = add(1, acc, shrink, found), top, total
        return state, later_pages

    (acc, _, total), _ = jax.lax.fori_loop(0, pairs, step, (softmax.start(HALF), pages_of(1)))
    meet()  # after this no warpgroup reads queries or largest scores
    tops.at[own][...] = total
    mosaic.commit_smem()
    meet()
    total = total + dialect.mosaic_load(tops.at[1 - own], each_row)  # each has added up the weights of its own blocks
    held = queries.at[own]
    held[...] = softmax.result(acc, total).astype(held.dtype)
    mosaic.commit_smem()
    parts.store_results(plan, refs, item, held, pl.ds(own * HALF, HALF))
    mosaic.wait_smem_to_gmem(0)
