"""A mixture of experts for few rows: the choice of experts by their scores, and the weighted sum of the chosen experts' outputs.

The kernel reads only the weights of experts that some row chose, each once (see `triton.py`). On a GPU `jax.lax.ragged_dot` multiplies
with all experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import dialect
from pallas_kernels.activation import GELU, Activation
from pallas_kernels.moe import packed_mosaic, packed_triton, reference, triton
from pallas_kernels.moe.reference import Choices
from pallas_kernels.packed import Packed


class Groups(NamedTuple):
    """Who chose each expert. A pair is a row and one of its choices; its number is row * top_k + choice."""

    counts: jax.Array  # [E] int32: how many pairs chose each expert
    pairs: jax.Array  # [E, at least the largest count] int32: their numbers, ascending; undefined past an expert's count


def route(
    scores: jax.Array,
    per_expert: jax.Array,
    top_k: int,
    *,
    scale: float | None = None,
    dtype: Any = jnp.float32,
    launch_dependents: bool = False,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, Groups | None]:
    """The top_k experts of each row and their weights, by one of two rules. Computed in float32.

    Without `scale`: the experts of the largest scores; a softmax over the chosen scores, times the experts' `per_expert`. That equals a
    softmax over all experts, renormalised over the chosen (transformers `Gemma4TextRouter`). With it: s is the sigmoid of the scores, the
    experts are those of the largest s + `per_expert`, a bias that plays no part in the weights, and these are scale * s over the sum of
    the chosen s (DeepSeek-V3, arXiv 2412.19437; transformers `Step3p7TextTopKRouter`). Of equals the lower expert comes first, as with
    `jax.lax.top_k`.

    scores: [N, E], or parts [S, N, E] whose sum they are; they are rounded to `dtype` first. per_expert: [E]. Returns weights [N, top_k]
    float32, ids [N, top_k] int32, and the groups of these ids, or None if the kernel does not make them. A row with NaN among its scores
    gets NaN weights, and ids that may be E.

    launch_dependents: whether only kernels read the results: see `dialect.launching`. implementation: see `dialect.select`. Raises
    ValueError for an unknown one, or if top_k is not within 1 .. E.
    """
    if not 1 <= top_k <= scores.shape[-1]:
        raise ValueError(f"top_k is {top_k}; expected 1 to {scores.shape[-1]}, the number of experts")
    chosen = dialect.select(implementation)
    if chosen == "xla":
        return *reference.route(scores, per_expert, top_k, scale, dtype), None
    settings = {"launch_dependents": launch_dependents, "interpret": chosen == "triton-interpret"}
    weights, ids, groups = triton.route(scores, per_expert, top_k, scale, dtype, **settings)
    return weights, ids, groups and Groups(*groups)


def experts(
    x: jax.Array,
    gate_up_proj: jax.Array | Packed,
    down_proj: jax.Array | Packed,
    weights: jax.Array,
    ids: jax.Array,
    groups: Groups | None = None,
    *,
    activation: Activation = GELU,
    implementation: str = "auto",
) -> jax.Array:
    """The weighted sum of the chosen experts' outputs, down(act(gate x) * up x) with `activation`'s act and limit, for each row.

    x: [N, H]; gate_up_proj: [E, 2, I, H] and down_proj: [E, H, I], both packed or neither; weights: [N, top_k], of any float dtype; ids:
    [N, top_k] int32, not negative. An id >= E stands for no expert and adds nothing. So a device can compute its share of the experts: it
    counts ids from its first expert, and takes E for the others. groups: of `ids`, as `route` returns them. Returns [N, H] in x's dtype.

    Products are summed in float32. The kernel rounds to x's dtype after the activation, after down_proj and after the sum. The reference
    also rounds the two halves of the activation. So in bfloat16 the two differ by a few units in the last place of the largest term (1e-2
    of the largest output), in float32 by 1e-5. The result does not depend on the order in which programs run.

    implementation: see `dialect.select`; or "mosaic", kernels for Hopper and packed experts with few pairs, which "auto" takes where they
    serve. Raises ValueError for an unknown or unsupported one.
    """
    settings = {"activation": activation, "implementation": implementation}
    return outputs(x, gate_up_proj, down_proj, weights, ids, groups, **settings).summed()


def outputs(
    x: jax.Array,
    gate_up_proj: jax.Array | Packed,
    down_proj: jax.Array | Packed,
    weights: jax.Array,
    ids: jax.Array,
    groups: Groups | None = None,
    *,
    activation: Activation = GELU,
    launch_dependents: bool = False,
    implementation: str = "auto",
) -> Choices:
    """What `experts` sums, for `add_norm`, which does that too. launch_dependents: whether only kernels read it: see `dialect.launching`.
    Other arguments and errors: as for `experts`."""
    chosen = _select(implementation, x, gate_up_proj, down_proj, ids.size)
    if chosen == "xla":
        return reference.outputs(x, gate_up_proj, down_proj, weights, ids, activation)
    settings: dict[str, Any] = {"activation": activation, "launch_dependents": launch_dependents}
    if chosen == "mosaic":
        return packed_mosaic.outputs(x, gate_up_proj, down_proj, weights, ids, groups, **settings)
    kernels: Any = packed_triton if isinstance(gate_up_proj, Packed) else triton
    return kernels.outputs(x, gate_up_proj, down_proj, weights, ids, groups, interpret=chosen == "triton-interpret", **settings)


def by_kernel(x: Any, gate_up_proj: Any, down_proj: Any, top_k: int, implementation: str = "auto") -> bool:
    """Whether `experts` reads x by a kernel, and by no operation of XLA. Of all arrays the shapes are enough. Errors: as for `experts`."""
    return _select(implementation, x, gate_up_proj, down_proj, x.shape[0] * top_k) != "xla"


def _select(implementation: str, x: Any, gate_up_proj: Any, down_proj: Any, pairs: int) -> str:
    packed = [isinstance(w, Packed) for w in (gate_up_proj, down_proj)]
    if any(packed) and not all(packed):
        raise ValueError("one of gate_up_proj and down_proj is packed; expected both or neither")
    if implementation == "mosaic" or implementation == "auto" and all(packed):
        unsupported = packed_mosaic.unsupported(x, gate_up_proj, down_proj, pairs)
        if not unsupported:
            return "mosaic"
        if implementation == "mosaic":
            raise ValueError(f"implementation 'mosaic' cannot serve this: {unsupported}")
    kernels: Any = packed_triton if all(packed) else triton
    return dialect.select(implementation, kernels.unsupported(x, gate_up_proj, down_proj), further=("mosaic",))


__all__ = ["Choices", "Groups", "by_kernel", "experts", "outputs", "route"]
