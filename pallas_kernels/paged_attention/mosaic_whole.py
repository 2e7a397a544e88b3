"""Paged attention in the Mosaic GPU dialect for keys that are stored whole.

One warpgroup of a program copies keys and values to shared memory, as far ahead as there is room; another computes, or two do, half of the
rows each. A program serves one item after the other, and the next item's keys arrive while it still computes.

Keys are the tensor core's left operand, which has 64 rows, and so are the columns of V. Queries are the right one, which may have as few
as eight columns. So a verify block's few queries cost what they need: scores, weights and sums lie in few registers, and a block of keys
is computed in about half the time in which it arrives. FlashMLA (https://github.com/deepseek-ai/FlashMLA) and others call this swapping A
and B.

With few items, several programs share an item's keys. They are a cluster: each sends the others those blocks of its sums that they add up.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect, read_once
from pallas_kernels.clusters import Mail
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention import mosaic_parts as parts
from pallas_kernels.paged_attention.mosaic_parts import KEYS
from pallas_kernels.paged_attention.mosaic_queries import load, store, store_block
from pallas_kernels.paged_attention.reference import MASKED
from pallas_kernels.registers import BLOCK, over_rows, sending

PART = 256  # columns of keys or of values that are copied and multiplied at once
MOST_ROWS = {256: 40, 512: 32}  # of an item, by head_dim: with more, registers would be spilled
MOST_SPLITS, GROUPS = 8, 8  # programs of a cluster; groups of multiprocessors
# Microseconds for a block of keys and for each of an item's rows in it, for a program's start and end, and for each row of a merge; and
# blocks that all multiprocessors together copy in a microsecond: of heads of 256. Wide heads have two of these for one.
BLOCK_US, ROW_US, START_US, MERGE_US, BLOCKS_A_US = 0.4, 0.04, 3, 0.07, 62
PIECE = 32  # keys that are copied at once; of a block of which a part is seen, pieces that are not seen are not copied
SHARED_MEMORY = 224_000  # of a program, without its barriers


def clusters(size: int) -> int:
    """How many clusters of programs run at once, at least: a cluster lies within one of eight groups of multiprocessors, each of which has
    an even number of them."""
    return (dialect.MULTIPROCESSORS - GROUPS * (size - 2 + size % 2 if size > 1 else 0)) // size


@dataclasses.dataclass(frozen=True)
class Plan(parts.Plan):
    """How a call is cut into items, whose rows are the heads of one query after the other."""

    read_once: bool = False  # see `paged_attention`

    @property
    def at_once(self) -> int:
        return min(self.shape[1], max(1, MOST_ROWS[self.shape[4]] // self.shape[3]))

    @property
    def height(self) -> int:
        return pl.cdiv(self.at_once * self.shape[3], 8) * 8

    def rows_of(self, item: parts.Item) -> tuple[Any, Any]:
        """An item's first row, of all heads of all queries, and the one after its last."""
        return item.first * self.shape[3], jnp.minimum(item.first + self.at_once, self.shape[1]) * self.shape[3]


def workers_of(plan: Plan) -> int:
    """How many warpgroups of a program compute: two where the sums are too many for one's registers."""
    return 2 if plan.shape[4] > PART and plan.height == MOST_ROWS[plan.shape[4]] else 1


