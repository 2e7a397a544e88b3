"""What the values of a JSON schema's keywords must be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.structured.refused import below, refuse


def check(key: str, value: Any, at: str) -> None:
    """Raises ValueError for a value that a keyword cannot have. at: the pointer of the schema."""
    expected, fits = EXPECTED.get(key, ("", None))
    if fits is not None and not fits(value):
        refuse(f"{key!r} {value!r}; expected {expected}", below(at, key))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_size(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_json(value: Any) -> bool:
    """Whether JSON can hold a value: NaN and the infinities, which Python reads, are no numbers there."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_is_text, value)) and all(map(_is_json, value.values()))
    return all(map(_is_json, value)) if isinstance(value, list) else value is None or isinstance(value, str | int)


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
EXPECTED: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(BOUNDS, ("a number", lambda value: value is None or _is_number(value))),
    **dict.fromkeys(SIZES, ("an integer of 0 at least", _is_size)),
    **dict.fromkeys(("pattern", "format"), ("a text", _is_text)),
    **dict.fromkeys(("enum", "const"), ("what JSON can hold", _is_json)),
    "type": ("a text or a list of texts", lambda value: _is_text(value) or _are_texts(value)),
    "required": ("a list of names", _are_texts),
    "properties": ("a dict of names", lambda value: isinstance(value, Mapping) and all(map(_is_text, value))),
    "prefixItems": ("a list of schemas", lambda value: isinstance(value, list)),
}
