"""Where vLLM has LoRARequest."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jaxspec.checks import integer, path


@dataclasses.dataclass(frozen=True)
class LoRARequest:
    """An adapter for the prompts of a call, as vLLM's LoRARequest.

    lora_path: its folder or hub id, which alone says which one it is. lora_name, lora_int_id: what the caller knows it by. The others have
    no effect. Raises TypeError or ValueError for an id below 1, and for what is no path."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    tensorizer_config_dict: Mapping[str, Any] | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        integer("lora_int_id", self.lora_int_id, 1)
        if not os.fspath(path("lora_path", self.lora_path, "a folder or a hub id")):
            raise ValueError(f"the LoRARequest {self.lora_name!r} has no lora_path; expected a folder or a hub id")
