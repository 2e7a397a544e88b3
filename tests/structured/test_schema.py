"""Every text of a schema's automaton is JSON that validates, by the jsonschema package; what is not served is refused by name and place."""

import dataclasses
import functools
import itertools
import json
import re

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field
from samples import drawn

from jaxspec.structured import StructuredOutputsParams
from jaxspec.structured.automaton import automaton_of
from jaxspec.structured.numbers import integers, numbers
from jaxspec.structured.schema import regex_of

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["b"]}
# By what is tried: the schema.
SCHEMAS = {
    "anything": True,
    "an empty schema": {},
    "types": {"type": ["string", "null", "integer"]},
    "lengths": {"type": "string", "minLength": 2, "maxLength": 5},
    "keywords without a type": {"minLength": 3, "maximum": 7},
    "a pattern": {"type": "string", "pattern": "^[a-z]+\\.[^,]{2}$"},
    "a pattern that is looked for": {"pattern": 'a\\\\b|"c"$|^\\t\\S'},
    "a pattern with a class of what is escaped": {"pattern": '^["\\\\/\\]x-]+[^\\w\\s]\\/[.]$'},
    "bounds": {"type": "integer", "minimum": -17, "exclusiveMaximum": 1203},
    "bounds of a number": {"type": "number", "exclusiveMinimum": -2, "maximum": 10},
    "a positive number": {"type": "number", "exclusiveMinimum": 0},
    "whole numbers": {"type": "number", "multipleOf": 1, "minimum": 0.5, "maximum": 12},
    "members": {"enum": ['a"b', "\\", "é\n", 1, 1.5, None, {"x": [1]}, True, "𝄞"]},
    "members of a type": {"type": "integer", "enum": [1, "1", 2.5, 3.0]},
    "one value": {"const": "a.b*"},
    "an object": OBJECT,
    "optional members": {"properties": {"a": {"const": 1}, "b": {"const": 2}, "c": {"const": 3}}},
    "a closed object": {**OBJECT, "additionalProperties": False},
    "a required name without a schema": {"type": "object", "required": ["x"], "additionalProperties": {"type": "null"}},
    "a map": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1, "maxProperties": 3},
    "names with quotes": {"type": "object", "properties": {'a"\\\n': {"const": 1}}, "required": ['a"\\\n']},
    "a list": {"type": "array", "items": OBJECT, "minItems": 1, "maxItems": 3},
    "a list without end": {"type": "array", "items": {"type": "boolean"}},
    "a tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False, "minItems": 2},
    "a tuple of draft 7": {"type": "array", "items": [{"type": "integer"}], "additionalItems": {"const": "x"}, "maxItems": 4},
    "no items": {"type": "array", "maxItems": 0},
    "references": {"$defs": {"a/b": {"type": "integer"}}, "type": "array", "items": {"$ref": "#/$defs/a~1b", "minimum": 3}},
    "a reference with an escaped space": {"$defs": {"a b": {"type": "integer"}}, "$ref": "#/$defs/a%20b"},
    "all of one schema twice": {"$defs": {"x": OBJECT}, "allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}]},
    "all of": {"allOf": [OBJECT, {"required": ["a"]}, {"properties": {"a": {"minimum": 5}}}]},
    "all of, with items of a tuple": {
        "type": "array",
        "prefixItems": [{"enum": ["x", 7]}],
        "allOf": [{"items": {"type": "integer"}, "minItems": 1, "maxItems": 2}],
    },
    "any of": {"type": "integer", "anyOf": [{"minimum": 10, "maximum": 20}, {"const": 3}, False]},
    "any of, requiring": {**OBJECT, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "one of types": {"oneOf": [{"type": "string"}, {"type": "number"}, {"type": "object", "properties": {}}]},
    "one of kinds": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": name}, name: {"type": "integer"}}, "required": ["kind", name]}
            for name in ("x", "y")
        ]
    },
    "formats": {"type": "array", "prefixItems": [{"format": f} for f in ("date", "date-time", "time", "uuid", "ipv4", "email")]},
    "annotations": {"title": "T", "description": "d", "default": 3, "x-order": 1, "type": "boolean", "$schema": "https://json-schema.org/"},
    "spaces": {"type": "array", "items": {"type": "array", "items": {"type": "null"}}},
}
VALIDATOR = jsonschema.Draft202012Validator


