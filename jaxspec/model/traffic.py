"""Bytes that a pass over weights and cache reads, counted from shapes alone.

What a pass writes, and rows gathered from embedding tables, are thousands of times less and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jaxspec.model.layer_spec import LayerSpec
from jaxspec.trees import nbytes


def expected_distinct(chosen: int, of: int, rows: int) -> float:
    """How many of `of` things are chosen by at least one of `rows` rows that each choose `chosen` of them at random."""
    return of * (1 - (1 - chosen / of) ** rows)


def experts_left_out(spec: LayerSpec, experts: Any, rows: int) -> float:
    """Bytes of a layer's experts, weights or their shapes, that none of so many rows chooses, if their routing is random."""
    if not spec.num_experts:
        return 0.0
    return (1 - expected_distinct(spec.top_k_experts, spec.num_experts, rows) / spec.num_experts) * nbytes(experts)


def visible_kv(layers: Iterable[LayerSpec], dtype: Any, context: float) -> float:
    """Bytes of one sequence's K and V that the queries of these layers see, of `context` cached positions."""
    itemsize = jnp.dtype(dtype).itemsize
    return sum(min(context, s.window or context) * s.num_kv_heads * (s.key_dims + s.head_dim) * itemsize for s in layers)
