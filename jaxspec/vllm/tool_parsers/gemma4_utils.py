"""Where vLLM has functions that find the tool calls in a text of Gemma 4. `Completion.message` needs none of them."""

from __future__ import annotations

import re
from typing import Any

from jaxspec.engine.answers import CALLS, arguments_of, parts_of

BARE = re.compile(r"(?:<call>|(?:^|(?<=\s))call:)([\w.-]+)(\{.*?\})", re.DOTALL)  # without the special tokens


def parse_tool_calls(text: str, *, strict: bool = False) -> list[dict[str, Any]]:
    """The calls in a text that was decoded with its special tokens: dicts with "name" and "arguments", which are a dict, or the text
    that the model wrote if that is none. strict: do not look for calls without special tokens where there are none with them."""
    found = [call["function"] for call in parts_of(text)[CALLS]]
    if found or strict:
        return found
    return [{"name": call[1], "arguments": arguments_of(call[2])} for call in BARE.finditer(text)]


def has_tool_response_tag(text: str) -> bool:
    """Whether a text ends where the result of a call is to come."""
    return text.rstrip().endswith("<|tool_response>")
