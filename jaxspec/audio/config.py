"""What a checkpoint's config.json says about sounds. Field names are Hugging Face's.

Facts: transformers `Gemma4AudioConfig` and `Gemma4UnifiedAudioConfig` 5.24, whose defaults hold for fields that a config leaves out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxspec.checks import number
from jaxspec.model.config_fields import checked, expect, flag, positive, section, whole, whole_or

TOWER, UNIFIED = "gemma4", "gemma4_unified"  # the model types with sounds
TOKENS = {"audio_token_id": 258_881, "boa_token_id": 256_000, "eoa_token_index": 258_883}
UNSEEN, MOST_UNSEEN = -1e9, -1e3  # the score of a row that is not seen: by default, and at most


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """The encoder of E2B and E4B."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    subsampling_conv_channels: tuple[int, int]
    conv_kernel_size: int
    residual_weight: float
    attention_chunk_size: int
    attention_context_left: int
    attention_context_right: int
    attention_logit_cap: float
    attention_invalid_logits_value: float
    use_clipped_linears: bool
    gradient_clipping: float
    output_proj_dims: int

    @property
    def num_places(self) -> int:
        """How many places of a frame's features the convolutions leave, each of which halves them: as many as the projection reads."""
        return self.subsampling_conv_channels[0] // 4


@dataclasses.dataclass(frozen=True)
class EmbedderConfig:
    """The embedder of the 12B, which has no encoder."""

    audio_embed_dim: int


@dataclasses.dataclass(frozen=True)
class AudioConfig:
    """How sounds become rows."""

    tower: TowerConfig | EmbedderConfig
    text_hidden_size: int
    rms_norm_eps: float
    audio_token_id: int
    boa_token_id: int
    eoa_token_index: int


def audio_config(config: Mapping[str, Any]) -> AudioConfig | None:
    """What config.json says about sounds; None where it has no `audio_config`, as of text and images alone.

    Raises ValueError, which names what is found and what is expected, for what is not served.
    """
    if config.get("audio_config") is None:
        return None
    try:
        return _audio_config(config)
    except ValueError as error:
        raise ValueError(f"the audio tower cannot be read: {error}") from error


def _audio_config(config: Mapping[str, Any]) -> AudioConfig:
    expect(config, "model_type", (TOWER, UNIFIED))
    audio, kind = section(config, "audio_config"), config.get("model_type", TOWER)
    expect(audio, "model_type", (f"{kind}_audio",))
    return AudioConfig(
        tower=_tower(audio) if kind == TOWER else EmbedderConfig(whole_or(audio, "audio_embed_dim", 640)),
        text_hidden_size=whole(section(config, "text_config"), "hidden_size"),
        rms_norm_eps=positive(audio, "rms_norm_eps", 1e-6),
        **{name: whole_or(config, name, default) for name, default in TOKENS.items()},
    )


def _tower(audio: Mapping[str, Any]) -> TowerConfig:
    expect(audio, "hidden_act", ("silu",))
    hidden, heads = whole_or(audio, "hidden_size", 1024), whole_or(audio, "num_attention_heads", 8)
    if hidden % heads:
        raise ValueError(f"hidden_size is {hidden}; expected a multiple of num_attention_heads, {heads}")
    channels = audio.get("subsampling_conv_channels", (128, 32))
    if not isinstance(channels, list | tuple) or len(channels) != 2 or not all(isinstance(c, int) and c > 3 for c in channels):
        raise ValueError(f"subsampling_conv_channels are {channels!r}; expected two integers")
    left = whole_or(audio, "attention_context_left", 13)
    if left < 2:
        raise ValueError(f"attention_context_left is {left}; expected 2 at least, with which a row sees itself")
    unseen = audio.get("attention_invalid_logits_value")
    unseen = UNSEEN if unseen is None else checked(number, "attention_invalid_logits_value", unseen, -math.inf)
    if unseen > MOST_UNSEEN:
        raise ValueError(f"attention_invalid_logits_value is {unseen}; expected {MOST_UNSEEN} at most, so that such rows weigh nothing")
    return TowerConfig(
        hidden_size=hidden,
        num_hidden_layers=whole_or(audio, "num_hidden_layers", 12),
        num_attention_heads=heads,
        subsampling_conv_channels=(channels[0], channels[1]),
        conv_kernel_size=whole_or(audio, "conv_kernel_size", 5),
        residual_weight=positive(audio, "residual_weight", 0.5),
        attention_chunk_size=whole_or(audio, "attention_chunk_size", 12),
        attention_context_left=left,
        attention_context_right=whole_or(audio, "attention_context_right", 0),
        attention_logit_cap=positive(audio, "attention_logit_cap", 50.0),
        attention_invalid_logits_value=unseen,
        use_clipped_linears=flag(audio, "use_clipped_linears", True),
        gradient_clipping=positive(audio, "gradient_clipping", 1e10),
        output_proj_dims=whole_or(audio, "output_proj_dims", 1536),
    )
