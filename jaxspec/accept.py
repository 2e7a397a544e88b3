"""Acceptance rules: which drafts of a verified block are kept. Arrays only."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def coupled(drafts: jax.Array, choices: jax.Array) -> jax.Array:
    """Accepts a draft exactly when it is what the target chose at its position and all drafts before it were accepted.

    drafts: [B, K] int32. choices: [B, K + 1] int32, the target's choice after the anchor and after each draft. What is emitted is
    choices[:, : accepted + 1], the target's own, so the text does not depend on the drafter. Returns accepted: [B] int32, 0 .. K.
    """
    return jnp.sum(jnp.cumprod((drafts == choices[:, :-1]).astype(jnp.int32), axis=1), axis=1)
