"""Regular expressions for numbers between bounds."""

from __future__ import annotations

# JSON's numbers, as short as every reader keeps them exactly: integers of 64 bits, and exponents that no double overflows with.
DIGITS = 18
INTEGER = r"-?(?:0|[1-9][0-9]{0,17})"
NUMBER = INTEGER + r"(?:\.[0-9]{1,17})?(?:[eE][+-]?[0-9]{1,2})?"
EXACT = 15  # decimal digits that a double tells apart


def integers(low: int | None, high: int | None) -> str | None:
    """Matches the decimal forms of low .. high, None for no bound; None if there are none."""
    most = 10 ** max(DIGITS, *(len(str(abs(x))) for x in (low, high) if x is not None), 1) - 1
    first, last = -most if low is None else low, most if high is None else high
    parts = []
    if first < 0 and first <= last:
        parts += [f"-(?:{'|'.join(_naturals(max(-last, 1), -first))})"]
    if last >= 0 and first <= last:
        parts += _naturals(max(first, 0), last)
    return "|".join(parts) or None


def numbers(low: int | None, high: int | None, above: bool, below: bool) -> str | None:
    """Matches decimals without an exponent between whole bounds, None for no bound; None if there are none. above, below: whether the
    bound itself is excluded. Fractions are so short that a double is on the same side of a bound as its decimal form."""
    places = max(1, EXACT - max((len(str(abs(x))) for x in (low, high) if x is not None), default=0))
    parts = []
    if low is None or low < 0:
        ends = (0, False) if high is None or high > 0 else (-high, below)
        negative = _positive(ends[0], None if low is None else -low, ends[1], above, places)
        parts += [f"-(?:{negative})"] if negative else []
    if high is None or high >= 0:
        ends = (0, False) if low is None or low < 0 else (low, above)
        plain = _positive(ends[0], high, ends[1], below, places)
        parts += [plain] if plain else []
    return "|".join(parts) or None


def _positive(low: int, high: int | None, above: bool, below: bool, places: int) -> str | None:
    """Matches decimals low .. high, low 0 at least."""
    parts = list[str]()
    if high is not None and (high < low or (high == low and (above or below))):
        return None
    first = low
    if above:
        parts.append(rf"{low}\.[0-9]{{0,{places - 1}}}[1-9]")
        first = low + 1
    last = 10**EXACT - 1 if high is None else high - 1
    if first <= last:
        parts.append(rf"(?:{'|'.join(_naturals(first, last))})(?:\.[0-9]{{1,{places}}})?")
    if high is not None and not below:
        parts.append(rf"{high}(?:\.0{{1,{places}}})?")
    return "|".join(parts) or None


def _naturals(low: int, high: int) -> list[str]:
    """Alternatives that match the decimal forms of low .. high, 0 <= low <= high."""
    found = []
    while low <= high:
        top = min(high, 10 ** len(str(low)) - 1)  # of as many digits
        found.append(_same_length(str(low), str(top)))
        low = top + 1
    return found


def _same_length(low: str, high: str) -> str:
    """Matches numbers of as many digits as both bounds have."""
    if not low:
        return ""
    if low == high:
        return low
    rest = len(low) - 1
    least, most = "0" * rest, "9" * rest
    first, last = int(low[0]), int(high[0])
    if first == last:
        return low[0] + _grouped(low[1:], high[1:])
    parts, begin, end = [], first, last
    if low[1:] != least:
        parts.append(low[0] + _grouped(low[1:], most))
        begin += 1
    if high[1:] != most:
        end -= 1
    if begin <= end:
        digit = str(begin) if begin == end else f"[{begin}-{end}]"
        parts.append(digit + (f"[0-9]{{{rest}}}" if rest else ""))
    if high[1:] != most:
        parts.append(high[0] + _grouped(least, high[1:]))
    return "|".join(parts)


def _grouped(low: str, high: str) -> str:
    return f"(?:{_same_length(low, high)})" if low else ""
