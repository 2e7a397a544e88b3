"""Random weights of a shape, made where they are to lie."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def random_weights(abstract: Any, seed: int = 0, std: float = 0.02) -> Any:
    """Weights for an abstract tree, made where they are to lie, one by one: norms and scalars one, a token ordering the identity,
    everything else normal with deviation `std`. There is one program for each shape."""

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
    """Normal numbers from a hash of (seed, index of the array, coordinates): nothing larger than the result is ever stored."""

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
    """Standard normal numbers of uint32 bits, all of them finite: with 23 bits and a half, no uniform number rounds to 0 or 1."""
    uniform = ((bits >> jnp.uint32(9)).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)
    return jnp.float32(math.sqrt(2)) * jax.lax.erf_inv(2 * uniform - 1)
