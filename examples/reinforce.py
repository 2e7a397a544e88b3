"""Teaches a model by reinforcement to write Python that parses: `python examples/reinforce.py`.

In each step the LLM writes several texts for each prompt. Those that parse are made likelier than the others of their prompt (REINFORCE
with the mean of the others as baseline, arXiv 2402.14740), and the LLM goes on with the new weights, which its drafter follows. It prints
the share of texts that parse, and the tokens of a round. It needs optax. With the bundled pocket models it runs on a laptop.
"""

from __future__ import annotations

import argparse
import ast

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxspec
from jaxspec.drafters.training import XLA, whole_rows

NAMES = "add count find is_empty merge parse reverse split".split()
PROMPTS = [f"def {name}(self, value):\n    " for name in NAMES]


def reward(text: str) -> float:
    """1.0 if a text's whole lines are Python, else 0.0."""
    try:
        ast.parse(text[: text.rfind("\n") + 1])
    except (SyntaxError, ValueError):
        return 0.0
    return 1.0


def loss(weights, ids, mask, advantages):
    """Less, the likelier texts with an advantage are. ids: [B, T] int32; mask: [B, T - 1], which of ids[:, 1:] were written; advantages:
    [B]."""
    out, _ = weights(whole_rows(ids), None, attention=XLA)
    logprobs = jax.nn.log_softmax(weights.unembed(out.hidden[:, :-1]))
    chosen = jnp.take_along_axis(logprobs, ids[:, 1:, None], axis=-1)[:, :, 0]
    return -jnp.sum(chosen * mask * advantages[:, None]) / jnp.sum(mask)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="pocket", help="hub id, folder or bundled name (default: pocket)")
    parser.add_argument("--drafter", default="pocket-mtp", help="hub id, folder or bundled name (default: pocket-mtp)")
    parser.add_argument("--steps", type=int, default=40, help="(default: 40)")
    parser.add_argument("--samples", type=int, default=8, help="texts of each prompt in a step (default: 8)")
    parser.add_argument("--tokens", type=int, default=40, help="of a text (default: 40)")
    parser.add_argument("--rate", type=float, default=2e-4, help="learning rate (default: 2e-4)")
    parser.add_argument("--learn", type=float, default=0.1, help="share of the time in which the drafter learns (default: 0.1)")
    args = parser.parse_args()
    # A guide of the head is made of it anew with each update; the tree of weights that is trained has none.
    llm = jaxspec.load(args.target, args.drafter, learn=args.learn or None, head_guide=False, max_slots=64, max_len=128)
    params = jaxspec.SamplingParams(n=args.samples, max_tokens=args.tokens, temperature=1.0, top_k=0, top_p=1.0)
    optimizer = optax.adam(args.rate, b1=0.9, b2=0.95)
    weights = llm.target
    state = optimizer.init(weights)

    @jax.jit  # which must not donate the weights, since the LLM has them too
    def train(weights, state, ids, mask, advantages):
        gradient = jax.grad(loss)(weights, ids, mask, advantages)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(weights, updates), state

    length = max(len(llm.tokenizer.encode(prompt)) for prompt in PROMPTS) + args.tokens + 1
    for step in range(args.steps):
        before = llm.stats
        outs = llm.generate(PROMPTS, params, use_tqdm=False)
        rewards = np.asarray([reward(out.prompt + out.text) for out in outs], np.float32).reshape(len(PROMPTS), -1)
        baseline = (rewards.sum(axis=1, keepdims=True) - rewards) / (args.samples - 1)
        ids, mask = np.zeros((len(outs), length), np.int32), np.zeros((len(outs), length - 1), np.float32)
        for i, out in enumerate(outs):
            tokens = [*out.prompt_token_ids, *out.token_ids]
            ids[i, : len(tokens)] = tokens
            mask[i, len(out.prompt_token_ids) - 1 : len(tokens) - 1] = 1
        weights, state = train(weights, state, ids, mask, (rewards - baseline).reshape(-1))
        llm.update_weights(weights)
        spent = llm.stats - before
        print(f"step {step}: {rewards.mean():.0%} parse, {spent.acceptance_length:.2f} tokens a round", flush=True)


if __name__ == "__main__":
    main()
