"""Tiny random models with an audio tower, as transformers saves them, and what it makes of a sound."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import media_oracle
import numpy as np
import torch
import transformers

TEXT = media_oracle.TEXT  # the width of the text models
TOWER = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "subsampling_conv_channels": [128, 8],
    "output_proj_dims": 20,
    "use_clipped_linears": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"use_clipped_linears": True, "gradient_clipping": 1.5, "residual_weight": 0.7},
    "wide": {"attention_chunk_size": 10, "attention_context_left": 7, "attention_context_right": 4, "conv_kernel_size": 3},
    "unified": {"audio_embed_dim": 640},
}


def config(kind: str) -> dict[str, Any]:
    """config.json of a tiny target with sounds, in released form."""
    return media_oracle.config(kind, {"audio_config": KINDS[kind] if kind == "unified" else {**TOWER, **KINDS[kind]}})


def drawn(model: torch.nn.Module, seed: int) -> None:
    """Draws the weights of a model's audio tower."""
    generator = torch.Generator().manual_seed(seed)
    for name, value in model.state_dict().items():
        if "audio" not in name:
            continue
        random = torch.randn(value.shape, generator=generator)
        if name.endswith(("_min", "_max")):  # bounds of which many numbers are out
            value.copy_((-1 if name.endswith("_min") else 1) * (0.5 + random.abs()))
        elif "norm" in name:
            value.copy_(1 + 0.3 * random)
        elif "bias" in name or "per_dim_scale" in name:
            value.copy_(0.5 * random)
        else:
            value.copy_(random * np.prod(value.shape[1:]) ** -0.5)


@functools.cache
@torch.no_grad()
def saved(kind: str) -> tuple[Any, Path]:
    """A tiny random target and the folder where transformers saved it. Shared by all tests: do not change either."""
    return media_oracle.saved(config(kind), f"sounds-{kind}", functools.partial(drawn, seed=len(kind)))


def extractor(kind: str, **settings: Any) -> Any:
    """What makes features of a model's sounds in transformers."""
    family = "Gemma4Unified" if kind == "unified" else "Gemma4"
    return getattr(transformers, f"{family}AudioFeatureExtractor")(**settings)


def features(kind: str, samples: np.ndarray, **settings: Any) -> np.ndarray:
    """The features of one sound by transformers, without those that are padding: [n, F] float32."""
    found = extractor(kind, **settings)([samples], return_tensors="np")
    return found["input_features"][0][found["input_features_mask"][0]]


@torch.no_grad()
def rows(kind: str, samples: np.ndarray) -> np.ndarray:
    """The rows of one sound by transformers: [n, TEXT] float32."""
    model, _ = saved(kind)
    found = extractor(kind)([samples], return_tensors="pt")
    out = model.model.get_audio_features(found["input_features"], found["input_features_mask"], return_dict=True)
    return out.pooler_output[0][out.attention_mask[0]].numpy()


def sound(seconds: float, seed: int = 0) -> np.ndarray:
    """Samples of some tones and noise, 16,000 a second: float32."""
    generator, count = np.random.default_rng(seed), int(seconds * 16_000)
    at = np.arange(count) / 16_000
    tones = sum(np.sin(2 * np.pi * hertz * at + phase) for hertz, phase in generator.uniform((80, 0), (4000, 6), (4, 2)))
    return (0.1 * tones * (1 + np.sin(3 * at)) + 0.02 * generator.standard_normal(count)).astype(np.float32)
