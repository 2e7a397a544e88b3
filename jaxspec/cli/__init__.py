"""The command line: `jaxspec` with a command, each of which is a module. The package may import everything; a module imports what its
command needs when the command runs, so that help comes at once."""

from __future__ import annotations

import argparse
import errno
import io
import os
import sys
from collections.abc import Sequence

from jaxspec import __version__
from jaxspec.cli import batch, bench, chat, compare, convert, environment, errors, generate, info, merge, options, train
from jaxspec.interrupts import heeded


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 if a batch could not serve some requests, 2 for what the user got wrong, 130
    when interrupted."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:  # closed, as some services start what they run
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):  # a model may write what a terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    environment.prepare()
    try:
        with heeded():
            return args.command(args) or 0
    except errors.UserError as error:
        print(f"jaxspec: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:  # of a device; it says what to lower
        print(f"jaxspec: {error or 'out of memory'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has had enough
        _write_nowhere()
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _write_nowhere()
        print(f"jaxspec: nothing more can be written: {error.strerror}", file=sys.stderr)
        return 2


def _write_nowhere() -> None:
    """Without a place to write to, Python would complain once more at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxspec", description="Speculative decoding in JAX, for Gemma 4 and Step-3.5.")
    parser.add_argument("--version", action="version", version=f"jaxspec {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    hub = options.hub_options()
    model = options.model_options(hub)
    generate.add_parser(commands, model)
    chat.add_parser(commands, model)
    batch.add_parser(commands, model)
    merge.add_parser(commands)
    info.add_parser(commands, hub)
    compare.add_parser(commands, hub)
    convert.add_parser(commands, hub)
    train.add_parser(commands)
    bench.add_parser(commands)
    return parser
