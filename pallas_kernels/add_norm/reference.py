"""Residual sums and their norms in plain XLA: the definition of the operation, and its implementation where no kernel runs."""

from __future__ import annotations

import functools
import operator

from pallas_kernels.qkv.reference import rms_norm


def add_norm(x, y, weight, scalar, next_weights, eps):
    """See `pallas_kernels.add_norm.add_norm`."""
    if isinstance(y, tuple):
        y = functools.reduce(operator.add, [rms_norm(part, w, eps) for part, w in y])
    x = x + rms_norm(y, weight, eps)
    if scalar is not None:
        x = x * scalar.reshape((1,) * x.ndim)
    return (x, *(rms_norm(x, w, eps) for w in next_weights))
