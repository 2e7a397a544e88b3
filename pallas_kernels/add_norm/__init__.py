"""Adds a sublayer's normed output to the residual stream, and norms the sum for the next sublayers."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import dialect
from pallas_kernels.add_norm import reference, triton
from pallas_kernels.add_norm.reference import Float8, Stepwise
from pallas_kernels.all_reduce import Unsummed
from pallas_kernels.float8_rows import Rounded
from pallas_kernels.moe import Choices

# What is added: one output, or several, each with its norm's weight or None, whose norms are summed first. An output may be in parts, and
# these on several devices, or lie with each row's experts.
Output = jax.Array | Unsummed | Choices
Addend = Output | tuple[tuple[Output, jax.Array | None], ...]


def add_norm(
    x: jax.Array,
    y: Addend,
    weight: jax.Array | None,
    *,
    scalar: jax.Array | None = None,
    next_weights: tuple[jax.Array | Stepwise | Float8, ...] = (),
    eps: float,
    launch_dependents: bool = False,
    implementation: str = "auto",
) -> tuple[Any, ...]:
    """(x + norm(y, weight)) * scalar, followed by the norm of that with each of next_weights. All returned arrays are like x, but the norm
    of a `Float8` is a `Rounded`.

    x: [..., H], the residual stream. y: [..., H], or several pairs of such an array and a weight; then y is the sum of their norms. An
    array [S, ..., H], with one axis more than x, stands for the sum of its S parts (`linear.partials`). `Unsummed` stands for such a sum
    over devices, which only kernels serve, and `moe.Choices` for their weighted sum. weight, next_weights: [H] each; a `Stepwise` norm is
    rounded more often than others. scalar: [1], or None for 1. Norms are RMS norms with `eps`; with None in the place of a weight, what it
    would norm is taken as it is.

    Arithmetic is in float32. Norms, sums and products are rounded to x's dtype, which y has too unless it is in parts.
    launch_dependents: whether only kernels read the results: see `dialect.launching`. implementation: see `dialect.select`. Raises
    ValueError for an unknown one.
    """
    chosen = dialect.select(implementation)
    if chosen == "xla":
        return reference.add_norm(x, y, weight, scalar, next_weights, eps)
    if isinstance(y, tuple):
        y = tuple((part.summed(x.dtype) if isinstance(part, Unsummed) else part, w) for part, w in y)
    settings = {"launch_dependents": launch_dependents, "interpret": chosen == "triton-interpret"}
    return triton.add_norm(x, y, weight, scalar, next_weights, eps, **settings)


__all__ = ["Addend", "Float8", "Rounded", "Stepwise", "add_norm"]
