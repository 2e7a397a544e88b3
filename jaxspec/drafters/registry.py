"""The kinds of drafters that are known, which of them a checkpoint is, and drafters from checkpoints and back."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxspec import checkpoint
from jaxspec.checkpoint import safetensors
from jaxspec.checkpoint.files import CONVERTED, DRAFTER
from jaxspec.checkpoint.hub import HUB, Hub
from jaxspec.checkpoint.quantisation import Quantisation
from jaxspec.drafters import assistant, base, dflash, dflash2, draft_model, dspark, eagle3, mtp_modules, ngram
from jaxspec.drafters.base import Drafter, fitted
from jaxspec.drafters.kind import Kind
from jaxspec.drafters.quantising import asked_quantisation, checkpoint_part, quantised, stored_quantisation, with_checkpoint_part
from jaxspec.model.families import MODEL_TYPES
from jaxspec.model.target import TargetConfig
from jaxspec.trees import is_packed

# By name, in the order in which they were registered.
KINDS: dict[str, Kind] = {}
SAME = "same"  # what stands for the drafter in a target's own checkpoint
# By what config.json calls them.
REGISTRY: dict[str, Kind] = {}


def register(kind: Kind) -> None:
    """Makes a kind known to loading, benchmarks and training. A kind that is written again, as when a notebook's cell is run twice, takes
    the place of the one before. Raises ValueError for a name that another kind has."""
    before = KINDS.get(kind.name, kind)
    again = (before.made.__module__, before.made.__qualname__) == (kind.made.__module__, kind.made.__qualname__)
    for name, kinds in [(kind.name, KINDS), *((name, REGISTRY) for name in kind.config_names)]:
        if kinds.get(name, kind) is not kind and not (again and kinds[name] is before):
            raise ValueError(f"the kind {kind.name!r} of {kind.made.__name__} has the name {name!r}, which {kinds[name].made.__name__} has")
    for name in before.config_names:
        REGISTRY.pop(name, None)
    KINDS[kind.name] = kind
    REGISTRY.update(dict.fromkeys(kind.config_names, kind))


for _module in (base, ngram, assistant, dflash, dflash2, dspark, eagle3, mtp_modules, draft_model):
    register(_module.KIND)


def trainable() -> dict[str, Kind]:
    """The kinds that can be trained, by name."""
    return {name: kind for name, kind in KINDS.items() if kind.objective is not None}


def without_checkpoints() -> dict[str, Kind]:
    """The kinds whose drafters have no checkpoints, by name."""
    return {name: kind for name, kind in KINDS.items() if not kind.config_names}


def names_of(config: Mapping[str, Any]) -> list[str]:
    """What a config.json calls its model, what says most first: many drafters have the model_type of the decoder that they resemble."""
    names = config.get("architectures")
    names = names if isinstance(names, list) else [names]
    return [x for x in (*names, config.get("speculators_model_type"), config.get("model_type")) if isinstance(x, str)]


def kind_of(config: Mapping[str, Any]) -> Kind | None:
    """The kind of a config.json, or None of one that is no drafter's. A target's that tells of a drafter in the same checkpoint is that
    drafter's, and no draft model's."""
    within = next((kind for kind in KINDS.values() if kind.within(config)), None)
    return within or next((REGISTRY[name] for name in names_of(config) if name in REGISTRY), None)


def resolve(drafter: str | os.PathLike[str], target: Path, hub: Hub = HUB) -> Path:
    """The folder of a drafter's checkpoint: of a name as `checkpoint.resolve` takes it, or for "same" the target's, which then holds both.
    Of a converted target it is the one that was converted with it. Raises what that raises, and ValueError for a target without a drafter
    in its checkpoint."""
    if drafter != SAME:
        return checkpoint.resolve(drafter, hub)
    if (target / CONVERTED).exists():
        if not (target / DRAFTER).is_dir():
            raise ValueError(f"drafter is {SAME!r}, but {target} was converted without a drafter; expected the name of one")
        return target / DRAFTER
    config = checkpoint.read_config(target)
    if not any(kind.within(config) for kind in KINDS.values()):
        raise ValueError(f"drafter is {SAME!r}, but the config.json in {target} tells of no drafter in the target's checkpoint")
    return target


def is_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a drafter which can be nothing else."""
    return any(name in REGISTRY and name not in MODEL_TYPES for name in names_of(config))


