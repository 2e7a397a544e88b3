"""Training a drafter for a target: `distil`. And the target itself, which is what makes its drafters stale: `finetune`."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec import checkpoint
from jaxspec.checkpoint import safetensors
from jaxspec.checkpoint.files import CONVERTED, SUFFIX
from jaxspec.checks import expanded, flag, integer, number, path, unknown
from jaxspec.collectives import DATA
from jaxspec.drafters.base import NoDraft
from jaxspec.drafters.registry import abstract_drafter, load_drafter, save_trained
from jaxspec.engine.memory import AUTO_SLOTS, memory_limit, memory_used, most_slots, sizes_of
from jaxspec.interrupts import compiled, heeded
from jaxspec.learning.losses import Batch, distil_loss, target_loss
from jaxspec.learning.settings import FIELDS, check_tokens
from jaxspec.learning.update import split
from jaxspec.model.families import family_of
from jaxspec.model.target import TargetConfig, TargetModel
from jaxspec.progress import watched
from jaxspec.sharding.placement import Placement, placement_of
from jaxspec.sharding.specs import WHOLE
from jaxspec.targets import DTYPES, abstract_target, eos_token_ids, load_target, read_quantisation, read_target
from jaxspec.text import Tokenizer, load_tokenizer
from jaxspec.train import kinds
from jaxspec.train.data import drawn, held_back, joined, read, take_rows
from jaxspec.train.generate import acceptance_length, beginnings, continued, written
from jaxspec.train.loop import Run, alone, check_batch, check_begin, check_out, fit
from jaxspec.trees import packed_kinds
from pallas_kernels import dialect

MEASURED = 16  # held-out texts that acceptance is measured on
SCORED = 64  # held-out texts that the loss is measured on
WRITING_SLOTS = 1024  # texts written at a time, where memory allows
WRITTEN = "self_generated.npz"
WRITTEN_AT_ONCE = 8  # texts a slot, after which they are kept
BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json", "special_tokens_map.json")

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@heeded()
def distil(
    target: str | os.PathLike[str],
    drafter_kind: str,
    *,
    data: Files,
    out: str | os.PathLike[str],
    init: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    held_out: Files | None = None,
    self_generate: int = 0,
    temperature: float = 0.0,
    objective: Mapping[str, Any] | None = None,
    num_draft_tokens: int = 4,
    resume: bool = False,
    mesh: Mesh | None = None,
    progress: bool | None = None,
    **run: Any,
) -> Path:
    """Trains a drafter to guess what a target writes, and returns the folder that holds it, which `load` takes as a drafter.

    target: a hub id, folder or bundled name; its weights stay as they are. drafter_kind: "mtp", "dflash", "dflash2", "dspark", "eagle3",
    "mtp-modules", "draft-model", or the name of another kind that is registered and has an objective. data: files, see `data.read`. out:
    the folder; float weights there have the dtype that its config.json names, bfloat16 or else float32. It also gets metrics.jsonl,
    curves.png and checkpoints/, which hold float32. init: the drafter to go on from (a hub id, folder or bundled name), or the config.json
    of a fresh one, as a mapping or in a folder without weights; by default a fresh one of a size that suits the target. held_out: files
    that are measured on and not trained on; by default a fiftieth of the data. self_generate: texts that the target first writes behind
    beginnings of the data, at `temperature`, and that are half of every batch. objective: fields of `Objective` that shall differ from the
    kind's. num_draft_tokens: K with which acceptance is measured. resume: go on from the newest checkpoint in `out`, with the target, texts
    and settings that the run began with. mesh: batches are spread over its axis "data", and all weights are on each of its devices. run:
    fields of `loop.Run`: steps, batch, length, peak and others.

    Raises FileNotFoundError, TypeError or ValueError for what cannot be used, FileExistsError where `out` holds another run or another
    checkpoint, and FloatingPointError as `loop.fit` does.
    """
    kind, how, out, progress = kinds.kind_of(drafter_kind), _run(run, distil), expanded(path("out", out, "a folder")), watched(progress)
    resume = flag("resume", resume)
    assert kind.objective is not None  # as of every kind that can be trained
    if not isinstance(objective, Mapping | None):
        raise TypeError(f"objective is {objective!r}, expected a dict of fields of Objective")
    for name in objective or {}:
        if name not in FIELDS:
            raise unknown("the objective", name, FIELDS)
    goal = dataclasses.replace(kind.objective, **objective or {})
    integer("the objective's steps", goal.steps, 1, how.length - 1)
    integer("num_draft_tokens", num_draft_tokens, 1, how.length - 1)
    integer("self_generate", self_generate, 0)
    if self_generate and how.batch < 2:
        raise ValueError(f"batch is {how.batch}, expected at least 2 with self_generate: half of every batch are texts of the target")
    temperature = number("temperature", temperature, 0)
    placement = _placement(mesh)
    check_batch(how, placement)
    folder = checkpoint.resolve(path("target", target, "a hub id, a folder or a bundled name"))
    raw, tokenizer = checkpoint.read_config(folder), load_tokenizer(folder)
    of_target: Any = read_target(folder)[0]
    # What can be refused here is, before the weights of the target are read, which takes long.
    texts, held = _texts(data, held_out, tokenizer, how.length, of_target)
    first = _init(drafter_kind, init, raw, of_target)
    for count, named in ((goal.steps, f"the objective has {goal.steps} draft steps: "), (num_draft_tokens, "")):
        try:
            jax.eval_shape(lambda count=count: first[0].init(1, how.length, count))
        except ValueError as error:
            raise ValueError(f"{named}{error}") from error
    check_begin(out, resume)
    model = _target(folder, DTYPES[how.dtype])  # which writes texts where it is; a mesh's devices get copies when training begins
    weights, config, generation, begun = _drafter(drafter_kind, first, model, texts, how.seed)
    settings = {
        "drafter_kind": drafter_kind,
        "target": os.fspath(target),
        "target_files": checkpoint.fingerprint(folder),
        "data": _checksum(texts),
        "held_out": _checksum(held),
        "self_generate": self_generate,
        "temperature": temperature,
        "num_draft_tokens": num_draft_tokens,
        "objective": dataclasses.asdict(goal),
        "config": config,
        "init": _checksum(begun),
    }
    check_out(out, how, settings, resume)  # before texts are written, which takes long

    def loss(drafter: Any, model: TargetModel, batch: Batch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return distil_loss(drafter, model, batch, key, goal)

    def save(drafter: Any) -> None:
        save_trained(out, drafter, config, generation)

    with alone(out):
        own = None
        if self_generate:
            own = _own(folder, model, tokenizer, texts, self_generate, temperature, how, out / WRITTEN, progress)
        model = jax.device_put(model, placement.sharding(WHOLE))
        fit(
            loss,
            weights,
            model,
            drawn(texts, how.batch, how.seed, own=own),
            how,
            out=out,
            evaluate=_evaluation(model, held, loss, min(how.batch // how.accumulate, len(held.ids)), num_draft_tokens),
            save=save,
            resume=resume,
            settings=settings,
            placement=placement,
            progress=progress,
        )
    return out


@heeded()
def finetune(
    target: str | os.PathLike[str],
    *,
    data: Files,
    out: str | os.PathLike[str],
    held_out: Files | None = None,
    resume: bool = False,
    mesh: Mesh | None = None,
    progress: bool | None = None,
    **run: Any,
) -> Path:
    """Trains all weights of a target's text model on other text, and returns the folder that holds it, which `load` takes as a target.

    Arguments and errors as for `distil`, and ValueError for a quantised target.
    """
    how, out, placement = _run(run, finetune), expanded(path("out", out, "a folder")), _placement(mesh)
    resume = flag("resume", resume)
    check_batch(how, placement)
    folder = checkpoint.resolve(path("target", target, "a hub id, a folder or a bundled name"))
    quantisation = read_quantisation(folder)
    if quantisation is not None and not quantisation.dense:
        raise ValueError(f"the target {folder} is quantised ({quantisation.name}); only float weights can be trained")
    raw, tokenizer = checkpoint.read_config(folder), load_tokenizer(folder)
    texts, held = _texts(data, held_out, tokenizer, how.length, read_target(folder)[0])
    settings = {"target": os.fspath(target), "target_files": checkpoint.fingerprint(folder)}
    settings |= {"data": _checksum(texts), "held_out": _checksum(held)}
    check_out(out, how, settings, resume)  # before weights are read, and the run's first file is there
    model = _target(folder, jnp.float32)

    def loss(model: TargetModel, _: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return target_loss(model, batch)

    def save(model: TargetModel) -> None:
        save_target(out, model, raw)
        for name in BESIDE:
            if (folder / name).exists():
                shutil.copy(folder / name, out / name)

    score = scores(held, loss, min(how.batch // how.accumulate, len(held.ids)))
    draw = drawn(texts, how.batch, how.seed)
    with alone(out):
        fit(loss, model, (), draw, how, out=out, evaluate=lambda m: score(m, ()), save=save, resume=resume, settings=settings,
            placement=placement, progress=watched(progress))  # fmt: skip
    return out


def save_target(out: Path, model: TargetModel, config: Mapping[str, Any]) -> None:
    """Writes a target's text model. Weights get the config's dtype."""
    dtype = safetensors.FLOATS["BF16"] if model.config.dtype == "bfloat16" else np.float32
    prefixes = family_of(model.config).prefixes
    checkpoint.save_weights(out, model, config, prefix=prefixes[0 if "text_config" in config else -1], dtype=dtype)


def _target(folder: Path, dtype: Any) -> TargetModel:
    """A target's weights, on one device."""
    config: Any = read_target(folder)[0]
    quantisation = read_quantisation(folder)
    return load_target(folder, abstract_target(config, dtype, quantisation), quantisation, progress=False)


