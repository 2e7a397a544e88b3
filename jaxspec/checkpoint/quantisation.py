"""Which matrices of a tree are quantised, and how: a tree of float matrices to one with `Packed` in their places."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.checkpoint.layout import Part, layouts_of
from jaxspec.trees import leaves_by_path
from pallas_kernels import packed


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a matrix is quantised: see `pallas_kernels.packed`."""

    kind: str  # of packed.KINDS
    group: int | None = None  # inputs that share a scale; None for one scale an output
    zeros: bool = False  # whether there are zero points
    scale_dtype: str = "bfloat16"  # of scales, and what a dequantised weight is rounded to


# From the name of a module of the checkpoint, as a key without ".weight", to its scheme, or None where it has float weights.
SchemeOf = Callable[[str], Scheme | None]


def with_packed(tree: Any, scheme_of: SchemeOf, prefix: str = "") -> Any:
    """A tree of ShapeDtypeStructs with a `Packed` in place of every matrix that is quantised. prefix: stands before our paths in the
    names that scheme_of takes.

    Embedding tables and vectors stay. Raises ValueError if the parts of a fused matrix have different schemes.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves_by_path(tree).items()}
    layouts = layouts_of(tree)

    def changed(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if len(leaf.shape) < 2 or "embed_tokens" in name or "norm" in name:
            return leaf
        # The last way names every module by itself.
        parts = layouts(name, shapes)[-1]
        schemes = {part.key: scheme_of(prefix + part.key.removesuffix(".weight")) for part in parts}
        if len(set(schemes.values())) > 1:
            listed = ", ".join(f"{key}: {scheme}" for key, scheme in list(schemes.items())[:4])
            raise ValueError(f"{name} is made of matrices that are quantised in different ways ({listed}); expected one way")
        scheme = next(iter(schemes.values()))
        if scheme is None:
            return leaf
        settings = {"group": scheme.group, "zeros": scheme.zeros, "scale_dtype": jnp.dtype(scheme.scale_dtype)}
        return packed.abstract(tuple(leaf.shape), scheme.kind, over=input_axes(tuple(leaf.shape), parts[0]), **settings)

    return jax.tree_util.tree_map_with_path(changed, tree)


def input_axes(shape: tuple[int, ...], part: Part) -> int:
    """How many of the last axes of a leaf are the inputs of the matrix, of which a part is [..., in] in the file."""
    return next(n for n in range(len(shape) - 1, 0, -1) if math.prod(shape[-n:]) == part.shape[-1])
