"""How the target and its drafters choose a token: argmax(logits / T + gumbel(seed, position, id)).

`position` is that of the chosen token. Temperature 0 drops the noise. The noise depends on nothing else, so a draft equals the target's
choice at its position exactly when both put the same id on top. A rule that needs independent noise takes another seed for each kind
of noise and each round (`stream_seed`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.collectives import Shard, full_logits, shard_of
from jaxspec.sampling.automata import Constraint
from jaxspec.sampling.filters import CANDIDATES, Filters, best_candidates, candidates_of_shards, filtered
from jaxspec.sampling.logit_edits import Tables
from pallas_kernels import lm_head, top_candidates
from pallas_kernels.linear import product
from pallas_kernels.noise import gumbel, row_keys
from pallas_kernels.packed import Packed

# Streams of noise, besides the noise that tokens are chosen with.
ACCEPTANCE, DRAFT, RESIDUAL = 1, 2, 3


@dataclasses.dataclass(frozen=True)
class Needs:
    """What the requests of a call need besides a temperature. Static: what no request needs is not compiled."""

    scope: str = "plain"
    """As in `Filters`, or "plain" if no request filters."""
    edits: bool = False
    """Whether some request has penalties, biases or other `Edits`."""
    logprobs: int | None = None
    """How many likely tokens to report with each token; None for no log-probabilities at all."""
    suppress_tokens: tuple[int, ...] = ()
    """Ids that are never chosen."""
    structured: bool = False
    """Whether some request's text is structured, so that an automaton says which tokens may come."""

    @property
    def choice_alone(self) -> bool:
        """Whether the chosen tokens are all that is needed of the logits."""
        return self.scope == "plain" and self._as_they_are

    @property
    def likeliest_alone(self) -> bool:
        """Whether tokens are chosen among a row's likeliest, of which alone the logits are needed."""
        return self.scope == "top" and self._as_they_are

    @property
    def _as_they_are(self) -> bool:
        return not (self.edits or self.structured) and self.logprobs is None


PLAIN = Needs()


@struct.dataclass
class Sampling:
    """How B requests choose."""

    seed: jax.Array
    """[B, 2] uint32: low and high word."""
    temperature: jax.Array
    """[B] float32; 0 is greedy."""
    filters: Filters | None = None
    """top_k, top_p and min_p, or None."""
    tables: Tables | None = None
    """Edits of the logits, or None."""
    constraint: Constraint | None = None
    """What the next tokens must be, or None. `draw` applies it to drafts, and whoever has the target's logits to those."""
    shard: Shard | None = None
    """The device's share of a vocabulary that is spread over several devices, or None."""
    weighed: bool = struct.field(pytree_node=False, default=False)
    """For drafts: whether the acceptance rule needs the logits that each is chosen from."""

    @property
    def by_temperature_alone(self) -> bool:
        """Whether nothing but a temperature says which drafts are chosen, and no acceptance rule needs what they are chosen from."""
        return not self.weighed and self.filters is None and self.tables is None and self.constraint is None

    def taken(self, owner: jax.Array) -> Sampling:
        """How the requests owner[0], owner[1], ... choose. owner: [M] int32."""

        def of(field: Any) -> Any:
            return jax.tree.map(lambda x: jnp.take(x, owner, axis=0, mode="clip"), field)

        constraint = self.constraint
        if constraint is not None:
            own = of((constraint.state, constraint.begin, constraint.stop_ids))
            constraint = Constraint(constraint.automata, *own)
        own = {name: of(getattr(self, name)) for name in ("seed", "temperature", "filters", "tables")}
        return dataclasses.replace(self, **own, constraint=constraint)


def seed_words(seed: int) -> tuple[int, int]:
    """A 64-bit seed as its low and high 32-bit words."""
    return seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF


def choose(logits: jax.Array, positions: jax.Array, sampling: Sampling, ids: jax.Array | None = None) -> jax.Array:
    """Chooses the tokens at `positions`: their ids, [B, T] int32. Of equal values the first candidate wins; with filters of scope "top" it
    is the one with the lowest id.

    logits: [B, T, C] float32, over the whole vocabulary, the device's `sampling.shard` of it, or candidates. positions: [B, T] int32.
    ids: [B, T, C] int32, the candidates' token ids; None if candidate i is token i.
    """
    if sampling.filters is not None and sampling.filters.scope == "top":
        logits, sampling = _edited(logits, sampling, ids, positions), dataclasses.replace(sampling, tables=None)
        return choose_among_likeliest(logits, positions, sampling, ids)[0]
    logits, ids = allowed(logits, sampling, ids, positions)
    shard = shard_of(logits, ids, sampling.shard)
    first = jnp.int32(0) if shard is None else shard.first
    values = _values(logits, positions, sampling, ids, first)
    best = jnp.argmax(values, axis=-1).astype(jnp.int32)
    if shard is not None:
        return shard.best(jnp.max(values, axis=-1), first + best)[0]
    return best if ids is None else jnp.take_along_axis(ids, best[..., None], axis=-1)[..., 0]


