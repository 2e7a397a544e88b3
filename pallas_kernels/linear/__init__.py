"""Products of few rows with a matrix, as in a decoding step. They take as long as it takes to read the weights once.

With few outputs, several programs share the sums of a product, to fill the GPU. `partials` returns their parts, and the kernel that reads
the product adds them up. The activation of a gated layer is part of its product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.activation import GELU, Activation
from pallas_kernels.dialect import pl
from pallas_kernels.linear import mosaic, packed_mosaic, packed_triton, reference, triton
from pallas_kernels.linear.reference import product
from pallas_kernels.linear.triton import MOST_ROWS
from pallas_kernels.packed import Packed

# How often a kernel reads a packed matrix for more rows than it multiplies at a time. XLA first writes the unpacked weights to memory and
# reads them again, which takes as long as two or three passes.
MOST_PASSES = 3
# Rows and outputs of a tile that the matrix library takes for 160 rows on an H200, and where parts of its sums were worth it: with so many
# inputs for each of so many parts, for so many rows and weights.
LIBRARY_TILE, LEAST_SHARE, MOST_LIBRARY_SPLITS = (80, 192), 2048, 3
MOST_LIBRARY_ROWS, LEAST_LIBRARY_WEIGHTS = 160, 15 << 20


def most_rows(w: jax.Array | Packed, implementation: str = "auto", *, gated: bool = False) -> int:
    """The most rows that a kernel multiplies with this matrix. implementation: the one asked for. gated: whether w is a gated pair."""
    if isinstance(w, Packed):
        return 0 if any(w.cut) else MOST_PASSES * packed_triton.MOST_ROWS
    if implementation == "mosaic":
        return mosaic.MOST_ROWS
    return max(MOST_ROWS, mosaic.most_rows(w, 2 if gated else 1)) if implementation == "auto" else MOST_ROWS


def library_splits(rows: int, outputs: int, w: jax.Array | Packed) -> int:
    """Into how many parts XLA should cut the sums of x w^T: as many as let the matrix library's tiles fill a Hopper GPU once. XLA cuts them
    itself where it has to return their sum, for which it takes a kernel of its own. w: [*out, *in], of as many outputs."""
    measured = not isinstance(w, Packed) and w.dtype == jnp.bfloat16 and w.size >= LEAST_LIBRARY_WEIGHTS and rows <= MOST_LIBRARY_ROWS
    if not measured or dialect.mosaic_obstacle():
        return 1
    most = dialect.MULTIPROCESSORS // (pl.cdiv(rows, LIBRARY_TILE[0]) * pl.cdiv(outputs, LIBRARY_TILE[1]))
    width = w.size // outputs
    fit = [n for n in range(1, MOST_LIBRARY_SPLITS + 1) if n <= most and width % (64 * n) == 0 and width >= LEAST_SHARE * n]
    return max(fit, default=1)


def linear(x: jax.Array, w: jax.Array | Packed, *, splits: int | None = 1, implementation: str = "auto") -> jax.Array:
    """x w^T, summed in float32 and rounded once. x: [N, H], w: [O, H] -> [N, O] in x's dtype.

    splits: into how many parts the kernel may cut the sums; None for as many as fill the GPU. More than one take a second kernel, which
    adds them up. w: packed or not, as in all functions here; what a packed one means is its weights as `unpack` gives them.
    implementation: "auto" is XLA above `most_rows`, and if a matrix that is not packed has few columns for so many rows (`triton.pays`);
    otherwise see `dialect.select`; or "mosaic", a kernel for Hopper, which "auto" takes where it serves (of a matrix that is not packed:
    from `mosaic.LEAST_ROWS` to `mosaic.most_rows` rows). Raises ValueError for an unknown or unsupported one, or if splits is not positive.
    """
    chosen = _select(implementation, splits, x, w)
    if chosen == "xla":
        return reference.linear(x, w)
    return _by_rows(_kernel("linear", chosen, w), 0, w, splits)(x)


def partials(x: jax.Array, w: jax.Array | Packed, *, splits: int | None = None, implementation: str = "auto") -> jax.Array:
    """Parts of x w^T, to be summed over the first axis. x: [N, H], w: [O, H] -> [S, N, O] float32.

    splits: the most that S may be; None for as many as fill the GPU. implementation and errors: as for `linear`.
    """
    chosen = _select(implementation, splits, x, w)
    if chosen == "xla":
        return reference.partials(x, w, min(splits or MOST_LIBRARY_SPLITS, library_splits(x.shape[0], w.shape[0], w)))
    return _by_rows(_kernel("partials", chosen, w), 1, w, splits)(x)


def gated(x: jax.Array, gate_up: jax.Array | Packed, *, activation: Activation = GELU, implementation: str = "auto") -> jax.Array:
    """act(x gate^T) * (x up^T), with `activation`'s act and limit. x: [N, H], gate_up: [2, I, H] -> [N, I] in x's dtype.

    Both products are summed in float32 and rounded to x's dtype; all else is computed in float32 and rounded once. implementation and
    errors: as for `linear`.
    """
    chosen = _select(implementation, 1, x, gate_up)
    if chosen == "xla":
        return reference.gated(x, gate_up, activation)
    return _by_rows(_kernel("gated", chosen, gate_up), 0, gate_up, activation)(x)


def gated_by(x: jax.Array, w: jax.Array | Packed, u: jax.Array, index: jax.Array, *, implementation: str = "auto") -> jax.Array:
    """gelu_tanh(x w^T) * u[:, index]. x: [N, H], w: [P, H], u: [N, L, P], index: [] int32 -> [N, P] in x's dtype.

    Rounded as `gated` is. implementation and errors: as for `linear`.
    """
    chosen = _select(implementation, 1, x, w, u)
    if chosen == "xla":
        return reference.gated_by(x, w, u, index)
    return _by_rows(lambda x, w, u: _kernel("gated_by", chosen, w)(x, w, u, index), 0, w)(x, u)


def _select(implementation: str, splits: int | None, x: jax.Array, w: jax.Array | Packed, *others: jax.Array) -> str:
    if splits is not None and splits < 1:
        raise ValueError(f"splits is {splits}; expected at least 1")
    packed = isinstance(w, Packed)
    arrays: Any = (x, *others)
    if packed and packed_triton.MOST_ROWS < x.shape[0] <= most_rows(w):  # served in passes
        arrays = [jax.ShapeDtypeStruct((packed_triton.MOST_ROWS, *a.shape[1:]), a.dtype) for a in arrays]
    x, *more = arrays
    if implementation in ("auto", "mosaic"):
        unsupported = packed_mosaic.unsupported(x, w, *more) if packed else mosaic.unsupported(x, w, *more)
        if unsupported and implementation == "mosaic":
            raise ValueError(f"implementation 'mosaic' cannot serve this: {unsupported}")
        fastest = packed or implementation == "mosaic" or mosaic.LEAST_ROWS <= x.shape[0] <= mosaic.most_rows(w, math.prod(w.shape[:-2]))
        if not unsupported and fastest:
            return "mosaic"
    if packed:
        return dialect.select(implementation, packed_triton.unsupported(x, w, *more), further=("mosaic",))
    chosen = dialect.select(implementation, triton.unsupported(x, w, *more), further=("mosaic",))
    return "xla" if chosen != implementation and not triton.pays(x, w, splits) else chosen


def _kernel(name: str, chosen: str, w: jax.Array | Packed) -> Callable[..., jax.Array]:
    """The kernel of a function's name in the chosen implementation."""
    if chosen == "mosaic":
        return getattr(packed_mosaic if isinstance(w, Packed) else mosaic, name)
    return functools.partial(getattr(packed_triton if isinstance(w, Packed) else triton, name), interpret=chosen == "triton-interpret")


def _by_rows(kernel: Callable[..., jax.Array], axis: int, w: jax.Array | Packed, *settings: Any) -> Callable[..., jax.Array]:
    """kernel(x, w, *settings) for any rows of x: for a packed matrix in equal parts that it serves. axis: of the rows in the result. The
    returned function takes x and other arrays by row."""

    def run(x: jax.Array, *others: jax.Array) -> jax.Array:
        rows = x.shape[0]
        count = -(-rows // packed_triton.MOST_ROWS) if isinstance(w, Packed) else 1
        if count == 1:
            return kernel(x, w, *others, *settings)
        size = -(-rows // count)
        padded = [jnp.pad(a, ((0, count * size - rows), *[(0, 0)] * (a.ndim - 1))) for a in (x, *others)]
        parts = ([a[i * size : (i + 1) * size] for a in padded] for i in range(count))
        whole = jnp.concatenate([kernel(part, w, *more, *settings) for part, *more in parts], axis=axis)
        return jax.lax.slice_in_dim(whole, 0, rows, axis=axis)

    return run


__all__ = ["MOST_ROWS", "gated", "gated_by", "library_splits", "linear", "most_rows", "partials", "product"]