def _run(given: Mapping[str, Any], function: Callable[..., Any]) -> Run:
    """The `Run` of these fields. Raises TypeError for an unknown one."""
    known = [field.name for field in dataclasses.fields(Run)]
    for name in given:
        if name not in known:
            raise unknown(function.__name__, name, known)
    return Run(**given)


def _placement(mesh: Any) -> Placement:
    """Where a run computes. Raises TypeError or ValueError."""
    if mesh is not None and not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is {mesh!r}, expected a Mesh with an axis 'data', or None")
    if mesh is not None and DATA not in mesh.axis_names:
        raise ValueError(f"mesh has the axes {mesh.axis_names}; expected one called {DATA!r}, over which batches are spread")
    return placement_of(mesh)


def _texts(data: Files, held_out: Files | None, tokenizer: Tokenizer, length: int, config: TargetConfig) -> tuple[Batch, Batch]:
    """(to train on, held out)"""

    def load(name: str, files: Any) -> Batch:
        paths = list(files) if isinstance(files, Iterable) and not isinstance(files, str) else [files]
        for file in paths:
            path(name, file, "a file, or a list of files")
        if not paths:
            raise ValueError(f"{name} is {files!r}, expected at least one file")
        return read(paths, tokenizer, length=length, vocab_size=config.vocab_size)

    return held_back(load("data", data)) if held_out is None else (load("data", data), load("held_out", held_out))


