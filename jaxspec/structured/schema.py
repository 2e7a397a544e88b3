"""From a JSON schema to a regular expression that matches JSON texts which validate by it.

It need not match all of them: members of an object come in the schema's order, numbers and depths are bounded. Whatever a schema says
either holds for every text that matches, or is refused by its name and its place. Keywords are those of draft 2020-12, with `definitions`
and `additionalItems` of earlier ones. Sources: json-schema.org/draft/2020-12, RFC 8259.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from jaxspec.structured import numbers
from jaxspec.structured.combine import apart, merged
from jaxspec.structured.formats import FORMATS
from jaxspec.structured.keywords import BOUNDS, check
from jaxspec.structured.patterns import PLAIN, in_string, literal
from jaxspec.structured.refused import below, refuse
from jaxspec.structured.values import identity, kind_of

DEPTH = 3  # values within values, where a schema allows any
WHITESPACE = "[ ]?"  # between the parts of objects and arrays
TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
KEYWORDS = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
    "object": {"properties", "required", "additionalProperties", "minProperties", "maxProperties"},
    "array": {"items", "prefixItems", "additionalItems", "minItems", "maxItems", "uniqueItems"},
}
COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "enum", "const", "type"}
# What says nothing about a value.
ANNOTATIONS = {"title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "discriminator"}
ANNOTATIONS |= {"$schema", "$id", "$comment", "$defs", "definitions", "$vocabulary", "contentMediaType", "contentEncoding", "contentSchema"}
CHARACTER = rf'(?:{PLAIN}|\\["\\/bfnrt])'
STRING = f'"{CHARACTER}*"'
SCALARS: tuple[str, ...] = ("true", "false", "null", STRING, numbers.NUMBER)


def regex_of(schema: Any, whitespace: str = WHITESPACE, closed: bool = False) -> str:
    """The expression of a schema, which is a dict or a bool. whitespace: matches what may stand between the parts of objects and arrays.
    closed: whether `additionalProperties` is false where a schema has `properties` and says nothing.

    Raises ValueError, naming the feature and its JSON pointer, for what has no regular form, and for a schema that nothing satisfies."""
    try:
        return Writer(schema, whitespace, closed).value(schema, "", ())
    except RecursionError:
        refuse("more levels than can be gone through", "")


def any_object(whitespace: str = WHITESPACE) -> str:
    """Matches JSON objects of a bounded depth."""
    return Writer(True, whitespace).anything(DEPTH, ("object",))


class Writer:
    """Writes the expressions of a schema's parts. root: what `$ref` refers to."""

    def __init__(self, root: Any, whitespace: str, closed: bool = False):
        self._closed = closed
        self._root, self._space = root, f"(?:{whitespace})" if whitespace else ""
        self._comma = "," + self._space

    def value(self, schema: Any, at: str, seen: tuple[str, ...]) -> str:
        """Of the values of a schema. at: its pointer. seen: the pointers that `$ref` has led through on the way here."""
        schema, at, seen = self._plain(schema, at, seen)
        if schema is True:
            return self.anything(DEPTH)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                return self._either(schema, name, at, seen)
        if "enum" in schema or "const" in schema:
            return _group(literal(_written(x, at)) for x in self._members(schema, at))
        found = [self._typed(kind, schema, at, seen) for kind in types_of(schema, at)]
        return _group(found)

    def anything(self, depth: int, kinds: Sequence[str] = ("scalar", "array", "object")) -> str:
        """Of any value that holds values of at most `depth` levels."""
        parts = list(SCALARS) if "scalar" in kinds else []
        inner = self.anything(depth - 1) if depth else ""
        if "array" in kinds:
            parts.append(self._list([], inner, 0, None if depth else 0))
        if "object" in kinds:
            parts.append(self._map(inner, 0, None if depth else 0))
        return _group(parts)

    def _plain(self, schema: Any, at: str, seen: tuple[str, ...]) -> tuple[Any, str, tuple[str, ...]]:
        """A schema without `$ref` and `allOf`, or True; every keyword that is left is known."""
        if schema is True or schema == {}:
            return True, at, seen
        if schema is False:
            refuse("false, which nothing satisfies,", at)
        if not isinstance(schema, Mapping):
            refuse(f"{schema!r} of type {type(schema).__name__}, expected a dict or a bool,", at)
        kept = {}
        known = COMBINING.union(*KEYWORDS.values())
        for key, value in schema.items():
            if key in known:
                check(key, value, at)
                kept[key] = value
            elif key not in ANNOTATIONS and not str(key).startswith("x-"):
                refuse(f"{key!r}, which has no regular form here,", below(at, key))
        if "$ref" in kept:
            place, target = self._found(kept.pop("$ref"), below(at, "$ref"))
            if place in seen:
                refuse(f"a recursion: '$ref' leads back to #{place}, and a value of any depth has no regular form,", below(at, "$ref"))
            target, _, seen = self._plain(target, place, (*seen, place))
            return (target, place, seen) if not kept else self._plain(merged(kept, target, at), at, seen)
        if "allOf" in kept:
            parts = _listed(kept.pop("allOf"), below(at, "allOf"))
            led = list(seen)  # the way of each part is its own
            for i, part in enumerate(parts):
                part, _, way = self._plain(part, below(at, "allOf", i), seen)
                kept = merged(kept, part, below(at, "allOf", i))
                led += way[len(seen) :]
            return self._plain(kept, at, tuple(led))
        return kept or True, at, seen

    def _found(self, ref: Any, at: str) -> tuple[str, Any]:
        """(pointer, schema) that a `$ref` names."""
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            refuse(f"'$ref' to {ref!r}; expected a place in the same schema, such as '#/$defs/name',", at)
        found = self._root
        for key in ref[2:].split("/") if ref != "#" else ():
            key = unquote(key).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and key in found:
                found = found[key]
            elif isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                found = found[int(key)]
            else:
                refuse(f"'$ref' to {ref!r}, which is not there,", at)
        return ref[1:], found

    def _either(self, schema: Mapping[str, Any], name: str, at: str, seen: tuple[str, ...]) -> str:
        rest, branches = {k: v for k, v in schema.items() if k != name}, []
        for i, branch in enumerate(_listed(schema[name], below(at, name))):
            if branch is False:
                continue
            place = below(at, name, i)
            plain, _, inner = self._plain(branch, place, seen)
            branches.append((merged(rest, plain, place), place, inner))
        if not branches:
            refuse(f"{name!r} without a schema that something satisfies", below(at, name))
        if name == "oneOf" and not apart([branch for branch, _, _ in branches], types_of):
            refuse(
                "'oneOf' of schemas that one value may satisfy at once; expected different types, or a required property that tells,",
                below(at, name),
            )
        return _group(self.value(*branch) for branch in branches)

    def _members(self, schema: Mapping[str, Any], at: str) -> list[Any]:
        """The values of `enum` and `const`."""
        others = set(schema) - {"enum", "const", "type"}
        name = "enum" if "enum" in schema else "const"
        if others:
            refuse(f"{name!r} beside {min(others)!r}; expected it alone, or with a type,", at)
        listed = _listed(schema["enum"], below(at, "enum")) if "enum" in schema else [schema["const"]]
        if "enum" in schema and "const" in schema:
            listed = [x for x in listed if identity(x) == identity(schema["const"])]
        kinds = types_of(schema, at) if "type" in schema else TYPES
        listed = [x for x in listed if kind_of(x) in kinds or (kind_of(x) == "integer" and "number" in kinds)]
        if not listed:
            refuse(f"{name!r} that leaves no value", below(at, name))
        return listed

    def _typed(self, kind: str, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> str:
        if kind == "boolean":
            return "true|false"
        if kind == "null":
            return "null"
        if kind == "string":
            return _string(schema, at)
        if kind == "array":
            return self._array(schema, at, seen)
        return self._object(schema, at, seen) if kind == "object" else _number(kind, schema, at)

    def _array(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> str:
        least, most = _bounds(schema, "minItems", "maxItems", at)
        first, rest, name = schema.get("prefixItems", []), schema.get("items", True), "items"
        if isinstance(rest, list):  # of drafts before 2020-12
            first, rest, name = rest, schema.get("additionalItems", True), "additionalItems"
        if schema.get("uniqueItems") and (most is None or most > 1):
            refuse("'uniqueItems', which has no regular form,", below(at, "uniqueItems"))
        begun = [self.value(x, below(at, "prefixItems", i), seen) for i, x in enumerate(first[:most])]
        if rest is False or (most is not None and most <= len(begun)):
            if least > len(begun):
                refuse(f"'minItems' {least} with room for {len(begun)}", below(at, "minItems"))
            return self._list(begun, "", 0, 0)
        inner = self.value(rest, below(at, name), seen) if rest is not True else self.anything(DEPTH - 1)
        return self._list(begun, inner, max(least - len(begun), 0), None if most is None else most - len(begun))

    def _list(self, first: Sequence[str], item: str, least: int, most: int | None) -> str:
        """An array: the first items, then `least` to `most` more."""
        head = self._comma.join(first)
        if most == 0:
            return _bracketed("[", head, "]", self._space)
        if first:
            return _bracketed("[", head + _times(self._comma + item, least, most), "]", self._space)
        more = item + _times(self._comma + item, max(least - 1, 0), None if most is None else most - 1)
        return _bracketed("[", more if least else f"(?:{more})?", "]", self._space)

    def _map(self, value: str, least: int, most: int | None) -> str:
        """An object of any names."""
        if most == 0:
            return _bracketed("{", "", "}", self._space)
        member = f"{STRING}:{self._space}{value}"
        more = member + _times(self._comma + member, 0, None if most is None else most - 1)
        return _bracketed("{", more if least else f"(?:{more})?", "}", self._space)

    def _object(self, schema: Mapping[str, Any], at: str, seen: tuple[str, ...]) -> str:
        least, most = _bounds(schema, "minProperties", "maxProperties", at)
        named, required = schema.get("properties", {}), list(dict.fromkeys(schema.get("required", [])))
        others = schema.get("additionalProperties", not (self._closed and "properties" in schema))
        members = dict(named) | {name: others for name in required if name not in named}
        if not members:
            if least > 1:
                refuse(f"'minProperties' {least} of names that are not given, which has no regular form,", below(at, "minProperties"))
            if others is False or most == 0:
                return self._map("", 0, 0) if not least else refuse("no property and 'minProperties'", at)
            inner = self.value(others, below(at, "additionalProperties"), seen) if others is not True else self.anything(DEPTH - 1)
            return self._map(inner, least, most)
        if least > len(required):
            refuse(
                f"'minProperties' {least} beside {len(required)} required properties; expected at most as many", below(at, "minProperties")
            )
        if most is not None and most < len(members):
            refuse(f"'maxProperties' {most} beside {len(members)} properties; expected at least as many", below(at, "maxProperties"))
        parts = []
        for name, member in members.items():
            place = below(at, "properties", name)
            if member is False and name not in required:
                continue
            if name not in named and others is False:
                refuse(f"{name!r} in 'required', which 'additionalProperties' forbids,", below(at, "required"))
            value = self.anything(DEPTH - 1) if member is True or member == {} else self.value(member, place, seen)
            parts.append((f"{literal(_written(name, at))}:{self._space}{value}", name in required))
        return _bracketed("{", self._in_order(parts), "}", self._space)

    def _in_order(self, members: Sequence[tuple[str, bool]]) -> str:
        """Members in order, of which those that are not required may be left out."""
        first = next((i for i, (_, required) in enumerate(members) if required), len(members))

        def after(i: int) -> str:
            return "".join(_times(self._comma + text, int(required), 1) for text, required in members[i:])

        if first < len(members):
            before = "".join(f"(?:{text}{self._comma})?" for text, _ in members[:first])
            return before + members[first][0] + after(first + 1)
        return f"(?:{'|'.join(text + after(i + 1) for i, (text, _) in enumerate(members))})?" if members else ""


def types_of(schema: Mapping[str, Any], at: str = "") -> list[str]:
    """The types that a schema names, or those that its keywords are about; all of them if it says nothing."""
    if "type" not in schema:
        return [kind for kind, keys in KEYWORDS.items() if keys & set(schema)] or [kind for kind in TYPES if kind != "integer"]
    given = schema["type"]
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not listed or any(kind not in TYPES for kind in listed):
        refuse(f"type {given!r}; expected one or several of {', '.join(TYPES)}", below(at, "type"))
    return [kind for kind in dict.fromkeys(listed) if kind != "integer" or "number" not in listed]


def _string(schema: Mapping[str, Any], at: str) -> str:
    least, most = _bounds(schema, "minLength", "maxLength", at)
    given = [name for name in ("pattern", "format") if name in schema]
    if not given:
        return f'"{_times(CHARACTER, least, most)}"'
    name = given[0]
    if len(given) > 1 or least or most is not None:
        other = given[1] if len(given) > 1 else "minLength" if least else "maxLength"
        refuse(f"{name!r} beside {other!r}; expected one of them", below(at, name))
    if name == "pattern":
        place = below(at, "pattern")
        return f'"(?:{in_string(schema["pattern"], lambda what: refuse(what, place))})"'
    if schema["format"] not in FORMATS:
        refuse(f"the format {schema['format']!r}; expected one of {', '.join(FORMATS)}, or a pattern,", below(at, "format"))
    return f'"(?:{FORMATS[schema["format"]]})"'


def _number(kind: str, schema: Mapping[str, Any], at: str) -> str:
    step = schema.get("multipleOf")
    if step is not None and step != 1:
        refuse(f"'multipleOf' {step}, which has no regular form here,", below(at, "multipleOf"))
    whole = kind == "integer" or step == 1
    low, above = _limit(schema, "minimum", "exclusiveMinimum", max, at)
    high, under = _limit(schema, "maximum", "exclusiveMaximum", min, at)
    if low is None and high is None:
        return numbers.INTEGER if whole else numbers.NUMBER
    if whole:
        first = None if low is None else int(low // 1) + (above or low % 1 != 0)
        last = None if high is None else -int(-high // 1) - (under or high % 1 != 0)
        found = numbers.integers(first, last)
    else:
        for name in BOUNDS:
            if Fraction(schema.get(name) or 0) % 1:
                refuse(f"{name!r} {schema[name]} of a number; expected a whole number", below(at, name))
        found = numbers.numbers(None if low is None else int(low), None if high is None else int(high), above, under)
    if found is None:
        refuse("bounds that leave no number", at)
    return found


def _limit(schema: Mapping[str, Any], name: str, exclusive: str, choose: Any, at: str) -> tuple[Fraction | None, bool]:
    """The stricter of two bounds, and whether it is excluded itself."""
    found = []
    for key in (name, exclusive):
        value = schema.get(key)
        if value is not None:
            found.append((Fraction(value), key == exclusive))
    if not found:
        return None, False
    bound = choose(value for value, _ in found)
    return bound, any(out for value, out in found if value == bound)


def _bounds(schema: Mapping[str, Any], low: str, high: str, at: str) -> tuple[int, int | None]:
    least, most = int(schema.get(low, 0)), schema.get(high)
    if most is not None and most < least:
        refuse(f"{low!r} {least} above {high!r} {most}", at)
    return least, None if most is None else int(most)


def _listed(value: Any, at: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        refuse(f"{value!r}; expected a list that is not empty", at)
    return value


def _written(value: Any, at: str) -> str:
    """A value as JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode().decode()
    except (TypeError, ValueError):
        refuse(f"{value!r}, which JSON cannot hold,", at)


def _times(text: str, least: int, most: int | None) -> str:
    """A text repeated."""
    if (least, most) == (1, 1):
        return text
    if most == 0:
        return ""
    count = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((least, most))
    return f"(?:{text})" + (count or f"{{{least},{'' if most is None else most}}}")


def _bracketed(opening: str, inner: str, closing: str, space: str) -> str:
    return f"\\{opening}{space}{inner}{space if inner else ''}\\{closing}"


def _group(parts: Iterable[str]) -> str:
    return f"(?:{'|'.join(dict.fromkeys(parts))})"
