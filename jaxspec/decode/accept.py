"""Acceptance rules: which drafts of a verified block are kept, and which token follows them. Arrays only.

"coupled" keeps a draft exactly when it is what the target chooses. "standard" (Leviathan et al., 2211.17192; Chen et al., 2302.01318)
and "block" (Sun et al., 2403.10444) draw drafts from the drafter's distribution q with noise of their own, and keep them with
probabilities that leave the target's distribution p as it is; they keep a little more, and the text depends on the drafter.
"synthetic" keeps them at given rates, for benchmarks.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.decode.rejection import Distribution, keep_block, keep_prefix, rest
from jaxspec.sampling.choice import ACCEPTANCE, DRAFT, RESIDUAL, Sampling, choose, probabilities, stream_seed, uniform

if TYPE_CHECKING:
    from jaxspec.drafters.base import Drafts
    from jaxspec.model.draft_tree import DraftTree

NAMES = ("coupled", "standard", "block")  # of the rules that need nothing but their name


@dataclasses.dataclass(frozen=True)
class Rule:
    """An acceptance rule. Hashable, so that it can be a static argument; `COUPLED`, or what the functions below give.

    name: "coupled", "standard", "block" or "synthetic". rates: of "synthetic", the share of rounds that accept draft i and all
    before it.
    """

    name: str
    rates: tuple[float, ...] = ()

    def check(self, num_draft_tokens: int) -> None:
        """Raises ValueError if the rule has no rate for some of the drafts."""
        if self.name == "synthetic" and len(self.rates) < num_draft_tokens:
            raise ValueError(f"synthetic acceptance has {len(self.rates)} rates for {num_draft_tokens} drafts; expected one for each")

    @property
    def shares_noise(self) -> bool:
        """Whether drafter and target choose by the same noise."""
        return self.name in ("coupled", "synthetic")

    def drafting(self, sampling: Sampling, rounds: jax.Array) -> Sampling:
        """How the drafter chooses. Filters that take many passes are the target's alone."""
        filters = sampling.filters
        if filters is not None and filters.scope == "search":
            sampling = dataclasses.replace(sampling, filters=dataclasses.replace(filters, scope="whole"))
        if self.shares_noise:
            return sampling
        return dataclasses.replace(sampling, seed=stream_seed(sampling.seed, DRAFT, rounds), weighed=True)

    def __call__(
        self,
        drafts: Drafts,
        logits: jax.Array | None,
        positions: jax.Array,
        sampling: Sampling,
        rounds: jax.Array,
        choices: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """(tokens [B, K + 1] int32, accepted [B] int32): the first accepted + 1 tokens are what the round adds.

        drafts: of K tokens. logits: [B, K + 1, V] float32, the target's after the anchor and after each draft, edited. positions:
        [B, K + 1] int32, of the tokens that they choose. sampling: the target's. rounds: [B] int32, the sequence's rounds before this
        one. choices: [B, K + 1] int32, what the target chooses, where that is known: a rule that shares noise needs no logits then.
        """
        self.check(drafts.tokens.shape[1])
        sampling = dataclasses.replace(sampling, constraint=None)  # all logits are masked already
        drafting, sampling = self.drafting(sampling, rounds), dataclasses.replace(sampling, tables=None)  # the target's are edited too
        if not self.shares_noise:
            assert logits is not None
            keep = keep_block if self.name == "block" else keep_prefix
            return _rejection(drafts, logits, positions, sampling, drafting, rounds, keep)
        if choices is None:
            assert logits is not None
            choices = choose(logits, positions, sampling)
        if self.name == "coupled":
            return choices, coupled(drafts.tokens, choices)
        accepted = _synthetic(drafts.tokens, uniform(sampling.seed, ACCEPTANCE, rounds, drafts.tokens.shape[1]), self.rates)
        return _spliced(drafts.tokens, choices, accepted), accepted


COUPLED = Rule("coupled")


def rule_of(accept: str | Rule) -> Rule:
    """The rule of a name, or the rule given. Raises ValueError or TypeError for what is neither."""
    if isinstance(accept, Rule):
        return accept
    if not isinstance(accept, str):
        raise TypeError(f"accept is of type {type(accept).__name__}, expected a name or an accept.Rule")
    if accept == "synthetic":
        raise ValueError("accept is 'synthetic' without rates; expected accept.synthetic(rates) or accept.synthetic_length(length, K)")
    if accept not in NAMES:
        raise ValueError(f"accept is {accept!r}; available: {', '.join(map(repr, NAMES))}, or accept.synthetic(rates)")
    return Rule(accept)


def synthetic(rates: Sequence[float]) -> Rule:
    """Accepts drafts at given rates whatever their tokens, for benchmarks: the text that comes out is not the target's.

    rates: for each draft position the share of rounds that accept it and all before it, none above the one before. The token
    after the accepted drafts is what the target chooses there. As vLLM's `synthetic_acceptance_rates`.
    Raises TypeError or ValueError for rates that are no such numbers.
    """
    if isinstance(rates, str) or not hasattr(rates, "__iter__"):
        raise TypeError(f"rates is {rates!r}, expected a list of numbers")
    for i, rate in enumerate(rates):
        if isinstance(rate, bool) or not isinstance(rate, numbers.Real):
            raise TypeError(f"rates[{i}] is {rate!r} of type {type(rate).__name__}, expected a number")
        if not 0 <= rate <= 1:
            raise ValueError(f"rates[{i}] is {rate}, expected 0 .. 1")
        if i and rate > rates[i - 1]:
            raise ValueError(f"rates[{i}] is {rate}, expected at most {rates[i - 1]}, the rate before it: each counts all before it")
    return Rule("synthetic", tuple(float(rate) for rate in rates))


def synthetic_length(length: float, num_draft_tokens: int) -> Rule:
    """`synthetic` with the rates of least variance that make `length` tokens a round on average, the target's own counted:
    1 .. K + 1. As vLLM's `synthetic_acceptance_length`. Raises TypeError or ValueError for another length."""
    if isinstance(length, bool) or not isinstance(length, numbers.Real):
        raise TypeError(f"length is {length!r} of type {type(length).__name__}, expected a number")
    if not 1 <= length <= num_draft_tokens + 1:
        raise ValueError(f"length is {length}, expected 1 .. {num_draft_tokens + 1}, the drafts and the target's own token")
    whole = math.floor(length - 1)
    rates = [1.0] * whole + [float(length - 1 - whole)] + [0.0] * num_draft_tokens
    return synthetic(rates[:num_draft_tokens])


def coupled(drafts: jax.Array, choices: jax.Array) -> jax.Array:
    """Accepts a draft exactly when it is what the target chose at its position and all drafts before it were accepted.

    drafts: [B, K] int32. choices: [B, K + 1] int32, the target's choice after the anchor and after each draft. What is emitted is
    choices[:, : accepted + 1], the target's own, so the text does not depend on the drafter. Returns accepted: [B] int32, 0 .. K.
    """
    return _prefix(drafts == choices[:, :-1])


def coupled_path(tree: DraftTree, drafts: jax.Array, choices: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same of a tree: accepts a node exactly when it is what the target chose after its parent and all nodes on the way to it were
    accepted, so that at most one node of each depth is.

    drafts: [B, N] int32, an id below 0 for none. choices: [B, N + 1] int32, the target's choice after the root and after each node. Returns
    path: [B, D + 1] int32, the row of the tree at depth 0, 1, ... that is accepted, 0 where none is; and accepted: [B] int32, 0 .. D.
    """
    equal = drafts == choices[:, tree.parents]
    whole = jnp.all(~jnp.asarray(tree.seen[1:, 1:])[None] | equal[:, None, :], axis=2)
    row = jnp.where(whole, jnp.arange(1, tree.rows, dtype=jnp.int32)[None, :], 0)
    at_depth = jnp.asarray(np.asarray(tree.depths[1:])[None, :] == np.arange(tree.depth + 1)[:, None])
    path = jnp.max(jnp.where(at_depth[None], row[:, None, :], 0), axis=2)
    return path, jnp.sum(path > 0, axis=1, dtype=jnp.int32)  # not of `whole`: siblings may be equal, and one of them is enough


def _synthetic(drafts: jax.Array, uniforms: jax.Array, rates: tuple[float, ...]) -> jax.Array:
    """Accepts draft i with probability rates[i] / rates[i - 1] if all before it were; never an id below 0, which is no token."""
    chances = [rate / before if before else 0.0 for before, rate in zip((1.0, *rates), rates, strict=False)]
    kept = uniforms < jnp.asarray(chances[: drafts.shape[1]], jnp.float32)[None, :]
    return _prefix(kept & (drafts >= 0))


def _prefix(kept: jax.Array) -> jax.Array:
    """How many of the first entries are set, up to the first that is not. [B, K] bool -> [B] int32."""
    return jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1)


def _spliced(drafts: jax.Array, following: jax.Array, accepted: jax.Array) -> jax.Array:
    """The accepted drafts, then the token that follows them. drafts: [B, K], following: [B, K + 1] -> [B, K + 1] int32."""
    row = jnp.arange(following.shape[1], dtype=jnp.int32)[None, :]
    return jnp.where(row < accepted[:, None], jnp.pad(drafts, ((0, 0), (0, 1))), following)


def _rejection(
    drafts: Drafts,
    logits: jax.Array,
    positions: jax.Array,
    sampling: Sampling,
    drafting: Sampling,
    rounds: jax.Array,
    keep: Callable[..., tuple[jax.Array, jax.Array]],
) -> tuple[jax.Array, jax.Array]:
    tokens, count = drafts.tokens, drafts.tokens.shape[1]
    p = Distribution(*probabilities(logits, sampling))
    if drafts.logits is None:  # each guess came without an alternative
        q = Distribution(jnp.ones((*tokens.shape, 1), jnp.float32), tokens[..., None])
    else:
        q = Distribution(*probabilities(drafts.logits, drafting, drafts.ids, positions[:, :count]))
    accepted, weight = keep(p, q, tokens, uniform(sampling.seed, ACCEPTANCE, rounds, count))
    left = rest(p, q, accepted, weight)
    fresh = Sampling(stream_seed(sampling.seed, RESIDUAL, rounds), jnp.ones_like(sampling.temperature))
    following = choose(jnp.log(left.mass), jnp.take_along_axis(positions, accepted[:, None], axis=1), fresh, left.ids)
    return _spliced(tokens, jnp.broadcast_to(following, positions.shape), accepted), accepted
