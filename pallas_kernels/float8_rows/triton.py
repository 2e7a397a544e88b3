"""Rounding of rows to float8_e4m3fn as a kernel in the Triton dialect. A program holds one row."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl, plgpu
from pallas_kernels.float8_rows.reference import LEAST_NORMAL, padded, power_for

WARP = 1024  # numbers of a row that a warp holds
MOST_WARPS = 16
SIXTEEN = 16  # numbers that codes are put in order among


def rounded(x, *, launch_dependents=False, interpret=False):
    """See `pallas_kernels.float8_rows.rounded`. x: [N, I]."""
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _call(_numbers, "float8_numbers", x, out, launch_dependents, interpret)


def codes(x, *, launch_dependents=False, interpret=False):
    """See `pallas_kernels.float8_rows.codes`."""
    return _call(_codes, "float8_codes", x, abstract_codes(*x.shape), launch_dependents, interpret)


def abstract_codes(rows: int, width: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Codes and scales of so many rows, padded."""
    rows = padded(rows)
    return jax.ShapeDtypeStruct((rows, width), jnp.float8_e4m3fn), jax.ShapeDtypeStruct((rows,), jnp.float32)


def _call(kernel: Any, name: str, x: jax.Array, out: Any, launch_dependents: bool, interpret: bool) -> Any:
    return dialect.call(
        kernel,
        name=name,
        grid=(jax.tree.leaves(out)[0].shape[0],),
        out_shape=out,
        num_warps=warps(x.shape[1]),
        num_stages=1,
        interpret=interpret,
        launch_dependents=launch_dependents,
    )(x)


def warps(width: int) -> int:
    """How many warps a program has for a row of so many numbers."""
    return max(1, min(MOST_WARPS, pl.next_power_of_2(width) // WARP))


def pieces_of(width: int, load: Any) -> list[list[tuple[jax.Array, jax.Array]]]:
    """A row in pieces of W sixteens, W a power of two, none of which is partly empty. Of each piece the columns and numbers of the first
    and the second eight of the sixteens, [W, 8]: so no thread has to exchange numbers with another to put codes in order.

    load: gives the row's numbers in columns [W, 8], float32."""
    pieces, first = [], 0
    while first < width:
        size = 1 << ((width - first) // SIXTEEN).bit_length() - 1
        at = jnp.arange(size, dtype=jnp.int32)[:, None] * SIXTEEN + jnp.arange(8, dtype=jnp.int32)[None, :]
        pieces.append([(columns, load(columns)) for columns in (first + at, first + 8 + at)])
        first += size * SIXTEEN
    return pieces


def store_codes(pieces, out_ref, scale_ref) -> None:
    """Stores the codes and the scale of a program's row, of which `pieces_of` gave the pieces."""
    scale, inverse = _power(pieces)
    first = 0
    for halves in pieces:
        found = jnp.stack([(x * inverse).astype(jnp.float8_e4m3fn) for _, x in halves], axis=-1)
        at = first + jnp.arange(found.size, dtype=jnp.int32).reshape(-1, SIXTEEN)
        plgpu.store(out_ref.at[pl.program_id(0), at], found.reshape(at.shape))
        first += found.size
    scale_ref[pl.program_id(0)] = scale


def on_grid(y):
    """Numbers of up to 448 in float32, rounded to e4m3's."""
    # A number of the size of 2**20 times y's power of two pushes all but three bits of the mantissa out of a float32, and goes again.
    power = jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(y, jnp.int32) & 0x7F800000, jnp.float32)
    large = jnp.maximum(power, LEAST_NORMAL) * (1.5 * 2**20)
    return (y + large) - large


def _power(pieces):
    """The row's scale and its inverse."""
    largest = [jnp.max(jnp.maximum(*(jnp.abs(x) for _, x in halves))) for halves in pieces]
    return power_for(functools.reduce(jnp.maximum, largest))


def _pieces(x_ref):
    row = jnp.minimum(pl.program_id(0), x_ref.shape[0] - 1)
    return pieces_of(x_ref.shape[1], lambda at: plgpu.load(x_ref.at[row, at]).astype(jnp.float32))


def _numbers(x_ref, out_ref):
    pieces = _pieces(x_ref)
    scale, inverse = _power(pieces)
    for at, x in itertools.chain(*pieces):
        plgpu.store(out_ref.at[pl.program_id(0), at], (on_grid(x * inverse) * scale).astype(out_ref.dtype))


def _codes(x_ref, out_ref, scale_ref):
    store_codes(_pieces(x_ref), out_ref, scale_ref)
