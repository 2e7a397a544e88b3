"""The command line: jaxspec generate | chat | batch | info | convert | train | bench."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from jaxspec import __version__
from jaxspec.bench import command as bench_command
from jaxspec.info import command as info_command
from jaxspec.train import command as train_command

MEMORY_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")  # either, and not both


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 if a batch could not serve some requests, 2 for what the user got wrong, 130
    when interrupted."""
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):  # a model may write what a terminal cannot show
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    # Set before JAX starts: what it says about the devices it looked for in vain is no news to a command's user.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    # Of a GPU's memory, JAX takes three quarters unless it is told; a command has the device for itself.
    if not any(name in os.environ for name in MEMORY_VARIABLES):
        os.environ[MEMORY_VARIABLES[0]] = "0.9"
    try:
        return args.command(args) or 0
    except _UserError as error:
        print(f"jaxspec: {error}", file=sys.stderr)
        return 2
    except MemoryError as error:  # of a device; it says what to lower
        print(f"jaxspec: {error or 'out of memory'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has had enough; without a place to write to, Python would complain once more at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


SHARD_HELP = (
    "serve every N-th line from line I on, write OUT-I-of-N.jsonl; auto: as SLURM or Open MPI number processes; auto/N: I from them"
)
SHARD_HELP += " or from Kubernetes"


class _UserError(Exception):
    pass


@contextlib.contextmanager
def _door() -> Iterator[None]:
    """Turns what loading and checking a request raise into a message without a traceback; what comes later is a bug."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        raise _UserError(error) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxspec", description="Speculative decoding in JAX, for Gemma 4 and Step-3.5.")
    parser.add_argument("--version", action="version", version=f"jaxspec {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    hub = argparse.ArgumentParser(add_help=False)
    hub.add_argument("--revision", metavar="R", help="branch, tag or commit of a hub's model; id@R says the same, also of a drafter")
    hub.add_argument("--token", metavar="T", help="token of a Hugging Face account (default: HF_TOKEN, or the one that is logged in)")
    hub.add_argument("--cache-dir", metavar="DIR", help="where the hub's models are kept (default: where HF_HOME says)")
    hub.add_argument("--local-files-only", action="store_true", help="take what has been downloaded, and ask no hub")

    model = argparse.ArgumentParser(add_help=False, parents=[hub])
    model.add_argument("--target", default="pocket", help="hub id, folder or bundled name (default: pocket)")
    model.add_argument("--drafter", help="hub id, folder or bundled name; same for the one in the target's checkpoint (default: none)")
    model.add_argument("--adapter", help="LoRA adapter of PEFT to merge into the target: folder or hub id (default: none)")
    model.add_argument("--k", type=int, metavar="K", help="number of tokens to draft in each round")
    text = "guess trees of N candidates, such as 15, where at most 4 sequences decode (default: chains)"
    model.add_argument("--tree", type=int, metavar="N", help=text)
    model.add_argument("--dtype", default="auto", help="dtype of the weights: auto, float32 or bfloat16 (default: auto)")
    model.add_argument("--quantize", metavar="KIND", help="quantise the target's float weights: int8, int4 or fp8 (default: as they are)")
    text = "quantise the target's token embedding, which is its head too: int8 (default: as it is)"
    model.add_argument("--quantize-embedding", metavar="KIND", help=text)
    text = "quantise the drafter's float weights: int8, int4 or fp8 (default: as they are)"
    model.add_argument("--quantize-drafter", metavar="KIND", help=text)
    text = "read an 8-bit copy of the head to choose tokens; texts are the same (default: on Hopper GPUs with enough memory)"
    model.add_argument("--head-guide", action=argparse.BooleanOptionalAction, help=text)
    model.add_argument("--kv-dtype", default="auto", help="dtype of the target's cache: auto, float32, bfloat16 or fp8 (default: auto)")
    model.add_argument("--max-len", type=int, metavar="N", help="most tokens of a sequence, including its prompt")
    model.add_argument("--max-tokens", type=int, metavar="N", help="most new tokens (default: up to max-len)")
    model.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: the checkpoint's)")
    text = "choose among the N most likely tokens; 0 means all (default: the checkpoint's)"
    model.add_argument("--top-k", type=int, metavar="N", help=text)
    text = "choose among the most likely tokens whose probabilities add up to P; 1 means all (default: the checkpoint's)"
    model.add_argument("--top-p", type=float, metavar="P", help=text)
    text = "choose among tokens at least P times as likely as the most likely one; 0 means all (default: the checkpoint's)"
    model.add_argument("--min-p", type=float, metavar="P", help=text)
    model.add_argument("--repetition-penalty", type=float, metavar="R", help="1 means none (default: the checkpoint's)")
    model.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be repeated")
    model.add_argument("--accept", default="coupled", help="rule that accepts drafts: coupled, standard or block (default: coupled)")
    model.add_argument("--mesh", metavar="AXIS=N,...", help="devices to spread the model over, such as tensor=4 (default: one device)")
    model.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    text = """what a text must look like, such as '{"regex": "[0-9]+"}' or '{"json": {"type": "object", ...}}'"""
    model.add_argument("--structured-outputs", type=_object, metavar="JSON", help=text)
    model.add_argument("--ignore-eos", action="store_true", help="do not stop at the checkpoint's end tokens")
    model.add_argument("--stats", action="store_true", help="print speed and acceptance at the end")

    generate = commands.add_parser("generate", parents=[model], help="continue a prompt", description="Continues a prompt.")
    generate.add_argument("--prompt", required=True, help="the text to continue; - reads it from standard input")
    generate.set_defaults(command=_generate)

    chat = commands.add_parser("chat", parents=[model], help="talk to the model", description="Answers line by line until end of input.")
    chat.add_argument("--system", help="a system message")
    chat.add_argument("--thinking", action="store_true", help="let the model think first, if its chat template supports it")
    chat.set_defaults(command=_chat)

    text = "Completes every request of a file. If a run is interrupted, the same command resumes it."
    batch = commands.add_parser("batch", parents=[model], help="complete a file of requests", description=text)
    text = 'one request a line: {"prompt" or "messages": ..., "id": ..., "params": {...}} or OpenAI\'s form; or IN.parquet, or - for stdin'
    batch.add_argument("input", metavar="IN.jsonl", help=text)
    text = "file to append results to, one a line, as they come; or OUT.parquet, or - for stdout, where no run resumes"
    batch.add_argument("output", metavar="OUT.jsonl", help=text)
    batch.add_argument("--errors", metavar="FILE", help="file for lines that cannot be served, with the reason (default: OUT.errors.jsonl)")
    batch.add_argument("--shard", default="1/1", metavar="I/N", help=SHARD_HELP)
    batch.add_argument("--process", metavar="I/N", help="this is process I of N that share a mesh; only I differs in their commands")
    text = "address at which process 1 listens for the others; auto, without --process: SLURM, Open MPI or Kubernetes says all"
    batch.add_argument("--coordinator", metavar="HOST:PORT", help=text)
    batch.add_argument("--max-slots", type=int, metavar="N", help="most sequences at a time (default: what memory holds, up to 64)")
    batch.add_argument("--memory-fraction", type=float, default=0.9, metavar="F", help="share of JAX's memory to use (default: 0.9)")
    batch.add_argument("--token-ids", action="store_true", help="write token ids too")
    batch.add_argument("--include-prompt", action="store_true", help="write the prompt, or the messages, too")
    text = "let the drafter learn from the job's texts, in this share of the time, such as 0.05; it is kept in OUT.jsonl.drafter"
    batch.add_argument("--learn", type=float, metavar="SHARE", help=text)
    batch.add_argument("--thinking", action="store_true", help="let the model think first when it answers messages, as in chat")
    batch.set_defaults(command=_batch)

    text = "Puts the results of all shards of a batch together, in the order of the input, and says what is missing."
    merge = commands.add_parser("merge", help="put shards' results together", description=text)
    merge.add_argument("input", metavar="IN.jsonl", help="the input of the shards")
    merge.add_argument("output", metavar="OUT.jsonl", help="the output as the shards were given it: OUT-1-of-N.jsonl and so on are read")
    merge.set_defaults(command=_merge)

    info_command.add_parser(commands, hub).set_defaults(command=_info)

    text = "Writes fused weights in one dtype, which load reads without converting them. Load DST, and DST/drafter as its drafter."
    convert = commands.add_parser("convert", parents=[hub], help="write a checkpoint that loads faster", description=text)
    convert.add_argument("source", metavar="SRC", help="hub id, folder or bundled name of a target")
    convert.add_argument("destination", metavar="DST", help="folder to write, which must be empty or not exist")
    convert.add_argument("--drafter", help="hub id, folder or bundled name of a drafter to convert with it")
    convert.add_argument("--adapter", help="LoRA adapter of PEFT to merge into the target: folder or hub id (default: none)")
    convert.add_argument("--dtype", default="auto", help="auto (the target's own), float32 or bfloat16")
    convert.add_argument("--quantize", metavar="KIND", help="quantise the target's float weights: int8, int4 or fp8 (default: as they are)")
    text = "quantise the target's token embedding, which is its head too: int8 (default: as it is)"
    convert.add_argument("--quantize-embedding", metavar="KIND", help=text)
    text = "quantise the drafter's float weights: int8, int4 or fp8 (default: as they are)"
    convert.add_argument("--quantize-drafter", metavar="KIND", help=text)
    text = "devices that hold the weights during the conversion, such as tensor=4 (default: one device)"
    convert.add_argument("--mesh", metavar="AXIS=N,...", help=text)
    convert.set_defaults(command=_convert)
    train_command.add_parser(commands).set_defaults(command=_train)
    bench_command.add_parser(commands).set_defaults(command=_bench)
    return parser


def _object(text: str) -> Any:
    """A JSON object of the command line."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a JSON object")
    return found


