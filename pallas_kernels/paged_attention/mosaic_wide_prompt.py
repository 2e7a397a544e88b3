"""Paged attention in the Mosaic GPU dialect for many rows of a prompt, with wide keys that are stored whole.

A program serves 64 queries of a sequence, for one query head. It has two warpgroups, which each accumulate half of V's columns, and of two
blocks of keys each computes the scores of one. They exchange largest scores and weights through shared memory, so that no score is computed
twice, and sums are scaled once for both blocks. Each warpgroup copies what only it multiplies: all columns of the keys of its block, then
its columns of both blocks' values, which come in the keys' place piece by piece, and the next keys in theirs.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention import mosaic_parts as parts
from pallas_kernels.paged_attention.mosaic_parts import KEYS, ROWS
from pallas_kernels.paged_attention.mosaic_rotary import launch
from pallas_kernels.paged_attention.mosaic_whole_prompt import Plan

DIM = 512
MEMBERS = 1  # query heads of an item
HALF, PIECE = DIM // 2, DIM // 4  # columns of a warpgroup, and of what is copied and multiplied at once
PIECES = DIM // PIECE  # of the keys of a block, and of a warpgroup's columns of two blocks' values
PAIR = 2  # blocks of keys, one for each warpgroup


def serves(q) -> bool:
    """Whether the kernel can serve these queries, which `mosaic_whole` can."""
    return q.shape[4] == DIM and q.shape[1] >= ROWS and q.shape[1] % 8 == 0


def attend(plan: Plan, inputs, q):
    """The result. inputs: the kernel's arguments by name."""
    mosaic = dialect.mosaic()
    scratch = {
        "queries": parts.tiled(2, ROWS, HALF),  # where results are put together later
        "pages": parts.tiled(2, PIECES, KEYS, PIECE),
        "weights": parts.tiled(PAIR, ROWS, KEYS),
        "numbers": mosaic.SMEM((PAIR, ROWS), jnp.float32),  # numbers of each row that the warpgroups exchange
        "loaded": mosaic.Barrier(num_arrivals=2),
        "full": mosaic.Barrier(num_barriers=2 * PIECES),
        "both": mosaic.Barrier(num_arrivals=2),
    }
    out = {"out": jax.ShapeDtypeStruct(q.shape, q.dtype)}
    return launch(plan, inputs | plan.ends(inputs), out, scratch, _compute)[0]


