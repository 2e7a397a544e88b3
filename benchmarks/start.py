"""Times how long an LLM takes to be ready once its weights are there: `python benchmarks/start.py 31b mtp`.

Weights are random and of a released model's shape. Everything is compiled that greedy requests use, and one request is served: with an
empty compilation cache, and from the files of that cache, in the same process, which keeps kernels that it has compiled, and in another.
With `--prompts 64` so many requests are served without a warm-up, as by a script that does not ask for one.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxspec import SamplingParams, checkpoint, released
from jaxspec.bench.random_weights import random_weights
from jaxspec.engine.llm import LLM
from jaxspec.engine.settings import Settings
from jaxspec.model import gemma4
from jaxspec.model.head_guides import guided
from jaxspec.sharding.meshes import mesh_of
from jaxspec.sharding.placement import placement_of
from jaxspec.text import load_tokenizer
from pallas_kernels.lm_head import guide_pays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="e2b, e4b, 12b, 26b, 31b, or a folder with a config.json")
    parser.add_argument("drafter", help="as for `jaxspec bench`")
    parser.add_argument("--k", type=int, default=4, help="tokens drafted in each round (default: 4)")
    parser.add_argument("--slots", type=int, default=8, help="sequences in flight (default: 8)")
    parser.add_argument("--prompts", type=int, help="requests that are served without a warm-up (default: one after a warm-up)")
    parser.add_argument("--tokens", type=int, default=16, help="new tokens of each request (default: 16)")
    parser.add_argument("--max-len", type=int, default=4096, help="tokens of a sequence (default: 4096)")
    parser.add_argument("--mesh", help='axes and their sizes, such as "tensor=2" (default: one GPU)')
    parser.add_argument("--cache", help=argparse.SUPPRESS)  # of a process of its own
    args = parser.parse_args()
    if args.cache is not None:
        measure(args, args.cache)
        return
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            subprocess.run([sys.executable, *sys.argv, "--cache", folder], check=True)


def measure(args: argparse.Namespace, cache: str) -> None:
    """Starts in this process, and starts again. cache: the folder of JAX's."""
    names = ("full, in another process" if any(Path(cache).iterdir()) else "empty", "full, in the same process")
    placement = placement_of(None if args.mesh is None else mesh_of(args.mesh))
    config = released.target_config(args.config)
    trees = gemma4.abstract(config, jnp.bfloat16), released.abstract_drafter(args.drafter, args.config, config, jnp.bfloat16)
    tokenizer = load_tokenizer(checkpoint.resolve("pocket"))
    begun = time.perf_counter()
    target, drafter = random_weights(tuple(placement.spread(placement.place(tree)) for tree in trees), 0)
    if guide_pays():
        target, drafter = guided(target), guided(drafter)
    jax.block_until_ready((target, drafter))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}: random weights of {args.config} {time.perf_counter() - begun:.1f} s")
    jax.config.update("jax_compilation_cache_dir", cache)
    for name in names:
        jax.clear_caches()
        begun = time.perf_counter()
        settings = Settings(num_draft_tokens=args.k, max_slots=args.slots, max_len=args.max_len, progress=False)
        llm = LLM(target, drafter, tokenizer, settings, placement=placement)
        params = SamplingParams(max_tokens=args.tokens, temperature=0)
        if args.prompts is None:
            llm.warmup(params)
        ready = time.perf_counter()
        llm.generate(["def f(x):"] * (args.prompts or 1), params)
        ended, stats = time.perf_counter(), llm.stats
        print(
            f"compilation cache {name}: ready after {ready - begun:.1f} s, {args.tokens} tokens of each request after "
            f"{ended - begun:.1f} s ({stats.compilations} programs)",
            flush=True,
        )
        llm.close()


if __name__ == "__main__":
    main()
