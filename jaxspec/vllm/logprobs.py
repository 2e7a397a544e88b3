"""Where vLLM has Logprob."""

from jaxspec.engine.completion import Logprob

__all__ = ["Logprob"]
