"""A packed matrix as a plain one, in the Triton dialect: for products of so many rows that XLA's are faster than a kernel's."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.dialect import pl, plgpu
from pallas_kernels.packed import tile
from pallas_kernels.packed.matrix import BLOCK, Packed

WIDE = 2  # blocks of inputs of a program, where their number is even


def unpack(w: Packed, dtype: Any, after: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The weights [O, I] of a matrix with full blocks, in `dtype`. after: any array, which is computed before."""
    form = dataclasses.replace(tile.form(w, interpret), paired=False)
    rows, columns = (size // BLOCK for size in w.shape)
    wide = WIDE if columns % WIDE == 0 else 1
    return dialect.call(
        functools.partial(_unpack, form=form, wide=wide),
        name="unpack",
        grid=(rows, columns // wide),
        out_shape=jax.ShapeDtypeStruct(w.shape, dtype),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(after, *tile.arrays(w))


def _unpack(_, *refs, form, wide):
    *refs, result = refs
    out, into = pl.program_id(0), pl.program_id(1) * wide
    weights = tile.unpacked(refs, out + jnp.arange(1, dtype=jnp.int32), into + jnp.arange(wide, dtype=jnp.int32), result.dtype, form)
    row, column = (first * BLOCK + jnp.arange(size, dtype=jnp.int32) for first, size in zip((out, into), weights.shape, strict=True))
    plgpu.store(result.at[row[:, None], column[None, :]], weights)