def validator(schema):
    old = isinstance(schema, dict) and isinstance(schema.get("items"), list)
    kind = jsonschema.Draft7Validator if old else VALIDATOR
    return kind(schema, format_checker=kind.FORMAT_CHECKER)


def check(schema, count, seed=0):
    automaton = automaton_of(regex_of(schema))
    for i in range(count):
        text = drawn(automaton, seed + i)
        validator(schema).validate(json.loads(text))


@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_texts_of_a_schema_validate(schema):
    check(schema, 60)


# By what is refused: the schema and what the message names, its place among it.
REFUSED = {
    "recursion": (
        {"$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
        "a recursion.*at #/\\$defs/n/properties/next/\\$ref",
    ),
    "a root that holds itself": ({"type": "array", "items": {"$ref": "#"}}, "a recursion.*at #/items/\\$ref"),
    "a reference elsewhere": ({"$ref": "https://x.org/y.json"}, "'\\$ref' to 'https://x.org/y.json'.*at #/\\$ref"),
    "a reference to nothing": ({"$ref": "#/$defs/x"}, "which is not there"),
    "not": ({"properties": {"a/b": {"not": {}}}}, "'not'.*at #/properties/a~1b/not"),
    "if": ({"if": {}}, "'if'.*at #/if"),
    "pattern properties": ({"patternProperties": {}}, "'patternProperties'.*at #/patternProperties"),
    "property names": ({"propertyNames": {}}, "'propertyNames'"),
    "unique items": ({"items": {"uniqueItems": True}}, "'uniqueItems'.*at #/items/uniqueItems"),
    "contains": ({"contains": {}}, "'contains'"),
    "dependent": ({"dependentRequired": {}}, "'dependentRequired'"),
    "unevaluated": ({"unevaluatedProperties": False}, "'unevaluatedProperties'"),
    "a keyword that is none": ({"minimun": 3}, "'minimun'.*at #/minimun"),
    "a multiple": ({"type": "integer", "multipleOf": 5}, "'multipleOf' 5.*at #/multipleOf"),
    "a bound with a fraction": ({"type": "number", "minimum": 0.5}, "'minimum' 0.5.*whole number at #/minimum"),
    "a format": ({"format": "iri"}, "the format 'iri'.*at #/format"),
    "a pattern and a length": ({"pattern": "a", "maxLength": 3}, "'pattern' beside 'maxLength'.*at #/pattern"),
    "a repetition without a least": ({"pattern": "^a{,3}$"}, r"a repetition '\{,3\}', .*; expected '\{0,3\}' at #/pattern"),
    "1 and true": ({"allOf": [{"const": 1}, {"const": True}]}, "'const' twice with different values.*at #/allOf/1/const"),
    "a name twice": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "required": ["a", "a"], "minProperties": 2},
        "'minProperties' 2 beside 1 required properties",
    ),
    "more levels than Python calls": (
        functools.reduce(lambda x, _: {"items": x}, range(2000), {"type": "null"}),
        "more levels than can be gone through at #",
    ),
    "a lookahead": ({"pattern": "(?=a)b"}, "a lookaround, .*at #/pattern"),
    "a reference to a group": ({"pattern": "(a)\\1"}, "a reference to a group.*at #/pattern"),
    "an anchor inside": ({"pattern": "(^a)b"}, "an anchor.*at #/pattern"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "'oneOf'.*at #/oneOf"),
    "oneOf open objects": ({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, "'oneOf'"),
    "allOf that differs": ({"allOf": [{"type": "string", "pattern": "a"}, {"pattern": "b"}]}, "'pattern' twice.*at #/allOf/1/pattern"),
    "types at once": ({"type": "string", "allOf": [{"type": "null"}]}, "types 'string' and 'null' at once"),
    "false": ({"properties": {"a": False}, "required": ["a"]}, "false, which nothing satisfies, at #/properties/a"),
    "a forbidden requirement": ({"properties": {"b": {}}, "required": ["a"], "additionalProperties": False}, "'a' in 'required'"),
    "no number": ({"type": "integer", "minimum": 5, "maximum": 4}, "bounds that leave no number"),
    "bounds": ({"minLength": 5, "maxLength": 4}, "'minLength' 5 above 'maxLength' 4"),
    "a type that is none": ({"type": "text"}, "type 'text'; expected one.*at #/type"),
    "few properties": ({"type": "object", "minProperties": 2}, "'minProperties' 2 of names that are not given"),
    "an empty enum": ({"enum": []}, "at #/enum"),
    "an enum beside more": ({"enum": ["ab"], "minLength": 3}, "'enum' beside 'minLength'"),
    "NaN in an enum": ({"enum": [{"a": [float("nan")]}]}, "'enum' .*nan.*; expected what JSON can hold at #/enum"),
    "an infinite constant": ({"const": 1e400, "type": "number"}, "'const' inf; expected what JSON can hold at #/const"),
    "an infinite bound": ({"type": "integer", "minimum": 1e400}, "'minimum' inf; expected a number at #/minimum"),
    "an infinite length": ({"type": "string", "maxLength": 1e400}, "'maxLength' inf; expected an integer of 0 at least at #/maxLength"),
    "a dict of items": ({"prefixItems": {"type": "integer"}}, "'prefixItems' .*; expected a list of schemas at #/prefixItems"),
    "a list of formats": ({"format": ["date"]}, "'format' .*; expected a text at #/format"),
    "a number as a pattern": ({"type": "string", "pattern": 5}, "'pattern' 5; expected a text at #/pattern"),
    "a number as a name": ({"type": "object", "required": [1]}, r"'required' \[1\]; expected a list of names at #/required"),
    "a bound that is a text, in allOf": ({"allOf": [{"minimum": "a"}, {"minimum": 3}]}, "'minimum' 'a'; expected a number at #/allOf/0"),
    "no properties, in allOf": (
        {"properties": {"a": {}}, "allOf": [{"properties": None}]},
        "'properties' None; .* at #/allOf/0/properties",
    ),
    "a number as a type, in allOf": ({"allOf": [{"type": 5}, {"type": "string"}]}, "'type' 5; expected a text.* at #/allOf/0/type"),
    "a list as a schema": ({"items": [3]}, "3 of type int, expected a dict or a bool"),
}


