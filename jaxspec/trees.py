"""Trees of arrays, or of ShapeDtypeStructs: their leaves by path, their bytes, and their weights, of which a packed matrix is one."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.lm_head import Guide
from pallas_kernels.packed import Packed


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree. An array counts once, however many devices hold a copy."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_device(tree: Any) -> int:
    """Bytes that each device holds of a tree. A leaf without a sharding counts whole."""

    def local(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        return math.prod(x.shape if sharding is None else sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(map(local, jax.tree.leaves(tree)))


def leaves_by_path(tree: Any, *, whole: tuple[type, ...] = ()) -> dict[str, Any]:
    """A tree's leaves by path, in the tree's order. A path is fields and indices joined by dots. whole: classes of nodes that count as
    leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, whole))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def is_packed(x: Any) -> bool:
    """Whether this is a packed matrix, whose fields are leaves of a tree: to be given as `is_leaf`."""
    return isinstance(x, Packed)


def weights_of(tree: Any) -> list[Any]:
    """A tree's weights, a packed matrix as one of them: `size` and `shape` of each are those of the numbers that it stands for. Guides of
    heads, which are copies, are left out."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: is_packed(x) or isinstance(x, Guide))
    return [leaf for leaf in leaves if not isinstance(leaf, Guide)]


def weight_count(tree: Any) -> int:
    """How many numbers a tree's weights are."""
    return sum(weight.size for weight in weights_of(tree))


def told(self: Any) -> str:
    """A module's `__repr__`: its class, how many weights it has, and in which dtypes. All of its arrays would fill many screens."""
    weights = [weight for weight in weights_of(self) if is_packed(weight) or hasattr(weight, "dtype")]
    floats = {str(weight.dtype) for weight in weights if not is_packed(weight) and jnp.issubdtype(weight.dtype, jnp.floating)}
    kinds = " and ".join(sorted({*floats, *(weight.kind for weight in weights if is_packed(weight))}))
    return f"{type(self).__name__}({sum(weight.size for weight in weights):,} weights in {kinds})"


def packed_kinds(tree: Any) -> list[str]:
    """The kinds of its packed matrices, such as "int4", in alphabetical order."""
    return sorted({weight.kind for weight in weights_of(tree) if is_packed(weight)})


def rounded_inputs(tree: Any) -> list[str]:
    """What rows of products with its packed matrices are rounded to, such as "fp8": see `Packed.inputs`."""
    return sorted({weight.inputs for weight in weights_of(tree) if is_packed(weight) and weight.inputs is not None})
