"""Training: the losses are what they say, of the modules that serve, and the loop learns and says when it fails."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxspec import decode, gemma4
from jaxspec.config import AssistantConfig, Gemma4Config
from jaxspec.drafters import base, gemma4_mtp
from jaxspec.sampling import Sampling
from jaxspec.train import unlikelihood
from jaxspec.train.generate import corpus, generate
from jaxspec.train.loop import train, windows
from jaxspec.train.losses import mtp_loss, target_loss, whole_rows
from jaxspec.train.pocket import balanced_clusters, initial
from jaxspec.train.unlikelihood import break_loops, repeats

VOCAB, CENTROIDS, STEPS = 32, 8, 2
TEXT = {**tiny.TEXT, "vocab_size": VOCAB, "hidden_size_per_layer_input": 0}
ASSISTANT = {
    **tiny.ASSISTANT,
    "num_centroids": CENTROIDS,
    "centroid_intermediate_top_k": 3,
    "text_config": {**tiny.ASSISTANT["text_config"], "vocab_size": VOCAB},
}
CONFIG = Gemma4Config.from_hf({**tiny.TARGET, "text_config": TEXT})
# One full layer, which is enough to learn a text of 200 tokens in which each follows from the one before.
LEARNER = Gemma4Config.from_hf({**tiny.TARGET, "text_config": {**TEXT, "num_hidden_layers": 1, "layer_types": ["full_attention"]}})
CYCLE = np.random.default_rng(0).permutation(VOCAB)[:20]
STREAM = np.tile(CYCLE, 10).astype(np.uint16)


@pytest.fixture(scope="module", autouse=True)
def unoptimised():
    """Such code compiles in half the time, and computes the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@functools.cache
def random_target():
    return jax.tree.map(jnp.asarray, tiny.random_weights(gemma4.abstract(CONFIG, jnp.float32), 6))  # whose texts have variety


@functools.cache
def assistant(centroids=True):
    """(weights, with token_ordering taken out as in training, and that ordering)"""
    text = ASSISTANT["text_config"] | {"final_logit_softcapping": None if centroids else 5.0}
    config = AssistantConfig.from_hf({**ASSISTANT, "use_ordered_embeddings": centroids, "text_config": text})
    config = gemma4_mtp.bind(config, CONFIG)
    weights = jax.tree.map(jnp.asarray, tiny.random_weights(gemma4_mtp.abstract(config, jnp.float32), 1))
    if not centroids:
        return weights, jnp.arange(VOCAB, dtype=jnp.int32)
    head = weights.masked_embedding
    return with_ordering(weights, None), head.token_ordering


def with_ordering(weights, ordering):
    return dataclasses.replace(weights, masked_embedding=dataclasses.replace(weights.masked_embedding, token_ordering=ordering))


@jax.jit
def forward(model, ids):
    return model.unembed(model(whole_rows(ids), None)[0].hidden)


@functools.cache
def greedy_texts():
    """What the random target writes after one token: [6, 24]. Every token but the first is its own choice."""
    return jax.jit(generate, static_argnums=2)(random_target(), np.arange(3, 9, dtype=np.int32)[:, None], 23)


@jax.jit
def mtp(weights, ids, ordering, hard):
    """((loss, metrics), gradient) of the assistant against the random target."""
    return jax.value_and_grad(lambda w: mtp_loss(w, random_target(), ids, STEPS, ordering, hard), has_aux=True)(weights)


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


SETTINGS = {"batch": 8, "length": 16, "seed": 0, "dtype": jnp.float32}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """(a target that has learnt the cycle, the rows that its training logged)"""
    log = tmp_path_factory.mktemp("train") / "new folder" / "target.jsonl"
    weights = jax.jit(functools.partial(initial, gemma4.abstract(LEARNER, jnp.float32)))(jax.random.key(0))
    weights = train(target_loss, weights, STREAM, STREAM, steps=60, peak=1e-2, log=log, every=40, **SETTINGS)
    return weights, read(log)


