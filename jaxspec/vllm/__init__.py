"""The names, arguments and results of vLLM's offline interface over `jaxspec.load`: a script changes its import line alone. It is a door;
it may import all that `loading` may, and `loading`."""

from typing import Any

from jaxspec.engine.completion import Logprob
from jaxspec.structured import StructuredOutputsParams
from jaxspec.vllm.inputs import PromptType, TextPrompt, TokensPrompt
from jaxspec.vllm.llm import LLM
from jaxspec.vllm.lora.request import LoRARequest
from jaxspec.vllm.outputs import POOLING, CompletionOutput, RequestMetrics, RequestOutput
from jaxspec.vllm.sampling_params import MISSING, SamplingParams
from jaxspec.vllm.v1.metrics.reader import Counter, Gauge, Histogram, Metric, Vector

__all__ = [
    "LLM",
    "CompletionOutput",
    "Counter",
    "Gauge",
    "Histogram",
    "LoRARequest",
    "Logprob",
    "Metric",
    "PromptType",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "Vector",
]
_SERVER = "there is no server; jaxspec.LLM has stream, also for `async for`"
# Names of vLLM that are not here, and why.
_MISSING = {
    "AsyncEngineArgs": _SERVER,
    "AsyncLLMEngine": _SERVER,
    "EngineArgs": "LLM takes the arguments",
    "LLMEngine": _SERVER,
    "PoolingParams": "a target generates text",
    **POOLING,
    **MISSING,
}


def __getattr__(name: str) -> Any:
    if name in _MISSING:
        raise ImportError(f"jaxspec.vllm has no {name}: {_MISSING[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
