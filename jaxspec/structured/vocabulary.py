"""What each token adds to a text, in bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxspec.text import bytes_of

if TYPE_CHECKING:
    from jaxspec.text import Tokenizer


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The bytes of every token, and what decoding does to the first one."""

    data: np.ndarray  # [V, L] uint8, padded with 0
    length: np.ndarray  # [V] int32; 0 for a token without text
    strips_space: bool  # whether the decoder leaves out a space at a text's beginning
    opening: int  # the token that opens a thought, -1 if there is none
    closing: int  # the one that closes it
    think: int  # the one that asks for thoughts, in a prompt

    def bytes_of(self, token: int) -> bytes:
        return self.data[token, : self.length[token]].tobytes()

    def begins_in_thought(self, prompt: Sequence[int]) -> bool | None:
        """Whether a text begins within a thought; None if it may begin with one."""
        marks = [token for token in prompt if token in (self.opening, self.closing)]
        if self.opening < 0 or self.closing < 0:
            return False
        if marks and marks[-1] == self.opening:
            return True
        return None if self.think in prompt and prompt[-1] != self.closing else False


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
    """The bytes of a tokenizer's tokens. vocab_size: of the model, whose last ids may have no token.

    Special tokens have no text. Other tokens count as they are decoded in the middle of a text."""
    backend = tokenizer.transformers.backend_tokenizer
    ids = [i for i in range(min(vocab_size, tokenizer.vocab_size)) if tokenizer.has_text(i)]
    # Decoders treat the first token in their own ways, so each is decoded behind another one, a letter.
    before = next((i for i in ids if i not in tokenizer.byte_ids and _is_letter(tokenizer.decode([i]))), None)
    head = [] if before is None else [before]
    start = len(tokenizer.decode(head))
    texts = backend.decode_batch([[*head, i] for i in ids], skip_special_tokens=False)
    found = [b""] * vocab_size
    for i, text in zip(ids, texts, strict=True):
        found[i] = bytes_of(backend.id_to_token(i), text[start:], i in tokenizer.byte_ids)
    length = np.asarray([len(x) for x in found], np.int32)
    width = max(8, -(-int(length.max(initial=0)) // 8) * 8)
    data = np.zeros((vocab_size, width), np.uint8)
    for row, piece in zip(data, found, strict=True):
        row[: len(piece)] = np.frombuffer(piece, np.uint8)
    spaced = next((i for i in ids if found[i].startswith(b" ") and i not in tokenizer.byte_ids), None)
    strips = spaced is not None and not tokenizer.decode([spaced]).startswith(" ")
    return Vocabulary(data, length, strips, *tokenizer.thought_ids)


def _is_letter(text: str) -> bool:
    return len(text) == 1 and text.isascii() and text.isalpha()
