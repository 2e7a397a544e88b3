"""Converted checkpoints: the weights as they lie on devices, fused and in their dtype, so that loading is reading alone.

A converted folder holds config.json, generation_config.json and the tokenizer's files as the checkpoint had them, jaxspec.json with
the format's version and the sizes of the weights' files, and `weights`, an Orbax checkpoint (OCDBT) of a flat dict from our paths to
arrays. A drafter that was converted with its target is such a folder too, `drafter` in the target's. Chunks on disk are cut where
meshes cut, and each process reads what its own devices hold.
"""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import drafters, loading
from jaxspec.checkpoint import load as checkpoint
from jaxspec.checkpoint import onto_devices as placing
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.model import gemma4
from jaxspec.sharding import layout as sharding

VERSION = 2
WEIGHTS, DRAFTER = "weights", "drafter"
CHUNK = 1 << 24  # bytes, few enough that several threads read an array
GB = 10**9


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    drafter: str | os.PathLike[str] | None = None,
    dtype: Any = "auto",
    mesh: jax.sharding.Mesh | None = None,
    progress: bool = True,
) -> Path:
    """Writes a target, and a drafter for it, as a converted checkpoint, and returns its folder.

    source: the target, under any name that `load` takes. destination: a folder that is empty or does not exist. drafter: a drafter
    under any name of a checkpoint that `load` takes; it goes to the folder `drafter` in the destination. dtype: of the float weights,
    "float32" or "bfloat16"; "auto" is the target's own, float32 where that is neither. mesh: devices to hold the weights while they
    are written; the default device must hold them all otherwise. The checkpoint can be loaded onto any mesh.

    Raises FileExistsError for a destination that holds anything, ValueError or FileNotFoundError for what `load` would refuse. A
    conversion that fails or is killed leaves no folder under the destination's name.
    """
    final = Path(destination).expanduser().absolute()
    _check_destination(final)
    if jax.process_count() > 1:
        raise ValueError(f"a conversion runs in one process; found {jax.process_count()}")
    place = (lambda tree: tree) if mesh is None else functools.partial(sharding.shard_tree, mesh=mesh)
    folder = checkpoint.resolve(source)
    config, _ = loading.read_target(folder)
    weights_dtype = jnp.dtype(loading.DTYPES.get(config.dtype, jnp.float32) if dtype == "auto" else loading._dtype(dtype, config.dtype))
    draft_folder = None if drafter is None else checkpoint.resolve(drafter)
    if draft_folder is not None:
        drafters.abstract_drafter(draft_folder, config, weights_dtype)

    final.parent.mkdir(parents=True, exist_ok=True)
    unfinished = final.with_name(f".{final.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a conversion that was killed
    try:
        weights = loading.load_target(folder, place(gemma4.abstract(config, weights_dtype)), progress=progress)
        _write(unfinished, folder, weights, weights_dtype)
        del weights
        if draft_folder is not None:
            guesser = drafters.load_drafter(draft_folder, config, weights_dtype, place=place, progress=progress)
            # A draft model is a target.
            _write(unfinished / DRAFTER, draft_folder, guesser.model if isinstance(guesser, DraftModel) else guesser, weights_dtype)
        unfinished.replace(final)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return final


def _check_destination(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        found = f"a folder with {', '.join(sorted(path.name for path in folder.iterdir())[:5])}" if folder.is_dir() else "a file"
        raise FileExistsError(f"{folder} exists: found {found}, expected nothing or an empty folder")


def _write(folder: Path, source: Path, weights: Any, dtype: np.dtype) -> None:
    """One converted folder. jaxspec.json comes last."""
    folder.mkdir()
    for path in source.iterdir():
        wanted = path.suffix in (".json", ".jinja") or path.name.startswith("tokenizer")
        if path.is_file() and wanted and path.name not in ("config.json", checkpoint.INDEX, checkpoint.CONVERTED):
            shutil.copyfile(path, folder / path.name)
    config = checkpoint.read_config(source) | {"dtype": dtype.name}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _save(folder / WEIGHTS, checkpoint._leaves(weights))
    files = {path.relative_to(folder).as_posix(): path.stat().st_size for path in (folder / WEIGHTS).rglob("*") if path.is_file()}
    text = json.dumps({"version": VERSION, "files": dict(sorted(files.items()))}, indent=2)
    (folder / checkpoint.CONVERTED).write_text(text + "\n", encoding="utf-8")


def _save(folder: Path, leaves: Mapping[str, jax.Array]) -> None:
    """An Orbax checkpoint of arrays by path."""
    import orbax.checkpoint as ocp  # here, because it takes a while to import

    # Compressing random bits takes longer than reading them. An array must fit whole in what is copied to the host at a time.
    room = max(leaf.nbytes for leaf in leaves.values()) // GB + 1
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False, save_device_host_concurrent_gb=room)
    settings = {path: ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=_few_parts(path, leaf.shape)) for path, leaf in leaves.items()}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(dict(leaves), save_args=settings))


