"""Serves many short requests of the pocket models by `jaxspec batch` and by Ray Data, and says how fast and with how much memory:
`python benchmarks/engines.py --rows 20000`. It needs ray[data] and psutil.

Each way runs in processes of its own, one after the other. Throughput is that of the rows behind the first tenth, so it leaves out
starting and compiling; beside it is the CPU time of the processes with a model, which says more where others use the machine too. Memory is
the resident set of these processes, after a tenth of the rows and at the end. For a Generator it also counts the rounds and the slots that
they had in use.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from jaxspec.train.pocket.corpus import held_out_texts

SETTINGS = {"max_len": 256, "max_slots": 8}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000, help="requests (default: 20000)")
    parser.add_argument("--max-tokens", type=int, default=4, help="new tokens of each (default: 4)")
    parser.add_argument("--replicas", type=int, default=1, help="of Ray; as many shards of jaxspec batch (default: 1)")
    parser.add_argument("--batch-size", type=int, default=256, help="rows of a batch of Ray's (default: 256)")
    parser.add_argument("--stop", help=r"a string that ends a text, such as '\n\n', so that lengths differ (default: none)")
    parser.add_argument("--ways", default="direct,ray,calls,map", help="which to run (default: direct,ray,calls,map)")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # of a process of its own
    args = parser.parse_args()
    ways = {"direct": direct, "ray": by_ray, "calls": by_calls, "map": by_map}
    if args.folder is not None:
        ways[args.ways](args)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder), args.rows)
        for way in args.ways.split(","):
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--ways", way, "--folder", folder], check=True)


def write_rows(folder: Path, count: int) -> None:
    """The requests as JSON lines and as parquet: pieces of held-out code, of 4 to 200 characters."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts, chance, rows = list(held_out_texts().values()), random.Random(0), list[dict[str, Any]]()
    for i in range(count):
        text, size = chance.choice(texts), chance.randint(4, 200)
        begin = chance.randrange(len(text) - size)
        rows.append({"id": f"r{i}", "prompt": text[begin : begin + size]})
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), folder / "in.parquet", row_group_size=2000)


