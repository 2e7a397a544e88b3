"""The command `jaxspec chat`: a conversation, line by line."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from typing import Any

from jaxspec.cli import errors, options
from jaxspec.cli.generate import compiled
from jaxspec.engine.answers import SAID, THOUGHT

DIM, PLAIN = "\x1b[2m", "\x1b[0m"  # how a terminal shows what follows


def add_parser(commands: Any, model: argparse.ArgumentParser) -> None:
    """Adds the command. model: the options that say what is loaded, and how it chooses tokens."""
    chat = commands.add_parser("chat", parents=[model], help="talk to the model", description="Answers line by line until end of input.")
    chat.add_argument("--system", help="a system message")
    chat.add_argument("--thinking", action="store_true", help="let the model think first, if its chat template supports it")
    for kind, more in (("image", "it needs Pillow"), ("video", "it needs Pillow and PyAV"), ("audio", "it needs soundfile and soxr")):
        text = f"a file or URL that the first message is about; may be given several times; {more}"
        chat.add_argument(f"--{kind}", action="append", default=[], metavar="FILE", help=text)
    chat.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> None:
    files = [{"type": kind, "path": path} for kind in ("image", "video", "audio") for path in getattr(args, kind)]
    with errors.door():
        media = {"images": bool(args.image), "videos": bool(args.video), "audio": bool(args.audio)}
        llm, params = options.load_model(args, max_slots=1, **media)
        if files:
            llm.chat_input([{"role": "user", "content": files}])  # which refuses what cannot be read
    messages = [{"role": "system", "content": args.system}] if args.system else []
    somebody = sys.stdin.isatty()
    if somebody:
        with contextlib.suppress(ImportError):  # not on Windows
            importlib.import_module("readline")  # with it, `input` edits lines and remembers them
    while True:
        try:
            line = options.without_mark(input("> " if somebody else "")).strip()
            if not line:
                continue
            asked = [*messages, {"role": "user", "content": [*files, {"type": "text", "text": line}] if files else line}]
            with errors.door():
                chunks = llm.stream_chat(asked, params, enable_thinking=args.thinking)
        except EOFError:
            break
        except (errors.UserError, UnicodeDecodeError) as error:  # no other error of reading, which might come again and again
            if not somebody:
                raise errors.UserError(error) from error
            print(f"jaxspec: {error}", file=sys.stderr)
            continue
        files = []
        messages = [*asked, _answer(chunks, somebody)]
    if args.stats:
        print(f"\n{llm.stats}")


def _answer(chunks: Any, interruptible: bool) -> dict[str, Any]:
    """Prints an answer, its thoughts dimmed where a terminal shows them, and returns it as a message. interruptible: whether an interrupt
    ends the answer alone."""
    said, shown, message, dimmed = "", None, None, sys.stdout.isatty()
    with contextlib.closing(chunks):
        try:
            for chunk in compiled(chunks):
                for name, piece in chunk.delta.items():
                    between = "" if shown in (None, name) else "\n"
                    print(between + (f"{DIM}{piece}{PLAIN}" if dimmed and name == THOUGHT else piece), end="", flush=True)
                    said, shown = said + (piece if name == SAID else ""), name
                message = chunk.completion and chunk.completion.message
        except KeyboardInterrupt:
            if not interruptible:
                raise
    print()
    return message or {"role": "assistant", "content": said}
