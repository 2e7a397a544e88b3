"""Interrupts that Python would ignore come again."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

SOON = 0.01  # seconds


@contextlib.contextmanager
def heeded() -> Iterator[None]:
    """Interrupts again, soon, where Python ignores an interrupt: in a function that is called when garbage is collected, as JAX has one. A
    decorator too. It does nothing in threads but the main one, which alone is interrupted, and on Windows, where a process cannot do it."""
    if threading.current_thread() is not threading.main_thread() or os.name == "nt":
        yield
        return
    ignored = sys.unraisablehook

    def again(found: Any) -> None:
        if found.exc_type is not KeyboardInterrupt:
            ignored(found)
            return
        timer = threading.Timer(SOON, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()

    sys.unraisablehook = again
    try:
        yield
    finally:
        sys.unraisablehook = ignored
