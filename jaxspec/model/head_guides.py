"""Guides of heads: what lets a kernel find the best token of a few rows by half of the head's bytes. See `pallas_kernels.lm_head.guided`.

A guide is made of a table when the weights are where they stay, and is no part of a checkpoint. A model or drafter whose token embedding
is its head has a method `with_head_guide`; others have no guides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.interrupts import compiled
from jaxspec.trees import nbytes
from pallas_kernels.lm_head import Guide, abstract_guide, guide_of, unguided
from pallas_kernels.lm_head.guided import MOST_ROWS


def guided(tree: Any) -> Any:
    """A target or a drafter, of weights or of ShapeDtypeStructs, with a guide for its head if it may have one."""
    return tree.with_head_guide() if hasattr(tree, "with_head_guide") else tree


def has_guide(tree: Any) -> bool:
    """Whether a head in the tree has a guide."""
    return any(isinstance(node, Guide) for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Guide)))


def head_bytes(model: Any, rows: int) -> int:
    """Bytes that the choice of so many rows' tokens reads of a target's head or of its guide."""
    return bytes_read_of(model.head[0], model.head_guide, rows)


def bytes_read_of(table: Any, guide: Guide | None, rows: int) -> int:
    """The same of a head and its guide, or None."""
    return nbytes(table if guide is None or rows > MOST_ROWS else guide)


def guide_for(table: Any) -> Guide | None:
    """The guide of a head's table [V, H] or of its shape, which lies as the table does; None for a table that has none."""
    sharding: Any = getattr(table, "sharding", None)
    axis = sharding.spec[0] if isinstance(sharding, NamedSharding) and sharding.spec else None
    devices = 1 if axis is None else sharding.mesh.shape[axis]
    if unguided(table) or unguided(jax.ShapeDtypeStruct((table.shape[0] // devices, table.shape[1]), table.dtype)):
        return None
    if isinstance(table, jax.ShapeDtypeStruct):
        shapes = abstract_guide(table)
        if not isinstance(sharding, NamedSharding):
            return shapes
        lies = NamedSharding(sharding.mesh, PartitionSpec(axis))
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies), shapes)
    return compiled(_made(None if axis is None else sharding), table)(table)


@functools.cache
def _made(sharding: NamedSharding | None) -> Callable[[jax.Array], Guide]:
    """What makes a guide, of a table whose rows lie over an axis of a mesh as `sharding` says."""
    if sharding is None:
        return jax.jit(guide_of)
    on_mesh = {"mesh": sharding.mesh, "in_specs": sharding.spec, "out_specs": PartitionSpec(sharding.spec[0])}
    return jax.jit(jax.shard_map(guide_of, **on_mesh, check_vma=False))
