"""Trees of arrays: their leaves by path, and their bytes."""

from __future__ import annotations

import math
from typing import Any

import jax


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, over all devices a replica counted once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_device(tree: Any) -> int:
    """Bytes that each device holds of a tree of arrays or ShapeDtypeStructs, all of it where they have no sharding."""

    def local(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        return math.prod(x.shape if sharding is None else sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(map(local, jax.tree.leaves(tree)))


def leaves(tree: Any) -> dict[str, Any]:
    """Leaves by path: fields and indices joined by dots."""
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
