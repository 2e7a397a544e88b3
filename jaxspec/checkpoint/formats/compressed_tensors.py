"""The quantization_config of compressed-tensors, which llm-compressor writes: groups of modules, each with a way to quantise weights.

Its inputs' quantisation is left out: activations stay float, which is the more exact of the two, unless `load` is asked to round them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from jaxspec.checkpoint.formats.matrices import Bytes, Float4, Words
from jaxspec.checkpoint.formats.rules import Rules, classes_of, names_in
from jaxspec.checkpoint.quantisation import Format, Quantisation, Scheme

SERVED = (
    "pack-quantized (int4 and int8), float-quantized (fp8), int-quantized and naive-quantized (8 bits), nvfp4-pack-quantized, "
    "mixed-precision"
)
OFFLINE = ("weight_input", "weight_output")  # where transforms are in the weights already


def read(config: Mapping[str, Any], *, scale_dtype: str, fused_float_experts: bool) -> Quantisation:
    """What a quantization_config of quant_method "compressed-tensors" says. scale_dtype: of the scales in the file. fused_float_experts:
    whether the file holds float experts as one tensor, which no rule for single matrices means. Raises ValueError, by its name, for what
    is not served."""
    groups, named = config.get("config_groups") or {}, config.get("format") or "dense"
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ValueError(f"config_groups is {groups!r}; expected an object of name to object")
    transforms = config.get("transform_config")
    if transforms is not None and not isinstance(transforms, Mapping):
        raise ValueError(f"transform_config is {transforms!r}; expected an object")
    _refuse_transforms(transforms or {})
    formats: dict[str, Format | None] = {}  # by rule
    for name, group in groups.items():
        made = _format(name, group, group.get("format") or named, scale_dtype)
        formats |= dict.fromkeys(names_in(group, "targets"), made)
    targets, ignored = Rules(tuple(formats)), Rules(names_in(config, "ignore"))

    @functools.cache  # `load` asks twice for each of ten thousand experts' matrices
    def format_of(module: str) -> Format | None:
        classes = classes_of(module, fused_float_experts)
        if ignored.match(module, classes) is not None:
            return None
        rule = targets.match(module, classes)
        return None if rule is None else formats[rule]

    return Quantisation(f"compressed-tensors {named}", format_of, dense=not any(formats.values()))


def _refuse_transforms(config: Mapping[str, Any]) -> None:
    """Raises ValueError for transforms of activations, which stand beside weights that were turned the other way."""
    for name, group in (config.get("config_groups") or {}).items():
        places = sorted({str(place.get("location")) for place in group.get("apply") or ()} - set(OFFLINE))
        if places:
            raise ValueError(
                f"transform_config has the group {name!r}, which transforms activations while the model runs ({', '.join(places)}), as "
                "QuIP and SpinQuant do; served are weights alone"
            )


def _format(name: str, group: Mapping[str, Any], named: str, scale_dtype: str) -> Format | None:
    """How the modules of a group are held; None where their weights are float."""
    where = f"config_groups.{name} of the quantization_config"
    inputs, weights = group.get("input_activations"), group.get("weights")
    if not all(part is None or isinstance(part, Mapping) for part in (inputs, weights)):
        raise ValueError(f"{where} has weights {weights!r} and input_activations {inputs!r}; expected objects")
    static = inputs and not inputs.get("dynamic") and inputs.get("type", "int") == "int"
    if group.get("output_activations") or static:
        raise ValueError(f"{where} quantises activations by numbers fixed in the checkpoint; served are weights alone")
    if any("mbedding" in target for target in names_in(group, "targets")):
        raise ValueError(f"{where} quantises embeddings; served are matrices of layers alone")
    if weights is None:
        return None

    bits, kind, strategy = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("strategy")
    size, zeros, block = weights.get("group_size"), not weights.get("symmetric", True), weights.get("block_structure")
    strategy = strategy or ("channel" if size == -1 else "group" if size else "tensor")
    if strategy == "group" and size == -1:
        strategy = "channel"
    if named == "mixed-precision":  # the library infers what a group does not say
        named = "nvfp4-pack-quantized" if (kind, bits) == ("float", 4) else "pack-quantized" if kind == "int" else "float-quantized"
    told = f"{where} has format {named!r} with {bits} bits of type {kind!r}, strategy {strategy!r}, group_size {size!r}"
    if type(bits) is not int:
        raise ValueError(f"{told}; expected a whole number of bits")
    scheme = Scheme("int8", None, zeros, scale_dtype)

    if strategy in ("group", "tensor_group"):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{told}; expected a positive group_size")
        scheme = dataclasses.replace(scheme, group=size)
    if named == "pack-quantized" and kind == "int" and bits in (4, 8) and strategy in ("group", "channel"):
        return Words(dataclasses.replace(scheme, kind=f"int{bits}"), bits)
    if named == "nvfp4-pack-quantized" and (kind, bits, strategy, size) == ("float", 4, "tensor_group", 16) and not zeros:
        return Float4(dataclasses.replace(scheme, kind="fp4", scale_dtype="float32"), "_packed", "_global_scale", divides=True)
    if named in ("float-quantized", "int-quantized", "naive-quantized") and bits == 8 and kind in ("int", "float"):
        scheme = dataclasses.replace(scheme, kind="fp8" if kind == "float" else "int8")
        if strategy in ("tensor", "channel", "group") and not (zeros and kind == "float"):
            return Bytes(scheme, strategy)
        if strategy == "block" and not zeros and _pair(block):
            return Bytes(dataclasses.replace(scheme, group=block[1]), strategy, (block[0], block[1]))
    if strategy == "block":
        told += f", block_structure {block!r}"
    raise ValueError(f"{told}{', with zero points' if zeros else ''}; served are {SERVED}")


def _pair(block: Any) -> bool:
    return isinstance(block, list | tuple) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
