"""What a drafter learns during a job: `python benchmarks/learning.py --prompts 3000`.

The target is pocket, fine-tuned on log lines; the drafter is the bundled assistant, which does not know these. The job runs without
learning and then with it, and texts are compared token by token. With `--target pocket`, prompts are the bundled target's own domain,
Python code. Prints tokens a step of each twelfth of the job, and seconds, as rows of a Markdown table: those of a clock, and those of all
processors, which other work on the machine changes less.

`--shape 31b` runs on random weights of a released model's shape and its assistant's instead, and prints the share of the time that went
into learning, and the memory that was planned and in use.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jaxspec
from jaxspec import Learn, SamplingParams, checkpoint, released
from jaxspec.bench.random_weights import random_weights
from jaxspec.engine.llm import LLM
from jaxspec.engine.memory import fit, memory_limit, sizes_of
from jaxspec.engine.settings import Settings
from jaxspec.model import gemma4
from jaxspec.targets import DTYPES
from jaxspec.text import load_tokenizer
from jaxspec.train import finetune
from pallas_kernels import dialect

PARTS = 12  # of a job, for which acceptance is told
GIVEN = 64  # tokens of a prompt of code


def log_line(rng: random.Random, second: int) -> str:
    user, size = rng.choice(["ada", "grace", "linus", "guido"]), rng.randrange(100, 1000)
    path = rng.choice(["/index", "/login", "/search", "/static/logo"])
    event = rng.choice([f"GET {path} 200 {size} bytes", f"POST {path} 302", f"GET {path} 404", f"session of {user} closed"])
    return f"2026-11-21 10:{second // 60:02}:{second % 60:02} [{rng.choice(['info', 'info', 'warning'])}] user={user} {event}"


def log(rng: random.Random, lines: int) -> str:
    return "".join(log_line(rng, 60 + 3 * i) + "\n" for i in range(lines))


def tuned(folder: Path) -> Path:
    """A target that writes log lines."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, data = random.Random(0), folder / "logs.jsonl"
    data.write_text("".join(json.dumps({"text": log(rng, 20)}) + "\n" for _ in range(100)))
    run: dict[str, Any] = {"steps": 48, "batch": 4, "length": 64, "peak": 1e-3, "every": 48, "save_every": 0, "dtype": "float32"}
    return finetune("pocket", data=data, out=folder / "target", progress=False, **run)


def prompts_of(llm: Any, count: int, code: bool) -> list[list[int]]:
    rng = random.Random(1)
    if not code:
        return [llm.tokenizer.encode(log(rng, rng.randrange(1, 4))) for _ in range(count)]
    from jaxspec.train.pocket.corpus import held_out_texts

    texts = [llm.tokenizer.encode(text) for text in held_out_texts().values()]
    starts = [(ids, rng.randrange(max(len(ids) - GIVEN, 1))) for ids in rng.choices(texts, k=count)]
    return [ids[at : at + GIVEN] for ids, at in starts]


def job(args: argparse.Namespace, target: Any, learn: Learn | None) -> tuple[list[list[int]], list[float], tuple[float, float], Any]:
    """(texts, tokens a step of each part, seconds and those of processors, stats)"""
    more = {"num_draft_tokens": args.k, "max_slots": args.slots, "max_len": 256, "dtype": "float32", "progress": False}
    with jaxspec.load(target, args.drafter, **more) as llm:
        prompts = prompts_of(llm, args.prompts, args.target == "pocket")
        asked = [SamplingParams(max_tokens=args.tokens, temperature=args.temperature, seed=i, ignore_eos=True) for i in range(len(prompts))]
        llm.warmup(asked[0])
        learning = None if learn is None else llm.learn(learn)
        if learning is not None:
            learning.compile()
        texts: list[list[int]] = [[] for _ in prompts]
        begun, worked, lengths, stepped, steps = time.perf_counter(), time.process_time(), list[float](), 0, 0
        for count, done in enumerate(llm.as_completed(zip(prompts, asked, strict=True)), start=1):
            texts[done.prompt_index] = done.token_ids
            stepped, steps = stepped + len(done.token_ids) - 1, steps + done.stats.steps
            if count * PARTS // len(prompts) > len(lengths):
                lengths.append(stepped / steps)
                stepped = steps = 0
                told = llm.stats.learning or ""
                print(f"  {count} prompts, {time.perf_counter() - begun:.1f} s, {lengths[-1]:.2f}, {told}", flush=True)
        seconds, stats = (time.perf_counter() - begun, time.process_time() - worked), llm.stats
        if learning is not None:
            learning.close()
        return texts, lengths, seconds, stats


