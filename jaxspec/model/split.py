"""What a module says about itself to whoever spreads it over the devices of a mesh axis.

Any module of a tree may have these members, as attributes of its class or as properties:

- `kv_heads`: tuple of `KVHeads`, the projections that have KV heads along an axis. Where the mesh axis does not divide the heads, they
  are repeated until it does.
- `sums`: names of the `Linear`s whose inputs lie over the mesh axis where their weights do, so that their products are summed over it.
- `gathers`: names of the `Linear`s whose outputs lie over the mesh axis where their weights do, and are wanted whole. A field that is
  None is left out.
- `split`: name of the weight whose part the module computes with by itself: its field `axis` becomes the mesh axis.

Where the weights lie, the member `partitions` of the whole target or drafter says: rows of (pattern of a path, PartitionSpec), of which
the first that is found in a path rules. What no row names, and a tree without that member, lies whole on every device.
"""

from __future__ import annotations

from typing import NamedTuple

from jax.sharding import PartitionSpec

from jaxspec.collectives import TENSOR
from jaxspec.model.layer_spec import LayerSpec

# The rows for the weights that targets and drafters have in common.
PARTITIONS: tuple[tuple[str, PartitionSpec], ...] = (
    (r"embed_tokens(_per_layer)?\.weight$", PartitionSpec(TENSOR, None)),
    (r"embed_tokens\.guide\.", PartitionSpec(TENSOR)),
    (r"\bqkv_proj\.weight$", PartitionSpec(TENSOR, None, None, None)),
    (r"\bo_proj\.weight$", PartitionSpec(None, TENSOR, None, None)),
    (r"experts\.gate_up_proj$", PartitionSpec(TENSOR, None, None, None)),
    (r"experts\.down_proj$", PartitionSpec(TENSOR, None, None)),
    (r"mlp\.gate_up_proj\.weight$", PartitionSpec(None, TENSOR, None)),
    (r"mlp\.down_proj\.weight$", PartitionSpec(None, TENSOR)),
)


class KVHeads(NamedTuple):
    """A `Linear` whose weight has KV heads along an axis."""

    # Its field in the module.
    name: str
    # The weight's axis of KV heads.
    axis: int
    # The layer whose heads they are.
    spec: LayerSpec
    # How many entries of the next axis are the query heads of a KV head. Any that follow are its key and value; all, if this is 0.
    queries: int
