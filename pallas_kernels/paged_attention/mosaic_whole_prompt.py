"""Paged attention in the Mosaic GPU dialect for many rows of a prompt, with keys that are stored whole.

A program serves 64 queries of a sequence, for two query heads of one KV head. It has two warpgroups, each for one of the two heads, so that
a row of a product is a query: while one computes products, the other computes its softmax. The first also copies blocks of keys and values
to shared memory. With a third for that a thread has 168 registers (see `packed.mosaic.registers`), with two 255; the sums take 128 and the
scores 32.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention import mosaic_parts as parts
from pallas_kernels.paged_attention.mosaic_parts import KEYS, ROWS

DIM = 256
SLOTS = 5  # blocks of keys or of values in shared memory
AHEAD = 2  # so many blocks before it is needed, a block's copy starts
MEMBERS = 2  # query heads of an item, each for a warpgroup


@dataclasses.dataclass(frozen=True)
class Plan(parts.Call):
    """How a call is cut into items."""

    members: int  # query heads of an item

    @property
    def tiles(self) -> int:
        return pl.cdiv(self.shape[1], ROWS)

    @property
    def pairs(self) -> int:
        return self.shape[3] // self.members

    @property
    def items(self) -> int:
        return self.tiles * self.pairs * self.shape[0] * self.shape[2]

    def ends(self, inputs) -> dict[str, jax.Array]:
        """The positions [B, T] and those through which rows see, filled up to whole tiles, and the least and the largest of each tile."""
        missing = self.tiles * ROWS - self.shape[1]
        given = {name: inputs[name] for name in ("positions", "through") if name in inputs}
        whole = {name: jnp.pad(x, ((0, 0), (0, missing)), mode="edge") for name, x in given.items()}
        tiles = [x.reshape(-1, self.tiles, ROWS) for x in whole.values()]
        return {**whole, "low": jnp.min(tiles[0], axis=2), "high": jnp.max(tiles[-1], axis=2)}

    def item(self, refs, number) -> Item:
        """refs: the kernel's arguments by name. number: below `items`; those with the same keys are neighbours."""
        rest, tile = jax.lax.div(number, self.tiles), self.tiles - 1 - jax.lax.rem(number, self.tiles)
        rest, pair = jax.lax.div(rest, self.pairs), jax.lax.rem(rest, self.pairs)
        b, head = jax.lax.div(rest, self.shape[2]), jax.lax.rem(rest, self.shape[2])
        low, high = refs["low"][b, tile], refs["high"][b, tile]
        span = parts.span_of(refs, b, [low, high], self.causal, self.window)
        return Item(b, head, tile * ROWS, span, jnp.int32(0), span.blocks, pair * self.members, low, high)

    def softmax(self, refs, item: Item) -> parts.Softmax:
        def after(name):
            own = refs[name].at[item.b, pl.ds(item.first, ROWS)]
            return dialect.mosaic_load(own, dialect.mosaic().Layout.WGMMA.reduce(1)).astype(jnp.float32) + 1.0

        limit = after("through") if "through" in refs else None
        return parts.Softmax(after("positions"), item.span.begin, limit, causal=self.causal, window=self.window, scale=self.scale)


@dataclasses.dataclass(frozen=True)
class Item(parts.Work):
    member: jax.Array  # the first of its query heads
    low: jax.Array  # the least position of its queries
    high: jax.Array  # the largest, or that through which they see


def serves(q) -> bool:
    """Whether the kernel can serve these queries, which `mosaic_whole` can."""
    return q.shape[4] == DIM and q.shape[1] >= ROWS and q.shape[1] % 8 == 0 and q.shape[3] % MEMBERS == 0


def attend(plan: Plan, inputs, q):
    """The result. inputs: the kernel's arguments by name."""
    mosaic = dialect.mosaic()
    programs = min(plan.items, dialect.MULTIPROCESSORS)
    inputs = inputs | plan.ends(inputs)
    scratch = {
        "queries": parts.tiled(MEMBERS, ROWS, DIM),  # where results are put together later
        "pages": parts.tiled(SLOTS, KEYS, DIM),
        "loaded": mosaic.Barrier(num_barriers=MEMBERS),
        "full": mosaic.Barrier(num_barriers=SLOTS),
        "empty": mosaic.Barrier(num_arrivals=MEMBERS, num_barriers=SLOTS),
    }
    names = (*inputs, "out")

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True)) | scratch
        _compute(plan, refs, jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program"), programs)

    return mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=MEMBERS,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        compiler_params=mosaic.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane),
    )(*inputs.values())


