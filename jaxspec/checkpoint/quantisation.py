"""Which matrices of a checkpoint are quantised, and how: what a format has to say, and the tree with `Packed` in the place of matrices."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.layout import Part, layouts_of
from jaxspec.checkpoint.safetensors import Stored
from jaxspec.trees import is_packed, leaves_by_path
from pallas_kernels import packed


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a matrix is quantised: see `pallas_kernels.packed`."""

    kind: str  # of packed.KINDS
    group: int | None = None  # inputs that share a scale; None for one scale an output
    zeros: bool = False  # whether there are zero points
    scale_dtype: str = "bfloat16"  # of scales, and what a dequantised weight is rounded to
    affine: bool = False  # whether zero points are not codes but what a code of 0 stands for


EMBEDDING = "embed_tokens"  # the module of the token embedding
PER_LAYER = "embed_tokens_per_layer"  # and that of the per-layer embeddings, a table that is gathered from alone
# Matrices whose products take rows as they are whatever their own kind is: routed experts, routers, embeddings and heads.
AS_THEY_ARE = re.compile(rf"\bexperts\.|\brouter\.|\bmoe\.gate\.|{EMBEDDING}|\blm_head\b")

# Small matrices, which kernels take with others where they are not packed. They are unpacked as they are read, into the same numbers.
UNPACKED = re.compile(r"\bper_layer_(input_gate|projection)\b")

# From the name of a module of the checkpoint, as a key without ".weight", to its scheme, or None where it has float weights.
SchemeOf = Callable[[str], Scheme | None]


class Wanted(NamedTuple):
    """A tensor that a checkpoint holds for a quantised matrix."""

    shape: tuple[int, ...]  # () takes any shape of one element
    dtypes: tuple[str, ...]  # those it may have, as safetensors names them
    optional: bool = False


class Matrix(NamedTuple):
    """A quantised matrix in host memory, as `packed.pack` takes it but with one axis of inputs."""

    codes: np.ndarray  # [..., out, in] uint8: see packed.KINDS
    scale: np.ndarray  # [..., out, ceil(in / group)], or [..., out, 1] without groups; in the scheme's scale_dtype
    # As `scale`, the code that stands for zero (of int8: the number), or of an affine scheme what a code of 0 stands for; of any dtype.
    zero: np.ndarray | None = None


class Format(Protocol):
    """How a checkpoint holds one quantised matrix, or the experts' as one tensor."""

    @property
    def scheme(self) -> Scheme: ...

    def tensors(self, key: str, shape: tuple[int, ...]) -> dict[str, Wanted]:
        """The tensors that hold a matrix, by key. key: of the float matrix in the file, as layout.Part has it, after the prefix.
        shape: [..., out, in], of the float matrix. Raises ValueError for a shape that cannot be quantised so."""
        ...

    def read(self, key: str, shape: tuple[int, ...], tensors: Mapping[str, Stored]) -> Matrix:
        """The matrix. tensors: those of `tensors` that are there, by key, unread. Raises ValueError for contents that do not fit."""
        ...


