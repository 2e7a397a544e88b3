"""Products of few rows with a packed matrix in the Mosaic GPU dialect, for Hopper.

A program has all rows and a few blocks of 64 outputs, or a part of their sums. One warpgroup copies words, scales and rows to shared
memory, several steps ahead. Each of the others multiplies: a thread reads 16 bytes of a block, which are its part of the tensor core's
left operand (see `packed`), unpacks two codes at a time, and multiplies from registers. Outputs are the operand's rows, so any multiple
of 8 rows of x makes a product. With many rows the warpgroups have different outputs; with few, they share outputs and divide the sums.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dialect
from pallas_kernels.activation import GELU
from pallas_kernels.dialect import pl
from pallas_kernels.linear.registers import exchange, store
from pallas_kernels.packed import BLOCK, KINDS, Packed

MOST_ROWS = 256
# A product with its activation keeps the sums of gate and up in the registers of a warpgroup: so many rows at most, and fewer in a large
# matrix, whose product alone keeps the tensor cores busier.
MOST_GATED, MOST_GATED_LARGE, LARGE = 160, 64, 1 << 26
LEAST_TILES = dialect.MULTIPROCESSORS // 2  # with fewer, programs share the sums of a product alone, which one with its activation cannot
LEAST_WEIGHTS = 1 << 20  # smaller matrices are multiplied faster by `packed_triton`
FEW_OUTPUTS = 4096
MOST_SPLITS = 8
SHARED_MEMORY = 230_000  # of a program, without its barriers
START = 3  # the time of a program's start and end, in units of the time for a step
# The bits of a pair of codes, or of the two parts of their numbers.
MASKS = {
    "int4": (0x000F000F, 0),
    "int8": (0x007F007F, 0x00800080),
    "fp8": (0x80008000, 0x07F007F0),
    "fp4": (0x80008000, 0x01C001C0),
}


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a product is cut."""

    blocks: int  # blocks of outputs of a warpgroup, of each matrix
    wide: int  # warpgroups with outputs of their own
    deep: int  # warpgroups that share the sums of their outputs
    step: int  # blocks of inputs in a step
    stages: int  # steps in shared memory
    splits: int  # programs that share the sums
    flying: int = 4  # products of a warpgroup in flight


def unsupported(x: jax.Array, w: Packed, *others: jax.Array) -> str | None:
    """Why the kernel cannot serve these arrays, or None."""
    if reason := dialect.mosaic_obstacle():
        return reason
    if others:
        return "the product is gated by other numbers; the kernel does not read any"
    if {x.dtype, w.scale.dtype} != {jnp.dtype(jnp.bfloat16)}:
        return f"x is {x.dtype.name} and the scales are {w.scale.dtype.name}; the kernel needs bfloat16"
    if any(w.cut):
        return f"the matrix is {list(w.shape)}; the kernel needs multiples of {BLOCK}"
    if w.zero is not None:
        return "the matrix has zero points; the kernel has none"
    if w.scale.shape[-1] > 8:
        return f"{2 * BLOCK // w.scale.shape[-1]} inputs share a scale; the kernel needs 16 or more"
    if w.size < LEAST_WEIGHTS:
        return f"the matrix has {w.size} weights; the kernel is made for {LEAST_WEIGHTS} and more"
    if x.shape[0] > MOST_ROWS:
        return f"x has {x.shape[0]} rows; the kernel takes at most {MOST_ROWS}"
    return None


