"""The image embedder of the 12B, which has no encoder: a product for each patch between norms, and an embedding of its place.

Facts: transformers `modeling_gemma4_unified.py` 5.24 (Gemma4UnifiedVisionEmbedder).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.checkpoint.layout import Part
from jaxspec.media.layers import BiasedLinear, LayerNorm, Projection, abstract_projection
from jaxspec.model.layers import Weight
from jaxspec.trees import told
from jaxspec.vision.config import EmbedderConfig, VisionConfig

EPS = 1e-5  # of the norms with a mean, which no config names


@struct.dataclass
class VisionEmbedder:
    """Patches to soft tokens. pos_embedding: [positions, 2, H]."""

    patch_ln1: LayerNorm
    patch_dense: BiasedLinear
    patch_ln2: LayerNorm
    pos_embedding: Weight
    pos_norm: LayerNorm

    def __call__(self, pixels: jax.Array, positions: jax.Array) -> jax.Array:
        """pixels: [B, N, P] float32; positions: [B, N, 2] int32, -1 for padding -> [B, N, H]."""
        x = self.patch_ln2(self.patch_dense(self.patch_ln1(pixels.astype(self.patch_dense.weight.dtype))))
        columns, rows = (jnp.take(self.pos_embedding[:, i], positions[..., i], axis=0, mode="clip") for i in range(2))
        valid = jnp.any(positions != -1, axis=-1)
        return self.pos_norm(x + jnp.where(valid[..., None], columns + rows, 0))


@struct.dataclass
class UnifiedVision:
    """The embedder and the projection of what it gives; the path of a field is its key in the release without the `model.` prefix."""

    vision_embedder: VisionEmbedder
    embed_vision: Projection

    __repr__ = told

    @staticmethod
    def layouts(path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[list[Part]]:
        """The names of the release, and those of transformers' model: see `layout.layouts`."""
        old, new = ("vision_embedder.", "") if path.startswith("vision_embedder.") else ("embed_vision.", "multimodal_embedder.")
        return [[Part(path, shapes[path])], [Part(f"embed_vision.{new}{path.removeprefix(old)}", shapes[path])]]

    def __call__(self, pixels: jax.Array, positions: jax.Array) -> jax.Array:
        """Images. pixels: [B, N, P] float32 of 0 .. 1, patches with channels last; positions: [B, N, 2] int32, their columns and rows,
        -1 for padding -> [B, N, text hidden] in the weights' dtype; rows past an image's own are finite."""
        return self.embed_vision(self.vision_embedder(pixels, positions))


def abstract(config: VisionConfig, dtype: Any = jnp.bfloat16) -> UnifiedVision:
    """The model as a tree of ShapeDtypeStructs."""
    assert isinstance(config.tower, EmbedderConfig)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def norm(width: int) -> LayerNorm:
        return LayerNorm(leaf(width), leaf(width), EPS)

    width, pixels = config.tower.mm_embed_dim, 3 * config.patch**2
    return UnifiedVision(
        vision_embedder=VisionEmbedder(
            patch_ln1=norm(pixels),
            patch_dense=BiasedLinear(leaf(width, pixels), leaf(width)),
            patch_ln2=norm(width),
            pos_embedding=leaf(config.tower.mm_posemb_size, 2, width),
            pos_norm=norm(width),
        ),
        embed_vision=abstract_projection(width, config.text_hidden_size, config.rms_norm_eps, dtype),
    )