def dummy(args: argparse.Namespace, learn: Learn) -> None:
    """A job on random weights. Drafts are hardly ever accepted, and the drafter learns what there is to learn of noise."""
    config = released.target_config(args.shape)
    dtype = DTYPES["float32" if args.shape == "pocket" else config.dtype]
    target = random_weights(gemma4.abstract(config, dtype), 0)
    name = str(checkpoint.resolve("pocket-mtp")) if args.shape == "pocket" else "mtp"
    drafter = random_weights(released.abstract_drafter(name, args.shape, config, dtype), 1)
    kernels = dialect.obstacle() is None
    sizes = sizes_of(target, drafter, max_len=args.max_len, num_draft_tokens=args.k, kernels=kernels, learn=learn)
    limit = memory_limit(jax.local_devices()[0])
    chosen = fit(sizes, None if limit is None else int(0.9 * limit), args.slots or None)
    more = {"max_slots": chosen.slots, "kv_pages": chosen.pages, "prefix_bytes": chosen.prefix_bytes, "progress": False}
    settings = Settings(num_draft_tokens=args.k, max_len=args.max_len, **more)
    planned = sizes.kept(chosen.slots, chosen.pages) + chosen.prefix_bytes + sizes.work(chosen.slots)
    with LLM(target, drafter, load_tokenizer(checkpoint.resolve("pocket")), settings) as llm:
        prompts = np.random.default_rng(0).integers(2, config.vocab_size, (args.prompts, GIVEN)).tolist()
        asked = SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True)
        llm.warmup(asked)
        with llm.learn(learn) as learning:
            learning.compile()
            print(f"compiled in {llm.stats.compile_seconds:.0f} s; {chosen.slots} slots", flush=True)
            begun = time.perf_counter()
            llm.generate(prompts, asked)
            seconds, told = time.perf_counter() - begun, learning.stats
        print(f"{seconds:.1f} s, {llm.stats.tokens_per_second:.0f} tokens/s; asked for {learn.share:.1%}: {told}")
        peak = llm.stats.peak_bytes
        found = "unknown here" if peak is None else f"{peak / 2**30:.2f} GiB"
        print(f"peak memory {found}, planned {planned / 2**30:.2f} GiB: of it learning {sizes.learnt / 2**30:.2f} GiB and an update's work "
              f"{sizes.learning / 2**30:.2f} GiB")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=3000)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each text")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--k", type=int, default=4, help="tokens drafted in each round")
    parser.add_argument("--target", help="a folder, or pocket; by default pocket is fine-tuned first")
    parser.add_argument("--drafter", default="pocket-mtp")
    parser.add_argument("--keep", type=Path, help="folder for the fine-tuned target")
    for name in ("share", "rate"):
        parser.add_argument(f"--{name}", type=float, default=getattr(Learn(), name))
    for name in ("batch", "length", "anchors", "every"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Learn(), name))
    parser.add_argument("--shape", help="e2b, e4b, 12b, 26b, 31b or pocket: random weights of this shape")
    parser.add_argument("--max-len", type=int, default=1024, help="for --shape: tokens of the longest sequence")
    args = parser.parse_args()
    if args.shape is not None:
        dummy(
            args, Learn(**{name: getattr(args, name) for name in ("share", "rate", "batch", "length", "anchors", "every")}, patience=1000)
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        target = args.target or tuned(args.keep or Path(folder))
        learn = Learn(**{name: getattr(args, name) for name in ("share", "rate", "batch", "length", "anchors", "every")})
        plain, without, before, _ = job(args, target, None)
        texts, lengths, seconds, stats = job(args, target, learn)
    differing = sum(a != b for a, b in zip(plain, texts, strict=True))
    print(f"{differing} of {len(texts)} texts differ; {before[0]:.1f} s without learning, {seconds[0]:.1f} s with; {stats.learning}")
    print("| | " + " | ".join(f"{i + 1}/{PARTS}" for i in range(PARTS)) + " | s | CPU s |")
    for name, row, took in (("without", without, before), ("with", lengths, seconds)):
        print(f"| {name} | " + " | ".join(f"{length:.2f}" for length in row) + f" | {took[0]:.1f} | {took[1]:.1f} |")
    print(f"last quarter: {np.mean(without[-3:]):.2f} tokens a step without, {np.mean(lengths[-3:]):.2f} with")


if __name__ == "__main__":
    main()
