"""Brings what the kernels after this one read into the L2 cache, while this one leaves memory idle.

Between two products of a decoding step stand kernels that take a microsecond or two and read almost nothing. They get programs more than
they have rows, which ask Hopper's copy engine for the first bytes of the next products' weights and end without waiting for them
(https://docs.nvidia.com/cuda/parallel-thread-execution, cp.async.bulk.prefetch). Nothing depends on whether the bytes arrive.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.device import capability
from pallas_kernels.dialect import HOPPER, pl, plgpu
from pallas_kernels.packed import Packed

BYTES = 16 << 20  # of one kernel at most; an H200's L2 cache has 50 MiB
PIECE = 4096  # bytes that a thread asks for
PROGRAMS = 120  # that do so
MOST_ROWS = 256  # with more, kernels keep the memory busy themselves

_ASK = """{
.reg .b64 a; .reg .pred p;
setp.ge.s32 p, $2, 0;
mad.wide.s32 a, $2, PIECE, $1;
@p cp.async.bulk.prefetch.L2.global [a], PIECE;
mov.b32 $0, 0;
}""".replace("PIECE", str(PIECE))


@dataclasses.dataclass(frozen=True)
class Ahead:
    """What a kernel asks for. views: of each array, flat; ranges: of each, (first piece, pieces)."""

    views: tuple[jax.Array, ...]
    ranges: tuple[tuple[tuple[int, int], ...], ...]

    def __bool__(self) -> bool:
        return bool(self.views)

    @property
    def programs(self) -> int:
        """How many programs the kernel gets more."""
        return PROGRAMS if self else 0

    def in_specs(self, num_warps: int) -> list[Any]:
        """The specs of `views`, for kernels of so many warps."""
        # A block, since assembly takes a reference only beside arrays of its shape. It stands for the address of the first number.
        return [pl.BlockSpec((32 * num_warps,), lambda *_: (0,)) for _ in self.views]

    def out_shapes(self, num_warps: int) -> list[Any]:
        """An output that is never written: it keeps the assembly from being dropped."""
        return [jax.ShapeDtypeStruct((32 * num_warps,), jnp.int32)] if self else []


NOTHING = Ahead((), ())


def ahead(arrays: tuple[jax.Array | Packed, ...], rows: int, interpret: bool) -> Ahead:
    """What a kernel of so many rows asks for, of weights in the order in which they are read: nothing but on Hopper GPUs and newer."""
    left, views, ranges = BYTES // PIECE, [], []
    if interpret or rows > MOST_ROWS or (capability() or 0.0) < HOPPER:
        return NOTHING
    for array in arrays:
        stored = array.words if isinstance(array, Packed) else array
        # The matrices of a pair are read side by side.
        matrices = 2 if stored.ndim == 3 and stored.shape[0] == 2 else 1
        pieces = stored.size * stored.dtype.itemsize // matrices // PIECE
        count = min(pieces, left // matrices)
        if count:
            left -= count * matrices
            views.append(stored.reshape(-1))
            ranges.append(tuple((i * pieces, count) for i in range(matrices)))
    return Ahead(tuple(views), tuple(ranges))


def ask(ahead: Ahead, refs: Any, out_ref: Any, number: Any) -> None:
    """Asks for a program's share. refs: of `views`; number: of the program among those for this, below 0 for any other."""
    (threads,) = out_ref.shape
    lane = jnp.arange(threads, dtype=jnp.int32)
    place = jnp.where(number >= 0, lane * PROGRAMS + number, -1)
    for ref, ranges in zip(refs, ahead.ranges, strict=True):
        piece = jnp.full_like(lane, -1)
        for first, count in ranges:
            piece = jnp.where((place >= 0) & (place < count), place + first, piece)
            place -= count
        (zero,) = plgpu.elementwise_inline_asm(
            _ASK, args=[ref, piece], constraints="=r,l,r", pack=1, result_shape_dtypes=[jax.ShapeDtypeStruct((threads,), jnp.int32)]
        )
        plgpu.store(out_ref.at[lane], zero, mask=zero != 0)


__all__ = ["Ahead", "ahead", "ask"]
