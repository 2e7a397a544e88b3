"""How compressed-tensors and ModelOpt hold a quantised matrix: 4-bit and 8-bit integers in words, 8-bit numbers as they are, and NVFP4.

The tensors beside a matrix are named after it: `q_proj.weight` has `q_proj.weight_scale`, and the experts' `gate_up_proj` has
`gate_up_proj_scale`. The formulas are those of `compressed_tensors/compressors` 0.20.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoint.quantisation import Matrix, Scheme, Wanted
from jaxspec.checkpoint.safetensors import Stored

SCALE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # of a scheme's scale_dtype in safetensors
# What the activations would be quantised with, in the configs that have them: weights alone are quantised here.
ACTIVATIONS = ("_scale", "_global_scale", "_zero_point")


def fields(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Unsigned numbers of 4 or 8 bits out of integers: [..., count] uint8. words: [..., n] of any integer dtype; the first number lies in
    the least significant bits of the first word."""
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 4:  # each half of a byte gets a byte, in one number of 16 bits
        wide = data.astype("<u2")
        wide |= wide << 4
        wide &= 0x0F0F
        data = wide.view(np.uint8)
    return data[..., :count]


def named(key: str, suffix: str) -> str:
    """The key of a tensor beside the matrix of a key."""
    return f"{key}_{suffix}"


def activation_tensors(key: str) -> dict[str, Wanted]:
    """Scales of a layer's inputs, which may be there and are not read."""
    stem = key.removesuffix("weight")
    dtypes = ("F32", "BF16", "F16", "I8", "F8_E4M3")
    return {f"{stem}input{name}": Wanted((), dtypes, optional=True) for name in ACTIVATIONS} if stem != key else {}


def groups(into: int, group: int | None) -> int:
    """How many scales a row of the matrix has. Raises ValueError if the groups do not fill the row."""
    if group is not None and into % group:
        raise ValueError(f"its rows of {into} are not made of groups of {group}")
    return 1 if group is None else into // group


