"""Attention over a paged cache and fresh rows, for verify blocks, prefill chunks and drafters."""

from __future__ import annotations

import jax

from pallas_kernels import dialect
from pallas_kernels.paged_attention import mosaic, reference, triton


def paged_attention(
    q: jax.Array,
    positions: jax.Array,
    cached: tuple[jax.Array, jax.Array] | None,
    table: jax.Array | None,
    lengths: jax.Array,
    fresh: tuple[jax.Array, jax.Array] | None = None,
    fresh_count: jax.Array | None = None,
    key_weight: jax.Array | None = None,
    scales: jax.Array | None = None,
    through: jax.Array | None = None,
    *,
    causal: bool = True,
    window: int | None = None,
    scale: float = 1.0,
    ancestors: tuple[int, ...] | None = None,
    launch_dependents: bool = False,
    read_once: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Softmax attention of query rows over a sequence's pages and over fresh rows that are not in the pages yet.

    q: [B, T, KV, G, D], G query heads for each KV head. positions: [B, T] int32, of the query rows.
    cached: K and V pools [pages, page, KV, D], or None. table: [B, W] int32; logical page i of sequence b is table[b, i % W], so a
    narrow table is a ring that keeps the newest W * page positions. lengths: [B] int32; positions 0 .. lengths - 1 are cached.
    fresh: K and V [B, F, KV, D] at positions lengths .. lengths + fresh_count - 1; fresh_count: [B] int32.
    key_weight: [D], or None. With it, cached and fresh K hold only the R rotary dims of each key ([..., R]: dims 0 .. R/2 - 1 and
    D/2 .. D/2 + R/2 - 1); the other dims of a key are V's times the weight.
    scales: [2] float32, factors for all K and all V, or None; for K and V in float8_e4m3fn. causal: whether a query sees fresh keys only
    up to its own position. through: [B, T] int32, then, up to which positions it sees keys, its own at least: for rows of an image, which
    see one another; None for its own. window: a query at p sees keys with p - key < window; None sees all. scale: of the scores.
    ancestors (static): for each of T rows of a tree of drafts, which fresh rows it sees, whatever the positions: row t sees fresh row j if
    bit j of ancestors[t] is set. At most 32 fresh rows. Causality and window are then those of cached keys alone. None for no tree.

    Returns [B, T, KV, G, D] in q's dtype; zeros for a query that sees no key. K and V may be anything, even NaN, at positions outside
    0 .. lengths + fresh_count - 1, at or before min(positions) - window, and (if causal) after max(positions), or max(through).

    launch_dependents: whether only kernels read the result: see `dialect.launching`. read_once: whether no other layer reads these pages
    soon, so that the L2 cache need not keep them.

    implementation: see `dialect.select`; or "mosaic", kernels for Hopper and bfloat16: for keys of which only the rotary dims are stored,
    and for whole keys of head_dim 256, each for few rows and for many. "auto" takes them where they are faster. Raises ValueError for an
    unknown or unsupported one.
    """
    if ancestors is not None and (fresh is None or len(ancestors) != q.shape[1] or fresh[0].shape[1] > 32):
        rows = "no" if fresh is None else fresh[0].shape[1]
        raise ValueError(
            f"{len(ancestors)} ancestors are given for {q.shape[1]} rows and {rows} fresh rows; expected one each, and 1 .. 32"
        )
    if through is not None and (not causal or ancestors is not None):
        raise ValueError("through is given for rows that are not causal or are a tree's; expected causal rows in order")
    arguments = (q, positions, cached, table, lengths, fresh, fresh_count, key_weight, scales, through)
    if implementation in ("auto", "mosaic"):
        unsupported = mosaic.unsupported(q, cached, fresh, key_weight, scales, through, ancestors)
        if implementation == "mosaic" and unsupported:
            raise ValueError(f"implementation 'mosaic' cannot serve this: {unsupported}")
        if not unsupported and (implementation == "mosaic" or mosaic.is_faster(q, key_weight, window)):
            settings = {"causal": causal, "window": window, "scale": scale, "launch_dependents": launch_dependents, "read_once": read_once}
            return mosaic.paged_attention(*arguments[:8], through, **settings)
    unsupported = triton.unsupported(q.shape[-1], None if cached is None else cached[0].shape[1])
    chosen = dialect.select(implementation, unsupported, further=("mosaic",))
    settings = {"causal": causal, "window": window, "scale": scale, "ancestors": ancestors}
    if chosen == "xla":
        return reference.paged_attention(*arguments, **settings)
    settings |= {"launch_dependents": launch_dependents, "interpret": chosen == "triton-interpret"}
    return triton.paged_attention(*arguments, **settings)


def by_kernel(head_dim: int, page: int | None, implementation: str = "auto") -> bool:
    """Whether a kernel reads the queries, and no operation of XLA does. page: positions of a page, or None without a cache."""
    return implementation == "mosaic" or dialect.select(implementation, triton.unsupported(head_dim, page)) != "xla"
