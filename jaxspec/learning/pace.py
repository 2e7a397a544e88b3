"""When to learn: as often as a share of the time allows."""

from __future__ import annotations

from collections.abc import Callable

NEWEST = 0.3  # how much the newest time counts for the next one


class Pace:
    """Keeps what is spent within a share of the time that passes.

    share: 0 .. 1. clock: the time that passes, in seconds; what is spent passes on it too. A piece of work is begun only once the time that
    it is expected to take has been earned. So the share is exceeded by no more than the last pieces took longer than expected.
    """

    def __init__(self, share: float, clock: Callable[[], float]):
        self._share, self._clock, self._begun = share, clock, clock()
        self.expected = 0.0  # seconds of a piece of work
        self.spent = 0.0

    @property
    def passed(self) -> float:
        return self._clock() - self._begun

    @property
    def share(self) -> float:
        """The share that was spent so far."""
        return self.spent / self.passed if self.passed > 0 else 0.0

    def due(self, pieces: int = 1) -> bool:
        """Whether so many pieces of work fit."""
        return self.spent + pieces * self.expected <= self._share * self.passed

    def took(self, seconds: float, pieces: int = 1) -> None:
        """So many pieces of work are done."""
        self.spent += seconds
        self.expected += NEWEST * (seconds / pieces - self.expected)

    def cost(self, seconds: float) -> None:
        """Something else was spent, such as on writing a checkpoint."""
        self.spent += seconds
