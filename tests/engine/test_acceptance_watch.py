"""The watch over acceptance: what it warns of, and what it leaves alone."""

import warnings

import numpy as np
import pytest
from scipy import stats

import jaxspec
from jaxspec.decode import accept
from jaxspec.drafters.base import NoDraft
from jaxspec.drafters.ngram import NGram
from jaxspec.engine import acceptance_watch
from jaxspec.engine.acceptance_watch import AcceptanceWarning, Watch

pytestmark = pytest.mark.usefixtures("unoptimised")


def warned(drafter, requests, rule=accept.COUPLED):
    """After how many of these (rounds, kept, temperature) a watch warns, once; None if it does not."""
    watching, after = Watch(drafter, rule), []
    for i, request in enumerate(requests, start=1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watching.see(*request)
        after += [i] * len(caught)
    assert len(after) <= 1
    return after[0] if after else None


@pytest.mark.parametrize(
    ("requests", "after"),
    [
        ([(100, 0, 0.0)] * 9, 5),  # 500 rounds are needed
        ([(499, 0, 0.0)], None),
        ([(500, 72, 0.0)], 1),
        ([(500, 74, 0.0)] * 9, None),  # one of five gives so few in more than 1 of 1,000 times
        ([(1000, 160, 1.0)], 1),
        ([(60, 12, 1.0)] * 50, None),  # one of five
        ([(162, 111, 0.0), (229, 114, 1.0)] * 9, None),  # the bundled assistant
        ([(60, 30, 1.0)] * 50 + [(60, 0, 1.0)] * 9, 57),  # old rounds are forgotten
        ([(1000, 0, 1.3)] * 5, None),  # too warm to tell
        ([(0, 0, 0.0)] * 5, None),
    ],
)
def test_when_it_warns(requests, after):
    assert warned(object(), requests) == after


@pytest.mark.parametrize(("drafter", "rule"), [(NGram(), accept.COUPLED), (NoDraft(), accept.COUPLED), (object(), accept.synthetic([0.0]))])
def test_what_it_leaves_alone(drafter, rule):
    assert warned(drafter, [(1000, 0, 0.0)], rule) is None


def test_how_sure_it_is():
    for count, trials in ((0, 300), (72, 500), (160, 1000), (200, 1000), (1000, 1000)):
        np.testing.assert_allclose(acceptance_watch.at_most(count, trials, 0.2), stats.binom.cdf(count, trials, 0.2), rtol=1e-9)


def test_an_untrained_drafter_is_noticed_once(folders, monkeypatch):
    """After its first 40 rounds, in spite of which the texts are those of the target."""
    monkeypatch.setattr(acceptance_watch, "ROUNDS", 40)
    llm = jaxspec.load(*folders, max_slots=1, progress=False)
    params = jaxspec.SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
    with pytest.warns(AcceptanceWarning, match=r"in \d of the last \d\d rounds: the drafter Gemma4MTP is near chance.*num_draft_tokens=0"):
        first = llm.generate("def add(a, b):", params)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # for a second warning
        assert llm.generate("def add(a, b):", params)[0].token_ids == first.token_ids
    assert llm.stats.steps > 80 and llm.stats.acceptance_rates[0] < 0.1