def _load(args: argparse.Namespace, **settings: Any) -> tuple[Any, Any]:
    """(llm, sampling params). settings: of `load`, beside those that every command has."""
    from jaxspec.engine.params import SamplingParams
    from jaxspec.loading import load

    names = (
        "max_tokens",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "stop",
        "seed",
        "ignore_eos",
        "structured_outputs",
    )
    params = SamplingParams(**{name: getattr(args, name) for name in names})
    progress = sys.stderr.isatty()
    llm = load(
        args.target,
        args.drafter,
        num_draft_tokens=args.k,
        tree=args.tree,
        dtype=args.dtype,
        quantize=args.quantize,
        quantize_embedding=args.quantize_embedding,
        quantize_drafter=args.quantize_drafter,
        head_guide=args.head_guide,
        kv_dtype=args.kv_dtype,
        max_len=args.max_len,
        accept=args.accept,
        mesh=_mesh(args),
        adapter=args.adapter,
        progress=progress,
        **dataclasses.asdict(_hub(args)),
        **settings,
    )
    return llm, params


def _hub(args: argparse.Namespace) -> Any:
    """How models are fetched."""
    from jaxspec.checkpoint.hub import Hub

    return Hub(args.revision, args.token, args.cache_dir, args.local_files_only)


def _mesh(args: argparse.Namespace) -> Any:
    """The mesh that was asked for, or None."""
    from jaxspec.sharding.meshes import mesh_of

    return None if args.mesh is None else mesh_of(args.mesh)


