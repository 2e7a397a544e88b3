"""What a warpgroup of a Mosaic kernel does with a product [64, N] in its registers: it stores it transposed, hands it to another one, or
sends parts of it to the programs of a cluster."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import clusters
from pallas_kernels.clusters import Mail
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


def sending(mosaic: Any, mail: Mail) -> tuple[Any, Any, Any, Any]:
    """Functions for programs of a cluster that send each other products [M, N] in float32, and numbers of each of their columns.

    The first sends a product's blocks [64, 8]: of n programs p gets blocks p, p + n and so on. The kth that it gets from `sender` lies at
    k n + sender of `held`, [.., 512], in shared memory. The second sends two numbers of each column to all; held: [n, 2, N]. Both take
    held, the counter of `mail`, the sender's number and n, after what they send. The third and the fourth load a block, and eight numbers,
    each of them for 64 rows.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    layout, given = mosaic.Layout.WGMMA, (mosaic.RefType(), mosaic.RefType(), mosaic.Layout.WG_SPLAT((1,)))
    block = mosaic.ShapeDtypeStruct((BLOCK, 8), jnp.float32, layout=layout)

    def numbers(*pairs):
        return [vector.extract(pair, [], [n]) for pair in pairs for n in range(2)]

    def send_blocks(value, held, number, sender, programs):
        def code(_, value, held, counters, sender):
            registers = value.registers.reshape(-1, 2)
            for n, pairs in enumerate(registers):
                program, place = n % programs, arith.addi(clusters.index(n // programs * programs), clusters.scalar(sender))
                own = clusters.address(held, place, arith.muli(clusters.thread(), clusters.index(4)))
                clusters.send(numbers(*pairs), own, clusters.counter(counters, number), clusters.index(program))

        mosaic.inline_mgpu(arg_types=(layout, *given))(code)(value, held, mail.held, clusters.splat(mosaic, sender))

    def send_numbers(values, held, number, sender, programs):
        def code(_, first, second, held, counters, sender):
            # Of the threads that have the same numbers, one sends to each program.
            warp, program = clusters.warp(), arith.divui(clusters.lane(), clusters.index(4))
            for kind, value in enumerate((first, second)):
                mine = arith.andi(
                    arith.cmpi(arith.CmpIPredicate.eq, warp, clusters.index(kind)),
                    arith.cmpi(arith.CmpIPredicate.ult, program, clusters.index(programs)),
                )
                with mgpu.when(mine):
                    for n, pair in enumerate(value.registers.flat):
                        place = arith.addi(clusters.index(8 * n), pair_place())
                        own = clusters.address(held, clusters.scalar(sender), clusters.index(kind), place)
                        clusters.send(numbers(pair), own, clusters.counter(counters, number), program)

        types = (layout.reduce(0), layout.reduce(0), *given)
        mosaic.inline_mgpu(arg_types=types)(code)(*values, held, mail.held, clusters.splat(mosaic, sender))

    def pair_place():
        return arith.muli(arith.remui(clusters.lane(), clusters.index(4)), clusters.index(2))

    def whole(pairs):
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((BLOCK, 8)), dtype=object)
        registers.flat[:] = pairs
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    def load(count, *place):
        held, *where = place
        return vector.load(ir.VectorType.get((count,), ir.F32Type.get()), held, where)

    def take_block(_, held):
        four = load(4, held, arith.muli(clusters.thread(), clusters.index(4)))
        return whole([vector.extract_strided_slice(ir.VectorType.get((2,), ir.F32Type.get()), four, [n], [2], [1]) for n in (0, 2)])

    def take_numbers(_, held):
        return whole([load(2, held, pair_place())] * 2)

    def of(code):
        return mosaic.inline_mgpu(arg_types=(mosaic.RefType(),), return_type=block)(code)

    return send_blocks, send_numbers, of(take_block), of(take_numbers)


def _set(ref: Any, value: jax.Array) -> None:
    ref[...] = value
