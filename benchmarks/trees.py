"""Asks whether a tree of drafts would beat a chain: `python benchmarks/trees.py pocket-mtp`, on a CPU.

The target continues the beginnings of the held-out modules, greedily and at temperature 1. By the coupled rule its text is the same with
any drafts, and a path of a tree is accepted as far as it is that text. So all that has to be known of a place is how high the drafter
ranks the text's next token, given the text before it, at draft step 1, 2, ...: the path of those ranks is in the tree up to some depth.
Candidates rank by what they are chosen by, at a temperature with the noise of their position.

A tree of N nodes holds the N paths of ranks that the texts of one half of the prompts take most often, as Sequoia (Chen et al. 2024,
arXiv 2402.12374) builds it, but from counts of whole paths. The other half says what it gives, walked round by round. The milliseconds of
a round are of `COSTS`; that attention over a tree and a ranking cost nothing extra is assumed in favour of the tree.

`--served N` asks for less: what rounds with the default tree of N nodes give where `load(tree=N)` serves them, beside what the ranks say.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec import SamplingParams, checkpoint
from jaxspec.drafters.registry import load_drafter
from jaxspec.drafters.training import XLA, Guess, pick, whole_rows
from jaxspec.model.draft_tree import DraftTree
from jaxspec.sampling.choice import seed_words
from jaxspec.targets import abstract_target, load_target, read_target
from jaxspec.train.pocket.corpus import BOS, held_out_texts
from pallas_kernels.noise import gumbel, row_keys

STEPS = 15  # draft steps, so the longest chain
NODES = (8, 12, 16)  # of a tree, the anchor not counted
RANKS = 8  # children of a node at most
ENOUGH = 0.08  # the gain for which a tree would be worth its code
PROMPT_TOKENS, NEW_TOKENS = 160, 128

Path = tuple[int, ...]  # of a node: the rank of each candidate on the way to it, the best has 0


@dataclasses.dataclass(frozen=True)
class Cost:
    """Milliseconds of a round. fixed: of a verification without rows; row: of each row of each sequence; draft: of a draft pass."""

    fixed: float
    row: float
    draft: float

    def round(self, batch: int, nodes: int, passes: int) -> float:
        return self.fixed + self.row * batch * (nodes + 1) + self.draft * passes


# One H200, bfloat16, the assistant's passes; benchmarks/results/2026-11-22-trees.md says what in the records each number comes from.
COSTS = {
    ("31b", 1): Cost(fixed=15.85, row=0.036, draft=0.35),
    ("31b", 4): Cost(fixed=16.73, row=0.036, draft=0.36),
    ("e2b", 1): Cost(fixed=2.10, row=0.0125, draft=0.12),
    ("e2b", 4): Cost(fixed=2.14, row=0.0125, draft=0.12),
}


@dataclasses.dataclass(frozen=True)
class Text:
    """What the target wrote after one prompt. ids: prompt and continuation; start: how many ids are the prompt's; ranks: [T, STEPS], from
    each place P how high the text's token P + k + 1 ranks at draft step k, counted from 0."""

    ids: list[int]
    start: int
    ranks: np.ndarray


def offered(guess: Guess) -> jax.Array:
    """The logits of a guess, [B, A, C], with -inf for what the drafter does not offer at inference."""
    if guess.centroids is not None:
        head = guess.centroids
        best = jax.lax.top_k(head.logits, head.top_k)[1]
        count = head.logits.shape[-1]
        of_token = jnp.argsort(head.ordering) // (head.ordering.shape[0] // count)
        among = jnp.any(jax.nn.one_hot(best, count, dtype=bool), axis=-2)
        return jnp.where(jnp.take(among, of_token, axis=-1), guess.logits, -jnp.inf)
    if guess.shortlist is not None:
        first = guess.shortlist.logits
        return jnp.where(first >= jax.lax.top_k(first, guess.shortlist.top_k)[0][..., -1:], guess.logits, -jnp.inf)
    return guess.logits


