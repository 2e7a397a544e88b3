"""Penalties, biases, allowed ids, bad words and min_tokens: at every position of a verified block as token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling import logit_edits
from jaxspec.sampling.choice import Sampling, choose
from jaxspec.sampling.logit_edits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_IDS, NOBODY

pytestmark = pytest.mark.usefixtures("unoptimised")

BATCH, LENGTH, K, VOCAB = 6, 30, 4, 12  # so few ids that all of them come again
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32)
PROMPT = np.array([1, 5, 9, 12, 20, 3], np.int32)
KNOWN = np.array([1, 6, 20, 12, 30, 11], np.int32)  # two have no output yet, one fills its row
DRAFTS = RNG.integers(0, VOCAB, (BATCH, K)).astype(np.int32)
DRAFTS[1] = [7, 7, 3, 7]  # a draft that comes again in the block
DRAFTS[2, 1:] = -1  # no drafts any more
LOGITS = RNG.normal(0, 3, (BATCH, K + 1, VOCAB)).astype(np.float32)
STOPS = np.array([[2, 5, -1]] * BATCH, np.int32)

# What each sequence asks for, by itself and all at once.
ASKED = {
    "repetition": {"repetition": 1.7},
    "repetition below one": {"repetition": 0.6},
    "frequency": {"frequency": 0.9},
    "presence": {"presence": -1.3},
    "bias": {"bias": {3: 5.0, 7: -100.0, 0: 0.5}},
    "allowed": {"allowed": [1, 4, 7, 11]},
    "min_tokens": {"min_tokens": 3},
    "bad_words": {"bad_words": [[4], [7, 7], [7, 3, 7], [9] * 16]},
}
ASKED["all"] = {k: v for asked in ASKED.values() for k, v in asked.items()} | {"repetition": 1.2}


def edits_of(asked):
    """The same for every sequence."""
    arrays = {k: np.array(v) for k, v in dataclasses.asdict(jax.jit(logit_edits.defaults, static_argnums=0)(BATCH)).items()}
    for name in ("repetition", "frequency", "presence", "min_tokens"):
        arrays[name][:] = asked.get(name, arrays[name][0])
    for i, (token, bias) in enumerate(asked.get("bias", {}).items()):
        arrays["bias_ids"][:, i], arrays["bias"][:, i] = token, bias
    allowed = asked.get("allowed", [])
    arrays["allowed"][:, : len(allowed)] = allowed
    for i, word in enumerate(asked.get("bad_words", [])):
        arrays["bad_words"][:, i, -len(word) :] = word
    return logit_edits.Edits(**arrays)


def defined(logits, prompt, output, asked):
    """One row by the definitions. prompt, output: lists of ids."""
    out = logits.astype(np.float64).copy()
    if "allowed" in asked:
        out[[i for i in range(VOCAB) if i not in asked["allowed"]]] = -np.inf
    for token, bias in asked.get("bias", {}).items():
        out[token] += bias
    if len(output) < asked.get("min_tokens", 0):
        out[[2, 5]] = -np.inf
    for token in {*prompt, *output}:
        out[token] *= 1 / asked.get("repetition", 1) if out[token] > 0 else asked.get("repetition", 1)
    for token in set(output):
        out[token] -= asked.get("frequency", 0) * output.count(token) + asked.get("presence", 0)
    for word in asked.get("bad_words", []):
        if len(word) == 1 or output[-len(word) + 1 :] == word[:-1]:
            out[word[-1]] = -np.inf
    return out


@jax.jit
def verified(asked, logits, drafts, tokens=TOKENS, prompt=PROMPT, known=KNOWN):
    return logit_edits.tables(asked, tokens, prompt, known, STOPS, VOCAB).verified(logits, drafts)


@pytest.mark.parametrize("name", ASKED)
def test_every_position_of_a_block_counts_the_drafts_before_it(name):
    found = np.asarray(verified(edits_of(ASKED[name]), LOGITS, DRAFTS))
    changed = 0
    for b, (prompt, known) in enumerate(zip(PROMPT, KNOWN, strict=True)):
        for i in range(K + 1):
            if (DRAFTS[b, :i] < 0).any():
                continue  # what follows no draft is never used
            output = [*TOKENS[b, prompt:known].tolist(), *DRAFTS[b, :i].tolist()]
            expected = defined(LOGITS[b, i], TOKENS[b, :prompt].tolist(), output, ASKED[name])
            np.testing.assert_allclose(found[b, i], expected, rtol=1e-5, atol=1e-5, err_msg=f"sequence {b}, row {i}")
            changed += not np.array_equal(found[b, i], LOGITS[b, i])
    assert changed > 2


def test_no_edits_change_nothing():
    assert np.array_equal(verified(edits_of({}), LOGITS, DRAFTS), LOGITS)


def test_without_drafts_there_is_one_row():
    found = verified(edits_of(ASKED["all"]), LOGITS[:, :1], DRAFTS[:, :0])
    assert np.array_equal(found, verified(edits_of(ASKED["all"]), LOGITS, DRAFTS)[:, :1])


def test_a_bad_word_of_sixteen_tokens_needs_all_of_them():
    for produced in (14, 15, 16):
        tokens = np.full((BATCH, LENGTH), 9, np.int32)
        prompt = np.full(BATCH, 4, np.int32)
        found = np.asarray(verified(edits_of(ASKED["bad_words"]), LOGITS, 0 * DRAFTS + 9, tokens, prompt, prompt + np.int32(produced)))
        assert ((found[:, :, 9] == -np.inf) == (produced + np.arange(K + 1) >= 15)).all()


def test_penalties_are_those_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    found = np.asarray(verified(edits_of({"repetition": 1.7, "min_tokens": 3}), LOGITS, DRAFTS))
    for b, (prompt, known) in enumerate(zip(PROMPT, KNOWN, strict=True)):
        for i in range(1 if b == 2 else K + 1):
            ids = torch.tensor([[*TOKENS[b, :known], *DRAFTS[b, :i]]])
            expected = hf.RepetitionPenaltyLogitsProcessor(1.7)(ids, torch.tensor(LOGITS[b, i][None]))
            expected = hf.MinNewTokensLengthLogitsProcessor(int(prompt), 3, [2, 5], device="cpu")(ids, expected)
            np.testing.assert_allclose(found[b, i], expected[0].numpy(), rtol=1e-6)
    words = ASKED["bad_words"]["bad_words"][:3]
    found = np.asarray(verified(edits_of({"bad_words": words}), LOGITS, DRAFTS))
    for b in (0, 1, 3, 5):
        for i in range(K + 1):
            ids = torch.tensor([[*TOKENS[b, PROMPT[b] : KNOWN[b]], *DRAFTS[b, :i]]], dtype=torch.long)
            expected = hf.NoBadWordsLogitsProcessor(words, eos_token_id=[2])(ids, torch.tensor(LOGITS[b, i][None]))
            assert np.array_equal(found[b, i], expected[0].numpy())


def test_drafters_choose_with_the_biases_and_penalties_of_their_candidates():
    asked = edits_of(ASKED["all"])
    tables = jax.jit(logit_edits.tables, static_argnums=5)(asked, TOKENS, PROMPT, KNOWN, STOPS, VOCAB)
    sampling = Sampling(jnp.zeros((BATCH, 2), jnp.uint32), jnp.zeros(BATCH, jnp.float32), tables=tables)
    row, position = LOGITS[:, :1], np.zeros((BATCH, 1), np.int32)
    applied = jax.jit(logit_edits.Tables.applied)(tables, row, None, position)
    assert np.array_equal(choose(row, position, sampling), np.argmax(applied, -1)) and not np.array_equal(applied, row)
    ids = np.broadcast_to(np.array([7, 1, 11, 0], np.int32), (BATCH, 1, 4))
    few = np.take_along_axis(row, ids, -1)
    assert np.array_equal(tables.applied(few, ids, position), np.take_along_axis(np.asarray(applied), ids, -1))
    assert set(np.asarray(choose(few, position, sampling, jnp.asarray(ids))).ravel()) <= {7, 1, 11}


def test_drafters_choose_no_stop_id_before_min_tokens():
    """As the target, which chooses the token at a position by the row before it."""
    asked, position = edits_of({"min_tokens": 5}), KNOWN[:, None] + np.arange(K + 1, dtype=np.int32)
    tables = jax.jit(logit_edits.tables, static_argnums=5)(asked, TOKENS, PROMPT, KNOWN, STOPS, VOCAB)
    wanted = np.asarray(verified(asked, LOGITS, DRAFTS)) == -np.inf
    assert wanted.any()
    found = np.asarray(jax.jit(logit_edits.Tables.applied)(tables, LOGITS, None, position))
    assert np.array_equal(found == -np.inf, wanted)
    ids = np.broadcast_to(np.array([7, 5, 2, 0], np.int32), (BATCH, K + 1, 4))
    few = np.take_along_axis(LOGITS, ids, -1)
    assert np.array_equal(tables.applied(few, ids, position) == -np.inf, np.take_along_axis(wanted, ids, -1))
    sampling = Sampling(jnp.zeros((BATCH, 2), jnp.uint32), jnp.zeros(BATCH, jnp.float32), tables=tables)
    chosen = np.asarray(choose(LOGITS, position, sampling))
    assert not np.take_along_axis(wanted, chosen[..., None], -1).any()


def test_lists_have_room_for_what_a_request_may_ask():
    asked = logit_edits.defaults(2)
    assert asked.bias_ids.shape == asked.allowed.shape == (2, MAX_IDS) and (asked.allowed == NOBODY).all()
    assert asked.bad_words.shape == (2, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS)
