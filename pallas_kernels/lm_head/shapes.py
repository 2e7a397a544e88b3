"""The shapes that the Gemma 4 family gives to the fused head, for tests, the benchmark and tuning."""

from __future__ import annotations

import dataclasses

VOCAB = 262_144
HIDDEN_SIZES = {"E2B": 1536, "E4B": 2560, "12B": 3840, "26B-A4B": 2816, "31B": 5376}
ASSISTANT = 1024  # hidden size of the assistants of 12B, 26B-A4B and 31B, whose head is dense


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call of the head."""

    rows: int
    hidden: int
    vocab: int
    softcap: float | None


def of(name: str, rows: int) -> Shape:
    """The head of a target for so many rows."""
    return Shape(rows, HIDDEN_SIZES[name], VOCAB, 30.0)


# One sequence without drafts, then 1, 8 and 32 sequences with four. An assistant has one row a sequence.
SHAPES = {f"{name} x {rows}": of(name, rows) for name in HIDDEN_SIZES for rows in (1, 5, 40, 160)}
SHAPES |= {f"{name} x 128": of(name, 128) for name in ("E2B", "E4B")}  # 32 sequences with three
SHAPES |= {f"assistant x {rows}": Shape(rows, ASSISTANT, VOCAB, None) for rows in (1, 8, 32)}