@pytest.mark.parametrize("schema,message", REFUSED.values(), ids=REFUSED)
def test_what_has_no_regular_form_is_refused_by_name_and_place(schema, message):
    with pytest.raises(ValueError, match=message):
        regex_of(schema)


def test_integers_between_bounds():
    for low, high in ((0, 0), (3, 57), (-5, 5), (-120, -7), (99, 1000), (10, 10), (-1, 0), (95, 105)):
        found = {n for n in range(-1300, 1300) if re.fullmatch(integers(low, high) or "x", str(n))}
        assert found == set(range(low, high + 1)), (low, high)
    assert integers(3, 2) is None
    assert re.fullmatch(integers(5, None) or "", "123456") and not re.fullmatch(integers(5, None) or "", "4")
    assert re.fullmatch(integers(None, 10**20) or "", str(10**20)) and not re.fullmatch(integers(None, 10**20) or "", str(10**20 + 1))


@pytest.mark.parametrize("low,high", [(0, 1), (-1, 1), (-3, -1), (None, 2), (-2, None), (7, 12), (0, 0)])
def test_numbers_between_bounds(low, high):
    texts = [f"{sign}{whole}{rest}" for sign in ("", "-") for whole in range(15) for rest in ("", ".0", ".5", ".25", ".999")]
    for above in (False, True):
        for below in (False, True):
            expression = numbers(low, high, above, below)
            for text in texts:
                x = float(text)
                inside = (low is None or x > low or (x == low and not above)) and (high is None or x < high or (x == high and not below))
                if text.startswith("-") and x == 0:
                    continue  # another way to write 0, which may be there or not
                assert bool(expression and re.fullmatch(f"(?:{expression})", text)) == inside, (text, low, high, above, below)


