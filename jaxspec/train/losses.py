"""Losses of the target and of its drafters, computed by the very modules that run at inference.

What is differentiated runs in plain XLA: the kernels have no derivative.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.drafters.gemma4_mtp import Gemma4MTP
from jaxspec.gemma4 import Gemma4, Rows
from jaxspec.layers import Linear, softcap


def whole_rows(ids: jax.Array) -> Rows:
    """Every row of a batch of whole sequences. ids: [B, T] int32."""
    batch, length = ids.shape
    zero = jnp.zeros((batch,), jnp.int32)
    return Rows(ids, zero, zero + length, jnp.arange(batch, dtype=jnp.int32))


def target_loss(model: Gemma4, ids: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the next token, in nats. ids: [B, T]."""
    out, _ = model(whole_rows(ids), None, attention="xla")
    logits = model.unembed(out.hidden[:, :-1])
    gold = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
    loss = jnp.mean(jax.nn.logsumexp(logits, axis=-1) - gold)
    return loss, {"accuracy": jnp.mean((jnp.argmax(logits, axis=-1) == ids[:, 1:]).astype(jnp.float32))}


def mtp_loss(
    assistant: Gemma4MTP, target: Gemma4, ids: jax.Array, steps: int, ordering: jax.Array, hard: float = 1.0
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The assistant's distance from the target's next-token distributions, unrolled over `steps` draft steps with its own feedback.

    Every row P of a sequence drafts at once: step k takes token P + k and predicts what the target chooses after it. The loss of a
    step is the cross-entropy to the target's distribution, plus `hard` times that to its argmax, plus, for a centroid head, the
    cross-entropy to the target's mass in each centroid's tokens. ids: [B, T]. ordering: [V] int32, `token_ordering`.
    Metrics: acceptance length, greedy, had every row drafted along this text; recall of the target's argmax by the centroids.
    """
    rows = whole_rows(ids)
    out, _ = target(rows, None)
    logits = jax.lax.stop_gradient(target.unembed(out.hidden))
    layers = assistant.config.text.layers
    keys = {spec.kind: out.keys[spec.kv_source] for spec in layers if spec.kv_source is not None}
    keys = jax.lax.stop_gradient(keys)
    hidden, config = jax.lax.stop_gradient(out.hidden), assistant.config
    length = ids.shape[1]
    total, weight = jnp.zeros((), jnp.float32), 0.0
    agree = jnp.ones((ids.shape[0], length - steps), bool)
    metrics: dict[str, jax.Array] = {}
    accepted = jnp.ones((), jnp.float32)
    for k in range(1, steps + 1):
        embedded = jax.lax.stop_gradient(target.embed(jnp.roll(ids, -k, axis=1)))
        y, hidden = assistant.step(embedded, hidden, rows.positions, keys, "xla")
        y, truth = y[:, : length - steps], jnp.roll(logits, -k, axis=1)[:, : length - steps]
        drafted = Linear(assistant.model.embed_tokens.weight)(y, dtype=jnp.float32)
        if assistant.masked_embedding is None:
            drafted = softcap(drafted, config.text.final_logit_softcapping)
        best = jnp.argmax(truth, axis=-1)
        log_q = jax.nn.log_softmax(drafted, axis=-1)
        p = jax.nn.softmax(truth, axis=-1)
        loss = -jnp.sum(p * log_q, axis=-1) - hard * jnp.take_along_axis(log_q, best[..., None], axis=-1)[..., 0]
        offered = jnp.ones_like(drafted, bool)
        if assistant.masked_embedding is not None:
            scores = assistant.masked_embedding.centroids(y).astype(jnp.float32)
            mass = jnp.take(p, ordering, axis=-1).reshape(*p.shape[:2], config.num_centroids, -1).sum(-1)
            loss -= jnp.sum(mass * jax.nn.log_softmax(scores, axis=-1), axis=-1)
            chosen = jax.lax.top_k(scores, config.centroid_intermediate_top_k)[1]
            centroid_of = jnp.argsort(ordering) // (ordering.shape[0] // config.num_centroids)
            among = jnp.any(jax.nn.one_hot(chosen, config.num_centroids, dtype=bool), axis=-2)
            offered = jnp.take(among, centroid_of, axis=-1)
            found = jnp.take_along_axis(offered, best[..., None], axis=-1)
            metrics[f"recall_{k}"] = jnp.mean(found.astype(jnp.float32))
        # What inference drafts: the best of the tokens that the centroids offer.
        agree &= jnp.argmax(jnp.where(offered, drafted, -jnp.inf), axis=-1) == best
        accepted += jnp.mean(agree.astype(jnp.float32))
        total, weight = total + 0.9 ** (k - 1) * jnp.mean(loss), weight + 0.9 ** (k - 1)
    return total / weight, {"acceptance_length": accepted, **metrics}
