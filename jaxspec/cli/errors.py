"""What ends a command with a line in place of a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


class UserError(Exception):
    """What the user got wrong, in words for the user."""


@contextlib.contextmanager
def door() -> Iterator[None]:
    """Turns what loading and checking a request raise into a message without a traceback; what comes later is a bug."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise UserError(error) from error
