"""Converted checkpoints: weights stored as devices hold them, fused and in their dtype, so that loading only has to read.

A converted folder holds config.json, generation_config.json and the tokenizer's files of the checkpoint; jaxspec.json with the format's
version, the sizes of the weights' files and how matrices are quantised; and `weights`, an Orbax checkpoint (OCDBT) of a flat dict from
our paths to arrays. A drafter that was converted with its target is such a folder too: `drafter` in the target's. The target's image and
audio towers lie beside them as a release has them, in `images` and `audio`. A chunk on disk does
not cross the borders at which meshes cut, so each process reads only what its devices hold.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import checkpoint, checks, drafters, targets
from jaxspec.audio import Sounds
from jaxspec.checkpoint import fused
from jaxspec.checkpoint.files import CONVERTED, DRAFTER, INDEX_FILE, PROCESSORS, lock
from jaxspec.checkpoint.formats.converted import KEY, describe
from jaxspec.checkpoint.from_floats import config_of
from jaxspec.checkpoint.hub import Hub
from jaxspec.checkpoint.peft import read_adapter
from jaxspec.checkpoint.quantisation import Quantisation
from jaxspec.model.families import family_of
from jaxspec.planning import pair_of
from jaxspec.progress import watched
from jaxspec.sharding import specs
from jaxspec.sharding.placement import placement_of
from jaxspec.text import check_files
from jaxspec.trees import leaves_by_path
from jaxspec.vision import Images
from jaxspec.vision.preprocessing import SOFT_TOKENS
from pallas_kernels.packed import Packed

LOCK = ".lock"  # in a folder that is being written
CHAT_TEMPLATES = "additional_chat_templates"  # where transformers keeps chat templates that have names


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    drafter: str | os.PathLike[str] | None = None,
    dtype: Any = "auto",
    quantize: str | None = None,
    quantize_embedding: str | None = None,
    quantize_drafter: str | None = None,
    mesh: jax.sharding.Mesh | None = None,
    adapter: str | os.PathLike[str] | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    progress: bool | None = None,
) -> Path:
    """Writes a target, and a drafter for it, as a converted checkpoint, and returns its folder.

    source: the target, under any name that `load` takes. destination: a folder that is empty or does not exist. drafter: a checkpoint under
    any name that `load` takes, "same" too; it goes to the folder `drafter` in the destination. The target's image and audio towers go to
    the folders `images` and `audio`, in float; a warning says why one is left out that cannot be read. dtype: of the float weights,
    "float32" or "bfloat16"; "auto" is the target's own, or float32 if that is neither. quantize: "int8", "int4" or "fp8" quantises the
    target's float weights as `load` does; weights that are quantised already stay as they are. quantize_embedding: "int8" quantises
    embeddings, as `load` does. quantize_drafter: quantises the drafter, as `load` does. mesh: the devices that hold the weights during
    the conversion; None is the default device alone. The result can be loaded onto any mesh. adapter: is merged into the target's weights,
    as `load` does, which are then written without it. revision, token, cache_dir, local_files_only: as for `load`.

    Raises FileExistsError if the destination has any content, NotADirectoryError if it is to lie in a file, ValueError or
    FileNotFoundError for a source that `load` would refuse, ValueError if several processes convert together, while another conversion
    writes the destination, or for a mount point, which no folder can replace. A conversion that fails or is killed leaves no folder under
    the destination's name.
    """
    source = checks.path("source", source, "a hub id, a folder or a bundled model")
    final, progress = checks.expanded(checks.path("destination", destination, "a folder")).absolute(), watched(progress)
    _check_destination(final)
    if jax.process_count() > 1:
        raise ValueError(f"a conversion runs in one process; found {jax.process_count()}")
    place = placement_of(mesh).place
    hub = Hub(revision, token, cache_dir, local_files_only)
    asked = {"quantize": quantize, "quantize_embedding": quantize_embedding}

    def dtype_of(name: str) -> Any:
        return targets.DTYPES.get(name, jnp.float32) if dtype == "auto" else targets.weights_dtype(dtype, name)

    pair = pair_of(source, drafter, hub, dtype=dtype_of, adapter=adapter, quantize_drafter=quantize_drafter, **asked)
    config, weights_dtype, draft_folder = pair.config, jnp.dtype(pair.dtype), pair.drafter_folder
    if drafter is not None and draft_folder is None:
        raise ValueError(f"the drafter {drafter!r} is not a checkpoint: it has no weights to convert, and fits every target")
    folder = checkpoint.resolve(source, hub)  # only now, since a target's weights are a long download
    check_files(folder)
    towers = [family for family in (Images, Sounds) if family.is_in(folder)]
    if adapter is not None and not pair.changes and not towers:
        reads = "no image tower and no audio tower"
        raise ValueError(f"the adapter {os.fspath(adapter)!r} changes none of the target's text weights, and {folder} has {reads}")
    quantisation = targets.quantisation_of(folder, config, weights_dtype, **asked)  # again: the weights' headers may say more
    tree = targets.abstract_target(config, weights_dtype, quantisation)

    with _named_at_the_end(final) as unfinished:
        weights = targets.load_target(folder, place(tree), quantisation, pair.changes, progress=progress)
        more = {} if quantize is None else {"quantization_config": config_of(quantize)}
        _write(unfinished, folder, weights, weights_dtype, more, _about(quantisation, tree, family_of(config).prefixes[0]))
        del weights
        for family in towers:
            _write_tower(family, unfinished / family.folder, folder, weights_dtype, adapter, hub)
        if draft_folder is not None:
            guesser = drafters.load_drafter(draft_folder, config, weights_dtype, quantize=quantize_drafter, place=place, progress=progress)
            planned, quantisation = drafters.planned(draft_folder, config, weights_dtype, quantize_drafter)
            about = _about(quantisation, drafters.checkpoint_part(planned), getattr(planned, "key_prefixes", ("",))[0])
            _write(unfinished / DRAFTER, draft_folder, drafters.checkpoint_part(guesser), weights_dtype, {}, about)
    return final


def _write_tower(
    family: type[Images] | type[Sounds], destination: Path, folder: Path, dtype: np.dtype, adapter: str | os.PathLike[str] | None, hub: Hub
) -> None:
    """Writes a tower of the target in `folder`, with what says how images or sounds are prepared. Warns of one that cannot be read, and
    leaves it out."""
    try:
        # Of images with any number of tokens: weights are those of all.
        read = family.read(folder, dtype, SOFT_TOKENS[0]) if family is Images else family.read(folder, dtype)
        read = read.with_weights(folder, {} if adapter is None else read.changes(read_adapter(adapter, hub)))
    except ValueError as error:
        warnings.warn(f"the converted checkpoint has no {family.noun}: {error}", UserWarning, stacklevel=4)
        return
    source = family.home(folder)
    checkpoint.save_weights(destination, read.tower, checkpoint.read_config(source), prefix="model.")
    for name in PROCESSORS:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


@contextlib.contextmanager
def _named_at_the_end(final: Path) -> Iterator[Path]:
    """A folder to write in, which becomes `final` at the end, or is removed. Raises ValueError while another conversion writes there."""
    real = final.resolve()  # a link stays, and what it leads to is replaced
    real.parent.mkdir(parents=True, exist_ok=True)
    unfinished = real.with_name(f".{real.name}.unfinished")
    unfinished.mkdir(exist_ok=True)  # a killed conversion may have left it
    with (unfinished / LOCK).open("w") as file:
        lock(file, final)
        try:
            _check_destination(final)  # again: another conversion may have ended since
            for left in unfinished.iterdir():
                if left.is_dir():
                    shutil.rmtree(left)
                elif left.name != LOCK:
                    left.unlink()
            yield unfinished
            unfinished.replace(real)
            (real / LOCK).unlink()  # only now: nobody else may take the lock before
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def _about(quantisation: Quantisation | None, tree: Any, prefix: str) -> dict[str, Any]:
    """What jaxspec.json says of quantised matrices. Arguments as for `describe`."""
    return {} if quantisation is None else {KEY: describe(quantisation, tree, prefix)}


def _check_destination(folder: Path) -> None:
    if above := next((path for path in folder.parents if path.exists() and not path.is_dir()), None):
        raise NotADirectoryError(f"{folder} cannot be: {above} is a file; expected a folder")
    if folder.is_dir() and not any(folder.iterdir()):
        if os.path.ismount(folder.resolve()):
            raise ValueError(f"{folder} is a mount point, which the finished folder could not replace; name a folder in it")
        return
    if folder.exists() or folder.is_symlink():
        found = f"a folder with {', '.join(sorted(path.name for path in folder.iterdir())[:5])}" if folder.is_dir() else "a file"
        raise FileExistsError(f"{folder} exists: found {found}, expected nothing or an empty folder")


def _write(folder: Path, source: Path, weights: Any, dtype: np.dtype, changes: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Writes a converted folder. jaxspec.json comes last: a folder without it is not complete. changes: to the config. about: what else
    stands in jaxspec.json."""
    folder.mkdir(exist_ok=True)
    for path in source.iterdir():
        wanted = path.suffix in (".json", ".jinja") or path.name.startswith("tokenizer")
        if path.is_file() and wanted and path.name not in ("config.json", INDEX_FILE, CONVERTED):
            shutil.copyfile(path, folder / path.name)
    if (templates := source / CHAT_TEMPLATES).is_dir():
        shutil.copytree(templates, folder / CHAT_TEMPLATES)
    config = checkpoint.read_config(source) | {"dtype": dtype.name} | dict(changes)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    arrays = folder / fused.ARRAYS_FOLDER
    fused.save_converted(arrays, leaves_by_path(weights), _cut_axes(weights))
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in arrays.rglob("*") if path.is_file()}
    text = json.dumps({"version": fused.VERSION, "files": dict(sorted(files.items())), **about}, indent=2)
    (folder / CONVERTED).write_text(text + "\n", encoding="utf-8")


def _cut_axes(weights: Any) -> dict[str, tuple[int, ...]]:
    """The axes of heads or experts over which a mesh spreads an array, by path: a chunk has length 1 there.

    Other axes need nothing: Orbax halves the longest axes of a chunk by itself, which suits widths, blocks of widths and vocabularies.
    """
    rows, found = specs.partitions_of(weights), {}
    for path, weight in leaves_by_path(weights, whole=(Packed,)).items():
        spec = enumerate(specs.first_match(path, rows))
        few = tuple(axis for axis, name in spec if name is not None and len(weight.shape) > 2 and weight.shape[axis] <= 256)
        if isinstance(weight, Packed):
            few = tuple(axis for axis in few if axis not in (weight.ndim - weight.over - 1, weight.ndim - 1))
        found |= {f"{path}.{field}".rstrip("."): few for field in leaves_by_path(weight)}
    return found
