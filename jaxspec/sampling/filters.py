"""top_k, top_p and min_p: which tokens of a row may be chosen, without sorting a vocabulary.

Every filter keeps the tokens whose logit reaches a threshold, so equal logits share their fate, and the most likely one always. The
order is vLLM's: after the temperature min_p, then top_k, then top_p over what those leave.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.collectives import Shard, gathered
from pallas_kernels import top_candidates as kernels

CANDIDATES = 128  # a top_k of at most so many is found among so many candidates


@struct.dataclass
class Filters:
    """Filters of B requests. top_k: [B] int32, 0 for all tokens. top_p: [B] float32, 1 for all. min_p: [B] float32, 0 for all.

    scope (static): "top" if every request that samples has a top_k of 1 .. 128, so that a row's best 128 candidates are all that
    matters; "whole" if some have none and need no more than min_p; "search" if some of those have a top_p, or a larger top_k.
    """

    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    scope: str = struct.field(pytree_node=False, default="search")


def filtered(
    logits: jax.Array, ids: jax.Array | None, temperature: jax.Array, filters: Filters, shard: Shard | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """(logits, ids) with -inf for what may not be chosen; with scope "top" only a row's best candidates.

    logits: [B, T, C] float32. ids: [B, T, C] int32, token ids of the candidates, or None if candidate i is token i. temperature: [B].
    shard: of the vocabulary, if the logits are of one; a search takes all of them.
    """
    if shard is not None and filters.scope == "search":
        logits, shard = gathered(logits, shard.axis), None
    values, places = top_candidates(logits, CANDIDATES, shard)
    best, threshold = values[..., 0], _among_candidates(values, temperature, filters)
    if filters.scope != "top":
        few = (filters.top_k > 0) & (filters.top_k <= CANDIDATES)
        search = _search if filters.scope == "search" else _min_p_floor
        threshold = jnp.where(few[:, None], threshold, search(logits, best, temperature, filters))
    # Of a value so small that a float32 takes it for 0 a threshold may be above all logits, or none: what is best stays.
    threshold = jnp.where(threshold <= best, threshold, best)[..., None]
    if filters.scope == "top":
        kept = jnp.where(values >= threshold, values, -jnp.inf)
        return kept, places if ids is None else jnp.take_along_axis(ids, places, axis=-1)
    return jnp.where(logits >= threshold, logits, -jnp.inf), ids


def top_candidates(logits: jax.Array, count: int, shard: Shard | None = None) -> tuple[jax.Array, jax.Array]:
    """The `count` best of each row (all, if there are fewer), best first, of equal ones the lower index first. shard: of the
    vocabulary, if the logits are of one: each device's best are put together. [B, T, C] -> values, indices [B, T, count]."""
    rows = logits.reshape(-1, logits.shape[-1])
    values, indices = kernels.top_candidates(rows, min(count, rows.shape[-1]))
    if shard is not None:
        # A lower device's candidates come first, so that of equal values the lower token does.
        values, indices = gathered(values, shard.axis), gathered(indices + shard.first, shard.axis)
        values, place = kernels.top_candidates(values, min(count, values.shape[-1]))
        indices = jnp.take_along_axis(indices, place, axis=-1)
    return values.reshape(*logits.shape[:-1], -1), indices.reshape(*logits.shape[:-1], -1)


def _among_candidates(values: jax.Array, temperature: jax.Array, filters: Filters) -> jax.Array:
    """The threshold of a row whose top_k is among its candidates. values: [B, T, N], best first -> [B, T]."""
    k = jnp.clip(filters.top_k, 1, values.shape[-1])[:, None, None]
    last = jnp.take_along_axis(values, jnp.broadcast_to(k - 1, (*values.shape[:2], 1)), axis=-1)
    kept = (values >= last) & (values >= _min_p_floor(values, values[..., 0], temperature, filters)[..., None])
    weights = jnp.where(kept, _weights(values, values[..., :1], temperature), 0.0)
    before = jnp.cumsum(weights, axis=-1) - weights
    p = filters.top_p[:, None, None]
    kept &= (before < p * jnp.sum(weights, axis=-1, keepdims=True)) | (p >= 1)
    return jnp.min(jnp.where(kept, values, jnp.inf), axis=-1)


def _min_p_floor(logits: jax.Array, best: jax.Array, temperature: jax.Array, filters: Filters) -> jax.Array:
    """The least logit that min_p keeps. best: [B, T], each row's largest logit -> [B, T]."""
    log = jnp.log(filters.min_p)[:, None]
    # A greedy row keeps its best alone, and 0 times the log of 0 is no number.
    return best + jnp.where(temperature[:, None] > 0, temperature[:, None] * log, 0.0)


def _weights(logits: jax.Array, best: jax.Array, temperature: jax.Array) -> jax.Array:
    """Probabilities up to a factor. best: [B, T, 1]."""
    return jnp.exp((logits - best) / jnp.maximum(temperature, jnp.float32(1e-30))[:, None, None])


def _search(logits: jax.Array, best: jax.Array, temperature: jax.Array, filters: Filters) -> jax.Array:
    """The threshold of any row, by bisection on the bits of its logits: exact, in 16 passes for top_k and 16 for top_p. -> [B, T]."""
    keys = _sortable(logits)
    floor = _sortable(_min_p_floor(logits, best, temperature, filters))
    k = jnp.minimum(filters.top_k, logits.shape[-1])[:, None]
    kth = _largest(keys, jnp.ones_like(logits), jnp.broadcast_to(k, best.shape).astype(jnp.float32))
    floor = jnp.maximum(floor, jnp.where(k > 0, kth, 0))
    weights = jnp.where(keys >= floor[..., None], _weights(logits, best[..., None], temperature), 0.0)
    p = filters.top_p[:, None]
    nucleus = _largest(keys, weights, p * jnp.sum(weights, axis=-1))
    return _unsortable(jnp.maximum(floor, jnp.where(p < 1, nucleus, 0)))


def _largest(keys: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest key such that the weights of all keys from it on reach what is wanted. keys: [B, T, C] uint32 -> [B, T] uint32."""
    found = jnp.zeros(wanted.shape, jnp.uint32)
    digits = jnp.arange(1, 4, dtype=jnp.uint32)[None, None, :]
    for shift in range(30, -1, -2):
        tries = found[..., None] | (digits << jnp.uint32(shift))
        reached = jnp.sum(jnp.where(keys[..., None, :] >= tries[..., None], weights[..., None, :], 0.0), axis=-1) >= wanted[..., None]
        found |= jnp.sum(reached, axis=-1, dtype=jnp.uint32) << jnp.uint32(shift)
    return found


def _sortable(x: jax.Array) -> jax.Array:
    """float32 -> uint32 in the same order."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)  # -0 equals 0
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _unsortable(keys: jax.Array) -> jax.Array:
    sign = jnp.uint32(1 << 31)
    return jax.lax.bitcast_convert_type(jnp.where(keys >= sign, keys ^ sign, ~keys), jnp.float32)
