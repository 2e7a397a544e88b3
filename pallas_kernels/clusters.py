"""How programs of a cluster send each other numbers, in kernels of the Mosaic GPU dialect.

They store into each other's shared memory, and a counter of the one that they send to counts the bytes that have arrived. It waits until it
has as many as it expects. A barrier of the cluster, or a fence, takes several times as long.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels.inlined import asm, i32, index, splat

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

        sizes = [splat(self._mosaic, size) for size in expected]
        types = self._mosaic.RefType(), *[self._mosaic.Layout.WG_SPLAT((1,))] * len(sizes)
        self._mosaic.inline_mgpu(arg_types=types)(start)(self.held, *sizes)

    def wait(self, number: int) -> None:
        """Waits until all has arrived that this counter waits for."""
        from jax.experimental.mosaic import gpu as mgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import nvvm

        def until(_, held):
            address = mgpu.utils.getelementptr(mgpu.utils.memref_ptr(held), [number], ir.IntegerType.get_signless(64))
            nvvm.mbarrier_try_wait_parity(address, i32(0), i32(10_000_000))

        self._mosaic.inline_mgpu(arg_types=(self._mosaic.RefType(),))(until)(self.held)


def address(held: Any, *place: Any) -> Any:
    """In inlined code: where held[place], of four bytes, lies in shared memory."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm

    integer, at = ir.IntegerType.get_signless(32), index(0)
    for length, step in zip(held.type.shape, place, strict=True):
        at = arith.addi(arith.muli(at, index(length)), step)
    begin: Any = llvm.ptrtoint(integer, mgpu.utils.memref_ptr(held))
    return arith.addi(begin, arith.muli(arith.index_cast(integer, at), i32(4)))


def counter(held: Any, number: int) -> Any:
    """In inlined code: where a counter lies. held: as for `Mail`."""
    return address(held, index(COUNTER // 4 * number))


def send(numbers: list[Any], place: Any, counted: Any, program: Any) -> None:
    """In inlined code: stores one, two or four numbers of 32 bits in another program's shared memory. place, counted: where they and the
    counter lie in this one's. program: the other one's number in the cluster."""
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
