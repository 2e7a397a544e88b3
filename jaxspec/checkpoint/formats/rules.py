"""Which modules a rule of a quantised checkpoint's config means: names, patterns and classes."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

# Rules are matched as if a module's name began with each of these. Tools write the same modules' names with either.
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
EXPERT = re.compile(r"(?P<all>.*\bexperts)\.(?P<index>\d+)\.(?P<name>gate|up|down)_proj")
EXPERTS = ("Gemma4TextExperts",)  # transformers' class of all experts of a layer


def names_of(name: str) -> list[str]:
    """The names under which rules may mean a module: with each prefix, and an expert's matrix also in the other ways of writing it, as
    the tensor of all experts and as their module."""
    name = next(name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix))
    names, expert = [name], EXPERT.fullmatch(name)
    if expert:
        everyone, index, matrix = expert.group("all", "index", "name")
        fused = "down_proj" if matrix == "down" else "gate_up_proj"
        names += [f"{everyone}.{matrix}_proj.{index}", f"{everyone}.{fused}", everyone]
    return [prefix + one for one in names for prefix in PREFIXES]


def names_in(config: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    """The names in the first of these fields of a config that has any. Raises ValueError for what is no list of texts."""
    field = next((field for field in fields if config.get(field)), None)
    if field is None:
        return ()
    names = config[field]
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{field} of the quantization_config is {names!r}; expected a list of names")
    return tuple(names)


@dataclasses.dataclass(frozen=True)
class Rules:
    """Rules as compressed-tensors has them (`compressed_tensors/utils/match.py`): a whole name, a regular expression after "re:" that
    is matched from the start, or the name of a module's class. With `wildcards` also as ModelOpt has them: "*" stands for anything, and
    the name of a module for all below it."""

    rules: tuple[str, ...]
    wildcards: bool = False

    def __post_init__(self) -> None:
        _ = self._parsed  # raises for a broken pattern

    def match(self, name: str, classes: Iterable[str] = ()) -> str | None:
        """The rule that means a module, or None: of several a name goes before a pattern, and that before a class. classes: of the
        module. A pattern that says what a name is not knows the module by the released models' prefix alone, since it would mean any
        module by another."""
        names = names_of(name)
        released = [one for one in names if one.startswith(PREFIXES[0])]
        exact, patterns = self._parsed
        found = next((one for one in names if one in exact), None)
        meant = (rule for rule, pattern in patterns if any(map(pattern.match, released if "(?!" in rule else names)))
        found = found or next(meant, None)
        return found or next((one for one in classes if one in exact), None)

    @functools.cached_property
    def _parsed(self) -> tuple[frozenset[str], list[tuple[str, re.Pattern[str]]]]:
        patterns = []
        for rule in sorted(self.rules):
            if rule.startswith("re:"):
                try:
                    patterns.append((rule, re.compile(rule.removeprefix("re:"))))
                except re.error as error:
                    raise ValueError(f"the rule {rule!r} is no regular expression: {error}") from error
            elif self.wildcards:
                patterns.append((rule, re.compile(re.escape(rule).replace(r"\*", ".*") + r"(\.|$)")))
        return frozenset(self.rules), patterns


def classes_of(name: str, fused_float_experts: bool) -> tuple[str, ...]:
    """The classes of a matrix's module, as rules name them. fused_float_experts: whether the file holds the experts as one float tensor,
    which is then the parameter of a module of its own and no Linear."""
    if EXPERT.fullmatch(name) and fused_float_experts:
        return EXPERTS
    return ("Linear", *EXPERTS) if EXPERT.fullmatch(name) else ("Linear",)
