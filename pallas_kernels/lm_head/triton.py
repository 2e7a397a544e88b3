"""The fused head as a kernel. Each program multiplies a tile of the table with all rows and keeps only each row's best token.

The table is read from memory once. Tensor cores want 64 rows or more in the left operand. That is the table's tile, so that few rows of
hidden states waste nothing. These rows are cut into powers of two, since a kernel's arrays have such sizes.

So many rows that XLA's product is the faster one have their logits in memory. A second kernel reads them once and chooses in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import read_once
from pallas_kernels.choice import best, capped
from pallas_kernels.dialect import call, pl, plgpu, shared_memory
from pallas_kernels.noise import perturbed

LEAST_ROWS = 16  # of hidden states in a tensor core's product
ROWS_OF_A_PASS = 256  # most rows of hidden states that a program can sum for; more take several passes over the table
MOST_SUPPRESSED = 32  # each takes a comparison for every logit
TABLE_DTYPES = ("bfloat16", "float16", "float32")
LOGITS, LOGITS_WARPS = 2048, 4  # logits in memory that a program chooses from, and its warps


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut."""

    vocab: int  # rows of the table in a program
    depth: int  # columns in a step
    warps: int
    stages: int  # steps whose loads are in flight
    rows: int = 128  # most rows of hidden states in one product


def unsupported(dtype: Any, suppressed: tuple[int, ...]) -> str | None:
    """Why the kernel cannot serve this, or None. dtype: the table's."""
    if dtype.name not in TABLE_DTYPES:
        return f"the table is {dtype.name}; the kernel takes {', '.join(TABLE_DTYPES)}"
    return too_many(suppressed)


def too_many(suppressed: tuple[int, ...]) -> str | None:
    """Why a kernel cannot suppress all these ids, or None."""
    if len(suppressed) > MOST_SUPPRESSED:
        return f"{len(suppressed)} ids are suppressed; the kernel takes at most {MOST_SUPPRESSED}"
    return None


