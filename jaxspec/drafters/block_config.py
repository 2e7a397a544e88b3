"""The config.json of drafters that guess a block in one pass: what is read of it for every such kind."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Any

from jaxspec.drafters.blocks import plain_config, plain_spec, unread_keys
from jaxspec.model.config_fields import expect, flag, part, positive, whole, whole_or
from jaxspec.model.families import family_of
from jaxspec.model.layer_spec import FULL, SLIDING, LayerSpec
from jaxspec.model.target import TargetConfig

FRESH_LAYERS = 5  # of a drafter that is trained from the start
SCALE, ANCHOR = "input_embedding_scale", "sample_from_anchor"


@dataclasses.dataclass(frozen=True)
class Undecided:
    """A key that a config.json lacks, where readers disagree about what that means."""

    key: str
    values: tuple[float, float]  # what readers take; the first is taken where nothing is tried

    @property
    def readings(self) -> tuple[str, str]:
        """What each value is called."""
        first, second = (json.dumps(value if isinstance(value, bool) else round(value, 4)) for value in self.values)
        return f"{self.key}={first}", f"{self.key}={second}"


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """What such a drafter is made of, and the target that it was made for."""

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
    # Of the block's embeddings: 1 takes the rows of the target's table as they are.
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    # The first row of a block that guesses. 1: a row guesses the token at its own position, and the anchor's, which is known, none. 0:
    # every row guesses the token after its own.
    first_row: int = 1
    # What the config leaves open; the field that follows from it is as with the first value.
    undecided: Undecided | None = None

    def __post_init__(self):
        if self.block_size <= self.silent_rows:
            raise ValueError(f"block_size is {self.block_size}, of which {self.silent_rows} guess nothing; expected more")

    @property
    def silent_rows(self) -> int:
        """Rows of a block at most that guess nothing."""
        return 1 if self.undecided is not None and self.undecided.key == ANCHOR else self.first_row


def plain_fields(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    """The fields of `BlockConfig`, but for taps, of a drafter with Qwen3's layers, as z-lab or speculators write it. keys: of the
    checkpoint's tensors.

    Raises ValueError, naming what was found, for a drafter that this implementation does not have or that leaves open what it reads.
    """
    inner = {**config, **part(config, "transformer_layer_config")}
    dflash = part(config, "dflash_config")
    speculators = "speculators_model_type" in config
    rope = part(inner, "rope_parameters")
    if speculators and isinstance(rope.get(SLIDING), Mapping):
        inner["rope_parameters"] = rope[SLIDING]  # copied from the target, by kind of layer; vLLM's `algos.py` takes this one
    for field in ("attention_sink_bias", "attention_value_scale", "add_swa_attention_sink_bias"):
        if dflash.get(field) or config.get(field):
            raise ValueError(f"config.json has {field}={dflash.get(field) or config.get(field)!r}; implemented: none")
    expect(config, "is_neox_style", (True,))
    expect(config, "shift_label", (False, None))
    hidden, vocab = whole(inner, "hidden_size"), whole(inner, "vocab_size")
    layers, causal = _layers(inner, config, dflash)
    draft_vocab = whole_or(config, "draft_vocab_size", vocab)
    # A head that covers the whole vocabulary is a frozen copy of the target's in speculators' checkpoints.
    own_head = "lm_head.weight" in keys and not (speculators and draft_vocab == vocab)
    if draft_vocab != vocab and not own_head:
        raise ValueError(f"draft_vocab_size is {draft_vocab} of {vocab} tokens, and the checkpoint has no lm_head.weight")
    return {
        "layers": layers,
        "causal": causal,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab,
        "block_size": whole_or(dflash, "block_size", 0) or whole(config, "block_size"),
        "mask_token_id": mask_token(config, vocab),
        "eps": positive(inner, "rms_norm_eps", 1e-6),
        "target_hidden_size": whole_or(config, "target_hidden_size", hidden),
        "num_target_layers": config.get("num_target_layers"),
        "own_head": own_head,
        "own_mask": "mask_embedding" in keys,
        "unread": unread_keys(speculators, own_head=own_head, own_embedding=False, own_d2t=draft_vocab != vocab),
        "final_logit_softcapping": positive(dflash if "final_logit_softcapping" in dflash else inner, "final_logit_softcapping", None),
        SCALE: positive(dflash, SCALE, positive(config, SCALE, 1.0)),
        "output_multiplier": positive(dflash, "output_multiplier", positive(config, "output_multiplier", 1.0)),
    }


def mask_token(config: Mapping[str, Any], vocab_size: int) -> int:
    """The mask token's id, from the first place that has one. Raises ValueError for none, or for one that is no token."""
    fields = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
    places = [("mask_token_id", part(config, "dflash_config")), *((field, config) for field in fields)]
    mask = next((place[name] for name, place in places if place.get(name) is not None), None)
    if isinstance(mask, bool) or not isinstance(mask, int) or not 0 <= mask < vocab_size:
        raise ValueError(f"mask_token_id is {mask!r}; expected an id below vocab_size {vocab_size}")
    return mask


def _layers(
    inner: Mapping[str, Any], config: Mapping[str, Any], dflash: Mapping[str, Any]
) -> tuple[tuple[LayerSpec, ...], tuple[bool, ...]]:
    """The spec of every layer, and whether it is causal inside the block."""
    count = whole(inner, "num_hidden_layers")
    kinds = inner.get("layer_types")
    if kinds is None:
        first = whole_or(inner, "max_window_layers", 0) if inner.get("use_sliding_window") else count
        kinds = [FULL if i < first else SLIDING for i in range(count)]
    if len(kinds) != count or set(kinds) - {SLIDING, FULL}:
        raise ValueError(f"layer_types has {len(kinds)} entries of {sorted(set(kinds))}; expected {count} of {SLIDING!r} and {FULL!r}")
    both_ways = flag(config, "sliding_window_non_causal")
    places = (config, "is_causal"), (dflash, "is_causal"), (dflash, "causal")
    explicit = next((flag(place, name) for place, name in places if place.get(name) is not None), None)
    causal = tuple(explicit if explicit is not None else kind == SLIDING and not both_ways for kind in kinds)
    if dflash.get("use_swa") and SLIDING not in kinds:
        kinds = [SLIDING] * count
    window = (whole_or(dflash, "swa_window_size", 0) or whole_or(inner, "sliding_window", 0)) if SLIDING in kinds else None
    if window == 0:
        raise ValueError(f"layer_types has {list(kinds).count(SLIDING)} sliding layers, and there is no sliding_window")
    return tuple(plain_spec(inner, window if kind == SLIDING else None, rope_theta=1e6) for kind in kinds), causal


def fresh_config(target: TargetConfig, **layers: Any) -> dict[str, Any]:
    """What the config.json of a fresh drafter has in speculators' layout, whatever its kind. layers: more of its layers' config."""
    depth, taps = target.num_hidden_layers, min(FRESH_LAYERS, target.num_hidden_layers)
    return {
        "transformer_layer_config": {
            "model_type": "qwen3",
            **plain_config(target),
            "intermediate_size": 2 * target.hidden_size,
            "num_hidden_layers": FRESH_LAYERS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
            **layers,
        },
        "aux_hidden_state_layer_ids": sorted({round(1 + i * (depth - 1) / max(taps - 1, 1)) for i in range(taps)}),
        "mask_token_id": family_of(target).mask_token,
        "num_target_layers": depth,
        "dtype": "bfloat16",
    }
