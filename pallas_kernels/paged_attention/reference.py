"""Paged attention in plain XLA: the definition of the operation, and its implementation without a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a row that sees no key does not become NaN


def ring_positions(lengths: jax.Array, size: int) -> jax.Array:
    """The position that each of `size` ring places holds after positions 0 .. lengths - 1 were written: [B, size] int32.

    Place j holds the newest position that is congruent to j; a negative one if nothing was written there. lengths: [B] int32.
    """
    newest = lengths[:, None] - 1
    return newest - jnp.mod(newest - jnp.arange(size, dtype=jnp.int32)[None, :], size)


def rebuilt_keys(rotary: jax.Array, values: jax.Array, weight: jax.Array) -> jax.Array:
    """K [..., D] from its rotary dims [..., R], V [..., D] and the weight [D].

    The rotary dims are 0 .. R/2 - 1 and D/2 .. D/2 + R/2 - 1. In the others K is V times the weight.
    """
    half, middle = rotary.shape[-1] // 2, values.shape[-1] // 2
    keys = (values.astype(jnp.float32) * weight.astype(jnp.float32).reshape((1,) * (values.ndim - 1) + weight.shape)).astype(values.dtype)
    return keys.at[..., :half].set(rotary[..., :half]).at[..., middle : middle + half].set(rotary[..., half:])


def paged_attention(
    q, positions, cached, table, lengths, fresh, fresh_count, key_weight, scales, through=None, *, causal, window, scale, ancestors=None,
):  # fmt: skip
    """See `pallas_kernels.paged_attention.paged_attention`."""
    keys, values, key_positions, is_fresh = [], [], [], []
    if cached is not None:
        k, v = (jnp.take(pool, table, axis=0, mode="clip").reshape(q.shape[0], -1, *pool.shape[2:]) for pool in cached)
        keys.append(k)
        values.append(v)
        key_positions.append(ring_positions(lengths, k.shape[1]))
        is_fresh.append(jnp.zeros(k.shape[1], bool))
    if fresh is not None:
        k, v = fresh
        row = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :]
        keys.append(k)
        values.append(v)
        key_positions.append(jnp.where(row < fresh_count[:, None], lengths[:, None] + row, -1))
        is_fresh.append(jnp.ones(k.shape[1], bool))
    at = jnp.concatenate(key_positions, axis=1)[:, None, :]
    visible = at >= 0
    if causal:
        visible &= at <= (positions if through is None else through)[:, :, None]
    else:
        visible &= (at < lengths[:, None, None]) | jnp.concatenate(is_fresh)[None, None, :]
    if window is not None:
        visible &= positions[:, :, None] - at < window
    if ancestors is not None:
        assert fresh is not None
        seen = jnp.asarray(ancestors, jnp.uint32)[:, None] >> jnp.arange(fresh[0].shape[1], dtype=jnp.uint32)[None, :] & jnp.uint32(1)
        own = jnp.broadcast_to((seen > 0)[None], (q.shape[0], *seen.shape)) & (key_positions[-1] >= 0)[:, None, :]
        visible = jnp.broadcast_to(visible, (*own.shape[:2], at.shape[-1]))
        visible = jnp.concatenate([visible[..., : at.shape[-1] - seen.shape[1]], own], axis=-1)
    # A masked key has weight 0, but 0 times NaN is NaN. So we clear keys that no query sees.
    seen = jnp.any(visible, axis=1)[:, :, None, None]
    k = jnp.where(seen, jnp.concatenate(keys, axis=1).astype(q.dtype), 0)
    v = jnp.where(seen, jnp.concatenate(values, axis=1).astype(q.dtype), 0)
    if scales is not None:
        k, v = ((x.astype(jnp.float32) * scale).astype(q.dtype) for x, scale in zip((k, v), scales, strict=True))
    if key_weight is not None:
        k = rebuilt_keys(k, v, key_weight)
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k, preferred_element_type=jnp.float32) * scale
    visible = visible[:, None, None, :, :]
    weights = jax.nn.softmax(jnp.where(visible, scores, MASKED), axis=-1)
    weights = jnp.where(visible, weights, 0).astype(q.dtype)  # if a query sees no key, the softmax has given all keys equal weights
    return jnp.einsum("bkgts,bskd->btkgd", weights, v)
