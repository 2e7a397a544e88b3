"""The audio embedder of the 12B, which has no encoder: samples are projected as they are.

Facts: transformers `modeling_gemma4_unified.py` 5.24 (get_audio_features).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.audio.config import AudioConfig, EmbedderConfig
from jaxspec.media.layers import Projection, abstract_projection
from jaxspec.trees import told


@struct.dataclass
class UnifiedAudio:
    """The projection; the path of a field is its Hugging Face key without the `model.` prefix."""

    embed_audio: Projection

    __repr__ = told

    def __call__(self, features: jax.Array, count: jax.Array) -> jax.Array:
        """One sound. features: [N, F] float32, samples; count: int32, how many of the N rows are the sound's -> [N, text hidden] in the
        weights' dtype; rows past the sound's own are finite."""
        return self.embed_audio(features.astype(self.embed_audio.embedding_projection.weight.dtype))


def abstract(config: AudioConfig, dtype: Any = jnp.bfloat16) -> UnifiedAudio:
    """The model as a tree of ShapeDtypeStructs."""
    assert isinstance(config.tower, EmbedderConfig)
    return UnifiedAudio(abstract_projection(config.tower.audio_embed_dim, config.text_hidden_size, config.rms_norm_eps, dtype))
