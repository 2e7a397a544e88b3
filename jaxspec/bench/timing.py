"""`jaxspec bench`: what a step costs on the device that is there, beside what it has to cost.

Weights are random and of a released model's shape, so no checkpoint is needed; prompts are random tokens, nothing ends a sequence,
and drafts are accepted at given rates. The floor of a step is what it has to read over the bandwidth measured in the same run, or what
it has to compute over the rate of matrix products, whichever is longer.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import importlib.metadata
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec import decode, sharding
from jaxspec.bench import kernel_times, roofline
from jaxspec.bench.random_weights import random_weights
from jaxspec.bench.workload import WARM_UP_STEPS, WARM_UPS, Plan, Workload, plan
from jaxspec.engine import cuda_graphs
from jaxspec.model.target import TargetConfig
from jaxspec.sampling.choice import PLAIN, seed_words
from jaxspec.sampling.filters import Filters


@dataclasses.dataclass(frozen=True)
class Spread:
    """Of several measurements."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class Program:
    """What making a program ready took, and the bytes of its temporary arrays."""

    trace_s: float
    compile_s: float
    temporary_bytes: int


@dataclasses.dataclass(frozen=True)
class DecodeFigures:
    """Decoding a batch. temperature: of every sequence. context: mean length of a sequence while it was timed. steps: rounds that were
    timed, in all repeats. step_ms: the difference of a call of many rounds and one of a single round, by round; call_ms: what a call takes
    beside its rounds. acceptance_length: tokens a step of each sequence. bytes, flops: that a step has to read and to compute.
    floor_ms: the longer time of the two at the measured rates. ratio: step over floor. peak_bytes: most memory in use since the process
    began, None where the device does not say. kernels: by `kernel_times`, if asked for."""

    batch: int
    temperature: float
    num_draft_tokens: int
    context: float
    steps: int
    step_ms: Spread
    call_ms: float
    tokens_per_s: float
    acceptance_length: float
    bytes: roofline.StepBytes
    flops: float
    floor_ms: float
    ratio: float
    loop: Program
    peak_bytes: int | None
    kernels: tuple[kernel_times.KernelTime, ...] = ()


