"""The end of a layer with per-layer inputs in plain XLA: the definition of the operation."""

from __future__ import annotations

from typing import Any

from pallas_kernels.add_norm import reference as add_norm
from pallas_kernels.linear import reference as linear


def layer_end(x, y, weight, gate, inputs, index, projection, norm, scalar, next_weight, eps) -> tuple[Any, Any]:
    """See `pallas_kernels.layer_end.layer_end`."""
    (x,) = add_norm.add_norm(x, y, weight, None, (), eps)
    out = linear.linear(linear.gated_by(x, gate, inputs, index), projection)
    x, *normed = add_norm.add_norm(x, out, norm, scalar, () if next_weight is None else (next_weight,), eps)
    return x, normed[0] if normed else None
