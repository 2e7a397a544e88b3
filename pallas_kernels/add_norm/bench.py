"""Checks the kernel of residual sums and norms against its reference on a GPU and times both: `python -m pallas_kernels.add_norm.bench`.

Arguments: shapes of `shapes.py` by the start of their names (by default all), and --tune to time other numbers of warps too.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.add_norm import reference, triton
from pallas_kernels.add_norm.shapes import SHAPES, Shape
from pallas_kernels.bench import begin, show, time_us
from pallas_kernels.moe import Choices

WARPS = (2, 4, 8, 16, 32)
EXPERTS = 128


def inputs(shape: Shape, dtype: Any) -> tuple[Any, ...]:
    """x, y, weight, scalar and next_weights, where the stream x is larger than y."""
    rng = np.random.default_rng(0)

    def rows(deviation: float) -> jax.Array:
        return jnp.asarray(deviation * rng.normal(size=(shape.rows, shape.hidden)), dtype)

    def weight() -> jax.Array:
        return jnp.asarray(1 + 0.1 * rng.normal(size=shape.hidden), dtype)

    y = rows(0.3) if shape.parts == 1 else tuple((rows(0.3), weight()) for _ in range(shape.parts))
    if shape.choices:
        pairs = shape.rows * shape.choices
        out = jnp.asarray(0.3 * rng.normal(size=(pairs, shape.hidden)), dtype)
        ids = jnp.asarray(rng.permuted(np.tile(np.arange(EXPERTS), (shape.rows, 1)), axis=1)[:, : shape.choices], jnp.int32)
        shares = jnp.asarray(rng.dirichlet(np.ones(shape.choices), shape.rows), jnp.float32)
        y = (*y[:-1], (Choices(out, shares, ids, EXPERTS), y[-1][1]))
    scalar = jnp.asarray([0.7], dtype) if shape.scaled else None
    return rows(2.0), y, weight(), scalar, tuple(weight() for _ in range(shape.norms))


def check(found: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> float:
    """The share of bfloat16 numbers that differ. Raises AssertionError if one differs by more than rounding can explain."""
    a, b = (np.concatenate([np.asarray(x, np.float32).reshape(-1) for x in arrays]) for arrays in (found, expected))
    np.testing.assert_allclose(a, b, rtol=2**-6, atol=2**-6)
    return float(np.mean(a != b))


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks and times residual sums and norms.")
    parser.add_argument("--tune", action="store_true", help="time other numbers of warps too")
    parser.add_argument("names", nargs="*", help="shapes, by the start of their names")
    arguments = parser.parse_args()
    bandwidth = begin()
    for name, shape in SHAPES.items():
        if arguments.names and not name.startswith(tuple(arguments.names)):
            continue
        args = inputs(shape, jnp.bfloat16)
        kernel, plain = (partial(f, eps=1e-6) for f in (triton.add_norm, reference.add_norm))
        # Without this option XLA may leave out a rounding between operations that it fuses.
        strict = jax.jit(plain, compiler_options={"xla_allow_excess_precision": False})
        differing = check(jax.jit(kernel)(*args), strict(*args))
        size = 2 * shape.numbers
        show(name, time_us(kernel, *args), size, bandwidth, time_us(plain, *args))
        if differing:
            print(f"  {differing:.1e} of the numbers are rounded otherwise than the reference's")
        for warps in WARPS if arguments.tune else ():
            show(f"  {warps} warps", time_us(partial(kernel, num_warps=warps), *args), size, bandwidth)


if __name__ == "__main__":
    main()
