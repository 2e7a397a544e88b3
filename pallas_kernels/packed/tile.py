"""Tiles of packed matrices in kernels in the Triton dialect.

The order in memory is the matrix unit's order in registers (see the package). So a tile is unpacked word by word, two weights at a time,
and then only renamed: its axes become a matrix's without a move between threads. Triton finds that by itself. Codes go from memory to
shared memory asynchronously and from there to registers, 16 bytes a thread; the unpacked weights never leave the registers.

Codes less their zeros are exact in pairs of 16-bit floats. Scales in bfloat16 multiply such pairs. So do scales in float16 where codes are
integers: those products are multiples of float16's least number, so its subnormals lose nothing. All other scales multiply in float32.
Products are rounded to the scale's dtype and then to x's, as by `matrix.unpack`; only beyond 65,504 a float16 product is infinite here.

In an affine matrix the codes themselves are exact. One instruction multiplies them by scales and adds the numbers that codes of 0 stand
for; it rounds the sum alone. In float16 that sum is a multiple of the least number, too. It is infinite only if the weight itself is beyond
65,504, whatever the product is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import read_once
from pallas_kernels.device import capability
from pallas_kernels.dialect import HOPPER, pl, plgpu
from pallas_kernels.packed.matrix import BLOCK, KINDS, LANES, WORDS, Packed
from pallas_kernels.packed.rounding import multiply_add, odd_sum

MOST_GROUPS = 8  # groups of a block; groups of fewer inputs would cut a thread's part of an instruction
SCALES = (jnp.bfloat16, jnp.float16, jnp.float32)
SIGNS = 0x80008000  # of a pair: both numbers are -0


@dataclasses.dataclass(frozen=True)
class Pair:
    """The type of two 16-bit floats in an int32, and the bits of numbers of which a pair has two."""

    name: str  # in PTX
    dtype: Any
    one: int
    large: int  # the least number whose last bit counts 1, so the bits of a small integer add to it

    @property
    def minus_large(self) -> int:
        return self.large | SIGNS


BFLOAT16 = Pair("bf16x2", jnp.bfloat16, 0x3F803F80, 0x43004300)  # 1 and 128
FLOAT16 = Pair("f16x2", jnp.float16, 0x3C003C00, 0x64006400)  # 1 and 1024


@dataclasses.dataclass(frozen=True)
class Form:
    """What a kernel has to know of a packed matrix [..., O, I] besides its arrays."""

    kind: str
    groups: int | None
    zeros: bool
    affine: bool
    scale: Any  # the dtype of scales
    columns: int  # O
    width: int  # I
    # Whether a word's inputs, 4 of 4 bits and 2 of 8 bits, stand side by side in a tile; else its inputs have the matrix's order. The first
    # is what Triton gives a thread for `mma.sync`, the second what `wgmma` takes. `_inputs` puts x in the same order.
    paired: bool
    interpret: bool

    @property
    def slabs(self) -> int:
        return KINDS[self.kind].bits // 4

    @property
    def pair(self) -> Pair:
        """In what pairs of codes are computed."""
        return FLOAT16 if self.scale == jnp.float16 and self.kind in ("int4", "int8") else BFLOAT16


def form(packed: Packed, interpret: bool) -> Form:
    """The form of a matrix whose `over` is 1."""
    *_, columns, width = packed.shape
    zeros, scale = packed.zero is not None, packed.scale.dtype
    return Form(packed.kind, packed.groups, zeros, packed.affine, scale, columns, width, paired(), interpret)


def paired() -> bool:
    """Whether the current device multiplies with `mma.sync`, and so takes inputs in the order that `Form.paired` describes."""
    return (capability() or HOPPER) != HOPPER


def arrays(packed: Packed) -> tuple[jax.Array, ...]:
    """The arrays of a matrix, which a kernel takes in this order."""
    return (packed.words, packed.scale) if packed.zero is None else (packed.words, packed.scale, packed.zero)


def unsupported(packed: Packed, dtype: Any) -> str | None:
    """Why kernels cannot unpack this matrix for a product with numbers of this dtype, or None."""
    if packed.over != 1:
        return f"the matrix has {packed.over} input axes; the kernel takes one"
    if (packed.groups or 1) > MOST_GROUPS:
        return f"{packed.groups} groups lie in {BLOCK} inputs; the kernel takes at most {MOST_GROUPS}"
    if packed.scale.dtype not in SCALES:
        return f"the scales are {packed.scale.dtype.name}; the kernel takes bfloat16, float16 and float32"
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"x is {dtype.name}; the kernel takes bfloat16 and float32 with a packed matrix"
    return None


def products(
    load: Callable[[Any], Sequence[jax.Array]],
    heights: Sequence[int],
    refs: Sequence[Any],
    indices: Sequence[tuple[Any, ...]],
    out: jax.Array,
    steps: tuple[Any, Any],
    depth: int,
    form: Form,
) -> list[list[jax.Array]]:
    """Products of output blocks `out` [A] of each matrix w[*index] with each piece of x: by index and piece, [64 A, R] float32.

    load: called with the first of a step's `depth` input blocks, gives the pieces of x, [R, 64 depth]. heights: R of each. refs: of
    `arrays`. steps: the first one and their number.
    """
    blocks = pl.cdiv(form.width, BLOCK)
    out_mask = None if pl.cdiv(form.columns, BLOCK) % len(out) == 0 else out * BLOCK < form.columns
    words_ref, *number_refs = refs
    first, count = steps

    def numbers(index, at, mask):
        found = [_load_numbers(ref, index, out, at, mask, form) for ref in number_refs]
        return found if form.zeros else (*found, None)

    if form.groups is None:
        mask = None if out_mask is None else out_mask[:, None]
        scales = [numbers(index, jnp.zeros(1, jnp.int32), mask) for index in indices]

    def step(i, sums):
        at = (first + i) * depth + jnp.arange(depth, dtype=jnp.int32)
        mask = None if out_mask is None else jnp.broadcast_to(out_mask[:, None], (len(out), depth))
        if blocks % depth:
            inside = jnp.broadcast_to((at < blocks)[None, :], (len(out), depth))
            mask = inside if mask is None else mask & inside
        pieces = [_inputs(x, form) for x in load((first + i) * depth)]
        added = []
        for m, index in enumerate(indices):
            words = _load_words(words_ref, index, out, at, mask, form)
            scale, zero = scales[m] if form.groups is None else numbers(index, at, mask)
            w = weights(words, scale, zero, pieces[0].dtype, form)
            for total, x in zip(sums[m], pieces, strict=True):
                precision = "highest" if x.dtype == jnp.float32 else None
                added.append(total + plgpu.dot(w, x, trans_b=True, precision=precision))
        return [added[m * len(pieces) : (m + 1) * len(pieces)] for m in range(len(indices))]

    zeros = [[jnp.zeros((len(out) * BLOCK, height), jnp.float32) for height in heights] for _ in indices]
    return jax.lax.fori_loop(0, count, step, zeros)


def unpacked(refs: Sequence[Any], out: jax.Array, into: jax.Array, dtype: Any, form: Form) -> jax.Array:
    """Blocks `out` [A] x `into` [B] of a matrix, all of which exist: [64 A, 64 B], in the order of `_inputs`. refs: of `arrays`."""
    words_ref, *number_refs = refs
    words = _load_words(words_ref, (), out, into, None, form)
    where = jnp.zeros(1, jnp.int32) if form.groups is None else into
    numbers = [_load_numbers(ref, (), out, where, None, form) for ref in number_refs]
    scale, zero = numbers if form.zeros else (*numbers, None)
    return weights(words, scale, zero, dtype, form)


def load_rows(ref: Any, row: jax.Array, kept: jax.Array | None, block: Any, depth: int, form: Form) -> jax.Array:
    """Numbers of `depth` input blocks from `block` on, of rows `row` [R] of a matrix: [R, 64 depth].

    Zeros where a row is not kept (None keeps all), and past the width."""
    at = block * BLOCK + jnp.arange(depth * BLOCK, dtype=jnp.int32)
    shape, mask = (len(row), len(at)), None
    if kept is not None:
        mask = jnp.broadcast_to(kept[:, None], shape)
    if form.width % len(at):
        inside = jnp.broadcast_to((at < form.width)[None, :], shape)
        mask = inside if mask is None else mask & inside
    return plgpu.load(ref.at[row[:, None], at[None, :]], mask=mask, other=None if mask is None else jnp.zeros((), ref.dtype))


def _load_words(ref, index, out, into, mask, form):
    """The words of blocks `out` [A] x `into` [B] of the matrix ref[*index]: [A, B, slabs, 32, 16].

    mask: bool [A, B], of the blocks that exist, or None for all. Others come as zeros."""
    places = [out[:, None, None, None, None], into[None, :, None, None, None]]
    for axis, size in enumerate((form.slabs, LANES, WORDS), 2):
        places.append(jnp.arange(size, dtype=jnp.int32).reshape([-1 if i == axis else 1 for i in range(5)]))
    return _load(ref.at[*index, *places], mask, (len(out), len(into), form.slabs, LANES, WORDS))


def _load_numbers(ref, index, out, into, mask, form):
    """The scales or zeros of blocks `out` [A] x `into` [B]: [A, B, 32, 2 G]. Without groups `into` must be [0]. mask: as above."""
    columns = 2 * (form.groups or 1)
    lane, column = jnp.arange(LANES, dtype=jnp.int32), jnp.arange(columns, dtype=jnp.int32)
    places = out[:, None, None, None], into[None, :, None, None], lane[None, None, :, None], column[None, None, None, :]
    return _load(ref.at[*index, *places], mask, (len(out), len(into), LANES, columns))


def _load(ref, mask, shape):
    if mask is None:
        return plgpu.load(ref, eviction_policy=read_once.POLICY)
    mask = jnp.broadcast_to(mask.reshape(*shape[:2], *[1] * (len(shape) - 2)), shape)
    return plgpu.load(ref, mask=mask, other=jnp.zeros((), ref.dtype), eviction_policy=read_once.POLICY)


def _inputs(x, form):
    """Numbers of x [N, 64 B] in the order in which `weights` has them."""
    if not form.paired:
        return x
    rows, columns = x.shape
    return x.reshape(rows, columns // 16, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(rows, columns)


def weights(words: jax.Array, scale: jax.Array, zero: jax.Array | None, dtype: Any, form: Form) -> jax.Array:
    """The weights of a tile, [64 A, 64 B] in x's dtype, from its words and numbers as they were loaded, in the order of `_inputs`."""
    words = jax.lax.bitcast_convert_type(words, jnp.int32)
    pairs = _four_bits(words, form) if KINDS[form.kind].bits == 4 else _eight_bits(words, form)
    a, b = words.shape[:2]

    def spread(numbers):
        return jnp.broadcast_to(numbers, (a, b, *_fine_shape(form))).reshape(pairs.shape)

    def spread_pairs(numbers):
        return spread(_pairs_of(_fine(numbers.astype(form.pair.dtype), form)))

    def spread_wide(numbers):
        return spread(_fine(numbers.astype(jnp.float32), form))

    values = _values(pairs, None if zero is None or form.affine else spread_pairs(zero), form)
    if scale.dtype == form.pair.dtype:
        added = spread_pairs(zero) if form.affine else SIGNS
        halves = _halves(_fma(spread_pairs(scale), values, added, form), form.pair.dtype)
    else:
        wide, halves = spread_wide(scale), _widened(values)
        if form.affine:
            least = spread_wide(zero)
            halves = [_wide_fma(half, wide, least, form) for half in halves]
        else:
            halves = [half * wide for half in halves]
        if scale.dtype == jnp.float16:
            halves = [_eleven_bits(half) for half in halves]
    if dtype == jnp.bfloat16 and halves[0].dtype != dtype:
        halves = _halves(_narrowed([half.astype(jnp.float32) for half in halves], form), jnp.bfloat16)
    fine = jnp.stack(halves, axis=-1)
    # Axes: block, block, slab, w, r, c, s, then h, e, b of 4 bits and e, h, b of 8 bits.
    h, e = (7, 8) if form.slabs == 1 else (8, 7)
    inner = (5, e) if form.paired else (e, 5)
    return fine.transpose(0, 3, h, 4, 1, 2, 6, *inner, 9).reshape(a * BLOCK, b * BLOCK).astype(dtype)


