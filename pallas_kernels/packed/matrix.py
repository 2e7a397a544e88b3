"""The type `Packed`, and its codes in and out of their order in memory. See the package for the order."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.packed.rounding import multiply_add

BLOCK = 64  # outputs and inputs of a block
LANES, WORDS = 32, 16  # rows and columns of a slab of 32-bit words


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a code stands for a number."""

    bits: int
    # The number that is subtracted from a code where no zeros are given: codes of "int4" are stored unsigned.
    offset: int = 0


# int4: 0 .. 15, less 8. int8: two's complement. fp8: float8_e4m3fn. fp4: float4_e2m1fn, a sign and an index into 0 .5 1 1.5 2 3 4 6.
KINDS = {"int4": Kind(4, 8), "int8": Kind(8), "fp8": Kind(8), "fp4": Kind(4)}
# Where the bits of "fp8" lie: those of a word of bytes that are in a mask move so far to the left.
FP8_BITS = ((0x00800080, 8), (0x007F007F, 4), (0x80008000, -4), (0x70007000, 0), (0x0F000F00, -8))


META = ("kind", "over", "cut", "inputs", "affine")


@functools.partial(jax.tree_util.register_dataclass, data_fields=("words", "scale", "zero"), meta_fields=META)
@dataclasses.dataclass(frozen=True)
class Packed:
    """A matrix [*out, *in] of few bits a weight. Its fields may be arrays, ShapeDtypeStructs or shardings.

    The last output axis and the last input axis are cut into blocks; where 64 does not divide them, zeros fill the last block.
    """

    # [*out', O / 64, *in', I / 64, slabs, 32, 16] uint32, where out' and in' are all axes but the last.
    words: Any
    # [*out', O / 64, *in', I / 64, 32, 2 G]; with one scale for each output all axes of `in` are 1, and so is G.
    scale: Any
    # The code that stands for zero, like `scale` and in its dtype; None for the kind's offset. In an affine matrix it is
    # the number that a code of 0 stands for.
    zero: Any
    kind: str
    # How many axes `in` are.
    over: int
    # How many outputs and inputs of the last blocks are filling.
    cut: tuple[int, int]
    # What the rows of a product with this matrix are rounded to first: "fp8" (see `float8_rows`), or None for rows as they are.
    inputs: str | None = None
    # Whether a weight is code * scale + zero and not (code - zero) * scale. Codes of "int4" are then 0 .. 15.
    affine: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[*out, *in], without the filling."""
        *axes, _, _, _ = self.words.shape
        for axis, filling in zip((len(axes) - self.over - 1, len(axes) - 1), self.cut, strict=True):
            axes[axis] = axes[axis] * BLOCK - filling
        return tuple(axes)

    @property
    def ndim(self) -> int:
        return self.words.ndim - 3

    @property
    def size(self) -> int:
        """How many weights there are."""
        return math.prod(self.shape)

    @property
    def groups(self) -> int | None:
        """Groups of inputs in a block, each with a scale of its own; None where each output has one scale."""
        *inner, _, columns = self.scale.shape[self.ndim - self.over :]
        return None if math.prod(inner) == 1 and columns == 2 else columns // 2

    @property
    def takes_codes(self) -> bool:
        """Whether codes of rounded rows may be multiplied with the matrix's, and the sums by scales: by one of an output and no more."""
        return self.inputs == self.kind == "fp8" and self.groups is None and self.zero is None

    def flat(self) -> Packed:
        """The same as a matrix [out, in] with one axis each. ValueError if blocks are filled up, and so cannot be joined."""
        if any(self.cut):
            raise ValueError(f"the matrix is {list(self.shape)}, whose blocks of {BLOCK} are not all full")

        def joined(x: Any) -> Any:
            out, rest = math.prod(x.shape[: self.ndim - self.over]), x.shape[self.ndim :]
            return x.reshape(out, math.prod(x.shape[self.ndim - self.over : self.ndim]), *rest)

        zero = None if self.zero is None else joined(self.zero)
        return dataclasses.replace(self, words=joined(self.words), scale=joined(self.scale), zero=zero, over=1, cut=(0, 0))


