"""What comes back: Completion, and the pieces of a stream."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Generator
from typing import Any

from jaxspec.engine.answers import Deltas, message_of
from jaxspec.engine.html import completion_html
from jaxspec.engine.stats import RoundStats
from jaxspec.text import Tokenizer

SHOWN = ("steps", "accepted", "acceptance_length", "acceptance_rates")  # properties of stats that `Completion.to_dict` shows


@dataclasses.dataclass(frozen=True)
class Logprob:
    """A token's log-probability."""

    logprob: float
    """The model's own, before temperature, filters, penalties and biases."""
    rank: int
    """Among all tokens; 1 is the most likely."""
    decoded_token: str
    """The token's text."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was generated from one prompt."""

    text: str
    """Without the stop token, the stop string and special tokens."""
    token_ids: list[int]
    """The new tokens, the stop token included."""
    finish_reason: str
    """"stop" (a stop token or stop string came), "length" (max_tokens or max_len was reached) or "error" (this request alone failed, and
    has what it had by then)."""
    stop_reason: int | str | None
    """The stop string; or the stop token, if it was one of stop_token_ids; None if it was the checkpoint's own end token."""
    prompt_token_ids: list[int]
    """The prompt's tokens."""
    seed: int
    """The seed that was used."""
    stats: RoundStats
    """The rounds that it took."""
    index: int = 0
    """Which of the prompt's n samples it is."""
    prompt_index: int = dataclasses.field(default=0, compare=False)
    """Which of the call's prompts it belongs to."""
    num_cached_tokens: int = dataclasses.field(default=0, compare=False)
    """Prompt tokens that had been computed for another request."""
    prompt: str | None = dataclasses.field(default=None, compare=False)
    """The prompt's text, of a conversation what the chat template made of it; None where token ids were given."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each new token a dict from token id to Logprob, of the token itself and of the most likely tokens; None unless asked for."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """The same for the prompt's tokens, of which the first has None."""
    error: str | None = None
    """What failed; None unless finish_reason is "error"."""
    # These two are no fields: == and asdict ignore them, and a pickled copy goes without.
    tokenizer: dataclasses.InitVar[Tokenizer | None] = None
    tools: dataclasses.InitVar[Any] = None

    def __post_init__(self, tokenizer: Tokenizer | None, tools: Any) -> None:
        object.__setattr__(self, "tokenizer", tokenizer)  # by these names dataclasses.replace finds them
        object.__setattr__(self, "tools", tools)

    @functools.cached_property
    def message(self) -> dict[str, Any]:
        """It as the next message of the conversation, `messages.append(answer.message)`: "role" and "content", and if there are any,
        "reasoning_content", the model's thoughts, and "tool_calls", each with "id" and "function", a dict with "name" and "arguments".

        Arguments are a dict; where the model wrote none, the text that it wrote. Chat templates leave thoughts out of later turns. Where
        the prompt ends within the model's turn, as with continue_final_message, the message has what the prompt has of it, too.
        """
        tokenizer = self.__dict__["tokenizer"]
        if tokenizer is None:
            return {"role": "assistant", "content": self.text}
        prompt = tokenizer.decode(self.prompt_token_ids, special=True) if self.prompt is None else self.prompt
        return message_of(tokenizer, prompt, self.token_ids, self.text, self.__dict__["tools"])

    def __repr__(self) -> str:
        return (
            f"Completion(text={self.text!r}, tokens={len(self.token_ids)}, finish_reason={self.finish_reason!r}, "
            f"prompt_tokens={len(self.prompt_token_ids)}, seed={self.seed}, "
            f"acceptance_length={self.stats.acceptance_length:.2f}{'' if self.error is None else f', error={self.error!r}'})"
        )

    def to_dict(self) -> dict[str, Any]:
        """All of it as dicts, lists, texts and numbers, which JSON can hold. The stats have the properties of RoundStats too."""
        stats = dataclasses.asdict(self.stats)
        return dataclasses.asdict(self) | {"stats": stats | {name: getattr(self.stats, name) for name in SHOWN}}

    def _repr_html_(self) -> str:
        return completion_html(self, self.__dict__["tokenizer"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "message": self.message, "tokenizer": None, "tools": None}


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a stream."""

    text: str
    """What is new; text that may still change is held back."""
    token_ids: list[int]
    """The tokens that are new."""
    finish_reason: str | None = None
    """As of the Completion in the last chunk, None before it."""
    completion: Completion | None = dataclasses.field(default=None, repr=False)
    """All of it in the last chunk, None before it."""
    logprobs: list[dict[int, Logprob]] | None = None
    """Those of token_ids, if at most 20 were asked for; else None."""
    delta: dict[str, str] = dataclasses.field(default_factory=dict)
    """What is new of the answer to a conversation: of its "reasoning_content", the model's thoughts, and of its "content". Its tool calls
    are in the completion's message."""


def with_deltas(chunks: Generator[Chunk, None, None], tokenizer: Tokenizer, prompt: str) -> Generator[Chunk, None, None]:
    """The chunks of an answer, each with its delta."""
    deltas = Deltas(tokenizer, prompt)
    with contextlib.closing(chunks):
        for chunk in chunks:
            yield dataclasses.replace(chunk, delta=deltas.push(chunk.token_ids, chunk.text, chunk.completion is not None))
