"""Trials: two variants of a drafter, such as its weights before and after training, run in turn on live traffic, and the one that accepts
more is kept. With the rule "coupled" the text does not depend on the drafter, so a trial costs no more than the rounds of the variant
that loses.

Variants have the same shapes and shardings, so they share compiled programs. A variant has its turn for so many calls that TURN rounds
are seen, then the other has its own: that makes a pair. The next pair begins with the variant that ended the last one, so that a steady
drift of the text favours neither. What counts of a pair is the difference of accepted drafts a round.

After each pair one number tells how much more likely the differences are if one variant is better than if both are equal: the Bayes
factor of a t-test, with effects of unit-normal size in standard deviations, which needs no scale (Rouder et al. 2009,
doi:10.3758/PBR.16.2.225). With n differences, their sum S and the sum Q of their squares it is

    (1 + n)^(-1/2) (1 - S^2 / ((1 + n) Q))^(-n/2).

If both are equal it ever reaches 1 / ERROR with a probability of at most ERROR, however often one looks (Hendriksen et al. 2021,
doi:10.1214/20-BA1234). Once it does the trial ends, after 6 pairs at the earliest. It also ends once the difference is known to ALIKE of
the tokens a step, and after PAIRS pairs in any case. The greater mean decides; equal variants keep the first. Where the first
challenges the second, it loses as soon as the number says 1 / DOUBT against it: bad weights then cost few rounds, and newer ones are
tried later.

Some drafters have K and V of their own. If variants differ in those too, a sequence that both have served tells nothing about either:
see `Trial`.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
from collections.abc import Mapping
from typing import Any

TURN = 32  # rounds, summed over sequences, after which the other variant has its turn
PAIRS = 64  # pairs of turns at most
LEAST = 6  # pairs, before variants are found to be alike
ERROR = 0.01  # the probability of finding a difference where there is none
DOUBT = 0.1  # the probability that a challenger loses early for no reason
ALIKE = 0.01  # the standard error of the difference, as a share of tokens a step, below which nothing more is to be found out


@dataclasses.dataclass(frozen=True)
class Tally:
    """What a variant has done in a trial."""

    rounds: int = 0
    """Rounds, summed over sequences."""
    accepted: int = 0
    """Drafts that they accepted."""

    @property
    def acceptance_length(self) -> float:
        """Tokens a round, the target's own choice counted; 1.0 before the first round."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.rounds + other.rounds, self.accepted + other.accepted)


@dataclasses.dataclass(frozen=True)
class Findings:
    """What there is to say of a comparison."""

    tallies: Mapping[str, Tally]
    """What each variant did, by name, in whole pairs of turns."""
    verdict: str | None
    """The name of the variant that was kept; None as long as that is open."""
    gain: float
    """The mean difference of a pair, of the second less of the first, in tokens a step; 0.0 before the first."""
    error: float
    """Its standard error; infinite before the second pair."""

    def __str__(self) -> str:
        told = (f"{name} {tally.acceptance_length:.2f} tokens a step ({tally.rounds} steps)" for name, tally in self.tallies.items())
        return f"{', '.join(told)}: {f'{self.verdict} is kept' if self.verdict else 'both are still tried'}"


class Comparison:
    """What trials of the same two variants have found, on all data shards together. Several threads may use it.

    first, second: the variants' names. The first is kept where neither is better. challenge: whether the first challenges the second, which
    is in use. Raises ValueError for equal names.
    """

    def __init__(self, first: str, second: str, *, challenge: bool = False):
        if first == second:
            raise ValueError(f"both variants are called {first!r}; expected two names")
        self.names = first, second
        self._doubt = DOUBT if challenge else ERROR  # the probability that the second is found better where both are equal
        self.tallies: dict[str, Tally] = {first: Tally(), second: Tally()}  # of complete pairs
        self.verdict: str | None = None  # the name of the variant to keep; None as long as that is open
        self._count, self._sum, self._squares = 0, 0.0, 0.0
        self._lock = threading.Lock()

    @property
    def findings(self) -> Findings:
        with self._lock:
            return Findings(dict(self.tallies), self.verdict, self._mean, self._error)

    @property
    def _mean(self) -> float:
        return self._sum / self._count if self._count else 0.0

    @property
    def _error(self) -> float:
        if self._count < 2:
            return math.inf
        return math.sqrt(max(self._squares / self._count - self._mean**2, 0.0) / (self._count - 1))

    def add(self, first: Tally, second: Tally) -> None:
        """Takes in a pair of turns. Once there is a verdict it stays, and so do the tallies."""
        with self._lock:
            if self.verdict is not None:
                return
            for name, tally in zip(self.names, (first, second), strict=True):
                self.tallies[name] += tally
            difference = second.acceptance_length - first.acceptance_length
            self._count, self._sum, self._squares = self._count + 1, self._sum + difference, self._squares + difference**2
            error = self._doubt if self._sum > 0 else ERROR
            clear = log_evidence(self._count, self._sum, self._squares) >= -math.log(error)
            alike = self._count >= LEAST and self._error <= ALIKE * self.tallies[self.names[0]].acceptance_length
            if clear or alike or self._count == PAIRS:
                self.verdict = self.names[self._sum > 0]


class Trial:
    """The part of a comparison that runs on one data shard.

    variants: the drafter's weights by name, for both names of the comparison. comparison: of all shards. apart: whether variants also
    differ in what they keep of a sequence, such as K and V of their own. Then only those sequences count that one variant alone has
    served, from their first row on. turn: rounds of a turn.

    Raises ValueError for other names than those of the comparison.
    """

    def __init__(self, variants: Mapping[str, Any], comparison: Comparison, *, apart: bool = False, turn: int = TURN):
        if set(variants) != set(comparison.names):
            raise ValueError(f"variants are called {sorted(variants)}; expected {sorted(comparison.names)}")
        self.comparison, self.apart = comparison, apart
        self.variants, self._rounds = dict(variants), turn
        self.writers: dict[str, object] = {name: object() for name in variants}  # what stands for each variant in `Request.writer`
        self._turn = comparison.names[0]
        self._seen = collections.defaultdict[str, Tally](Tally)  # of the pair that is under way

    @property
    def verdict(self) -> str | None:
        """The name of the variant to keep; None as long as that is open."""
        return self.comparison.verdict

    @property
    def name(self) -> str:
        """The variant of the next call: after the verdict the one to keep."""
        return self.verdict or self._turn

    @property
    def weights(self) -> Any:
        """The drafter's weights for the next call."""
        return self.variants[self.name]

    @property
    def writer(self) -> object:
        """What stands for the variant of the next call."""
        return self.writers[self.name]

    def see(self, name: str, tally: Tally) -> None:
        """Takes in what a call of a variant did."""
        self._seen[name] += tally
        if self._seen[self._turn].rounds < self._rounds:
            return
        first, second = self.comparison.names
        if all(self._seen[name].rounds >= self._rounds for name in (first, second)):
            self.comparison.add(self._seen[first], self._seen[second])
            self._seen.clear()
        else:
            self._turn = second if self._turn == first else first


def log_evidence(count: int, total: float, squares: float) -> float:
    """The logarithm of the Bayes factor of numbers whose mean is not 0. total, squares: their sum and the sum of their squares."""
    share = total**2 / ((1 + count) * squares) if squares else 0.0
    return -0.5 * math.log1p(count) - count / 2 * math.log1p(-share)
