"""What DFlash and EAGLE-3 have in common: fields of their config.json, decoder layers of Llama's or Qwen3's kind, and heads over a draft
vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.config import FULL, SLIDING, Gemma4Config, LayerSpec, expect, require
from jaxspec.model.gemma4 import Gemma4
from jaxspec.model.layers import Linear


def named_taps(*configs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The indices of hidden states that (parts of) a config name, None where they name none. vLLM and speculators take `aux` ids as
    such; `target_layer_ids` count layers, whose outputs are one further on. Raises ValueError if two of them say different things."""
    fields = {"eagle_aux_hidden_state_layer_ids": 0, "aux_hidden_state_layer_ids": 0, "target_layer_ids": 1}
    found = [(field, config[field], offset) for config in configs for field, offset in fields.items() if config.get(field)]
    named = {tuple(int(i) + offset for i in ids) for _, ids, offset in found}
    if len(named) > 1:
        listed = ", ".join(f"{field} {list(ids)}" for field, ids, _ in found)
        raise ValueError(f"config.json names different layers: {listed}; expected target_layer_ids one below the others, or one of them")
    return next(iter(named), None)


def check_target(config: Any, target: Gemma4Config) -> None:
    """Raises ValueError if a drafter's config was made for a target of another depth or vocabulary."""
    made_for, depth = config.num_target_layers, target.num_hidden_layers
    if made_for is not None and made_for != depth:
        raise ValueError(f"the drafter was made for a target of {made_for} layers (num_target_layers), this target has {depth}")
    if config.vocab_size != target.vocab_size:
        raise ValueError(f"the drafter has vocab_size {config.vocab_size}, this target has {target.vocab_size}")


def unread_keys(speculators: bool, *, own_head: bool, own_embedding: bool, own_d2t: bool) -> tuple[str, ...]:
    """Beginnings of a checkpoint's keys that nothing reads: training's tables and, from speculators, copies of the target's weights."""
    keys = {"t2d": False, "d2t": own_d2t}
    if speculators:
        keys |= {"verifier_": False, "embed_tokens.": own_embedding, "lm_head.": own_head}
    return tuple(key for key, own in keys.items() if not own)


def plain_spec(config: Mapping[str, Any], window: int | None = None, *, rope_theta: float = 1e4) -> LayerSpec:
    """A decoder layer of Llama's or Qwen3's kind. rope_theta: where the config names none.

    Raises ValueError for what such a layer here does not have.
    """
    expect(config, "hidden_act", ("silu",))
    expect(config, "attention_bias", (False,))
    expect(config, "mlp_bias", (False,))
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer = any(isinstance(value, Mapping) for value in scaling.values())
    kind, part = scaling.get("rope_type", scaling.get("type", "default")), scaling.get("partial_rotary_factor")
    expect(config, "partial_rotary_factor", (None, 1))
    if kind != "default" or part not in (None, 1) or by_layer:
        raise ValueError(f"the drafter's RoPE is {dict(scaling)}; implemented: rope_type 'default' over whole heads")
    heads = int(require(config, "num_attention_heads"))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"the drafter has {heads} query heads and {kv_heads} KV heads of head_dim {head_dim}; the first must be a multiple of the "
            "second, and head_dim even"
        )
    return LayerSpec(
        kind=FULL if window is None else SLIDING,
        window=window,
        hidden_size=int(config["hidden_size"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=float(scaling.get("rope_theta") or config.get("rope_theta") or rope_theta),
        rotary_angles=head_dim // 2,
        k_eq_v=False,
        kv_source=None,
        intermediate_size=int(require(config, "intermediate_size")),
        num_experts=0,
        top_k_experts=0,
        moe_intermediate_size=0,
        per_layer_input=0,
        eps=float(config.get("rms_norm_eps", 1e-6)),
    )


@struct.dataclass
class SiluMLP:
    """down(silu(gate x) * up x). gate_up_proj: [2, I, H], down_proj: [H, I]."""

    gate_up_proj: Linear
    down_proj: Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = self.gate_up_proj(x)
        return self.down_proj(jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :])


def head(model: Gemma4, lm_head: Linear | None, d2t: jax.Array | None, out: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Float32 logits from a drafter's own head or the target's, and the candidates' token ids, i + d2t[i], where a head has d2t."""
    linear = Linear(model.embed_tokens.weight) if lm_head is None else lm_head
    logits = linear(out.astype(linear.weight.dtype), dtype=jnp.float32)
    if d2t is None:
        return logits, None
    return logits, jnp.broadcast_to((d2t + jnp.arange(d2t.shape[0], dtype=jnp.int32))[None, None, :], logits.shape)
