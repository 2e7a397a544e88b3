"""Products in plain XLA: the definition of the operation, and its implementation without a kernel."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import device, float8_rows
from pallas_kernels.activation import GELU, Activation
from pallas_kernels.order import zero_after
from pallas_kernels.packed import Packed, unpack
from pallas_kernels.packed.matrix import float8_of, rounded, scales_of

UNPACKED_BYTES = 1 << 25  # most of a packed matrix that is unpacked at a time


def linear(x: jax.Array, w: jax.Array | Packed, dtype: Any = None) -> jax.Array:
    """x w^T in x's dtype or in `dtype`. w: [..., H]; see `pallas_kernels.linear.linear`."""
    return product(x, w, dtype=dtype)


def product(x: jax.Array, w: jax.Array | Packed, *, over: int = 1, dtype: Any = None) -> jax.Array:
    """x w^T for any axes. x: [..., *in], w: [*out, *in] -> [..., *out] in x's dtype or in `dtype`. over: how many axes `in` are.

    A packed w is unpacked piece by piece, so its float copy never exists whole. x's rows are rounded first if w says so (`Packed.inputs`).
    """
    contract = (tuple(range(x.ndim - over, x.ndim)), tuple(range(w.ndim - over, w.ndim)))
    if not isinstance(w, Packed):
        return jax.lax.dot_general(x, w, (contract, ((), ())), preferred_element_type=dtype)
    if w.inputs is not None and not _takes_codes(w):
        x = float8_rows.rounded(x.reshape(*x.shape[: x.ndim - over], -1), implementation="xla").reshape(x.shape)
    if any(w.cut) and w.ndim > 2:  # small, since the widths of large matrices of layers are multiples of a block
        return jax.lax.dot_general(x, unpack(w, x.dtype), (contract, ((), ())), preferred_element_type=dtype)
    leading, out = x.shape[: x.ndim - over], w.shape[: w.ndim - over]
    # With its last outputs' filling, all pieces of a matrix are alike.
    rows, w = x.reshape(math.prod(leading), -1), dataclasses.replace(w, cut=(0, w.cut[1])) if any(w.cut) else w.flat()
    blocks = w.words.shape[0]
    pieces = next(n for n in range(1, blocks + 1) if blocks % n == 0 and w.size * x.dtype.itemsize <= n * UNPACKED_BYTES or n == blocks)
    of_piece = _of_codes(rows, dtype or x.dtype) if _takes_codes(w) else _of_numbers(rows, dtype)
    if pieces == 1:
        # Else XLA may unpack matrices of many layers in one operation, before the first layer.
        w = dataclasses.replace(w, words=w.words | zero_after(rows).astype(w.words.dtype))
        return of_piece(w)[:, : math.prod(out)].reshape(*leading, *out)
    cut = jax.tree.map(lambda part: part.reshape(pieces, -1, *part.shape[1:]), w)
    # `map` takes its pieces along the first axis, which a Packed does not count among its own.
    parts = jax.lax.map(lambda piece: of_piece(dataclasses.replace(w, **piece)), {"words": cut.words, "scale": cut.scale, "zero": cut.zero})
    return jnp.moveaxis(parts, 0, 1).reshape(len(rows), -1)[:, : math.prod(out)].reshape(*leading, *out)


def _takes_codes(w: Packed) -> bool:
    """Whether the current device multiplies codes of rounded rows with those of this matrix."""
    return w.takes_codes and not any(w.cut) and (device.capability() or 0) >= device.FLOAT8_CAPABILITY


def _of_numbers(rows: jax.Array, dtype: Any) -> Callable[[Packed], jax.Array]:
    """The product of rows with a piece of a matrix, unpacked."""
    return lambda w: jax.lax.dot_general(rows, unpack(w, rows.dtype), (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def _of_codes(rows: jax.Array, dtype: Any) -> Callable[[Packed], jax.Array]:
    """The product of rows, rounded, with a piece of a matrix of "fp8": of codes with codes, and then of scales."""
    codes, of_rows = float8_rows.reference.divided(rows)
    codes = codes.astype(jnp.float8_e4m3fn)

    def multiply(w: Packed) -> jax.Array:
        found = jax.lax.dot_general(codes, float8_of(w), (((1,), (1,)), ((), ())), preferred_element_type=dtype)
        return (found.astype(jnp.float32) * of_rows * scales_of(w).astype(jnp.float32)[None, :]).astype(dtype)

    return multiply


def partials(x: jax.Array, w: jax.Array | Packed, splits: int = 1) -> jax.Array:
    """See `pallas_kernels.linear.partials`. splits: the number of parts; it divides the width. A packed matrix has one."""
    if splits == 1 or isinstance(w, Packed):
        return linear(x, w, jnp.float32)[None]
    left, right = (a.reshape(a.shape[0], splits, -1) for a in (x, w))
    return jax.lax.dot_general(left, right, (((2,), (2,)), ((1,), (1,))), preferred_element_type=jnp.float32)


def summed(parts: jax.Array, dtype: Any) -> jax.Array:
    """The sum of a product's parts, rounded to dtype also where XLA's next operation could have more bits of it."""
    return rounded(jnp.sum(parts, axis=0), dtype).astype(dtype)


def gated(x: jax.Array, gate_up: jax.Array | Packed, activation: Activation = GELU) -> jax.Array:
    """See `pallas_kernels.linear.gated`."""
    both = linear(x, gate_up)
    return activation(both[:, 0], both[:, 1])


def gated_by(x: jax.Array, w: jax.Array | Packed, u: jax.Array, index: jax.Array) -> jax.Array:
    """See `pallas_kernels.linear.gated_by`."""
    return GELU(linear(x, w), jax.lax.dynamic_index_in_dim(u, index, axis=1, keepdims=False))
