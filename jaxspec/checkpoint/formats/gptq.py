"""The layouts of AutoGPTQ, which AutoRound writes too, and of AutoAWQ: integers in words along the inputs or the outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoint.formats.matrices import SCALE_NAMES, check_order, fields, groups
from jaxspec.checkpoint.formats.rules import names_in, names_of
from jaxspec.checkpoint.quantisation import Format, Matrix, Quantisation, Scheme, Wanted
from jaxspec.checkpoint.safetensors import Stored

WEIGHTS = {"bits": None, "group_size": 128, "sym": True, "data_type": "int"}  # settings of weights, and what a config without them means
AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # in which field of a word AutoAWQ puts each of 8 outputs


@dataclasses.dataclass(frozen=True)
class Columns:
    """A matrix that is stored as its transpose, [in, out]."""

    scheme: Scheme
    bits: int
    awq: bool  # whether words hold 8 outputs in AutoAWQ's order, or inputs in their own order
    plus: int = 0  # what has to be added to stored zeros

    def tensors(self, key: str, shape: tuple[int, ...]) -> dict[str, Wanted]:
        out, into = shape[-2:]
        stem, each = key.removesuffix(".weight"), 32 // self.bits
        if into % each or out % each:
            raise ValueError(f"neither {out} outputs nor {into} inputs may fill a part of a word of {each} numbers")
        count = groups(into, self.scheme.group)
        return {
            f"{stem}.qweight": Wanted((into, out // each) if self.awq else (into // each, out), ("I32",)),
            f"{stem}.qzeros": Wanted((count, out // each), ("I32",)),
            f"{stem}.scales": Wanted((count, out), (SCALE_NAMES[self.scheme.scale_dtype],)),
            f"{stem}.g_idx": Wanted((into,), ("I32", "I64"), optional=True),
        }

    def read(self, key: str, shape: tuple[int, ...], tensors: Mapping[str, Stored]) -> Matrix:
        (out, into), stem = shape[-2:], key.removesuffix(".weight")
        check_order(f"{stem}.g_idx", tensors, into, self.scheme.group)
        words, stored = tensors[f"{stem}.qweight"].read(), tensors[f"{stem}.qzeros"].read().view(np.uint32)
        # Tools take one from whole words, so that a zero of 0 borrows from its neighbour.
        stored = stored + np.uint32(sum(self.plus << bit for bit in range(0, 32, self.bits)))
        zeros = self._outputs(stored, out).T
        codes = self._outputs(words, out).T if self.awq else fields(words.T, self.bits, into)
        middle, zeros = 1 << (self.bits - 1), zeros.astype(np.int16)
        if not self.scheme.zeros and (zeros != middle).any():
            raise ValueError(f"{stem}.qzeros has values {zeros.min()} .. {zeros.max()}; expected {middle}, as the config says 'sym'")
        if self.bits == 8:
            codes, zeros = codes ^ np.uint8(0x80), zeros - 128
        return Matrix(codes, tensors[f"{stem}.scales"].read().T, zeros if self.scheme.zeros else None)

    def _outputs(self, words: np.ndarray, out: int) -> np.ndarray:
        """Numbers of words along the outputs: [..., out]."""
        numbers = fields(words, self.bits, out)
        return numbers.reshape(*numbers.shape[:-1], -1, 8)[..., AWQ_ORDER].reshape(numbers.shape) if self.awq else numbers


def _left_float(config: Mapping[str, Any], told: str) -> list[str]:
    """The modules that `extra_config` leaves in 16 or 32 bits, among which AutoRound lists those of the image tower. Raises ValueError
    for one that is quantised in another way than the rest."""
    found = []
    for name, own in _object(config, "extra_config", told).items():
        if not isinstance(own, Mapping) or not isinstance(own.get("bits") or 0, int):
            raise ValueError(f"{told} has {own!r} for {name} in extra_config; expected an object of settings, with a whole number of bits")
        if (own.get("bits") or 0) >= 16:
            found.append(name)
        elif other := {key: value for key, value in own.items() if key in WEIGHTS and value != config.get(key, WEIGHTS[key])}:
            raise ValueError(
                f"{told} has settings of single layers (extra_config): {name} has {other}; expected those of the rest, or 16 bits"
            )
    return found


def _object(config: Mapping[str, Any], key: str, told: str) -> Mapping[str, Any]:
    found = config.get(key) or {}
    if not isinstance(found, Mapping):
        raise ValueError(f"{told} has {key} {found!r}; expected an object")
    return found


def read(method: str, config: Mapping[str, Any], keys: Collection[str] | None, *, scale_dtype: str) -> Quantisation:
    """What a quantization_config of quant_method "gptq", "auto-round" or "awq" says. keys: of all tensors in the file, which tell which
    modules are quantised; None if the file is not there, and then it is those of the layers but the router. scale_dtype: of the scales
    in the file. Raises ValueError for what is not served."""
    bits: Any = config.get("bits")
    group = config.get("group_size", 128)
    told = f"quant_method {method!r} with {bits!r} bits, group_size {group!r}"
    awq = method == "awq"
    if type(bits) is not int or bits not in ((4,) if awq else (4, 8)) or type(group) is not int or not (group > 0 or group == -1):
        raise ValueError(f"{told}; served are {'4 bits' if awq else '4 and 8 bits'} and a group_size that is positive or -1")
    own = {name: value for name, value in _object(config, "dynamic", told).items() if not str(name).startswith("-:")}
    left_float = _left_float(config, told)
    if own:
        raise ValueError(f"{told} has settings of single layers (dynamic); expected none")
    packing = config.get("packing_format", "auto_round:auto_gptq")
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if method == "auto-round" and packing != "auto_round:auto_gptq":
        raise ValueError(f"{told} has packing_format {packing!r}; served is 'auto_round:auto_gptq'")
    if awq and (version != "gemm" or not config.get("zero_point", True)):
        raise ValueError(f"{told} has version {version!r} and zero_point {config.get('zero_point')!r}; served is 'gemm' with zero points")
    layout = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    if method == "gptq" and layout not in ("gptq", "gptq_v2"):
        raise ValueError(f"{told} has format {layout!r}; served are 'gptq' and 'gptq_v2'")
    zeros = awq or not config.get("sym", True)
    scheme = Scheme(f"int{bits}", None if group == -1 else group, zeros, scale_dtype)
    made = Columns(scheme, bits, awq, plus=0 if awq or layout == "gptq_v2" else 1)
    left_out = (*names_in(config, "modules_to_not_convert"), *left_float)

    def format_of(name: str) -> Format | None:
        if keys is not None:
            return made if any(f"{one}.qweight" in keys for one in names_of(name)) else None
        return made if ".layers." in name and ".router." not in name and not any(one in name for one in left_out) else None

    return Quantisation(f"{method} of {bits} bits", format_of)
