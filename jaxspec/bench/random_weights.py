"""Random weights for a tree of shapes, made on the devices that will hold them."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def random_weights(abstract: Any, seed: int = 0, std: float = 0.02) -> Any:
    """Weights in the shapes, dtypes and shardings of a tree of ShapeDtypeStructs, made one by one on their devices.

    Norms, scalars and vectors are 1, integers (a token ordering) are 0, 1, 2, ..., all else is normal with standard deviation `std`.
    Weights of one shape share a program.
    """

    def draw(path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.device_put(jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape), leaf.sharding)
        if len(leaf.shape) < 2 or "norm" in name:
            return jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding)
        drawn.append(name)
        settings = {"shape": leaf.shape, "dtype": leaf.dtype, "sharding": leaf.sharding}
        return _normal(np.uint32(seed), np.uint32(len(drawn)), np.float32(std), **settings)

    drawn: list[str] = []
    return jax.tree_util.tree_map_with_path(draw, abstract)


@partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def _normal(seed: jax.Array, index: jax.Array, std: jax.Array, *, shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
    """Normal numbers from a hash of (seed, index of the array, coordinates). It needs no memory beside the result."""

    def mix(x: jax.Array) -> jax.Array:
        x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x21F0AAAD)
        x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0xD35A2D97)
        return x ^ (x >> jnp.uint32(15))

    bits = jnp.broadcast_to(mix(mix(seed) + index), shape)
    for axis in range(len(shape)):
        bits = mix(bits + jax.lax.broadcasted_iota(jnp.uint32, shape, axis))
    weight = (std * normal_of(bits)).astype(dtype)
    return weight if sharding is None else jax.lax.with_sharding_constraint(weight, sharding)


def normal_of(bits: jax.Array) -> jax.Array:
    """Standard normal float32 numbers from uint32 bits, of any shape. All are finite: (23 bits + 0.5) / 2**23 never rounds to 0 or 1."""
    uniform = ((bits >> jnp.uint32(9)).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)
    return jnp.float32(math.sqrt(2)) * jax.lax.erf_inv(2 * uniform - 1)
