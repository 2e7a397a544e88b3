"""Times streams and single answers: `python benchmarks/streams.py e2b mtp --k 3`, or `pocket pocket-mtp` on a CPU.

Weights are random and of a released model's shape, or of a folder's; prompts are random tokens, nothing ends a text before its last
token, and drafts are accepted at given rates. Everything is compiled and has run before the clock starts. Each is timed as it is and with
calls of one sequence that wait until the host has read what the one before reports, in turn. `--open 8` is for the last columns: eight
streams that are open at a time and read in turn, and eight threads, of which each asks for one long answer after the other. Prints rows of
a Markdown table, medians with the least and the most.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import statistics
import time

import jax
import numpy as np

from jaxspec import SamplingParams, checkpoint, released, sharding
from jaxspec.bench.random_weights import random_weights
from jaxspec.bench.workload import RATES
from jaxspec.decode.accept import synthetic
from jaxspec.engine.llm import LLM, STREAM_STEPS
from jaxspec.engine.memory import memory_limit
from jaxspec.engine.runner import Runner
from jaxspec.engine.settings import Settings
from jaxspec.model import gemma4
from jaxspec.planning import with_head_guides
from jaxspec.sharding.placement import placement_of
from jaxspec.targets import DTYPES
from jaxspec.text import load_tokenizer
from pallas_kernels.lm_head import guide_pays

COLUMNS = ("calls", "first tokens of a stream, ms", "then, tokens/s", "an answer, ms", "a long answer, ms")
COLUMNS += ("open streams, tokens/s", "threads, tokens/s")
EACH = 3  # answers that a thread asks for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="e2b, e4b, 12b, 26b, 31b, a bundled target, or a folder with a config.json")
    parser.add_argument("drafter", help="as for `jaxspec bench`")
    parser.add_argument("--k", type=int, default=4, help="tokens drafted in each round (default: 4)")
    parser.add_argument("--mesh", help="devices to spread over: tensor=N; one by default")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt (default: 512)")
    parser.add_argument("--tokens", type=int, nargs=2, default=(32, 512), help="of an answer and of a long one, which streams have too")
    parser.add_argument("--steps", type=int, default=STREAM_STEPS, help=f"rounds between two pieces of a stream (default: {STREAM_STEPS})")
    parser.add_argument("--open", type=int, default=1, help="streams that are open at a time, and threads (default: 1)")
    parser.add_argument("--repeats", type=int, default=5, help="(default: 5)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: bfloat16)")
    args = parser.parse_args()
    config, dtype = released.target_config(args.config), DTYPES[args.dtype]
    trees = gemma4.abstract(config, dtype), released.abstract_drafter(args.drafter, args.config, config, dtype)
    placement = placement_of(None if args.mesh is None else sharding.mesh_of(args.mesh))
    placement = with_head_guides(placement, *trees, None, memory_limit(jax.devices()[0]), pays=guide_pays())
    target, drafter = (placement.spread(tree) for tree in random_weights(tuple(placement.place(tree) for tree in trees), 0))
    few, many = args.tokens
    settings = Settings(
        num_draft_tokens=args.k,
        max_slots=args.open,
        max_len=args.prompt + many,
        accept=synthetic(RATES[: args.k]),
        progress=False,
    )
    llm = LLM(target, drafter, load_tokenizer(checkpoint.resolve("pocket")), settings, placement=placement)
    rng = np.random.default_rng(0)

    def prompt() -> list[int]:
        return rng.integers(0, config.vocab_size, args.prompt).tolist()

    def opened() -> float:
        params = SamplingParams(max_tokens=many, temperature=0)
        streams = [llm.stream(prompt(), params, steps=args.steps) for _ in range(args.open)]
        for stream in streams:
            next(stream)
        begun, tokens = time.perf_counter(), 0
        while streams:
            for stream in list(streams):
                chunk = next(stream, None)
                if chunk is None:
                    streams.remove(stream)
                else:
                    tokens += len(chunk.token_ids)
        return tokens / (time.perf_counter() - begun)

    def threaded() -> float:
        begun = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(args.open) as pool:
            list(pool.map(lambda _: [answered(many) for _ in range(EACH)], range(args.open)))
        return EACH * args.open * many / (time.perf_counter() - begun)

    def streamed() -> tuple[float, float]:
        begun = time.perf_counter()
        stream = llm.stream(prompt(), SamplingParams(max_tokens=many, temperature=0), steps=args.steps)
        next(stream)
        first = time.perf_counter()
        tokens = sum(len(chunk.token_ids) for chunk in stream)
        return 1e3 * (first - begun), tokens / (time.perf_counter() - first)

    def answered(tokens: int) -> float:
        begun = time.perf_counter()
        llm.generate([prompt()], SamplingParams(max_tokens=tokens, temperature=0), use_tqdm=False)
        return 1e3 * (time.perf_counter() - begun)

    llm.warmup(SamplingParams(max_tokens=many, temperature=0))
    ways = {
        "as it is": (Runner.queues, Runner.companions),
        "one after the other": (lambda *_: False, lambda *_: []),
    }
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in ways}
    for repeat in range(-2, args.repeats):
        for name, (queues, companions) in ways.items():
            Runner.queues, Runner.companions = queues, companions
            times = (*streamed(), answered(few), answered(many), opened(), threaded())
            if repeat >= 0:
                found[name].append(times)
    device, what = jax.devices()[0].device_kind, f"{args.config} with {args.drafter}, {args.dtype}, K = {args.k}"
    print(f"{device}, {args.mesh or 'one device'}, jax {jax.__version__}: {what};")
    print(f"prompts of {args.prompt} tokens, answers of {few} and {many}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name, times in found.items():
        cells = (f"{statistics.median(column):.1f} ({min(column):.1f} - {max(column):.1f})" for column in zip(*times, strict=True))
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
