"""Times steps and prompts on this device, beside the least time that a step can take.

Weights are random and have the shapes of a released model, so no checkpoint is needed. Prompts are random tokens, nothing ends a
sequence, and drafts are accepted at given rates. The floor of a step is the longer of two times: the bytes that it has to read over the
bandwidth, and the operations that it has to compute over the rate of matrix products. Both rates are measured in the same run.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import functools
import importlib.metadata
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from jaxspec import decode
from jaxspec.bench import automata, kernel_times, roofline
from jaxspec.bench.random_weights import random_weights
from jaxspec.bench.report import BenchReport, DecodeFigures, PrefillFigures, ProgramCost, Spread
from jaxspec.bench.workload import QUEUED, WARM_UP_STEPS, WARM_UPS, BenchPlan, Workload
from jaxspec.checks import expanded
from jaxspec.engine import cuda_graphs
from jaxspec.engine.buckets import spares
from jaxspec.engine.program_kinds import decode_rounds, prefill
from jaxspec.engine.programs import flat
from jaxspec.interrupts import compiled, undisturbed
from jaxspec.model.head_guides import guided, has_guide
from jaxspec.model.target import TargetConfig
from jaxspec.sampling.choice import PLAIN, Needs, seed_words
from jaxspec.sampling.filters import Filters
from jaxspec.sharding.specs import WHOLE
from jaxspec.trees import nbytes


def measure_plan(plan: BenchPlan, *, progress: bool = True) -> Iterator[BenchReport]:
    """Makes the weights and times what was planned. Yields what is known so far: when the weights are there, and after each figure.

    progress: show a bar. Raises RuntimeError if a sequence ends while it is timed.
    """
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
        target, drafter = weights_of(plan)
        weights_s = time.perf_counter() - begun
        report = BenchReport(
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
            quantize=plan.quantize,
            quantize_embedding=plan.quantize_embedding,
            quantize_activations=plan.quantize_activations,
            quantize_drafter=plan.quantize_drafter,
            head_guides=has_guide((target, drafter)),
            settings=work,
            temperatures=plan.temperatures if plan.batches else (),
            mesh=plan.placement.axes,
            target_bytes=nbytes(target),
            drafter_bytes=nbytes(drafter),
            weights_s=weights_s,
            copy_bytes_per_s=bandwidth,
            matmul_flops_per_s=rate,
            decode=(),
            prefill=(),
        )
        yield report
        gaps = cuda_graphs.keep_apart(plan.placement.devices)
        for decoded in _decode_all(plan, target, drafter, (bandwidth, rate), stage):
            report = dataclasses.replace(report, decode=(*report.decode, decoded))
            yield report
        for prefilled in _prefill_all(plan, target, drafter, rate, stage):
            report = dataclasses.replace(report, prefill=(*report.prefill, prefilled))
            yield report
        del gaps


def weights_of(plan: BenchPlan) -> tuple[Any, Any]:
    """The plan's target and drafter with random weights."""
    made = random_weights(plan.placed(), plan.work.seed)
    # Random guides are those of no table.
    return jax.block_until_ready(tuple(map(guided, made)) if plan.placement.head_guides else made)


