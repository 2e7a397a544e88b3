"""What the project has to know of a kind of drafter before there is one: its names, and how one of its configs becomes a drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxspec.drafters.training import Objective
from jaxspec.model.target import TargetConfig


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of drafter, which the file of its class defines as `KIND` and `registry.register` makes known. What is asked of a drafter
    that is there, are members of the class: see `base.Drafter`."""

    # What `jaxspec train --drafter-kind` and `jaxspec bench --drafter` call it.
    name: str
    # What config.json calls it: entries of `architectures`, or values of `speculators_model_type` or `model_type`. Empty for
    # drafters that have no checkpoints.
    config_names: tuple[str, ...]
    # The class of its drafters. `made()` gives the drafter of a kind without checkpoints.
    made: type
    # (folder, config.json, the target's config, dtype) -> the drafter as a tree of ShapeDtypeStructs, whose paths are the checkpoint's
    # keys. folder: the checkpoint's, or None of a config that has no weights yet. Raises ValueError for a config that cannot be used;
    # whether the drafter fits the target, its `bind` says, which is called behind it.
    from_checkpoint: Callable[[Path | None, Mapping[str, Any], TargetConfig, Any], Any]

    # Whether a target's config.json tells of a drafter of this kind in the target's own checkpoint, which then is that drafter's too.
    within: Callable[[Mapping[str, Any]], bool] = lambda config: False

    # Bench: (name of a released target, its config.json, its config) -> config.json of the drafter that was released for it, or of a
    # made-up one; None if there is none. For a target's folder, name and config.json are None.
    released: Callable[[str | None, Mapping[str, Any] | None, TargetConfig], Mapping[str, Any] | None] | None = None
    # What `jaxspec bench --drafter` calls it, where that is not `name`.
    bench_name: str | None = None

    # Training: what it is trained towards, None for a kind that cannot be trained. Its class then has `guesses`.
    objective: Objective | None = None
    # (the target's config.json, its config) -> config.json of a fresh drafter of a size that suits the target. None if one has to be
    # given.
    default_config: Callable[[Mapping[str, Any], TargetConfig], dict[str, Any]] | None = None
    # The generation_config.json of a fresh drafter, which is written where there is anything in it.
    generation: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def kind_without_weights(name: str, made: type) -> Kind:
    """The kind of a class whose drafters have no weights and no checkpoints, and serve every target."""
    return Kind(
        name=name,
        config_names=(),
        made=made,
        from_checkpoint=lambda folder, config, target, dtype: made(),
        released=lambda name, raw, target: {},
    )
