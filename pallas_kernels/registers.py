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


def exchange(mosaic: Any, columns: int, dtype: Any, *, rows: int = BLOCK, interpret: bool = False) -> tuple[Any, Any]:
    """Functions that store a product [rows, columns] in shared memory [rows * columns / 256, 256] as it lies in registers, blocks of
    [64, 8] one after the other, and load it again."""
    if interpret:

        def put(value, held):
            _set(held, value.reshape(held.shape))

        return put, lambda held: held[...].reshape(rows, columns)
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    def places(count):
        index = ir.IndexType.get()
        thread = arith.remui(arith.index_cast(index, mgpu.thread_idx()), arith.constant(index, 128))
        pair = arith.muli(thread, arith.constant(index, 2))
        return [[arith.constant(index, i), pair] for i in range(count)]

    def give(_, value, held):
        for register, place in zip(value.registers.flat, places(rows * columns // 256), strict=True):
            vector.store(register, held, place)

    def take(_, held):
        numbers = ir.VectorType.get((2,), held.type.element_type)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((rows, columns)), dtype=object)
        for n, place in enumerate(places(rows * columns // 256)):
            registers.flat[n] = vector.load(numbers, held, place)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    result = mosaic.ShapeDtypeStruct((rows, columns), dtype, layout=mosaic.Layout.WGMMA)
    return (
        mosaic.inline_mgpu(arg_types=(mosaic.Layout.WGMMA, mosaic.RefType()))(give),
        mosaic.inline_mgpu(arg_types=(mosaic.RefType(),), return_type=result)(take),
    )


def cluster(mosaic: Any) -> tuple[Any, Any, Any]:
    """Functions for programs of a cluster that read each other's shared memory, in float32: one waits until all warpgroups of all of them
    are there, and what they stored before can be read; one loads a block [64, 8] that another program `exchange`d, [2, 256]; one loads
    eight numbers of another program, the same for each of 64 rows."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, vector

    splat, block = mosaic.Layout.WG_SPLAT((1,)), mosaic.ShapeDtypeStruct((BLOCK, 8), jnp.float32, layout=mosaic.Layout.WGMMA)

    def wait(_):
        code = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
        llvm.inline_asm(None, [], code, "", has_side_effects=True, asm_dialect=0)

    def load(held, program, offset, count):
        """Pairs of numbers, 1,024 bytes apart, of the program's `held`, from `offset` bytes on."""
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        pointer = mgpu.utils.memref_ptr(held)
        own = arith.addi(llvm.ptrtoint(i32, pointer), offset)
        code = "mapa.shared::cluster.u32 $0, $1, $2;"
        there: Any = llvm.inline_asm(i32, [own, program], code, "=r,r,r", asm_dialect=0)
        pair = llvm.StructType.get_literal([f32, f32])
        found = []
        for n in range(count):
            code = f"ld.shared::cluster.v2.f32 {{$0, $1}}, [$2 + {1024 * n}];"
            both: Any = llvm.inline_asm(pair, [there], code, "=f,=f,r", has_side_effects=True, asm_dialect=0)
            found.append(vector.from_elements(ir.VectorType.get((2,), f32), [llvm.extractvalue(f32, both, [k]) for k in range(2)]))
        return found

    def whole(pairs):
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((BLOCK, 8)), dtype=object)
        registers.flat[:] = pairs
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    def thread(modulus):
        i32 = ir.IntegerType.get_signless(32)
        return arith.muli(arith.remui(mgpu.thread_idx(), mgpu.c(modulus, i32)), mgpu.c(8, i32))

    def take(_, held, program):
        return whole(load(held, program.registers.flat[0], thread(128), 2))

    def numbers(_, held, program):
        return whole(load(held, program.registers.flat[0], thread(4), 1) * 2)

    def of(function):
        inline = mosaic.inline_mgpu(arg_types=(mosaic.RefType(), splat), return_type=block)(function)
        return lambda held, program: inline(held, mosaic.layout_cast(jnp.full((1,), program, jnp.int32), splat))

    return mosaic.inline_mgpu()(wait), of(take), of(numbers)


def _set(ref: Any, value: jax.Array) -> None:
    ref[...] = value
