"""Times paged attention on a GPU: `python -m pallas_kernels.paged_attention.bench [--shapes NAME,...] [--batch 1,32] [--context 4096]`.

Prints microseconds a call, the bytes of visible K and V over that time, their share of the copy bandwidth measured in the same run, and
the largest difference from the XLA reference. --sweep tries many tile sizes. Where the kernel for Hopper serves, it is timed too.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bench
from pallas_kernels.dialect import pl
from pallas_kernels.paged_attention import mosaic, paged_attention, reference, triton
from pallas_kernels.paged_attention.shapes import PAGE, SHAPES, Shape


def arguments(shape: Shape, batch: int, context: int, dtype=jnp.bfloat16, seed: int = 0) -> tuple:
    """Random arguments of `triton.paged_attention`. A sequence's pages are in random order."""
    width = pl.cdiv(context if shape.window is None else min(context, shape.window + shape.queries), PAGE)
    pages, stored = batch * width, shape.rotary or shape.head_dim
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key, shape):
        return jax.random.normal(key, shape, dtype)

    def pair(*leading):
        return tuple(normal(next(keys), (*leading, shape.kv_heads, dims)) for dims in (stored, shape.head_dim))

    lengths = jnp.full(batch, context, jnp.int32)
    first = lengths if shape.fresh else lengths - 1
    return (
        normal(next(keys), (batch, shape.queries, shape.kv_heads, shape.group, shape.head_dim)) * jnp.asarray(0.1, dtype),
        first[:, None] + jnp.arange(shape.queries, dtype=jnp.int32)[None, :],
        pair(pages, PAGE),
        jnp.asarray(np.random.default_rng(seed).permutation(pages).reshape(batch, width), jnp.int32),
        lengths,
        pair(batch, shape.queries) if shape.fresh else None,
        jnp.full(batch, shape.queries, jnp.int32) if shape.fresh else None,
        normal(next(keys), (shape.head_dim,)) if shape.rotary else None,
        None,
        shape.through(first),
    )


def visible_bytes(shape: Shape, batch: int, context: int, itemsize: int = 2) -> int:
    """Bytes of K and V that a call has to read."""
    keys = context if shape.window is None else min(context, shape.window)
    return batch * keys * shape.kv_heads * ((shape.rotary or shape.head_dim) + shape.head_dim) * itemsize


def candidates(shape: Shape, args: tuple) -> list[triton.Tiles]:
    """Tiles worth a try."""
    rows = shape.queries * shape.group
    tile_rows = [r for r in (16, 32, 64) if r == 16 or r < 2 * rows]
    default = _tiles(shape, args)
    splits = sorted({1, max(1, default.splits // 2), default.splits, min(32, default.splits * 2)})
    grid = itertools.product(tile_rows, (32, 64), splits, (4, 8), (2, 3, 4))
    return [triton.Tiles(*g) for g in grid]


def _tiles(shape: Shape, args: tuple) -> triton.Tiles:
    q, _, cached, table, _, fresh, _, weight, *_ = args
    return triton.tiles_for(q, cached, table, fresh, weight, shape.window)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--context", default="4096")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    bandwidth = bench.begin()
    batches, contexts = ([int(x) for x in text.split(",")] for text in (options.batch, options.context))
    for name, batch, context in itertools.product(options.shapes.split(","), batches, contexts):
        shape = SHAPES[name]
        args = arguments(shape, batch, context)
        settings = {"causal": shape.causal, "window": shape.window, "scale": 1.0}
        wanted = None
        if batch * context * shape.queries <= 2**20:
            wanted = jax.jit(functools.partial(reference.paged_attention, **settings))(*args).astype(jnp.float32)
        functions: dict[str, Callable[..., jax.Array]] = {
            str(tiles): functools.partial(triton.paged_attention, **settings, tiles=tiles)
            for tiles in (candidates(shape, args) if options.sweep else [_tiles(shape, args)])
        }
        if mosaic.unsupported(args[0], args[2], args[5], *args[7:]) is None:
            functions["mosaic"] = functools.partial(paged_attention, **settings, implementation="mosaic")
        results = []
        for label, function in functions.items():
            function = jax.jit(function)
            try:
                error = float("nan") if wanted is None else float(jnp.max(jnp.abs(function(*args).astype(jnp.float32) - wanted)))
                results.append((bench.time_us(function, *args), error, label))
            except Exception as failure:  # most often too much shared memory; we go on with the sweep
                print(f"  {label}: {str(failure).splitlines()[0][:120]}")
        for us, error, label in sorted(results)[:3]:
            bench.show(f"{name} B={batch} {context}", us, visible_bytes(shape, batch, context), bandwidth)
            print(f"    largest difference {error:.1e}, {label}", flush=True)


if __name__ == "__main__":
    main()
