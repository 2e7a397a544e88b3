"""Converted checkpoints: the weights as they lie on devices, fused and in their dtype, so that loading is reading alone.

A converted folder holds config.json, generation_config.json and the tokenizer's files as the checkpoint had them, jaxspec.json with
the format's version, and `weights`, an Orbax checkpoint (OCDBT) of a flat dict from our paths to arrays. A drafter that was converted
with its target is such a folder too, `drafter` in the target's. Arrays lie in chunks that no device of a mesh shares with many
others, and each process reads what its own devices hold.
"""

from __future__ import annotations

import functools
import gc
import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import checkpoint, drafters, gemma4, loading, sharding
from jaxspec.drafters.draft_model import DraftModel

VERSION = 1
WEIGHTS, DRAFTER = "weights", "drafter"
# Orbax reads up to 128 chunks at once, beside the arrays that they go to: 128 MiB.
CHUNK = 1 << 20
LEAST_GROUP = 1 << 28
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
    (folder / checkpoint.CONVERTED).write_text(json.dumps({"version": VERSION}) + "\n", encoding="utf-8")


def _save(folder: Path, leaves: Mapping[str, jax.Array]) -> None:
    """An Orbax checkpoint of arrays by path."""
    import orbax.checkpoint as ocp  # here and below, because it takes a while to import

    largest = max(leaf.nbytes for leaf in leaves.values())
    # Compressing random bits takes longer than reading them.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, save_device_host_concurrent_gb=-(-largest // GB) + 1)
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

    Raises FileNotFoundError for a folder without weights, ValueError for another version, for weights that do not fit the tree, all
    of them listed, and for weights that cannot be read.
    """
    import orbax.checkpoint as ocp
    from tqdm.auto import tqdm

    stored, leaves = describe(folder), checkpoint._leaves(abstract)
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
    loaded: dict[str, jax.Array] = {}
    total = sum(_nbytes(leaf) for leaf in leaves.values())
    with (
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
        tqdm(total=total, unit="B", unit_scale=True, desc=f"Loading {folder.name}", disable=not progress) as bar,
    ):
        for group in _groups(leaves):
            settings = {
                path: ocp.ArrayRestoreArgs(sharding=leaf.sharding or default, global_shape=leaf.shape, dtype=leaf.dtype)
                for path, leaf in group.items()
            }
            args = ocp.args.PyTreeRestore(group, restore_args=settings, partial_restore=True)
            try:
                loaded |= jax.block_until_ready(checkpointer.restore(folder / WEIGHTS, args=args))
            except Exception as error:  # Orbax and TensorStore raise many kinds, and Exception itself
                raise ValueError(f"{folder / WEIGHTS} cannot be read: {error}") from error
            # Orbax leaves the host's copies in reference cycles.
            gc.collect()
            bar.update(sum(_nbytes(leaf) for leaf in group.values()))
    return jax.tree.unflatten(jax.tree.structure(abstract), [loaded[path] for path in leaves])


def _groups(leaves: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Leaves to be read at a time: no more bytes than the largest leaf has, which bounds the host's memory."""
    limit = max(LEAST_GROUP, *(_nbytes(leaf) for leaf in leaves.values()))
    groups: list[dict[str, Any]] = []
    room = 0
    for path, leaf in leaves.items():
        if not groups or _nbytes(leaf) > room:
            groups.append({})
            room = limit
        groups[-1][path] = leaf
        room -= _nbytes(leaf)
    return groups


def _nbytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def describe(folder: Path) -> dict[str, Any]:
    """Shape and dtype of each array in a converted folder, by path. Raises FileNotFoundError or ValueError."""
    import orbax.checkpoint as ocp

    file = folder / checkpoint.CONVERTED
    version = checkpoint._read_json(file).get("version")
    if version != VERSION:
        raise ValueError(f"{file} has version {version!r}; this jaxspec reads version {VERSION}: convert the checkpoint again")
    if not (folder / WEIGHTS).is_dir():
        raise FileNotFoundError(f"{folder} has no folder {WEIGHTS}, which belongs to its {file.name}: convert the checkpoint again")
    try:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            metadata = checkpointer.metadata(folder / WEIGHTS).item_metadata.tree
        return {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in metadata.items()}
    except Exception as error:
        raise ValueError(f"{folder / WEIGHTS} cannot be read: {error}") from error
