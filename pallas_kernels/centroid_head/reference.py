"""The centroid head in plain XLA: the definition of the operation, and its implementation without a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.choice import best, capped
from pallas_kernels.noise import perturbed


def centroid_scores(hidden: jax.Array, centroids: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """The product of each row with each centroid, and its bias: [N, h], [C, h] and [N, C] float32, or None -> [N, C] float32."""
    scores = jax.lax.dot_general(hidden, centroids, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return scores if bias is None else scores + bias


def candidates(
    hidden: jax.Array,
    centroids: jax.Array,
    token_ordering: jax.Array,
    table: jax.Array,
    top_k: int,
    suppressed: tuple[int, ...],
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.centroid_head.candidates`."""
    scores = centroid_scores(hidden, centroids, bias)
    _, selected = jax.lax.top_k(scores, top_k)
    ordering = token_ordering.reshape(centroids.shape[0], -1)
    ids = jnp.take(ordering, jnp.sort(selected, axis=-1), axis=0).reshape(hidden.shape[0], -1)
    logits = jnp.einsum("nch,nh->nc", jnp.take(table, ids, axis=0), hidden, preferred_element_type=jnp.float32)
    return capped(logits, ids, None, suppressed), ids


def choose(
    hidden: jax.Array,
    centroids: jax.Array,
    token_ordering: jax.Array,
    table: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    top_k: int,
    suppressed: tuple[int, ...],
) -> jax.Array:
    """See `pallas_kernels.centroid_head.choose`."""
    logits, ids = candidates(hidden, centroids, token_ordering, table, top_k, suppressed)
    return best(perturbed(logits, temperature[:, None], keys[:, :1], keys[:, 1:], ids), ids)[0]
