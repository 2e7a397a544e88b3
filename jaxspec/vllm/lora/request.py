"""Where vLLM has LoRARequest, which is not here."""

from typing import Any

from jaxspec.vllm.arguments import MERGED


def __getattr__(name: str) -> Any:
    if name == "LoRARequest":
        raise ImportError(f"jaxspec.vllm has no {name}: {MERGED}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
