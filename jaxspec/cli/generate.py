"""The command `jaxspec generate`: a prompt is continued as its text comes."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any

from jaxspec.cli import errors, options


def add_parser(commands: Any, model: argparse.ArgumentParser) -> None:
    """Adds the command. model: the options that say what is loaded, and how it chooses tokens."""
    generate = commands.add_parser("generate", parents=[model], help="continue a prompt", description="Continues a prompt.")
    generate.add_argument("--prompt", required=True, action="append", help="the text to continue; - reads it from standard input")
    generate.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> None:
    with errors.door():
        if len(args.prompt) > 1:
            raise ValueError(f"--prompt is given {len(args.prompt)} times, expected once; jaxspec batch completes a file of prompts")
        llm, params = options.load_model(args, max_slots=1)
        [prompt] = args.prompt
        if prompt == "-":
            prompt = options.without_mark(sys.stdin.read())
        chunks = llm.stream(prompt, params)
    for i, chunk in enumerate(compiled(chunks)):
        print(chunk.text if i else prompt + chunk.text, end="", flush=True)
    print()
    if args.stats:
        print(f"\n{llm.stats}")


def compiled(chunks: Any) -> Iterator[Any]:
    """The chunks of a stream, the first one with the second: until then programs are compiled, and a line that says so stands where the
    text is to begin."""
    yield from list(itertools.islice(chunks, 2))
    yield from chunks