def direct(args: argparse.Namespace) -> None:
    """`jaxspec batch`, one process a shard."""
    out = args.folder / "out.jsonl"
    command = [
        sys.executable,
        "-m",
        "jaxspec",
        "batch",
        str(args.folder / "in.jsonl"),
        str(out),
        *"--target pocket --drafter pocket-mtp".split(),
    ]
    command += ["--max-tokens", str(args.max_tokens), "--temperature", "0.8"]
    command += [] if args.stop is None else ["--stop", args.stop.encode().decode("unicode_escape")]
    command += [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    shards = [[*command, "--shard", f"{i}/{args.replicas}"] for i in range(1, args.replicas + 1)]
    processes = [psutil.Popen(shard, stderr=subprocess.PIPE) for shard in shards]

    def done() -> int:
        return sum(path.read_bytes().count(b"\n") for path in args.folder.glob("out*.jsonl") if "errors" not in path.name)

    def rows() -> Iterator[int]:
        while any(process.poll() is None for process in processes):
            time.sleep(0.5)
            yield done()

    report("jaxspec batch", rows(), lambda: processes, args.rows)


def by_ray(args: argparse.Namespace) -> None:
    """`jaxspec.ray.generate` on a Ray of this machine."""
    import ray

    import jaxspec.ray

    ray.init(num_cpus=max(args.replicas + 1, 2), include_dashboard=False, log_to_driver=False, logging_level="error")
    read = ray.data.read_parquet(str(args.folder / "in.parquet"))
    made = jaxspec.ray.generate(read, "pocket", "pocket-mtp", replicas=args.replicas, batch_size=args.batch_size, **arguments(args))

    def rows() -> Iterator[int]:
        count = 0
        for batch in made.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield (count := count + batch.num_rows)

    def actors() -> list[psutil.Process]:
        return [process for process in psutil.Process().children(recursive=True) if "ray::MapWorker" in " ".join(process.cmdline())]

    report("Ray Data", rows(), actors, args.rows)
    ray.shutdown()


def by_calls(args: argparse.Namespace) -> None:
    """A Generator, called with one batch after the other."""
    generated(args, "Generator, called", lambda generator, batches: map(generator, batches))


def by_map(args: argparse.Namespace) -> None:
    """The same by `Generator.map`, which reads batches ahead."""
    generated(args, "Generator.map", lambda generator, batches: generator.map(batches))


def generated(args: argparse.Namespace, name: str, served: Callable[[Any, Iterator[Any]], Iterator[Any]]) -> None:
    import pyarrow.parquet as pq

    import jaxspec

    batches = pq.ParquetFile(args.folder / "in.parquet").iter_batches(args.batch_size)
    with jaxspec.Generator("pocket", "pocket-mtp", **arguments(args)) as generator:

        def rows() -> Iterator[int]:
            count = 0
            for batch in served(generator, (jaxspec_table(batch) for batch in batches)):
                yield (count := count + batch.num_rows)

        counted = count_rounds()
        report(name, rows(), lambda: [psutil.Process()], args.rows)
        print(f"{name}: {counted[0]:.0f} rounds, {counted[1] / counted[0]:.2f} of {SETTINGS['max_slots']} slots in use in each", flush=True)


def count_rounds() -> list[float]:
    """[rounds, slots in use in all of them], which grow from now on."""
    from jaxspec.engine.runner import Runner

    counted, read = [0.0, 0.0], Runner.read

    def counting(self: Runner, calls: Any) -> Any:
        known = [(call.shape.num_draft_tokens, [(r, r.drafted) for r in call.requests if r is not None]) for call in calls]
        result = read(self, calls)
        for drafts, requests in known:
            if drafts:  # a call that decodes
                rounds = [(request.drafted - before) / drafts for request, before in requests]
                counted[0] += max(rounds, default=0)
                counted[1] += sum(rounds)
        return result

    Runner.read = counting
    return counted


def jaxspec_table(batch: Any) -> Any:
    import pyarrow as pa

    return pa.Table.from_batches([batch])


def arguments(args: argparse.Namespace) -> dict[str, Any]:
    import jaxspec

    stop = () if args.stop is None else args.stop.encode().decode("unicode_escape")
    params = jaxspec.SamplingParams(max_tokens=args.max_tokens, temperature=0.8, stop=stop)
    return {"sampling_params": params, "id_column": "id", **SETTINGS}


def report(name: str, rows: Iterator[int], processes: Callable[[], list[Any]], count: int) -> None:
    """Prints what a way did. rows: how many are done, again and again. processes: those with a model."""
    begun, first, last, done = time.perf_counter(), None, (0, 0.0), 0
    for done in rows:
        with contextlib.suppress(psutil.NoSuchProcess):
            alive = [process for process in processes() if process.is_running()]
            times = [process.cpu_times() for process in alive]
            if now := sum(process.memory_info().rss for process in alive):
                last = (now, sum(spent.user + spent.system for spent in times))
        if done >= count // 10 and first is None:
            first = (done, time.perf_counter(), *last)
    ended = time.perf_counter()
    assert first is not None and done == count, f"{done} of {count} rows"
    left, growth = done - first[0], last[0] / first[2] - 1
    print(
        f"{name}: {count} rows in {ended - begun:.0f} s, {left / (ended - first[1]):.1f} rows/s after {first[0]}, "
        f"{1000 * (last[1] - first[3]) / left:.1f} ms of CPU a row; resident {first[2] / 2**20:.0f} MiB then, "
        f"{last[0] / 2**20:.0f} MiB at the end ({100 * growth:+.1f} %)",
        flush=True,
    )


if __name__ == "__main__":
    main()
