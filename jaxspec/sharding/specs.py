"""Which axis of which weight lies over which axis of a mesh: what the `partitions` of a target or a drafter say."""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WHOLE = PartitionSpec()

# Rows of (pattern, PartitionSpec). The first pattern found in a weight's path rules; what no row names is replicated.
SpecRules = tuple[tuple[str, PartitionSpec], ...]


def shard_tree(tree: Any, mesh: Mesh) -> Any:
    """A target's or a drafter's weights as ShapeDtypeStructs, with the sharding that its `partitions` give each."""
    specs = weight_specs(tree, mesh)
    return jax.tree.map(lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree, specs)


def weight_specs(tree: Any, mesh: Mesh) -> Any:
    """The PartitionSpec of every weight of a target or a drafter, in whose place it stands."""
    rows = partitions_of(tree)
    return jax.tree_util.tree_map_with_path(lambda path, x: weight_spec(dotted(path), x.shape, rows, mesh), tree)


def partitions_of(tree: Any) -> SpecRules:
    """The rows of a target or a drafter, none of one that lies whole on every device."""
    return getattr(tree, "partitions", None) or ()


def is_whole(tree: Any) -> bool:
    """Whether a target or drafter lies on every device of "tensor", and with it a drafter's part of the state."""
    return not partitions_of(tree)


def weight_spec(name: str, shape: tuple[int, ...], rows: SpecRules, mesh: Mesh) -> PartitionSpec:
    """Where the weight of a name and a shape lies. An axis that the mesh's does not divide is replicated."""
    spec = first_match(name, rows)
    fits = (axis if axis is None or size % mesh.shape[axis] == 0 else None for axis, size in zip(spec, shape, strict=False))
    return PartitionSpec(*fits)


def first_match(name: str, rows: SpecRules) -> PartitionSpec:
    """The spec of the first row whose pattern is found in a name."""
    return next((spec for pattern, spec in rows if re.search(pattern, name)), WHOLE)


def dotted(path: Any) -> str:
    """A path of JAX's as fields and indices joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
