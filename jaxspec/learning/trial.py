"""A trial: two drafters take turns on live traffic, until it is clear enough which one is accepted more.

Calls of the loop alternate between them. The same sequences go on from call to call, so that both meet the same texts; and neither has
learnt from these, which have not ended yet. The rounds of a call are alike, because its sequences are. So calls, not rounds, are the
independent units: the error of a ratio of sums over calls is that of clusters (Cochran, "Sampling Techniques", section 6.3).
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable, Sequence

import numpy as np

CALLS = 8  # calls of each, at least, before anything is decided
CLEAR = 3.0  # standard errors of a difference that decides at once; it is looked at after every call, so that fewer would err often
PRECISION = 0.01  # the standard error, as a share of the tokens a step, at which the better one of two that are much alike is taken


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a trial found: the name of the better one, tokens a step of each, and the standard error of their difference."""

    better: str
    lengths: dict[str, float]
    error: float

    @property
    def gain(self) -> float:
        """Tokens a step of the second one less those of the first."""
        first, second = self.lengths.values()
        return second - first


class Trial:
    """Compares the second of two drafters with the first.

    names: of the first, which is in use, and of the second, which is taken if it is at least as good. Threads of several data shards may
    use one trial.
    """

    def __init__(self, names: Sequence[str] = ("current", "candidate"), precision: float = PRECISION):
        self.names, self._precision = tuple(names), precision
        self._calls = 0
        self._lock = threading.Lock()
        # By the number of drafts of a call's rounds and by name, (rounds, accepted drafts) of each call.
        self._seen: dict[int, dict[str, list[tuple[int, int]]]] = {}

    def next(self) -> str:
        """Whose turn the next call is: the first, then twice the second, twice the first and so on, so that a drift favours neither."""
        with self._lock:
            self._calls += 1
            return self.names[self._calls // 2 % 2]

    def see(self, name: str, accepted: Iterable[int], num_draft_tokens: int) -> None:
        """Takes in a call: the accepted drafts of each of its rounds, which guessed so many tokens."""
        counts = np.asarray(tuple(accepted), np.int64)
        if num_draft_tokens and len(counts):
            with self._lock:
                calls = self._seen.setdefault(num_draft_tokens, {name: [] for name in self.names})
                calls[name].append((len(counts), int(counts.sum())))

    def verdict(self) -> Verdict | None:
        """None until it is clear. Only calls of the same number of drafts are compared, those of the number with most calls."""
        with self._lock:
            both = max(self._seen.values(), key=lambda calls: min(map(len, calls.values())), default=None)
            if both is None or min(map(len, both.values())) < CALLS:
                return None
            (first, first_error), (second, second_error) = (_ratio(np.asarray(both[name], np.float64)) for name in self.names)
        gain, error = second - first, math.hypot(first_error, second_error)
        if abs(gain) <= CLEAR * error and error > self._precision * (1 + first):
            return None
        lengths = {name: 1 + value for name, value in zip(self.names, (first, second), strict=True)}
        return Verdict(self.names[int(gain >= 0)], lengths, error)


def _ratio(calls: np.ndarray) -> tuple[float, float]:
    """Accepted drafts a round over calls [n, 2] of (rounds, accepted), and its standard error."""
    rounds, accepted = calls.T
    mean, count = accepted.sum() / rounds.sum(), len(calls)
    return float(mean), float(math.sqrt(count / (count - 1) * np.sum((accepted - mean * rounds) ** 2)) / rounds.sum())