def splits_for(plan: Plan, blocks: int) -> int:
    """The best number of parts for `blocks` blocks of keys, the least one of several. plan: without parts."""
    wide = plan.shape[4] // PART
    compute, merge = wide * (BLOCK_US + plan.height // workers_of(plan) * ROW_US), wide * plan.height * MERGE_US

    def us(splits: int) -> float:  # fitted to measured times, for sequences that are as long as their tables
        each = max(pl.cdiv(blocks, splits) * compute, plan.items * blocks * wide / BLOCKS_A_US)
        return pl.cdiv(plan.items, clusters(splits)) * (each + START_US) + (merge if splits > 1 else 0)

    return min(range(1, min(blocks, MOST_SPLITS) + 1), key=lambda splits: (us(splits), splits))


def attend(plan: Plan, inputs, outputs, launch_dependents: bool):
    """The kernel's results. inputs, outputs: its arguments, and the shapes of its results, by name. launch_dependents: whether only kernels
    read them: see `dialect.launching`."""
    mosaic, height, dim, workers = dialect.mosaic(), plan.height, plan.shape[4], workers_of(plan)
    programs = min(plan.items, dialect.MULTIPROCESSORS) if plan.splits == 1 else plan.items // plan.splits
    scratch = {"queries": parts.tiled(height, dim), "weights": parts.tiled(height, KEYS)}
    scratch["reduced"] = mosaic.SMEM((workers, 4, height // workers), jnp.float32)
    taken = height * ((dim + KEYS) * 2 + 4 * 4)
    if plan.splits > 1:
        places = pl.cdiv(dim // BLOCK * height // 8, plan.splits) * plan.splits
        scratch |= {"sums": mosaic.SMEM((places, BLOCK * 8), jnp.float32), "numbers": mosaic.SMEM((plan.splits, 2, height), jnp.float32)}
        scratch["mail"] = mosaic.SMEM((4,), jnp.int32)
        taken += (plan.splits * 2 * height + (places * BLOCK * 8 if dim == PART else 0)) * 4
    slots = (SHARED_MEMORY - taken) // (KEYS * PART * 2)  # parts of blocks of keys or of values in shared memory
    scratch |= {
        "pages": parts.tiled(slots, KEYS, PART),
        "full": mosaic.Barrier(num_arrivals=KEYS // PIECE, num_barriers=slots),
        "empty": mosaic.Barrier(num_arrivals=workers, num_barriers=slots),
    }
    if dim > PART and plan.splits > 1:  # sums come in the place of keys and values
        scratch["union"] = mosaic.RefUnion(scratch.pop("pages"), scratch.pop("sums"))
    names = (*inputs, *outputs)

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True)) | scratch
        if "union" in refs:
            refs["pages"], refs["sums"] = refs["union"]
        if plan.splits > 1:
            count = _blocks_of(jax.lax.axis_index("part"), plan)
            Mail(mosaic, refs["mail"]).begin(plan.splits * 2 * height * 4, count * (plan.splits * BLOCK * 8 * 4))
        dialect.mosaic_wait(launch_dependents)
        warpgroup, program = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program")

        def serve(role):
            def step(n, before):
                item = plan.item(refs, number(n))

                def place(block, kind, part):
                    """Counts the parts of blocks of keys and of values before a block's, and says which slot this has. kind: 0 for keys, 1
                    for values. part: which of its columns."""
                    number = (2 * (before + block - item.start) + kind) * (dim // PART) + part
                    return number, jax.lax.rem(number, slots)

                role(plan, refs, item, place, slots)
                return before + item.stop - item.start

            if plan.splits > 1:
                step(0, jnp.int32(0))
            else:
                jax.lax.fori_loop(0, jax.lax.div(plan.items - 1 - program, programs) + 1, step, jnp.int32(0))

        def number(n):
            if plan.splits == 1:
                return program + n * programs
            pair, tile = jax.lax.div(program, plan.tiles), jax.lax.rem(program, plan.tiles)
            return (pair * plan.splits + jax.lax.axis_index("part")) * plan.tiles + tile

        for worker in range(workers):
            pl.when(warpgroup == worker)(functools.partial(serve, functools.partial(_compute, worker)))
        pl.when(warpgroup == workers)(functools.partial(serve, _copy))

    together = {"cluster": (plan.splits,), "cluster_names": ("part",)} if plan.splits > 1 else {}
    return mosaic.kernel(
        body,
        out_type=list(outputs.values()),
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=workers + 1,
        thread_name="warpgroup",
        kernel_name="paged_attention",
        compiler_params=mosaic.CompilerParams(
            approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        **together,
    )(*inputs.values())


def _copy(plan, refs, item, place, slots):
    mosaic, pages = dialect.mosaic(), refs["pages"]
    copy_keys = functools.partial(read_once.copy, mosaic) if plan.read_once else mosaic.copy_gmem_to_smem

    def copy(block, k_source, v_source, major, rows):
        low, high = parts.inside(item.span, block)
        for (kind, source), part in itertools.product(enumerate((k_source, v_source)), range(plan.shape[4] // PART)):
            number, slot = place(block, kind, part)
            pl.when(number >= slots)(lambda slot=slot: mosaic.barrier_wait(refs["empty"].at[slot]))
            for first in range(0, KEYS, PIECE):
                count = min(PIECE, rows.size - first)

                def skip(slot=slot):
                    mosaic.barrier_arrive(refs["full"].at[slot])

                if count <= 0:
                    skip()
                    continue

                seen = (low < first + PIECE) & (high > first)

                @pl.when(seen)
                def _(first=first, count=count, source=source, slot=slot, part=part):
                    piece = source.at[major, pl.ds(rows.start + first, count), item.head, pl.ds(part * PART, PART)]
                    copy_keys(piece, pages.at[slot, pl.ds(first, count)], refs["full"].at[slot])

                pl.when(jnp.logical_not(seen))(skip)

    parts.each_block(refs, item, copy)


def _compute(worker, plan, refs, item, place, slots):
    mosaic, pages, workers = dialect.mosaic(), refs["pages"], workers_of(plan)
    each, columns = plan.height // workers, [pl.ds(part * PART, PART) for part in range(plan.shape[4] // PART)]
    queries, held = (refs[name].at[pl.ds(worker * each, each)] for name in ("queries", "weights"))
    first, end = plan.rows_of(item)
    load(refs["q"].at[item.b, :, item.head], queries, first + worker * each, end)
    largest, sum_of = over_rows(mosaic, refs["reduced"].at[worker])
    softmax = Softmax(plan, item, worker * each, each, largest)
    mosaic.commit_smem()

    def step(block, state):
        zero = parts.hidden_zero(item, block) if len(columns) > 1 else 0
        keys, values = ([place(block, kind, part)[1] + zero for part in range(len(columns))] for kind in range(2))

        def product(scores):
            for k, at in zip(keys, columns, strict=True):
                mosaic.barrier_wait(refs["full"].at[k])
                mosaic.wgmma(scores, pages.at[k], dialect.mosaic_transposed(queries.at[:, at]))
            return scores[...]

        scores = pl.run_scoped(product, mosaic.ACC((KEYS, each), jnp.float32))
        for k in keys:
            mosaic.barrier_arrive(refs["empty"].at[k])
        weights, (sums, *state) = softmax.step(scores, state, item.span.seen(block))
        parts.store_transposed(held, weights)
        added = []
        for v, acc in zip(values, sums, strict=True):
            mosaic.barrier_wait(refs["full"].at[v])
            parts.clear(pages.at[v], parts.inside(item.span, block))
            mosaic.commit_smem()
            left, right = dialect.mosaic_transposed(pages.at[v]), dialect.mosaic_transposed(held)
            added.append(pl.run_state(lambda acc, left=left, right=right: mosaic.wgmma(acc, left, right))(mosaic.ACC.init(acc)))
            mosaic.barrier_arrive(refs["empty"].at[v])
        return tuple(added), *state

    sums, top, total = jax.lax.fori_loop(item.start, item.stop, step, softmax.start())
    total = sum_of(total)
    if plan.splits > 1:
        _merge(worker, plan, refs, item, sums, top, total)
        return
    for acc, at in zip(sums, columns, strict=True):
        parts.store_transposed(queries.at[:, at], (acc * softmax.along(1.0 / jnp.maximum(total, 1e-30), PART)).astype(refs["q"].dtype))
    mosaic.commit_smem()
    store(queries, refs["out"].at[item.b, :, item.head], first + worker * each, end)
    mosaic.commit_smem()  # after this the next item's queries may come


def _blocks_of(part, plan):
    """How many blocks [64, 8] of an item's sums a program of the cluster adds up: every nth, from its own number on."""
    return jax.lax.div(plan.shape[4] // BLOCK * plan.height // 8 - part + plan.splits - 1, plan.splits)


def _merge(worker, plan, refs, item, accs, top, total):
    """Adds up the sums of all parts of the keys, which are those of a cluster's programs. Each program does it for some blocks of [64, 8],
    each of its warpgroups for some of these, and stores them."""
    mosaic, (sums, numbers), workers = dialect.mosaic(), (refs["sums"], refs["numbers"]), workers_of(plan)
    mail, own = Mail(mosaic, refs["mail"]), jax.lax.axis_index("part")
    send_blocks, send_numbers, take, take_numbers = sending(mosaic, mail)
    across = plan.height // workers // 8  # blocks side by side, of 8 queries or heads each, of a warpgroup
    of_part = PART // BLOCK * across  # its blocks of a part of the columns
    each = len(accs) * of_part
    send_numbers((top, total), numbers, 0, own, plan.splits, first=worker * across * 8)
    if len(accs) > 1:  # when all have sent theirs, nobody needs keys and values any more, whose place the sums take
        mail.wait(0)
    for part, acc in enumerate(accs):
        send_blocks(acc, sums, 1, own, plan.splits, first=worker * each + part * of_part)
    mail.wait(0)
    mail.wait(1)

    def merge(n):
        block = own + n * plan.splits
        whose, rest = jax.lax.div(block, each), jax.lax.rem(block, each)
        down, side = jax.lax.div(rest, across), whose * across + jax.lax.rem(rest, across)
        found, tops, totals = [], [], []
        for other in range(plan.splits):
            found.append(take(sums.at[n * plan.splits + other]))
            tops.append(take_numbers(numbers.at[other, 0, pl.ds(8 * side, 8)]))
            totals.append(take_numbers(numbers.at[other, 1, pl.ds(8 * side, 8)]))
        most = functools.reduce(jnp.maximum, tops)
        shares = [jnp.exp2(t - most) for t in tops]
        whole = functools.reduce(jnp.add, [share * t for share, t in zip(shares, totals, strict=True)])
        value = functools.reduce(jnp.add, [share * f for share, f in zip(shares, found, strict=True)]) * (1.0 / jnp.maximum(whole, 1e-30))
        first, end = plan.rows_of(item)
        store_block(value.astype(refs["out"].dtype), refs["out"].at[item.b, :, item.head], first + 8 * side, end, down * BLOCK)

    # Unrolled, so that loads and sums of several blocks are under way at a time.
    for n in range(worker, pl.cdiv(workers * each, plan.splits), workers):
        every = (n + 1) * plan.splits <= workers * each  # program of the cluster has such a block
        pl.when(True if every else n < _blocks_of(own, plan))(functools.partial(merge, n))


class Softmax:
    """The softmax of some of an item's columns, each a query of a head, a block of keys after the other."""

    def __init__(self, plan: Plan, item: parts.Item, first: int, count: int, largest: Any):
        """first, count: of the columns, of those of an item. largest: finds the largest number of each column of a product."""
        self.plan, self.height, self.largest, mosaic = plan, count, largest, dialect.mosaic()
        layout = mosaic.Layout.WGMMA
        self.key = mosaic.broadcasted_iota(jnp.int32, (KEYS, count), 0, layout=layout)
        column = mosaic.broadcasted_iota(jnp.int32, (count,), 0, layout=layout.reduce(0)) + first
        # We compare positions in float32, which holds them exactly, because int32 vectors would be compared as uint32.
        self.after = self._each_query((item.position[0] + 1).astype(jnp.float32))  # the position after each query's own
        for t in range(1, plan.at_once):
            self.after = jnp.where(column >= t * plan.shape[3], (item.position[t] + 1).astype(jnp.float32), self.after)
        self.begin = item.span.begin

    def start(self):
        """The state before the first block: sums of each part of V, each query's largest score, and the sums of weights of each thread's
        keys."""
        mosaic = dialect.mosaic()
        sizes = (*[PART] * (self.plan.shape[4] // PART), KEYS)
        *sums, total = (mosaic.layout_cast(jnp.zeros((n, self.height), jnp.float32), mosaic.Layout.WGMMA) for n in sizes)
        return tuple(sums), self._each_query(MASKED), total

    def step(self, scores, state, seen):
        """The weights of a block's keys, and the state before V is added. scores: products of keys and queries. seen: of the block."""
        sums, top, total = state
        base, end = seen
        position = (self.key + base).astype(jnp.float32)
        limit = self._each_query(end.astype(jnp.float32))
        if self.plan.causal:
            limit = jnp.minimum(limit, self.after)
        least = self._each_query(self.begin.astype(jnp.float32))
        if self.plan.window is not None:
            least = jnp.maximum(least, self.after - float(self.plan.window))
        visible = (position >= self.along(least, KEYS)) & (position < self.along(limit, KEYS))
        scores = jnp.where(visible, scores * self.plan.scale, -jnp.inf)
        new_top = jnp.maximum(top, self.largest(scores))
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores - self.along(new_top, KEYS))
        total = total * self.along(shrink, KEYS) + weights
        return weights.astype(jnp.bfloat16), (tuple(acc * self.along(shrink, PART) for acc in sums), new_top, total)

    def along(self, x, rows: int):
        """A number of each query, in `rows` rows."""
        return jax.lax.broadcast_in_dim(x, (rows, self.height), (1,))

    def _each_query(self, value):
        return dialect.mosaic().layout_cast(jnp.full((self.height,), value, jnp.float32), dialect.mosaic().Layout.WGMMA.reduce(0))