def best(logits: jax.Array, positions: jax.Array, sampling: Sampling, count: int, ids: jax.Array | None = None) -> jax.Array:
    """The `count` (static) tokens that `choose` would choose first, then if it could not have that one, and so on: [B, T, count] int32.

    Arguments as for `choose`. -1 where there are not so many candidates."""
    logits, ids = allowed(logits, sampling, ids, positions)
    logits = logits if ids is not None else full_logits(logits, sampling.shard)
    values = _values(logits, positions, sampling, ids, jnp.int32(0))
    most = min(count, values.shape[-1])
    values, found = best_candidates(values, most)
    found = found if ids is None else jnp.take_along_axis(ids, found, axis=-1)
    found = jnp.where(values > -jnp.inf, found, -1)
    return jnp.pad(found, ((0, 0), (0, 0), (0, count - most)), constant_values=-1)


def _values(logits: jax.Array, positions: jax.Array, sampling: Sampling, ids: jax.Array | None, first: jax.Array) -> jax.Array:
    """What a choice maximises. logits: [B, T, C] float32, of what may be chosen. ids: [B, T, C] int32; None if candidate i is token
    first + i."""
    candidates = first + jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, None, :] if ids is None else ids
    temperature = sampling.temperature[:, None, None]
    keys = row_keys(jnp.broadcast_to(sampling.seed[:, None, :], (*positions.shape, 2)), positions)
    noisy = logits / jnp.maximum(temperature, jnp.float32(1e-30)) + gumbel(keys, candidates)
    return jnp.where(temperature > 0, noisy, logits)


def draw(
    logits: jax.Array, positions: jax.Array, sampling: Sampling, ids: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, Sampling]:
    """Chooses drafts that follow each other, as `choose` does, each among those that may come after the ones before it.

    Arguments as for `choose`. Returns the drafts [B, T] int32, the logits that they were chosen by, and how the drafts after them are to be
    chosen."""
    constraint = sampling.constraint
    if constraint is None:
        return choose(logits, positions, sampling, ids), logits, sampling
    drafts, rows = [], []
    for t in range(positions.shape[1]):
        one, candidates = logits[:, t : t + 1], None if ids is None else ids[:, t : t + 1]
        rows.append(constraint.masked(one, constraint.state[:, None], sampling.shard, candidates))
        drafts.append(choose(rows[-1], positions[:, t : t + 1], sampling, candidates))
        constraint = constraint.after(drafts[-1][:, 0])
    after = dataclasses.replace(sampling, constraint=constraint)
    return jnp.concatenate(drafts, axis=1), jnp.concatenate(rows, axis=1), after


