"""Gemma 4 configurations, read from Hugging Face's config.json, whose names of fields they have."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jaxspec.checks import integer, number
from jaxspec.model.config_fields import checked, expect, experts_of, flag, float_name, positive, require, section, whole, whole_or
from jaxspec.model.layer_spec import FULL, SLIDING, LayerSpec

TEXT_TYPES = ("gemma4_text", "gemma4_unified_text")
TARGET_TYPES = ("gemma4", "gemma4_unified", *TEXT_TYPES)
CENTROIDS = {"num_centroids": 2048, "centroid_intermediate_top_k": 32}  # where an assistant's config says nothing
ASSISTANT_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


@dataclasses.dataclass(frozen=True)
class Gemma4Config:
    """The text part of a Gemma 4 config (facts: google/gemma-4-* config.json, transformers `Gemma4TextConfig`)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    layers: tuple[LayerSpec, ...]
    sliding_window: int
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 131_072
    final_logit_softcapping: float | None = None
    vocab_size_per_layer_input: int = 0
    hidden_size_per_layer_input: int = 0
    num_kv_shared_layers: int = 0
    initializer_range: float = 0.02
    eos_token_id: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    use_bidirectional_attention: str | None = None  # "vision": in sliding layers all rows of an image see one another
    dtype: str = "bfloat16"

    @property
    def first_shared_layer(self) -> int:
        """Index of the first layer that reads another layer's K and V (num_hidden_layers if none does)."""
        return next((i for i, layer in enumerate(self.layers) if not layer.owns_kv), self.num_hidden_layers)

    @property
    def kv_owners(self) -> tuple[int, ...]:
        return tuple(i for i, layer in enumerate(self.layers) if layer.owns_kv)

    def last_owner(self, kind: str) -> int | None:
        """The last layer of `kind` that owns K and V: the one a shared layer, or an assistant's layer, reads. None if there is none."""
        return next((i for i in reversed(self.kv_owners) if self.layers[i].kind == kind), None)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Gemma4Config:
        """Reads a target's config.json, multimodal or text-only.

        Raises ValueError for another model type, or a value that this implementation does not have.
        """
        model_type = config.get("model_type")
        if model_type not in TARGET_TYPES:
            raise ValueError(f"model_type is {model_type!r}; a Gemma 4 target has one of {', '.join(TARGET_TYPES)}")
        read = _text_config(config, {}) if model_type in TEXT_TYPES else _text_config(section(config, "text_config"), config)
        if not read.kv_owners:
            raise ValueError(f"num_kv_shared_layers is {read.num_kv_shared_layers}; a target of {len(read.layers)} layers shares fewer")
        if read.hidden_size_per_layer_input and read.vocab_size_per_layer_input < read.vocab_size:
            raise ValueError(
                f"vocab_size_per_layer_input is {read.vocab_size_per_layer_input}; expected at least vocab_size, {read.vocab_size}"
            )
        return read


@dataclasses.dataclass(frozen=True)
class AssistantConfig:
    """A Gemma 4 MTP assistant's config (transformers `Gemma4AssistantConfig`). `text` layers all read the target's K and V."""

    text: Gemma4Config
    backbone_hidden_size: int
    use_ordered_embeddings: bool = False
    num_centroids: int = 2048
    centroid_intermediate_top_k: int = 32
    target_vocab_size: int | None = None  # of the target that it is bound to, which may have more tokens

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> AssistantConfig:
        model_type = config.get("model_type")
        if model_type not in ASSISTANT_TYPES:
            raise ValueError(f"model_type is {model_type!r}; a Gemma 4 assistant has one of {', '.join(ASSISTANT_TYPES)}")
        inner = dict(section(config, "text_config"))
        inner["num_kv_shared_layers"] = require(inner, "num_hidden_layers")
        text = _text_config(inner, config)
        for field in ("hidden_size_per_layer_input", "enable_moe_block", "use_double_wide_mlp"):
            if inner.get(field):
                raise ValueError(f"the assistant's text_config has {field}={inner[field]!r}; an assistant has none")
        ordered = flag(config, "use_ordered_embeddings")
        centroids, top_k = (whole({**CENTROIDS, **config}, name) for name in CENTROIDS)
        if ordered and (text.vocab_size % centroids or not 0 < top_k <= centroids):
            raise ValueError(
                f"use_ordered_embeddings needs num_centroids that divides vocab_size and holds centroid_intermediate_top_k; "
                f"found num_centroids {centroids}, vocab_size {text.vocab_size}, centroid_intermediate_top_k {top_k}"
            )
        return cls(text, whole(config, "backbone_hidden_size"), ordered, centroids, top_k)


