"""The fused head with a packed table, in the Triton dialect. Each program has some blocks of the table, and keeps each row's best token.

Products are those of `pallas_kernels.linear.packed_triton`, and the choice is that of `pallas_kernels.lm_head.triton`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.choice import best
from pallas_kernels.dialect import pl
from pallas_kernels.linear import packed_triton as linear
from pallas_kernels.lm_head.triton import store_best, too_many
from pallas_kernels.packed import BLOCK, Packed, tile

MOST_ROWS = linear.MOST_ROWS


def unsupported(hidden: jax.Array, table: Packed, suppressed: tuple[int, ...]) -> str | None:
    """Why the kernel cannot serve this, or None."""
    return linear.unsupported(hidden, table) or too_many(suppressed)


def lm_head(
    hidden: jax.Array,
    table: Packed,
    keys: jax.Array,
    temperature: jax.Array,
    softcap: float | None,
    suppressed: tuple[int, ...],
    first_id: jax.Array | None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.lm_head.lm_head`."""
    form, cut, rows = tile.form(table, interpret), linear.choose_tiles(hidden, table), hidden.shape[0]
    programs, arrays = pl.cdiv(form.columns, BLOCK * cut.blocks), tile.arrays(table)
    first = jnp.int32(0) if first_id is None else first_id
    values, ids = dialect.call(
        functools.partial(kernel, form=form, cut=cut, softcap=softcap, suppressed=suppressed),
        name="packed_lm_head",
        grid=(pl.cdiv(rows, cut.rows), programs, 1),
        out_shape=(jax.ShapeDtypeStruct((rows, programs), jnp.float32), jax.ShapeDtypeStruct((rows, programs), jnp.int32)),
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        interpret=interpret,
    )(hidden, *arrays, keys, temperature, first.reshape(1))
    return best(values, ids)


def kernel(hidden_ref, *refs, form, cut, softcap, suppressed):
    """Program (i, j): the best token of some rows among the table's blocks j * cut.blocks and following."""
    w_refs, refs = refs[:-5], refs[-5:]
    steps = pl.cdiv(form.width, BLOCK * cut.depth)
    for _, row, _, (logits,) in linear.products(hidden_ref, w_refs, [()], form, cut, steps):
        store_best(logits, pl.program_id(1), row.reshape(-1), form.columns, refs, softcap=softcap, suppressed=suppressed)
