"""Rows of images on an NVIDIA GPU: by kernels and by XLA the same, in layers of the released widths."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from gpu_layers import calm_weights, first_layers

from jaxspec.model import gemma4
from jaxspec.model import paged_kv as paged
from jaxspec.model.rows import Inserted, Rows
from jaxspec.vision import gemma4_tower

pytestmark = pytest.mark.gpu
LIMIT = 5e-2  # of the largest value: bfloat16 through up to twenty layers


@jax.jit
def call(target, cache, ids, start, inserted):
    slots, count = jnp.zeros(1, jnp.int32), jnp.full(1, ids.shape[1], jnp.int32)
    cache, _ = paged.reserve(cache, slots, start + count, ids.shape[1])
    found = [target(Rows(ids, start, count, slots, inserted=inserted), cache, attention=kind) for kind in ("xla", "auto")]
    return [out.hidden.astype(jnp.float32) for out, _ in found], found[0][1]


@pytest.mark.parametrize("name", ["e2b", "12b", "31b"])
def test_rows_of_an_image_by_kernels_and_by_xla(name):
    """After text that is longer than the window, so that a ring has come round."""
    config = first_layers(name)
    target = calm_weights(gemma4.abstract(config, jnp.bfloat16))
    cache = gemma4.init_cache(config, slots=1, max_len=2048, num_draft_tokens=3, dtype=jnp.bfloat16)
    at, keys = 0, iter(jax.random.split(jax.random.key(0), 16))
    for width, image in ((512, False), (512, False), (320, False), (344, True), (64, False)):
        ids = jax.random.randint(next(keys), (1, width), 0, config.vocab_size, jnp.int32)
        start, inserted = jnp.full(1, at, jnp.int32), None
        if image:  # behind twenty tokens, and before others
            rows = jax.random.normal(next(keys), (1, 280, config.hidden_size), jnp.bfloat16)
            inserted = Inserted(rows, start[:, None] + 20, jnp.full((1, 1), 266, jnp.int32), jnp.ones((1, 1), bool))
        (xla, auto), after = call(target, cache, ids, start, inserted)
        assert jnp.max(jnp.abs(xla - auto)) <= LIMIT * jnp.max(jnp.abs(xla))
        if image and config.use_bidirectional_attention:
            causal = dataclasses.replace(target, config=dataclasses.replace(config, use_bidirectional_attention=None))
            (other, _), _ = call(causal, cache, ids, start, inserted)
            assert jnp.max(jnp.abs(xla - other)) > 2 * LIMIT * jnp.max(jnp.abs(xla))
        cache, at = after, at + width


@pytest.mark.parametrize(("heads", "head_dim"), [(12, 64), (16, 72)])
def test_attention_of_towers(heads, head_dim):
    """Those of the E2B and the 31B, of an image that leaves some patches over, and of four frames."""
    for several, count, left in ((1, 2520, [2394]), (4, 630, [630, 540, 9, 612])):
        q, k, v = jax.random.normal(jax.random.key(0), (3, several, count, heads, head_dim), jnp.bfloat16) / 2
        valid = jnp.arange(count)[None] < jnp.asarray(left)[:, None]
        found = jnp.where(valid[..., None, None], jax.jit(gemma4_tower._attended)(q, k, v, valid).astype(jnp.float32), 0)
        wide = (x.astype(jnp.float32) for x in (q, k, v))
        expected = jnp.where(valid[..., None, None], jax.jit(jax.vmap(gemma4_tower._by_xla))(*wide, valid), 0)
        for i in range(several):
            assert jnp.linalg.norm(found[i] - expected[i]) <= 5e-3 * jnp.linalg.norm(expected[i])
