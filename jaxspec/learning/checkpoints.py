"""Checkpoints of a run: trees of arrays in folders that are named by the run's step. A killed run resumes from the newest."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax

NEWEST = 2  # how many checkpoints stay


def save(folder: Path, step: int, *trees: Any) -> Path:
    """Writes the trees as a checkpoint in `folder`. Removes all but the newest few, and unfinished ones of killed runs."""
    import orbax.checkpoint as ocp

    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.StandardCheckpointer() as checkpointer:  # renames the folder when all of it is written
        checkpointer.save(folder / str(step), _flat(*trees), force=True)
    newest = {str(at) for at in steps_of(folder)[-NEWEST:]}
    for old in folder.iterdir():
        if old.name not in newest:
            shutil.rmtree(old)
    return folder / str(step)


def restore(folder: Path, *trees: Any) -> tuple[Any, ...]:
    """The trees of the newest checkpoint in `folder`, which has one. trees: like those that were saved, of the same shapes and with the
    shardings that the result shall have."""
    import orbax.checkpoint as ocp

    folder, flat = folder.resolve(), _flat(*trees)
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(folder / str(steps_of(folder)[-1]), jax.tree.map(ocp.utils.to_shape_dtype_struct, flat))
    return jax.tree.unflatten(jax.tree.structure(trees), [state[name] for name in flat])


def steps_of(folder: Path) -> list[int]:
    """The steps of a folder's checkpoints, in order."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit()) if folder.is_dir() else []


def _flat(*trees: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(trees)}
