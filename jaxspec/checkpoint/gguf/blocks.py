"""The types of tensors in GGUF files: blocks of a few bits a weight, with scales of their own, and what their bytes mean.

Source: ggml's `ggml-common.h` for the blocks, and `dequantize_row_*` of `ggml-quants.c` for the numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxspec.checkpoint.safetensors import Stored

# What the 16 codes of the types IQ4_NL and IQ4_XS stand for.
TABLE = np.asarray([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


class Numbers(NamedTuple):
    """Blocks as integers and what these stand for: a weight is `code * scale`, or `code * scale + least`."""

    codes: np.ndarray  # [blocks, weights of a block] int8
    scale: np.ndarray  # [blocks, groups of a block] float32, exact
    least: np.ndarray | None = None  # like `scale`, what a code of 0 stands for; None for 0


@dataclasses.dataclass(frozen=True)
class Kind:
    """A type of tensors."""

    name: str
    count: int  # weights of a block
    nbytes: int  # of a block
    numbers: Callable[[np.ndarray], Numbers] | None = None  # from blocks [blocks, bytes] uint8; None for floats
    group: int = 0  # weights that share a scale
    bits: int = 8  # 4 where codes are -8 .. 7, or with a least number 0 .. 15
    has_least: bool = False


@dataclasses.dataclass(frozen=True)
class Blocks(Stored):
    """A tensor of blocks in a file, unread. Its dtype is the name of their type."""

    @property
    def kind(self) -> Kind:
        return BY_NAME[self.dtype]

    def numbers(self) -> Numbers:
        """What the blocks hold. Raises ValueError if the file ends early."""
        assert self.kind.numbers is not None
        count = self.nbytes // self.kind.nbytes
        return self.kind.numbers(Stored(self.file, "U8", (count, self.kind.nbytes), self.offset, self.nbytes).read())


@dataclasses.dataclass(frozen=True)
class Floats(Stored):
    """A tensor of blocks that is read as the numbers that they stand for, float32."""

    held: Blocks

    @classmethod
    def of(cls, held: Blocks) -> Floats:
        return cls(held.file, "F32", held.shape, held.offset, 4 * math.prod(held.shape), held)

    def read(self, into: np.ndarray | None = None) -> np.ndarray:
        codes, scale, least = self.held.numbers()
        values = codes.reshape(*scale.shape, -1) * scale[..., None]
        values = (values if least is None else values + least[..., None]).reshape(self.shape)
        if into is None:
            return values
        into.reshape(-1)[:] = values.reshape(-1)
        return into

    def rows(self, shape: tuple[int, ...], start: int, stop: int) -> Floats:
        """As of any tensor. Raises ValueError for rows that begin or end within a block."""
        kind, row, wanted = self.held.kind, math.prod(shape[1:]), (stop - start, *shape[1:])
        if start * row % kind.count or stop * row % kind.count:
            raise ValueError(f"rows {start} .. {stop - 1} of {list(shape)} are not made of blocks of {kind.count}")
        first, last = (at * row // kind.count * kind.nbytes for at in (start, stop))
        return Floats.of(Blocks(self.file, kind.name, wanted, self.offset + first, last - first))

    def beginning(self, count: int) -> np.ndarray:
        return self.held.beginning(count)


def stored(file: Path, kind: Kind, shape: tuple[int, ...], offset: int) -> Stored:
    """A tensor in a file. Raises ValueError for a shape whose rows are not made of whole blocks."""
    if (shape[-1] if shape else 1) % kind.count:
        raise ValueError(f"it is {list(shape)} of {kind.name}; expected rows of whole blocks of {kind.count}")
    make = Stored if kind.numbers is None else Blocks
    return make(file, kind.name, shape, offset, math.prod(shape) // kind.count * kind.nbytes)


def _halves(blocks: np.ndarray, first: int, last: int | None = None) -> np.ndarray:
    """Numbers of 16 bits in these bytes of blocks: [blocks, n] float32."""
    return np.ascontiguousarray(blocks[:, first:last]).view("<f2").astype(np.float32)


def _nibbles(data: np.ndarray) -> np.ndarray:
    """The 4-bit numbers of bytes [..., n]: the low ones, then the high ones, [..., 2 n] uint8."""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _bits(data: np.ndarray, count: int, width: int = 1) -> np.ndarray:
    """Numbers of `width` bits of bytes [..., n], the lowest of all bytes first: [..., count, n] uint8."""
    return np.stack([data >> np.uint8(width * i) & np.uint8((1 << width) - 1) for i in range(count)], axis=-2)


def _q4_0(blocks: np.ndarray) -> Numbers:
    return Numbers(_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8), _halves(blocks, 0, 2))


def _q4_1(blocks: np.ndarray) -> Numbers:
    return Numbers(_nibbles(blocks[:, 4:]).view(np.int8), _halves(blocks, 0, 2), _halves(blocks, 2, 4))


def _fifth(data: np.ndarray) -> np.ndarray:
    """The fifth bits of 32 codes, from 4 bytes: [blocks, 32], each 0 or 16."""
    return np.unpackbits(data, axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(blocks: np.ndarray) -> Numbers:
    return Numbers((_nibbles(blocks[:, 6:]) | _fifth(blocks[:, 2:6])).view(np.int8) - np.int8(16), _halves(blocks, 0, 2))


def _q5_1(blocks: np.ndarray) -> Numbers:
    return Numbers((_nibbles(blocks[:, 8:]) | _fifth(blocks[:, 4:8])).view(np.int8), _halves(blocks, 0, 2), _halves(blocks, 2, 4))


def _q8_0(blocks: np.ndarray) -> Numbers:
    return Numbers(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _halves(blocks, 0, 2))


def _quarters(data: np.ndarray) -> np.ndarray:
    """The 2-bit numbers of 64 bytes, as Q2_K and Q3_K have them: of each half the lowest first, [blocks, 256] uint8."""
    return _bits(data.reshape(-1, 2, 32), 4, 2).reshape(-1, 256)


def _q2_k(blocks: np.ndarray) -> Numbers:
    scales, whole = blocks[:, :16], _halves(blocks, 80)
    codes = _quarters(blocks[:, 16:80]).view(np.int8)
    return Numbers(codes, whole[:, :1] * (scales & 15), -whole[:, 1:] * (scales >> 4))


def _q3_k(blocks: np.ndarray) -> Numbers:
    third = _bits(blocks[:, :32], 8).reshape(-1, 256)  # 0 for codes less 4
    codes = (_quarters(blocks[:, 32:96]) | third << np.uint8(2)).view(np.int8) - np.int8(4)
    low, high = _nibbles(blocks[:, 96:104]), _bits(blocks[:, 104:108], 4, 2).reshape(-1, 16)
    scales = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    return Numbers(codes, _halves(blocks, 108) * scales)


def _of_superblock(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales and least numbers of the 8 groups of blocks of Q4_K or Q5_K: each [blocks, 8]."""
    whole, six = _halves(blocks, 0, 4), blocks[:, 4:16]
    first, second, third = six[:, :4], six[:, 4:8], six[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=1)
    leasts = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=1)
    return whole[:, :1] * scales, -whole[:, 1:] * leasts


