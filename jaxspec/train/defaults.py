"""Configs of fresh drafters for a target, in the layouts of released ones, of a size that suits the target."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.model.config import FULL, SLIDING, Gemma4Config

MODULES = 3
DRAFT_VOCABULARY = 32_000
MASK_TOKEN = 4  # Gemma's `<mask>`
# What a drafter's text config has of the target's.
SHARED = (
    "vocab_size", "head_dim", "num_attention_heads", "num_key_value_heads", "attention_k_eq_v", "attention_bias", "attention_dropout",
    "hidden_activation", "rms_norm_eps", "rope_parameters", "sliding_window", "max_position_embeddings", "tie_word_embeddings",
    "pad_token_id", "eos_token_id", "bos_token_id", "initializer_range", "dtype",
)  # fmt: skip
NONE = {"num_kv_shared_layers": 0, "use_double_wide_mlp": False, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}


def default_config(kind: str, raw: Mapping[str, Any], target: Gemma4Config) -> dict[str, Any]:
    """The config.json of a fresh drafter. raw: the target's config.json.

    The assistant and the draft model are narrower than the target, the others as wide. Released drafters are the models: see
    google/gemma-4-31B-it-assistant, z-lab/gemma-4-31B-it-DFlash, RedHatAI's EAGLE-3 speculators, stepfun-ai/Step-3.5-Flash.
    """
    text = raw.get("text_config") or raw
    full = target.layers[-1]  # which always is; a config that transformers wrote has its sizes by layer
    sizes = {"global_head_dim": full.head_dim, "num_global_key_value_heads": full.num_kv_heads if full.k_eq_v else None}
    shared = {name: text[name] for name in SHARED if name in text} | sizes | {"model_type": "gemma4_text", "dtype": "bfloat16"}
    narrow = max(64, target.hidden_size // 256 * 64)
    return globals()[f"_{kind.replace('-', '_')}"](target, text, shared, narrow)


def _mtp(target: Gemma4Config, text: Mapping[str, Any], shared: dict[str, Any], narrow: int) -> dict[str, Any]:
    kinds = [kind for kind in (SLIDING, SLIDING, SLIDING, FULL) if target.last_owner(kind) is not None]
    inner = {
        **shared,
        **NONE,
        "hidden_size": narrow,
        "intermediate_size": 4 * narrow,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
    }
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": target.hidden_size,
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "text_config": {**inner, "num_kv_shared_layers": len(kinds), "final_logit_softcapping": None},
    }


def _plain(target: Gemma4Config) -> dict[str, Any]:
    """Of a decoder of Llama's or Qwen3's kind, as wide as the target."""
    return {
        "hidden_size": target.hidden_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "num_target_layers": target.num_hidden_layers,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _dflash(target: Gemma4Config, text: Mapping[str, Any], shared: dict[str, Any], narrow: int) -> dict[str, Any]:
    layers, depth = 5, target.num_hidden_layers
    taps = min(layers + 1, depth)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **_plain(target),
        "intermediate_size": 2 * target.hidden_size,
        "num_hidden_layers": layers,
        "layer_types": [*[SLIDING] * (layers - 1), FULL],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "rope_theta": 1_000_000.0,
        "block_size": 16,
        "dflash_config": {
            "mask_token_id": MASK_TOKEN,
            # From the second layer on; the last layer says most about the next token.
            "target_layer_ids": sorted(
                {round(min(1, depth - 1) + i * (depth - 1 - min(1, depth - 1)) / max(taps - 1, 1)) for i in range(taps)}
            ),
            "final_logit_softcapping": target.final_logit_softcapping,
        },
    }


def _eagle3(target: Gemma4Config, text: Mapping[str, Any], shared: dict[str, Any], narrow: int) -> dict[str, Any]:
    depth = target.num_hidden_layers
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **_plain(target),
        "intermediate_size": 4 * target.hidden_size,
        "num_hidden_layers": 1,
        "rope_theta": 1_000_000.0,
        "draft_vocab_size": min(DRAFT_VOCABULARY, target.vocab_size),
        "eagle_aux_hidden_state_layer_ids": sorted({min(2, depth), depth // 2 + 1, depth}),
    }


def _mtp_modules(target: Gemma4Config, text: Mapping[str, Any], shared: dict[str, Any], narrow: int) -> dict[str, Any]:
    return {
        "architectures": ["Gemma4MTPModules"],
        "model_type": "gemma4_mtp_modules",
        "num_nextn_predict_layers": MODULES,
        "dtype": "bfloat16",
        "text_config": {
            **shared,
            **NONE,
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_hidden_layers": target.num_hidden_layers,
            "layer_types": [*target.layer_types, *[SLIDING] * MODULES],
            "final_logit_softcapping": target.final_logit_softcapping,
        },
    }


def _draft_model(target: Gemma4Config, text: Mapping[str, Any], shared: dict[str, Any], narrow: int) -> dict[str, Any]:
    kinds = [SLIDING, SLIDING, SLIDING, FULL]
    return {
        "architectures": ["Gemma4ForCausalLM"],
        **shared,
        **NONE,
        "hidden_size": 2 * narrow,
        "intermediate_size": 8 * narrow,
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "final_logit_softcapping": target.final_logit_softcapping,
    }