def read(log):
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_target_loss_is_the_cross_entropy_of_the_next_token():
    ids = np.asarray(greedy_texts())
    other = ids.copy()
    other[:, 1:] = np.random.default_rng(0).integers(0, VOCAB, other[:, 1:].shape)
    loss_of = jax.jit(target_loss)
    for text in (ids, other):
        loss, metrics = loss_of(random_target(), text)
        at = np.asarray(forward(random_target(), text))[:, :-1]
        expected = -np.take_along_axis(log_softmax(at), text[:, 1:, None], -1).mean()
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        np.testing.assert_allclose(metrics["accuracy"], (at.argmax(-1) == text[:, 1:]).mean(), rtol=1e-6)
        assert text is other or metrics["accuracy"] == 1  # its own greedy text


def test_a_target_learns_a_text_by_heart(learnt):
    weights, (first, last) = learnt
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(weights))
    assert (first["step"], last["step"]) == (40, 60)  # every 40 steps, and at the end
    assert set(first) == {"step", "seconds", "loss", "accuracy", "held_out_loss", "held_out_accuracy"}
    assert last["loss"] < 0.05 and last["held_out_loss"] < 0.05 and last["held_out_accuracy"] == 1


@pytest.mark.parametrize("centroids", [True, False])
def test_mtp_loss_is_the_mean_of_its_steps(centroids):
    """The sum in NumPy, from the outputs of the assistant's own `step`."""
    weights, ordering = assistant(centroids)
    ids = greedy_texts()
    if centroids:
        (loss, metrics), _ = mtp(weights, ids, ordering, 0.5)
    else:
        loss, metrics = jax.jit(mtp_loss, static_argnums=3)(weights, random_target(), ids, STEPS, ordering, 0.5)
    outputs, logits, rows = unrolled(weights, random_target(), ids), np.asarray(forward(random_target(), ids)), ids.shape[1] - STEPS
    total, right, accepted = 0.0, np.ones((len(ids), rows), bool), 1.0
    for k, (drafted, scores) in enumerate(outputs, start=1):
        truth = logits[:, k : k + rows]
        drafted, best = np.asarray(drafted)[:, :rows], truth.argmax(-1)
        log_q, p = log_softmax(drafted), np.exp(log_softmax(truth))
        step = -(p * log_q).sum(-1) - 0.5 * np.take_along_axis(log_q, best[..., None], -1)[..., 0]
        offered = np.ones_like(drafted, bool)
        if centroids:
            scores = np.asarray(scores)[:, :rows]
            members = np.asarray(ordering).reshape(CENTROIDS, -1)
            mass = np.stack([p[..., ids].sum(-1) for ids in members], axis=-1)
            step -= (mass * log_softmax(scores)).sum(-1)
            offered[:] = False
            np.put_along_axis(offered, members[np.argsort(-scores, axis=-1)[..., :3]].reshape(*scores.shape[:2], -1), True, -1)
            np.testing.assert_allclose(metrics[f"recall_{k}"], np.take_along_axis(offered, best[..., None], -1).mean(), rtol=1e-6)
        right &= np.where(offered, drafted, -np.inf).argmax(-1) == best
        accepted += right.mean()
        total += 0.9 ** (k - 1) * step.mean()
    np.testing.assert_allclose(loss, total / (1 + 0.9), rtol=1e-5)
    np.testing.assert_allclose(metrics["acceptance_length"], accepted, rtol=1e-6)
    assert set(metrics) == {"acceptance_length", *(f"recall_{k}" for k in (1, 2) if centroids)}


@jax.jit
def unrolled(weights, model, ids):
    """Each draft step's logits of all tokens and of the centroids, for every row at once."""
    rows, results = whole_rows(ids), []
    out, _ = model(rows, None)
    keys = {spec.kind: out.keys[spec.kv_source] for spec in weights.config.text.layers}
    hidden = out.hidden
    for k in range(1, STEPS + 1):
        y, hidden = weights.step(model.embed(jnp.roll(ids, -k, axis=1)), hidden, rows.positions, keys)
        if weights.masked_embedding is None:
            results.append((weights.candidates(y)[0], None))
        else:
            results.append((y @ weights.model.embed_tokens.weight.T, weights.masked_embedding.centroids(y)))
    return results


