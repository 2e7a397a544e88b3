"""GGUF files as folders: a model's file brings its config and tokenizer with it, which a checkpoint's folder has as files."""

from __future__ import annotations

import json
import os
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path

from jaxspec.checkpoint.gguf import gemma4
from jaxspec.checkpoint.gguf.blocks import Blocks, Floats
from jaxspec.checkpoint.gguf.file import firsts, model_name, parts_of, read, read_tensors, stem_of
from jaxspec.checkpoint.gguf.names import renamed
from jaxspec.checkpoint.gguf.tokenizer import save_tokenizer
from jaxspec.checkpoint.safetensors import Stored
from jaxspec.checks import cache_folder, folder_of_this_process

VERSION = 2  # of what is written into a folder
LONGEST = 60  # characters of a file's name that the name of its folder has
CONFIG = "config.json"
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Matrices that share a leaf: where one of them is float, all are read so.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def model_in(folder: Path) -> Path | None:
    """The file of the model in a folder, the first of its parts, None if there is none. Raises ValueError if there are several."""
    found = firsts(path.name for path in folder.iterdir() if not path.is_dir())
    if len(found) > 1:
        raise ValueError(f"{folder} holds {len(found)} models ({', '.join(found)}); expected one, or the name of one of these files")
    return folder / found[0] if found else None


def folder_of(file: Path) -> Path:
    """A folder with the config and the tokenizer of a model's file, and links to it and its other parts. It is kept with the compiled
    programs for the next time, if that place takes it. Raises ValueError for a file that is damaged or holds a model that is not served."""
    parts = [part.absolute() for part in parts_of(file)]
    stats = [part.stat() for part in parts]
    about = [VERSION, *((str(part), stat.st_size, stat.st_mtime_ns) for part, stat in zip(parts, stats, strict=True))]
    name = f"{stem_of(file.name)[:LONGEST]}-{zlib.crc32(repr(about).encode()):08x}"
    try:
        return _made(cache_folder() / "gguf" / name, parts)
    except OSError:  # it cannot be written to or read, is full or takes no links
        return _made(folder_of_this_process() / name, parts)


def _made(kept: Path, parts: list[Path]) -> Path:
    """The folder of that path, made if it is not there. Raises OSError where that place does not take it, and as `folder_of` does."""
    # Listing raises for a folder of somebody else's that may not be read.
    if kept.is_dir() and CONFIG in os.listdir(kept):
        return kept
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, ignore_cleanup_errors=True) as own:
        made = Path(own) / kept.name  # within it, as others may not read the outer one
        made.mkdir()
        _fill(made, parts)
        try:
            made.rename(kept)
        except OSError:
            if not (kept / CONFIG).is_file():  # else another process was first
                raise
    return kept


def _fill(folder: Path, parts: list[Path]) -> None:
    first = read(parts[0])
    architecture = first.metadata.get("general.architecture")
    if architecture != gemma4.ARCHITECTURE:
        raise ValueError(f"{parts[0]} is a GGUF of the architecture {architecture!r}; served is {gemma4.ARCHITECTURE!r}")
    contents = first._replace(tensors=read_tensors(parts))
    configs = {CONFIG: gemma4.config_of(parts[0], contents), "generation_config.json": gemma4.generation_of(contents)}
    for name, config in configs.items():
        (folder / name).write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_tokenizer(parts[0], contents, folder)
    for part in parts:
        os.symlink(part, folder / model_name(part.name))


def read_model(file: Path) -> dict[str, Stored]:
    """The tensors of a model, of which `file` is a part, by their names in Hugging Face's layout, unread. Tensors of blocks that are read
    as floats are so here: matrices that share a leaf with a float one, and a token embedding beside which there is a head, with that head,
    so that the two can be compared."""
    found = renamed(read_tensors(parts_of(file)))
    apart = (TABLE, HEAD) if HEAD in found else ()
    floats = {key for key, tensor in found.items() if isinstance(tensor, Blocks) and (key in apart or _has_float(key, found))}
    return {key: Floats.of(tensor) if key in floats and isinstance(tensor, Blocks) else tensor for key, tensor in found.items()}


def beside(key: str, keys: Iterable[str]) -> list[str]:
    """The keys of the matrices that share a leaf with that of this key, itself among them."""
    stem, _, name = key.removesuffix(".weight").rpartition(".")
    names = next((names for names in TOGETHER if name in names), (name,))
    return [other for each in names if (other := f"{stem}.{each}.weight" if key.endswith(".weight") else key) in keys]


def _has_float(key: str, found: dict[str, Stored]) -> bool:
    return any(not isinstance(found[other], Blocks) for other in beside(key, found.keys()))
