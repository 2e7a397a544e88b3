"""Calls for rows of long prompts before their ends, on an NVIDIA GPU: what they leave out changes nothing that is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu_layers import calm_weights, first_layers

from jaxspec import decode, released
from jaxspec.engine.buckets import spares
from jaxspec.model import gemma4

pytestmark = pytest.mark.gpu
LENGTH, CHUNK = 1800, 512  # longer than the window, so that rings come round
LIMIT = 5e-2  # of the largest value: XLA may multiply in another order in another program


def test_a_prompt_is_computed_without_what_only_its_end_needs():
    """Layers of the E2B, of which the last five share K and V, and its assistant, which reads the last hidden state."""
    config = first_layers("e2b")
    drafter = released.abstract_drafter("mtp", "e2b", config, jnp.bfloat16)
    models = calm_weights((gemma4.abstract(config, jnp.bfloat16), drafter))
    assert spares(*models)
    each = np.full(1, LENGTH, np.int32)
    requests = decode.Requests(
        tokens=np.random.default_rng(0).integers(0, config.vocab_size, (1, LENGTH), np.int32),
        length=each,
        prompt=each,
        limit=each + 8,
        stop_ids=np.full((1, 16), -1, np.int32),
        seed=np.zeros((1, 2), np.uint32),
        temperature=np.zeros(1, np.float32),
    )
    slots, found = np.zeros(1, np.int32), []
    prefill = jax.jit(decode.prefill, static_argnames=("chunk", "ends"))
    for before in (True, False):
        state = decode.init_state(*models, slots=1, max_len=2048, num_draft_tokens=3)
        state = jax.jit(decode.admit)(state, slots, requests)
        for begin in range(0, LENGTH, CHUNK):
            state = prefill(*models, state, slots, chunk=CHUNK, ends=before or begin + CHUNK >= LENGTH)
        assert state.length[0] == LENGTH + 1
        found.append([leaf.astype(jnp.float32) for leaf in jax.tree.leaves((state.cache.layers, state.drafter))])
    for all_computed, left_out in zip(*found, strict=True):
        assert jnp.max(jnp.abs(all_computed - left_out)) <= LIMIT * jnp.max(jnp.abs(all_computed)) > 0
