"""Texts to train on: files of text, JSON lines, conversations or token ids, cut into rows of one length."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import jsonl
from jaxspec.checks import expanded
from jaxspec.learning.losses import Batch
from jaxspec.text import Tokenizer

ANSWERS = ("assistant", "model")


def read(paths: Sequence[str | os.PathLike[str]], tokenizer: Tokenizer, *, length: int, vocab_size: int) -> Batch:
    """All texts of some files, as rows of at most `length` tokens.

    A `.jsonl` file has an object a line: {"text": ...}, or {"messages": [...]} with the roles and contents of a conversation, which
    trains on its last answer alone. A `.npy` file is a stream of token ids. Any other file is one text in UTF-8. A text that is longer
    than a row continues in the next one. vocab_size: the target's.

    Raises FileNotFoundError for a missing file; ValueError, naming file and line, for any other content and for ids outside the
    vocabulary; ValueError if no text has 3 tokens.
    """
    rows: list[tuple[np.ndarray, int]] = []
    for path in map(expanded, paths):
        if not path.is_file():
            raise FileNotFoundError(f"data file {path} {'is a folder' if path.is_dir() else 'does not exist'}")
        for where, ids, first in _texts(path, tokenizer):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
                raise ValueError(f"{where} has token ids {ids.min()} .. {ids.max()}; this target has 0 .. {vocab_size - 1}")
            rows += ((ids[at : at + length], max(first - at, 0)) for at in range(0, len(ids), length))
    kept = [(ids, first) for ids, first in rows if len(ids) >= max(first, 1) + 2]
    if not kept:
        raise ValueError(f"found no text of 3 tokens or more to learn from in {', '.join(map(str, paths))}")
    return batch_of([ids for ids, _ in kept], [first for _, first in kept], length)


def batch_of(texts: Sequence[np.ndarray], first: Sequence[int], length: int) -> Batch:
    """Texts as rows of `length` tokens, padded with zeros. texts: the ids of each, [at most length]. first: see `Batch`."""
    ids = np.zeros((len(texts), length), np.int32)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text)] = text
    return Batch(ids, np.asarray(first, np.int32), np.asarray([len(text) for text in texts], np.int32))


def take_rows(texts: Batch, index: Any) -> Batch:
    """The rows at a NumPy index: a slice or an array."""
    return Batch(texts.ids[index], texts.first[index], texts.length[index])


def joined(*parts: Batch) -> Batch:
    """The rows of several batches of one row length, one after the other."""
    return Batch(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("ids", "first", "length")))


def held_back(texts: Batch) -> tuple[Batch, Batch]:
    """The rows to train on and those to hold out, which are the last fiftieth, at least one. Raises ValueError for a single row."""
    count = len(texts.ids)
    if count < 2:
        raise ValueError("the data is a single row, of which none can be held out; give more, or held_out")
    cut = count - max(1, count // 50)
    return take_rows(texts, slice(cut)), take_rows(texts, slice(cut, None))


def drawn(texts: Batch, batch: int, seed: int, *, own: Batch | None = None) -> Callable[[int], Batch]:
    """A function from a step's number to its batch: `batch` rows drawn at random, half of them from `own` if that is given."""

    def some(texts: Batch, count: int, *key: int) -> Batch:
        return take_rows(texts, np.random.default_rng([seed, *key]).integers(0, len(texts.ids), count))

    def draw(step: int) -> Batch:
        if own is None:
            return some(texts, batch, step)
        return joined(some(texts, batch - batch // 2, step), some(own, batch // 2, step, 1))

    return draw


def _texts(path: Path, tokenizer: Tokenizer) -> Iterator[tuple[str, np.ndarray, int]]:
    """Yields (place, ids, first token to learn) for each text of a file. The place is for errors."""
    if path.suffix == ".npy":
        try:
            ids = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is no array of numpy, or one of objects; expected a stream of integers") from error
        if not isinstance(ids, np.ndarray):
            raise ValueError(f"{path} holds several arrays of numpy; expected one, a stream of integers")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ValueError(f"{path} holds {ids.dtype} {list(ids.shape)}, expected a stream of integers")
        yield str(path), ids, 0
        return
    if path.suffix != ".jsonl":
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8: {error}") from error
        yield str(path), np.asarray(tokenizer.encode(text), np.int32), 0
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                ids, first = _line(jsonl.value(line), tokenizer)
            except (ValueError, TypeError) as error:
                raise ValueError(f"{where}: {error}") from error
            yield where, np.asarray(ids, np.int32), first


def _line(entry: Any, tokenizer: Tokenizer) -> tuple[list[int], int]:
    """(ids, first token to learn). Raises ValueError or TypeError for a line that is neither text nor conversation."""
    if isinstance(entry, Mapping) and isinstance(entry.get("text"), str):
        return tokenizer.encode(entry["text"]), 0
    messages = entry.get("messages") if isinstance(entry, Mapping) else None
    if not isinstance(messages, list):
        found = sorted(entry) if isinstance(entry, Mapping) else type(entry).__name__
        raise ValueError(f'found {found}; expected {{"text": ...}} or {{"messages": [...]}}')
    last = messages[-1].get("role") if messages and isinstance(messages[-1], Mapping) else None
    if last not in ANSWERS:
        raise ValueError(f"the last message has role {last!r}; expected 'assistant', whose text is learnt")
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    given = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True)
    # A template may put something in front of an answer that the model is to write, such as an empty thought, and leave it out of a
    # finished conversation. Inference has it, so training has it too: we join what is given with the rest of the finished conversation.
    same = next((i for i, (a, b) in enumerate(zip(whole, given, strict=False)) if a != b), min(len(whole), len(given)))
    return given + whole[same:], len(given)


def windows(stream: np.ndarray, length: int, batch: int, seed: int) -> Callable[[int], Batch]:
    """A function from a step's number to its batch: `batch` windows of `length` tokens at random places of a stream of token ids, [N]."""

    def draw(step: int) -> Batch:
        starts = np.random.default_rng([seed, step]).integers(0, len(stream) - length + 1, batch)
        return batch_of([stream[at : at + length] for at in starts], [0] * batch, length)

    return draw
