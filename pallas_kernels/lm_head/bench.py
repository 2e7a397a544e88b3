"""Checks the fused head's kernel against its reference on a GPU and times both: `python -m pallas_kernels.lm_head.bench`.

Arguments: shapes of `shapes.py` by the start of their names (by default all), and --tune to time other tiles too, or --kind for a packed
table, whose kernel is the one that serves on this GPU. Rows are sampled at temperature 1; greedy rows are timed beside them.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import begin, show, time_us
from pallas_kernels.linear.bench import drawn
from pallas_kernels.linear.shapes import PACKINGS, packed
from pallas_kernels.lm_head import lm_head, reference, triton
from pallas_kernels.lm_head.shapes import SHAPES, Shape

TILES = [
    triton.Tiles(vocab, depth, warps, stages, rows)
    for vocab, depth, warps, stages in [
        (64, 128, 4, 4),
        (128, 64, 4, 3),
        (128, 64, 4, 4),
        (128, 128, 4, 3),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 3),
        (256, 64, 8, 3),
        (256, 64, 16, 3),
    ]
    for rows in (32, 64, 128)
]


def inputs(shape: Shape, temperature: float, packing: str | None) -> tuple[Any, ...]:
    """Hidden states, table, keys and temperatures; logits have a deviation of about 5. packing: of the table, a key of PACKINGS."""

    def normal(seed: int, rows: int, deviation: float) -> jax.Array:
        make = jax.jit(lambda: jax.random.normal(jax.random.key(seed), (rows, shape.hidden), jnp.bfloat16) * jnp.bfloat16(deviation))
        return make()

    keys = jax.random.bits(jax.random.key(2), (shape.rows, 2), jnp.uint32)
    if packing is not None:
        table: Any = drawn(packed((shape.vocab, shape.hidden), packing, jnp.bfloat16))
    else:
        table = normal(1, shape.vocab, 5 * shape.hidden**-0.5)
    return normal(0, shape.rows, 1.0), table, keys, jnp.full(shape.rows, temperature, jnp.float32)


def check(found: Any, expected: Any) -> int:
    """How many rows chose another token. Raises AssertionError if one of these is not a tie up to rounding."""
    (ids, values), (wanted, maxima) = jax.device_get((found, expected))
    np.testing.assert_allclose(values, maxima, rtol=0, atol=1e-3)
    return int(np.sum(ids != wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks and times the fused head.")
    parser.add_argument("--tune", action="store_true", help="time other tiles too")
    parser.add_argument("--kind", choices=tuple(PACKINGS), help="how the table is packed (default: not at all)")
    parser.add_argument("names", nargs="*", help="shapes, by the start of their names")
    arguments = parser.parse_args()
    bandwidth = begin()
    for name, shape in SHAPES.items():
        if arguments.names and not name.startswith(tuple(arguments.names)):
            continue
        hidden, table, keys, sampled = inputs(shape, 1.0, arguments.kind)
        size = sum(part.nbytes for part in jax.tree.leaves(table)) + hidden.nbytes
        greedy = jnp.zeros_like(sampled)

        def kernel(*args: jax.Array, cut: triton.Tiles | None = None, softcap: float | None = shape.softcap) -> Any:
            if arguments.kind is not None:
                return lm_head(*args, softcap=softcap)
            hidden, table, keys, temperature = args
            return triton.lm_head(hidden, table, keys, temperature, softcap, (), None, cut=cut)

        def plain(*args: jax.Array, softcap: float | None = shape.softcap) -> Any:
            hidden, table, keys, temperature = args
            return reference.lm_head(hidden, table, keys, temperature, softcap, (), None)

        for kind, temperature in (("sampled", sampled), ("greedy", greedy)):
            args = (hidden, table, keys, temperature)
            ties = check(jax.jit(kernel)(*args), jax.jit(plain)(*args))
            show(f"{name}, {kind}", time_us(kernel, *args), size, bandwidth, time_us(plain, *args))
            if ties:
                print(f"  {ties} of {shape.rows} rows chose a token that ties with the reference's")
        for cut in TILES if arguments.tune and arguments.kind is None else ():
            try:
                taken = time_us(partial(kernel, cut=cut), hidden, table, keys, sampled)
            except jax.errors.JaxRuntimeError as error:  # more shared memory than the device has
                print(f"  {cut}: {str(error).splitlines()[0][:100]}")
            else:
                show(f"  {cut.vocab}x{cut.depth} w{cut.warps} s{cut.stages} r{cut.rows}", taken, size, bandwidth)


if __name__ == "__main__":
    main()
