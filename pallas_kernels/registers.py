"""What a warpgroup of a Mosaic kernel does with a product [64, N] in its registers: it stores it transposed, hands it to another one, sends
parts of it to the programs of a cluster, or finds the largest number or the sum of each column."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import inlined
from pallas_kernels.clusters import Mail, address, counter, send
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
    from jaxlib.mlir.dialects import arith, memref

    numbers = [inlined.splat(mosaic, n) for n in ((first,) if end is None else (first, end))]

    def write(_, value, out, first, end=None):
        rows = out.type.shape[0]

        def column(half):
            return arith.addi(inlined.row(half), inlined.scalar(first))

        def write_halves(*halves):
            for place, register in np.ndenumerate(value.registers):
                if place[4] not in halves:
                    continue
                for n, number in enumerate(inlined.pair(register)):
                    where = [inlined.column(8 * place[1] + n), column(place[4])]
                    if 8 * place[1] + 8 <= rows:
                        memref.store(number, out, where)
                    elif 8 * place[1] < rows:
                        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, where[0], inlined.index(rows))):
                            memref.store(number, out, where)

        if end is None:
            write_halves(0, 1)
            return
        for half in range(2):
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, column(half), inlined.scalar(end))):
                write_halves(half)

    layouts = mosaic.Layout.WGMMA, mosaic.RefType(), *[mosaic.Layout.WG_SPLAT((1,))] * len(numbers)
    mosaic.inline_mgpu(arg_types=layouts)(write)(value, ref, *numbers)


def store_rows(mosaic: Any, value: jax.Array, ref: Any, row: Any, column: Any, *, interpret: bool = False) -> None:
    """Stores a product [64, N] in a matrix in global memory from this row and column on, but for what is past its last row or column. N and
    the matrix's columns are multiples of 8. interpret: whether the kernel is interpreted; then its rows are too."""
    rows, columns = ref.shape
    if interpret:
        for i, j in itertools.product(range(0, BLOCK, 8), range(0, value.shape[1], 8)):
            place, part = ref.at[pl.ds(row + i, 8), pl.ds(column + j, 8)], value[i : i + 8, j : j + 8]
            pl.when((row + i < rows) & (column + j < columns))(functools.partial(_set, place, part))
        return
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir.dialects import arith, vector

    def write(_, value, out, row, column):
        for place, register in np.ndenumerate(value.registers):
            at = arith.addi(inlined.row(place[4]), inlined.scalar(row)), arith.addi(inlined.column(8 * place[1]), inlined.scalar(column))
            inside = [arith.cmpi(arith.CmpIPredicate.ult, i, inlined.index(end)) for i, end in zip(at, out.type.shape, strict=True)]
            with mgpu.when(arith.andi(*inside)):
                vector.store(register, out, at)

    layouts = mosaic.Layout.WGMMA, mosaic.RefType(), *[mosaic.Layout.WG_SPLAT((1,))] * 2
    mosaic.inline_mgpu(arg_types=layouts)(write)(value, ref, *[inlined.splat(mosaic, n) for n in (row, column)])


