"""The shapes that the Gemma 4 family gives to the top candidates, for tests, the benchmark and tuning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call."""

    rows: int
    k: int  # how many candidates
    vocab: int = 262_144


# One sequence without drafts, then 1, 8 and 32 sequences with four.
SHAPES = {f"top {k} of {rows} rows": Shape(rows, k) for k in (20, 64, 128) for rows in (1, 5, 40, 160)}
