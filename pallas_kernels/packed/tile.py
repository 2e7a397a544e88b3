"""Tiles of packed matrices in kernels in the Triton dialect.

The order in memory is the matrix unit's order in registers (see the package). So a tile is unpacked word by word, two weights at a time,
and then only renamed: its axes become a matrix's without a move between threads. Triton finds that by itself. Codes go from memory to
shared memory asynchronously and from there to registers, 16 bytes a thread; the unpacked weights never leave the registers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.device import capability
from pallas_kernels.dialect import HOPPER, pl, plgpu
from pallas_kernels.packed.matrix import BLOCK, KINDS, LANES, WORDS, Packed

MOST_GROUPS = 8  # groups of a block; groups of fewer inputs would cut a thread's part of an instruction
# Pairs of bfloat16, of which both are this number.
ONE, MINUS_ONE, MINUS_ZERO, MINUS_128 = 0x3F803F80, 0xBF80BF80, 0x80008000, 0xC300C300


@dataclasses.dataclass(frozen=True)
class Form:
    """What a kernel has to know of a packed matrix [..., O, I] besides its arrays."""

    kind: str
    groups: int | None
    zeros: bool
    columns: int  # O
    width: int  # I
    # Whether a word's inputs, 4 of 4 bits and 2 of 8 bits, stand side by side in a tile; else its inputs have the matrix's order. The first
    # is what Triton gives a thread for `mma.sync`, the second what `wgmma` takes. `_inputs` puts x in the same order.
    paired: bool
    interpret: bool

    @property
    def slabs(self) -> int:
        return KINDS[self.kind].bits // 4


def form(packed: Packed, interpret: bool) -> Form:
    """The form of a matrix whose `over` is 1."""
    *_, columns, width = packed.shape
    return Form(packed.kind, packed.groups, packed.zero is not None, columns, width, paired(), interpret)


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
    if packed.scale.dtype != jnp.bfloat16:
        return f"the scales are {packed.scale.dtype.name}; the kernel takes bfloat16"
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
            w = weights(words, scale, zero, form)
            for total, x in zip(sums[m], pieces, strict=True):
                precision = "highest" if x.dtype == jnp.float32 else None
                added.append(total + plgpu.dot(w.astype(x.dtype), x, trans_b=True, precision=precision))
        return [added[m * len(pieces) : (m + 1) * len(pieces)] for m in range(len(indices))]

    zeros = [[jnp.zeros((len(out) * BLOCK, height), jnp.float32) for height in heights] for _ in indices]
    return jax.lax.fori_loop(0, count, step, zeros)


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
        return plgpu.load(ref)
    mask = jnp.broadcast_to(mask.reshape(*shape[:2], *[1] * (len(shape) - 2)), shape)
    return plgpu.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def _inputs(x, form):
    """Numbers of x [N, 64 B] in the order in which `weights` has them."""
    if not form.paired:
        return x
    rows, columns = x.shape
    return x.reshape(rows, columns // 16, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(rows, columns)


def weights(words: jax.Array, scale: jax.Array, zero: jax.Array | None, form: Form) -> jax.Array:
    """The weights of a tile, [64 A, 64 B] bfloat16, from its words and numbers as they were loaded, in the order of `_inputs`."""
    words = jax.lax.bitcast_convert_type(words, jnp.int32)
    pairs = _four_bits(words, form) if KINDS[form.kind].bits == 4 else _eight_bits(words, form)
    a, b = words.shape[:2]

    def spread(numbers):
        return jnp.broadcast_to(_pairs_of(_fine(numbers, form)), (a, b, *_fine_shape(form))).reshape(pairs.shape)

    offset = None if zero is None else spread(zero)
    values = _values(pairs, offset, form)
    values = _fma(spread(scale), values, MINUS_ZERO, form)
    low, high = (jax.lax.bitcast_convert_type(part.astype(jnp.uint16), jnp.bfloat16) for part in (values, values >> 16))
    fine = jnp.stack([low, high], axis=-1)
    # Axes: block, block, slab, w, r, c, s, then h, e, b of 4 bits and e, h, b of 8 bits.
    h, e = (7, 8) if form.slabs == 1 else (8, 7)
    inner = (5, e) if form.paired else (e, 5)
    return fine.transpose(0, 3, h, 4, 1, 2, 6, *inner, 9).reshape(a * BLOCK, b * BLOCK)


def _four_bits(words, form):
    """Pairs of codes, as far as they can be had with integers: [A, B, 1, w, r, c, s, h, e]."""
    a, b = words.shape[:2]
    words = words.reshape(a, b, 1, 4, 8, 4, 4)
    return jnp.stack([jnp.stack([_nibble(words, h + 2 * e, form) for h in range(2)], axis=-1) for e in range(2)], axis=-1)


def _nibble(words, number, form):
    if form.kind == "int4":  # the last bits of 128 as bfloat16
        return _shifted(words, -4 * number) & 0x000F000F | _opaque(0x43004300, words, form)
    return _shifted(words, 12 - 4 * number) & _signed(0x80008000) | _shifted(words, 6 - 4 * number) & 0x01C001C0


def _eight_bits(words, form):
    """As `_four_bits`: [A, B, slab, w, r, c, s, e, h]."""
    a, b = words.shape[:2]
    words = words.reshape(a, b, 2, 4, 8, 4, 2, 2)
    if form.kind == "int8":
        return jnp.stack([words, _shifted(words, -8)], axis=-1)
    halves = [_shifted(words, 8 - 8 * h) & _signed(0x80008000) | _shifted(words, 4 - 8 * h) & 0x07F007F0 for h in range(2)]
    return jnp.stack(halves, axis=-1)


def _values(pairs, offset, form):
    """Codes less their zeros, as pairs of bfloat16. Every step is exact."""
    if form.kind == "int8":
        high, low = pairs & 0x00800080 | _opaque(0x43004300, pairs, form), pairs & 0x007F007F | _opaque(0x43004300, pairs, form)
        values = _fma(high, MINUS_ONE, low, form)
        return values if offset is None else _fma(offset, MINUS_ONE, values, form)
    if form.kind == "int4":
        if offset is None:
            return _fma(pairs, ONE, 0xC308C308, form)  # -136
        return _fma(pairs, ONE, _fma(offset, MINUS_ONE, MINUS_128, form), form)
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
    """bfloat16 numbers, each twice in an int32."""
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
    args, kinds = [jnp.full(like.shape, number, jnp.int32)], [jax.ShapeDtypeStruct(like.shape, jnp.int32)]
    return plgpu.elementwise_inline_asm(asm, args=args, constraints="=r,r", pack=1, result_shape_dtypes=kinds)[0]


def _signed(bits):
    return int(np.uint32(bits).astype(np.int32))


def _fma(a, b, c, form):
    """a b + c for pairs of bfloat16 in int32, rounded once. b, c: like a, or the bits of a constant."""
    a, b, c = (jnp.full(pairs[0].shape, _signed(x), jnp.int32) if isinstance(x, int) else x for pairs in [(a,)] for x in (a, b, c))
    if not form.interpret:
        args, kinds = (a, b, c), [jax.ShapeDtypeStruct(a.shape, jnp.int32)]
        return plgpu.elementwise_inline_asm(
            "fma.rn.bf16x2 $0, $1, $2, $3;", args=args, constraints="=r,r,r,r", pack=1, result_shape_dtypes=kinds
        )[0]
    return _joined(_half(a, at) * _half(b, at) + _half(c, at) for at in (0, 16))


def _raised(pairs, exponent, form):
    """Pairs times 2**exponent, for numbers below 2**-100 that may be subnormal."""
    if not form.interpret:
        return _fma(pairs, (127 + exponent) * 0x00800080, MINUS_ZERO, form)

    def half(at):
        # A CPU may take a subnormal for zero, so we make no float of it.
        bits = (pairs >> at) << 16
        magnitude = bits & 0x7FFFFFFF
        fraction = (magnitude >> 16).astype(jnp.float32) * 2.0 ** (exponent - 133)
        value = jnp.where(magnitude < 1 << 23, fraction, jax.lax.bitcast_convert_type(magnitude + (exponent << 23), jnp.float32))
        return jnp.where(bits < 0, -value, value)

    return _joined(half(at) for at in (0, 16))


def _half(pairs, at):
    return jax.lax.bitcast_convert_type((pairs >> at) << 16, jnp.float32)


def _joined(halves):
    low, high = (jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16).astype(jnp.int32) for x in halves)
    return low | high << 16
