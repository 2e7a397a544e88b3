"""What a checkpoint's config.json says about images. Field names are Hugging Face's.

Facts: transformers `Gemma4VisionConfig` and `Gemma4UnifiedVisionConfig` 5.24, whose defaults hold for fields that a config leaves out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.model.config_fields import expect, flag, part, positive, section, whole, whole_or

TOWER, UNIFIED = "gemma4", "gemma4_unified"  # the model types with images
ROPE_TYPES = ("axial", "default")  # two names of the same rotation: transformers wrote the latter before it knew the former
TOKENS = {"image_token_id": 258_880, "boi_token_id": 255_999, "eoi_token_id": 258_882}


@dataclasses.dataclass(frozen=True)
class TowerConfig:
    """The encoder of E2B, E4B, 26B-A4B and 31B."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_theta: float
    position_embedding_size: int
    use_clipped_linears: bool
    standardize: bool


@dataclasses.dataclass(frozen=True)
class EmbedderConfig:
    """The embedder of the 12B, which has no encoder."""

    mm_embed_dim: int
    mm_posemb_size: int


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """How images become rows."""

    tower: TowerConfig | EmbedderConfig
    text_hidden_size: int
    patch_size: int
    pooling_kernel_size: int
    rms_norm_eps: float
    image_token_id: int
    boi_token_id: int
    eoi_token_id: int

    @property
    def patch(self) -> int:
        """Pixels a side of the patches that the tower reads."""
        return self.patch_size if isinstance(self.tower, TowerConfig) else self.patch_size * self.pooling_kernel_size

    @property
    def pool(self) -> int:
        """Patches a side of the square that becomes one soft token."""
        return self.pooling_kernel_size if isinstance(self.tower, TowerConfig) else 1

    @property
    def max_position(self) -> int:
        """How many columns, and how many rows, of patches the tower has embeddings for."""
        return self.tower.position_embedding_size if isinstance(self.tower, TowerConfig) else self.tower.mm_posemb_size


def vision_config(config: Mapping[str, Any]) -> VisionConfig | None:
    """What config.json says about images; None where it has no `vision_config`, as of text alone.

    Raises ValueError, which names what is found and what is expected, for what is not served.
    """
    if config.get("vision_config") is None:
        return None
    try:
        return _vision_config(config)
    except ValueError as error:
        raise ValueError(f"the image tower cannot be read: {error}") from error


def _vision_config(config: Mapping[str, Any]) -> VisionConfig:
    expect(config, "model_type", (TOWER, UNIFIED))
    vision, kind = section(config, "vision_config"), config.get("model_type", TOWER)
    expect(vision, "model_type", (f"{kind}_vision",))
    return VisionConfig(
        tower=_tower(vision) if kind == TOWER else _embedder(vision),
        text_hidden_size=whole(section(config, "text_config"), "hidden_size"),
        patch_size=whole_or(vision, "patch_size", 16),
        pooling_kernel_size=whole_or(vision, "pooling_kernel_size", 3),
        rms_norm_eps=positive(vision, "rms_norm_eps", 1e-6),
        **{name: whole_or(config, name, default) for name, default in TOKENS.items()},
    )


def _tower(vision: Mapping[str, Any]) -> TowerConfig:
    expect(vision, "hidden_activation", ("gelu_pytorch_tanh",))
    rope = part(vision, "rope_parameters")
    expect(rope, "rope_type", ROPE_TYPES)
    heads, kv_heads = whole_or(vision, "num_attention_heads", 12), whole_or(vision, "num_key_value_heads", 12)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads is {heads}; expected a multiple of num_key_value_heads, {kv_heads}")
    head_dim = whole_or(vision, "head_dim", 64)
    if head_dim % 4:
        raise ValueError(f"head_dim is {head_dim}; expected a multiple of 4: pairs along two axes")
    return TowerConfig(
        hidden_size=whole_or(vision, "hidden_size", 768),
        intermediate_size=whole_or(vision, "intermediate_size", 3072),
        num_hidden_layers=whole_or(vision, "num_hidden_layers", 16),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=positive(rope, "rope_theta", 100.0),
        position_embedding_size=whole_or(vision, "position_embedding_size", 10_240),
        use_clipped_linears=flag(vision, "use_clipped_linears"),
        standardize=flag(vision, "standardize"),
    )


def _embedder(vision: Mapping[str, Any]) -> EmbedderConfig:
    width = whole_or(vision, "mm_embed_dim", 3840)
    expect(vision, "output_proj_dims", (width,))
    return EmbedderConfig(mm_embed_dim=width, mm_posemb_size=whole_or(vision, "mm_posemb_size", 1120))
