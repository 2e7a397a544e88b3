"""The rows that the Gemma 4 family's products take, for the benchmark and the compile check."""

from __future__ import annotations

# Numbers of a row: hidden states, heads and the feed-forward's of a layer.
WIDTHS = {"E2B": (1536, 2048, 6144), "31B": (5376, 8192, 21504)}
SHAPES = {f"{model} {rows} x {width}": (rows, width) for model, widths in WIDTHS.items() for width in widths for rows in (5, 40, 160)}
