"""Where the time of one device goes, and how long threads compile."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator

HOST_TIMES = 61  # entries of the histogram of host times; the last counts all times above a third of a second
SHORTEST, OCTAVE = 1e-5, 4  # the longest time of the first entry, in seconds; entries for each doubling


class Compiling:
    """How long one of several threads compiled, or some of them at once."""

    def __init__(self) -> None:
        self._lock, self._threads = threading.Lock(), 0
        self._before, self._begun = 0.0, 0.0  # for how long before, and since when if threads compile now

    @property
    def seconds(self) -> float:
        with self._lock:
            return self._before + (time.perf_counter() - self._begun if self._threads else 0.0)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """The thread compiles in this context."""
        with self._lock:
            self._threads += 1
            if self._threads == 1:
                self._begun = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self._before += time.perf_counter() - self._begun


class Times:
    """How long one device works on a runner's calls, and how long the host takes in between.

    clock: in seconds; it stands still where time does not count. compiling: what counts the time of compiling, perhaps with that of
    other runners. busy_seconds and host_times are those of `Stats`.
    """

    def __init__(self, clock: Callable[[], float], compiling: Compiling | None = None):
        self._clock, self._idle, self.compiling = clock, 0.0, compiling or Compiling()
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