@dataclasses.dataclass(frozen=True)
class PrefillFigures:
    """Computing one prompt. matmul_share: the share of the measured matmul rate that the needed operations make."""

    length: int
    chunk: int
    ms: Spread
    tokens_per_s: float
    flops: float
    matmul_share: float
    program: Program


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that a run of `bench` found, and what it was a run of. mesh: devices by axis, if there were several. copy and matmul
    rates are those of one device, and so are memory and bytes of a step."""

    command: list[str]
    date: str
    jax: str
    jaxlib: str
    platform: str
    device: str
    driver: str | None
    config: str
    drafter: str
    dtype: str
    settings: Workload
    mesh: dict[str, int]
    target_bytes: int
    drafter_bytes: int
    weights_s: float
    copy_bytes_per_s: float
    matmul_flops_per_s: float
    decode: tuple[DecodeFigures, ...]
    prefill: tuple[PrefillFigures, ...]


def bench(config: str, drafter: str = "none", *, progress: bool = True, **asked: Any) -> Report:
    """Times steps and prompts. Arguments and errors are those of `workload.plan`; progress: show a bar."""
    return measure(plan(config, drafter, **asked), progress=progress)


def measure(plan: Plan, *, progress: bool = True) -> Report:
    """Makes the weights and times what was planned."""
    work = plan.work
    stages = 4 + 3 * len(plan.temperatures) * len(plan.batches) + 2 * len(plan.prefill)
    bar = tqdm(total=stages, disable=not progress, leave=False)
    device = jax.devices()[0]
    on_cpu = device.platform == "cpu"

    def stage(text: str) -> None:
        bar.set_description_str(text)
        bar.update()

    with bar:
        stage("copy bandwidth")
        bandwidth = roofline.copy_bandwidth(2**24 if on_cpu else 2**30)
        stage("matmul rate")
        rate = roofline.matmul_rate(256 if on_cpu else 8192, plan.target_tree.dtype)
        stage("random weights")
        begun = time.perf_counter()
        target, drafter = jax.block_until_ready(random_weights(plan.placed(), work.seed))
        weights_s = time.perf_counter() - begun
        gaps = cuda_graphs.keep_apart([device] if plan.mesh is None else plan.mesh.devices.flat)
        decoded = tuple(_decode_all(plan, target, drafter, (bandwidth, rate), stage))
        prefilled = tuple(_prefill_all(plan, target, drafter, rate, stage))
        del gaps
    return Report(
        command=sys.argv,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        jax=jax.__version__,
        jaxlib=importlib.metadata.version("jaxlib"),
        platform=device.client.platform_version.strip(),
        device=device.device_kind,
        driver=_driver(),
        config=plan.config,
        drafter=plan.drafter,
        dtype=plan.dtype,
        settings=work,
        mesh={} if plan.mesh is None else dict(plan.mesh.shape),
        target_bytes=sharding.nbytes(target),
        drafter_bytes=sharding.nbytes(drafter),
        weights_s=weights_s,
        copy_bytes_per_s=bandwidth,
        matmul_flops_per_s=rate,
        decode=decoded,
        prefill=prefilled,
    )


def lines(report: Report) -> Iterator[str]:
    """The report as text."""
    work, gb = report.settings, 1e9
    rates = ", ".join(map(str, work.accept.rates[: work.num_draft_tokens])) or work.accept.name
    with_drafter = f"drafter {report.drafter}, K = {work.num_draft_tokens}, acceptance {rates}" if work.num_draft_tokens else "no drafter"
    sampling = f"; where a temperature is, top_k {work.top_k} and top_p {work.top_p}" if any(f.temperature for f in report.decode) else ""
    yield f"{report.config}, {report.dtype}; {with_drafter}{sampling}; attention {work.attention}"
    mesh = "".join(f", {axis} {size}" for axis, size in report.mesh.items())
    yield f"{report.device}{mesh}, driver {report.driver or 'unknown'}; jax {report.jax}, jaxlib {report.jaxlib}"
    yield (
        f"weights {report.target_bytes / gb:.2f} GB and {report.drafter_bytes / gb:.2f} GB, made in {report.weights_s:.1f} s; "
        f"copy {report.copy_bytes_per_s / gb:.0f} GB/s; matmul {report.matmul_flops_per_s / 1e12:.1f} TFLOP/s"
    )
    if report.decode:
        yield ""
        columns = "step ms      min      max  tokens/s  accepted  GB/step  TFLOP  floor ms  ratio  call ms  compile s  peak GB"
        yield f"batch  temp context  {columns}"
    for f in report.decode:
        peak = "       -" if f.peak_bytes is None else f"{f.peak_bytes / gb:8.2f}"
        yield (
            f"{f.batch:5d} {f.temperature:5.2f} {f.context:7.0f} {f.step_ms.median:8.3f} {f.step_ms.min:8.3f} {f.step_ms.max:8.3f} "
            f"{f.tokens_per_s:9.1f} {f.acceptance_length:9.2f} {f.bytes.total / gb:8.3f} {f.flops / 1e12:6.2f} {f.floor_ms:9.3f} "
            f"{f.ratio:6.2f} {f.call_ms:8.2f} {f.loop.compile_s:10.1f} {peak}"
        )
    if report.prefill:
        yield ""
        yield "prompt  chunk       ms      min      max  tokens/s   TFLOP  of matmul  compile s"
    for p in report.prefill:
        yield (
            f"{p.length:6d} {p.chunk:6d} {p.ms.median:8.2f} {p.ms.min:8.2f} {p.ms.max:8.2f} {p.tokens_per_s:9.0f} "
            f"{p.flops / 1e12:7.2f} {p.matmul_share:10.1%} {p.program.compile_s:10.1f}"
        )
    for f in report.decode:
        if f.kernels:
            yield f"\nbatch {f.batch} at temperature {f.temperature}"
            yield from kernel_times.table(list(f.kernels), f.step_ms.median)


def write_json(report: Report, path: str | os.PathLike[str]) -> None:
    """The report as a JSON object with the names of its fields."""
    Path(path).write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")


def _decode_all(plan: Plan, target: Any, drafter: Any, rates: tuple[float, float], stage: Callable[[str], None]) -> Iterator[DecodeFigures]:
    """Every batch size at every temperature, in one state that has the slots of the largest. rates: bytes and operations a second."""
    if not plan.batches:
        return
    work, slots = plan.work, max(plan.batches)
    stage("prompts: compile")
    state, on = _placed(plan, target, drafter, slots, work.max_len)
    chunk = min(work.prefill_chunk, work.context)
    # Nothing is sampled among the likeliest alone for a prompt's first token: no figure is of it.
    first = functools.partial(decode.prefill, chunk=chunk, round=dataclasses.replace(work.round, needs=PLAIN))
    prefill, _ = _compiled(on(first), target, drafter, state, np.zeros(plan.shards, np.int32))
    admit = jax.jit(on(_admit), donate_argnums=0)

    def prompts(state: Any, requests: decode.Requests) -> Any:
        state = admit(state, _each(plan, slots), requests)
        for slot in range(len(requests.length) // plan.shards):
            for _ in range(math.ceil(work.context / chunk)):
                state = prefill(target, drafter, state, np.full(plan.shards, slot, np.int32))
        return state

    for temperature in plan.temperatures:
        for batch in plan.batches:
            cell = dataclasses.replace(plan, work=dataclasses.replace(work, temperature=temperature))
            state = prompts(state, _requests(cell.work, target.config, batch, work.context, work.max_len))
            state, figures = _decode(cell, on, target, drafter, state, batch, rates, stage)
            yield figures


def _placed(plan: Plan, target: Any, drafter: Any, slots: int, max_len: int) -> tuple[Any, Callable[[Any], Any]]:
    """An empty state, and what makes a function of it run on the plan's devices."""
    init = plan.init(target, drafter, slots, max_len)
    if plan.mesh is None:
        return jax.block_until_ready(jax.jit(init)()), lambda function: function
    layout = sharding.Layout.of(plan.mesh, drafter, init)
    return jax.block_until_ready(layout.empty()), layout.on


