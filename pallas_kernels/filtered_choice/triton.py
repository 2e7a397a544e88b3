"""The filtered choice in the Triton dialect: after the kernels that find a row's candidates, one that filters them and chooses.

It sorts nothing. Each candidate is compared with all others, which says how many come before it, and how likely these are together.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dialect import call, pl, plgpu
from pallas_kernels.filtered_choice.reference import min_p_floor, weigh
from pallas_kernels.noise import perturbed
from pallas_kernels.top_candidates.triton import earlier, padded_size, unordered_candidates


def filtered_choice(logits, keys, temperature, top_k, top_p, min_p, count, ids=None, *, interpret=False):
    """See `pallas_kernels.filtered_choice.filtered_choice`."""
    values, places = unordered_candidates(logits, count, interpret=interpret)
    return call(
        _choose,
        name="filtered_choice",
        grid=values.shape[:1],
        out_shape=jax.ShapeDtypeStruct(values.shape[:1], jnp.int32),
        num_warps=4,
        num_stages=1,
        interpret=interpret,
    )(values, places, keys, temperature, top_k, top_p, min_p, *(() if ids is None else (ids,)))


def _choose(values_ref: Any, places_ref: Any, keys_ref: Any, *refs: Any) -> None:
    """Program i: the choice of row i. Its candidates come by ascending place."""
    temperature_ref, top_k_ref, top_p_ref, min_p_ref, *ids_ref, chosen_ref = refs
    row, count = pl.program_id(0), values_ref.shape[1]
    at = jnp.arange(padded_size(count), dtype=jnp.int32)
    rows, real = jnp.full_like(at, row), at < count
    values = plgpu.load(values_ref.at[rows, at], mask=real, other=-np.inf)
    token = plgpu.load(places_ref.at[rows, at], mask=real, other=0)
    if ids_ref:
        token = plgpu.load(ids_ref[0].at[rows, token], mask=real, other=0)
    whose = row // np.int32(keys_ref.shape[0] // temperature_ref.shape[0])
    temperature, p = temperature_ref[whose], top_p_ref[whose]

    before = earlier(values, real)
    place = jnp.sum(before.astype(jnp.int32), axis=1, dtype=jnp.int32)
    best = jnp.max(values)
    k = jnp.minimum(jnp.maximum(top_k_ref[whose], 1), count)
    last = jnp.max(jnp.where(real & (place == k - 1), values, -np.inf))
    kept = real & (values >= last) & (values >= min_p_floor(best, temperature, min_p_ref[whose]))
    weights = jnp.where(kept, weigh(values, best, temperature), 0.0)
    likelier = jnp.sum(jnp.where(before, weights[None, :], 0.0), axis=1)
    kept &= (likelier < p * jnp.sum(weights)) | (p >= 1)
    least = jnp.min(jnp.where(kept, values, np.inf))
    least = jnp.where(least <= best, least, best)

    noisy = perturbed(jnp.where(values >= least, values, -np.inf), temperature, keys_ref[row, 0], keys_ref[row, 1], token)
    top = jnp.max(jnp.where(real, noisy, -np.inf))
    # A NaN equals nothing, not even itself. We take its token all the same.
    wins = real & ((noisy == top) | (noisy != noisy))
    first = jnp.min(jnp.where(wins, place, np.int32(count)))
    chosen_ref[row] = jnp.max(jnp.where(wins & (place == first), token, 0))
