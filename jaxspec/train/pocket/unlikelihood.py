"""Sequence-level unlikelihood training (Welleck et al. 2019, arXiv 1908.04319), which teaches a small model not to repeat itself.

Greedy text of a small model falls into loops. So the model writes greedy continuations, and each token that completes an n-gram which
the sequence already has is made less likely. Ordinary training goes on at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.drafters.training import XLA, whole_rows
from jaxspec.learning.losses import Batch, target_loss
from jaxspec.model.gemma4 import Gemma4
from jaxspec.train.generate import generate
from jaxspec.train.loop import Run, fit
from pallas_kernels.noise import row_keys


def repeats(ids: jax.Array, n: int) -> jax.Array:
    """Whether each token completes an n-gram that its sequence already has. ids: [B, T] int32 -> [B, T] bool."""
    keys = jnp.zeros((*ids.shape, 2), jnp.uint32)
    for back in range(n):
        keys = row_keys(keys, jnp.roll(ids, back, axis=1))
    same = jnp.all(keys[:, :, None] == keys[:, None, :], axis=-1)
    at = jnp.arange(ids.shape[1])
    earlier = (at[None, :] < at[:, None]) & (at[None, :] >= n - 1)
    return jnp.any(same & earlier[None], axis=2)


def break_loops(
    weights: Gemma4,
    texts: Callable[[int], Batch],
    prompts: Callable[[int], Batch],
    run: Run,
    *,
    out: Path,
    new_tokens: int = 192,
    n: int = 5,
    evaluate: Callable[[Any], dict[str, float]] | None = None,
    progress: bool = True,
) -> Gemma4:
    """Trains on texts and, with the same weight a token, against repetition in greedy continuations of prompts. Returns the weights.

    texts, prompts: return the batch of a step; prompts have no padding. new_tokens: of a continuation. n: of the n-grams. evaluate,
    progress: as in `fit`. The metric `distinct_8` is the share of tokens in the continuations that complete a new 8-gram.
    """
    given = prompts(0).ids.shape[1]

    def draw(step: int) -> tuple[Batch, Batch]:
        return texts(step), prompts(step)

    def loss(model: Gemma4, _: Any, drawn: tuple[Batch, Batch], key: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        texts, prompts = drawn
        written = generate(jax.lax.stop_gradient(model), prompts.ids, new_tokens)
        likelihood, metrics = target_loss(model, texts)
        out, _ = model(whole_rows(written), None, attention=XLA)
        logits = model.unembed(out.hidden[:, given - 1 : -1])
        again = repeats(written, n)[:, given:]
        distinct = 1.0 - jnp.mean(repeats(written, 8)[:, given:].astype(jnp.float32))
        total = likelihood + jnp.mean(jnp.where(again, unlikelihood(logits, written[:, given:]), 0.0))
        return total, {**metrics, "likelihood": likelihood, "distinct_8": distinct}

    return fit(loss, weights, (), draw, run, out=out, evaluate=evaluate, progress=progress)


def unlikelihood(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """-log(1 - p), where p is the probability of each token. logits: [..., V] float32, tokens: [...] int32 -> [...] float32.

    We take the logarithm of the other tokens' probability: unlike 1 - p, that and its gradient stay exact where p is nearly 1.
    """
    others = jnp.where(jax.nn.one_hot(tokens, logits.shape[-1], dtype=bool), -jnp.inf, logits)
    return jax.nn.logsumexp(logits, axis=-1) - jax.nn.logsumexp(others, axis=-1)
