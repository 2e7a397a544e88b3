"""Text that a target writes itself, by the loop that serves: what its drafters will meet."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import decode
from jaxspec.drafters.base import NoDraft
from jaxspec.gemma4 import Gemma4
from jaxspec.train.loop import windows


def generate(model: Gemma4, prompts: jax.Array, new_tokens: int) -> jax.Array:
    """Greedy continuations. prompts: [B, P] int32 -> [B, P + new_tokens] int32."""
    batch, length = prompts.shape
    slots = jnp.arange(batch, dtype=jnp.int32)
    zero = jnp.zeros_like(slots)
    state = decode.init_state(model, NoDraft(), slots=batch, max_len=length + new_tokens, num_draft_tokens=0)
    requests = decode.Requests(
        tokens=prompts,
        length=zero + length,
        prompt=zero + length,
        limit=zero + length + new_tokens,
        stop_ids=jnp.broadcast_to(state.stop_ids[:1], state.stop_ids.shape),
        seed=state.seed,
        temperature=state.temperature,
    )
    state = decode.prefill(model, NoDraft(), decode.admit(state, slots, requests), slots, chunk=length)
    return decode.decode_loop(model, NoDraft(), state, slots, new_tokens, num_draft_tokens=0).tokens


def corpus(
    model: Gemma4, stream: np.ndarray, *, sequences: int, prompt_length: int, new_tokens: int, seed: int, batch: int = 512
) -> jax.Array:
    """Greedy continuations of prompts from random places of a stream: [sequences, prompt_length + new_tokens] int32.

    sequences: rounded up to whole batches.
    """
    starts = jnp.asarray(stream)

    @jax.jit
    def write(model: Gemma4, key: jax.Array) -> jax.Array:
        return generate(model, windows(starts, key, batch, prompt_length), new_tokens)

    keys = jax.random.split(jax.random.key(seed), -(-sequences // batch))
    return jnp.concatenate([write(model, key) for key in keys])
