"""What a request asks for: SamplingParams."""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.checks import characters, flag, integer, number
from jaxspec.foreign_names import PARAMS_HERE, PARAMS_NEEDLESS, answer
from jaxspec.structured.params import StructuredOutputsParams

MAX_SEED = 2**63  # seeds are two 32-bit words on the device; the top bit is left out so that they fit every int64
MAX_N = 16_384
MAX_BIAS = 100.0
MAX_REPETITION = 1e4  # and its reciprocal at least, so that a penalised logit is finite over any temperature


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to generate, with vLLM's names and meanings. Values are checked when the object is made. Lists may be given, and are kept as
    tuples.

    Where temperature, top_k, top_p, min_p or repetition_penalty is None, the checkpoint's generation_config.json decides. None for stop,
    stop_token_ids, logit_bias or bad_words means none of them. Integers are below 2**31 and other numbers at most 1e30, where nothing else
    is said.

    Raises TypeError for a wrong type and for a name that is none of these, ValueError for a value out of range.
    """

    max_tokens: int | None = None
    """New tokens at most, the stop token included. None: up to the engine's max_len, which bounds every request."""
    min_tokens: int = 0
    """Until there are so many new tokens, no stop token is chosen and no stop string is looked for."""
    temperature: float | None = None
    """0 is greedy. temperature, min_p, top_k and top_p apply in this order; tokens of equal probability are kept or dropped together."""
    top_k: int | None = None
    """Only the k most likely tokens; 0 or -1 for all."""
    top_p: float | None = None
    """Only the most likely tokens that together reach this probability, more than 0 and at most 1."""
    min_p: float | None = None
    """Only tokens at least this share as likely as the most likely one, 0 .. 1."""
    seed: int | None = None
    """0 .. 2**63 - 1. The same seed gives the same text; with acceptance "coupled" whatever the drafter and the batch. None draws one."""
    n: int = 1
    """Completions of each prompt, which is computed once; at most 16,384. Sample i uses seed + i."""
    stop: str | Sequence[str] = ()
    """Strings that end the text. It ends before the string."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the text, beside the checkpoint's own end tokens."""
    include_stop_str_in_output: bool = False
    """Whether the text ends behind the stop string instead, and shows the text of a stop token."""
    ignore_eos: bool = False
    """Whether the checkpoint's own end tokens do not end the text."""
    repetition_penalty: float | None = None
    """Divides positive and multiplies negative logits of tokens in the prompt or the output, 1e-4 .. 1e4."""
    presence_penalty: float = 0.0
    """Subtracted once from the logits of tokens in the output, -2 .. 2."""
    frequency_penalty: float = 0.0
    """Subtracted from the logits of tokens in the output for each time that they occur, -2 .. 2."""
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """From token id to what is added to its logit, cut to -100 .. 100."""
    allowed_token_ids: Sequence[int] | None = None
    """No other token is chosen. None for all."""
    bad_words: Sequence[str] = ()
    """Words whose last token is not chosen where it would complete them."""
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    """What the text must look like: a JSON schema, a regular expression, or a choice of texts. A dict of its fields will do."""
    logprobs: int | None = None
    """Report each new token's log-probability and those of so many most likely tokens; -1 for the whole vocabulary. They are the model's
    own, before temperature, filters, penalties and biases. More than 20 take another pass over the text at its end."""
    prompt_logprobs: int | None = None
    """The same for the prompt's tokens, by another pass over it."""

    def __post_init__(self) -> None:
        checks = {
            "max_tokens": lambda name, x: integer(name, x, 1),
            "min_tokens": lambda name, x: integer(name, x, 0),
            "temperature": _temperature,
            "top_k": lambda name, x: max(integer(name, x, -1), 0),
            "top_p": lambda name, x: number(name, x, 0, 1, above=True),
            "min_p": lambda name, x: number(name, x, 0, 1),
            "seed": lambda name, x: integer(name, x, 0, MAX_SEED - 1),
            "n": lambda name, x: integer(name, x, 1, MAX_N),
            "stop": _strings,
            "stop_token_ids": _ids,
            "include_stop_str_in_output": flag,
            "ignore_eos": flag,
            "repetition_penalty": lambda name, x: number(name, x, 1 / MAX_REPETITION, MAX_REPETITION),
            "presence_penalty": lambda name, x: number(name, x, -2, 2),
            "frequency_penalty": lambda name, x: number(name, x, -2, 2),
            "logit_bias": _biases,
            "allowed_token_ids": _ids,
            "bad_words": _strings,
            "structured_outputs": lambda name, x: StructuredOutputsParams.of(x),
            "logprobs": lambda name, x: integer(name, x, -1),
            "prompt_logprobs": lambda name, x: integer(name, x, -1),
        }
        empty: dict[str, Any] = {"stop": (), "stop_token_ids": (), "logit_bias": {}, "bad_words": ()}
        for field in dataclasses.fields(SamplingParams):  # a subclass may have more
            value = getattr(self, field.name)
            value = empty.get(field.name) if value is None else value
            # None is a value where it is the default.
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, checks[field.name](field.name, value))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, expected at most max_tokens, {self.max_tokens}")
        if self.allowed_token_ids == ():
            raise ValueError("allowed_token_ids is empty; expected at least one token id, or None for all")

    def replace(self, **changes: Any) -> SamplingParams:
        """These params with some values changed. Raises what making SamplingParams raises."""
        return dataclasses.replace(self, **changes)

    def clone(self) -> SamplingParams:
        """A copy of these params. They cannot change, so it is seldom needed; vLLM's have it."""
        return dataclasses.replace(self, logit_bias=dict(self.logit_bias))


