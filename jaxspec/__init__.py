"""Speculative decoding for Gemma 4 and Step-3.5 in JAX on NVIDIA GPUs."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers see of the two tables below
    from jaxspec import checkpoint, decode, drafters, sampling, sharding
    from jaxspec.batch.job import BatchResult, run_batch
    from jaxspec.converting import convert
    from jaxspec.decode import accept
    from jaxspec.engine.acceptance_watch import AcceptanceWarning
    from jaxspec.engine.completion import Chunk, Completion, Logprob
    from jaxspec.engine.llm import LLM
    from jaxspec.engine.params import SamplingParams
    from jaxspec.engine.stats import Stats
    from jaxspec.engine.stream import Stream
    from jaxspec.generator import Generator
    from jaxspec.learning.settings import Learn
    from jaxspec.loading import load
    from jaxspec.model import gemma4
    from jaxspec.model import gemma4_config as config
    from jaxspec.model import paged_kv as cache
    from jaxspec.plots import plot_acceptance
    from jaxspec.sharding.meshes import mesh
    from jaxspec.structured.params import StructuredOutputsParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AcceptanceWarning",
    "BatchResult",
    "Chunk",
    "Completion",
    "Generator",
    "Learn",
    "Logprob",
    "SamplingParams",
    "Stats",
    "Stream",
    "StructuredOutputsParams",
    "accept",
    "cache",
    "checkpoint",
    "config",
    "convert",
    "decode",
    "drafters",
    "gemma4",
    "load",
    "mesh",
    "plot_acceptance",
    "run_batch",
    "sampling",
    "sharding",
]

# Public name -> the module that defines it. Imported on first use, so that `import jaxspec` and the command line start at once.
_EXPORTS: dict[str, str] = {
    "load": "jaxspec.loading",
    "convert": "jaxspec.converting",
    "LLM": "jaxspec.engine.llm",
    "Learn": "jaxspec.learning.settings",
    "SamplingParams": "jaxspec.engine.params",
    "StructuredOutputsParams": "jaxspec.structured.params",
    "AcceptanceWarning": "jaxspec.engine.acceptance_watch",
    "Completion": "jaxspec.engine.completion",
    "Chunk": "jaxspec.engine.completion",
    "Logprob": "jaxspec.engine.completion",
    "Stream": "jaxspec.engine.stream",
    "Stats": "jaxspec.engine.stats",
    "plot_acceptance": "jaxspec.plots",
    "mesh": "jaxspec.sharding.meshes",
    "run_batch": "jaxspec.batch.job",
    "Generator": "jaxspec.generator",
    "BatchResult": "jaxspec.batch.job",
}
# Public modules by the name that `from jaxspec import NAME` takes.
_MODULES: dict[str, str] = {
    "accept": "jaxspec.decode.accept",
    "cache": "jaxspec.model.paged_kv",
    "checkpoint": "jaxspec.checkpoint",
    "config": "jaxspec.model.gemma4_config",
    "decode": "jaxspec.decode",
    "drafters": "jaxspec.drafters",
    "gemma4": "jaxspec.model.gemma4",
    "sampling": "jaxspec.sampling",
    "sharding": "jaxspec.sharding",
}


if not TYPE_CHECKING:  # a checker that saw it would take every name for one of ours

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(_MODULES[name])
        if name not in _EXPORTS:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
