"""Where weights and state lie on a mesh, and how the functions of `decode` run there. It may import decode, drafters, models and what lies
below them."""

from jaxspec.sharding.kv_heads import spread
from jaxspec.sharding.layout import Layout
from jaxspec.sharding.meshes import DATA, TENSOR, check, data_shards, mesh, mesh_of
from jaxspec.sharding.placement import OneDevice, OnMesh, Placement, placement_of
from jaxspec.sharding.specs import WHOLE, shard_tree
from jaxspec.trees import bytes_per_device, nbytes

__all__ = [
    "DATA",
    "TENSOR",
    "WHOLE",
    "Layout",
    "OnMesh",
    "OneDevice",
    "Placement",
    "bytes_per_device",
    "check",
    "data_shards",
    "mesh",
    "mesh_of",
    "nbytes",
    "placement_of",
    "shard_tree",
    "spread",
]
