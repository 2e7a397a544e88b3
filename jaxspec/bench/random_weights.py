"""Random weights for a tree of shapes, made on the devices that will hold them."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.interrupts import compiled
from jaxspec.trees import is_packed
from pallas_kernels.packed import KINDS, Packed, pack, values_of


def random_weights(abstract: Any, seed: int = 0, std: float = 0.02) -> Any:
    """Weights in the shapes, dtypes and shardings of a tree of ShapeDtypeStructs, made one by one on their devices.

    Norms, scalars and vectors are 1, integers (a token ordering) are 0, 1, 2, ..., all else is normal with standard deviation `std`;
    packed matrices have random codes and one scale, by which that is their deviation too. Weights of one shape share a program.
    """

    def draw(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if is_packed(leaf):
            drawn.append(name)
            return _packed(leaf, np.uint32(seed), np.uint32(len(drawn)), std)
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return jax.device_put(jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape), leaf.sharding)
        if len(leaf.shape) < 2 or "norm" in name:
            return jnp.ones(leaf.shape, leaf.dtype, device=leaf.sharding)
        drawn.append(name)
        settings = {"shape": leaf.shape, "dtype": leaf.dtype, "sharding": leaf.sharding}
        given = np.uint32(seed), np.uint32(len(drawn)), np.float32(std)
        return compiled(_normal, *given, **settings)(*given)

    drawn: list[str] = []
    return jax.tree_util.tree_map_with_path(draw, abstract, is_leaf=is_packed)


def _packed(leaf: Packed, seed: np.uint32, index: np.uint32, std: float) -> Packed:
    """A packed matrix of random codes. leaf: of ShapeDtypeStructs."""
    codes = np.arange(2 ** KINDS[leaf.kind].bits, dtype=np.uint8)
    kept = codes & ~np.uint8(leaf.kind == "fp8")  # the codes of NaN are odd
    values = np.asarray(values_of(jnp.asarray(kept), leaf.kind))
    scale, middle = std / float(np.std(values)), float(np.mean(values))
    settings = {"shape": leaf.words.shape, "sharding": leaf.words.sharding, "mask": 0xFFEEFFEE if leaf.kind == "fp8" else 0xFFFFFFFF}
    words = compiled(_words, seed, index, **settings)(seed, index)
    scales = jnp.full(leaf.scale.shape, scale, leaf.scale.dtype)
    if any(leaf.cut):  # the filling has scales of 0
        inner = leaf.shape[leaf.ndim - leaf.over :]
        group = None if leaf.groups is None else 64 // leaf.groups
        last = (1,) * leaf.over if group is None else (*inner[:-1], -(-inner[-1] // group))
        ones = jnp.full((*leaf.shape[: leaf.ndim - leaf.over], *last), scale, leaf.scale.dtype)
        scales = pack(jnp.zeros(leaf.shape, jnp.uint8), ones, kind=leaf.kind, over=leaf.over, group=group).scale
    scales = jax.device_put(scales, leaf.scale.sharding)
    if leaf.zero is None:
        return dataclasses.replace(leaf, words=words, scale=scales)
    if leaf.affine:
        zeros = jax.device_put((-middle * scales).astype(leaf.zero.dtype), leaf.zero.sharding)
    else:
        zeros = jnp.full(leaf.zero.shape, KINDS[leaf.kind].offset, leaf.zero.dtype, device=leaf.zero.sharding)
    return dataclasses.replace(leaf, words=words, scale=scales, zero=zeros)


@partial(jax.jit, static_argnames=("shape", "sharding", "mask"))
def _words(seed: jax.Array, index: jax.Array, *, shape: tuple[int, ...], sharding: Any, mask: int) -> jax.Array:
    words = _hash(seed, index, shape) & jnp.uint32(mask)
    return words if sharding is None else jax.lax.with_sharding_constraint(words, sharding)


@partial(jax.jit, static_argnames=("shape", "dtype", "sharding"))
def _normal(seed: jax.Array, index: jax.Array, std: jax.Array, *, shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.Array:
    weight = (std * normal_of(_hash(seed, index, shape))).astype(dtype)
    return weight if sharding is None else jax.lax.with_sharding_constraint(weight, sharding)


def _hash(seed: jax.Array, index: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Random uint32 from a hash of (seed, index of the array, coordinates). It needs no memory beside the result."""

    def mix(x: jax.Array) -> jax.Array:
        x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x21F0AAAD)
        x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0xD35A2D97)
        return x ^ (x >> jnp.uint32(15))

    bits = jnp.broadcast_to(mix(mix(seed) + index), shape)
    for axis in range(len(shape)):
        bits = mix(bits + jax.lax.broadcasted_iota(jnp.uint32, shape, axis))
    return bits


def normal_of(bits: jax.Array) -> jax.Array:
    """Standard normal float32 numbers from uint32 bits, of any shape. All are finite: (23 bits + 0.5) / 2**23 never rounds to 0 or 1."""
    uniform = ((bits >> jnp.uint32(9)).astype(jnp.float32) + 0.5) * jnp.float32(2.0**-23)
    return jnp.float32(math.sqrt(2)) * jax.lax.erf_inv(2 * uniform - 1)
