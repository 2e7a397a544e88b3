"""Branching: how a drafter chooses the nodes of a tree, one depth after the other."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxspec.model.draft_tree import Level
from jaxspec.sampling.choice import Sampling, best


@dataclasses.dataclass(frozen=True)
class Branching:
    """sampling: how the sequences choose. states: [B, n] int32, of the automata after each node of the newest depth; None where texts are
    free."""

    sampling: Sampling
    states: jax.Array | None

    @classmethod
    def begun(cls, sampling: Sampling) -> Branching:
        """At the root."""
        return cls(sampling, None if sampling.constraint is None else sampling.constraint.state[:, None])

    def of_rows(self, level: Level) -> Sampling:
        """How each parent of a level's nodes chooses, one sequence's after the other, as far as its text is structured."""
        constraint = self.sampling.constraint
        if constraint is None or self.states is None:
            return self.sampling
        return dataclasses.replace(self.sampling, constraint=constraint.at(self.states[:, level.inner]))

    def choose(self, logits: jax.Array, position: jax.Array, level: Level, ids: jax.Array | None = None) -> tuple[jax.Array, Branching]:
        """The nodes of the next depth: [B, n] int32, and what chooses those after them.

        logits: [B, m, C] float32, after each of their m parents. position: [B] int32, theirs. ids: [B, m, C] int32, the candidates' token
        ids; None if candidate i is token i."""
        constraint, at = self.sampling.constraint, jnp.broadcast_to(position[:, None], logits.shape[:2])
        if constraint is None or self.states is None:
            return best(logits, at, self.sampling, level.width, ids)[:, level.parent, level.rank], self
        states = self.states[:, level.inner]
        masked = constraint.masked(logits, states, self.sampling.shard, ids)
        tokens = best(masked, at, self.sampling, level.width, ids)[:, level.parent, level.rank]
        after = constraint.at(states[:, level.parent]).after(tokens.reshape(-1)).state
        return tokens, dataclasses.replace(self, states=after.reshape(tokens.shape))
