"""Times products of few rows beside XLA's on this machine's GPU: `python -m pallas_kernels.linear.bench`.

--shapes NAME and --rows 4,40 choose what to time, --kind int4 takes packed weights, --sweep times other tiles too, those of the Triton
dialect; the first line is for what serves on this GPU. The bytes of a line are the weights with their scales, each read once.
XLA's time is for the whole product, in x's dtype and with its activation; `partials` leaves the sum of its parts to the next kernel.
Programs first compile side by side, then are timed one after the other.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import bench
from pallas_kernels import linear as products
from pallas_kernels.linear import packed_triton, reference, triton
from pallas_kernels.linear.shapes import PACKINGS, ROUNDED, SHAPES, Shape
from pallas_kernels.linear.triton import Tiles
from pallas_kernels.packed import Packed

DTYPE = jnp.bfloat16
SHARED_BYTES = 200_000  # most of a packed candidate
MOST_TURNS = 16  # most copies of the weights; they keep a call from finding its weights in the L2 cache, unless these are small
REFERENCES = {"linear": reference.linear, "partials": reference.linear, "gated": reference.gated, "gated_by": reference.gated_by}
KERNELS = {"linear": triton.linear, "partials": triton.partials, "gated": triton.gated, "gated_by": triton.gated_by}
PACKED_KERNELS = {kind: getattr(packed_triton, kind) for kind in KERNELS}
SUMMED = ("partials", "gated_by")  # whose packed kernels may share the sums of a product
# Numbers as large as the largest codes of a kind that `drawn` gives.
LARGEST = {"int4": 8.0, "int8": 128.0, "fp8": 2.0, "fp4": 6.0}


def chosen(shape: Shape, rows: int, splits: int | None = None, tile: int = 0) -> Tiles:
    """The tiles for a shape; splits and tile override what is best."""
    matrices, splits = 2 if shape.kind == "gated" else 1, splits if shape.kind == "partials" else splits or 1
    return triton.choose_tiles(rows, shape.columns, shape.width, DTYPE.dtype.itemsize, matrices=matrices, splits=splits, tile=tile)


def candidates(shape: Shape, rows: int) -> list[Tiles | None]:
    """None, which stands for what serves this product on this GPU, then tiles of the Triton kernel, where it takes so many rows."""
    if rows > triton.MOST_ROWS:
        return [None]
    serves = chosen(shape, rows)
    out = [serves, *(chosen(shape, rows, tile=tile) for tile in ((8, 16, 32, 64) if rows <= 16 else (32, 64, 128)))]
    if shape.kind == "partials":
        out += [chosen(shape, rows, splits) for splits in (1, 4)]
    if shape.kind == "linear" and shape.columns <= 5376:
        out += [chosen(shape, rows, 3)]
    out += [dataclasses.replace(serves, slice=192 - serves.slice), dataclasses.replace(serves, num_stages=serves.num_stages - 1)]
    matrices = 2 if shape.kind == "gated" else 1
    fit = [t for t in out if t.num_stages > 1 and t.num_stages * t.step(rows, matrices, DTYPE.dtype.itemsize) <= 2 * triton.PROGRAM_BYTES]
    return [None, *dict.fromkeys(fit)]


def packed_candidates(shape: Shape, rows: int, packing: str) -> list[packed_triton.Tiles | None]:
    """As `candidates`, for packed weights. None stands for the kernel that serves on this GPU."""
    x, w, *_ = shape.arguments(rows, DTYPE, packing)
    serves = packed_triton.choose_tiles(x, w, None if shape.kind in SUMMED else 1)
    changes = [{}, *({"depth": depth, "num_stages": stages} for depth in (1, 2, 4) for stages in (2, 3, 4, 5))]
    changes += [{"blocks": 2, "num_warps": 8, "depth": depth, "num_stages": stages} for depth in (1, 2) for stages in (2, 3)]
    changes += [{"rows": part} for part in (16, 32, 64, 128) if part < rows]
    if shape.kind in SUMMED:
        changes += [{"splits": splits} for splits in (1, 2, 3, 4, 6, 8, 11) if splits != serves.splits]
    tried = [dataclasses.replace(serves, **change) for change in changes]
    return [None, *dict.fromkeys(t for t in tried if t.shared(w, DTYPE.dtype.itemsize) <= SHARED_BYTES)]


def turns_of(arguments: Any) -> int:
    """How many copies of the arguments to take in turn."""
    size = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(arguments))
    return max(4, min(MOST_TURNS, math.ceil(4 * bench.L2_BYTES / size)))


def compiled(fn: Callable[..., jax.Array], arguments: Any) -> Callable[..., Any]:
    """A compiled loop of calls of fn, which take the copies of the arguments in turn."""
    return bench.loop(jax.jit(fn)).lower([arguments] * turns_of(arguments)).compile()


def drawn(w: Packed) -> Packed:
    """Random weights of the size of rows of unit length."""
    keys = jax.random.split(jax.random.key(1), 3)
    words = jax.random.bits(keys[0], w.words.shape, jnp.uint32)
    if w.kind == "fp8":  # without a bit of the exponent there is no NaN
        words &= jnp.uint32(0xBBFFBBFF)
    dtype = w.scale.dtype
    scale = jax.random.uniform(keys[1], w.scale.shape, dtype, 0.5, 2.0) * dtype.type(w.shape[-1] ** -0.5 / LARGEST[w.kind])
    zero = None if w.zero is None else jax.random.randint(keys[2], w.zero.shape, 0, 16).astype(dtype)
    zero = -scale * zero if w.affine else zero
    return dataclasses.replace(w, words=words, scale=scale, zero=zero)


def check(found: jax.Array, expected: jax.Array) -> None:
    """Raises AssertionError if the two differ by more than rounding can explain."""
    found, expected = found.astype(jnp.float32), expected.astype(jnp.float32)
    found = jnp.sum(found, axis=0) if found.ndim > expected.ndim else found
    error = float(jnp.max(jnp.abs(found - expected)) / jnp.max(jnp.abs(expected)))
    assert error < 0.02, f"kernel and reference differ by {error:.3f} of the largest value"


def describe(tiles: Tiles | packed_triton.Tiles | None) -> str:
    """Tiles, for a line of output."""
    if tiles is None:
        return "  what serves"
    if isinstance(tiles, packed_triton.Tiles):
        cut = f"{tiles.blocks}x{tiles.depth} blocks, {tiles.rows} rows, {tiles.splits} splits"
        return f"  {cut}, {tiles.num_warps} warps, {tiles.num_stages} stages"
    return f"  {tiles.columns}x{tiles.depth}, {tiles.splits} splits, {tiles.num_stages} stages"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time other tiles too")
    parser.add_argument("--shapes", default="", help="only the shapes whose name holds this")
    parser.add_argument("--rows", default="4,40", help="numbers of rows, with commas between them")
    parser.add_argument("--kind", choices=(*PACKINGS, ROUNDED), help="how the weights are packed (default: not at all)")
    options = parser.parse_args()
    cases = [(name, shape, int(rows)) for name, shape in SHAPES.items() if options.shapes in name for rows in options.rows.split(",")]
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        programs = {}
        for name, shape, rows in cases:
            shapes = shape.arguments(rows, DTYPE, options.kind)
            tried: list[Any] = packed_candidates(shape, rows, options.kind) if options.kind else candidates(shape, rows)
            kernel = (PACKED_KERNELS if options.kind else KERNELS)[shape.kind]

            def tiled(tiles: Any, kernel: Any = kernel, kind: str = shape.kind) -> Any:
                return getattr(products, kind) if tiles is None else functools.partial(kernel, tiles=tiles)

            plain = pool.submit(compiled, REFERENCES[shape.kind], shapes)
            tried = tried[: None if options.sweep else 1]
            programs[name, rows] = plain, {t: pool.submit(compiled, tiled(t), shapes) for t in tried}
    bandwidth = bench.begin()
    draws = jax.random.normal(jax.random.key(0), (max(2 * s.columns * s.width for _, s, _ in cases) + 2**22,), DTYPE)
    for name, shape, rows in cases:
        x, w, *others = shape.arguments(rows, DTYPE, options.kind)
        inputs: list[Any] = [draws[-math.prod(a.shape) :].reshape(a.shape).astype(a.dtype) for a in (x, *others)]
        weights = drawn(w) if options.kind else draws[: math.prod(w.shape)].reshape(w.shape) * DTYPE(shape.width**-0.5)
        inputs.insert(1, weights)
        turns = [tuple(jax.tree.map(jnp.copy, a) for a in inputs) for _ in range(turns_of(inputs))]
        size = sum(part.nbytes for part in jax.tree.leaves(weights))
        plain, kernels = programs[name, rows]
        reference_us = bench.loop_us(plain.result(), turns)
        if options.sweep:
            print(f"{name} x {rows}")
        for tiles, kernel in kernels.items():
            try:
                run = kernel.result()
            except jax.errors.JaxRuntimeError as error:  # more shared memory than the device has
                print(f"{describe(tiles)}: {str(error).splitlines()[0][:100]}")
                continue
            check(run(turns)[-1], plain.result()(turns)[-1])
            label = describe(tiles) if options.sweep else f"{name} x {rows}"
            bench.show(label, bench.loop_us(run, turns), size, bandwidth, reference_us)


if __name__ == "__main__":
    main()
