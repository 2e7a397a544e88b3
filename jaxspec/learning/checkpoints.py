"""Checkpoints of a run: trees of arrays in folders that are named by the run's step. A killed run resumes from the newest."""

from __future__ import annotations

import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import jax

from jaxspec.interrupts import undisturbed

NEWEST = 2  # how many checkpoints stay
NEW = ".new"  # ends the name of a checkpoint that is whole and is to replace the one of its step, if there is one
_writing = threading.Lock()  # held by who writes or reads: whose caller was interrupted writes on


def save(folder: Path, step: int, *trees: Any) -> Path:
    """Writes the trees as a checkpoint in `folder`. Removes all but the newest few, and unfinished ones of killed runs. Wherever it is
    killed, a whole checkpoint stays: the one before, of this step or an older one, or the new one. It is written `undisturbed`, as
    Orbax's threads go on where their caller is interrupted, and the next checkpoint would meet them in this folder. An interrupt is raised
    once it is written, a second one at once."""
    import orbax.checkpoint as ocp

    folder, flat = folder.resolve(), _flat(*trees)

    def write() -> None:
        with _writing:
            folder.mkdir(parents=True, exist_ok=True)
            _settle(folder)
            with ocp.StandardCheckpointer() as checkpointer:  # renames the folder when all of it is written
                checkpointer.save(folder / f"{step}{NEW}", flat)
            _settle(folder)
            newest = {str(at) for at in steps_of(folder)[-NEWEST:]}
            for old in folder.iterdir():
                if old.name not in newest:
                    shutil.rmtree(old)

    undisturbed(write, to_end=True)
    return folder / str(step)


def restore(folder: Path, *trees: Any) -> tuple[int, tuple[Any, ...]]:
    """The step and the trees of the newest checkpoint in `folder` that can be read; it warns of newer ones. trees: like those that were
    saved, of the same shapes and with the shardings that the result shall have. Raises ValueError if there is none."""
    import orbax.checkpoint as ocp

    folder, flat, unread = folder.resolve(), _flat(*trees), list[str]()
    with _writing:
        _settle(folder)
        for step in reversed(steps_of(folder)):
            try:
                with ocp.StandardCheckpointer() as checkpointer:
                    state = checkpointer.restore(folder / str(step), jax.tree.map(ocp.utils.to_shape_dtype_struct, flat))
            except Exception as error:  # of many kinds
                reason = str(error).partition("\n")[0]
                unread.append(f"{folder / str(step)} cannot be read ({type(error).__name__}: {reason:.200})")
                continue
            if unread:
                warnings.warn(f"{'; '.join(unread)}; going on from {folder / str(step)}", UserWarning, stacklevel=2)
            return step, jax.tree.unflatten(jax.tree.structure(trees), [state[name] for name in flat])
    raise ValueError(f"{'; '.join(unread) or f'{folder} has no checkpoint'}; remove {folder} to begin anew")


def steps_of(folder: Path) -> list[int]:
    """The steps of a folder's checkpoints, in order."""
    names = {path.name.removesuffix(NEW) for path in folder.iterdir()} if folder.is_dir() else ()
    return sorted(int(name) for name in names if name.isdigit())


def _settle(folder: Path) -> None:
    """Gives new checkpoints the names of their steps. Until one has it, the one that it replaces may be there in part."""
    for new in folder.glob(f"*{NEW}"):
        old = new.with_suffix("")
        if old.exists():
            shutil.rmtree(old)
        new.rename(old)


def _flat(*trees: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(trees)}
