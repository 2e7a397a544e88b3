"""Names to folders: bundled models, local folders and the Hugging Face hub; and the JSON files in them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

# mask_embedding.pt is a pickle: we download it so that loading refuses it, where it would otherwise be missed silently.
DOWNLOADED = ["*.json", "*.safetensors", "*.jinja", "tokenizer*", "mask_embedding.pt"]
MODELOPT_CONFIG = "hf_quant_config.json"  # where ModelOpt writes how it quantised a checkpoint
CONFIGS = ["config.json", "generation_config.json", MODELOPT_CONFIG]
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
CONVERTED = "jaxspec.json"  # marks a folder that `jaxspec convert` wrote
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")


def resolve(name: str | os.PathLike[str], *, weights: bool = True) -> Path:
    """The folder of a checkpoint.

    name: a bundled name such as "pocket", a local folder, or a hub id (owner/name), which is downloaded. weights: False downloads the
    configs alone. Raises FileNotFoundError if the name is none of these or cannot be downloaded, ValueError for a single file.
    """
    text = os.fspath(name)
    found = bundled()
    if text in found:
        return found[text]
    path = Path(text).expanduser()
    if text and path.is_dir():
        return path
    if path.suffix in PICKLES:
        raise ValueError(refuse_pickle(path.name))
    if path.is_file():
        raise ValueError(f"{text!r} is a file; expected the folder that holds it and its config.json")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", text):
        raise FileNotFoundError(
            f"{text!r} is neither a folder, nor a hub id (owner/name), nor bundled ({', '.join(sorted(found))}), nor the drafter 'ngram'"
        )
    import huggingface_hub  # here, because it takes a while to import and only downloads need it

    try:
        folder = huggingface_hub.snapshot_download(text, allow_patterns=DOWNLOADED if weights else CONFIGS, ignore_patterns=["*/*"])
    except (OSError, ValueError) as error:
        raise FileNotFoundError(f"{text!r} is not a folder, and the hub did not provide a model of that id: {error}") from error
    return Path(folder)


def bundled() -> dict[str, Path]:
    """The bundled checkpoints, by name: pocket/target is "pocket", and pocket/X is "pocket-X" if it has a config.json."""
    root = Path(__file__).parent.parent / "pocket"
    folders = (path.parent for path in root.glob("*/config.json"))
    return {"pocket": root / "target"} | {f"pocket-{path.name}": path for path in folders if path.name != "target"}


def read_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's config.json. Raises FileNotFoundError if there is none, ValueError if it is no JSON object."""
    return read_json(Path(folder) / "config.json")


def read_generation_config(folder: Path) -> dict[str, Any]:
    """A checkpoint's generation_config.json, or {} if there is none. Raises ValueError if it is no JSON object."""
    path = Path(folder) / "generation_config.json"
    return read_json(path) if path.exists() else {}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises FileNotFoundError if there is no such file, ValueError if it is no JSON object."""
    if not path.is_file():
        raise FileNotFoundError(f"{path.parent} has no {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def refuse_pickle(name: str) -> str:
    """The error message for a file that is a pickle. name: the file's."""
    convert = f"save_file(torch.load('{name}', weights_only=True), '{WEIGHTS_FILE}', {{'format': 'pt'}})"
    return (
        f"{name} is a pickle, which can run code when it is read; expected safetensors. To convert it, where you trust it: "
        f'python -c "import torch; from safetensors.torch import save_file; {convert}"'
    )
