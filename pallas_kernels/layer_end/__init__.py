"""The end of a layer with per-layer inputs (Gemma 4's E2B and E4B): the feed-forward's output is added to the stream, which a gate reads;
what it lets through of the layer's inputs is projected and added too."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels.layer_end import mosaic, reference


def serves(x: Any, gate: Any, projection: Any, inputs: Any, implementation: str) -> bool:
    """Whether `layer_end` has a kernel for these arrays, of which the shapes are enough, and "auto" takes it. implementation: the one asked
    for. Without, several kernels serve (`add_norm`, `linear.gated_by`, `linear.partials`)."""
    early = jax.__version_info__ >= mosaic.SINCE
    return implementation == "auto" and early and mosaic.unsupported(x, gate, projection, inputs) is None


def layer_end(
    x: jax.Array,
    y: jax.Array,
    weight: jax.Array,
    gate: jax.Array,
    inputs: jax.Array,
    index: jax.Array,
    projection: jax.Array,
    norm: jax.Array,
    scalar: jax.Array,
    next_weight: jax.Array | None = None,
    *,
    eps: float,
    launch_dependents: bool = False,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array | None]:
    """The stream and its norm for the next layer, both like x; the norm is None without next_weight.

    With s = x + norm(y, weight): (s + norm(p, norm)) * scalar, where p = (gelu_tanh(s gate^T) * inputs[..., index, :]) projection^T.

    x: [..., H]; y: the same, or parts [S, ..., H] of it, float32; gate: [P, H]; inputs: [..., L, P]; index: [] int32; projection: [H, P];
    weight, norm, next_weight: [H]; scalar: [1]. gate and projection may be packed. Norms are RMS norms with `eps`; all is rounded as in
    `add_norm`, `linear.gated_by` and `linear.linear`. launch_dependents: whether only kernels read the results: see `dialect.launching`.
    implementation: "auto", "xla" or "mosaic", a kernel for Hopper, which "auto" takes where it `serves`. It may read weights and the index
    before the kernel ahead of it has ended. Raises ValueError for another one, or if the kernel was asked for and cannot serve.
    """
    if implementation not in ("auto", "xla", "mosaic"):
        raise ValueError(f"implementation is {implementation!r}; expected 'auto', 'xla' or 'mosaic'")
    if implementation == "mosaic" and (reason := mosaic.unsupported(x, gate, projection, inputs)):
        raise ValueError(f"implementation 'mosaic' cannot serve this: {reason}")
    rows, matrices = x.reshape(-1, x.shape[-1]), (gate, inputs.reshape(-1, *inputs.shape[-2:]), index, projection)
    arrays = (rows, y.reshape(-1, *rows.shape), weight, *matrices, norm, scalar, next_weight)
    if implementation == "mosaic" or serves(x, gate, projection, inputs, implementation):
        stream, normed = mosaic.layer_end(*arrays, eps, launch_dependents=launch_dependents)
    else:
        stream, normed = reference.layer_end(*arrays, eps)
    return stream.reshape(x.shape), None if normed is None else normed.reshape(x.shape)


__all__ = ["layer_end", "serves"]
