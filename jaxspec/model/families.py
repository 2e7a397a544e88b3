"""The families of targets, by the model_type of a config.json. A new one is a file and a line here."""

from __future__ import annotations

from typing import Any

from jaxspec.model import gemma4, step3p5
from jaxspec.model.target import Family, TargetConfig

FAMILIES: tuple[Family, ...] = (gemma4.FAMILY, step3p5.FAMILY)
MODEL_TYPES = tuple(name for family in FAMILIES for name in family.model_types)
MODELS = tuple(family.model for family in FAMILIES)
MODULES_TYPES = tuple(name for family in FAMILIES for name in family.modules.model_types)


def family_named(model_type: Any) -> Family:
    """The family of a config.json's model_type. Raises ValueError for one that no family has."""
    found = next((family for family in FAMILIES if model_type in family.model_types), None)
    if found is None:
        raise ValueError(f"model_type is {model_type!r}; a target has one of {', '.join(MODEL_TYPES)}")
    return found


def family_of(config: TargetConfig) -> Family:
    """The family that a config is of. Raises TypeError for an object that is no target's config."""
    found = next((family for family in FAMILIES if isinstance(config, family.config)), None)
    if found is None:
        raise TypeError(f"config is of type {type(config).__name__}; expected one of {', '.join(f.config.__name__ for f in FAMILIES)}")
    return found


def family_of_modules(model_type: Any) -> Family:
    """The family whose MTP modules a config.json of this model_type tells of, that of modules alone or a target's with modules. Raises
    ValueError if there is none."""
    found = next((family for family in FAMILIES if model_type in (*family.modules.model_types, *family.model_types)), None)
    if found is None:
        raise ValueError(f"model_type is {model_type!r}; MTP modules have one of {', '.join(map(repr, MODULES_TYPES))}")
    return found
