"""Layers that towers are made of. Their fields are named as in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.checkpoint.layout import Part
from jaxspec.model.layers import Linear, Weight, last_axis, rms

Layer = TypeVar("Layer")


def abstract_stack(layer: Layer, count: int) -> Layer:
    """So many layers like an abstract one, as one whose leaves are [count, ...]."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((count, *leaf.shape), leaf.dtype), layer)


def through(stack: Any, x: jax.Array, *more: Any) -> jax.Array:
    """What the last layer of a stack gives, each of which is called with what the one before gave, and with `more`. XLA compiles one layer.

    To take a layer's part of each array takes time, and products with bounds have four scalars each. So vectors and scalars, all of one
    dtype, lie in one array."""
    leaves, structure = jax.tree.flatten(stack)
    large = [leaf for leaf in leaves if leaf.ndim > 2]
    small = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves if leaf.ndim <= 2], axis=1)

    def step(x: jax.Array, parts: tuple[list[jax.Array], jax.Array]) -> tuple[jax.Array, None]:
        matrices, numbers, own, at = iter(parts[0]), parts[1], list[jax.Array](), 0
        for leaf in leaves:
            size = 0 if leaf.ndim > 2 else leaf.size // len(leaf)
            own.append(numbers[at : at + size].reshape(leaf.shape[1:]) if size else next(matrices))
            at += size
        return jax.tree.unflatten(structure, own)(x, *more), None

    return jax.lax.scan(step, x, (large, small))[0]


def stack_layouts(stem: str, path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[list[Part]]:
    """How a checkpoint holds the leaf at a path: if the path begins with `stem`, layer by layer. See `layout.layouts`."""
    if not path.startswith(stem):
        return [[Part(path, shapes[path])]]
    count, *shape = shapes[path]
    return [[Part(f"{stem}{i}.{path.removeprefix(stem)}", tuple(shape), (i,)) for i in range(count)]]


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
