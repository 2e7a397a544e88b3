"""Rejection sampling: "standard", draft by draft, and "block", of the block as a whole.

Drafts, their acceptance and the token that follows are drawn with noise of their own: a token that follows a rejection and was drawn
with the rejected draft's noise would not have the target's distribution.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.model.rows import take_row


@struct.dataclass
class Distribution:
    """mass: [B, T, C] float32, probabilities of the tokens `ids` [B, T, C], ids below 0 being none; ids None if candidate i is token i.
    A row from which nothing can be drawn is all 0."""

    mass: jax.Array
    ids: jax.Array | None

    def of(self, tokens: jax.Array) -> jax.Array:
        """The probability of a token in each row, 0 for an id below 0. tokens: [B, T] -> [B, T]."""
        if self.ids is None:
            found = jnp.take_along_axis(self.mass, tokens[..., None], axis=-1, mode="clip")[..., 0]
        else:
            found = jnp.sum(jnp.where(self.ids == tokens[..., None], self.mass, 0.0), axis=-1)
        return jnp.where(tokens >= 0, found, 0.0)

    def onto(self, other: Distribution) -> jax.Array:
        """The probabilities of another's candidates. [B, T, C of the other]"""
        if other.ids is None and self.ids is None:
            return self.mass
        if other.ids is not None and self.ids is None:
            return jnp.take_along_axis(self.mass, other.ids, axis=-1)
        if other.ids is not None and self.ids is not None:
            same = other.ids[..., :, None] == self.ids[..., None, :]
            return jnp.sum(jnp.where(same, self.mass[..., None, :], 0.0), axis=-1)
        assert self.ids is not None
        batch, count = self.mass.shape[:2]
        slot, row = jnp.arange(batch)[:, None, None], jnp.arange(count)[None, :, None]
        ids = jnp.where(self.ids < 0, other.mass.shape[-1], self.ids)
        return jnp.zeros_like(other.mass).at[slot, row, ids].add(self.mass, mode="drop")

    def rows(self, start: int, end: int) -> Distribution:
        return Distribution(self.mass[:, start:end], None if self.ids is None else self.ids[:, start:end])

    def row(self, index: jax.Array) -> Distribution:
        """One row of each sequence. index: [B]."""
        return Distribution(take_row(self.mass, index), None if self.ids is None else take_row(self.ids, index))

    def padded(self) -> Distribution:
        """With one more row that gives nothing to any token."""
        more = ((0, 0), (0, 1), (0, 0))
        return Distribution(jnp.pad(self.mass, more), None if self.ids is None else jnp.pad(self.ids, more))


def keep_prefix(p: Distribution, q: Distribution, tokens: jax.Array, uniforms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Leviathan et al. (2211.17192): keeps draft i with probability min(1, p(i) / q(i)) if all before it were kept. A draft with q(i) = 0,
    which was not drawn from q, is not kept.

    p: K + 1 rows, q: K rows. tokens: [B, K] int32, uniforms: [B, K]. Returns accepted: [B] int32 and weight: [B], with which the token
    that follows is drawn from max(weight p - q, 0).
    """
    drafter = q.of(tokens)
    kept = (drafter > 0) & (uniforms * drafter < p.rows(0, tokens.shape[1]).of(tokens))
    return jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1), jnp.ones(tokens.shape[:1], jnp.float32)


def keep_block(p: Distribution, q: Distribution, tokens: jax.Array, uniforms: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sun et al. (2403.10444), algorithm 2: keeps the longest prefix that its own uniform admits. As `keep_prefix`."""
    count = tokens.shape[1]
    target, drafter = p.rows(0, count).of(tokens), q.of(tokens)
    ratio = jnp.where(drafter > 0, target / jnp.where(drafter > 0, drafter, 1.0), 0.0)
    weights = [jnp.ones(tokens.shape[:1], jnp.float32)]
    for i in range(count):
        weights.append(jnp.minimum(weights[-1] * ratio[:, i], 1.0))
    weight = jnp.stack(weights, axis=1)
    # What the target has left after prefixes 1 .. K - 1 once the drafter's is taken away. The whole block is kept by its weight alone.
    head, inner = p.rows(1, count), weight[:, 1:count]
    left = jnp.sum(jnp.maximum(inner[..., None] * head.mass - q.rows(1, count).onto(head), 0.0), axis=-1)
    total = left + 1 - inner
    chance = jnp.where(total == 0, 1.0, left / total)
    chance = jnp.concatenate([chance, weight[:, count:] if count else weight[:, :0]], axis=1)
    index = jnp.arange(1, count + 1, dtype=jnp.int32)[None, :]
    accepted = jnp.max(jnp.where(uniforms < chance, index, 0), axis=1, initial=0)
    return accepted, jnp.take_along_axis(weight, accepted[:, None], axis=1)[:, 0]


def rest(p: Distribution, q: Distribution, accepted: jax.Array, weight: jax.Array) -> Distribution:
    """What the token after the accepted drafts is drawn from, up to a factor: max(weight p - q, 0), or p after the last draft."""
    at = p.row(accepted)
    left = jnp.maximum(weight[:, None, None] * at.mass - q.padded().row(accepted).onto(at), 0.0)
    # Nothing is left only where p = q but for rounding.
    return Distribution(jnp.where(jnp.sum(left, axis=-1, keepdims=True) > 0, left, at.mass), at.ids)