def _q4_k(blocks: np.ndarray) -> Numbers:
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 256)
    return Numbers(codes.view(np.int8), *_of_superblock(blocks))


def _q5_k(blocks: np.ndarray) -> Numbers:
    fifth = _bits(blocks[:, 16:48], 8).reshape(-1, 256) << np.uint8(4)
    codes = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 256) | fifth
    return Numbers(codes.view(np.int8), *_of_superblock(blocks))


def _q6_k(blocks: np.ndarray) -> Numbers:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 256)
    high = _bits(blocks[:, 128:192].reshape(-1, 2, 32), 4, 2).reshape(-1, 256)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return Numbers((low | high << np.uint8(4)).view(np.int8) - np.int8(32), _halves(blocks, 208) * scales)


def _iq4_nl(blocks: np.ndarray) -> Numbers:
    return Numbers(TABLE[_nibbles(blocks[:, 2:])], _halves(blocks, 0, 2))


def _iq4_xs(blocks: np.ndarray) -> Numbers:
    codes = TABLE[_nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 256)]
    low = np.stack([blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4], axis=-1).reshape(-1, 8)
    high = np.moveaxis(_bits(blocks[:, 2:4], 4, 2), -2, -1).reshape(-1, 8)
    scales = (low | high << np.uint8(4)).view(np.int8) - np.int8(32)
    return Numbers(codes, _halves(blocks, 0, 2) * scales)


# By their numbers in files.
KINDS = {
    0: Kind("F32", 1, 4),
    1: Kind("F16", 1, 2),
    2: Kind("Q4_0", 32, 18, _q4_0, 32, bits=4),
    3: Kind("Q4_1", 32, 20, _q4_1, 32, bits=4, has_least=True),
    6: Kind("Q5_0", 32, 22, _q5_0, 32),
    7: Kind("Q5_1", 32, 24, _q5_1, 32, has_least=True),
    8: Kind("Q8_0", 32, 34, _q8_0, 32),
    10: Kind("Q2_K", 256, 84, _q2_k, 16, bits=4, has_least=True),
    11: Kind("Q3_K", 256, 110, _q3_k, 16, bits=4),
    12: Kind("Q4_K", 256, 144, _q4_k, 32, bits=4, has_least=True),
    13: Kind("Q5_K", 256, 176, _q5_k, 32, has_least=True),
    14: Kind("Q6_K", 256, 210, _q6_k, 16),
    20: Kind("IQ4_NL", 32, 18, _iq4_nl, 32),
    23: Kind("IQ4_XS", 256, 136, _iq4_xs, 32),
    30: Kind("BF16", 1, 2),
}
BY_NAME = {kind.name: kind for kind in KINDS.values()}
# Of those that are not read, which errors name.
OTHERS = {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0"}
OTHERS |= {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"}
