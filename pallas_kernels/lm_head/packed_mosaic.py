"""The fused head for a packed table in the Mosaic GPU dialect, for Hopper: the products of `linear.packed_mosaic`, and `mosaic_choice`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.dialect import pl
from pallas_kernels.linear import packed_mosaic as linear
from pallas_kernels.linear.packed_mosaic import PROGRAMS
from pallas_kernels.lm_head.mosaic_choice import Choice
from pallas_kernels.lm_head.triton import too_many
from pallas_kernels.packed import BLOCK, KINDS, Packed, mosaic

MOST_ROWS = 64


def unsupported(hidden: jax.Array, table: Packed, suppressed: tuple[int, ...]) -> str | None:
    """Why the kernel cannot serve this, or None."""
    if len(hidden) > MOST_ROWS:
        return f"there are {len(hidden)} hidden states; the kernel takes at most {MOST_ROWS}"
    return linear.unsupported(hidden, table) or too_many(suppressed)


def choose_tiles(rows: int, table: Packed) -> mosaic.Tiles:
    """The tiles for so many rows, padded, of hidden states."""
    bits, (size, width) = KINDS[table.kind].bits, table.shape
    tiles = linear.choose_tiles(rows, size, width, bits)
    step, sums = tiles.room(1, bits, rows)
    stages = (mosaic.SHARED_MEMORY - sums - Choice.room(rows, tiles.wide)) // step
    return dataclasses.replace(tiles, stages=min(tiles.stages, stages), joined=False)


def lm_head(
    hidden: jax.Array,
    table: Packed,
    keys: jax.Array,
    temperature: jax.Array,
    softcap: float | None,
    suppressed: tuple[int, ...],
    first_id: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.lm_head.lm_head`."""
    (rows, width), size = hidden.shape, table.shape[0]
    padded = -(-rows // 8) * 8
    tiles = choose_tiles(padded, table)
    pieces, steps = pl.cdiv(size // BLOCK, tiles.at_once), width // BLOCK // tiles.step
    programs = min(pieces, PROGRAMS)
    choice = Choice(padded, size, tiles.wide, tiles.deep, programs, softcap, suppressed)
    x = jnp.pad(hidden, ((0, padded - rows), (0, 0))) if linear.pads(rows) else hidden

    def locate(refs, program, i):
        zero = jnp.minimum(i, 0)  # rows past the last are copied as zeros, but JAX 0.12 refuses a slice that it knows to end there
        return mosaic.Piece((), program + i * programs, zero, jnp.int32(0), jnp.int32(steps))

    found = mosaic.call(
        {"x": x} | choice.arrays(keys, temperature, first_id),
        table,
        choice.out,
        tiles,
        name="packed_lm_head",
        rows=padded,
        matrices=1,
        programs=programs,
        works=lambda refs, program: mosaic.in_turn(pieces, program, programs),
        locate=locate,
        finish=lambda refs, piece, block, totals: choice.choose(refs, totals[0], block * BLOCK),
        scratch=choice.scratch,
        begin=choice.begin,
        end=lambda refs: choice.end(refs, jax.lax.axis_index("program")),
        ahead=True,
    )
    return choice.best(found, rows)