def schemas(depth=2):
    bound = st.integers(-30, 30)
    leaves = st.one_of(
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.builds(lambda a, b: {"type": "string", "minLength": a, "maxLength": a + b}, st.integers(0, 3), st.integers(0, 4)),
        st.builds(lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)}, bound, bound),
        st.builds(lambda a, b: {"type": "number", "minimum": min(a, b), "maximum": max(a, b)}, bound, bound),
        st.lists(st.one_of(st.text(max_size=4), bound, st.none(), st.booleans()), min_size=1, max_size=4).map(lambda x: {"enum": x}),
    )
    if not depth:
        return leaves
    inner = schemas(depth - 1)
    members = st.dictionaries(st.text(min_size=1, max_size=4), inner, max_size=4)
    objects = members.flatmap(
        lambda m: st.builds(
            lambda required, closed: {
                "type": "object",
                "properties": m,
                "required": required,
                **({"additionalProperties": False} if closed else {}),
            },
            st.lists(st.sampled_from(sorted(m)), unique=True) if m else st.just([]),
            st.booleans(),
        )
    )
    lists = st.builds(
        lambda i, a, b: {"type": "array", "items": i, "minItems": a, "maxItems": a + b}, inner, st.integers(0, 2), st.integers(0, 2)
    )
    return st.one_of(leaves, objects, lists, st.lists(inner, min_size=1, max_size=3).map(lambda x: {"anyOf": x}))


@given(schemas(), st.integers(0, 1000))
@settings(max_examples=25)
def test_texts_of_random_schemas_validate(schema, seed):
    check(schema, 5, seed)


@pytest.mark.slow
@given(schemas(3), st.integers(0, 1000))
@settings(max_examples=500)
def test_texts_of_many_random_schemas_validate(schema, seed):
    check(schema, 10, seed)


class Address(BaseModel):
    street: str = Field(max_length=10)
    number: int | None = None


class Person(BaseModel):
    """Whom we know."""

    name: str = Field(pattern="^[A-Z][a-z]+$")
    age: int = Field(ge=0, lt=150)
    score: float = Field(ge=0, le=1)
    home: Address
    others: list[Address] = Field(default_factory=list, max_length=2)


def test_a_pydantic_model_is_its_schema():
    automaton = automaton_of(StructuredOutputsParams(json=Person).expression)
    for seed in range(40):
        person = Person.model_validate_json(drawn(automaton, seed))
        assert 0 <= person.age < 150


def test_a_bound_that_is_null_is_none():
    """No such schema is valid, but tools write them."""
    bounded = regex_of({"type": "integer", "minimum": 3})
    for one, other in itertools.permutations([{"minimum": None}, {"minimum": 3}]):
        assert regex_of({"type": "integer", "allOf": [one, other]}) == bounded


def test_years_are_those_of_dates():
    automaton = automaton_of(regex_of({"format": "date"}))
    found = {year: automaton.accepting[automaton.after(f'"{year:04}-01-01"'.encode())] for year in (0, 1, 10, 100, 1000, 2026, 9990)}
    assert found == {year: year > 0 for year in found}


def test_an_object_of_any_kind():
    automaton = automaton_of(StructuredOutputsParams(json_object=True).expression)
    assert all(isinstance(json.loads(drawn(automaton, seed)), dict) for seed in range(20))


