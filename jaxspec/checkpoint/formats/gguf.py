"""How GGUF files hold a quantised matrix: see `gguf.blocks`. The types of its tensors are all that a file says of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np

from jaxspec.checkpoint.formats.rules import names_of
from jaxspec.checkpoint.gguf.blocks import BY_NAME, Blocks, Kind
from jaxspec.checkpoint.gguf.folder import beside
from jaxspec.checkpoint.quantisation import Format, Matrix, Quantisation, Scheme, Wanted
from jaxspec.checkpoint.safetensors import Stored

# llama.cpp multiplies a scale of 16 bits with one of 6 in float32. Here the product is rounded to the dtype of the first.
SCALES = "float16"
OFFSET = 8  # what is added to symmetric codes of 4 bits, so that they are not negative
TYPES = tuple(name for name, kind in BY_NAME.items() if kind.numbers is not None)


@dataclasses.dataclass(frozen=True)
class InBlocks:
    """A matrix in blocks, of a scheme that holds the numbers of its type: its own, or a wider one that it shares with other matrices of
    its leaf."""

    scheme: Scheme

    def tensors(self, key: str, shape: tuple[int, ...]) -> dict[str, Wanted]:
        return {key: Wanted(shape, TYPES)}

    def read(self, key: str, shape: tuple[int, ...], tensors: Mapping[str, Stored]) -> Matrix:
        held = tensors[key]
        assert isinstance(held, Blocks) and self.scheme.group is not None
        codes, scale, least = held.numbers()
        if self.scheme.kind == "int4" and not held.kind.has_least:
            codes = codes + np.int8(OFFSET)
        scale = self._of_groups(scale, held.kind, shape)
        zero = None
        if self.scheme.affine and least is not None:
            zero = self._of_groups(least, held.kind, shape)
        elif self.scheme.affine:
            zero = -OFFSET * scale if self.scheme.kind == "int4" else np.zeros_like(scale)
        if zero is not None and not np.isfinite(zero).all():
            raise ValueError(f"{key}: its least numbers are not all finite in {SCALES}")
        return Matrix(codes.view(np.uint8).reshape(shape), scale, zero)

    def _of_groups(self, numbers: np.ndarray, kind: Kind, shape: tuple[int, ...]) -> np.ndarray:
        """Numbers of groups of the type, [blocks, groups], for each group of the scheme: [..., out, groups]."""
        assert self.scheme.group is not None
        with np.errstate(over="ignore"):  # whoever takes them looks for infinite ones
            rounded = numbers.astype(SCALES).reshape(*shape[:-1], -1)
        return np.repeat(rounded, kind.group // self.scheme.group, axis=-1)


def read(stored: Mapping[str, Stored]) -> Quantisation | None:
    """How the matrices of a model in a GGUF file are quantised, None where all are float. stored: its tensors, as `gguf.read_model` gives
    them."""
    types = {key: tensor.kind for key, tensor in stored.items() if isinstance(tensor, Blocks)}
    if not types:
        return None

    def format_of(name: str) -> Format | None:
        key = next((key for one in names_of(name) for key in (f"{one}.weight", one) if key in types), None)
        return None if key is None else InBlocks(scheme_for([types[other] for other in beside(key, types)]))

    weights = dict.fromkeys((kind.name for kind in types.values()), 0)
    for key, kind in types.items():
        weights[kind.name] += math.prod(stored[key].shape)
    return Quantisation(f"GGUF of {' and '.join(sorted(weights, key=lambda name: -weights[name]))}", format_of)


def scheme_for(kinds: list[Kind]) -> Scheme:
    """The scheme that holds the numbers of all these types."""
    bits, group = max(kind.bits for kind in kinds), math.gcd(*(kind.group for kind in kinds))
    least = any(kind.has_least for kind in kinds)
    return Scheme(f"int{bits}", group, zeros=least, scale_dtype=SCALES, affine=least)
