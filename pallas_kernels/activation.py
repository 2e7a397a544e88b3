"""What a gated layer makes of its two products."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

NAMES = ("gelu_tanh", "silu")


@dataclasses.dataclass(frozen=True)
class Activation:
    """act(gate) * up. name: of act, one of NAMES. limit: act(gate) is cut off above it, and up above it and below its negative, before
    they are multiplied; None for no limit. Raises ValueError for another name, and for a limit that is not positive."""

    name: str = "gelu_tanh"
    limit: float | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"activation is {self.name!r}; available: {', '.join(map(repr, NAMES))}")
        if self.limit is not None and not self.limit > 0:
            raise ValueError(f"the activation's limit is {self.limit}; expected a positive number, or None")

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Computed in float32, rounded once to gate's dtype. gate, up: of one shape."""
        wide, factor = gate.astype(jnp.float32), up.astype(jnp.float32)
        wide = jax.nn.gelu(wide, approximate=True) if self.name == "gelu_tanh" else wide / (1 + jnp.exp(-wide))
        if self.limit is not None:
            wide = jnp.minimum(wide, self.limit)
            factor = jnp.minimum(jnp.maximum(factor, -self.limit), self.limit)
        return (wide * factor).astype(gate.dtype)


GELU = Activation()
