"""Times a whole job through the public LLM: `python benchmarks/throughput.py 31b mtp`, or `pocket pocket-mtp --slots 8` on a CPU.

Weights are random and of a released model's shape, or of a folder's; prompts are random tokens of random lengths, nothing ends a
sequence before its last token, and drafts are accepted at given rates. Everything is compiled and has run before the clock starts.
Prints a row of a Markdown table for each number of slots.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxspec import SamplingParams, checkpoint, released, sharding
from jaxspec.bench.random_weights import random_weights
from jaxspec.bench.workload import RATES
from jaxspec.decode.accept import synthetic
from jaxspec.engine.llm import LLM
from jaxspec.engine.memory import fit, memory_limit, most_slots, sizes_of
from jaxspec.engine.settings import Settings
from jaxspec.loading import MAX_SLOTS
from jaxspec.model import gemma4
from jaxspec.planning import with_head_guides
from jaxspec.sharding.placement import placement_of
from jaxspec.targets import DTYPES
from jaxspec.text import load_tokenizer
from pallas_kernels import dialect
from pallas_kernels.lm_head import guide_pays

COLUMNS = (
    "slots",
    "s",
    "prompts/s",
    "tokens/s",
    "accepted",
    "device busy",
    "GPU in use",
    "turns",
    "host ms, median",
    "host ms, 95 %",
    "compiled",
    "preempted",
    "peak GiB",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="e2b, e4b, 12b, 26b, 31b, a bundled target, or a folder with a config.json")
    parser.add_argument("drafter", help="as for `jaxspec bench`")
    parser.add_argument("--k", type=int, default=4, help="tokens drafted in each round (default: 4)")
    parser.add_argument("--mesh", help="devices to spread over: data=N, tensor=N or both with a comma between them; one by default")
    parser.add_argument(
        "--slots",
        default="32,auto",
        help="sequences in flight, on each data shard; auto: as many as memory holds at full length (default: 32,auto)",
    )
    parser.add_argument("--prompts", type=int, default=256, help="(default: 256)")
    parser.add_argument(
        "--lengths", type=int, nargs=2, default=(64, 1024), help="tokens of the shortest and longest prompt (default: 64 1024)"
    )
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[256], help="new tokens of each prompt, or the fewest and the most (default: 256)"
    )
    parser.add_argument("--acceptance", default=",".join(map(str, RATES)), help="share of rounds that accept draft i and all before it")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--memory-fraction", type=float, default=0.9, help="as for jaxspec.load (default: 0.9)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and prompts (default: 0)")
    args = parser.parse_args()

    config, device = released.target_config(args.config), jax.devices()[0]
    dtype, limit = DTYPES[args.dtype], memory_limit(device)
    room = None if limit is None else int(args.memory_fraction * limit)
    trees = gemma4.abstract(config, dtype), released.abstract_drafter(args.drafter, args.config, config, dtype)
    placement = placement_of(None if args.mesh is None else sharding.mesh_of(args.mesh))
    placement = with_head_guides(placement, *trees, None, room, pays=guide_pays())
    shards = placement.shards
    if len(args.tokens) > 2:
        parser.error(f"--tokens: found {len(args.tokens)} numbers, expected one or two")
    fewest, most = args.tokens[0], args.tokens[-1]
    max_len = args.lengths[1] + most
    sizes = sizes_of(*trees, max_len=max_len, num_draft_tokens=args.k, kernels=dialect.obstacle() is None, placement=placement)
    begun = time.perf_counter()
    placed = tuple(placement.place(tree) for tree in trees)
    target, drafter = (placement.spread(tree) for tree in random_weights(placed, args.seed))
    jax.block_until_ready((target, drafter))
    work = f"{args.config} with {args.drafter}, {args.dtype}, K = {args.k}"
    print(f"{device.device_kind}, {args.mesh or 'one device'}, jax {jax.__version__}: {work}")
    print(
        f"random weights {time.perf_counter() - begun:.1f} s; {args.prompts} prompts of {args.lengths[0]} to {args.lengths[1]} tokens,",
        end="",
    )
    each = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    print(f" {each} new tokens each; acceptance {args.acceptance}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)

    rng = np.random.default_rng(args.seed)
    lengths = rng.integers(args.lengths[0], args.lengths[1] + 1, args.prompts)
    prompts = [rng.integers(0, config.vocab_size, length).tolist() for length in lengths]
    tokens = rng.integers(fewest, most + 1, args.prompts).tolist()
    rates = tuple(map(float, args.acceptance.split(",")))[: args.k]
    for asked in args.slots.split(","):
        share = -(-args.prompts // shards)
        most = MAX_SLOTS if room is None else most_slots(sizes, room, share)
        chosen = fit(sizes, room, min(most, share) if asked == "auto" else int(asked))
        settings = Settings(
            num_draft_tokens=args.k,
            max_slots=chosen.slots * shards,
            max_len=max_len,
            accept=synthetic(rates),
            kv_pages=chosen.pages,
            prefix_bytes=chosen.prefix_bytes,
            progress=False,
        )
        llm = LLM(target, drafter, load_tokenizer(checkpoint.resolve("pocket")), settings, placement=placement)
        print(row(llm, prompts, tokens, shards, placement.size), flush=True)
        del llm
        gc.collect()  # what it held is to be free for the next


def row(llm: LLM, prompts: list[list[int]], tokens: list[int], shards: int, devices: int) -> str:
    """A line of the table: one job, after everything that it uses has run."""
    params = [SamplingParams(max_tokens=count, temperature=0) for count in tokens]
    llm.warmup(params[0])
    # A CUDA graph is recorded in the second run of a program, so each batch size runs thrice.
    few = SamplingParams(max_tokens=min(3 * (llm.num_draft_tokens + 1), *tokens), temperature=0)
    for count in [shards] * 3 + [8 * shards] * 3 + [llm.max_slots] * 3:
        llm.generate([prompt[:16] for prompt in prompts[:count]], few)
    longest = max(prompts, key=len)
    llm.generate([longest], few)

    with utilization(devices) as samples:
        before, begun = llm.stats, time.perf_counter()
        completions = llm.generate(prompts, params)
        seconds, stats = time.perf_counter() - begun, llm.stats - before
    if [len(completion.token_ids) for completion in completions] != tokens:
        raise RuntimeError("a sequence ended before its last token")
    cells: list[Any] = [
        llm.max_slots,
        f"{seconds:.1f}",
        f"{len(prompts) / seconds:.2f}",
        f"{stats.tokens / seconds:.0f}",
        f"{stats.acceptance_length:.2f}",
        f"{stats.busy_seconds / seconds:.1%}",
        f"{statistics.mean(samples):.1f} %" if samples else "-",
        sum(stats.host_times),
        f"{1e3 * stats.host_seconds():.2f}",
        f"{1e3 * stats.host_seconds(0.95):.2f}",
        stats.compilations,
        stats.preemptions,
        "-" if stats.peak_bytes is None else f"{stats.peak_bytes / 2**30:.1f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


@contextlib.contextmanager
def utilization(devices: int) -> Iterator[list[float]]:
    """Fills the list, at the end, with the percentage of the time in which each of the first GPUs had a kernel running, by its driver: one
    of every tenth of a second but the first. Empty where there is no nvidia-smi."""
    samples: list[float] = []
    if shutil.which("nvidia-smi") is None:
        yield samples
        return
    ids = ",".join(map(str, range(devices)))
    command = f"nvidia-smi --id={ids} --query-gpu=utilization.gpu --format=csv,noheader,nounits --loop-ms=100"
    with subprocess.Popen(command.split(), stdout=subprocess.PIPE, text=True) as process:
        try:
            yield samples
        finally:
            process.terminate()
        samples += map(float, process.communicate()[0].split()[10 * devices :])


if __name__ == "__main__":
    main()
