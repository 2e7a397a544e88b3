"""The reference: tiny random models of every kind in the family, run by transformers in float32.

Configs are in released form, so that both implementations read what a release says. Weights, norms and scalars are all drawn at
random, large enough that every part of the model moves the logits.
"""

from __future__ import annotations

import atexit
import copy
import functools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    Gemma4UnifiedForCausalLM,
    Gemma4UnifiedTextConfig,
)

torch.set_num_threads(1)  # of several, each waits for the others after every operation, and operations here are tiny

S, F = "sliding_attention", "full_attention"
WINDOW = 8

BASE = {
    "model_type": "gemma4_text",
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "head_dim": 8,
    "global_head_dim": 16,
    "layer_types": [S, S, S, F],
    "sliding_window": WINDOW,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 131,
    "use_double_wide_mlp": False,
    "enable_moe_block": False,
    "use_bidirectional_attention": None,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "rope_parameters": {
        S: {"rope_type": "default", "rope_theta": 1e4},
        F: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
}

# What sets each member of the family apart.
MEMBERS: dict[str, dict[str, Any]] = {
    "E2B": {
        "num_hidden_layers": 7,
        "layer_types": [S, F, S, F, S, S, F],
        "num_kv_shared_layers": 3,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 12,
        "use_double_wide_mlp": True,
    },
    "E4B": {
        "num_hidden_layers": 6,
        "layer_types": [S, S, F, S, S, F],
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 12,
    },
    "12B": {
        "model_type": "gemma4_unified_text",
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "use_bidirectional_attention": "vision",
    },
    "26B": {
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 20,
        "use_bidirectional_attention": "vision",
    },
    "31B": {
        "num_hidden_layers": 6,
        "layer_types": [S, S, F, S, S, F],
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "use_bidirectional_attention": "vision",
    },
}


def _kv_sharing_modes(config: Any) -> list[str | None]:
    """What transformers 5.23 means to compute: it refuses a model that shares every layer, and stores nothing where none is shared."""
    first = config.num_hidden_layers - config.num_kv_shared_layers
    modes: list[str | None] = [None] * first + ["reuse"] * config.num_kv_shared_layers
    for kind in set(config.layer_types[:first]):
        modes[max(i for i in range(first) if config.layer_types[i] == kind)] = "store"
    return modes


for _config in (Gemma4TextConfig, Gemma4UnifiedTextConfig):
    setattr(_config, "kv_sharing_modes", property(_kv_sharing_modes))  # noqa: B010


def text_config(member: str, **changes: Any) -> dict[str, Any]:
    """config.json of a tiny text-only target, in released form."""
    return copy.deepcopy({**BASE, **MEMBERS[member], **changes})


def outer_config(text: dict[str, Any]) -> dict[str, Any]:
    """config.json of a conditional-generation target around a text config."""
    return {"model_type": text["model_type"].removesuffix("_text"), "text_config": text, "eos_token_id": [1, 106]}


def assistant_config(target: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """config.json of a tiny assistant of a target with this text config, in released form."""
    fields = ("model_type", "vocab_size", "num_key_value_heads", "num_global_key_value_heads", "head_dim", "global_head_dim")
    text = {
        **BASE,
        **{field: target[field] for field in (*fields, "attention_k_eq_v", "sliding_window", "rope_parameters")},
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_kv_shared_layers": 4,
        "vocab_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    }
    return {
        "model_type": target["model_type"].removesuffix("_text") + "_assistant",
        "text_config": text,
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": False,
        **changes,
    }


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Draws every weight and buffer that a checkpoint holds; a token_ordering becomes a permutation."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.state_dict().items():
        if name.endswith("token_ordering"):
            value.copy_(torch.randperm(len(value), generator=generator))
        elif "norm" in name or name.endswith(("layer_scalar", "scale")):
            value.copy_(0.5 + 1.2 * torch.rand(value.shape, generator=generator))
        else:
            # Tables count as rows of one unit each, matrices keep the size of what they multiply.
            width = 4.0 if "embed_tokens" in name or name == "lm_head.weight" else value.shape[-1]
            value.copy_(torch.randn(value.shape, generator=generator) * width**-0.5)


def build(config: dict[str, Any], seed: int = 0) -> Any:
    """The transformers model of a tiny text-only target or assistant, in float32 on CPU, with random weights."""
    config = copy.deepcopy(config)
    kind = config.pop("model_type")
    if kind.endswith("assistant"):
        inner = config.pop("text_config")
        text_class = Gemma4TextConfig if inner.pop("model_type") == "gemma4_text" else Gemma4UnifiedTextConfig
        model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig(text_config=text_class(**inner), **config, attn_implementation="eager"))
    elif kind == "gemma4_unified_text":
        unused = ("enable_moe_block", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
        config = {field: value for field, value in config.items() if field not in unused}
        model = Gemma4UnifiedForCausalLM(Gemma4UnifiedTextConfig(**config, attn_implementation="eager"))
    else:
        model = Gemma4ForCausalLM(Gemma4TextConfig(**config, attn_implementation="eager"))
    with torch.no_grad():
        randomise(model, seed)
    return model.eval()


@functools.cache
def target(member: str, seed: int = 0) -> tuple[Any, Path]:
    """A tiny random target and the folder where transformers saved it. Shared by all tests: do not change either."""
    folder = _temporary() / f"{member}-{seed}"
    model = build(text_config(member), seed)
    model.save_pretrained(folder)
    return model, folder


@functools.cache
def _temporary() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="jaxspec-oracle-"))
    atexit.register(shutil.rmtree, folder)
    return folder


@torch.no_grad()
def run(model: Any, ids: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """Whole sequences through the reference. ids: [B, T]. Returns logits [B, T, V] and hidden states, of which the last is normed."""
    out = model(torch.tensor(np.asarray(ids), dtype=torch.long), output_hidden_states=True, use_cache=False)
    return out.logits.numpy(), [hidden.numpy() for hidden in out.hidden_states]