def _ids(value: Any) -> tuple[int, ...]:
    given = () if value is None else value if isinstance(value, list | tuple) else (value,)
    return tuple(checked(integer, "eos_token_id", i, -1) for i in given)


def _text_config(text: Mapping[str, Any], outer: Mapping[str, Any]) -> Gemma4Config:
    expect(text, "hidden_activation", ("gelu_pytorch_tanh",))
    expect(text, "attention_bias", (False,))
    expect(text, "use_bidirectional_attention", (None, "vision"))
    expect(text, "hidden_act", (None, "gelu_pytorch_tanh"))
    expect(text, "attn_logit_softcapping", (None,))
    expect(text, "rope_scaling", (None,))
    if not text.get("layer_types"):
        expect(text, "sliding_window_pattern", (6, None))
    hidden = whole(text, "hidden_size")
    count = whole(text, "num_hidden_layers")
    # A config without layer_types means five sliding layers to a full one, and the last is always full.
    written = text.get("layer_types") or [SLIDING if (i + 1) % 6 else FULL for i in range(count)]
    kinds = list(written) if isinstance(written, list | tuple) else [written]
    if len(kinds) != count or not all(kind in (SLIDING, FULL) for kind in kinds):
        found = sorted({str(kind) for kind in kinds})
        raise ValueError(f"layer_types has {len(kinds)} entries of {found}; expected {count} of {SLIDING!r} and {FULL!r}")
    kinds[-1] = FULL

    shared = whole_or(text, "num_kv_shared_layers", 0)
    first_shared = max(count - shared, 0)
    ple = whole_or(text, "hidden_size_per_layer_input", 0)
    moe = flag(text, "enable_moe_block")
    experts, top_k = experts_of(text, "num_experts", "top_k_experts") if moe else (0, 0)
    overrides = _by_layer(text, count)
    layers = []
    for i, kind in enumerate(kinds):
        source = None
        if i >= first_shared:
            # An assistant owns no K and V at all: its layers are bound to the target's when the two meet.
            owners = [j for j in range(first_shared) if kinds[j] == kind]
            if shared < count and not owners:
                raise ValueError(f"num_kv_shared_layers is {shared}, but no layer before {first_shared} is of type {kind!r}")
            source = owners[-1] if owners else -1
        wide = flag(text, "use_double_wide_mlp") and i >= first_shared > 0
        heads, kv_heads, head_dim, k_eq_v = _attention_dims(text, i, kind, overrides)
        theta, angles = _rope(text, kind, head_dim)
        if k_eq_v and not angles:
            raise ValueError(
                f"rope_parameters of {kind} rotate none of {head_dim} numbers; with attention_k_eq_v, expected at least a pair"
            )
        layers.append(
            LayerSpec(
                kind=kind,
                window=whole(text, "sliding_window") if kind == SLIDING else None,
                hidden_size=hidden,
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                rope_theta=theta,
                rotary_angles=angles,
                k_eq_v=k_eq_v,
                kv_source=source,
                intermediate_size=whole(text, "intermediate_size") * (2 if wide else 1),
                num_experts=experts,
                top_k_experts=top_k,
                moe_intermediate_size=whole(text, "moe_intermediate_size") if moe else 0,
                per_layer_input=ple,
                eps=positive(text, "rms_norm_eps", 1e-6),
            )
        )
    spread = text.get("initializer_range")
    return Gemma4Config(
        vocab_size=whole(text, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=whole(text, "intermediate_size"),
        num_hidden_layers=count,
        num_attention_heads=whole(text, "num_attention_heads"),
        num_key_value_heads=whole(text, "num_key_value_heads"),
        head_dim=whole(text, "head_dim"),
        layer_types=tuple(kinds),
        layers=tuple(layers),
        sliding_window=whole(text, "sliding_window"),
        rms_norm_eps=positive(text, "rms_norm_eps", 1e-6),
        max_position_embeddings=whole_or(text, "max_position_embeddings", 131_072),
        final_logit_softcapping=positive(text, "final_logit_softcapping", None),
        vocab_size_per_layer_input=whole_or(text, "vocab_size_per_layer_input", 0) if ple else 0,
        hidden_size_per_layer_input=ple,
        num_kv_shared_layers=shared,
        initializer_range=0.02 if spread is None else checked(number, "initializer_range", spread, 0),
        eos_token_id=_ids(next((c["eos_token_id"] for c in (outer, text) if c.get("eos_token_id") is not None), None)),
        bos_token_id=text.get("bos_token_id"),
        pad_token_id=text.get("pad_token_id"),
        use_bidirectional_attention=text.get("use_bidirectional_attention", "vision" if text.get("model_type") == TEXT_TYPES[1] else None),
        dtype=float_name(outer, text),
    )


def _by_layer(text: Mapping[str, Any], count: int) -> dict[int, Mapping[str, Any]] | None:
    """`per_layer_config` by layer index, None where a config has none. transformers pads its keys with zeros to one width: "04", "10"."""
    written = text.get("per_layer_config")
    if written is None:
        return None
    if not isinstance(written, Mapping):
        raise ValueError(f"per_layer_config is a {type(written).__name__}; expected an object of layer index to settings")
    names: dict[int, Any] = {}
    for name, own in written.items():
        index = int(name) if re.fullmatch("[0-9]+", str(name)) else -1
        if not 0 <= index < count:
            raise ValueError(f"per_layer_config has the key {name!r}; expected the index of a layer, 0 .. {count - 1}")
        if index in names:
            raise ValueError(f"per_layer_config has layer {index} twice, as {names[index]!r} and as {name!r}")
        if not isinstance(own, Mapping):
            raise ValueError(f"per_layer_config of layer {index} is {own!r}; expected an object")
        names[index] = name
    return {index: written[name] for index, name in names.items()}


def _attention_dims(
    text: Mapping[str, Any], index: int, kind: str, overrides: Mapping[int, Mapping[str, Any]] | None
) -> tuple[int, int, int, bool]:
    """(query heads, KV heads, head_dim, k_eq_v) of one layer.

    Released configs give full layers `global_head_dim` and, with attention_k_eq_v, `num_global_key_value_heads`; transformers 5.16
    and newer write the same as `per_layer_config`, here `overrides`.
    """
    heads, kv_heads, head_dim = (whole(text, f) for f in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    k_eq_v = flag(text, "attention_k_eq_v") and kind == FULL
    if overrides is not None:
        own = overrides.get(index, {})
        unknown = set(own) - {"head_dim", "num_key_value_heads"}
        if unknown:
            raise ValueError(f"per_layer_config of layer {index} sets {sorted(unknown)}; implemented: head_dim, num_key_value_heads")
        head_dim, kv_heads = whole_or(own, "head_dim", head_dim), whole_or(own, "num_key_value_heads", kv_heads)
    elif kind == FULL:
        head_dim = whole_or(text, "global_head_dim", 512)
        if k_eq_v:
            kv_heads = whole_or(text, "num_global_key_value_heads", kv_heads)
    if heads % kv_heads:
        raise ValueError(f"layer {index} has {heads} query heads, which {kv_heads} KV heads do not divide")
    return heads, kv_heads, head_dim, k_eq_v


def _rope(text: Mapping[str, Any], kind: str, head_dim: int) -> tuple[float, int]:
    """(theta, rotating frequency pairs) of one kind of layer."""
    default = {
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    }
    rope = section(section(text, "rope_parameters") if text.get("rope_parameters") else default, kind)
    fraction = checked(number, "partial_rotary_factor", rope.get("partial_rotary_factor", 1.0), 0, 1)
    rope_type = rope.get("rope_type", rope.get("type", "default"))  # "type" in older files
    known = rope_type == "proportional" or rope_type == "default" and fraction == 1.0
    if not known or (1.0 if rope.get("factor") is None else checked(number, "factor", rope["factor"], 0)) != 1.0:
        raise ValueError(
            f"rope_parameters of {kind} are {dict(rope)}; implemented: rope_type 'default' over whole heads or 'proportional', "
            "with factor 1"
        )
    return checked(number, "rope_theta", require(rope, "rope_theta"), 0, above=True), int(fraction * head_dim // 2)