def _generate(args: argparse.Namespace) -> None:
    with _door():
        llm, params = _load(args, max_slots=1)
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
        chunks = llm.stream(prompt, params)
    for i, chunk in enumerate(_compiled(chunks)):
        print(chunk.text if i else prompt + chunk.text, end="", flush=True)
    print()
    if args.stats:
        print(f"\n{llm.stats}")


def _chat(args: argparse.Namespace) -> None:
    with _door():
        llm, params = _load(args, max_slots=1)
    messages = [{"role": "system", "content": args.system}] if args.system else []
    somebody = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if somebody else "").strip()
        except EOFError:
            break
        if not line:
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            with _door():
                chunks = llm.stream_chat(asked, params, enable_thinking=args.thinking)
        except _UserError as error:
            if not somebody:
                raise
            print(f"jaxspec: {error}", file=sys.stderr)
            continue
        messages = [*asked, {"role": "assistant", "content": _answer(chunks, llm.tokenizer, somebody)}]
    if args.stats:
        print(f"\n{llm.stats}")


def _answer(chunks: Any, tokenizer: Any, interruptible: bool) -> str:
    """Prints an answer; returns it without its thoughts, which later turns are not to see. interruptible: whether an interrupt ends the
    answer alone."""
    text, ids = "", []
    with contextlib.closing(chunks):
        try:
            for chunk in _compiled(chunks):
                print(chunk.text, end="", flush=True)
                text, ids = text + chunk.text, ids + chunk.token_ids
        except KeyboardInterrupt:
            if not interruptible:
                raise
    print()
    return text.removeprefix(tokenizer.thoughts(ids))


