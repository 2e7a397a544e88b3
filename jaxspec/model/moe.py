"""Mixtures of experts: routers, and the experts that they choose."""

from __future__ import annotations

from typing import ClassVar

import jax
from flax import struct

from jaxspec.collectives import local_ids, summed
from jaxspec.model.layers import Linear, Weight, last_axis, rms, times
from pallas_kernels import moe
from pallas_kernels.activation import GELU, Activation


@struct.dataclass
class Router:
    """Gemma 4's, over the un-normed residual. proj: [E, H]; scale: [H]; per_expert_scale: [E]. (transformers `Gemma4TextRouter`)"""

    proj: Linear
    scale: Weight
    per_expert_scale: Weight
    top_k: int = struct.field(pytree_node=False)
    eps: float = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array, implementation: str = "auto") -> tuple[jax.Array, jax.Array, moe.Groups | None]:
        """x: [N, H], the residual stream -> weights [N, top_k] float32, expert ids [N, top_k] int32, and their groups or None."""
        x = times(rms(x, self.eps) * last_axis(self.scale, x.ndim), x.shape[-1] ** -0.5)
        return moe.route(self.proj(x), self.per_expert_scale, self.top_k, implementation=implementation)


@struct.dataclass
class Experts:
    """gate_up_proj: [E, 2, I, H]; down_proj: [E, H, I]. axis: the mesh axis over which the experts lie, or None. mail: see `parallel`."""

    gate_up_proj: Weight
    down_proj: Weight
    activation: Activation = struct.field(pytree_node=False, default=GELU)
    axis: str | None = struct.field(pytree_node=False, default=None)
    mail: jax.Array | None = None

    split: ClassVar[str] = "down_proj"  # see `split.py`

    def __call__(
        self, x: jax.Array, weights: jax.Array, ids: jax.Array, groups: moe.Groups | None = None, implementation: str = "auto"
    ) -> jax.Array:
        """x: [N, H]; weights, ids: [N, top_k]; groups: as the router gives them -> the chosen experts' weighted sum, [N, H]."""
        return summed(self.own(x, weights, ids, groups, implementation), self.axis, self.mail)

    def own(self, x: jax.Array, weights: jax.Array, ids: jax.Array, groups: moe.Groups | None, implementation: str) -> jax.Array:
        """The same of the device's own experts alone, where they lie over a mesh axis."""
        if self.axis is not None:
            size = self.gate_up_proj.shape[0]
            first = size * jax.lax.axis_index(self.axis)
            groups = groups and moe.Groups(*(jax.lax.dynamic_slice_in_dim(of_each, first, size) for of_each in groups))
            ids = local_ids(ids, size, self.axis, size)
        settings = {"activation": self.activation, "implementation": implementation}
        return moe.experts(x, self.gate_up_proj, self.down_proj, weights, ids, groups, **settings)
