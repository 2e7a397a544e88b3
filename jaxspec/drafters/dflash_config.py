"""The config.json of a DFlash drafter: what is read of it, that of a fresh drafter, and those of the released ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxspec.drafters.blocks import named_taps, plain_config, plain_spec, unread_keys
from jaxspec.model.config import FULL, SLIDING, LayerSpec, expect, require
from jaxspec.model.families import family_of
from jaxspec.model.target import TargetConfig


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """What a DFlash drafter is made of, and the target that it was made for."""

    # Of each layer its spec, and whether a row of the block sees only the block's rows up to its own.
    layers: tuple[LayerSpec, ...]
    causal: tuple[bool, ...]
    # Indices of the target's hidden states, in the order in which fc takes them.
    taps: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    # Rows of the head. A head of fewer rows than the target has tokens comes with d2t.
    draft_vocab_size: int
    # Rows of the longest block, the anchor's among them.
    block_size: int
    mask_token_id: int
    eps: float
    # Of the target that the drafter was made for; None where the config does not say.
    target_hidden_size: int
    num_target_layers: int | None = None
    # Whether the checkpoint has a head and a mask embedding; else they are the target's.
    own_head: bool = False
    own_mask: bool = False
    # Beginnings of the checkpoint's keys that nothing reads.
    unread: tuple[str, ...] = ()
    final_logit_softcapping: float | None = None
    # Of the block's embeddings: 1 takes the rows of the target's table as they are, hidden_size ** 0.5 is what some ports use.
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: TargetConfig, keys: Collection[str] = ()) -> DFlashConfig:
        """Reads config.json, as z-lab or speculators write it. keys: of the checkpoint's tensors.

        Raises ValueError, naming what was found, for a drafter that this implementation does not have or that leaves open what it reads.
        """
        inner = {**config, **(config.get("transformer_layer_config") or {})}
        dflash = config.get("dflash_config") or {}
        speculators = "speculators_model_type" in config
        for field in ("attention_sink_bias", "attention_value_scale", "add_swa_attention_sink_bias"):
            if dflash.get(field) or config.get(field):
                raise ValueError(f"config.json has {field}={dflash.get(field) or config.get(field)!r}; implemented: none")
        expect(config, "is_neox_style", (True,))
        expect(config, "sample_from_anchor", (False, None))
        expect(config, "shift_label", (False, None))
        expect(config, "projector_type", ("dflash",))
        hidden, vocab = int(require(inner, "hidden_size")), int(require(inner, "vocab_size"))
        layers, causal = _layers(inner, config, dflash)
        mask = next((c[name] for name, c in _mask_places(dflash, config) if c.get(name) is not None), None)
        if mask is None or not 0 <= mask < vocab:
            raise ValueError(f"mask_token_id is {mask}; expected an id below vocab_size {vocab}")
        draft_vocab = int(config.get("draft_vocab_size") or vocab)
        # A head that covers the whole vocabulary is a frozen copy of the target's in speculators' checkpoints.
        own_head = "lm_head.weight" in keys and not (speculators and draft_vocab == vocab)
        if draft_vocab != vocab and not own_head:
            raise ValueError(f"draft_vocab_size is {draft_vocab} of {vocab} tokens, and the checkpoint has no lm_head.weight")
        return cls(
            layers=layers,
            causal=causal,
            taps=_taps(config, dflash, len(layers), target.num_hidden_layers),
            hidden_size=hidden,
            vocab_size=vocab,
            draft_vocab_size=draft_vocab,
            block_size=int(dflash.get("block_size") or require(config, "block_size")),
            mask_token_id=int(mask),
            eps=float(inner.get("rms_norm_eps", 1e-6)),
            target_hidden_size=int(config.get("target_hidden_size") or hidden),
            num_target_layers=config.get("num_target_layers"),
            own_head=own_head,
            own_mask="mask_embedding" in keys,
            unread=unread_keys(speculators, own_head=own_head, own_embedding=False, own_d2t=draft_vocab != vocab),
            final_logit_softcapping=dflash.get("final_logit_softcapping", inner.get("final_logit_softcapping")),
            input_embedding_scale=float(dflash.get("input_embedding_scale", config.get("input_embedding_scale", 1.0))),
            output_multiplier=float(dflash.get("output_multiplier", config.get("output_multiplier", 1.0))),
        )


def _mask_places(dflash: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(field, part of the config) where the mask token's id may be; the first that is there counts."""
    return [("mask_token_id", dflash), *((f, config) for f in ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"))]


def _taps(config: Mapping[str, Any], dflash: Mapping[str, Any], layers: int, depth: int) -> tuple[int, ...]:
    """Indices of hidden states, in the order in which the drafter's fc takes them."""
    indices = named_taps(dflash, config)
    if indices is not None:
        return indices
    made_for = config.get("num_target_layers")
    if made_for is None:
        raise ValueError(f"config.json has neither target_layer_ids nor num_target_layers, which this target's {depth} must equal")
    # As many as the drafter has layers, evenly from the second layer to the third from the end.
    ids = [made_for // 2] if layers == 1 else [round(1 + i * (made_for - 4) / (layers - 1)) for i in range(layers)]
    return tuple(i + 1 for i in ids)


def _layers(
    inner: Mapping[str, Any], config: Mapping[str, Any], dflash: Mapping[str, Any]
) -> tuple[tuple[LayerSpec, ...], tuple[bool, ...]]:
    """The spec of every layer, and whether it is causal inside the block."""
    count = int(require(inner, "num_hidden_layers"))
    kinds = inner.get("layer_types")
    if kinds is None:
        first = int(inner.get("max_window_layers") or 0) if inner.get("use_sliding_window") else count
        kinds = [FULL if i < first else SLIDING for i in range(count)]
    if len(kinds) != count or set(kinds) - {SLIDING, FULL}:
        raise ValueError(f"layer_types has {len(kinds)} entries of {sorted(set(kinds))}; expected {count} of {SLIDING!r} and {FULL!r}")
    places = config.get("is_causal"), dflash.get("is_causal"), dflash.get("causal")
    explicit = next((place for place in places if place is not None), None)
    both_ways = config.get("sliding_window_non_causal", False)
    causal = tuple(bool(explicit) if explicit is not None else kind == SLIDING and not both_ways for kind in kinds)
    if dflash.get("use_swa") and SLIDING not in kinds:
        kinds = [SLIDING] * count
    window = dflash.get("swa_window_size") or inner.get("sliding_window")
    if SLIDING in kinds and not window:
        raise ValueError(f"layer_types has {list(kinds).count(SLIDING)} sliding layers, and sliding_window is {window!r}")
    return tuple(plain_spec(inner, window if kind == SLIDING else None, rope_theta=1e6) for kind in kinds), causal


def default_config(raw: Mapping[str, Any], target: TargetConfig) -> dict[str, Any]:
    """The config.json of a fresh drafter, like z-lab/gemma-4-31B-it-DFlash. raw: the target's."""
    layers, depth = 5, target.num_hidden_layers
    taps = min(layers + 1, depth)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **plain_config(target),
        "intermediate_size": 2 * target.hidden_size,
        "num_hidden_layers": layers,
        "layer_types": [*[SLIDING] * (layers - 1), FULL],
        "sliding_window": 2048,
        "use_sliding_window": True,
        "rope_theta": 1_000_000.0,
        "block_size": 16,
        "dflash_config": {
            "mask_token_id": family_of(target).mask_token,
            # From the second layer on; the last layer says most about the next token.
            "target_layer_ids": sorted(
                {round(min(1, depth - 1) + i * (depth - 1 - min(1, depth - 1)) / max(taps - 1, 1)) for i in range(taps)}
            ),
            "final_logit_softcapping": target.final_logit_softcapping,
        },
    }


def _released(depth: int, target_layer_ids: list[int], **sizes: int) -> dict[str, Any]:
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 262_144,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "layer_types": [SLIDING, SLIDING, SLIDING, SLIDING, FULL],
        "sliding_window": 2048,
        "block_size": 16,
        "num_target_layers": depth,
        "final_logit_softcapping": 30.0,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": target_layer_ids},
        **sizes,
    }


# By the name of the target.
RELEASED: dict[str, dict[str, Any]] = {
    "26b": _released(30, [1, 6, 11, 17, 22, 27], hidden_size=2816, intermediate_size=5632, num_attention_heads=32),
    "31b": _released(60, [1, 12, 23, 35, 46, 57], hidden_size=5376, intermediate_size=10_752, num_attention_heads=64),
}
