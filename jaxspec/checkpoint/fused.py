"""The format of a converted checkpoint: an Orbax checkpoint (OCDBT) of a flat dict from our paths to our arrays, which are fused and in
the dtype of the conversion. jaxspec.json holds the format's version and the size of every file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint import jobs
from jaxspec.checkpoint.changes import Change
from jaxspec.checkpoint.files import CONVERTED, read_json
from jaxspec.checkpoint.layout import Part, layouts_of, raise_misfits
from jaxspec.checkpoint.onto_devices import Box, Pieces
from jaxspec.trees import leaves_by_path

VERSION = 3  # raised with any other order of what is stored, that of bits in packed matrices included
ARRAYS_FOLDER = "weights"
STORED_CHUNK_BYTES = 1 << 24  # small enough for several threads to read one array
ALIGNMENT = 64  # bytes, of arrays on a CPU
GB = 10**9


def save_converted(folder: Path, leaves: Mapping[str, jax.Array], cut_axes: Mapping[str, tuple[int, ...]]) -> None:
    """Writes arrays, by path, as an Orbax checkpoint.

    cut_axes: by path, the axes along which a chunk has length 1.
    """
    import orbax.checkpoint as ocp  # here, because it takes a while to import

    # No compression: for weights it takes longer than it saves. The limit on what is copied to the host must admit the largest array.
    room = max(leaf.nbytes for leaf in leaves.values()) // GB + 1
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=False, use_compression=False, save_device_host_concurrent_gb=room)
    settings = {path: ocp.SaveArgs(chunk_byte_size=STORED_CHUNK_BYTES, shard_axes=cut_axes[path]) for path in leaves}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(dict(leaves), save_args=settings))


def restore(folder: Path, abstract: Any, changes: Mapping[str, Change], *, progress: bool = True) -> Any:
    """Reads a converted folder into the shapes, dtypes and shardings of a tree of ShapeDtypeStructs. changes: as for `load_weights`; the
    host holds a leaf that has any whole. progress: show a bar, by bytes.

    Raises ValueError for another version, a missing or truncated file, an array that cannot be read, and weights that do not fit the
    tree; the error lists all of those.
    """
    from tqdm.auto import tqdm

    arrays, leaves = _open(folder), leaves_by_path(abstract)
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
    raise_misfits(folder, problems)

    filled, parts = {path: Pieces(leaf) for path, leaf in leaves.items()}, _changed_parts(abstract, changes)
    pieces = [(path, box) for path, leaf in filled.items() if path not in parts for box in leaf.needed()]
    sources = [arrays[path].astype(leaves[path].dtype)[tuple(slice(*cut) for cut in box)].translate_to[0] for path, box in pieces]
    # Changed as they are stored, and cast then, as a checkpoint's own tensors are.
    pieces += [(path, tuple((0, size) for size in leaves[path].shape)) for path in parts]
    sources += [arrays[path] for path in parts]

    def job(path: str, box: Box, source: Any) -> jobs.Job:
        def run(update: Callable[[int], Any]) -> None:
            value, leaf = read_array(folder / ARRAYS_FOLDER, source), filled[path]
            update(value.nbytes)
            if path not in parts:
                leaf.put(box, value)
                return
            value = _as_changed(value, parts[path], changes).astype(leaves[path].dtype, copy=False)
            for piece in leaf.needed():
                leaf.put(piece, value[tuple(slice(*cut) for cut in piece)])

        return jobs.Job(_nbytes(source), run)

    total = sum(map(_nbytes, sources))
    with tqdm(total=total, unit="B", unit_scale=True, desc=f"Loading {folder.name}", disable=not progress) as bar:
        jobs.results([job(path, box, source) for (path, box), source in zip(pieces, sources, strict=True)], bar.update)
    return jax.tree.unflatten(jax.tree.structure(abstract), [leaf.array() for leaf in filled.values()])


def _changed_parts(abstract: Any, changes: Mapping[str, Change]) -> dict[str, list[Part]]:
    """The parts of each leaf of which an adapter changes any, by path."""
    shapes, layouts = {path: tuple(leaf.shape) for path, leaf in leaves_by_path(abstract).items()}, layouts_of(abstract)
    parts = {path: layouts(path, shapes)[0] for path in shapes} if changes else {}
    return {path: found for path, found in parts.items() if any(part.key in changes for part in found)}


def _as_changed(value: np.ndarray, parts: Sequence[Part], changes: Mapping[str, Change]) -> np.ndarray:
    """A leaf as an adapter makes it."""
    value = value.copy()
    for part in parts:
        if part.key in changes:
            change, held = changes[part.key], value[part.index]
            base = held if change.whole is None else change.whole.read().astype(value.dtype)
            value[part.index] = change.applied(base.reshape(-1, part.shape[-1])).reshape(held.shape)
    return value


def read_array(folder: Path, source: Any) -> np.ndarray:
    """The contents of a TensorStore. folder: for errors."""
    import tensorstore as ts

    # NumPy's memory, since it asks for large pages; and aligned, so that a CPU keeps it as the array.
    nbytes = _nbytes(source)
    memory = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % ALIGNMENT
    value = memory[first : first + nbytes].view(source.dtype.numpy_dtype).reshape(source.shape)
    try:
        ts.array(value).write(source).result()
    except Exception as error:  # TensorStore raises many kinds
        raise _unreadable(folder, error) from error
    return value


def _nbytes(source: Any) -> int:
    return source.size * source.dtype.numpy_dtype.itemsize


def stored_shapes(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """The shape and dtype of each array in a converted folder, by path. Raises ValueError as `restore` does."""
    return _shapes(_open(folder))


def _shapes(arrays: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    return {path: jax.ShapeDtypeStruct(array.shape, array.dtype.numpy_dtype) for path, array in arrays.items()}


def _open(folder: Path) -> dict[str, Any]:
    """A TensorStore for each array in a converted folder, by path. Raises ValueError as `restore` does.

    We do not read through Orbax: it reads everything that a device will hold at once, and copies it once more since it maps no files.
    """
    import tensorstore as ts

    file = folder / CONVERTED
    about = read_json(file)
    check_version(folder, about)
    files = about.get("files")
    if not isinstance(files, Mapping):
        raise ValueError(f"{file} is damaged: its 'files' are {files!r}, expected names and sizes; convert the checkpoint again")
    for name, size in files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            found = "none" if found is None else f"{found} bytes"
            raise ValueError(f"{folder / name}: found {found}, expected the {size} bytes of {file.name}: convert the checkpoint again")

    context = ts.Context({"file_io_mode": {"mode": "memmap"}})
    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder / ARRAYS_FOLDER}/"}}
    try:
        keys = [key.decode() for key in ts.KvStore.open(store, context=context).result().list().result()]
        paths = [path for path, _, name in (key.rpartition("/") for key in keys) if name == ".zarray"]
        specs = ({"driver": "zarr", "kvstore": {**store, "path": f"{path}/"}} for path in paths)
        opened = [ts.open(spec, context=context, read=True) for spec in specs]
        return {path: array.result() for path, array in zip(paths, opened, strict=True)}
    except Exception as error:
        raise _unreadable(folder / ARRAYS_FOLDER, error) from error


def check_version(folder: Path, about: Mapping[str, Any]) -> None:
    """Raises ValueError if a converted folder has another version of the format. about: its jaxspec.json."""
    if (found := about.get("version")) != VERSION:
        raise ValueError(f"{folder / CONVERTED} has version {found!r}; this jaxspec reads version {VERSION}: convert the checkpoint again")


def _unreadable(folder: Path, error: Exception) -> ValueError:
    return ValueError(f"{folder} cannot be read: {error}")
