"""The shapes that the Gemma 4 family gives to the top candidates, for tests, the benchmark and tuning."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """One call."""

    rows: int
    k: int  # how many candidates
    vocab: int = 262_144


# One sequence without drafts, then 1, 8 and 32 sequences with four.
SHAPES = {f"top {k} of {rows} rows": Shape(rows, k) for k in (20, 64, 128) for rows in (1, 5, 40, 160)}


def filters(rows: int) -> tuple[jax.Array, ...]:
    """Positions, seeds, temperatures and filters of as many requests with one row each, as `choose` takes them: Gemma 4's own sampling."""
    positions = jnp.arange(rows, dtype=jnp.int32)[:, None]
    settings = ((1.0, jnp.float32), (64, jnp.int32), (0.95, jnp.float32), (0.0, jnp.float32))
    return positions, jnp.full((rows, 2), 7, jnp.uint32), *(jnp.full(rows, value, dtype) for value, dtype in settings)
