"""From the fused projection of a layer to normed, rotated heads, with new keys and values stored in their pages on the way."""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels import dialect
from pallas_kernels.qkv import reference, triton


class Pages(NamedTuple):
    """Where the rows' keys and values go. k [pages, page, KV, key_dims], v [pages, page, KV, D]: the pools, updated in place if the
    caller donates them. table: [B, W] int32, logical page i of sequence b is table[b, i % W]. start, count: [B] int32, row t stands at
    position start + t, and rows from `count` on are not stored."""

    k: jax.Array
    v: jax.Array
    table: jax.Array
    start: jax.Array
    count: jax.Array


def qkv(
    projected: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array | None = None,
    pages: Pages | None = None,
    *,
    group: int,
    key_dims: int = 0,
    eps: float,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Normed and rotated query heads of a block of rows, and its keys and values.

    projected: [B, T, KV, P, D], or float32 parts [S, B, T, KV, P, D] whose sum it is (`linear.partials`); of P heads the first `group`
    are queries. With k_weight, head `group` is the key and the last one the value (the same head if P = group + 1). cos, sin:
    [B, T, D / 2] float32, of the angles by which pairs (d, d + D / 2) turn. q_weight, k_weight: [D], of the RMS norms with `eps`;
    values are normed without a weight and do not turn. key_dims: how many numbers of a key are kept: D, or R < D, which then are its
    dims 0 .. R/2 - 1 and D/2 .. D/2 + R/2 - 1.

    Returns q [B, T, KV, group, D], k and v, in q_weight's dtype. Without pages these are the rows' own, [B, T, KV, key_dims] and
    [B, T, KV, D]; with pages they are the pools with the rows in place, and every count must be at most W * page. Without k_weight
    they are None.

    implementation: see `dialect.select`. Raises ValueError for an unknown one.
    """
    chosen = dialect.select(implementation)
    settings = {"group": group, "key_dims": key_dims, "eps": eps}
    if chosen == "xla":
        return reference.qkv(projected, cos, sin, q_weight, k_weight, pages, **settings)
    return triton.qkv(projected, cos, sin, q_weight, k_weight, pages, **settings, interpret=chosen == "triton-interpret")


__all__ = ["Pages", "qkv"]
