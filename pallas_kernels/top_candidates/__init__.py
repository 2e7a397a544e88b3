"""The k largest logits of a row and their token ids, without a sort of the vocabulary."""

from __future__ import annotations

import jax

from pallas_kernels import dialect
from pallas_kernels.top_candidates import reference, triton


def top_candidates(logits: jax.Array, k: int, *, implementation: str = "auto") -> tuple[jax.Array, jax.Array]:
    """The k largest values of each row, in descending order, and their ids, as `jax.lax.top_k` returns them.

    logits: [N, V] float32. k: 1 .. V. Returns values [N, k] float32 and ids [N, k] int32. Of equal values the lower id comes first.
    Raises ValueError for a k outside 1 .. V, and for an `implementation` that is unknown or cannot serve the shapes.
    """
    if not 1 <= k <= logits.shape[1]:
        raise ValueError(f"k is {k}; expected 1 .. {logits.shape[1]}, the width of the logits")
    chosen = dialect.select(implementation, triton.unsupported(logits.shape[1], k))
    if chosen == "xla":
        return reference.top_candidates(logits, k)
    return triton.top_candidates(logits, k, interpret=chosen == "triton-interpret")
