"""The order in which XLA computes, where its own would take more memory or copy what could be overwritten."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def zero_after(x: jax.Array) -> jax.Array:
    """0 as int32, of which XLA does not know that it is not made from x: what it is added to is computed after x. x: any numbers."""
    bits = jax.lax.bitcast_convert_type(x.ravel()[0].astype(jnp.float32), jnp.int32)
    return (jax.lax.shift_right_logical(bits | 0x7FFFFFFF, 1) & 1) ^ 1
