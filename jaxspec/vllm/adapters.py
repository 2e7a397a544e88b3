"""Adapters of calls: each is merged into the weights before its prompts are served."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.checks import type_name
from jaxspec.engine.completion import Completion
from jaxspec.engine.llm import LLM
from jaxspec.vllm.lora.request import LoRARequest

Adapter = LoRARequest | None
UNKNOWN = ""  # in place of the path of an adapter


class Adapters:
    """The adapters of an LLM's calls, of which its weights have one, or none, at a time. Calls take turns. Weights that the LLM is given
    in between serve prompts without an adapter; adapters are merged into those of the model.

    model: what the LLM was loaded from. enabled: whether calls may ask for adapters."""

    def __init__(self, llm: LLM, model: str, enabled: bool):
        self._llm, self._model, self._enabled = llm, model, enabled
        self._merged: str | None = None  # the path of the one that the weights have, or UNKNOWN
        self._name: str | None = None  # the LLM's name since
        self._lock = threading.Lock()

    def of_call(self, call: str, given: Any, count: int) -> list[Adapter]:
        """Those of a call's prompts, of which there are `count`. given: vLLM's lora_request, one for all or one for each. Raises TypeError
        or ValueError."""
        several = isinstance(given, list | tuple)
        for each in given if several else [given]:
            if each is not None and not isinstance(each, LoRARequest):
                raise TypeError(f"lora_request of {call} is of type {type_name(each)}, expected jaxspec.vllm.lora.request.LoRARequest")
            if each is not None and not self._enabled:
                raise ValueError(f"lora_request of {call} is {each.lora_name!r}, but the LLM was not made with enable_lora=True")
        if several and len(given) != count:
            raise ValueError(f"lora_request is a list of length {len(given)}; expected {count}, one for each prompt, or one alone for all")
        return list(given) if several else [given] * count

    def served(self, wanted: Sequence[Adapter], serve: Callable[[Sequence[int] | None], list[Completion]]) -> list[Completion]:
        """Completions of a call's prompts, in order. wanted: by prompt. serve: gives completions of the prompts of these numbers, None for
        all, whose `prompt_index` counts them alone."""
        if not self._enabled:
            return serve(None)
        with self._lock:
            groups = dict[str | None, list[int]]()
            for i, adapter in enumerate(wanted):
                groups.setdefault(None if adapter is None else os.fspath(adapter.lora_path), []).append(i)
            if len(groups) < 2:
                self._merge(next(iter(groups), None))
                return serve(None)
            found = list[Completion]()
            for path in sorted(groups, key=lambda path: path != self._merged):  # what is merged already comes first
                self._merge(path)
                found += [dataclasses.replace(made, prompt_index=groups[path][made.prompt_index]) for made in serve(groups[path])]
        return sorted(found, key=lambda made: made.prompt_index)  # which leaves samples of a prompt in their order

    def _merge(self, path: str | None) -> None:
        _ = self._llm.target  # raises while the LLM sleeps, which no call ends
        if self._merged and self._llm.name != self._name:  # it was given other weights
            self._merged = None
        if path == self._merged:
            return
        before, self._merged = self._merged, UNKNOWN  # which an interrupt leaves
        try:
            if path is None:
                self._llm.update_weights(self._model)
            else:
                self._llm.update_weights(adapter=path)
        except Exception:  # which leaves the weights as they were
            self._merged = before
            raise
        self._merged, self._name = path, self._llm.name
