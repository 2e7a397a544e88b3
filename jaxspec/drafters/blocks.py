"""What drafters with decoder layers of their own have in common: fields of their config.json, layers of Llama's, Qwen3's or Gemma 4's kind,
and heads over a draft vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import PartitionSpec

from jaxspec.collectives import TENSOR
from jaxspec.model.config_fields import expect, indices, part, positive, whole, whole_or
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.layer_spec import FULL, SLIDING, LayerSpec
from jaxspec.model.layers import Linear, RMSNorm, Weight, head_logits
from jaxspec.model.split import PARTITIONS
from jaxspec.model.target import TargetConfig, TargetModel


def named_taps(*configs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The indices of hidden states that (parts of) a config name, None where they name none. vLLM and speculators take `aux` ids as
    such; `target_layer_ids` count layers, whose outputs are one further on. Raises ValueError if two of them say different things."""
    fields = {"eagle_aux_hidden_state_layer_ids": 0, "aux_hidden_state_layer_ids": 0, "target_layer_ids": 1}
    found = [(field, ids, offset) for config in configs for field, offset in fields.items() if (ids := indices(config, field))]
    named = {tuple(i + offset for i in ids) for _, ids, offset in found}
    if len(named) > 1:
        listed = ", ".join(f"{field} {list(ids)}" for field, ids, _ in found)
        raise ValueError(f"config.json names different layers: {listed}; expected target_layer_ids one below the others, or one of them")
    return next(iter(named), None)


def check_target(config: Any, target: TargetConfig, *, own_logits: bool) -> None:
    """Raises ValueError if a drafter's config was made for a target of another depth or vocabulary. The target may have more tokens than
    the drafter, as after a fine-tune that added some: it never drafts those. own_logits: whether the drafter's tables give logits of all
    tokens that it knows, which then have to be the target's."""
    made_for, depth = config.num_target_layers, target.num_hidden_layers
    if made_for is not None and made_for != depth:
        raise ValueError(f"the drafter was made for a target of {made_for} layers (num_target_layers), this target has {depth}")
    if config.vocab_size > target.vocab_size or (own_logits and config.vocab_size != target.vocab_size):
        expected = "as many" if own_logits else "at most as many"
        raise ValueError(f"the drafter has vocab_size {config.vocab_size}, this target has {target.vocab_size}; expected {expected}")


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
    expect(config, "partial_rotary_factor", (None, 1))
    both = [part(config, name) for name in ("rope_parameters", "rope_scaling")]  # of which a file may have either, or both
    for scaling in both:
        by_layer = any(isinstance(value, Mapping) for value in scaling.values())
        kind, share = scaling.get("rope_type", scaling.get("type", "default")), scaling.get("partial_rotary_factor")
        if kind != "default" or share not in (None, 1) or by_layer:
            raise ValueError(f"the drafter's RoPE is {dict(scaling)}; implemented: rope_type 'default' over whole heads")
    scaling = both[0] or both[1]
    heads = whole(config, "num_attention_heads")
    kv_heads = whole_or(config, "num_key_value_heads", heads)
    head_dim = whole_or(config, "head_dim", config["hidden_size"] // heads)
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
        rope_theta=positive(scaling, "rope_theta", positive(config, "rope_theta", rope_theta)),
        rotary_angles=head_dim // 2,
        k_eq_v=False,
        kv_source=None,
        intermediate_size=whole(config, "intermediate_size"),
        num_experts=0,
        top_k_experts=0,
        moe_intermediate_size=0,
        per_layer_input=0,
        eps=positive(config, "rms_norm_eps", 1e-6),
    )


