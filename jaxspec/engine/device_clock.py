"""Where the time of one device goes."""

from __future__ import annotations

import math
from collections.abc import Callable

HOST_TIMES = 61  # entries of the histogram of host times; the last counts all times above a third of a second
SHORTEST, OCTAVE = 1e-5, 4  # the longest time of the first entry, in seconds; entries for each doubling


class Times:
    """How long one device works on a runner's calls, and how long the host takes in between.

    clock: in seconds; it stands still where time does not count. busy_seconds and host_times are those of `Stats`.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock, self._idle = clock, 0.0
        self._begun: float | None = None  # since when the device has been busy, as far as is known
        self._before = 0.0  # for how long it was busy before that
        self._done = 0.0  # when the host last found a call to be done
        self.host_times = [0] * HOST_TIMES

    @property
    def busy_seconds(self) -> float:
        return self._before + (0.0 if self._begun is None else max(self._done - self._begun, 0.0))

    def handed(self, going: bool = False) -> None:
        """The host begins to hand a call to the device. going: whether the device is still at another call. If not, it counts as idle
        since the last time that the host found a call to be done."""
        if self._begun is not None and not going and self._done > self._begun:
            self._before, self._begun = self.busy_seconds, None
        if self._begun is None:
            self._begun = self._clock()

    def waited(self) -> None:
        """The host waited for a call, and it is done."""
        self._done = self._clock()

    def turn(self) -> None:
        """A step of a turn is over: the host has waited for its rounds."""
        idle = self._clock() - self.busy_seconds
        taken, self._idle = idle - self._idle, idle
        if taken > 0:  # not while the clock stood still
            self.host_times[min(max(math.ceil(OCTAVE * math.log2(taken / SHORTEST)), 0), HOST_TIMES - 1)] += 1