def abstract_drafter(folder: Path, target: TargetConfig, dtype: Any, quantize: str | None = None) -> Any:
    """The drafter in a checkpoint folder as a tree of ShapeDtypeStructs, bound to its target. quantize: `quantize_drafter` of `load`.

    Raises ValueError if the checkpoint is no drafter, or does not fit the target, and as `quantising.asked_quantisation` does.
    """
    return planned(folder, target, dtype, quantize)[0]


def planned(folder: Path, target: TargetConfig, dtype: Any, quantize: str | None = None) -> tuple[Any, Quantisation | None]:
    """(what `abstract_drafter` gives, how its checkpoint is read: see `checkpoint.load_weights`)."""
    config = checkpoint.read_config(folder)
    kind = kind_of(config)
    if kind is None:
        found, known = config.get("model_type"), ", ".join(map(repr, REGISTRY))
        others = [name for name in names_of(config) if name != found]
        named = f" ({', '.join(others)})" if others else ""
        raise ValueError(f"the drafter {folder} has model_type {found!r}{named}; expected one of {known}")
    try:
        drafter = fitted(kind.from_checkpoint(folder, config, target, dtype), target)
        stored = stored_quantisation(folder, config, drafter)
        found = quantised(drafter, stored)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the drafter {folder} cannot be used with this target: {error}") from error
    if quantize is None:
        return found, stored
    # Else the config is of the cache alone, or only the target in the same checkpoint is quantised.
    already = stored if any(map(is_packed, jax.tree.leaves(found, is_leaf=is_packed))) else None
    asked = asked_quantisation(quantize, drafter, config, dtype, folder, already)
    return quantised(drafter, asked), asked


def load_drafter(
    folder: Path,
    target: TargetConfig,
    dtype: Any,
    *,
    quantize: str | None = None,
    place: Callable[[Any], Any] = lambda abstract: abstract,
    progress: bool = True,
) -> Drafter:
    """The drafter in a checkpoint folder. quantize: `quantize_drafter` of `load`. place: gives the leaves of an abstract tree their
    shardings.

    Raises ValueError as `abstract_drafter` and `checkpoint.load_weights` do, and for weights that can be no such drafter's."""
    drafter, quantisation = planned(folder, target, dtype, quantize)
    drafter = place(drafter)
    settings = {"prefixes": getattr(drafter, "key_prefixes", ("",)), "skip": getattr(drafter, "unread", ()), "quantisation": quantisation}
    weights = checkpoint.load_weights(folder, checkpoint_part(drafter), **settings, progress=progress)
    drafter = with_checkpoint_part(drafter, weights)
    check = getattr(drafter, "check_weights", None)
    if check is not None:
        check(folder)
    return drafter


def save_drafter(folder: Path, drafter: Any, config: Mapping[str, Any], dtype: Any = None) -> None:
    """Writes a drafter's config.json and weights as `load_drafter` reads them. dtype: of float weights, by default their own."""
    decided = getattr(drafter, "decided", None)
    drafter, config = (drafter, config) if decided is None else decided(config)
    prefixes = getattr(drafter, "key_prefixes", ("",))
    prefix = prefixes[0] if "text_config" in config else prefixes[-1]
    checkpoint.save_weights(folder, checkpoint_part(drafter), config, prefix=prefix, dtype=dtype)


def save_trained(folder: Path, drafter: Any, config: Mapping[str, Any], generation: Mapping[str, Any]) -> None:
    """Writes a drafter as its checkpoint has it: float weights in config.json's dtype, "bfloat16" or else float32, and
    generation_config.json where there is anything in it. A file is replaced when all of it is written."""
    dtype = safetensors.FLOATS["BF16"] if config.get("dtype", config.get("torch_dtype")) == "bfloat16" else np.float32
    save_drafter(folder, drafter, config, dtype)
    if generation:
        checkpoint.save_json(folder / "generation_config.json", generation)
