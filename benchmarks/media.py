"""Times prompts with images, sounds or videos: `python benchmarks/media.py e2b mtp --k 3`, with `--audio 10` for sounds of ten seconds, or
with `--video 32` for videos of so many frames.

Weights are random and of a released model's shape, its tower's too; images are random pixels and sounds are noise, each another one;
nothing ends a text before its last token, and drafts are accepted at given rates. Everything is compiled and has run before the clock
starts. Prints a Markdown table: what the tower takes for one image, or for the frames that it reads at a time, without decoding, and for
an image, a sound or a video with all that the host does; one prompt and its first token, with one of them and with as many tokens of text;
and a job of many prompts in both ways. Medians with the least and the most.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxspec import SamplingParams, checkpoint, released
from jaxspec.bench.random_weights import random_weights
from jaxspec.bench.workload import RATES
from jaxspec.decode.accept import synthetic
from jaxspec.engine.llm import LLM
from jaxspec.engine.memory import memory_limit
from jaxspec.engine.settings import Settings
from jaxspec.model import gemma4
from jaxspec.planning import with_head_guides
from jaxspec.sharding.placement import placement_of
from jaxspec.targets import DTYPES
from jaxspec.text import load_tokenizer
from jaxspec.vision.images import Images
from jaxspec.vision.videos import FRAMES_TOGETHER, SOFT_TOKENS, TOKEN_ID, Videos
from pallas_kernels.lm_head import guide_pays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", choices=released.IMAGES)
    parser.add_argument("drafter", help="as for `jaxspec bench`")
    parser.add_argument("--k", type=int, default=4, help="tokens drafted in each round (default: 4)")
    parser.add_argument("--soft-tokens", type=int, default=280, help="of an image at most (default: 280)")
    parser.add_argument("--size", type=int, nargs=2, default=(1024, 768), help="pixels of an image (default: 1024 768)")
    parser.add_argument("--audio", type=float, metavar="SECONDS", help="sounds of so many seconds in place of images")
    parser.add_argument("--video", type=int, metavar="FRAMES", help="videos of so many frames in place of images, as arrays")
    parser.add_argument("--text", type=int, default=64, help="tokens of text in a prompt (default: 64)")
    parser.add_argument("--prompts", type=int, default=64, help="of the job (default: 64)")
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of each (default: 128)")
    parser.add_argument("--slots", type=int, default=16, help="(default: 16)")
    parser.add_argument("--repeats", type=int, default=5, help="(default: 5)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="(default: bfloat16)")
    args = parser.parse_args()
    config, dtype = released.target_config(args.config), DTYPES[args.dtype]
    trees = gemma4.abstract(config, dtype), released.abstract_drafter(args.drafter, args.config, config, dtype)
    placement = placement_of(None)
    placement = with_head_guides(placement, *trees, None, memory_limit(jax.devices()[0]), pays=guide_pays())
    target, drafter = (placement.spread(tree) for tree in random_weights(tuple(placement.place(tree) for tree in trees), 0))
    rng = np.random.default_rng(0)

    def medium() -> Any:
        if args.audio is not None:
            return rng.normal(size=int(args.audio * 16_000)).astype(np.float32) / 10
        return rng.integers(0, 256, (*(() if args.video is None else (args.video,)), *args.size[::-1], 3), np.uint8)

    kind, what = "image", f"{args.size[0]} x {args.size[1]} pixels"
    if args.audio is not None:
        kind, what, tower_of = "audio", f"{args.audio} seconds", released.sounds_of(args.config, dtype)
    else:
        tower_of = released.images_of(args.config, dtype, args.soft_tokens if args.video is None else SOFT_TOKENS)
        if args.video is not None:
            tower_of = Images(tower_of.config, tower_of.preprocessing, tower_of.tower, FRAMES_TOGETHER)
    tower_of = tower_of.with_tower(random_weights(tower_of.tower, 1))
    media, rooms, named = tower_of, tower_of.rooms, "a sound" if kind == "audio" else "an image"
    if args.video is not None:  # calls have room for an image
        kind, media, rooms, named = "video", Videos(tower_of, args.video, TOKEN_ID), (args.soft_tokens,), f"a video of {args.video} frames"
    tokenizer = load_tokenizer(checkpoint.resolve("pocket"))
    count = sum(len(run.before) + run.count for run in media.runs(medium(), tokenizer.encode_word))
    settings = Settings(
        num_draft_tokens=args.k,
        max_slots=args.slots,
        max_len=args.text + count + args.tokens + 64,
        accept=synthetic(RATES[: args.k]),
        insert_rows=rooms,
        prefix_bytes=0,
        progress=False,
    )
    llm = LLM(target, drafter, tokenizer, settings, placement=placement, towers={kind: media})
    llm.warmup(SamplingParams(temperature=0))

    def prompt(with_medium: bool) -> dict:
        ids = rng.integers(5, 4000, args.text).tolist()
        if not with_medium:
            return {"prompt_token_ids": ids + rng.integers(5, 4000, count + 1).tolist()}
        return {"prompt_token_ids": [*ids, media.token_id], "multi_modal_data": {kind: medium()}}

    def generated(with_medium: bool, prompts: int, tokens: int) -> Callable[[], None]:
        def run() -> None:
            llm.generate(given.pop(), SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))

        given = [[prompt(with_medium) for _ in range(prompts)] for _ in range(args.repeats + 1)]
        return run

    def rows() -> None:
        decoded = media.decoded(fresh.pop())
        jax.block_until_ready([tower_of.rows(each, decoded[i + 1 :]) for i, each in enumerate(decoded)])

    def tower() -> None:
        jax.block_until_ready(tower_of.computed(prepared))

    fresh = [medium() for _ in range(args.repeats + 1)]
    prepared = media.decoded(medium())[: tower_of.together]
    timed = {
        f"the tower, {named if args.video is None else f'{len(prepared)} frames'} without decoding, ms": tower,
        f"{named} of {what}, ms": rows,
        f"one prompt with {named}, to its first token, ms": generated(True, 1, 1),
        "as many tokens of text, ms": generated(False, 1, 1),
        f"{args.prompts} prompts with {named} each, ms": generated(True, args.prompts, args.tokens),
        f"{args.prompts} prompts of text, ms": generated(False, args.prompts, args.tokens),
    }
    print(f"| {args.config} | median | least | most |\n|---|---|---|---|")
    for name, run in timed.items():
        run()
        found = []
        for _ in range(args.repeats):
            begun = time.perf_counter()
            run()
            found.append(1e3 * (time.perf_counter() - begun))
        print(f"| {name} | {statistics.median(found):.1f} | {min(found):.1f} | {max(found):.1f} |", flush=True)


if __name__ == "__main__":
    main()