def test_the_assistants_gradient_reaches_every_weight():
    """And equals finite differences, along each leaf's gradient and at its largest entry."""
    weights, ordering = assistant()
    leaves, tree = jax.tree.flatten(weights)
    gradients = tree.flatten_up_to(mtp(weights, greedy_texts(), ordering, 1.0)[1])
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(weights)]
    assert len(names) == len(leaves) > 20

    def slope(i, direction, step=4e-3):
        ends = (tree.unflatten([*leaves[:i], leaves[i] + sign * step * direction, *leaves[i + 1 :]]) for sign in (1, -1))
        up, down = (float(mtp(end, greedy_texts(), ordering, 1.0)[0][0]) for end in ends)
        return (up - down) / (2 * step)

    for i, (name, gradient) in enumerate(zip(names, map(np.asarray, gradients), strict=True)):
        norm = np.linalg.norm(gradient)
        assert norm > 1e-5, name
        np.testing.assert_allclose(slope(i, gradient / norm), norm, rtol=0.02, atol=1e-3, err_msg=name)
        if i % 5 == 0:
            one = np.zeros_like(gradient)
            one.flat[np.abs(gradient).argmax()] = 1
            np.testing.assert_allclose(slope(i, one), gradient[one == 1][0], rtol=0.02, atol=1e-3, err_msg=name)


def test_the_acceptance_that_training_reports_is_that_of_the_drafts_at_inference():
    """Every row of the target's own greedy texts drafts, from a cache that ends there, by the drafter's own `draft`."""
    weights, ordering = assistant()
    texts = np.asarray(greedy_texts())
    (before, _), _ = mtp(weights, texts, ordering, 1.0)
    for _ in range(10):  # it learns a little, so that there is something to compare
        _, gradient = mtp(weights, texts, ordering, 1.0)
        weights = jax.tree.map(lambda w, g: np.asarray(w) - np.float32(0.01) * np.sign(g), weights, gradient)
    (after, metrics), _ = mtp(weights, texts, ordering, 1.0)
    assert after < before - 1
    drafter = with_ordering(weights, ordering)
    batch, length = texts.shape
    places = np.tile(np.arange(length - STEPS, dtype=np.int32), batch)  # P of each slot
    count = len(places)
    row_tokens = np.repeat(texts, length - STEPS, axis=0)

    @jax.jit
    def draft(model, drafter, requests):
        slots = jnp.arange(count, dtype=jnp.int32)
        state = decode.init_state(model, drafter, slots=count, max_len=length, num_draft_tokens=STEPS, page_size=8)
        state = decode.prefill(model, drafter, decode.admit(state, slots, requests), slots, chunk=length)
        anchor = jnp.take_along_axis(state.tokens, state.computed[:, None], axis=1)[:, 0]
        view = base.Target(model, state.cache, slots, anchor, state.computed)
        return drafter.draft(state.drafter, view, Sampling(state.seed, state.temperature), STEPS)[0].tokens

    requests = decode.Requests(
        tokens=row_tokens,
        length=places + 2,  # the rows up to P are computed; token P + 1 is the anchor
        prompt=np.ones(count, np.int32),
        limit=np.full(count, length, np.int32),
        stop_ids=np.full((count, 16), -1, np.int32),
        seed=np.zeros((count, 2), np.uint32),
        temperature=np.zeros(count, np.float32),
    )
    drafts = np.asarray(draft(random_target(), drafter, requests))
    best = np.asarray(forward(random_target(), greedy_texts())).argmax(-1)
    chosen = np.stack([best[:, k : k + length - STEPS].reshape(-1) for k in range(1, STEPS + 1)], axis=1)
    accepted = np.cumprod(drafts == chosen, axis=1).sum(axis=1).mean()
    np.testing.assert_allclose(metrics["acceptance_length"], 1 + accepted, rtol=1e-6)
    assert 0.3 < accepted < STEPS - 0.3


def toy(weights, ids):
    return jnp.sum((weights["a"] - jnp.mean(ids.astype(jnp.float32))) ** 2), {"largest": jnp.max(ids).astype(jnp.float32)}


