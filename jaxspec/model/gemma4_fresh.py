"""What training begins with where layers are Gemma 4's: config.json of a fresh draft model, the text config of other fresh drafters, and
weights of norms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.target import TargetConfig

Tree = TypeVar("Tree")

MASK_TOKEN = 4  # `<mask>`

# What a fresh text config has of the target's.
_SHARED = (
    "vocab_size", "head_dim", "num_attention_heads", "num_key_value_heads", "attention_k_eq_v", "attention_bias", "attention_dropout",
    "hidden_activation", "rms_norm_eps", "rope_parameters", "sliding_window", "max_position_embeddings", "tie_word_embeddings",
    "pad_token_id", "eos_token_id", "bos_token_id", "initializer_range", "dtype",
)  # fmt: skip
_NONE = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}


def text_config(raw: Mapping[str, Any], target: TargetConfig, layer_types: list[str], **sizes: Any) -> dict[str, Any]:
    """The text config of a fresh drafter. raw: the target's config.json. sizes: fields of its own."""
    text = raw.get("text_config") or raw
    full = target.layers[-1]  # which always is; a config that transformers wrote has its sizes by layer
    heads = {"global_head_dim": full.head_dim, "num_global_key_value_heads": full.num_kv_heads if full.k_eq_v else None}
    shared = {name: text[name] for name in _SHARED if name in text} | heads | {"model_type": "gemma4_text", "dtype": "bfloat16"}
    return {**shared, **_NONE, "num_hidden_layers": len(layer_types), "layer_types": layer_types, **sizes}


def draft_config(raw: Mapping[str, Any], target: TargetConfig) -> dict[str, Any]:
    """The config.json of a fresh draft model: see `Family.draft_config`."""
    width = narrow(target.hidden_size)
    sizes = {"hidden_size": 2 * width, "intermediate_size": 8 * width, "final_logit_softcapping": target.final_logit_softcapping}
    return {"architectures": ["Gemma4ForCausalLM"], **text_config(raw, target, [SLIDING, SLIDING, SLIDING, FULL], **sizes)}


def narrow(hidden_size: int) -> int:
    """The width of a fresh drafter that is narrower than its target, whose own is given: a quarter, in multiples of 64."""
    return max(64, hidden_size // 256 * 64)


def with_query_norms(tree: Tree) -> Tree:
    """Weights in which every norm is one, with the query norms as they begin: at 1 / sqrt(D), which the attention itself does not have."""

    def begun(path: Any, x: jax.Array) -> jax.Array:
        return jnp.full_like(x, x.shape[0] ** -0.5) if "q_norm" in jax.tree_util.keystr(path) else x

    return jax.tree_util.tree_map_with_path(begun, tree)
