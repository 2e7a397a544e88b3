"""A lock for devices that wait for each other: one thread at a time computes there, and in one LLM."""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


class _Lock:
    """The lock of one device, or of an LLM whose devices wait for no others."""

    def __init__(self) -> None:
        self.held = threading.RLock()
        self.last: Callable[[], DeviceLock | None] = lambda: None  # a weak reference to the DeviceLock that held it last


class DeviceLock:
    """Calling it gives a context that one thread at a time can enter; a thread that is inside may enter again.

    devices: those whose programs exchange sums, if any. In a sum each device waits for the others, so two programs must start in the same
    order on all of them. That is why two DeviceLocks that have a device in common share its lock.

    A fork has the arrays' names and no devices, and would wait for ever. There the call raises RuntimeError.
    """

    _of: dict[Any, _Lock] = {}  # the lock of each device

    def __init__(self, devices: Iterable[Any] = ()):
        # All take the locks in the same order, so that no two of them wait for each other.
        shared = [self._of.setdefault(device, _Lock()) for device in sorted(devices, key=lambda device: device.id)]
        self._locks = shared or [_Lock()]
        self._process = os.getpid()
        self._inside = 0  # how often the thread that is inside has entered
        self._asking = set[object]()  # one for each thread that wants to enter
        # Waits for threads that still give the devices work after the context was left. Called before somebody else enters.
        self.settle: Callable[[], None] = lambda: None

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made the lock."""
        return os.getpid() != self._process

    @property
    def wanted(self) -> bool:
        """Whether a thread waits to enter."""
        return bool(self._asking)

    @property
    def nested(self) -> bool:
        """Whether the thread that is inside has entered more than once."""
        return self._inside > 1

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        if self.forked:  # before the locks, which a thread that is not here may hold
            raise RuntimeError(
                "this process is a fork of the one that loaded the model, and has no devices; load it in the process that uses it, "
                "and start processes by multiprocessing's 'spawn'"
            )
        asking = object()
        try:
            self._asking.add(asking)
            with _held(self._locks):
                self._asking.discard(asking)
                self._take()
                with self._entered():
                    yield
        finally:
            self._asking.discard(asking)

    def _take(self) -> None:
        """Notes who is inside now, once other DeviceLocks have settled."""
        for last in [last for lock in self._locks if (last := lock.last()) not in (None, self)]:
            last.settle()
        for lock in self._locks:
            lock.last = weakref.ref(self)

    @contextlib.contextmanager
    def if_free(self) -> Iterator[bool]:
        """A context that never waits: True in it says that nobody was inside, this thread neither, and that others have to wait until the
        context is left. It settles nothing, so it is for work of the host alone."""
        taken = list[Any]()
        try:
            # C alone runs here, so that no interrupt comes between taking a lock and remembering it.
            taken.extend(itertools.takewhile(operator.methodcaller("acquire", False), [lock.held for lock in self._locks]))
            if len(taken) < len(self._locks) or self._inside:
                yield False
            else:
                with self._entered():
                    yield True
        finally:
            collections.deque(map(operator.methodcaller("release"), taken), 0)

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        before = self._inside
        try:
            self._inside = before + 1
            yield
        finally:
            self._inside = before


@contextlib.contextmanager
def _held(locks: Sequence[_Lock]) -> Iterator[None]:
    """Holds all locks. `with` takes a lock and remembers it in one step, between which no interrupt comes, as it can in an ExitStack."""
    if not locks:
        yield
        return
    with locks[0].held, _held(locks[1:]):
        yield
