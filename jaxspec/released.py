"""Shapes of the released models and of drafters for them, config.json without a checkpoint, and random weights of a shape.

Only text parts. The targets' values are those of the released configs, and so are those of E2B's assistant and of the DFlash
drafters; the other assistants' are assembled from public code and agree with the sizes of their checkpoints. The EAGLE-3 drafter and
the MTP modules are made up, of the size that is usual.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxspec import checkpoint, drafters
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.drafters import dflash, draft_model, eagle3
from jaxspec.drafters import mtp_modules as mtp
from jaxspec.drafters.base import NoDraft
from jaxspec.drafters.ngram import NGram
from jaxspec.model.config import FULL, SLIDING, AssistantConfig, Gemma4Config
from jaxspec.targets import read_target

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


def _dflash(depth: int, target_layer_ids: list[int], **sizes: int) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 262_144,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "layer_types": _kinds(4, 1),
        "sliding_window": 2048,
        "block_size": 16,
        "num_target_layers": depth,
        "final_logit_softcapping": 30.0,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": target_layer_ids},
        **sizes,
    }


DFLASH: dict[str, dict[str, Any]] = {
    "26b": _dflash(30, [1, 6, 11, 17, 22, 27], hidden_size=2816, intermediate_size=5632, num_attention_heads=32),
    "31b": _dflash(60, [1, 12, 23, 35, 46, 57], hidden_size=5376, intermediate_size=10_752, num_attention_heads=64),
}


def target_config(name: str) -> Gemma4Config:
    """The config of a named target, or of a checkpoint folder, of which only config.json is read.

    Raises FileNotFoundError or ValueError for what is neither.
    """
    if name in TARGETS:
        return Gemma4Config.from_hf(TARGETS[name])
    try:
        folder = checkpoint.resolve(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"config {error}; named shapes: {', '.join(TARGETS)}") from error
    return read_target(folder)[0]


def abstract_drafter(name: str, shape: str, target: Gemma4Config, dtype: Any) -> Any:
    """A named drafter for the target of a name, or that of a checkpoint folder, as a tree of ShapeDtypeStructs.

    Raises FileNotFoundError or ValueError for what is neither, and for a drafter that there is not for this target.
    """
    if name in DRAFTERS:
        return DRAFTERS[name](shape, target, dtype)
    try:
        folder = checkpoint.resolve(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"drafter {error}; named drafters: {', '.join(DRAFTERS)}") from error
    return drafters.abstract_drafter(folder, target, dtype)


def _of(configs: dict[str, dict[str, Any]], drafter: str, shape: str) -> dict[str, Any]:
    if shape not in configs:
        raise ValueError(f"drafter {drafter!r} is there for config {', '.join(configs)}; for {shape!r} name a folder")
    return configs[shape]


def _abstract_assistant(shape: str, target: Gemma4Config, dtype: Any) -> gemma4_mtp.Gemma4MTP:
    config = AssistantConfig.from_hf(_of(ASSISTANTS, "mtp", shape))
    return gemma4_mtp.abstract(gemma4_mtp.bind(config, target), dtype)


def _abstract_dflash(shape: str, target: Gemma4Config, dtype: Any) -> dflash.DFlash:
    return dflash.abstract(dflash.DFlashConfig.from_hf(_of(DFLASH, "dflash", shape), target), dtype)


def _abstract_eagle3(shape: str, target: Gemma4Config, dtype: Any) -> eagle3.Eagle3:
    """One Llama layer as wide as the target, and a head of 32,000 tokens."""
    config = {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": min(32_000, target.vocab_size // 2),
        "hidden_size": target.hidden_size,
        "intermediate_size": 4 * target.hidden_size,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    return eagle3.abstract(eagle3.Eagle3Config.from_hf(config, target, ("lm_head.weight",)), dtype)


def _abstract_modules(shape: str, target: Gemma4Config, dtype: Any) -> mtp.MTPModules:
    """Four modules like the target's sliding layers."""
    text = _of(TARGETS, "modules", shape)["text_config"]
    text = {**text, "layer_types": [*text["layer_types"], *[SLIDING] * 4]}
    config = {"model_type": mtp.MODEL_TYPE, "num_nextn_predict_layers": 4, "text_config": text}
    return mtp.abstract(mtp.bind(mtp.ModulesConfig.from_hf(config), target), dtype)


def _abstract_draft_model(config: dict[str, Any], shape: str, target: Gemma4Config, dtype: Any) -> draft_model.DraftModel:
    return draft_model.abstract(draft_model.bind(Gemma4Config.from_hf(config), target), dtype)


# Name of a drafter -> (name of the target's shape, its config, dtype) -> the drafter as a tree of ShapeDtypeStructs.
DRAFTERS: dict[str, Callable[[str, Gemma4Config, Any], Any]] = {
    "none": lambda shape, target, dtype: NoDraft(),
    "ngram": lambda shape, target, dtype: NGram(),
    "mtp": _abstract_assistant,
    "dflash": _abstract_dflash,
    "eagle3": _abstract_eagle3,
    "modules": _abstract_modules,
    **{name: partial(_abstract_draft_model, config) for name, config in TARGETS.items()},
}