def _four_bits(words, form):
    """Pairs of codes, as far as they can be had with integers: [A, B, 1, w, r, c, s, h, e]."""
    a, b = words.shape[:2]
    words = words.reshape(a, b, 1, 4, 8, 4, 4)
    return jnp.stack([jnp.stack([_nibble(words, h + 2 * e, form) for h in range(2)], axis=-1) for e in range(2)], axis=-1)


def _nibble(words, number, form):
    if form.kind == "int4":
        return _shifted(words, -4 * number) & 0x000F000F | _opaque(form.pair.large, words, form)
    return _shifted(words, 12 - 4 * number) & _signed(0x80008000) | _shifted(words, 6 - 4 * number) & 0x01C001C0


def _eight_bits(words, form):
    """As `_four_bits`: [A, B, slab, w, r, c, s, e, h]."""
    a, b = words.shape[:2]
    words = words.reshape(a, b, 2, 4, 8, 4, 2, 2)
    if form.kind == "int8":
        return jnp.stack([words, _shifted(words, -8)], axis=-1)
    return jnp.stack([words & _signed(0x87F087F0), words << 4 & _signed(0x80F080F0) | words >> 4 & 0x07000700], axis=-1)


def _values(pairs, offset, form):
    """Codes less their zeros, or of an affine matrix codes, as pairs. Every step is exact."""
    one, minus_one, large, minus_large = form.pair.one, form.pair.one | SIGNS, form.pair.large, form.pair.minus_large
    if form.kind == "int8":
        high, low = pairs & 0x00800080 | _opaque(large, pairs, form), pairs & 0x007F007F | _opaque(large, pairs, form)
        values = _fma(high, minus_one, low, form)
        return values if offset is None else _fma(offset, minus_one, values, form)
    if form.kind == "int4":
        if offset is None:
            return _fma(pairs, one, minus_large | (0 if form.affine else 0x00080008), form)
        return _fma(pairs, one, _fma(offset, minus_one, minus_large, form), form)
    return _raised(pairs, 120 if form.kind == "fp8" else 126, form)  # so much the exponents of bfloat16 are offset from theirs


