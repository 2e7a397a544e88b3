"""Mixtures of experts: routers, and the experts that they choose."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
from flax import struct

from jaxspec.collectives import local_ids, summed
from jaxspec.model.layers import Linear, Weight
from pallas_kernels import moe
from pallas_kernels.activation import GELU, Activation
from pallas_kernels.add_norm import Stepwise
from pallas_kernels.all_reduce import Unsummed


@struct.dataclass
class Router:
    """Gemma 4's. proj: [E, H]; scale: [H], the weight of its norm; per_expert_scale: [E]. (transformers `Gemma4TextRouter`)"""

    proj: Linear
    scale: Weight
    per_expert_scale: Weight
    top_k: int = struct.field(pytree_node=False)

    @property
    def norm(self) -> Stepwise:
        """The norm of the residual stream that it takes."""
        return Stepwise(self.scale, self.scale.shape[0] ** -0.5)

    def by_kernel(self, x: jax.Array, implementation: str) -> bool:
        """Whether a kernel reads x, [..., H], and no operation of XLA does."""
        return self.proj.by_kernel(math.prod(x.shape[:-1]), x.dtype, implementation)

    def __call__(
        self, x: jax.Array, implementation: str = "auto", *, read_by_kernel: bool = False
    ) -> tuple[jax.Array, jax.Array, moe.Groups | None]:
        """x: [N, H], the residual stream's `norm` -> weights [N, top_k] float32, expert ids [N, top_k] int32, and their
        groups or None. read_by_kernel: whether kernels read these, and no operation of XLA does."""
        settings = {"dtype": x.dtype, "launch_dependents": read_by_kernel, "implementation": implementation}
        scores = self.proj.parts(x, implementation)
        assert not isinstance(scores, Unsummed)  # every device has the whole router
        return moe.route(scores, self.per_expert_scale, self.top_k, **settings)


@struct.dataclass
class Experts:
    """gate_up_proj: [E, 2, I, H]; down_proj: [E, H, I]. axis: the mesh axis over which the experts lie, or None. mail: as for `Linear`."""

    gate_up_proj: Weight
    down_proj: Weight
    activation: Activation = struct.field(pytree_node=False, default=GELU)
    axis: str | None = struct.field(pytree_node=False, default=None)
    mail: jax.Array | None = None

    split: ClassVar[str] = "down_proj"  # see `split.py`

    def by_kernel(self, x: jax.Array, top_k: int, implementation: str) -> bool:
        """Whether in `parts` a kernel reads x, [..., H], and the choice, and no operation of XLA does."""
        rows = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
        return self.axis is None and moe.by_kernel(rows, self.gate_up_proj, self.down_proj, top_k, implementation)

    def parts(
        self, x: jax.Array, weights: jax.Array, ids: jax.Array, groups: moe.Groups | None = None, implementation: str = "auto"
    ) -> jax.Array | moe.Choices:
        """The chosen experts' weighted sum, [..., H], or, where a device has all experts, what `add_norm` sums so. x: [..., H]; weights,
        ids: [N, top_k], of its rows; groups: as the router gives them."""
        rows = x.reshape(-1, x.shape[-1])
        if self.axis is not None:
            return summed(self.own(rows, weights, ids, groups, implementation), self.axis, self.mail).reshape(x.shape)
        settings = {"activation": self.activation, "launch_dependents": True, "implementation": implementation}
        return moe.outputs(rows, self.gate_up_proj, self.down_proj, weights, ids, groups, **settings)

    def own(self, x: jax.Array, weights: jax.Array, ids: jax.Array, groups: moe.Groups | None, implementation: str) -> jax.Array:
        """The weighted sum, [N, H], of the device's own experts alone, where they lie over a mesh axis. x: [N, H]."""
        assert self.axis is not None
        size = self.gate_up_proj.shape[0]
        first = size * jax.lax.axis_index(self.axis)
        groups = groups and moe.Groups(*(jax.lax.dynamic_slice_in_dim(of_each, first, size) for of_each in groups))
        ids = local_ids(ids, size, self.axis, size)
        settings = {"activation": self.activation, "implementation": implementation}
        return moe.experts(x, self.gate_up_proj, self.down_proj, weights, ids, groups, **settings)
