"""NVIDIA ModelOpt's configs: a quantization_config in config.json, or hf_quant_config.json beside it. Their keys differ a little."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoint.formats.matrices import Bytes, Float4
from jaxspec.checkpoint.formats.rules import Rules, names_in
from jaxspec.checkpoint.quantisation import Format, Quantisation, Scheme

ALGORITHMS = ("NVFP4", "FP8")


def read(config: Mapping[str, Any]) -> Quantisation:
    """What a quantization_config of quant_method "modelopt", or the object `quantization` of hf_quant_config.json, says. Raises ValueError
    for an algorithm that is not served, by its name."""
    algorithm = str(config.get("quant_algo") or "").upper()
    if algorithm not in ALGORITHMS:
        raise ValueError(f"ModelOpt's quant_algo is {config.get('quant_algo')!r}; served are {', '.join(ALGORITHMS)}")
    group = config.get("group_size") or next(
        (
            (one.get("weights") or {}).get("group_size")
            for one in (config.get("config_groups") or {}).values()
            if (one.get("weights") or {}).get("group_size")
        ),
        None,
    )
    if algorithm == "NVFP4" and group not in (None, 16):
        raise ValueError(f"ModelOpt's NVFP4 has group_size {group!r}; expected 16")
    made: Format = Bytes(Scheme("fp8", None, False, "float32"), "tensor")
    if algorithm == "NVFP4":
        made = Float4(Scheme("fp4", 16, False, "float32"), "", "_scale_2", divides=False)
    ignored = Rules(names_in(config, "ignore", "exclude_modules"), wildcards=True)
    return Quantisation(f"ModelOpt {algorithm}", lambda name: None if ignored.match(name) else made)
