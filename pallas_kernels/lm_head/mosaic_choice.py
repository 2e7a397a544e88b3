"""What kernels of the head in the Mosaic GPU dialect do with their products: they choose.

A thread has two ids of each of its columns (rows of hidden states). It caps their logits, adds noise, and finds the best of its warp's
sixteen with shuffles. The best so far lies in shared memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dialect
from pallas_kernels.choice import best
from pallas_kernels.dialect import pl

WARPS = 4  # of a warpgroup
TOGETHER = 4  # groups of 8 columns that go through shared memory together
LOG_2 = float(np.log(2))
SERIES_BELOW, SERIES_TERMS = 0.125, 8  # where -log(1 - d) is d + d^2 / 2 + ..., since the GPU's logarithm is not exact enough near 1


@dataclasses.dataclass(frozen=True)
class Choice:
    """How the programs of a kernel choose."""

    columns: int  # of a product: rows of hidden states, padded
    size: int  # of the vocabulary
    wide: int  # warpgroups of a program with products of their own
    deep: int  # warpgroups that share the sums of a product, of which the first chooses
    programs: int
    softcap: float | None
    suppressed: tuple[int, ...]

    @staticmethod
    def room(columns: int, wide: int) -> int:
        """Bytes of shared memory that it takes."""
        return wide * (WARPS * columns * 8 + 2 * TOGETHER * 256 * 4)

    @property
    def out(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What the kernel writes: the best of each column and warp."""
        shape = self.columns, self.programs * self.wide * WARPS
        return {"values": jax.ShapeDtypeStruct(shape, jnp.float32), "ids": jax.ShapeDtypeStruct(shape, jnp.int32)}

    @property
    def scratch(self) -> dict[str, Any]:
        """What it needs of shared memory."""
        shared, kept = dialect.mosaic().SMEM, (self.wide * WARPS, self.columns)
        held = (self.wide, 2 * TOGETHER, 256)
        return {"best_values": shared(kept, jnp.float32), "best_ids": shared(kept, jnp.int32), "held": shared(held, jnp.float32)}

    def arrays(self, keys: jax.Array, temperature: jax.Array, first_id: jax.Array | None) -> dict[str, jax.Array]:
        """What the kernel reads for it. Arguments: as for `lm_head`."""
        first = jnp.int32(0) if first_id is None else first_id
        # By column: the temperature's inverse, or 0 for a greedy row, and the bits of the key.
        inverse = jnp.where(temperature > 0, 1 / jnp.maximum(temperature, 1e-30), 0)
        words = [jax.lax.bitcast_convert_type(inverse, jnp.int32)[None], jax.lax.bitcast_convert_type(keys, jnp.int32).T]
        return {
            "of_columns": jnp.pad(jnp.concatenate(words), ((0, 0), (0, self.columns - len(keys)))),
            "settings": jnp.stack([first, jnp.any(temperature > 0).astype(jnp.int32)]),
        }

    def begin(self, refs: dict[str, Any]) -> None:
        """What a warpgroup does before its first product. refs, here and below: all references by name."""
        _, begin, _ = self._functions
        self._in_first(lambda: begin(refs["best_values"], refs["best_ids"]))

    def choose(self, refs: dict[str, Any], total: jax.Array, row: Any) -> None:
        """What the warpgroup that has a product [64, columns] does with it. row: the product's first row of the table."""
        choose, _, _ = self._functions
        sampled = refs["settings"][1] > 0
        memory = refs["held"].at[jax.lax.div(jax.lax.axis_index("warpgroup"), self.deep)], refs["best_values"], refs["best_ids"]
        for noisy in (False, True):

            @pl.when(sampled if noisy else ~sampled)
            def _choose(noisy=noisy):
                choose[noisy](total, refs["of_columns"], row, row + refs["settings"][0], *memory)

    def end(self, refs: dict[str, Any], program: Any) -> None:
        """What a warpgroup does after its last product. program: the program's number."""
        _, _, write = self._functions
        names = "best_values", "best_ids", "values", "ids"
        self._in_first(lambda: write(*(refs[name] for name in names), program * (self.wide * WARPS)))

    @property
    def _functions(self) -> tuple[Any, Any, Any]:
        return _inline(dialect.mosaic(), self.columns, self.size, self.softcap, self.suppressed, self.deep)

    def _in_first(self, do: Callable[[], None]) -> None:
        """Calls do in the first of the warpgroups that share sums."""
        if self.deep == 1:
            do()
        else:
            pl.when(jax.lax.rem(jax.lax.axis_index("warpgroup"), self.deep) == 0)(do)

    @staticmethod
    def best(found: dict[str, jax.Array], rows: int) -> tuple[jax.Array, jax.Array]:
        """The ids and values of so many rows. found: what the kernel wrote."""
        return best(found["values"][:rows], found["ids"][:rows])


