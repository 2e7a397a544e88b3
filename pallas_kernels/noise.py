"""Position-keyed Gumbel noise: a counter-based integer hash of a request's seed, a token's position and a token id.

Any subset of ids (a vocabulary shard, a few candidates, a tile of a head) gets the same values on any backend. So a target and its
drafter can share the noise.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def _mix(x: jax.Array) -> jax.Array:
    """A bijection of uint32 in which every input bit reaches every output bit (the finaliser of MurmurHash3)."""
    x = x ^ (x >> jnp.uint32(16))
    x = x * jnp.uint32(0x85EBCA6B)
    x = x ^ (x >> jnp.uint32(13))
    x = x * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> jnp.uint32(16))


def row_keys(seed: jax.Array, position: jax.Array) -> jax.Array:
    """The 64-bit key of a row of noise. seed: [..., 2] uint32, position: [...] int32 -> [..., 2] uint32."""
    return jnp.stack(key_words(seed[..., 0], seed[..., 1], position), axis=-1)


def key_words(low: jax.Array, high: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`row_keys` with the two words of a seed as separate arguments, and those of the key as separate results, as a kernel has them."""
    at = position.astype(jnp.uint32)
    first = _mix(_mix(_mix(low + jnp.uint32(0x9E3779B9)) ^ high) + at)
    return first, _mix(_mix(_mix(high ^ jnp.uint32(0x7F4A7C15)) + low) ^ at)


def gumbel(keys: jax.Array, ids: jax.Array) -> jax.Array:
    """The Gumbel noise of token ids. keys: [..., 2] uint32 from `row_keys`; ids: [..., C] int32 -> [..., C] float32."""
    return gumbel_of(keys[..., :1], keys[..., 1:], ids)


def gumbel_of(first: jax.Array, second: jax.Array, ids: jax.Array) -> jax.Array:
    """`gumbel` with the two words of a key as separate arguments, as a kernel loads them. All three broadcast against each other.

    We compute the uniform number as its distance from 1, so that large noise, which decides a choice, has 32 bits of resolution.
    """
    bits = _mix(_mix((ids.astype(jnp.uint32) * jnp.uint32(0x9E3779B1)) ^ first) + second)
    distance = jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32), jnp.float32(1.0 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-distance))


def perturbed(logits: jax.Array, temperature: jax.Array, first: jax.Array, second: jax.Array, ids: jax.Array) -> jax.Array:
    """What the choice of a token maximises: logits / T + noise, or the logits where the temperature T is 0.

    logits, temperature: float32; first, second: uint32, the two words of the rows' keys; ids: int32, token ids. All five broadcast
    against each other.
    """
    noisy = logits / jnp.maximum(temperature, jnp.float32(1e-30)) + gumbel_of(first, second, ids)
    return jnp.where(temperature > 0, noisy, logits)
