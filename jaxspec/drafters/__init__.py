"""Drafters: whatever guesses tokens for a target. A kind is a file; `base` has the protocol that they share, `registry` says which
checkpoint means which kind. It may import models, sampling, checkpoint and what lies below them."""

from jaxspec.drafters.base import Drafter, NoDraft
from jaxspec.drafters.registry import REGISTRY, abstract_drafter, is_drafter, load_drafter, names_of

__all__ = ["REGISTRY", "Drafter", "NoDraft", "abstract_drafter", "is_drafter", "load_drafter", "names_of"]
