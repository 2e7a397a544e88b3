"""Shapes of the released models and their assistants: config.json without a checkpoint, text parts only.

The targets' values are those of the released configs. Of the assistants only E2B's config was read; the others' values are
assembled from public code and agree with the sizes of their checkpoints.
"""

from __future__ import annotations

from typing import Any

from jaxspec.config import FULL, SLIDING

_COMMON = {
    "vocab_size": 262_144,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 0,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "sliding_window": 1024,
    "max_position_embeddings": 262_144,
    "use_bidirectional_attention": "vision",
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "dtype": "bfloat16",
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}


def _kinds(sliding: int, groups: int) -> list[str]:
    return ([SLIDING] * sliding + [FULL]) * groups


def _target(model_type: str, layer_types: list[str], **text: Any) -> dict[str, Any]:
    text = {**_COMMON, "model_type": f"{model_type}_text", "layer_types": layer_types, "num_hidden_layers": len(layer_types), **text}
    if model_type == "gemma4_unified":  # its text config has no such fields
        for field in ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"):
            del text[field]
        del text["hidden_size_per_layer_input"], text["vocab_size_per_layer_input"]
    return {
        "model_type": model_type,
        "architectures": [f"{'Gemma4Unified' if model_type == 'gemma4_unified' else 'Gemma4'}ForConditionalGeneration"],
        "text_config": text,
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "tie_word_embeddings": True,
    }


def _assistant(target: dict[str, Any], *, hidden_size: int, num_attention_heads: int, ordered: bool) -> dict[str, Any]:
    theirs = target["text_config"]
    kept = ("model_type", "num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v", "sliding_window")
    text = {
        **_COMMON,
        **{field: theirs[field] for field in (*kept, "max_position_embeddings", "use_bidirectional_attention")},
        "hidden_size": hidden_size,
        "intermediate_size": 8 * hidden_size,
        "num_attention_heads": num_attention_heads,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 4,
        "layer_types": _kinds(3, 1),
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    }
    return {
        "model_type": f"{target['model_type']}_assistant",
        "text_config": text,
        "backbone_hidden_size": theirs["hidden_size"],
        "use_ordered_embeddings": ordered,
        "num_centroids": 2048,
        "centroid_intermediate_top_k": 32,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
    }


TARGETS: dict[str, dict[str, Any]] = {
    "e2b": _target(
        "gemma4",
        _kinds(4, 7),
        hidden_size=1536,
        intermediate_size=6144,
        use_double_wide_mlp=True,
        num_attention_heads=8,
        num_key_value_heads=1,
        sliding_window=512,
        hidden_size_per_layer_input=256,
        num_kv_shared_layers=20,
        max_position_embeddings=131_072,
        use_bidirectional_attention=None,
    ),
    "e4b": _target(
        "gemma4",
        _kinds(5, 7),
        hidden_size=2560,
        intermediate_size=10_240,
        num_attention_heads=8,
        num_key_value_heads=2,
        sliding_window=512,
        hidden_size_per_layer_input=256,
        num_kv_shared_layers=18,
        max_position_embeddings=131_072,
        use_bidirectional_attention=None,
    ),
    "12b": _target(
        "gemma4_unified",
        _kinds(5, 8),
        hidden_size=3840,
        intermediate_size=15_360,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
    ),
    "26b": _target(
        "gemma4",
        _kinds(5, 5),
        hidden_size=2816,
        intermediate_size=2112,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        attention_k_eq_v=True,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "31b": _target(
        "gemma4",
        _kinds(5, 10),
        hidden_size=5376,
        intermediate_size=21_504,
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
        attention_k_eq_v=True,
    ),
}

ASSISTANTS: dict[str, dict[str, Any]] = {
    "e2b": _assistant(TARGETS["e2b"], hidden_size=256, num_attention_heads=4, ordered=True),
    "e4b": _assistant(TARGETS["e4b"], hidden_size=256, num_attention_heads=4, ordered=True),
    "12b": _assistant(TARGETS["12b"], hidden_size=1024, num_attention_heads=16, ordered=False),
    "26b": _assistant(TARGETS["26b"], hidden_size=1024, num_attention_heads=16, ordered=False),
    "31b": _assistant(TARGETS["31b"], hidden_size=1024, num_attention_heads=32, ordered=False),
}
