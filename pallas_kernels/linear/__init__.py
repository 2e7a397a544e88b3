"""Products of few rows with a matrix, as in a decoding step. They take as long as it takes to read the weights once.

With few outputs, several programs share the sums of a product, to fill the GPU. `partials` returns their parts, and the kernel that reads
the product adds them up. The activation of a gated layer is part of its product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

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
    otherwise see `dialect.select`; or "mosaic", a kernel for Hopper and packed matrices, which "auto" takes where it serves. Raises
    ValueError for an unknown or unsupported one, or if splits is not positive.
    """
    chosen = _select(implementation, splits, x, w)
    if chosen == "xla":
        return reference.linear(x, w)
    return _kernel("linear", chosen, w)(x, w, splits)


def partials(x: jax.Array, w: jax.Array | Packed, *, splits: int | None = None, implementation: str = "auto") -> jax.Array:
    """Parts of x w^T, to be summed over the first axis. x: [N, H], w: [O, H] -> [S, N, O] float32.

    splits: the most that S may be; None for as many as fill the GPU. XLA's S is 1. implementation and errors: as for `linear`.
    """
    chosen = _select(implementation, splits, x, w)
    if chosen == "xla":
        return reference.partials(x, w)
    return _kernel("partials", chosen, w)(x, w, splits)


def gated(x: jax.Array, gate_up: jax.Array | Packed, *, implementation: str = "auto") -> jax.Array:
    """gelu_tanh(x gate^T) * (x up^T). x: [N, H], gate_up: [2, I, H] -> [N, I] in x's dtype.

    Both products are summed in float32 and rounded to x's dtype; all else is computed in float32 and rounded once. implementation and
    errors: as for `linear`.
    """
    chosen = _select(implementation, 1, x, gate_up)
    if chosen == "xla":
        return reference.gated(x, gate_up)
    return _kernel("gated", chosen, gate_up)(x, gate_up)


def gated_by(x: jax.Array, w: jax.Array | Packed, u: jax.Array, index: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """gelu_tanh(x w^T) * u[:, index]. x: [N, H], w: [P, H], u: [N, L, P], index: [] int32 -> [N, P] in x's dtype.

    Rounded as `gated` is. implementation and errors: as for `linear`.
    """
    chosen = _select(implementation, 1, x, w, u)
    if chosen == "xla":
        return reference.gated_by(x, w, u, index)
    return _kernel("gated_by", chosen, w)(x, w, u, index)


def _select(implementation: str, splits: int | None, x: jax.Array, w: jax.Array | Packed, *others: jax.Array) -> str:
    if splits is not None and splits < 1:
        raise ValueError(f"splits is {splits}; expected at least 1")
    if not isinstance(w, Packed):
        chosen = dialect.select(implementation, triton.unsupported(x, w, *others))
        return "xla" if chosen != implementation and not triton.pays(x, w, splits) else chosen
    if implementation in ("auto", "mosaic"):
        unsupported = packed_mosaic.unsupported(x, w, *others)
        if not unsupported:
            return "mosaic"
        if implementation == "mosaic":
            raise ValueError(f"implementation 'mosaic' cannot serve this: {unsupported}")
    return dialect.select(implementation, packed_triton.unsupported(x, w, *others), further=("mosaic",))


def _kernel(name: str, chosen: str, w: jax.Array | Packed) -> Callable[..., jax.Array]:
    """The kernel of a function's name in the chosen implementation."""
    if chosen == "mosaic":
        return getattr(packed_mosaic, name)
    return functools.partial(getattr(packed_triton if isinstance(w, Packed) else triton, name), interpret=chosen == "triton-interpret")


__all__ = ["MOST_ROWS", "gated", "gated_by", "linear", "most_rows", "partials", "product"]
