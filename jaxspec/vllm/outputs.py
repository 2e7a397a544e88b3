"""Results in vLLM's shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxspec.engine.completion import Completion, Logprob
from jaxspec.vllm.lora.request import LoRARequest
from jaxspec.vllm.v1.metrics.reader import accepted, drafts

# Results of vLLM that are not here, and why.
POOLING = {
    f"{kind}{suffix}": "a target generates text"
    for kind in ("Pooling", "Embedding", "Classification", "Scoring")
    for suffix in ("Output", "RequestOutput")
}


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One text that was generated from a prompt."""

    index: int
    """Which of the prompt's n samples it is."""
    text: str
    token_ids: list[int]
    """The new tokens, the stop token included."""
    cumulative_logprob: float | None
    """The sum of the tokens' log-probabilities; None unless these were asked for."""
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None = None
    """Why the request failed, where finish_reason is "error". vLLM has no such field."""

    def finished(self) -> bool:
        """Whether nothing more comes, which is always so here."""
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """What a request took, summed over its samples."""

    num_generation_tokens: int
    first_token_latency: float
    """Seconds from the call until the first token, waiting included and compiling not; 0.0 if there is none."""
    num_drafts: int
    """Rounds that guessed anything."""
    num_draft_tokens: int
    num_accepted_tokens: int


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """What came of one prompt."""

    request_id: str
    prompt: str | None
    """Its text, of a conversation what the chat template made of it; None where token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int
    lora_request: LoRARequest | None = None


def request_output(
    request_id: str, samples: Sequence[Completion], texts: Sequence[str], adapter: LoRARequest | None = None
) -> RequestOutput:
    """The result of a prompt from its samples, of which there is at least one. texts: theirs."""
    first, stats = samples[0], [sample.stats for sample in samples]
    metrics = RequestMetrics(
        num_generation_tokens=sum(len(sample.token_ids) for sample in samples),
        first_token_latency=min((found.first_token_seconds for found in stats if found.first_token_seconds), default=0.0),
        num_drafts=sum(drafts(found.rounds_by_draft) for found in stats),
        num_draft_tokens=sum(found.drafted for found in stats),
        num_accepted_tokens=sum(accepted(found.histogram) for found in stats),
    )
    return RequestOutput(
        request_id=request_id,
        prompt=first.prompt,
        prompt_token_ids=first.prompt_token_ids,
        prompt_logprobs=first.prompt_logprobs,
        outputs=[_output(sample, text) for sample, text in zip(samples, texts, strict=True)],
        finished=True,
        metrics=metrics,
        num_cached_tokens=first.num_cached_tokens,
        lora_request=adapter,
    )


def _output(sample: Completion, text: str) -> CompletionOutput:
    total = None
    if sample.logprobs is not None:
        total = sum(row[token].logprob for token, row in zip(sample.token_ids, sample.logprobs, strict=False))
    return CompletionOutput(
        index=sample.index,
        text=text,
        token_ids=sample.token_ids,
        cumulative_logprob=total,
        logprobs=sample.logprobs,
        finish_reason=sample.finish_reason,
        stop_reason=sample.stop_reason,
        error=sample.error,
    )


def __getattr__(name: str) -> Any:
    if name in POOLING:
        raise ImportError(f"jaxspec.vllm.outputs has no {name}: {POOLING[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
