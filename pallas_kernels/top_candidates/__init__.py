"""The k largest logits of a row and their token ids, without a sort of the vocabulary, and a choice among them."""

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


def choose(
    logits: jax.Array,
    positions: jax.Array,
    seed: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    *,
    k: int,
    ids: jax.Array | None = None,
    softcap: float | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """The token that each row chooses among its k largest logits, under filters whose top_k is at most k: of what min_p, then top_k, then
    top_p keep, argmax(logits / T + noise), or argmax(logits) where the temperature T is 0.

    logits: [B, T, V] float32; with a softcap, softcap * tanh(logits / softcap) are meant, but -inf stays. positions: [B, T] int32, and
    seed: [B, 2] uint32, of the noise: see `noise.row_keys`. temperature, top_p, min_p: [B] float32; top_k: [B] int32, taken as 1 .. k.
    k: 1 .. V. ids: [B, T, V] int32, token ids of the logits; without them logit i is token i's. implementation: see `dialect.select`.

    Returns ids [B, T] int32 and each row's largest logit [B, T] float32. Of equal values the lowest id wins. Raises ValueError for a k
    outside 1 .. V, and for an `implementation` that is unknown or cannot serve the shapes.
    """
    vocab = logits.shape[-1]
    if not 1 <= k <= vocab:
        raise ValueError(f"k is {k}; expected 1 .. {vocab}, the width of the logits")
    chosen = dialect.select(implementation, triton.unsupported(vocab, k))
    settings = logits, ids, positions, seed, temperature, (top_k, top_p, min_p), k, softcap
    return reference.choose(*settings) if chosen == "xla" else triton.choose(*settings, interpret=chosen == "triton-interpret")
