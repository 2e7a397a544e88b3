"""What a decoder layer needs to know, of whatever family: derived once from a config, hashable and without the layer's index, so that equal
layers share one trace."""

from __future__ import annotations

import dataclasses

SLIDING = "sliding_attention"
FULL = "full_attention"


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """Everything a decoder layer needs to know, derived from the config.

    kind: "sliding_attention" or "full_attention". window: keys a query sees, itself included (None: all before it).
    rotary_angles: how many of head_dim / 2 frequency pairs rotate. kv_source: None if the layer owns its K and V, else the index
    of the target layer whose K and V it reads. num_experts 0 means no mixture of experts; per_layer_input 0 means no PLE.
    """

    kind: str
    window: int | None
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rotary_angles: int
    k_eq_v: bool
    kv_source: int | None
    intermediate_size: int
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int
    per_layer_input: int
    eps: float

    @property
    def owns_kv(self) -> bool:
        return self.kv_source is None

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def key_dims(self) -> int:
        """How many numbers of a key the cache stores. With k_eq_v the dims of a key that do not rotate are the value's times
        k_norm's weight, so only those that do are stored: 128 of 512."""
        return min(2 * self.rotary_angles, self.head_dim) if self.k_eq_v else self.head_dim
