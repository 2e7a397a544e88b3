"""One thread at a time computes on devices that wait for each other, and in one LLM."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class _Lock:
    """A device's, or somebody's own. last: who held it last."""

    def __init__(self) -> None:
        self.held = threading.RLock()
        self.last: Callable[[], Alone | None] = lambda: None


class Alone:
    """Called, it gives a context in which one thread at a time is; a thread that is in may enter again.

    devices: between which sums travel, if any. In a sum each of them waits for the others, so that two programs must begin in one order
    on all of them: where two have devices in common, a thread is in the context of one of them.

    settle: waits for threads that go on giving the devices something to do after the context was left; called before others begin.
    """

    _of: dict[Any, _Lock] = {}

    def __init__(self, devices: Iterable[Any] = ()):
        # All take the locks in one order, so that nobody waits for somebody who waits.
        shared = [self._of.setdefault(device, _Lock()) for device in sorted(devices, key=lambda device: device.id)]
        self._locks, self.settle = shared or [_Lock()], lambda: None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for lock in self._locks:
                stack.enter_context(lock.held)
            for last in [last for lock in self._locks if (last := lock.last()) not in (None, self)]:
                last.settle()
            for lock in self._locks:
                lock.last = weakref.ref(self)
            yield
