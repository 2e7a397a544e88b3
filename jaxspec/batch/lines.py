"""The input of a batch: what a line may ask for, and the request that it makes."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.batch import openai
from jaxspec.engine.completion import Completion
from jaxspec.engine.intake import Prompt
from jaxspec.engine.params import SamplingParams

LINE_KEYS = ("id", "prompt", "messages", "tools", "params")
PARAM_NAMES = {field.name for field in dataclasses.fields(SamplingParams)}
RESULT_KEYS = (
    "line",
    "request",
    "index",
    "text",
    "message",
    "token_ids",
    "finish_reason",
    "stop_reason",
    "seed",
    "model",
    "usage",
    "acceptance",
)
RESULT_KEYS += ("logprobs", "prompt_logprobs", "error")


@dataclasses.dataclass
class Line:
    """A line of the input that can be served."""

    number: int  # from 1
    name: str | int  # its id
    params: SamplingParams
    seed: int  # of its first sample; sample i has seed + i
    digest: int  # of what it asks for: see `digest_of_request`
    asked: dict[str, Any]  # its prompt or messages
    template: dict[str, Any]  # what the chat template of messages gets beside them
    extra: dict[str, Any]  # columns that go to its results as they are
    url: str | None = None  # the endpoint that a line in OpenAI's form names; None for plain lines
    prompt: Prompt = ()  # token ids, with the images, sounds and videos of messages that have any; once it is to be served
    samples: dict[int, Completion] = dataclasses.field(default_factory=dict)  # those that are done, of a line in OpenAI's form
    left: int = 0  # samples that have no result yet
    failed: bool = False  # whether one of its samples raised


@dataclasses.dataclass(frozen=True)
class LineReader:
    """Makes lines of the input into requests of a model."""

    llm: Any  # a jaxspec.LLM
    params: SamplingParams  # what a line's own params leave out
    seed: int  # the run's, from which lines without a seed get theirs
    enable_thinking: bool  # for the chat template of messages
    tools: Sequence[Any] | None = None  # functions that the model may call in answers to messages that bring none

    def read(self, number: int, values: Mapping[str, Any]) -> Line:
        """The request of line `number`, without its prompt. Raises ValueError or TypeError if it cannot be served."""
        name, template, extra, url = name_of(number, values), dict[str, Any](enable_thinking=self.enable_thinking), {}, None
        if openai.is_line(values):
            found = openai.read(values)
            name, url, given, tools = found.name, found.url, found.params, found.tools
            asked = {openai.ASKS[url]: found.what}
            options = dict(found.template)
            template["enable_thinking"] = options.pop("enable_thinking", self.enable_thinking)
            if options:
                template["chat_template_kwargs"] = options
        else:
            given, extra = _plain(values)
            asked = {key: values[key] for key in ("prompt", "messages") if values.get(key) is not None}
            tools = self._tools(values, asked)
        if tools:
            template["tools"] = tools
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise TypeError(f"id is {name!r}, expected a text or an integer")
        if len(asked) != 1:
            raise ValueError(f"found {'both prompt and' if asked else 'neither prompt nor'} messages; expected one of them")
        params = dataclasses.replace(self.params, **given)
        seed = derived_seed(self.seed, name) if params.seed is None else params.seed
        return Line(number, name, params, seed, digest_of_request(values), asked, template, extra, url)

    def _tools(self, values: Mapping[str, Any], asked: Mapping[str, Any]) -> Sequence[Any] | None:
        """The functions that the model may call in the answer to a plain line, which may have them as JSON text. Raises ValueError."""
        tools = values.get("tools")
        if tools is None:
            return self.tools
        if "messages" not in asked:
            raise ValueError("found tools without messages, where nothing would read them")
        try:
            return openai.functions(json.loads(tools) if isinstance(tools, str) else tools)
        except json.JSONDecodeError as error:
            raise ValueError(f"tools is {tools!r}, which is no JSON: {error}") from error

    def prompt(self, line: Line, asked: Mapping[str, Any] | None = None) -> Prompt:
        """The prompt of a line. asked: the line's, perhaps with media that are on their way. Raises ValueError or TypeError if
        it cannot be served, and what the chat template raises."""
        asked = line.asked if asked is None else asked
        ids: Any = next(iter(asked.values()))
        if "messages" in asked:
            ids = self.llm.chat_input(ids, **line.template)
        elif isinstance(ids, str):
            ids = self.llm.tokenizer.encode(ids) if ids else []
        self.llm.check(ids, line.params)
        return ids


def _plain(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(params, extra columns) of a line that is not in OpenAI's form. Raises ValueError or TypeError."""
    extra = {key: value for key, value in values.items() if key not in LINE_KEYS}
    for key in extra:
        if key in PARAM_NAMES:
            raise ValueError(f"found {key!r}, which belongs into params")
        if key == "multi_modal_data":
            raise ValueError(f"found {key!r}, which no line has; images, sounds and videos belong into the content of messages")
        near = ["params"] if key == "sampling_params" else difflib.get_close_matches(key, ("params", "messages"), 1, 0.8)
        if near:
            raise ValueError(f"found {key!r}; expected {near[0]!r}, or a name less like it for a column that is passed on")
        if key in RESULT_KEYS:
            raise ValueError(f"found {key!r}, which results have themselves; name the column otherwise, and it is passed on")
    given = values.get("params")
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise TypeError(f"params is {given!r}, expected an object")
    unknown = [key for key in given if key not in PARAM_NAMES]
    if unknown:
        raise ValueError(f"params has {unknown[0]!r}; expected some of {', '.join(sorted(PARAM_NAMES))}")
    return given, extra


def name_of(number: int, values: Any) -> Any:
    """The id of a line, by default its number. It is not checked."""
    if not isinstance(values, Mapping):
        return number
    return values.get("custom_id") if openai.is_line(values) else values.get("id", number)


def derived_seed(seed: int, name: Any) -> int:
    """The seed of a request that names none, from the seed of its job and its id alone, or from what it asks for where it has no id. It has
    53 bits, which any JSON reader keeps."""
    text = f"{seed} {json.dumps(name, sort_keys=True)}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 11


def digest_of_request(values: Mapping[str, Any]) -> int:
    """64 bits, never 0, that tell what a line asks for. Its id and other columns, the order of keys and the spacing do not matter."""
    request = {key: values[key] for key in (("url", "body") if openai.is_line(values) else LINE_KEYS[1:]) if key in values}
    text = json.dumps(request, sort_keys=True, default=repr).encode()  # what is no JSON is refused by who reads it
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") | 1
