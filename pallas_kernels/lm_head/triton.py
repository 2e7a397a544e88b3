"""The fused head as a kernel: each program multiplies a tile of the table with all rows and keeps only each row's best token.

The table is read from memory once. Its tile is the left operand, which tensor cores want in 64 rows or more, so that few rows of
hidden states waste nothing; these are divided into powers of two, as arrays in a kernel are.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dialect import call, pl, plgpu, shared_memory
from pallas_kernels.lm_head.reference import best, capped
from pallas_kernels.noise import perturbed

LEAST_ROWS = 16  # of a tensor core's product
MOST_ROWS = 256  # sums of one program; more rows are served by several passes over the table
MOST_SUPPRESSED = 32  # each is a comparison per logit
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut: rows of the table in a program, columns in a step, warps, steps whose loads are in flight, and the most
    rows of hidden states in one product."""

    vocab: int
    depth: int
    warps: int
    stages: int
    rows: int = 128


def unsupported(dtype: Any, suppressed: tuple[int, ...]) -> str | None:
    """Why the kernel cannot serve this, or None."""
    if dtype.name not in DTYPES:
        return f"the table is {dtype.name}; the kernel takes {', '.join(DTYPES)}"
    if len(suppressed) > MOST_SUPPRESSED:
        return f"{len(suppressed)} ids are suppressed; the kernel takes at most {MOST_SUPPRESSED}"
    return None


def tiles(rows: int, dtype: Any, shared: int | None = None) -> Tiles:
    """The cut for this many rows. shared: bytes of shared memory, by default the device's."""
    if dtype.itemsize == 4:
        return Tiles(vocab=64, depth=32, warps=4 if rows <= 64 else 8, stages=2)
    # Two programs or more fit on a multiprocessor, in registers and in shared memory: one's choice hides behind another's loads.
    cut = Tiles(vocab=128, depth=64, warps=4, stages=4)
    if rows > 48:
        cut = Tiles(vocab=128, depth=64, warps=8, stages=4)
    if rows > 64:
        cut = Tiles(vocab=128, depth=64, warps=8, stages=3, rows=32)
    # Each step in flight holds a block of the table and one of all rows.
    step = (cut.vocab + -(-rows // LEAST_ROWS) * LEAST_ROWS) * cut.depth * dtype.itemsize
    return dataclasses.replace(cut, stages=min(cut.stages, (shared or shared_memory()) // step))


def chunks(rows: int, most: int) -> list[tuple[int, int]]:
    """Rows as (start, size) of powers of two up to `most`, the largest first; the last may reach past the end by less than LEAST_ROWS."""
    left, start, out = -(-rows // LEAST_ROWS) * LEAST_ROWS, 0, []
    while left:
        size = min(most, 1 << (left.bit_length() - 1))
        out.append((start, size))
        start, left = start + size, left - size
    return out


def kernel(
    hidden_ref: Any,
    table_ref: Any,
    keys_ref: Any,
    temperature_ref: Any,
    first_id_ref: Any,
    values_ref: Any,
    ids_ref: Any,
    *,
    cut: Tiles,
    softcap: float | None,
    suppressed: tuple[int, ...],
) -> None:
    """Program i: each row's best token among rows i * vocab .. of the table."""
    (rows, width), size = hidden_ref.shape, table_ref.shape[0]
    tile = pl.program_id(0)
    start = tile * cut.vocab
    at = start + jnp.arange(cut.vocab, dtype=jnp.int32)
    parts = chunks(rows, cut.rows)

    def load(ref: Any, first: Any, count: int, end: int, column: Any) -> jax.Array:
        """A block of `count` rows; past the array's end it repeats the last row, whose results are dropped, and in width it has zeros."""
        row, columns = first + jnp.arange(count, dtype=jnp.int32), column + jnp.arange(cut.depth, dtype=jnp.int32)
        if end % count:
            row = jnp.minimum(row, np.int32(end - 1))
        block = ref.at[row[:, None], columns[None, :]]
        if width % cut.depth == 0:
            return plgpu.load(block)
        return plgpu.load(block, mask=jnp.broadcast_to(columns[None, :] < width, (count, cut.depth)), other=0.0)

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weights = load(table_ref, start, cut.vocab, size, i * cut.depth)
        return tuple(
            total + plgpu.dot(weights, load(hidden_ref, first, count, rows, i * cut.depth), trans_b=True, allow_tf32=False)
            for total, (first, count) in zip(sums, parts, strict=True)
        )

    zeros = tuple(jnp.zeros((cut.vocab, count), jnp.float32) for _, count in parts)
    sums = jax.lax.fori_loop(0, pl.cdiv(width, cut.depth), step, zeros)

    token = at + first_id_ref[0]
    for logits, (first, count) in zip(sums, parts, strict=True):
        row = first + jnp.arange(count, dtype=jnp.int32)
        real = row < rows
        temperature = plgpu.load(temperature_ref.at[row], mask=real, other=0.0)
        words = (plgpu.load(keys_ref.at[row, jnp.full_like(row, word)], mask=real, other=0)[None, :] for word in (0, 1))
        logits = capped(logits, token[:, None], softcap, suppressed)
        noisy = functools.partial(perturbed, logits, temperature[None, :], *words, token[:, None])
        # The noise of a tile costs as much as a good part of its products: greedy rows among themselves go without.
        values = jax.lax.cond(jnp.max(temperature) > 0, noisy, lambda logits=logits: logits)
        if size % cut.vocab:
            values = jnp.where((at < size)[:, None], values, -jnp.inf)
        place = jnp.full_like(row, tile)
        plgpu.store(values_ref.at[row, place], jnp.max(values, axis=0), mask=real)
        plgpu.store(ids_ref.at[row, place], jnp.argmax(values, axis=0).astype(jnp.int32) + start + first_id_ref[0], mask=real)


def lm_head(
    hidden: jax.Array,
    table: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    softcap: float | None,
    suppressed: tuple[int, ...],
    first_id: jax.Array | None,
    *,
    interpret: bool = False,
    cut: Tiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.lm_head.lm_head`. cut: tiles other than the ones chosen by `tiles`."""
    rows = hidden.shape[0]
    if rows > MOST_ROWS:
        passes = [slice(i, i + MOST_ROWS) for i in range(0, rows, MOST_ROWS)]
        outs = [
            lm_head(hidden[p], table, keys[p], temperature[p], softcap, suppressed, first_id, interpret=interpret, cut=cut) for p in passes
        ]
        return jnp.concatenate([ids for ids, _ in outs]), jnp.concatenate([values for _, values in outs])
    cut = cut or tiles(rows, table.dtype)
    programs = pl.cdiv(table.shape[0], cut.vocab)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    first = jnp.int32(0) if first_id is None else first_id
    values, ids = call(
        functools.partial(kernel, cut=cut, softcap=softcap, suppressed=suppressed),
        name="lm_head",
        grid=(programs,),
        in_specs=[whole] * 5,
        out_specs=(whole, whole),
        out_shape=(jax.ShapeDtypeStruct((rows, programs), jnp.float32), jax.ShapeDtypeStruct((rows, programs), jnp.int32)),
        num_warps=cut.warps,
        num_stages=cut.stages,
        interpret=interpret,
    )(hidden, table, keys, temperature, first.reshape(1))
    return best(values, ids)
