"""The losses are what they say, their gradients are right, and every kind of drafter learns a text by heart through them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small
from small import KINDS, VOCAB, log_softmax

from jaxspec.drafters.training import Objective, whole_rows
from jaxspec.learning.losses import Batch, distil_loss, places, target_loss
from jaxspec.learning.update import join, split

STEPS = 3
MIXED = Objective(steps=STEPS, decay=0.7, soft=0.8, hard=0.5, tv=0.6)
pytestmark = pytest.mark.usefixtures("unoptimised")


def batch():
    """The target's greedy texts, of which some are shorter than the row and some begin later."""
    ids = small.texts()
    return Batch(ids, np.asarray([0, 1, 5, 0, 9, 2], np.int32), np.asarray([24, 20, 24, 11, 24, 24], np.int32))


@functools.partial(jax.jit, static_argnums=3)
def graded(trained, kept, batch, objective):
    """((loss, metrics), gradient) at all places."""
    return jax.value_and_grad(lambda t: distil_loss(join(t, kept), small.target(), batch, None, objective), has_aux=True)(trained)


@jax.jit
def steps_of(drafter, ids):
    out, _ = small.target()(whole_rows(ids), None, taps=drafter.taps)
    at = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :], ids.shape)
    return list(drafter.guesses(small.target(), out, ids, at, STEPS))


def test_target_loss_is_the_cross_entropy_of_the_tokens_that_were_written():
    texts = batch()
    loss, metrics = jax.jit(target_loss)(small.target(), texts)
    logits = np.asarray(small.logits(texts.ids))
    losses, right = [], []
    for ids, first, length, row in zip(texts.ids, texts.first, texts.length, logits, strict=True):
        for at in range(max(first, 1), length):
            losses.append(-log_softmax(row[at - 1])[ids[at]])
            right.append(row[at - 1].argmax() == ids[at])
    np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-5)
    np.testing.assert_allclose(metrics["accuracy"], np.mean(right), rtol=1e-6)
    assert np.mean(right) == 1  # its own greedy text


