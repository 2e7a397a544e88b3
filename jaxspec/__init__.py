"""Speculative decoding for Gemma 4 in JAX on NVIDIA GPUs."""

import importlib
from typing import Any

__version__ = "0.1.0"

# Public name -> the module that defines it. Imported on first use, so that `import jaxspec` and the command line start at once.
_EXPORTS: dict[str, str] = {
    "load": "jaxspec.loading",
    "convert": "jaxspec.converting",
    "LLM": "jaxspec.engine",
    "SamplingParams": "jaxspec.params",
    "Completion": "jaxspec.params",
    "Chunk": "jaxspec.params",
    "Logprob": "jaxspec.params",
    "Stats": "jaxspec.stats",
    "plot_acceptance": "jaxspec.plots",
    "mesh": "jaxspec.sharding",
    "run_batch": "jaxspec.batch",
    "BatchResult": "jaxspec.batch",
}
_MODULES = ("accept", "cache", "checkpoint", "config", "decode", "drafters", "gemma4", "sampling", "sharding")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS, *_MODULES])
