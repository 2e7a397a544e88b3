"""Times rounds of every shape that adaptive verification chooses among, and tells what it makes of them at given acceptance.

    python benchmarks/adaptive_verification.py 31b dflash --k 15 --batch 32 --fixed 2,4,7,15 --rates 0.3,0.5,0.7,0.85,0.95

Weights are random and prompts are random tokens, as in `jaxspec bench`. The time of a round depends on its shape alone. For every rate c,
with which a draft is accepted once all before it are, the tokens of rounds are drawn on the host, with the rows handed out as the device
does it, and the choice is that of the engine. The first rate is also that of the timed rounds: their tokens tell whether the two agree.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import math
import os
import statistics
import time
from typing import Any

import jax
import numpy as np

from jaxspec import decode
from jaxspec.bench.random_weights import random_weights
from jaxspec.bench.timing import _admit, _requests
from jaxspec.bench.workload import BenchPlan, plan_bench
from jaxspec.decode import verification
from jaxspec.engine import cuda_graphs
from jaxspec.engine.round_shape import Adaptive, RoundShape, round_shapes
from jaxspec.sampling.choice import PLAIN

REPEATS, STEPS, WARM = 3, 6, 3  # timed calls, rounds that a long one has more than a short one, and rounds of each call before them
ROUNDS, CALL = 900, 16  # simulated rounds, and how many of them a call has


def main() -> None:
    options = parsed()
    rate, most = options.rates[0], options.k
    unconditional = tuple(rate**i for i in range(1, most + 1))
    plan = plan_bench(
        options.config, options.drafter, num_draft_tokens=most, batches=(options.batch,), acceptance=unconditional, context=options.context,
        dtype=options.dtype, repeats=REPEATS, tokens=STEPS * 6,
    )  # fmt: skip
    shapes = [*map(RoundShape, options.fixed), *round_shapes(options.batch, most)]
    found = measured(plan, options.batch, list(dict.fromkeys(shapes)))
    costs = {shape: ms for shape, (ms, _) in found.items()}
    print(f"\n{options.config}, {options.drafter}, batch {options.batch}, context {options.context}; accepted at {rate}:")
    for shape, (ms, tokens) in found.items():
        drawn = simulated(Adaptive({(options.batch, RoundShape(shape.num_draft_tokens)): 1.0}), rate, options.batch, shape, costs)
        print(f"  {str(tuple(shape)):12s} {ms:8.3f} ms, {tokens:.2f} tokens a round (drawn: {drawn[1]:.2f})")
    report(options, costs)
    if options.json:
        rows = [{"k": s.num_draft_tokens, "rows": s.rows, "ms": ms, "tokens": tokens} for s, (ms, tokens) in found.items()]
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"options": vars(options), "rounds": rows}, file, indent=1)


def report(options: argparse.Namespace, costs: dict[RoundShape, float]) -> None:
    """Tokens a second at every rate, with fixed numbers of drafts and with the engine's choice."""
    print(
        f"\n{'rate':>5} "
        + " ".join(f"{f'K = {k}':>8}" for k in options.fixed)
        + f" {'adaptive':>9} {'/ best':>7} {'/ largest K':>11}  chosen"
    )
    for rate in options.rates:
        fixed = [1e3 * options.batch * sum(rate**i for i in range(k + 1)) / costs[RoundShape(k)] for k in options.fixed]
        chooser = Adaptive({(options.batch, shape): costs[shape] for shape in round_shapes(options.batch, options.k)})
        speed, _, chosen = simulated(chooser, rate, options.batch, None, costs)
        ratios = speed / max(fixed), speed / fixed[-1]
        print(f"{rate:5.2f} " + " ".join(f"{x:8.0f}" for x in fixed) + f" {speed:9.0f} {ratios[0]:7.3f} {ratios[1]:11.2f}  {tuple(chosen)}")


