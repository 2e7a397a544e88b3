"""A tokenizer from the metadata of a GGUF file, as transformers has it.

Source: llama.cpp's `conversion/gemma.py` (`Gemma4Model.set_vocab`), which writes it: a BPE of characters with byte tokens, whose spaces are
"▁". The file does not say which tokens of text are whole ones wherever they occur, so those come from merges alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.gguf.file import Contents

MODELS = ("gemma4",)  # tokenizer.ggml.model
CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
# Marks of turns, thoughts, calls and media. llama.cpp says of some that they are text, so as to show them.
MARK = re.compile(r"<\|[^\s<>|]+\|?>|<[^\s<>|]+\|>|<(bos|eos|pad|unk|mask)>")
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown", "mask_token": "mask"}


def save_tokenizer(file: Path, contents: Contents, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template into a folder. Raises ValueError for a file without a tokenizer,
    or with one of another kind."""
    found = contents.metadata
    model, tokens, merges = (found.get(f"tokenizer.ggml.{name}") for name in ("model", "tokens", "merges"))
    if model not in MODELS or not isinstance(tokens, list) or not isinstance(merges, list):
        held = "no tokenizer" if model is None else f"a tokenizer of the kind {model!r}"
        raise ValueError(
            f"{file} has {held}; expected {MODELS[0]!r} with its tokens and merges. Put the file into a folder with the config.json and "
            "the tokenizer's files of the model that it was made from"
        )
    try:
        _made(found, tokens, merges).save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # the parser raises many types, even bare Exception
        if "(os error " in str(error):  # of a file that could not be written, as Rust says it
            raise OSError(str(error)) from error
        raise ValueError(f"{file} is damaged: its tokenizer cannot be made: {error}") from error


def _made(found: Mapping[str, Any], tokens: list[str], merges: list[str]) -> Any:
    from tokenizers import AddedToken
    from transformers import GemmaTokenizer

    pairs: Any = [tuple(merge.split(" ", 1)) for merge in merges]
    names: dict[str, Any] = {name: _token(tokens, found.get(f"tokenizer.ggml.{key}_token_id")) for name, key in SPECIAL.items()}
    made: Any = GemmaTokenizer(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=pairs,
        add_bos_token=found.get("tokenizer.ggml.add_bos_token", True) is True,
        **{name: token for name, token in names.items() if token is not None},
    )
    kinds = found.get("tokenizer.ggml.token_type") or [0] * len(tokens)
    marks, texts = [], []
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == CONTROL or MARK.fullmatch(token):
            marks.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            texts.append(AddedToken(token, special=False, normalized=False))
    made.add_tokens(texts)
    made.add_tokens(marks, special_tokens=True)
    made.chat_template = found.get("tokenizer.chat_template")
    return made


def _token(tokens: list[str], index: Any) -> str | None:
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None