def _fine_shape(form):
    """The axes of pairs from the slab on, where those of groups are cut in two: the group's part and the rest."""
    if form.slabs == 1:
        s = min(form.groups or 1, 4)
        return (1, 4, 8, 4, s, 4 // s, 2, 2)
    return (2, 4, 8, 4, 2, 2, 2)


def _fine(numbers, form):
    """Numbers of a tile, [A, B, 32, 2 G], with the axes of `_fine_shape`, 1 where one number serves all."""
    a, b = numbers.shape[:2]
    groups = form.groups or 1
    if form.slabs == 1:
        s = min(groups, 4)
        return numbers.reshape(a, b, 4, 8, s, groups // s, 2).transpose(0, 1, 2, 3, 4, 6, 5).reshape(a, b, 1, 4, 8, 1, s, 1, 2, groups // s)
    slab = min(groups, 2)
    s = min(groups // slab, 2)
    fine = numbers.reshape(a, b, 4, 8, slab, s, groups // slab // s, 2).transpose(0, 1, 4, 2, 3, 5, 6, 7)
    return fine.reshape(a, b, slab, 4, 8, 1, s, groups // slab // s, 2)


def _pairs_of(numbers):
    """16-bit floats, each twice in an int32."""
    bits = jax.lax.bitcast_convert_type(numbers, jnp.uint16).astype(jnp.int32)
    return bits | bits << 16


def _shifted(words, left):
    """Words shifted to the left, or to the right where `left` is negative. Bits that come in from the left are undefined."""
    return words << left if left > 0 else words >> -left if left else words


def _opaque(number, like, form):
    """An even number that the compiler takes for a variable, in an array like `like`. An instruction holds one constant; a second would be
    moved to a register, again for each instruction."""
    if form.interpret:
        return number
    # The number of a multiprocessor is below 2**31, but no compiler counts on that.
    asm = "{.reg .b32 t; mov.u32 t, %smid; shr.u32 t, t, 31; or.b32 $0, $1, t;}"
    return _assembly(asm, "=r,r", jnp.full(like.shape, number, jnp.int32))


def _signed(bits):
    return int(np.uint32(bits).astype(np.int32))


def _fma(a, b, c, form):
    """a b + c for pairs, rounded once. b, c: like a, or the bits of a constant."""
    b, c = (jnp.full(a.shape, _signed(x), jnp.int32) if isinstance(x, int) else x for x in (b, c))
    name, dtype = form.pair.name, form.pair.dtype
    if not form.interpret:
        return _assembly(f"fma.rn.{name} $0, $1, $2, $3;", "=r,r,r,r", a, b, c)
    wide = [[half.astype(jnp.float32) for half in _halves(x, dtype)] for x in (a, b, c)]
    # Sums that are not exact are those of affine matrices alone.
    return _joined([(odd_sum(x * y, z) if form.affine else x * y + z).astype(dtype) for x, y, z in zip(*wide, strict=True)])


def _wide_fma(codes, b, c, form):
    """codes b + c for float32 numbers, rounded once. codes: of integers."""
    if form.interpret:
        return multiply_add(codes, b, c, jnp.float32)
    return _assembly("fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", codes, b, c, dtype=jnp.float32)


def _assembly(text, constraints, *args, dtype=jnp.int32):
    """A number of `dtype` for each element of the arguments, by an instruction."""
    kinds = [jax.ShapeDtypeStruct(args[0].shape, dtype)]
    return plgpu.elementwise_inline_asm(text, args=args, constraints=constraints, pack=1, result_shape_dtypes=kinds)[0]


def _raised(pairs, exponent, form):
    """Pairs of bfloat16 times 2**exponent, for numbers below 2**-100 that may be subnormal."""
    if not form.interpret:
        return _fma(pairs, (127 + exponent) * 0x00800080, SIGNS, form)

    def half(at):
        # A CPU may take a subnormal for zero, so we make no float of it.
        bits = (pairs >> at) << 16
        magnitude = bits & 0x7FFFFFFF
        fraction = (magnitude >> 16).astype(jnp.float32) * 2.0 ** (exponent - 133)
        value = jnp.where(magnitude < 1 << 23, fraction, jax.lax.bitcast_convert_type(magnitude + (exponent << 23), jnp.float32))
        return jnp.where(bits < 0, -value, value).astype(jnp.bfloat16)

    return _joined([half(at) for at in (0, 16)])


def _eleven_bits(x):
    """float32 x, rounded to the 11 bits that float16 has, but with float32's exponents.

    A number 1.5 * 2**13 times x's power of two pushes the other bits out of a float32, and goes again."""
    power = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int32) & 0x7F800000, jnp.float32)
    return (x + power * 12288.0) - power * 12288.0


def _halves(pairs, dtype):
    """The two numbers of pairs of a 16-bit dtype."""
    return [jax.lax.bitcast_convert_type(part.astype(jnp.uint16), dtype) for part in (pairs, pairs >> 16)]


def _joined(halves):
    """Pairs of two 16-bit floats."""
    low, high = (jax.lax.bitcast_convert_type(half, jnp.uint16).astype(jnp.int32) for half in halves)
    return low | high << 16


def _widened(pairs):
    """The two numbers of pairs of bfloat16, in float32."""
    return [jax.lax.bitcast_convert_type(bits, jnp.float32) for bits in (pairs << 16, pairs & _signed(0xFFFF0000))]


def _narrowed(halves, form):
    """Pairs of bfloat16 of float32 numbers."""
    if form.interpret:
        return _joined([half.astype(jnp.bfloat16) for half in halves])
    low, high = halves
    return _assembly("cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,f,f", high, low)
