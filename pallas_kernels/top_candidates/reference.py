"""Top candidates in plain XLA, in two exact stages instead of one sort of the vocabulary, and filters of these.

The k first tokens (by value, then by lower id) are all in the k first tiles (by largest value, then by lower index): if k tiles precede a
tile, their k maxima precede all of its tokens. So we choose k tiles by their maxima, then k tokens in these tiles.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels.choice import best, soft
from pallas_kernels.noise import key_words, perturbed


def tile_width(vocab: int, k: int) -> int:
    """Tokens in a tile: a power of two that makes the two stages about equally wide."""
    return 1 << math.ceil(math.log2(math.sqrt(vocab / k)))


def tile_maxima(logits: jax.Array, width: int) -> jax.Array:
    """The largest value of each tile. [N, V] -> [N, ceil(V / width)]."""
    rows, vocab = logits.shape
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % width)), constant_values=-jnp.inf)
    return jnp.max(padded.reshape(rows, -1, width), axis=-1)


def top_candidates(logits: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.top_candidates.top_candidates`."""
    width = tile_width(logits.shape[1], k)
    maxima = tile_maxima(logits, width)
    _, tiles = jax.lax.top_k(maxima, min(k, maxima.shape[1]))
    # In the order of their ids, so that of equal values the lower id comes first. Ids past the vocabulary's end come last.
    tiles = jnp.sort(tiles, axis=-1)
    ids = (tiles[:, :, None] * width + jnp.arange(width, dtype=jnp.int32)[None, None, :]).reshape(logits.shape[0], -1)
    values, best = jax.lax.top_k(jnp.take_along_axis(logits, ids, axis=1, mode="fill", fill_value=-jnp.inf), k)
    return values, jnp.take_along_axis(ids, best, axis=1)


def choose(
    logits: jax.Array,
    ids: jax.Array | None,
    positions: jax.Array,
    seed: jax.Array,
    temperature: jax.Array,
    filters: tuple[jax.Array, jax.Array, jax.Array],
    k: int,
    softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.top_candidates.choose`."""
    values, found = top_candidates(logits.reshape(-1, logits.shape[-1]), k)
    if ids is not None:
        found = jnp.take_along_axis(ids.reshape(-1, ids.shape[-1]), found, axis=-1)
    values, found = (x.reshape(*positions.shape, k) for x in (values, found))
    values = with_softcap(values, softcap)
    low, high, temperature, top_k, top_p, min_p = (x[:, None] for x in (seed[:, 0], seed[:, 1], temperature, *filters))
    kept = jnp.where(values >= threshold(values, temperature, top_k, top_p, min_p)[..., None], values, -jnp.inf)
    first, second = key_words(low, high, positions)
    noisy = perturbed(kept, temperature[..., None], first[..., None], second[..., None], found)
    chosen, _ = best(noisy.reshape(-1, k), found.reshape(-1, k))
    # The largest of all logits: of a row with a NaN that is a NaN, which may not be among the candidates.
    return chosen.reshape(positions.shape), with_softcap(jnp.max(logits, axis=-1), softcap)


def with_softcap(logits: jax.Array, softcap: float | None) -> jax.Array:
    """Capped logits, float32; what is at -inf is never chosen, and stays there."""
    return jnp.where(logits > -jnp.inf, soft(logits, softcap), logits)


def threshold(values: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """The least logit that filters keep of rows whose top_k is at most N. values: [..., N] float32, a row's best, largest first. Others:
    float32 and int32, which broadcast against [...]. Returns [...] float32, at most the row's largest."""
    most = values[..., 0]
    k = jnp.broadcast_to(jnp.clip(top_k, 1, values.shape[-1]), most.shape)
    last = jnp.take_along_axis(values, k[..., None] - 1, axis=-1)
    kept = (values >= last) & (values >= min_p_floor(most, temperature, min_p)[..., None])
    weights = jnp.where(kept, weight(values, most[..., None], temperature[..., None]), 0.0)
    before = jnp.cumsum(weights, axis=-1) - weights
    kept &= (before < top_p[..., None] * jnp.sum(weights, axis=-1, keepdims=True)) | (top_p[..., None] >= 1)
    return at_most(jnp.min(jnp.where(kept, values, jnp.inf), axis=-1), most)


def min_p_floor(most: jax.Array, temperature: jax.Array, min_p: jax.Array) -> jax.Array:
    """The least logit that min_p keeps. most: the row's largest. All float32, which broadcast against each other."""
    # A greedy row keeps only its best. Without the condition, temperature 0 times log 0 would be NaN.
    return most + jnp.where(temperature > 0, temperature * jnp.log(min_p), 0.0)


def weight(logits: jax.Array, most: jax.Array, temperature: jax.Array) -> jax.Array:
    """Probabilities up to a factor. most: the row's largest logit. All float32, which broadcast against each other."""
    return jnp.exp((logits - most) / jnp.maximum(temperature, jnp.float32(1e-30)))


def at_most(threshold: jax.Array, most: jax.Array) -> jax.Array:
    """A threshold that keeps the row's largest logit. A tiny top_p or min_p, 0 in float32, may give one above all logits, or NaN."""
    return jnp.where(threshold <= most, threshold, most)
