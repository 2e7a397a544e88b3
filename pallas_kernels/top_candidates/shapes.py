"""Shapes of the top candidates in the Gemma 4 family, for its tests, its benchmark and the choice of its tiles."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """N rows of V logits, of which the k largest are wanted."""

    rows: int
    k: int
    vocab: int = 262_144


# One sequence without drafts, one with four, and batches of 8 and 32 with four.
SHAPES = {f"top {k} of {rows} rows": Shape(rows, k) for k in (20, 64, 128) for rows in (1, 5, 40, 160)}
