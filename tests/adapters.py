"""LoRA adapters that PEFT writes for tiny random targets, and what PEFT makes of target and adapter together."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import oracle
import torch
import transformers
from oracle import outer_config, text_config


class Adapted(NamedTuple):
    """target, adapter, merged: folders that transformers and PEFT wrote; `merged` is merge_and_unload of the other two."""

    target: Path
    adapter: Path
    merged: Path


def text_model(member: str, **changes: Any) -> Any:
    """The text-only class."""
    return oracle.build(text_config(member, **changes))


def whole_model(member: str) -> Any:
    """The class with an image tower, and with an audio tower where the member has one."""
    text = text_config(member)
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**tower, "intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 2, "position_embedding_size": 16}
    more = {"vision_config": vision, "audio_config": {**tower, "output_proj_dims": 16}}
    config = transformers.Gemma4Config.from_dict({**outer_config(text), **more})
    config._attn_implementation = "eager"
    model = transformers.Gemma4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        oracle.randomise(model.model.language_model, 0)
    return model


def adapted(model: Any, root: Path, *, dtype: torch.dtype = torch.float32, **lora: Any) -> Adapted:
    """Writes a model, an adapter of it with random weights, and both merged. lora: of `peft.LoraConfig`."""
    import peft  # here, since it takes a second to import

    folders = Adapted(root / "target", root / "adapter", root / "merged")
    model = model.to(dtype)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folders.target)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        wrapped = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(task_type="CAUSAL_LM", **lora))
        torch.manual_seed(1)
        for name, weight in wrapped.named_parameters():
            if weight.requires_grad or "lora_" in name:
                weight.add_(0.1 * torch.randn_like(weight))
        # What is tied stays tied, as training with ensure_weight_tying keeps it.
        if lora.get("ensure_weight_tying"):
            for name, weight in wrapped.named_parameters():
                if "lm_head.modules_to_save" in name:
                    weight.copy_(dict(wrapped.named_parameters())[name.replace("lm_head", "model.embed_tokens")])
        wrapped.save_pretrained(folders.adapter)
        merged = peft.PeftModel.from_pretrained(copy.deepcopy(model), folders.adapter).merge_and_unload()
        merged.to(dtype).save_pretrained(folders.merged)
    return folders


def edited(adapter: Path, to: Path, **changes: Any) -> Path:
    """A copy of an adapter with other settings in its config; None takes one away."""
    to.mkdir()
    (to / "adapter_model.safetensors").write_bytes((adapter / "adapter_model.safetensors").read_bytes())
    config = {**json.loads((adapter / "adapter_config.json").read_text()), **changes}
    (to / "adapter_config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return to
