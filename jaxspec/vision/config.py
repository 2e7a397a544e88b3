"""What a checkpoint's config.json says about images. Field names are Hugging Face's.

Facts: transformers `Gemma4VisionConfig` and `Gemma4UnifiedVisionConfig` 5.24, whose defaults hold for fields that a config leaves out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxspec.checks import flag, integer, number

TOWER, UNIFIED = "gemma4", "gemma4_unified"  # the model types with images
ACTIVATION = "gelu_pytorch_tanh"
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

    Raises TypeError or ValueError, which name what is found and what is expected, for what is not served.
    """
    vision = config.get("vision_config")
    if vision is None:
        return None
    if not isinstance(vision, Mapping):
        raise TypeError(f"vision_config is of type {type(vision).__name__}; expected an object, or null")
    kind, text = config.get("model_type"), config.get("text_config")
    _expect("model_type", kind, (TOWER, UNIFIED))
    if not isinstance(text, Mapping):
        raise TypeError(f"text_config is of type {type(text).__name__}; expected an object beside vision_config")
    _expect("vision_config.model_type", vision.get("model_type", f"{kind}_vision"), (f"{kind}_vision",))
    return VisionConfig(
        tower=_tower(vision) if kind == TOWER else _embedder(vision),
        text_hidden_size=integer("text_config.hidden_size", text.get("hidden_size"), 1),
        patch_size=_size(vision, "patch_size", 16),
        pooling_kernel_size=_size(vision, "pooling_kernel_size", 3),
        rms_norm_eps=number("vision_config.rms_norm_eps", vision.get("rms_norm_eps", 1e-6), 0),
        **{name: integer(name, config.get(name, default), 0) for name, default in TOKENS.items()},
    )


def _tower(vision: Mapping[str, Any]) -> TowerConfig:
    _expect("vision_config.hidden_activation", vision.get("hidden_activation", ACTIVATION), (ACTIVATION,))
    rope = vision.get("rope_parameters") or {}
    _expect("vision_config.rope_parameters.rope_type", rope.get("rope_type", ROPE_TYPES[0]), ROPE_TYPES)
    heads, kv_heads = _size(vision, "num_attention_heads", 12), _size(vision, "num_key_value_heads", 12)
    if heads % kv_heads:
        raise ValueError(f"vision_config.num_attention_heads is {heads}; expected a multiple of num_key_value_heads, {kv_heads}")
    head_dim = _size(vision, "head_dim", 64)
    if head_dim % 4:
        raise ValueError(f"vision_config.head_dim is {head_dim}; expected a multiple of 4: pairs along two axes")
    return TowerConfig(
        hidden_size=_size(vision, "hidden_size", 768),
        intermediate_size=_size(vision, "intermediate_size", 3072),
        num_hidden_layers=_size(vision, "num_hidden_layers", 16),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=number("vision_config.rope_parameters.rope_theta", rope.get("rope_theta", 100.0), 0, above=True),
        position_embedding_size=_size(vision, "position_embedding_size", 10_240),
        use_clipped_linears=flag("vision_config.use_clipped_linears", vision.get("use_clipped_linears", False)),
        standardize=flag("vision_config.standardize", vision.get("standardize", False)),
    )


def _embedder(vision: Mapping[str, Any]) -> EmbedderConfig:
    width = _size(vision, "mm_embed_dim", 3840)
    _expect("vision_config.output_proj_dims", vision.get("output_proj_dims", width), (width,))
    return EmbedderConfig(mm_embed_dim=width, mm_posemb_size=_size(vision, "mm_posemb_size", 1120))


def _size(vision: Mapping[str, Any], name: str, default: int) -> int:
    return integer(f"vision_config.{name}", vision.get(name, default), 1)


def _expect(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected {' or '.join(map(repr, allowed))}")
