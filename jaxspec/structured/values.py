"""JSON values as schemas see them."""

from __future__ import annotations

import json
from typing import Any


def kind_of(value: Any) -> str:
    """The type of a JSON value."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "number"
    return {str: "string", dict: "object", list: "array"}[type(value)]


def identity(value: Any) -> str:
    """A text that is the same for equal JSON values alone."""

    def plain(x: Any) -> Any:
        if isinstance(x, float) and x == int(x):
            return int(x)
        return [plain(y) for y in x] if isinstance(x, list) else {k: plain(v) for k, v in x.items()} if isinstance(x, dict) else x

    return json.dumps(plain(value), sort_keys=True)
