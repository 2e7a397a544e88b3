"""The mixture of experts in plain XLA: the definition of the operation, and its implementation without a kernel."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.activation import GELU, Activation
from pallas_kernels.packed import Packed, unpack

TINY = 1e-20  # scores so low that all sigmoids are 0 give weights of 0
CHUNK = 64  # pairs that are multiplied with an unpacked expert at a time


@functools.partial(jax.tree_util.register_dataclass, data_fields=("out", "weights", "ids"), meta_fields=("experts",))
@dataclasses.dataclass(frozen=True)
class Choices:
    """The outputs of each row's chosen experts, which are yet to be weighted and summed."""

    out: Any  # [N * top_k, H]: choice k of row n is row n * top_k + k; undefined where there is no expert
    weights: Any  # [N, top_k]
    ids: Any  # [N, top_k] int32; `experts` or more stand for no expert
    experts: int

    def summed(self) -> jax.Array:
        """Each row's weighted sum over its choices, added in float32 in their order: [N, H] in the outputs' dtype."""
        rows, top_k = self.ids.shape
        out = jnp.where((self.ids < self.experts)[..., None], self.out.reshape(rows, top_k, -1), jnp.zeros((), self.out.dtype))
        # We multiply after the `where`, so that a NaN weight shows in the result.
        terms = out.astype(jnp.float32) * self.weights.astype(jnp.float32)[..., None]
        return functools.reduce(jnp.add, [terms[:, choice] for choice in range(top_k)]).astype(self.out.dtype)


def route(
    scores: jax.Array, per_expert: jax.Array, top_k: int, scale: float | None = None, dtype: Any = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.moe.route`."""
    scores, per_expert = scores.astype(jnp.float32), per_expert.astype(jnp.float32)
    scores = (scores if scores.ndim == 2 else jnp.sum(scores, axis=0)).astype(dtype).astype(jnp.float32)
    if scale is None:
        top, ids = jax.lax.top_k(scores, top_k)
        return jax.nn.softmax(top, axis=-1) * jnp.take(per_expert, ids, axis=0), ids
    shares = jax.nn.sigmoid(scores)
    _, ids = jax.lax.top_k(shares + per_expert[None, :], top_k)
    chosen = jnp.take_along_axis(shares, ids, axis=-1)
    return scale * chosen / jnp.maximum(jnp.sum(chosen, axis=-1, keepdims=True), TINY), ids


def outputs(x: jax.Array, gate_up_proj: Any, down_proj: Any, weights: jax.Array, ids: jax.Array, activation: Activation = GELU) -> Choices:
    """See `pallas_kernels.moe.outputs`. It sorts rows by expert and multiplies each group with its expert's matrices."""
    count, _, inner, hidden = gate_up_proj.shape
    order = jnp.argsort(ids.reshape(-1))
    row = order // ids.shape[1]
    # Pairs without an expert are sorted last and are in no group.
    sizes = jnp.bincount(ids.reshape(-1), length=count + 1)[:count].astype(jnp.int32)
    if isinstance(gate_up_proj, Packed):
        out = _one_by_one(jnp.take(x, row, axis=0), gate_up_proj, down_proj, sizes, activation)
    else:
        gate_up = _grouped(jnp.take(x, row, axis=0), gate_up_proj.reshape(count, 2 * inner, hidden), sizes)
        out = _grouped(activation(gate_up[:, :inner], gate_up[:, inner:]), down_proj, sizes)
    return Choices(jnp.zeros_like(out).at[order].set(out, unique_indices=True), weights, ids, count)


def _one_by_one(x: jax.Array, gate_up_proj: Packed, down_proj: Packed, sizes: jax.Array, activation: Activation) -> jax.Array:
    """The experts' outputs for consecutive groups of rows. x: [M, H], sizes: [E] -> [M, H].

    One expert is unpacked at a time, if it has rows. Its last chunk reaches into the next group, which is computed later."""
    rows, chunk = x.shape[0], min(CHUNK, x.shape[0])
    x = jnp.pad(x, ((0, chunk), (0, 0)))
    ends = jnp.cumsum(sizes)

    def expert(e, out):
        gate_up, down = (unpack(jax.tree.map(lambda part: part[e], w), x.dtype) for w in (gate_up_proj, down_proj))

        def multiply(i, out):
            start = ends[e] - sizes[e] + i * chunk
            halves = jnp.einsum("mh,gih->gmi", jax.lax.dynamic_slice_in_dim(x, start, chunk), gate_up)
            return jax.lax.dynamic_update_slice_in_dim(out, activation(*halves) @ down.T, start, axis=0)

        return jax.lax.fori_loop(0, (sizes[e] + chunk - 1) // chunk, multiply, out)

    def used(e, out):
        return jax.lax.cond(sizes[e] > 0, functools.partial(expert, e), lambda out: out, out)

    return jax.lax.fori_loop(0, len(sizes), used, jnp.zeros_like(x))[:rows]


def _grouped(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies consecutive groups of rows, each with its own matrix. x: [M, in], w: [E, out, in], sizes: [E] int32 -> [M, out]."""
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return jax.lax.ragged_dot_general(x, w, sizes, numbers)
