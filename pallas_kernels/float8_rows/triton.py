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
    """The program's row, its columns and which of them it has, its numbers divided by its scale and rounded, and the scale."""
    row, (rows, width) = pl.program_id(0), x_ref.shape
    column = jnp.arange(pl.next_power_of_2(width), dtype=jnp.int32)
    inside = None if len(column) == width else column < width
    other = None if inside is None else jnp.zeros((), x_ref.dtype)
    x = plgpu.load(x_ref.at[jnp.minimum(row, rows - 1), column], mask=inside, other=other).astype(jnp.float32)
    scale, inverse = power_for(jnp.max(jnp.abs(x)))
    y = x * inverse
    # A number of the size of 2**20 times y's power of two pushes all but three bits of the mantissa out of a float32, and goes again.
    power = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(y, jnp.int32) & 0x7F800000, jnp.float32)
    large = jnp.maximum(power, LEAST_NORMAL) * (1.5 * 2**20)
    return row, column, inside, (y + large) - large, scale


def _numbers(x_ref, out_ref):
    row, column, inside, y, scale = _row(x_ref)
    plgpu.store(out_ref.at[row, column], (y * scale).astype(out_ref.dtype), mask=inside)


def _codes(x_ref, out_ref, scale_ref):
    row, column, inside, y, scale = _row(x_ref)
    found = y.astype(jnp.float8_e4m3fn).reshape(-1, 2, 4, 2).transpose(0, 2, 3, 1).reshape(-1)
    plgpu.store(out_ref.at[row, column], found, mask=inside)
    scale_ref[row] = scale
