"""What threads do with blocks [64, 8] in their registers: load and store them, and send parts of them to the programs of a cluster.

A block has columns of eight rows of a matrix: its own 64 rows are columns there. Of a warpgroup's 128 threads each has four numbers, in
the tensor cores' order: of columns c and c + 8, with c = thread / 32 * 16 + thread % 32 / 4, in rows 2 (thread % 4) and the one after. In a
half block only 32 columns count, a thread's is thread / 4, and it has its numbers twice.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import inlined
from pallas_kernels.clusters import Mail, address, counter, send
from pallas_kernels.inlined import block, i32, index, lane, pair, scalar, splat, thread, warp

PROGRAMS = 8  # of a cluster
ROWS = 8  # of a block


class Exchange:
    """The functions, for kernels of clusters of eight programs. mosaic: the dialect. transforms: of tiles in shared memory. mail: counts
    what arrives; a `number` is one of its counters."""

    def __init__(self, mosaic: Any, transforms: Any, mail: Mail):
        self._mosaic, self._transforms, self._mail = mosaic, transforms, mail

    def load(self, ref: Any, columns: Any, row: Any = None, part: Any = None, *, half: bool = False) -> jax.Array:
        """A block of a matrix [rows, columns] in global memory, or of a part of [rows, parts, columns], or a vector's columns for all rows.

        columns, row: the first ones. A row past the last is the last. half: of 32 columns alone."""
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, memref, vector

        def read(_, ref, columns, row=None, part=None):
            numbers, registers = ir.VectorType.get((2,), ref.type.element_type), []
            for h in range(1 if half else 2):
                column = arith.addi(scalar(columns), _column(h, half))
                if row is None:
                    found = [memref.load(ref, [column])] * 2
                else:
                    last = index(ref.type.shape[0] - 1)
                    rows = [arith.minui(arith.addi(scalar(row), _row(n)), last) for n in range(2)]
                    found = [memref.load(ref, [r, *([] if part is None else [scalar(part)]), column]) for r in rows]
                registers.append(vector.from_elements(numbers, found))
            return block(registers * (2 if half else 1))

        places = [splat(self._mosaic, n) for n in (columns, row, part) if n is not None]
        return self._call(read, ref, *places, returns=ref.dtype)

    def store(self, value: jax.Array, ref: Any, columns: Any, row: Any) -> None:
        """Stores a block into a matrix [rows, columns] in global memory. columns, row: the first ones. Rows past the last are left out."""
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir.dialects import arith, memref

        def write(_, value, ref, columns, row):
            for n in range(2):
                at = arith.addi(scalar(row), _row(n))

                def put(n=n, at=at):
                    for h, register in enumerate(value.registers.flat):
                        memref.store(pair(register)[n], ref, [at, arith.addi(scalar(columns), _column(h))])

                if ref.type.shape[0] % ROWS == 0:
                    put()
                else:
                    with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, at, index(ref.type.shape[0]))):
                        put()

        self._call(write, value, ref, splat(self._mosaic, columns), splat(self._mosaic, row))

    def send_sums(self, value: jax.Array, held: Any, number: int, sender: Any) -> None:
        """Sends each row's sum over a block's columns to all programs. held: float32 [4 senders, 8] in shared memory, of which each warp
        has a row. sender: the warpgroup's number among those of all programs."""
        from jaxlib.mlir.dialects import arith

        def send_all(_, value, held, mail, sender):
            total = _over_columns(arith.addf(*value.registers.flat))
            place = arith.addi(arith.muli(scalar(sender), index(4)), warp())
            send(pair(total), address(held, place, _row(0)), counter(mail, number), arith.divui(lane(), index(4)))

        self._call(send_all, value, held, self._mail.held, splat(self._mosaic, sender))

    def sums(self, held: Any) -> jax.Array:
        """The sums of what `send_sums` sent, in each column of a block."""
        from jaxlib.mlir.dialects import arith

        def read(_, held):
            places = [arith.addi(arith.divui(lane(), index(4)), index(8 * i)) for i in range(held.type.shape[0] // 8)]
            return block([_over_columns(_total(held, places))] * 2)

        return self._call(read, held, returns=jnp.float32)

    def send_parts(self, value: jax.Array, held: Any, number: int, sender: Any, which: Any) -> None:
        """Sends each program those columns of a block of 64 that it adds up, 32 of two blocks. held: float32 [32 programs, 8] in shared
        memory. sender: the program's number. which: of the four blocks."""
        from jaxlib.mlir.dialects import arith

        def send_all(_, value, held, mail, sender, which):
            program = arith.addi(arith.muli(scalar(which), index(2)), arith.divui(warp(), index(2)))
            for h, register in enumerate(value.registers.flat):
                place = arith.addi(arith.muli(scalar(sender), index(32)), arith.remui(_column(h), index(32)))
                send(pair(register), address(held, place, _row(0)), counter(mail, number), program)

        self._call(send_all, value, held, self._mail.held, splat(self._mosaic, sender), splat(self._mosaic, which))

    def parts(self, held: Any) -> jax.Array:
        """The sum of what `send_parts` sent, half a block."""
        from jaxlib.mlir.dialects import arith

        def read(_, held):
            return block([_total(held, [arith.addi(_column(0, True), index(32 * i)) for i in range(PROGRAMS)])] * 2)

        return self._call(read, held, returns=jnp.float32)

    def send_rows(self, value: jax.Array, held: Any, number: int, sender: Any) -> None:
        """Sends half a block, transposed, to all programs, as an operand of the tensor cores. value: of two bytes each. held: tiles
        [n, 8, 64] in shared memory, swizzled by 128 bytes. sender: the program's number, which says where the 32 columns begin."""
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm, vector

        def send_all(_, value, held, mail, sender):
            integer = ir.IntegerType.get_signless(32)
            # Two rows of a column each; threads that have the same rows exchange their columns until each has all eight.
            found = [vector.extract(vector.bitcast(ir.VectorType.get((1,), integer), value.registers.flat[0]), [], [0])]
            for bit in (4, 8, 16):
                second = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane(), index(bit)), index(0))
                others = [mgpu.utils.shfl_bfly(two, bit) for two in found]
                low = [arith.select(second, a, b) for a, b in zip(others, found, strict=True)]
                found = low + [arith.select(second, a, b) for a, b in zip(found, others, strict=True)]
            first = arith.addi(arith.muli(scalar(sender), index(32)), arith.muli(warp(), index(8)))
            tile, byte = arith.divui(first, index(64)), arith.muli(arith.remui(first, index(64)), index(2))
            for n, selector in enumerate((0x5410, 0x7632)):
                numbers = [
                    llvm.inline_asm(integer, [a, b, i32(selector)], "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", asm_dialect=0)
                    for a, b in zip(found[::2], found[1::2], strict=True)
                ]
                swizzled = arith.xori(byte, arith.muli(_row(n), index(16)))
                at = arith.addi(arith.addi(arith.muli(tile, index(1024)), arith.muli(_row(n), index(128))), swizzled)
                begin: Any = llvm.ptrtoint(integer, mgpu.utils.memref_ptr(held))
                place = arith.addi(begin, arith.index_cast(integer, at))
                send(numbers, place, counter(mail, number), arith.divui(lane(), index(4)))

        self._call(send_all, value, held, self._mail.held, splat(self._mosaic, sender), transforms={1: self._transforms})

    def _call(self, function: Any, *args: Any, returns: Any = None, transforms: Any = None) -> Any:
        mosaic, given = self._mosaic, transforms or {}
        kinds = {2: mosaic.Layout.WGMMA, 1: mosaic.Layout.WG_SPLAT((1,))}
        types = tuple(kinds[a.ndim] if isinstance(a, jax.Array) else mosaic.RefType(given.get(i, ())) for i, a in enumerate(args))
        result = None if returns is None else mosaic.ShapeDtypeStruct((64, ROWS), returns, layout=mosaic.Layout.WGMMA)
        return mosaic.inline_mgpu(arg_types=types, return_type=result)(function)(*args)


def _column(which: int, half: bool = False) -> Any:
    """The first or second column of a thread within its block, or the one within half a block."""
    from jaxlib.mlir.dialects import arith

    return arith.divui(thread(), index(4)) if half else inlined.row(which)


def _row(which: int) -> Any:
    """The first or second row of a thread."""
    return inlined.column(which)


def _over_columns(numbers: Any) -> Any:
    """The sums of pairs over the threads of a warp that have the same rows."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir.dialects import arith

    for distance in (4, 8, 16):
        numbers = arith.addf(numbers, mgpu.utils.shfl_bfly(numbers, distance))
    return numbers


def _total(held: Any, places: list[Any]) -> Any:
    """The sum of a thread's pairs at these places of shared memory."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    pairs = [vector.load(ir.VectorType.get((2,), ir.F32Type.get()), held, [place, _row(0)]) for place in places]
    return functools.reduce(arith.addf, pairs)
