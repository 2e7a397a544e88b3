"""OpenAI's form of batch files: a line asks for a chat completion or a completion, and its result is the response of that endpoint.

Source: the guide to the Batch API and the reference of /v1/chat/completions and /v1/completions, platform.openai.com/docs. Fields that
vLLM adds to the body, such as top_k, are read too.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxspec.checks import among
from jaxspec.engine.answers import CALLS
from jaxspec.engine.completion import Completion, Logprob
from jaxspec.engine.params import SamplingParams

if TYPE_CHECKING:
    from jaxspec.text import Tokenizer

LINE_KEYS = ("custom_id", "method", "url", "body")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ASKS = {CHAT: "messages", COMPLETIONS: "prompt"}  # what the body of each has
# Fields that only label a request, or say how OpenAI's servers treat it.
LABELS = ("model", "user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "stream_options")
# Fields that are known, the values that ask for nothing, and why others are refused.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((False,), "a batch has no streams"),
    "tool_choice": (("none", "auto"), "the model chooses whether it calls a function"),
    "functions": (([],), "their name is tools now"),
    "function_call": (("none", "auto"), "its name is tool_choice now"),
    "modalities": ((["text"],), "only text is answered"),
    "audio": ((), "only text is answered"),
    "prediction": ((), "the drafter guesses"),
    "reasoning_effort": ((), "thinking is on or off: chat_template_kwargs with enable_thinking"),
    "verbosity": ((), "the model has no such setting"),
    "web_search_options": ((), "nothing is searched"),
    "echo": ((False,), "--include-prompt puts prompts into the results"),
    "suffix": ((), "the model continues a text and fills no gaps"),
    "best_of": ((1,), "each sample is one of the results"),
}
PARAM_NAMES = tuple(field.name for field in dataclasses.fields(SamplingParams))


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a line of OpenAI's asks for, in the names used here."""

    name: str
    url: str
    what: Any  # messages or a prompt
    params: dict[str, Any]
    template: dict[str, Any]  # for the chat template
    tools: Sequence[Any]  # functions that the model may call


def is_line(values: Mapping[str, Any]) -> bool:
    """Whether a line of the input has this form."""
    return "custom_id" in values or "body" in values


def read(values: Mapping[str, Any]) -> Asked:
    """What a line asks for. Raises ValueError or TypeError, with the name of the field, for what cannot be served."""
    unknown = [key for key in values if key not in LINE_KEYS]
    if unknown:
        raise ValueError(f"found {unknown[0]!r} in a line with custom_id and body; expected {', '.join(LINE_KEYS)}")
    name, url, body = values.get("custom_id"), values.get("url"), values.get("body")
    if not isinstance(name, str):
        raise TypeError(f"custom_id is {name!r}, expected a text")
    if values.get("method") != "POST":
        raise ValueError(f"method is {values.get('method')!r}, expected 'POST'")
    if not isinstance(url, str) or url not in ASKS:
        raise ValueError(f"url is {url!r}, expected {CHAT!r} or {COMPLETIONS!r}")
    if not isinstance(body, Mapping):
        raise TypeError(f"body is {body!r}, expected an object")
    key, given = ASKS[url], {name: value for name, value in body.items() if value is not None}
    tools, several = given.pop("tools", []), given.pop("parallel_tool_calls", True)
    if tools and several is not True:
        raise ValueError(f"body has parallel_tool_calls {several!r}, which cannot be served: the model chooses how many functions it calls")
    if tools and url != CHAT:
        raise ValueError(f"body has tools, which {url} does not know")
    what, template, params = given.pop(key, None), given.pop("chat_template_kwargs", {}), dict[str, Any]()
    if what is None:
        raise ValueError(f"body has no {key}, which {url} needs")
    if url == COMPLETIONS and isinstance(what, list) and what and not all(isinstance(i, int) for i in what):
        raise ValueError("prompt of body is a list of prompts; expected one, as each line has one result")
    if not isinstance(template, dict) or (template and url != CHAT):
        raise ValueError("chat_template_kwargs of body is not an object, or not beside messages")
    if "max_tokens" in given and "max_completion_tokens" in given:
        raise ValueError("body has max_tokens and max_completion_tokens; expected one of them")
    if "response_format" in given:
        params |= _structure(given.pop("response_format"))
    for field, value in given.items():
        if field in REFUSED:
            nothing, reason = REFUSED[field]
            if not among(value, nothing):
                raise ValueError(f"body has {field} {value!r}, which cannot be served: {reason}")
        elif field == "max_completion_tokens" and url == CHAT:
            params["max_tokens"] = value
        elif field in ("logprobs", "top_logprobs") and url == CHAT:
            continue
        elif field in PARAM_NAMES:
            params[field] = value
        elif field not in LABELS:
            raise ValueError(f"body has {field!r}, which is not known; known are {', '.join(_known(url))}")
    if url == CHAT and (given.get("logprobs") or given.get("top_logprobs")):
        if given.get("logprobs") is not True:
            raise ValueError(f"body has top_logprobs {given.get('top_logprobs')!r} and logprobs {given.get('logprobs')!r}; expected True")
        params["logprobs"] = given.get("top_logprobs", 0)
    return Asked(name, url, what, params, template, [] if given.get("tool_choice") == "none" else functions(tools))


def functions(tools: Any) -> Sequence[Any]:
    """The functions that a model may call. Raises ValueError for tools that are none."""
    several = isinstance(tools, list | tuple)
    for tool in tools if several else [tools]:
        if not several or not isinstance(tool, Mapping) or not isinstance(tool.get("function"), Mapping):
            raise ValueError(f"tools has {tool!r}; expected a list of {{'type': 'function', 'function': {{...}}}}")
    return tools


