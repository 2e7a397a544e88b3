"""Heads of a layer in plain XLA: the definition of the operation, and its implementation where no kernel runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array | None, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis, in float32, rounded once at the end."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if weight is not None:
        wide = wide * weight.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + weight.shape)
    return wide.astype(x.dtype)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates pairs (d, d + D / 2) of the last axis. x: [B, T, ..., D]; cos, sin: [B, T, D / 2] float32. Returns an array like x."""
    shape = cos.shape[:2] + (1,) * (x.ndim - 3) + cos.shape[2:]
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)


def stored(x: jax.Array, dtype: jnp.dtype, scale: jax.Array | None = None) -> jax.Array:
    """x as a pool of `dtype` holds it: divided by `scale` ([] float32, or None for 1), and for float8 clipped to its range."""
    if scale is not None:
        x = x.astype(jnp.float32) / scale
    if dtype == jnp.float8_e4m3fn:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x.astype(jnp.float32), -largest, largest)
    return x.astype(dtype)


def write_rows(
    pool: jax.Array, table: jax.Array, start: jax.Array, count: jax.Array, rows: jax.Array, path: jax.Array | None = None
) -> jax.Array:
    """Stores rows at positions start .. start + count - 1 of each sequence in its pages, and returns the pool.

    pool: [pages, page, KV, D]. table: [B, W] int32. start, count: [B] int32. rows: [B, T, KV, D]; those from `count` on are dropped. path:
    [B, N] int32, the rows to be stored in place of these. If there are more rows than the ring holds, the last ones stay.
    """
    page = pool.shape[1]
    if path is not None:
        rows = jnp.take_along_axis(rows, path[:, :, None, None], axis=1)
    row = jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :]
    position = start[:, None] + row
    kept = (row < count[:, None]) & (row >= count[:, None] - table.shape[1] * page)
    pages = jnp.take_along_axis(table, jnp.mod(position // page, table.shape[1]), axis=1)
    pages = jnp.where(kept, pages, pool.shape[0])  # out of range: the row is dropped
    return pool.at[pages, jnp.mod(position, page)].set(stored(rows, pool.dtype), mode="drop")


def qkv(projected, cos, sin, q_weight, k_weight, pages, *, group, key_dims, eps, value_norm, dtype):
    """See `pallas_kernels.qkv.qkv`."""
    if projected.ndim == 6:
        projected = jnp.sum(projected, axis=0)
    projected = projected.astype(dtype)
    q = rotate(rms_norm(projected[..., :group, :], q_weight, eps), cos, sin)
    if k_weight is None:
        return q, None, None
    k = rotate(rms_norm(projected[..., group, :], k_weight, eps), cos, sin)
    v = rms_norm(projected[..., -1, :], None, eps) if value_norm else projected[..., -1, :]
    if key_dims < k.shape[-1]:
        low, high = jnp.split(k, 2, axis=-1)
        k = jnp.concatenate([low[..., : key_dims // 2], high[..., : key_dims // 2]], axis=-1)
    if pages is None:
        return q, k, v
    where = (pages.table, pages.start, pages.count)
    return q, write_rows(pages.k, *where, k), write_rows(pages.v, *where, v)