@pytest.mark.parametrize("kind", ["mtp", "dspark", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dflash2", "eagle3"))])
def test_distil_loss_is_the_mean_of_its_steps(kind):
    """The sum in NumPy, from the guesses of every place: a centroid head's, a shortlist's, a draft vocabulary's, and a confidence's."""
    drafter, texts = small.drafter(kind), batch()
    (loss, metrics), _ = graded(*split(drafter), texts, MIXED)
    truth, found = np.asarray(small.logits(texts.ids)), steps_of(drafter, texts.ids)
    totals, whole = [[] for _ in range(STEPS)], []
    recalls = [[] for _ in range(STEPS)]
    for b, (first, length) in enumerate(zip(texts.first, texts.length, strict=True)):
        for at in range(max(first - 1, 0), length - 1):
            agree = []
            for k, guess in enumerate(found, start=1):
                if at + k >= length:
                    break
                p, q = np.exp(log_softmax(truth[b, at + k])), np.asarray(guess.logits)[b, at]
                best, distance, offered, drawn = p.argmax(), *one(drafter, guess, p, truth[b, at + k], q, b, at)
                recalls[k - 1].append(offered)
                if guess.ids is None or offered:
                    totals[k - 1].append(distance)
                agree.append(drawn == best)
            if len(agree) == STEPS:
                whole.append(np.cumprod(agree).sum())
    weights = 0.7 ** np.arange(STEPS)
    np.testing.assert_allclose(loss, sum(w * np.mean(t) for w, t in zip(weights, totals, strict=True)) / weights.sum(), rtol=1e-5)
    np.testing.assert_allclose(metrics["acceptance_length"], 1 + np.mean(whole), rtol=1e-6)
    for k in range(STEPS):
        np.testing.assert_allclose(metrics[f"recall_{k + 1}"], np.mean(recalls[k]), rtol=1e-6)
    assert set(metrics) == {"acceptance_length", *(f"recall_{k}" for k in range(1, STEPS + 1))}


def one(drafter, guess, p, truth, q, b, at):
    """(distance, whether the best token could have been drafted, the token that is) of one guess."""
    best, ids = p.argmax(), np.arange(VOCAB) if guess.ids is None else np.asarray(guess.ids)
    log_q, soft = log_softmax(q), np.exp(log_softmax(truth[ids]))
    at_best = np.flatnonzero(ids == best)
    tv = 1 - np.minimum(p[ids], np.exp(log_q)).sum()
    distance = -0.8 * (soft * log_q).sum() + 0.6 * tv - 0.5 * (log_q[at_best[0]] if len(at_best) else 0)
    if guess.confidence is not None:
        sure = 1 / (1 + np.exp(-np.asarray(guess.confidence, np.float64)[b, at]))
        distance -= (1 - tv) * np.log(sure) + tv * np.log(1 - sure)
    if guess.shortlist is not None:
        first = np.asarray(guess.shortlist.logits)[b, at]
        distance -= 0.8 * (soft * log_softmax(first)).sum() + 0.5 * log_softmax(first)[best]
        offered = np.argsort(-first)[:5]
        return distance, best in offered, offered[q[offered].argmax()]
    if guess.centroids is None:
        return distance, len(at_best) > 0, ids[q.argmax()]
    scores, members = np.asarray(guess.centroids.logits)[b, at], np.asarray(drafter.masked_embedding.token_ordering).reshape(8, -1)
    distance -= (p[members].sum(-1) * log_softmax(scores)).sum()
    offered = members[np.argsort(-scores)[:3]].reshape(-1)
    return distance, best in offered, offered[q[offered].argmax()]


# A head of centroids, a shortlist, a confidence and a draft vocabulary; the losses of the others are the same sums.
OFTEN = ("mtp", "dspark")


@pytest.mark.parametrize("kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_gradients_equal_finite_differences(kind):
    """Along each leaf's gradient, which is nowhere zero. What a confidence is compared with changes with every weight, but makes no
    gradient: the confidence's own weights are looked at with its loss, all others without."""
    trained, kept = split(small.drafter(kind))
    leaves, tree = jax.tree.flatten(trained)
    of_all = dataclasses.replace(MIXED, confidence=0.0) if hasattr(trained, "confidence_head") else MIXED
    _, gradient = graded(trained, kept, batch(), of_all)
    if of_all != MIXED:
        gradient = dataclasses.replace(gradient, confidence_head=graded(trained, kept, batch(), MIXED)[1].confidence_head)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained)]
    assert len(names) > 10
    for i, (name, leaf) in enumerate(zip(names, map(np.asarray, tree.flatten_up_to(gradient)), strict=True)):
        norm = np.linalg.norm(leaf)
        assert norm > 1e-6, name  # a module's layer_scalar hardly matters: a norm follows it
        step = 2e-3 * leaf / norm
        ends = (tree.unflatten([*leaves[:i], leaves[i] + sign * step, *leaves[i + 1 :]]) for sign in (1, -1))
        objective = MIXED if "confidence" in name else of_all
        up, down = (float(graded(end, kept, batch(), objective)[0][0]) for end in ends)
        np.testing.assert_allclose((up - down) / 4e-3, norm, rtol=0.03, atol=2e-3, err_msg=name)


@pytest.mark.parametrize("kind", [kind if kind == "mtp" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_a_drafter_learns_a_batch_by_heart(kind):
    """Almost every draft along it is accepted in the end, and hardly any before."""
    (trained, kept), texts = split(small.drafter(kind)), batch()
    if kind in ("dspark", "eagle3"):  # a whole vocabulary's worth of drafts can be right only where the best tokens are in it
        ids = np.asarray(small.drafter(kind).d2t) + np.arange(24)
        texts = Batch(texts.ids, texts.first, np.where(np.isin(texts.ids, ids).all(axis=1), texts.length, 0).astype(np.int32))
        assert (texts.length > 0).sum() >= 1
    tx = optax.adam(2e-2)
    moments = tx.init(trained)
    change = jax.jit(tx.update)
    (_, before), _ = graded(trained, kept, texts, MIXED)
    for step in range(150):
        (_, metrics), gradient = graded(trained, kept, texts, MIXED)
        with jax.numpy_dtype_promotion("standard"):
            changes, moments = change(gradient, moments)
        trained = optax.apply_updates(trained, changes)
        if step % 30 == 29 and metrics["acceptance_length"] - 1 > 0.9 * STEPS:
            break
    assert before["acceptance_length"] < 2.5 < 0.9 * STEPS < metrics["acceptance_length"] - 1


def test_places_are_those_that_draft_after_what_was_written():
    texts = Batch(np.zeros((3, 12), np.int32), np.asarray([0, 4, 6], np.int32), np.asarray([12, 8, 7], np.int32))
    for key in map(jax.random.key, range(4)):
        at, valid = map(np.asarray, places(texts, key, 5))
        assert at.shape == (3, 5)
        drawn = [sorted(row[ok]) for row, ok in zip(at, valid, strict=True)]
        # Row P + 1 is the anchor: the first token that was written, at the earliest, and the last one, at the latest.
        assert len(set(drawn[0])) == 5 and set(drawn[0]) <= set(range(11))
        assert drawn[1] == [3, 4, 5, 6] and drawn[2] == [5]
    at, valid = map(np.asarray, places(texts, None, 5))
    assert [list(row[ok]) for row, ok in zip(at, valid, strict=True)] == [list(range(11)), [3, 4, 5, 6], [5]]


def test_a_draft_vocabulary_is_found_in_any_order():
    drafter = small.drafter("eagle3")
    ids = np.asarray(drafter.d2t) + np.arange(24)
    order = np.random.default_rng(3).permutation(24)
    shuffled = dataclasses.replace(
        drafter,
        d2t=jnp.asarray(ids[order] - np.arange(24), jnp.int32),
        lm_head=dataclasses.replace(drafter.lm_head, weight=drafter.lm_head.weight[order]),
    )
    (loss, metrics), _ = graded(*split(drafter), batch(), MIXED)
    (again, others), _ = graded(*split(shuffled), batch(), MIXED)
    np.testing.assert_allclose(again, loss, rtol=1e-5)
    assert {k: float(v) for k, v in others.items()} == pytest.approx({k: float(v) for k, v in metrics.items()})
