"""Times the mixture of experts on this machine's GPU: `python -m pallas_kernels.moe.bench [--sweep] [--shapes NAME] [--kind int8]`.

--kind takes packed weights. Scores are random, so rows choose their experts evenly. The bytes of a line are the chosen experts' weights,
each read once.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import bench, moe
from pallas_kernels.linear.bench import drawn
from pallas_kernels.linear.shapes import PACKINGS
from pallas_kernels.moe import packed_triton, triton
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
# The same for packed weights, either kernel.
PACKED = {
    16: [
        (64, 64, 4, 4),
        (64, 128, 4, 3),
        (64, 128, 4, 4),
        (64, 128, 4, 5),
        (64, 256, 4, 3),
        (64, 256, 4, 4),
        (128, 128, 4, 3),
        (128, 128, 8, 4),
    ],
    32: [(64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3), (64, 256, 4, 4), (128, 128, 4, 3), (128, 128, 8, 4)],
    64: [(64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 8, 3), (128, 128, 8, 3), (128, 128, 8, 4)],
    128: [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (64, 128, 8, 3), (128, 64, 8, 3), (128, 128, 8, 3)],
}


def candidates(shape: Shape) -> list[Tiles]:
    """The tiles that serve this shape, then others: tiles of other rows, then other blocks for one kernel or the other."""
    chosen = choose_tiles(shape.rows * shape.top_k, shape.experts, DTYPE.dtype.itemsize)
    share = shape.rows * shape.top_k / shape.experts
    tried = [chosen, *(tiles for rows, tiles in TILES.items() if share / 4 <= rows <= max(32, 8 * share))]
    tried += [dataclasses.replace(chosen, gate_up=Blocks(*blocks)) for blocks in GATE_UP[chosen.rows]]
    tried += [dataclasses.replace(chosen, down=Blocks(*blocks)) for blocks in DOWN[chosen.rows]]
    return list(dict.fromkeys(tried))


def packed_candidates(shape: Shape) -> list[Tiles]:
    """As `candidates`, for packed weights."""
    chosen = packed_triton.choose_tiles(shape.rows * shape.top_k, shape.experts)
    tried = [chosen, *packed_triton.TILES.values()]
    for blocks in PACKED[chosen.rows]:
        tried += [dataclasses.replace(chosen, **{kernel: Blocks(*blocks)}) for kernel in ("gate_up", "down")]
    return list(dict.fromkeys(tried))


def describe(tiles: Tiles) -> str:
    """Tiles, for a line of output."""

    def blocks(b: Blocks) -> str:
        return f"{b.columns}x{b.depth} w{b.num_warps} s{b.num_stages}"

    return f"{tiles.rows} rows, {blocks(tiles.gate_up)}, {blocks(tiles.down)}"


def arguments(shape: Shape, packing: str | None) -> tuple[tuple[Any, ...], jax.Array, jax.Array]:
    """Random x, gate_up_proj and down_proj, and scores and `per_expert` for `route`."""
    x, gate_up, down, scores, scale = shape.layer(DTYPE, packing)
    keys = jax.random.split(jax.random.key(0), 5)

    def normal(key, spec):
        return jax.random.normal(key, spec.shape, spec.dtype)

    def weights(key, spec):
        return drawn(spec) if packing else normal(key, spec) * DTYPE(spec.shape[-1] ** -0.5)

    arrays = normal(keys[0], x), weights(keys[1], gate_up), weights(keys[2], down)
    return arrays, normal(keys[3], scores), normal(keys[4], scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="time other tiles too")
    parser.add_argument("--shapes", default="", help="only the shapes whose name holds this")
    parser.add_argument("--kind", choices=PACKINGS, help="how the weights are packed (default: not at all)")
    options = parser.parse_args()
    bandwidth = bench.begin()
    for name, shape in SHAPES.items():
        if options.shapes not in name:
            continue
        arrays, scores, scale = arguments(shape, options.kind)

        def route(scores, per_expert, shape=shape, implementation="triton"):
            return moe.route(scores, per_expert, shape.top_k, scale=shape.scale, implementation=implementation)

        weights, ids, groups = jax.jit(route)(scores, scale)
        active = len(set(ids.reshape(-1).tolist()))
        size = shape.read(active, *arrays[1:])
        print(f"{name}: {active} of {shape.experts} experts, {size / 1e6:.0f} MB")
        xla = functools.partial(moe.experts, activation=shape.activation, implementation="xla")
        reference = bench.time_us(xla, *arrays, weights, ids) if shape.rows <= REFERENCE_ROWS else None
        run = functools.partial(moe.experts, activation=shape.activation, implementation="triton")
        bench.show("  experts", bench.time_us(run, *arrays, weights, ids, groups), size, bandwidth, reference)
        reference = bench.time_us(functools.partial(route, implementation="xla"), scores, scale)
        bench.show("  route", bench.time_us(route, scores, scale), scores.nbytes, bandwidth, reference)
        if groups is None or options.sweep:
            grouping = functools.partial(triton.group, experts=shape.experts)
            bench.show("  group", bench.time_us(grouping, ids), ids.nbytes, bandwidth)
        kernels, tried = (packed_triton, packed_candidates) if options.kind else (triton, candidates)
        for tiles in tried(shape) if options.sweep else []:
            outputs = functools.partial(kernels.outputs, activation=shape.activation, tiles=tiles)
            try:
                bench.show(
                    f"  {describe(tiles)}",
                    bench.time_us(lambda *args, f=outputs: f(*args).summed(), *arrays, weights, ids, groups),
                    size,
                    bandwidth,
                )
            except jax.errors.JaxRuntimeError as error:
                print(f"  {describe(tiles)}: {str(error).splitlines()[0]}")  # smaller GPUs have less shared memory


if __name__ == "__main__":
    main()
