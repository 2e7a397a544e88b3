"""Checks of single values, for errors that name the value, what was found and what was expected."""

from __future__ import annotations

import math
import numbers
from typing import Any


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int. Raises TypeError if it is not an integer (a bool is not), ValueError if it is not in low .. high."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}, expected an integer")
    found = int(value)
    if found < low or (high is not None and found > high):
        raise ValueError(f"{name} is {found}, expected {f'at least {low}' if high is None else f'{low} .. {high}'}")
    return found


def number(name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """`value` as a finite float of low .. high, without low itself if `above`. Raises TypeError or ValueError."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}, expected a number")
    try:
        found = float(value)
    except OverflowError:
        found = math.inf
    # The device holds it as a float32.
    if not (low <= found <= high and abs(found) < 2.0**127 and (found > low or not above)):
        least = f"more than {low}" if above else f"at least {low}"
        raise ValueError(f"{name} is {found}, expected a finite number of {least}{'' if high == math.inf else f' and at most {high}'}")
    return found
