"""Where weights and state lie on a mesh, and how the functions of `decode` run there. It may import decode, drafters, models and what lies
below them."""

from jaxspec.sharding.layout import (
    DATA,
    TENSOR,
    WHOLE,
    Layout,
    abstract_mesh_of,
    bytes_per_device,
    check,
    data_shards,
    mesh,
    mesh_of,
    nbytes,
    shard_tree,
    spread,
)

__all__ = [
    "DATA",
    "TENSOR",
    "WHOLE",
    "Layout",
    "abstract_mesh_of",
    "bytes_per_device",
    "check",
    "data_shards",
    "mesh",
    "mesh_of",
    "nbytes",
    "shard_tree",
    "spread",
]
