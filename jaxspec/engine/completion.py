"""What comes back: Completion, and the pieces of a stream."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxspec.engine.html import completion_html
from jaxspec.engine.stats import RoundStats
from jaxspec.text import Tokenizer


@dataclasses.dataclass(frozen=True)
class Logprob:
    """A token's log-probability, its rank among all tokens (1 is the most likely), and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was generated from one prompt.

    text: without the stop token, the stop string and special tokens. token_ids: with the stop token. finish_reason: "stop" (a stop
    token or stop string came), "length" (max_tokens or max_len was reached) or "error" (this request alone failed; what it had by then
    is given). stop_reason: the stop string; or the id, if it was one of stop_token_ids; None if it was the checkpoint's own end token.
    seed: the one that was used. stats: the rounds that it took. index: which of the prompt's n samples. prompt_index: which of the
    call's prompts. num_cached_tokens: prompt tokens that had been computed for another request. logprobs: for each new token a dict of
    token id -> Logprob, of the token itself and of the most likely ones, None unless asked for; prompt_logprobs: the same for the
    prompt, where the first token has None. error: what failed, None unless finish_reason is "error".
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    prompt_token_ids: list[int]
    seed: int
    stats: RoundStats
    index: int = 0
    prompt_index: int = dataclasses.field(default=0, compare=False)
    num_cached_tokens: int = dataclasses.field(default=0, compare=False)
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    # What `_repr_html_` cuts the text with. It is no field: == and asdict pass it by, and so does a copy that is pickled.
    tokenizer: dataclasses.InitVar[Tokenizer | None] = None

    def __post_init__(self, tokenizer: Tokenizer | None) -> None:
        object.__setattr__(self, "_tokenizer", tokenizer)

    def __repr__(self) -> str:
        return (
            f"Completion(text={self.text!r}, tokens={len(self.token_ids)}, finish_reason={self.finish_reason!r}, "
            f"prompt_tokens={len(self.prompt_token_ids)}, seed={self.seed}, "
            f"acceptance_length={self.stats.acceptance_length:.2f}{'' if self.error is None else f', error={self.error!r}'})"
        )

    def _repr_html_(self) -> str:
        return completion_html(self, self.__dict__["_tokenizer"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokenizer": None}


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a stream. text and token_ids: what is new; text that may still change is held back. logprobs: of token_ids, if
    asked for and at most 20. The last chunk has a finish_reason and the whole Completion; before it both are None."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    completion: Completion | None = dataclasses.field(default=None, repr=False)
    logprobs: list[dict[int, Logprob]] | None = None
