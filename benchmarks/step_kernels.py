"""Shows by how much each kernel lengthens a step on a GPU, as it runs in its CUDA graph: `python benchmarks/step_kernels.py e2b mtp --k 3`.

`jaxspec bench --profile` launches each kernel after the one before has ended; in a step most of them begin earlier. This traces calls of
one round with their graph. A kernel lengthens the step by what it runs on after all before it have ended. Kernels of one name are one row.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxspec.bench import workload
from jaxspec.bench.timing import Rounds, Sequences, weights_of
from jaxspec.engine import cuda_graphs

CALLS = 6  # of which the first is left out
PAUSE = 300_000  # nanoseconds without a kernel, which only the host leaves

Kernel = tuple[int, int, str]  # nanoseconds at which it begins and ends, and its name


def kernels_of(folder: Path) -> list[Kernel]:
    """All kernels of the trace in a folder, by when they begin."""
    (path,) = folder.glob("**/*.xplane.pb")
    found = list[Kernel]()
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines if plane.name.startswith("/device:GPU:0") else ():
            if line.name.startswith("Stream") and "Memcpy" not in line.name:
                found += [(event.start_ns, event.start_ns + event.duration_ns, event.name) for event in line.events]
    return sorted(found)


def calls_of(kernels: list[Kernel]) -> list[list[Kernel]]:
    """The kernels of each call's graph. Pauses part calls, and each call from the few kernels that the host launches after its graph."""
    groups, ended = [list[Kernel]()], 0
    for kernel in kernels:
        if groups[-1] and kernel[0] - ended > PAUSE:
            groups.append([])
        groups[-1].append(kernel)
        ended = max(ended, kernel[1])
    most = max(map(len, groups))
    return [group for group in groups if len(group) > most / 2]


def lines_of(calls: list[list[Kernel]], most: int) -> Iterator[str]:
    """A table of the kernels that lengthen a call the most, in microseconds."""
    longer, taken, count = collections.Counter[str](), collections.Counter[str](), collections.Counter[str]()
    for call in calls:
        ended = call[0][0]
        for begin, end, name in call:
            longer[name] += max(end - ended, 0)
            taken[name] += end - begin
            count[name] += 1
            ended = max(ended, end)
    yield f"{'us':>9} {'count':>6} {'us each':>8} {'runs for':>9}  kernel"
    for name, nanoseconds in longer.most_common(most):
        each = nanoseconds / count[name] / 1e3, taken[name] / count[name] / 1e3
        yield f"{nanoseconds / len(calls) / 1e3:9.1f} {count[name] / len(calls):6.1f} {each[0]:8.2f} {each[1]:9.2f}  {name}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="e2b, e4b, 12b, 26b, 31b, or a folder with a config.json")
    parser.add_argument("drafter", help="as for `jaxspec bench`")
    parser.add_argument("--k", type=int, default=4, help="tokens drafted in each round (default: 4)")
    parser.add_argument("--batch", type=int, default=1, help="(default: 1)")
    parser.add_argument("--quantize", help="as for `jaxspec bench`")
    parser.add_argument("--most", type=int, default=35, help="rows of the table (default: 35)")
    args = parser.parse_args()
    if not cuda_graphs.used_on(jax.devices()[:1]):
        sys.exit(f"the device is a {jax.devices()[0].platform}; only a GPU has CUDA graphs")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the types of a trace have no __module__
        what = {"num_draft_tokens": args.k, "batches": (args.batch,), "quantize": args.quantize}
        plan = workload.plan_bench(args.config, args.drafter, tokens=64, profile=folder, **what)
        target, drafter = weights_of(plan)
        gaps = cuda_graphs.keep_apart(plan.placement.devices)
        sequences = Sequences(plan, target, drafter)
        sequences.fill(plan.work, args.batch)
        rounds = Rounds(plan, sequences, args.batch)
        rounds.compile()
        rounds.warm_up()
        times = rounds.time()
        with jax.profiler.trace(folder):
            for _ in range(CALLS):
                rounds.call(1)
        calls = calls_of(kernels_of(Path(folder)))[1:]
        del gaps
    spans = ", ".join(f"{(max(end for _, end, _ in call) - call[0][0]) / 1e3:.0f}" for call in calls)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: {args.config} with {args.drafter}, K = {args.k}, batch {args.batch}")
    print(f"a step takes {sorted(times.step_ms)[len(times.step_ms) // 2]:.3f} ms; calls of one, traced, {spans} us\n")
    print("\n".join(lines_of(calls, args.most)))


if __name__ == "__main__":
    main()
