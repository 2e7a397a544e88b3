"""What threads of a kernel for Hopper make of packed words in shared memory: the tensor core's left operand in registers, of numbers or of
codes."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels import inlined
from pallas_kernels.packed.matrix import BLOCK, KINDS

# The bits of a pair of codes, or of the parts of their numbers; of "fp8" those of the pair h = 0, and the parts of h = 1.
MASKS = {
    "int4": (0x000F000F, 0),
    "int8": (0x007F007F, 0x00800080),
    "fp8": (0x87F087F0, 0x80F080F0, 0x07000700),
    "fp4": (0x80008000, 0x01C001C0),
}
# How two words of codes of "fp8", of the inputs e = 0 and e = 1, become a register of four codes of outputs h, whose bytes are 2 b + e: the
# bits of each word, moved so far to the right, that are in a mask.
CODES = (
    (((4, 0x007F007F), (8, 0x00800080)), ((-4, 0x7F007F00), (0, 0x80008000))),
    (((4, 0x00800080), (8, 0x00700070), (0, 0x000F000F)), ((-4, 0x80008000), (0, 0x70007000), (-8, 0x0F000F00))),
)
CODE_MASKS = tuple(sorted({mask for half in CODES for word in half for _, mask in word}))


def unpacker(mosaic, kind, groups, zeros, affine, numbers_dtype):
    """A function of a block's words, scales and, if it has some, zeros in shared memory, and of the masks, that returns the block [64, 64]
    as the left operand in registers. numbers_dtype: of scales and zeros, in which weights are computed, bfloat16 or float16."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, math, vector

    settings = mosaic.ShapeDtypeStruct((BLOCK, BLOCK), jnp.bfloat16, layout=mosaic.Layout.WGMMA)

    splat = mosaic.Layout.WG_SPLAT((1,))

    references = [mosaic.RefType()] * (2 + zeros)

    @mosaic.inline_mgpu(arg_types=(*references, *[splat] * len(MASKS[kind])), return_type=settings)
    def unpack(_, words, scales, *others):
        masks = others[zeros:]
        i32, bf16, f32, index = ir.IntegerType.get_signless(32), ir.BF16Type.get(), ir.F32Type.get(), ir.IndexType.get()
        narrow = numbers_dtype == jnp.float16
        element = ir.F16Type.get() if narrow else bf16
        pair = ir.VectorType.get((2,), element)
        # The bits of a pair of numbers whose last bit counts 1, so the bits of a small integer add to it, and that number.
        large, least = (0x64006400, 1024.0) if narrow else (0x43004300, 128.0)

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

        def both(value):  # a constant in both halves
            word = int(np.asarray(value, numbers_dtype).view(np.uint16))
            return floats(number(word << 16 | word))

        thread = arith.remui(arith.index_cast(index, mgpu.thread_idx()), at(128))
        flat = mgpu.memref_fold(words, 0, 2)
        slabs = flat.type.shape[0] // 512
        word_type, scale_type = ir.VectorType.get((4,), i32), ir.VectorType.get((2 * groups,), element)
        first = arith.muli(thread, at(4))
        loaded = [vector.load(word_type, flat, [arith.addi(first, at(512 * slab))]) for slab in range(slabs)]
        row = arith.muli(arith.divui(thread, at(4)), at(2 * groups))

        def pairs(numbers):  # each of a row's numbers, in both halves
            numbers = vector.load(scale_type, numbers, [row])
            return [vector.broadcast(pair, vector.extract(numbers, [], [n])) for n in range(2 * groups)]

        spread = pairs(scales)
        if factor := {"fp8": 2.0**120, "fp4": 2.0**126}.get(kind):
            spread = [arith.mulf(scale, both(factor)) for scale in spread]
        # What is subtracted from codes, to which `least` was added if they have 4 bits. All of it is exact: integers of few bits.
        offsets = [both(least + 8.0 * (not affine))] * (2 * groups) if kind == "int4" else None
        added = pairs(others[0]) if affine else None
        if zeros and not affine:
            offsets = pairs(others[0])
            if kind == "int4":
                offsets = [arith.addf(zero, both(least)) for zero in offsets]

        def weights(value, group):
            made = arith.mulf(value, spread[group]) if added is None else math.fma(value, spread[group], added[group])
            if not narrow:
                return made
            return arith.truncf(ir.VectorType.get((2,), bf16), arith.extf(ir.VectorType.get((2,), f32), made))

        registers = np.empty((1, 8, 1, 1, 2, 1, 1, 1, 1), dtype=object)
        for s in range(4):
            for e in range(2):
                for h in range(2):
                    group = 2 * (s * groups // 4) + h
                    if KINDS[kind].bits == 4:
                        word, shift = vector.extract(loaded[0], [], [s]), 4 * (h + 2 * e)
                    else:
                        word, shift = vector.extract(loaded[s // 2], [], [2 * (s % 2) + e]), 8 * h
                    if kind == "int4":
                        code = arith.ori(bits(0x000F000F, right(word, shift)), number(large))
                        value = floats(code)
                    elif kind == "int8":
                        code = right(word, shift)
                        low, high = (arith.ori(bits(mask, code), number(large)) for mask in (0x007F007F, 0x00800080))
                        value = arith.subf(floats(low), floats(high))
                    elif kind == "fp8" and h == 0:
                        value = floats(bits(0x87F087F0, word))
                    elif kind == "fp8":
                        value = floats(arith.ori(bits(0x80F080F0, right(word, -4)), bits(0x07000700, right(word, 4))))
                    else:
                        value = floats(arith.ori(bits(0x80008000, right(word, shift - 12)), bits(0x01C001C0, right(word, shift - 6))))
                    if offsets is not None:
                        value = arith.subf(value, offsets[group])
                    registers[0, 2 * s + e, 0, 0, h, 0, 0, 0, 0] = weights(value, group)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return unpack


def codes_in_registers(mosaic):
    """A function of a block's words of "fp8" in shared memory, and of `CODE_MASKS`, that returns the block's codes [64, 64] as the left
    operand in registers. Of 16 inputs, input 8 e + 2 c + b becomes number 4 c + 2 b + e, as in the rows (`float8_rows.codes`)."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    settings = mosaic.ShapeDtypeStruct((BLOCK, BLOCK), jnp.float8_e4m3fn, layout=mosaic.Layout.WGMMA_8BIT)
    splat = mosaic.Layout.WG_SPLAT((1,))

    @mosaic.inline_mgpu(arg_types=(mosaic.RefType(), *[splat] * len(CODE_MASKS)), return_type=settings)
    def order(_, words, *masks):
        i32 = ir.IntegerType.get_signless(32)
        of_masks = dict(zip(CODE_MASKS, (mask.registers.flat[0] for mask in masks), strict=True))
        flat = mgpu.memref_fold(words, 0, 2)
        first = arith.muli(inlined.thread(), inlined.index(4))
        # Two slabs of words (s, e), of 16 s + 8 e and so on.
        loaded = [vector.load(ir.VectorType.get((4,), i32), flat, [arith.addi(first, inlined.index(512 * slab))]) for slab in range(2)]
        registers = np.empty(mgpu.WGMMA_LAYOUT_8BIT.registers_shape((BLOCK, BLOCK)), dtype=object)
        for s in range(4):
            pair = [vector.extract(loaded[s // 2], [], [2 * (s % 2) + e]) for e in range(2)]
            moved = {(e, n): shifted(word, n) for e, word in enumerate(pair) for n in {n for half in CODES for n, _ in half[e]}}
            for h in range(2):
                parts = [arith.andi(moved[e, n], of_masks[mask]) for e in range(2) for n, mask in CODES[h][e]]
                four = vector.broadcast(ir.VectorType.get((1,), i32), functools.reduce(arith.ori, parts))
                registers[0, s, 0, 0, h, 0, 0, 0, 0] = vector.bitcast(ir.VectorType.get((4,), ir.Float8E4M3FNType.get()), four)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT_8BIT, _is_signed=None)

    def shifted(word, right):
        return word if right == 0 else arith.shrui(word, inlined.i32(right)) if right > 0 else arith.shli(word, inlined.i32(-right))

    return order


def scaled(mosaic, value, of_outputs, of_rows, first):
    """A product of codes [64, N] times the scales of its outputs, [64] in the order of a block, and of the rows from `first` on."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    def scale(_, value, of_outputs, of_rows, first):
        f32, two = ir.F32Type.get(), ir.VectorType.get((2,), ir.F32Type.get())
        row = arith.muli(arith.divui(inlined.thread(), inlined.index(4)), inlined.index(2))
        halves = vector.load(ir.VectorType.get((2,), ir.BF16Type.get()), of_outputs, [row])
        halves = [vector.broadcast(two, arith.extf(f32, number)) for number in inlined.pair(halves)]
        registers = np.empty_like(value.registers)
        for place, register in np.ndenumerate(value.registers):
            at = arith.addi(inlined.column(8 * place[1]), inlined.scalar(first))
            registers[place] = arith.mulf(arith.mulf(register, vector.load(two, of_rows, [at])), halves[place[4]])
        return mgpu.FragmentedArray(_registers=registers, _layout=value.layout, _is_signed=None)

    result = mosaic.ShapeDtypeStruct(value.shape, jnp.float32, layout=mosaic.Layout.WGMMA)
    types = mosaic.Layout.WGMMA, mosaic.RefType(), mosaic.RefType(), mosaic.Layout.WG_SPLAT((1,))
    scaling = mosaic.inline_mgpu(arg_types=types, return_type=result)(scale)
    return scaling(value, of_outputs, of_rows, inlined.splat(mosaic, first))