def choose_by_head(
    hidden: jax.Array,
    table: jax.Array | Packed,
    positions: jax.Array,
    sampling: Sampling,
    *,
    softcap: float | None,
    suppressed: tuple[int, ...] = (),
    guide: lm_head.Guide | None = None,
    implementation: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Chooses as `choose` does by a temperature alone, straight from hidden states. A kernel for few rows never stores the logits.

    hidden: [B, T, H]. table: [V, H], or the device's `sampling.shard` of it. positions: [B, T] int32. softcap: of the logits, or None.
    suppressed: ids that are never chosen. guide, implementation: see `pallas_kernels.lm_head`. Returns ids [B, T] int32 and their values
    [B, T] float32, noise included.
    """
    shard, rows = sampling.shard, hidden.reshape(-1, hidden.shape[-1])
    keys = row_keys(jnp.broadcast_to(sampling.seed[:, None, :], (*positions.shape, 2)), positions).reshape(-1, 2)
    temperature = jnp.broadcast_to(sampling.temperature[:, None], positions.shape).reshape(-1)
    settings = {"softcap": softcap, "suppressed": suppressed, "first_id": None if shard is None else shard.first}
    if rows.shape[0] <= lm_head.most_rows(table, implementation):
        chosen, maxima = lm_head.lm_head(rows, table, keys, temperature, **settings, guide=guide, implementation=implementation)
    else:
        logits = product(rows, table, dtype=jnp.float32)
        chosen, maxima = lm_head.choose(logits, keys, temperature, **settings, implementation=implementation)
    if shard is not None:
        chosen, maxima = shard.best(maxima, chosen)
    return chosen.reshape(positions.shape), maxima.reshape(positions.shape)


def choose_among_likeliest(
    logits: jax.Array, positions: jax.Array, sampling: Sampling, ids: jax.Array | None = None, *, softcap: float | None = None
) -> tuple[jax.Array, jax.Array]:
    """Chooses as `choose` does with filters of scope "top" and no edits, straight from logits that have no softcap yet: it leaves their
    order, so only the likeliest get it. Of equal values the lowest id wins.

    logits, positions, ids: as for `choose`. softcap: of the logits, or None. Returns ids [B, T] int32 and each row's largest logit [B, T]
    float32.
    """
    filters, shard = sampling.filters, shard_of(logits, ids, sampling.shard)
    assert filters is not None and sampling.tables is None
    if shard is not None:
        logits, ids = candidates_of_shards(logits, CANDIDATES, shard)
    settings = positions, sampling.seed, sampling.temperature, filters.top_k, filters.top_p, filters.min_p
    return top_candidates.choose(logits, *settings, k=min(CANDIDATES, logits.shape[-1]), ids=ids, softcap=softcap)


def likely_logits(
    hidden: jax.Array,
    table: jax.Array | Packed,
    guide: lm_head.Guide,
    sampling: Sampling,
    *,
    suppressed: tuple[int, ...] = (),
    implementation: str = "auto",
) -> jax.Array:
    """Logits without a softcap, in which filters of scope "top" find what they keep: [B, T, V] float32. See
    `pallas_kernels.lm_head.likely_logits`.

    hidden: [B, T, H]. table: [V, H], or the device's `sampling.shard` of it. suppressed: ids that are never chosen."""
    assert sampling.filters is not None and not isinstance(table, Packed)  # a packed table has no guide
    most = jnp.clip(sampling.filters.top_k, 1, CANDIDATES) + len(suppressed)
    most = jnp.broadcast_to(most[:, None], hidden.shape[:-1]).reshape(-1)
    logits = lm_head.likely_logits(hidden.reshape(-1, hidden.shape[-1]), table, guide, most, implementation=implementation)
    return logits.reshape(*hidden.shape[:-1], -1)


def allowed(
    logits: jax.Array, sampling: Sampling, ids: jax.Array | None, positions: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """The logits that `choose` chooses by, with -inf for what may not be chosen, and the candidates' token ids or None.

    logits, ids, positions: as for `choose`; without positions edits leave stop ids alone. What is returned may have fewer candidates.
    """
    logits = _edited(logits, sampling, ids, positions)
    if sampling.filters is not None:
        logits, ids = filtered(logits, ids, sampling.temperature, sampling.filters, shard_of(logits, ids, sampling.shard))
    return logits, ids


def _edited(logits: jax.Array, sampling: Sampling, ids: jax.Array | None, positions: jax.Array | None) -> jax.Array:
    """The logits with the edits of `sampling.tables`, for which a shard's are gathered."""
    if sampling.tables is None:
        return logits
    logits = logits if ids is not None else full_logits(logits, sampling.shard)
    return sampling.tables.applied(logits, ids, positions)


def probabilities(
    logits: jax.Array, sampling: Sampling, ids: jax.Array | None = None, positions: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """The distribution that `choose` draws from, [B, T, C] float32, and the candidates' token ids or None. logits, ids, positions: as for
    `choose`; positions only matter with edits.

    It is over the whole vocabulary or over candidates, never over a shard. A greedy row has one 1. A row is all 0 if its largest logit
    is not finite, since nothing can be drawn from it.
    """
    logits, ids = allowed(logits, sampling, ids, positions)
    logits = logits if ids is not None else full_logits(logits, sampling.shard)
    temperature = sampling.temperature[:, None, None]
    some = jnp.isfinite(jnp.max(logits, axis=-1, keepdims=True))
    best = jnp.argmax(logits, axis=-1)[..., None]
    greedy = (jnp.arange(logits.shape[-1])[None, None, :] == best).astype(jnp.float32)
    sampled = jax.nn.softmax(jnp.where(some, logits, 0.0) / jnp.maximum(temperature, jnp.float32(1e-30)), axis=-1)
    return jnp.where(some, jnp.where(temperature > 0, sampled, greedy), 0.0), ids


def stream_seed(seed: jax.Array, stream: int, rounds: jax.Array) -> jax.Array:
    """The seed for one stream of noise in one round: [B, 2] uint32. seed: the requests', [B, 2] uint32; rounds: [B] int32."""
    return row_keys(row_keys(seed, jnp.full_like(rounds, stream)), rounds)


def uniform(seed: jax.Array, stream: int, rounds: jax.Array, count: int) -> jax.Array:
    """Uniform numbers 0 <= u < 1, keyed by (seed, stream, round, index): [B, count] float32. seed, rounds: as for `stream_seed`."""
    index = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None, :], (seed.shape[0], count))
    keys = row_keys(jnp.broadcast_to(stream_seed(seed, stream, rounds)[:, None, :], (*index.shape, 2)), index)
    return (keys[..., 0] >> jnp.uint32(8)).astype(jnp.float32) * jnp.float32(2.0**-24)
