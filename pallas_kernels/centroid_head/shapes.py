"""Shapes of the centroid head in the Gemma 4 family, for its tests, its benchmark and the choice of its tiles."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """N rows of width h, C centroids of which the best are taken, and a table of V rows."""

    rows: int
    hidden: int = 256
    centroids: int = 2048
    top_k: int = 32
    vocab: int = 262_144


# The assistants of E2B and E4B, which have one row a sequence.
SHAPES = {f"assistant x {rows}": Shape(rows) for rows in (1, 8, 32)}
