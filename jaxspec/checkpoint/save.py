"""Writing a checkpoint in Hugging Face's layout."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.files import WEIGHTS_FILE, writing
from jaxspec.checkpoint.layout import layouts_of
from jaxspec.trees import leaves_by_path


def save_weights(folder: Path, tree: Any, config: Mapping[str, Any], *, prefix: str = "", dtype: Any = None) -> None:
    """Writes config.json and one model.safetensors in Hugging Face's layout. The host holds all of it at once.

    tree: of arrays; where it has a member `layouts`, that says how a file holds them: see `layout.layouts_of`. prefix: stands before our
    paths, such as "model." for a text-only target. dtype: what float weights are cast to; None keeps theirs. Integers are written as
    int64, as in released checkpoints. Raises OSError, which names the file that cannot be written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    leaves = leaves_by_path(tree)
    shapes, layouts = {path: tuple(leaf.shape) for path, leaf in leaves.items()}, layouts_of(tree)
    tensors = {}
    for path, leaf in leaves.items():
        value = np.asarray(leaf)
        wanted = np.int64 if value.dtype.kind == "i" else dtype or value.dtype
        for part in layouts(path, shapes)[0]:
            tensor = value[part.index].reshape(part.shape)
            tensor = tensor.astype(np.float32) - np.float32(part.plus) if part.plus else tensor
            tensors[prefix + part.key] = np.ascontiguousarray(tensor.astype(wanted))
    save_json(folder / "config.json", config)
    unfinished = _unfinished(folder / WEIGHTS_FILE)
    with writing(folder / WEIGHTS_FILE):
        _save_tensors(tensors, unfinished)
        unfinished.replace(folder / WEIGHTS_FILE)


def _save_tensors(tensors: dict[str, np.ndarray], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        if (found := re.search(r"\(os error (\d+)\)", str(error))) is None:
            raise
        raise OSError(int(found[1]), str(error)) from error


def save_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a config of a checkpoint. Raises OSError, which names the file."""
    unfinished = _unfinished(path)
    with writing(path):
        unfinished.write_text(json.dumps(dict(values), indent=2) + "\n", encoding="utf-8")
        unfinished.replace(path)


def _unfinished(path: Path) -> Path:
    """Where a file is written before it gets its name: a run that is killed must not leave a truncated file under that."""
    return path.with_name(f".{path.name}.unfinished")
