"""The shapes that the Gemma 4 family gives to the centroid head, for tests, the benchmark and tuning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of the head."""

    rows: int
    hidden: int = 256
    centroids: int = 2048
    top_k: int = 32  # centroids that a row takes
    vocab: int = 262_144


# The assistants of E2B and E4B, with one row a sequence.
SHAPES = {f"assistant x {rows}": Shape(rows) for rows in (1, 8, 32)}
