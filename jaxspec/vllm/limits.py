"""How many images, sounds and videos a prompt may have: vLLM's limit_mm_per_prompt."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.checks import integer
from jaxspec.engine.inserts import NOUNS, PARTS, are_several

MOST = 999  # vLLM's default of a kind that has a limit without a count


def limits_of(given: Any) -> dict[str, int]:
    """By kind, what `limit_mm_per_prompt` allows; a kind that it does not name is left out. Raises TypeError or ValueError."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"limit_mm_per_prompt is {given!r}, expected a dict")
    counts = {kind: given[kind] for kind in NOUNS if kind in given}
    counts = {kind: count.get("count", MOST) if isinstance(count, Mapping) else count for kind, count in counts.items()}
    return {kind: integer(f"limit_mm_per_prompt[{kind!r}]", count, 0) for kind, count in counts.items()}


def check_prompts(prompts: Iterable[Any], limits: Mapping[str, int]) -> None:
    """Raises ValueError for a prompt that has more than so many of a kind."""
    for i, prompt in enumerate(prompts):
        media = prompt.get("multi_modal_data") if isinstance(prompt, Mapping) else None
        found = media if isinstance(media, Mapping) else {}
        for kind in limits.keys() & found.keys():
            _check(f"prompt {i}", kind, len(found[kind]) if are_several(found[kind], kind) else 1, limits)


def check_conversations(conversations: Iterable[Any], limits: Mapping[str, int]) -> None:
    """The same for the messages of each conversation together. What is no conversation is left to be refused by its name."""
    for i, messages in enumerate(conversations):
        parts = [part for message in _mappings(messages) for part in _mappings(message.get("content"))]
        kinds = [PARTS[part["type"]][0] for part in parts if isinstance(part.get("type"), str) and part["type"] in PARTS]
        for kind in limits:
            _check(f"conversation {i}", kind, kinds.count(kind), limits)


def _mappings(given: Any) -> list[Mapping[str, Any]]:
    return [each for each in given if isinstance(each, Mapping)] if isinstance(given, list | tuple) else []


def _check(whose: str, kind: str, found: int, limits: Mapping[str, int]) -> None:
    if 0 < limits[kind] < found:  # what may have none at all is refused where it is read
        raise ValueError(f"{whose} has {found} {NOUNS[kind]}s; expected at most {limits[kind]}, as limit_mm_per_prompt says")
