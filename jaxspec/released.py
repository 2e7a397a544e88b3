"""Shapes of the released models and of drafters for them, config.json without a checkpoint.

The text parts and, apart from them, those that read images and hear sounds. The targets' values are those of the released configs; the
drafters' come from their kinds.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec import checkpoint, drafters
from jaxspec.audio import Frames, Mel, Sounds, audio_config
from jaxspec.checkpoint.hub import HUB, Hub
from jaxspec.checkpoint.quantisation import Quantisation
from jaxspec.drafters import quantising
from jaxspec.drafters.base import fitted
from jaxspec.drafters.kind import Kind
from jaxspec.drafters.registry import KINDS, SAME, kind_of
from jaxspec.model.families import family_named
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.target import TargetConfig
from jaxspec.targets import asked_quantisation, quantisation_of, read_target
from jaxspec.vision import Images, Preprocessing, vision_config

MODULES = "modules"  # the named drafter that the checkpoint of its target holds
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


def _step3p5(layers: int) -> dict[str, Any]:
    """stepfun-ai/Step-3.5-Flash, or its first layers and its MTP layers. Lists by layer end with the MTP layers' entries."""
    kinds, modules = [FULL if i % 4 == 0 else SLIDING for i in range(layers)], 3
    every = [*kinds, *[SLIDING] * modules]
    limits = [0.0] * (layers + modules)
    return {
        "model_type": "step3p5",
        "architectures": ["Step3p5ForCausalLM"],
        "hidden_size": 4096,
        "vocab_size": 128_896,
        "num_hidden_layers": layers,
        "layer_types": every,
        "num_attention_heads": 64,
        "num_attention_groups": 8,
        "head_dim": 128,
        "attention_other_setting": {
            "attention_type": SLIDING,
            "num_attention_heads": 96,
            "num_attention_groups": 8,
            "head_dim": 128,
            "true_head_dim": 128,
        },
        "sliding_window": 512,
        "rope_theta": [5e6 if kind == FULL else 1e4 for kind in every],
        "partial_rotary_factors": [0.5 if kind == FULL else 1.0 for kind in every],
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 2.0,
            "original_max_position_embeddings": 131_072,
            "low_freq_factor": 1.0,
            "high_freq_factor": 32.0,
        },
        "yarn_only_types": [FULL],
        "max_position_embeddings": 262_144,
        "max_seq_len": 262_144,
        "rms_norm_eps": 1e-5,
        "zero_centered": True,
        "use_qk_norm": True,
        "use_head_wise_attn_gate": True,
        "use_rope_layers": [],
        "sink": False,
        "intermediate_size": 11_264,
        "moe_layers_enum": ",".join(str(i) for i in range(3, layers)),
        "moe_every_n_layer": 1,
        "moe_layer_offset": 0,
        "moe_num_experts": 288,
        "moe_top_k": 8,
        "moe_intermediate_size": 1280,
        "share_expert_dim": 1280,
        "moe_router_activation": "sigmoid",
        "use_moe_router_bias": True,
        "norm_expert_weight": True,
        "need_fp32_gate": True,
        "moe_router_scaling_factor": 3.0,
        "swiglu_limits": [7.0 if i in (43, 44) else limit for i, limit in enumerate(limits)],
        "swiglu_limits_shared": [16.0 if i == 44 else limit for i, limit in enumerate(limits)],
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": modules,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": [1, 2, 128_007],
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
    "step3p5": _step3p5(45),
    # As many of its layers as one device of 141 GB holds, for benchmarks.
    "step3p5-15": _step3p5(15),
}


_LARGE_TOWER = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 72,
    "standardize": True,
}
# What the config.json of a target says of its image tower beside the defaults.
IMAGES: dict[str, dict[str, Any]] = {
    "e2b": {"use_clipped_linears": True},
    "e4b": {"use_clipped_linears": True},
    "12b": {},
    "26b": _LARGE_TOWER,
    "31b": _LARGE_TOWER,
}
# And of its audio tower.
AUDIO: dict[str, dict[str, Any]] = {"e2b": {}, "e4b": {}, "12b": {}}


# Targets that are suggested for a device, the smallest first, and how their weights may be quantised.
OFFERED: dict[str, tuple[str | None, ...]] = {
    "e2b": (None,),
    "e4b": (None, "int4"),
    "12b": (None, "int4"),
    "26b": (None, "int8"),
    "31b": (None, "int4"),
}


