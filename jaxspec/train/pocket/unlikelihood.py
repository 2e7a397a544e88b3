"""Sequence-level unlikelihood training (Welleck et al. 2019, arXiv 1908.04319): a small model decoded greedily runs into loops;
this teaches it out of them. The model writes continuations greedily, and tokens that complete an n-gram which it has written before
are made less likely, beside ordinary training.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.drafters.training import XLA, whole_rows
from jaxspec.model.gemma4 import Gemma4
from jaxspec.train.generate import generate
from jaxspec.train.loop import Run, fit
from jaxspec.train.losses import Batch, target_loss
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
    """Trains on texts as before and, with equal weight a token, against repetition in greedy continuations of prompts.

    texts, prompts: the batches of a step; prompts have no padding. evaluate: as in `fit`. The metric `distinct_8` is the share of 8-grams
    in the continuations that are not repeats within their sequence.
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
    """-log(1 - p) of each token. logits: [..., V] float32, tokens: [...] int32.

    1 - p is the probability of all other tokens, whose logarithm keeps its digits, and its gradient, where p is all but 1.
    """
    others = jnp.where(jax.nn.one_hot(tokens, logits.shape[-1], dtype=bool), -jnp.inf, logits)
    return jax.nn.logsumexp(logits, axis=-1) - jax.nn.logsumexp(others, axis=-1)