_made = SamplingParams.__init__


@functools.wraps(_made)
def _answered(self: SamplingParams, *args: Any, **kwargs: Any) -> None:
    answer("SamplingParams", kwargs, SamplingParams.__dataclass_fields__, PARAMS_HERE, PARAMS_NEEDLESS)
    _made(self, *args, **kwargs)


SamplingParams.__init__ = _answered


def _temperature(name: str, value: Any) -> float:
    return number(name, value, 0)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes | numbers.Number) or not hasattr(value, "__iter__"):
        raise TypeError(f"{name} is {value!r}, expected a list of token ids")
    return tuple(dict.fromkeys(integer(f"{name}[{i}]", x, 0, 2**31 - 2) for i, x in enumerate(value)))


def _strings(name: str, value: Any) -> tuple[str, ...]:
    listed = (value,) if isinstance(value, str) and name == "stop" else value
    if isinstance(listed, str | bytes | numbers.Number | Mapping) or not hasattr(listed, "__iter__"):
        raise TypeError(f"{name} is {value!r}, expected a list of strings")
    for i, text in enumerate(listed):
        if not isinstance(text, str):
            raise TypeError(f"{name}[{i}] is {text!r} of type {type(text).__name__}, expected a str")
        if not text:
            raise ValueError(f"{name}[{i}] is empty; expected a text")
        characters(f"{name}[{i}]", text)
    return tuple(dict.fromkeys(listed))


def _biases(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {value!r}, expected a dict of token id to bias")
    found = {}
    for token, bias in value.items():
        key = int(token) if isinstance(token, str) and token.isdecimal() else token  # as JSON has it
        key = integer(f"a token id of {name}", key, 0, 2**31 - 2)
        if not isinstance(bias, numbers.Real) or isinstance(bias, bool):
            raise TypeError(f"{name}[{key}] is {bias!r} of type {type(bias).__name__}, expected a number")
        if bias != bias:
            raise ValueError(f"{name}[{key}] is nan, expected a number")
        found[key] = float(min(max(bias, -MAX_BIAS), MAX_BIAS))
    return found


# What else a generation config may say of texts, and the values that say nothing.
LEFT_OUT: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("stop_strings", "bad_words_ids", "begin_suppress_tokens", "sequence_bias"), (None, [], {})),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "penalty_alpha", "exponential_decay_length_penalty"), (None,)),
    **dict.fromkeys(("watermarking_config", "forced_decoder_ids", "force_words_ids", "constraints", "top_h"), (None,)),
    **dict.fromkeys(("no_repeat_ngram_size", "epsilon_cutoff", "eta_cutoff", "min_new_tokens", "min_length"), (None, 0)),
    **dict.fromkeys(("num_beams", "typical_p", "guidance_scale"), (None, 1)),
}


@dataclasses.dataclass(frozen=True)
class Defaults:
    """What requests that say nothing use, from a checkpoint's generation_config.json."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    suppress_tokens: tuple[int, ...] = ()  # ids that are never chosen

    @classmethod
    def of(cls, generation: Mapping[str, Any]) -> Defaults:
        """generation: the file's content. temperature is 0 unless the file samples, and then 1 where it names none. Whatever else it leaves
        out gets the value that changes nothing.

        Raises TypeError or ValueError, as SamplingParams does, for values that make no sense.
        """
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        read: dict[str, Any] = {name: generation.get(name) for name in names}
        given = SamplingParams(**read)
        values = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
        samples = flag("do_sample", generation.get("do_sample") or False)
        values["temperature"] = values.get("temperature", 1.0) if samples else 0.0
        return cls(**values, suppress_tokens=_ids("suppress_tokens", generation.get("suppress_tokens") or ()))

    @staticmethod
    def left_out(generation: Mapping[str, Any]) -> list[str]:
        """What the file says of texts beside that, which requests do not take from it."""
        return [name for name, nothing in LEFT_OUT.items() if generation.get(name) not in nothing]
