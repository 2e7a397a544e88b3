"""What threads of `mosaic.py` do with numbers in their registers and in shared memory: add up the products of a program's warpgroups, send
each program of the cluster the rows that it finishes, and add up squares over a head.

Products of a program lie in shared memory as [warpgroups, rows, 64]. A warp stores eight numbers of each of four rows at a time. Number n
of row r lies at n xor 8 (r / 2 mod 4), so that these are in 32 banks.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import inlined
from pallas_kernels.clusters import Mail, address, counter, send
from pallas_kernels.inlined import index, lane, pair, scalar, splat, thread, warp

PROGRAMS = 8  # of a cluster
TILE = 8  # rows of which each program of a cluster finishes one
EACH = 4  # numbers that a thread sends


def put(mosaic: Any, product: jax.Array, held: Any, warpgroup: Any, *, interpret: bool = False) -> None:
    """Stores a product [64, rows] in shared memory [warpgroups, rows, 64]. interpret: whether the kernel is interpreted."""
    if interpret:
        held[warpgroup] = product.T
        return
    from jaxlib.mlir.dialects import arith, memref

    def write(_, product, held, warpgroup):
        moved = arith.muli(arith.remui(lane(), index(4)), index(8))
        for tile, halves in enumerate(product.registers.reshape(-1, 2)):
            for half, register in enumerate(halves):
                output = arith.xori(inlined.row(half), moved)
                for n, number in enumerate(pair(register)):
                    memref.store(number, held, [scalar(warpgroup), inlined.column(TILE * tile + n), output])

    types = mosaic.Layout.WGMMA, mosaic.RefType(), mosaic.Layout.WG_SPLAT((1,))
    mosaic.inline_mgpu(arg_types=types)(write)(product, held, splat(mosaic, warpgroup))


def send_rows(mosaic: Any, held: Any, there: Any, mail: Mail, tile: Any, place: Any, rows: int) -> None:
    """Sends the sums of a tile's products, of each row to the program of its number, where the first counter of `mail` counts them.

    held: as `put` left it. there: float32 [tiles, n] in shared memory, where they begin at [tile, place]. rows: how many a tile has."""
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, vector

    def send_all(_, held, there, counters, tile, place):
        program, output = arith.divui(thread(), index(64 // EACH)), arith.muli(arith.remui(thread(), index(64 // EACH)), index(EACH))
        moved = arith.muli(arith.remui(arith.divui(program, index(2)), index(4)), index(8))
        tile = scalar(tile)
        row, four = arith.addi(program, arith.muli(tile, index(TILE))), ir.VectorType.get((EACH,), ir.F32Type.get())

        def put_there():
            found = [vector.load(four, held, [index(w), row, arith.xori(output, moved)]) for w in range(held.type.shape[0])]
            total = functools.reduce(arith.addf, found)
            numbers = [vector.extract(total, [], [n]) for n in range(EACH)]
            send(numbers, address(there, tile, arith.addi(scalar(place), output)), counter(counters, 0), program)

        if rows == TILE:
            put_there()
        else:
            with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, program, index(rows))):
                put_there()

    types = (*[mosaic.RefType()] * 3, *[mosaic.Layout.WG_SPLAT((1,))] * 2)
    mosaic.inline_mgpu(arg_types=types)(send_all)(held, there, mail.held, splat(mosaic, tile), splat(mosaic, place))


def total(mosaic: Any, values: jax.Array, held: Any, tile: Any, *, interpret: bool = False) -> jax.Array:
    """The sum of a warpgroup's numbers [n], as an array like that. held: float32 [tiles, 4] in shared memory, of which each call needs its
    own row. interpret: whether the kernel is interpreted."""
    if interpret:
        return jnp.full(values.shape, jnp.sum(values))
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, memref, vector

    def add(_, values, held, tile):
        found = [number for register in values.registers.flat for number in _numbers(register)]
        found = functools.reduce(arith.addf, found)
        for distance in (1, 2, 4, 8, 16):
            found = arith.addf(found, mgpu.utils.shfl_bfly(found, distance))
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.eq, lane(), index(0))):
            memref.store(found, held, [scalar(tile), warp()])
        mgpu.utils.warpgroup_barrier()
        every = vector.load(ir.VectorType.get((4,), ir.F32Type.get()), held, [scalar(tile), index(0)])
        found = functools.reduce(arith.addf, _numbers(every))
        return mgpu.FragmentedArray.splat(found, values.shape)

    layout = mosaic.Layout.WG_STRIDED(values.shape, vec_size=values.shape[0] // 128)
    types = layout, mosaic.RefType(), mosaic.Layout.WG_SPLAT((1,))
    result = mosaic.ShapeDtypeStruct(values.shape, jnp.float32, layout=mosaic.Layout.WG_SPLAT(values.shape))
    return mosaic.inline_mgpu(arg_types=types, return_type=result)(add)(values, held, splat(mosaic, tile))


def _numbers(register: Any) -> list[Any]:
    """The numbers of a vector."""
    from jaxlib.mlir.dialects import vector

    return [vector.extract(register, [], [n]) for n in range(register.type.shape[0])]
