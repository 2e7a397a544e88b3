"""Released targets cut to their first layers, for tests on a GPU."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import released
from jaxspec.bench.random_weights import random_weights
from jaxspec.model.gemma4_config import Gemma4Config


def first_layers(name: str) -> Gemma4Config:
    """The config of a released target with six layers, or twenty where the last five share K and V: of the E2B, the first fifteen own
    them."""
    raw = released.TARGETS[name]
    text = raw["text_config"]
    layers = 6 if text["num_kv_shared_layers"] == 0 else 20
    text = {**text, "num_hidden_layers": layers, "layer_types": text["layer_types"][:layers]}
    text["num_kv_shared_layers"] = min(text["num_kv_shared_layers"], 5)
    return Gemma4Config.from_hf({**raw, "text_config": text})


def calm_weights(abstract: Any) -> Any:
    """Random weights of shapes. Scores of random queries would be so large that a rounding decides which key is seen, so norms of queries
    are small."""

    def calmed(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf / jnp.asarray(16, leaf.dtype) if "q_norm" in jax.tree_util.keystr(path) else leaf

    return jax.tree_util.tree_map_with_path(calmed, random_weights(abstract, 0))
