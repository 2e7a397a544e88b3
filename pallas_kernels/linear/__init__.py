"""Products of few rows with a matrix, as in a decoding step. They take as long as it takes to read the weights once.

With few outputs, several programs share the sums of a product, to fill the GPU. `partials` returns their parts, and the kernel that reads
the product adds them up. The activation of a gated layer is part of its product.

On Hopper a kernel may read weights before the kernel ahead of it has ended. So weights must not be computed just before their product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dialect, float8_rows
from pallas_kernels.activation import GELU, Activation
from pallas_kernels.dialect import pl
from pallas_kernels.float8_rows import Rounded
from pallas_kernels.linear import mosaic, packed_mosaic, packed_triton, reference, triton
from pallas_kernels.linear.reference import product
from pallas_kernels.linear.triton import MOST_ROWS
from pallas_kernels.packed import Packed, tile
from pallas_kernels.packed import triton as unpacking

# How often a kernel reads a packed matrix for more rows than it multiplies at a time. For more, a kernel writes the unpacked weights to
# memory and XLA multiplies them (see `unpacked`), which costs the time of one or two passes. On an H200 that was faster from so many rows
# on with matrices of up to so many weights, whose products do not keep all programs of a kernel busy.
MOST_PASSES = 3
UNPACKED_ROWS, UNPACKED_WEIGHTS = 512, 55_000_000
MOST_PASSES_ROUNDED = 8  # with larger matrices whose rows are rounded: XLA unpacks those, which takes longer
# Where parts of XLA's products were found to be faster on an H200, from XLA_LEAST_ROWS on: for up to so many rows, the fewest weights, the
# fewest and the most parts, and the most tiles of XLA_TILE outputs in all of them together.
XLA_LEAST_ROWS, XLA_PARTS, XLA_TILE = 129, ((192, 12 << 20, 2, 3, 96), (256, 1 << 20, 4, 4, 96)), 128


def most_rows(w: jax.Array | Packed, implementation: str = "auto", *, gated: bool = False) -> int:
    """The most rows that a kernel multiplies with this matrix. implementation: the one asked for. gated: whether w is a gated pair."""
    if isinstance(w, Packed):
        if any(w.cut):
            return 0
        small = w.size <= UNPACKED_WEIGHTS
        if small and w.inputs is None and not dialect.mosaic_obstacle():
            return UNPACKED_ROWS - 1
        return (MOST_PASSES if small or w.inputs is None else MOST_PASSES_ROUNDED) * packed_triton.MOST_ROWS
    if implementation == "mosaic":
        return mosaic.MOST_ROWS
    most = triton.most_rows(w)
    return max(most, mosaic.most_rows(w, 2 if gated else 1)) if implementation == "auto" else most


def linear(x: jax.Array, w: jax.Array | Packed, *, splits: int | None = 1, implementation: str = "auto") -> jax.Array:
    """x w^T, summed in float32 and rounded once. x: [N, H], w: [O, H] -> [N, O] in x's dtype.

    splits: into how many parts the kernel may cut the sums; None for as many as fill the GPU. More than one take a second kernel, which
    adds them up. w: packed or not, as in all functions here; what a packed one means is its weights as `unpack` gives them.
    implementation: "auto" is XLA above `most_rows`, and if a matrix that is not packed has few columns for so many rows (`triton.pays`);
    otherwise see `dialect.select`; or "mosaic", a kernel for Hopper, which "auto" takes where it serves (a matrix that is not packed
    where `mosaic.is_fastest`). Raises ValueError for an unknown or unsupported one, or if splits is not positive.
    """
    chosen = _select(implementation, splits, x, w)
    if chosen == "xla":
        return reference.linear(x, w)
    return _by_rows(_kernel("linear", chosen, w), 0, w, splits)(x)


def partials(
    x: jax.Array | Rounded,
    w: jax.Array | Packed,
    *,
    splits: int | None = None,
    launch_dependents: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """Parts of x w^T, to be summed over the first axis. x: [N, H], w: [O, H] -> [S, N, O] float32.

    splits: the most that S may be; None for as many as fill the GPU, of XLA's product for `xla_parts`. launch_dependents: whether only
    kernels read the results: see `dialect.launching`. implementation and errors: as for `linear`. x may be `Rounded` as `rounding` says.
    """
    chosen = _select(implementation, splits, x, w)
    if chosen == "xla":
        count = xla_parts(x.shape[0], w)
        assert not isinstance(x, Rounded)  # `rounding` asks for it where a kernel serves
        return reference.partials(x, w, count if splits is None else min(splits, count))
    return _by_rows(_kernel("partials", chosen, w, launch_dependents and not _divided(x, w)), 1, w, splits)(x)


def gated(
    x: jax.Array | Rounded,
    gate_up: jax.Array | Packed,
    *,
    activation: Activation = GELU,
    codes: bool = False,
    launch_dependents: bool = False,
    implementation: str = "auto",
) -> jax.Array | Rounded:
    """act(x gate^T) * (x up^T), with `activation`'s act and limit. x: [N, H], gate_up: [2, I, H] -> [N, I] in x's dtype.

    Both products are summed in float32 and rounded to x's dtype; all else is computed in float32 and rounded once. codes: whether the
    result may be a `Rounded` of codes, where a kernel can make them; for a product for which `rounding` says so. launch_dependents and a
    `Rounded` x: as for `partials`. implementation and errors: as for `linear`.
    """
    chosen = _select(implementation, 1, x, gate_up)
    if chosen == "xla":
        assert not isinstance(x, Rounded)
        return reference.gated(x, gate_up, activation)
    kernel = _kernel("gated", chosen, gate_up, launch_dependents and not _divided(x, gate_up))
    if codes and chosen == "mosaic" and isinstance(gate_up, Packed) and not _divided(x, gate_up):
        kernel = functools.partial(kernel, codes=True)
    return _by_rows(kernel, 0, gate_up, activation)(x)


def gated_by(
    x: jax.Array,
    w: jax.Array | Packed,
    u: jax.Array,
    index: jax.Array,
    *,
    launch_dependents: bool = False,
    implementation: str = "auto",
) -> jax.Array:
    """gelu_tanh(x w^T) * u[:, index]. x: [N, H], w: [P, H], u: [N, L, P], index: [] int32 -> [N, P] in x's dtype.

    Rounded as `gated` is. launch_dependents: as for `partials`. implementation and errors: as for `linear`.
    """
    chosen = _select(implementation, 1, x, w, u)
    if chosen == "xla":
        return reference.gated_by(x, w, u, index)
    kernel = _kernel("gated_by", chosen, w, launch_dependents)
    return _by_rows(lambda x, w, u: kernel(x, w, u, index), 0, w)(x, u)


def unpacked(w: Packed, x: jax.Array, *, implementation: str = "auto") -> jax.Array | Packed:
    """The matrix for XLA's product with more rows than `most_rows`: [*out, *in] in x's dtype, if a kernel can unpack it, or as it is.

    XLA by itself unpacks a matrix piece by piece, and takes several times as long. x: [N, H], the rows, which are computed first: so no
    layer's matrix is unpacked long before its product. One whose rows are rounded stays as it is. implementation: see `dialect.select`.
    """
    if w.inputs is not None or any(w.cut):
        return w
    flat = w.flat()
    chosen = "xla" if tile.unsupported(flat, x.dtype) else dialect.select(implementation)
    return w if chosen == "xla" else unpacking.unpack(flat, x.dtype, x, interpret=chosen == "triton-interpret").reshape(w.shape)


def xla_parts(rows: int, w: jax.Array | Packed) -> int:
    """Into how many parts the sums of XLA's product of so many rows with w [O, H] are cut where a kernel adds them up. XLA cuts them too,
    to fill the GPU, but adds them with a kernel of its own."""
    if isinstance(w, Packed) or rows < XLA_LEAST_ROWS or dialect.mosaic_obstacle():
        return 1
    outputs, width = w.shape
    for rows_at_most, weights, least, most, tiles in XLA_PARTS:
        if rows <= rows_at_most:
            most = min(most, tiles // pl.cdiv(outputs, XLA_TILE)) if w.size >= weights else 1
            return next((count for count in range(most, least - 1, -1) if width % (64 * count) == 0), 1)
    return 1


def by_kernel(x: Any, w: Any, *others: Any, splits: int | None = None, implementation: str = "auto") -> bool:
    """Whether a kernel reads x, and no operation of XLA does. x: [N, H]; others: further arrays that the product takes. Of all arrays the
    shapes are enough. splits and implementation: as for `partials`; splits is 1 for a product with a gate."""
    chosen, rows = _select(implementation, splits, x, w, *others), x.shape[0]
    return chosen != "xla" and not _padded(chosen, rows, w) and not _divided(x, w)


def rounding(x: Any, w: Any, *, splits: int | None = None, implementation: str = "auto") -> str | None:
    """How a kernel before may round the rows of x for their product with w: to "codes" or "numbers" of a `Rounded`, which then takes the
    place of x; None where the product takes rows as they are, or rounds them itself. x: [N, I]; of arrays the shapes are enough. splits
    and implementation: as for `by_kernel`."""
    if not isinstance(w, Packed) or w.inputs is None or not by_kernel(x, w, splits=splits, implementation=implementation):
        return None
    codes = _select(implementation, splits, x, w) == "mosaic" and packed_mosaic.takes_codes(x.shape[0], w)
    return "codes" if codes else "numbers"


def _padded(chosen: str, rows: int, w: Any) -> bool:
    """Whether XLA pads so many rows before the chosen kernel takes them."""
    if chosen != "mosaic":
        return False
    if isinstance(w, Packed):
        return packed_mosaic.pads(rows) and not packed_mosaic.takes_codes(rows, w)
    return mosaic.pads(rows)


def _select(implementation: str, splits: int | None, x: Any, w: jax.Array | Packed, *others: jax.Array) -> str:
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
        fastest = packed or implementation == "mosaic" or mosaic.is_fastest(x.shape[0], w, math.prod(w.shape[:-2]), splits)
        if not unsupported and fastest:
            return "mosaic"
    if packed:
        return dialect.select(implementation, packed_triton.unsupported(x, w, *more), further=("mosaic",))
    chosen = dialect.select(implementation, triton.unsupported(x, w, *more), further=("mosaic",))
    return "xla" if chosen != implementation and not triton.pays(x, w, splits) else chosen


def _kernel(name: str, chosen: str, w: jax.Array | Packed, launch_dependents: bool = False) -> Callable[..., jax.Array]:
    """The kernel of a function's name in the chosen implementation."""
    packed, settings = isinstance(w, Packed), {}
    if name != "linear" and (chosen == "mosaic" or not packed):
        settings = {"launch_dependents": launch_dependents}
    if chosen == "mosaic":
        kernel = functools.partial(getattr(packed_mosaic if packed else mosaic, name), **settings)
    else:
        kernel = functools.partial(getattr(packed_triton if packed else triton, name), interpret=chosen == "triton-interpret", **settings)
    return _of_rounded_rows(kernel, chosen) if isinstance(w, Packed) and w.inputs is not None else kernel


