"""Residual sums and their norms in plain XLA: the definition of the operation, and its implementation without a kernel."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp

from pallas_kernels.qkv.reference import rms_norm


def sum_parts(y: jax.Array, like: jax.Array) -> jax.Array:
    """y, which may be in parts, as an array of the shape and dtype of `like`."""
    return y if y.ndim == like.ndim else jnp.sum(y, axis=0).astype(like.dtype)


def _normed(y, weight, eps):
    return y if weight is None else rms_norm(y, weight, eps)


def add_norm(x, y, weight, scalar, next_weights, eps):
    """See `pallas_kernels.add_norm.add_norm`."""
    if isinstance(y, tuple):
        y = functools.reduce(operator.add, [_normed(sum_parts(part, x), w, eps) for part, w in y])
    x = x + _normed(sum_parts(y, x), weight, eps)
    if scalar is not None:
        x = x * scalar.reshape((1,) * x.ndim)
    return (x, *(rms_norm(x, w, eps) for w in next_weights))
