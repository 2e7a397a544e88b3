"""The command `jaxspec compare`: a checkpoint is run here and by transformers."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from jaxspec.cli import errors, options


def add_parser(commands: Any, hub: argparse.ArgumentParser) -> None:
    """Adds the command. hub: the options that say how models are fetched."""
    text = """Compares what a checkpoint computes here with what it computes in transformers, on the CPU: the log-probabilities of texts,
    and the tokens that are written after them. Exits with 1 if they differ by more than rounding explains."""
    compare = commands.add_parser("compare", parents=[hub], help="compare a checkpoint with transformers", description=text)
    compare.add_argument("target", metavar="MODEL", help="hub id, folder or bundled name")
    compare.add_argument("--drafter", help="what guesses while tokens are written: hub id, folder or bundled name (default: none)")
    compare.add_argument("--k", type=int, metavar="K", help="number of tokens to draft in each round")
    compare.add_argument("--dtype", default="auto", help="dtype of the weights here: auto, float32 or bfloat16 (default: auto)")
    text = "dtype of the weights in transformers: auto, float32 or bfloat16 (default: auto, the checkpoint's)"
    compare.add_argument("--reference-dtype", default="auto", choices=("auto", "float32", "bfloat16"), metavar="DTYPE", help=text)
    compare.add_argument("--mesh", metavar="AXIS=N,...", help="devices to spread the model over, such as tensor=4 (default: one device)")
    compare.add_argument("--tokens", type=int, default=32, metavar="N", help="to write after each text (default: 32)")
    text = "compare the text of this file beside some short texts of several languages; may be repeated"
    compare.add_argument("--text", action="append", default=[], metavar="FILE", help=text)
    compare.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    from jaxspec import comparing
    from jaxspec.checkpoint import hub
    from jaxspec.loading import load

    with errors.door():
        texts = [*comparing.TEXTS, *map(_read, args.text)]
        how = options.hub_of(args)
        folder = hub.resolve(args.target, how)
        comparing.reference_class(folder)
        llm = load(
            args.target,
            args.drafter,
            num_draft_tokens=args.k,
            dtype=args.dtype,
            mesh=options.mesh_of(args),
            max_slots=len(texts) + 1,
            progress=sys.stderr.isatty(),
            **dataclasses.asdict(how),
        )
        found = comparing.compare(llm, folder, texts=texts, tokens=args.tokens, dtype=args.reference_dtype)
    print(found)
    return 0 if found.agrees else 1


def _read(path: str) -> str:
    """The text of a file. Raises OSError, and ValueError if it is not UTF-8."""
    try:
        return options.without_mark(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from error
