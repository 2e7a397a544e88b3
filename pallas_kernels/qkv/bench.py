"""Checks the kernel that makes a layer's heads of its rows on a GPU, and times it beside the two that serve otherwise: `python -m
pallas_kernels.qkv.bench`. Arguments: shapes of `shapes.py` by the start of their names (by default all), and --rows 1,4,8,32.

What is timed is a chain of layers with weights of their own, which store in the same pools; a line is for one of them.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import begin, show, time_us
from pallas_kernels.linear import partials
from pallas_kernels.qkv import Pages, projected, qkv
from pallas_kernels.qkv.shapes import PAGE, PLACES, SHAPES, Shape

EPS = 1e-6
LAYERS = 8  # of a chain


def inputs(shape: Shape, batch: int, queries: int, dtype: Any, seed: int = 0) -> tuple[Any, ...]:
    """Arguments of `projected`: positions in two pages, sequences of which not all rows are stored, and pools full of NaN."""
    rng = np.random.default_rng(seed)
    x, w, *_, table, _, _ = shape.arguments(batch, queries, dtype)

    def draw(shape: tuple[int, ...], deviation: float = 1.0, mean: float = 0.0) -> jax.Array:
        return jnp.asarray(mean + deviation * rng.standard_normal(shape, np.float32)).astype(dtype)

    angles = rng.standard_normal((batch, queries, shape.dim // 2)).astype(np.float32)
    weights = [draw((shape.dim,), 0.1, 1.0) for _ in range(2)]
    pages = None
    if table is not None:
        pools = [jnp.full((batch * PLACES, PAGE, shape.kv_heads, shape.dim), jnp.nan, dtype) for _ in range(2)]
        order = rng.permutation(batch * PLACES).reshape(batch, PLACES)
        start, count = 62 + PAGE * rng.integers(0, 40, batch), queries - np.arange(batch) % (queries + 1)
        order, start, count = (jnp.asarray(numbers, jnp.int32) for numbers in (order, start, count))
        pages = Pages(pools[0], pools[1], order, start, count)
    turns = jnp.cos(angles), jnp.sin(angles)
    return draw(x.shape), draw(w.shape, shape.width**-0.5), *turns, weights[0], weights[1] if shape.owned else None, pages


def apart(x: jax.Array, w: jax.Array, *others: Any, group: int, key_dims: int, eps: float, launch_dependents: bool) -> tuple[Any, ...]:
    """The same by two kernels."""
    parts = partials(x.reshape(-1, x.shape[-1]), w.reshape(-1, w.shape[-1]), launch_dependents=launch_dependents)
    settings = {"group": group, "key_dims": key_dims, "eps": eps, "dtype": x.dtype, "launch_dependents": launch_dependents}
    return qkv(parts.reshape(-1, *x.shape[:2], *w.shape[:-1]), *others, **settings)


def chain(heads: Any, x: jax.Array, layers: list[tuple[Any, ...]], pages: Pages | None, launch_dependents: bool) -> Any:
    """The queries of several layers of the same rows, and the pools in the end. layers: for each the arguments of `projected` between x and
    pages, which all of them use."""
    found = []
    for layer in layers:
        q, k, v = heads(x, *layer, pages, launch_dependents=launch_dependents)
        found.append(q)
        if pages is not None:
            pages = pages._replace(k=k, v=v)
    return found, None if pages is None else (pages.k, pages.v)


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks and times the heads of layers.")
    parser.add_argument("--rows", default="1,4,8,32", help="numbers of rows, with commas between them")
    parser.add_argument("names", nargs="*", help="shapes, by the start of their names")
    arguments = parser.parse_args()
    bandwidth = begin()
    for name, shape in SHAPES.items():
        if arguments.names and not name.startswith(tuple(arguments.names)):
            continue
        for rows in map(int, arguments.rows.split(",")):
            args = inputs(shape, 1, rows, jnp.bfloat16)
            settings = {"group": shape.group, "key_dims": shape.dim, "eps": EPS}
            kernel, others = partial(projected, **settings, implementation="mosaic"), partial(apart, **settings)
            both = [jax.tree.leaves(jax.jit(partial(f, launch_dependents=False))(*args)) for f in (kernel, others)]
            for found, wanted in zip(*both, strict=True):
                np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=0.05, atol=0.05)
            x, _, *rest, pages = args
            layers = [(inputs(shape, 1, rows, jnp.bfloat16, seed)[1], *rest) for seed in range(LAYERS)]
            times = [time_us(partial(chain, f, launch_dependents=True), x, layers, pages) / LAYERS for f in (kernel, others)]
            show(f"{name} x {rows}", times[0], shape.size, bandwidth, times[1])


if __name__ == "__main__":
    main()
