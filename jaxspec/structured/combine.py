"""Several JSON schemas for one value: all of them, or exactly one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxspec.structured.keywords import BOUNDS
from jaxspec.structured.refused import below, refuse
from jaxspec.structured.values import identity


def merged(one: Any, other: Any, at: str) -> Any:
    """A schema that says what both say. Neither has `$ref` or `allOf`. at: the pointer of the other.

    Raises ValueError for keywords that cannot be joined."""
    if one is True or not one:
        return other
    if other is True or not other:
        return one
    closed = [x for x in (one, other) if x.get("additionalProperties", True) is not True]
    if closed and set(one.get("properties", {})) != set(other.get("properties", {})):
        if "properties" in one and "properties" in other or any("properties" not in x for x in closed):
            refuse("'additionalProperties' beside schemas with other properties", at)
    one, other = _of_all_items(one, other), _of_all_items(other, one)
    result = dict(one)
    for key, value in other.items():
        if key not in result or (result[key] == value and identity(result[key]) == identity(value)):  # 1 is not true
            result[key] = value
        else:
            result[key] = _joined(key, result[key], value, at)
    return result


def _of_all_items(one: Any, other: Any) -> Any:
    """The first schema; what the second says of every item is said of each of its `prefixItems`, for which its own `items` do not hold."""
    first = one.get("prefixItems")
    if not isinstance(first, list) or "prefixItems" in other or other.get("items", True) is True:
        return one
    return {**one, "prefixItems": [{"allOf": [item, other["items"]]} for item in first]}


def _joined(key: str, one: Any, other: Any, at: str) -> Any:
    if key in BOUNDS and (one is None or other is None):  # no bound
        return other if one is None else one
    if key == "type":
        ours, theirs = ([x] if isinstance(x, str) else x for x in (one, other))
        both = [x for x in ours if x in theirs or (x == "integer" and "number" in theirs)]
        both += [x for x in theirs if x == "integer" and "number" in ours and x not in both]
        return both or refuse(f"types {one!r} and {other!r} at once", at)
    if key == "required":
        return list(dict.fromkeys([*one, *other]))
    if key == "properties":
        return {**one, **{name: {"allOf": [one[name], value]} if name in one else value for name, value in other.items()}}
    if key in ("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties"):
        return max(one, other)
    if key in ("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"):
        return min(one, other)
    if key in ("items", "additionalProperties"):
        return {"allOf": [one, other]}
    refuse(f"{key!r} twice with different values, in schemas that hold together,", below(at, key))


def apart(branches: Sequence[Any], types_of: Callable[[Mapping[str, Any]], list[str]]) -> bool:
    """Whether no value satisfies two of these schemas."""
    return all(_differ(a, b, types_of) for a, b in itertools.combinations(branches, 2))


def _differ(a: Any, b: Any, types_of: Callable[[Mapping[str, Any]], list[str]]) -> bool:
    if not (isinstance(a, Mapping) and isinstance(b, Mapping)):
        return False

    def values(schema: Any) -> set[str] | None:
        if not isinstance(schema, Mapping) or not ("const" in schema or "enum" in schema):
            return None
        return {identity(x) for x in ([schema["const"]] if "const" in schema else schema["enum"])}

    mine, theirs = values(a), values(b)
    if mine is not None and theirs is not None:
        return not mine & theirs
    if "type" in a and "type" in b:
        ours, others = ({"number" if x == "integer" else x for x in types_of(s)} for s in (a, b))
        if not ours & others:
            return True
        if ours == others == {"object"}:
            for name in set(a.get("required", ())) & set(b.get("required", ())):
                mine, theirs = (values(s.get("properties", {}).get(name)) for s in (a, b))
                if mine is not None and theirs is not None and not mine & theirs:
                    return True
    return False
