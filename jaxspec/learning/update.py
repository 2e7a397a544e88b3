"""An update: AdamW on float32 master weights, with the loss computed on weights that are rounded from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

# loss(weights in compute dtype, fixed, batch, key) -> (scalar, metrics by name)
Loss = Callable[[Any, Any, Any, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]


def optimizer(rate: optax.Schedule, weight_decay: float = 0.1) -> optax.GradientTransformation:
    """AdamW with a learning rate by step. Gradients are clipped at norm 1, and only matrices decay."""
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(rate, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    )


def updater(
    loss: Loss,
    tx: optax.GradientTransformation,
    rounded: Callable[[Any, Any], Any],
    *,
    seed: int,
    accumulate: int = 1,
    shardings: Any = None,
) -> Any:
    """The jitted function (masters, moments, kept, fixed, batch, step, scale) -> (masters, moments, metrics), which takes the first two
    along.

    rounded: (masters, kept) -> the weights that the loss takes; see `split`. What is kept is an argument, not a constant, as XLA computes
    with constants while it compiles (an order of 262,144 tokens was sorted for 16 s). accumulate: parts of a batch, whose gradients are
    averaged; a batch's arrays are [accumulate, texts of a part, ...]. step: [] int32; with `seed` it determines the random numbers. scale:
    [] float32, which the change of the weights is multiplied by. shardings: of what is returned, None for one device. Metrics: "loss",
    "gradient" (its norm) and those of the loss.
    """

    def update(masters: Any, moments: Any, kept: Any, fixed: Any, batch: Any, step: jax.Array, scale: jax.Array) -> tuple[Any, Any, Any]:
        key = jax.random.fold_in(jax.random.key(seed), step)
        gradient = jax.value_and_grad(lambda m, part, key: loss(rounded(m, kept), fixed, part, key), has_aux=True)

        def one(part: Any, i: Any) -> Any:
            (value, metrics), grads = gradient(masters, part, jax.random.fold_in(key, i))
            return grads, {"loss": value, **metrics}

        if accumulate == 1:
            grads, metrics = one(jax.tree.map(lambda x: x[0], batch), 0)
        else:
            shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], batch), jnp.zeros((), jnp.int32))
            zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

            def add(total: Any, part: Any) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, total, one(*part)), None

            total, _ = jax.lax.scan(add, zeros, (batch, jnp.arange(accumulate, dtype=jnp.int32)))
            grads, metrics = jax.tree.map(lambda x: x / accumulate, total)
        metrics["gradient"] = optax.tree.norm(grads)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer powers
            changes, moments = tx.update(grads, moments, masters)
        return optax.apply_updates(masters, jax.tree.map(lambda x: x * scale, changes)), moments, metrics

    return jax.jit(update, donate_argnums=(0, 1), out_shardings=shardings)


def split(weights: Any) -> tuple[Any, Any]:
    """The tree with its float leaves alone and the tree with its other leaves alone; None stands for the missing ones."""
    is_float = jax.tree.map(lambda x: bool(jnp.issubdtype(x.dtype, jnp.floating)), weights)
    trained, kept = (jax.tree.map(lambda x, f, w=wanted: x if f is w else None, weights, is_float) for wanted in (True, False))
    return trained, kept


def join(trained: Any, kept: Any) -> Any:
    """The tree that `split` took apart."""
    return jax.tree.map(lambda t, k: k if t is None else t, trained, kept, is_leaf=lambda x: x is None)
