"""The walk as one kernel, in which each token takes as many steps as it has bytes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dialect import call, pl, plgpu


def walk_kernel(following_ref: Any, data_ref: Any, length_ref: Any, states_ref: Any, tokens_ref: Any, reached_ref: Any) -> None:
    """Program i: the walk of token i."""
    row = pl.program_id(0)
    token = jnp.clip(tokens_ref[row], 0, data_ref.shape[0] - 1)
    count = plgpu.load(length_ref.at[token])

    def byte(place: jax.Array) -> jax.Array:
        return plgpu.load(data_ref.at[token, jnp.minimum(place, data_ref.shape[1] - 1)]).astype(jnp.int32)

    def step(place: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        # The next byte is asked for before the state is there.
        state, code = carry
        following = byte(place + 1)
        return plgpu.load(following_ref.at[state, code]).astype(jnp.int32), following

    reached_ref[row] = jax.lax.fori_loop(0, count, step, (states_ref[row], byte(jnp.int32(0))))[0]


def byte_walk(
    following: jax.Array, data: jax.Array, length: jax.Array, states: jax.Array, tokens: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """See `pallas_kernels.byte_walk.byte_walk`."""
    return call(
        walk_kernel,
        name="byte_walk",
        grid=states.shape,
        out_shape=jax.ShapeDtypeStruct(states.shape, jnp.int32),
        num_warps=1,
        num_stages=1,
        interpret=interpret,
    )(following, data, length, states, tokens)
