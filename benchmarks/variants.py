"""Times steps with other constants of kernels, in turn in one process, so that their times can be compared.

    python benchmarks/variants.py bench --config 12b --drafter mtp --k 4 --batch 8 --tokens 64 --variant linear.mosaic.FEW_ROWS=40

Options are those of `jaxspec bench` but for `--json`, `--mesh`, `--prefill` and `--profile`. Each `--variant` names constants of modules in
`pallas_kernels`, or of others by their whole names (`jaxspec.engine.cuda_graphs.WHOLE_LOOP`), and their values, several with commas. The
weights are made once. All programs are compiled before the first is timed, since meanwhile XLA tries kernels on the GPU. They are timed in
turn, `--turns` times: what differs between two equal variants is the machine's. A line ends with whether the texts are the first one's.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import dataclasses
import importlib
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import jax
import numpy as np

from jaxspec.bench import roofline, timing, workload
from jaxspec.bench.report import Spread
from jaxspec.cli import bench
from jaxspec.engine import cuda_graphs

NEXT = re.compile(r",(?=[A-Za-z_]\w*\.[\w.]+=)")  # the comma before another constant; those within a value stay


@contextmanager
def changed(variant: str) -> Iterator[None]:
    """The constants have their values of the variant meanwhile, for programs that are traced meanwhile. Raises ValueError, SyntaxError,
    ImportError or AttributeError if there are no such constants, or if those are no values."""
    jax.clear_caches()
    with ExitStack() as stack:
        for change in filter(None, NEXT.split(variant)):
            name, value = change.split("=", 1)
            module, constant = (name if name.startswith("jaxspec.") else f"pallas_kernels.{name}").rsplit(".", 1)
            stack.enter_context(mock.patch.object(importlib.import_module(module), constant, ast.literal_eval(value.strip())))
        yield


def checked(variant: str) -> str:
    """The variant, if there are such constants."""
    try:
        with changed(variant):
            return variant
    except (ValueError, SyntaxError, ImportError, AttributeError) as error:
        raise argparse.ArgumentTypeError(f"found {variant!r}, expected constants of modules and values: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options = bench.add_parser(parser.add_subparsers(required=True))
    options.add_argument("--variant", action="append", default=[], type=checked, metavar="MODULE.CONSTANT=VALUE,...", dest="variants")
    options.add_argument("--turns", type=int, default=2, help="how often each program is timed (default: %(default)s)")
    given = vars(parser.parse_args())
    variants, turns = given.pop("variants"), given.pop("turns")
    del given["command"]
    if refused := {"json", "mesh", "prefill", "profile"} & given.keys():
        parser.error(f"--{min(refused)} is not served here")
    plan = workload.plan_bench(**given)
    bandwidth = roofline.copy_bandwidth(2**24 if jax.default_backend() == "cpu" else 2**30)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, a copy moves {bandwidth / 1e9:,.0f} GB/s", flush=True)
    sequences = timing.Sequences(plan, *timing.weights_of(plan))
    gaps = cuda_graphs.keep_apart(plan.placement.devices)
    cells = list[tuple[workload.BenchPlan, int, dict[str, timing.Rounds]]]()
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        compiling = list[tuple[timing.Rounds, concurrent.futures.Future]]()
        for temperature in plan.temperatures:
            for batch in plan.batches:
                cell = dataclasses.replace(plan, work=dataclasses.replace(plan.work, temperature=temperature))
                cells.append((cell, batch, {}))
                for variant in dict.fromkeys(("", *variants)):
                    with changed(variant):
                        rounds = timing.Rounds(cell, sequences, batch)
                        program = pool.submit(cuda_graphs.compiled, rounds.lower(), rounds.weights[0].devices())
                        if "jaxspec." in variant:  # what compiles a program may read such constants
                            concurrent.futures.wait([program])
                    cells[-1][-1][variant] = rounds
                    compiling.append((rounds, program))
        for rounds, program in compiling:
            rounds.program = program.result()
    for cell, batch, programs in cells:
        times: dict[str, list[float]] = {variant: [] for variant in programs}
        texts = dict[str, np.ndarray]()
        for _ in range(turns):
            for variant, rounds in programs.items():
                sequences.fill(cell.work, batch)
                rounds.warm_up()
                times[variant] += rounds.time().step_ms
                texts[variant] = np.asarray(sequences.state.tokens)
        for variant, spent in times.items():
            step, same = Spread.of(spent), np.array_equal(texts[variant], texts[""])
            print(
                f"batch {batch} at temperature {cell.work.temperature}  {step.median:.3f} ms ({step.min:.3f} - {step.max:.3f})  "
                f"{'the same texts' if same else 'other texts'}  {variant or 'as it is'}",
                flush=True,
            )
    del gaps


if __name__ == "__main__":
    main()