def choose_tiles(rows: int, outputs: int, inputs: int, bits: int, *, matrices: int = 1, splits: int | None = 1) -> Tiles:
    """The tiles for a product of `rows` rows with [matrices, outputs, inputs] codes of so many bits. splits: as for `linear`."""
    padded, blocks = -(-rows // 8) * 8, inputs // BLOCK

    def fitting(wide: int, deep: int, step: int) -> Tiles | None:
        block = matrices * wide * (512 * bits + 64 * 8)  # bytes of codes, and of scales for groups of 16
        sums = (deep - 1) * wide * matrices * BLOCK * padded * 4
        stages = min(4 if step > 2 else 6, (SHARED_MEMORY - sums) // (step * (block + padded * BLOCK * 2)))
        if blocks % step or stages < min(3, blocks // step):
            return None
        counts = range(1, min(splits or MOST_SPLITS, blocks // step) + 1)
        tiles = [Tiles(1, wide, deep, step, stages, count, 1 if padded > 64 else 4) for count in counts]
        return min(tiles, key=time)

    def time(tiles: Tiles) -> float:  # in units of the time for a step
        programs = pl.cdiv(outputs // BLOCK, tiles.wide) * tiles.splits
        return pl.cdiv(programs, dialect.MULTIPROCESSORS) * (blocks / tiles.step / tiles.splits + START)

    if padded > 64:  # a step takes the time of its `wide` products, and for its rows that of bits / 8 more, fitted to measured times
        pair = [tiles for wide in (3, 2) if (tiles := fitting(wide, 1, 2))]
        if pair:
            return min(pair, key=lambda tiles: time(tiles) * (tiles.wide + bits / 8))
        shapes = ((2, 1, 1),)
    elif matrices == 1:
        shapes = ((1 if outputs <= FEW_OUTPUTS else 2, 2, 4), (2, 2, 2), (2, 1, 1))
    else:
        shapes = ((1, 4, 4), (1, 3, 3), (1, 2, 2), (1, 1, 1)) if padded <= 40 else ((1, 2, 2), (1, 1, 1))
    return next(tiles for shape in shapes if (tiles := fitting(*shape)))


def linear(x, w, splits: int | None = 1):
    """See `pallas_kernels.linear.linear`."""
    tiles = _tiles(x, w, splits)
    parts = _call(x, w, 1, tiles, x.dtype if tiles.splits == 1 else jnp.float32)
    return parts[0] if tiles.splits == 1 else jnp.sum(parts, axis=0).astype(x.dtype)


def partials(x, w, splits: int | None = None):
    """See `pallas_kernels.linear.partials`."""
    return _call(x, w, 1, _tiles(x, w, splits), jnp.float32)


def gated(x, gate_up, activation=GELU):
    """See `pallas_kernels.linear.gated`. An activation other than GELU's takes a second kernel."""
    few = gate_up.shape[-2] // BLOCK < LEAST_TILES
    if few or activation != GELU or x.shape[0] > (MOST_GATED if gate_up.size < LARGE else MOST_GATED_LARGE):
        gate, up = jnp.split(linear(x, gate_up.flat(), None if few else 1), 2, axis=-1)
        return activation(gate, up)
    return _call(x, gate_up, 2, _tiles(x, gate_up, matrices=2), x.dtype)[0]


def _tiles(x: jax.Array, w: Packed, splits: int | None = 1, matrices: int = 1) -> Tiles:
    *_, outputs, inputs = w.shape
    return choose_tiles(x.shape[0], outputs, inputs, KINDS[w.kind].bits, matrices=matrices, splits=splits)


def _call(x: jax.Array, w: Packed, matrices: int, tiles: Tiles, dtype: Any) -> jax.Array:
    mosaic = dialect.mosaic()
    rows, width = x.shape
    padded = -(-rows // 8) * 8
    if 8 < rows < padded:  # rows are copied in tiles of eight, so there must be fewer than eight, or a multiple
        x = jnp.pad(x, ((0, padded - rows), (0, 0)))
    slabs = KINDS[w.kind].bits // 4
    deep_blocks = width // BLOCK
    groups = w.scale.shape[-1] // 2
    lanes = 2 * slabs  # rows of 256 words of a block
    words = w.words.reshape(matrices, -1, deep_blocks * lanes, 256)
    scale = w.scale.reshape(matrices, words.shape[1], -1, 64 * groups)
    out_blocks = words.shape[1]
    at_once = tiles.blocks * tiles.wide
    per_output = scale.shape[2] == 1 and deep_blocks > 1
    steps = deep_blocks // tiles.step
    share = pl.cdiv(steps, tiles.splits)
    splits = pl.cdiv(steps, share)
    works = pl.cdiv(out_blocks, at_once) * splits
    workers = tiles.wide * tiles.deep
    scratch = {
        "words": mosaic.SMEM((tiles.stages, matrices, at_once, tiles.step * lanes, 256), jnp.uint32),
        "scales": mosaic.SMEM((tiles.stages, matrices, at_once, 1 if per_output else tiles.step, 64 * groups), w.scale.dtype),
        "rows": mosaic.SMEM(
            (tiles.stages, padded, tiles.step * BLOCK),
            x.dtype,
            transforms=(mosaic.TilingTransform((8, 64)), mosaic.SwizzleTransform(128)),
        ),
        "full": mosaic.Barrier(num_arrivals=3, num_barriers=tiles.stages),
        "empty": mosaic.Barrier(num_arrivals=workers, num_barriers=tiles.stages),
    }
    if tiles.deep > 1:
        scratch["sums"] = mosaic.SMEM((tiles.deep - 1, tiles.wide, matrices * tiles.blocks, padded // 4, 256), jnp.float32)
        scratch["given"] = mosaic.Barrier(num_arrivals=workers - tiles.wide)
        scratch["taken"] = mosaic.Barrier(num_arrivals=tiles.wide)
    names = ("x", "w", "s", "masks", "out")
    settings = {"works": works, "splits": splits, "steps": steps, "share": share}

    def body(*refs, **scratch):
        refs = dict(zip(names, refs, strict=True)) | scratch
        _multiply(mosaic, refs, kind=w.kind, tiles=tiles, per_output=per_output, **settings)

    return mosaic.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, rows, out_blocks * BLOCK), dtype),
        scratch_types=scratch,
        grid=(min(works, dialect.MULTIPROCESSORS),),
        grid_names=("program",),
        num_threads=workers + 1,
        thread_name="warpgroup",
        kernel_name=f"packed_{'gated' if matrices == 2 else 'linear'}",
        compiler_params=mosaic.CompilerParams(approx_math=True, lowering_semantics=mosaic.LoweringSemantics.Lane),
    )(x, words, scale, jnp.asarray(np.array(MASKS[w.kind], np.uint32)))


def _multiply(mosaic, refs, *, kind, tiles, works, splits, steps, share, per_output):
    words, scales, rows, out, full, empty = (refs[name] for name in ("words", "scales", "rows", "out", "full", "empty"))
    warpgroup, program, programs = jax.lax.axis_index("warpgroup"), jax.lax.axis_index("program"), jax.lax.axis_size("program")
    stages, matrices, at_once, lanes, _ = words.shape
    lanes, padded, groups = lanes // tiles.step, rows.shape[1], scales.shape[-1] // 64
    workers = tiles.wide * tiles.deep

    def each_work(do):
        """Calls do(tile, split, first step, steps, steps before) for each piece of the program's work."""

        def work(i, before):
            number = program + i * programs
            tile, split = jax.lax.div(number, splits), jax.lax.rem(number, splits)
            first = split * share
            count = jnp.minimum(share, steps - first)
            do(i, tile, split, first, count, before)
            return before + count

        jax.lax.fori_loop(0, jax.lax.div(works - program + programs - 1, programs), work, jnp.int32(0))

    @pl.when(warpgroup == workers)
    def _copy():
        mosaic.set_max_registers(40, action="decrease")
        zero = jnp.minimum(program, 0)  # rows past the last are copied as zeros, but JAX 0.12 refuses a slice that it knows to end there

        def copy(_, tile, __, first, count, before):
            def step(i, _):
                slot = jax.lax.rem(before + i, stages)
                pl.when(before + i >= stages)(lambda: mosaic.barrier_wait(empty.at[slot]))
                begin = (first + i) * tiles.step
                both, blocks = pl.ds(0, matrices), pl.ds(tile * at_once, at_once)
                source = refs["w"].at[both, blocks, pl.ds(begin * lanes, tiles.step * lanes)]
                mosaic.copy_gmem_to_smem(source, words.at[slot], full.at[slot])
                source = refs["s"].at[both, blocks, pl.ds(0, 1) if per_output else pl.ds(begin, tiles.step)]
                mosaic.copy_gmem_to_smem(source, scales.at[slot], full.at[slot])
                source = refs["x"].at[pl.ds(zero, padded), pl.ds(begin * BLOCK, tiles.step * BLOCK)]
                mosaic.copy_gmem_to_smem(source, rows.at[slot], full.at[slot])

            jax.lax.fori_loop(0, count, step, None)

        each_work(copy)

    @pl.when(warpgroup < workers)
    def _compute():
        # What the copying warpgroup gives up goes to the others.
        started = 65_536 // (128 * (workers + 1)) // 8 * 8
        mosaic.set_max_registers(min(232, started + (started - 40) // workers // 8 * 8), action="increase")
        place, part = jax.lax.div(warpgroup, tiles.deep), jax.lax.rem(warpgroup, tiles.deep)
        mine = tiles.step // tiles.deep
        operand = _unpacker(mosaic, kind, groups)
        give_sums, take_sums = exchange(mosaic, padded, jnp.float32)
        # Masks come from memory: ptxas would load a constant again before each use.
        masks = [mosaic.layout_cast(jnp.full((1,), refs["masks"][i], jnp.uint32), mosaic.Layout.WG_SPLAT((1,))) for i in range(2)]

        def compute(number, tile, split, _, count, before):
            def multiply(*accumulators):
                def step(i, _):
                    slot = jax.lax.rem(before + i, stages)
                    mosaic.barrier_wait(full.at[slot])
                    products = itertools.product(range(mine), enumerate(accumulators))
                    for k, (n, accumulator) in products:
                        at, block = part * mine + k, place * tiles.blocks + n % tiles.blocks
                        held = words.at[slot, n // tiles.blocks, block, pl.ds(at * lanes, lanes)]
                        scale = scales.at[slot, n // tiles.blocks, block, 0 if per_output else at]
                        right = dialect.mosaic_transposed(rows.at[slot, :, pl.ds(at * BLOCK, BLOCK)])
                        mosaic.wgmma(accumulator, operand(held, scale, *masks), right)
                        mosaic.wgmma_wait(tiles.flying)
                    # A product reads its operand's registers while it runs. ptxas keeps them apart in straight code, not over a loop's end.
                    mosaic.wgmma_wait(0)
                    mosaic.barrier_arrive(empty.at[slot])

                jax.lax.fori_loop(0, count, step, None)
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
            def finish():
                found = totals
                if tiles.deep > 1:
                    mosaic.barrier_wait(refs["given"])
                    for other in range(tiles.deep - 1):
                        found = [total + take_sums(refs["sums"].at[other, place, n]) for n, total in enumerate(found)]
                    mosaic.barrier_arrive(refs["taken"])
                found = [total.astype(out.dtype) for total in found]
                if matrices == 2:
                    found = [GELU(gate, up) for gate, up in zip(found[: tiles.blocks], found[tiles.blocks :], strict=True)]
                for b, value in enumerate(found):
                    block = tile * at_once + place * tiles.blocks + b
                    pl.when(block * BLOCK < out.shape[2])(functools.partial(store, mosaic, value, out.at[split], block * BLOCK))

        each_work(compute)


def _unpacker(mosaic, kind, groups):
    """A function of a block's words and scales in shared memory that returns the block [64, 64] as the left operand in registers."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    settings = mosaic.ShapeDtypeStruct((BLOCK, BLOCK), jnp.bfloat16, layout=mosaic.Layout.WGMMA)

    splat = mosaic.Layout.WG_SPLAT((1,))

    @mosaic.inline_mgpu(arg_types=(mosaic.RefType(), mosaic.RefType(), splat, splat), return_type=settings)
    def unpack(_, words, scales, *masks):
        i32, bf16, index = ir.IntegerType.get_signless(32), ir.BF16Type.get(), ir.IndexType.get()
        pair = ir.VectorType.get((2,), bf16)

        def number(value):
            return arith.constant(i32, ir.IntegerAttr.get(i32, value if value < 2**31 else value - 2**32))

        def at(value):
            return arith.constant(index, value)

        of_masks = dict(zip(MASKS[kind], (mask.registers.flat[0] for mask in masks), strict=True))

        def bits(mask, word):
            return arith.andi(word, of_masks[mask])

        def right(word, count):
            return word if count == 0 else arith.shrui(word, number(count)) if count > 0 else arith.shli(word, number(-count))

        def floats(word):
            return vector.bitcast(pair, vector.broadcast(ir.VectorType.get((1,), i32), word))

        def both(value):  # a bfloat16 constant in both halves
            word = int(np.asarray(value, jnp.bfloat16).view(np.uint16))
            return floats(number(word << 16 | word))

        thread = arith.remui(arith.index_cast(index, mgpu.thread_idx()), at(128))
        flat = mgpu.memref_fold(words, 0, 2)
        slabs = flat.type.shape[0] // 512
        word_type, scale_type = ir.VectorType.get((4,), i32), ir.VectorType.get((2 * groups,), bf16)
        first = arith.muli(thread, at(4))
        loaded = [vector.load(word_type, flat, [arith.addi(first, at(512 * slab))]) for slab in range(slabs)]
        row = arith.muli(arith.divui(thread, at(4)), at(2 * groups))
        numbers = vector.load(scale_type, scales, [row])
        factor = {"fp8": 2.0**120, "fp4": 2.0**126}.get(kind)
        spread = []
        for n in range(2 * groups):
            one = vector.extract(numbers, [], [n])
            two = vector.broadcast(pair, one)
            spread.append(two if factor is None else arith.mulf(two, both(factor)))

        registers = np.empty((1, 8, 1, 1, 2, 1, 1, 1, 1), dtype=object)
        for s in range(4):
            for e in range(2):
                for h in range(2):
                    if KINDS[kind].bits == 4:
                        word, shift = vector.extract(loaded[0], [], [s]), 4 * (h + 2 * e)
                    else:
                        word, shift = vector.extract(loaded[s // 2], [], [2 * (s % 2) + e]), 8 * h
                    if kind == "int4":
                        code = arith.ori(bits(0x000F000F, right(word, shift)), number(0x43004300))
                        value = arith.subf(floats(code), both(136.0))
                    elif kind == "int8":
                        code = right(word, shift)
                        low, high = (arith.ori(bits(mask, code), number(0x43004300)) for mask in (0x007F007F, 0x00800080))
                        value = arith.subf(floats(low), floats(high))
                    else:
                        sign, size, mask = (8, 4, 0x07F007F0) if kind == "fp8" else (12, 6, 0x01C001C0)
                        value = floats(arith.ori(bits(0x80008000, right(word, shift - sign)), bits(mask, right(word, shift - size))))
                    registers[0, 2 * s + e, 0, 0, h, 0, 0, 0, 0] = arith.mulf(value, spread[2 * (s * groups // 4) + h])
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return unpack