def tiles(rows: int, dtype: Any, shared: int | None = None) -> Tiles:
    """The tiles for this many rows of hidden states. dtype: the table's. shared: bytes of shared memory, by default the device's."""
    if dtype.itemsize == 4:
        return Tiles(vocab=64, depth=32, warps=4 if rows <= 64 else 8, stages=2)
    # At least two programs fit on a multiprocessor, so that one chooses while another loads.
    cut = Tiles(vocab=128, depth=64, warps=4, stages=4)
    if rows > 48:
        cut = Tiles(vocab=128, depth=64, warps=8, stages=4)
    if rows > 64:
        cut = Tiles(vocab=128, depth=64, warps=8, stages=3, rows=32)
    # Each step in flight holds a block of the table and one of all rows.
    step = (cut.vocab + -(-rows // LEAST_ROWS) * LEAST_ROWS) * cut.depth * dtype.itemsize
    return dataclasses.replace(cut, stages=min(cut.stages, (shared or shared_memory()) // step))


def chunks(rows: int, most: int) -> list[tuple[int, int]]:
    """Cuts rows into (start, size), the largest first, in powers of two up to `most`. The last may reach past the end: sizes are multiples
    of LEAST_ROWS."""
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
    parts = chunks(rows, cut.rows)

    def load(ref: Any, first: Any, count: int, end: int, column: Any, policy: str | None = None) -> jax.Array:
        """A block of `count` rows from `first` on. Past the array's end it repeats the last row, and its results are dropped; past the
        width it has zeros."""
        row, columns = first + jnp.arange(count, dtype=jnp.int32), column + jnp.arange(cut.depth, dtype=jnp.int32)
        if end % count:
            row = jnp.minimum(row, np.int32(end - 1))
        block = ref.at[row[:, None], columns[None, :]]
        if width % cut.depth == 0:
            return plgpu.load(block, eviction_policy=policy)
        inside = jnp.broadcast_to(columns[None, :] < width, (count, cut.depth))
        return plgpu.load(block, mask=inside, other=0.0, eviction_policy=policy)

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        weights = load(table_ref, start, cut.vocab, size, i * cut.depth, read_once.POLICY)
        return tuple(
            total + plgpu.dot(weights, load(hidden_ref, first, count, rows, i * cut.depth), trans_b=True, allow_tf32=False)
            for total, (first, count) in zip(sums, parts, strict=True)
        )

    zeros = tuple(jnp.zeros((cut.vocab, count), jnp.float32) for _, count in parts)
    sums = jax.lax.fori_loop(0, pl.cdiv(width, cut.depth), step, zeros)

    refs = keys_ref, temperature_ref, first_id_ref, values_ref, ids_ref
    for logits, (first, count) in zip(sums, parts, strict=True):
        row = first + jnp.arange(count, dtype=jnp.int32)
        store_best(logits, tile, row, size, refs, softcap=softcap, suppressed=suppressed)


def store_best(
    logits: jax.Array, tile: Any, row: jax.Array, size: int, refs: Any, *, softcap: float | None, suppressed: tuple[int, ...]
) -> None:
    """Stores each row's best token of a tile. logits: [C, R] float32, the products of table rows tile * C .. with rows `row` [R]. size:
    rows of the table. refs: of keys, temperatures, first_id, and as outputs of values and ids, [N, tiles] each."""
    keys_ref, temperature_ref, first_id_ref, values_ref, ids_ref = refs
    start, real = tile * logits.shape[0], row < keys_ref.shape[0]
    at = start + jnp.arange(logits.shape[0], dtype=jnp.int32)
    token = at + first_id_ref[0]
    temperature = plgpu.load(temperature_ref.at[row], mask=real, other=0.0)
    words = (plgpu.load(keys_ref.at[row, jnp.full_like(row, word)], mask=real, other=0)[None, :] for word in (0, 1))
    logits = capped(logits, token[:, None], softcap, suppressed)
    noisy = functools.partial(perturbed, logits, temperature[None, :], *words, token[:, None])
    # A tile's noise costs a good part of what its products cost, so we skip it if all rows are greedy.
    values = jax.lax.cond(jnp.max(temperature) > 0, noisy, lambda: logits)
    if size % logits.shape[0]:
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
    """See `pallas_kernels.lm_head.lm_head`. cut: tiles other than those of `tiles`."""
    rows = hidden.shape[0]
    if rows > ROWS_OF_A_PASS:
        passes = [slice(i, i + ROWS_OF_A_PASS) for i in range(0, rows, ROWS_OF_A_PASS)]
        outs = [
            lm_head(hidden[p], table, keys[p], temperature[p], softcap, suppressed, first_id, interpret=interpret, cut=cut) for p in passes
        ]
        return jnp.concatenate([ids for ids, _ in outs]), jnp.concatenate([values for _, values in outs])
    cut = cut or tiles(rows, table.dtype)
    programs = pl.cdiv(table.shape[0], cut.vocab)
    first = jnp.int32(0) if first_id is None else first_id
    values, ids = call(
        functools.partial(kernel, cut=cut, softcap=softcap, suppressed=suppressed),
        name="lm_head",
        grid=(programs,),
        out_shape=(jax.ShapeDtypeStruct((rows, programs), jnp.float32), jax.ShapeDtypeStruct((rows, programs), jnp.int32)),
        num_warps=cut.warps,
        num_stages=cut.stages,
        interpret=interpret,
    )(hidden, table, keys, temperature, first.reshape(1))
    return best(values, ids)


def choose_kernel(
    logits_ref: Any,
    keys_ref: Any,
    temperature_ref: Any,
    first_id_ref: Any,
    values_ref: Any,
    ids_ref: Any,
    *,
    size: int,
    softcap: float | None,
    suppressed: tuple[int, ...],
) -> None:
    """Program (i, j): row j's best token among logits i * size .. of it."""
    tile, row = pl.program_id(0), pl.program_id(1) + jnp.arange(1, dtype=jnp.int32)
    at, vocab = tile * size + jnp.arange(size, dtype=jnp.int32), logits_ref.shape[1]
    inside = None if vocab % size == 0 else (at < vocab)[:, None]
    logits = plgpu.load(logits_ref.at[row[None, :], at[:, None]], mask=inside, other=None if inside is None else 0.0)
    refs = keys_ref, temperature_ref, first_id_ref, values_ref, ids_ref
    store_best(logits, tile, row, vocab, refs, softcap=softcap, suppressed=suppressed)


def choose(
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    softcap: float | None,
    suppressed: tuple[int, ...],
    first_id: jax.Array | None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.lm_head.choose`."""
    rows, vocab = logits.shape
    size = min(LOGITS, pl.next_power_of_2(vocab))
    tiles, first = pl.cdiv(vocab, size), jnp.int32(0) if first_id is None else first_id
    values, ids = call(
        functools.partial(choose_kernel, size=size, softcap=softcap, suppressed=suppressed),
        name="choose",
        grid=(tiles, rows),
        out_shape=(jax.ShapeDtypeStruct((rows, tiles), jnp.float32), jax.ShapeDtypeStruct((rows, tiles), jnp.int32)),
        num_warps=LOGITS_WARPS,
        num_stages=1,
        interpret=interpret,
    )(logits, keys, temperature, first.reshape(1))
    return best(values, ids)
