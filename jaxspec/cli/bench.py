"""The command `jaxspec bench`: a model's shape is timed on this device."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from jaxspec.checks import expanded
from jaxspec.cli import errors, options


def add_parser(commands: Any) -> argparse.ArgumentParser:
    """Adds the command. Its options have the names of the arguments of `workload.plan_bench`; one that is not given is left to its default
    there. Returns its parser."""
    text = "Times steps and prompts with random weights of a model's shape, and compares them with the memory floor of the same run."
    bench = commands.add_parser("bench", help="time a model's shape on this device", description=text, argument_default=argparse.SUPPRESS)

    def option(name: str, text: str, **settings: Any) -> None:
        bench.add_argument(f"--{name}", help=text, **settings)

    option("config", "a named shape, such as e2b or 31b, or a folder with a config.json; any other word lists the names", required=True)
    option(
        "drafter",
        "none (the default), a kind such as mtp or ngram, same, another config's name, or a folder; any other word lists them all",
    )
    option("k", "number of tokens to draft in each round (default: 4 with a drafter)", type=int, metavar="K", dest="num_draft_tokens")
    rows = "rows of the target's pass for all sequences together, which go to the best drafts (default: one for each draft and anchor)"
    option("rows", rows, type=int, metavar="M")
    option("tree", "guess a tree of N candidates in place of K tokens (default: no tree)", type=int, metavar="N")
    option("batch", "numbers of sequences at a time, each timed in turn (default: 1)", type=_integers, metavar="B,...", dest="batches")
    option("context", "tokens of a prompt (default: 512)", type=int, metavar="N")
    option("tokens", "new tokens of a sequence in a timed call, approximately (default: 128)", type=int, metavar="N")
    rates = "share of rounds that accept draft 1, 2, ... and all before it (default: 0.92,0.78,0.67,0.57), or the name of a rule"
    option("acceptance", rates, type=_rates, metavar="R,...")
    option("temperature", "temperatures, each timed in turn; 0 is greedy (default: 0)", type=_floats, metavar="T,...", dest="temperatures")
    option("top-k", "with a temperature: sample among the N most likely tokens; 0 means all (default: 0)", type=int, metavar="N")
    top_p = "with a temperature: sample among the most likely tokens whose probabilities add up to P (default: 1)"
    option("top-p", top_p, type=float, metavar="P")
    structured = "let texts follow an automaton of N states, as structured outputs do; 0 means none (default: 0)"
    option("structured", structured, type=int, metavar="N")
    option("prefill", "also time prompts of these lengths", type=_integers, metavar="N,...")
    option("prefill-chunk", "most rows of a prefill call (default: the engine's, 512 to 2048)", type=int, metavar="N")
    option("dtype", "bfloat16 (the default) or float32")
    option("quantize", "quantise the target's matrices: int8, int4 or fp8 (default: none)", metavar="KIND")
    option("quantize-embedding", "quantise the target's token embedding, which is its head too: int8 (default: none)", metavar="KIND")
    option("quantize-activations", "round what the target's fp8 matrices are multiplied with: fp8 (default: none)", metavar="KIND")
    option("quantize-drafter", "quantise the drafter's matrices: int8, int4 or fp8 (default: none)", metavar="KIND")
    text = "read an 8-bit copy of float heads to choose tokens (default: on Hopper GPUs with enough memory)"
    option("head-guide", text, action=argparse.BooleanOptionalAction)
    option("attention", "implementation of attention (default: auto)")
    option("draft-attention", "implementation of the drafter's attention (default: auto)")
    option("repeats", "number of timed calls (default: 3)", type=int, metavar="N")
    option("mesh", "devices to spread the model over, such as tensor=4 or data=2,tensor=2 (default: one)", metavar="AXIS=N,...")
    option("json", "write every figure to this file", metavar="FILE")
    option("profile", "trace one more call of each kind, write the traces to this folder and print their kernels", metavar="DIR")
    bench.set_defaults(command=_run)
    return bench


def _run(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from jaxspec.bench import report, timing, workload

    given = {name: value for name, value in vars(args).items() if name not in ("command", "json")}
    with errors.door():
        if "mesh" in given:
            given["mesh"] = options.mesh_of(args)
        plan = workload.plan_bench(**given)
        if "json" in args:  # before minutes of measuring
            open(expanded(args.json), "a").close()
        if "profile" in args:
            os.makedirs(expanded(args.profile), exist_ok=True)
    shown = 0
    for found in timing.measure_plan(plan, progress=sys.stderr.isatty()):  # a run that is cut off has shown what it measured
        lines = list(report.report_lines(found))
        with tqdm.external_write_mode():  # the bar gives way
            print("\n".join(lines[shown:]), flush=True)
        shown = len(lines)
        if "json" in args:
            with errors.door():
                report.write_json(found, args.json)
    for line in report.profile_lines(found):
        print(line)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(_list(text, int))


def _floats(text: str) -> tuple[float, ...]:
    return tuple(_list(text, float))


def _list(text: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        expected = "whole numbers" if kind is int else "numbers"
        raise argparse.ArgumentTypeError(f"found {text!r}, expected {expected} with commas between them") from error


def _rates(text: str) -> str | tuple[float, ...]:
    return text if text.isidentifier() else _floats(text)
