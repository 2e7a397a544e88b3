"""How many tokens to guess: between calls of the loop, one of a few compiled numbers K, by expected tokens a second.

A round that guesses K tokens gives 1 + r_1 + ... + r_K of them on average, r_i being the share of rounds that accept draft i and all
before it, and takes what such a round took at warm-up with as many sequences. r_i is the product of the shares c_1 .. c_i of drafts that
are accepted where all before them were, which rounds of any K of at least i measure, so that the K in use tells about smaller ones too.

Two rules keep the choice awake and calm. What is not seen is forgotten: counts halve every so many rounds, and what is left of them is
mixed with a few rounds of a good drafter, so that a position that has not been tried for long looks worth a try again. And another K is
taken only if it promises a margin more. Where acceptance decides the text, as with every rule but "coupled", K stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

HALF_LIFE = 2000.0  # rounds, each sequence's counted, after which a count is half forgotten
HOPED, HOPED_ROUNDS = 0.8, 10.0  # what a draft is taken to be accepted by where nothing is known, and how many rounds that weighs
MARGIN = 1.05


def choices(num_draft_tokens: int) -> tuple[int, ...]:
    """The numbers to choose among, where the drafter's own is K: none, half of K and K."""
    return tuple(sorted({0, (num_draft_tokens + 1) // 2, num_draft_tokens}))


class Adaptive:
    """Chooses among `choices` for batches of the sizes that `costs` names. costs: seconds of a round by (batch size, K), all of them
    measured; it never changes, so that what is chosen depends on acceptance alone. Begins with the largest K.

    Raises ValueError for a cost that is missing or no positive number.
    """

    def __init__(self, choices: Iterable[int], costs: Mapping[tuple[int, int], float]):
        self.choices = tuple(sorted(set(choices)))
        self.costs = dict(costs)
        self.sizes = tuple(sorted({size for size, _ in costs}))
        for size in self.sizes:
            for k in self.choices:
                cost = self.costs.get((size, k))
                if cost is None or not 0 < cost < float("inf"):
                    raise ValueError(f"a round of {size} sequences with {k} drafts costs {cost}; expected a number of seconds above 0")
        self._tried = np.zeros(self.choices[-1])
        self._kept = np.zeros(self.choices[-1])
        self._using = dict.fromkeys(self.sizes, self.choices[-1])

    def see(self, histogram: Iterable[int], num_draft_tokens: int) -> None:
        """Takes in rounds of K drafts: entry i of the histogram counts those that accepted i of them, i = 0 .. K."""
        counts = np.asarray(tuple(histogram)[: num_draft_tokens + 1], np.float64)
        forgotten = 0.5 ** (counts.sum() / HALF_LIFE)
        self._tried *= forgotten
        self._kept *= forgotten
        at_least = counts[::-1].cumsum()[::-1]
        self._tried[:num_draft_tokens] += at_least[:-1]
        self._kept[:num_draft_tokens] += at_least[1:]

    @property
    def rates(self) -> tuple[float, ...]:
        """The estimate of r_1 .. r_K."""
        shares = (self._kept + HOPED * HOPED_ROUNDS) / (self._tried + HOPED_ROUNDS)
        return tuple(np.cumprod(shares).tolist())

    def speed(self, size: int, num_draft_tokens: int) -> float:
        """Expected tokens a second of each sequence. size: one of `sizes`."""
        return (1 + sum(self.rates[:num_draft_tokens])) / self.costs[size, num_draft_tokens]

    def choose(self, size: int, among: Collection[int] | None = None) -> int:
        """K of the next call. size: one of `sizes`. among: those of the choices that may be taken, all by default; if it is none of them
        that was in use, or there are none, it is the largest choice."""
        among = self.choices if among is None else among
        now = self._using[size] if self._using[size] in among else self.choices[-1]
        best = max(among, key=lambda k: self.speed(size, k), default=now)
        if self.speed(size, best) > MARGIN * self.speed(size, now):
            now = best
        self._using[size] = now
        return now
