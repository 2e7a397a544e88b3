"""Products of up to 256 rows in the Mosaic GPU dialect, for Hopper: one matrix of bfloat16 weights, read once.

A program multiplies all rows with some blocks of outputs, or with a part of their inputs. One warpgroup copies weights and rows to shared
memory, several steps ahead; each of the others multiplies blocks of its own. Outputs are the tensor core's left operand, so rows of x are
padded to eight only. A block holds 64 outputs or fewer: as many as give each multiprocessor the same number of programs. Two programs side
by side may share what they read of x, each of them copying half of it to both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.activation import GELU
from pallas_kernels.dialect import pl
from pallas_kernels.linear.registers import BLOCK, exchange, flags, store

LEAST_ROWS, MOST_ROWS = 17, 256
LEAST_WEIGHTS = 1 << 24
FETCHED = 256  # inputs whose weights are brought into the L2 cache together
SHARED_MEMORY = 230_000  # of a program, without its barriers
MOST_STAGES = 12
MOST_SPLITS = 8
MOST_LONG = 64  # rows up to which a step has 128 inputs
LEAST_SHARE = 512  # inputs of a program that shares sums
# The times of `choose_tiles`: of a row of x beside a row of weights, of a tile's end, of programs that wait for each other, and of a number
# of a part, which the next kernel reads.
OF_ROWS, TILE, STREAM, OF_PARTS = 1 / 12, 200, 2000, 5e-4


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a product is cut."""

    outputs: int  # of a block of each matrix: a multiple of 8, at most 64
    wide: int  # warpgroups that multiply
    blocks: int = 1  # of a warpgroup
    step: int = 64  # inputs of a step: a multiple of 64
    stages: int = 4  # steps in shared memory
    splits: int = 1  # programs that share the sums
    cluster: int = 1  # programs that share what they read of x
    stream: bool = False  # whether programs have equal runs of steps, which may begin and end within a tile
    ahead: int = 0  # steps by which weights are in the L2 cache before they are copied; 0 for as late as they are copied
    delay: int = 1  # steps whose products are in flight when the next ones start

    def padded(self, rows: int) -> int:
        """Rows of x, padded."""
        return pl.cdiv(rows, 8 * self.cluster) * 8 * self.cluster

    def shared(self, rows: int, matrices: int) -> int:
        """Bytes of shared memory."""
        return self.handed(rows, matrices) + self.stages * (self.wide * self.blocks * BLOCK + self.padded(rows)) * self.step * 2

    def handed(self, rows: int, matrices: int) -> int:
        """Bytes of shared memory for products that a warpgroup hands to another."""
        return self.wide // 2 * BLOCK * self.padded(rows) * 2 if self.blocks % matrices else 0


def unsupported(x: jax.Array, w: jax.Array, *others: jax.Array) -> str | None:
    """Why the kernels cannot serve these arrays, or None."""
    if reason := dialect.mosaic_obstacle():
        return reason
    if others:
        return "the product is gated by other numbers; the kernel does not read any"
    if {x.dtype, w.dtype} != {jnp.dtype(jnp.bfloat16)}:
        return f"x is {x.dtype.name} and the matrix {w.dtype.name}; the kernel needs bfloat16"
    *_, outputs, width = w.shape
    if width % BLOCK or outputs % 8:
        return f"the matrix is {list(w.shape)}; the kernel needs inputs in multiples of {BLOCK} and outputs in multiples of 8"
    if x.shape[0] > MOST_ROWS:
        return f"x has {x.shape[0]} rows; the kernel takes at most {MOST_ROWS}"
    return None


def pays(w: jax.Array) -> bool:
    """Whether the device has the kernels and they are the fastest with this matrix, from LEAST_ROWS rows on."""
    return w.dtype == jnp.bfloat16 and dialect.mosaic_obstacle() is None and math.prod(w.shape) >= LEAST_WEIGHTS


