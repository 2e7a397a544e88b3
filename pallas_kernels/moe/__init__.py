"""A mixture of experts at few rows: the choice of experts from scores, and the chosen experts' weighted sum.

Only the weights of experts that some row chose are read, each once (see `triton.py`), where `jax.lax.ragged_dot` on a GPU multiplies with
all of them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from pallas_kernels import dialect
from pallas_kernels.moe import reference, triton


class Groups(NamedTuple):
    """Who chose each expert. A pair is a row and one of its choices, numbered row * top_k + choice.

    counts: [E] int32, how many pairs chose an expert. pairs: [E, at least the largest count] int32, their numbers in rising order;
    what lies past an expert's count is undefined.
    """

    counts: jax.Array
    pairs: jax.Array


def route(
    scores: jax.Array, per_expert_scale: jax.Array, top_k: int, *, implementation: str = "auto"
) -> tuple[jax.Array, jax.Array, Groups | None]:
    """The top_k experts of each row and their weights: a softmax over the chosen scores, times per_expert_scale of the expert.

    That softmax is the softmax over all experts, renormalised over the chosen (transformers `Gemma4TextRouter`). Among equal scores
    the expert of lower index comes first, as with `jax.lax.top_k`. Computed in float32.

    scores: [N, E]; per_expert_scale: [E]. Returns weights [N, top_k] float32, ids [N, top_k] int32, and the groups of these ids
    where the kernel has them at hand, else None. A row whose scores hold NaN gets NaN weights, and ids that may be E.

    implementation: see `dialect.select`. Raises ValueError for an unknown one, or if top_k is not within 1 .. E.
    """
    if not 1 <= top_k <= scores.shape[1]:
        raise ValueError(f"top_k is {top_k}; expected 1 to {scores.shape[1]}, the number of experts")
    chosen = dialect.select(implementation)
    if chosen == "xla":
        return *reference.route(scores, per_expert_scale, top_k), None
    weights, ids, groups = triton.route(scores, per_expert_scale, top_k, interpret=chosen == "triton-interpret")
    return weights, ids, groups and Groups(*groups)


def experts(
    x: jax.Array,
    gate_up_proj: jax.Array,
    down_proj: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    groups: Groups | None = None,
    *,
    implementation: str = "auto",
) -> jax.Array:
    """The weighted sum of the chosen experts' outputs, down(gelu_tanh(gate x) * up x), for each row.

    x: [N, H]; gate_up_proj: [E, 2, I, H]; down_proj: [E, H, I]; weights: [N, top_k], in any float dtype; ids: [N, top_k] int32, not
    negative. An id >= E stands for no expert and adds nothing, so a part of the experts can be computed with ids counted from the
    part's first and E for the others. groups: those of `ids`, as `route` gives them. Returns [N, H] in x's dtype.

    Products are summed in float32. The kernel rounds to x's dtype after the activation, after down_proj and after the sum; the
    reference also rounds the two halves of the activation, so in bfloat16 the two differ by a few units in the last place of the
    largest term (1e-2 of the largest output), in float32 by 1e-5. The result does not depend on the order in which programs run.

    implementation: see `dialect.select`. Raises ValueError for an unknown or unsupported one.
    """
    chosen = dialect.select(implementation, triton.unsupported(x, gate_up_proj, down_proj))
    if chosen == "xla":
        return reference.experts(x, gate_up_proj, down_proj, weights, ids)
    return triton.experts(x, gate_up_proj, down_proj, weights, ids, groups, interpret=chosen == "triton-interpret")


__all__ = ["Groups", "experts", "route"]
