"""When to learn: as often as a share of the time allows."""

from __future__ import annotations

from collections.abc import Callable


class Pace:
    """Keeps what is spent within a share of the time that passes.

    share: 0 .. 1. clock: the time that passes, in seconds; what is spent passes on it too.
    """

    def __init__(self, share: float, clock: Callable[[], float]):
        self._share, self._clock, self._begun = share, clock, clock()
        self._last = 0.0  # what the last piece of work took
        self.spent = 0.0

    @property
    def passed(self) -> float:
        return self._clock() - self._begun

    @property
    def share(self) -> float:
        """The share that was spent so far."""
        return self.spent / self.passed if self.passed > 0 else 0.0

    def due(self) -> bool:
        """Whether another piece of work fits, if it takes as long as the last one."""
        return self.spent + self._last <= self._share * self.passed

    def took(self, seconds: float) -> None:
        """A piece of work is done."""
        self.spent, self._last = self.spent + seconds, seconds

    def cost(self, seconds: float) -> None:
        """Something else was spent, such as on writing a checkpoint."""
        self.spent += seconds
