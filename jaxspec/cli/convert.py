"""The command `jaxspec convert`: a checkpoint is written in a layout that loads faster."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from typing import Any

from jaxspec.cli import errors, options


def add_parser(commands: Any, hub: argparse.ArgumentParser) -> None:
    """Adds the command. hub: the options that say how models are fetched."""
    text = "Writes fused weights in one dtype, which load reads without converting them. Load DST, and DST/drafter as its drafter."
    convert = commands.add_parser("convert", parents=[hub], help="write a checkpoint that loads faster", description=text)
    convert.add_argument("source", metavar="SRC", help="hub id, folder or bundled name of a target")
    convert.add_argument("destination", metavar="DST", help="folder to write, which must be empty or not exist")
    convert.add_argument("--drafter", help="hub id, folder or bundled name of a drafter to convert with it")
    convert.add_argument("--adapter", help="LoRA adapter of PEFT to merge into the target: folder or hub id (default: none)")
    convert.add_argument("--dtype", default="auto", help="auto (the target's own), float32 or bfloat16")
    options.add_quantize(convert)
    text = "devices that hold the weights during the conversion, such as tensor=4 (default: one device)"
    convert.add_argument("--mesh", metavar="AXIS=N,...", help=text)
    convert.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> None:
    with errors.door():
        from jaxspec.converting import convert

        quantised = {name: getattr(args, name) for name in ("quantize", "quantize_embedding", "quantize_drafter")}
        settings = {"dtype": args.dtype, **quantised, "mesh": options.mesh_of(args), "progress": sys.stderr.isatty()}
        models = {"drafter": args.drafter, "adapter": args.adapter, **dataclasses.asdict(options.hub_of(args))}
        print(convert(args.source, args.destination, **models, **settings))
