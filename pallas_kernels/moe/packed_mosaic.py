"""The mixture of packed experts for Hopper: a kernel in the Triton dialect sorts rows, two in the Mosaic GPU dialect multiply.

`arrange` copies the rows of each expert's pairs to consecutive places, from a multiple of 8 on, and lists tiles: some rows of one expert.
`gate_up` and `down` run over the tiles and, of each, blocks of outputs, on one program a multiprocessor; `pallas_kernels.packed.mosaic`
says how one multiplies.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.activation import GELU
from pallas_kernels.dialect import pl, plgpu
from pallas_kernels.moe.reference import Choices
from pallas_kernels.moe.triton import group
from pallas_kernels.packed import BLOCK, KINDS, Packed, mosaic
from pallas_kernels.packed.mosaic import SHARED_MEMORY

PROGRAMS = dialect.MULTIPROCESSORS
EIGHT = 8  # rows that a product counts in, and that are copied to shared memory together
COLUMNS = 512  # of x that a program of `arrange` copies
FEW_PAIRS = 64  # up to so many, programs have few tiles each, and blocks of outputs of two warpgroups, or longer steps, are faster
MOST_SHARE = 24  # pairs of an expert, on average: with more, tiles of many rows are multiplied faster by `packed_triton`


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut."""

    rows: int  # most pairs of a tile, a multiple of 8
    gate_up: mosaic.Tiles
    down: mosaic.Tiles


