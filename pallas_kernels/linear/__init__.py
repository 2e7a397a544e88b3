"""Products of few rows with a matrix, as in a decoding step. They take as long as it takes to read the weights once.

With few outputs, several programs share the sums of a product, to fill the GPU. `partials` returns their parts, and the kernel that reads
the product adds them up. The activation of a gated layer is part of its product.
"""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import dialect
from pallas_kernels.linear import packed_mosaic, packed_triton, reference, triton
from pallas_kernels.linear.reference import product
from pallas_kernels.linear.triton import MOST_ROWS
from pallas_kernels.packed import Packed


def most_rows(w: jax.Array | Packed) -> int:
    """The most rows that a kernel multiplies with this matrix."""
    if isinstance(w, Packed):
        return 0 if any(w.cut) else packed_triton.MOST_ROWS
    return MOST_ROWS


def linear(x: jax.Array, w: jax.Array | Packed, *, splits: int | None = 1, implementation: str = "auto") -> jax.Array:
    """x w^T, summed in float32 and rounded once. x: [N, H], w: [O, H] -> [N, O] in x's dtype.

    splits: into how many parts the kernel may cut the sums; None for as many as fill the GPU. More than one take a second kernel, which
    adds them up. w: packed or not, as in all functions here; what a packed one means is its weights as `unpack` gives them.
    implementation: "auto" is XLA above `most_rows`, and if a matrix that is not packed has few columns for so many rows (`triton.pays`);
    otherwise see `dialect.select`. Raises ValueError for an unknown or unsupported one, or if splits is not positive.
    """
    chosen = _select(implementation, splits, x, w)
    if chosen == "xla":
        return reference.linear(x, w)
    if chosen == "mosaic":
        return packed_mosaic.linear(x, w, splits)
    return _kernels(w).linear(x, w, splits, interpret=chosen == "triton-interpret")


def partials(x: jax.Array, w: jax.Array | Packed, *, splits: int | None = None, implementation: str = "auto") -> jax.Array:
    """Parts of x w^T, to be summed over the first axis. x: [N, H], w: [O, H] -> [S, N, O] float32.

    splits: the most that S may be; None for as many as fill the GPU. XLA's S is 1. implementation and errors: as for `linear`.
    """
    chosen = _select(implementation, splits, x, w)
    if chosen == "xla":
        return reference.partials(x, w)
    if chosen == "mosaic":
        return packed_mosaic.partials(x, w, splits)
    return _kernels(w).partials(x, w, splits, interpret=chosen == "triton-interpret")


def gated(x: jax.Array, gate_up: jax.Array | Packed, *, implementation: str = "auto") -> jax.Array:
    """gelu_tanh(x gate^T) * (x up^T). x: [N, H], gate_up: [2, I, H] -> [N, I] in x's dtype.

    Both products are summed in float32 and rounded to x's dtype; all else is computed in float32 and rounded once. implementation and
    errors: as for `linear`.
    """
    chosen = _select(implementation, 1, x, gate_up)
    if chosen == "xla":
        return reference.gated(x, gate_up)
    if chosen == "mosaic":
        return packed_mosaic.gated(x, gate_up)
    return _kernels(gate_up).gated(x, gate_up, interpret=chosen == "triton-interpret")


def gated_by(x: jax.Array, w: jax.Array | Packed, u: jax.Array, index: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """gelu_tanh(x w^T) * u[:, index]. x: [N, H], w: [P, H], u: [N, L, P], index: [] int32 -> [N, P] in x's dtype.

    Rounded as `gated` is. implementation and errors: as for `linear`.
    """
    chosen = _select(implementation, 1, x, w, u)
    if chosen == "xla":
        return reference.gated_by(x, w, u, index)
    if chosen == "mosaic":
        return packed_mosaic.gated_by(x, w, u, index)
    return _kernels(w).gated_by(x, w, u, index, interpret=chosen == "triton-interpret")


def _select(implementation: str, splits: int | None, x: jax.Array, w: jax.Array | Packed, *others: jax.Array) -> str:
    if splits is not None and splits < 1:
        raise ValueError(f"splits is {splits}; expected at least 1")
    if isinstance(w, Packed) and implementation == "auto" and not packed_mosaic.unsupported(x, w, *others):
        return "mosaic"
    chosen = dialect.select(implementation, _kernels(w).unsupported(x, w, *others))
    if isinstance(w, Packed):  # XLA writes the unpacked weights to memory, so it never pays
        return chosen
    return "xla" if chosen != implementation and not triton.pays(x, w, splits) else chosen


def _kernels(w: jax.Array | Packed) -> Any:
    """The kernels in the Triton dialect for a matrix."""
    return packed_triton if isinstance(w, Packed) else triton


__all__ = ["MOST_ROWS", "gated", "gated_by", "linear", "most_rows", "partials", "product"]
