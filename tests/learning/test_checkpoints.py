"""Checkpoints: wherever a save is killed a whole one stays, and the next save leaves nothing else behind."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

from jaxspec.learning import checkpoints


def saved(folder, step, value):
    return checkpoints.save(folder, step, {"a": jnp.full(3, value, jnp.float32)})


def value(folder):
    return float(checkpoints.restore(folder, {"a": jnp.zeros(3, jnp.float32)})[1][0]["a"][0])


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def killed(*args):
    raise OSError("killed")


def test_a_save_that_is_killed_before_all_is_written_leaves_the_checkpoint_of_the_same_step(tmp_path, monkeypatch):
    saved(tmp_path, 5, 1.0)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed"):
        patch.setattr(os, "rename", killed)  # by which Orbax ends
        saved(tmp_path, 5, 2.0)
    assert checkpoints.steps_of(tmp_path) == [5] and value(tmp_path) == 1.0 and len(names(tmp_path)) == 2
    assert saved(tmp_path, 5, 2.0) == tmp_path / "5"
    assert value(tmp_path) == 2.0 and names(tmp_path) == ["5"]


@pytest.mark.parametrize("step", [5, 6])
@pytest.mark.parametrize("at", ["removing", "renaming"])
def test_a_save_that_is_killed_when_all_is_written_counts(tmp_path, monkeypatch, step, at):
    """In the middle of removing the checkpoint that is replaced, or before the new one has its name."""

    def remove_some(path):
        next(file for file in path.rglob("*") if file.is_file()).unlink()
        killed()

    saved(tmp_path, 4, 0.0)
    saved(tmp_path, 5, 1.0)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="killed"):
        if at == "removing":
            patch.setattr(checkpoints, "shutil", SimpleNamespace(rmtree=remove_some))
        else:
            patch.setattr(Path, "rename", killed)
        saved(tmp_path, step, 2.0)
    assert checkpoints.steps_of(tmp_path)[-1] == step and value(tmp_path) == 2.0
    saved(tmp_path, 7, 3.0)
    assert value(tmp_path) == 3.0 and names(tmp_path) == [str(step), "7"]


def test_what_killed_saves_left_is_removed(tmp_path):
    saved(tmp_path, 1, 1.0)
    for name in ("2.new.orbax-checkpoint-tmp", "2.orbax-checkpoint-tmp", "2.unfinished"):
        (tmp_path / name).mkdir()
    assert checkpoints.steps_of(tmp_path) == [1]
    saved(tmp_path, 2, 2.0)
    assert value(tmp_path) == 2.0 and names(tmp_path) == ["1", "2"]


@pytest.mark.parametrize("kind", ["truncated", "empty"])
def test_a_checkpoint_that_cannot_be_read_is_left_for_the_one_before(tmp_path, kind):
    saved(tmp_path, 5, 1.0)
    saved(tmp_path, 6, 2.0)

    def damage(step):
        folder = tmp_path / str(step)
        if kind == "empty":
            shutil.rmtree(folder)
            folder.mkdir()
        for path in folder.rglob("*"):
            if path.is_file():
                os.truncate(path, path.stat().st_size // 2)

    damage(6)
    with pytest.warns(UserWarning, match=r"/6 cannot be read \(\w+: .*\); going on from .*/5"):
        step, [found] = checkpoints.restore(tmp_path, {"a": jnp.zeros(3, jnp.float32)})
    assert (step, float(found["a"][0])) == (5, 1.0)
    damage(5)
    with pytest.raises(ValueError, match=r"/6 cannot be read .*/5 cannot be read .*; remove .* to begin anew"):
        value(tmp_path)


def test_an_interrupt_is_raised_once_the_checkpoint_is_written(tmp_path, monkeypatch):
    """Else a process that ends with it would end the threads of Orbax, and the checkpoint would be lost."""
    close = ocp.StandardCheckpointer.close

    def interrupted(checkpointer):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        close(checkpointer)

    with monkeypatch.context() as patch:
        patch.setattr(ocp.StandardCheckpointer, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saved(tmp_path, 5, 1.0)
    assert names(tmp_path) == ["5"] and value(tmp_path) == 1.0


def test_the_next_save_waits_for_one_whose_caller_was_interrupted(tmp_path, monkeypatch):
    """Twice, so that it waited no more. Such as that of an LLM that is closed since it was interrupted. Threads of Orbax write on."""
    close, told, order = ocp.StandardCheckpointer.close, threading.Event(), []

    def interrupted(checkpointer):
        if not told.is_set():
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.1)  # until it is raised
            told.wait(60)
        close(checkpointer)
        order.append("closed")

    monkeypatch.setattr(ocp.StandardCheckpointer, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, 5, 1.0)
    told.set()
    saved(tmp_path, 5, 2.0)
    assert order == ["closed"] * 2 and value(tmp_path) == 2.0 and names(tmp_path) == ["5"]