def choose_tiles(pairs: int, experts: int, bits: int) -> Tiles:
    """The tiles for this many pairs, with codes of so many bits. Most experts' pairs should fit in one tile; rows of x cost time too."""
    share = pairs / experts
    rows = 8 if share <= 4 else 16 if share <= 12 else 32

    def fitting(wide: int, deep: int, step: int, matrices: int) -> mosaic.Tiles:
        size, sums = mosaic.Tiles(1, wide, deep, step, 1).room(matrices, bits, rows)
        return mosaic.Tiles(1, wide, deep, step, min(12, (SHARED_MEMORY - sums) // size))

    if pairs <= FEW_PAIRS:
        return Tiles(rows, fitting(2, 2, 2, 2), fitting(4, 1, 2, 1))
    return Tiles(rows, fitting(1, 4, 4, 2), fitting(4, 1, 1, 1))


def unsupported(x: jax.Array, gate_up_proj: Any, down_proj: Any, pairs: int) -> str | None:
    """Why the kernels cannot serve these arrays, or None."""
    if not isinstance(gate_up_proj, Packed):
        return "the weights are not packed"
    for w in (gate_up_proj, down_proj):
        if reason := mosaic.unsupported(x, w):
            return reason
    if pairs > MOST_SHARE * gate_up_proj.shape[0]:
        return f"{pairs} pairs chose {gate_up_proj.shape[0]} experts; the kernel takes at most {MOST_SHARE} for each"
    return None


def outputs(x, gate_up_proj, down_proj, weights, ids, groups=None, *, activation=GELU, launch_dependents=False, tiles=None):
    """See `pallas_kernels.moe.outputs`."""
    count, _, inner, hidden = gate_up_proj.shape
    pairs, top_k = ids.size, ids.shape[1]
    counts, lists = groups or group(ids, count)
    tiles = tiles or choose_tiles(pairs, count, KINDS[gate_up_proj.kind].bits)
    table, places, rows = arrange(x, counts, lists, tiles.rows, top_k)

    def call(name, x, w, cut, columns, finish, ahead, launch_dependents):
        out_blocks = w.shape[-2] // BLOCK
        groups = pl.cdiv(out_blocks, cut.at_once)
        steps = pl.cdiv(w.shape[-1] // BLOCK, cut.step)

        def works(refs, program):
            return mosaic.in_turn(refs["table"][3, 0] * groups, program, PROGRAMS)

        def locate(refs, program, i):
            number = program + i * PROGRAMS
            tile = jax.lax.div(number, groups)
            return Piece(
                matrices=(refs["table"][0, tile],),
                tile=jax.lax.rem(number, groups),
                row=refs["table"][1, tile],
                first=jnp.int32(0),
                count=jnp.int32(steps),
                pairs=refs["table"][2, tile],
            )

        return mosaic.call(
            {"x": x, "table": table, "places": places},
            w,
            {"out": columns},
            cut,
            name=name,
            rows=tiles.rows,
            matrices=2 if name.endswith("gate_up") else 1,
            programs=PROGRAMS,
            works=works,
            locate=locate,
            finish=finish,
            ahead=ahead,
            launch_dependents=launch_dependents,
        )["out"]

    def finish_gate_up(refs, piece, block, totals):
        mosaic.store(activation(*totals).astype(x.dtype), refs["out"], block, piece.row, piece.pairs)

    def finish_down(refs, piece, block, totals):
        mosaic.store(totals[0].astype(x.dtype), refs["out"], block, piece.row, piece.pairs, refs["places"])

    act = jax.ShapeDtypeStruct((rows.shape[0], inner), x.dtype)
    act = call("packed_moe_gate_up", rows, gate_up_proj, tiles.gate_up, act, finish_gate_up, False, True)
    out = jax.ShapeDtypeStruct((pairs, hidden), x.dtype)
    # It may start before `gate_up` has ended, but not before `arrange` has: `gate_up` waits for that before it lets others start.
    out = call("packed_moe_down", act, down_proj, tiles.down, out, finish_down, True, launch_dependents)
    return Choices(out, weights, ids, count)


@dataclasses.dataclass(frozen=True)
class Piece(mosaic.Piece):
    """A block of outputs of one tile."""

    pairs: Any  # of the tile


def arrange(
    x: jax.Array, counts: jax.Array, pairs: jax.Array, rows: int, top_k: int, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tiles of at most `rows` pairs, and the rows of x in their order.

    counts, pairs: see `pallas_kernels.moe.Groups`. Returns the table [4, most tiles] int32: a tile's expert, its first place, its number
    of pairs, and, in the first column alone, how many tiles there are; the pair of each place [P] int32; and its row of x [P, H]. What
    no pair has is undefined.
    """
    count, width = len(counts), x.shape[1]
    total = x.shape[0] * top_k
    most = (total + min(total, count) * (rows - 1)) // rows
    places = -(-(total + min(total, count) * (EIGHT - 1)) // EIGHT) * EIGHT
    places = max(places, rows)
    return dialect.call(
        functools.partial(_arrange, rows=rows, top_k=top_k),
        name="moe_arrange",
        grid=(count, pl.cdiv(width, COLUMNS)),
        out_shape=[
            jax.ShapeDtypeStruct((4, most), jnp.int32),
            jax.ShapeDtypeStruct((places,), jnp.int32),
            jax.ShapeDtypeStruct((places, width), x.dtype),
        ],
        num_warps=4,
        num_stages=1,
        launch_dependents=True,
        interpret=interpret,
    )(counts, pairs, x)


def _arrange(counts_ref, pairs_ref, x_ref, table_ref, places_ref, rows_ref, *, rows, top_k):
    (experts,), width = counts_ref.shape, x_ref.shape[1]
    expert, first_column = pl.program_id(0), pl.program_id(1) == 0
    lane = jnp.arange(pl.next_power_of_2(experts), dtype=jnp.int32)
    counts = plgpu.load(counts_ref.at[lane], mask=lane < experts, other=jnp.int32(0))
    tiles = pl.cdiv(counts, rows)
    earlier = lane < expert
    first = jnp.sum(jnp.where(earlier, pl.cdiv(counts, EIGHT) * EIGHT, 0))
    tile = jnp.sum(jnp.where(earlier, tiles, 0))
    count = jnp.sum(jnp.where(lane == expert, counts, 0))
    column = pl.program_id(1) * COLUMNS + jnp.arange(COLUMNS, dtype=jnp.int32)
    inside = None if width % COLUMNS == 0 else jnp.broadcast_to((column < width)[None, :], (EIGHT, COLUMNS))

    def copy(i, _):
        rank = i * EIGHT + jnp.arange(EIGHT, dtype=jnp.int32)
        real = rank < count
        pair = plgpu.load(pairs_ref.at[expert, rank], mask=real, other=jnp.int32(0))
        # Where there is nothing to store, the index is outside the array: the interpreter drops such an index but ignores the mask.
        place = jnp.where(real, first + rank, rows_ref.shape[0])
        kept = jnp.broadcast_to(real[:, None], (EIGHT, COLUMNS))
        kept = kept if inside is None else kept & inside
        found = plgpu.load(x_ref.at[(pair // top_k)[:, None], column[None, :]], mask=kept, other=jnp.zeros((), x_ref.dtype))
        plgpu.store(rows_ref.at[place[:, None], column[None, :]], found, mask=kept)
        pl.when(first_column)(lambda: plgpu.store(places_ref.at[place], pair, mask=real))

    jax.lax.fori_loop(0, pl.cdiv(count, EIGHT), copy, None)

    @pl.when(first_column)
    def _():
        def enter(i, _):
            table_ref[0, tile + i] = expert
            table_ref[1, tile + i] = first + i * rows
            table_ref[2, tile + i] = jnp.minimum(count - i * rows, rows)

        jax.lax.fori_loop(0, pl.cdiv(count, rows), enter, None)

    @pl.when(first_column & (expert == 0))
    def _():
        table_ref[3, 0] = jnp.sum(tiles)
