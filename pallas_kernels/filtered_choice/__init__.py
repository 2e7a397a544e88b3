"""The choice of a token among a row's most likely ones that top_k, top_p and min_p leave."""

from __future__ import annotations

import jax

from pallas_kernels import dialect, top_candidates
from pallas_kernels.filtered_choice import reference, triton
from pallas_kernels.filtered_choice.reference import min_p_floor, threshold, weigh


def filtered_choice(
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    count: int,
    ids: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """argmax(logits / T + noise) among a row's `count` largest logits that the filters keep, or argmax(logits) where the temperature T is
    0: [N] int32.

    logits: [N, V] float32. keys: [N, 2] uint32 from `noise.row_keys`. temperature, top_p, min_p: [M] float32; top_k: [M] int32, taken as
    the nearest number of 1 .. count; the first N / M rows have the first of each, and so on. A row keeps what reaches all of: its top_k-th
    largest logit, min_p times the largest probability, and the least of the largest probabilities that add up to top_p of what the others
    leave; equal logits share their fate. count: 1 .. V. ids: [N, V] int32, the token ids of the logits; None if logit i is token i. Of
    equal values the first one wins.

    implementation: see `dialect.select`. Raises ValueError for a count outside 1 .. V, and for an `implementation` that is unknown or
    cannot serve the shapes.
    """
    size = logits.shape[1]
    if not 1 <= count <= size:
        raise ValueError(f"count is {count}; expected 1 .. {size}, the width of the logits")
    settings = keys, temperature, top_k, top_p, min_p
    chosen = dialect.select(implementation, top_candidates.triton.unsupported(size, count))
    if chosen == "xla":
        return reference.filtered_choice(logits, *settings, count, ids)
    return triton.filtered_choice(logits, *settings, count, ids, interpret=chosen == "triton-interpret")


__all__ = ["filtered_choice", "min_p_floor", "threshold", "weigh"]
