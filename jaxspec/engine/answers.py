"""What a model wrote as a message of a conversation: its thoughts, what it says, and the functions that it calls.

transformers parses the text, by the checkpoint's own response template if it has one, else by one of those here.
"""

from __future__ import annotations

import ast
import collections
import contextlib
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.text import OTHER_THOUGHTS, THOUGHTS, IncrementalDetokenizer, Tokenizer

THOUGHT, SAID, CALLS = "reasoning_content", "content", "tool_calls"
OTHER_NAMES = ("thinking", "reasoning")  # of a thought in response templates
CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
LABEL = "thought\n"  # of a channel with thoughts
NO_LABEL = "|".join(f"(?={LABEL[:i]}[^{LABEL[i]}])" for i in range(len(LABEL)))  # known from the first character that is none of it
CHANNEL_END = r"<channel\|>|(?=<\|tool_call>)"  # models forget it before a call
# Where a model says something in several places, these are joined.
SEVERAL = {"repeats": True, "join": "\n"}
# Within the arguments of a call: a text, one in quotes, the name of an argument, and what JSON writes unlike Python.
WRITTEN = re.compile(
    r"""<\|"\|>(?P<text>.*?)<\|"\|>|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|(?<![\w.-])(?P<name>[\w.-]+)\s*[:=]|\b(?P<word>true|false|null)\b""",
    re.DOTALL,
)
WORDS = {"true": "True", "false": "False", "null": "None"}
# The forms of answers, as transformers' utils/chat_parsing wants them. Sources: Gemma 4's chat template; vLLM's parser for Step-3.5
# (vllm/parser/step3p5.py).
CHANNELS = {
    "defaults": {"role": "assistant"},
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        THOUGHT: {"open_pattern": rf"<\|channel>(?:{LABEL}|{NO_LABEL})", "close_pattern": CHANNEL_END, **SEVERAL},
        CALLS: {
            "open_pattern": r"<\|tool_call>call:(?P<name>[^({<]+)",
            "close": ["<tool_call|>", "<turn|>"],
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']], "allow_non_json": True},
            "transform": CALL,
        },
        SAID: SEVERAL,
    },
}
TAGS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        THOUGHT: {"open": "<think>", "close_pattern": r"</think>|(?=<tool_call>)", **SEVERAL},
        CALLS: {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"(?:</function>\s*)?</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
            "transform": CALL,
        },
        SAID: SEVERAL,
    },
}
TEXT = {"defaults": {"role": "assistant"}, "start_anchor": "\0", "fields": {SAID: {}}}
# Tokens by which a vocabulary is known, the form of its answers, and the special tokens in it, which `Completion.text` leaves out.
FORMS = (
    (THOUGHTS, CHANNELS, {*THOUGHTS, "<|tool_call>", "<tool_call|>", '<|"|>'}),
    (OTHER_THOUGHTS, TAGS, set[str]()),
    ((), TEXT, set[str]()),
)


def message_of(tokenizer: Tokenizer, prompt: str, ids: Sequence[int], text: str, tools: Any) -> dict[str, Any]:
    """An answer as a message.

    prompt: what the chat template made of the conversation. ids, text: the answer's tokens and its text. tools: the functions that the
    model may call, or None.
    """
    try:
        reading = _Reading(tokenizer, prompt, tools)
        reading.feed(ids, text)
        found = reading.end()[0]
        said, thought, calls = (found.get(name) or "" for name in (SAID, THOUGHT, CALLS))
        message = {"role": "assistant", SAID: text if said == text.strip() else said.strip()}
        if thought.strip():
            message[THOUGHT] = thought.strip()
        if calls:
            message[CALLS] = [{"id": _call_id(prompt, ids, i), **_with_arguments(call)} for i, call in enumerate(calls)]
        return message
    except Exception:  # of a response template, which is the checkpoint's, or of a text that it cannot take
        return {"role": "assistant", SAID: text}


class Deltas:
    """The parts of an answer as they come."""

    def __init__(self, tokenizer: Tokenizer, prompt: str):
        """prompt: what the chat template made of the conversation."""
        self._reading: Any = None  # then all is content
        with contextlib.suppress(Exception):  # as above
            self._reading = _Reading(tokenizer, prompt, None)

    def push(self, ids: Sequence[int], piece: str, last: bool) -> dict[str, str]:
        """Takes the next ids, and text that is certain. Returns what is new of "reasoning_content" and of "content", if anything is."""
        found = dict[str, str]()
        try:
            for name, new in [*self._reading.feed(ids, piece), *(self._reading.end()[1] if last else ())]:
                found[name] = found.get(name, "") + new
        except Exception:
            self._reading = None
            found = {SAID: piece}
        return {name: new for name, new in found.items() if new}


