"""Where the time of one device goes."""

from __future__ import annotations

import math
from collections.abc import Callable

HOST_TIMES = 61  # entries of a histogram of times, the last from a third of a second on
SHORTEST, OCTAVE = 1e-5, 4  # in seconds, the end of its first entry; entries for each doubling


class Times:
    """Where the time of one device goes, of a runner's calls. clock: seconds, of which only those count that it says pass.

    busy_seconds, host_times: as of `Stats`.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._idle = clock, 0.0
        self._begun: float | None = None  # since when the device has been busy, as far as is known
        self._before, self._done = 0.0, 0.0  # how long it was busy before that; when something was last found to be done
        self.host_times = [0] * HOST_TIMES

    @property
    def busy_seconds(self) -> float:
        return self._before + (0.0 if self._begun is None else max(self._done - self._begun, 0.0))

    def handed(self, going: bool = False) -> None:
        """The device is being given something to do. going: it is still at something else. If not, it may have been idle since something
        was last found to be done."""
        if self._begun is not None and not going and self._done > self._begun:
            self._before, self._begun = self.busy_seconds, None
        if self._begun is None:
            self._begun = self._clock()

    def waited(self) -> None:
        """What the host waited for is done."""
        self._done = self._clock()

    def turn(self) -> None:
        """The host knows all that the rounds of a turn gave, and has waited for it."""
        idle = self._clock() - self.busy_seconds
        taken, self._idle = idle - self._idle, idle
        if taken > 0:  # a clock that stood still was not to count
            self.host_times[min(max(math.ceil(OCTAVE * math.log2(taken / SHORTEST)), 0), HOST_TIMES - 1)] += 1
