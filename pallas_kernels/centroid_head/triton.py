"""The centroid head as kernels. One selects centroids without a sort, the other reads each selected row of the table once.

XLA computes the centroids' scores in both implementations, so that both select the same ones.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import lm_head
from pallas_kernels.centroid_head.reference import centroid_scores
from pallas_kernels.choice import best, capped
from pallas_kernels.dialect import call, pl, plgpu
from pallas_kernels.noise import perturbed
from pallas_kernels.top_candidates.triton import WIDEST, padded_size, select_largest

TILE = 32  # candidates of a program; few, so that a single row already fills the device


def unsupported(table: jax.Array, centroids: int, suppressed: tuple[int, ...]) -> str | None:
    """Why the kernels cannot serve this, or None."""
    if padded_size(centroids) > WIDEST:
        return f"there are {centroids} centroids; the kernel holds at most {WIDEST}"
    if padded_size(table.shape[1]) > 1024:
        return f"the table is {table.shape[1]} wide; the kernel holds at most 1024"
    return lm_head.triton.unsupported(table.dtype, suppressed)


def tile_logits(
    hidden_ref: Any, selected_ref: Any, ordering_ref: Any, table_ref: Any, *, each: int, suppressed: tuple[int, ...]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The candidates of program (tile, row): rows, places among the row's candidates, logits (-inf past the end) and ids; [TILE] each."""
    width, count = table_ref.shape[1], selected_ref.shape[1] * each
    at = pl.program_id(0) * TILE + jnp.arange(TILE, dtype=jnp.int32)
    rows, column = jnp.full_like(at, pl.program_id(1)), jnp.arange(padded_size(width), dtype=jnp.int32)
    real = at < count
    centroid = plgpu.load(selected_ref.at[rows, at // each], mask=real, other=0)
    ids = plgpu.load(ordering_ref.at[centroid * each + at % each], mask=real, other=0)
    state = plgpu.load(hidden_ref.at[jnp.full_like(column, pl.program_id(1)), column], mask=column < width, other=0.0)
    inside = jnp.broadcast_to((column < width)[None, :], (TILE, padded_size(width)))
    weights = plgpu.load(table_ref.at[ids[:, None], column[None, :]], mask=inside, other=0.0)
    logits = jnp.sum(weights.astype(jnp.float32) * state.astype(jnp.float32)[None, :], axis=1)
    logits = jnp.where(real, capped(logits, ids, None, suppressed), -jnp.inf)
    return rows, at, logits, ids


def candidates_kernel(
    hidden_ref: Any, selected_ref: Any, ordering_ref: Any, table_ref: Any, logits_ref: Any, ids_ref: Any, **static: Any
) -> None:
    """Program (tile, row): logits and ids of a tile of the row's candidates."""
    rows, at, logits, ids = tile_logits(hidden_ref, selected_ref, ordering_ref, table_ref, **static)
    real = at < logits_ref.shape[1]
    plgpu.store(logits_ref.at[rows, at], logits, mask=real)
    plgpu.store(ids_ref.at[rows, at], ids, mask=real)


def choose_kernel(
    hidden_ref: Any,
    selected_ref: Any,
    ordering_ref: Any,
    table_ref: Any,
    keys_ref: Any,
    temperature_ref: Any,
    values_ref: Any,
    ids_ref: Any,
    **static: Any,
) -> None:
    """Program (tile, row): the best of a tile of the row's candidates."""
    tile, row = pl.program_id(0), pl.program_id(1)
    rows, at, logits, ids = tile_logits(hidden_ref, selected_ref, ordering_ref, table_ref, **static)
    temperature = plgpu.load(temperature_ref.at[rows])
    first, second = (plgpu.load(keys_ref.at[rows, jnp.full_like(rows, word)]) for word in (0, 1))
    values = perturbed(logits, temperature, first, second, ids)
    top = jnp.max(values)
    # A NaN equals nothing, not even itself. We take its id all the same.
    winning = (at < selected_ref.shape[1] * static["each"]) & ((values == top) | (values != values))
    values_ref[row, tile] = top
    ids_ref[row, tile] = jnp.min(jnp.where(winning, ids, np.int32(2**31 - 1)))


def _launch(kernel: Any, name: str, each: int, suppressed: tuple[int, ...], rows: int, width: int, programs: int, interpret: bool) -> Any:
    """A kernel's call over (programs, rows), with outputs [rows, width] float32 and int32. each: tokens of a centroid."""
    return call(
        functools.partial(kernel, each=each, suppressed=suppressed),
        name=name,
        grid=(programs, rows),
        out_shape=(jax.ShapeDtypeStruct((rows, width), jnp.float32), jax.ShapeDtypeStruct((rows, width), jnp.int32)),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )


def candidates(
    hidden: jax.Array,
    centroids: jax.Array,
    token_ordering: jax.Array,
    table: jax.Array,
    top_k: int,
    suppressed: tuple[int, ...],
    bias: jax.Array | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.centroid_head.candidates`."""
    selected = select_largest(centroid_scores(hidden, centroids, bias), top_k, interpret=interpret)
    each = table.shape[0] // centroids.shape[0]
    programs = pl.cdiv(top_k * each, TILE)
    run = _launch(candidates_kernel, "centroid_candidates", each, suppressed, hidden.shape[0], top_k * each, programs, interpret)
    return run(hidden, selected, token_ordering, table)


def choose(
    hidden: jax.Array,
    centroids: jax.Array,
    token_ordering: jax.Array,
    table: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    top_k: int,
    suppressed: tuple[int, ...],
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `pallas_kernels.centroid_head.choose`."""
    selected = select_largest(centroid_scores(hidden, centroids), top_k, interpret=interpret)
    each = table.shape[0] // centroids.shape[0]
    programs = pl.cdiv(top_k * each, TILE)
    run = _launch(choose_kernel, "centroid_choose", each, suppressed, hidden.shape[0], programs, programs, interpret)
    values, ids = run(hidden, selected, token_ordering, table, keys, temperature)
    return best(values, ids)[0]
