"""The command `jaxspec train`: a drafter is trained for a target."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxspec.cli import errors


def add_parser(commands: Any) -> None:
    """Adds the command. An option that is not given is left to its default in `distil`, `Run` or the kind's `Objective`."""
    text = (
        "Trains a drafter for a target and writes it in its Hugging Face layout, ready to load. Also writes metrics.jsonl, curves.png and "
        "checkpoints, from which --resume continues."
    )
    train = commands.add_parser("train", help="train a drafter for a target", description=text, argument_default=argparse.SUPPRESS)

    def option(name: str, text: str, **settings: Any) -> None:
        train.add_argument(f"--{name}", help=text, **settings)

    option("target", "hub id, folder or bundled name of the target", required=True)
    option("drafter-kind", "such as mtp, dflash or eagle3; any other word lists them all", required=True, metavar="KIND")
    option("data", "training data: text, .jsonl of texts or conversations, or .npy of token ids", required=True, nargs="+", metavar="FILE")
    option("out", "folder to write the drafter to", required=True, metavar="DIR")
    option("init", "drafter to start from, or a folder with the config.json of a new one (default: a new one for the target)")
    option("held-out", "files to measure on (default: a fiftieth of the data)", nargs="+", metavar="FILE")
    option("self-generate", "texts that the target writes first; they make up half of every batch (default: 0)", type=int, metavar="N")
    option("temperature", "temperature at which the target writes them (default: 0)", type=float, metavar="T")
    option("k", "number of tokens to draft when acceptance is measured (default: 4)", type=int, metavar="K", dest="num_draft_tokens")
    option("steps", "number of updates (default: 1000)", type=int, metavar="N")
    option("batch", "number of texts in a batch (default: 16)", type=int, metavar="N")
    option("length", "tokens of a text (default: 512)", type=int, metavar="N")
    option("peak", "highest learning rate (default: 5e-4)", type=float, metavar="RATE")
    option("accumulate", "number of parts that a batch is computed in, to save memory (default: 1)", type=int, metavar="N")
    option("every", "steps between measurements (default: 100)", type=int, metavar="N")
    option("save-every", "steps between checkpoints; 0 means none (default: --every)", type=int, metavar="N")
    option("seed", "seed of all random choices (default: 0)", type=int, metavar="S")
    option("dtype", "dtype to compute in: bfloat16 or float32 (default: bfloat16)")
    option("devices", "number of devices to spread batches over (default: 1)", type=int, metavar="N")
    option("unroll", "number of draft steps to train (default: the kind's)", type=int, metavar="N", dest="objective_steps")
    option("anchors", "number of places in a text to draft from (default: 64)", type=int, metavar="N", dest="objective_anchors")
    weights = {
        "decay": "of a draft step, relative to the one before it",
        "soft": "of cross-entropy to the target's distribution",
        "hard": "of cross-entropy to the target's best token",
        "tv": "of total variation, which bounds acceptance",
        "confidence": "of the confidence in a guess, of drafters that have one",
    }
    for name, meaning in weights.items():
        option(name, f"weight {meaning} (default: the kind's)", type=float, metavar="W", dest=f"objective_{name}")
    option("resume", "continue from the newest checkpoint in --out", action="store_true")
    train.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> None:
    with errors.door():
        try:
            folder, gain = _train(args)
        except FloatingPointError as error:
            raise errors.UserError(error) from error
    print(folder)
    print(gain, file=sys.stderr)  # stdout is for scripts


def _train(args: argparse.Namespace) -> tuple[str, str]:
    """Trains, and returns the folder and what the training brought, in words. Raises what `distil` raises, and MemoryError where the device
    has too little."""
    import jax
    import numpy as np

    from jaxspec.checks import expanded
    from jaxspec.learning import checkpoints
    from jaxspec.train import distil
    from jaxspec.train.loop import CHECKPOINTS, METRICS, read_metrics

    given = {name: value for name, value in vars(args).items() if name != "command"}
    objective = {name.removeprefix("objective_"): given.pop(name) for name in list(given) if name.startswith("objective_")}
    count = given.pop("devices", 1)
    if not 1 <= count <= jax.device_count():
        raise ValueError(f"devices is {count}; found {jax.device_count()}")
    mesh = None if count == 1 else jax.sharding.Mesh(np.asarray(jax.devices()[:count]), ("data",))
    kept = expanded(args.out) / CHECKPOINTS
    try:
        progress = sys.stderr.isatty()
        folder = distil(given.pop("target"), given.pop("drafter_kind"), objective=objective, mesh=mesh, progress=progress, **given)
    except KeyboardInterrupt:
        if checkpoints.steps_of(kept):
            print(f"\njaxspec: interrupted; the same command with --resume goes on from the newest of {kept}", end="", file=sys.stderr)
        raise
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise MemoryError(f"the device ran out of memory; lower --batch or --length, or take --accumulate: {reason}") from error
    lengths = [row["measured_acceptance_length"] for row in read_metrics(folder)]
    if not lengths:
        return str(folder), f"{folder / METRICS} has nothing to tell: it was removed after the run"
    return str(folder), f"tokens a step {lengths[0]:.2f} -> {lengths[-1]:.2f}, on held-out texts"
