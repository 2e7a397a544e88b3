"""The picture of a training run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PANELS = (
    ("loss", ("loss", "held_out_loss")),
    ("tokens a step", ("acceptance_length", "held_out_acceptance_length", "measured_acceptance_length")),
)


def draw_curves(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws loss and acceptance length over steps, as a PNG. rows: of metrics.jsonl. Does nothing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return
    panels = [(title, [name for name in names if name in rows[-1]]) for title, names in PANELS]
    panels = [(title, names) for title, names in panels if names]
    figure = Figure(figsize=(5 * len(panels), 3), layout="constrained")
    for axes, (title, names) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for name in names:
            shown = [row for row in rows if name in row]
            axes.plot([row["step"] for row in shown], [row[name] for row in shown], label=name.replace("_", " "))
        axes.set(xlabel="step", ylabel=title)
        axes.legend()
    figure.savefig(path)
