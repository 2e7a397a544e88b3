"""What ends a command with a line in place of a traceback."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

SOON = 0.01  # seconds


class UserError(Exception):
    """What the user got wrong, in words for the user."""


@contextlib.contextmanager
def door() -> Iterator[None]:
    """Turns what loading and checking a request raise into a message without a traceback; what comes later is a bug."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise UserError(error) from error


@contextlib.contextmanager
def heeding_interrupts() -> Iterator[None]:
    """Interrupts again, soon, where Python ignores an interrupt: in a function that is called when garbage is collected, as JAX has one."""
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
