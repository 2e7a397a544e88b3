"""Training against a model's own repetition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small

from jaxspec.drafters.training import whole_rows
from jaxspec.learning.losses import Batch, target_loss
from jaxspec.train.data import windows
from jaxspec.train.generate import generate
from jaxspec.train.loop import Run
from jaxspec.train.pocket import unlikelihood
from jaxspec.train.pocket.unlikelihood import break_loops, repeats

pytestmark = pytest.mark.usefixtures("unoptimised")


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


def test_unlikelihood_keeps_its_digits_and_its_gradient_near_certainty():
    """Where p is all but 1, 1 - p is 0 in float32, and its logarithm would be infinite or cut off, without a derivative."""
    logits = np.asarray([[0.0, 1.0, -2.0], [0.0, 30.0, -1.0], [60.0, 0.0, 3.0]], np.float32)
    tokens = np.asarray([1, 1, 0], np.int32)
    exact = logits.astype(np.float64)
    others = [np.log(sum(np.exp(row[i]) for i in range(3) if i != token)) for row, token in zip(exact, tokens, strict=True)]
    expected = np.log(np.exp(exact).sum(-1)) - others
    np.testing.assert_allclose(unlikelihood.unlikelihood(jnp.asarray(logits), jnp.asarray(tokens)), expected, rtol=1e-6)
    slopes = jax.grad(lambda x: jnp.sum(unlikelihood.unlikelihood(x, jnp.asarray(tokens))))(jnp.asarray(logits))
    # The derivative with respect to the token's own logit is p.
    p = np.exp(exact[np.arange(3), tokens]) / np.exp(exact).sum(-1)
    np.testing.assert_allclose(np.asarray(slopes)[np.arange(3), tokens], p, rtol=1e-6)


@pytest.mark.slow  # only the bundled models are trained so; its parts are looked at above
def test_unlikelihood_is_of_the_repeats_that_the_model_wrote(monkeypatch):
    """The loss and the batches that `break_loops` trains with, in NumPy."""
    monkeypatch.setattr(unlikelihood, "fit", lambda *args, **settings: (args, settings))
    model, run = small.target(4), Run(steps=7, batch=4, length=16)
    stream = np.random.default_rng(0).integers(0, small.VOCAB, 320)
    texts, prompts = windows(stream, 16, 4, 0), windows(stream, 5, 3, 1)
    (loss, *passed), settings = break_loops(model, texts, prompts, run, out="folder", new_tokens=18, n=3)
    assert passed[0] is model and passed[3] is run and settings["out"] == "folder"
    ids, drawn = passed[2](2)
    assert ids.ids.shape == (4, 16) and drawn.ids.shape == (3, 5)

    total, metrics = jax.jit(loss)(model, (), (ids, drawn), jax.random.key(0))
    written = np.asarray(jax.jit(generate, static_argnums=2)(model, jnp.asarray(drawn.ids), 18))
    likelihood = jax.jit(target_loss)(model, ids)[0]
    logits = jax.jit(lambda ids: model.unembed(model(whole_rows(ids), None)[0].hidden))(written)[:, 4:-1]
    p = np.exp(np.take_along_axis(small.log_softmax(logits), written[:, 5:, None], -1))[..., 0]
    again = np.asarray(repeats(jnp.asarray(written), 3))[:, 5:]
    expected = np.where(again, -np.log1p(-p), 0).mean()
    assert 0.1 < again.mean() < 0.9 and expected > 0.01
    np.testing.assert_allclose(metrics["likelihood"], likelihood, rtol=1e-5)
    np.testing.assert_allclose(total - metrics["likelihood"], expected, rtol=1e-3)
    np.testing.assert_allclose(metrics["distinct_8"], 1 - np.asarray(repeats(jnp.asarray(written), 8))[:, 5:].mean(), rtol=1e-5)
    # What was written is no function of the weights to be differentiated, and the rest is.
    gradient = jax.jit(jax.grad(lambda m: loss(m, (), (ids, drawn), jax.random.key(0))[0]))(model)
    assert np.isfinite(gradient.embed_tokens.weight).all() and isinstance(ids, Batch)