class _Reading:
    """An answer while it is parsed."""

    def __init__(self, tokenizer: Tokenizer, prompt: str, tools: Any):
        own = getattr(tokenizer.transformers, "response_template", None)
        form, self._marks = next((form, marks) for known, form, marks in FORMS if tokenizer.has_tokens(known))
        if own is not None:
            form, self._marks = own, None  # it may be about any
        anchors = form.get("start_anchor", ())
        begins = max((prompt.rfind(anchor) for anchor in ([anchors] if isinstance(anchors, str) else anchors)), default=0)
        # A prompt without the opening of a model's turn, such as a plain text, is not the beginning of an answer.
        prefix, tools = "" if begins < 0 else prompt[begins:], list(tools) if isinstance(tools, list | tuple) else None
        self._parser = tokenizer.transformers.get_response_parser(form, prefix=prefix, tools=tools)
        self._tokenizer, self._pieces = tokenizer, IncrementalDetokenizer(tokenizer)
        self._known, self._told = 0, 0  # characters of the text that the tokens make, and of that which was parsed
        self._waiting = collections.deque[tuple[int, str]]()  # special tokens that were not parsed, and where in the text they stand

    def feed(self, ids: Sequence[int], piece: str) -> list[tuple[str, str]]:
        """Takes the next ids, and text that is certain. Returns new pieces of what is no call, each with the name of its part."""
        run = list[int]()  # tokens of text up to the next mark
        for i in ids:
            if self._tokenizer.has_text(i):
                run.append(i)
            elif (mark := self._tokenizer.token_text(i)) and (self._marks is None or mark in self._marks):
                self._known += len(self._pieces.push(run))
                run = []
                before = self._waiting[-1][0] if self._waiting else self._told
                self._waiting.append((max(self._known + len(self._pieces.held), before), mark))  # bytes may be no character any more
        self._known += len(self._pieces.push(run))
        made, end = list[str](), self._told + len(piece)
        while self._waiting and self._waiting[0][0] <= end:
            at, mark = self._waiting.popleft()
            made += [piece[: at - self._told], mark]
            piece, self._told = piece[at - self._told :], at
        self._told = end
        return self._new(self._parser.feed("".join([*made, piece])))

    def end(self) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        """(the parts of the answer, the last pieces), once all of it was fed."""
        found, events = self._parser.finalize()
        return {_name(field): self._plain(part) if isinstance(part, str) else part for field, part in found.items()}, self._new(events)

    def _new(self, events: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        pieces = (event for event in events if event["type"] == "region_chunk" and not event["dirty"])
        return [(_name(event["field"]), self._plain(event["text"])) for event in pieces]

    def _plain(self, text: str) -> str:
        """Without marks that mean nothing where they stand."""
        for mark in self._marks or ():
            text = text.replace(mark, "")
        return text


def _name(field: str) -> str:
    return THOUGHT if field in OTHER_NAMES else field


def _with_arguments(call: Any) -> Any:
    """A call whose arguments are a dict, if there are none too. Those that are none in the model's notation stay a text."""
    function = call["function"]
    given = function["arguments"]
    return {**call, "function": {**function, "arguments": arguments_of(given) if isinstance(given, str) else given}}


def arguments_of(text: str) -> Any:
    """Arguments that are not written as they should be, which models do: names in quotes or before "=", texts in the quotes of Python or
    JSON, None. What cannot be read stays a text."""

    def in_python(found: re.Match[str]) -> str:
        if found["name"] is not None:
            return f"{found['name']!r}:"
        if found["word"] is not None:
            return WORDS[found["word"]]
        return repr(_quoted(found[0]) if found["text"] is None else found["text"])

    try:
        read = ast.literal_eval(WRITTEN.sub(in_python, text.strip() or "{}"))
        json.dumps(read)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text
    return read if isinstance(read, dict) else text


def _quoted(written: str) -> str:
    """What stands in quotes, of JSON or of Python, with the escapes of JSON. If it has others, as a regular expression does, all stay."""
    inner = written[1:-1]
    if written[0] == "'":
        inner = re.sub(r'\\.|"', lambda found: {r"\'": "'", '"': r"\""}.get(found[0], found[0]), inner, flags=re.DOTALL)
    try:
        return json.loads(f'"{inner}"', strict=False)
    except ValueError:
        return written[1:-1]


def parts_of(text: str) -> dict[str, Any]:
    """The parts of an answer in channels, as a text with its marks."""
    from transformers.utils.chat_parsing import parse_response

    found = parse_response(text, CHANNELS, prefix="")
    return found | {CALLS: [_with_arguments(call) for call in found.get(CALLS, [])]}


def _call_id(prompt: str, ids: Sequence[int], i: int) -> str:
    """An id that no other call has."""
    return "call_" + hashlib.blake2b(f"{prompt} {list(ids)} {i}".encode(errors="surrogatepass"), digest_size=12).hexdigest()
