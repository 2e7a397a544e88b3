"""The command `jaxspec merge`: the results of the shards of a batch are put together."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from jaxspec.cli import errors


def add_parser(commands: Any) -> None:
    """Adds the command."""
    text = "Puts the results of all shards of a batch together, in the order of the input, and says what is missing."
    merge = commands.add_parser("merge", help="put shards' results together", description=text)
    merge.add_argument("input", metavar="IN.jsonl", help="the input of the shards")
    merge.add_argument("output", metavar="OUT.jsonl", help="the output as the shards were given it: OUT-1-of-N.jsonl and so on are read")
    merge.add_argument("--errors", metavar="FILE", help="the file for lines that cannot be served, if the shards were given one")
    merge.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    from jaxspec.batch.merging import merge

    with errors.door():
        merged = merge(args.input, args.output, errors=args.errors)
    print(f"{merged.out}: {merged.results} results of {merged.shards} shards", file=sys.stderr)
    for line in merged.missing:
        print(line, file=sys.stderr)
    return int(bool(merged.missing))