def choose_tiles(rows: int, outputs: int, width: int, *, matrices: int = 1, splits: int | None = 1) -> Tiles:
    """The tiles for a product of `rows` rows with [matrices, outputs, width] weights. splits: as for `linear`."""
    padded = pl.cdiv(rows, 8) * 8
    step = 128 if padded <= MOST_LONG and width % 128 == 0 else 64

    def fitting(**settings: Any) -> Tiles:
        tiles = Tiles(wide=2, step=step, stages=1, **settings)
        most = (SHARED_MEMORY - tiles.shared(rows, matrices)) // (tiles.shared(rows, matrices) - tiles.handed(rows, matrices)) + 1
        return dataclasses.replace(tiles, stages=min(most, MOST_STAGES))

    def time(tiles: Tiles) -> float:  # in units of a step's time for a weight of each of its inputs, fitted to measured times
        at_once = tiles.wide * tiles.blocks // matrices * tiles.outputs
        each = tiles.wide * tiles.blocks * tiles.outputs + rows * OF_ROWS
        works, steps = pl.cdiv(outputs, at_once), pl.cdiv(width, BLOCK)
        if tiles.stream:
            return works * steps * each / dialect.MULTIPROCESSORS + STREAM
        share = pl.cdiv(steps, tiles.splits)
        waves = pl.cdiv(works * tiles.splits, dialect.MULTIPROCESSORS)
        return waves * (share * each + TILE) + tiles.splits * rows * outputs * OF_PARTS

    shapes = [fitting(outputs=height, splits=count) for height in (64, 56, 48, 40) for count in range(1, (splits or MOST_SPLITS) + 1)]
    shapes = [tiles for tiles in shapes if tiles.splits * LEAST_SHARE <= width or tiles.splits == 1]
    return min([*shapes, fitting(outputs=64, stream=True)], key=time)


def linear(x, w, splits: int | None = 1, *, tiles: Tiles | None = None, interpret: Any = False):
    """See `pallas_kernels.linear.linear`."""
    tiles = tiles or _tiles(x, w, splits)
    parts = _product(x, w, tiles, x.dtype if tiles.splits == 1 else jnp.float32, GELU, interpret)
    return parts[0] if len(parts) == 1 else jnp.sum(parts, axis=0).astype(x.dtype)


def partials(x, w, splits: int | None = None, *, tiles: Tiles | None = None, interpret: Any = False):
    """See `pallas_kernels.linear.partials`."""
    return _product(x, w, tiles or _tiles(x, w, splits), jnp.float32, GELU, interpret)


def gated(x, gate_up, activation=GELU, *, tiles: Tiles | None = None, interpret: Any = False):
    """See `pallas_kernels.linear.gated`."""
    return _product(x, gate_up, tiles or _tiles(x, gate_up), x.dtype, activation, interpret)[0]


def _tiles(x: jax.Array, w: jax.Array, splits: int | None = 1) -> Tiles:
    *matrices, outputs, width = w.shape
    return choose_tiles(x.shape[0], outputs, width, matrices=math.prod(matrices), splits=splits)


