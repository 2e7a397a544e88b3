"""Products of few rows with a packed matrix in the Mosaic GPU dialect, for Hopper.

A program has all rows and a few blocks of 64 outputs, or a part of their sums: see `packed.mosaic`. With many rows the warpgroups have
different outputs; with few, they share outputs and divide the sums. The first weights are copied while the kernel before still runs.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect, float8_rows
from pallas_kernels.activation import GELU
from pallas_kernels.dialect import pl
from pallas_kernels.float8_rows import Rounded
from pallas_kernels.linear.reference import summed
from pallas_kernels.linear.triton import activated, activated_codes, multiprocessors
from pallas_kernels.packed import BLOCK, KINDS, Packed, mosaic
from pallas_kernels.packed.mosaic import SHARED_MEMORY, Tiles

MOST_ROWS = 256
# A product with its activation keeps the sums of gate and up in the registers of a warpgroup: so many rows at most, and fewer in a large
# matrix, whose product alone keeps the tensor cores busier.
MOST_GATED, MOST_GATED_LARGE, LARGE = 96, 64, 1 << 26
OPERAND, OTHERS = 16, 30  # registers of a thread for a product's left operand of 16 bits, and for all but operands and sums
LEAST_CODES = 17  # rows that are rounded to fp8 are multiplied as codes from so many on
LEAST_TILES = dialect.MULTIPROCESSORS // 2  # with fewer, programs share the sums of a product alone, which one with its activation cannot
LEAST_WEIGHTS = 1 << 20  # smaller matrices are multiplied faster by `packed_triton`
FEW_OUTPUTS = 4096
WIDEST_ROWS, WIDEST_OUTPUTS = 40, 1 << 17  # from so many rows and outputs on, as of a head, all warpgroups have outputs of their own
MOST_SPLITS = 8
START = 3  # the time of a program's start and end, in units of the time for a step
PROGRAMS = dialect.MULTIPROCESSORS
JOINING = 4  # the time that it takes to join the parts of two programs, in the same units
JOINED_ROWS = 40  # up to so many rows programs may have equal parts of all steps
READ = 1 / 30_000  # microseconds for a byte, of one of 132 multiprocessors that all read
MULTIPLY = 1.1e-3  # microseconds for the product of a row and a block


def unsupported(x: jax.Array, w: Packed, *others: jax.Array) -> str | None:
    """Why the kernel cannot serve these arrays, or None."""
    if others:
        return "the product is gated by other numbers; the kernel does not read any"
    if reason := mosaic.unsupported(x, w):
        return reason
    if w.size < LEAST_WEIGHTS:
        return f"the matrix has {w.size} weights; the kernel is made for {LEAST_WEIGHTS} and more"
    if x.shape[0] > MOST_ROWS:
        return f"x has {x.shape[0]} rows; the kernel takes at most {MOST_ROWS}"
    return None


def pads(rows: int) -> bool:
    """Whether XLA pads so many rows of x."""
    return rows > 8 and rows % 8 != 0


def takes_codes(rows: int, w: Packed) -> bool:
    """Whether so many rows are rounded to codes for a product with this matrix, which multiplies codes."""
    return w.takes_codes and rows >= LEAST_CODES


def choose_tiles(
    rows: int, outputs: int, inputs: int, bits: int, *, matrices: int = 1, splits: int | None = 1, codes: bool = False, slim: bool = False
) -> Tiles:
    """The tiles for a product of `rows` rows with [matrices, outputs, inputs] codes of so many bits. splits: as for `linear`. codes:
    whether rows are codes of 8 bits too. slim: whether programs of many rows must leave registers for those of other kernels."""
    padded, blocks = -(-rows // 8) * 8, inputs // BLOCK

    def fitting(wide: int, deep: int, step: int) -> list[Tiles]:
        size, sums = Tiles(1, wide, deep, step, 1).room(matrices, bits, padded, 1 if codes else 2)
        stages = min(4 if step > 2 else 6, (SHARED_MEMORY - sums) // size)
        if blocks % step or stages < min(3, blocks // step):
            return []
        counts = range(1, min(splits or MOST_SPLITS, blocks // step) + 1)
        # How many products can run at once. Where a thread lacks registers for two, ptxas has every instruction of a product wait for the
        # one before (its note C7512). It does not count those that the copying warpgroup gives up: see `registers`.
        left = mosaic.registers(wide * deep) - OTHERS - matrices * padded // 2
        if left < 0:  # ptxas refuses products whose sums a thread cannot hold
            return []
        if codes:
            left -= matrices * padded // 8 if deep > 1 else 0  # sums of another warpgroup on their way
        operands = left // (OPERAND // 2 if codes else OPERAND)
        if codes and operands < 1:
            return []
        flying = 0 if operands < 2 else 1 if padded > 64 else 4
        found = [Tiles(1, wide, deep, step, stages, count, flying) for count in counts]
        if padded <= JOINED_ROWS and joins(pl.cdiv(outputs // BLOCK, wide), blocks // step):
            found.append(dataclasses.replace(found[0], joined=True))
        return found

    def time(tiles: Tiles) -> float:  # about so many microseconds on an H200
        wide, steps = tiles.wide * matrices, pl.cdiv(blocks // tiles.step, tiles.splits)
        if padded > 64:  # products, and the rows that all of them read, fitted to measured times
            step = tiles.step * padded * (wide + bits / 8) * MULTIPLY
        else:
            step = tiles.step * wide * 512 * bits * READ
        programs = pl.cdiv(outputs // BLOCK, tiles.wide) * tiles.splits
        parts = 8 * tiles.splits * outputs * padded * READ / dialect.MULTIPROCESSORS  # each is written and read once
        waves = (programs + JOINING / steps) / PROGRAMS if tiles.joined else pl.cdiv(programs, PROGRAMS)
        return waves * (steps + START) * step + parts

    if padded > 64:
        usual, others = ((3, 1, 2), (2, 1, 2), (1, 2, 2)), ((2, 1, 1), (1, 1, 2), (1, 1, 1))
        choices = (others[1:], usual, others) if slim else (usual, others)
        tried = ([tiles for shape in shapes for tiles in fitting(*shape)] for shapes in choices)
        return min(next(filter(None, tried)), key=time)
    if matrices == 1:
        widest = [(4, 1, 2)] if bits == 8 and padded >= WIDEST_ROWS and outputs >= WIDEST_OUTPUTS else []
        shapes = (*widest, (1 if outputs <= FEW_OUTPUTS else 2, 2, 4), (2, 2, 2), (2, 1, 1))
    else:
        # Two blocks of outputs halve what is read of x, but give each program less than two tiles. Codes of 8 bits are unpacked by two
        # warpgroups as fast as they are read, and two have the registers for more rows.
        joined = [tiles for tiles in fitting(2, 1 if bits == 8 and padded > 24 else 2, 2) if tiles.joined]
        # Of 8 rows and codes of 8 bits, joining costs a little, and pays where many programs would have nothing to do in the end.
        waves = outputs / BLOCK / PROGRAMS
        if joined and (padded > 8 or bits == 4 or waves < 0.8 * math.ceil(waves)):
            return joined[0]
        # Four that share sums lack the registers to put codes in order.
        shapes = ((1, 4, 4), (1, 3, 3), (1, 2, 2), (1, 1, 1))[codes:] if padded <= 40 else ((1, 2, 2), (1, 1, 1))
    return min(next(filter(None, (fitting(*shape) for shape in shapes))), key=time)


def joins(tiles: int, steps: int) -> bool:
    """Whether it pays that programs have equal parts of all steps of a product, so that two may share a tile.

    One then waits for the other. So all must run at once, and no third program may share the tile."""
    share = pl.cdiv(tiles * steps, PROGRAMS)
    return multiprocessors() >= PROGRAMS < tiles < 2 * PROGRAMS and steps - 1 <= share and share + JOINING < 2 * steps


def linear(x, w, splits: int | None = 1):
    """See `pallas_kernels.linear.linear`."""
    parts = _alone(x, w, splits)
    return parts[0] if parts.dtype == x.dtype else summed(parts, x.dtype)


def partials(x, w, splits: int | None = None, *, launch_dependents: bool = False):
    """See `pallas_kernels.linear.partials`."""
    return _call(x, w, 1, _tiles(x, w, splits), jnp.float32, launch_dependents)


def gated(x, gate_up, activation=GELU, *, codes: bool = False, launch_dependents: bool = False):
    """See `pallas_kernels.linear.gated`. An activation other than GELU's takes a second kernel."""
    few = gate_up.shape[-2] // BLOCK < LEAST_TILES  # as in the dense part of a mixture, beside which its router's kernels run
    if few or activation != GELU or x.shape[0] > (MOST_GATED if gate_up.size < LARGE else MOST_GATED_LARGE):
        parts = _alone(x, gate_up.flat(), None if few else 1, launch_dependents=True, slim=few)
        return (activated_codes if codes else activated)(parts, activation, x.dtype, launch_dependents=launch_dependents)
    return _call(x, gate_up, 2, _tiles(x, gate_up, matrices=2), x.dtype, launch_dependents)[0]


