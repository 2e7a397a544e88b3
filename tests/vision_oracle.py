"""Tiny random models with an image tower, as transformers saves them, and what it makes of an image."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

import media_oracle
import numpy as np
import oracle
import tiny
import torch

TEXT = media_oracle.TEXT  # the width of the text models
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "position_embedding_size": 512,
    "patch_size": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"num_key_value_heads": 2},
    "clipped": {"use_clipped_linears": True},
    "standardized": {"standardize": True},
    "unified": {"mm_embed_dim": 24, "output_proj_dims": 24, "mm_posemb_size": 160, "patch_size": 4},
}


def config(kind: str) -> dict[str, Any]:
    """config.json of a tiny target with images, in released form."""
    return media_oracle.config(kind, {"vision_config": KINDS[kind] if kind == "unified" else {**TOWER, **KINDS[kind]}})


def drawn(model: torch.nn.Module, seed: int) -> None:
    """Draws the weights of a model."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    for name, value in model.state_dict().items():
        if name.endswith(("_min", "_max")):  # bounds of which many numbers are out
            value.copy_((-1 if name.endswith("_min") else 1) * (0.5 + draw().abs()))
        elif "norm" in name or "_ln" in name or name.endswith("std_scale"):
            value.copy_(1 + 0.3 * draw(*value.shape))
        else:
            value.copy_(draw(*value.shape) * (0.5 if "position" in name or "bias" in name else value.shape[-1] ** -0.5))


@functools.cache
@torch.no_grad()
def saved(kind: str) -> tuple[Any, Path]:
    """A tiny random target and the folder where transformers saved it. Shared by all tests: do not change either."""
    return media_oracle.saved(config(kind), f"images-{kind}", functools.partial(drawn, seed=len(kind)))


IMAGE, OPENING, CLOSING, VIDEO = 5, 6, 7, 8  # tokens of the pocket tokenizer that nothing else uses
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|turn>' }}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{{ '<unused5>' if p.type == 'image' else '<unused8>' if p.type == 'video' else p.text }}{% endfor %}{% endif %}{{ '<turn|>' }}"
    "{% endfor %}"
)


@functools.cache
def in_prompts(kind: str) -> tuple[Any, Path]:
    """A tiny random target and its folder, with the pocket tokenizer and a chat template that has images and videos."""
    made = config(kind)
    text = oracle.text_config("12B" if kind == "unified" else "E4B", vocab_size=tiny.VOCAB, vocab_size_per_layer_input=tiny.VOCAB)
    kept = made["text_config"].keys()
    tokens = {"image_token_id": IMAGE, "boi_token_id": OPENING, "eoi_token_id": CLOSING, "video_token_id": VIDEO}
    made |= {"text_config": {k: v for k, v in text.items() if k in kept}, **tokens}
    model, folder = media_oracle.saved(made, f"prompts-{kind}", lambda model: oracle.randomise(model, 1))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny.POCKET / name, folder / name)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return model, folder


@torch.no_grad()
def rows(kind: str, patches: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The rows of one image by transformers, [n, TEXT] float32. patches: [N, P] float32 of 0 .. 1; positions: [N, 2] int."""
    model, _ = saved(kind)
    out = model.get_image_features(torch.tensor(patches)[None], torch.tensor(positions, dtype=torch.long)[None])
    (found,) = out.pooler_output
    return found.numpy()
