"""What every choice of a token is made of, besides its noise: the softcap of the logits, and the best of a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def capped(logits: jax.Array, ids: jax.Array, softcap: float | None, suppressed: tuple[int, ...]) -> jax.Array:
    """Capped logits, -inf for suppressed ids. logits: float32, the products with the table; ids: int32, which broadcasts against them."""
    logits = soft(logits, softcap)
    for token in suppressed:
        logits = jnp.where(ids == np.int32(token), -jnp.inf, logits)
    return logits


def soft(logits: jax.Array, softcap: float | None) -> jax.Array:
    """softcap * tanh(logits / softcap), or the logits where there is no softcap. float32."""
    return logits if softcap is None else np.float32(softcap) * jnp.tanh(logits / np.float32(softcap))


def best(values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The id of each row's largest value, and that value. Of equal values the lowest id wins. [N, C] each -> [N] int32, [N] float32."""

    def larger(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (value, at), (other, other_at) = left, right
        # NaN is the largest, as in argmax, so that the result is always one of the ids.
        keep = (value > other) | (value != value) | ((value == other) & (at < other_at))
        return jnp.where(keep, value, other), jnp.where(keep, at, other_at)

    start = (jnp.float32(-jnp.inf), jnp.int32(2**31 - 1))
    maxima, chosen = jax.lax.reduce((values, ids), start, larger, (1,))
    return chosen, maxima