def _alone(x: jax.Array | Rounded, w: Packed, splits: int | None, launch_dependents: bool = False, slim: bool = False) -> jax.Array:
    """The product in x's dtype [1, N, O], or its parts in float32."""
    tiles = _tiles(x, w, splits, slim=slim)
    return _call(x, w, 1, tiles, x.dtype if tiles.splits == 1 else jnp.float32, launch_dependents)


def _tiles(x: jax.Array | Rounded, w: Packed, splits: int | None = 1, matrices: int = 1, slim: bool = False) -> Tiles:
    *_, outputs, inputs = w.shape
    settings = {"matrices": matrices, "splits": splits, "codes": takes_codes(x.shape[0], w), "slim": slim}
    return choose_tiles(x.shape[0], outputs, inputs, KINDS[w.kind].bits, **settings)


# A program has many products alike, and to trace and lower one takes a few tenths of a second.
@jax.jit(static_argnames=("matrices", "tiles", "dtype", "launch_dependents"))
def _call(x: jax.Array | Rounded, w: Packed, matrices: int, tiles: Tiles, dtype: Any, launch_dependents: bool = False) -> jax.Array:
    rows, arrays = x.shape[0], dict[str, Any]({"x": x})
    padded = -(-rows // 8) * 8  # rows are copied in tiles of eight, so there must be fewer than eight, or a multiple
    if isinstance(x, Rounded):
        arrays["x"], arrays["x_scales"] = x.rows, x.scales
    elif takes_codes(rows, w):
        arrays["x"], arrays["x_scales"] = float8_rows.codes(x, launch_dependents=True)
    elif pads(rows):
        arrays["x"] = jnp.pad(x, ((0, padded - rows), (0, 0)))
    outputs, steps = w.shape[-2], w.shape[-1] // BLOCK // tiles.step
    groups = pl.cdiv(outputs // BLOCK, tiles.at_once)
    # Programs have equal parts of all steps, in order; or they take tiles, or splits of tiles, in turn.
    share = pl.cdiv(groups * steps, PROGRAMS) if tiles.joined else pl.cdiv(steps, tiles.splits)
    splits = 1 if tiles.joined else pl.cdiv(steps, share)
    programs = pl.cdiv(groups * steps, share) if tiles.joined else min(groups * splits, PROGRAMS)

    def works(refs, program):
        if tiles.joined:
            return mosaic.shares(groups, steps, share, program)
        return mosaic.in_turn(groups * splits, program, programs)

    def locate(refs, program, i):
        zero = jnp.minimum(i, 0)  # rows past the last are copied as zeros, but JAX 0.12 refuses a slice that it knows to end there
        if tiles.joined:
            tile, first, count = mosaic.shared(groups, steps, share, program, i)
            return mosaic.Piece((), tile, zero, first, count)
        number = program + i * programs
        tile, split = jax.lax.div(number, splits), jax.lax.rem(number, splits)
        first = split * share
        return mosaic.Piece((), tile, zero, first, jnp.minimum(share, steps - first))

    def finish(refs, piece, block, totals):
        totals = [total.astype(dtype) for total in totals]
        value = GELU(*totals) if matrices == 2 else totals[0]
        mosaic.store(value, refs["out"].at[0 if tiles.joined else jax.lax.div(piece.first, share)], block)

    return mosaic.call(
        arrays,
        w,
        {"out": jax.ShapeDtypeStruct((splits, rows, outputs), dtype)},
        tiles,
        name=f"packed_{'codes_' if 'x_scales' in arrays else ''}{'gated' if matrices == 2 else 'linear'}",
        rows=padded,
        matrices=matrices,
        programs=programs,
        works=works,
        locate=locate,
        finish=finish,
        ahead=True,
        launch_dependents=launch_dependents,
    )["out"]