def abstract(
    shape: tuple[int, ...],
    kind: str,
    *,
    over: int = 1,
    group: int | None,
    zeros: bool = False,
    affine: bool = False,
    scale_dtype: Any,
) -> Packed:
    """A packed matrix of shape [*out, *in] as ShapeDtypeStructs. over: how many axes `in` are. group: inputs that share a scale; None for
    one scale an output. zeros: whether it has zeros. affine: see `Packed`; ValueError without zeros, or for codes that are no integers."""
    _check_affine(affine, kind, zeros)
    out, into = shape[: len(shape) - over], shape[len(shape) - over :]
    blocks = [*(*out[:-1], -(-out[-1] // BLOCK)), *(*into[:-1], -(-into[-1] // BLOCK))]
    cut = tuple(-axis[-1] % BLOCK for axis in (out, into))
    count = groups_of(into[-1], group)
    scales = blocks if count else [*blocks[: len(out)], *[1] * over]
    scale = jax.ShapeDtypeStruct((*scales, LANES, 2 * (count or 1)), scale_dtype)
    words = jax.ShapeDtypeStruct((*blocks, KINDS[kind].bits // 4, LANES, WORDS), jnp.uint32)
    return Packed(words, scale, scale if zeros else None, kind, over, (cut[0], cut[1]), affine=affine)


def _check_affine(affine: bool, kind: str, zeros: bool) -> None:
    if affine and not zeros:
        raise ValueError("the matrix is affine and has no zeros; expected for each scale the number that a code of 0 stands for")
    if affine and kind not in ("int4", "int8"):
        raise ValueError(f"the matrix is affine and has codes of {kind}; expected int4 or int8")


def groups_of(width: int, group: int | None) -> int | None:
    """Groups of a block, of inputs that share a scale: a longer group counts once in each of its blocks. None for one scale an output.

    width: of the last input axis. Raises ValueError for groups that do not divide a block and that 64 does not divide either."""
    if group is None:
        return None
    if group < 1 or (BLOCK % group and group % BLOCK and group < width):
        raise ValueError(f"groups have {group} inputs; expected a divisor or a multiple of {BLOCK}")
    return max(1, BLOCK // group)


def pack(
    codes: jax.Array,
    scale: jax.Array,
    zero: jax.Array | None = None,
    *,
    kind: str,
    over: int = 1,
    group: int | None = None,
    affine: bool = False,
) -> Packed:
    """A packed matrix of its codes.

    codes: [*out, *in] uint8, the bits of each code (4-bit codes below 16). scale: [*out, *in', ceil(I / group)], of the groups of the
    last input axis in their order, or without groups [*out, 1, ...]. zero: like scale, or None. group, affine: see `abstract`.
    """
    _check_affine(affine, kind, zero is not None)
    split = codes.ndim - over
    out, into = codes.shape[:split], codes.shape[split:]
    cut = (-out[-1] % BLOCK, -into[-1] % BLOCK)
    pads = [(0, 0)] * codes.ndim
    pads[split - 1], pads[-1] = (0, cut[0]), (0, cut[1])
    words = _words(jnp.pad(codes, pads), split, KINDS[kind].bits)
    words = _moved(words, FP8_BITS) if kind == "fp8" else words
    numbers = functools.partial(_scales, split=split, width=into[-1], cut=cut[0], group=group)
    zero = None if zero is None else numbers(zero.astype(scale.dtype))
    return Packed(words, numbers(scale), zero, kind, over, cut, affine=affine)


def _words(codes: jax.Array, split: int, bits: int) -> jax.Array:
    """Codes of whole blocks, in words: [*out', O / 64, *in', I / 64, slabs, 32, 16]."""
    out, into = codes.shape[:split], codes.shape[split:]
    slabs = bits // 4
    # The axes w, h, r of an output, and slab, s, e, c, b of an input.
    fine = codes.astype(jnp.uint32).reshape(*out[:-1], -1, 4, 2, 8, *into[:-1], into[-1] // BLOCK, slabs, 4 // slabs, 2, 4, 2)
    lead, w = len(out) - 1, len(out)
    first = w + 3  # of the input's axes
    slab = first + len(into)
    h, r, s, e, c, b = w + 1, w + 2, slab + 1, slab + 2, slab + 3, slab + 4
    leading = (*range(lead + 1), *range(first, slab + 1))
    if bits == 4:
        fine = fine.transpose(*leading, w, r, c, s, b, e, h)
        shift = 4 * jnp.arange(8, dtype=jnp.uint32)
    else:
        fine = fine.transpose(*leading, w, r, c, s, e, b, h)
        shift = 8 * jnp.arange(4, dtype=jnp.uint32)
    shape = fine.shape[: len(leading)]
    fields = fine.reshape(*shape, LANES, WORDS, 32 // bits)
    return jnp.sum(fields << shift.reshape((1,) * (fields.ndim - 1) + shift.shape), axis=-1, dtype=jnp.uint32)


def _moved(words: jax.Array, bits: tuple[tuple[int, int], ...]) -> jax.Array:
    """Words whose bits in each mask lie so far to the left."""
    parts = [words & jnp.uint32(mask) for mask, _ in bits]
    moved = [part << left if left > 0 else part >> -left for part, (_, left) in zip(parts, bits, strict=True)]
    return functools.reduce(jnp.bitwise_or, moved)


def _bytes(packed: Packed) -> jax.Array:
    """The words of a matrix with the codes of 8 bits in bytes."""
    if packed.kind != "fp8":
        return packed.words
    return _moved(packed.words, tuple((mask << left if left > 0 else mask >> -left, -left) for mask, left in FP8_BITS))


def _scales(scale: jax.Array, *, split: int, width: int, cut: int, group: int | None) -> jax.Array:
    """Scales, or zeros, in the order of blocks: [*out', O / 64, *in', I / 64, 32, 2 G]. width: I. cut: the filling of O."""
    out, inner = scale.shape[:split], scale.shape[split:-1]
    count, blocks = groups_of(width, group) or 1, 1 if group is None else -(-width // BLOCK)
    if group is not None and group > BLOCK:  # its scale stands in each of its blocks
        scale = jnp.repeat(scale, -(-min(group, width) // BLOCK), axis=-1)[..., :blocks]
    pads = [(0, 0)] * scale.ndim
    pads[split - 1], pads[-1] = (0, cut), (0, blocks * count - scale.shape[-1])
    fine = jnp.pad(scale, pads).reshape(*out[:-1], (out[-1] + cut) // BLOCK, 4, 2, 8, *inner, blocks, count)
    w, last = split, fine.ndim - 1
    fine = fine.transpose(*range(w), *range(w + 3, last), w, w + 2, last, w + 1)
    return fine.reshape(*fine.shape[:-4], LANES, 2 * count)


def codes_of(packed: Packed) -> jax.Array:
    """The codes in the order of the matrix, with the filling: [*out, *in] uint8."""
    bits, split = KINDS[packed.kind].bits, packed.ndim - packed.over
    *blocks, slabs, _, _ = packed.words.shape
    shift = bits * jnp.arange(32 // bits, dtype=jnp.uint32)
    fields = (_bytes(packed)[..., None] >> shift.reshape((1,) * packed.words.ndim + shift.shape)) & jnp.uint32(2**bits - 1)
    names = "wrcsbeh" if bits == 4 else "wrcsebh"
    sizes = {"w": 4, "r": 8, "c": 4, "s": 4 // slabs, "b": 2, "e": 2, "h": 2}
    fine = fields.reshape(*blocks, slabs, *(sizes[name] for name in names))
    at = {name: len(blocks) + 1 + i for i, name in enumerate(names)}
    order = (*range(split), at["w"], at["h"], at["r"], *range(split, len(blocks) + 1), *(at[name] for name in "secb"))
    axes = [*blocks]
    axes[split - 1] *= BLOCK
    axes[-1] *= BLOCK
    return fine.transpose(order).reshape(axes).astype(jnp.uint8)


def numbers_of(packed: Packed, numbers: jax.Array) -> jax.Array:
    """Scales or zeros, one for each weight or each output, in the order of the matrix with the filling: [*out, *in] or [*out, 1, ...]."""
    split = packed.ndim - packed.over
    blocks, groups = numbers.shape[:-2], numbers.shape[-1] // 2
    fine = numbers.reshape(*blocks, 4, 8, groups, 2)
    w, r, g, h = range(len(blocks), len(blocks) + 4)
    fine = fine.transpose(*range(split), w, h, r, *range(split, len(blocks)), g)
    axes = [*blocks]
    axes[split - 1] *= BLOCK
    axes[-1] *= groups
    fine = fine.reshape(axes)
    return fine if packed.groups is None else jnp.repeat(fine, BLOCK // groups, axis=-1)


def float8_of(packed: Packed) -> jax.Array:
    """The codes of a matrix [O, I] of "fp8" with full blocks, as numbers float8_e4m3fn."""
    return jax.lax.bitcast_convert_type(codes_of(packed), jnp.float8_e4m3fn)


def scales_of(packed: Packed) -> jax.Array:
    """The scales [O] of a matrix [O, I] with full blocks that has one for each output."""
    return numbers_of(packed, packed.scale)[:, 0]


def values_of(codes: jax.Array, kind: str) -> jax.Array:
    """What codes mean before scales and zeros, float32, exact. codes: [...] uint8."""
    if kind == "int4":
        return codes.astype(jnp.float32)
    if kind == "int8":
        return jax.lax.bitcast_convert_type(codes, jnp.int8).astype(jnp.float32)
    if kind == "fp8":
        return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)
    magnitude = codes & 7
    # Exponent 0 means subnormal: 0 and 0.5.
    exponent, half = (magnitude >> 1).astype(jnp.int32), (magnitude & 1).astype(jnp.float32)
    value = jnp.where(exponent == 0, half * 0.5, (1 + half * 0.5) * jnp.exp2((exponent - 1).astype(jnp.float32)))
    return jnp.where(codes >= 8, -value, value)


def unpack(packed: Packed, dtype: Any = None) -> jax.Array:
    """The weights [*out, *in], in the scale's dtype or cast to `dtype`."""
    weights = _weights(packed, codes_of(packed), lambda numbers: numbers_of(packed, numbers).astype(jnp.float32))
    return weights[tuple(slice(0, size) for size in packed.shape)].astype(dtype or packed.scale.dtype)


def unpack_rows(packed: Packed, rows: jax.Array, dtype: Any = None) -> jax.Array:
    """Some rows of a matrix [O, I] of 8-bit codes: as `unpack` gives them, without the others.

    rows: [...] int32, each 0 .. O - 1. Returns [..., I]."""
    assert KINDS[packed.kind].bits == 8 and packed.over == 1
    block, row = rows // BLOCK, rows % BLOCK
    lane, h = row // 16 * 8 + row % 8, row // 8 % 2
    words = _bytes(packed)[block, :, :, lane]  # [..., I / 64, slabs, 16]
    fields = jnp.stack([words >> (8 * h + shift).astype(jnp.uint32)[..., None, None, None] for shift in (0, 16)], axis=-1) & jnp.uint32(255)
    # The axes c, s, e, b of a word's place and its bytes.
    fine = fields.reshape(*fields.shape[:-2], 4, 2, 2, 2)
    codes = jnp.moveaxis(fine, -4, -2).reshape(*rows.shape, -1).astype(jnp.uint8)

    def of_rows(numbers: jax.Array) -> jax.Array:
        found = numbers[block, :, lane].astype(jnp.float32)  # [..., I / 64 or 1, 2 G]
        found = jnp.where(h[..., None, None] == 0, found[..., 0::2], found[..., 1::2]).reshape(*rows.shape, -1)
        return found if packed.groups is None else jnp.repeat(found, BLOCK // packed.groups, axis=-1)

    weights = _weights(packed, codes, of_rows)
    return weights[..., : packed.shape[-1]].astype(dtype or packed.scale.dtype)


def _weights(packed: Packed, codes: jax.Array, spread: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """What codes mean, float32 rounded to the scale's dtype. spread: from scales or zeros to one for each of these codes, float32."""
    values, scale = values_of(codes, packed.kind), spread(packed.scale)
    zero = None if packed.zero is None else spread(packed.zero)
    if packed.affine:
        assert zero is not None
        weights = multiply_add(values, scale, zero, packed.scale.dtype)
    else:
        weights = (values - (KINDS[packed.kind].offset if zero is None else zero)) * scale
    return rounded(weights, packed.scale.dtype)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """float32 x as a number of `dtype`, still in float32. XLA may leave out a cast to and fro, but never this."""
    info = jnp.finfo(dtype)
    return x if info.nmant >= 23 else jax.lax.reduce_precision(x, max(info.nexp, 8), info.nmant)
