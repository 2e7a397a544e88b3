"""The choice of K on made-up costs and acceptance."""

import numpy as np
import pytest

from jaxspec import adaptive
from jaxspec.adaptive import Adaptive

CHEAP = {0: 1.0, 2: 1.1, 4: 1.2}  # a round's cost by K, where the target's weights are all that counts
DEAR = {0: 1.0, 2: 2.4, 4: 3.9}  # where every row costs


def costs(**sizes):
    return {(int(name[1:]), k): cost for name, by_k in sizes.items() for k, cost in by_k.items()}


def rounds(rng, shares, k, count):
    """A histogram of rounds of K drafts, of which draft i is accepted after all before it with shares[i]."""
    accepted = np.cumprod(rng.random((count, k)) < np.asarray(shares)[:k], axis=1).sum(1) if k else np.zeros(count, int)
    return np.bincount(accepted, minlength=k + 1)


def run(chooser, shares, size, calls, rng, count=64):
    """The K of each call."""
    chosen = []
    for _ in range(calls):
        chosen.append(chooser.choose(size))
        chooser.see(rounds(rng, shares, chosen[-1], count), chosen[-1])
    return chosen


def best(shares, by_k):
    """By definition: tokens a round over its cost."""
    return max(by_k, key=lambda k: (1 + sum(np.cumprod(shares)[:k])) / by_k[k])


@pytest.mark.parametrize("by_k", [CHEAP, DEAR])
@pytest.mark.parametrize("shares", [(0.9,) * 4, (0.7, 0.5, 0.2, 0.1), (0.3,) * 4, (0.05,) * 4, (0.9, 0.9, 0.1, 0.1)])
def test_it_settles_where_tokens_a_second_are_most(shares, by_k):
    """All but a few of the last 100 calls, those that see whether another K has become better."""
    chooser = Adaptive((0, 2, 4), costs(b1=by_k))
    chosen = run(chooser, shares, 1, 150, np.random.default_rng(0))
    speed = {k: (1 + sum(np.cumprod(shares)[:k])) / by_k[k] for k in by_k}
    good = [speed[k] * adaptive.MARGIN >= max(speed.values()) for k in chosen[50:]]
    assert np.mean(good) >= 0.95


def test_the_first_call_guesses_as_many_as_the_drafter_says():
    assert Adaptive((0, 2, 4), costs(b1=CHEAP)).choose(1) == 4


def test_rates_are_those_of_the_rounds_that_tried():
    """Rounds of 2 drafts and of 4 together: each share is of all rounds that got so far."""
    chooser = Adaptive((0, 2, 4), costs(b1=CHEAP))
    count, rng, shares = 600, np.random.default_rng(1), (0.8, 0.6, 0.7, 0.5)
    for k in (2, 4, 0) * 3:
        chooser.see(rounds(rng, shares, k, count), k)
    np.testing.assert_allclose(chooser.rates, np.cumprod(shares), atol=0.05)


def test_batches_have_their_own_choice():
    """What acceptance makes of one batch size holds for all, each with its own costs."""
    chooser = Adaptive((0, 2, 4), costs(b1=CHEAP, b8=DEAR))
    run(chooser, (0.6,) * 4, 1, 30, np.random.default_rng(2))
    assert (chooser.choose(1), chooser.choose(8)) == (4, 0) == (best((0.6,) * 4, CHEAP), best((0.6,) * 4, DEAR))


def test_no_change_for_little():
    """A K that promises 4 % more is not taken, one that promises 6 % more is."""
    for gain, chosen in ((1.04, 4), (1.06, 2)):
        chooser = Adaptive((0, 2, 4), costs(b1=CHEAP))
        rates = chooser.rates
        even = CHEAP[4] * (1 + sum(rates[:2])) / (1 + sum(rates))
        chooser = Adaptive((0, 2, 4), costs(b1={0: 100.0, 2: even / gain, 4: CHEAP[4]}))
        assert chooser.choose(1) == chosen


def test_it_wakes_up_when_the_text_changes():
    """After a thousand calls at which drafts were hopeless, and K = 0 at most of them, drafts become good."""
    chooser, rng = Adaptive((0, 2, 4), costs(b1=CHEAP)), np.random.default_rng(3)
    asleep = run(chooser, (0.02,) * 4, 1, 1000, rng)
    assert np.mean(np.asarray(asleep[20:]) == 0) > 0.85 and set(asleep[100:]) > {0}
    awake = run(chooser, (0.9,) * 4, 1, 200, rng)
    assert awake.index(4) < 150 and set(awake[-20:]) == {4}


def test_it_knows_nothing_of_rounds_without_drafts():
    chooser = Adaptive((0, 3), costs(b1={0: 1.0, 3: 1.1}))
    before = chooser.rates
    chooser.see([500], 0)
    assert chooser.rates == before and chooser.choose(1) == 3


@pytest.mark.parametrize(("k", "chosen"), [(0, (0,)), (1, (0, 1)), (2, (0, 1, 2)), (4, (0, 2, 4)), (7, (0, 4, 7)), (15, (0, 8, 15))])
def test_what_there_is_to_choose_among(k, chosen):
    assert adaptive.choices(k) == chosen


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({(1, 0): 1.0}, "a round of 1 sequences with 2 drafts costs None"),
        ({(1, 0): 1.0, (1, 2): 0.0}, "costs 0.0; expected a number of sec"),
    ],
)
def test_costs_must_be_known(table, message):
    with pytest.raises(ValueError, match=message):
        Adaptive((0, 2), table)
