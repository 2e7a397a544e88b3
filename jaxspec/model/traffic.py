"""Bytes that a pass over weights and cache reads, counted from shapes alone.

What a pass writes, and rows gathered from embedding tables, are thousands of times less and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxspec.model.config import LayerSpec
from jaxspec.model.gemma4 import DecoderLayer, Gemma4
from jaxspec.trees import nbytes


def expected_distinct(chosen: int, of: int, rows: int) -> float:
    """How many of `of` things are chosen by at least one of `rows` rows that each choose `chosen` of them at random."""
    return of * (1 - (1 - chosen / of) ** rows)


def weights_read(target: Gemma4, rows: int) -> float:
    """Bytes of a target's weights that a pass of so many rows reads. The tied embedding counts as the head; per-layer embeddings are
    only gathered from. target: weights or their shapes."""
    size: float = nbytes(target) - nbytes(target.embed_tokens_per_layer)
    for layer in target.layers:
        size = experts_read(size, layer, rows)
    return size


def experts_read(size: float, layer: DecoderLayer, rows: int) -> float:
    """`size` bytes less those of the layer's experts that none of so many rows chooses, if their routing is random."""
    spec = layer.self_attn.spec
    if not spec.num_experts:
        return size
    return size - (1 - expected_distinct(spec.top_k_experts, spec.num_experts, rows) / spec.num_experts) * nbytes(layer.experts)


def visible_kv(layers: Iterable[LayerSpec], dtype: Any, context: float) -> float:
    """Bytes of one sequence's K and V that the queries of these layers see, of `context` cached positions."""
    itemsize = jnp.dtype(dtype).itemsize
    return sum(min(context, s.window or context) * s.num_kv_heads * (s.key_dims + s.head_dim) * itemsize for s in layers)
