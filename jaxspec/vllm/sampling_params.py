"""SamplingParams with vLLM's names and defaults."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.checks import among, flag, unknown
from jaxspec.engine import params as engine_params
from jaxspec.structured import StructuredOutputsParams

# Names of vLLM's that are not here, and why.
MISSING = {
    "BeamSearchParams": "beam search is not available",
    "GuidedDecodingParams": "its name is StructuredOutputsParams",
    "RequestOutputKind": "a call returns whole results; jaxspec.LLM has stream",
}
# Fields that are refused, by what they may be all the same, and why.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "guided_decoding": ((None,), "its name is structured_outputs, with StructuredOutputsParams"),
    "logits_processors": ((None, []), "a step runs on the device whole; logit_bias, allowed_token_ids and bad_words work there"),
    "extra_args": ((None, {}), "nothing here reads them"),
    "truncate_prompt_tokens": ((None,), "a prompt that is too long is refused; cut its ids before"),
    "use_beam_search": ((None, False), "beam search is not available"),
    "thinking_token_budget": ((None, -1), "thoughts have no budget of their own"),
    "logprob_token_ids": ((None,), "log-probabilities are those of the most likely tokens"),
    "prompt_logprob_token_ids": ((None,), "log-probabilities are those of the most likely tokens"),
    "prompt_logprob_start": ((None, 0), "log-probabilities are those of the whole prompt"),
    "repetition_detection": ((None,), "a text ends by its end tokens, its stop strings or max_tokens"),
}
# Fields that change nothing here: how results are handed over, and what prefix caching reads.
WITHOUT_EFFECT = (
    "spaces_between_special_tokens",
    "output_kind",
    "stream_interval",
    "skip_clone",
    "flat_logprobs",
    "skip_reading_prefix_cache",
    "best_of",
    "detokenize",
    "skip_special_tokens",
)
# Fields for which None is no value, as with vLLM; jaxspec.SamplingParams would read it as the checkpoint's own default.
NUMBERS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# What is read of a generation config, and the fields that it sets.
GENERATION = {"max_new_tokens": "max_tokens"} | {name: name for name in NUMBERS}
OPTIONAL = (*NUMBERS, "n", "presence_penalty", "frequency_penalty")  # where `from_optional` takes it for the default


@dataclasses.dataclass(slots=True)
class SamplingParams:
    """How to generate, with vLLM's names, meanings and defaults: max_tokens 16, temperature 1, no filters. A checkpoint's own defaults
    apply only where no SamplingParams are given. Fields can be set later; they are checked here and again by each call.

    Raises TypeError for a wrong type or an unknown name, ValueError for a value out of range or one that cannot be served.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    detokenize: bool = True
    """False leaves texts empty. Stop strings need texts."""
    skip_special_tokens: bool = True
    """False shows them in texts, but for the token that ended one."""
    spaces_between_special_tokens: bool = True
    flat_logprobs: bool = False
    output_kind: Any = None
    stream_interval: int | None = None
    skip_clone: bool = False
    best_of: int | None = None
    """n, where it is given."""
    skip_reading_prefix_cache: bool | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    guided_decoding: Any = None
    logits_processors: Any = None
    extra_args: Mapping[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None
    thinking_token_budget: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_token_ids: Sequence[int] | None = None
    prompt_logprob_start: int | None = None
    repetition_detection: Any = None

    def __post_init__(self) -> None:
        self.served()

    @staticmethod
    def from_optional(**given: Any) -> SamplingParams:
        """SamplingParams in which None stands for the default of a number. Biases are cut to -100 .. 100; their keys may be texts."""
        given = {name: value for name, value in given.items() if value is not None or name not in OPTIONAL}
        if given.get("logit_bias") is not None:
            given["logit_bias"] = {_token(key): _cut(bias) for key, bias in given["logit_bias"].items()}
        return SamplingParams(**given)

    def clone(self) -> SamplingParams:
        """A deep copy."""
        return copy.deepcopy(self)

    def served(self) -> engine_params.SamplingParams:
        """The same for jaxspec. Raises what making SamplingParams raises."""
        for name, (allowed, reason) in REFUSED.items():
            if not among(value := getattr(self, name), allowed):
                raise ValueError(f"{name} is {value!r}, which cannot be served: {reason}")
        for name in NUMBERS:
            if getattr(self, name) is None:
                raise TypeError(f"{name} is None, expected a number; leave it out for vLLM's default")
        if not among(self.best_of, (None, self.n)):
            raise ValueError(f"best_of is {self.best_of!r}, which cannot be served: all n samples come back, here {self.n}")
        passed = {name: getattr(self, name) for name in self.__slots__ if name not in REFUSED and name not in WITHOUT_EFFECT}
        passed["seed"] = None if among(self.seed, (-1,)) else self.seed
        for name in ("logprobs", "prompt_logprobs"):
            passed[name] = {True: 1, False: None}[passed[name]] if isinstance(passed[name], bool) else passed[name]
        for name in ("detokenize", "skip_special_tokens"):
            flag(name, getattr(self, name))
        found = engine_params.SamplingParams(**passed)
        if found.stop and not self.detokenize:
            raise ValueError("stop needs texts, but detokenize is False")
        return found


def _token(key: int | str) -> int:
    try:
        return int(key)
    except (TypeError, ValueError) as error:
        raise ValueError(f"logit_bias has the key {key!r}, expected a token id") from error


def _cut(bias: Any) -> Any:
    return min(max(bias, -100.0), 100.0) if isinstance(bias, int | float) else bias  # others are refused by their names


_made = SamplingParams.__init__


@functools.wraps(_made)
def _checked(self: SamplingParams, *args: Any, **kwargs: Any) -> None:
    for name in kwargs:
        if name not in SamplingParams.__slots__:
            raise unknown("SamplingParams", name, SamplingParams.__slots__)
    _made(self, *args, **kwargs)


SamplingParams.__init__ = _checked


def default_params(generation: Mapping[str, Any]) -> SamplingParams:
    """What requests without params use: vLLM's defaults, changed by what a generation config says. generation: its content."""
    return SamplingParams(**{ours: generation[name] for name, ours in GENERATION.items() if generation.get(name) is not None})


def __getattr__(name: str) -> Any:
    if name in MISSING:
        raise ImportError(f"jaxspec.vllm.sampling_params has no {name}: {MISSING[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
