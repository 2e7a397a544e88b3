"""The walk in plain XLA: the definition of the operation, and its implementation without a kernel."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp


@jax.jit
def byte_walk(following: jax.Array, data: jax.Array, length: jax.Array, states: jax.Array, tokens: jax.Array) -> jax.Array:
    """See `pallas_kernels.byte_walk.byte_walk`."""
    flat, columns = following.reshape(-1), following.shape[1]
    count = jnp.take(length, tokens, mode="clip")
    codes = jnp.take(data, tokens, axis=0, mode="clip").astype(jnp.int32)

    def step(state: jax.Array, code_and_place: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        code, place = code_and_place
        reached = flat.at[state * columns + code].get(mode="promise_in_bounds").astype(jnp.int32)
        return jnp.where(place < count, reached, state), None

    def walk(states: jax.Array, codes: jax.Array, unroll: bool) -> jax.Array:
        places = jnp.arange(codes.shape[1], dtype=jnp.int32)
        return jax.lax.scan(step, states, (codes.T, places), unroll=unroll)[0]

    # On a GPU a loop costs a few microseconds for every byte, and steps that are written out are a few kernels.
    run: Any = functools.partial
    return jax.lax.platform_dependent(states, codes, cpu=run(walk, unroll=False), default=run(walk, unroll=True))
