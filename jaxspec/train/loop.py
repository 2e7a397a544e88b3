"""The training loop: AdamW on float32 master weights, compute in bfloat16, and checkpoints from which a killed run resumes exactly.

A step is a pure function of (seed, step, weights, moments). Seed and step determine its batch and its random numbers, so a checkpoint
holds only weights, moments and the step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from tqdm.auto import tqdm

from jaxspec.checkpoint.files import lock, refuse_to_replace
from jaxspec.checks import integer, number
from jaxspec.collectives import DATA
from jaxspec.engine.params import MAX_SEED
from jaxspec.interrupts import compiled
from jaxspec.learning import checkpoints
from jaxspec.learning.update import Loss, join, optimizer, split, updater
from jaxspec.sharding.placement import ONE_DEVICE, Placement
from jaxspec.targets import DTYPES
from jaxspec.train.curves import draw_curves

METRICS, CURVES, CHECKPOINTS, SETTINGS = "metrics.jsonl", "curves.png", "checkpoints", "settings.json"


@dataclasses.dataclass(frozen=True)
class Run:
    """How to train. Raises ValueError or TypeError for values that make no sense."""

    steps: int = 1000
    """Updates."""
    batch: int = 16
    """Texts in a batch."""
    length: int = 512
    """Tokens in a text."""
    peak: float = 5e-4
    """The learning rate after warm-up, which takes the first 2 % of the steps. From there it falls as a cosine to a fiftieth."""
    accumulate: int = 1
    """Parts that a batch is cut into, whose gradients are averaged."""
    every: int = 100
    """Steps between rows of metrics.jsonl."""
    save_every: int | None = None
    """Steps between checkpoints, a multiple of `every`. None is `every`; 0 writes no checkpoints."""
    seed: int = 0
    """For everything that is drawn at random."""
    dtype: str = "bfloat16"
    """Of computing, "bfloat16" or "float32". Master weights and moments are float32."""

    def __post_init__(self) -> None:
        for name, least in {"steps": 1, "batch": 1, "length": 4, "accumulate": 1, "every": 1, "save_every": 0}.items():
            if name != "save_every" or self.save_every is not None:
                object.__setattr__(self, name, integer(name, getattr(self, name), least))  # settings.json holds no integers of NumPy
        object.__setattr__(self, "peak", number("peak", self.peak, 0, above=True))
        object.__setattr__(self, "seed", integer("seed", self.seed, 0, MAX_SEED - 1))
        if self.batch % self.accumulate:
            raise ValueError(f"batch is {self.batch}, expected a multiple of accumulate, which is {self.accumulate}")
        if self.save_every is not None and self.save_every % self.every:
            raise ValueError(f"save_every is {self.save_every}, expected a multiple of every, which is {self.every}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; available: {', '.join(map(repr, DTYPES))}")


def check_begin(out: Path, resume: bool) -> None:
    """Raises what `check_out` raises whatever the settings are."""
    left = checkpoints.steps_of(out / CHECKPOINTS)
    if resume and not left:
        raise FileNotFoundError(f"{out} has no checkpoint to resume from")
    if left and not resume:
        raise FileExistsError(f"{out} has checkpoints of an earlier run; resume it, or take another folder")
    if not left and not (out / SETTINGS).is_file():
        refuse_to_replace(out)


def check_out(out: Path, run: Run, settings: dict[str, Any] | None, resume: bool) -> dict[str, Any]:
    """All settings of a run, as its folder keeps them. Raises FileExistsError for a folder whose checkpoints or weights the run would write
    over, unless they are from an earlier start of the same run, and NotADirectoryError for a file. Where the run resumes, raises
    FileNotFoundError for a folder without checkpoints, and ValueError if they are of a run with other settings."""
    wanted = json.loads(json.dumps(dataclasses.asdict(run) | (settings or {})))  # as the file will give them back
    check_begin(out, resume)
    if resume:
        _check_same(out, wanted)
    elif (before := out / SETTINGS).is_file() and before.read_text(encoding="utf-8") != _written(wanted):
        refuse_to_replace(out)
    return wanted


def check_batch(run: Run, placement: Placement) -> None:
    """Raises ValueError if the mesh does not divide the texts that are computed at a time."""
    texts = run.batch // run.accumulate
    if texts % placement.shards:
        raise ValueError(f"{placement.shards} devices along the mesh's axis 'data' do not divide a batch of {texts} texts")


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keeps other runs from writing into a folder meanwhile. Raises ValueError if one does."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / SETTINGS, "a", encoding="utf-8") as file:
        lock(file, out)
        yield


def schedule(peak: float, steps: int) -> optax.Schedule:
    """The learning rate by step: it rises to the peak over the first 2 % of the steps, then falls as a cosine to a fiftieth at the last."""
    rise = max(steps // 50, 1)
    # The first step already has a part of the peak: a step of rate 0 would change nothing.
    return optax.warmup_cosine_decay_schedule(peak / rise, peak, rise - 1, max(steps - 1, rise), peak / 50)


def fit(
    loss: Loss,
    weights: Any,
    fixed: Any,
    draw: Callable[[int], Any],
    run: Run,
    *,
    out: Path,
    evaluate: Callable[[Any], dict[str, float]] | None = None,
    save: Callable[[Any], None] | None = None,
    resume: bool = False,
    settings: dict[str, Any] | None = None,
    placement: Placement = ONE_DEVICE,
    progress: bool = True,
) -> Any:
    """Minimises `loss` and returns the float32 weights.

    weights: a pytree. We train its float leaves, as float32 master weights; the others stay as they are. fixed: passed to `loss`
    unchanged, such as the target. draw: returns the batch of a step, a pytree of arrays with the batch axis first, always the same for
    a step. out: the folder for settings, metrics, curves and checkpoints; a row of its metrics.jsonl has the means since the row before.
    evaluate: takes the weights in the compute dtype and returns figures for a row; it also runs before the first step. save: called
    with the weights at every checkpoint and at the end. resume: continue from the newest checkpoint in `out`. settings: what else must
    not change when a run resumes. placement: batches are spread over the mesh's axis "data"; all its devices hold the weights.

    Raises what `check_batch` and `check_out` raise, and FloatingPointError, naming the step and the last good checkpoint, if a loss or
    gradient is not finite.
    """
    steps, every, seed, accumulate, dtype = run.steps, run.every, run.seed, run.accumulate, DTYPES[run.dtype]
    save_every = every if run.save_every is None else run.save_every
    check_batch(run, placement)
    wanted = check_out(out, run, settings, resume)
    out.mkdir(parents=True, exist_ok=True)
    trained, kept = split(weights)
    masters = jax.tree.map(lambda x: jnp.array(x, jnp.float32), trained)  # copies, since steps donate them
    tx = optimizer(schedule(run.peak, steps))
    moments = tx.init(masters)
    copies, parts = placement.sharding(PartitionSpec()), placement.sharding(PartitionSpec(None, DATA))
    masters, moments, kept = jax.device_put((masters, moments, kept), copies)

    def rounded(masters: Any, kept: Any) -> Any:
        return join(jax.tree.map(lambda x: x.astype(dtype), masters), kept)

    update = updater(loss, tx, rounded, seed=seed, accumulate=accumulate, shardings=copies)
    one = jnp.ones((), jnp.float32)
    start, rows, good = 0, [], None
    in_compute = jax.jit(rounded)

    def measured() -> dict[str, float]:
        if evaluate is None:
            return {}
        found = evaluate(compiled(in_compute, masters, kept)(masters, kept))
        return {name: round(float(value), 4) for name, value in found.items()}

    if resume:
        start, (masters, moments) = checkpoints.restore(out / CHECKPOINTS, masters, moments)
        good = (out / CHECKPOINTS).resolve() / str(start)
        rows = [row for row in read_metrics(out) if row["step"] <= start]
    elif evaluate is not None:
        rows = [{"step": 0, "seconds": 0.0, **measured()}]
    if not resume:
        (out / SETTINGS).write_text(_written(wanted), encoding="utf-8")
    (out / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    spent = rows[-1]["seconds"] if rows else 0.0
    pending: list[dict[str, jax.Array]] = []
    program = None
    began = time.perf_counter()
    with tqdm(total=steps, initial=start, desc="Training", unit="step", disable=not progress) as bar:
        for step in range(start, steps):
            batch = jax.tree.map(lambda x: x.reshape(accumulate, -1, *x.shape[1:]), draw(step))
            given = kept, fixed, jax.device_put(batch, parts), jnp.asarray(step), one
            program = program or compiled(update, masters, moments, *given)
            masters, moments, metrics = program(masters, moments, *given)
            pending.append(metrics)
            bar.update()
            if (step + 1) % every and step + 1 != steps:
                continue
            found = jax.device_get(pending)
            _check_finite(found, step + 2 - len(found), good)
            pending.clear()
            row = {"step": step + 1, "seconds": round(spent + time.perf_counter() - began, 1)}
            row |= {name: round(float(np.mean([f[name] for f in found])), 6) for name in found[0]}
            row |= measured()
            rows.append(row)
            with (out / METRICS).open("a", encoding="utf-8") as log:
                print(json.dumps(row), file=log, flush=True)
            bar.set_postfix({name: f"{row[name]:.3f}" for name in ("loss", "measured_acceptance_length") if name in row})
            draw_curves(rows, out / CURVES)
            if save_every and ((step + 1) % save_every == 0 or step + 1 == steps):
                good = checkpoints.save(out / CHECKPOINTS, step + 1, masters, moments)
                if save is not None and step + 1 < steps:
                    save(join(masters, kept))
    result = join(masters, kept)
    if save is not None:
        save(result)
    return result


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl, [] if there is none. A last line that was cut off is left out."""
    path, rows = out / METRICS, []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _written(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2) + "\n"


def _check_finite(found: list[dict[str, Any]], first: int, good: Path | None) -> None:
    for step, metrics in enumerate(found, start=first):
        for name in ("loss", "gradient"):
            if not math.isfinite(metrics[name]):
                last = "no checkpoint was written before" if good is None else f"the last good checkpoint is {good}"
                raise FloatingPointError(f"the {name} at step {step} is {metrics[name]}; {last}")


def _check_same(out: Path, settings: dict[str, Any]) -> None:
    try:
        before = json.loads((out / SETTINGS).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"{out / SETTINGS} is no JSON, so what the run was started with is not known: {error}") from error
    for name in sorted({*before, *settings}):
        if before.get(name) != settings.get(name):
            raise ValueError(
                f"{name} is {settings.get(name)!r}; the run in {out} has {before.get(name)!r}, and a resumed run must have the same"
            )
