"""A document of the pocket models' corpus."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """One file, page or conversation."""

    name: str
    kind: str  # library, docs, tests or chat
    text: str
