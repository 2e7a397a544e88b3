"""Times steps with other constants of kernels, in turn in one process, so that their times can be compared.

    python benchmarks/variants.py bench --config 12b --drafter mtp --k 4 --batch 8 --tokens 64 --variant linear.mosaic.FEW_ROWS=40

Options are those of `jaxspec bench` but for `--json` and `--mesh`. Each `--variant` names constants of modules in `pallas_kernels`, or of
others by their whole names (`jaxspec.engine.cuda_graphs.WHOLE_LOOP`), and their values, several with commas. What is timed first, with no
constant changed, is timed again at the end: what differs between the two is the machine's.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import jax

from jaxspec.bench import command, timing, workload

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
    options = command.add_parser(parser.add_subparsers(required=True))
    options.add_argument("--variant", action="append", default=[], type=checked, metavar="MODULE.CONSTANT=VALUE,...", dest="variants")
    given = vars(parser.parse_args())
    variants = given.pop("variants")
    if refused := {"json", "mesh"} & given.keys():
        parser.error(f"--{min(refused)} is not served here")
    plan = workload.plan_bench(**given)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for variant in ("", *variants, ""):
        with changed(variant):
            *_, found = timing.measure_plan(plan, progress=False)
        for figures in found.decode:
            step = figures.step_ms
            print(
                f"batch {figures.batch}  {step.median:.3f} ms ({step.min:.3f} - {step.max:.3f})  "
                f"copy {found.copy_bytes_per_s / 1e9:,.0f} GB/s  {variant or 'as it is'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
