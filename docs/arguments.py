"""A griffe extension: where a docstring says what arguments mean, in sentences such as `seed: of the noise.`, they become a list."""

import re
from typing import Any

from griffe import Extension, Function


def listed(text: str, names: set[str]) -> str:
    """A docstring whose paragraphs about `names` are lists. An entry begins with names, commas between them, and a colon, at the start of
    a paragraph or behind a full stop or semicolon, and goes on to the next one or to the end of the paragraph."""
    entry = re.compile(r"(?:(?<=^)|(?<=[.;)] ))((?:\w+, )*\w+): ")

    def split(paragraph: str) -> str:
        flat = " ".join(paragraph.split())
        starts = [found for found in entry.finditer(flat) if set(found[1].split(", ")) <= names]
        if not starts or paragraph.startswith((" ", "```", "-", "|")):
            return paragraph
        ends = [found.start() for found in starts[1:]] + [len(flat)]
        items = [f"- **{found[1]}**: {flat[found.end() : end].strip()}" for found, end in zip(starts, ends, strict=True)]
        before = flat[: starts[0].start()].strip()
        return "\n".join([*([before, ""] if before else []), *items])

    return "\n\n".join(split(paragraph) for paragraph in text.split("\n\n"))


class Arguments(Extension):
    def on_function(self, *, func: Function, **_: Any) -> None:
        if func.docstring:
            func.docstring.value = listed(func.docstring.value, {parameter.name for parameter in func.parameters})
