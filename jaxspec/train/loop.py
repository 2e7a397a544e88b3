"""The training loop: AdamW over float32 masters, bf16 compute, windows of a token stream drawn on the device from a fixed seed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

# loss(weights in compute dtype, batch) -> (scalar, metrics by name); a batch is ids [B, T] int32 unless `draw` makes another.
Loss = Callable[[Any, Any], tuple[jax.Array, dict[str, jax.Array]]]
# draw(weights in compute dtype, stream, key) -> batch
Draw = Callable[[Any, jax.Array, jax.Array], Any]


def optimizer(peak: float, steps: int, weight_decay: float = 0.1) -> optax.GradientTransformation:
    """AdamW with warm-up over 2 % of the steps, cosine decay to a fiftieth, clipping at norm 1; only matrices decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, max(1, steps // 50), steps, peak / 50)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    )


def windows(stream: jax.Array, key: jax.Array, batch: int, length: int) -> jax.Array:
    """Windows at random places of a token stream: [batch, length] int32."""
    start = jax.random.randint(key, (batch, 1), 0, stream.shape[0] - length)
    return jnp.take(stream, start + jnp.arange(length)[None, :], axis=0).astype(jnp.int32)


def train(
    loss: Loss,
    weights: Any,
    stream: np.ndarray,
    held_out: np.ndarray,
    *,
    steps: int,
    batch: int,
    length: int,
    peak: float,
    seed: int,
    log: Path,
    draw: Draw | None = None,
    score: Loss | None = None,
    every: int = 500,
    dtype: Any = jnp.bfloat16,
) -> Any:
    """Minimises `loss` and returns the float32 weights.

    weights: float32 pytree, donated. stream, held_out: [N] token ids. draw: makes a batch (default: windows of `length` tokens). score: the
    loss of held-out windows (default: `loss`). Metrics of both streams are appended to `log` as JSON lines every `every` steps.
    Raises ValueError for a stream without one window, and FloatingPointError naming the step if the logged loss is not finite.
    """
    for name, ids in (("stream", stream), ("held_out", held_out)):
        if len(ids) <= length:
            raise ValueError(f"{name} has {len(ids)} tokens; expected more than the {length} of a window")
    tx = optimizer(peak, steps)

    def rounded(weights: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(dtype), weights)

    @jax.jit(donate_argnums=(0, 1))
    def update(weights: Any, moments: Any, tokens: jax.Array, step: jax.Array) -> tuple[Any, Any, dict[str, jax.Array]]:
        key = jax.random.fold_in(jax.random.key(seed), step)
        drawn = windows(tokens, key, batch, length) if draw is None else draw(rounded(weights), tokens, key)
        (value, metrics), grads = jax.value_and_grad(lambda w: loss(rounded(w), drawn), has_aux=True)(weights)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            changes, moments = tx.update(grads, moments, weights)
        return optax.apply_updates(weights, changes), moments, {"loss": value, **metrics}

    @jax.jit
    def evaluate(weights: Any, ids: jax.Array) -> dict[str, jax.Array]:
        value, metrics = (score or loss)(rounded(weights), ids)
        return {"loss": value, **metrics}

    tokens = jnp.asarray(stream)
    usable = len(held_out) // length * length
    held = jnp.asarray(held_out[:usable].astype(np.int32).reshape(-1, length))
    # A whole number of equal batches, so that one program serves them all; the mean over windows is over almost all of the stream.
    held = held[: max(1, len(held) // batch) * batch].reshape(-1, min(batch, len(held)), length)
    moments = tx.init(weights)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as out:
        began, metrics = time.perf_counter(), {}
        for step in range(steps):
            weights, moments, metrics = update(weights, moments, tokens, jnp.asarray(step))
            if (step + 1) % every and step + 1 != steps:
                continue
            seconds = time.perf_counter() - began
            scores = [evaluate(weights, part) for part in held]
            row = {name: float(value) for name, value in metrics.items()}
            row |= {f"held_out_{name}": float(np.mean([s[name] for s in scores])) for name in scores[0]}
            row = {"step": step + 1, "seconds": round(seconds, 1)} | {k: round(v, 4) for k, v in row.items()}
            print(json.dumps(row), file=out, flush=True)
            print(json.dumps(row), flush=True)
            if not np.isfinite(row["loss"]):
                raise FloatingPointError(f"the loss at step {step + 1} is {row['loss']}")
    return weights