def _product(x: jax.Array, w: jax.Array, tiles: Tiles, dtype: Any, activation: Any, interpret: Any) -> jax.Array:
    """Parts of the product, or of what the activation makes of two products, [splits, rows, outputs]."""
    mosaic, outputs, padded, matrices = dialect.mosaic(), w.shape[-2], tiles.padded(x.shape[0]), math.prod(w.shape[:-2])
    steps = x.shape[1] // tiles.step
    splits = pl.cdiv(steps, pl.cdiv(steps, tiles.splits))
    out = {"out": jax.ShapeDtypeStruct((splits, x.shape[0], outputs), dtype)}
    handed = tiles.blocks % matrices != 0  # whether a warpgroup has one matrix only, and hands its product to another one
    pairs = tiles.wide // 2
    scratch: dict[str, Any] = {}
    if handed:
        barriers = {name: mosaic.Barrier(num_barriers=pairs) for name in ("given", "taken")}
        scratch = {"handed": mosaic.SMEM((pairs, padded // 4, 256), x.dtype), **barriers}

    def worker(refs, warpgroup):
        """What a warpgroup does with its products. Returns a function of them and one for the end."""
        out = refs["out"]
        give, take = exchange(mosaic, padded, out.dtype, interpret=bool(interpret))
        place = jax.lax.rem(warpgroup, pairs) if handed else None

        def output(value, split, block):
            end = jnp.minimum(block + tiles.outputs, outputs)
            store(mosaic, value, out.at[split], block, end, interpret=bool(interpret))

        def finish(number, split, firsts, totals):
            found = [total.astype(out.dtype) for total in totals]
            if not handed:
                each = tiles.blocks // matrices
                for b in range(each):
                    output(found[b] if matrices == 1 else activation(found[b], found[each + b]), split, firsts[b])
                return

            @pl.when(warpgroup >= pairs)
            def _give():
                pl.when(number > 0)(lambda: mosaic.barrier_wait(refs["taken"].at[place]))
                give(found[0], refs["handed"].at[place])
                mosaic.barrier_arrive(refs["given"].at[place])

            @pl.when(warpgroup < pairs)
            def _take():
                mosaic.barrier_wait(refs["given"].at[place])
                up = take(refs["handed"].at[place])
                mosaic.barrier_arrive(refs["taken"].at[place])
                output(activation(found[0], up), split, firsts[0])

        def end(finished):
            if handed:
                pl.when((warpgroup >= pairs) & (finished > 0))(lambda: mosaic.barrier_wait(refs["taken"].at[place]))

        return finish, end

    name = "gated" if matrices == 2 else "linear"
    return products(x, w.reshape(matrices, *w.shape[-2:]), tiles, worker, name=name, out=out, scratch=scratch, interpret=interpret)["out"]


def products(
    x: jax.Array,
    w: jax.Array,
    tiles: Tiles,
    worker: Any,
    *,
    name: str,
    out: dict[str, jax.ShapeDtypeStruct],
    arrays: dict[str, jax.Array] | None = None,
    scratch: dict[str, Any] | None = None,
    interpret: Any = False,
) -> dict[str, jax.Array]:
    """A kernel of products x w^T. x: [N, H]; w: [matrices, O, H].

    worker: a function of all references, by name, and a warpgroup's number. It returns two functions: one takes how many tiles came before,
    the split, the first output of each of the warpgroup's blocks and their products [64, N padded]; the other takes how many tiles there
    were, at the end. name: the kernel's. out, arrays, scratch: what the worker writes, reads and keeps in shared memory. Returns `out`.
    """
    mosaic = dialect.mosaic()
    matrices, outputs, width = w.shape
    rows, padded = x.shape[0], tiles.padded(x.shape[0])
    if rows < padded:
        x = jnp.pad(x, ((0, padded - rows), (0, 0)))
    steps = width // tiles.step
    share = pl.cdiv(steps, tiles.splits)
    splits = pl.cdiv(steps, share)
    count = tiles.wide * tiles.blocks  # blocks of a program
    works = pl.cdiv(pl.cdiv(outputs, count // matrices * tiles.outputs), tiles.cluster) * splits
    programs = min(works * steps if tiles.stream else works, dialect.MULTIPROCESSORS // tiles.cluster)
    transforms = mosaic.TilingTransform((8, 64)), mosaic.SwizzleTransform(128)
    barrier = mosaic.Barrier
    if tiles.cluster > 1:
        barrier = functools.partial(mosaic.ClusterBarrier, collective_axes=("member",))
    kept = {
        "weights": mosaic.SMEM((tiles.stages, count, BLOCK, tiles.step), w.dtype, transforms=transforms),
        "rows": mosaic.SMEM((tiles.stages, padded, tiles.step), x.dtype, transforms=transforms),
        "full": mosaic.Barrier(num_arrivals=count + 1, num_barriers=tiles.stages),
        "empty": barrier(num_arrivals=tiles.wide, num_barriers=tiles.stages),
    }
    read, written = {"x": x, "w": w, **(arrays or {})}, dict(out)
    if tiles.stream:
        mine = programs * tiles.cluster * tiles.wide
        read["flags"] = jnp.zeros((mine,), jnp.int32)
        written["sums"] = jax.ShapeDtypeStruct((mine, tiles.blocks, padded // 4, 256), jnp.float32)
    names = (*read, *written)
    settings = {"works": works, "splits": splits, "steps": steps, "share": share, "matrices": matrices}

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True)) | scratch
        _multiply(mosaic, refs, worker, tiles=tiles, interpret=bool(interpret), **settings)

    together = {"cluster": (tiles.cluster,), "cluster_names": ("member",)} if tiles.cluster > 1 else {}
    interpreted = {"interpret": interpret} if interpret else {}
    found = mosaic.kernel(
        body,
        out_type=tuple(written.values()),
        scratch_types=kept | (scratch or {}),
        grid=(programs,),
        grid_names=("program",),
        num_threads=tiles.wide + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=mosaic.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane),
        **together,
        **interpreted,
    )(*read.values())
    return dict(zip(written, found, strict=True))


def _multiply(mosaic, refs, worker, *, tiles, works, splits, steps, share, matrices, interpret):
    weights, rows, full, empty = (refs[name] for name in ("weights", "rows", "full", "empty"))
    warpgroup, program, programs = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program"), jax.lax.axis_size("program")
    member = jax.lax.axis_index("member") if tiles.cluster > 1 else 0
    stages, count, _, _ = weights.shape
    padded, workers = rows.shape[1], tiles.wide
    places = count // matrices  # blocks of outputs of a program
    if tiles.stream:
        program = programs - 1 - program  # so that a program waits only for some that started before it
        begin, end = (jax.lax.div(p * (works * steps), programs) for p in (program, program + 1))
        head = jax.lax.div(begin, steps)
        pieces = jax.lax.div(end - 1, steps) - head + 1
        shared_first = (jax.lax.rem(begin, steps) > 0).astype(jnp.int32)  # whether the first piece began in another program
    else:
        begin = end = head = shared_first = 0
        pieces = jax.lax.div(works - program + programs - 1, programs)

    def each_work(do):
        """Calls do(number, tile, split, first step, steps, steps before) for each piece of the program's work. Returns all steps."""

        def work(i, before):
            if tiles.stream:
                number, split = head + i, 0
                first, last = jnp.maximum(begin - number * steps, 0), jnp.minimum(end - number * steps, steps)
                tile, length = number, last - first
            else:
                number = program + i * programs
                tile, split = jax.lax.div(number, splits), jax.lax.rem(number, splits)
                first = split * share
                length = jnp.minimum(share, steps - first)
            do(i, tile * tiles.cluster + member, split, first, length, before)
            return before + length

        return jax.lax.fori_loop(0, pieces, work, jnp.int32(0))

    together = FETCHED // tiles.step

    def fetch(at):
        """Brings the weights of FETCHED inputs, from the program's step `at` on, into the L2 cache."""
        if tiles.stream:
            there = begin + at
            tile, step, total = jax.lax.div(there, steps), jax.lax.rem(there, steps), end - begin
        else:
            number = program + jax.lax.div(at, share) * programs
            tile, total = jax.lax.div(number, splits), pieces * share
            step = jax.lax.rem(number, splits) * share + jax.lax.rem(at, share)

        @pl.when(at < total)
        def _fetch():
            inputs = pl.ds(step * tiles.step, FETCHED)
            for block in range(count):
                first = ((tile * tiles.cluster + member) * places + block % places) * tiles.outputs
                mosaic.async_prefetch(refs["w"].at[block // places, pl.ds(first, tiles.outputs), inputs])

    @pl.when(warpgroup == workers)
    def _copy():
        if not interpret:
            mosaic.set_max_registers(40, action="decrease")
        shared = {"collective_axes": "member"} if tiles.cluster > 1 else {}

        def copy(_, tile, __, first, length, before):
            def step(i, _):
                slot = jax.lax.rem(before + i, stages)
                if tiles.ahead:
                    pl.when(jax.lax.rem(before + i, together) == 0)(lambda: fetch(before + i + tiles.ahead))
                pl.when(before + i >= stages)(lambda: mosaic.barrier_wait(empty.at[slot]))
                inputs = pl.ds((first + i) * tiles.step, tiles.step)
                for block in range(count):
                    begin = (tile * places + block % places) * tiles.outputs
                    source = refs["w"].at[block // places, pl.ds(begin, tiles.outputs), inputs]
                    mosaic.copy_gmem_to_smem(source, weights.at[slot, block, pl.ds(0, tiles.outputs)], full.at[slot])
                mosaic.copy_gmem_to_smem(refs["x"].at[:, inputs], rows.at[slot], full.at[slot], **shared)

            jax.lax.fori_loop(0, length, step, None)

        for at in range(together, tiles.ahead, together):
            fetch(jnp.int32(at))
        done = each_work(copy)

        # Arrivals of the other program of a cluster still come here, so this one must not end before.
        def drain(i, _):
            mosaic.barrier_wait(empty.at[jax.lax.rem(i, stages)])

        jax.lax.fori_loop(jnp.maximum(done - stages, 0), done, drain, None)

    @pl.when(warpgroup < workers)
    def _compute():
        # What the copying warpgroup gives up goes to the others.
        started = 65_536 // (128 * (workers + 1)) // 8 * 8
        if not interpret:
            mosaic.set_max_registers(min(232, started + (started - 40) // workers // 8 * 8), action="increase")
        finish, finish_all = worker(refs, warpgroup)
        # A warpgroup's blocks: of the same outputs in each matrix, or one block of one matrix.
        each = tiles.blocks // matrices
        mine = [b // each * places + warpgroup * each + b % each for b in range(tiles.blocks)] if each else [warpgroup]

        def compute(number, tile, split, first, length, before):
            def multiply(*accumulators):
                def step(i, _):
                    slot = jax.lax.rem(before + i, stages)
                    mosaic.barrier_wait(full.at[slot])
                    for k in range(0, tiles.step, 64):
                        right = dialect.mosaic_transposed(rows.at[slot, :, pl.ds(k, 64)])
                        for block, accumulator in zip(mine, accumulators, strict=True):
                            mosaic.wgmma(accumulator, weights.at[slot, block, :, pl.ds(k, 64)], right)
                    if tiles.delay == 0:
                        mosaic.wgmma_wait(0)
                        mosaic.barrier_arrive(empty.at[slot])
                        return
                    mosaic.wgmma_wait(tiles.step // 64 * tiles.blocks)  # only this step's products may still run
                    pl.when(i > 0)(lambda: mosaic.barrier_arrive(empty.at[jax.lax.rem(before + i - 1, stages)]))

                jax.lax.fori_loop(0, length, step, None)
                totals = tuple(accumulator[...] for accumulator in accumulators)
                if tiles.delay:
                    mosaic.barrier_arrive(empty.at[jax.lax.rem(before + length - 1, stages)])
                return totals

            totals = pl.run_scoped(multiply, *[mosaic.ACC((BLOCK, padded), jnp.float32)] * tiles.blocks)
            firsts = [(tile * places + jax.lax.rem(block, places)) * tiles.outputs for block in mine]
            if not tiles.stream:
                finish(number, split, firsts, totals)
                return
            give_sums, take_sums = exchange(mosaic, padded, jnp.float32)
            set_flag, wait_for = flags(mosaic)

            def of(other):
                return (other * tiles.cluster + member) * workers + warpgroup

            @pl.when(first > 0)
            def _leave():
                for b, total in enumerate(totals):
                    give_sums(total, refs["sums"].at[of(program), b])
                set_flag(refs["flags"], of(program))

            @pl.when(first == 0)
            def _complete():
                def add(other, totals):
                    wait_for(refs["flags"], of(other))
                    return tuple(total + take_sums(refs["sums"].at[of(other), b]) for b, total in enumerate(totals))

                # The last program that has steps of this tile.
                last = jax.lax.div((jax.lax.div(tile, tiles.cluster) + 1) * steps * programs - 1, works * steps)
                finish(number - shared_first, split, firsts, jax.lax.fori_loop(program + 1, last + 1, add, totals))

        each_work(compute)
        finish_all(pieces - shared_first)
