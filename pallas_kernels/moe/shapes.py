"""The shapes that Gemma 4 26B-A4B and Step-3.5-Flash give to the mixture of experts, for tests, the benchmark and tuning."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from pallas_kernels.activation import GELU, Activation
from pallas_kernels.linear.shapes import packed


@dataclasses.dataclass(frozen=True)
class Shape:
    """A block of rows through one layer's experts."""

    rows: int
    experts: int = 128
    inner: int = 704
    hidden: int = 2816
    top_k: int = 8
    activation: Activation = GELU
    scale: float | None = None  # of `route`: None for a softmax

    def layer(self, dtype: Any, packing: str | None = None) -> tuple[Any, ...]:
        """The shapes of x, gate_up_proj, down_proj, scores and per_expert.

        packing: of the weights, a key of `linear.shapes.PACKINGS`; None for weights of `dtype`."""
        count, inner, hidden = self.experts, self.inner, self.hidden
        shapes = ((self.rows, hidden), (count, 2, inner, hidden), (count, hidden, inner), (self.rows, count), (count,))
        x, gate_up, down, *others = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
        if packing is not None:
            gate_up, down = (packed(w.shape, packing, dtype) for w in (gate_up, down))
        return x, gate_up, down, *others

    def read(self, active: int, gate_up: Any, down: Any) -> int:
        """Bytes of the weights of `active` experts. gate_up, down: those of all experts."""
        return active * sum(w.size * w.dtype.itemsize for w in jax.tree.leaves((gate_up, down))) // self.experts


def _step3p5(rows: int) -> Shape:
    return Shape(rows, experts=288, inner=1280, hidden=4096, activation=Activation("silu", 7.0), scale=3.0)


# A step without drafts; verify blocks of K = 4 for 1, 8 and 32 sequences; a prefill chunk.
SHAPES = {
    "26B decode 1": Shape(1),
    "26B verify 1x5": Shape(5),
    "26B verify 8x5": Shape(40),
    "26B verify 32x5": Shape(160),
    "26B prefill 2048": Shape(2048),
    "Step-3.5 decode 1": _step3p5(1),
    "Step-3.5 verify 1x4": _step3p5(4),
    "Step-3.5 verify 8x4": _step3p5(32),
}
