"""Times the mixture of experts on this machine's GPU: `python -m pallas_kernels.moe.bench [--sweep] [--shapes NAME]`.

Scores are random, so rows choose their experts evenly. The bytes of a line are the chosen experts' weights, each read once.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import bench, moe
from pallas_kernels.moe import triton
from pallas_kernels.moe.shapes import SHAPES, Shape
from pallas_kernels.moe.triton import TILES, Blocks, Tiles, choose_tiles

DTYPE = jnp.bfloat16
REFERENCE_ROWS = 160  # XLA multiplies every row with every expert
# The blocks that --sweep tries for each kernel, by rows of a tile. The other kernel then has the blocks of `choose_tiles`.
GATE_UP = {
    16: [
        (16, 256, 4, 4),
        (32, 128, 4, 3),
        (32, 128, 4, 4),
        (32, 256, 4, 3),
        (32, 256, 8, 4),
        (64, 64, 4, 4),
        (64, 128, 4, 3),
        (64, 128, 8, 4),
    ],
    32: [(32, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 8, 4), (64, 128, 8, 3)],
    64: [(32, 128, 4, 3), (64, 64, 4, 4), (128, 64, 8, 3), (64, 64, 4, 3), (64, 128, 4, 3), (64, 128, 8, 3), (64, 64, 8, 4)],
    128: [(64, 64, 8, 3), (64, 64, 8, 4), (64, 64, 4, 3), (128, 64, 8, 3), (64, 128, 8, 3), (32, 64, 4, 4)],
}
DOWN = {
    16: [
        (32, 128, 4, 4),
        (32, 256, 4, 3),
        (64, 64, 4, 4),
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (64, 256, 4, 3),
        (128, 64, 4, 4),
        (128, 128, 4, 3),
    ],
    32: [(64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3)],
    64: [(64, 128, 4, 3), (64, 64, 4, 4), (128, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 4), (128, 128, 8, 3)],
    128: [(128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 3), (256, 64, 8, 3), (128, 128, 8, 3), (64, 64, 4, 4)],
}


def candidates(shape: Shape) -> list[Tiles]:
    """The tiles that serve this shape, then others: tiles of other rows, then other blocks for one kernel or the other."""
    chosen = choose_tiles(shape.rows * shape.top_k, shape.experts, DTYPE.dtype.itemsize)
    share = shape.rows * shape.top_k / shape.experts
    tried = [chosen, *(tiles for rows, tiles in TILES.items() if share / 4 <= rows <= max(32, 8 * share))]
    tried += [dataclasses.replace(chosen, gate_up=Blocks(*blocks)) for blocks in GATE_UP[chosen.rows]]
    tried += [dataclasses.replace(chosen, down=Blocks(*blocks)) for blocks in DOWN[chosen.rows]]
    return list(dict.fromkeys(tried))


def describe(tiles: Tiles) -> str:
    """Tiles, for a line of output."""

    def blocks(b: Blocks) -> str:
        return f"{b.columns}x{b.depth} w{b.num_warps} s{b.num_stages}"

    return f"{tiles.rows} rows, {blocks(tiles.gate_up)}, {blocks(tiles.down)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time other tiles too")
    parser.add_argument("--shapes", default="", help="only the shapes whose name holds this")
    options = parser.parse_args()
    bandwidth = bench.begin()
    for name, shape in SHAPES.items():
        if options.shapes not in name:
            continue
        keys = jax.random.split(jax.random.key(0), 5)
        draws = [jax.random.normal(key, spec.shape, spec.dtype) for key, spec in zip(keys, shape.layer(DTYPE), strict=True)]
        x, gate_up, down, scores, scale = draws
        arrays = (x, gate_up * DTYPE(shape.hidden**-0.5), down * DTYPE(shape.inner**-0.5))
        del draws, gate_up, down

        def route(scores, scale, top_k=shape.top_k, implementation="triton"):
            return moe.route(scores, scale, top_k, implementation=implementation)

        weights, ids, groups = jax.jit(route)(scores, scale)
        active = len(set(ids.reshape(-1).tolist()))
        size = shape.read(active, DTYPE.dtype.itemsize)
        print(f"{name}: {active} of {shape.experts} experts, {size / 1e6:.0f} MB")
        xla = functools.partial(moe.experts, implementation="xla")
        reference = bench.time_us(xla, *arrays, weights, ids) if shape.rows <= REFERENCE_ROWS else None
        run = functools.partial(moe.experts, implementation="triton")
        bench.show("  experts", bench.time_us(run, *arrays, weights, ids, groups), size, bandwidth, reference)
        reference = bench.time_us(functools.partial(route, implementation="xla"), scores, scale)
        bench.show("  route", bench.time_us(route, scores, scale), scores.nbytes, bandwidth, reference)
        if groups is None or options.sweep:
            grouping = functools.partial(triton.group, experts=shape.experts)
            bench.show("  group", bench.time_us(grouping, ids), ids.nbytes, bandwidth)
        for tiles in candidates(shape) if options.sweep else []:
            run = functools.partial(triton.experts, tiles=tiles)
            try:
                bench.show(f"  {describe(tiles)}", bench.time_us(run, *arrays, weights, ids, groups), size, bandwidth)
            except jax.errors.JaxRuntimeError as error:
                print(f"  {describe(tiles)}: {str(error).splitlines()[0]}")  # smaller GPUs have less shared memory


if __name__ == "__main__":
    main()