def test_an_object_that_lists_no_properties_has_others_unless_it_is_closed():
    params = {"json": {"type": "array", "items": {"type": "object", "properties": {}}}}
    for closed in (False, True):
        found = re.compile(StructuredOutputsParams(**params, disable_additional_properties=closed).expression.replace(r"\x{10ffff}", ""))
        assert found.fullmatch("[{}, {}]") and bool(found.fullmatch('[{"a": 1}]')) is not closed
    closed = StructuredOutputsParams(json={"type": "object", "properties": {}, "additionalProperties": {"const": 1}})
    assert dataclasses.replace(closed, disable_additional_properties=True).expression == closed.expression


def test_spaces_are_as_asked_for():
    def spaces(**params):
        automaton = automaton_of(StructuredOutputsParams(json=SCHEMAS["spaces"], **params).expression)
        return {c for seed in range(30) for c in drawn(automaton, seed) if c.isspace()}

    assert spaces() == {" "}
    assert spaces(disable_any_whitespace=True) == set()
    assert spaces(whitespace_pattern="[\n\t]{0,2}") == {"\n", "\t"}
    assert spaces(whitespace_pattern=r"[^!-~]{0,25}") > {" "}  # a class of almost any character


# By what is given: the arguments, the error, and what it says.
WRONG = {
    "nothing": ({}, ValueError, "none of them; expected exactly one"),
    "two": ({"regex": "a", "choice": ["b"]}, ValueError, "'regex', 'choice'; expected exactly one"),
    "spaces that look ahead": (
        {"json_object": True, "whitespace_pattern": " (?=a)"},
        ValueError,
        "whitespace_pattern ' \\(\\?=a\\)' has a lookaround",
    ),
    "a grammar": ({"grammar": "root ::= x"}, ValueError, "grammars \\(EBNF, Lark\\) have no automaton"),
    "a tag": ({"structural_tag": "{}"}, ValueError, "'structural_tag': structural tags"),
    "no text": ({"regex": 3}, TypeError, "regex is 3 of type int"),
    "no schema": ({"json": 3}, TypeError, "json is of type int, expected a schema"),
    "a schema of nothing": ({"json": False}, ValueError, "the schema has false, which nothing satisfies"),
    "no regex": ({"regex": False}, TypeError, "regex is False of type bool"),
    "no JSON": ({"json": "{"}, ValueError, "json is a text that is no JSON"),
    "one text": ({"choice": "abc"}, TypeError, "choice is 'abc', expected a list"),
    "no choice": ({"choice": []}, ValueError, "choice is empty"),
    "a number to choose": ({"choice": ["a", 3]}, TypeError, "choice\\[1\\] is 3"),
    "half a character": ({"choice": ["\ud800"]}, ValueError, "half of a surrogate pair"),
    "half a character in a regex": ({"regex": "\ud800"}, ValueError, "half of a surrogate pair"),
    "a lookbehind": ({"regex": "(?<=a)b"}, ValueError, "regex .* has a lookaround"),
    "a word boundary": ({"regex": "a\\b"}, ValueError, "a word boundary"),
    "an object that is none": ({"json_object": 3}, TypeError, "json_object is 3"),
    "a number that is equal to False": ({"json_object": 0}, TypeError, "json_object is 0, expected True"),
}


@pytest.mark.parametrize("params,error,message", WRONG.values(), ids=WRONG)
def test_what_is_no_structure_is_refused(params, error, message):
    with pytest.raises(error, match=message):
        StructuredOutputsParams(**params)


def test_a_dict_of_other_names_is_refused():
    with pytest.raises(ValueError, match="structured_outputs has 'jsn'; expected one of 'json', 'regex'"):
        StructuredOutputsParams.of({"jsn": {}})
    with pytest.raises(TypeError, match="structured_outputs is of type list"):
        StructuredOutputsParams.of([])
