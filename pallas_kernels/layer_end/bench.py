"""Checks the kernel of layers' ends against its reference on a GPU and times it beside the kernels that serve otherwise: `python -m
pallas_kernels.layer_end.bench`. Arguments: shapes of `shapes.py` by the start of their names (by default all)."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.add_norm import add_norm
from pallas_kernels.bench import begin, show, time_us
from pallas_kernels.layer_end import mosaic, reference
from pallas_kernels.layer_end.shapes import SHAPES, Shape
from pallas_kernels.linear import gated_by, partials


def inputs(shape: Shape, dtype: Any) -> tuple[Any, ...]:
    """Arguments of `layer_end`, whose products are about as large as what they are made of."""
    rng = np.random.default_rng(0)

    def draw(leaf: jax.ShapeDtypeStruct | None) -> Any:
        if leaf is None:
            return None
        if leaf.dtype == jnp.int32:
            return jnp.asarray(shape.layers - 1, leaf.dtype)
        matrix = len(leaf.shape) == 2 and leaf.shape[0] != shape.rows
        return jnp.asarray(rng.normal(size=leaf.shape) * (leaf.shape[-1] ** -0.5 if matrix else 1.0), leaf.dtype)

    return tuple(map(draw, shape.arguments(dtype)))


def apart(x, y, weight, gate, inputs, index, projection, norm, scalar, next_weight, eps):
    """The same by four kernels."""
    settings = {"eps": eps, "launch_dependents": True}
    (x,) = add_norm(x, y, weight, **settings)
    out = partials(gated_by(x, gate, inputs, index, launch_dependents=True), projection, launch_dependents=True)
    x, *normed = add_norm(x, out, norm, scalar=scalar, next_weights=() if next_weight is None else (next_weight,), **settings)
    return x, normed[0] if normed else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks and times layers' ends.")
    parser.add_argument("names", nargs="*", help="shapes, by the start of their names")
    arguments = parser.parse_args()
    bandwidth = begin()
    for name, shape in SHAPES.items():
        if arguments.names and not name.startswith(tuple(arguments.names)):
            continue
        args = inputs(shape, jnp.bfloat16)
        kernel, others = (partial(f, eps=1e-6) for f in (mosaic.layer_end, apart))
        for found, wanted in zip(kernel(*args), jax.jit(partial(reference.layer_end, eps=1e-6))(*args), strict=True):
            if found is not None:
                np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=0.05, atol=0.05)
        show(name, time_us(kernel, *args), shape.size, bandwidth, time_us(others, *args))


if __name__ == "__main__":
    main()
