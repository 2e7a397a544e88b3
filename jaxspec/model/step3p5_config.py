"""The config of a Step-3.5 target and of its MTP layers (facts: stepfun-ai/Step-3.5-Flash config.json, transformers 5.23
`Step3p7TextConfig`, vLLM 0.33 `step3p5.py`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxspec.model.config_fields import expect, experts_of, float_name, require, whole, whole_or
from jaxspec.model.layer_spec import FULL, SLIDING, LayerSpec
from jaxspec.model.target import ModulesConfig

TARGET_TYPES = ("step3p5",)
MODULES_TYPES = ("step3p5_mtp",)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequencies of long wavelengths divided by a factor (rope_type "llama3"). original: positions before the scaling. low, high:
    the factors by which `original` is divided to give the wavelengths between which frequencies change over."""

    factor: float
    low: float
    high: float
    original: int

    def of(self, frequencies: np.ndarray) -> np.ndarray:
        """Scaled frequencies, in radians a position. [...] -> [...]."""
        share = (self.original * frequencies / (2 * math.pi) - self.low) / (self.high - self.low)
        share = np.clip(share, 0, 1)
        return frequencies * (share + (1 - share) / self.factor)


@dataclasses.dataclass(frozen=True)
class Step3p5LayerSpec(LayerSpec):
    """What a layer of this family has beside others: see `LayerSpec`. A layer with experts has no other MLP than the shared expert."""

    # The scaling of the rotating frequencies, None for none.
    rope_scaling: RopeScaling | None
    # Of the inner width of the expert that every row uses, 0 in a layer without experts.
    shared_intermediate_size: int
    # What the weights of a row's experts sum to.
    routed_scale: float
    # The activation's limit in the routed experts, and in the shared expert or the MLP; None for no limit.
    limit: float | None
    shared_limit: float | None

    @property
    def frequencies(self) -> np.ndarray:
        """Radians a position of each of head_dim / 2 pairs, float32; those that stand still come last. Exponents run over the dims that
        rotate."""
        turning = self.rope_theta ** -(np.arange(self.rotary_angles) / self.rotary_angles)
        turning = turning if self.rope_scaling is None else self.rope_scaling.of(turning)
        return np.concatenate([turning, np.zeros(self.head_dim // 2 - self.rotary_angles)]).astype(np.float32)

    @property
    def order(self) -> tuple[int, ...] | None:
        """Where each dim of a head in a checkpoint lies in memory, None where all keep their places. A checkpoint's pairs are
        (d, d + R / 2) of the first R dims, those in memory (d, d + D / 2), as if all rotated."""
        half, rotary = self.head_dim // 2, self.rotary_angles
        if rotary == half:
            return None
        low = [*range(rotary), *range(2 * rotary, half + rotary)]
        high = [*range(rotary, 2 * rotary), *range(half + rotary, 2 * half)]
        return tuple(int(place) for place in np.argsort([*low, *high]))


@dataclasses.dataclass(frozen=True)
class Step3p5Config:
    """A Step-3.5 config. modules: of the MTP layers in the same checkpoint, which follow the target's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    layers: tuple[Step3p5LayerSpec, ...]
    modules: tuple[Step3p5LayerSpec, ...]
    rms_norm_eps: float
    max_position_embeddings: int
    eos_token_id: tuple[int, ...]
    dtype: str

    @property
    def final_logit_softcapping(self) -> None:
        return None

    @property
    def first_shared_layer(self) -> int:
        """No layer reads another's K and V."""
        return self.num_hidden_layers

    @property
    def kv_owners(self) -> tuple[int, ...]:
        return tuple(range(self.num_hidden_layers))

    def last_owner(self, kind: str) -> int | None:
        return next((i for i in reversed(self.kv_owners) if self.layers[i].kind == kind), None)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Step3p5Config:
        """Reads a target's config.json.

        Lists by layer may hold the MTP layers' entries too, or leave them out or in lists of their own (`mtp_layer_types` and others); an
        entry that is nowhere means a sliding layer with theta 10,000 whose heads rotate whole, and no limits. Raises ValueError for
        another model type, or a value that this implementation does not have.
        """
        if config.get("model_type") not in TARGET_TYPES:
            raise ValueError(f"model_type is {config.get('model_type')!r}; a Step-3.5 target has {', '.join(TARGET_TYPES)}")
        return _read(config)


def read_modules(config: Mapping[str, Any]) -> ModulesConfig:
    """The MTP layers that a config.json tells of, a target's or one of modules alone. Raises ValueError as `Step3p5Config.from_hf` does."""
    read = _read(config)
    if not read.modules:
        raise ValueError(f"num_nextn_predict_layers is {config.get('num_nextn_predict_layers')!r}; expected at least 1")
    sizes = {name: getattr(read, name) for name in ("num_hidden_layers", "hidden_size", "vocab_size", "final_logit_softcapping")}
    return ModulesConfig(read.modules, **sizes, eps=read.rms_norm_eps, model_type=config["model_type"])


def has_modules(config: Mapping[str, Any]) -> bool:
    """Whether a target's config.json tells of MTP layers."""
    return config.get("model_type") in TARGET_TYPES and bool(config.get("num_nextn_predict_layers"))


def _read(config: Mapping[str, Any]) -> Step3p5Config:
    # What changes a forward pass and is there in one way alone.
    for field in ("zero_centered", "use_qk_norm", "use_head_wise_attn_gate"):
        expect(config, field, (True,))
    expect(config, "tie_word_embeddings", (False,))
    expect(config, "moe_every_n_layer", (1, None))
    expect(config, "moe_layer_offset", (0, None))
    expect(config, "sink", (False, None))
    expect(config, "use_rope_layers", ([], None))
    expect(config, "mtp_use_rope_layers", ([], None))
    expect(config, "hidden_act", ("silu", None))
    expect(config, "attention_bias", (False, None))
    expect(config, "attn_logit_softcapping", (None,))
    expect(config, "final_logit_softcapping", (None,))
    expect(config, "per_layer_config", (None,))
    expect(config, "mtp_mlp_layer_types", (None, ["dense"] * len(config.get("mtp_mlp_layer_types") or ())))
    hidden, count = whole(config, "hidden_size"), whole(config, "num_hidden_layers")
    modules = whole_or(config, "num_nextn_predict_layers", 0)
    kinds = _by_layer(config, "layer_types", count, modules, missing=None, module=SLIDING)
    if set(kinds) - {SLIDING, FULL}:
        raise ValueError(f"layer_types has {sorted(map(str, set(kinds)))}; expected {SLIDING!r} and {FULL!r}")
    thetas = _by_layer(config, "rope_theta", count, modules, missing=10_000.0, module=10_000.0)
    fractions = _by_layer(config, "partial_rotary_factors", count, modules, missing=1.0, module=1.0)
    limits = _by_layer(config, "swiglu_limits", count, modules, missing=0.0, module=0.0)
    shared_limits = _by_layer(config, "swiglu_limits_shared", count, modules, missing=0.0, module=0.0)
    experts = _expert_layers(config, count)
    if experts:
        expect(config, "moe_router_activation", ("sigmoid",))
        for field in ("use_moe_router_bias", "norm_expert_weight", "need_fp32_gate"):
            expect(config, field, (True,))
    scaling, scaled = _scaling(config.get("rope_scaling")), config.get("yarn_only_types") or (FULL, SLIDING)
    eps = float(config.get("rms_norm_eps", 1e-5))
    heads = {FULL: _heads(config, FULL, config)}
    other = config.get("attention_other_setting") or {}
    heads[SLIDING] = _heads(config, SLIDING, {**config, **other})
    if other:
        expect(other, "attention_type", (SLIDING,))

    def layer(i: int) -> Step3p5LayerSpec:
        kind, routed = kinds[i], i in experts
        num_heads, kv_heads, head_dim = heads[kind]
        count, top_k = experts_of(config, "moe_num_experts", "moe_top_k") if routed else (0, 0)
        return Step3p5LayerSpec(
            kind=kind,
            window=whole(config, "sliding_window") if kind == SLIDING else None,
            hidden_size=hidden,
            num_heads=num_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rope_theta=float(thetas[i]),
            rotary_angles=_rotary_angles(float(fractions[i]), head_dim),
            k_eq_v=False,
            kv_source=None,
            intermediate_size=whole(config, "intermediate_size"),
            num_experts=count,
            top_k_experts=top_k,
            moe_intermediate_size=whole(config, "moe_intermediate_size") if routed else 0,
            per_layer_input=0,
            eps=eps,
            rope_scaling=scaling if kind in scaled else None,
            shared_intermediate_size=whole(config, "share_expert_dim") if routed else 0,
            routed_scale=float(config.get("moe_router_scaling_factor", 1.0)),
            limit=float(limits[i] or 0) or None,
            shared_limit=float(shared_limits[i] or 0) or None,
        )

    layers = [layer(i) for i in range(count + modules)]
    eos = config.get("eos_token_id")
    return Step3p5Config(
        vocab_size=whole(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=whole(config, "intermediate_size"),
        num_hidden_layers=count,
        num_attention_heads=heads[FULL][0],
        num_key_value_heads=heads[FULL][1],
        head_dim=heads[FULL][2],
        layer_types=tuple(kinds[:count]),
        layers=tuple(layers[:count]),
        modules=tuple(layers[count:]),
        rms_norm_eps=eps,
        max_position_embeddings=whole_or(config, "max_position_embeddings", whole_or(config, "max_seq_len", 131_072)),
        eos_token_id=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),),
        dtype=float_name(config),
    )


def _by_layer(config: Mapping[str, Any], field: str, count: int, modules: int, *, missing: Any, module: Any) -> list[Any]:
    """A field's value of every layer and module; one number is that of them all. missing: of a config without the field, None if it has
    to be there; module: of a module that is in no list."""
    value, own = config.get(field), config.get(f"mtp_{field}")
    if value is None and missing is None:
        raise ValueError(f"config.json lacks {field!r}")
    each = [missing] * count if value is None else [value] * (count + modules)
    entries = list(value) if isinstance(value, list | tuple) else each
    if not count <= len(entries):
        raise ValueError(f"{field} has {len(entries)} entries; expected {count} of num_hidden_layers, or those of the MTP layers too")
    later = list(own) if isinstance(own, list | tuple) else entries[count:]
    return [*entries[:count], *(later + [module] * modules)[:modules]]


def _expert_layers(config: Mapping[str, Any], count: int) -> frozenset[int]:
    """The layers that have experts."""
    named, types = config.get("moe_layers_enum"), config.get("mlp_layer_types")
    if named is None and types is not None:
        return frozenset(i for i, kind in enumerate(types[:count]) if kind != "dense")
    if named is None:
        raise ValueError("config.json lacks 'moe_layers_enum'")
    try:
        layers = frozenset(int(i) for i in (named.split(",") if isinstance(named, str) else named) if str(i).strip())
    except (TypeError, ValueError) as error:
        raise ValueError(f"moe_layers_enum is {named!r}; expected the indices of layers, such as '3,4,5'") from error
    outside = sorted(i for i in layers if not 0 <= i < count)
    if outside:
        raise ValueError(f"moe_layers_enum names the layers {outside}; expected indices of layers, 0 .. {count - 1}")
    return layers


def _heads(config: Mapping[str, Any], kind: str, own: Mapping[str, Any]) -> tuple[int, int, int]:
    """(query heads, KV heads, head_dim) of a kind of layer. own: where its settings stand."""
    heads, kv_heads, head_dim = (whole(own, f) for f in ("num_attention_heads", "num_attention_groups", "head_dim"))
    expect(own, "true_head_dim", (head_dim, None))
    if heads % kv_heads:
        raise ValueError(f"{kind} has {heads} query heads, which {kv_heads} KV heads do not divide")
    return heads, kv_heads, head_dim


def _rotary_angles(fraction: float, head_dim: int) -> int:
    rotary = int(fraction * head_dim)
    if not 0 < rotary <= head_dim or rotary % 2:
        raise ValueError(f"partial_rotary_factors has {fraction}, so that {rotary} of {head_dim} dims rotate; expected an even number")
    return rotary // 2


def _scaling(rope: Any) -> RopeScaling | None:
    if rope is None:
        return None
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else rope
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"rope_scaling is {rope!r}; implemented: rope_type 'llama3'")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    factor, low, high, original = (float(require(rope, name)) for name in names)
    if not (factor > 0 and high > low > 0):
        raise ValueError(f"rope_scaling is {rope!r}; expected a positive factor and high_freq_factor above low_freq_factor")
    return RopeScaling(factor, low, high, int(original))


def modules_config(raw: Mapping[str, Any], target: Step3p5Config, count: int = 3) -> dict[str, Any]:
    """The config.json of `count` fresh modules alone. raw: the target's."""
    lists = ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared")
    cut = {name: raw[name][: target.num_hidden_layers] for name in lists if isinstance(raw.get(name), list)}
    named = {"architectures": ["Step3p5MTP"], "model_type": MODULES_TYPES[0], "num_nextn_predict_layers": count}
    left_out = ("auto_map", "quantization_config", *(f"mtp_{name}" for name in lists))
    return {**{name: value for name, value in raw.items() if name not in left_out}, **cut, **named}


def draft_config(raw: Mapping[str, Any], target: Step3p5Config) -> dict[str, Any]:
    """The config.json of a fresh draft model, of four dense layers: see `Family.draft_config`."""
    fields = (
        "architectures", "vocab_size", "head_dim", "rms_norm_eps", "sliding_window", "max_position_embeddings", "max_seq_len", "dtype",
        "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id", "rope_scaling", "yarn_only_types", "zero_centered", "use_qk_norm",
        "use_head_wise_attn_gate", "hidden_act",
    )  # fmt: skip
    full, width = target.layers[-1], max(64, target.hidden_size // 256 * 64)
    heads = {"num_attention_heads": 2 * full.num_kv_heads, "num_attention_groups": full.num_kv_heads}
    return {
        **{name: raw[name] for name in fields if name in raw},
        **heads,
        "model_type": TARGET_TYPES[0],
        "hidden_size": 2 * width,
        "intermediate_size": 8 * width,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
        "rope_theta": [10_000.0, 10_000.0, 10_000.0, next((s.rope_theta for s in target.layers if s.kind == FULL), 10_000.0)],
        "partial_rotary_factors": [1.0, 1.0, 1.0, 0.5],
        "moe_layers_enum": "",
        "num_nextn_predict_layers": 0,
    }
