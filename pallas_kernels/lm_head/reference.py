"""The fused head in plain XLA: the definition of the operation, and its implementation without a kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.choice import best, capped
from pallas_kernels.linear.reference import product
from pallas_kernels.noise import perturbed
from pallas_kernels.packed import Packed


def lm_head(
    hidden: jax.Array,
    table: jax.Array | Packed,
    keys: jax.Array,
    temperature: jax.Array,
    softcap: float | None,
    suppressed: tuple[int, ...],
    first_id: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.lm_head.lm_head`."""
    return choose(product(hidden, table, dtype=jnp.float32), keys, temperature, softcap, suppressed, first_id)


def choose(
    logits: jax.Array,
    keys: jax.Array,
    temperature: jax.Array,
    softcap: float | None,
    suppressed: tuple[int, ...],
    first_id: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """The same of products with the table, [N, V] float32."""
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32) + (jnp.int32(0) if first_id is None else first_id)
    logits = capped(logits, ids[None, :], softcap, suppressed)
    values = perturbed(logits, temperature[:, None], keys[:, :1], keys[:, 1:], ids[None, :])
    return best(values, jnp.broadcast_to(ids[None, :], values.shape))
