"""Where a program's time goes: the totals of its kernels, from a trace of the profiler."""

from __future__ import annotations

import collections
import dataclasses
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

# Of a step, how much its kernels may be off in all. A step is a CUDA graph and kernels are traced without one, so they differ a little;
# far less was not all in the trace, or counted for too many rounds.
TOLERANCE = 0.15


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """One kind of kernel. kernel: its name without numbers. operation: JAX's name of what it computes, as a path of scopes, and
    the result's shape; "" where the trace does not say. ms, count: of a step."""

    kernel: str
    operation: str
    ms: float
    count: float


def kernel_times(folder: Path, program: str, steps: int) -> list[KernelTime]:
    """The kernels of the newest trace in a folder, those that took longest in all first.

    program: the compiled program's text, which knows what each kernel is for. steps: how many steps the trace holds.
    """
    newest = max(folder.glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        raise RuntimeError(f"the profiler left no trace in {folder}")
    operations = _operations(program)
    sums: dict[tuple[str, str], list[float]] = collections.defaultdict(lambda: [0.0, 0])
    for name, instruction, nanoseconds in _read(newest):
        operation = operations.get(_plain(instruction), operations.get(_plain(name), ""))
        entry = sums[re.sub(r"(_\d+)+$", "", _plain(name)), operation]
        entry[0] += nanoseconds
        entry[1] += 1
    kinds = [KernelTime(*key, ns / 1e6 / steps, count / steps) for key, (ns, count) in sums.items()]
    return sorted(kinds, key=lambda kind: -kind.ms)


def table(kernels: list[KernelTime], step_ms: float, most: int = 25) -> Iterator[str]:
    """Lines: the sum of all kernels beside the step that was timed, then those that took longest."""
    total = sum(kernel.ms for kernel in kernels)
    ratio = total / step_ms
    yield f"kernels of a step: {total:.3f} ms in all, without CUDA graphs; a step takes {step_ms:.3f} ms, the ratio is {ratio:.2f}"
    if abs(ratio - 1) > TOLERANCE:
        reasons = (
            "a step waits between kernels, or kernels are missing in the trace"
            if ratio < 1
            else "kernels ran at once, or were slower in the trace"
        )
        yield f"the kernels do not add up to the step, within {TOLERANCE:.0%}: {reasons}"
    yield f"{'ms':>9} {'share':>6} {'count':>7} {'us each':>9}  kernel: operation"
    for kernel in kernels[:most]:
        share, each = kernel.ms / total if total else 0.0, 1e3 * kernel.ms / kernel.count
        name = f"{kernel.kernel}: {kernel.operation}" if kernel.operation else kernel.kernel
        yield f"{kernel.ms:9.3f} {share:6.1%} {kernel.count:7.1f} {each:9.1f}  {name[:150]}"


def _read(path: Path) -> list[tuple[str, str, float]]:
    # The types behind a trace have no __module__. Python 3.12 warns of each when it is first used, and where a warning is an error the
    # process would end.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return list(_kernels(jax.profiler.ProfileData.from_file(str(path))))


def _kernels(data: Any) -> Iterator[tuple[str, str, float]]:
    """(kernel, HLO instruction or "", nanoseconds) of every kernel. On a GPU they lie in the lines of streams, on a CPU in those of
    XLA's threads, among events of the runtime's own."""
    planes = {plane.name: plane for plane in data.planes}
    devices = [plane for name, plane in planes.items() if name.startswith("/device:GPU")]
    for plane in devices or [planes["/host:CPU"]]:
        for line in plane.lines:
            if not line.name.startswith("Stream" if devices else "tf_XLA"):
                continue
            for event in line.events:
                if devices or re.fullmatch(r"(?!while|call|conditional)[\w.-]+", event.name):
                    yield event.name, str(dict(event.stats).get("hlo_op", "")), event.duration_ns


def _operations(program: str) -> dict[str, str]:
    """HLO instruction -> JAX's name of the operation, without what all of the loop's body has in common, and what it gives."""
    pattern = r'^\s*(?:ROOT )?%?([\w.-]+) = \(*(\w+\[[\d,]*\])?.*?metadata=\{[^}]*?op_name="([^"]*)"'
    found = re.findall(pattern, program, re.MULTILINE)
    return {_plain(name): f"{re.sub('^.*?while/body/(closed_call/)?', '', path)} {shape}".strip() for name, shape, path in found}


def _plain(name: str) -> str:
    """A kernel's name is its instruction's with other separators."""
    return re.sub(r"\W", "_", name)
