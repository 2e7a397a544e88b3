"""Automata over bytes, moved by tokens: a token's bytes lead from state to state."""

from __future__ import annotations

import jax

from pallas_kernels import dialect
from pallas_kernels.byte_walk import reference, triton


def byte_walk(
    following: jax.Array, data: jax.Array, length: jax.Array, states: jax.Array, tokens: jax.Array, *, implementation: str = "auto"
) -> jax.Array:
    """The states that tokens lead to.

    following: [N, C] uint16, the state after each byte; C is 256 at least, and more columns are not read. data: [V, L] uint8, the bytes of
    each token; length: [V] int32, how many they are, at most L. states: [B] int32, each below N. tokens: [B] int32; ids outside
    0 .. V - 1 stand for the nearest inside. Returns [B] int32. Raises ValueError for arrays that do not fit each other, and for an
    `implementation` that is unknown or cannot serve.
    """
    fits = (
        following.ndim == data.ndim == 2 and following.shape[1] >= 256 and length.shape == data.shape[:1] and states.shape == tokens.shape
    )
    if not fits:
        found = ", ".join(str(list(x.shape)) for x in (following, data, length, states, tokens))
        raise ValueError(f"the arrays are {found}; expected [N, 256 or more], [V, L], [V], [B] and [B]")
    chosen = dialect.select(implementation)
    if chosen == "xla":
        return reference.byte_walk(following, data, length, states, tokens)
    return triton.byte_walk(following, data, length, states, tokens, interpret=chosen == "triton-interpret")
