"""The shapes that the Gemma 4 family gives to the filtered choice, for tests, the benchmark and tuning."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call."""

    rows: int
    sequences: int
    vocab: int = 262_144
    count: int = 128  # of candidates

    def arguments(self, array: Any) -> tuple[Any, ...]:
        """The arrays, in order. array: makes one of a shape and a dtype."""
        numbers = [array(self.sequences, dtype=dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.float32)]
        return array(self.rows, self.vocab, dtype=jnp.float32), array(self.rows, 2, dtype=jnp.uint32), *numbers


# The head of a draft, the target's rows of 1, 8 and 32 sequences with four drafts, and candidates of a centroid head.
SHAPES = {
    "a draft": Shape(1, 1),
    **{f"{5 * count} rows": Shape(5 * count, count) for count in (1, 8, 32)},
    "centroids x 8": Shape(8, 8, 4096),
}
