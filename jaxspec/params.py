"""What a request asks for and what comes back: SamplingParams, Completion, Chunk."""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

from jaxspec.stats import RoundStats

MAX_SEED = 2**63  # seeds are two 32-bit words on the device; the top bit is left out so that they fit every int64


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to generate, with vLLM's names and meanings. Numbers are checked when the object is made.

    max_tokens: new tokens at most, the stop token counted; None means up to the engine's max_len, which bounds every request.
    temperature: 0 is greedy; None means what the checkpoint's generation_config.json says (its temperature if do_sample, else 0).
    The top_k and top_p of that file are not applied. seed: 0 .. 2**63 - 1, the same seed gives the same text whatever the drafter
    and the batch; None draws one. stop_token_ids: end after any of these, besides the checkpoint's own end tokens.
    ignore_eos: do not end at the checkpoint's end tokens.

    Raises TypeError for a wrong type, ValueError for a value out of range.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def put(field: str, value: Any) -> None:
            object.__setattr__(self, field, value)

        if self.max_tokens is not None:
            put("max_tokens", integer("max_tokens", self.max_tokens, 1))
        if self.temperature is not None:
            put("temperature", _temperature(self.temperature))
        if self.seed is not None:
            put("seed", integer("seed", self.seed, 0, MAX_SEED - 1))
        if isinstance(self.stop_token_ids, str | bytes | numbers.Number) or not hasattr(self.stop_token_ids, "__iter__"):
            raise TypeError(f"stop_token_ids is {self.stop_token_ids!r}, expected a list of token ids")
        put("stop_token_ids", tuple(integer(f"stop_token_ids[{i}]", x, 0, 2**31 - 1) for i, x in enumerate(self.stop_token_ids)))
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos is {self.ignore_eos!r}, expected True or False")


def integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int. Raises TypeError if it is not an integer (a bool is not), ValueError if it is not in low .. high."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}, expected an integer")
    number = int(value)
    if number < low or (high is not None and number > high):
        raise ValueError(f"{name} is {number}, expected {f'at least {low}' if high is None else f'{low} .. {high}'}")
    return number


def _temperature(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"temperature is {value!r} of type {type(value).__name__}, expected a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    # The device holds it as a float32.
    if not (math.isfinite(number) and 0 <= number < 2.0**127):
        raise ValueError(f"temperature is {number}, expected a finite number of at least 0")
    return number


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was generated from one prompt.

    text: without the stop token and special tokens. token_ids: with the stop token. finish_reason: "stop" (a stop token came) or
    "length" (max_tokens or max_len was reached). stop_reason: the id if it was one of stop_token_ids, None if it was the checkpoint's
    own. seed: the one that was used. stats: the rounds that it took.
    """

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | None
    prompt_token_ids: list[int]
    seed: int
    stats: RoundStats

    def __repr__(self) -> str:
        return (
            f"Completion(text={self.text!r}, tokens={len(self.token_ids)}, finish_reason={self.finish_reason!r}, "
            f"prompt_tokens={len(self.prompt_token_ids)}, seed={self.seed}, "
            f"acceptance_length={self.stats.acceptance_length:.2f})"
        )


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A piece of a stream. text and token_ids: what is new; text that may still change is held back. The last chunk has a
    finish_reason and the whole Completion; before it both are None."""

    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    completion: Completion | None = dataclasses.field(default=None, repr=False)
