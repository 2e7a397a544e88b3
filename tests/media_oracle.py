"""What tests of images and of sounds share: tiny configs, models that transformers saved, and how answers are compared with its."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import transformers
from PIL import Image
from transformers.models.gemma4_unified import modeling_gemma4_unified as unified

from jaxspec.checkpoint.layout import layouts_of
from jaxspec.trees import leaves_by_path

TEXT = 24  # the width of the text models of `config`


def config(kind: str, sections: dict[str, Any]) -> dict[str, Any]:
    """config.json of a tiny target, in released form. kind: "unified" is the 12B's, any other E4B's. sections: those that are no text."""
    text = oracle.text_config("12B" if kind == "unified" else "E4B", hidden_size=TEXT, num_hidden_layers=1, layer_types=[oracle.F])
    text = {**text, "num_kv_shared_layers": 0}
    sections = {"vision_config": None, "audio_config": None} | sections
    if kind == "unified":
        unused = ("enable_moe_block", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
        return {"model_type": "gemma4_unified", "text_config": {k: v for k, v in text.items() if k not in unused}} | sections
    return {"model_type": "gemma4", "text_config": text} | sections


@torch.no_grad()
def saved(config: dict[str, Any], name: str, draw: Callable[[torch.nn.Module], None]) -> tuple[Any, Path]:
    """The model of a config, whose weights a function draws, and a folder where transformers saved it."""
    read = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
    read._attn_implementation = "eager"
    model = getattr(transformers, f"{type(read).__name__.removesuffix('Config')}ForConditionalGeneration")(read).eval()
    draw(model)
    folder = oracle._temporary() / name
    model.save_pretrained(folder)
    return model, folder


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


def after(model: Any, ids: list[int], **more: Any) -> tuple[list[int], list[float]]:
    """What transformers generates after token ids: eight tokens and their log-probabilities."""
    given = torch.tensor(ids)[None]
    more |= {"do_sample": False, "min_new_tokens": 8, "max_new_tokens": 8, "attention_mask": torch.ones_like(given)}
    out = model.generate(given, **more, output_logits=True, return_dict_in_generate=True)
    tokens = out.sequences[0, given.shape[1] :].tolist()
    return tokens, [torch.log_softmax(row[0], -1)[token].item() for row, token in zip(out.logits, tokens, strict=True)]


def logprobs(answer: Any) -> list[float]:
    return [row[token].logprob for row, token in zip(answer.logprobs, answer.token_ids, strict=True)]


def same(answer: Any, wanted: tuple[list[int], list[float]]) -> None:
    """Asserts that an answer has these tokens and log-probabilities."""
    tokens, values = wanted
    assert answer.token_ids == tokens
    np.testing.assert_allclose(logprobs(answer), values, atol=2e-3)


@pytest.fixture(autouse=True)
def masks_of_the_12b(monkeypatch):
    """The 12B's own, which transformers 5.24 takes in some calls only: in others images see themselves whole in full layers too, and past
    the window (transformers issue 46711, mended for the other members)."""
    made = getattr(unified, "create_masks_for_generate", None)
    if made is None:  # a later release that makes them in another way
        return

    def masks(*args, block_sequence_ids=None, **kwargs):
        if block_sequence_ids is None:
            return made(*args, **kwargs)
        return unified.create_masks_for_vision_model(*args, block_sequence_ids=block_sequence_ids, **kwargs)

    monkeypatch.setattr(unified, "create_masks_for_generate", masks)


def keys(tower: Any) -> set[str]:
    """The names that a checkpoint gives to what makes up a tower."""
    shapes, layouts = {path: leaf.shape for path, leaf in leaves_by_path(tower).items()}, layouts_of(tower)
    return {part.key for path in shapes for part in layouts(path, shapes)[0]}