def ranks_along(target: Any, drafter: Any, ids: jax.Array, seed: jax.Array, temperature: float) -> jax.Array:
    """The rank of a text's own token at every place and draft step, RANKS or more for a token that is not offered.

    ids: [1, T] int32. seed: [2] uint32, of the request. Returns [T, STEPS] int32; what lies past the text's end means nothing.
    """
    out, _ = target(whole_rows(ids), None, taps=drafter.taps, attention=XLA)
    at = jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
    ranks = []
    for k, guess in enumerate(drafter.guesses(target, out, ids, at, STEPS), start=1):
        values, tokens = offered(guess), guess.ids
        tokens = jnp.arange(values.shape[-1], dtype=jnp.int32) if tokens is None else tokens
        if temperature:
            keys = row_keys(jnp.broadcast_to(seed, (*at.shape, 2)), at + k + 1)
            values = values / temperature + gumbel(keys, jnp.broadcast_to(tokens, values.shape))
        is_truth = tokens[None, None] == pick(ids, at + k + 1)[..., None]
        value = jnp.max(jnp.where(is_truth, values, -jnp.inf), axis=-1, keepdims=True)
        above = jnp.sum(values > value, axis=-1).astype(jnp.int32)
        ranks.append(jnp.where(jnp.isfinite(value[..., 0]), above, RANKS))
    return jnp.stack(ranks, axis=-1)[0]


def continued(temperature: float, slots: int = 8, **settings: Any) -> tuple[list[list[int]], list[jaxspec.Completion]]:
    """The prompts and their continuations, in float32. settings: of `load`."""
    llm = jaxspec.load(**settings, dtype="float32", max_slots=slots, max_len=PROMPT_TOKENS + NEW_TOKENS, progress=False)
    texts = [llm.tokenizer.encode(text) for text in held_out_texts().values()]
    prompts = [[BOS, *ids[at + 1 : at + PROMPT_TOKENS]] for ids in texts for at in (0, 400)]
    params = [SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, top_k=0, top_p=1.0, seed=i) for i in range(len(prompts))]
    return prompts, llm.generate(prompts, params)


def served(target: str, drafter: str, temperature: float, **settings: Any) -> float:
    """Tokens a step of rounds as `load` serves them with these settings, four sequences at a time."""
    _, outs = continued(temperature, 4, target=target, drafter=drafter, **settings)
    return sum(len(out.token_ids) - 1 for out in outs) / sum(out.stats.steps for out in outs)


def measured(target: str, drafter: str, temperature: float) -> list[Text]:
    """The target's texts with the drafter's ranks along them, in float32."""
    prompts, outs = continued(temperature, target=target)
    models = weights_of(target, drafter)
    rank = jax.jit(ranks_along, static_argnames="temperature")
    found = []
    for seed, (prompt, out) in enumerate(zip(prompts, outs, strict=True)):
        ids = [*prompt, *out.token_ids]
        padded = jnp.asarray([ids + [0] * (PROMPT_TOKENS + NEW_TOKENS - len(ids))], jnp.int32)
        ranks = rank(*models, padded, jnp.asarray(seed_words(seed), jnp.uint32), temperature=temperature)
        found.append(Text(ids, len(prompt), np.asarray(ranks)))
    return found


def weights_of(target: str, drafter: str) -> tuple[Any, Any]:
    """Target and drafter in float32."""
    folder = checkpoint.resolve(target)
    config, _ = read_target(folder)
    model = load_target(folder, abstract_target(config, jnp.float32), progress=False)
    return model, load_drafter(checkpoint.resolve(drafter), config, jnp.float32, progress=False)


def paths(texts: Iterable[Text]) -> list[Path]:
    """The path of ranks at every place of the texts from which a round can start, up to the text's end or a token that no tree holds."""
    found = []
    for text in texts:
        for place in range(text.start - 1, len(text.ids) - 2):
            path = text.ranks[place, : len(text.ids) - 2 - place]
            missed = np.flatnonzero(path >= RANKS)
            found.append(tuple(path[: missed[0]] if len(missed) else path))
    return found


