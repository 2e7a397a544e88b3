"""The config.json of a DSpark drafter: what is read of it, that of a fresh drafter, and those of the released ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxspec.drafters.block_config import ANCHOR, FRESH_LAYERS, BlockConfig, Undecided, fresh_config, mask_token, plain_fields
from jaxspec.drafters.blocks import gemma_layers, named_taps, unread_keys
from jaxspec.model.config_fields import expect, flag, part, positive, whole, whole_or
from jaxspec.model.layer_spec import FULL
from jaxspec.model.target import TargetConfig

GEMMA = "Gemma4DSparkModel"
HEADS = ("vanilla", "gated", "rnn")
CONFIDENCE = "confidence_head.proj.weight"
DRAFT_VOCABULARY = 32_000  # of a fresh drafter, where the target has more tokens


@dataclasses.dataclass(frozen=True)
class DSparkConfig(BlockConfig):
    """What a DSpark drafter is made of, and the target that it was made for."""

    # Layers of Gemma 4's kind, with sandwich norms and layer_scalar (DeepSpec's); else Qwen3's (speculators').
    gemma: bool = False
    # Numbers that stand for a token in the Markov head; 0 for a drafter without that head.
    markov_rank: int = 0
    # How the Markov head makes a bias of them: one of `HEADS`.
    markov_head: str = "vanilla"
    # Whether the checkpoint has a confidence head, and whether that sees the token before a guess.
    confidence: bool = False
    confidence_with_markov: bool = False

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: TargetConfig, keys: Collection[str] = ()) -> DSparkConfig:
        """Reads config.json, as DeepSpec or speculators write it. keys: of the checkpoint's tensors.

        Raises ValueError, naming what was found, for a drafter that this implementation does not have or that leaves open what it reads.
        """
        gemma = GEMMA in (config.get("architectures") or ())
        taps = named_taps(part(config, "dflash_config"), config)
        if taps is None:
            raise ValueError("config.json names no layers of the target; expected aux_hidden_state_layer_ids or target_layer_ids")
        rank, head = whole_or(config, "markov_rank", 0), config.get("markov_head_type", HEADS[0])
        if head not in HEADS:
            raise ValueError(f"markov_head_type is {head!r}; implemented: {', '.join(map(repr, HEADS))}")
        confidence = flag(config, "enable_confidence_head", True) and CONFIDENCE in keys
        fields = _gemma_fields(config) if gemma else {**plain_fields(config, keys), **_first_row(config)}
        if not confidence:
            fields["unread"] = (*fields["unread"], "confidence_head.")
        return cls(
            **fields,
            taps=taps,
            gemma=gemma,
            markov_rank=rank,
            markov_head=head,
            confidence=confidence,
            confidence_with_markov=rank > 0 and flag(config, "confidence_head_with_markov"),
        )


def _first_row(config: Mapping[str, Any]) -> dict[str, Any]:
    """The first row of a block that guesses, and whether the config leaves that open. Without the key speculators takes true (each of
    block_size rows guesses the token after its own), vLLM 0.33 false (the anchor's row guesses nothing, each other row the token at its
    own position). Raises ValueError for what is neither true nor false."""
    expect(config, ANCHOR, (True, False, None))
    said = config.get(ANCHOR)
    return {"first_row": 1 if said is False else 0, "undecided": Undecided(ANCHOR, (True, False)) if said is None else None}


def _gemma_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `BlockConfig`, but for taps, of a drafter with Gemma 4's layers. Its embedding and head are copies of the target's."""
    expect(config, ANCHOR, (True, None))
    layers, hidden, vocab = gemma_layers(config), whole(config, "hidden_size"), whole(config, "vocab_size")
    if len({spec.k_eq_v for spec in layers}) > 1:
        raise ValueError("the drafter has layers with and without k_eq_v; expected one of both")
    return {
        "layers": layers,
        "causal": (False,) * len(layers),
        "hidden_size": hidden,
        "vocab_size": vocab,
        "draft_vocab_size": vocab,
        "block_size": whole(config, "block_size"),
        "mask_token_id": mask_token(config, vocab),
        "eps": layers[0].eps,
        "target_hidden_size": whole_or(config, "target_hidden_size", hidden),
        "num_target_layers": config.get("num_target_layers"),
        "unread": unread_keys(True, own_head=False, own_embedding=False, own_d2t=False),
        "final_logit_softcapping": positive(config, "final_logit_softcapping", None),
        "input_embedding_scale": hidden**0.5,
        "first_row": 0,
    }


_HEADS = {
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def default_config(raw: Mapping[str, Any], target: TargetConfig) -> dict[str, Any]:
    """The config.json of a fresh drafter, in speculators' layout. raw: the target's."""
    return {
        **fresh_config(target, layer_types=[FULL] * FRESH_LAYERS),
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "block_size": 8,
        "draft_vocab_size": min(DRAFT_VOCABULARY, target.vocab_size),
        "sample_from_anchor": True,
        **_HEADS,
    }


# By the name of the target.
RELEASED: dict[str, dict[str, Any]] = {
    # deepseek-ai/dspark_gemma4_12b_block7.
    "12b": {
        "architectures": [GEMMA],
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 5,
        "layer_types": [FULL] * 5,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_global_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "sliding_window": 1024,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": 30.0,
        "num_target_layers": 48,
        "block_size": 7,
        "mask_token_id": 4,
        "target_layer_ids": [5, 17, 29, 41, 46],
        **_HEADS,
    },
    # RedHatAI/gemma-4-31B-it-speculator.dspark: layers, as far as they are known, are those of the DFlash drafter that it began as; the
    # number of rows and which of them guesses are speculators' defaults.
    "31b": {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {
            "model_type": "qwen3",
            "vocab_size": 262_144,
            "hidden_size": 5376,
            "intermediate_size": 21_504,
            "num_hidden_layers": 5,
            "layer_types": [FULL] * 5,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
        },
        "aux_hidden_state_layer_ids": [1, 17, 29, 47, 58],
        "block_size": 8,
        "draft_vocab_size": 32_000,
        "mask_token_id": 4,
        "sample_from_anchor": True,
        **_HEADS,
    },
}
