"""Top candidates in plain XLA, in two exact stages instead of one sort of the vocabulary.

The k first tokens (by value, then by lower id) are all in the k first tiles (by largest value, then by lower index): if k tiles precede a
tile, their k maxima precede all of its tokens. So we choose k tiles by their maxima, then k tokens in these tiles.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp


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
