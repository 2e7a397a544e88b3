"""Which axis of which weight lies over which axis of a mesh: rows of (pattern of a path, PartitionSpec)."""

from __future__ import annotations

import re
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.drafters.assistant import Gemma4MTP
from jaxspec.drafters.dflash import DFlash
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.eagle3 import Eagle3
from jaxspec.drafters.mtp_modules import MTPModules
from jaxspec.model.gemma4 import Gemma4
from jaxspec.sharding.meshes import TENSOR

WHOLE = PartitionSpec()
SPREAD = (Gemma4, Gemma4MTP, DFlash, Eagle3, MTPModules, DraftModel)  # any other drafter lies on every device
# A draft model whose layers take less, in bytes, is read by every device sooner than two sums a layer are made.
SMALL_LAYER = 2**27

# The first pattern found in a path rules; what no row names is replicated. Paths begin with the class of the whole tree. Fused layouts:
# see gemma4.py and drafters/.
WEIGHT_SPECS: tuple[tuple[str, PartitionSpec], ...] = (
    (r"^Gemma4MTP\b.*\bmlp\.", WHOLE),  # so narrow that a sum takes longer than reading it
    (r"^Gemma4MTP with centroids\.model\.embed_tokens\.", WHOLE),  # a few of whose rows are read, in any order
    (r"embed_tokens(_per_layer)?\.weight$", PartitionSpec(TENSOR, None)),
    (r"(lm_head|shared_head\.output)\.weight$", PartitionSpec(TENSOR, None)),
    (r"\b(fc|eh_proj)\.weight$", PartitionSpec(TENSOR, None)),
    (r"\b(qkv|q)_proj\.weight$", PartitionSpec(TENSOR, None, None, None)),
    (r"\bkv_proj\.weight$", PartitionSpec(None, None, TENSOR, None, None)),
    (r"\bo_proj\.weight$", PartitionSpec(None, TENSOR, None, None)),
    (r"experts\.gate_up_proj$", PartitionSpec(TENSOR, None, None, None)),
    (r"experts\.down_proj$", PartitionSpec(TENSOR, None, None)),
    (r"mlp\.gate_up_proj\.weight$", PartitionSpec(None, TENSOR, None)),
    (r"mlp\.down_proj\.weight$", PartitionSpec(None, TENSOR)),
)


def shard_tree(tree: Any, mesh: Mesh) -> Any:
    """A target's or a drafter's weights as ShapeDtypeStructs, with the sharding that WEIGHT_SPECS gives each."""
    specs = weight_specs(tree, mesh)
    return jax.tree.map(lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree, specs)


def weight_specs(tree: Any, mesh: Mesh) -> Any:
    """The PartitionSpec of every weight of a target or a drafter, in whose place it stands."""
    root = root_name(tree)
    return jax.tree_util.tree_map_with_path(lambda path, x: weight_spec(f"{root}.{dotted(path)}", x.shape, mesh, is_whole(tree)), tree)


def is_whole(tree: Any) -> bool:
    """Whether a target or drafter lies on every device of "tensor", and with it a drafter's part of the state."""
    if not isinstance(tree, DraftModel):
        return not isinstance(tree, SPREAD)
    layers = tree.model.layers
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layers)) < len(layers) * SMALL_LAYER


def weight_spec(name: str, shape: tuple[int, ...], mesh: Mesh, whole: bool = False) -> PartitionSpec:
    spec = WHOLE if whole else first_match(name, WEIGHT_SPECS)
    fits = (axis if axis is None or size % mesh.shape[axis] == 0 else None for axis, size in zip(spec, shape, strict=False))
    return PartitionSpec(*fits)


def first_match(name: str, rows: tuple[tuple[str, PartitionSpec], ...]) -> PartitionSpec:
    return next((spec for pattern, spec in rows if re.search(pattern, name)), WHOLE)


def root_name(tree: Any) -> str:
    with_centroids = isinstance(tree, Gemma4MTP) and tree.masked_embedding is not None
    return type(tree).__name__ + (" with centroids" if with_centroids else "")


def dotted(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
