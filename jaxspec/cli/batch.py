"""The command `jaxspec batch`: a file of requests is completed, by one process or by several that share a mesh."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import traceback
from typing import Any

from jaxspec.cli import errors, options


def add_parser(commands: Any, model: argparse.ArgumentParser) -> None:
    """Adds the command. model: the options that say what is loaded, and how it chooses tokens."""
    text = "Completes every request of a file. If a run is interrupted, the same command resumes it."
    batch = commands.add_parser("batch", parents=[model], help="complete a file of requests", description=text)
    text = 'one request a line: {"prompt" or "messages": ..., "id": ..., "params": {...}} or OpenAI\'s form; or IN.parquet, or - for stdin'
    batch.add_argument("input", metavar="IN.jsonl", help=text)
    text = "file to append results to, one a line, as they come; or OUT.parquet, or - for stdout, where no run resumes"
    batch.add_argument("output", metavar="OUT.jsonl", help=text)
    batch.add_argument("--errors", metavar="FILE", help="file for lines that cannot be served, with the reason (default: OUT.errors.jsonl)")
    text = "serve every N-th line from line I on, write OUT-I-of-N.jsonl; auto: as SLURM or Open MPI number processes; "
    text += "auto/N: I from them or from Kubernetes"
    batch.add_argument("--shard", default="1/1", metavar="I/N", help=text)
    batch.add_argument("--process", metavar="I/N", help="this is process I of N that share a mesh; only I differs in their commands")
    text = "address at which process 1 listens for the others; auto, without --process: SLURM, Open MPI or Kubernetes says all"
    batch.add_argument("--coordinator", metavar="HOST:PORT", help=text)
    batch.add_argument("--max-slots", type=int, metavar="N", help="most sequences at a time (default: what memory holds, up to 64)")
    batch.add_argument("--memory-fraction", type=float, default=0.9, metavar="F", help="share of JAX's memory to use (default: 0.9)")
    text = "messages may have images, of at most N tokens each (default: what the checkpoint says); it needs Pillow"
    batch.add_argument("--images", type=int, nargs="?", const=True, default=False, metavar="N", help=text)
    text = "messages may have videos, of at most N frames each (default: what the checkpoint says); it needs Pillow and PyAV"
    batch.add_argument("--videos", type=int, nargs="?", const=True, default=False, metavar="N", help=text)
    batch.add_argument("--audio", action="store_true", help="messages may have sounds; it needs soundfile and soxr")
    batch.add_argument("--token-ids", action="store_true", help="write token ids too")
    batch.add_argument("--include-prompt", action="store_true", help="write the prompt, or the messages, too")
    text = "let the drafter learn from the job's texts, in this share of the time, such as 0.05; it is kept in OUT.jsonl.drafter"
    batch.add_argument("--learn", type=float, metavar="SHARE", help=text)
    batch.add_argument("--thinking", action="store_true", help="let the model think first when it answers messages, as in chat")
    batch.set_defaults(command=_run)


def _run(args: argparse.Namespace) -> int:
    import jax

    from jaxspec.batch.job import BatchJob
    from jaxspec.batch.results import ChangedInput
    from jaxspec.sharding.placement import placement_of

    seed, args.seed = args.seed or 0, None  # of the run, of which each line has its own
    with contextlib.ExitStack() as stack:
        with errors.door():
            together = _join(args.process, args.coordinator)
            placement = placement_of(options.mesh_of(args))  # refused before any file is touched
            if together and placement.size < (found := jax.device_count()):
                raise ValueError(f"the processes have {found} devices; expected --mesh over all of them, or --shard without --process")
            job = stack.enter_context(BatchJob(args.input, args.output, errors=args.errors, shard=args.shard, together=together))
            learn = None if args.learn is None else job.kept(args.learn)
            sizes = {"max_slots": args.max_slots, "memory_fraction": args.memory_fraction}
            llm, params = options.load_model(args, **sizes, learn=learn, images=args.images, videos=args.videos, audio=args.audio)
            if learn is not None:
                stack.enter_context(llm)  # which ends learning, and writes the drafter, before the job ends
            shown = {"token_ids": args.token_ids, "include_prompt": args.include_prompt}
            job.begin(llm, params, seed=seed, **shown, enable_thinking=args.thinking)
            if job.out is None:
                print("jaxspec: results go to standard output, so this run cannot be resumed", file=sys.stderr)
        try:
            result = job.run()
        except ChangedInput as error:
            raise errors.UserError(error) from error
        except KeyboardInterrupt:
            kept = "" if job.out is None else f"; the results so far are in {job.out}, and the same command resumes"
            print(f"\njaxspec: interrupted{kept}", end="", file=sys.stderr)
            raise
        except Exception as error:
            if not together:
                if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):  # such as a full disk
                    raise errors.UserError(error) from error
                raise
            if not isinstance(error, jax.errors.JaxRuntimeError | OSError):
                traceback.print_exc()
            reason = str(error).partition("\n")[0]
            print(f"jaxspec: a process of this run failed or is gone ({reason}); the same command resumes", file=sys.stderr, flush=True)
            os._exit(1)  # leaving in order waits for those that are gone
    kept = f", {result.kept} were already there" if result.kept else ""
    failed = f"; {result.failed} requests failed, their results say why" if result.failed else ""
    if together and jax.process_index():
        return 0  # the first process says it
    print(f"{result.out or 'standard output'}: {result.written} results written{kept}{failed}", file=sys.stderr)
    if result.bad:
        print(f"{result.errors or 'above'}: {result.bad} lines cannot be served", file=sys.stderr)
    if args.stats:
        print(f"\n{llm.stats}", file=sys.stderr if result.out is None else sys.stdout)
    return int(bool(result.bad or result.failed))


def _join(process: str | None, coordinator: str | None) -> bool:
    """Makes this process one of several that share a mesh, if it is to be. A process that is gone for half a minute ends the others."""
    if process is None and coordinator is None:
        return False
    if process is None and coordinator == "auto":
        return _join_cluster()
    found = re.fullmatch(r"(\d+)/(\d+)", process or "")
    index, count = map(int, found.groups()) if found else (0, 0)
    if not 1 <= index <= count or coordinator is None:
        raise ValueError(f"process is {process!r} and coordinator {coordinator!r}, expected i/n with i from 1 to n, and host:port")
    import jax

    jax.distributed.initialize(coordinator, count, index - 1, heartbeat_timeout_seconds=30)
    return True


def _join_cluster() -> bool:
    """The same with what JAX finds out about SLURM, Open MPI or Kubernetes by itself."""
    import jax

    try:
        jax.distributed.initialize(heartbeat_timeout_seconds=30)
    except ValueError as error:  # nothing was found
        known = "a step of SLURM, Open MPI, and an indexed Job of Kubernetes with the package kubernetes"
        raise ValueError(f"coordinator is 'auto', but JAX finds no cluster ({error}); known are {known}; expected host:port") from error
    return True
