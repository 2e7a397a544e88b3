"""Speculative decoding for Gemma 4 in JAX on NVIDIA GPUs."""

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that defines it. Imported on first use, so that `import jaxspec` and the command line start at once.
_EXPORTS: dict[str, str] = {
    "load": "jaxspec.loading",
    "convert": "jaxspec.converting",
    "LLM": "jaxspec.engine.llm",
    "SamplingParams": "jaxspec.engine.params",
    "Completion": "jaxspec.engine.completion",
    "Chunk": "jaxspec.engine.completion",
    "Logprob": "jaxspec.engine.completion",
    "Stats": "jaxspec.engine.stats",
    "plot_acceptance": "jaxspec.plots",
    "mesh": "jaxspec.sharding.meshes",
    "run_batch": "jaxspec.batch.job",
    "BatchResult": "jaxspec.batch.job",
}
# Public modules by the name that `from jaxspec import NAME` takes.
_MODULES: dict[str, str] = {
    "accept": "jaxspec.decode.accept",
    "cache": "jaxspec.model.paged_kv",
    "checkpoint": "jaxspec.checkpoint",
    "config": "jaxspec.model.config",
    "decode": "jaxspec.decode",
    "drafters": "jaxspec.drafters",
    "gemma4": "jaxspec.model.gemma4",
    "sampling": "jaxspec.sampling",
    "sharding": "jaxspec.sharding",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS, *_MODULES])
