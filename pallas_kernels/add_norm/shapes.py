"""The shapes that the Gemma 4 family gives to `add_norm`, for tests and the benchmark."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of `add_norm`."""

    rows: int
    hidden: int
    parts: int = 1  # outputs that are normed, summed and then added
    scaled: bool = False  # whether there is a scalar
    norms: int = 1  # norms of the sum
    choices: int = 0  # of experts whose outputs the last of several parts is

    @property
    def numbers(self) -> int:
        """How many numbers the call has to read and write."""
        weights = 1 + self.norms + (self.parts if self.parts > 1 else 0)
        outputs = self.parts + max(0, self.choices - 1)
        return self.hidden * (self.rows * (2 + outputs + self.norms) + weights)


# Verify blocks of one sequence and of 32, and a prefill chunk; after attention, the feed-forward and the per-layer input.
SHAPES = {
    "E2B attention 4": Shape(4, 1536),
    "E2B feed-forward 4": Shape(4, 1536, norms=0),
    "E2B per-layer input 4": Shape(4, 1536, scaled=True),
    "E2B assistant 1": Shape(1, 256),
    "26B attention 5": Shape(5, 2816, norms=3),
    "26B feed-forward 5": Shape(5, 2816, parts=2, scaled=True, choices=8),
    "26B feed-forward 160": Shape(160, 2816, parts=2, scaled=True, choices=8),
    "31B attention 5": Shape(5, 5376),
    "31B feed-forward 5": Shape(5, 5376, scaled=True),
    "31B attention 160": Shape(160, 5376),
    "31B feed-forward 160": Shape(160, 5376, scaled=True),
    "31B attention 2048": Shape(2048, 5376),
}
