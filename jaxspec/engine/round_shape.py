"""The shape of rounds: before each call of the loop, the one of a few compiled shapes with the most expected tokens a second.

A shape says how many tokens a round guesses, K, and how many rows the target's pass has for the guesses of all sequences: one for every
guess, or fewer. With n rows for each sequence a round gives 1 + r_1 + ... + r_(n - 1) tokens or more, where r_i is the share of rounds that
accept draft i and all before it: more, since the rows go to the best guesses of all sequences (`decode.verification`). It takes as long as
such a round took at warm-up with as many sequences. r_i is the product c_1 ... c_i, where c_i is the share of drafts i that are accepted
once all drafts before them are. Rounds that verify i drafts or more measure c_i, so those of one shape tell about others.

Three rules let the choice change, but not for little. Old counts fade: they halve every HALF_LIFE rounds, and are mixed with a few rounds
of a good drafter, so that a position that has not been tried for long looks worth a try again. What a shape gave is compared with what
these counts promised, since a guess that was worth a row is better than most: later promises are multiplied by the ratio. And another
shape is taken only if it promises MARGIN times the speed. With every rule but "coupled" acceptance decides the text, and the shape stays
as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from jaxspec.model.draft_tree import DraftTree

HALF_LIFE = 2000.0  # rounds, summed over sequences, after which a count is halved
# The c_i that is assumed where nothing is known, or the c_i of the draft before if that is more, and the rounds that it counts for.
HOPED, HOPED_ROUNDS = 0.8, 10.0
TRUSTED_TOKENS = 500.0  # tokens of a shape that must come before what they make of its promises counts more than the promises
MARGIN = 1.02  # how much faster another shape must promise to be
# Rows for each sequence to choose among, beside 1 and K + 1: as a block of as many, and shared out among drafts.
EACH = (3, 5, 8, 16)
# What shared rows are hoped to give more than blocks of as many, which take some percent less time, before it is known.
HOPED_GAIN = 1.1
FREE_ROWS = 128  # fewer rows than these save hardly any time: the pass waits for the weights


class RoundShape(NamedTuple):
    """The static shape of a round."""

    num_draft_tokens: int  # tokens that it guesses for each sequence, one after the other
    rows: int | None = None  # of the target's pass, for all sequences together; None for num_draft_tokens + 1 of each
    tree: DraftTree | None = None  # whose nodes it guesses and verifies, num_draft_tokens being its depth; None for a chain

    @property
    def drafts(self) -> int:
        """Tokens that it guesses for each sequence, on all paths."""
        return self.num_draft_tokens if self.tree is None else self.tree.nodes


NO_DRAFTS = RoundShape(0)


def round_shapes(size: int, num_draft_tokens: int) -> tuple[RoundShape, ...]:
    """The shapes to choose among for a call of `size` sequences, where the drafter's own number of drafts is K.

    With few sequences rows cost nothing, and only guessing does: no drafts, half of K and K. With many there is always a shape near the
    best, and a sequence may have half as many rows more than the average.
    """
    most = num_draft_tokens
    if size * (most + 1) <= FREE_ROWS:
        return tuple(RoundShape(count) for count in sorted({0, (most + 1) // 2, most}))
    some = [each for each in EACH if 4 * each <= 3 * (most + 1)]
    blocks = [RoundShape(each - 1) for each in some]
    shared = [RoundShape(min(each + each // 2, most), size * each) for each in some]
    return (NO_DRAFTS, *blocks, *shared, RoundShape(most))


class Adaptive:
    """Chooses among shapes, for each batch size that `costs` names. It begins with the shape of most rows.

    costs: seconds of a round by (batch size, shape). They never change, so that the choice depends on acceptance alone. Raises ValueError
    for a cost that is no positive number, and for a batch size without a shape that verifies all drafts.
    """

    def __init__(self, costs: Mapping[tuple[int, RoundShape], float]):
        self.costs = dict(costs)
        self._shapes: dict[int, list[RoundShape]] = {}
        for (size, shape), cost in costs.items():
            if not 0 < cost < float("inf"):
                raise ValueError(f"a round of {size} sequences with {shape} costs {cost}; expected a number of seconds above 0")
            self._shapes.setdefault(size, []).append(shape)
        self._full: dict[int, RoundShape] = {}  # of each batch size, the shape of most rows
        for size, shapes in self._shapes.items():
            whole = [shape for shape in shapes if shape.rows is None]
            if not whole:
                raise ValueError(f"no round of {size} sequences with rows=None has a cost; expected one to begin with")
            self._full[size] = max(whole)
        most = max((shape.num_draft_tokens for _, shape in costs), default=0)
        # Of each draft position, the rounds that came so far and those that accepted it, both of them gradually forgotten.
        self._tried, self._kept = np.zeros(most), np.zeros(most)
        # Of each shape the tokens that its rounds gave, and those that were promised, gradually forgotten too.
        self._given, self._promised = (dict.fromkeys(costs, 0.0) for _ in range(2))
        self._using = dict(self._full)  # shape of the last call, by batch size
        self._rates = self._estimated()

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(sorted(self._shapes))

    def shapes(self, size: int) -> tuple[RoundShape, ...]:
        """Those of a batch size."""
        return tuple(self._shapes[size])

    def see(self, accepted: np.ndarray, verified: np.ndarray, size: int, shape: RoundShape, sequences: int) -> None:
        """Takes in rounds of a call. accepted, verified: [N] int, the drafts that each round accepted, and those that it verified.
        sequences: how many the call had, at most `size`."""
        forgotten, draft = 0.5 ** (len(accepted) / HALF_LIFE), np.arange(len(self._tried))
        self._tried = forgotten * self._tried + np.sum((accepted[:, None] >= draft) & (verified[:, None] > draft), axis=0)
        self._kept = forgotten * self._kept + np.sum(accepted[:, None] > draft, axis=0)
        self._rates = self._estimated()
        for sums in (self._given, self._promised):
            for key in sums:
                sums[key] *= forgotten
        if (size, shape) in self.costs:
            self._given[size, shape] += len(accepted) + float(accepted.sum())
            self._promised[size, shape] += len(accepted) * self._tokens(size, shape, sequences)

    @property
    def rates(self) -> tuple[float, ...]:
        """The estimate of r_1 .. r_K."""
        return tuple(self._rates.tolist())

    def speed(self, size: int, shape: RoundShape, sequences: int | None = None) -> float:
        """Expected tokens a second of each sequence. size: one of `sizes`. sequences: how many there are, by default `size`."""
        hoped = 1.0 if shape.rows is None else HOPED_GAIN
        gain = (self._given[size, shape] + hoped * TRUSTED_TOKENS) / (self._promised[size, shape] + TRUSTED_TOKENS)
        return gain * self._tokens(size, shape, size if sequences is None else sequences) / self.costs[size, shape]

    def _tokens(self, size: int, shape: RoundShape, sequences: int) -> float:
        """Of a round of a sequence, if every sequence has as many rows and all have the same rates."""
        rates = self._rates[: shape.num_draft_tokens]
        each = np.inf if shape.rows is None else shape.rows / sequences
        return 1 + float(np.sum(rates * np.clip(each - 1 - np.arange(len(rates)), 0, 1)))

    def _estimated(self) -> np.ndarray:
        """See `rates`. [K] float64"""
        shares, hoped = np.empty_like(self._tried), HOPED
        for i, (tried, kept) in enumerate(zip(self._tried, self._kept, strict=True)):
            shares[i] = (kept + hoped * HOPED_ROUNDS) / (tried + HOPED_ROUNDS)
            hoped = max(HOPED, shares[i])
        return np.cumprod(shares)

    def choose(self, size: int, sequences: int | None = None, among: Collection[RoundShape] | None = None) -> RoundShape:
        """The shape of the next call. size: one of `sizes`. sequences: as for `speed`. among: the shapes that may be taken, all by default.
        Where the last call's is not among them, that of most rows stands in for it."""
        among = self.shapes(size) if among is None else among
        now = self._using[size] if self._using[size] in among else self._full[size]
        speeds = {shape: self.speed(size, shape, sequences) for shape in {now, *among}}
        best = max(among, key=speeds.__getitem__, default=now)
        if speeds[best] > MARGIN * speeds[now]:
            now = best
        self._using[size] = now
        return now
