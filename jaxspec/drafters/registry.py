"""Which checkpoint means which drafter: the kind is read from its config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import checkpoint
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.drafters import dflash, draft_model, eagle3
from jaxspec.drafters import mtp_modules as mtp
from jaxspec.drafters.base import Drafter, fitted
from jaxspec.model import gemma4
from jaxspec.model.config import TARGET_TYPES, AssistantConfig, Gemma4Config


def _assistant(folder: Path, config: Mapping[str, Any], target: Gemma4Config, dtype: Any) -> gemma4_mtp.Gemma4MTP:
    bound = gemma4_mtp.bind(AssistantConfig.from_hf(config), target)
    suppressed = checkpoint.read_generation_config(folder).get("suppress_tokens") or ()
    return gemma4_mtp.abstract(bound, dtype, tuple(suppressed))


# What config.json calls the drafter -> (folder, config, target's config, dtype) -> the drafter as a tree of ShapeDtypeStructs.
# Whether it fits the target, its `bind` says, which is called behind each.
REGISTRY: dict[str, Callable[[Path, Mapping[str, Any], Gemma4Config, Any], Any]] = {
    "gemma4_assistant": _assistant,
    "gemma4_unified_assistant": _assistant,
    **dict.fromkeys(dflash.NAMES, dflash.from_checkpoint),
    **dict.fromkeys(eagle3.NAMES, eagle3.from_checkpoint),
    mtp.MODEL_TYPE: mtp.from_checkpoint,
    **dict.fromkeys(TARGET_TYPES, draft_model.from_checkpoint),
}


def names_of(config: Mapping[str, Any]) -> list[Any]:
    """What a config.json calls its model, what says most first: many drafters have the model_type of the decoder that they resemble."""
    return [*(config.get("architectures") or ()), config.get("speculators_model_type"), config.get("model_type")]


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a drafter which can be nothing else."""
    return any(name in REGISTRY and name not in TARGET_TYPES for name in names_of(config))


def abstract_drafter(folder: Path, target: Gemma4Config, dtype: Any) -> Any:
    """The drafter in a checkpoint folder as a tree of ShapeDtypeStructs, bound to its target.

    Raises ValueError if the checkpoint is no drafter, or does not fit the target.
    """
    config = checkpoint.read_config(folder)
    make = next((REGISTRY[name] for name in names_of(config) if name in REGISTRY), None)
    if make is None:
        kind, architectures = config.get("model_type"), config.get("architectures")
        known = ", ".join(map(repr, REGISTRY))
        named = f" ({', '.join(architectures)})" if architectures else ""
        raise ValueError(f"the drafter {folder} has model_type {kind!r}{named}; expected one of {known}")
    try:
        return fitted(make(folder, config, target, dtype), target)
    except ValueError as error:
        raise ValueError(f"the drafter {folder} cannot be used with this target: {error}") from error


def load_drafter(
    folder: Path, target: Gemma4Config, dtype: Any, *, place: Callable[[Any], Any] = lambda abstract: abstract, progress: bool = True
) -> Drafter:
    """The drafter in a checkpoint folder. place: gives the leaves of an abstract tree their shardings."""
    tree = place(abstract_drafter(folder, target, dtype))
    if isinstance(tree, draft_model.DraftModel):  # a target's checkpoint
        prefixes, skip = gemma4.CHECKPOINT_PREFIXES, gemma4.TOWERS
        model = checkpoint.load_weights(folder, tree.model, prefixes=prefixes, skip=skip, progress=progress)
        return dataclasses.replace(tree, model=model)
    skip = tree.config.unread if isinstance(tree, dflash.DFlash | eagle3.Eagle3) else ()
    drafter = checkpoint.load_weights(folder, tree, skip=skip, progress=progress)
    _check_token_ids(folder, drafter)
    return drafter


def _check_token_ids(folder: Path, drafter: Any) -> None:
    """Raises ValueError for a table of token ids that is none: guesses would be other tokens than the drafter means."""
    if isinstance(drafter, gemma4_mtp.Gemma4MTP) and drafter.masked_embedding is not None:
        ids, vocab = np.asarray(drafter.masked_embedding.token_ordering), drafter.config.text.vocab_size
        if ids.min() < 0 or ids.max() >= vocab:
            raise ValueError(f"token_ordering of the drafter {folder} has ids {ids.min()} .. {ids.max()}; expected 0 .. {vocab - 1}")
    if isinstance(drafter, dflash.DFlash | eagle3.Eagle3) and drafter.d2t is not None:
        ids, vocab = np.asarray(drafter.d2t) + np.arange(drafter.d2t.size), drafter.config.vocab_size
        if len(np.unique(ids)) < ids.size or ids.min() < 0 or ids.max() >= vocab:
            raise ValueError(
                f"d2t of the drafter {folder}, which is what to add to each draft token's own number, gives {len(np.unique(ids))} "
                f"tokens, {ids.min()} .. {ids.max()}; expected {ids.size} different ones below {vocab}"
            )
