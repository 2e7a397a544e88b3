"""Plots of what speculation achieves. They need matplotlib: `pip install matplotlib`."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.engine.stats import RoundStats, Stats

MARKERS = "osD^vPX*"


def plot_acceptance(stats: Stats | RoundStats, axes: Any = None) -> Any:
    """Draws how often each draft position was accepted, and how many drafts a step accepted. Returns the figure.

    stats: `llm.stats`, the difference of two, or a completion's. axes: two matplotlib Axes to draw on; by default those of a new figure.
    Raises ImportError without matplotlib, ValueError if there are no steps to draw.
    """
    if not stats.steps:
        raise ValueError("there are no steps to draw; generate something first")
    by_position, by_count = _subplots("plot_acceptance", 2) if axes is None else axes
    rates = stats.acceptance_rates
    by_position.bar(range(1, len(rates) + 1), rates)
    by_position.set(xlabel="draft position", ylabel="share of steps", ylim=(0, 1), title="accepted, with all before it")
    by_position.set_xticks(range(1, len(rates) + 1))
    by_count.bar(range(len(stats.histogram)), [n / stats.steps for n in stats.histogram])
    by_count.set(xlabel="accepted drafts", ylabel="share of steps", title=f"{stats.acceptance_length:.2f} tokens a step")
    by_count.set_xticks(range(len(stats.histogram)))
    return by_position.figure


def plot_sweep(runs: Mapping[str, Mapping[int, Stats]], axes: Any = None) -> Any:
    """Draws tokens a step and tokens a second over the number of drafts, with a line for each drafter. Returns the figure.

    runs: drafter -> number of drafts K -> the Stats of a run. A drafter whose only K is 0 is the baseline and becomes a dashed line.
    axes: two matplotlib Axes; by default those of a new figure. Raises ImportError without matplotlib, ValueError if there are no runs.
    """
    if not any(runs.values()):
        raise ValueError("there are no runs to draw; expected drafter -> {K: Stats}")
    lengths, speeds = _subplots("plot_sweep", 2) if axes is None else axes
    for marker, (name, by_k) in zip(MARKERS * len(runs), runs.items(), strict=False):
        counts = sorted(by_k)
        for axis, values in (
            (lengths, [by_k[k].acceptance_length for k in counts]),
            (speeds, [by_k[k].tokens_per_second for k in counts]),
        ):
            if counts == [0]:
                axis.axhline(values[0], color="gray", linestyle="--", label=name)
            else:
                axis.plot(counts, values, marker=marker, label=name)
    for axis, label in ((lengths, "tokens a step"), (speeds, "tokens a second")):
        axis.set(xlabel="drafts a step, K", title=label)
        axis.set_xticks(sorted({k for by_k in runs.values() for k in by_k if k}))
        axis.set_ylim(bottom=0)
    speeds.legend(loc="upper left", bbox_to_anchor=(1, 1))  # beside the lines, however many there are
    return lengths.figure


def plot_frequencies(expected: Mapping[Any, float], samples: Mapping[str, Sequence[Any]], top: int = 12, axes: Any = None) -> Any:
    """Draws how often tokens occur in samples, beside their probabilities. Returns the figure.

    expected: token -> probability. samples: name -> the tokens drawn. A bar has the standard error of as many draws by the expected
    probability. top: how many tokens to show, the most probable ones. axes: a matplotlib Axes; by default that of a new figure.
    Raises ImportError without matplotlib, ValueError if a sample is empty.
    """
    empty = [name for name, drawn in samples.items() if not len(drawn)]
    if empty:
        raise ValueError(f"the sample {empty[0]!r} has no tokens; expected at least one")
    axis = _subplots("plot_frequencies", 1) if axes is None else axes
    shown = sorted(expected, key=lambda token: -expected[token])[:top]
    width = 0.8 / (len(samples) + 1)
    left = [place - 0.4 + width / 2 for place in range(len(shown))]
    axis.bar(left, [expected[token] for token in shown], width, label="probability", color="lightgray", edgecolor="gray")
    for i, (name, drawn) in enumerate(samples.items(), start=1):
        counts, total = collections.Counter(drawn), len(drawn)
        errors = [(expected[token] * (1 - expected[token]) / total) ** 0.5 for token in shown]
        axis.bar([x + i * width for x in left], [counts[token] / total for token in shown], width, yerr=errors, capsize=2, label=name)
    axis.set_xticks(range(len(shown)), [token if isinstance(token, str) else str(token) for token in shown], rotation=45, ha="right")
    axis.set(ylabel="share of draws")
    axis.set_ylim(bottom=0)
    axis.legend()
    return axis.figure


def _subplots(name: str, count: int) -> Any:
    """The Axes of a new figure, side by side: one, or an array of them. name: of the caller, for the error."""
    try:
        import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(f"{name} needs matplotlib: pip install matplotlib") from error
    return plt.subplots(1, count, figsize=(9, 3 if count > 1 else 3.4), layout="constrained")[1]