def gemma_layers(config: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """Layers of Gemma 4's kind that see everything before them, of which DeepSpec writes the whole text config.

    Raises ValueError for what such a layer here does not have."""
    read = Gemma4Config.from_hf({**config, "num_kv_shared_layers": 0})
    for spec, field in ((spec, field) for spec in read.layers for field in ("num_experts", "per_layer_input", "window")):
        if getattr(spec, field):
            raise ValueError(f"the drafter's layers have {field} {getattr(spec, field)}; implemented: none")
    return read.layers


def stored(layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    """The layers as a drafter's cache sees them: keys are stored whole."""
    return tuple(dataclasses.replace(spec, k_eq_v=False) for spec in layers)


@struct.dataclass
class SiluMLP:
    """down(silu(gate x) * up x). gate_up_proj: [2, I, H], down_proj: [H, I]."""

    gate_up_proj: Linear
    down_proj: Linear

    sums: ClassVar[tuple[str, ...]] = ("down_proj",)

    def __call__(self, x: jax.Array, implementation: str = "xla") -> jax.Array:
        """implementation: of products with packed weights."""
        gate_up = self.gate_up_proj(x, implementation=implementation)
        return self.down_proj(jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :], implementation=implementation)


def head(
    model: TargetModel, lm_head: Linear | None, d2t: jax.Array | None, out: jax.Array, implementation: str
) -> tuple[jax.Array, jax.Array | None]:
    """Float32 logits from a drafter's own head or the target's, and the candidates' token ids, i + d2t[i], where a head has d2t.

    implementation: of a packed head's product; only XLA's has a gradient."""
    if lm_head is None:
        logits = head_logits(out.astype(model.dtype), model.head[0], implementation)
    else:
        logits = lm_head(out, dtype=jnp.float32, implementation=implementation)
    if d2t is None:
        return logits, None
    return logits, jnp.broadcast_to((d2t + jnp.arange(d2t.shape[0], dtype=jnp.int32))[None, None, :], logits.shape)


class PlainDrafter:
    """The members that drafters with such layers share: see `base.Drafter`."""

    config: Any
    norm: RMSNorm
    lm_head: Linear | None
    d2t: Weight | None

    unquantised: ClassVar[tuple[str, ...]] = ()
    partitions: ClassVar[tuple[tuple[str, PartitionSpec], ...]] = (
        (r"\b(lm_head|fc)\.weight$", PartitionSpec(TENSOR, None)),
        (r"\bq_proj\.weight$", PartitionSpec(TENSOR, None, None, None)),
        (r"\bkv_proj\.weight$", PartitionSpec(None, None, TENSOR, None, None)),
        *PARTITIONS,
    )

    @property
    def dtype(self) -> Any:
        """Of the float weights."""
        return self.norm.weight.dtype

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def draft_vocab_size(self) -> int | None:
        return None if self.d2t is None else self.d2t.shape[0]

    @property
    def own_logits(self) -> bool:
        """Whether logits of all tokens come from tables of the drafter's own."""
        return self.lm_head is not None and self.d2t is None

    @property
    def gathers(self) -> tuple[str, ...]:
        """A head over a draft vocabulary gives listed candidates, which are no part of the target's vocabulary."""
        return ("fc",) if self.d2t is None else ("fc", "lm_head")

    @property
    def unread(self) -> tuple[str, ...]:
        return self.config.unread

    def check_weights(self, folder: Path) -> None:
        """Raises ValueError for a d2t that is no draft vocabulary: guesses would be other tokens than the drafter means."""
        if self.d2t is None:
            return
        ids, vocab_size = np.asarray(self.d2t) + np.arange(self.d2t.size), self.config.vocab_size
        if len(np.unique(ids)) < ids.size or ids.min() < 0 or ids.max() >= vocab_size:
            raise ValueError(
                f"d2t of the drafter {folder}, which is what to add to each draft token's own number, gives {len(np.unique(ids))} "
                f"tokens, {ids.min()} .. {ids.max()}; expected {ids.size} different ones below {vocab_size}"
            )


def with_the_targets_head(drafter: Any, table: np.ndarray, norm: np.ndarray, tokens: np.ndarray) -> Any:
    """A fresh drafter whose draft vocabulary is the most frequent of `tokens`, and whose norm and head, where it is as wide as the target,
    begin as the target's. table: [V, H], norm: [H], float32."""
    chosen, width = np.arange(len(table)), norm.shape
    if drafter.d2t is not None:
        chosen = draft_vocabulary(tokens, drafter.d2t.shape[0], drafter.config.vocab_size)
        drafter = dataclasses.replace(drafter, d2t=jnp.asarray(chosen - np.arange(len(chosen)), jnp.int32))
    if drafter.norm.weight.shape != width:
        return drafter
    drafter = dataclasses.replace(drafter, norm=dataclasses.replace(drafter.norm, weight=jnp.asarray(norm)))
    return drafter if drafter.lm_head is None else dataclasses.replace(drafter, lm_head=Linear(jnp.asarray(table[chosen])))


def draft_vocabulary(tokens: np.ndarray, size: int, vocab_size: int) -> np.ndarray:
    """The `size` most frequent token ids below vocab_size, in order; of equal counts the lower id."""
    counts = np.bincount(tokens.reshape(-1), minlength=vocab_size)[:vocab_size]
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def plain_config(target: TargetConfig) -> dict[str, Any]:
    """Of the config.json of a fresh drafter as wide as the target, what decoders of Llama's and Qwen3's kind have in common."""
    return {
        "hidden_size": target.hidden_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": target.num_key_value_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": target.rms_norm_eps,
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_position_embeddings,
        "num_target_layers": target.num_hidden_layers,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }
