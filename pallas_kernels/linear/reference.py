"""Products of few rows in plain XLA: the definition of the operation, and its implementation without a kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def linear(x: jax.Array, w: jax.Array, dtype: Any = None) -> jax.Array:
    """x w^T in x's dtype or in `dtype`. w: [..., H]; see `pallas_kernels.linear.linear`."""
    return jax.lax.dot_general(x, w, (((1,), (w.ndim - 1,)), ((), ())), preferred_element_type=dtype)


def partials(x: jax.Array, w: jax.Array) -> jax.Array:
    """See `pallas_kernels.linear.partials`."""
    return linear(x, w, jnp.float32)[None]


def activation(gate: jax.Array, up: jax.Array) -> jax.Array:
    """gelu_tanh(gate) * up in float32, rounded once."""
    wide = jax.nn.gelu(gate.astype(jnp.float32), approximate=True) * up.astype(jnp.float32)
    return wide.astype(gate.dtype)


def gated(x: jax.Array, gate_up: jax.Array) -> jax.Array:
    """See `pallas_kernels.linear.gated`."""
    both = linear(x, gate_up)
    return activation(both[:, 0], both[:, 1])


def gated_by(x: jax.Array, w: jax.Array, u: jax.Array, index: jax.Array) -> jax.Array:
    """See `pallas_kernels.linear.gated_by`."""
    return activation(linear(x, w), jax.lax.dynamic_index_in_dim(u, index, axis=1, keepdims=False))