@dataclasses.dataclass(frozen=True)
class Quantisation:
    """How the matrices of a checkpoint are quantised: what a config says, or what `load` was asked to make of float weights."""

    name: str  # of the format, for messages
    format_of: Callable[[str], Format | None]  # from a layer's module's name to its format, or None where it has float weights
    # By layer, what its keys and its values are divided by in a cache of float8; layers that the file says nothing of are not in it.
    kv_scales: Mapping[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    embedding: Format | None = None  # of the token embedding, which is the head too, or None where it is float
    per_layer: Format | None = None  # of the per-layer embeddings, the same
    inputs: str | None = None  # what rows of products with matrices of this kind are rounded to: see `packed.Packed`
    dense: bool = False  # whether a config says that all weights are float, as one for the cache alone does
    converted: bool = False  # whether matrices lie in the checkpoint as they do in memory

    def format_for(self, name: str) -> Format | None:
        """The format of a module, embeddings among them, or None where it has float weights."""
        return self.embedding if name.endswith(EMBEDDING) else self.per_layer if name.endswith(PER_LAYER) else self.format_of(name)

    def scheme_of(self, name: str) -> Scheme | None:
        """See `SchemeOf`."""
        found = self.format_for(name)
        return None if found is None else found.scheme

    def applied(self, tree: Any, prefix: str) -> Any:
        """A tree of ShapeDtypeStructs as `with_packed` makes it. Those of UNPACKED are packed too where a converted checkpoint has them so,
        and where rows of their products are to be rounded. prefix and errors: as there."""
        unpacked = not self.converted and self.inputs is None
        tables = [name for name, form in ((EMBEDDING, self.embedding), (PER_LAYER, self.per_layer)) if form is not None]
        return with_packed(tree, self.scheme_of, prefix, tables=tables, unpacked=unpacked)


def with_packed(tree: Any, scheme_of: SchemeOf, prefix: str = "", *, tables: Sequence[str] = (), unpacked: bool = True) -> Any:
    """A tree of ShapeDtypeStructs with a `Packed` in place of every matrix that is quantised. prefix: stands before our paths in the
    names that scheme_of takes. tables: the modules of embeddings that scheme_of is asked for too. unpacked: whether those of UNPACKED stay,
    if their dtype holds the numbers that they stand for.

    Other embedding tables and vectors stay. Raises ValueError if the parts of a fused matrix have different schemes.
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in leaves_by_path(tree).items()}
    layouts = layouts_of(tree)

    def changed(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        is_table = EMBEDDING in name and not name.removesuffix(".weight").endswith(tuple(tables))
        if len(leaf.shape) < 2 or is_table or "norm" in name:
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
        shape, over = tuple(leaf.shape), input_axes(tuple(leaf.shape), parts[0])
        settings = {"group": group_within(shape, over, scheme.group), "zeros": scheme.zeros, "affine": scheme.affine}
        try:
            made = packed.abstract(shape, scheme.kind, over=over, scale_dtype=jnp.dtype(scheme.scale_dtype), **settings)
        except ValueError as error:
            raise ValueError(f"{prefix}{parts[0].key} cannot be packed: {error}") from error
        return leaf if unpacked and UNPACKED.search(name) and _holds(leaf.dtype, scheme.scale_dtype) else made

    return jax.tree_util.tree_map_with_path(changed, tree)


def _holds(dtype: Any, other: Any) -> bool:
    """Whether a float dtype has every number of another."""
    whole, part = jnp.finfo(dtype), jnp.finfo(other)
    return whole.nmant >= part.nmant and whole.nexp >= part.nexp


def with_rounded_inputs(tree: Any, kind: str) -> Any:
    """A tree of `with_packed` in which the products of every matrix of a kind take rows that are rounded to it: see `Packed.inputs`. Those
    of AS_THEY_ARE do not.

    Raises ValueError if there is no such matrix, with the kinds that there are."""
    found = set()

    def changed(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if AS_THEY_ARE.search(name) or not is_packed(leaf):
            return leaf
        found.add(leaf.kind)
        return dataclasses.replace(leaf, inputs=kind) if leaf.kind == kind else leaf

    made = jax.tree_util.tree_map_with_path(changed, tree, is_leaf=is_packed)
    if kind not in found:
        held = f"in {' and '.join(sorted(found))}; expected {kind}" if found else f"float; expected {kind}, which quantize={kind!r} makes"
        raise ValueError(f"quantize_activations is {kind!r}, but the weights of the target's layers, routed experts aside, are {held}")
    return made


def group_within(shape: tuple[int, ...], over: int, group: int | None) -> int | None:
    """How many inputs share a scale in the leaf of this shape, given how many do in the file, where all inputs are one axis: groups may
    not reach over the end of the leaf's last axis, so a scale may have to stand for several. over: how many axes of the leaf are inputs."""
    return group if group is None or over == 1 else math.gcd(group, shape[-1])


def input_axes(shape: tuple[int, ...], part: Part) -> int:
    """How many of the last axes of a leaf are the inputs of the matrix, of which a part is [..., in] in the file."""
    return next(n for n in range(len(shape) - 1, 0, -1) if math.prod(shape[-n:]) == part.shape[-1])
