"""A sublayer's output, normed and added to the residual stream, and the norms with which the next sublayers read that."""

from __future__ import annotations

import jax

from pallas_kernels import dialect
from pallas_kernels.add_norm import reference, triton
from pallas_kernels.all_reduce import Unsummed

# What is added: one output, or several with a norm's weight each, whose norms are added up first. An output may come in parts, also on
# several devices.
Output = jax.Array | Unsummed
Addend = Output | tuple[tuple[Output, jax.Array], ...]


def add_norm(
    x: jax.Array,
    y: Addend,
    weight: jax.Array,
    *,
    scalar: jax.Array | None = None,
    next_weights: tuple[jax.Array, ...] = (),
    eps: float,
    implementation: str = "auto",
) -> tuple[jax.Array, ...]:
    """(x + norm(y, weight)) * scalar, followed by its norm with each of next_weights.

    x: [..., H], the residual stream. y: [..., H], or several pairs of such an array and a weight: their norms' sum then is y. An array
    with one axis more than x, [S, ..., H], stands for the sum of its S parts (`linear.partials`), `Unsummed` for such a sum over devices,
    which kernels alone serve. weight and all others: [H]. scalar: [1], or None for 1. Norms are RMS norms with `eps`.
    Returns arrays like x.

    Arithmetic is in float32; norms, sums and products are rounded to x's dtype, which is that of y unless it is in parts.
    implementation: see `dialect.select`. Raises ValueError for an unknown one.
    """
    chosen = dialect.select(implementation)
    if chosen == "xla":
        return reference.add_norm(x, y, weight, scalar, next_weights, eps)
    if isinstance(y, tuple):
        y = tuple((part.summed(x.dtype) if isinstance(part, Unsummed) else part, w) for part, w in y)
    return triton.add_norm(x, y, weight, scalar, next_weights, eps, interpret=chosen == "triton-interpret")


__all__ = ["Addend", "add_norm"]
