"""Copies an item's queries to shared memory, and its results back, in the Mosaic GPU dialect. No row of a tile stays unused.

A copy by the hardware fills tiles of eight rows. A KV head with fewer query heads would leave some of them empty, and products take the
time of all rows. So threads copy, 16 bytes each at a time, and the rows are the heads of one query after the other.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect, inlined
from pallas_kernels.dialect import pl

PIECE = 8  # numbers that a thread copies at once, in bfloat16
LINE = 64  # numbers of a row of a tile of shared memory, in which pieces change places (`mosaic_parts.tiled`)


def load(queries: Any, held: Any, first: Any, count: Any, *, interpret: bool = False) -> None:
    """Copies rows of queries [T, G, D] in global memory to shared memory [N, D]: row `first` + n of all T * G to row n. In place of rows
    from `count` on comes the last one before. The warpgroup's threads must meet before they read the copies, as in `commit_smem`."""
    if interpret:
        rows = queries[...].reshape(-1, queries.shape[-1])
        held[...] = rows[jnp.minimum(first + jnp.arange(held.shape[0]), count - 1)]
        return

    def code(_, queries, held, first, count):
        from jaxlib.mlir.dialects import arith, vector

        last = arith.subi(inlined.scalar(count), inlined.index(1))
        for place, row, piece, kind in _pieces(held):
            whose = arith.minui(arith.addi(inlined.scalar(first), row), last)
            found = vector.load(kind, queries, [*_head_of(queries, whose), piece], alignment=2 * PIECE)
            vector.store(found, held, place)

    _inline(code, queries, held, first, count)


def store(held: Any, results: Any, first: Any, count: Any, *, interpret: bool = False) -> None:
    """Copies rows of shared memory [N, D] to results [T, G, D] in global memory: row n to row `first` + n, if that is below `count`."""
    if interpret:
        group = results.shape[1]
        for n in range(held.shape[0]):
            head = results.at[(first + n) // group, (first + n) % group]
            pl.when(first + n < count)(lambda n=n, head=head: _set(head, held[n]))
        return

    def code(_, results, held, first, count):
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir.dialects import arith, vector

        for place, row, piece, kind in _pieces(held):
            whose = arith.addi(inlined.scalar(first), row)
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, whose, inlined.scalar(count))):
                found = vector.load(kind, held, place)
                vector.store(found, results, [*_head_of(results, whose), piece], alignment=2 * PIECE)

    _inline(code, results, held, first, count)


def store_block(value: Any, results: Any, first: Any, count: Any, column: Any, *, interpret: bool = False) -> None:
    """Stores a product [64, 8] as eight rows of results [T, G, D], 64 columns from `column` on: its column n as row `first` + n, if that is
    below `count`."""
    if interpret:
        group = results.shape[1]
        for n in range(value.shape[1]):
            head = results.at[(first + n) // group, (first + n) % group, pl.ds(column, LINE)]
            pl.when(first + n < count)(lambda n=n, head=head: _set(head, value[:, n]))
        return

    def code(_, value, results, first, count, column):
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir.dialects import arith, memref

        for n in range(2):
            whose = arith.addi(inlined.scalar(first), inlined.column(n))
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, whose, inlined.scalar(count))):
                head = _head_of(results, whose)
                for half, register in enumerate(value.registers.flat):
                    place = arith.addi(inlined.scalar(column), inlined.row(half))
                    memref.store(inlined.pair(register)[n], results, [*head, place])

    mosaic = dialect.mosaic()
    types = mosaic.Layout.WGMMA, mosaic.RefType(), *[mosaic.Layout.WG_SPLAT((1,))] * 3
    mosaic.inline_mgpu(arg_types=types)(code)(value, results, *[inlined.splat(mosaic, n) for n in (first, count, column)])


def _inline(code: Any, ref: Any, held: Any, first: Any, count: Any) -> None:
    mosaic = dialect.mosaic()
    tiled = mosaic.RefType((mosaic.TilingTransform((8, LINE)), mosaic.SwizzleTransform(2 * LINE)))
    types = mosaic.RefType(), tiled, *[mosaic.Layout.WG_SPLAT((1,))] * 2
    mosaic.inline_mgpu(arg_types=types)(code)(ref, held, *[inlined.splat(mosaic, n) for n in (first, count)])


def _pieces(held: Any) -> Any:
    """A thread's pieces of shared memory: where each lies, its row, its first column, and its type."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    down, across, height, _ = held.type.shape
    of_row = across * LINE // PIECE
    kind = ir.VectorType.get((PIECE,), held.type.element_type)
    for n in range(down * height * of_row // 128):
        number = arith.addi(inlined.thread(), inlined.index(128 * n))
        row, piece = arith.divui(number, inlined.index(of_row)), arith.remui(number, inlined.index(of_row))
        tile, inner = arith.divui(row, inlined.index(height)), arith.remui(row, inlined.index(height))
        line, chunk = (f(piece, inlined.index(LINE // PIECE)) for f in (arith.divui, arith.remui))
        swapped = arith.muli(arith.xori(chunk, inner), inlined.index(PIECE))
        yield [tile, line, inner, swapped], row, arith.muli(piece, inlined.index(PIECE)), kind


def _head_of(ref: Any, row: Any) -> list[Any]:
    """The query and the head of a row of [T, G, D]."""
    from jaxlib.mlir.dialects import arith

    group = inlined.index(ref.type.shape[1])
    return [arith.divui(row, group), arith.remui(row, group)]


def _set(ref: Any, value: jax.Array) -> None:
    ref[...] = value
