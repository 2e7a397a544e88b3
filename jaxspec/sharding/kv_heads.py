"""Weights as a device of a mesh computes with them: KV heads repeated where "tensor" does not divide them.

KV heads that "tensor" does not divide are repeated until it does, and their query heads are dealt out to the copies, zero heads making
up the number. Whatever else an axis does not divide is replicated: a vocabulary, experts, the inner width of an MLP.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.model.layer_spec import LayerSpec
from jaxspec.model.split import KVHeads
from jaxspec.sharding.meshes import TENSOR
from jaxspec.sharding.specs import SpecRules, fields_spec, is_whole, partitions_of, weight_spec
from jaxspec.trees import is_packed
from pallas_kernels.packed import KINDS, Packed

OVER = ("sum_over", "gather_over", "axis")  # fields in which a module of a tree of `spread` has the mesh axis


def spread(tree: Any, mesh: Mesh) -> Any:
    """A target or a drafter as a device of the mesh computes with it inside `Layout.on`: KV heads repeated as often as "tensor" needs,
    and every module told over which axis its part of a sum or of a vocabulary lies. What a module needs, its members say: see
    `model.split`.

    tree: weights, or ShapeDtypeStructs, that lie as `shard_tree` says. Returns the same, of the new shapes."""
    return tree if is_whole(tree) or mesh.shape[TENSOR] == 1 else _spread(tree, (), partitions_of(tree), mesh)


def _spread(tree: Any, path: tuple[str, ...], rows: SpecRules, mesh: Mesh) -> Any:
    """A part of a tree. path: fields and indices that lead to it. rows: the whole tree's `partitions`."""
    if isinstance(tree, tuple):
        return tuple(_spread(x, (*path, str(i)), rows, mesh) for i, x in enumerate(tree))
    if isinstance(tree, dict):
        return {name: _spread(x, (*path, name), rows, mesh) for name, x in tree.items()}
    if not dataclasses.is_dataclass(tree) or is_packed(tree):
        return tree
    fields = {field.name: field.metadata.get("pytree_node", True) for field in dataclasses.fields(tree)}
    parts = {name: _spread(getattr(tree, name), (*path, name), rows, mesh) for name, is_weights in fields.items() if is_weights}
    module: Any = dataclasses.replace(tree, **parts)  # pyright: ignore[reportArgumentType]
    changes: dict[str, Any] = {name: _with_repeated(getattr(tree, name), mesh) for name, is_weights in fields.items() if not is_weights}

    def changed(name: str) -> Any:
        return changes.get(name, getattr(module, name))

    def spec_of(name: str, weight: Any) -> PartitionSpec:
        return weight_spec(".".join((*path, name)), weight, rows, mesh)

    def on_tensor(name: str) -> bool:
        return TENSOR in spec_of(f"{name}.weight", changed(name).weight)

    for heads in getattr(module, "kv_heads", ()):
        linear = getattr(module, heads.name)
        weight = _dealt(linear.weight, heads, lambda dealt, name=heads.name: spec_of(f"{name}.weight", dealt), mesh)
        changes[heads.name] = dataclasses.replace(linear, weight=weight)
    for name in getattr(module, "sums", ()):
        if on_tensor(name):
            changes[name] = dataclasses.replace(changed(name), sum_over=TENSOR)
    for name in getattr(module, "gathers", ()):
        if changed(name) is not None and on_tensor(name):
            changes[name] = dataclasses.replace(changed(name), gather_over=TENSOR)
    split = getattr(module, "split", None)
    if split is not None and TENSOR in spec_of(split, getattr(module, split)):
        changes["axis"] = TENSOR
    return dataclasses.replace(module, **changes)


def unspread(tree: Any) -> Any:
    """A tree of `spread` as plain functions compute with it, under `jax.jit` and outside of `shard_map`: no module sums or gathers by
    itself, since XLA cuts the work up by where the weights lie. Repeated KV heads stay."""
    if isinstance(tree, tuple):
        return tuple(map(unspread, tree))
    if isinstance(tree, dict):
        return {name: unspread(x) for name, x in tree.items()}
    if not dataclasses.is_dataclass(tree) or is_packed(tree):
        return tree
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        if field.metadata.get("pytree_node", True):
            changes[field.name] = unspread(value)
        elif field.name in OVER and value == TENSOR:
            changes[field.name] = None
    return dataclasses.replace(tree, **changes)  # pyright: ignore[reportArgumentType]


