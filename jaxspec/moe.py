"""Gemma 4's mixture of experts: a router over the un-normed residual, and experts computed over rows sorted by expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.layers import Linear, Weight, gelu, last_axis, rms


@struct.dataclass
class Router:
    """proj: [E, H]; scale: [H]; per_expert_scale: [E]. (transformers `Gemma4TextRouter`)"""

    proj: Linear
    scale: Weight
    per_expert_scale: Weight
    top_k: int = struct.field(pytree_node=False)
    eps: float = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x: [N, H], the residual stream -> weights [N, top_k] in x's dtype and expert ids [N, top_k] int32."""
        x = rms(x, self.eps) * last_axis(self.scale, x.ndim) * (x.shape[-1] ** -0.5)
        scores = jax.nn.softmax(self.proj(x).astype(jnp.float32), axis=-1)
        weights, ids = jax.lax.top_k(scores, self.top_k)
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return (weights * jnp.take(self.per_expert_scale.astype(jnp.float32), ids, axis=0)).astype(x.dtype), ids


@struct.dataclass
class Experts:
    """gate_up_proj: [E, 2, I, H]; down_proj: [E, H, I]."""

    gate_up_proj: Weight
    down_proj: Weight

    def __call__(self, x: jax.Array, weights: jax.Array, ids: jax.Array) -> jax.Array:
        """x: [N, H]; weights, ids: [N, top_k] -> the weighted sum of the chosen experts' outputs, [N, H]."""
        experts, _, inner, hidden = self.gate_up_proj.shape
        top_k = ids.shape[1]
        order = jnp.argsort(ids.reshape(-1))
        row = order // top_k
        sizes = jnp.bincount(ids.reshape(-1), length=experts).astype(jnp.int32)
        gate_up = _grouped(jnp.take(x, row, axis=0), self.gate_up_proj.reshape(experts, 2 * inner, hidden), sizes)
        out = _grouped(gelu(gate_up[:, :inner]) * gate_up[:, inner:], self.down_proj, sizes)
        out = out * jnp.take(weights.reshape(-1), order)[:, None]
        return jnp.zeros_like(x).at[row].add(out)


def _grouped(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Consecutive groups of rows, each times its own matrix. x: [M, in], w: [E, out, in], sizes: [E] -> [M, out]."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return jax.lax.ragged_dot_general(x, w, sizes, numbers)
