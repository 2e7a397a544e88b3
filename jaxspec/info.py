"""What a checkpoint is and needs, in lines of text: `jaxspec info`. Configs alone are read, no weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import checkpoint, drafters, gemma4
from jaxspec.config import FULL, SLIDING, Gemma4Config
from jaxspec.loading import DTYPES, read_target
from jaxspec.runner import nbytes


def describe(folder: Path, drafter: Path | None = None) -> Iterator[str]:
    """Lines about a target in a checkpoint folder, and about a drafter for it.

    Sizes are those of the text path in the checkpoint's dtype. Raises what `jaxspec.load` raises for checkpoints that cannot be
    used, a drafter that does not fit among them.
    """
    config, generation = read_target(folder)
    dtype = DTYPES.get(config.dtype, jnp.float32)
    tree = gemma4.abstract(config, dtype)
    sliding, full = (sum(layer.kind == kind for layer in config.layers) for kind in (SLIDING, FULL))
    shared = config.num_hidden_layers - len(config.kv_owners)
    experts = max(layer.num_experts for layer in config.layers)
    yield f"target      {folder}"
    yield f"layers      {sliding} sliding (window {config.sliding_window}), {full} full" + (f"; {shared} share K and V" if shared else "")
    yield f"width       hidden {config.hidden_size}, feed-forward {config.intermediate_size}" + (f", {experts} experts" if experts else "")
    for kind in (SLIDING, FULL):
        spec = next((layer for layer in config.layers if layer.kind == kind), None)
        if spec is not None:
            name = kind.removesuffix("_attention")
            equal = ", K = V" if spec.k_eq_v else ""
            yield f"{name:<11} {spec.num_heads} heads, {spec.num_kv_heads} KV heads of {spec.head_dim}{equal}"
    yield f"vocabulary  {config.vocab_size}; positions {config.max_position_embeddings}; generation {generation or 'unset'}"
    yield f"parameters  {_count(tree):,}, of which {_embeddings(config):,} are per-layer embeddings"
    yield f"weights     {_size(nbytes(tree))} in {jnp.dtype(dtype).name}"
    per_token = {kind: kv_bytes_per_token(config, kind, jnp.dtype(dtype).itemsize) for kind in (SLIDING, FULL)}
    yield f"KV cache    sliding {per_token[SLIDING]:,} bytes a token, for the window; full {per_token[FULL]:,} bytes a token"
    if drafter is not None:
        draft: Any = drafters.abstract_drafter(drafter, config, dtype)
        count = checkpoint.read_generation_config(drafter).get("num_assistant_tokens", "unset")
        yield f"drafter     {drafter}"
        kind = type(draft).__name__
        yield f"            {kind}, fits; {_count(draft):,} parameters, {_size(nbytes(draft))}; num_assistant_tokens {count}"


def kv_bytes_per_token(config: Gemma4Config, kind: str, itemsize: int) -> int:
    """Bytes that one token adds to the cache over all layers of `kind` that own K and V."""
    owners = (config.layers[i] for i in config.kv_owners)
    return sum(spec.num_kv_heads * (spec.key_dims + spec.head_dim) * itemsize for spec in owners if spec.kind == kind)


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _embeddings(config: Gemma4Config) -> int:
    return config.vocab_size_per_layer_input * config.num_hidden_layers * config.hidden_size_per_layer_input


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"
