"""Products of few rows in the Triton dialect. A program has all rows, some output columns and a part of the sums.

So weights are read from memory once. For speed, all multiprocessors must read all the time. Each gets the same number of programs: a
program may have any number of columns (its tile is a power of two, but loads nothing past them). And each has enough bytes in flight.

Tensor cores want 64 rows in the left operand, which has a row for each output column. A program with fewer columns cuts the sums of each
into parts, and stacks the parts as rows. The right operand holds the same parts of the rows of x side by side. The product has every
part times every part; at the end we add up those where both parts have the same number. So nothing is read in vain, and the sums are
shorter by the number of parts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect, read_once
from pallas_kernels.activation import GELU
from pallas_kernels.dialect import MULTIPROCESSORS, pl, plgpu
from pallas_kernels.float8_rows import Rounded
from pallas_kernels.float8_rows.triton import abstract_codes, pieces_of, store_codes, warps
from pallas_kernels.linear.reference import summed

MOST_ROWS = 64
MOST_SPLITS = 8
LEFT, RIGHT = 64, 16  # least rows of a tensor core's left operand, least columns of its right one
SLICES = (128, 64)  # numbers of a part in a step: the first that divides the width, or else the last
LEAST_STAGES = 3
ACTIVATED = 1024  # outputs of a program of `activated`
LEAST_COLUMNS = 4
# A matrix of so few weights is read again for each block of rows, from the L2 cache: most weights, most rows, least rows of a block.
SMALL, SMALL_ROWS, ROW_BLOCK = 1 << 20, 160, 16
SMALL_PROGRAMS = 2  # most programs of a multiprocessor that share the sums of such a product
PROGRAM_BYTES = 98_304  # of shared memory: an L4 has 101,376 for a program, an H200 room for two such programs
IN_FLIGHT = 65_536  # bytes of weights in flight for each multiprocessor


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a product is cut."""

    columns: int  # output columns of a program
    splits: int  # programs that share the sums
    slice: int  # numbers of a part in a step
    num_warps: int
    num_stages: int
    rows: int = 0  # of x in a program: a power of two, or 0 for all of them

    @property
    def tile(self) -> int:
        """The power of two that holds the columns."""
        return pl.next_power_of_2(self.columns)

    @property
    def parts(self) -> int:
        """Parts of a column in the left operand."""
        return max(1, LEFT // self.tile)

    @property
    def depth(self) -> int:
        """Columns of x in a step."""
        return self.parts * self.slice

    def height(self, rows: int) -> int:
        """Rows of x in a program, padded."""
        return max(self.rows or pl.next_power_of_2(rows), RIGHT // self.parts)

    def step(self, rows: int, matrices: int, itemsize: int) -> int:
        """Bytes of shared memory of a step in flight."""
        return (matrices * self.tile + self.height(rows)) * self.depth * itemsize


def multiprocessors() -> int:
    """Multiprocessors of this machine's device, or an H200's if it has none."""
    return getattr(jax.devices()[0], "core_count", None) or MULTIPROCESSORS


def choose_tiles(rows: int, columns: int, width: int, itemsize: int, *, matrices: int = 1, splits: int | None = 1, tile: int = 0) -> Tiles:
    """The tiles for a product [rows, width] x [matrices, columns, width].

    splits: None for as many as fill the GPU. tile: most columns of a program; 0 for what seems best.
    """
    cores = multiprocessors()
    if matrices * columns * width <= SMALL and rows > ROW_BLOCK and itemsize == 2 and not tile:
        for block, height in ((16, ROW_BLOCK), (32, ROW_BLOCK), (64, ROW_BLOCK), (64, 2 * ROW_BLOCK), (64, 4 * ROW_BLOCK)):
            programs, count = pl.cdiv(columns, block) * pl.cdiv(rows, height), 1
            while splits is None and count < min(MOST_SPLITS, width // 512) and programs * (count + 1) <= SMALL_PROGRAMS * cores:
                count += 1
            if programs <= cores:
                return Tiles(min(block, columns), count, SLICES[-1], 4, LEAST_STAGES + 1, height)
    # Each block of columns reads all rows again, so with many rows the blocks are wide.
    if splits is None:
        tile, splits = tile or (LEFT if rows > 16 else 16), 1
        while splits < min(MOST_SPLITS, width // 512) and columns * splits <= tile * cores:
            splits += 1
    elif not tile:
        least = 8 if rows <= 8 else 16 if rows <= 16 else 32
        tile = LEFT if rows > 16 else LEFT // matrices
        while tile > least and columns * splits <= tile * cores:
            tile //= 2
    waves = pl.cdiv(columns * splits, tile * cores)
    # So many columns that each multiprocessor gets this many programs.
    block = min(tile, max(LEAST_COLUMNS, pl.next_power_of_2(rows) // 4 + 1, pl.cdiv(columns, max(1, waves * cores // splits))))
    if itemsize > 2:  # no tensor cores: parts would cost as much as they save
        return Tiles(LEFT, splits, 32, 4, LEAST_STAGES)
    cuts = [Tiles(block, splits, numbers, 4, LEAST_STAGES) for numbers in SLICES]
    cut = next((c for c in cuts if width % c.depth == 0 and 4 * c.step(rows, matrices, itemsize) <= PROGRAM_BYTES), cuts[-1])
    in_flight = min(pl.cdiv(width, cut.depth), pl.cdiv(IN_FLIGHT, min(waves, 3) * matrices * block * cut.depth * itemsize))  # steps
    stages = max(LEAST_STAGES, 1 + in_flight)
    return dataclasses.replace(cut, num_stages=min(stages, PROGRAM_BYTES // cut.step(rows, matrices, itemsize)))


def unsupported(x: jax.Array, w: jax.Array, *others: jax.Array) -> str | None:
    """Why the kernels cannot serve these arrays, or None."""
    dtypes = [a.dtype.name for a in (x, w, *others)]
    if len(set(dtypes)) > 1:
        return f"the arrays are {', '.join(dtypes)}; the kernel needs one dtype"
    if dtypes[0] not in ("bfloat16", "float16", "float32"):
        return f"x is {dtypes[0]}; the kernel takes bfloat16, float16 and float32"
    if x.shape[0] > most_rows(w):
        return f"x has {x.shape[0]} rows; the kernel takes at most {most_rows(w)}"
    return None


def most_rows(w: Any) -> int:
    """The most rows that a kernel multiplies with this matrix or pair."""
    return SMALL_ROWS if math.prod(w.shape) <= SMALL and w.dtype.itemsize == 2 else MOST_ROWS


def pays(x: jax.Array, w: jax.Array, splits: int | None = 1) -> bool:
    """Whether the kernel is faster than XLA. It is not if a program reads much more of x than of w: with many rows and few columns."""
    tiles, rows, matrices = _tiles(x, w, splits), x.shape[0], math.prod(w.shape[:-2])
    return rows <= RIGHT or tiles.rows > 0 or 5 * matrices * tiles.columns >= 3 * tiles.height(rows)


def linear(x, w, splits: int | None = 1, *, interpret=False, tiles=None):
    """See `pallas_kernels.linear.linear`."""
    tiles = tiles or _tiles(x, w, splits)
    if tiles.splits > 1:
        return summed(partials(x, w, interpret=interpret, tiles=tiles), x.dtype)
    return _call(_linear, "linear", tiles, x, w, dtype=x.dtype, launch_dependents=False, interpret=interpret)[0]


def partials(x, w, splits=None, *, launch_dependents=False, interpret=False, tiles=None):
    """See `pallas_kernels.linear.partials`."""
    settings = {"dtype": jnp.float32, "launch_dependents": launch_dependents, "interpret": interpret}
    return _call(_linear, "linear", tiles or _tiles(x, w, splits), x, w, **settings)


def gated(x, gate_up, activation=GELU, *, launch_dependents=False, interpret=False, tiles=None):
    """See `pallas_kernels.linear.gated`."""
    kernel = functools.partial(_gated, activation=activation)
    settings = {"dtype": x.dtype, "launch_dependents": launch_dependents, "interpret": interpret}
    return _call(kernel, "gated", tiles or _tiles(x, gate_up), x, gate_up, **settings)[0]


def gated_by(x, w, u, index, *, launch_dependents=False, interpret=False, tiles=None):
    """See `pallas_kernels.linear.gated_by`."""
    settings = {"dtype": x.dtype, "launch_dependents": launch_dependents, "interpret": interpret}
    return _call(_gated_by, "gated_by", tiles or _tiles(x, w), x, w, u, index.reshape(1), **settings)[0]


def activated(parts, activation, dtype, *, launch_dependents=False, interpret=False):
    """What `pallas_kernels.linear.gated` makes of both its products, which are side by side and in parts: [S, N, 2 I] -> [N, I]."""
    _, rows, columns = parts.shape
    return dialect.call(
        functools.partial(_activated, activation=activation),
        name="activated",
        grid=(rows, pl.cdiv(columns // 2, ACTIVATED)),
        out_shape=jax.ShapeDtypeStruct((rows, columns // 2), dtype),
        num_warps=4,
        num_stages=1,
        launch_dependents=launch_dependents,
        interpret=interpret,
    )(parts)


def activated_codes(parts, activation, dtype, *, launch_dependents=False, interpret=False):
    """As `activated`, with the rows rounded to codes. A program has a whole row."""
    _, rows, columns = parts.shape
    width = columns // 2
    codes, scales = dialect.call(
        functools.partial(_activated_codes, activation=activation, dtype=dtype),
        name="activated_codes",
        grid=(rows,),
        out_shape=abstract_codes(rows, width),
        num_warps=warps(width),
        num_stages=1,
        launch_dependents=launch_dependents,
        interpret=interpret,
    )(parts)
    return Rounded(codes, scales, (rows,), dtype)


def _tiles(x: jax.Array, w: jax.Array, splits: int | None = 1) -> Tiles:
    *matrices, columns, width = w.shape
    return choose_tiles(x.shape[0], columns, width, x.dtype.itemsize, matrices=math.prod(matrices), splits=splits)


def _call(kernel: Any, name: str, tiles: Tiles, x: jax.Array, w: jax.Array, *others: jax.Array, dtype: Any, **settings: Any) -> jax.Array:
    """The product's parts, [splits, N, O]. It has fewer splits than the tiles if some would be empty. settings: of `dialect.call`."""
    (rows, width), columns = x.shape, w.shape[-2]
    steps = pl.cdiv(width, tiles.depth)
    share = pl.cdiv(steps, tiles.splits)
    splits = pl.cdiv(steps, share)
    return dialect.call(
        functools.partial(kernel, tiles=tiles, share=share),
        name=name,
        grid=(pl.cdiv(columns, tiles.columns), splits, pl.cdiv(rows, tiles.height(rows))),
        out_shape=jax.ShapeDtypeStruct((splits, rows, columns), dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **settings,
    )(x, w, *others)


def _split(lane, size):
    """Quotients and remainders of numbers, which must not be negative."""
    return jax.lax.div(lane, jnp.full_like(lane, size)), jax.lax.rem(lane, jnp.full_like(lane, size))


def _load(ref, index, row, at, mask, ends, policy=None):
    """The numbers of the matrix ref[*index] in rows `row` [R, 1] and columns `at` [R, S]: [R, S].

    Zeros where `mask` [R, 1] is False, if there is one. ends: whether the width may end within a step; zeros past it too.
    """
    if mask is not None:
        mask = jnp.broadcast_to(mask, at.shape)
    if ends:
        inside = at < ref.shape[-1]
        mask = inside if mask is None else mask & inside
    other = None if mask is None else jnp.zeros((), ref.dtype)
    return plgpu.load(ref.at[*index, row, at], mask=mask, other=other, eviction_policy=policy)


def _products(x_ref, w_ref, indices, tiles, share):
    """A program's columns [C, 1], its rows [1, R], which pairs of them to store [C, R], and its part of the product with each w[*index],
    [C, R] float32."""
    (rows, width), columns = x_ref.shape, w_ref.shape[-2]
    tile, parts, depth, height = tiles.tile, tiles.parts, tiles.depth, tiles.height(rows)
    lane, left_part = _split(jnp.arange(tile * parts, dtype=jnp.int32), parts)
    right_part, row = _split(jnp.arange(parts * height, dtype=jnp.int32), height)
    row = pl.program_id(2) * height + row
    column = pl.program_id(0) * tiles.columns + lane
    place = jnp.arange(tiles.slice, dtype=jnp.int32)[None, :]
    left_at, right_at = (part[:, None] * tiles.slice + place for part in (left_part, right_part))
    left_mask = None if tile == tiles.columns and columns % tile == 0 else ((lane < tiles.columns) & (column < columns))[:, None]
    right_mask = None if rows % height == 0 else (row < rows)[:, None]
    first, steps = pl.program_id(1) * share, pl.cdiv(width, depth)
    precision = "highest" if x_ref.dtype == jnp.float32 else None

    def step(i, sums):
        start = (first + i) * depth
        x = _load(x_ref, (), row[:, None], start + right_at, right_mask, width % depth)
        ws = [_load(w_ref, index, column[:, None], start + left_at, left_mask, width % depth, read_once.POLICY) for index in indices]
        return tuple(s + plgpu.dot(w, x, trans_b=True, precision=precision) for s, w in zip(sums, ws, strict=True))

    zero = jnp.zeros((tile * parts, parts * height), jnp.float32)
    mine = share if steps % share == 0 else jnp.minimum(share, steps - first)
    sums = jax.lax.fori_loop(0, mine, step, (zero,) * len(indices))
    if parts > 1:
        same = left_part[:, None] == right_part[None, :]
        sums = [jnp.where(same, s, 0.0).reshape(tile, parts, -1).sum(axis=1).reshape(tile, parts, height).sum(axis=1) for s in sums]
    lane, row = jnp.arange(tile, dtype=jnp.int32)[:, None], pl.program_id(2) * height + jnp.arange(height, dtype=jnp.int32)[None, :]
    column = pl.program_id(0) * tiles.columns + lane
    return column, row, (lane < tiles.columns) & (column < columns) & (row < rows), sums


def _store(out_ref, column, row, mask, values):
    plgpu.store(out_ref.at[pl.program_id(1), row, column], values.astype(out_ref.dtype), mask=mask)


def _linear(x_ref, w_ref, out_ref, *, tiles, share):
    column, row, mask, (total,) = _products(x_ref, w_ref, [()], tiles, share)
    _store(out_ref, column, row, mask, total)


def _gated(x_ref, w_ref, out_ref, *, activation, tiles, share):
    column, row, mask, (gate, up) = _products(x_ref, w_ref, [(0,), (1,)], tiles, share)
    _store(out_ref, column, row, mask, activation(gate.astype(out_ref.dtype), up.astype(out_ref.dtype)))


def _activated(parts_ref, out_ref, *, activation):
    width = parts_ref.shape[-1] // 2
    column = pl.program_id(1) * ACTIVATED + jnp.arange(ACTIVATED, dtype=jnp.int32)
    inside = column < width
    plgpu.store(out_ref.at[pl.program_id(0), column], _act(parts_ref, column, inside, activation, out_ref.dtype), mask=inside)


def _activated_codes(parts_ref, out_ref, scale_ref, *, activation, dtype):
    pieces = pieces_of(out_ref.shape[1], lambda at: _act(parts_ref, at, None, activation, dtype).astype(jnp.float32))
    store_codes(pieces, out_ref, scale_ref)


def _act(parts_ref, column, mask, activation, dtype):
    """What the activation makes of the program's row in these columns."""
    splits, _, columns = parts_ref.shape
    other = None if mask is None else jnp.zeros((), parts_ref.dtype)

    def product(first):
        parts = [plgpu.load(parts_ref.at[i, pl.program_id(0), first + column], mask=mask, other=other) for i in range(splits)]
        return functools.reduce(jnp.add, [part.astype(jnp.float32) for part in parts]).astype(dtype)

    return activation(product(0), product(columns // 2)).astype(dtype)


def _gated_by(x_ref, w_ref, u_ref, index_ref, out_ref, *, tiles, share):
    column, row, mask, (gate,) = _products(x_ref, w_ref, [()], tiles, share)
    u = plgpu.load(u_ref.at[row, index_ref[0], column], mask=mask, other=jnp.zeros((), u_ref.dtype))
    _store(out_ref, column, row, mask, GELU(gate.astype(out_ref.dtype), u))