def toy_weights():
    return {"a": jnp.ones((2, 3), jnp.float32), "b": jnp.ones(3, jnp.float32)}


def test_the_same_seed_gives_the_same_weights(tmp_path):
    settings = {"steps": 4, "peak": 1e-1, "every": 2, "log": tmp_path / "log.jsonl"}
    first = train(toy, toy_weights(), STREAM, STREAM, **SETTINGS, **settings)
    again = train(toy, toy_weights(), STREAM, STREAM, **SETTINGS, **settings)
    assert np.array_equal(first["a"], again["a"]) and not np.array_equal(first["a"], toy_weights()["a"])
    rows = read(tmp_path / "log.jsonl")
    assert [row["step"] for row in rows] == [2, 4] * 2  # appended
    assert {**rows[0], "seconds": 0} == {**rows[2], "seconds": 0}
    assert rows[0]["held_out_largest"] == max(CYCLE)


def test_batches_may_be_drawn_and_scored_otherwise(tmp_path):
    def draw(weights, stream, key):
        return weights["b"], windows(stream, key, 3, 5)

    def loss(weights, drawn):
        own, ids = drawn
        assert ids.shape == (3, 5)
        return jnp.sum(weights["a"] ** 2) + jnp.sum(own), {}

    def score(weights, ids):
        assert ids.shape == (2, 16)  # fewer windows than a batch: all of them
        return jnp.sum(ids[:, :3]).astype(jnp.float32), {}

    train(loss, toy_weights(), STREAM, STREAM[:40], draw=draw, score=score, steps=2, peak=0, log=tmp_path / "log.jsonl", **SETTINGS)
    (row,) = read(tmp_path / "log.jsonl")
    assert row["loss"] == 9 and row["held_out_loss"] == STREAM[:3].sum() + STREAM[16:19].sum()


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    def broken(weights, ids):
        return jnp.sum(jnp.log(weights["a"] - 2)), {}

    with pytest.raises(FloatingPointError, match="the loss at step 3 is nan"):
        train(broken, toy_weights(), STREAM, STREAM, steps=9, every=3, peak=1e-3, log=tmp_path / "log.jsonl", **SETTINGS)
    assert [row["step"] for row in read(tmp_path / "log.jsonl")] == [3]


@pytest.mark.parametrize("name", ["stream", "held_out"])
def test_a_stream_shorter_than_a_window_is_refused(tmp_path, name):
    streams = {"stream": STREAM, "held_out": STREAM, name: STREAM[:16]}
    with pytest.raises(ValueError, match=f"{name} has 16 tokens; expected more than the 16 of a window"):
        train(toy, toy_weights(), **streams, steps=1, peak=1e-3, log=tmp_path / "log.jsonl", **SETTINGS)


def test_only_matrices_decay(tmp_path):
    def nothing(weights, ids):
        return 0.0 * sum(jnp.sum(w) for w in jax.tree.leaves(weights)), {}

    weights = train(nothing, toy_weights(), STREAM, STREAM, steps=2, peak=0.5, log=tmp_path / "log.jsonl", **SETTINGS)
    np.testing.assert_allclose(weights["a"], 1 - 0.5 * 0.1, rtol=1e-6)  # no step in the first round of warm-up, a whole one in the second
    assert np.array_equal(weights["b"], toy_weights()["b"])


def test_windows_are_pieces_of_the_stream():
    stream = jnp.arange(100, dtype=jnp.uint16)
    found = np.asarray(windows(stream, jax.random.key(0), 50, 7))
    assert found.dtype == np.int32 and np.array_equal(found - found[:, :1], np.tile(np.arange(7), (50, 1)))
    assert found.min() >= 0 and found.max() < 100 and len(set(found[:, 0])) > 30


