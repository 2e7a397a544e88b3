"""The pocket models on an NVIDIA GPU: the tokens of K = 0 with any K, and a loop that copies neither cache nor weights."""

import jax
import jax.numpy as jnp
import pytest

from jaxspec import decode
from jaxspec.drafters import NoDraft
from tests.test_pocket import assert_same, assistant, decode_loop, decoded, target, texts  # noqa: F401

pytestmark = pytest.mark.gpu


def test_it_runs_on_the_gpu():
    assert jax.default_backend() == "gpu"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_same_tokens_for_any_k(target, assistant, texts, temperature):  # noqa: F811
    sequences = [ids[:n] for ids, n in zip(texts, [1, 3, 40, 63, 64, 127, 129, 220], strict=False)]
    limits = [512] * len(sequences)
    expected, _ = decoded(target, NoDraft(), sequences, limits, max_len=512, num_draft_tokens=0, temperature=temperature)
    compared, ties = 0, 0
    for k in (1, 4, 7):
        found, _ = decoded(target, assistant, sequences, limits, max_len=512, num_draft_tokens=k, temperature=temperature)
        for seed, (f, e) in enumerate(zip(found, expected, strict=True)):
            ties += assert_same(target, f, e, temperature, seed)
            compared += len(e)
    assert ties <= 1 + compared // 10_000


def test_nothing_large_is_copied_in_the_loop(target, assistant):  # noqa: F811
    """XLA reports the bytes of temporaries: a copied pool or weight matrix would be among them."""
    half, draft = (jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree) for tree in (target, assistant))
    state = jax.eval_shape(lambda: decode.init_state(half, draft, slots=64, max_len=4096, num_draft_tokens=4, full_pages=20_000))
    slots = jnp.zeros(1, jnp.int32)
    compiled = decode_loop.lower(half, draft, state, slots, 100, num_draft_tokens=4).compile()
    pool = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert pool > 300e6
    assert compiled.memory_analysis().temp_size_in_bytes < pool / 4
