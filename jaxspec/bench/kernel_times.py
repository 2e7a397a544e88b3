"""Where a program's time goes: the total time of each kind of kernel, from a trace of JAX's profiler."""

from __future__ import annotations

import collections
import dataclasses
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

# By what share the kernels of a step may differ from the step's time. They differ a little because a step is timed as a CUDA graph, some of
# whose kernels overlap, and traced one kernel after the other. A larger difference means that many overlap, that kernels are missing in
# the trace or that the count of steps is wrong.
TOLERANCE = 0.15


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """One kind of kernel in a step."""

    kernel: str  # its name without numbers
    operation: str  # JAX's name for what it computes, a path of scopes, and the result's shape; "" if the trace does not say
    ms: float  # in all
    count: float  # how often it runs


def read_trace(folder: Path, program: str, steps: int) -> list[KernelTime]:
    """The kernels of the newest trace in a folder; those that take the longest come first.

    program: the compiled program's text, which names the operation of each kernel. steps: how many steps the trace holds. Raises
    RuntimeError if there is no trace.
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


def kernel_lines(kernels: list[KernelTime], whole_ms: float, whole: str = "step", most: int = 25) -> Iterator[str]:
    """Lines of text: the sum of all kernels beside the time of a whole step or prompt, then the `most` kernels that take the longest."""
    total = sum(kernel.ms for kernel in kernels)
    ratio = total / whole_ms
    yield f"kernels of a {whole}: {total:.3f} ms in all, without CUDA graphs; a {whole} takes {whole_ms:.3f} ms, the ratio is {ratio:.2f}"
    if abs(ratio - 1) > TOLERANCE:
        reasons = (
            f"a {whole} waits between kernels, or kernels are missing in the trace"
            if ratio < 1
            else f"those of a {whole} overlap more than the trace's, or were slower in the trace"
        )
        yield f"the kernels do not add up to the {whole}, within {TOLERANCE:.0%}: {reasons}"
    yield f"{'ms':>9} {'share':>6} {'count':>7} {'us each':>9}  kernel: operation"
    for kernel in kernels[:most]:
        share, each = kernel.ms / total if total else 0.0, 1e3 * kernel.ms / kernel.count
        name = f"{kernel.kernel}: {kernel.operation}" if kernel.operation else kernel.kernel
        yield f"{kernel.ms:9.3f} {share:6.1%} {kernel.count:7.1f} {each:9.1f}  {name[:150]}"


def _read(path: Path) -> list[tuple[str, str, float]]:
    # The types of a trace have no __module__. Python 3.12 warns at the first use of each; if warnings are errors, the process dies.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return list(_kernels(jax.profiler.ProfileData.from_file(str(path))))


def _kernels(data: Any) -> Iterator[tuple[str, str, float]]:
    """Yields (kernel, HLO instruction or "", nanoseconds) for every run of a kernel.

    A GPU's kernels are in the trace's lines of streams. A CPU's are in the lines of XLA's threads, between events of the runtime.
    """
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
    """HLO instruction -> JAX's name of the operation and the shape of its result. The path of the loop's body is left out."""
    pattern = r'^\s*(?:ROOT )?%?([\w.-]+) = \(*(\w+\[[\d,]*\])?.*?metadata=\{[^}]*?op_name="([^"]*)"'
    found = re.findall(pattern, program, re.MULTILINE)
    return {_plain(name): f"{re.sub('^.*?while/body/(closed_call/)?', '', path)} {shape}".strip() for name, shape, path in found}


def _plain(name: str) -> str:
    """A name with "_" for every separator: a kernel and its instruction differ in those alone."""
    return re.sub(r"\W", "_", name)
