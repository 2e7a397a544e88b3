"""Products of rows with packed matrices in the Mosaic GPU dialect, for Hopper: what the kernels of several operations share.

A program works through pieces: the product of some rows with a few blocks of 64 outputs of a matrix, or a part of its sums. One warpgroup
copies words, scales, zeros and rows to shared memory, several steps ahead, over the ends of pieces too. Each of the others multiplies: a
thread reads 16 bytes of a block, which are its part of the tensor core's left operand (see `packed`), unpacks two codes at a time, and
multiplies from registers. Outputs are the operand's rows, so any multiple of 8 rows of x makes a product. Warpgroups have outputs of their
own, or share outputs and divide the sums.

Rows may be codes themselves, float8_e4m3fn (see `float8_rows`). Then codes of the matrix, "fp8" with one scale an output, are put in order
as they are, the tensor core multiplies codes, at twice the rate, and sums are scaled once at the end.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dialect, read_once
from pallas_kernels.dialect import pl
from pallas_kernels.packed.matrix import BLOCK, KINDS, Packed
from pallas_kernels.packed.words import CODE_MASKS, MASKS, codes_in_registers, scaled, unpacker
from pallas_kernels.registers import exchange

SHARED_MEMORY = 230_000  # of a program, without its barriers
AHEAD = 4  # steps whose weights are copied before a kernel waits for its rows, as in `linear.mosaic`


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a product is cut."""

    blocks: int  # blocks of outputs of a warpgroup, of each matrix
    wide: int  # warpgroups with outputs of their own
    deep: int  # warpgroups that share the sums of their outputs
    step: int  # blocks of inputs in a step
    stages: int  # steps in shared memory
    splits: int = 1  # programs that share the sums
    flying: int = 4  # products of a warpgroup in flight
    joined: bool = False  # whether programs have equal parts of all steps, so that two may share a tile

    @property
    def at_once(self) -> int:
        """Blocks of outputs of a program, of each matrix."""
        return self.blocks * self.wide

    def room(self, matrices: int, bits: int, padded: int, itemsize: int = 2) -> tuple[int, int]:
        """Bytes of shared memory of a step, and of sums. matrices: how many at once, with codes of so many bits. padded: rows. itemsize: of
        their numbers."""
        block = matrices * self.at_once * (512 * bits + 64 * 8)  # codes, and 4 scales, or 2 scales and 2 zeros, of an output
        sums = (self.deep - 1) * self.wide * self.blocks * matrices * BLOCK * padded * 4
        return self.step * (block + padded * BLOCK * itemsize), sums


def registers(workers: int) -> int:
    """How many registers a thread has in a program of so many warpgroups and one that copies.

    That one could give some of its own to the others (`set_max_registers`), and does with JAX 0.11. JAX 0.12 compiles with nvJitLink, for
    which kernels are parts of a larger program, and there NVIDIA's assembler ignores this (its note C7504).
    """
    return 65_536 // (128 * (workers + 1)) // 8 * 8


@dataclasses.dataclass(frozen=True)
class Piece:
    """A piece of a program's work. All but `matrices` are traced numbers."""

    matrices: tuple[Any, ...]  # the index of its matrices
    tile: Any  # which `at_once` blocks of outputs
    row: Any  # the first row of x, a multiple of 8
    first: Any  # step
    count: Any  # of steps


def unsupported(x: jax.Array, w: Packed) -> str | None:
    """Why no kernel here can multiply rows of x with this matrix, or each matrix of several, or None."""
    if reason := dialect.mosaic_obstacle():
        return reason
    if x.dtype != jnp.bfloat16 or w.scale.dtype not in (jnp.bfloat16, jnp.float16):
        return f"x is {x.dtype.name} and the scales are {w.scale.dtype.name}; the kernel needs bfloat16, or scales in float16"
    if w.scale.dtype == jnp.float16 and w.kind not in ("int4", "int8"):
        return f"the scales are float16 and the codes are of {w.kind}; the kernel takes them with integers"
    if any(w.cut):
        return f"the matrix is {list(w.shape)}; the kernel needs multiples of {BLOCK}"
    if w.zero is not None and w.kind not in ("int4", "int8"):
        return f"the matrix has zero points and codes of {w.kind}; the kernel takes them with integers"
    least = 16 if w.zero is None else 32
    if w.scale.shape[-1] > 2 * BLOCK // least:
        return (
            f"{2 * BLOCK // w.scale.shape[-1]} inputs share a scale{' and a zero point' * (least > 16)}; the kernel needs {least} or more"
        )
    return None