def images_of(name: str, dtype: Any, max_soft_tokens: int = Preprocessing.max_soft_tokens) -> Images:
    """What makes rows of images for a named target; of its tower there are shapes alone. Raises ValueError for a target without one, and
    for another number of tokens than there is."""
    if name not in IMAGES:
        raise ValueError(f"{name!r} has no image tower; expected one of {', '.join(IMAGES)}")
    config = vision_config({**TARGETS[name], "vision_config": IMAGES[name]})
    assert config is not None
    return Images.of(config, Preprocessing(config.patch, config.pool, max_soft_tokens), dtype)


def sounds_of(name: str, dtype: Any) -> Sounds:
    """The same of sounds."""
    if name not in AUDIO:
        raise ValueError(f"{name!r} has no audio tower; expected one of {', '.join(AUDIO)}")
    config = audio_config({**TARGETS[name], "audio_config": AUDIO[name]})
    assert config is not None
    return Sounds.of(config, Frames() if name == "12b" else Mel(), dtype)


def target_config(name: str) -> TargetConfig:
    """The config of a named target, or of a checkpoint folder, of which only config.json is read.

    Raises FileNotFoundError or ValueError for what is neither.
    """
    if name in TARGETS:
        return family_named(TARGETS[name]["model_type"]).read(TARGETS[name])
    try:
        folder = checkpoint.resolve(name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"config {error}; named shapes: {', '.join(TARGETS)}") from error
    return read_target(folder)[0]


def target_quantisation(
    name: str,
    config: TargetConfig,
    dtype: Any,
    quantize: str | None,
    quantize_embedding: str | None,
    quantize_activations: str | None,
) -> Quantisation | None:
    """How the matrices of a named target or of a folder's are quantised: see `targets.quantisation_of`, whose errors it raises."""
    if name not in TARGETS:
        return quantisation_of(checkpoint.resolve(name), config, dtype, quantize, quantize_embedding, quantize_activations)
    return asked_quantisation(config, dtype, quantize, quantize_embedding, quantize_activations)


def drafter_names() -> list[str]:
    """The named drafters: the kinds that know configs for released targets, and the released targets, as draft models."""
    return [*_named_kinds(), *TARGETS]


def drafter_config(name: str, shape: str, target: TargetConfig | None = None) -> Mapping[str, Any]:
    """The config.json of a named drafter for the target of a name, or for that of a folder. target: its config, by default the named one's.

    Raises ValueError for a drafter that there is not for this target."""
    if name in TARGETS:
        return TARGETS[name]
    released = _named_kinds()[name].released
    assert released is not None
    raw = TARGETS.get(shape)
    found = released(None if raw is None else shape, raw, target_config(shape) if target is None else target)
    if found is None:
        there = [other for other in TARGETS if has_drafter(name, other)]
        raise ValueError(f"drafter {name!r} is there for config {', '.join(there)}; for {shape!r} name a folder")
    return found


def has_drafter(name: str, shape: str) -> bool:
    """Whether there is a named drafter of this kind for a named target."""
    released = _named_kinds()[name].released
    return released is not None and released(shape, TARGETS[shape], target_config(shape)) is not None


def abstract_drafter(name: str, shape: str, target: TargetConfig, dtype: Any, quantize: str | None = None) -> Any:
    """A named drafter for the target of a name, or that of a checkpoint folder, as a tree of ShapeDtypeStructs. name: "same" is what the
    target's own checkpoint holds. quantize: `quantize_drafter` of `load`.

    Raises FileNotFoundError or ValueError for what is neither, and for a drafter that there is not for this target.
    """
    if name == SAME and shape not in TARGETS:
        return drafters.abstract_drafter(drafters.resolve(SAME, checkpoint.resolve(shape)), target, dtype, quantize)
    name = MODULES if name == SAME else name
    if name in drafter_names():
        config = drafter_config(name, shape, target)
        kind = _named_kinds().get(name) or kind_of(config)
        assert kind is not None
        made = fitted(kind.from_checkpoint(None, config, target, dtype), target)
        asked = None if quantize is None else quantising.asked_quantisation(quantize, made, config, dtype)
        return quantising.quantised(made, asked)
    return drafters.abstract_drafter(resolve(name), target, dtype, quantize)


def resolve(name: str, hub: Hub = HUB) -> Path:
    """The folder of a drafter's checkpoint. Raises FileNotFoundError, with the names that need none, for what is no checkpoint, and as
    `checkpoint.resolve` does."""
    try:
        return checkpoint.resolve(name, hub)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"drafter {error}; named drafters: {', '.join(drafter_names())}") from error


def _named_kinds() -> dict[str, Kind]:
    """The kinds that know configs for released targets, by what the bench calls them."""
    return {kind.bench_name or kind.name: kind for kind in KINDS.values() if kind.released is not None}
