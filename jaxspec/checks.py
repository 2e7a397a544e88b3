"""Checks of single values. Errors name the value, what was found and what was expected."""

from __future__ import annotations

import difflib
import functools
import math
import numbers
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_INTEGER = 2**31 - 1  # devices hold int32
MAX_NUMBER = 1e30  # devices hold float32 and may multiply by the reciprocal, which they flush to 0 if it is denormal


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int of low .. high; high is the largest int32 by default.

    Raises TypeError if it is not an integer (a bool is not), ValueError if it is out of range. name: for the error.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}, expected an integer")
    found, most = int(value), MAX_INTEGER if high is None else high
    if not low <= found <= most:
        expected = f"at least {low}" if high is None and found < low else f"{low} .. {most}"
        raise ValueError(f"{name} is {found}, expected {expected}")
    return found


def number(name: str, value: Any, low: float, high: float = MAX_NUMBER, *, above: bool = False) -> float:
    """`value` as a finite float of low .. high; low itself is excluded if `above`.

    Raises TypeError if it is not a real number (a bool is not), ValueError if it is out of range. name: for the error.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}, expected a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    if not (low <= found <= high and (found > low or not above)):
        least = f"more than {low}" if above else f"at least {low}"
        raise ValueError(f"{name} is {found}, expected a finite number of {least} and at most {high}")
    return found


def flag(name: str, value: Any) -> bool:
    """`value`, which is True or False. Raises TypeError. name: for the error."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, expected True or False")
    return value


def among(value: Any, allowed: Iterable[Any]) -> bool:
    """Whether `value` is one of a few; an array, which compares number by number, is none of them."""
    return not getattr(value, "ndim", 0) and value in allowed


def characters(name: str, text: str) -> str:
    """`text`. Raises ValueError if it has half of a surrogate pair, which is no character. name: for the error."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            found = f"{text[error.start]!r} at position {error.start}"
            raise ValueError(f"{name} has {found}: half of a surrogate pair, no character") from None
    return text


def path(name: str, value: Any, expected: str) -> str | os.PathLike[str]:
    """`value`, which is a text or a path. Raises TypeError. name, expected: for the error."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}, expected {expected}")
    return value


def type_name(value: Any) -> str:
    """The name of the type of `value`, with its module unless that is Python's own: several packages have SamplingParams."""
    cls = type(value)
    return cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"


def same_kind(error: Exception, text: str) -> TypeError | ValueError:
    """A TypeError in place of one, else a ValueError, with another text. A kind of these may need more than a text."""
    return TypeError(text) if isinstance(error, TypeError) else ValueError(text)


def expanded(path: str | os.PathLike[str]) -> Path:
    """`path` with the home folder in place of a leading ~, which a shell leaves in `--out=~/drafter`; a ~ of no user stays."""
    return Path(os.path.expanduser(path))


def cache_folder() -> Path:
    """Where jaxspec keeps what it would else make again: JAXSPEC_CACHE_DIR, or ~/.cache/jaxspec. A user without a home folder, as some
    containers have, keeps nothing."""
    home = os.path.expanduser("~")
    named = os.environ.get("JAXSPEC_CACHE_DIR")
    return expanded(named) if named else Path(home, ".cache", "jaxspec") if os.path.isabs(home) else folder_of_this_process()


def folder_of_this_process() -> Path:
    """A folder that is gone when Python exits."""
    return Path(_temporary().name)


@functools.cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="jaxspec-")


def unknown(function: str, name: str, known: Iterable[str]) -> TypeError:
    """The error for a keyword that a function does not have. It names the nearest of those that are known, if one is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return TypeError(f"{function} has no argument {name!r}" + (f"; the nearest is {near[0]!r}" if near else ""))