def _structure(asked: Any) -> dict[str, Any]:
    """What a body's response_format is as params. Raises ValueError for a format that is none."""
    kind = asked.get("type") if isinstance(asked, Mapping) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"structured_outputs": {"json_object": True}}
    schema = asked.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, Mapping) or "schema" not in schema:
        raise ValueError(
            f"response_format of body is {asked!r}; expected type text, json_object, or json_schema with a json_schema that has a schema"
        )
    return {"structured_outputs": {"json": schema["schema"]}}


def _known(url: str) -> list[str]:
    own = ["max_completion_tokens", "top_logprobs", "chat_template_kwargs", "tools", "parallel_tool_calls"] if url == CHAT else []
    return sorted({*own, ASKS[url], "response_format", *LABELS, *PARAM_NAMES})


def record_id(number: int, digest: int) -> str:
    """The id of a result. It holds the line's number and a digest of its request, by which a run resumes."""
    return f"batch_req_{number}_{digest:016x}"


def place_of(record: Mapping[str, Any]) -> tuple[int, str] | None:
    """(line, digest of the request) of a result, or None if it is not one of ours."""
    found = re.fullmatch(r"batch_req_(\d+)_([0-9a-f]{16})", str(record.get("id")))
    return None if found is None else (int(found[1]), found[2])


def record(
    number: int, digest: int, url: str, name: str, samples: Sequence[Completion], model: str, logprobs: int, tokenizer: Tokenizer
) -> dict[str, Any]:
    """The line of results for a request: the response of its endpoint with all its samples. logprobs: how many most likely tokens were
    asked for; -1 for all. tokenizer: the model's."""
    failed = next((done.error for done in samples if done.finish_reason == "error"), None)
    head = {"id": record_id(number, digest), "custom_id": name}
    if failed is not None:
        return {**head, "response": None, "error": {"code": "request_failed", "message": failed}}
    chat, key = url == CHAT, f"{digest:016x}"
    new, old = sum(len(done.token_ids) for done in samples), len(samples[0].prompt_token_ids)
    body = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{number}-{key}",
        "object": "chat.completion" if chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(i, done, chat, logprobs, tokenizer) for i, done in enumerate(samples)],
        "usage": {"prompt_tokens": old, "completion_tokens": new, "total_tokens": old + new},
    }
    return {**head, "response": {"status_code": 200, "request_id": f"req_{number}_{key}", "body": body}, "error": None}


def refusal(number: int, name: Any, reason: str) -> dict[str, Any]:
    """The line of the errors file for a line that cannot be served."""
    error = {"code": "invalid_request", "message": reason}
    return {"line": number, "id": f"batch_req_{number}", "custom_id": name, "response": None, "error": error}


def _choice(index: int, done: Completion, chat: bool, logprobs: int, tokenizer: Tokenizer) -> dict[str, Any]:
    said, reason = {"message": _message(done)} if chat else {"text": done.text}, done.finish_reason
    if chat and reason == "stop" and CALLS in said["message"]:
        reason = CALLS
    found = None
    if done.logprobs is not None:
        rows = [_listed(row, token, logprobs, tokenizer) for row, token in zip(done.logprobs, done.token_ids, strict=True)]
        found = _chat_logprobs(rows) if chat else _text_logprobs(rows)
    return {"index": index, **said, "logprobs": found, "finish_reason": reason}


def _message(done: Completion) -> dict[str, Any]:
    """The message of a completion, in which arguments of calls are JSON texts."""
    message = {**done.message, "refusal": None}
    if CALLS in message:
        message["content"] = message["content"] or None
        message[CALLS] = [{**call, "function": _as_json(call["function"])} for call in message[CALLS]]
    return message


def _as_json(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return {**function, "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)}


@dataclasses.dataclass(frozen=True)
class _Token:
    bytes: bytes
    logprob: float
    in_text: bool = True  # texts leave special tokens out

    @property
    def name(self) -> str:
        """Its text; in OpenAI's words, "bytes:" and these if it is only a part of a character."""
        try:
            return self.bytes.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.bytes)


Row = tuple[_Token, list[_Token]]  # of a new token: itself, and the most likely ones


def _listed(row: Mapping[int, Logprob], chosen: int, count: int, tokenizer: Tokenizer) -> Row:
    """A row of log-probabilities, of which the most likely `count` were asked for, or all if that is negative. It has the chosen token
    beside them."""
    ranked = sorted(row.items(), key=lambda item: item[1].rank)
    most = [_Token(tokenizer.token_bytes(token), found.logprob) for token, found in (ranked if count < 0 else ranked[:count])]
    return _Token(tokenizer.token_bytes(chosen), row[chosen].logprob, tokenizer.has_text(chosen)), most


def _chat_logprobs(rows: Sequence[Row]) -> dict[str, Any]:
    def shown(token: _Token) -> dict[str, Any]:
        return {"token": token.name, "logprob": token.logprob, "bytes": list(token.bytes)}

    return {"content": [shown(own) | {"top_logprobs": [shown(other) for other in most]} for own, most in rows], "refusal": None}


def _text_logprobs(rows: Sequence[Row]) -> dict[str, Any]:
    decoder, offsets = codecs.getincrementaldecoder("utf-8")("replace"), [0]
    for own, _ in rows:  # a character begins where its first token does
        offsets.append(offsets[-1] + len(decoder.decode(own.bytes if own.in_text else b"")))
    most = [dict[str, float]() for _ in rows]
    for named, (_, others) in zip(most, rows, strict=True):
        for token in others:
            named.setdefault(token.name, token.logprob)  # of equal names the most likely one's
    own = [own for own, _ in rows]
    return {
        "tokens": [token.name for token in own],
        "token_logprobs": [token.logprob for token in own],
        "top_logprobs": most,
        "text_offset": offsets[:-1],
    }
