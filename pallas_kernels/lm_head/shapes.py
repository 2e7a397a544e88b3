"""Shapes of the fused head in the Gemma 4 family, for its tests, its benchmark and the choice of its tiles."""

from __future__ import annotations

import dataclasses

VOCAB = 262_144
TARGETS = {"E2B": 1536, "E4B": 2560, "12B": 3840, "26B-A4B": 2816, "31B": 5376}  # hidden sizes
ASSISTANT = 1024  # hidden size of the assistants of 12B, 26B-A4B and 31B, whose head is dense


@dataclasses.dataclass(frozen=True)
class Shape:
    """N rows of width H, a table of V rows, and the cap of the logits."""

    rows: int
    hidden: int
    vocab: int
    softcap: float | None


# One sequence without drafts, one with four, and batches of 8 and 32 with four; an assistant has one row a sequence.
SHAPES = {f"{name} x {rows}": Shape(rows, hidden, VOCAB, 30.0) for name, hidden in TARGETS.items() for rows in (1, 5, 40, 160)}
SHAPES |= {f"assistant x {rows}": Shape(rows, ASSISTANT, VOCAB, None) for rows in (1, 8, 32)}
