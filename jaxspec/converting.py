"""Converted checkpoints: the weights as they lie on devices, fused and in their dtype, so that loading is reading alone.

A converted folder holds config.json, generation_config.json and the tokenizer's files as the checkpoint had them, jaxspec.json with
the format's version and the sizes of the weights' files, and `weights`, an Orbax checkpoint (OCDBT) of a flat dict from our paths to
arrays. A drafter that was converted with its target is such a folder too, `drafter` in the target's. A large array is several, of
consecutive rows: `embed_tokens.weight[0]`, `embed_tokens.weight[8192]` and so on. Chunks on disk are cut where meshes cut, and of all
other arrays each process reads what its own devices hold.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import checkpoint, drafters, gemma4, loading, placing, sharding
from jaxspec.drafters.draft_model import DraftModel

VERSION = 1
WEIGHTS, DRAFTER = "weights", "drafter"
# What bounds the host's memory: Orbax reads up to 128 chunks at once, beside a group of arrays that they go to.
CHUNK = 1 << 20
PIECE = 1 << 26
GROUP = 1 << 28  # arrays that are larger lie in pieces
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
    import orbax.checkpoint as ocp  # here and below, because it takes a while to import

    arrays: dict[str, Any] = {}
    for path, leaf in leaves.items():
        if leaf.nbytes <= GROUP:
            arrays[path] = leaf
        else:
            whole, rows = np.asarray(leaf), _piece_rows(leaf.shape[0], leaf.nbytes // leaf.shape[0])
            arrays |= {f"{path}[{start}]": whole[start : start + rows] for start in range(0, len(whole), rows)}
    # Compressing random bits takes longer than reading them.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, save_device_host_concurrent_gb=-(-GROUP // GB) + 1)
    settings = {key: ocp.SaveArgs(chunk_byte_size=CHUNK, shard_axes=_few_parts(key, array.shape)) for key, array in arrays.items()}
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder, args=ocp.args.PyTreeSave(arrays, save_args=settings))


def _piece_rows(rows: int, nbytes: int) -> int:
    """Rows of a piece, of an array with rows of nbytes: a divisor, so that where meshes cut is the border of a piece; as many as fit,
    where the divisors are small."""
    most = max(1, min(rows, PIECE // nbytes))
    even = max(count for count in range(1, most + 1) if rows % count == 0)
    return even if 4 * even > most else most


def _few_parts(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The axis of heads or experts over which a mesh spreads an array, to be one long in a chunk. Orbax halves the longest axes of the
    chunks by itself, which serves axes of widths and vocabularies."""
    spec = next((spec for pattern, spec in sharding.WEIGHTS if re.search(pattern, path.partition("[")[0])), ())
    return tuple(axis for axis, name in enumerate(spec) if name is not None and len(shape) > 2 and shape[axis] <= 256)


def restore(folder: Path, abstract: Any, *, progress: bool = True) -> Any:
    """The weights of a converted folder in the shapes, dtypes and shardings of a tree of ShapeDtypeStructs.

    Raises ValueError for another version, for files that are missing or cut short, for weights that do not fit the tree, all of them
    listed, and for weights that cannot be read.
    """
    import orbax.checkpoint as ocp
    from tqdm.auto import tqdm

    pieces = _pieces(folder)
    stored, leaves = _joined(pieces), checkpoint._leaves(abstract)
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

    default = jax.device_put(np.zeros((), np.int32)).sharding
    rows = {path: placing.Rows(leaf) for path, leaf in leaves.items() if path not in pieces[path]}
    loaded: dict[str, jax.Array] = {}

    def how(path: str, key: str) -> Any:
        leaf = leaves[path]
        if path in rows:
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding or default, global_shape=leaf.shape, dtype=leaf.dtype)

    total = sum(map(_nbytes, stored.values()))
    with (
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
        tqdm(total=total, unit="B", unit_scale=True, desc=f"Loading {folder.name}", disable=not progress) as bar,
    ):
        for group in _groups(pieces):
            wanted = {key: how(path, key) for path, key, _, _ in group}
            args = ocp.args.PyTreeRestore({key: 0 for key in wanted}, restore_args=wanted, partial_restore=True)
            try:
                found = jax.block_until_ready(checkpointer.restore(folder / WEIGHTS, args=args))
            except Exception as error:  # Orbax and TensorStore raise many kinds, and Exception itself
                raise ValueError(f"{folder / WEIGHTS} cannot be read: {error}") from error
            for path, key, start, piece in group:
                if path in rows:
                    rows[path].put(start, found.pop(key))
                else:
                    loaded[path] = found.pop(key)
                bar.update(_nbytes(piece))
            # JAX gives the host's copies back when Python collects garbage.
            gc.collect(0)
    loaded |= {path: leaf.array() for path, leaf in rows.items()}
    return jax.tree.unflatten(jax.tree.structure(abstract), [loaded[path] for path in leaves])


def _groups(pieces: Mapping[str, Mapping[str, Any]]) -> Iterator[list[tuple[str, str, int, Any]]]:
    """What is read at a time, no more than GROUP bytes: the leaf's path, the array's name, its first row in the leaf, and the array."""
    group: list[tuple[str, str, int, Any]] = []
    for path, arrays in pieces.items():
        start = 0
        for key, array in arrays.items():
            if group and sum(_nbytes(held) for *_, held in group) + _nbytes(array) > GROUP:
                yield group
                group = []
            group.append((path, key, start, array))
            start += array.shape[0] if array.shape else 0
    if group:
        yield group


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def describe(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each leaf in a converted folder, by path. Raises ValueError as `restore` does."""
    return _joined(_pieces(folder))


def _joined(pieces: Mapping[str, Mapping[str, Any]]) -> dict[str, jax.ShapeDtypeStruct]:
    leaves = {}
    for path, arrays in pieces.items():
        first, rows = next(iter(arrays.values())), sum(array.shape[0] for array in arrays.values() if array.shape)
        leaves[path] = jax.ShapeDtypeStruct((rows, *first.shape[1:]) if first.shape else (), first.dtype)
    return leaves


def _pieces(folder: Path) -> dict[str, dict[str, Any]]:
    """The arrays that make up each leaf: by the leaf's path, then by their names and in the order of their rows."""
    import orbax.checkpoint as ocp

    file = folder / checkpoint.CONVERTED
    about = checkpoint._read_json(file)
    if about.get("version") != VERSION:
        raise ValueError(f"{file} has version {about.get('version')!r}; this jaxspec reads version {VERSION}: convert the checkpoint again")
    for name, size in about["files"].items():
        # Before anything is read: Orbax would say it at length, for each array at once.
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            found = "none" if found is None else f"{found} bytes"
            raise ValueError(f"{folder / name}: found {found}, expected the {size} bytes of {file.name}: convert the checkpoint again")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        metadata = checkpointer.metadata(folder / WEIGHTS).item_metadata.tree
    arrays = {key: jax.ShapeDtypeStruct(array.shape, array.dtype) for key, array in metadata.items()}
    pieces: dict[str, dict[str, Any]] = {}
    for key in sorted(arrays, key=lambda key: int(key.partition("[")[2].rstrip("]") or 0)):
        pieces.setdefault(key.partition("[")[0], {})[key] = arrays[key]
    return pieces
