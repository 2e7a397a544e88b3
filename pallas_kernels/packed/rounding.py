"""Sums of a product and a number that are rounded once, whether or not the compiler joins a multiplication and an addition.

The method is that of S. Boldo and G. Melquiond, "Emulation of a FMA and correctly rounded sums: proved algorithms using rounding to odd"
(IEEE Transactions on Computers, 2008).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

HIGH = -(1 << 12)  # the bits of a float32 that hold its first 12 bits, sign and exponent


def multiply_add(codes: jax.Array, b: jax.Array, c: jax.Array, dtype: Any) -> jax.Array:
    """codes b + c, float32, so that rounding it to `dtype` is the only rounding. codes: integers of at most 8 bits. b, c: float32 numbers
    that `dtype` has too."""
    if jnp.finfo(dtype).nmant <= 10:
        return odd_sum(codes * b, c)  # of an exact product
    high = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(b, jnp.int32) & HIGH, jnp.float32)
    product, rest = _two_sum(codes * high, codes * (b - high))
    other, least = _two_sum(c, rest)
    total, error = _two_sum(product, other)
    return total + odd_sum(error, least)


def odd_sum(a: jax.Array, b: jax.Array) -> jax.Array:
    """a + b for float32 numbers; if that is not exact, the neighbour whose last bit is 1. Rounded to at most 22 bits it becomes what the
    exact sum would."""
    total, error = _two_sum(a, b)
    bits = jax.lax.bitcast_convert_type(total, jnp.int32)
    inexact = (error > 0) | (error < 0)  # NaN, of a sum that is infinite, is neither
    outward = jnp.where((error > 0) == (total > 0), 1, -1)
    return jax.lax.bitcast_convert_type(jnp.where(inexact & (bits & 1 == 0), bits + outward, bits), jnp.float32)


def _two_sum(a, b):
    """a + b rounded, and the error of that."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)
