"""The input of a batch: what a line may ask for, and the request that it makes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from jaxspec.engine.params import SamplingParams

LINE_KEYS = ("id", "prompt", "messages", "params")
PARAM_NAMES = {field.name for field in dataclasses.fields(SamplingParams)}


@dataclasses.dataclass
class Line:
    """A line of the input that can be served."""

    number: int  # from 1
    name: str | int  # its id
    prompt: list[int]  # token ids
    params: SamplingParams
    seed: int  # of its first sample; sample i has seed + i
    digest: int  # of what it asks for: see `_digest`
    left: int = 0  # samples that have no result yet
    failed: bool = False  # whether one of its samples raised


@dataclasses.dataclass(frozen=True)
class LineReader:
    """Makes lines of the input into requests of a model."""

    llm: Any  # a jaxspec.LLM
    params: SamplingParams  # what a line's own params leave out
    seed: int  # the run's, from which lines without a seed get theirs
    enable_thinking: bool  # for the chat template of messages

    def read(self, number: int, values: Mapping[str, Any]) -> Line:
        """The request of line `number`. Raises ValueError or TypeError if it cannot be served, and what the chat template raises."""
        unknown = [key for key in values if key not in LINE_KEYS]
        if unknown:
            within = " (it belongs into params)" if unknown[0] in PARAM_NAMES else ""
            raise ValueError(f"found {unknown[0]!r}{within}; expected {', '.join(LINE_KEYS)}")
        name, messages = values.get("id", number), values.get("messages")
        prompt = values.get("prompt")
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise TypeError(f"id is {name!r}, expected a text or an integer")
        if (prompt is None) == (messages is None):
            raise ValueError(f"found {'neither prompt nor' if prompt is None else 'both prompt and'} messages; expected one of them")
        given = values.get("params") or {}
        if not isinstance(given, dict):
            raise TypeError(f"params is {given!r}, expected an object")
        unknown = [key for key in given if key not in PARAM_NAMES]
        if unknown:
            raise ValueError(f"params has {unknown[0]!r}; expected some of {', '.join(sorted(PARAM_NAMES))}")
        params = dataclasses.replace(self.params, **given)
        ids: Any = prompt
        if messages is not None:
            ids = self.llm.chat_prompt(messages, enable_thinking=self.enable_thinking)
        elif isinstance(prompt, str) and prompt:
            ids = self.llm.tokenizer.encode(prompt)
        self.llm.check(ids, params)
        seed = derived_seed(self.seed, number) if params.seed is None else params.seed
        return Line(number, name, ids, params, seed, _digest({key: values[key] for key in values if key != "id"}))


def derived_seed(seed: int, number: int) -> int:
    """The seed of a line that names none, from the run's seed and the line's number alone. It has 53 bits, which any JSON reader keeps."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest(), "little") >> 11


def _digest(request: Mapping[str, Any]) -> int:
    """64 bits, never 0, that tell requests apart. The order of keys and the spacing of the line do not matter."""
    text = json.dumps(request, sort_keys=True).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1
