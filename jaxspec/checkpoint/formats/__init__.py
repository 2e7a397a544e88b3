"""The formats of quantised checkpoints: from a config to which matrices are quantised, and how the file holds them."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.checkpoint import fused
from jaxspec.checkpoint.files import CONVERTED, MODELOPT_CONFIG, read_json
from jaxspec.checkpoint.formats import compressed_tensors, converted, fp8, gguf, gptq, modelopt
from jaxspec.checkpoint.formats.matrices import SCALE_NAMES
from jaxspec.checkpoint.formats.rules import PREFIXES
from jaxspec.checkpoint.layout import unwrapped
from jaxspec.checkpoint.quantisation import EMBEDDING, Quantisation
from jaxspec.checkpoint.safetensors import Stored
from jaxspec.checkpoint.tensors import gguf_in, read_folder

SERVED = (
    f"compressed-tensors ({compressed_tensors.SERVED}), modelopt ({', '.join(modelopt.ALGORITHMS)}), gptq, auto-round, awq, fp8 in blocks"
)
SCALE_KEY = re.compile(r"(\.weight_scale|experts\.\w+_proj_scale|\.scales)$")
# compressed-tensors names the scale of a layer's keys self_attn.k_scale, ModelOpt self_attn.k_proj.k_scale, vLLM self_attn.attn.k_scale.
KV_SCALE = re.compile(r"(model\.|language_model\.)*layers\.(?P<layer>\d+)\.self_attn\.((attn|[kv]_proj)\.)?(?P<name>[kv])_scale")


def read_quantisation(folder: Path, config: Mapping[str, Any]) -> Quantisation | None:
    """How a checkpoint is quantised, None where its weights are float. config: its config.json.

    The dtype of scales, and what else the config does not say, is read from the headers of the weights if these are there. Without them
    it is the config's dtype, and so it is worth asking again once they are. Raises ValueError, by its name, for a format that is not
    served.
    """
    folder = Path(folder)
    if (folder / CONVERTED).exists():
        about = read_json(folder / CONVERTED)
        fused.check_version(folder, about)
        quantised = about.get(converted.KEY)
        try:
            return None if quantised is None else converted.read(quantised)
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            reason = f"its {converted.KEY!r} cannot be read: {error!r}"
            raise ValueError(f"{folder / CONVERTED} is damaged: {reason}; convert the checkpoint again") from error
    found = _config(folder, config)
    if found is None and folder.is_dir() and gguf_in(folder) is not None:
        return gguf.read(headers(folder) or {})
    if found is None:
        return None
    stored = headers(folder)
    try:
        made = _parsed(found, stored, _scale_dtype(config, stored or {}))
    except (TypeError, AttributeError, LookupError) as error:  # a value of another type than all that tools write there
        raise ValueError(f"the quantization_config in {folder} cannot be read: {error!r}") from error
    return dataclasses.replace(made, kv_scales=_kv_scales(stored or {}))


def _parsed(config: Mapping[str, Any], stored: Mapping[str, Stored] | None, scale_dtype: str) -> Quantisation:
    # Some old files of compressed-tensors do not name it.
    method = str(config.get("quant_method") or ("compressed-tensors" if "config_groups" in config else "unknown")).lower().replace("_", "-")
    if method == "compressed-tensors":
        held = (tensor for key, tensor in (stored or {}).items() if key.endswith("experts.gate_up_proj"))
        fused_float = any(tensor.dtype in SCALE_NAMES.values() for tensor in held)
        return compressed_tensors.read(config, scale_dtype=scale_dtype, fused_float_experts=fused_float)
    if method in ("modelopt", "modelopt-fp4"):
        return modelopt.read(config)
    if method in ("gptq", "auto-round", "awq"):
        return gptq.read(method, config, stored, scale_dtype=scale_dtype)
    if method == "fp8":
        return fp8.read(config, stored)
    raise ValueError(f"the checkpoint's weights are quantised with quant_method {config.get('quant_method')!r}; served are {SERVED}")


def quantisation_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The object in a config.json that says how the weights are quantised, or None."""
    for where in (config, config.get("text_config") or {}):
        found = where.get("quantization_config") or where.get("compression_config")
        if found:
            return found
    return None


def _config(folder: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    found = quantisation_config(config)
    if found is None and (folder / MODELOPT_CONFIG).is_file():
        found = {"quant_method": "modelopt", **(read_json(folder / MODELOPT_CONFIG).get("quantization") or {})}
    if found is not None and not isinstance(found, Mapping):
        raise ValueError(f"quantization_config is {found!r}; expected an object")
    return found


def headers(folder: Path) -> dict[str, Stored] | None:
    """The tensors of a checkpoint, None if they are not there. Their keys name modules as `rules.names_of` has them, whatever module is
    around the model."""
    try:
        return unwrapped(read_folder(folder), [f"{prefix}{EMBEDDING}.weight" for prefix in PREFIXES])
    except FileNotFoundError:
        return None


def _scale_dtype(config: Mapping[str, Any], stored: Mapping[str, Stored]) -> str:
    """The dtype of a checkpoint's scales."""
    names = {name: dtype for dtype, name in SCALE_NAMES.items()}
    counts = collections.Counter(names[held.dtype] for key, held in stored.items() if SCALE_KEY.search(key) and held.dtype in names)
    text = config.get("text_config") or {}
    told = config.get("dtype") or config.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    return counts.most_common(1)[0][0] if counts else told if told in SCALE_NAMES else "bfloat16"


def _kv_scales(stored: Mapping[str, Stored]) -> dict[int, tuple[float, float]]:
    """What the file says of a cache of float8, see `Quantisation`; 1 for the keys or the values of a layer that it says nothing of."""
    found: dict[int, dict[str, float]] = {}
    for key, held in stored.items():
        match = KV_SCALE.fullmatch(key)
        if match is None:
            continue
        if math.prod(held.shape) != 1:
            raise ValueError(f"{key} is {held.describe()}; served is one scale for all heads of a layer")
        value = float(held.read().reshape(()))
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{key} is {value}; expected a positive number")
        found.setdefault(int(match["layer"]), {})[match["name"]] = value
    return {layer: (of.get("k", 1.0), of.get("v", 1.0)) for layer, of in found.items()}
