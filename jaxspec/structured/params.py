"""StructuredOutputsParams: what a request's text must look like, with vLLM's names."""

from __future__ import annotations

import dataclasses
import functools
import json as jsonlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.checks import characters
from jaxspec.structured import patterns, schema

KINDS = ("json", "regex", "choice", "json_object")
REFUSED = {"grammar": "grammars (EBNF, Lark)", "structural_tag": "structural tags"}


@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """What a text must look like: exactly one of json, regex, choice and json_object. Checked when the object is made.

    Raises TypeError for a wrong type, and ValueError, naming the feature and its place, for what has no regular form."""

    json: Any = None
    """A JSON schema: a dict, its text, or a pydantic model class."""
    regex: str | None = None
    """A regular expression that the whole text matches, in the dialect of Rust's `regex`; without lookaround, references and word
    boundaries."""
    choice: Sequence[str] | None = None
    """The texts to choose from."""
    json_object: bool | None = None
    """True for any JSON object that is at most four levels deep."""
    disable_any_whitespace: bool = False
    """Whether JSON has no space between its parts; else it has one or none."""
    whitespace_pattern: str | None = None
    """A regular expression of what may stand between the parts of JSON instead."""
    disable_additional_properties: bool = False
    """Whether an object with `properties`, though it lists none, has no others. Of one that lists some this is always so."""
    grammar: str | None = None
    """Refused: a grammar has no automaton."""
    structural_tag: str | None = None
    """Refused."""

    def __post_init__(self) -> None:
        for name, what in REFUSED.items():
            if getattr(self, name) is not None:
                raise ValueError(f"structured_outputs has {name!r}: {what} have no automaton; expected one of {_listed(KINDS)}")
        if len(self._given) != 1:
            found = _listed(self._given) if self._given else "none of them"
            raise ValueError(f"structured_outputs has {found}; expected exactly one of {_listed(KINDS)}")
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise TypeError(f"json_object is {self.json_object!r}, expected True")
        for name in ("regex", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} is {value!r} of type {type(value).__name__}, expected a str")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts(self.choice))
        self.expression  # noqa: B018, raises what is wrong with it

    @classmethod
    def of(cls, given: Any) -> StructuredOutputsParams:
        """What `SamplingParams` takes: an object of this class, or a dict of its fields. Raises TypeError or ValueError."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"structured_outputs is of type {type(given).__name__}, expected StructuredOutputsParams or a dict")
        names = [field.name for field in dataclasses.fields(cls)]
        other = next((name for name in given if name not in names), None)
        if other is not None:
            raise ValueError(f"structured_outputs has {other!r}; expected one of {_listed(KINDS)}")
        return cls(**given)

    @functools.cached_property
    def expression(self) -> str:
        """The regular expression that says the same."""
        space = "" if self.disable_any_whitespace else schema.WHITESPACE
        if self.whitespace_pattern is not None and space:
            space = patterns.whole(self.whitespace_pattern, functools.partial(_refused, "whitespace_pattern", self.whitespace_pattern))
        if self.json is not None:
            return _expression_of(self.json, space, self.disable_additional_properties)
        if self.json_object:
            return schema.any_object(space)
        if self.choice is not None:
            return "|".join(map(patterns.literal, self.choice))
        assert self.regex is not None
        return patterns.whole(self.regex, functools.partial(_refused, "regex", self.regex))

    @property
    def _given(self) -> list[str]:
        """The names of KINDS that are asked for. json_object=False asks for nothing; json=False is a schema, which allows no value."""
        return [name for name in KINDS if getattr(self, name) is not None and not (name == "json_object" and self.json_object is False)]

    @property
    def label(self) -> str:
        """A short name of it, for messages and statistics."""
        name = self._given[0]
        value = getattr(self, name)
        text = f"{name} {value if isinstance(value, str) else jsonlib.dumps(value, ensure_ascii=False)}" if value is not True else name
        return text if len(text) <= 80 else text[:77] + "..."


@functools.lru_cache(maxsize=256)
def _expression_of(text: str, space: str, closed: bool) -> str:
    return schema.regex_of(jsonlib.loads(text), space, closed)


def _refused(name: str, expression: str, what: str) -> Any:
    raise ValueError(f"{name} {expression!r} has {what}")


def _schema_text(given: Any) -> str:
    """A schema as JSON."""
    made = getattr(given, "model_json_schema", None)
    if made is not None:
        given = made()
    if isinstance(given, str):
        try:
            given = jsonlib.loads(given)
        except jsonlib.JSONDecodeError as error:
            raise ValueError(f"json is a text that is no JSON: {error}") from error
    if not isinstance(given, Mapping | bool):
        raise TypeError(f"json is of type {type(given).__name__}, expected a schema (a dict or its text) or a pydantic model class")
    try:
        return jsonlib.dumps(given)
    except (TypeError, ValueError) as error:
        raise TypeError(f"json is a schema that JSON cannot hold: {error}") from error


def _texts(given: Any) -> tuple[str, ...]:
    if isinstance(given, str) or not hasattr(given, "__iter__"):
        raise TypeError(f"choice is {given!r}, expected a list of texts")
    listed = tuple(given)
    if not listed:
        raise ValueError("choice is empty; expected at least one text")
    for i, text in enumerate(listed):
        if not isinstance(text, str):
            raise TypeError(f"choice[{i}] is {text!r} of type {type(text).__name__}, expected a str")
        characters(f"choice[{i}]", text)
    return listed


def _listed(names: Any) -> str:
    return ", ".join(map(repr, names))
