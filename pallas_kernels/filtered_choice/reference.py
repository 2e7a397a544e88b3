"""The threshold that top_k, top_p and min_p set among a row's candidates, in plain XLA, and the choice among what reaches it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.noise import perturbed
from pallas_kernels.top_candidates.reference import top_candidates


def threshold(values: jax.Array, temperature: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """The smallest logit that the filters keep: [...] float32. values: [..., C] float32, a row's largest logits, largest first.
    temperature, top_k, top_p, min_p: the settings, which broadcast against [...]; a top_k is taken as the nearest number of 1 .. C."""
    best = values[..., 0]
    k = jnp.clip(top_k, 1, values.shape[-1])[..., None]
    last = jnp.take_along_axis(values, k - 1, axis=-1)
    kept = (values >= last) & (values >= min_p_floor(best, temperature, min_p)[..., None])
    weights = jnp.where(kept, weigh(values, best[..., None], temperature[..., None]), 0.0)
    before = jnp.cumsum(weights, axis=-1) - weights
    p = top_p[..., None]
    kept &= (before < p * jnp.sum(weights, axis=-1, keepdims=True)) | (p >= 1)
    found = jnp.min(jnp.where(kept, values, jnp.inf), axis=-1)
    # A tiny top_p or min_p, 0 in float32, may give a threshold above all logits, or NaN. The best token stays all the same.
    return jnp.where(found <= best, found, best)


def min_p_floor(best: jax.Array, temperature: jax.Array, min_p: jax.Array) -> jax.Array:
    """The smallest logit that min_p keeps. best: [...], each row's largest logit; all three broadcast against each other."""
    # A greedy row keeps only its best. Without the condition, temperature 0 times log 0 would be NaN.
    return best + jnp.where(temperature > 0, temperature * jnp.log(min_p), 0.0)


def weigh(logits: jax.Array, best: jax.Array, temperature: jax.Array) -> jax.Array:
    """Probabilities up to a factor; all three broadcast against each other."""
    return jnp.exp((logits - best) / jnp.maximum(temperature, jnp.float32(1e-30)))


def filtered_choice(logits, keys, temperature, top_k, top_p, min_p, count, ids=None):
    """See `pallas_kernels.filtered_choice.filtered_choice`."""
    rows = len(logits)
    temperature, top_k, top_p, min_p = (jnp.repeat(x, rows // len(x)) for x in (temperature, top_k, top_p, min_p))
    values, places = top_candidates(logits, count)
    tokens = places if ids is None else jnp.take_along_axis(ids, places, axis=1)
    left = jnp.where(values >= threshold(values, temperature, top_k, top_p, min_p)[:, None], values, -jnp.inf)
    noisy = perturbed(left, temperature[:, None], keys[:, :1], keys[:, 1:], tokens)
    return jnp.take_along_axis(tokens, jnp.argmax(noisy, axis=-1)[:, None], axis=1)[:, 0]
