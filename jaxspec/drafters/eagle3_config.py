"""The config.json of an EAGLE-3 drafter: what is read of it, that of a fresh drafter, and that of a made-up one for benchmarks."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from jaxspec.drafters.blocks import gemma_layers, named_taps, plain_config, plain_spec, unread_keys
from jaxspec.model.config_fields import flag, indices, part, positive, whole, whole_or
from jaxspec.model.layer_spec import FULL, LayerSpec
from jaxspec.model.target import TargetConfig

DRAFT_VOCABULARY = 32_000  # of a fresh drafter, where the target has more tokens
GEMMA = "Gemma4Eagle3Model"


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """What an EAGLE-3 drafter is made of, and the target that it was made for."""

    layers: tuple[LayerSpec, ...]
    # Indices of the target's hidden states.
    taps: tuple[int, ...]
    hidden_size: int
    # Of the target that the drafter was made for; None where the config does not say.
    target_hidden_size: int
    vocab_size: int
    # Rows of the head. A head of fewer rows than the target has tokens comes with d2t.
    draft_vocab_size: int
    eps: float
    num_target_layers: int | None = None
    # What it was trained or published to guess, None where the config does not say.
    num_draft_tokens: int | None = None
    # Layers of Gemma 4's kind, with sandwich norms and layer_scalar, all of which see embedding and feature; else Llama's, of which the
    # first does.
    gemma: bool = False
    # Queries and keys are normed.
    head_norms: bool = False
    # The first layer adds to the normed feature.
    norm_before_residual: bool = False
    # One norm over all taps before fc.
    norm_before_fc: bool = False
    # One norm for each tap before fc.
    fc_norm: bool = False
    # What is fed back has passed the final norm (vLLM's meaning).
    norm_output: bool = False
    # Whether the checkpoint has them; else they are the target's.
    own_head: bool = False
    own_embedding: bool = False
    # Beginnings of the checkpoint's keys that nothing reads.
    unread: tuple[str, ...] = ()
    final_logit_softcapping: float | None = None
    logit_scale: float = 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: TargetConfig, keys: Collection[str] = ()) -> Eagle3Config:
        """Reads config.json, as EAGLE, SpecForge, speculators or DeepSpec write it. keys: of the checkpoint's tensors.

        Raises ValueError, naming what was found, for a drafter that this implementation does not have or that leaves open what it reads.
        """
        inner = {**config, **part(config, "transformer_layer_config")}
        gemma, speculators = GEMMA in (config.get("architectures") or ()), "speculators_model_type" in config
        hidden, vocab = whole(inner, "hidden_size"), whole(inner, "vocab_size")
        theirs = whole_or(config, "target_hidden_size", hidden)
        own_embedding, own_head = ("embed_tokens.weight" in keys, "lm_head.weight" in keys) if not gemma else (False, False)
        if speculators and hidden == theirs and not config.get("embed_requires_grad"):
            own_embedding = False  # a frozen copy of the target's
        draft_vocab = whole_or(config, "draft_vocab_size", vocab)
        for name, own in (("embed_tokens", own_embedding), ("lm_head", own_head)):
            if hidden != theirs and not own:
                raise ValueError(f"the drafter has hidden_size {hidden} and no {name} of its own; this target's has {theirs}")
        if draft_vocab != vocab and not own_head:
            raise ValueError(f"draft_vocab_size is {draft_vocab} of {vocab} tokens, and the checkpoint has no lm_head.weight")
        layers = gemma_layers(config) if gemma else _plain_layers(inner)
        kept = unread_keys(speculators or gemma, own_head=own_head, own_embedding=own_embedding, own_d2t=draft_vocab != vocab)
        return cls(
            layers=layers,
            taps=_taps(config, target.num_hidden_layers),
            hidden_size=hidden,
            target_hidden_size=theirs,
            vocab_size=vocab,
            draft_vocab_size=draft_vocab,
            eps=layers[0].eps,
            num_target_layers=config.get("num_target_layers"),
            num_draft_tokens=_proposed(config),
            gemma=gemma,
            head_norms=gemma or any(key.endswith("self_attn.q_norm.weight") for key in keys),
            norm_before_residual=not gemma and flag(config, "norm_before_residual", speculators),
            norm_before_fc=flag(config, "norm_before_fc"),
            fc_norm=flag(config, "fc_norm"),
            norm_output=flag(config, "norm_output"),
            own_head=own_head,
            own_embedding=own_embedding,
            unread=kept,
            final_logit_softcapping=positive(inner, "final_logit_softcapping", None),
            logit_scale=positive(config, "logit_scale", 1.0),
        )


def _taps(config: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    """Indices of hidden states. The ids that SpecForge writes into `eagle_config` count layers, unlike those of the same name outside."""
    nested = indices(part(config, "eagle_config"), "eagle_aux_hidden_state_layer_ids")
    named = named_taps(config, {"target_layer_ids": nested})
    return tuple(sorted(set(named or (2, depth // 2, depth - 3))))


def _proposed(config: Mapping[str, Any]) -> int | None:
    """How many tokens a round a speculators config proposes."""
    methods = part(config, "speculators_config").get("proposal_methods") or [{}]
    if not isinstance(methods, list) or not isinstance(methods[0], Mapping):
        raise ValueError(f"config.json has proposal_methods={methods!r}; expected a list of objects")
    return whole_or(methods[0], "speculative_tokens", 0) or None


def _plain_layers(config: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """Layers of Llama's kind, which all see everything before them."""
    kinds, count = config.get("layer_types") or (), whole_or(config, "num_hidden_layers", 1)
    if config.get("use_sliding_window") or set(kinds[:count]) - {FULL}:
        raise ValueError(
            f"the drafter's layers have layer_types {list(kinds)} and use_sliding_window {config.get('use_sliding_window')}; "
            f"implemented: {FULL!r} without"
        )
    return (plain_spec(config),) * count


def default_config(raw: Mapping[str, Any], target: TargetConfig) -> dict[str, Any]:
    """The config.json of a fresh drafter, like RedHatAI's EAGLE-3 speculators. raw: the target's."""
    depth = target.num_hidden_layers
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **plain_config(target),
        "intermediate_size": 4 * target.hidden_size,
        "num_hidden_layers": 1,
        "rope_theta": 1_000_000.0,
        "draft_vocab_size": min(DRAFT_VOCABULARY, target.vocab_size),
        "eagle_aux_hidden_state_layer_ids": sorted({min(2, depth), depth // 2 + 1, depth}),
    }


def made_up(name: str | None, raw: Mapping[str, Any] | None, target: TargetConfig) -> dict[str, Any]:
    """The config.json of a drafter of the usual size for any target: one Llama layer as wide as the target, and a head of 32,000 tokens.
    See `Kind.released`."""
    return {
        "vocab_size": target.vocab_size,
        "draft_vocab_size": min(DRAFT_VOCABULARY, target.vocab_size // 2),
        "hidden_size": target.hidden_size,
        "intermediate_size": 4 * target.hidden_size,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
