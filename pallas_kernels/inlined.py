"""What code that is inlined in a kernel of the Mosaic GPU dialect is made of. In it every thread says what it does, in MLIR.

A block is what the tensor cores give: [64, N], N a multiple of 8, in the registers of a warpgroup. Of each [64, 8] a thread has four
numbers: in rows r and r + 8, with r = thread / 32 * 16 + thread % 32 / 4, those of columns 2 (thread % 4) and the one after. A register
holds the two of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def splat(mosaic: Any, number: Any) -> jax.Array:
    """A number as an argument of inlined code."""
    return mosaic.layout_cast(jnp.full((1,), number, jnp.int32), mosaic.Layout.WG_SPLAT((1,)))


def scalar(splat: Any) -> Any:
    """The number of such an argument."""
    from jaxlib.mlir.dialects import arith

    return arith.index_cast(index(0).type, splat.registers.flat[0])


def index(number: int) -> Any:
    """A constant that arrays are indexed with."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.constant(ir.IndexType.get(), number)


def i32(number: int) -> Any:
    """A constant of 32 bits."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.constant(ir.IntegerType.get_signless(32), number)


def asm(code: str, *values: Any) -> None:
    """An instruction without a result, of numbers of 32 bits."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    kinds = ",".join("f" if isinstance(value.type, ir.F32Type) else "r" for value in values)
    llvm.inline_asm(None, list(values), code, kinds, has_side_effects=True, asm_dialect=0)


def thread() -> Any:
    """The thread's number in its warpgroup."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir.dialects import arith

    return arith.remui(arith.index_cast(index(0).type, mgpu.thread_idx()), index(128))


def warp() -> Any:
    """The warp's number in its warpgroup."""
    from jaxlib.mlir.dialects import arith

    return arith.divui(thread(), index(32))


def lane() -> Any:
    """The thread's number in its warp."""
    from jaxlib.mlir.dialects import arith

    return arith.remui(thread(), index(32))


def row(half: int) -> Any:
    """The first or second of a thread's rows of a block."""
    from jaxlib.mlir.dialects import arith

    return arith.addi(arith.addi(arith.muli(warp(), index(16)), arith.divui(lane(), index(4))), index(8 * half))


def column(after: int) -> Any:
    """The column so many after a thread's first one of a block."""
    from jaxlib.mlir.dialects import arith

    return arith.addi(arith.muli(arith.remui(lane(), index(4)), index(2)), index(after))


def pair(register: Any) -> list[Any]:
    """The two numbers of a register of a block."""
    from jaxlib.mlir.dialects import vector

    return [vector.extract(register, [], [n]) for n in range(2)]


def block(registers: Sequence[Any], rows: int = 64, columns: int = 8) -> Any:
    """A block of these registers, in the order in which `flat` gives them."""
    from jax.experimental.mosaic import gpu as mgpu

    held = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((rows, columns)), dtype=object)
    for n, register in enumerate(registers):
        held.flat[n] = register
    return mgpu.FragmentedArray(_registers=held, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
