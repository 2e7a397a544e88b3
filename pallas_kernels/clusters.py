"""How programs of a cluster send each other numbers, in kernels of the Mosaic GPU dialect.

They store into each other's shared memory, and a counter of the one that they send to counts the bytes that have arrived. It waits until it
has as many as it expects. A barrier of the cluster, or a fence, takes several times as long.

Functions but for `Mail` are for code that is inlined, in which every thread says what it does.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

COUNTER = 8  # bytes


class Mail:
    """Counters of what arrives. held: int32 [2 n] in shared memory, for n of them, each of which counts once."""

    def __init__(self, mosaic: Any, held: Any):
        self._mosaic, self.held = mosaic, held

    def begin(self, *expected: Any) -> None:
        """Says how many bytes each counter waits for, and waits until all programs of the cluster did. All warpgroups call it, before any
        sends."""
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir.dialects import arith

        def start(_, held, *sizes):
            first = arith.cmpi(arith.CmpIPredicate.eq, arith.index_cast(index(0).type, mgpu.thread_idx()), index(0))
            with mgpu.when(first):
                for n in range(len(sizes)):
                    asm("mbarrier.init.shared::cta.b64 [$0], 1;", counter(held, n))
                asm("fence.mbarrier_init.release.cluster;")
                for n, size in enumerate(sizes):
                    asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", counter(held, n), size.registers.flat[0])
            asm("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;")

        layout = self._mosaic.Layout.WG_SPLAT((1,))
        sizes = [splat(self._mosaic, size) for size in expected]
        self._mosaic.inline_mgpu(arg_types=(self._mosaic.RefType(), *[layout] * len(sizes)))(start)(self.held, *sizes)

    def wait(self, number: int) -> None:
        """Waits until all has arrived that this counter waits for."""
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import nvvm

        def until(_, held):
            address = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(held), [number], ir.IntegerType.get_signless(64))
            nvvm.mbarrier_try_wait_parity(address, i32(0), i32(10_000_000))

        self._mosaic.inline_mgpu(arg_types=(self._mosaic.RefType(),))(until)(self.held)


def splat(mosaic: Any, number: Any) -> jax.Array:
    """A number as an argument of inlined code."""
    return mosaic.layout_cast(jnp.full((1,), number, jnp.int32), mosaic.Layout.WG_SPLAT((1,)))


def scalar(splat: Any) -> Any:
    """The number of such an argument."""
    from jaxlib.mlir.dialects import arith

    return arith.index_cast(index(0).type, splat.registers.flat[0])


def asm(code: str, *values: Any) -> None:
    """An instruction without a result, of numbers of 32 bits."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    kinds = ",".join("f" if isinstance(value.type, ir.F32Type) else "r" for value in values)
    llvm.inline_asm(None, list(values), code, kinds, has_side_effects=True, asm_dialect=0)


def index(number: int) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.constant(ir.IndexType.get(), number)


def i32(number: int) -> Any:
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith

    return arith.constant(ir.IntegerType.get_signless(32), number)


def thread() -> Any:
    """The thread's number in its warpgroup."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir.dialects import arith

    return arith.remui(arith.index_cast(index(0).type, mgpu.thread_idx()), index(128))


def warp() -> Any:
    from jaxlib.mlir.dialects import arith

    return arith.divui(thread(), index(32))


def lane() -> Any:
    from jaxlib.mlir.dialects import arith

    return arith.remui(thread(), index(32))


def address(held: Any, *place: Any, size: int = 4) -> Any:
    """Where held[place] lies in shared memory. size: bytes of its numbers."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    integer, at = ir.IntegerType.get_signless(32), index(0)
    for length, step in zip(held.type.shape, place, strict=True):
        at = arith.addi(arith.muli(at, index(length)), step)
    begin: Any = llvm.ptrtoint(integer, mgpu.utils.memref_ptr(held))
    return arith.addi(begin, arith.muli(arith.index_cast(integer, at), i32(size)))


def counter(held: Any, number: int) -> Any:
    """Where the counter lies."""
    return address(held, index(COUNTER // 4 * number))


def send(numbers: list[Any], place: Any, counted: Any, program: Any) -> None:
    """Stores one, two or four numbers of 32 bits in another program's shared memory. place, counted: where they and the counter lie in this
    one's. program: the other one's number in the cluster."""
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    integer = ir.IntegerType.get_signless(32)
    other = arith.index_cast(integer, program)
    there, its_counter = (
        llvm.inline_asm(integer, [own, other], "mapa.shared::cluster.u32 $0, $1, $2;", "=r,r,r", asm_dialect=0) for own in (place, counted)
    )
    kind = "f32" if isinstance(numbers[0].type, ir.F32Type) else "b32"
    several = f".v{len(numbers)}" if len(numbers) > 1 else ""
    names = ", ".join(f"${n + 1}" for n in range(len(numbers)))
    listed = f"{{{names}}}" if several else names
    code = f"st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{several}.{kind} [$0], {listed}, [${len(numbers) + 1}];"
    asm(code, there, *numbers, its_counter)