def _compiled(chunks: Any) -> Iterator[Any]:
    """The chunks of a stream, the first one with the second: until then programs are compiled, and a line that says so stands where the
    text is to begin."""
    yield from list(itertools.islice(chunks, 2))
    yield from chunks


def _batch(args: argparse.Namespace) -> int:
    import jax

    from jaxspec.batch.job import BatchJob
    from jaxspec.batch.results import ChangedInput
    from jaxspec.sharding.placement import placement_of

    seed, args.seed = args.seed or 0, None  # of the run, of which each line has its own
    with contextlib.ExitStack() as stack:
        with _door():
            together = _join(args.process, args.coordinator)
            placement = placement_of(_mesh(args))  # refused before any file is touched
            if together and placement.size < (found := jax.device_count()):
                raise ValueError(f"the processes have {found} devices; expected --mesh over all of them, or --shard without --process")
            job = stack.enter_context(BatchJob(args.input, args.output, errors=args.errors, shard=args.shard, together=together))
            learn = None if args.learn is None else job.kept(args.learn)
            llm, params = _load(args, max_slots=args.max_slots, memory_fraction=args.memory_fraction, learn=learn)
            if learn is not None:
                stack.enter_context(llm)  # which ends learning, and writes the drafter, before the job ends
            shown = {"token_ids": args.token_ids, "include_prompt": args.include_prompt}
            job.begin(llm, params, seed=seed, **shown, enable_thinking=args.thinking)
            if job.out is None:
                print("jaxspec: results go to standard output, so this run cannot be resumed", file=sys.stderr)
        try:
            result = job.run()
        except ChangedInput as error:
            raise _UserError(error) from error
        except KeyboardInterrupt:
            kept = "" if job.out is None else f"; the results so far are in {job.out}, and the same command resumes"
            print(f"\njaxspec: interrupted{kept}", end="", file=sys.stderr)
            raise
        except Exception as error:
            if not together:
                if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):  # such as a full disk
                    raise _UserError(error) from error
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


def _merge(args: argparse.Namespace) -> int:
    from jaxspec.batch.merging import merge

    with _door():
        merged = merge(args.input, args.output)
    print(f"{merged.out}: {merged.results} results of {merged.shards} shards", file=sys.stderr)
    for line in merged.missing:
        print(line, file=sys.stderr)
    return int(bool(merged.missing))


def _info(args: argparse.Namespace) -> None:
    with _door():
        name = next(name for name in MEMORY_VARIABLES if name in os.environ)
        try:
            share = float(os.environ[name])
        except ValueError as error:
            raise ValueError(f"{name} is {os.environ[name]!r} in the environment, expected a number such as 0.9") from error
        lines = info_command.lines(args, _hub(args), share)
    print("\n".join(lines))


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


def _convert(args: argparse.Namespace) -> None:
    with _door():
        from jaxspec.converting import convert

        quantised = {name: getattr(args, name) for name in ("quantize", "quantize_embedding", "quantize_drafter")}
        settings = {"dtype": args.dtype, **quantised, "mesh": _mesh(args), "progress": sys.stderr.isatty()}
        models = {"drafter": args.drafter, "adapter": args.adapter, **dataclasses.asdict(_hub(args))}
        print(convert(args.source, args.destination, **models, **settings))


def _train(args: argparse.Namespace) -> None:
    with _door():
        try:
            folder, gain = train_command.run(args, sys.stderr.isatty())
        except FloatingPointError as error:
            raise _UserError(error) from error
    print(folder)
    print(gain, file=sys.stderr)  # stdout is for scripts


def _bench(args: argparse.Namespace) -> None:
    from tqdm import tqdm

    from jaxspec.bench import report, timing, workload

    given = {name: value for name, value in vars(args).items() if name not in ("command", "json")}
    with _door():
        if "mesh" in given:
            given["mesh"] = _mesh(args)
        plan = workload.plan_bench(**given)
        if "json" in args:  # before minutes of measuring
            open(args.json, "a").close()
        if "profile" in args:
            os.makedirs(args.profile, exist_ok=True)
    shown = 0
    for found in timing.measure_plan(plan, progress=sys.stderr.isatty()):  # a run that is cut off has shown what it measured
        lines = list(report.report_lines(found))
        with tqdm.external_write_mode():  # the bar gives way
            print("\n".join(lines[shown:]), flush=True)
        shown = len(lines)
        if "json" in args:
            with _door():
                report.write_json(found, args.json)
    for line in report.profile_lines(found):
        print(line)
