"""Pictures of what speculation achieved. Needs matplotlib: `pip install jaxspec[notebooks]`."""

from __future__ import annotations

from typing import Any

from jaxspec.stats import RoundStats, Stats


def plot_acceptance(stats: Stats | RoundStats, axes: Any = None) -> Any:
    """Draws how often each draft position was accepted, and how many drafts a step accepted.

    stats: `llm.stats`, the difference of two, or a completion's. axes: two matplotlib Axes to draw on; a new figure by default.
    Returns the figure. Raises ImportError without matplotlib, ValueError if there were no steps to draw.
    """
    if not stats.steps:
        raise ValueError("there are no steps to draw; generate something first")
    if axes is None:
        try:
            import matplotlib.pyplot as plt  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("plot_acceptance needs matplotlib: pip install matplotlib") from error
        axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")[1]
    by_position, by_count = axes
    rates = stats.acceptance_rates
    by_position.bar(range(1, len(rates) + 1), rates)
    by_position.set(xlabel="draft position", ylabel="share of steps", ylim=(0, 1), title="accepted, with all before it")
    by_position.set_xticks(range(1, len(rates) + 1))
    by_count.bar(range(len(stats.histogram)), [n / stats.steps for n in stats.histogram])
    by_count.set(xlabel="accepted drafts", ylabel="share of steps", title=f"{stats.acceptance_length:.2f} tokens a step")
    by_count.set_xticks(range(len(stats.histogram)))
    return by_position.figure
