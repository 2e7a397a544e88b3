"""The files of a checkpoint: their names, and the JSON in them."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

MODELOPT_CONFIG = "hf_quant_config.json"  # where ModelOpt writes how it quantised a checkpoint
WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
CONVERTED = "jaxspec.json"  # marks a folder that `jaxspec convert` wrote
DRAFTER = "drafter"  # the folder in it of a drafter that was converted with its target
IMAGES, AUDIO = "images", "audio"  # and those of the target's image and audio towers, in the layout of a release
# Any may say how images, sounds or videos are prepared: the first of all of them, the second of images or sounds, the third of videos.
PROCESSORS = PROCESSOR, PREPROCESSOR, VIDEOS = "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # PEFT's
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl")
SUFFIX = ".safetensors"
SHOWN = 8  # files of a folder, in an error
# How pickles begin that trainers and accelerate leave beside weights.
TRAINING = tuple("optimizer scheduler scaler rng_state training_args random_states sampler dl_state_dict custom_checkpoint".split())
PART = re.compile(r"^(.+)-\d+-of-\d+(\.\w+)$")  # a file that holds a part of the weights


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
        there = sorted(found.name for found in path.parent.iterdir()) if path.parent.is_dir() else []
        found = ", ".join(there[:SHOWN]) + (", ..." if len(there) > SHOWN else "")
        raise FileNotFoundError(f"{path.parent} has no {path.name}; found {found or 'nothing'}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def refuse_to_replace(folder: Path) -> None:
    """Raises FileExistsError where a checkpoint that is to be written into a folder would replace another, and NotADirectoryError for a
    file."""
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; expected a folder, or nothing")
    if folder.is_dir() and (there := [path.name for path in folder.iterdir() if path.name == "config.json" or path.suffix == SUFFIX]):
        raise FileExistsError(f"{folder} holds another checkpoint ({', '.join(sorted(there)[:SHOWN])}), which stays; take another folder")


def lock(file: Any, out: Path) -> None:
    """Locks an open file until it is closed. Raises ValueError if another process writes `out`, whose file it is."""
    import fcntl  # which only systems with POSIX have

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{out} is being written by another process; wait for it, or name another output") from error


@contextlib.contextmanager
def writing(path: Any, hint: str = "") -> Iterator[None]:
    """While this lasts, an OSError says that the file at `path` cannot be written, and why. hint: what else the user should know."""
    try:
        yield
    except OSError as error:
        reason = error.strerror if error.errno is None else os.strerror(error.errno)
        raise OSError(error.errno, f"{path} cannot be written: {reason}{hint and '; '}{hint}") from error


def pickled_weights(names: Iterable[str]) -> list[str]:
    """Those of the names of files that are pickles of weights, sorted."""
    return sorted(name for name in names if name.endswith(PICKLES) and not name.startswith(TRAINING))


def refuse_pickle(names: Sequence[str], instead: str = WEIGHTS_FILE) -> str:
    """The error message for the first of these files, which are pickles, with the others that it is one of several parts with. instead:
    the name that the weights' file should have."""
    name, *others = names
    part = PART.match(name)
    parts = [name, *(other for other in others if part and (found := PART.match(other)) and found.groups() == part.groups())]
    read = f"torch.load('{name}', weights_only=True).items()"
    if len(parts) > 1:
        read = f"(pair for name in {parts} for pair in torch.load(name, weights_only=True).items())"
    # Copies, since safetensors refuses tensors that share memory, as embedding and head do.
    convert = f"save_file({{k: v.contiguous().clone() for k, v in {read}}}, '{instead}', {{'format': 'pt'}})"
    return (
        f"{name} is a pickle, which can run code when it is read; expected safetensors. To convert it, where you trust it: "
        f'python -c "import torch; from safetensors.torch import save_file; {convert}"'
    )


def unmerged(names: Iterable[str]) -> str:
    """What makes weights of what a trainer left of several processes, or an empty text. names: of the files and folders that are there."""
    there = set(names)
    if "zero_to_fp32.py" in there:
        return " (DeepSpeed's zero_to_fp32.py there merges what its processes saved)"
    if any("_fsdp_" in name or name.endswith(".distcp") for name in there):
        return " (`accelerate merge-weights` merges what processes with FSDP saved)"
    return ""
