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
from jax.sharding import Mesh, NamedSharding

from jaxspec.drafters.blocks import SiluMLP
from jaxspec.drafters.dflash import DFlash, DFlashAttention
from jaxspec.drafters.eagle3 import Eagle3, Eagle3Attention
from jaxspec.drafters.mtp_modules import Module
from jaxspec.model.config import LayerSpec
from jaxspec.model.gemma4 import Attention
from jaxspec.model.layers import Embedding, GatedMLP
from jaxspec.model.moe import Experts
from jaxspec.sharding.meshes import TENSOR
from jaxspec.sharding.specs import is_whole, root_name, weight_spec


def spread(tree: Any, mesh: Mesh) -> Any:
    """A target or a drafter as a device of the mesh computes with it inside `Layout.on`: KV heads repeated as often as "tensor" needs,
    and every module told over which axis its part of a sum or of a vocabulary lies.

    tree: weights, or ShapeDtypeStructs, that lie as `shard_tree` says. Returns the same, of the new shapes."""
    return tree if is_whole(tree) or mesh.shape[TENSOR] == 1 else _spread(tree, root_name(tree), mesh)


def _spread(tree: Any, path: str, mesh: Mesh) -> Any:
    if isinstance(tree, tuple):
        return tuple(_spread(x, f"{path}.{i}", mesh) for i, x in enumerate(tree))
    if isinstance(tree, dict):
        return {name: _spread(x, f"{path}.{name}", mesh) for name, x in tree.items()}
    if not dataclasses.is_dataclass(tree):
        return tree
    weights = [field.name for field in dataclasses.fields(tree) if field.metadata.get("pytree_node", True)]
    parts = {name: _spread(getattr(tree, name), f"{path}.{name}", mesh) for name in weights}
    module: Any = dataclasses.replace(tree, **parts)  # pyright: ignore[reportArgumentType]
    changes: dict[str, Any] = {}

    def on_tensor(weight: str, leaf: Any) -> bool:
        return TENSOR in weight_spec(f"{path}.{weight}", leaf.shape, mesh)

    def gathered(name: str) -> None:
        linear = getattr(module, name)
        if linear is not None and on_tensor(f"{name}.weight", linear.weight):
            changes[name] = dataclasses.replace(linear, gather_over=TENSOR)

    if isinstance(module, Attention | DFlashAttention | Eagle3Attention):
        changes["spec"], queries = _repeated(module.spec, mesh), "q_proj" if isinstance(module, DFlashAttention) else "qkv_proj"
        for name, axis in ((queries, 0), ("o_proj", 1)):
            linear = getattr(module, name)
            weight = _dealt(linear.weight, f"{path}.{name}.weight", axis, module.spec.group, module.spec, mesh)
            changes[name] = dataclasses.replace(linear, weight=weight, sum_over=TENSOR if name == "o_proj" else None)
    elif isinstance(module, GatedMLP | SiluMLP) and on_tensor("down_proj.weight", module.down_proj.weight):
        changes["down_proj"] = dataclasses.replace(module.down_proj, sum_over=TENSOR)
    elif (isinstance(module, Embedding) and on_tensor("weight", module.weight)) or (
        isinstance(module, Experts) and on_tensor("down_proj", module.down_proj)
    ):
        changes["axis"] = TENSOR
    elif isinstance(module, Module):
        gathered("eh_proj")
    elif isinstance(module, DFlash | Eagle3):
        gathered("fc")
        if module.d2t is not None:
            gathered("lm_head")
    if isinstance(module, DFlash):
        weight = _dealt(module.kv_proj.weight, f"{path}.kv_proj.weight", 2, 0, module.config.layers[0], mesh)
        changes["kv_proj"] = dataclasses.replace(module.kv_proj, weight=weight)
    if (config := getattr(module, "config", None)) is not None:
        changes["config"] = _repeated_config(config, mesh)
    return dataclasses.replace(module, **changes)


def _repeated(spec: LayerSpec, mesh: Mesh) -> LayerSpec:
    """The layer with each KV head as often as "tensor" needs, and as many query heads for each copy as all of them need."""
    copies = _copies(spec, mesh)
    kv_heads = spec.num_kv_heads * copies
    return dataclasses.replace(spec, num_kv_heads=kv_heads, num_heads=kv_heads * -(-spec.group // copies))


def _repeated_config(config: Any, mesh: Mesh) -> Any:
    if hasattr(config, "text"):
        return dataclasses.replace(config, text=_repeated_config(config.text, mesh))
    return dataclasses.replace(config, layers=tuple(_repeated(spec, mesh) for spec in config.layers))


def _copies(spec: LayerSpec, mesh: Mesh) -> int:
    return mesh.shape[TENSOR] // math.gcd(spec.num_kv_heads, mesh.shape[TENSOR])


def _dealt(weight: Any, path: str, axis: int, queries: int, spec: LayerSpec, mesh: Mesh) -> Any:
    """The weight with each KV head's `queries` query heads dealt out to its copies; see `_deal`."""
    copies = _copies(spec, mesh)
    if copies == 1:
        return weight
    settings = (axis, queries, -(-queries // copies), copies)
    shape = jax.eval_shape(functools.partial(_deal, axis=axis, queries=queries, group=settings[2], copies=copies), weight).shape
    sharding = NamedSharding(mesh, weight_spec(path, shape, mesh))
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, weight.dtype, sharding=sharding)
    return _deal_onto(sharding)(weight, *settings)


@functools.cache
def _deal_onto(sharding: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(_deal, static_argnums=(1, 2, 3, 4), out_shardings=sharding)


def _deal(weight: jax.Array, axis: int, queries: int, group: int, copies: int) -> jax.Array:
    """weight: KV heads on `axis`, of which the first `queries` entries of the next axis are dealt out, `group` to each of `copies`
    copies and zeros where there are no more; all other entries are repeated."""
    own, shared = jnp.split(weight, [queries], axis=axis + 1)
    ends = [(0, 0)] * weight.ndim
    ends[axis + 1] = (0, copies * group - queries)
    own = jnp.pad(own, ends).reshape(*weight.shape[: axis + 1], copies, group, *weight.shape[axis + 2 :])
    shared = jnp.broadcast_to(jnp.expand_dims(shared, axis + 1), (*own.shape[: axis + 2], *shared.shape[axis + 1 :]))
    both = jnp.concatenate([own, shared], axis=axis + 2)
    return both.reshape(*weight.shape[:axis], -1, *both.shape[axis + 2 :])
