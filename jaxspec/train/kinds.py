"""The kinds of drafters that can be trained: what a fresh one is made of, and how it begins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.formats import quantisation_config
from jaxspec.drafters.base import fitted
from jaxspec.drafters.kind import Kind
from jaxspec.drafters.registry import trainable
from jaxspec.model.target import TargetConfig, TargetModel
from pallas_kernels.packed import Packed, unpack


def kind_of(name: str) -> Kind:
    """The kind of drafters of a name. Raises ValueError for one that cannot be trained."""
    kinds = trainable()
    if name not in kinds:
        raise ValueError(f"drafter_kind is {name!r}; available: {', '.join(map(repr, kinds))}")
    return kinds[name]


def fresh(kind: Kind, config: Mapping[str, Any], target: TargetModel, tokens: np.ndarray, seed: int) -> Any:
    """A drafter that has learnt nothing, float32. tokens: what it will be trained on, whose counts choose a draft vocabulary.

    Heads begin as rows of the target's, and the norms before such a head, or before the target's own, as the target's last norm:
    see the drafters' `fresh`. Raises ValueError as `abstract_fresh`.
    """
    weights = initial(abstract_fresh(kind, config, target.config), seed, target.config.hidden_size)
    head, _ = target.head
    table, norm = (np.asarray(x, np.float32) for x in (unpack(head) if isinstance(head, Packed) else head, target.norm.weight))
    begin = getattr(weights, "fresh", None)
    return weights if begin is None else begin(table, norm, tokens, seed)


def abstract_fresh(kind: Kind, config: Mapping[str, Any], target: TargetConfig) -> Any:
    """That drafter as a tree of ShapeDtypeStructs. Raises ValueError for a config that is not of this kind, does not fit the target, or has
    quantised weights."""
    if found := quantisation_config(config):
        method = found.get("quant_method", "unknown")
        raise ValueError(f"config.json says that the weights are quantised (quant_method {method!r}); a drafter that is trained is float")
    return fitted(kind.from_checkpoint(None, config, target, jnp.float32), target)


def initial(abstract: Any, seed: int, width: int) -> Any:
    """Random float32 weights for a model of about this width; norms and scalars begin as one. By NumPy, which compiles nothing."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        if "norm" in name or name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            return jnp.ones(leaf.shape, jnp.float32)
        return jnp.asarray(0.8 * width**-0.5 * rng.standard_normal(leaf.shape, np.float32), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract)
