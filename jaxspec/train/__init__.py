"""Training: drafters for any target (`distil`), a target on other text (`finetune`), and the pocket models."""

import importlib
from typing import Any

_EXPORTS = {
    "distil": "jaxspec.train.tuning",
    "finetune": "jaxspec.train.tuning",
    "Objective": "jaxspec.drafters.training",
    "Run": "jaxspec.train.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
