"""What updates of a drafter that fits its target gain: `python benchmarks/learning_updates.py --batch 8,32`.

Pocket writes texts behind prompts of its own domain. The bundled assistant learns from four fifths of them in the order in which they were
written, as it would during a job, with each batch size and learning rate. Prints the acceptance length along the other texts, divided by
the one at the start, after some numbers of updates.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np
from learning import prompts_of

import jaxspec
from jaxspec import Learn, SamplingParams
from jaxspec.drafters.training import Objective
from jaxspec.learning.learner import Learner
from jaxspec.learning.losses import distil_loss
from jaxspec.train.data import batch_of, take_rows

K, SCORED, PART = 4, 384, 32  # drafts; texts that are scored, and how many of them at a time
TOLD = (8, 16, 32, 64, 128, 192, 256, 400, 800, 1600)


def main() -> None:
    def numbers(kind: Any) -> Any:
        return lambda text: [kind(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each text")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--updates", type=int, default=400)
    parser.add_argument("--batch", type=numbers(int), default=[8, 32])
    parser.add_argument("--rates", type=numbers(float), default=[1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3])
    parser.add_argument("--anchors", type=int, default=Learn().anchors)
    args = parser.parse_args()
    sizes = {"num_draft_tokens": K, "max_slots": args.slots, "max_len": 256}
    llm = jaxspec.load("pocket", "pocket-mtp", **sizes, dtype="float32", progress=False)
    outs = llm.generate(prompts_of(llm, args.prompts, True), SamplingParams(max_tokens=args.tokens, temperature=0, ignore_eos=True))
    texts = [(np.asarray([*out.prompt_token_ids, *out.token_ids], np.int32), len(out.prompt_token_ids)) for out in outs]
    cut, longest = 4 * len(texts) // 5, max(len(ids) for ids, _ in texts)
    ids, given = zip(*texts[cut : cut + SCORED], strict=True)
    held = batch_of(ids, given, longest)
    (target, origin, placement), steps = llm._whole, Objective(**{**vars(Objective()), "steps": K})
    score = jax.jit(lambda drafter, target, batch: distil_loss(drafter, target, batch, None, steps)[1]["acceptance_length"])

    def acceptance(drafter: Any) -> float:
        parts = [take_rows(held, slice(at, at + PART)) for at in range(0, len(held.ids), PART)]
        return float(np.mean([score(drafter, target, part) for part in parts]))

    start = acceptance(origin.weights)
    told = [count for count in TOLD if count <= args.updates]
    print(f"at the start {start:.3f}\n| batch | rate | " + " | ".join(map(str, told)) + " |", flush=True)
    for batch in args.batch:
        for rate in args.rates:
            learn = Learn(batch=batch, rate=rate, length=longest, anchors=args.anchors)
            learner, at, found = Learner(target, origin.weights, learn, num_draft_tokens=K, max_len=256, placement=placement), 0, []
            for update in range(1, args.updates + 1):
                while at < max(update * cut // args.updates, 2 * batch):
                    learner.add(*texts[at])
                    at += 1
                learner.step()
                if update in told:
                    found.append(acceptance(learner.candidate()) / start)
            print(f"| {batch} | {rate:.1e} | " + " | ".join(f"{share:.3f}" for share in found) + " |", flush=True)


if __name__ == "__main__":
    main()
