"""The config.json of a DFlash drafter: what is read of it, that of a fresh drafter, and those of the released ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxspec.drafters.block_config import SCALE, BlockConfig, Undecided, plain_fields
from jaxspec.drafters.blocks import named_taps, plain_config
from jaxspec.model.config_fields import expect, part, whole_or
from jaxspec.model.families import family_of
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.target import TargetConfig


@dataclasses.dataclass(frozen=True)
class DFlashConfig(BlockConfig):
    """What a DFlash drafter is made of, and the target that it was made for."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: TargetConfig, keys: Collection[str] = ()) -> DFlashConfig:
        """Reads config.json, as z-lab or speculators write it. keys: of the checkpoint's tensors.

        Raises ValueError, naming what was found, for a drafter that this implementation does not have or that leaves open what it reads.
        """
        expect(config, "sample_from_anchor", (False, None))
        expect(config, "projector_type", ("dflash",))
        fields = plain_fields(config, keys)
        undecided = _undecided(config, fields["hidden_size"], target)
        return cls(**fields, taps=_taps(config, len(fields["layers"]), target.num_hidden_layers), undecided=undecided)


def _undecided(config: Mapping[str, Any], hidden: int, target: TargetConfig) -> Undecided | None:
    """Gemma multiplies its embeddings by sqrt(hidden_size), and z-lab's configs for it do not say whether its drafters do. vLLM 0.33 and
    z-lab's newest code take the table's rows as they are; SGLang 0.5 and z-lab's pull request to vLLM (#41703) multiply them. speculators
    trains with the rows as they are."""
    said = SCALE in config or SCALE in part(config, "dflash_config")
    if said or "speculators_model_type" in config or not family_of(target).scales_embeddings:
        return None
    return Undecided(SCALE, (1.0, hidden**0.5))


def _taps(config: Mapping[str, Any], layers: int, depth: int) -> tuple[int, ...]:
    """Indices of hidden states, in the order in which the drafter's fc takes them."""
    indices = named_taps(part(config, "dflash_config"), config)
    if indices is not None:
        return indices
    made_for = whole_or(config, "num_target_layers", 0)
    if not made_for:
        raise ValueError(f"config.json has neither target_layer_ids nor num_target_layers, which this target's {depth} must equal")
    # As many as the drafter has layers, evenly from the second layer to the third from the end.
    ids = [made_for // 2] if layers == 1 else [round(1 + i * (made_for - 4) / (layers - 1)) for i in range(layers)]
    return tuple(i + 1 for i in ids)


def default_config(raw: Mapping[str, Any], target: TargetConfig) -> dict[str, Any]:
    """The config.json of a fresh drafter, like z-lab/gemma-4-31B-it-DFlash. raw: the target's."""
    layers, depth = 5, target.num_hidden_layers
    taps = min(layers + 1, depth)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **plain_config(target),
        "intermediate_size": 2 * target.hidden_size,
        "num_hidden_layers": layers,
        "layer_types": [*[SLIDING] * (layers - 1), FULL],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "rope_theta": 1_000_000.0,
        "block_size": 16,
        "dflash_config": {
            "mask_token_id": family_of(target).mask_token,
            # From the second layer on; the last layer says most about the next token.
            "target_layer_ids": sorted(
                {round(min(1, depth - 1) + i * (depth - 1 - min(1, depth - 1)) / max(taps - 1, 1)) for i in range(taps)}
            ),
            "final_logit_softcapping": target.final_logit_softcapping,
            "input_embedding_scale": 1.0,
        },
    }


def _released(depth: int, target_layer_ids: list[int], **sizes: int) -> dict[str, Any]:
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
        "layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, FULL],
        "sliding_window": 2048,
        "block_size": 16,
        "num_target_layers": depth,
        "final_logit_softcapping": 30.0,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": target_layer_ids},
        **sizes,
    }


# By the name of the target.
RELEASED: dict[str, dict[str, Any]] = {
    "26b": _released(30, [1, 6, 11, 17, 22, 27], hidden_size=2816, intermediate_size=5632, num_attention_heads=32),
    "31b": _released(60, [1, 12, 23, 35, 46, 57], hidden_size=5376, intermediate_size=10_752, num_attention_heads=64),
}
