"""What the pocket models' corpus is made of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Document:
    """One file, page or conversation. `kind` is library, docs, tests or chat."""

    name: str
    kind: str
    text: str
