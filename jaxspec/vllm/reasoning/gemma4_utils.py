"""Where vLLM has a function that takes the thoughts out of a text of Gemma 4. `Completion.message` does not need it."""

from __future__ import annotations

from jaxspec.engine.answers import LABEL
from jaxspec.text import THOUGHTS

ENDS = ("<eos>", "<turn|>")  # the last first


def parse_thinking_output(text: str) -> dict[str, str | None]:
    """The "thinking" in a text that was decoded with its special tokens, None if it has none, and the "answer" behind it."""
    opening, closing = THOUGHTS
    thought, end, answer = text.partition(closing)
    if end:
        thought = thought.partition(opening)[2] if opening in thought else thought
    else:
        answer = text.removeprefix(LABEL)  # which models write without the tokens, too
    answer = answer.strip()
    for mark in ENDS:
        answer = answer.removesuffix(mark).rstrip()
    return {"thinking": thought.lstrip().removeprefix(LABEL).strip() if end else None, "answer": answer}