def _few_parts(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axis of heads or experts over which a mesh spreads an array, to be one long in a chunk. Orbax halves the longest axes of the
    chunks by itself, which serves axes of widths and vocabularies."""
    spec = next((spec for pattern, spec in sharding.WEIGHTS if re.search(pattern, path)), ())
    return tuple(axis for axis, name in enumerate(spec) if name is not None and len(shape) > 2 and shape[axis] <= 256)


def restore(folder: Path, abstract: Any, *, progress: bool = True) -> Any:
    """The weights of a converted folder in the shapes, dtypes and shardings of a tree of ShapeDtypeStructs.

    Raises ValueError for another version, for files that are missing or cut short, for weights that do not fit the tree, all of them
    listed, and for weights that cannot be read.
    """
    from tqdm.auto import tqdm

    arrays, leaves = _open(folder), checkpoint._leaves(abstract)
    stored = _shapes(arrays)
    problems = []
    for path, leaf in leaves.items():
        found = stored.get(path)
        if found is None:
            problems.append(f"{path}: missing, expected {list(leaf.shape)}")
        elif found.shape != leaf.shape:
            problems.append(f"{path}: found {list(found.shape)}, expected {list(leaf.shape)}")
        elif jnp.issubdtype(found.dtype, jnp.integer) != jnp.issubdtype(leaf.dtype, jnp.integer):
            problems.append(f"{path}: found {found.dtype}, expected {leaf.dtype}")
    problems += [f"{path}: unknown, found {found.dtype} {list(found.shape)}" for path, found in stored.items() if path not in leaves]
    checkpoint._raise_all(folder, problems)

    filled = {path: placing.Pieces(leaf) for path, leaf in leaves.items()}
    pieces = [(path, box) for path, leaf in filled.items() for box in leaf.needed()]
    sources = [arrays[path].astype(leaves[path].dtype)[tuple(slice(*cut) for cut in box)].translate_to[0] for path, box in pieces]
    total = sum(map(_nbytes, sources))
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"Loading {folder.name}", disable=not progress) as bar:
        for (path, box), value in zip(pieces, _read(folder / WEIGHTS, sources), strict=True):
            filled[path].put(box, value)
            bar.update(value.nbytes)
    return jax.tree.unflatten(jax.tree.structure(abstract), [leaf.array() for leaf in filled.values()])


def _read(folder: Path, sources: Sequence[Any]) -> Iterator[np.ndarray]:
    """What each TensorStore holds, valid until the next is taken, which is read meanwhile.

    On a CPU each has memory of its own, for JAX to take as the array's; elsewhere two buffers serve all.
    """
    import tensorstore as ts

    buffers = None if jax.default_backend() == "cpu" else [np.empty(max(map(_nbytes, sources)), np.uint8) for _ in range(2)]

    def start(i: int, source: Any) -> tuple[np.ndarray, Any]:
        memory = mmap.mmap(-1, _nbytes(source), flags=mmap.MAP_PRIVATE) if buffers is None else buffers[i % 2]
        value = np.frombuffer(memory, source.dtype.numpy_dtype, source.size).reshape(source.shape)
        return value, ts.array(value).write(source)

    try:
        reads = itertools.starmap(start, enumerate(sources))
        ahead = list(itertools.islice(reads, 1))
        while ahead:
            value, done = ahead.pop()
            ahead += itertools.islice(reads, 1)
            done.result()
            yield value
    except Exception as error:  # TensorStore raises many kinds
        raise _unreadable(folder, error) from error


def _nbytes(source: Any) -> int:
    return source.size * source.dtype.numpy_dtype.itemsize


def describe(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each leaf in a converted folder, by path. Raises ValueError as `restore` does."""
    return _shapes(_open(folder))


def _shapes(arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {path: jax.ShapeDtypeStruct(array.shape, array.dtype.numpy_dtype) for path, array in arrays.items()}


def _open(folder: Path) -> dict[str, Any]:
    """A TensorStore of each array in a converted folder, by path. Raises ValueError as `restore` does.

    Orbax itself would read no less than all that a device holds at a time, and copy it once more: it maps no files.
    """
    import tensorstore as ts

    file = folder / checkpoint.CONVERTED
    about = checkpoint._read_json(file)
    if about.get("version") != VERSION:
        raise ValueError(f"{file} has version {about.get('version')!r}; this jaxspec reads version {VERSION}: convert the checkpoint again")
    for name, size in about["files"].items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            found = "none" if found is None else f"{found} bytes"
            raise ValueError(f"{folder / name}: found {found}, expected the {size} bytes of {file.name}: convert the checkpoint again")

    context = ts.Context({"file_io_mode": {"mode": "memmap"}})
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder / WEIGHTS}/"}}
    try:
        keys = [key.decode() for key in ts.KvStore.open(store, context=context).result().list().result()]
        paths = [path for path, _, name in (key.rpartition("/") for key in keys) if name == ".zarray"]
        specs = ({"driver": "zarr", "kvstore": {**store, "path": f"{path}/"}} for path in paths)
        opened = [ts.open(spec, context=context, read=True) for spec in specs]
        return {path: array.result() for path, array in zip(paths, opened, strict=True)}
    except Exception as error:
        raise _unreadable(folder / WEIGHTS, error) from error


def _unreadable(folder: Path, error: Exception) -> ValueError:
    return ValueError(f"{folder} cannot be read: {error}")
