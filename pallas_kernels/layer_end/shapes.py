"""The shapes that the Gemma 4 family gives to `layer_end`, for tests and the benchmark."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of `layer_end`."""

    rows: int
    hidden: int
    layers: int
    parts: int = 4  # of the feed-forward's output
    last: bool = False  # whether no layer follows, whose norm the call would end with
    inputs: int = 256

    @property
    def size(self) -> int:
        """Bytes that the call has to read and write, in bfloat16; parts are float32."""
        norms = 0 if self.last else 1
        rows = self.rows * (self.hidden * (4 * self.parts + 2 * (2 + norms)) + 2 * self.inputs)
        return rows + 2 * self.hidden * (2 * self.inputs + 2 + norms)

    def arguments(self, dtype: Any) -> tuple[Any, ...]:
        """The shapes of x, y, weight, gate, inputs, index, projection, norm and scalar, and of next_weight or None."""
        leaf, vector = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((self.hidden,), dtype)
        return (
            leaf((self.rows, self.hidden), dtype),
            leaf((self.parts, self.rows, self.hidden), jnp.float32),
            vector,
            leaf((self.inputs, self.hidden), dtype),
            leaf((self.rows, self.layers, self.inputs), dtype),
            leaf((), jnp.int32),
            leaf((self.hidden, self.inputs), dtype),
            vector,
            leaf((1,), dtype),
            None if self.last else vector,
        )


# Verify blocks of one sequence, of eight and of 16, as many rows as a kernel takes, and other numbers.
SHAPES = {
    "E2B 4": Shape(4, 1536, 35),
    "E2B 32": Shape(32, 1536, 35),
    "E2B 64": Shape(64, 1536, 35, parts=2),
    "E2B 27, the last layer": Shape(27, 1536, 35, parts=1, last=True),
    "E4B 4": Shape(4, 2560, 42, parts=3),
    "E4B 32": Shape(32, 2560, 42),
    "E4B 61": Shape(61, 2560, 42),
}