def _init(kind: str, init: Any, raw: Mapping[str, Any], target: TargetConfig) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
    """(drafter, config.json, generation_config.json). The drafter has float32 weights, or is abstract if it is a fresh one. Raises
    ValueError, TypeError or FileNotFoundError for an init that is no drafter of the kind or does not fit the target."""
    chosen = kinds.kind_of(kind)
    if isinstance(init, str | os.PathLike):
        folder = checkpoint.resolve(init)
        config, generation = checkpoint.read_config(folder), checkpoint.read_generation_config(folder)
        if (folder / CONVERTED).exists() or any(file.name.removesuffix(".index.json").endswith(SUFFIX) for file in folder.iterdir()):
            found = abstract_drafter(folder, target, jnp.float32)
            if not isinstance(found, chosen.made):
                raise ValueError(f"init {folder} is a {type(found).__name__}; drafter_kind {kind!r} is a {chosen.made.__name__}")
            check_tokens(found)
            if packed := packed_kinds(found):
                raise ValueError(f"the weights of init {folder} are quantised ({', '.join(packed)}); a drafter that is trained is float")
            if readings := getattr(found, "readings", ()):
                raise ValueError(
                    f"the config.json of init {folder} leaves open {' or '.join(readings)}; expected the one that the drafter was trained "
                    "with: generate with it, and llm.stats says which accepts more"
                )
            return load_drafter(folder, target, jnp.float32, progress=False), config, generation
    elif init is not None:
        if not isinstance(init, Mapping):
            raise TypeError(f"init is {init!r}, expected a drafter, a folder, a config.json as a dict, or None")
        config, generation = init, chosen.generation
    elif chosen.default_config is not None:
        config, generation = chosen.default_config(raw, target), chosen.generation
    else:
        raise ValueError(f"init is None, and drafter_kind {kind!r} has no default config; expected a config.json or a drafter")
    abstract = kinds.abstract_fresh(chosen, config, target)
    check_tokens(abstract)
    return abstract, config, generation


def _drafter(
    kind: str, first: tuple[Any, Mapping[str, Any], Mapping[str, Any]], model: TargetModel, texts: Batch, seed: int
) -> tuple[Any, Mapping[str, Any], Mapping[str, Any], Any]:
    """(float32 weights, config.json, generation_config.json, those of the weights by which one init is told from another). These are all of
    a drafter that was trained; of a fresh one, whose float weights follow from config and seed, the others, which stay as they are. first:
    what `_init` gives."""
    weights, config, generation = first
    if not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(weights)):
        return weights, config, generation, weights
    weights = kinds.fresh(kinds.kind_of(kind), config, model, texts.ids, seed)
    if getattr(weights, "readings", ()):  # it learns the first, and its config.json says so
        weights, config = weights.read_as(np.int32(0)).decided(config)
    return weights, config, generation, split(weights)[1]


