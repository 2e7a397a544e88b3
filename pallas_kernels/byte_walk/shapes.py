"""The shapes that structured texts of the Gemma 4 family give to the walk, for tests, the benchmark and tuning."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call."""

    rows: int  # tokens, one a sequence
    states: int = 8192
    vocab: int = 262_144
    longest: int = 48  # bytes of a token


SHAPES = {f"{rows} tokens": Shape(rows) for rows in (1, 8, 32)}
