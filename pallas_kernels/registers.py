"""What a warpgroup of a Mosaic kernel does with a product [64, N] in its registers: it stores it transposed, or hands it to another one."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dialect import pl

BLOCK = 64  # outputs of a product of the tensor cores: rows of their left operand


def store(mosaic: Any, value: jax.Array, ref: Any, first: Any, end: Any = None, *, interpret: bool = False) -> None:
    """Stores a product [64, N] as columns from `first` on of a matrix [rows, columns] in global memory, of which rows may be fewer than N.

    end: columns from there on are not stored; a multiple of 8 after `first`. None for all 64. interpret: whether the kernel is interpreted.
    """
    if interpret:
        for at in range(0, BLOCK, 8):
            part = value[at : at + 8, : ref.shape[0]].T
            pl.when(True if end is None else first + at < end)(lambda at=at, part=part: _set(ref.at[:, pl.ds(first + at, 8)], part))
        return
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref, vector

    splat = mosaic.Layout.WG_SPLAT((1,))
    numbers = [mosaic.layout_cast(jnp.full((1,), n, jnp.int32), splat) for n in ((first,) if end is None else (first, end))]

    def write(_, value, out, first, end=None):
        index = ir.IndexType.get()

        def at(value):
            return arith.constant(index, value)

        thread = arith.remui(arith.index_cast(index, mgpu.thread_idx()), at(128))
        warp, lane = arith.divui(thread, at(32)), arith.remui(thread, at(32))
        column = arith.addi(arith.muli(warp, at(16)), arith.divui(lane, at(4)))
        column = arith.addi(column, arith.index_cast(index, first.registers.flat[0]))
        row = arith.muli(arith.remui(lane, at(4)), at(2))
        rows = out.type.shape[0]

        def write_halves(*halves):
            for place, register in np.ndenumerate(value.registers):
                if place[4] not in halves:
                    continue
                for n in range(2):
                    where = [arith.addi(row, at(8 * place[1] + n)), arith.addi(column, at(8 * place[4]))]
                    number = vector.extract(register, [], [n])
                    if 8 * place[1] + 8 <= rows:
                        memref.store(number, out, where)
                    elif 8 * place[1] < rows:
                        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, where[0], at(rows))):
                            memref.store(number, out, where)

        if end is None:
            write_halves(0, 1)
            return
        last = arith.index_cast(index, end.registers.flat[0])
        for half in range(2):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, arith.addi(column, at(8 * half)), last)):
                write_halves(half)

    mosaic.inline_mgpu(arg_types=(mosaic.Layout.WGMMA, mosaic.RefType(), *[splat] * len(numbers)))(write)(value, ref, *numbers)


def exchange(mosaic: Any, columns: int, dtype: Any, *, interpret: bool = False) -> tuple[Any, Any]:
    """Functions that store a product [64, columns] in shared memory [columns / 4, 256] as it lies in registers, and load it again."""
    if interpret:

        def put(value, held):
            _set(held, value.reshape(held.shape))

        return put, lambda held: held[...].reshape(BLOCK, columns)
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    def places(count):
        index = ir.IndexType.get()
        thread = arith.remui(arith.index_cast(index, mgpu.thread_idx()), arith.constant(index, 128))
        pair = arith.muli(thread, arith.constant(index, 2))
        return [[arith.constant(index, i), pair] for i in range(count)]

    def give(_, value, held):
        for register, place in zip(value.registers.flat, places(columns // 4), strict=True):
            vector.store(register, held, place)

    def take(_, held):
        numbers = ir.VectorType.get((2,), held.type.element_type)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((BLOCK, columns)), dtype=object)
        for n, place in enumerate(places(columns // 4)):
            registers.flat[n] = vector.load(numbers, held, place)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    result = mosaic.ShapeDtypeStruct((BLOCK, columns), dtype, layout=mosaic.Layout.WGMMA)
    return (
        mosaic.inline_mgpu(arg_types=(mosaic.Layout.WGMMA, mosaic.RefType()))(give),
        mosaic.inline_mgpu(arg_types=(mosaic.RefType(),), return_type=result)(take),
    )


def _set(ref: Any, value: jax.Array) -> None:
    ref[...] = value