def counted(found: Sequence[Path]) -> dict[Path, float]:
    """How likely each node is to be accepted: the share of places whose path goes through it."""
    counts = collections.Counter(path[:depth] for path in found for depth in range(1, len(path) + 1))
    return {path: count / len(found) for path, count in counts.items()}


def best_tree(chances: Mapping[Path, float], nodes: int, depth: int) -> frozenset[Path]:
    """The likeliest nodes no deeper than `depth`. A node is at least as likely as what follows it, so this is a tree."""
    at_most = sorted((path for path in chances if len(path) <= depth), key=lambda path: (-chances[path], len(path), path))
    return frozenset(at_most[:nodes])


def chain(drafts: int) -> frozenset[Path]:
    return frozenset((0,) * depth for depth in range(1, drafts + 1))


def tokens_a_step(tree: frozenset[Path], texts: Iterable[Text]) -> float:
    """Walks the texts as rounds of this tree do. Prefill chooses the first token."""
    written = steps = 0
    for text in texts:
        place, last = text.start - 1, len(text.ids) - 2  # a round at place P begins from the anchor P + 1
        while place < last:
            accepted, path = 0, text.ranks[place, : last - place]
            while accepted < len(path) and tuple(path[: accepted + 1]) in tree:
                accepted += 1
            gain = min(accepted + 1, last - place)
            written, steps, place = written + gain, steps + 1, place + gain
    return written / steps


def depth_of(tree: frozenset[Path]) -> int:
    return max(map(len, tree))


def shape_of(tree: frozenset[Path]) -> str:
    """Nodes at each depth."""
    return " ".join(str(sum(len(path) == depth for path in tree)) for depth in range(1, depth_of(tree) + 1))


@dataclasses.dataclass(frozen=True)
class Choice:
    """Drafts of a round, and the tokens a step that they give."""

    tree: frozenset[Path]
    tokens: float

    def rate(self, cost: Cost, batch: int) -> float:
        """Tokens a millisecond and sequence."""
        return self.tokens / cost.round(batch, len(self.tree), depth_of(self.tree))


def compare(choices: Mapping[str, Sequence[Choice]]) -> None:
    """Prints, for each model and batch, the best chain and the best tree in tokens a millisecond of one sequence, and how much longer the
    tree's round may take before its gain is below `ENOUGH`."""
    titles = ["model", "batch", "best chain", "tokens a step", "tokens/ms", "best tree", "at each depth", "tokens a step", "tokens/ms"]
    titles += ["gain", f"ms to spare above {ENOUGH:.0%}"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}")
    for (model, batch), cost in COSTS.items():
        best = {name: max(some, key=lambda choice: choice.rate(cost, batch)) for name, some in choices.items()}
        line, tree = best["chains"], best["trees"]
        gain = tree.rate(cost, batch) / line.rate(cost, batch) - 1
        cells = [model, batch, f"K = {len(line.tree)}", f"{line.tokens:.2f}", f"{line.rate(cost, batch):.4f}"]
        cells += [f"{len(tree.tree)} nodes", shape_of(tree.tree), f"{tree.tokens:.2f}", f"{tree.rate(cost, batch):.4f}", f"{gain:+.1%}"]
        spare = tree.tokens / (1 + ENOUGH) / line.rate(cost, batch) - tree.tokens / tree.rate(cost, batch)
        cells.append(f"{spare:.2f}" if spare > 0 else "-")
        print(f"| {' | '.join(map(str, cells))} |", flush=True)


def on_texts(texts: Sequence[Text]) -> dict[str, list[Choice]]:
    """Chains and trees, both chosen on every other prompt and walked on the rest, and the other way round."""
    halves = texts[::2], texts[1::2]
    chances = [counted(paths(half)) for half in halves]
    chains = [Choice(chain(k), tokens_a_step(chain(k), texts)) for k in range(1, STEPS + 1)]
    trees = []
    for nodes in NODES:
        for depth in range(2, STEPS + 1):
            made = [best_tree(some, nodes, depth) for some in chances]
            scores = [tokens_a_step(tree, other) for tree, other in zip(made, halves[::-1], strict=True)]
            trees.append(Choice(made[0], math.fsum(scores) / 2))
    return {"chains": chains, "trees": trees}


