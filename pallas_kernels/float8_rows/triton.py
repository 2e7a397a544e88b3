"""Rounding of rows to float8_e4m3fn as a kernel in the Triton dialect. A program holds one row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl, plgpu
from pallas_kernels.float8_rows.reference import LEAST_NORMAL, power_for

WARP = 1024  # numbers of a row that a warp holds
MOST_WARPS = 16


def rounded(x, *, launch_dependents=False, interpret=False):
    """See `pallas_kernels.float8_rows.rounded`. x: [N, I]."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _call(_numbers, "float8_numbers", x, out, launch_dependents, interpret)


def codes(x, rows, *, launch_dependents=False, interpret=False):
    """See `pallas_kernels.float8_rows.codes`."""
    out = jax.ShapeDtypeStruct((rows, x.shape[1]), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((rows,), jnp.float32)
    return _call(_codes, "float8_codes", x, out, launch_dependents, interpret)


def _call(kernel: Any, name: str, x: jax.Array, out: Any, launch_dependents: bool, interpret: bool) -> Any:
    width = x.shape[1]
    return dialect.call(
        kernel,
        name=name,
        grid=(jax.tree.leaves(out)[0].shape[0],),
        out_shape=out,
        num_warps=max(1, min(MOST_WARPS, pl.next_power_of_2(width) // WARP)),
        num_stages=1,
        interpret=interpret,
        launch_dependents=launch_dependents,
    )(x)


def _row(x_ref):
    """The program's row: its numbers divided by its scale and rounded, as two arrays [W, 8] of the first and the second eight of sixteen;
    where they stand; and the scale. Numbers of a thread then need no exchange with those of another to be put in order."""
    row, width = jnp.minimum(pl.program_id(0), x_ref.shape[0] - 1), x_ref.shape[1]
    sixteen, one = jnp.arange(pl.next_power_of_2(pl.cdiv(width, 16)), dtype=jnp.int32)[:, None], jnp.arange(8, dtype=jnp.int32)[None, :]
    columns = [16 * sixteen + 8 * half + one for half in range(2)]
    x = [plgpu.load(x_ref.at[row, at], mask=at < width, other=jnp.zeros((), x_ref.dtype)).astype(jnp.float32) for at in columns]
    scale, inverse = power_for(jnp.max(jnp.maximum(*map(jnp.abs, x))))
    return columns, [_rounded(half * inverse) for half in x], scale


def _rounded(y):
    # A number of the size of 2**20 times y's power of two pushes all but three bits of the mantissa out of a float32, and goes again.
    power = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(y, jnp.int32) & 0x7F800000, jnp.float32)
    large = jnp.maximum(power, LEAST_NORMAL) * (1.5 * 2**20)
    return (y + large) - large


def _numbers(x_ref, out_ref):
    columns, numbers, scale = _row(x_ref)
    for at, half in zip(columns, numbers, strict=True):
        plgpu.store(out_ref.at[pl.program_id(0), at], (half * scale).astype(out_ref.dtype), mask=at < x_ref.shape[1])


def _codes(x_ref, out_ref, scale_ref):
    _, numbers, scale = _row(x_ref)
    found = jnp.stack([half.astype(jnp.float8_e4m3fn) for half in numbers], axis=-1)
    at = jnp.arange(found.size, dtype=jnp.int32).reshape(-1, 16)
    found = found.reshape(at.shape)
    plgpu.store(out_ref.at[pl.program_id(0), at], found, mask=at < x_ref.shape[1])
    scale_ref[pl.program_id(0)] = scale