def _compute(plan, refs, item, own):
    """own: the number of the warpgroup, of its half of the columns, and of its block in a pair."""
    mosaic, queries, weights, held, both = dialect.mosaic(), refs["queries"], refs["weights"], refs["numbers"], refs["both"]
    columns = pl.ds(own * HALF, HALF)
    rows = (item.b, pl.ds(item.first, ROWS), item.head, item.member)
    pairs = jax.lax.div(item.stop - item.start + PAIR - 1, PAIR)

    def block_of(pair, n):
        """A block of a pair. After an odd number of blocks comes a copy of the last one."""
        return jnp.minimum(item.start + PAIR * pair + n, item.stop - 1)

    def pages_of(pair):
        return [parts.page_of(refs, item, block_of(pair, n)) for n in range(PAIR)]

    def copy(pair, pages, n, kind, piece, first):
        """Copies columns of the keys (kind 0) or the values (1) of a pair's block n to a piece's place."""

        def copy(k_source, v_source, major, rows):
            source = (k_source, v_source)[kind].at[major, rows, item.head, pl.ds(first, PIECE)]
            place = refs["pages"].at[own, piece, pl.ds(0, rows.size)]
            mosaic.copy_gmem_to_smem(source, place, refs["full"].at[own * PIECES + piece])

        parts.copy_block(refs, item, block_of(pair, n), jnp.where(n == 0, *pages), copy)

    def copy_keys(pair, pages, piece):
        copy(pair, pages, own, 0, piece, piece * PIECE)

    def copy_values(pair, pages, piece):
        n, part = divmod(piece, 2)
        copy(pair, pages, n, 1, piece, own * HALF + part * PIECE)

    def in_turn(multiply, copy_next):
        """Multiplies the pieces as they arrive, and copies the next to the place of each as soon as its product is done, but the last."""
        for piece in range(PIECES):
            mosaic.barrier_wait(refs["full"].at[own * PIECES + piece])
            multiply(piece)
            if piece:
                mosaic.wgmma_wait(1)
                copy_next(piece - 1)

    def others(numbers):
        """The other warpgroup's numbers of each row, in exchange for the own ones."""
        held.at[own][...] = numbers
        mosaic.commit_smem()
        mosaic.barrier_arrive(both)
        mosaic.barrier_wait(both)
        return dialect.mosaic_load(held.at[1 - own], mosaic.Layout.WGMMA.reduce(1))

    pages = pages_of(0)
    mosaic.copy_gmem_to_smem(refs["q"].at[(*rows, columns)], queries.at[own], refs["loaded"])
    for piece in range(PIECES):
        pl.when(pairs > 0)(functools.partial(copy_keys, 0, pages, piece))
    softmax = plan.softmax(refs, item)
    mosaic.barrier_wait(refs["loaded"])

    def step(pair, carry):
        (*acc, top, total), pages = carry
        later_pages = pages_of(pair + 1)
        zero = parts.hidden_zero(item, pair)
        blocks = [item.start + PAIR * pair + n for n in range(PAIR)]
        # Of the copy of the last block no row sees a key.
        seen = [tuple(jnp.where(block < item.stop, x, 0) for x in item.span.seen(block)) for block in blocks]

        def product(scores):
            def multiply(piece):
                half, part = divmod(piece, 2)
                left = queries.at[half + zero, :, pl.ds(part * PIECE, PIECE)]
                mosaic.wgmma(scores, left, dialect.mosaic_transposed(refs["pages"].at[own + zero, piece]))

            in_turn(multiply, functools.partial(copy_values, pair, pages))
            return scores[...]

        scores = pl.run_scoped(product, mosaic.ACC((ROWS, KEYS), jnp.float32))
        copy_values(pair, pages, PIECES - 1)
        own_seen = tuple(jnp.where(own == 0, *x) for x in zip(*seen, strict=True))
        scores = softmax.masked(scores, own_seen, plan.plain(item, own_seen, item.low, item.high))
        own_top = softmax.raised(scores, top)
        new_top = jnp.maximum(own_top, others(own_top))
        found, shrink, total = softmax.weights(scores, top, new_top, total)
        weights.at[own][...] = found
        mosaic.commit_smem()
        mosaic.barrier_arrive(both)
        acc = [x * parts.across(shrink, PIECE) for x in acc]
        mosaic.barrier_wait(both)

        def copy_next(piece):
            pl.when(pair + 1 < pairs)(functools.partial(copy_keys, pair + 1, later_pages, piece))

        def add(sums):
            def multiply(piece):
                n, part = divmod(piece, 2)
                values = refs["pages"].at[own + zero, piece]
                parts.clear(values, parts.within(item.span.begin, seen[n]))
                mosaic.wgmma(sums[part], weights.at[n + zero], values)

            in_turn(multiply, copy_next)

        acc = pl.run_state(add)([mosaic.ACC.init(x) for x in acc])
        copy_next(PIECES - 1)
        return (*acc, new_top, total), later_pages

    acc, top, total = softmax.start(PIECE)
    (*acc, _, total), _ = jax.lax.fori_loop(0, pairs, step, ((acc, acc, top, total), pages))
    total = total + others(total)  # each has added up the weights of its own blocks
    for part, x in enumerate(acc):
        queries.at[own, :, pl.ds(part * PIECE, PIECE)][...] = softmax.result(x, total).astype(queries.dtype)
    mosaic.commit_smem()
    mosaic.copy_smem_to_gmem(queries.at[own], refs["out"].at[(*rows, columns)])
    mosaic.wait_smem_to_gmem(0)
