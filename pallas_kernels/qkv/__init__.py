"""Norms and rotates the heads of a layer's fused projection, and stores new keys and values in their pages, at once or later. On Hopper one
kernel does all that and the projection."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax

from pallas_kernels import dialect, linear
from pallas_kernels.order import zero_after
from pallas_kernels.packed import Packed
from pallas_kernels.qkv import mosaic, reference, triton


class Pages(NamedTuple):
    """Where the rows' keys and values go. The pools are updated in place if the caller donates them."""

    k: jax.Array  # [pages, page, KV, key_dims]: the pool of keys
    v: jax.Array  # [pages, page, KV, D]: the pool of values
    table: jax.Array  # [B, W] int32; logical page i of sequence b is table[b, i % W]
    start: jax.Array  # [B] int32; row t stands at position start + t
    count: jax.Array  # [B] int32; rows from `count` on are not stored


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
    value_norm: bool = True,
    dtype: Any = None,
    launch_dependents: bool = False,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """The normed and rotated query heads of a block of rows, and its keys and values.

    projected: [B, T, KV, P, D], or float32 parts [S, B, T, KV, P, D] to be summed (`linear.partials`). The first `group` of P heads are
    queries. With k_weight, head `group` is the key and the last head the value (the same head if P = group + 1). cos, sin: [B, T, D / 2]
    float32, of the angles by which pairs (d, d + D / 2) rotate. q_weight, k_weight: [D], of the RMS norms with `eps`; values do not
    rotate, and are normed without a weight, or taken as they are if not value_norm. key_dims: how many numbers of a key are kept: D, or
    R < D; the latter are its dims 0 .. R/2 - 1 and D/2 .. D/2 + R/2 - 1.

    Returns q [B, T, KV, group, D], k and v, in `dtype`, by default q_weight's. Without pages k and v are those of the rows,
    [B, T, KV, key_dims] and [B, T, KV, D]. With pages they are the pools, which then hold the rows, and every count must be at most
    W * page. Without k_weight they are None.

    launch_dependents: whether only kernels read the results: see `dialect.launching`. implementation: see `dialect.select`. Raises
    ValueError for an unknown one.
    """
    chosen = dialect.select(implementation)
    settings = {"group": group, "key_dims": key_dims, "eps": eps, "value_norm": value_norm, "dtype": dtype or q_weight.dtype}
    if chosen == "xla":
        return reference.qkv(projected, cos, sin, q_weight, k_weight, pages, **settings)
    settings |= {"launch_dependents": launch_dependents, "interpret": chosen == "triton-interpret"}
    return triton.qkv(projected, cos, sin, q_weight, k_weight, pages, **settings)


def serves(x: Any, w: Any, k_weight: Any, pages: Any, *, key_dims: int = 0, dtype: Any = None, implementation: str = "auto") -> bool:
    """Whether `projected` has a kernel for these arrays, of which the shapes are enough, and "auto" takes it. Without, a product and `qkv`
    serve. Arguments: those of `projected`."""
    early = jax.__version_info__ >= mosaic.SINCE
    return implementation == "auto" and early and _unsupported(x, w, k_weight, pages, key_dims, dtype) is None


def projected(
    x: jax.Array,
    w: jax.Array | Packed,
    cos: jax.Array,
    sin: jax.Array,
    q_weight: jax.Array,
    k_weight: jax.Array | None = None,
    pages: Pages | None = None,
    *,
    group: int,
    key_dims: int = 0,
    eps: float,
    value_norm: bool = True,
    dtype: Any = None,
    launch_dependents: bool = False,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """`qkv` of the product of rows x, [B, T, H], with w, [KV, P, D, H], which is summed in float32.

    dtype: by default x's. implementation: as for `qkv`, or "mosaic", one kernel for Hopper, which "auto" takes where it `serves`. It may
    read weights before the kernel ahead of it has ended. Other arguments and results: those of `qkv`. Raises ValueError for an unknown
    implementation, or if the kernel was asked for and cannot serve.
    """
    rows, settings = x.reshape(-1, x.shape[-1]), {"group": group, "eps": eps, "value_norm": value_norm}
    settings["launch_dependents"] = launch_dependents
    if implementation == "mosaic" and (reason := _unsupported(x, w, k_weight, pages, key_dims, dtype)):
        raise ValueError(f"implementation 'mosaic' cannot serve this: {reason}")
    if implementation == "mosaic" or serves(x, w, k_weight, pages, key_dims=key_dims, dtype=dtype, implementation=implementation):
        turns = [angles.reshape(-1, angles.shape[-1]) for angles in (cos, sin)]
        q, k, v = mosaic.projected(rows, w, *turns, q_weight, k_weight, pages, batch=x.shape[0], **settings)
        q = q.reshape(*x.shape[:2], -1, group, q.shape[-1])
        if pages is None and k is not None:
            k, v = (a.reshape(*x.shape[:2], *a.shape[1:]) for a in (k, v))
        return q, k, v
    matrix = w.flat() if isinstance(w, Packed) else w.reshape(-1, w.shape[-1])
    parts = linear.partials(rows, matrix, implementation=implementation).reshape(-1, *x.shape[:2], *w.shape[:-1])
    settings |= {"key_dims": key_dims, "dtype": dtype or x.dtype, "implementation": implementation}
    return qkv(parts, cos, sin, q_weight, k_weight, pages, **settings)


def _unsupported(x: Any, w: Any, k_weight: Any, pages: Any, key_dims: int, dtype: Any) -> str | None:
    rows = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    return mosaic.unsupported(rows, w, pages, key_dims, k_weight is not None, dtype or x.dtype)


def write(
    pages: Pages,
    k: jax.Array,
    v: jax.Array,
    path: jax.Array | None = None,
    *,
    after: jax.Array | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Stores rows that were not stored at once: k [B, T, KV, key_dims] and v [B, T, KV, D] in the pools' dtype.

    path: [B, N] int32, which of the rows of k and v are stored, in this order; None for all. after: any array, which is computed before
    the rows are stored: what was made of the pools as they are. XLA overwrites a pool in place if no write can come before a read of what
    it was. Else it copies the pool first, every slot's pages. Returns the pools. Of more rows than W * page, the last are kept.
    implementation: see `dialect.select`; kernels do not store float8. Raises ValueError for an unknown one.
    """
    narrow = pages.k.dtype.itemsize == 1
    chosen = "xla" if narrow else dialect.select(implementation)
    if chosen == "xla":
        where = (pages.table, pages.start, pages.count if after is None else pages.count + zero_after(after))
        return reference.write_rows(pages.k, *where, k, path), reference.write_rows(pages.v, *where, v, path)
    return triton.write(pages, k, v, path, after, interpret=chosen == "triton-interpret")


__all__ = ["Pages", "projected", "qkv", "serves", "write"]
