"""The config.json of a DFlash2 drafter: what is read of it, that of a fresh drafter, and that of one for benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxspec.drafters.block_config import FRESH_LAYERS, BlockConfig, fresh_config, plain_fields
from jaxspec.drafters.blocks import named_taps
from jaxspec.model.config_fields import expect, part, whole
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.target import TargetConfig


@dataclasses.dataclass(frozen=True)
class DFlash2Config(BlockConfig):
    """What a DFlash2 drafter is made of, and the target that it was made for."""

    # Rows that a convolution sees, and channels that share what a row adds to its kernel.
    conv_kernel_size: int = 1
    conv_group_size: int = 1
    # Numbers that stand for a token in the selector, and candidates of each place.
    selector_rank: int = 1
    selector_top_k: int = 1

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: TargetConfig, keys: Collection[str] = ()) -> DFlash2Config:
        """Reads config.json, as speculators or z-lab (in `dflash_config`) write it. keys: of the checkpoint's tensors.

        Raises ValueError, naming what was found, for a drafter that this implementation does not have or that leaves open what it reads.
        """
        dflash = part(config, "dflash_config")
        expect(config, "sample_from_anchor", (False, None))
        # A sliding layer sees the whole block unless the config says otherwise.
        fields = plain_fields({"sliding_window_non_causal": True, **config}, keys)
        if fields["draft_vocab_size"] != fields["vocab_size"]:
            raise ValueError(f"draft_vocab_size is {fields['draft_vocab_size']} of {fields['vocab_size']} tokens; DFlash2 drafts from all")
        taps = named_taps(dflash, config)
        if taps is None:
            raise ValueError("config.json names no layers of the target; expected aux_hidden_state_layer_ids or target_layer_ids")
        sizes: dict[str, Any] = {name: whole({**config, **dflash}, name) for name in _SIZES}
        if fields["hidden_size"] % sizes["conv_group_size"]:
            raise ValueError(f"conv_group_size {sizes['conv_group_size']} does not divide hidden_size {fields['hidden_size']}")
        if sizes["selector_top_k"] > fields["vocab_size"]:
            raise ValueError(f"selector_top_k is {sizes['selector_top_k']} of {fields['vocab_size']} tokens")
        return cls(**fields, **sizes, taps=taps)


# As speculators makes them where nobody asks for others.
_SIZES = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}


def default_config(raw: Mapping[str, Any], target: TargetConfig) -> dict[str, Any]:
    """The config.json of a fresh drafter, in speculators' layout. raw: the target's."""
    layers = {"layer_types": [*[SLIDING] * (FRESH_LAYERS - 1), FULL], "sliding_window": 2048}
    return {
        **fresh_config(target, **layers),
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "block_size": 16,
        "draft_vocab_size": target.vocab_size,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        **_SIZES,
        "dflash_config": {"final_logit_softcapping": target.final_logit_softcapping},  # which vLLM reads there
    }


# By the name of the target. Of RedHatAI/gemma-4-31B-it-speculator.dflash2 no config is known here: these are the layers of z-lab's
# DFlash drafter for that target, with the sizes that speculators adds.
RELEASED: dict[str, dict[str, Any]] = {
    "31b": {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "transformer_layer_config": {
            "model_type": "qwen3",
            "vocab_size": 262_144,
            "hidden_size": 5376,
            "intermediate_size": 10_752,
            "num_hidden_layers": 5,
            "layer_types": [*[SLIDING] * 4, FULL],
            "sliding_window": 2048,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1_000_000.0,
        },
        "aux_hidden_state_layer_ids": [1, 17, 29, 47, 58],
        "block_size": 16,
        "mask_token_id": 4,
        "sample_from_anchor": False,
        "sliding_window_non_causal": True,
        **_SIZES,
    },
}
