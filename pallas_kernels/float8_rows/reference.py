"""Rounding of rows to float8_e4m3fn in plain XLA: the definition of the operation, and its implementation without a kernel."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

LARGEST_EXPONENT, LEAST_NORMAL = 8, 2.0**-6  # of e4m3: its largest number is 1.75 * 2**8
# What brings the mantissa of a float32 above 1.75 to the next exponent, and no other.
CARRY = 0x1FFFFF


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounded:
    """Rows that are rounded already, for the product that reads them: as `float8_rows.rounded` or as `float8_rows.codes` gives them."""

    rows: jax.Array  # [N, I] numbers, or [at least N, I] codes
    scales: jax.Array | None  # of codes, [at least N]; None for numbers
    leading: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # the axes of rows, of N in all
    dtype: Any = dataclasses.field(metadata={"static": True})  # of what was rounded

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.leading, self.rows.shape[-1]

    def flat(self) -> Rounded:
        """The same with one axis of rows."""
        return dataclasses.replace(self, leading=(math.prod(self.leading),))


def padded(rows: int) -> int:
    """How many rows of codes the kernel for Hopper reads for so many: a multiple of 8. What those after the last hold does not matter."""
    return -(-rows // 8) * 8


def power_for(largest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The least power of two by which numbers of up to `largest` are divided, so that they do not exceed 448, and its inverse. float32."""
    exponent = (jax.lax.bitcast_convert_type(largest, jnp.int32) + CARRY) >> 23
    exponent = jnp.clip(exponent - LARGEST_EXPONENT, 1, 253)
    scale, inverse = (jax.lax.bitcast_convert_type(bits << 23, jnp.float32) for bits in (exponent, 254 - exponent))
    return scale, inverse


def rounded(x: jax.Array) -> jax.Array:
    """See `float8_rows.rounded`."""
    numbers, scale = divided(x)
    return (numbers * scale).astype(x.dtype)


def codes(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """See `float8_rows.codes`."""
    x = jnp.pad(x, ((0, padded(len(x)) - len(x)), (0, 0)), mode="edge")
    numbers, scale = divided(x)
    fine = numbers.astype(jnp.float8_e4m3fn).reshape(len(x), -1, 2, 4, 2)
    return fine.transpose(0, 1, 3, 4, 2).reshape(x.shape), scale[:, 0]


def codes_in_order(found: jax.Array) -> jax.Array:
    """The codes [N, I] of `float8_rows.codes` in the order of the inputs."""
    return found.reshape(len(found), -1, 4, 2, 2).transpose(0, 1, 4, 2, 3).reshape(found.shape)


def divided(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows divided by their scales and rounded to e4m3's numbers, and the scales [..., 1]. float32."""
    wide = x.astype(jnp.float32)
    scale, inverse = power_for(jnp.max(jnp.abs(wide), axis=-1, keepdims=True))
    y = wide * inverse
    # Not by a cast to and fro, which XLA may leave out.
    normal = jax.lax.reduce_precision(y, exponent_bits=8, mantissa_bits=3)
    return jnp.where(jnp.abs(y) < LEAST_NORMAL, jnp.round(y * 512) / 512, normal), scale
