"""Sequence-level unlikelihood training (Welleck et al. 2019, arXiv 1908.04319): a small model decoded greedily runs into loops;
this teaches it out of them. The model writes continuations greedily, and tokens that complete an n-gram which it has written before
are made less likely, beside ordinary training.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.gemma4 import Gemma4
from jaxspec.train.generate import generate
from jaxspec.train.loop import train, windows
from jaxspec.train.losses import target_loss, whole_rows
from pallas_kernels.noise import row_keys


def repeats(ids: jax.Array, n: int) -> jax.Array:
    """Whether each token completes an n-gram that stood earlier in its sequence. ids: [B, T] int32 -> [B, T] bool."""
    keys = jnp.zeros((*ids.shape, 2), jnp.uint32)
    for back in range(n):
        keys = row_keys(keys, jnp.roll(ids, back, axis=1))
    same = jnp.all(keys[:, :, None] == keys[:, None, :], axis=-1)
    at = jnp.arange(ids.shape[1])
    earlier = (at[None, :] < at[:, None]) & (at[None, :] >= n - 1)
    return jnp.any(same & earlier[None], axis=2)


def break_loops(
    weights: Gemma4,
    learnt: np.ndarray,
    prompts: np.ndarray,
    held_out: np.ndarray,
    *,
    batch: int,
    length: int,
    peak: float,
    prompt_length: int = 128,
    new_tokens: int = 192,
    continuations: int = 256,
    n: int = 5,
    **settings: Any,
) -> Gemma4:
    """Trains on windows of `learnt` as before and, with equal weight a token, against repetition after windows of `prompts`.

    The metric `distinct_8` is the share of 8-grams in the continuations that are not repeats within their sequence.
    """
    starts = jnp.asarray(prompts)

    def draw(model: Gemma4, stream: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        chosen = windows(starts, jax.random.fold_in(key, 1), continuations, prompt_length)
        return windows(stream, key, batch, length), generate(model, chosen, new_tokens)

    def loss(model: Gemma4, drawn: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, dict[str, jax.Array]]:
        ids, written = drawn
        likelihood, metrics = target_loss(model, ids)
        out, _ = model(whole_rows(written), None)
        logits = model.unembed(out.hidden[:, prompt_length - 1 : -1])
        tokens = written[:, prompt_length:]
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits, axis=-1), tokens[..., None], axis=-1)[..., 0]
        unlikelihood = -jnp.log1p(-jnp.minimum(jnp.exp(log_p), 1.0 - 1e-4))
        again = repeats(written, n)[:, prompt_length:]
        distinct = 1.0 - jnp.mean(repeats(written, 8)[:, prompt_length:].astype(jnp.float32))
        total = likelihood + jnp.mean(jnp.where(again, unlikelihood, 0.0))
        return total, {**metrics, "likelihood": likelihood, "distinct_8": distinct}

    return train(
        loss, weights, learnt, held_out, batch=batch, length=length, peak=peak / 4, draw=draw, score=target_loss, every=100, **settings
    )