def _each(plan: Plan, count: int) -> np.ndarray:
    """The first slots of every data shard, `count` in all."""
    return np.tile(np.arange(count // plan.shards, dtype=np.int32), plan.shards)


def _decode(
    plan: Plan, on: Any, target: Any, drafter: Any, state: Any, batch: int, rates: tuple[float, float], stage: Callable[[str], None]
) -> tuple[Any, DecodeFigures]:
    """Times `batch` sequences, in the first slots of every data shard. Takes the state along, and returns it."""
    work, slots = plan.work, _each(plan, batch)
    name = f"batch {batch} at temperature {work.temperature}"
    stage(f"{name}: compile")
    function = functools.partial(decode.decode_loop, round=work.round)
    loop, loop_cost = _compiled(on(function), target, drafter, state, slots, np.int32(0), np.bool_(False))

    def call(steps: int) -> float:
        nonlocal state
        begun = time.perf_counter()
        state = jax.block_until_ready(loop(target, drafter, state, slots, np.int32(steps), np.bool_(False)))
        return time.perf_counter() - begun

    def counts() -> tuple[np.ndarray, np.ndarray]:
        fields = jax.device_get((state.length, state.rounds, state.status))
        length, rounds, status = (x.reshape(plan.shards, -1)[:, : batch // plan.shards].reshape(-1) for x in fields)
        if not (status == decode.RUNNING).all():
            raise RuntimeError(f"{(status != decode.RUNNING).sum()} of {batch} sequences ended while they were timed")
        return length, rounds

    stage(f"{name}: warm up")
    for _ in range(WARM_UPS):
        call(WARM_UP_STEPS)
    stage(f"{name}: time")
    first_length, first_rounds = counts()
    times, overheads, contexts = [], [], []
    for _ in range(work.repeats):
        short = 1e3 * call(1)
        before, _ = counts()
        times.append((1e3 * call(1 + work.steps) - short) / work.steps)
        overheads.append(short - times[-1])
        length, rounds = counts()
        contexts.append(float(np.mean(before + length)) / 2)
    accepted = float((length - first_length).sum() / (rounds - first_rounds).sum())
    found: tuple[kernel_times.KernelTime, ...] = ()
    if work.profile is not None:
        if cuda_graphs.used_on(jax.tree.leaves(target)[0].devices()):
            loop, _ = _compiled(on(function), target, drafter, state, slots, np.int32(0), np.bool_(False), compiler=cuda_graphs.without)
            call(1)  # loads the kernels
        folder, (_, before) = Path(work.profile) / f"batch-{batch}-temperature-{work.temperature}", counts()
        with jax.profiler.trace(str(folder)):
            call(work.steps)
        traced = int((counts()[1] - before).max())
        # A trace holds the kernels of all devices, which do the same: the mean of one is wanted.
        found = tuple(kernel_times.kernel_times(folder, loop.as_text(), traced * (1 if plan.mesh is None else plan.mesh.size)))
    step, context = Spread.of(times), statistics.mean(contexts)
    devices, shape = plan.devices_of_a_shard, {"batch": batch // plan.shards, "num_draft_tokens": work.num_draft_tokens, "context": context}
    size = roofline.step_bytes(plan.target_tree, plan.drafter_tree, **shape).over(devices)
    flops = roofline.step_flops(plan.target_tree, **shape) / devices
    floor = 1e3 * max(size.total / rates[0], flops / rates[1])
    return state, DecodeFigures(
        batch=batch,
        temperature=work.temperature,
        num_draft_tokens=work.num_draft_tokens,
        context=context,
        steps=work.repeats * work.steps,
        step_ms=step,
        call_ms=statistics.median(overheads),
        tokens_per_s=1e3 * batch * accepted / step.median,
        acceptance_length=accepted,
        bytes=size,
        flops=flops,
        floor_ms=floor,
        ratio=step.median / floor,
        loop=loop_cost,
        peak_bytes=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        kernels=found,
    )


def _prefill_all(plan: Plan, target: Any, drafter: Any, rate: float, stage: Callable[[str], None]) -> Iterator[PrefillFigures]:
    """Every length of a prompt, in one state with a slot for the longest."""
    if not plan.prefill:
        return
    work, max_len, slots = plan.work, max(plan.prefill) + 2, np.zeros(1, np.int32)
    state, on = _placed(plan, target, drafter, 1, max_len)
    admit = jax.jit(on(_admit), donate_argnums=0)
    programs: dict[int, tuple[Any, Program]] = {}
    for length in plan.prefill:
        chunk = min(work.prefill_chunk, length)
        stage(f"prompt of {length}: compile")
        if chunk not in programs:
            prefill = functools.partial(decode.prefill, chunk=chunk, round=work.round)
            programs[chunk] = _compiled(on(prefill), target, drafter, state, slots)
        program, cost = programs[chunk]
        requests, calls = _requests(work, target.config, 1, length, length + 2), math.ceil(length / chunk)

        stage(f"prompt of {length}: time")
        times, warm_ups = [], math.ceil(WARM_UPS / calls)
        for _ in range(warm_ups + work.repeats):
            state = jax.block_until_ready(admit(state, slots, requests))
            begun = time.perf_counter()
            for _ in range(calls):
                state = program(target, drafter, state, slots)
            jax.block_until_ready(state)
            times.append(1e3 * (time.perf_counter() - begun))
            if int(state.length[0]) != length + 1:
                raise RuntimeError(f"a prompt of {length} tokens was not computed: the sequence has {int(state.length[0])}")
        spread = Spread.of(times[warm_ups:])
        flops = roofline.prefill_flops(plan.target_tree, length, chunk, drafter.taps)
        share = 1e3 * flops / spread.median / (rate * plan.devices_of_a_shard)
        yield PrefillFigures(length, chunk, spread, 1e3 * length / spread.median, flops, share, cost)


def _admit(state: decode.DecodeState, ended: jax.Array, requests: decode.Requests) -> decode.DecodeState:
    """Empties the slots `ended`, and puts the requests into the first ones."""
    return decode.admit(decode.release(state, ended), jnp.arange(requests.length.shape[0], dtype=jnp.int32), requests)


def _requests(work: Workload, config: TargetConfig, batch: int, length: int, limit: int) -> decode.Requests:
    """Prompts of random tokens that nothing ends but `limit`."""
    rng = np.random.default_rng(work.seed)
    each = np.full(batch, length, np.int32)
    fields: dict[str, Any] = {
        "tokens": rng.integers(0, config.vocab_size, (batch, length), np.int32),
        "length": each,
        "prompt": each,
        "limit": np.full(batch, limit, np.int32),
        "stop_ids": np.full((batch, 16), -1, np.int32),
        "seed": np.asarray([seed_words(work.seed + i) for i in range(batch)], np.uint32),
        "temperature": np.full(batch, work.temperature, np.float32),
    }
    filters: Any = (np.full(batch, work.top_k, np.int32), np.full(batch, work.top_p, np.float32), np.zeros(batch, np.float32))
    return decode.Requests(**fields, filters=Filters(*filters))


def _compiled(function: Callable[..., Any], *args: Any, compiler: Any = cuda_graphs.compiled) -> tuple[Any, Program]:
    """A program that takes the state along, its third argument, and what making it took. compiler: one of `cuda_graphs`."""
    begun = time.perf_counter()
    lowered = jax.jit(function, donate_argnums=2).lower(*args)
    traced = time.perf_counter()
    program = compiler(lowered, jax.tree.leaves(args[0])[0].devices())
    memory = program.memory_analysis()
    temporary = 0 if memory is None else memory.temp_size_in_bytes
    return program, Program(traced - begun, time.perf_counter() - traced, temporary)


def _driver() -> str | None:
    """The NVIDIA kernel driver's version, or None."""
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text().split() if path.exists() else []
    return next((word for word in words if word[0].isdigit() and "." in word), None)
