"""What people bring that is no checkpoint for here, by what it is: told before anything is downloaded, planned or read.

Quantised formats that are not served are refused by `formats`, model types by who reads the config.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONVERTED, INDEX_FILE, WEIGHTS_FILE, pickled_weights, refuse_pickle

LFS = b"version https://git-lfs"
MLX = "expected a checkpoint in Hugging Face's layout: take the model that it was made from, with quantize='int4' or 'int8'"


def refuse_file(path: Path) -> None:
    """Raises ValueError for a file that was given in place of a folder."""
    raise ValueError(f"{str(path)!r} is a file; expected the folder that holds it and its config.json")


def refuse_foreign(folder: Path, name: str) -> None:
    """Raises ValueError for a folder that is known to hold no checkpoint that is read here, by what it holds, and for files that have
    not been fetched. name: what the user called it."""
    there = {path.name for path in folder.iterdir()}
    if not there & {WEIGHTS_FILE, INDEX_FILE, CONVERTED}:
        if ADAPTER_CONFIG in there and ("config.json" not in there or ADAPTER_WEIGHTS in there):
            about = _object((folder / ADAPTER_CONFIG).read_bytes())
            if "peft_type" not in about and "fine_tune_type" in about:
                raise ValueError(f"{name!r} is an adapter for MLX; {MLX}")
            kind, base = about.get("peft_type"), about.get("base_model_name_or_path") or "TARGET"
            raise ValueError(
                f"{name!r} is an adapter ({kind}) and no model of its own; expected the model that it was made for and the adapter beside "
                f"it: load({base!r}, adapter={name!r}), or jaxspec convert {base} DST --adapter {name}"
            )
        pickles = pickled_weights(there)
        if pickles and not any(file.endswith(".safetensors") for file in there):
            raise ValueError(refuse_pickle(pickles))
    pointer = next(
        (file for file in sorted(there) if file.endswith((".safetensors", "tokenizer.json")) and _is_pointer(folder / file)), None
    )
    if pointer is not None:
        raise ValueError(
            f"{folder / pointer} is a Git LFS pointer and not the file itself, which has not been fetched; run `git lfs pull` in {folder}"
        )
    if _is_mlx(folder, there):
        raise ValueError(f"{name!r} is a model for MLX; {MLX}")


def _is_pointer(file: Path) -> bool:
    if not file.is_file() or file.stat().st_size >= 1024:
        return False
    with open(file, "rb") as opened:
        return opened.read(len(LFS)) == LFS


def _is_mlx(folder: Path, there: set[str]) -> bool:
    """MLX writes how it quantised into `quantization`, and its name into the metadata of the weights."""
    if "config.json" in there:
        found = _object((folder / "config.json").read_bytes()).get("quantization")
        if isinstance(found, dict) and {"group_size", "bits"} <= found.keys():
            return True
    weights = (folder / file for file in sorted(there) if file.endswith(".safetensors"))
    return any(_metadata(file).get("format") == "mlx" for file in weights if file.is_file())


def _metadata(file: Path) -> dict[str, Any]:
    """The metadata of a safetensors file."""
    with open(file, "rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = _object(opened.read(length)) if length <= file.stat().st_size else {}
    found = header.get("__metadata__")
    return found if isinstance(found, dict) else {}


def _object(text: bytes) -> dict[str, Any]:
    """The object in a JSON text, {} if there is none: whoever reads the file for its contents says what is wrong with it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
