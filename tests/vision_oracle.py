"""Tiny random models with an image tower, as transformers saves them, and what it makes of an image."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import torch
import transformers

TEXT = 24  # the width of the text models
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "position_embedding_size": 256,
    "patch_size": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"num_key_value_heads": 2},
    "clipped": {"use_clipped_linears": True},
    "standardized": {"standardize": True},
    "unified": {"mm_embed_dim": 24, "output_proj_dims": 24, "mm_posemb_size": 80, "patch_size": 4},
}


def config(kind: str) -> dict[str, Any]:
    """config.json of a tiny target with images, in released form."""
    text = oracle.text_config("12B" if kind == "unified" else "E4B", hidden_size=TEXT, num_hidden_layers=1, layer_types=[oracle.F])
    text = {**text, "num_kv_shared_layers": 0}
    if kind == "unified":
        unused = ("enable_moe_block", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
        text = {field: value for field, value in text.items() if field not in unused}
        return {"model_type": "gemma4_unified", "text_config": text, "vision_config": KINDS[kind], "audio_config": None}
    return {"model_type": "gemma4", "text_config": text, "vision_config": {**TOWER, **KINDS[kind]}, "audio_config": None}


@functools.cache
@torch.no_grad()
def saved(kind: str) -> tuple[Any, Path]:
    """A tiny random target and the folder where transformers saved it. Shared by all tests: do not change either."""
    released = config(kind)
    read = transformers.CONFIG_MAPPING[released["model_type"]].from_dict(released)
    read._attn_implementation = "eager"
    family = type(read).__name__.removesuffix("Config")
    model = getattr(transformers, f"{family}ForConditionalGeneration")(read).eval()
    generator = torch.Generator().manual_seed(len(kind))

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for name, value in model.state_dict().items():
        if name.endswith(("_min", "_max")):  # bounds of which many numbers are out
            value.copy_((-1 if name.endswith("_min") else 1) * (0.5 + draw().abs()))
        elif "norm" in name or "_ln" in name or name.endswith("std_scale"):
            value.copy_(1 + 0.3 * draw(*value.shape))
        else:
            value.copy_(draw(*value.shape) * (0.5 if "position" in name or "bias" in name else value.shape[-1] ** -0.5))
    folder = oracle._temporary() / f"images-{kind}"
    model.save_pretrained(folder)
    return model, folder


@torch.no_grad()
def rows(kind: str, patches: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The rows of one image by transformers, [n, TEXT] float32. patches: [N, P] float32 of 0 .. 1; positions: [N, 2] int."""
    model, _ = saved(kind)
    out = model.get_image_features(torch.tensor(patches)[None], torch.tensor(positions, dtype=torch.long)[None])
    (found,) = out.pooler_output
    return found.numpy()
