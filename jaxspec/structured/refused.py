"""The error for what has no regular form, and JSON pointers, which say where it stands."""

from __future__ import annotations

from typing import NoReturn


def refuse(what: str, at: str) -> NoReturn:
    """Raises ValueError. what: the feature, and what was expected. at: the JSON pointer of its place in the schema, "" for the root."""
    raise ValueError(f"the schema has {what} at #{at}")


def below(at: str, *keys: str | int) -> str:
    """The JSON pointer (RFC 6901) of a member of what is at a pointer."""
    return at + "".join("/" + str(key).replace("~", "~0").replace("/", "~1") for key in keys)
