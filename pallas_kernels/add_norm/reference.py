"""Residual sums and their norms in plain XLA: the definition of the operation, and its implementation without a kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import float8_rows
from pallas_kernels.float8_rows import Rounded
from pallas_kernels.moe import Choices
from pallas_kernels.qkv.reference import rms_norm


@functools.partial(jax.tree_util.register_dataclass, data_fields=("weight",), meta_fields=("factor",))
@dataclasses.dataclass(frozen=True)
class Stepwise:
    """A norm whose result is rounded before it is multiplied by the weight [H], and again before it is by the factor, as the input of
    transformers' `Gemma4TextRouter` is. The factor itself is not rounded."""

    weight: Any
    factor: float

    def __call__(self, x: jax.Array, eps: float) -> jax.Array:
        scaled = rms_norm(x, None, eps) * self.weight.reshape((1,) * (x.ndim - 1) + self.weight.shape)
        return (scaled.astype(jnp.float32) * self.factor).astype(x.dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=("weight",), meta_fields=("codes",))
@dataclasses.dataclass(frozen=True)
class Float8:
    """A norm of weight [H] for a product that takes rows rounded to float8: its result is a `Rounded`, of codes or of numbers."""

    weight: Any
    codes: bool

    def __call__(self, x: jax.Array, eps: float) -> Rounded:
        rows = rms_norm(x, self.weight, eps).reshape(math.prod(x.shape[:-1]), -1)
        found, scales = float8_rows.reference.codes(rows) if self.codes else (float8_rows.reference.rounded(rows), None)
        return Rounded(found, scales, x.shape[:-1], x.dtype)


def sum_parts(y: jax.Array | Choices, like: jax.Array) -> jax.Array:
    """y, which may be in parts or with each row's experts, as an array of the shape and dtype of `like`."""
    if isinstance(y, Choices):
        return y.summed().reshape(like.shape)
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
    return (x, *(w(x, eps) if isinstance(w, Stepwise | Float8) else rms_norm(x, w, eps) for w in next_weights))