def _with_repeated(static: Any, mesh: Mesh) -> Any:
    """A setting of a module in which every layer has its KV heads as `_repeated` says."""
    if isinstance(static, LayerSpec):
        return _repeated(static, mesh)
    if type(static) is tuple:
        return tuple(_with_repeated(x, mesh) for x in static)
    if dataclasses.is_dataclass(static) and not isinstance(static, type):
        new = {field.name: _with_repeated(getattr(static, field.name), mesh) for field in dataclasses.fields(static)}
        changes = {name: value for name, value in new.items() if value != getattr(static, name)}
        return dataclasses.replace(static, **changes) if changes else static
    return static


def _repeated(spec: LayerSpec, mesh: Mesh) -> LayerSpec:
    """The layer with each KV head as often as "tensor" needs, and as many query heads for each copy as all of them need."""
    copies = _copies(spec, mesh)
    kv_heads = spec.num_kv_heads * copies
    return dataclasses.replace(spec, num_kv_heads=kv_heads, num_heads=kv_heads * -(-spec.group // copies))


def _copies(spec: LayerSpec, mesh: Mesh) -> int:
    return mesh.shape[TENSOR] // math.gcd(spec.num_kv_heads, mesh.shape[TENSOR])


def _dealt(weight: Any, heads: KVHeads, spec_of: Callable[[Any], PartitionSpec], mesh: Mesh) -> Any:
    """The weight with the query heads of each KV head dealt out to its copies; see `_deal`. spec_of: where a weight like this lies."""
    copies, queries = _copies(heads.spec, mesh), heads.queries
    if copies == 1:
        return weight
    settings = (heads.axis, queries, -(-queries // copies), copies)
    dealt = jax.eval_shape(functools.partial(_deal, axis=heads.axis, queries=queries, group=settings[2], copies=copies), weight)
    spec = spec_of(dealt)
    shardings = jax.tree.map(lambda to: NamedSharding(mesh, to), fields_spec(dealt, spec) if is_packed(dealt) else spec)
    if isinstance(jax.tree.leaves(weight)[0], jax.ShapeDtypeStruct):
        return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), dealt, shardings)
    return _deal_onto(shardings)(weight, *settings)


@functools.cache
def _deal_onto(shardings: Any) -> Callable[..., Any]:
    return jax.jit(_deal, static_argnums=(1, 2, 3, 4), out_shardings=shardings)


def _deal(weight: Any, axis: int, queries: int, group: int, copies: int) -> Any:
    """weight: KV heads on `axis`, of which the first `queries` entries of the next axis are dealt out, `group` to each of `copies`
    copies and zeros where there are no more; all other entries are repeated."""
    deal = functools.partial(_deal_array, axis=axis, queries=queries, group=group, copies=copies)
    if not is_packed(weight):
        return deal(weight)
    if weight.groups is not None or axis < weight.ndim - weight.over:
        return jax.tree.map(deal, weight)
    if copies * group > queries and (KINDS[weight.kind].offset or weight.zero is not None):
        # Codes of 0 stand for 0 only by a scale of 0, in an affine matrix with a zero of 0. So every block gets these of its own.
        return jax.tree.map(deal, _with_scales_of_blocks(weight))
    return dataclasses.replace(weight, words=deal(weight.words))  # a scale of all inputs has no heads


def _with_scales_of_blocks(weight: Packed) -> Packed:
    """The same matrix with scales and zeros along all its inputs."""

    def along(field: jax.Array) -> jax.Array:
        return jnp.broadcast_to(field, (*weight.words.shape[: weight.ndim], *field.shape[weight.ndim :]))

    return dataclasses.replace(weight, scale=along(weight.scale), zero=None if weight.zero is None else along(weight.zero))


def _deal_array(weight: jax.Array, axis: int, queries: int, group: int, copies: int) -> jax.Array:
    """`_deal` for an array: a float matrix, or a field of a packed one."""
    own, shared = jnp.split(weight, [queries], axis=axis + 1)
    ends = [(0, 0)] * weight.ndim
    ends[axis + 1] = (0, copies * group - queries)
    own = jnp.pad(own, ends).reshape(*weight.shape[: axis + 1], copies, group, *weight.shape[axis + 2 :])
    shared = jnp.broadcast_to(jnp.expand_dims(shared, axis + 1), (*own.shape[: axis + 2], *shared.shape[axis + 1 :]))
    both = jnp.concatenate([own, shared], axis=axis + 2)
    return both.reshape(*weight.shape[:axis], -1, *both.shape[axis + 2 :])