def _of_rounded_rows(kernel: Callable[..., jax.Array], chosen: str) -> Callable[..., jax.Array]:
    """The kernel for a packed matrix that wants its rows rounded."""

    def rounded(x: jax.Array | Rounded, w: Packed, *others: Any, **settings: Any) -> Any:
        if isinstance(x, Rounded):
            x = x.rows if x.scales is None else x
        elif not (chosen == "mosaic" and packed_mosaic.takes_codes(x.shape[0], w)):  # else the kernel rounds them itself
            implementation = "triton" if chosen == "mosaic" else chosen
            early = not _padded(chosen, x.shape[0], w)
            x = float8_rows.rounded(x, launch_dependents=early, implementation=implementation)
        return kernel(x, w, *others, **settings)

    return rounded


def _divided(x: Any, w: Any) -> bool:
    """Whether XLA divides the rows of x [N, H] for several calls of a kernel, and puts the results together."""
    return isinstance(w, Packed) and x.shape[0] > packed_triton.MOST_ROWS


def _by_rows(kernel: Callable[..., jax.Array], axis: int, w: jax.Array | Packed, *settings: Any) -> Callable[..., jax.Array]:
    """kernel(x, w, *settings) for any rows of x: for a packed matrix in equal parts that it serves. axis: of the rows in the result. The
    returned function takes x and other arrays by row."""

    def run(x: Any, *others: jax.Array) -> jax.Array:
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


__all__ = ["MOST_ROWS", "by_kernel", "gated", "gated_by", "linear", "most_rows", "partials", "product", "rounding", "unpacked"]