class Sequences:
    """The state in which all batches of a plan are timed, with the slots of the largest, and the programs that fill it."""

    def __init__(self, plan: BenchPlan, target: Any, drafter: Any):
        work, slots = plan.work, max(plan.batches)
        layout = plan.layout(target, drafter, slots, work.max_len)
        self.plan, self.target, self.drafter, self.slots = plan, target, drafter, slots
        self.state, self.on = jax.block_until_ready(layout.empty()), layout.on
        self.chunk = min(work.prefill_chunk, work.context)
        # Nothing is sampled among the likeliest alone for a prompt's first token: no figure is of it.
        first = functools.partial(decode.prefill, chunk=self.chunk, round=dataclasses.replace(work.round, needs=PLAIN))
        self.prefill, _ = _compiled(self.on(first), target, drafter, self.state, np.zeros(plan.shards, np.int32))
        self.admit = jax.jit(self.on(_admit), donate_argnums=0)

    def fill(self, work: Workload, batch: int) -> None:
        """Takes up `batch` new prompts, in the first slots of every data shard, in place of all sequences."""
        plan = self.plan
        requests = _requests(work, self.target.config, batch, work.context, work.max_len)
        given = self.state, _each(plan, self.slots), requests
        self.state = compiled(self.admit, *given)(*given)
        for slot in range(batch // plan.shards):
            for _ in range(math.ceil(work.context / self.chunk)):
                self.state = self.prefill(self.target, self.drafter, self.state, np.full(plan.shards, slot, np.int32))


class Rounds:
    """Rounds of `batch` sequences, in a program as the engine calls it."""

    def __init__(self, plan: BenchPlan, sequences: Sequences, batch: int):
        work = plan.work
        self.plan, self.sequences, self.batch = plan, sequences, batch
        self.program: Any = None
        self.weights, models = jax.tree.flatten((sequences.target, sequences.drafter))
        self.form = jax.tree.structure(sequences.state)
        rounds = functools.partial(decode_rounds, width=work.num_draft_tokens + 1, round=work.round)
        self.function = flat(sequences.on(rounds, WHOLE), models, self.form)
        self.pool: Any = None  # of automata, where texts follow one
        if work.structured:
            made = automata.made(plan.target_tree.config.vocab_size, work.structured, work.seed)
            self.pool = jax.device_put(made, plan.placement.sharding(WHOLE))

    def arguments(self, steps: int, leaves: Any = None) -> tuple[Any, ...]:
        """What the program takes to run so many rounds. leaves: of a state; by default that of the sequences."""
        columns = np.stack(np.broadcast_arrays(_each(self.plan, self.batch), 0, steps, 0), axis=1).astype(np.int32)
        return self.weights, self.pool, jax.tree.leaves(self.sequences.state) if leaves is None else leaves, columns

    def lower(self) -> Any:
        """The lowered program."""
        return jax.jit(self.function, donate_argnums=2).lower(*self.arguments(0))

    def compile(self, compiler: Any = cuda_graphs.compiled) -> ProgramCost:
        """Makes the program. compiler: a function of `cuda_graphs`."""
        self.program, cost = _compiled(self.function, *self.arguments(0), compiler=compiler)
        return cost

    def call(self, steps: int) -> float:
        """Runs so many rounds. Returns the seconds that the call took."""
        arguments = self.arguments(steps)
        begun = time.perf_counter()
        leaves, found = self.program(*arguments)
        jax.block_until_ready(found)
        spent = time.perf_counter() - begun
        self.sequences.state = self.form.unflatten(leaves)
        return spent

    def queued(self, calls: int) -> float:
        """Makes so many calls of a round, each before what the one before it reports is read, as the engine does. Returns the seconds of a
        call after the first."""
        leaves, done, unread = jax.tree.leaves(self.sequences.state), list[float](), collections.deque[Any]()
        for _ in range(calls):
            leaves, found = self.program(*self.arguments(1, leaves))
            unread.append(found)
            if len(unread) > 1:
                jax.block_until_ready(unread.popleft())
                done.append(time.perf_counter())
        jax.block_until_ready(unread.popleft())
        done.append(time.perf_counter())
        self.sequences.state = self.form.unflatten(leaves)
        return (done[-1] - done[0]) / (calls - 1)

    def counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Each sequence's length and rounds. Raises RuntimeError if one has ended."""
        state, plan = self.sequences.state, self.plan
        fields = jax.device_get((state.length, state.rounds, state.status))
        length, rounds, status = (x.reshape(plan.shards, -1)[:, : self.batch // plan.shards].reshape(-1) for x in fields)
        if not (status == decode.RUNNING).all():
            raise RuntimeError(f"{(status != decode.RUNNING).sum()} of {self.batch} sequences ended while they were timed")
        return length, rounds

    def warm_up(self) -> None:
        """Calls that come before those that are timed."""
        for _ in range(WARM_UPS):
            self.call(WARM_UP_STEPS)
        self.queued(QUEUED)

    def time(self) -> Times:
        """Times calls."""
        work = self.plan.work
        first_length, first_rounds = self.counts()
        times, overheads, contexts = [], [], []
        for _ in range(work.repeats):
            short = 1e3 * self.call(1)
            before, _ = self.counts()
            times.append((1e3 * self.call(1 + work.steps) - short) / work.steps)
            overheads.append(short - times[-1])
            length, rounds = self.counts()
            contexts.append(float(np.mean(before + length)) / 2)
        queued = 1e3 * self.queued(QUEUED) - statistics.median(times)
        accepted = float((length - first_length).sum() / (rounds - first_rounds).sum())
        return Times(times, overheads, queued, statistics.mean(contexts), accepted)


@dataclasses.dataclass(frozen=True)
class Times:
    """What calls of rounds took."""

    step_ms: list[float]  # of each call
    call_ms: list[float]  # of each call, beside its steps
    queued_ms: float  # the same of a call of one step that is queued behind another
    context: float  # positions of a sequence, in the mean
    accepted: float  # tokens of a step of a sequence, in the mean


def _decode_all(
    plan: BenchPlan, target: Any, drafter: Any, rates: tuple[float, float], stage: Callable[[str], None]
) -> Iterator[DecodeFigures]:
    """Times every batch size at every temperature. rates: bytes and operations a second. stage: shows what is being done."""
    if not plan.batches:
        return
    stage("prompts: compile")
    sequences = Sequences(plan, target, drafter)
    for temperature in plan.temperatures:
        for batch in plan.batches:
            cell = dataclasses.replace(plan, work=dataclasses.replace(plan.work, temperature=temperature))
            sequences.fill(cell.work, batch)
            yield _decode(cell, sequences, batch, rates, stage)


def _each(plan: BenchPlan, count: int) -> np.ndarray:
    """The first slots of every data shard, `count` in all: [count] int32."""
    return np.tile(np.arange(count // plan.shards, dtype=np.int32), plan.shards)


def _decode(plan: BenchPlan, sequences: Sequences, batch: int, rates: tuple[float, float], stage: Callable[[str], None]) -> DecodeFigures:
    """Times `batch` sequences, which are in the first slots of every data shard."""
    work = plan.work
    name = f"batch {batch} at temperature {work.temperature}"
    stage(f"{name}: compile")
    rounds = Rounds(plan, sequences, batch)
    loop_cost = rounds.compile()
    stage(f"{name}: warm up")
    rounds.warm_up()
    stage(f"{name}: time")
    times = rounds.time()
    found: tuple[kernel_times.KernelTime, ...] = ()
    traced_context = None
    if work.profile is not None:
        if cuda_graphs.used_on(rounds.weights[0].devices()):
            rounds.compile(cuda_graphs.without)
            rounds.call(1)  # loads the kernels
        folder, (longer, before) = expanded(work.profile) / f"batch-{batch}-temperature-{work.temperature}", rounds.counts()
        with jax.profiler.trace(str(folder)):
            rounds.call(work.steps)
        length, after = rounds.counts()
        traced, traced_context = int((after - before).max()), float(np.mean(longer + length)) / 2
        # A trace holds the kernels of all devices, which do the same. We want one device's.
        found = tuple(kernel_times.read_trace(folder, rounds.program.as_text(), traced * plan.placement.size))
    step = Spread.of(times.step_ms)
    devices, drafts = plan.devices_of_a_shard, {"num_draft_tokens": work.num_draft_tokens, "rows": work.rows}
    if work.tree is not None:
        drafts["rows"] = batch // plan.shards * work.rows_each
    shape: dict[str, Any] = {"batch": batch // plan.shards, "context": times.context, **drafts}
    size = roofline.step_bytes(*plan.read(drafts["rows"] or batch // plan.shards * work.rows_each), **shape).over(devices)
    flops = roofline.step_flops(plan.target_tree, **shape) / devices
    floor = 1e3 * max(size.total / rates[0], flops / rates[1])
    return DecodeFigures(
        batch=batch,
        temperature=work.temperature,
        num_draft_tokens=work.num_draft_tokens,
        context=times.context,
        steps=work.repeats * work.steps,
        step_ms=step,
        call_ms=statistics.median(times.call_ms),
        queued_ms=times.queued_ms,
        tokens_per_s=1e3 * batch * times.accepted / step.median,
        acceptance_length=times.accepted,
        bytes=size,
        flops=flops,
        floor_ms=floor,
        ratio=step.median / floor,
        loop=loop_cost,
        peak_bytes=(jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
        kernels=found,
        traced_context=traced_context,
    )


def _prefill_all(plan: BenchPlan, target: Any, drafter: Any, rate: float, stage: Callable[[str], None]) -> Iterator[PrefillFigures]:
    """Times every length of prompt, all in one state with one slot, by programs as the engine calls them. rate: operations a second of a
    device."""
    if not plan.prefill:
        return
    work, max_len, slots = plan.work, max(plan.prefill) + 2, np.zeros(1, np.int32)
    layout = plan.layout(target, drafter, 1, max_len)
    state, on = jax.block_until_ready(layout.empty()), layout.on
    (weights, models), form = jax.tree.flatten((target, drafter)), jax.tree.structure(state)
    admit = jax.jit(on(_admit), donate_argnums=0)
    programs: dict[tuple[int, bool], tuple[Any, ProgramCost]] = {}  # by rows, and whether prompts may come to their ends
    for length in plan.prefill:
        chunk = min(work.prefill_chunk, length)
        settings = {"chunk": chunk, "round": dataclasses.replace(work.round, needs=_free(work.round.needs))}
        columns = [np.asarray([[0, length, length, 0, begin, 0, 0, 0]], np.int32) for begin in range(0, length, chunk)]
        stage(f"prompt of {length}: compile")
        for ends in (True, *((False,) if length > chunk and spares(target, drafter) else ())):
            function = flat(on(functools.partial(prefill, ends=ends, **settings), WHOLE), models, form)
            if (chunk, ends) not in programs:
                programs[chunk, ends] = _compiled(function, weights, None, jax.tree.leaves(state), columns[0], compiler=_plainly)
        program, cost = programs[chunk, True]
        within, _ = programs.get((chunk, False), (program, None))
        requests = _requests(work, target.config, 1, length, length + 2)

        def compute(
            program: Any, within: Any, length: int = length, requests: decode.Requests = requests, columns: list[np.ndarray] = columns
        ) -> float:
            nonlocal state
            state = jax.block_until_ready(compiled(admit, state, slots, requests)(state, slots, requests))
            leaves = jax.tree.leaves(state)
            begun = time.perf_counter()
            for each in columns:
                leaves, _ = (program if each is columns[-1] else within)(weights, None, leaves, each)
            jax.block_until_ready(leaves)
            took = 1e3 * (time.perf_counter() - begun)
            state = form.unflatten(leaves)
            if int(state.length[0]) != length + 1:
                raise RuntimeError(f"a prompt of {length} tokens was not computed: the sequence has {int(state.length[0])}")
            return took

        stage(f"prompt of {length}: time")
        warm_ups = math.ceil(WARM_UPS / len(columns))
        spread = Spread.of([compute(program, within) for _ in range(warm_ups + work.repeats)][warm_ups:])
        found: tuple[kernel_times.KernelTime, ...] = ()
        if work.profile is not None:
            # One program's text explains the trace, so it is of the one that computes all.
            if cuda_graphs.used_on(jax.tree.leaves(target)[0].devices()):
                function = flat(on(functools.partial(prefill, **settings), WHOLE), models, form)
                program, _ = _compiled(function, weights, None, jax.tree.leaves(state), columns[0], compiler=cuda_graphs.without)
                compute(program, program)  # loads the kernels
            folder = expanded(work.profile) / f"prompt-{length}"
            with jax.profiler.trace(str(folder)):
                compute(program, program)
            found = tuple(kernel_times.read_trace(folder, program.as_text(), plan.placement.size))
        flops = roofline.prefill_flops(plan.target_tree, length, drafter.taps)
        share = 1e3 * flops / spread.median / (rate * plan.devices_of_a_shard)
        yield PrefillFigures(length, chunk, spread, 1e3 * length / spread.median, flops, share, cost, found)


def _admit(state: decode.DecodeState, ended: jax.Array, requests: decode.Requests) -> decode.DecodeState:
    """Empties the slots `ended` and puts the requests into the first slots."""
    return decode.admit(decode.release(state, ended), jnp.arange(requests.length.shape[0], dtype=jnp.int32), requests)


def _requests(work: Workload, config: TargetConfig, batch: int, length: int, limit: int) -> decode.Requests:
    """Requests with prompts of random tokens, which only reaching `limit` positions ends."""
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
    if work.structured:
        fields["automaton"] = fields["automaton_start"] = np.full(batch, automata.START, np.int32)
    filters: Any = (np.full(batch, work.top_k, np.int32), np.full(batch, work.top_p, np.float32), np.zeros(batch, np.float32))
    return decode.Requests(**fields, filters=Filters(*filters))


def _plainly(lowered: Any, devices: Any) -> Any:
    """Compiles what is no loop, as the engine does."""
    return lowered.compile()


def _compiled(function: Callable[..., Any], *args: Any, compiler: Any = cuda_graphs.compiled) -> tuple[Any, ProgramCost]:
    """A compiled program, and what it took to make. The third argument is the state, which is donated. compiler: `_plainly` or a function
    of `cuda_graphs`."""
    begun = time.perf_counter()
    lowered = jax.jit(function, donate_argnums=2).lower(*args)
    traced = time.perf_counter()
    program = undisturbed(functools.partial(compiler, lowered, jax.tree.leaves(args[0])[0].devices()))
    memory = program.memory_analysis()
    temporary = 0 if memory is None else memory.temp_size_in_bytes
    return program, ProgramCost(traced - begun, time.perf_counter() - traced, temporary)


def _free(needs: Needs) -> Needs:
    """Of free texts."""
    return dataclasses.replace(needs, structured=False)


def _driver() -> str | None:
    """The NVIDIA kernel driver's version, or None."""
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text().split() if path.exists() else []
    return next((word for word in words if word[0].isdigit() and "." in word), None)
