"""Where weights and state lie on a mesh: rows of (pattern of a path, PartitionSpec).

Axes of a mesh are "data" and "tensor". KV heads lie over "tensor" with their query heads and their part of the cache, the inner
width of a gated MLP, experts and the vocabulary lie over it too, and the compiler adds the communication. An axis that the mesh does
not divide is replicated.
"""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# The first pattern found in a path rules; what no row names is replicated. Fused layouts: see gemma4.py.
WEIGHTS: tuple[tuple[str, PartitionSpec], ...] = (
    (r"embed_tokens(_per_layer)?\.weight$", PartitionSpec("tensor", None)),
    (r"qkv_proj\.weight$", PartitionSpec("tensor", None, None, None)),
    (r"o_proj\.weight$", PartitionSpec(None, "tensor", None, None)),
    (r"experts\.gate_up_proj$", PartitionSpec("tensor", None, None, None)),
    (r"experts\.down_proj$", PartitionSpec("tensor", None, None)),
    (r"mlp\.gate_up_proj\.weight$", PartitionSpec(None, "tensor", None)),
    (r"mlp\.down_proj\.weight$", PartitionSpec(None, "tensor")),
)
STATE: tuple[tuple[str, PartitionSpec], ...] = ((r"cache\.layers\.\d+\.[kv]$", PartitionSpec(None, None, "tensor", None)),)


def mesh(*, data: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of the first data * tensor devices. Raises ValueError if there are fewer."""
    devices = jax.devices()
    if data < 1 or tensor < 1 or data * tensor > len(devices):
        raise ValueError(f"a mesh of data={data} times tensor={tensor} devices was asked for; found {len(devices)} devices")
    return Mesh(np.asarray(devices[: data * tensor]).reshape(data, tensor), ("data", "tensor"))


def shard_tree(abstract: Any, mesh: Mesh) -> Any:
    """A tree of weights' ShapeDtypeStructs, with the sharding that WEIGHTS gives each."""

    def place(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_sharding(path, leaf, WEIGHTS, mesh))

    return jax.tree_util.tree_map_with_path(place, abstract)


def state_shardings(state: Any, mesh: Mesh) -> Any:
    """The shardings of a DecodeState, given as shapes. Raises ValueError for a mesh whose data axis is longer than 1."""
    if mesh.shape["data"] != 1:
        raise ValueError(f"the mesh has a data axis of {mesh.shape['data']}; slots can be spread over 1 only, use the tensor axis")
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _sharding(path, leaf, STATE, mesh), state)


def _sharding(path: Any, leaf: Any, rows: tuple[tuple[str, PartitionSpec], ...], mesh: Mesh) -> NamedSharding:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    spec = next((spec for pattern, spec in rows if re.search(pattern, name)), PartitionSpec())
    fits = (axis if axis is None or size % mesh.shape[axis] == 0 else None for axis, size in zip(spec, leaf.shape, strict=False))
    return NamedSharding(mesh, PartitionSpec(*fits))
