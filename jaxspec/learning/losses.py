"""Losses of a target and of its drafters: how far a drafter's guesses are from what the target chooses."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.drafters.training import XLA, Guess, Objective, pick, whole_rows
from jaxspec.model.target import TargetModel


@struct.dataclass
class Batch:
    """Texts, padded at their ends. ids: [B, T] int32. first: [B] int32, the first token that a drafter may have to guess after: those
    before it were given, not written. length: [B] int32."""

    ids: Any
    first: Any
    length: Any


def target_loss(model: TargetModel, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy of the next token, in nats, of tokens from `first` on."""
    ids, place = batch.ids, jnp.arange(1, batch.ids.shape[1], dtype=jnp.int32)[None, :]
    counted = (place >= batch.first[:, None]) & (place < batch.length[:, None])
    out, _ = model(whole_rows(ids), None, attention=XLA)
    logits = model.unembed(out.hidden[:, :-1])
    gold = jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1)[..., 0]
    right = jnp.argmax(logits, axis=-1) == ids[:, 1:]
    loss = mean(jax.nn.logsumexp(logits, axis=-1) - gold, counted)
    return loss, {"accuracy": mean(right.astype(jnp.float32), counted)}


def distil_loss(
    drafter: Any, target: TargetModel, batch: Batch, key: jax.Array | None, objective: Objective
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The mean distance of a drafter's guesses from the target's choices, by `objective`. key: of the places; None takes every one.

    With a draft vocabulary the target's distribution is compared on that, and places whose best token it lacks do not count.
    Metrics: acceptance length, greedy, had every place drafted along this text; the recall of the target's best token by the draft
    vocabulary's, the centroids' or the shortlist's choice.
    """
    out, _ = target(whole_rows(batch.ids), None, taps=drafter.taps, attention=XLA)
    at, valid = places(batch, key, objective.anchors)
    whole = valid & (at + objective.steps < batch.length[:, None])
    agree, accepted = whole, jnp.ones((), jnp.float32)
    total, weight = jnp.zeros((), jnp.float32), 0.0
    metrics: dict[str, jax.Array] = {}
    for k, guess in enumerate(drafter.guesses(target, out, batch.ids, at, objective.steps), start=1):
        truth = target.unembed(pick(out.hidden, at + k))
        best = jnp.argmax(truth, axis=-1).astype(jnp.int32)
        distance, chosen, offered = _distance(guess, truth, best, objective)
        counted = valid & (at + k < batch.length[:, None])
        if guess.centroids is not None or guess.shortlist is not None or guess.ids is not None:
            metrics[f"recall_{k}"] = mean(offered.astype(jnp.float32), counted)
        if guess.ids is not None:
            counted &= offered
        agree &= chosen == best
        accepted += mean(agree.astype(jnp.float32), whole)
        importance = objective.decay ** (k - 1)
        total, weight = total + importance * mean(distance, counted), weight + importance
    return total / weight, {"acceptance_length": accepted, **metrics}


def places(batch: Batch, key: jax.Array | None, count: int) -> tuple[jax.Array, jax.Array]:
    """`count` places of each text at most, none twice, from which a drafter guesses: [B, A] int32, and whether each is one."""
    rows = jnp.arange(batch.ids.shape[1], dtype=jnp.int32)[None, :]
    # The first guess follows the anchor, which is at the earliest the first token that was written, and at the latest the last.
    valid = (rows >= batch.first[:, None] - 1) & (rows < batch.length[:, None] - 1)
    if key is None:
        return jnp.broadcast_to(rows, valid.shape), valid
    scores = jnp.where(valid, jax.random.uniform(key, valid.shape), -1.0)
    scores, at = jax.lax.top_k(scores, min(count, valid.shape[1]))
    return at.astype(jnp.int32), scores >= 0


def mean(values: jax.Array, counted: jax.Array) -> jax.Array:
    """The mean of those that count, 0 of none. values: float32, counted: bool, of one shape."""
    return jnp.sum(jnp.where(counted, values, 0.0)) / jnp.maximum(jnp.sum(counted.astype(jnp.float32)), 1.0)


def _distance(guess: Guess, truth: jax.Array, best: jax.Array, objective: Objective) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of every place the distance, the token that is drafted, and whether the target's best token could have been. truth: [B, A, V],
    best: [B, A]."""
    logits, p = guess.logits, jax.nn.softmax(truth, axis=-1)
    if guess.ids is None:
        index, drawable, offered = best, logits, jnp.ones(best.shape, bool)
        shared, soft = p, p
    else:
        shared, soft = jnp.take(p, guess.ids, axis=-1), jax.nn.softmax(jnp.take(truth, guess.ids, axis=-1), axis=-1)
        candidate = jnp.full((p.shape[-1],), -1, jnp.int32).at[guess.ids].set(jnp.arange(guess.ids.shape[0], dtype=jnp.int32))
        index, drawable = jnp.take(candidate, best), logits
        index, offered = jnp.maximum(index, 0), index >= 0
    # Both cross-entropies in one: of each log q = logits - total, so that no logarithm is kept for the way back.
    total = jax.nn.logsumexp(logits, axis=-1)
    goal = objective.soft * soft + objective.hard * jax.nn.one_hot(index, logits.shape[-1], dtype=jnp.float32)
    distance = (objective.soft + objective.hard) * total - jnp.sum(goal * logits, axis=-1)
    if objective.tv or guess.confidence is not None:
        kept = jnp.sum(jnp.minimum(shared, jnp.exp(logits - total[..., None])), axis=-1)
        distance += objective.tv * (1.0 - kept)
        if guess.confidence is not None:
            # Binary cross-entropy to what is kept, which it is not to change.
            gain = jax.lax.stop_gradient(kept) * guess.confidence
            distance += objective.confidence * (jax.nn.softplus(guess.confidence) - gain)
    if guess.centroids is not None:
        scores, ordering = guess.centroids.logits, guess.centroids.ordering
        count = scores.shape[-1]
        # Centroids are to be chosen by how much of p their tokens have.
        mass = jnp.take(p, ordering, axis=-1).reshape(*best.shape, count, -1).sum(-1)
        distance -= jnp.sum(mass * jax.nn.log_softmax(scores, axis=-1), axis=-1)
        among = jax.lax.top_k(scores, guess.centroids.top_k)[1]
        size = ordering.shape[0] // count
        centroid_of = jnp.zeros_like(ordering).at[ordering].set(jnp.arange(count * size, dtype=ordering.dtype) // size)
        allowed = jnp.take(jnp.any(jax.nn.one_hot(among, count, dtype=bool), axis=-2), centroid_of, axis=-1)
        offered = jnp.take_along_axis(allowed, best[..., None], axis=-1)[..., 0]
        # What inference drafts: the best of the tokens that the centroids offer.
        drawable = jnp.where(allowed, guess.logits, -jnp.inf)
    if guess.shortlist is not None:
        # What makes a token a candidate learns as what then scores it.
        first = guess.shortlist.logits
        distance += (objective.soft + objective.hard) * jax.nn.logsumexp(first, axis=-1) - jnp.sum(goal * first, axis=-1)
        allowed = first >= jax.lax.top_k(first, guess.shortlist.top_k)[0][..., -1:]
        offered = jnp.take_along_axis(allowed, best[..., None], axis=-1)[..., 0]
        drawable = jnp.where(allowed, guess.logits, -jnp.inf)
    chosen = jnp.argmax(drawable, axis=-1).astype(jnp.int32)
    return distance, chosen if guess.ids is None else jnp.take(guess.ids, chosen), offered
