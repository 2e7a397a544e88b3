"""The tensors of a checkpoint's folder, in whatever files they are."""

from __future__ import annotations

from pathlib import Path

from jaxspec.checkpoint import gguf, safetensors
from jaxspec.checkpoint.files import INDEX_FILE, WEIGHTS_FILE
from jaxspec.checkpoint.safetensors import Stored


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file that holds a folder's weights, None where they are in other files. Raises as `gguf.model_in` does."""
    if (folder / WEIGHTS_FILE).exists() or (folder / INDEX_FILE).exists():
        return None
    return gguf.model_in(folder)


def read_folder(folder: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint, by key, unread: those of its safetensors files, or of a GGUF file. Raises as
    `safetensors.read_folder` and `gguf.read_model` do, and FileNotFoundError for a folder that is not there."""
    file = gguf_in(folder) if folder.is_dir() else None
    return safetensors.read_folder(folder) if file is None else gguf.read_model(file)