def exchange(mosaic: Any, columns: int, dtype: Any, *, rows: int = BLOCK, interpret: bool = False) -> tuple[Any, Any]:
    """Functions that store a product [rows, columns] in shared memory [rows * columns / 256, 256] as it lies in registers, blocks of
    [64, 8] one after the other, and load it again."""
    if interpret:

        def put(value, held):
            _set(held, value.reshape(held.shape))

        return put, lambda held: held[...].reshape(rows, columns)
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    def places():
        pair = arith.muli(inlined.thread(), inlined.index(2))
        return [[inlined.index(i), pair] for i in range(rows * columns // 256)]

    def give(_, value, held):
        for register, place in zip(value.registers.flat, places(), strict=True):
            vector.store(register, held, place)

    def take(_, held):
        numbers = ir.VectorType.get((2,), held.type.element_type)
        return inlined.block([vector.load(numbers, held, place) for place in places()], rows, columns)

    result = mosaic.ShapeDtypeStruct((rows, columns), dtype, layout=mosaic.Layout.WGMMA)
    return (
        mosaic.inline_mgpu(arg_types=(mosaic.Layout.WGMMA, mosaic.RefType()))(give),
        mosaic.inline_mgpu(arg_types=(mosaic.RefType(),), return_type=result)(take),
    )


def sending(mosaic: Any, mail: Mail) -> tuple[Any, Any, Any, Any]:
    """Functions for programs of a cluster that send each other products [M, N] in float32, and numbers of each of their columns.

    The first sends a product's blocks [64, 8]: of n programs p gets blocks p, p + n and so on. The kth that it gets from `sender` lies at
    k n + sender of `held`, [.., 512], in shared memory. The second sends two numbers of each column to all; held: [n, 2, N]. Both take
    held, the counter of `mail`, the sender's number and n, after what they send; first is the number of the first block, or column. The
    third and the fourth load a block, and eight numbers, each of them for 64 rows.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    layout, given = mosaic.Layout.WGMMA, (mosaic.RefType(), mosaic.RefType(), mosaic.Layout.WG_SPLAT((1,)))
    block = mosaic.ShapeDtypeStruct((BLOCK, 8), jnp.float32, layout=layout)

    def send_blocks(value, held, number, sender, programs, first=0):
        def code(_, value, held, counters, sender):
            four = arith.muli(inlined.thread(), inlined.index(4))
            for n, halves in enumerate(value.registers.reshape(-1, 2), first):
                place = arith.addi(inlined.index(n // programs * programs), inlined.scalar(sender))
                numbers = [number for register in halves for number in inlined.pair(register)]
                send(numbers, address(held, place, four), counter(counters, number), inlined.index(n % programs))

        mosaic.inline_mgpu(arg_types=(layout, *given))(code)(value, held, mail.held, inlined.splat(mosaic, sender))

    def send_numbers(values, held, number, sender, programs, first=0):
        def code(_, one, other, held, counters, sender):
            # Of the threads that have the same numbers, one sends to each program.
            program = arith.divui(inlined.lane(), inlined.index(4))
            there = arith.cmpi(arith.CmpIPredicate.ult, program, inlined.index(programs))
            for kind, value in enumerate((one, other)):
                mine = arith.andi(arith.cmpi(arith.CmpIPredicate.eq, inlined.warp(), inlined.index(kind)), there)
                with mgpu.when(mine):
                    for n, register in enumerate(value.registers.flat):
                        place = address(held, inlined.scalar(sender), inlined.index(kind), inlined.column(first + 8 * n))
                        send(inlined.pair(register), place, counter(counters, number), program)

        types = (layout.reduce(0), layout.reduce(0), *given)
        mosaic.inline_mgpu(arg_types=types)(code)(*values, held, mail.held, inlined.splat(mosaic, sender))

    def load(count, held, place):
        return vector.load(ir.VectorType.get((count,), ir.F32Type.get()), held, [place])

    def take_block(_, held):
        four = load(4, held, arith.muli(inlined.thread(), inlined.index(4)))
        two = ir.VectorType.get((2,), ir.F32Type.get())
        return inlined.block([vector.extract_strided_slice(two, four, [n], [2], [1]) for n in (0, 2)])

    def take_numbers(_, held):
        return inlined.block([load(2, held, inlined.column(0))] * 2)

    def of(code):
        return mosaic.inline_mgpu(arg_types=(mosaic.RefType(),), return_type=block)(code)

    return send_blocks, send_numbers, of(take_block), of(take_numbers)


def over_rows(mosaic: Any, held: Any, *, interpret: bool = False) -> tuple[Any, Any]:
    """Functions that find the largest number, and the sum, of each column of a product [64, N] in float32.

    held: float32 [4, N] in shared memory, through which the warps of a warpgroup tell each other theirs. Each warpgroup needs its own;
    JAX's reductions have one for all. Between two calls the warpgroup's threads must have met once, as in `commit_smem`.
    """
    if interpret:
        return lambda value: jnp.max(value, axis=0), lambda value: jnp.sum(value, axis=0)
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    def reduce(value, operation):
        def code(_, value, held):
            found = [operation(*halves) for halves in value.registers.reshape(-1, 2)]
            for distance in (4, 8, 16):  # lanes that have the same columns
                found = [operation(x, mgpu.utils.shfl_bfly(x, distance)) for x in found]
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, inlined.lane(), inlined.index(4))):
                for n, x in enumerate(found):
                    vector.store(x, held, [inlined.warp(), inlined.column(8 * n)])
            mgpu.utils.warpgroup_barrier()
            two = ir.VectorType.get((2,), ir.F32Type.get())
            registers = np.empty(layout.to_mgpu().registers_shape((held.type.shape[1],)), dtype=object)
            for n, place in enumerate(np.ndindex(registers.shape)):
                every = [vector.load(two, held, [inlined.index(warp), inlined.column(8 * n)]) for warp in range(4)]
                registers[place] = functools.reduce(operation, every)
            return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

        layout = mosaic.Layout.WGMMA.reduce(0)
        result = mosaic.ShapeDtypeStruct(value.shape[1:], jnp.float32, layout=layout)
        return mosaic.inline_mgpu(arg_types=(mosaic.Layout.WGMMA, mosaic.RefType()), return_type=result)(code)(value, held)

    return lambda value: reduce(value, arith.maximumf), lambda value: reduce(value, arith.addf)


def _set(ref: Any, value: jax.Array) -> None:
    ref[...] = value
