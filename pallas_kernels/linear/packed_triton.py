"""Products of few rows with packed matrices, in the Triton dialect. A program has all rows, some output blocks and a part of the sums.

Weights are the left operand of the matrix unit, straight from registers (see `pallas_kernels.packed.tile`), and rows of x the right one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.activation import GELU
from pallas_kernels.dialect import pl, plgpu
from pallas_kernels.linear.reference import summed
from pallas_kernels.linear.triton import multiprocessors
from pallas_kernels.packed import BLOCK, Packed, tile
from pallas_kernels.packed.matrix import LANES, WORDS

MOST_ROWS = 256
MOST_SPLITS = 12
LEAST_HEIGHT = 16  # rows of x in a product
# Rows of x that a program sums up, times matrices: more do not fit into registers. First with `wgmma`, then with `mma.sync`, which takes
# x from registers too: there a program of more than 64 rows has 8 warps.
MOST_SUMS = 320, 256
PARTS = (128, 64, 32, 16)
SMALL = 1 << 20  # so few weights lie in the L2 cache, where programs with other rows find them again
# Depths and stages of a program, best first: the first that fits is taken.
PIPELINES = ((4, 4), (4, 3), (2, 4), (2, 3), (2, 2), (1, 4), (1, 3), (1, 2))
# Up to so many rows a program has so many bytes of shared memory, and an H200's multiprocessor runs so many programs.
BUDGETS = ((16, 57_344, 4), (64, 73_728, 3), (MOST_ROWS, 101_376, 2))
SCRATCH = BLOCK * BLOCK  # bytes for a block of weights that goes through shared memory on its way to tensor cores older than Hopper's


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a product is cut."""

    rows: int  # most rows of a program
    blocks: int  # of 64 outputs, of a program
    depth: int  # blocks of 64 inputs in a step
    splits: int  # programs that share the sums
    num_warps: int
    num_stages: int

    def shared(self, w: Packed, itemsize: int) -> int:
        """Bytes of shared memory of a program, of which x's numbers have `itemsize`."""
        groups, slabs = w.groups or 0, w.words.shape[-3]
        numbers = 1 if w.zero is None else 2
        block = 4 * LANES * WORDS * slabs + 2 * LANES * groups * w.scale.dtype.itemsize * numbers
        rows = sum(heights(min(self.rows, MOST_ROWS)))
        weights = math.prod(w.shape[:-2]) * self.blocks * block
        return self.depth * ((self.num_stages - 1) * weights + self.num_stages * rows * BLOCK * itemsize)


