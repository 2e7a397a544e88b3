"""Products of up to 256 rows in the Mosaic GPU dialect, for Hopper: one matrix of bfloat16 weights, or a gated pair, read once.

A program multiplies all rows with two blocks of outputs, or with a part of their inputs; of a gated pair, with a block of each matrix. One
warpgroup copies weights and rows to shared memory, several steps ahead, the first weights while the kernel before still runs; each of two
others multiplies a block. Outputs are the tensor core's left operand, so rows of x are padded to eight only. A block holds 64 outputs or
fewer: as many as give each multiprocessor the same number of programs. Where no number does, programs have equal runs of steps. Two
programs whose runs meet within a tile share its sums: the first one to work on it leaves them in memory, and the other adds them to its
own. Two programs side by side may share what they read of x, each of them copying half of it to both.

With about 128 rows, these are the left operand, half of them for each warpgroup, and a program has as many outputs as give each
multiprocessor one. So none of the tensor cores' 64 rows is wasted on a short block, and a pair's two products meet in one warpgroup.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect, read_once
from pallas_kernels.activation import GELU
from pallas_kernels.dialect import pl
from pallas_kernels.linear.reference import summed
from pallas_kernels.registers import BLOCK, exchange, store, store_rows

MOST_ROWS = 256
WORKERS = 2  # warpgroups that multiply
# Where the kernels are faster than others on an H200, by the number of matrices: from LEAST_ROWS rows on, or fewer if the next kernel adds
# parts, with so many weights.
LEAST_ROWS, LEAST_ROWS_OF_PARTS, MOST_FASTEST, LEAST_WEIGHTS = 17, 9, {1: 96, 2: 160}, {1: 30 << 20, 2: 18 << 20}
# Few rows, none of them padded by XLA, so many weights and a JAX that launches kernels early in CUDA graphs: what counts is how soon the
# first weights are there.
FEW_ROWS, FEW_ROWS_WEIGHTS, FEW_ROWS_SINCE = 32, 1 << 18, (0, 12)
# Parts of products with matrices of fewer weights, which leave out the pass that adds them up.
PARTS_ROWS, PARTS_WEIGHTS = (97, 128), (1 << 20, 30 << 20)
# A gated pair of so many weights and so few outputs is the dense part of a mixture of experts. The kernels that choose experts may run
# beside it, in a graph of a JAX that lets them. XLA's product of so many rows leaves them no multiprocessor; programs of whole tiles do.
DENSE_ROWS, DENSE_OUTPUTS, DENSE_WEIGHTS, DENSE_SINCE = (65, 192), 64 * BLOCK, (8 << 20, 18 << 20), (0, 12)
SHARED_MEMORY = 230_000  # of a program, without its barriers
MOST_STAGES, FEW_STAGES = 12, 4
MOST_LONG = {1: 96, 2: 64}  # rows up to which a step may have 128 inputs, by the number of matrices
HEIGHTS = (64, 56, 48, 40)  # outputs of a block that are tried
MOST_SPLITS = 8
AHEAD = 4  # steps whose weights are copied before a kernel waits for its rows, which must not queue behind too many of them
LEAST_SHARE = 512  # inputs of a program that shares sums
MANY_ROWS = 80  # with more, programs of equal runs share what they read of x
# The terms of a tile's time beside that of its weights, fitted to measured times: of a program, of a tile, of programs that wait for each
# other, of a number of a part, which the next kernel reads, and of the rows, which takes the square of their number.
START, TILE, STREAM, OF_PARTS, OF_ROWS = 300, 200, 2100, 5e-4, 1 / 900
# How many rows may be the left operand, and the most columns of the right one. Then the terms of such a tile's time: of a program, and the
# least of a step, which is that of its rows.
LEFT_ROWS, MOST_RIGHT, START_LEFT, STEP_LEFT = (97, WORKERS * BLOCK), 256, 720, 58


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a product is cut."""

    outputs: int  # of a block: a multiple of 8, at most 64; with rows on the left of a program, at most 256, or 128 of each of a pair
    step: int = 64  # inputs of a step: a multiple of 64
    stages: int = 4  # steps in shared memory
    splits: int = 1  # programs that share the sums
    stream: bool = False  # whether programs have equal runs of steps, which may begin and end within a tile
    cluster: int = 1  # programs that share what they read of x
    rows_left: bool = False  # whether rows of x are the tensor core's left operand, a half of them for each warpgroup

    def padded(self, rows: int) -> int:
        """Rows of x, padded."""
        return WORKERS * BLOCK if self.rows_left else pl.cdiv(rows, 8 * self.cluster) * 8 * self.cluster

    def together(self, matrices: int) -> int:
        """Outputs that a program computes at once."""
        return self.outputs * (1 if self.rows_left else WORKERS // matrices)

    def right(self, rows: int, matrices: int) -> int:
        """Rows of the right operand, which are columns of a product. The left operand has a block of rows for each warpgroup."""
        return matrices * self.outputs if self.rows_left else self.padded(rows)

    def shared(self, rows: int, matrices: int) -> int:
        """Bytes of shared memory."""
        return self.handed(rows, matrices) + self.stages * (WORKERS * BLOCK + self.right(rows, matrices)) * self.step * 2

    def handed(self, rows: int, matrices: int) -> int:
        """Bytes of shared memory for a product that one warpgroup hands to the other."""
        return BLOCK * self.padded(rows) * 2 if matrices == 2 and not self.rows_left else 0


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


def is_fastest(rows: int, w: jax.Array, matrices: int = 1, splits: int | None = 1) -> bool:
    """Whether the kernels are the fastest for so many rows with this matrix or pair on the current device. splits: as for `linear`."""
    if w.dtype != jnp.bfloat16 or dialect.mosaic_obstacle():
        return False
    size = math.prod(w.shape)
    if rows <= FEW_ROWS and not pads(rows) and size >= FEW_ROWS_WEIGHTS and jax.__version_info__ >= FEW_ROWS_SINCE:
        return True
    if _is_dense_part(rows, w.shape[-2], w.shape[-1], matrices):
        return jax.__version_info__ >= DENSE_SINCE
    if size >= LEAST_WEIGHTS[matrices]:
        return (LEAST_ROWS_OF_PARTS if splits is None else LEAST_ROWS) <= rows <= MOST_FASTEST[matrices]
    of_parts = matrices == 1 and splits is None and PARTS_WEIGHTS[0] < size < PARTS_WEIGHTS[1]
    return of_parts and PARTS_ROWS[0] <= rows <= PARTS_ROWS[1]


def _is_dense_part(rows: int, outputs: int, width: int, matrices: int) -> bool:
    """Whether [matrices, outputs, width] weights are such a pair, and so many rows too many for other products of it."""
    small = outputs <= DENSE_OUTPUTS and DENSE_WEIGHTS[0] <= matrices * outputs * width < DENSE_WEIGHTS[1]
    return matrices == 2 and small and DENSE_ROWS[0] <= rows <= DENSE_ROWS[1]


def pads(rows: int) -> bool:
    """Whether XLA pads so many rows of x."""
    return rows > 8 and rows % (8 if rows <= MANY_ROWS else 16) != 0


def most_rows(w: jax.Array, matrices: int = 1) -> int:
    """The most rows for which the kernels are the fastest with this matrix or pair on the current device; 0 if they never are."""
    return max((rows for rows in (*MOST_FASTEST.values(), PARTS_ROWS[1]) if is_fastest(rows, w, matrices, None)), default=0)


def choose_tiles(rows: int, outputs: int, width: int, *, matrices: int = 1, splits: int | None = 1) -> Tiles:
    """The tiles for a product of `rows` rows with [matrices, outputs, width] weights. splits: as for `linear`."""

    def staged(tiles: Tiles) -> Tiles:
        least = dataclasses.replace(tiles, stages=0).shared(rows, matrices)
        each = dataclasses.replace(tiles, stages=1).shared(rows, matrices) - least
        return dataclasses.replace(tiles, stages=min(MOST_STAGES, (SHARED_MEMORY - least) // each))

    def time(tiles: Tiles) -> float:  # in units of the time for a row of weights of 64 inputs
        works, steps = pl.cdiv(outputs, tiles.together(matrices)), pl.cdiv(width, BLOCK)
        parts = tiles.splits * rows * outputs * OF_PARTS if splits is None else 0
        if tiles.rows_left:
            return pl.cdiv(steps, tiles.splits) * max(matrices * tiles.outputs, STEP_LEFT) + START_LEFT + parts
        # Programs of gated pairs that share x read half as much of it. Single products with many rows were not timed so.
        alone = matrices == 2 and tiles.cluster == 1 and rows > MANY_ROWS
        each = WORKERS * tiles.outputs + rows * rows * OF_ROWS * (2 if alone else 1)
        if tiles.stream:
            return works * steps * each / dialect.MULTIPROCESSORS + STREAM + parts
        waves = pl.cdiv(works * tiles.splits, dialect.MULTIPROCESSORS)
        return waves * (pl.cdiv(steps, tiles.splits) * each + TILE) + START + parts

    def forms() -> Iterator[Tiles]:
        most = max(1, min(MOST_SPLITS if splits is None else splits, width // LEAST_SHARE))
        for height, count in itertools.product(HEIGHTS, range(1, most + 1)):
            # Programs share sums where all of them run at once.
            if count == 1 or pl.cdiv(outputs, WORKERS // matrices * height) * count <= dialect.MULTIPROCESSORS:
                yield Tiles(height, splits=count)
        for count in range(1, most + 1) if LEFT_ROWS[0] <= rows <= LEFT_ROWS[1] else ():
            height = pl.cdiv(outputs, dialect.MULTIPROCESSORS // count * 8) * 8
            if matrices * height <= MOST_RIGHT:
                yield Tiles(height, splits=count, rows_left=True)
        yield Tiles(BLOCK, stream=True, cluster=1 if rows <= MANY_ROWS else 2)

    chosen = Tiles(BLOCK) if _is_dense_part(rows, outputs, width, matrices) else min(forms(), key=time)
    long = staged(dataclasses.replace(chosen, step=128))
    return long if rows <= MOST_LONG[matrices] and width % 128 == 0 and long.stages >= FEW_STAGES else staged(chosen)


def linear(x, w, splits: int | None = 1, *, tiles: Tiles | None = None, interpret: Any = False):
    """See `pallas_kernels.linear.linear`."""
    tiles = tiles or _tiles(x, w, splits)
    parts = _product(x, w, tiles, x.dtype if tiles.splits == 1 else jnp.float32, interpret=interpret)
    return parts[0] if tiles.splits == 1 else summed(parts, x.dtype)


def partials(x, w, splits: int | None = None, *, tiles: Tiles | None = None, launch_dependents: bool = False, interpret: Any = False):
    """See `pallas_kernels.linear.partials`."""
    return _product(x, w, tiles or _tiles(x, w, splits), jnp.float32, launch_dependents=launch_dependents, interpret=interpret)


def gated(x, gate_up, activation=GELU, *, tiles: Tiles | None = None, launch_dependents: bool = False, interpret: Any = False):
    """See `pallas_kernels.linear.gated`."""
    settings = {"launch_dependents": launch_dependents, "interpret": interpret}
    return _product(x, gate_up, tiles or _tiles(x, gate_up), x.dtype, activation, **settings)[0]


def _tiles(x: jax.Array, w: jax.Array, splits: int | None = 1) -> Tiles:
    *matrices, outputs, width = w.shape
    return choose_tiles(x.shape[0], outputs, width, matrices=math.prod(matrices), splits=splits)


# A program has many products alike, and to trace and lower one takes a few tenths of a second.
@jax.jit(static_argnames=("tiles", "dtype", "activation", "launch_dependents", "interpret"))
def _product(
    x: jax.Array, w: jax.Array, tiles: Tiles, dtype: Any, activation: Any = GELU, *, launch_dependents: bool = False, interpret: Any
) -> jax.Array:
    """Parts of the product, or of what the activation makes of two products, [splits, rows, outputs]."""
    mosaic, outputs, padded, matrices = dialect.mosaic(), w.shape[-2], tiles.padded(x.shape[0]), math.prod(w.shape[:-2])
    steps = x.shape[1] // tiles.step
    splits = pl.cdiv(steps, pl.cdiv(steps, tiles.splits))
    out = {"out": jax.ShapeDtypeStruct((splits, x.shape[0], outputs), dtype)}
    scratch: dict[str, Any] = {}
    if tiles.handed(x.shape[0], matrices):  # one warpgroup has the gate's product, and the other hands it that of `up`
        scratch = {"handed": mosaic.SMEM((padded // 4, 256), x.dtype), "given": mosaic.Barrier(), "taken": mosaic.Barrier()}

    def rows_worker(refs, warpgroup):
        """What a warpgroup does with the products of its rows. Returns a function of them and one for the end."""

        def finish(number, split, first, total):
            found = total.astype(dtype)
            if matrices == 2:
                found = activation(found[:, : tiles.outputs], found[:, tiles.outputs :])
            store_rows(mosaic, found, refs["out"].at[split], warpgroup * BLOCK, first, interpret=bool(interpret))

        return finish, lambda finished: None

    def worker(refs, warpgroup):
        """The same for a block of outputs."""
        out = refs["out"]
        give, take = exchange(mosaic, padded, out.dtype, interpret=bool(interpret))

        def output(value, split, first):
            end = jnp.minimum(first + tiles.outputs, outputs)
            store(mosaic, value, out.at[split], first, end, interpret=bool(interpret))

        def finish(number, split, first, total):
            found = total.astype(out.dtype)
            if matrices == 1:
                output(found, split, first)
                return

            @pl.when(warpgroup == 1)
            def _give():
                pl.when(number > 0)(lambda: mosaic.barrier_wait(refs["taken"]))
                give(found, refs["handed"])
                mosaic.barrier_arrive(refs["given"])

            @pl.when(warpgroup == 0)
            def _take():
                mosaic.barrier_wait(refs["given"])
                up = take(refs["handed"])
                mosaic.barrier_arrive(refs["taken"])
                output(activation(found, up), split, first)

        def end(finished):
            if matrices == 2:
                pl.when((warpgroup == 1) & (finished > 0))(lambda: mosaic.barrier_wait(refs["taken"]))

        return finish, end

    name = "gated" if matrices == 2 else "linear"
    settings = {"name": name, "out": out, "scratch": scratch, "launch_dependents": launch_dependents, "interpret": interpret}
    return products(x, w.reshape(matrices, *w.shape[-2:]), tiles, rows_worker if tiles.rows_left else worker, **settings)["out"]


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
    launch_dependents: bool = False,
    interpret: Any = False,
) -> dict[str, jax.Array]:
    """A kernel of products x w^T. x: [N, H]; w: [matrices, O, H], which no kernel shortly before writes.

    worker: a function of all references, by name, and a warpgroup's number. It returns two functions: one takes how many tiles came before,
    the split, the first output of the warpgroup's block and its product [64, N padded]; the other takes how many tiles there were, at the
    end. If rows are on the left, the product is that of 64 rows, [64, outputs of each matrix after the other]. name: the kernel's. out,
    arrays, scratch: what the worker writes, reads and keeps in shared memory. launch_dependents: see `dialect.mosaic_wait`. Returns `out`.
    """
    mosaic = dialect.mosaic()
    matrices, outputs, width = w.shape
    rows, padded = x.shape[0], tiles.padded(x.shape[0])
    # Rows are copied in tiles of eight, so there must be fewer than eight, or a multiple. The interpreter copies only rows that there are.
    held = pl.cdiv(rows, 8) * 8 if tiles.rows_left and not interpret else padded
    if rows < held and (rows > 8 or interpret):
        x = jnp.pad(x, ((0, held - rows), (0, 0)))
    steps = width // tiles.step
    share = pl.cdiv(steps, tiles.splits)
    splits = pl.cdiv(steps, share)
    works = pl.cdiv(pl.cdiv(outputs, tiles.together(matrices)), tiles.cluster) * splits
    programs = min(works * steps if tiles.stream else works, dialect.MULTIPROCESSORS // tiles.cluster)
    transforms = mosaic.TilingTransform((8, 64)), mosaic.SwizzleTransform(128)
    barrier = mosaic.Barrier
    if tiles.cluster > 1:
        barrier = functools.partial(mosaic.ClusterBarrier, collective_axes=("member",))
    kept = {
        "left": mosaic.SMEM((tiles.stages, WORKERS, BLOCK, tiles.step), w.dtype, transforms=transforms),
        "right": mosaic.SMEM((tiles.stages, tiles.right(rows, matrices), tiles.step), x.dtype, transforms=transforms),
        "full": mosaic.Barrier(num_arrivals=WORKERS + (matrices if tiles.rows_left else 1), num_barriers=tiles.stages),
        "empty": barrier(num_arrivals=WORKERS, num_barriers=tiles.stages),
    }
    read, written = {"x": x, "w": w, **(arrays or {})}, dict(out)
    mine = 0
    if tiles.stream:
        mine = programs * tiles.cluster * WORKERS
        written["sums"] = jax.ShapeDtypeStruct((mine, tiles.right(rows, matrices) // 4, 256), jnp.float32)
    names = (*read, *written)
    settings = {"works": works, "splits": splits, "steps": steps, "share": share, "matrices": matrices}

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True)) | scratch
        if tiles.stream:
            refs["ready"] = pl.get_global(mosaic.SemaphoreType.REGULAR((mine,)))
        # The interpreter knows neither this nor registers.
        wait = None if interpret else functools.partial(dialect.mosaic_wait, launch_dependents)
        _multiply(mosaic, refs, worker, tiles=tiles, wait=wait, **settings)

    together = {"cluster": (tiles.cluster,), "cluster_names": ("member",)} if tiles.cluster > 1 else {}
    interpreted = {"interpret": interpret} if interpret else {}
    found = mosaic.kernel(
        body,
        out_type=tuple(written.values()),
        scratch_types=kept | (scratch or {}),
        grid=(programs,),
        grid_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=mosaic.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane),
        **together,
        **interpreted,
    )(*read.values())
    return dict(zip(written, found, strict=True))


def _multiply(mosaic, refs, worker, *, tiles, works, splits, steps, share, matrices, wait):
    left, right, full, empty = (refs[name] for name in ("left", "right", "full", "empty"))
    warpgroup, program, programs = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program"), jax.lax.axis_size("program")
    member = jax.lax.axis_index("member") if tiles.cluster > 1 else 0
    stages, columns = right.shape[:2]  # columns of a product
    places = 1 if tiles.rows_left else WORKERS // matrices  # blocks of outputs of a program
    if tiles.stream:
        program = programs - 1 - program  # so that a program waits only for some that started before it
        begin, end = (jax.lax.div(p * (works * steps), programs) for p in (program, program + 1))
        head = jax.lax.div(begin, steps)
        pieces = jax.lax.div(end - 1, steps) - head + 1
        shared_first = (jax.lax.rem(begin, steps) > 0).astype(jnp.int32)  # whether the first piece began in another program
    else:
        begin = end = head = shared_first = 0
        pieces = jax.lax.div(works - program + programs - 1, programs)

    def piece(i):
        """A piece of the program's work: its tile and split, its first step, and its number of steps."""
        if tiles.stream:
            tile, split = head + i, 0
            first, last = jnp.maximum(begin - tile * steps, 0), jnp.minimum(end - tile * steps, steps)
            length = last - first
        else:
            number = program + i * programs
            tile, split = jax.lax.div(number, splits), jax.lax.rem(number, splits)
            first = split * share
            length = jnp.minimum(share, steps - first)
        return tile * tiles.cluster + member, split, first, length

    def each_work(do):
        """Calls do(number, tile, split, first step, steps, steps before) for each piece of the program's work. Returns all steps."""

        def work(i, before):
            *place, length = piece(i)
            do(i, *place, length, before)
            return before + length

        return jax.lax.fori_loop(0, pieces, work, jnp.int32(0))

    @pl.when(warpgroup == WORKERS)
    def _copy():
        if wait is not None:
            mosaic.set_max_registers(40, action="decrease")
        shared = {"collective_axes": "member"} if tiles.cluster > 1 else {}

        def copy_weights(tile, step, slot):
            for block in range(places * matrices):
                begin = (tile * places + block % places) * tiles.outputs
                source = refs["w"].at[block // places, pl.ds(begin, tiles.outputs), pl.ds(step * tiles.step, tiles.step)]
                held, first = (right.at[slot], block * tiles.outputs) if tiles.rows_left else (left.at[slot, block], 0)
                read_once.copy(mosaic, source, held.at[pl.ds(first, tiles.outputs)], full.at[slot], interpret=wait is None)

        def copy_rows(step, slot):
            # Rows past the last are copied as zeros, but JAX 0.12 refuses a slice that it knows to end there.
            first = jnp.minimum(step, 0)
            for block, held in enumerate([left.at[slot, n] for n in range(WORKERS)] if tiles.rows_left else [right.at[slot]]):
                rows = pl.ds(first + block * BLOCK, held.shape[0])
                mosaic.copy_gmem_to_smem(refs["x"].at[rows, pl.ds(step * tiles.step, tiles.step)], held, full.at[slot], **shared)

        start, _, first_step, length = piece(0)
        early = jnp.minimum(length, min(stages, AHEAD))  # steps whose weights are copied before the kernel waits
        jax.lax.fori_loop(0, early, lambda i, _: copy_weights(start, first_step + i, i), None)
        if wait is not None:
            wait()

        def copy(_, tile, __, first, length, before):
            def step(i, _):
                slot = jax.lax.rem(before + i, stages)
                pl.when(before + i >= stages)(lambda: mosaic.barrier_wait(empty.at[slot]))
                pl.when(before + i >= early)(lambda: copy_weights(tile, first + i, slot))
                copy_rows(first + i, slot)

            jax.lax.fori_loop(0, length, step, None)

        done = each_work(copy)

        # Arrivals of the other program of a cluster still come here, so this one must not end before.
        def drain(i, _):
            mosaic.barrier_wait(empty.at[jax.lax.rem(i, stages)])

        jax.lax.fori_loop(jnp.maximum(done - stages, 0), done, drain, None)

    @pl.when(warpgroup < WORKERS)
    def _compute():
        if wait is not None:
            wait()
            mosaic.set_max_registers(232, action="increase")  # what the copying warpgroup gave up
        finish, finish_all = worker(refs, warpgroup)

        def compute(number, tile, split, first, length, before):
            def multiply(accumulator):
                def step(i, _):
                    slot = jax.lax.rem(before + i, stages)
                    mosaic.barrier_wait(full.at[slot])
                    for k in range(0, tiles.step, 64):
                        transposed = dialect.mosaic_transposed(right.at[slot, :, pl.ds(k, 64)])
                        mosaic.wgmma(accumulator, left.at[slot, warpgroup, :, pl.ds(k, 64)], transposed)
                    mosaic.wgmma_wait(tiles.step // 64)  # only this step's products may still run
                    pl.when(i > 0)(lambda: mosaic.barrier_arrive(empty.at[jax.lax.rem(before + i - 1, stages)]))

                jax.lax.fori_loop(0, length, step, None)
                total = accumulator[...]
                mosaic.barrier_arrive(empty.at[jax.lax.rem(before + length - 1, stages)])
                return total

            total = pl.run_scoped(multiply, mosaic.ACC((BLOCK, columns), jnp.float32))
            output = (tile * places + jax.lax.rem(warpgroup, places)) * tiles.outputs
            if not tiles.stream:
                finish(number, split, output, total)
                return
            give_sums, take_sums = exchange(mosaic, columns, jnp.float32)

            def of(other):
                return (other * tiles.cluster + member) * WORKERS + warpgroup

            @pl.when(first > 0)
            def _leave():
                give_sums(total, refs["sums"].at[of(program)])
                pl.semaphore_signal(refs["ready"].at[of(program)])

            @pl.when(first == 0)
            def _complete():
                def add(other, total):
                    pl.semaphore_wait(refs["ready"].at[of(other)])
                    return total + take_sums(refs["sums"].at[of(other)])

                # The last program that has steps of this tile.
                last = jax.lax.div((jax.lax.div(tile, tiles.cluster) + 1) * steps * programs - 1, works * steps)
                finish(number - shared_first, split, output, jax.lax.fori_loop(program + 1, last + 1, add, total))

        each_work(compute)
        finish_all(pieces - shared_first)
