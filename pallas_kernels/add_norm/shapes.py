"""The shapes in which the Gemma 4 family adds to its residual stream, for tests and the benchmark."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """parts: outputs that are normed and added up before they are added. scaled: whether a scalar follows. norms: of the sum."""

    rows: int
    hidden: int
    parts: int = 1
    scaled: bool = False
    norms: int = 1

    @property
    def numbers(self) -> int:
        """Numbers that have to be read and written."""
        weights = 1 + self.norms + (self.parts if self.parts > 1 else 0)
        return self.hidden * (self.rows * (2 + self.parts + self.norms) + weights)


# Verify blocks, a batch of 32 of them, and prefill chunks; after attention, after the feed-forward and after the per-layer input.
SHAPES = {
    "E2B attention 4": Shape(4, 1536),
    "E2B feed-forward 4": Shape(4, 1536, norms=0),
    "E2B per-layer input 4": Shape(4, 1536, scaled=True),
    "E2B assistant 1": Shape(1, 256),
    "26B attention 5": Shape(5, 2816, norms=2),
    "26B feed-forward 5": Shape(5, 2816, parts=2, scaled=True),
    "26B feed-forward 160": Shape(160, 2816, parts=2, scaled=True),
    "31B attention 5": Shape(5, 5376),
    "31B feed-forward 5": Shape(5, 5376, scaled=True),
    "31B attention 160": Shape(160, 5376),
    "31B feed-forward 160": Shape(160, 5376, scaled=True),
    "31B attention 2048": Shape(2048, 5376),
}