def conditional(texts: Sequence[Text], depth: int) -> np.ndarray:
    """How often the text's token has each rank at a draft step before which the drafter was right: [RANKS]."""
    at = [path for text in texts for path in text.ranks[text.start - 1 : len(text.ids) - 1 - depth] if not path[: depth - 1].any()]
    return np.bincount([min(path[depth - 1], RANKS) for path in at], minlength=RANKS + 1)[:RANKS] / max(len(at), 1)


def by_arithmetic(rates: Sequence[float], behind: Sequence[float]) -> dict[str, list[Choice]]:
    """Chains and trees for a drafter of given rates. rates: share of rounds that accept draft 1, 2, ... and all before it, and so on by the
    last ratio. behind: how often candidate 2, 3, ... is right where the first is not. Every path goes on as the best one does."""
    following = [rates[0], *(after / before for before, after in zip(rates, rates[1:], strict=False))]
    following += [following[-1]] * (STEPS - len(following))
    chances: dict[Path, float] = {}
    level: dict[Path, float] = {(): 1.0}
    for best in following:
        each = (best, *((1 - best) * share for share in behind))
        grown = {(*path, rank): chance * share for path, chance in level.items() for rank, share in enumerate(each)}
        level = dict(sorted(grown.items(), key=lambda item: -item[1])[: max(NODES)])
        chances |= level

    def choice(tree: frozenset[Path]) -> Choice:
        return Choice(tree, 1 + sum(chances[path] for path in tree))

    return {
        "chains": [choice(chain(k)) for k in range(1, STEPS + 1)],
        "trees": [choice(best_tree(chances, nodes, depth)) for nodes in NODES for depth in range(2, STEPS + 1)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", help="a bundled drafter or a folder: of a kind that can be trained")
    parser.add_argument("--target", default="pocket", help="a bundled target or a folder (default: pocket)")
    parser.add_argument("--rates", default="0.92,0.78,0.67,0.57", help="of the arithmetic: share of rounds that accept draft i")
    parser.add_argument("--served", type=int, metavar="N", help="only run rounds with the default tree of N nodes, and with K = 4")
    args = parser.parse_args()
    rates = tuple(map(float, args.rates.split(",")))
    for temperature in (0.0, 1.0):
        texts = measured(args.target, args.drafter, temperature)
        if args.served is not None:
            for name, paths, settings in (
                ("K = 4", chain(4), {"num_draft_tokens": 4}),
                (f"tree of {args.served}", frozenset(DraftTree.default(args.served).paths), {"tree": args.served}),
            ):
                given = served(args.target, args.drafter, temperature, **settings)
                said = tokens_a_step(paths, texts)
                print(f"temperature {temperature:g}, {name}: {given:.2f} tokens a step, {said:.2f} by the ranks", flush=True)
            continue
        print(f"\n{args.drafter}, temperature {temperature:g}: {sum(len(text.ids) - text.start for text in texts)} tokens")
        for depth in range(1, 6):
            shares = ", ".join(f"{share:.3f}" for share in conditional(texts, depth)[:5])
            print(f"draft {depth} after {depth - 1} right ones: the text's token ranks 1, 2, ... in {shares} of places")
        choices = on_texts(texts)
        print("chains: " + ", ".join(f"K = {len(choice.tree)}: {choice.tokens:.2f}" for choice in choices["chains"]))
        compare(choices)
        first = conditional(texts, 1)
        behind = (first[1:] / (1 - first[0])).tolist()
        print(
            f"\nby arithmetic from the rates {args.rates}, other candidates as here: " + ", ".join(f"{share:.2f}" for share in behind[:4])
        )
        compare(by_arithmetic(rates, behind))


if __name__ == "__main__":
    main()
