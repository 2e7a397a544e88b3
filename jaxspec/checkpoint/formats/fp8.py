"""Checkpoints of quant_method "fp8": float8_e4m3fn with a scale for each block of outputs and inputs, as DeepSeek-V3's have.

A matrix `name.weight` has `name.weight_scale_inv`, by which it is multiplied (transformers `FineGrainedFP8Config`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoint.formats.matrices import Bytes
from jaxspec.checkpoint.formats.rules import names_in, names_of
from jaxspec.checkpoint.quantisation import Format, Quantisation, Scheme
from jaxspec.checkpoint.safetensors import Stored

SUFFIX = ".weight_scale_inv"


def read(config: Mapping[str, Any], stored: Mapping[str, Stored] | None) -> Quantisation:
    """What a quantization_config of quant_method "fp8" says. stored: the tensors of the weights, None if they are not there; without them
    every module of the layers is quantised that `modules_to_not_convert` does not name. Raises ValueError for what is not served."""
    block, activations = config.get("weight_block_size"), config.get("activation_scheme", "dynamic")
    told = f"the quantization_config has quant_method 'fp8' with weight_block_size {block!r} and activation_scheme {activations!r}"
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise ValueError(f"{told}; served are blocks of outputs and inputs, such as [128, 128]")
    if activations != "dynamic" or config.get("fmt", "e4m3") != "e4m3":
        raise ValueError(f"{told} and fmt {config.get('fmt', 'e4m3')!r}; served is 'dynamic', which is not applied, and 'e4m3'")
    outputs, inputs = block
    made: Format = Bytes(Scheme("fp8", inputs, False, "float32"), "block", (outputs, inputs), "scale_inv")
    if other := next((key for key in stored or () if key.endswith("_scale_inv") and not key.endswith(SUFFIX)), None):
        raise ValueError(f"the weights have scales {other}; served are those of single matrices, such as down_proj{SUFFIX}")
    scaled = None if stored is None else frozenset(key.removesuffix(SUFFIX) for key in stored if key.endswith(SUFFIX))
    left_out = names_in(config, "modules_to_not_convert", "ignored_layers")

    def format_of(name: str) -> Format | None:
        if scaled is not None:
            return made if any(one in scaled for one in names_of(name)) else None
        return made if ".layers." in name and not any(one in name for one in left_out) else None

    return Quantisation(f"fp8 of blocks {outputs} x {inputs}", format_of)
