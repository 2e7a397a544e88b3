"""What `jaxspec bench` found: its figures, as lines of text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
from collections.abc import Iterator, Sequence

from jaxspec.bench.kernel_times import KernelTime, kernel_lines
from jaxspec.bench.roofline import StepBytes
from jaxspec.bench.workload import Workload
from jaxspec.checks import expanded


@dataclasses.dataclass(frozen=True)
class Spread:
    """Several measurements of one quantity."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of some values, at least one."""
        return cls(statistics.median(values), min(values), max(values))


@dataclasses.dataclass(frozen=True)
class ProgramCost:
    """What it took to make a program ready."""

    trace_s: float
    compile_s: float
    temporary_bytes: int  # of the program's temporary arrays


@dataclasses.dataclass(frozen=True)
class DecodeFigures:
    """Decoding a batch at one temperature. Bytes and operations are those of one device."""

    batch: int
    temperature: float
    num_draft_tokens: int
    context: float  # mean length of a sequence while it was timed
    steps: int  # rounds that were timed, over all repeats
    step_ms: Spread  # a call of many rounds less a call of one, for each further round
    call_ms: float  # what a call takes beside its rounds
    queued_ms: float  # the same of a call that is made before the one before it is read, as the engine does
    tokens_per_s: float  # of the whole batch
    acceptance_length: float  # tokens a step of each sequence
    bytes: StepBytes  # what a step has to read
    flops: float  # what a step has to compute
    floor_ms: float  # the time for those bytes or those operations at the measured rates, whichever is longer
    ratio: float  # step over floor
    loop: ProgramCost
    peak_bytes: int | None  # most memory in use since the process began; None if the device does not say
    kernels: tuple[KernelTime, ...] = ()  # where a step's time goes, if a profile was asked for
    traced_context: float | None = None  # mean length of a sequence in that profile, which is made after all else was timed


@dataclasses.dataclass(frozen=True)
class PrefillFigures:
    """Computing one prompt."""

    length: int  # tokens
    chunk: int  # tokens of a call
    ms: Spread
    tokens_per_s: float
    flops: float  # that the prompt needs, on all devices together
    matmul_share: float  # flops over what the devices could compute in that time, at the measured rate of matrix products
    program: ProgramCost
    kernels: tuple[KernelTime, ...] = ()  # where its time goes, if a profile was asked for


@dataclasses.dataclass(frozen=True)
class BenchReport:
    """What a run of `bench` found, and what it was a run of."""

    command: list[str]
    date: str  # ISO 8601, UTC
    jax: str  # versions
    jaxlib: str
    platform: str
    device: str
    driver: str | None  # the NVIDIA kernel driver's version
    config: str
    drafter: str
    dtype: str
    quantize: str | None  # what the target's float weights were quantised to, or how its checkpoint's are
    quantize_embedding: str | None  # and its token embedding
    quantize_activations: str | None  # and what its matrices are multiplied with
    quantize_drafter: str | None  # what the drafter's were quantised to
    head_guides: bool  # whether a head has a guide
    settings: Workload
    temperatures: tuple[float, ...]  # of the steps, also of those that are still to be timed
    mesh: dict[str, int]  # devices by axis; {} for one device
    target_bytes: int  # of the weights, each counted once
    drafter_bytes: int
    weights_s: float  # how long it took to make them
    copy_bytes_per_s: float  # of one device
    matmul_flops_per_s: float  # of one device
    decode: tuple[DecodeFigures, ...]
    prefill: tuple[PrefillFigures, ...]


def report_lines(report: BenchReport) -> Iterator[str]:
    """The report as lines of text, without its profiles. A longer report of the same run begins with the same lines."""
    work, gb = report.settings, 1e9
    rates = ", ".join(map(str, work.accept.rates[: work.num_draft_tokens])) or work.accept.name
    rows = "" if work.rows is None else f"{work.rows} rows{' on each data shard' if report.mesh.get('data', 1) > 1 else ''}, "
    drafts = f"K = {work.num_draft_tokens}" if work.tree is None else f"tree of {work.tree}"
    with_drafter = f"drafter {report.drafter}, {drafts}, {rows}acceptance {rates}" if work.num_draft_tokens else "no drafter"
    sampling = f"; where a temperature is, top_k {work.top_k} and top_p {work.top_p}" if any(report.temperatures) else ""
    quantised = f", target quantised to {report.quantize}" if report.quantize else ""
    quantised += f", embedding in {report.quantize_embedding}" if report.quantize_embedding else ""
    quantised += f", activations in {report.quantize_activations}" if report.quantize_activations else ""
    quantised += f", drafter in {report.quantize_drafter}" if report.quantize_drafter else ""
    quantised += ", heads with guides" if report.head_guides else ""
    yield f"{report.config}, {report.dtype}{quantised}; {with_drafter}{sampling}; attention {work.attention}"
    mesh = "".join(f", {axis} {size}" for axis, size in report.mesh.items())
    yield f"{report.device}{mesh}, driver {report.driver or 'unknown'}; jax {report.jax}, jaxlib {report.jaxlib}"
    yield (
        f"weights {report.target_bytes / gb:.2f} GB and {report.drafter_bytes / gb:.2f} GB, made in {report.weights_s:.1f} s; "
        f"copy {report.copy_bytes_per_s / gb:.0f} GB/s; matmul {report.matmul_flops_per_s / 1e12:.1f} TFLOP/s"
    )
    if report.decode:
        yield ""
        columns = "step ms      min      max  tokens/s  accepted  GB/step  TFLOP  floor ms  ratio  call ms  queued ms  compile s  peak GB"
        yield f"batch  temp context  {columns}"
    for f in report.decode:
        peak = "       -" if f.peak_bytes is None else f"{f.peak_bytes / gb:8.2f}"
        yield (
            f"{f.batch:5d} {f.temperature:5.2f} {f.context:7.0f} {f.step_ms.median:8.3f} {f.step_ms.min:8.3f} {f.step_ms.max:8.3f} "
            f"{f.tokens_per_s:9.1f} {f.acceptance_length:9.2f} {f.bytes.total / gb:8.3f} {f.flops / 1e12:6.2f} {f.floor_ms:9.3f} "
            f"{f.ratio:6.2f} {f.call_ms:8.2f} {f.queued_ms:10.2f} {f.loop.compile_s:10.1f} {peak}"
        )
    if report.prefill:
        yield ""
        yield "prompt  chunk       ms      min      max  tokens/s   TFLOP  of matmul  compile s"
    for p in report.prefill:
        yield (
            f"{p.length:6d} {p.chunk:6d} {p.ms.median:8.2f} {p.ms.min:8.2f} {p.ms.max:8.2f} {p.tokens_per_s:9.0f} "
            f"{p.flops / 1e12:7.2f} {p.matmul_share:10.1%} {p.program.compile_s:10.1f}"
        )


def profile_lines(report: BenchReport) -> Iterator[str]:
    """Its profiles, as lines of text."""
    for f in report.decode:
        if f.kernels:
            yield f"\nbatch {f.batch} at temperature {f.temperature}, traced at a context of {f.traced_context:.0f}"
            yield from kernel_lines(list(f.kernels), f.step_ms.median)
    for p in report.prefill:
        if p.kernels:
            yield f"\nprompt of {p.length}"
            yield from kernel_lines(list(p.kernels), p.ms.median, "prompt")


def write_json(report: BenchReport, path: str | os.PathLike[str]) -> None:
    """Writes the report as a JSON object with the names of its fields. Raises OSError."""
    expanded(path).write_text(json.dumps(dataclasses.asdict(report), indent=1) + "\n", encoding="utf-8")