def call(
    arrays: dict[str, jax.Array],
    w: Packed,
    out: dict[str, jax.ShapeDtypeStruct],
    tiles: Tiles,
    *,
    name: str,
    rows: int,
    matrices: int,
    programs: int,
    works: Callable[[dict[str, Any], Any], Any],
    locate: Callable[[dict[str, Any], Any, Any], Piece],
    finish: Callable[..., None],
    scratch: dict[str, Any] | None = None,
    begin: Callable[[dict[str, Any]], None] | None = None,
    end: Callable[[dict[str, Any]], None] | None = None,
    ahead: bool = False,
    launch_dependents: bool = False,
) -> dict[str, jax.Array]:
    """What a kernel of so many programs writes, by name.

    arrays: "x" [N, I], of which N is below 8 or a multiple of it, and others: for rows of codes "x_scales" [N] float32, too.
    w: [*index, matrices, O, I]. out, scratch: the results, and what `finish` needs of shared memory. rows: of a piece, a multiple of 8.
    Functions get all references by name: works(refs, program) is how many pieces a program has, locate(refs, program, i) what they are;
    finish(refs, piece, block, totals) stores the products [64, rows] float32 of a block of 64 outputs with each matrix; begin(refs) and
    end(refs) are called by each warpgroup that multiplies, before its first piece and after its last. If tiles are joined, a program's
    last piece may lack steps, which are then the first piece of the next program; that one's products are added.
    ahead: whether the first weights may be read before the kernels before this one have ended: if these write neither weights nor what
    `works` and `locate` read. launch_dependents: see `dialect.mosaic_wait`.
    """
    mosaic = dialect.mosaic()
    slabs = KINDS[w.kind].bits // 4
    *lead, out_blocks, deep_blocks = w.words.shape[:-3]
    lead = (*lead, 1) if matrices == 1 else tuple(lead)
    groups = w.scale.shape[-1] // 2
    lanes = 2 * slabs  # rows of 256 words of a block
    weights = {"w": w.words.reshape(*lead, out_blocks, deep_blocks * lanes, 256)}
    weights |= {name: x.reshape(*lead, out_blocks, -1, 64 * groups) for name, x in (("s", w.scale), ("z", w.zero)) if x is not None}
    per_output = weights["s"].shape[-2] == 1 and deep_blocks > 1
    of_codes, width = "x_scales" in arrays, arrays["x"].dtype.itemsize * BLOCK
    numbers = mosaic.SMEM((tiles.stages, matrices, tiles.at_once, 1 if per_output else tiles.step, 64 * groups), w.scale.dtype)
    workers = tiles.wide * tiles.deep
    scratch = (scratch or {}) | {
        "words": mosaic.SMEM((tiles.stages, matrices, tiles.at_once, tiles.step * lanes, 256), jnp.uint32),
        "rows": mosaic.SMEM(
            (tiles.stages, rows, tiles.step * BLOCK),
            arrays["x"].dtype,
            transforms=(mosaic.TilingTransform((8, BLOCK)), mosaic.SwizzleTransform(width)),
        ),
        "full": mosaic.Barrier(num_arrivals=2 if of_codes else 1 + len(weights), num_barriers=tiles.stages),
        "empty": mosaic.Barrier(num_arrivals=workers, num_barriers=tiles.stages),
    }
    if not of_codes:
        scratch |= {name: numbers for name, x in (("scales", w.scale), ("zeros", w.zero)) if x is not None}
    if tiles.deep > 1:
        scratch["sums"] = mosaic.SMEM((tiles.deep - 1, tiles.wide, matrices * tiles.blocks, rows // 4, 256), jnp.float32)
        scratch["given"] = mosaic.Barrier(num_arrivals=workers - tiles.wide)
        scratch["taken"] = mosaic.Barrier(num_arrivals=tiles.wide)
    masks = jnp.asarray(np.array(CODE_MASKS if of_codes else MASKS[w.kind], np.uint32))
    inputs = arrays | weights | {"masks": masks}
    outputs = dict(out)
    if tiles.joined:
        outputs["mail"] = jax.ShapeDtypeStruct((programs, tiles.wide, matrices * tiles.blocks, rows // 4, 256), jnp.float32)
    names = (*inputs, *outputs)

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True)) | scratch
        if tiles.joined:
            refs["ready"] = pl.get_global(mosaic.SemaphoreType.REGULAR((programs * tiles.wide,)))
        wait = functools.partial(dialect.mosaic_wait, launch_dependents)
        _multiply(mosaic, refs, w, tiles, per_output, works, locate, begin, finish, end, wait, ahead)

    found = mosaic.kernel(
        body,
        out_type=tuple(outputs.values()),
        scratch_types=scratch,
        grid=(programs,),
        grid_names=("program",),
        num_threads=workers + 1,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=mosaic.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane),
    )(*inputs.values())
    return dict(zip(outputs, found, strict=True))


def in_turn(works: Any, program: Any, programs: int) -> Any:
    """How many of `works` pieces a program has if programs take them in turn."""
    return jax.lax.div(works - program + programs - 1, programs)


def shares(tiles: int, steps: int, share: int, program: Any) -> Any:
    """How many pieces a program has of tiles that take `steps` steps each, if a program has `share` consecutive steps of all."""
    begin, end = program * share, jnp.minimum((program + 1) * share, tiles * steps)
    return jax.lax.div(end - 1, steps) - jax.lax.div(begin, steps) + 1


def shared(tiles: int, steps: int, share: int, program: Any, i: Any) -> tuple[Any, Any, Any]:
    """Piece i of a program as in `shares`: its tile, its first step of that, and its number of steps."""
    begin, end = program * share, jnp.minimum((program + 1) * share, tiles * steps)
    tile = jax.lax.div(begin, steps) + i
    first = jnp.maximum(begin - tile * steps, 0)
    return tile, first, jnp.minimum(end - tile * steps, steps) - first


def _multiply(mosaic, refs, w, tiles, per_output, works, locate, begin, finish, end, wait, ahead):
    words, rows, full, empty = (refs[name] for name in ("words", "rows", "full", "empty"))
    of_codes = "x_scales" in refs  # whose scales are not needed before the end
    numbers = {name: refs[held] for name, held in (("s", "scales"), ("z", "zeros")) if held in refs}
    warpgroup, program = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program")
    stages, matrices, at_once, lanes, _ = words.shape
    lanes, padded, groups = lanes // tiles.step, rows.shape[1], refs["s"].shape[-1] // 64
    workers = tiles.wide * tiles.deep
    if tiles.joined:
        program = jax.lax.axis_size("program") - 1 - program  # so that a program waits only for one that started before it

    def each_piece(do):
        """Calls do(number, piece, steps before) for each piece of the program's work."""

        def work(i, before):
            piece = locate(refs, program, i)
            do(i, piece, before)
            return before + piece.count

        jax.lax.fori_loop(0, works(refs, program), work, jnp.int32(0))

    if not ahead:
        wait()

    @pl.when(warpgroup == workers)
    def _copy():
        mosaic.set_max_registers(40, action="decrease")

        def copy_weights(piece, i, slot):
            begin = (piece.first + i) * tiles.step
            which = *piece.matrices, pl.ds(0, matrices), pl.ds(piece.tile * at_once, at_once)
            source = refs["w"].at[*which, pl.ds(begin * lanes, tiles.step * lanes)]
            read_once.copy(mosaic, source, words.at[slot], full.at[slot])
            for name, held in numbers.items():
                source = refs[name].at[*which, pl.ds(0, 1) if per_output else pl.ds(begin, tiles.step)]
                read_once.copy(mosaic, source, held.at[slot], full.at[slot])

        def copy_first(_, __):
            first = locate(refs, program, 0)
            count = jnp.minimum(first.count, min(stages, AHEAD))
            jax.lax.fori_loop(0, count, lambda i, _: copy_weights(first, i, i), None)
            return count

        early = 0  # steps whose weights are copied before the kernel waits
        if ahead:
            early = jax.lax.fori_loop(0, jnp.minimum(works(refs, program), 1), copy_first, jnp.int32(0))
            wait()

        def copy(_, piece, before):
            def step(i, _):
                slot = jax.lax.rem(before + i, stages)
                pl.when(before + i >= stages)(lambda: mosaic.barrier_wait(empty.at[slot]))
                pl.when(before + i >= early)(lambda: copy_weights(piece, i, slot))
                begin = (piece.first + i) * tiles.step
                source = refs["x"].at[pl.ds(piece.row, padded), pl.ds(begin * BLOCK, tiles.step * BLOCK)]
                mosaic.copy_gmem_to_smem(source, rows.at[slot], full.at[slot])

            jax.lax.fori_loop(0, piece.count, step, None)

        each_piece(copy)

    @pl.when(warpgroup < workers)
    def _compute():
        if ahead:
            wait()
        # What the copying warpgroup gives up goes to the others.
        started = registers(workers)
        mosaic.set_max_registers(min(232, started + (started - 40) // workers // 8 * 8), action="increase")
        place, part = jax.lax.div(warpgroup, tiles.deep), jax.lax.rem(warpgroup, tiles.deep)
        mine = tiles.step // tiles.deep
        if of_codes:
            operand = codes_in_registers(mosaic)
        else:
            operand = unpacker(mosaic, w.kind, groups, w.zero is not None, w.affine, w.scale.dtype)
        give_sums, take_sums = exchange(mosaic, padded, jnp.float32)
        # Masks come from memory: ptxas would load a constant again before each use.
        layout = mosaic.Layout.WG_SPLAT((1,))
        masks = [mosaic.layout_cast(jnp.full((1,), refs["masks"][i], jnp.uint32), layout) for i in range(refs["masks"].shape[0])]

        def compute(number, piece, before):
            def multiply(*accumulators):
                def step(i, _):
                    slot = jax.lax.rem(before + i, stages)
                    mosaic.barrier_wait(full.at[slot])
                    products = itertools.product(range(mine), enumerate(accumulators))
                    for k, (n, accumulator) in products:
                        at, block = part * mine + k, place * tiles.blocks + n % tiles.blocks
                        held = words.at[slot, n // tiles.blocks, block, pl.ds(at * lanes, lanes)]
                        of_outputs = [x.at[slot, n // tiles.blocks, block, 0 if per_output else at] for x in numbers.values()]
                        right = dialect.mosaic_transposed(rows.at[slot, :, pl.ds(at * BLOCK, BLOCK)])
                        mosaic.wgmma(accumulator, operand(held, *of_outputs, *masks), right)
                        mosaic.wgmma_wait(tiles.flying)
                    # A product reads its operand's registers while it runs. ptxas keeps them apart in straight code, not over a loop's end.
                    mosaic.wgmma_wait(0)
                    mosaic.barrier_arrive(empty.at[slot])

                jax.lax.fori_loop(0, piece.count, step, None)
                return tuple(accumulator[...] for accumulator in accumulators)

            totals = pl.run_scoped(multiply, *[mosaic.ACC((BLOCK, padded), jnp.float32)] * (matrices * tiles.blocks))

            def give():
                pl.when(number > 0)(lambda: mosaic.barrier_wait(refs["taken"]))
                for n, total in enumerate(totals):
                    give_sums(total, refs["sums"].at[part - 1, place, n])
                mosaic.barrier_arrive(refs["given"])

            if tiles.deep > 1:
                pl.when(part > 0)(give)

            @pl.when(part == 0)
            def _():
                found = totals
                if tiles.deep > 1:
                    mosaic.barrier_wait(refs["given"])
                    for other in range(tiles.deep - 1):
                        found = [total + take_sums(refs["sums"].at[other, place, n]) for n, total in enumerate(found)]
                    mosaic.barrier_arrive(refs["taken"])

                def store_all(found):
                    for b in range(tiles.blocks):
                        block, totals = piece.tile * at_once + place * tiles.blocks + b, found[b :: tiles.blocks]
                        if of_codes:
                            last = refs["s"].shape[-3] - 1
                            of_outputs = [refs["s"].at[*piece.matrices, m, jnp.minimum(block, last), 0] for m in range(matrices)]
                            totals = [scaled(mosaic, x, s, refs["x_scales"], piece.row) for x, s in zip(totals, of_outputs, strict=True)]
                        finish(refs, piece, block, totals)

                if not tiles.joined:
                    store_all(found)
                    return
                steps, mail, ready = refs["w"].shape[-2] // (lanes * tiles.step), refs["mail"], refs["ready"]

                @pl.when(piece.first > 0)
                def _():
                    for n, total in enumerate(found):
                        give_sums(total, mail.at[program, place, n])
                    pl.semaphore_signal(ready.at[program * tiles.wide + place])

                @pl.when((piece.first == 0) & (piece.count < steps))
                def _():
                    pl.semaphore_wait(ready.at[(program + 1) * tiles.wide + place])
                    store_all([total + take_sums(mail.at[program + 1, place, n]) for n, total in enumerate(found)])

                pl.when(piece.count == steps)(lambda: store_all(found))

        if begin is not None:
            begin(refs)
        each_piece(compute)
        if end is not None:
            end(refs)


def store(value: Any, out: Any, block: Any, base: Any = None, count: Any = None, places: Any = None) -> None:
    """Stores a product [64, N] as columns 64 block .. 64 block + 63 of `out` [rows, columns] in global memory, if it has them.

    Column n of the product becomes row base + n (default: n), or with places [P] int32 the row places[base + n]; only the first `count`
    do (default: as many as `out` has rows).
    """
    pl.when(block * BLOCK < out.shape[1])(functools.partial(_store, value, out, block * BLOCK, base, count, places))


def _store(value, out, first, base, count, places):
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref, vector

    mosaic = dialect.mosaic()
    splat = mosaic.Layout.WG_SPLAT((1,))
    given = [first, 0 if base is None else base, out.shape[0] if count is None else count]
    numbers = [mosaic.layout_cast(jnp.full((1,), number, jnp.int32), splat) for number in given]
    bounded = count is not None or value.shape[1] > out.shape[0]

    def body(_, value, out, first, base, count, *places):
        index = ir.IndexType.get()

        def at(value):
            return arith.constant(index, value)

        def scalar(number):
            return arith.index_cast(index, number.registers.flat[0])

        thread = arith.remui(arith.index_cast(index, mgpu.thread_idx()), at(128))
        warp, lane = arith.divui(thread, at(32)), arith.remui(thread, at(32))
        column = arith.addi(arith.muli(warp, at(16)), arith.divui(lane, at(4)))
        column = arith.addi(column, scalar(first))
        row, base, count = arith.muli(arith.remui(lane, at(4)), at(2)), scalar(base), scalar(count)
        bound = out.type.shape[0] if not bounded else 0
        for place, register in np.ndenumerate(value.registers):
            for n in range(2):
                number = vector.extract(register, [], [n])
                mine = arith.addi(row, at(8 * place[1] + n))

                def put(place=place, number=number, mine=mine):
                    where = arith.addi(base, mine)
                    if places:
                        where = arith.index_cast(index, memref.load(places[0], [where]))
                    memref.store(number, out, [where, arith.addi(column, at(8 * place[4]))])

                if 8 * place[1] + 8 <= bound:
                    put()
                else:
                    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, mine, count)):
                        put()

    references = (mosaic.RefType(),) * (places is not None)
    types = (mosaic.Layout.WGMMA, mosaic.RefType(), splat, splat, splat, *references)
    mosaic.inline_mgpu(arg_types=types)(body)(value, out, *numbers, *(() if places is None else (places,)))