def _compute(plan, refs, warpgroup, program, programs):
    mosaic, pages, held = dialect.mosaic(), refs["pages"], refs["queries"].at[warpgroup]
    works = jax.lax.div(plan.items - 1 - program, programs) + 1

    def page_of(item, block):
        return parts.page_of(refs, item, jnp.minimum(block, item.stop - 1))

    def slot_of(number):
        return jax.lax.rem(number, SLOTS)

    def copy(item, before, block, page):
        """Copies a block's keys and values, as soon as both warpgroups have read what is in their place. before: blocks of the items
        before."""

        def copy_both(k_source, v_source, major, rows):
            for kind, source in enumerate((k_source, v_source)):
                number = 2 * (before + block) + kind
                slot = slot_of(number)
                pl.when(number >= SLOTS)(lambda slot=slot: mosaic.barrier_wait(refs["empty"].at[slot]))
                source = source.at[major, rows, item.head]
                mosaic.copy_gmem_to_smem(source, pages.at[slot, pl.ds(0, rows.size)], refs["full"].at[slot])

        parts.copy_block(refs, item, block, page, copy_both)

    def begin(item, before):
        """Starts the first copies of an item."""
        for n in range(AHEAD):
            block = item.start + n
            pl.when((warpgroup == 0) & (block < item.stop))(functools.partial(copy, item, before, block, page_of(item, block)))

    def serve(n, before):
        number = program + n * programs
        item = plan.item(refs, number)
        at = (item.b, pl.ds(item.first, ROWS), item.head, item.member + warpgroup)
        mosaic.copy_gmem_to_smem(refs["q"].at[at], held, refs["loaded"].at[warpgroup])
        softmax = plan.softmax(refs, item)
        mosaic.barrier_wait(refs["loaded"].at[warpgroup])

        def step(block, carry):
            state, page = carry
            k, v = (slot_of(2 * (before + block) + kind) for kind in range(2))
            next_page = page_of(item, block + AHEAD + 1)  # read one step ahead, so that nothing waits for it

            def product(scores):
                mosaic.wgmma(scores, held, dialect.mosaic_transposed(pages.at[k]))
                return scores[...]

            mosaic.barrier_wait(refs["full"].at[k])
            scores = pl.run_scoped(product, mosaic.ACC((ROWS, KEYS), jnp.float32))
            mosaic.barrier_arrive(refs["empty"].at[k])
            seen = item.span.seen(block)
            weights, (acc, *state) = softmax.step(scores, state, seen, plan.plain(item, seen, item.low, item.high))
            mosaic.barrier_wait(refs["full"].at[v])
            parts.clear(pages.at[v], parts.within(item.span.begin, seen))
            acc = pl.run_state(lambda acc: mosaic.wgmma(acc, weights, pages.at[v]))(mosaic.ACC.init(acc))
            mosaic.barrier_arrive(refs["empty"].at[v])
            later = block + AHEAD
            pl.when((warpgroup == 0) & (later < item.stop))(functools.partial(copy, item, before, later, page))
            return (acc, *state), next_page

        carry = softmax.start(DIM), page_of(item, item.start + AHEAD)
        (acc, _, total), _ = jax.lax.fori_loop(item.start, item.stop, step, carry)
        done = before + item.stop
        pl.when(n + 1 < works)(lambda: begin(plan.item(refs, number + programs), done))
        held[...] = softmax.result(acc, total).astype(held.dtype)
        mosaic.commit_smem()
        mosaic.copy_smem_to_gmem(held, refs["out"].at[at])
        mosaic.wait_smem_to_gmem(0)
        return done

    begin(plan.item(refs, program), jnp.int32(0))
    jax.lax.fori_loop(0, works, serve, jnp.int32(0))
