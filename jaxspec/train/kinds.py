"""The kinds of drafters that can be trained: what a fresh one is made of, how it begins, and how it is written to a folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import checkpoint
from jaxspec.checkpoint import safetensors
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.drafters import dflash, draft_model, eagle3
from jaxspec.drafters import mtp_modules as mtp
from jaxspec.drafters.base import fitted
from jaxspec.model.config import AssistantConfig, Gemma4Config
from jaxspec.model.gemma4 import Gemma4
from jaxspec.model.layers import Linear
from jaxspec.train.losses import Objective


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of drafter. made: its class. objective: what it is trained towards. read: from config.json and the target's config to the
    drafter as a tree of float32 ShapeDtypeStructs."""

    made: type
    objective: Objective
    read: Callable[[Mapping[str, Any], Gemma4Config], Any]


# Steps and decays: SpecForge unrolls EAGLE-3 seven steps and weighs each 0.8 of the one before; DFlash's weights fall by e every
# fourth place of a block of 8 (arXiv 2602.06036, section 4.2).
KINDS = {
    "mtp": Kind(
        gemma4_mtp.Gemma4MTP,
        Objective(steps=5, decay=0.9, hard=1.0),
        lambda config, target: gemma4_mtp.abstract(AssistantConfig.from_hf(config), jnp.float32),
    ),
    "dflash": Kind(
        dflash.DFlash,
        Objective(steps=7, decay=0.78, hard=1.0),
        lambda config, target: dflash.abstract(dflash.DFlashConfig.from_hf(config, target), jnp.float32),
    ),
    "eagle3": Kind(
        eagle3.Eagle3,
        Objective(steps=5, decay=0.8, hard=1.0),
        lambda config, target: eagle3.abstract(eagle3.Eagle3Config.from_hf(config, target, ("lm_head.weight",)), jnp.float32),
    ),
    "mtp-modules": Kind(
        mtp.MTPModules,
        Objective(steps=4, decay=0.8, hard=1.0),
        lambda config, target: mtp.abstract(mtp.ModulesConfig.from_hf(config), jnp.float32),
    ),
    "draft-model": Kind(
        draft_model.DraftModel,
        Objective(steps=4, decay=1.0, hard=1.0),
        lambda config, target: draft_model.abstract(Gemma4Config.from_hf(config), jnp.float32),
    ),
}


def kind_of(name: str) -> Kind:
    if name not in KINDS:
        raise ValueError(f"drafter_kind is {name!r}; available: {', '.join(map(repr, KINDS))}")
    return KINDS[name]


def fresh(kind: Kind, config: Mapping[str, Any], target: Gemma4, tokens: np.ndarray, seed: int) -> Any:
    """A drafter that has learnt nothing, float32. tokens: what it will be trained on, whose counts choose a draft vocabulary.

    Heads begin as rows of the target's table, and the norms before such a head, or before the target's own, as the target's last norm.
    Raises ValueError for a config that is not of this kind, or does not fit the target.
    """
    abstract = fitted(kind.read(config, target.config), target.config)
    weights = initial(abstract, seed, target.config.hidden_size)
    table, norm = (np.asarray(x, np.float32) for x in (target.embed_tokens.weight, target.norm.weight))
    replace = dataclasses.replace
    if isinstance(weights, gemma4_mtp.Gemma4MTP) and weights.masked_embedding is not None:
        ordering = balanced_clusters(table, weights.config.num_centroids, seed)
        weights = replace(weights, masked_embedding=replace(weights.masked_embedding, token_ordering=jnp.asarray(ordering)))
    if isinstance(weights, dflash.DFlash | eagle3.Eagle3):
        chosen = np.arange(len(table))
        if weights.d2t is not None:
            chosen = draft_vocabulary(tokens, weights.d2t.shape[0], len(table))
            weights = replace(weights, d2t=jnp.asarray(chosen - np.arange(len(chosen)), jnp.int32))
        if weights.norm.weight.shape == norm.shape:
            weights = replace(weights, norm=replace(weights.norm, weight=jnp.asarray(norm)))
            if weights.lm_head is not None:
                weights = replace(weights, lm_head=Linear(jnp.asarray(table[chosen])))
    if isinstance(weights, mtp.MTPModules):
        head = replace(weights.modules[0].shared_head, norm=replace(weights.modules[0].shared_head.norm, weight=jnp.asarray(norm)))
        head = replace(head, output=Linear(jnp.asarray(table)))
        layers = {name: replace(module, shared_head=jax.tree.map(jnp.copy, head)) for name, module in weights.model.layers.items()}
        weights = replace(weights, model=mtp.MTPModel(layers))
    return weights


def initial(abstract: Any, seed: int, width: int) -> Any:
    """Random float32 weights for a model of about this width; norms and scalars begin as one. By NumPy, which compiles nothing."""
    rng = np.random.default_rng(seed)
    # Gemma's attention has no 1 / sqrt(D), so the query norm starts there; Qwen's, of which DFlash's is, does have it.
    scaled = not isinstance(abstract, dflash.DFlash)

    def draw(path: Any, leaf: Any) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)
        if "norm" in name or name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
            return jnp.full(leaf.shape, leaf.shape[0] ** -0.5 if scaled and "q_norm" in name else 1.0, jnp.float32)
        return jnp.asarray(0.8 * width**-0.5 * rng.standard_normal(leaf.shape, np.float32), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, abstract)


def draft_vocabulary(tokens: np.ndarray, size: int, vocab_size: int) -> np.ndarray:
    """The `size` most frequent token ids, in order; of equal counts the lower id."""
    counts = np.bincount(tokens.reshape(-1), minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def balanced_clusters(rows: np.ndarray, count: int, seed: int, rounds: int = 10) -> np.ndarray:
    """k-means with clusters of equal size: the row ids of each cluster in turn, [N] int32. rows: [N, D]; count divides N."""
    rng = np.random.default_rng(seed)
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True).clip(1e-6)
    size = len(rows) // count
    centres = rows[rng.choice(len(rows), count, replace=False)]
    owner = np.empty(len(rows), np.int64)
    for _ in range(rounds):
        similarity = rows @ centres.T
        owner[:], room = -1, np.full(count, size)
        for flat in np.argsort(-similarity, axis=None, kind="stable"):
            row, centre = divmod(int(flat), count)
            if owner[row] < 0 and room[centre]:
                owner[row], room[centre] = centre, room[centre] - 1
        centres = np.stack([rows[owner == centre].mean(axis=0) for centre in range(count)])
    return np.argsort(owner, kind="stable").astype(np.int32)


def save(folder: Path, drafter: Any, config: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """Writes config.json, model.safetensors and, where there is anything in it, generation_config.json. Weights get the config's dtype."""
    dtype = safetensors.FLOATS["BF16"] if config.get("dtype", config.get("torch_dtype")) == "bfloat16" else np.float32
    if isinstance(drafter, draft_model.DraftModel):
        prefix = "model." if "text_config" not in config else "model.language_model."
        checkpoint.save_weights(folder, drafter.model, config, prefix=prefix, dtype=dtype)
    else:
        checkpoint.save_weights(folder, drafter, config, dtype=dtype)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(dict(generation), indent=2) + "\n", encoding="utf-8")
