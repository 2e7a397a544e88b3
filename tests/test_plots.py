"""Pictures, by what is drawn on their axes."""

import builtins

import pytest

import jaxspec
from jaxspec.engine.stats import RoundStats, Stats
from jaxspec.plots import plot_acceptance, plot_frequencies, plot_sweep

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


def test_a_sweep_has_a_line_for_each_drafter_and_one_across_for_the_baseline():
    pytest.importorskip("matplotlib").use("Agg")
    runs = {
        "none": {0: Stats(tokens=10, seconds=2.0, steps=9, stepped_tokens=9, histogram=(9,))},
        "mtp": {k: Stats(tokens=20, seconds=2.0 / k, steps=10, stepped_tokens=10 + 2 * k) for k in (4, 1, 2)},
    }
    lengths, speeds = plot_sweep(runs).axes
    baseline, line = lengths.lines
    assert set(baseline.get_ydata()) == {1.0} and line.get_xydata().tolist() == [[1, 1.2], [2, 1.4], [4, 1.8]]
    baseline, line = speeds.lines
    assert set(baseline.get_ydata()) == {5.0} and line.get_xydata().tolist() == [[1, 10], [2, 20], [4, 40]]
    assert lengths.get_xticks().tolist() == [1, 2, 4]
    assert [text.get_text() for text in speeds.get_legend().get_texts()] == ["none", "mtp"]


def test_frequencies_are_drawn_beside_the_probabilities():
    pytest.importorskip("matplotlib").use("Agg")
    (axis,) = plot_frequencies({"b": 0.25, "a": 0.5, "c": 0.15, "d": 0.1}, {"one": "aabc", "two": ["b"]}, top=2).axes
    bars, one, two = ([patch.get_height() for patch in kind.patches] for kind in axis.containers if hasattr(kind, "patches"))
    assert (bars, one, two) == ([0.5, 0.25], [0.5, 0.25], [0.0, 1.0])
    assert [text.get_text() for text in axis.get_xticklabels()] == ["a", "b"]
    lower, upper = next(kind for kind in axis.containers if getattr(kind, "errorbar", None)).errorbar.lines[2][0].get_segments()[0][:, 1]
    assert upper - lower == pytest.approx(2 * (0.5 * 0.5 / 4) ** 0.5)


def test_what_cannot_be_drawn_says_why(monkeypatch):
    with pytest.raises(ValueError, match="there are no steps to draw; generate something first"):
        plot_acceptance(Stats())
    with pytest.raises(ValueError, match="there are no runs to draw; expected drafter -> {K: Stats}"):
        plot_sweep({"mtp": {}})
    with pytest.raises(ValueError, match="the sample 'two' has no tokens; expected at least one"):
        plot_frequencies({"a": 1.0}, {"one": "a", "two": []})
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match="plot_acceptance needs matplotlib: pip install matplotlib"):
        plot_acceptance(STATS)
