"""How GGUF files hold a quantised matrix: see `gguf.blocks`. The types of its tensors are all that a file says of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.checkpoint.formats.rules import names_of
from jaxspec.checkpoint.gguf.blocks import BY_NAME, Blocks, Kind
from jaxspec.checkpoint.gguf.folder import beside
from jaxspec.checkpoint.quantisation import EMBEDDING, PER_LAYER, Format, Matrix, Quantisation, Scheme, Wanted
from jaxspec.checkpoint.safetensors import Stored

# llama.cpp multiplies a scale of 16 bits with one of 6 in float32. Here the product is rounded to the dtype of the first.
SCALES = "float16"
AT_ONCE = 1 << 24  # weights that are read at a time
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
        held, count, width = tensors[key], math.prod(shape[:-1]), shape[-1]
        assert self.scheme.group is not None
        codes = np.empty((count, width), np.uint8)
        scale = np.empty((count, width // self.scheme.group), SCALES)
        zero = np.empty_like(scale) if self.scheme.affine else None
        at_once = max(1, AT_ONCE // width)
        for start in range(0, count, at_once):  # few, so that what comes up on the way is small
            rows = held.rows((count, width), start, min(start + at_once, count))
            assert isinstance(rows, Blocks)
            self._read_rows(rows, *(None if x is None else x[start : start + at_once] for x in (codes, scale, zero)))
        if zero is not None and not np.isfinite(zero).all():
            raise ValueError(f"{key}: its least numbers are not all finite in {SCALES}")
        lead = shape[:-1]
        return Matrix(codes.reshape(shape), scale.reshape(*lead, -1), None if zero is None else zero.reshape(*lead, -1))

    def _read_rows(self, held: Blocks, codes: Any, scale: Any, zero: Any) -> None:
        """Reads some rows into arrays [rows, in], and of scales and least numbers [rows, groups]."""
        own, scales, leasts = held.numbers()
        symmetric = self.scheme.kind == "int4" and not held.kind.has_least
        codes[:] = (own + np.int8(OFFSET) if symmetric else own).view(np.uint8).reshape(codes.shape)
        again = scale.size // scales.size  # groups of the scheme in one of the type
        with np.errstate(over="ignore"):  # whoever takes them looks for infinite ones
            scale[:] = np.repeat(scales.astype(SCALES), again, axis=-1).reshape(scale.shape)
            if leasts is not None:
                zero[:] = np.repeat(leasts.astype(SCALES), again, axis=-1).reshape(scale.shape)
            elif zero is not None:
                zero[:] = -OFFSET * scale if symmetric else 0


def read(stored: Mapping[str, Stored]) -> Quantisation | None:
    """How the matrices of a model in a GGUF file are quantised, None where all are float. stored: its tensors, as `gguf.read_model` gives
    them."""
    types = {key: tensor.kind for key, tensor in stored.items() if isinstance(tensor, Blocks)}
    if not types:
        return None

    def format_of(name: str) -> Format | None:
        # A leaf of which a matrix is missing has a scheme too, so that the missing one is named where all are read.
        ways = (beside(key, types) for one in names_of(name) for key in (f"{one}.weight", one))
        keys = next(filter(None, ways), None)
        return None if keys is None else InBlocks(scheme_for([types[key] for key in keys]))

    tables = [types.get(f"model.{name}.weight") for name in (EMBEDDING, PER_LAYER)]
    embedding, per_layer = (kind and InBlocks(scheme_for([kind], gathered=True)) for kind in tables)
    weights = dict.fromkeys((kind.name for kind in types.values()), 0)
    for key, kind in types.items():
        weights[kind.name] += math.prod(stored[key].shape)
    name = " and ".join(sorted(weights, key=lambda name: -weights[name]))
    return Quantisation(f"GGUF of {name}", format_of, embedding=embedding, per_layer=per_layer)


def scheme_for(kinds: list[Kind], *, gathered: bool = False) -> Scheme:
    """The scheme that holds the numbers of all these types. gathered: whether rows are, which then have 8 bits."""
    bits, group = 8 if gathered else max(kind.bits for kind in kinds), math.gcd(*(kind.group for kind in kinds))
    least = any(kind.has_least for kind in kinds)
    return Scheme(f"int{bits}", group, zeros=least, scale_dtype=SCALES, affine=least)