@pytest.mark.parametrize("n", [1, 2, 5])
def test_repeats_are_what_stood_earlier(n):
    ids = np.random.default_rng(n).integers(0, 2, (4, 40))
    ids[1] = np.arange(40)
    expected = np.zeros(ids.shape, bool)
    for b, i in np.ndindex(*ids.shape):
        gram = ids[b, i - n + 1 : i + 1].tolist()
        expected[b, i] = i >= n - 1 and any(ids[b, j - n + 1 : j + 1].tolist() == gram for j in range(n - 1, i))
    found = np.asarray(jax.jit(repeats, static_argnums=1)(jnp.asarray(ids, jnp.int32), n))
    assert np.array_equal(found, expected)
    assert 0 < found[0].sum() < 40 and not found[1].any()


def test_unlikelihood_is_of_the_repeats_that_the_model_wrote(monkeypatch):
    """The loss and the batches that `break_loops` trains with, in NumPy."""
    monkeypatch.setattr(unlikelihood, "train", lambda *args, **settings: (args, settings))
    sizes = {"prompt_length": 6, "new_tokens": 18, "continuations": 5, "n": 3}
    prompts = np.flip(STREAM)
    (loss, *passed), settings = break_loops("weights", STREAM, prompts, "held out", steps=7, peak=4e-3, log="log", **sizes, **SETTINGS)
    assert passed[0] == "weights" and passed[1] is STREAM and passed[2] == "held out" and settings["score"] is target_loss
    assert settings.items() >= {**SETTINGS, "steps": 7, "peak": 1e-3, "log": "log"}.items()

    drawn = jax.eval_shape(settings["draw"], random_target(), jnp.asarray(STREAM), jax.random.key(0))
    assert [(x.shape, x.dtype) for x in drawn] == [((8, 16), jnp.int32), ((5, 24), jnp.int32)]

    ids, written = jnp.asarray(STREAM[:24][None].astype(np.int32)), greedy_texts()
    total, metrics = jax.jit(loss)(random_target(), (ids, written))
    likelihood = jax.jit(target_loss)(random_target(), ids)[0]
    p = np.exp(np.take_along_axis(log_softmax(forward(random_target(), written)[:, :-1]), np.asarray(written)[:, 1:, None], -1))[:, 5:, 0]
    again = np.asarray(repeats(written, 3))[:, 6:]
    expected = np.where(again, -np.log1p(-np.minimum(p, 1 - 1e-4)), 0).mean()
    assert 0.1 < again.mean() < 0.9 and expected > 0.01
    np.testing.assert_allclose(metrics["likelihood"], likelihood, rtol=1e-5)
    np.testing.assert_allclose(total - metrics["likelihood"], expected, rtol=1e-3)
    np.testing.assert_allclose(metrics["distinct_8"], 1 - np.asarray(repeats(written, 8))[:, 6:].mean(), rtol=1e-5)


def test_a_corpus_is_greedy_text_after_windows_of_the_stream(learnt):
    texts = np.asarray(corpus(learnt[0], STREAM, sequences=5, prompt_length=4, new_tokens=12, seed=3, batch=4))
    assert texts.shape == (8, 16)  # whole batches
    starts = [int(np.flatnonzero(text[0] == CYCLE)[0]) for text in texts]
    assert len(set(starts)) > 3
    assert np.array_equal(texts, [np.tile(CYCLE, 2)[start : start + 16] for start in starts])


def test_clusters_are_of_equal_size_and_hold_what_is_alike():
    rng = np.random.default_rng(0)
    kinds, size = rng.standard_normal((6, 9)), 5
    kind = rng.permutation(np.repeat(np.arange(6), size))
    rows = kinds[kind] * rng.uniform(0.1, 10, (30, 1))  # only directions count
    found = balanced_clusters(rows, 6, seed=0)
    assert found.dtype == np.int32 and sorted(found) == list(range(30))
    assert all(len(set(kind[cluster])) == 1 for cluster in found.reshape(6, size))
    assert np.array_equal(found, balanced_clusters(rows, 6, seed=0))

    # Nothing alike: still a permutation, and nearer to each other than rows taken at random.
    rows = rng.standard_normal((64, 4))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    found = balanced_clusters(rows, 8, seed=1)
    assert sorted(found) == list(range(64))

    def spread(order):
        return np.mean([np.linalg.norm(rows[c].mean(axis=0)) for c in order.reshape(8, 8)])

    assert spread(found) > spread(np.arange(64)) + 0.2