@dataclasses.dataclass(frozen=True)
class Words:
    """Integers of 4 or 8 bits in 32-bit words (`pack-quantized`)."""

    scheme: Scheme
    bits: int

    def tensors(self, key: str, shape: tuple[int, ...]) -> dict[str, Wanted]:
        *lead, out, into = shape
        count = groups(into, self.scheme.group)
        wanted = {
            named(key, "packed"): Wanted((*lead, out, self._words(into)), ("I32",)),
            named(key, "scale"): Wanted((*lead, out, count), (SCALE_NAMES[self.scheme.scale_dtype],)),
            named(key, "shape"): Wanted((len(shape),), ("I64", "I32"), optional=True),
            named(key, "g_idx"): Wanted((into,), ("I32", "I64"), optional=True),
        }
        if self.scheme.zeros:
            wanted[named(key, "zero_point")] = Wanted((*lead, self._words(out), count), ("I32",))
        return wanted | activation_tensors(key)

    def read(self, key: str, shape: tuple[int, ...], tensors: Mapping[str, Stored]) -> Matrix:
        *lead, out, into = shape
        told = tensors.get(named(key, "shape"))
        if told is not None and tuple(told.read().tolist()) != tuple(shape):
            raise ValueError(f"{named(key, 'shape')} says {told.read().tolist()}, but the matrix is {list(shape)}")
        check_order(named(key, "g_idx"), tensors, into, self.scheme.group)
        codes = self._signed(fields(tensors[named(key, "packed")].read(), self.bits, into))
        zero = None
        if self.scheme.zeros:  # in words along the outputs
            words = np.swapaxes(tensors[named(key, "zero_point")].read(), -1, -2)
            zero = np.swapaxes(self._signed(fields(words, self.bits, out)), -1, -2)
            zero = zero.view(np.int8) if self.bits == 8 else zero
        return Matrix(codes, tensors[named(key, "scale")].read(), zero)

    def _words(self, count: int) -> int:
        return -(-count * self.bits // 32)

    def _signed(self, numbers: np.ndarray) -> np.ndarray:
        """Codes as a Packed has them: of 8 bits in two's complement, while the file has them unsigned."""
        return numbers ^ np.uint8(0x80) if self.bits == 8 else numbers


def check_order(key: str, tensors: Mapping[str, Stored], into: int, group: int | None) -> None:
    """Raises ValueError if the tensor of this key, where there is one, gives inputs to groups in another order than their own."""
    if key in tensors:
        order = tensors[key].read()
        if not (np.array_equal(order, np.arange(into) // (group or into)) or (order == -1).all()):
            raise ValueError(f"{key} puts inputs into groups out of order (actorder 'group', desc_act); expected groups of inputs in order")


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Numbers of 8 bits as they are, float8_e4m3fn or int8 (`float-quantized`, `int-quantized`, `naive-quantized`; ModelOpt's FP8)."""

    scheme: Scheme
    strategy: str  # how many weights share a scale: "tensor", "channel", "group" or "block"
    block: tuple[int, int] = (1, 1)  # outputs and inputs that do, of strategy "block"; the last blocks may be cut off
    suffix: str = "scale"  # of the scales' key

    def tensors(self, key: str, shape: tuple[int, ...]) -> dict[str, Wanted]:
        *lead, out, into = shape
        if self.strategy == "block":
            scales: tuple[int, ...] = (*lead, -(-out // self.block[0]), -(-into // self.block[1]))
        else:
            scales = () if self.strategy == "tensor" else (*lead, out, groups(into, self.scheme.group))
        wanted = {
            key: Wanted(shape, ("F8_E4M3" if self.scheme.kind == "fp8" else "I8",)),
            named(key, self.suffix): Wanted(scales, (SCALE_NAMES[self.scheme.scale_dtype],)),
        }
        if self.scheme.zeros:
            wanted[named(key, "zero_point")] = Wanted(scales, ("I8",))
        return wanted | activation_tensors(key)

    def read(self, key: str, shape: tuple[int, ...], tensors: Mapping[str, Stored]) -> Matrix:
        zero = tensors[named(key, "zero_point")].read() if self.scheme.zeros else None
        scale = tensors[named(key, self.suffix)].read()
        return Matrix(tensors[key].read().view(np.uint8), self._rows(scale, shape), None if zero is None else self._rows(zero, shape))

    def _rows(self, numbers: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Scales or zeros of each output: [..., out, groups]."""
        if self.strategy == "tensor":
            return np.full((*shape[:-1], 1), numbers.reshape(()), numbers.dtype)
        if self.strategy == "block":
            return np.repeat(numbers, self.block[0], axis=-2)[..., : shape[-2], :]
        return numbers


@dataclasses.dataclass(frozen=True)
class Float4:
    """NVFP4: pairs of float4_e2m1fn in bytes, a float8_e4m3fn scale for each 16 inputs, and a scale of the tensor.

    The scale of a group is the quotient of both, or in ModelOpt's files their product, in float32, so `scheme.scale_dtype` is float32.
    """

    scheme: Scheme
    codes: str  # what is added to a matrix's key for its codes
    scale: str  # and for the tensor's scale
    divides: bool  # whether the tensor's scale divides a group's, or multiplies it

    def tensors(self, key: str, shape: tuple[int, ...]) -> dict[str, Wanted]:
        *lead, out, into = shape
        wanted = {
            key + self.codes: Wanted((*lead, out, into // 2), ("U8",)),
            named(key, "scale"): Wanted((*lead, out, groups(into, self.scheme.group)), ("F8_E4M3",)),
            key + self.scale: Wanted((*lead, 1) if lead else (), ("F32",)),
        }
        return wanted | activation_tensors(key)

    def read(self, key: str, shape: tuple[int, ...], tensors: Mapping[str, Stored]) -> Matrix:
        *lead, _, into = shape
        whole: Any = tensors[key + self.scale].read()
        whole = whole.reshape(*lead, 1, 1) if lead else whole.reshape(())
        if not (np.isfinite(whole).all() and (whole > 0).all()):
            raise ValueError(f"{key + self.scale} is {whole.ravel()[:4].tolist()}; expected positive numbers")
        scale = tensors[named(key, "scale")].read().astype(np.float32)
        codes = fields(tensors[key + self.codes].read(), 4, into)
        return Matrix(codes, scale / whole if self.divides else scale * whole)
