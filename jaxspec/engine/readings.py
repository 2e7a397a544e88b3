"""A drafter whose config.json leaves open how its checkpoint is read: both readings are tried on the first rounds of an LLM."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import numpy as np

from jaxspec.decode.accept import COUPLED
from jaxspec.engine.settings import Settings
from jaxspec.engine.trials import Comparison, Trial
from jaxspec.sharding.placement import Placement
from jaxspec.sharding.specs import WHOLE


def comparison_of(drafter: Any, settings: Settings) -> Comparison | None:
    """The comparison of a drafter's two readings; None for a drafter that can be read in one way only, or where nothing is drafted.

    With an acceptance rule by which texts depend on the drafter there is none either: the drafter is used as it is, and a warning says
    so. With made-up acceptance it does not matter."""
    names, rule = getattr(drafter, "readings", ()), settings.accept.name
    if not names or not settings.num_draft_tokens or rule == "synthetic":
        return None
    if rule == COUPLED.name:
        return Comparison(*names)
    warnings.warn(
        f"the drafter's config.json leaves open {' or '.join(names)}. Only with accept={COUPLED.name!r} can both be tried, and it is "
        f"{rule!r}: {names[0]} is taken. Add the one that the drafter was trained with to its config.json",
        stacklevel=3,
    )
    return None


def trial_of(drafter: Any, placement: Placement, comparison: Comparison) -> Trial:
    """The trial of both readings on a data shard. drafter: the shard's weights. placement: the shard's."""
    sharding = placement.sharding(WHOLE)
    return Trial({name: drafter.read_as(jax.device_put(np.int32(i), sharding)) for i, name in enumerate(drafter.readings)}, comparison)