def _inline(mosaic: Any, columns: int, size: int, softcap: float | None, suppressed: tuple[int, ...], deep: int) -> tuple[Any, Any, Any]:
    """Functions of one warpgroup: two that choose among the products of a block, without and with noise; one that starts, one that writes.

    columns: of a product. size: of the vocabulary; rows of a block past it are not chosen. deep: as for `Choice`.
    """
    from jax.experimental.mosaic import gpu as mgpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, memref, scf, vector

    splat = mosaic.Layout.WG_SPLAT((1,))
    ref = mosaic.RefType()

    def types():
        return ir.IndexType.get(), ir.IntegerType.get_signless(32), ir.F32Type.get()

    def whole(value):
        i32 = ir.IntegerType.get_signless(32)
        value = int(value) & 0xFFFFFFFF
        return arith.constant(i32, ir.IntegerAttr.get(i32, value if value < 2**31 else value - 2**32))

    def real(value):
        f32 = ir.F32Type.get()
        return arith.constant(f32, ir.FloatAttr.get(f32, float(value)))

    def at(value):
        return arith.constant(ir.IndexType.get(), value)

    def unary(name: str, x: Any) -> Any:
        return llvm.inline_asm(ir.F32Type.get(), [x], f"{name} $0, $1;", "=f,f", asm_dialect=0)

    def threads():
        """The warp in the warpgroup, the warp among all of the program that choose, and the lane, as indices."""
        thread = arith.index_cast(ir.IndexType.get(), mgpu.thread_idx())
        warp, place = arith.remui(arith.divui(thread, at(32)), at(WARPS)), arith.divui(thread, at(32 * WARPS * deep))
        return warp, arith.addi(arith.muli(place, at(WARPS)), warp), arith.remui(thread, at(32))

    def mixed(x):
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = arith.muli(arith.xori(x, arith.shrui(x, whole(shift))), whole(factor))
        return arith.xori(x, arith.shrui(x, whole(16)))

    def noise(token, first, second):
        """As `pallas_kernels.noise.gumbel_of`."""
        _, _, f32 = types()
        bits = mixed(arith.addi(mixed(arith.xori(arith.muli(token, whole(0x9E3779B1)), first)), second))
        distance = arith.mulf(arith.addf(arith.uitofp(f32, bits), real(0.5)), real(2.0**-32))
        distance = arith.minimumf(distance, real(1.0 - 2.0**-24))
        series = real(1 / SERIES_TERMS)
        for n in range(SERIES_TERMS - 1, 0, -1):
            series = arith.addf(arith.mulf(series, distance), real(1 / n))
        series = arith.mulf(series, distance)
        far = arith.mulf(unary("lg2.approx.f32", arith.subf(real(1), distance)), real(-LOG_2))
        near = arith.cmpf(arith.CmpFPredicate.OLT, distance, real(SERIES_BELOW))
        return arith.mulf(unary("lg2.approx.f32", arith.select(near, series, far)), real(-LOG_2))

    def capped(x):
        if softcap is None:
            return x
        # softcap * tanh(x / softcap), which is 1 - 2 / (exp(2 x / softcap) + 1)
        power = unary("ex2.approx.f32", arith.mulf(x, real(2 / (softcap * LOG_2))))
        part = unary("rcp.approx.f32", arith.addf(power, real(1)))
        return arith.subf(real(softcap), arith.mulf(part, real(2 * softcap)))

    def better(value, token, other, other_token):
        """The better of two. NaN is the largest; of equal values the lower id."""
        wins = arith.ori(
            arith.cmpf(arith.CmpFPredicate.UGT, value, other),  # also if one is NaN
            arith.andi(arith.cmpf(arith.CmpFPredicate.OEQ, value, other), arith.cmpi(arith.CmpIPredicate.slt, token, other_token)),
        )
        wins = arith.andi(
            wins, arith.ori(arith.cmpf(arith.CmpFPredicate.UNO, value, value), arith.cmpf(arith.CmpFPredicate.ORD, other, other))
        )
        return arith.select(wins, value, other), arith.select(wins, token, other_token)

    def chooser(noisy):
        def choose(_, logits, words, row, token, held, best_values, best_ids):
            index, i32, f32 = types()

            def of_column(column, logits, tokens, closed, every, is_writer):
                found = []
                if noisy:
                    inverse = arith.bitcast(f32, memref.load(words, [at(0), column]))
                    first, second = (memref.load(words, [at(1 + k), column]) for k in range(2))
                    warm = arith.cmpf(arith.CmpFPredicate.OGT, inverse, real(0))
                for half in range(2):
                    value = capped(logits[half])
                    if noisy:
                        other = arith.addf(arith.mulf(value, inverse), noise(tokens[half], first, second))
                        value = arith.select(warm, other, value)
                    found.append((arith.select(closed[half], real(-np.inf), value), tokens[half]))
                value, chosen = better(*found[1], *found[0])
                for distance in (4, 8, 16):
                    other = mgpu.utils.shfl_bfly(value, distance), mgpu.utils.shfl_bfly(chosen, distance)
                    value, chosen = better(*other, value, chosen)
                with mgpu.when(is_writer):
                    where = [every, column]
                    value, chosen = better(value, chosen, memref.load(best_values, where), memref.load(best_ids, where))
                    memref.store(value, best_values, where)
                    memref.store(chosen, best_ids, where)

            warp, every, lane = threads()
            group = arith.addi(arith.muli(warp, at(16)), arith.divui(lane, at(4)))
            within = arith.index_cast(i32, group)
            rows = [arith.addi(arith.addi(row.registers.flat[0], within), whole(8 * half)) for half in range(2)]
            tokens = [arith.addi(arith.addi(token.registers.flat[0], within), whole(8 * half)) for half in range(2)]
            closed = []
            for half in range(2):
                out = arith.cmpi(arith.CmpIPredicate.sge, rows[half], whole(size))
                for other in suppressed:
                    out = arith.ori(out, arith.cmpi(arith.CmpIPredicate.eq, tokens[half], whole(other)))
                closed.append(out)
            is_writer = arith.cmpi(arith.CmpIPredicate.ult, lane, at(4))
            pair = ir.VectorType.get((2,), f32)
            thread = arith.muli(arith.remui(arith.index_cast(index, mgpu.thread_idx()), at(32 * WARPS)), at(2))
            for begin in range(0, columns // 8, TOGETHER):
                # A loop cannot count registers, so the numbers of some columns go through shared memory; a thread reads its own.
                for place, register in np.ndenumerate(logits.registers):
                    if begin <= place[1] < begin + TOGETHER:
                        vector.store(register, held, [at(2 * (place[1] - begin) + place[4]), thread])
                loop = scf.ForOp(at(0), at(min(TOGETHER, columns // 8 - begin)), at(1))
                with ir.InsertionPoint(loop.body):
                    j = loop.induction_variable
                    halves = [vector.load(pair, held, [arith.addi(arith.muli(j, at(2)), at(half)), thread]) for half in range(2)]
                    column = arith.addi(arith.muli(arith.remui(lane, at(4)), at(2)), arith.muli(arith.addi(j, at(begin)), at(8)))
                    for n in range(2):
                        of_column(
                            arith.addi(column, at(n)), [vector.extract(half, [], [n]) for half in halves], tokens, closed, every, is_writer
                        )
                    scf.yield_([])

        inline = mosaic.inline_mgpu(arg_types=(mosaic.Layout.WGMMA, ref, splat, splat, ref, ref, ref))(choose)

        def call(logits, words, row, token, *kept):
            row, token = (mosaic.layout_cast(jnp.full((1,), n, jnp.int32), splat) for n in (row, token))
            inline(logits, words, row, token, *kept)

        return call

    def each_column(do):
        _, every, lane = threads()
        with mgpu.when(arith.cmpi(arith.CmpIPredicate.ult, lane, at(4))):
            for j in range(columns // 8):
                for n in range(2):
                    do(every, arith.addi(arith.muli(lane, at(2)), at(8 * j + n)))

    def begin(_, best_values, best_ids):
        def start(every, column):
            memref.store(real(-np.inf), best_values, [every, column])
            memref.store(whole(2**31 - 1), best_ids, [every, column])

        each_column(start)

    def write(_, best_values, best_ids, values, ids, first):
        def copy(every, column):
            place = [column, arith.addi(arith.index_cast(ir.IndexType.get(), first.registers.flat[0]), every)]
            memref.store(memref.load(best_values, [every, column]), values, place)
            memref.store(memref.load(best_ids, [every, column]), ids, place)

        each_column(copy)

    written = mosaic.inline_mgpu(arg_types=(ref, ref, ref, ref, splat))(write)

    def write_all(*refs):
        *refs, first = refs
        written(*refs, mosaic.layout_cast(jnp.full((1,), first, jnp.int32), splat))

    return (chooser(False), chooser(True)), mosaic.inline_mgpu(arg_types=(ref, ref))(begin), write_all
