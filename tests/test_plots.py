"""The picture of acceptance, by what is drawn on its axes."""

import builtins

import pytest

import jaxspec
from jaxspec.plots import plot_acceptance
from jaxspec.stats import RoundStats, Stats

STATS = Stats(steps=8, stepped_tokens=14, histogram=(4, 2, 2))


class Axes:
    """What matplotlib's Axes would be told."""

    figure = "the figure"

    def __init__(self):
        self.bars, self.texts, self.ticks = None, {}, None

    def bar(self, at, heights):
        self.bars = dict(zip(at, heights, strict=True))

    def set(self, **texts):
        self.texts = texts

    def set_xticks(self, ticks):
        self.ticks = list(ticks)


def test_rates_and_histogram_are_drawn():
    axes = Axes(), Axes()
    assert jaxspec.plot_acceptance is plot_acceptance and plot_acceptance(STATS, axes) == "the figure"
    assert axes[0].bars == {1: 0.5, 2: 0.25} and axes[1].bars == {0: 0.5, 1: 0.25, 2: 0.25}
    assert axes[1].texts["title"] == "1.75 tokens a step" and axes[0].texts["ylim"] == (0, 1)
    assert (axes[0].ticks, axes[1].ticks) == ([1, 2], [0, 1, 2])
    plot_acceptance(RoundStats(4, (1, 1), (False, False, True, False)), axes)
    assert axes[0].bars == {1: 0.5}


def test_matplotlib_draws_it():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    figure = plot_acceptance(STATS)
    assert [patch.get_height() for patch in figure.axes[0].patches] == [0.5, 0.25]


def test_what_cannot_be_drawn_says_why(monkeypatch):
    with pytest.raises(ValueError, match="there are no steps to draw; generate something first"):
        plot_acceptance(Stats())
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="plot_acceptance needs matplotlib: pip install matplotlib"):
        plot_acceptance(STATS)
