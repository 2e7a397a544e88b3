"""How many tokens to guess: before each call of the loop, the one of a few compiled numbers K with the most expected tokens a second.

A round that guesses K tokens gives 1 + r_1 + ... + r_K of them on average, where r_i is the share of rounds that accept draft i and all
before it. It takes as long as such a round took at warm-up with as many sequences. r_i is the product c_1 ... c_i, where c_i is the share
of drafts i that are accepted once all drafts before them are. Rounds of any K of at least i measure c_i, so the K in use also tells about
smaller ones.

Two rules let the choice change, but not for little. Old counts fade: they halve every HALF_LIFE rounds, and are mixed with a few rounds of
a good drafter, so that a position that has not been tried for long looks worth a try again. And another K is taken only if it promises
MARGIN times the speed. With every rule but "coupled" acceptance decides the text, and K stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np

HALF_LIFE = 2000.0  # rounds, summed over sequences, after which a count is halved
HOPED, HOPED_ROUNDS = 0.8, 10.0  # the c_i that is assumed where nothing is known, and the number of rounds that it counts for
MARGIN = 1.05  # how much faster another K must promise to be


def counts_up_to(num_draft_tokens: int) -> tuple[int, ...]:
    """The numbers of drafts to choose among, ascending, where the drafter's own is K: 0, half of K and K."""
    return tuple(sorted({0, (num_draft_tokens + 1) // 2, num_draft_tokens}))


class Adaptive:
    """Chooses K among `draft_counts`, for each batch size that `costs` names. It begins with the largest.

    costs: seconds of a round by (batch size, K), with every pair measured. They never change, so that the choice depends on acceptance
    alone. Raises ValueError for a cost that is missing or no positive number.
    """

    def __init__(self, draft_counts: Iterable[int], costs: Mapping[tuple[int, int], float]):
        self.draft_counts = tuple(sorted(set(draft_counts)))
        self.costs = dict(costs)
        self.sizes = tuple(sorted({size for size, _ in costs}))
        for size in self.sizes:
            for k in self.draft_counts:
                cost = self.costs.get((size, k))
                if cost is None or not 0 < cost < float("inf"):
                    raise ValueError(f"a round of {size} sequences with {k} drafts costs {cost}; expected a number of seconds above 0")
        # Of each draft position, the rounds that came so far and those that accepted it, both of them gradually forgotten.
        self._tried = np.zeros(self.draft_counts[-1])
        self._kept = np.zeros(self.draft_counts[-1])
        self._using = dict.fromkeys(self.sizes, self.draft_counts[-1])  # K of the last call, by batch size

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
        """K of the next call. size: one of `sizes`. among: the counts that may be taken, all by default. Where the last call's count is not
        among them, the largest count stands in for it."""
        among = self.draft_counts if among is None else among
        now = self._using[size] if self._using[size] in among else self.draft_counts[-1]
        best = max(among, key=lambda k: self.speed(size, k), default=now)
        if self.speed(size, best) > MARGIN * self.speed(size, now):
            now = best
        self._using[size] = now
        return now
