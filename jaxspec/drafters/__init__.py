"""Drafters: whatever guesses tokens for a target. A kind is a file; `base` has the protocol that they share, `kind` what is known of a
kind before there is a drafter, `registry` the kinds that there are. It may import models, sampling, checkpoint and what lies below
them."""

from jaxspec.drafters.base import Drafter, NoDraft
from jaxspec.drafters.checking import check
from jaxspec.drafters.kind import Kind
from jaxspec.drafters.quantising import checkpoint_part
from jaxspec.drafters.registry import (
    KINDS,
    REGISTRY,
    abstract_drafter,
    is_drafter,
    load_drafter,
    names_of,
    planned,
    register,
    resolve,
    save_drafter,
    without_checkpoints,
)

__all__ = [
    "KINDS",
    "REGISTRY",
    "Drafter",
    "Kind",
    "NoDraft",
    "abstract_drafter",
    "check",
    "checkpoint_part",
    "is_drafter",
    "load_drafter",
    "names_of",
    "planned",
    "register",
    "resolve",
    "save_drafter",
    "without_checkpoints",
]
