"""The shapes that Gemma 4 26B-A4B gives to the mixture of experts, for tests, the benchmark and tuning."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Shape:
    """A block of rows through one layer's experts."""

    rows: int
    experts: int = 128
    inner: int = 704
    hidden: int = 2816
    top_k: int = 8

    def layer(self, dtype: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The shapes of x, gate_up_proj, down_proj, scores and per_expert_scale."""
        count, inner, hidden = self.experts, self.inner, self.hidden
        shapes = ((self.rows, hidden), (count, 2, inner, hidden), (count, hidden, inner), (self.rows, count), (count,))
        return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)

    def read(self, active: int, itemsize: int) -> int:
        """Bytes of the weights of `active` experts."""
        return active * 3 * self.inner * self.hidden * itemsize


# A step without drafts; verify blocks of K = 4 for 1, 8 and 32 sequences; a prefill chunk.
SHAPES = {
    "26B decode 1": Shape(1),
    "26B verify 1x5": Shape(5),
    "26B verify 8x5": Shape(40),
    "26B verify 32x5": Shape(160),
    "26B prefill 2048": Shape(2048),
}