def heights(rows: int) -> tuple[int, ...]:
    """Powers of two that together hold the rows: one or, where that saves a quarter and registers suffice, two."""
    whole = max(LEAST_HEIGHT, pl.next_power_of_2(rows))
    rest = max(LEAST_HEIGHT, pl.next_power_of_2(max(1, rows - whole // 2)))
    alone = rows <= LEAST_HEIGHT or rest > whole // 4 or tile.paired() and rows > BLOCK
    return (whole,) if alone else (whole // 2, rest)


def choose_tiles(x: jax.Array, w: Packed, splits: int | None = 1) -> Tiles:
    """The tiles that serve a product. splits: None for as many as fill the GPU."""
    *matrices, columns, width = w.shape
    count, rows = math.prod(matrices), x.shape[0]
    _, budget, room = next(found for found in BUDGETS if rows <= found[0])
    # A thread should load at least 4 bytes of scales in a step: fewer are not copied asynchronously.
    least = 1 if w.groups is None else 8 // (w.groups * w.scale.dtype.itemsize)
    out, into, cores = pl.cdiv(columns, BLOCK), pl.cdiv(width, BLOCK), multiprocessors()
    small = w.size < SMALL
    most = max(1, min(MOST_SPLITS, into // (4 if small else 8))) if splits is None else splits
    # Programs of all rows, or of parts of them, which read the weights again.
    parts = [rows, *(part for part in PARTS if part < rows)]
    parts = [part for part in parts if count * sum(heights(part)) <= MOST_SUMS[tile.paired()]]
    if small:  # the fewest parts that nearly fill the GPU
        parts = [next((part for part in parts if pl.cdiv(rows, part) * out * most >= 0.7 * cores), parts[-1])]
        out *= pl.cdiv(rows, parts[0])
    warps = [8 if tile.paired() and part > BLOCK else 4 for part in parts]
    fitting = [Tiles(part, 1, depth, 1, n, stages) for part, n in zip(parts, warps, strict=True) for depth, stages in PIPELINES]
    fitting.sort(key=lambda t: t.depth < least)

    def fits(tiles):
        shared = tiles.shared(w, x.dtype.itemsize)
        return shared <= budget and shared + tiles.depth * SCRATCH <= dialect.shared_memory()

    tiles = next(filter(fits, fitting), fitting[-1])
    if splits is not None:
        return dataclasses.replace(tiles, splits=splits)
    # A part of the sums is written and read once, beside the weights.
    share = 8 * rows / (width * w.words.shape[-3] / 2)

    def worth(splits):
        """The part of the GPU that is busy, and of the bytes that are weights."""
        waves = out * splits / cores
        busy = waves * waves / math.ceil(waves) / room if waves <= room else waves / math.ceil(waves / room) / room
        return busy / (1 + splits * (share + 0.01))

    return dataclasses.replace(tiles, splits=max(range(1, most + 1), key=worth))


def unsupported(x: jax.Array, w: Packed, *others: jax.Array) -> str | None:
    """Why the kernels cannot serve these arrays, or None."""
    if x.shape[0] > MOST_ROWS:
        return f"x has {x.shape[0]} rows; the kernel takes at most {MOST_ROWS}"
    if any(other.dtype != x.dtype for other in others):
        return f"x is {x.dtype.name} and u is {others[0].dtype.name}; the kernel needs one dtype"
    return tile.unsupported(w, x.dtype)


def linear(x, w, splits: int | None = 1, *, interpret=False, tiles=None):
    """See `pallas_kernels.linear.linear`."""
    tiles = tiles or choose_tiles(x, w, splits)
    if tiles.splits > 1:
        return summed(partials(x, w, interpret=interpret, tiles=tiles), x.dtype)
    return _call(_linear, "packed_linear", tiles, x, w, dtype=x.dtype, interpret=interpret)[0]


def partials(x, w, splits=None, *, interpret=False, tiles=None):
    """See `pallas_kernels.linear.partials`."""
    return _call(_linear, "packed_linear", tiles or choose_tiles(x, w, splits), x, w, dtype=jnp.float32, interpret=interpret)


def gated(x, gate_up, activation=GELU, *, interpret=False, tiles=None):
    """See `pallas_kernels.linear.gated`."""
    kernel = functools.partial(_gated, activation=activation)
    return _call(kernel, "packed_gated", tiles or choose_tiles(x, gate_up), x, gate_up, dtype=x.dtype, interpret=interpret)[0]


def gated_by(x, w, u, index, *, interpret=False, tiles=None):
    """See `pallas_kernels.linear.gated_by`. The matrix is small, so programs share the sums, and XLA adds them up."""
    gate = summed(partials(x, w, interpret=interpret, tiles=tiles), x.dtype)
    return GELU(gate, jax.lax.dynamic_index_in_dim(u, index, 1, keepdims=False))


def _call(kernel: Any, name: str, tiles: Tiles, x: jax.Array, w: Packed, *, dtype: Any, interpret: bool) -> jax.Array:
    """The product's parts, [splits, N, O]. It has fewer splits than the tiles if some would be empty."""
    form, rows = tile.form(w, interpret), x.shape[0]
    steps = pl.cdiv(pl.cdiv(form.width, BLOCK), tiles.depth)
    share = pl.cdiv(steps, tiles.splits)
    splits = pl.cdiv(steps, share)
    arrays = tile.arrays(w)
    return dialect.call(
        functools.partial(kernel, form=form, tiles=tiles, share=share),
        name=name,
        grid=(pl.cdiv(rows, tiles.rows), pl.cdiv(form.columns, BLOCK * tiles.blocks), splits),
        out_shape=jax.ShapeDtypeStruct((splits, rows, form.columns), dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        interpret=interpret,
    )(x, *arrays)


def products(x_ref, w_refs, indices, form, tiles, share):
    """Yields, for some of a program's rows, the outputs [C, 1], the rows [1, R], which pairs of them to store [C, R], and the program's
    part of the product with each w[*index], [C, R] float32."""
    rows = x_ref.shape[0]
    tall = heights(min(rows, tiles.rows))
    at = [pl.program_id(0) * tiles.rows + sum(tall[:i]) + jnp.arange(height, dtype=jnp.int32) for i, height in enumerate(tall)]

    def load(block):
        exact = rows % sum(tall) == 0
        return [tile.load_rows(x_ref, row, None if exact else row < rows, block, tiles.depth, form) for row in at]

    out = pl.program_id(1) * tiles.blocks + jnp.arange(tiles.blocks, dtype=jnp.int32)
    first, steps = pl.program_id(2) * share, pl.cdiv(form.width, BLOCK * tiles.depth)
    mine = share if steps % share == 0 else jnp.minimum(share, steps - first)
    sums = tile.products(load, tall, w_refs, indices, out, (first, mine), tiles.depth, form)
    column = pl.program_id(1) * tiles.blocks * BLOCK + jnp.arange(tiles.blocks * BLOCK, dtype=jnp.int32)[:, None]
    for row, *totals in zip(at, *sums, strict=True):
        yield column, row[None, :], (column < form.columns) & (row < rows)[None, :], totals


def _store(out_ref, column, row, mask, values):
    plgpu.store(out_ref.at[pl.program_id(2), row, column], values.astype(out_ref.dtype), mask=mask)


def _linear(x_ref, *refs, form, tiles, share):
    *w_refs, out_ref = refs
    for column, row, mask, (total,) in products(x_ref, w_refs, [()], form, tiles, share):
        _store(out_ref, column, row, mask, total)


def _gated(x_ref, *refs, activation, form, tiles, share):
    *w_refs, out_ref = refs
    for column, row, mask, (gate, up) in products(x_ref, w_refs, [(0,), (1,)], form, tiles, share):
        _store(out_ref, column, row, mask, activation(gate.astype(out_ref.dtype), up.astype(out_ref.dtype)))
