"""The last step of every tower: into the width of the text model."""

from __future__ import annotations

from typing import Any

import jax
from flax import struct

from jaxspec.model.layers import Linear, rms


@struct.dataclass
class Projection:
    """A norm without a weight, then a product. (transformers `Gemma4MultimodalEmbedder`)"""

    embedding_projection: Linear
    eps: float = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x: [N, width of the tower] -> [N, text hidden]."""
        return self.embedding_projection(rms(x, self.eps))


def abstract_projection(width: int, text_hidden: int, eps: float, dtype: Any) -> Projection:
    """A projection as a tree of ShapeDtypeStructs."""
    return Projection(Linear(jax.ShapeDtypeStruct((text_hidden, width), dtype)), eps)
