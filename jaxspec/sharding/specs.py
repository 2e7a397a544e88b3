"""Which axis of which weight lies over which axis of a mesh: what the `partitions` of a target or a drafter say.

A packed matrix is cut between blocks. Its fields have the axes of the matrix first, so that what holds for the matrix holds for each.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.collectives import TENSOR
from jaxspec.trees import is_packed
from pallas_kernels.packed import BLOCK, Packed

WHOLE = PartitionSpec()

# Rows of (pattern, PartitionSpec). The first pattern found in a weight's path rules; what no row names is replicated.
SpecRules = tuple[tuple[str, PartitionSpec], ...]


def shard_tree(tree: Any, mesh: Mesh) -> Any:
    """A target's or a drafter's weights as ShapeDtypeStructs, with the sharding that its `partitions` give each.

    Raises ValueError if of two matrices whose parts belong together one is packed and cannot be cut as the other is, and if a packed
    embedding or head cannot be cut as other tables over its vocabulary are."""
    specs = weight_specs(tree, mesh)
    return jax.tree.map(lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree, specs)


def weight_specs(tree: Any, mesh: Mesh) -> Any:
    """The PartitionSpec of every weight of a target or a drafter, in whose place it stands; of a packed one, that of each field.

    Raises ValueError as `shard_tree` does."""
    rows = partitions_of(tree)

    def of(path: Any, weight: Any) -> Any:
        spec = weight_spec(dotted(path), weight, rows, mesh)
        return fields_spec(weight, spec) if is_packed(weight) else spec

    specs = jax.tree_util.tree_map_with_path(of, tree, is_leaf=is_packed)
    _check_tables(tree, specs, mesh)  # first, as it says more of what can be done
    _check_modules(tree, specs, rows)
    return specs


def _check_modules(tree: Any, specs: Any, rows: SpecRules) -> None:
    """Raises ValueError if a packed weight is whole although another weight of its module, whose parts belong to its own, is cut."""
    weights = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_packed)
    if not any(is_packed(weight) for _, weight in weights):
        return
    cut: dict[str, dict[str, bool]] = {}
    for (path, weight), spec in zip(weights, jax.tree.leaves(specs, is_leaf=is_packed), strict=True):
        name = dotted(path)
        module, _, field = name.removesuffix(".weight").rpartition(".")
        if field not in _alone(tree, module) and any(axis is not None for axis in first_match(name, rows)):
            cut.setdefault(module, {})[name] = any(axis is not None for axis in (spec.words if is_packed(weight) else spec))
    for of_module in cut.values():
        if len(set(of_module.values())) > 1:
            whole = next(name for name, is_cut in of_module.items() if not is_cut)
            others = ", ".join(name for name, is_cut in of_module.items() if is_cut)
            raise ValueError(f"{whole} is quantised and its blocks cannot be spread over the mesh as {others} is; expected fewer devices")


def _alone(tree: Any, path: str) -> set[str]:
    """The fields of the module at a path that may be cut or not whatever others are: those whose outputs are gathered, and projections
    whose KV heads are repeated where they are too few, if no sum of the module is over them."""

    def member(module: Any, key: str) -> Any:
        return module[key] if isinstance(module, dict) else module[int(key)] if isinstance(module, tuple) else getattr(module, key)

    module = functools.reduce(member, filter(None, path.split(".")), tree)
    heads = () if getattr(module, "sums", ()) else getattr(module, "kv_heads", ())
    return {*getattr(module, "gathers", ()), *(projection.name for projection in heads)}


def _check_tables(tree: Any, specs: Any, mesh: Mesh) -> None:
    """Raises ValueError for a packed embedding or head that is whole on a mesh by which a float one would be cut, as others over the
    vocabulary are: all have to hold the same tokens."""
    devices = mesh.shape[TENSOR]
    for field, called, instead in (("embed_tokens", "embedding", ", a float embedding"), ("lm_head", "head", "")):
        table: Any = getattr(getattr(tree, field, None), "weight", None)
        if not is_packed(table) or field in getattr(tree, "gathers", ()):
            continue
        vocab = table.shape[0]
        if TENSOR not in getattr(specs, field).weight.words and vocab % devices == 0:
            raise ValueError(
                f"the {called} of {vocab} tokens is quantised, and its blocks of {BLOCK} cannot be spread over {devices} devices; expected "
                f"fewer devices{instead}, or a vocabulary padded to a multiple of {BLOCK * devices} tokens"
            )


def fields_spec(weight: Packed, spec: PartitionSpec) -> Any:
    """The PartitionSpecs of a packed matrix's fields. spec: the matrix's. Scales lie whole along inputs that share one."""
    axes = zip(spec, weight.words.shape, weight.scale.shape, strict=False)
    scale = PartitionSpec(*(axis if blocks == scales else None for axis, blocks, scales in axes))
    return dataclasses.replace(weight, words=spec, scale=scale, zero=None if weight.zero is None else scale)


def partitions_of(tree: Any) -> SpecRules:
    """The rows of a target or a drafter, none of one that lies whole on every device."""
    return getattr(tree, "partitions", None) or ()


def is_whole(tree: Any) -> bool:
    """Whether a target or drafter lies on every device of "tensor", and with it a drafter's part of the state."""
    return not partitions_of(tree)


def weight_spec(name: str, weight: Any, rows: SpecRules, mesh: Mesh) -> PartitionSpec:
    """Where a weight of a name lies. An axis that the mesh's does not divide is replicated, as is an axis of a packed matrix that is
    not all full blocks."""
    spec = first_match(name, rows)
    sizes = list(weight.shape)
    if is_packed(weight):
        sizes = list(weight.words.shape[: weight.ndim])
        for axis, filling in zip((weight.ndim - weight.over - 1, weight.ndim - 1), weight.cut, strict=True):
            sizes[axis] = 1 if filling else sizes[axis]
    fits = (axis if axis is None or size % mesh.shape[axis] == 0 else None for axis, size in zip(spec, sizes, strict=False))
    return PartitionSpec(*fits)


def first_match(name: str, rows: SpecRules) -> PartitionSpec:
    """The spec of the first row whose pattern is found in a name."""
    return next((spec for pattern, spec in rows if re.search(pattern, name)), WHOLE)


def dotted(path: Any) -> str:
    """A path of JAX's as fields and indices joined by dots."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
