"""Layers that towers are made of. Their fields are named as in checkpoints."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.layers import Linear, Weight, last_axis, rms


@struct.dataclass
class ClippableLinear:
    """A product whose inputs and outputs are kept within bounds, where there are bounds, which are scalars. [N, in] -> [N, out].
    (transformers `Gemma4ClippableLinear`)"""

    linear: Linear
    input_min: Weight | None
    input_max: Weight | None
    output_min: Weight | None
    output_max: Weight | None

    def __call__(self, x: jax.Array) -> jax.Array:
        return _clipped(self.linear(_clipped(x, self.input_min, self.input_max)), self.output_min, self.output_max)


def _clipped(x: jax.Array, low: Weight | None, high: Weight | None) -> jax.Array:
    return x if low is None else jnp.clip(x, low, high)


def abstract_clippable(inputs: int, outputs: int, clipped: bool, dtype: Any) -> ClippableLinear:
    """Such a product as a tree of ShapeDtypeStructs. clipped: whether there are bounds."""
    bounds = (jax.ShapeDtypeStruct((), dtype) if clipped else None for _ in range(4))
    return ClippableLinear(Linear(jax.ShapeDtypeStruct((outputs, inputs), dtype)), *bounds)


@struct.dataclass
class LayerNorm:
    """(x - mean) / deviation * weight + bias, in float32, rounded once at the end. weight, bias: [H]; bias may be None."""

    weight: Weight
    bias: Weight | None
    eps: float = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        wide = wide * last_axis(self.weight.astype(jnp.float32), x.ndim)
        wide = wide if self.bias is None else wide + last_axis(self.bias.astype(jnp.float32), x.ndim)
        return wide.astype(x.dtype)


@struct.dataclass
class BiasedLinear:
    """x W^T + bias, rounded once. weight: [out, in], bias: [out]."""

    weight: Weight
    bias: Weight

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = Linear(self.weight)(x, dtype=jnp.float32)
        return (wide + last_axis(self.bias.astype(jnp.float32), x.ndim)).astype(x.dtype)


@struct.dataclass
class Projection:
    """The last step of every tower, into the width of the text model: a norm without a weight, then a product. (transformers
    `Gemma4MultimodalEmbedder`)"""

    embedding_projection: Linear
    eps: float = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [N, width of the tower] -> [N, text hidden]."""
        return self.embedding_projection(rms(x, self.eps))


def abstract_projection(width: int, text_hidden: int, eps: float, dtype: Any) -> Projection:
    """A projection as a tree of ShapeDtypeStructs."""
    return Projection(Linear(jax.ShapeDtypeStruct((text_hidden, width), dtype)), eps)
