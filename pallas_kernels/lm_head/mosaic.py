"""The fused head in the Mosaic GPU dialect, for Hopper and up to 256 rows. Each program keeps each row's best token of all its tiles.

Products are those of `pallas_kernels.linear.mosaic`; `mosaic_choice` says how it chooses among them.
"""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels import dialect
from pallas_kernels.dialect import pl
from pallas_kernels.linear import mosaic as linear
from pallas_kernels.linear.mosaic import MOST_STAGES, SHARED_MEMORY, WORKERS, Tiles
from pallas_kernels.lm_head.mosaic_choice import Choice
from pallas_kernels.lm_head.triton import too_many
from pallas_kernels.registers import BLOCK

LEAST_ROWS, MOST_FASTEST = 33, 160  # rows with which the kernel is faster than Triton's and XLA's on an H200
MOST_LONG = 64  # rows up to which a step has 128 inputs
SHARED_ROWS = 97, 128  # rows of which two programs share what they read; others were not timed so


def unsupported(hidden: jax.Array, table: jax.Array, suppressed: tuple[int, ...]) -> str | None:
    """Why the kernel cannot serve this, or None."""
    return linear.unsupported(hidden, table) or too_many(suppressed)


def most_rows(table: jax.Array) -> int:
    """The most rows for which the kernel is the fastest with this table on the current device; 0 if it never is."""
    return MOST_FASTEST if linear.is_fastest(linear.LEAST_ROWS, table) else 0


def choose_tiles(rows: int, width: int) -> Tiles:
    """The tiles for this many rows of hidden states."""
    step, least, most = 128 if rows <= MOST_LONG and width % 128 == 0 else 64, *SHARED_ROWS
    tiles = Tiles(BLOCK, step=step, stages=1, cluster=2 if least <= rows <= most else 1)
    kept = Choice.room(tiles.padded(rows), WORKERS)
    return dataclasses.replace(tiles, stages=min(MOST_STAGES, (SHARED_MEMORY - kept) // tiles.shared(rows, 1)))


def lm_head(
    hidden: jax.Array,
    table: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    softcap: float | None,
    suppressed: tuple[int, ...],
    first_id: jax.Array | None,
    *,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.lm_head.lm_head`."""
    tiles = tiles or choose_tiles(*hidden.shape)
    works = pl.cdiv(table.shape[0], WORKERS * tiles.outputs)
    programs = min(pl.cdiv(works, tiles.cluster), dialect.MULTIPROCESSORS // tiles.cluster) * tiles.cluster
    choice = Choice(tiles.padded(hidden.shape[0]), table.shape[0], WORKERS, 1, programs, softcap, suppressed)

    def worker(refs, _):
        member = jax.lax.axis_index("member") if tiles.cluster > 1 else 0
        program = jax.lax.axis_index("program") * tiles.cluster + member
        choice.begin(refs)
        return lambda _, __, row, total: choice.choose(refs, total, row), lambda _: choice.end(refs, program)

    settings = {"out": choice.out, "arrays": choice.arrays(keys, temperature, first_id), "scratch": choice.scratch}
    found = linear.products(hidden, table.reshape(1, *table.shape), tiles, worker, name="lm_head", **settings)
    return choice.best(found, len(hidden))
