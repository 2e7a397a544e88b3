"""Regular expressions as users write them: anchors, what has no automaton, and patterns of JSON strings.

The dialect is that of Rust's `regex` crate, which is close to Python's and JavaScript's. A text matches as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

# U+10FFFF, which is no character, marks the ends of a text: see `automaton`. A class that had it would make automata too large to build,
# since a text might begin at each of its characters.
UNMARKED = r"[^\x{10ffff}]"
# What a JSON string holds as it is.
PLAIN = r'[^"\\\x00-\x1f\x{10ffff}]'
ESCAPES = {'"': r"\\\"", "\\": r"\\\\", "\n": r"\\n", "\r": r"\\r", "\t": r"\\t", "\f": r"\\f", "\b": r"\\b"}
CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
# Classes as members of others, such that a character is in them by Python's meaning and by JavaScript's; and in classes that are negated,
# by either's.
INSIDE = {"d": "0-9", "w": "0-9A-Za-z_", "s": " ", "D": r"\D", "W": r"[^\w\p{N}]", "S": r"[^\s\x{feff}]"}
OUTSIDE = {"d": r"\d", "w": r"\w\p{N}", "s": r"\s\x{feff}", "D": "[^0-9]", "W": "[^0-9A-Za-z_]", "S": "[^ ]"}
Refuse = Callable[[str], NoReturn]


def literal(text: str) -> str:
    """Matches a text as it is."""
    return "".join("\\" + c if c in r"\.+*?()|[]{}^$" else c for c in text)


def whole(pattern: str, refuse: Refuse) -> str:
    """The same expression without anchors at the ends of its alternatives. refuse: raises for a feature that no automaton has."""
    return "|".join(body for body, _, _ in _alternatives(pattern, refuse, _unmarked, nested=True))


def in_string(pattern: str, refuse: Refuse) -> str:
    """Matches what stands between the quotes of JSON strings that a schema's `pattern` finds a match in, as far as they hold its characters
    themselves or a short escape."""
    free = rf'(?:{PLAIN}|\\["\\/bfnrt])*'
    parts = [
        f"{'' if start else free}(?:{body}){'' if end else free}"
        for body, start, end in _alternatives(pattern, refuse, lambda x: _encoded(x, refuse))
    ]
    return "|".join(parts)


def _unmarked(piece: str) -> str:
    """A piece that does not match the mark."""
    if piece == ".":
        return r"[^\n\x{10ffff}]"
    several = piece[0] == "[" or (piece[0] == "\\" and piece[1] in "DSWpP")
    return f"[{piece}&&{UNMARKED}]" if several else piece


def _alternatives(pattern: str, refuse: Refuse, change: Callable[[str], str], *, nested: bool = False) -> Iterator[tuple[str, bool, bool]]:
    """(expression, whether it is anchored at its beginning, at its end) of each alternative. change: of every piece. nested: as for
    `_pieces`."""
    depth, pieces, found = 0, list[str](), list[list[str]]()
    for piece in _pieces(pattern, refuse, nested):
        if piece == "|" and depth == 0:
            found.append(pieces)
            pieces = []
            continue
        depth += (piece[0] == "(") - (piece == ")")
        pieces.append(piece)
    found.append(pieces)
    for pieces in found:
        start, end = pieces[:1] == ["^"], pieces[-1:] == ["$"]
        inner = pieces[start : len(pieces) - end]
        if "^" in inner or "$" in inner:
            refuse("an anchor, ^ or $, inside an expression; expected it at the ends alone")
        yield "".join(map(change, inner)), start, end


def _pieces(pattern: str, refuse: Refuse, nested: bool) -> Iterator[str]:
    """The tokens of an expression: characters, escapes, classes, openings of groups, quantifiers. nested: whether there are classes in
    classes, as in Rust; else [ is a member like others."""
    try:
        pattern.encode()
    except UnicodeEncodeError:
        refuse("half of a surrogate pair, which is no character")
    at = 0
    while at < len(pattern):
        c = pattern[at]
        if c == "[":
            end = _class_end(pattern, at, refuse, nested)
        elif c == "\\":
            end = _escape_end(pattern, at, refuse)
        elif c == "(":
            end = at + 1
            if pattern.startswith("(?", at):
                if re.match(r"\(\?(=|!|<=|<!)", pattern[at:]):
                    refuse(f"a lookaround, {pattern[at : at + 4]!r}")
                opening = re.match(r"\(\?(:|P?<\w+>)", pattern[at:])
                if opening is None:
                    refuse(f"a group {pattern[at : at + 4]!r}; expected (...), (?:...) or (?P<name>...)")
                    raise AssertionError
                yield "(?:"
                at += opening.end()
                continue
        elif c in "*+?" or (c == "{" and re.match(r"\{\d+(,\d*)?\}", pattern[at:])):
            end = at + 1 if c != "{" else pattern.index("}", at) + 1
            if pattern[end : end + 1] == "+":
                refuse(f"a possessive quantifier, {pattern[at : end + 1]!r}")
            yield pattern[at:end]
            at = end + (pattern[end : end + 1] == "?")  # a lazy quantifier matches the same texts
            continue
        elif upto := re.match(r"\{,\d+\}", pattern[at:]):
            refuse(f"a repetition {upto[0]!r}, which Python and JavaScript read differently; expected '{{0{upto[0][1:]}'")
        elif c in "{}":  # as it is, for Python and JavaScript
            yield "\\" + c
            at += 1
            continue
        else:
            end = at + 1
        yield pattern[at:end]
        at = end


def _escape_end(pattern: str, at: int, refuse: Refuse) -> int:
    c = pattern[at + 1 : at + 2]
    if c in "bB" and c:
        refuse(f"a word boundary, \\{c}")
    if c in tuple("123456789k"):
        refuse(f"a reference to a group, \\{c}")
    if c in tuple("AzZG"):
        refuse(f"an anchor, \\{c}; expected ^ and $, or none, since a text matches as a whole")
    length = {"x": 4, "u": 6, "p": 3, "P": 3}.get(c, 2)
    if c in ("p", "P", "x", "u") and pattern[at + 2 : at + 3] == "{":
        length = pattern.find("}", at) + 1 - at
    if not c or len(pattern) < at + length or length < 2:
        refuse(f"an escape that is not complete, {pattern[at:]!r}")
    return at + length


def _class_end(pattern: str, at: int, refuse: Refuse, nested: bool) -> int:
    end = at + 1 + pattern.startswith("[^", at)
    end += pattern[end : end + 1] == "]"
    while end < len(pattern) and pattern[end] != "]":
        if nested and pattern[end] == "[":
            end = _class_end(pattern, end, refuse, nested)
            continue
        end = (
            _escape_end(pattern, end, refuse)
            if pattern[end] == "\\" and pattern[end + 1 : end + 2] != "b"
            else end + 1 + (pattern[end] == "\\")
        )
    if end >= len(pattern):
        refuse(f"a class that does not end, {pattern[at:]!r}")
    return end + 1


def _encoded(piece: str, refuse: Refuse) -> str:
    """A piece as it stands in a JSON string."""
    if piece == ".":
        return PLAIN
    if piece[0] == "[":
        negated, inner = piece.startswith("[^"), piece[2:-1] if piece.startswith("[^") else piece[1:-1]
        members = "".join(_class_members(inner, OUTSIDE if negated else INSIDE, refuse))
        own = f"[{'^' if negated else ''}{members}]"
        return f"[{own}&&{PLAIN}]"
    if piece[0] == "\\" and len(piece) > 1:
        c = piece[1]
        if c in INSIDE:
            return f"[{INSIDE[c]}]" if c.islower() else f"[{INSIDE[c]}&&{PLAIN}]"
        if c in "pP":
            return f"[{piece}&&{PLAIN}]"
        return _character(_escaped(piece), refuse)
    if len(piece) == 1 and piece not in "|()*+?":
        return _character(piece, refuse)
    return piece


def _class_members(inner: str, classes: Mapping[str, str], refuse: Refuse) -> Iterator[str]:
    """The members of a class, in Rust's syntax, where more characters have a meaning. classes: what those like \\d are written as."""
    at = 0
    while at < len(inner):
        end = at + 1
        if inner[at] == "\\":
            c = inner[at + 1]
            end = at + 2 if c == "b" else _escape_end(inner, at, refuse)
            if c in classes:
                yield classes[c]
            elif c in "pP":
                yield inner[at:end]
            else:
                yield f"\\x{{{ord(chr(8) if c == 'b' else _escaped(inner[at:end])):x}}}"
        elif inner[at] == "-" and 0 < at < len(inner) - 1:
            yield "-"
        else:
            yield f"\\x{{{ord(inner[at]):x}}}"
        at = end


def _escaped(piece: str) -> str:
    """The character that an escape stands for."""
    c = piece[1]
    if c in "xu":
        return chr(int(piece[2:].strip("{}"), 16))
    return CONTROLS.get(c, c)


def _character(c: str, refuse: Refuse) -> str:
    """A character as it stands in a JSON string."""
    if c in ESCAPES:
        return ESCAPES[c]
    if ord(c) < 0x20 or 0xD800 <= ord(c) < 0xE000:
        refuse(f"the character U+{ord(c):04X}, which JSON strings hold in no short form")
    return literal(c)
