"""The command `jaxspec train`: its options, and what it calls."""

from __future__ import annotations

import argparse
from typing import Any

KINDS = ("mtp", "dflash", "eagle3", "mtp-modules", "draft-model")


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Adds the command. An option that is not given is left to its default in `distil`, `Run` or the kind's `Objective`."""
    text = (
        "Trains a drafter for a target and writes it in its Hugging Face layout, ready to load. The folder also gets metrics.jsonl, "
        "curves.png and checkpoints, from which --resume goes on."
    )
    train = commands.add_parser("train", help="train a drafter for a target", description=text, argument_default=argparse.SUPPRESS)

    def option(name: str, text: str, **settings: Any) -> None:
        train.add_argument(f"--{name}", help=text, **settings)

    option("target", "hub id, folder or bundled name", required=True)
    option("drafter-kind", ", ".join(KINDS), required=True, choices=KINDS, metavar="KIND")
    option("data", "text, .jsonl of texts or conversations, or .npy of token ids", required=True, nargs="+", metavar="FILE")
    option("out", "folder to write", required=True, metavar="DIR")
    option("init", "drafter to go on from, or a folder with the config.json of a fresh one (default: a fresh one that suits the target)")
    option("held-out", "files to measure on (default: a fiftieth of the data)", nargs="+", metavar="FILE")
    option("self-generate", "texts that the target writes first, to be half of every batch (default: 0)", type=int, metavar="N")
    option("temperature", "at which it writes them (default: 0)", type=float, metavar="T")
    option("k", "tokens drafted in each round where acceptance is measured (default: 4)", type=int, metavar="K", dest="num_draft_tokens")
    option("steps", "updates (default: 1000)", type=int, metavar="N")
    option("batch", "texts in a batch (default: 16)", type=int, metavar="N")
    option("length", "tokens of a text (default: 512)", type=int, metavar="N")
    option("peak", "highest learning rate (default: 5e-4)", type=float, metavar="RATE")
    option("accumulate", "parts in which a batch is computed (default: 1)", type=int, metavar="N")
    option("every", "steps between measurements (default: 100)", type=int, metavar="N")
    option("save-every", "steps between checkpoints, 0 for none (default: as --every)", type=int, metavar="N")
    option("seed", "of everything drawn (default: 0)", type=int, metavar="S")
    option("dtype", "of computing: bfloat16 (the default) or float32")
    option("devices", "devices over which batches are spread (default: 1)", type=int, metavar="N")
    option("unroll", "draft steps that are trained (default: the kind's)", type=int, metavar="N", dest="objective_steps")
    option("anchors", "places of a text that draft (default: 64)", type=int, metavar="N", dest="objective_anchors")
    weights = {
        "decay": "of a draft step, against the one before it",
        "soft": "of cross-entropy to the target's distribution",
        "hard": "of cross-entropy to its best token",
        "tv": "of total variation, which bounds acceptance",
    }
    for name, meaning in weights.items():
        option(name, f"weight {meaning} (default: the kind's)", type=float, metavar="W", dest=f"objective_{name}")
    option("resume", "go on from the newest checkpoint in --out", action="store_true")
    return train


def run(args: argparse.Namespace, progress: bool) -> str:
    """Trains, and returns the folder. Raises what `distil` raises."""
    import jax
    import numpy as np

    from jaxspec.train import distil

    given = {name: value for name, value in vars(args).items() if name != "command"}
    objective = {name.removeprefix("objective_"): given.pop(name) for name in list(given) if name.startswith("objective_")}
    count = given.pop("devices", 1)
    if not 1 <= count <= jax.device_count():
        raise ValueError(f"devices is {count}; found {jax.device_count()}")
    mesh = None if count == 1 else jax.sharding.Mesh(np.asarray(jax.devices()[:count]), ("data",))
    return str(distil(given.pop("target"), given.pop("drafter_kind"), objective=objective, mesh=mesh, progress=progress, **given))