def _own(
    folder: Path,
    model: TargetModel,
    tokenizer: Tokenizer,
    texts: Batch,
    count: int,
    temperature: float,
    how: Run,
    kept: Path,
    progress: bool,
) -> Batch:
    """Texts that the target writes on one device, where `model` lies. They are kept in a file as they come, so that a run which goes on has
    the same."""
    asked = json.dumps([checkpoint.fingerprint(folder), _checksum(texts), count, temperature, how.seed, how.length])
    own = Batch(*(np.zeros((0, *shape), np.int32) for shape in ((how.length,), (), ())))
    if kept.exists():
        found = np.load(kept, allow_pickle=False)
        if str(found["asked"]) == asked:
            own = Batch(found["ids"], found["first"], found["length"])
    if len(own.ids) == count:
        return own
    from jaxspec.engine.llm import LLM
    from jaxspec.engine.settings import Settings

    config, generation = read_target(folder)
    slots = min(count, _slots(model, how.length))
    settings = Settings(num_draft_tokens=0, max_slots=slots, max_len=how.length, progress=progress)
    llm = LLM(model, NoDraft(), tokenizer, settings, eos_token_ids=eos_token_ids(config, generation))
    prompts = beginnings(texts, count, how.seed)
    kept.parent.mkdir(parents=True, exist_ok=True)
    while (at := len(own.ids)) < count:
        more = written(llm, prompts[at : at + WRITTEN_AT_ONCE * slots], how.length, temperature=temperature, seed=how.seed + at)
        own = joined(own, more)
        unfinished = kept.with_name(f".{kept.name}")
        with unfinished.open("wb") as file:
            np.savez(file, asked=asked, ids=own.ids, first=own.first, length=own.length)
        unfinished.replace(kept)
    del llm
    gc.collect()  # an engine refers to itself, and its cache may be most of the memory
    return own


def _checksum(tree: Any) -> str:
    """The CRC-32 of all bytes, in hexadecimal digits."""
    found = 0
    for leaf in jax.tree.leaves(tree):
        found = zlib.crc32(np.ascontiguousarray(leaf).data, found)
    return f"{found:08x}"


def _slots(model: TargetModel, length: int) -> int:
    """How many texts are written at a time: what memory allows beside what is there."""
    device = jax.local_devices()[0]
    limit = memory_limit(device)
    if limit is None:
        return AUTO_SLOTS
    sizes = sizes_of(model, NoDraft(), max_len=length, num_draft_tokens=0, kernels=dialect.obstacle() is None)
    room = int(0.9 * limit) - memory_used(device) + sizes.weights  # which are there already
    return most_slots(sizes, room, WRITING_SLOTS) or 1


def scores(held: Batch, loss: Callable[..., Any], batch: int) -> Callable[[Any, Any], dict[str, float]]:
    """Of weights and what is fixed, the mean loss and metrics of held-out texts, of which there is a batch at least."""

    @jax.jit
    def score(weights: Any, fixed: Any, part: Batch) -> dict[str, jax.Array]:
        value, metrics = loss(weights, fixed, part, jax.random.key(0))
        return {"held_out_loss": value, **{f"held_out_{name}": value for name, value in metrics.items()}}

    count = max(min(SCORED, len(held.ids)) // batch, 1)
    parts = [take_rows(held, slice(i * batch, (i + 1) * batch)) for i in range(count)]

    def mean(weights: Any, fixed: Any) -> dict[str, float]:
        program = compiled(score, weights, fixed, parts[0])
        found = jax.device_get([program(weights, fixed, part) for part in parts])
        return {name: float(np.mean([f[name] for f in found])) for name in found[0]}

    return mean


def _evaluation(
    model: TargetModel, held: Batch, loss: Callable[..., Any], batch: int, num_draft_tokens: int
) -> Callable[[Any], dict[str, float]]:
    """Held-out loss and metrics, and the acceptance length of greedy text behind beginnings of held-out texts, by the loop that serves."""
    score = scores(held, loss, batch)
    some = take_rows(held, np.linspace(0, len(held.ids) - 1, min(MEASURED, len(held.ids))).astype(int))
    # What was given of a text, or its first half.
    given = np.where(some.first > 0, np.minimum(some.first, some.length), some.length // 2).clip(1).astype(np.int32)

    @jax.jit
    def accepted(model: TargetModel, drafter: Any) -> jax.Array:
        return acceptance_length(continued(model, drafter, jnp.asarray(some.ids), jnp.asarray(given), num_draft_tokens))

    def evaluate(drafter: Any) -> dict[str, float]:
        return {**score(drafter, model), "measured_acceptance_length": float(compiled(accepted, model, drafter)(model, drafter))}

    return evaluate