def simulated(
    chooser: Adaptive, rate: float, batch: int, fixed: RoundShape | None, costs: dict[RoundShape, float]
) -> tuple[float, float, RoundShape]:
    """Rounds whose drafts are accepted at a rate: tokens a second of all sequences, tokens a round of one, and the shape that most of the
    last rounds had. fixed: the shape of all rounds, else the chooser's."""
    rng, acceptance, shapes = np.random.default_rng(0), np.zeros((batch, 2)), []
    tokens = milliseconds = rounds = 0.0
    fades = 0.5 ** (1 / verification.HALF_LIFE)
    for call in range(ROUNDS // CALL):
        shape = fixed or chooser.choose(batch)
        seen = []
        for _ in range(CALL):
            k = shape.num_draft_tokens
            kept = np.cumprod(rng.random((batch, k)) < rate, axis=1).sum(axis=1) if k else np.zeros(batch, int)
            chances = (acceptance[:, 1:] + verification.PRIOR_KEPT) / (acceptance[:, :1] + verification.PRIOR_TRIED)
            verified = np.full(batch, k) if shape.rows is None else prefixes(chances ** np.arange(1, k + 1), shape.rows)
            accepted = np.minimum(kept, verified)
            acceptance = acceptance * fades + np.stack([np.minimum(accepted + 1, verified), accepted], axis=1)
            seen.append((accepted, verified))
            if call * 3 > ROUNDS // CALL:
                tokens, milliseconds, rounds = tokens + batch + accepted.sum(), milliseconds + costs[shape], rounds + batch
                shapes.append(shape)
        if fixed is None:
            accepted, verified = (np.concatenate(part) for part in zip(*seen, strict=True))
            chooser.see(accepted, verified, batch, shape, batch)
    return 1e3 * tokens / milliseconds, tokens / rounds, max(set(shapes), key=shapes.count)


def prefixes(chances: np.ndarray, rows: int) -> np.ndarray:
    """As `verification.best_prefixes`, where every sequence has a round. [B, K] -> [B]"""
    batch, count = chances.shape
    order = np.argsort(-chances.T.reshape(-1), kind="stable")[: max(rows - batch, 0)]
    taken = np.zeros(count * batch, bool)
    taken[order] = True
    return taken.reshape(count, batch).sum(axis=0)


def measured(plan: BenchPlan, batch: int, shapes: list[RoundShape]) -> dict[RoundShape, tuple[float, float]]:
    """Milliseconds of a round, and tokens a round of a sequence, for each shape. All programs share the weights and are compiled side by
    side."""
    work, begun = plan.work, time.perf_counter()
    target, drafter = jax.block_until_ready(random_weights(plan.placed(), work.seed))
    print(f"weights made after {time.perf_counter() - begun:.0f} s", flush=True)
    devices, slots = jax.tree.leaves(target)[0].devices(), np.arange(batch, dtype=np.int32)
    # A sequence is at most twice as long as rounds that accept everything would make it in one cell.
    calls = WARM * WARM + REPEATS * (2 + STEPS)
    layout = plan.layout(target, drafter, batch, work.context + 2 + calls * (work.num_draft_tokens + 1))
    gaps, state = cuda_graphs.keep_apart(devices), jax.block_until_ready(layout.empty())
    max_len = state.tokens.shape[1]
    chunk = min(work.prefill_chunk, work.context)
    first = functools.partial(decode.prefill, chunk=chunk, round=decode.Round(0, needs=PLAIN))
    begin = jax.jit(layout.on(_admit), donate_argnums=0)
    arguments = state, slots, np.int32(0), np.bool_(False)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        lowered = jax.jit(layout.on(first), donate_argnums=2).lower(target, drafter, state, slots[:1])
        prefill = pool.submit(lowered.compile)
        loops = {}
        for shape in shapes:
            loop = functools.partial(decode.decode_loop, round=decode.Round(shape.num_draft_tokens, work.accept, rows=shape.rows))
            program = jax.jit(layout.on(loop), donate_argnums=2).lower(target, drafter, *arguments)
            loops[shape] = pool.submit(functools.partial(cuda_graphs.compiled, program, devices))
    print(f"{1 + len(loops)} programs compiled after {time.perf_counter() - begun:.0f} s", flush=True)

    found = {}
    requests = _requests(work, plan.target_tree.config, batch, work.context, max_len)
    for shape, loop in loops.items():
        state = begin(state, slots, requests)
        for slot in range(batch):
            for _ in range(math.ceil(work.context / chunk)):
                state = prefill.result()(target, drafter, state, np.full(1, slot, np.int32))

        def call(steps: int, loop: Any = loop) -> float:
            nonlocal state
            started = time.perf_counter()
            state = jax.block_until_ready(loop.result()(target, drafter, state, slots, np.int32(steps), np.bool_(False)))
            return 1e3 * (time.perf_counter() - started)

        for _ in range(WARM):
            call(WARM)
        before, times = jax.device_get((state.length, state.rounds)), []
        for _ in range(REPEATS):
            short = call(1)
            times.append((call(1 + STEPS) - short) / STEPS)
        length, rounds = jax.device_get((state.length, state.rounds))
        assert (np.asarray(state.status) == decode.RUNNING).all(), "a sequence ended while it was timed"
        tokens = float((length - before[0]).sum() / (rounds - before[1]).sum())
        found[shape] = statistics.median(times), tokens
        print(f"{str(tuple(shape)):12s} {found[shape][0]:8.3f} ms ({min(times):.3f} - {max(times):.3f}), {tokens:.2f} tokens", flush=True)
    del gaps
    return found


def parsed() -> argparse.Namespace:
    def numbers(kind: Any) -> Any:
        return lambda text: [kind(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a named shape or a folder, as for jaxspec bench")
    parser.add_argument("drafter", help="a kind, or a folder")
    parser.add_argument("--k", type=int, default=15, help="most tokens of a round's drafts")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fixed", type=numbers(int), default=[2, 4, 7, 15], help="numbers of drafts to compare with, the largest last")
    parser.add_argument("--rates", type=numbers(float), default=[0.7, 0.3, 0.5, 0.85, 0.95])
    parser.add_argument("--json", help="write every figure to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
