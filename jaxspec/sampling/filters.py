"""top_k, top_p and min_p, without sorting a vocabulary.

Every filter keeps the tokens whose logit reaches a threshold. So equal logits are kept or dropped together, and the largest one is
always kept. The order is vLLM's: temperature, min_p, top_k, and top_p over what those leave.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.collectives import Shard, gathered
from pallas_kernels.top_candidates import top_candidates
from pallas_kernels.top_candidates.reference import at_most, min_p_floor, threshold, weight

CANDIDATES = 128  # a row's best candidates, among which any top_k up to this number is found


@struct.dataclass
class Filters:
    """The filters of B requests."""

    top_k: jax.Array  # [B] int32; 0 keeps all tokens
    top_p: jax.Array  # [B] float32; 1 keeps all
    min_p: jax.Array  # [B] float32; 0 keeps all
    # How far we look. "top": every request that samples has a top_k of 1 .. 128, so a row's best 128 candidates suffice. "whole": some
    # have no top_k, and min_p at most. "search": some of those have a top_p too, or a larger top_k.
    scope: str = struct.field(pytree_node=False, default="search")


def filtered(
    logits: jax.Array, ids: jax.Array | None, temperature: jax.Array, filters: Filters, shard: Shard | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Logits with -inf for what may not be chosen, and the candidates' ids. With scope "top", only a row's best candidates.

    logits: [B, T, C] float32. ids: [B, T, C] int32, the candidates' token ids, or None if candidate i is token i. temperature: [B]
    float32. shard: given if the logits cover only its tokens; a search gathers those of all devices.
    """
    if shard is not None and filters.scope == "search":
        logits, shard = gathered(logits, shard.axis), None
    values, places = best_candidates(logits, CANDIDATES, shard)
    best, settings = values[..., 0], [x[:, None] for x in (temperature, filters.top_k, filters.top_p, filters.min_p)]
    least = threshold(values, *settings)
    if filters.scope == "top":
        return _kept(values, least), places if ids is None else jnp.take_along_axis(ids, places, axis=-1)
    few = (filters.top_k > 0) & (filters.top_k <= CANDIDATES)
    others = _search(logits, best, temperature, filters) if filters.scope == "search" else min_p_floor(best, settings[0], settings[-1])
    return _kept(logits, jnp.where(few[:, None], least, at_most(others, best))), ids


def _kept(logits: jax.Array, threshold: jax.Array) -> jax.Array:
    """Logits [B, T, C] with -inf below their row's threshold [B, T]."""
    return jnp.where(logits >= threshold[..., None], logits, -jnp.inf)


def best_candidates(logits: jax.Array, count: int, shard: Shard | None = None) -> tuple[jax.Array, jax.Array]:
    """The `count` largest logits of each row and their indices, largest first, of equal ones the lower index first; all if there are fewer.

    logits: [B, T, C] float32. shard: given if the logits cover only its tokens; the result is of the whole vocabulary all the same.
    Returns values [B, T, count] float32 and indices [B, T, count] int32.
    """
    if shard is not None:
        # Devices are in the order of their tokens, so of equal values the lower token comes first.
        values, indices = candidates_of_shards(logits, count, shard)
        values, places = best_candidates(values, count)
        return values, jnp.take_along_axis(indices, places, axis=-1)
    rows = logits.reshape(-1, logits.shape[-1])
    values, indices = top_candidates(rows, min(count, rows.shape[-1]))
    return values.reshape(*logits.shape[:-1], -1), indices.reshape(*logits.shape[:-1], -1)


def candidates_of_shards(logits: jax.Array, count: int, shard: Shard) -> tuple[jax.Array, jax.Array]:
    """The `count` largest logits of each device's part of the vocabulary and their token ids, one device's after another's. Arguments and
    result as for `best_candidates`, with `count` for each of the devices."""
    values, indices = best_candidates(logits, count)
    return gathered(values, shard.axis), gathered(indices + shard.first, shard.axis)


def _search(logits: jax.Array, best: jax.Array, temperature: jax.Array, filters: Filters) -> jax.Array:
    """The exact threshold of any row: [B, T]. It searches the bits of the logits, in 16 passes for top_k and 16 for top_p."""
    keys = _sortable(logits)
    floor = _sortable(min_p_floor(best, temperature[:, None], filters.min_p[:, None]))
    k = jnp.minimum(filters.top_k, logits.shape[-1])[:, None]
    kth = largest_key(keys, jnp.ones_like(logits), jnp.broadcast_to(k, best.shape).astype(jnp.float32))
    floor = jnp.maximum(floor, jnp.where(k > 0, kth, 0))
    weights = jnp.where(keys >= floor[..., None], weight(logits, best[..., None], temperature[:, None, None]), 0.0)
    p = filters.top_p[:, None]
    nucleus = largest_key(keys, weights, p * jnp.sum(weights, axis=-1))
    return _unsortable(jnp.maximum(floor, jnp.where(p < 1, nucleus, 0)))


def largest_key(keys: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest key such that the weights of all keys at or above it sum to `wanted` at least: [B, T] uint32.

    keys: [B, T, C] uint32; weights: [B, T, C] float32; wanted: [B, T] float32.
    """
    found = jnp.zeros(wanted.shape, jnp.uint32)
    digits = jnp.arange(1, 4, dtype=jnp.uint32)[None, None, :]
    for shift in range(30, -1, -2):
        tries = found[..., None] | (digits << jnp.uint32(shift))
        reached = jnp.sum(jnp.where(keys[..., None, :] >= tries[..., None], weights[..., None, :], 0.0), axis=-1) >= wanted[..., None]
        found |= jnp.sum(reached, axis=-1, dtype=jnp.uint32) << jnp.uint32(shift)
    return found


def _sortable(x: jax.Array) -> jax.Array:
    """float32 -> uint32 with the same order."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 equals 0
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _unsortable(keys: jax.Array) -> jax.Array:
    """The inverse of `_sortable`."""
    sign = jnp.uint32(1 << 31)
    return jax.lax.bitcast_convert_type(jnp.where(keys >= sign, keys ^ sign, ~keys), jnp.float32)
