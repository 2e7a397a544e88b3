"""From a checkpoint's config to how its weights are quantised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.quantisation import Quantisation


def read_quantisation(folder: Path, config: Mapping[str, Any]) -> Quantisation | None:
    """How a checkpoint is quantised, None where its weights are float. config: its config.json. Raises ValueError for a format that is
    not read here, by its name."""
    found = [where["quantization_config"] for where in (config, config.get("text_config") or {}) if where.get("quantization_config")]
    if not found:
        return None
    raise ValueError(f"the checkpoint's weights are quantised (quant_method {found[0].get('quant_method')!r})")
