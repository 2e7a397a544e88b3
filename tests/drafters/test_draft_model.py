"""A draft model against transformers, and in the loop: a second target with a cache of its own."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import real_configs
import rounds
import tiny
from definitions import relative_error

import jaxspec
from jaxspec import checkpoint, decode, drafters
from jaxspec.drafters import draft_model
from jaxspec.drafters.base import Target
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.rows import Rows
from jaxspec.sampling import choice as sampling

pytestmark = pytest.mark.usefixtures("unoptimised")
LIMIT = 1e-4
# Of the family what is least like the target of `rounds`: per-layer inputs, shared KV, other head sizes and another window.
TEXT = {
    **oracle.text_config("E2B", vocab_size=rounds.VOCAB, vocab_size_per_layer_input=rounds.VOCAB, sliding_window=6),
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
}


@functools.cache
def models():
    """A random model in transformers, and ours from what transformers saved."""
    theirs = oracle.build(TEXT, seed=5)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = drafters.load_drafter(Path(folder), rounds.target().config, jnp.float32, progress=False)
    assert isinstance(ours, DraftModel)
    return theirs, dataclasses.replace(ours, page_size=rounds.PAGE)


@functools.cache
def nearby():
    """A target that the draft model of `models` guesses now and then."""
    rng = np.random.default_rng(8)
    return jax.tree.map(lambda x: jnp.asarray(x + (0.05 * rng.standard_normal(x.shape)).astype(x.dtype)), jax.device_get(models()[1].model))


@jax.jit
def choose(logits, at, row):
    seed, temperature = jnp.stack([row, jnp.zeros_like(row)]).astype(jnp.uint32), jnp.asarray(rounds.TEMPERATURE)[row]
    return sampling.choose(logits[None, None], at[None, None], sampling.Sampling(seed[None], temperature[None]))[0, 0]


def reference(texts, count):
    """Of each text the logits and choices of its next `count` tokens, by transformers from whole texts. [count][5]"""
    texts, out = [list(text) for text in texts], []
    for _ in range(count):
        ids = np.zeros((len(texts), max(map(len, texts))), np.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
        logits, _ = oracle.run(models()[0], ids)
        ends = [len(text) for text in texts]
        logits = [logits[row, end - 1] for row, end in enumerate(ends)]
        tokens = [
            int(choose(row_logits, np.int32(end), np.int32(row))) for row, (row_logits, end) in enumerate(zip(logits, ends, strict=True))
        ]
        out.append((logits, tokens))
        texts = [[*text, token] for text, token in zip(texts, tokens, strict=True)]
    return out


def check(state):
    """The next guesses are what the reference says, from its logits."""
    found = jax.device_get(rounds.drafts(nearby(), models()[1], state, k=3))
    texts = [text[:n].tolist() for text, n in zip(rounds.tokens(state), rounds.lengths(state), strict=True)]
    for k, (logits, tokens) in enumerate(reference(texts, 3)):
        for row in range(len(texts)):
            assert relative_error(found.logits[row, k], logits[row]) <= LIMIT, (row, k, len(texts[row]))
        assert found.tokens[:-1, k].tolist() == tokens


def test_drafts_of_whole_rounds():
    """After prompts in chunks, and after every round: of K = 3, of which 0 to 3 guesses are accepted, of K = 1 and of K = 0."""
    drafter = models()[1]
    state = rounds.started(drafter, nearby())
    check(state)
    accepted = []
    for k in (3, 3, 3, 0, 1, 3):
        known = rounds.lengths(state)
        state = rounds.spec_step(nearby(), drafter, state, rounds.SLOT_IDS, round=decode.Round(k))
        accepted += (rounds.lengths(state) - known - 1).tolist()
        check(state)
    assert set(accepted) == {0, 1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("k", [7, 1])
def test_a_target_that_drafts_for_itself_is_always_right(k):
    """Greedy and sampled, past the window and to the very end of the slots, where guesses find no room."""
    found, taken = rounds.finish(DraftModel(rounds.target(), page_size=rounds.PAGE), k)
    np.testing.assert_array_equal(found, rounds.texts())
    np.testing.assert_array_equal(taken, -(-(rounds.MAX_LEN - rounds.LENGTHS - 1) // (k + 1)))


def test_rows_of_each_pass(monkeypatch):
    """Of a block that was drafted at most two rows are left to compute; of a prompt all are, and the token after it."""
    passes = []
    monkeypatch.setattr(draft_model, "Rows", lambda ids, *rest: passes.append(ids.shape[1]) or Rows(ids, *rest))
    drafter, slots = models()[1], jax.ShapeDtypeStruct((6,), jnp.int32)
    state = jax.eval_shape(lambda: decode.init_state(rounds.target(), drafter, slots=7, max_len=32, num_draft_tokens=3))
    for call, rows in (
        (functools.partial(decode.prefill, chunk=9), [10]),
        (functools.partial(decode.spec_step, round=decode.Round(3)), [1, 1, 2]),
        (functools.partial(decode.spec_step, round=decode.Round(1)), [2]),
        (functools.partial(decode.spec_step, round=decode.Round(0)), [2]),
    ):
        passes.clear()
        jax.eval_shape(call, rounds.target(), drafter, state, slots)
        assert passes == rows


@pytest.mark.slow  # test_mtp_modules.py has the same of a cache of that kind
def test_slots_that_do_not_run_stay_as_they_are():
    """Two of six ids in the call run, the others are nobody's; the last slot is not named."""
    drafter = DraftModel(rounds.target(), page_size=rounds.PAGE)
    before = rounds.started(drafter)
    slots = np.asarray([2, 5, *[rounds.SLOTS + 2] * 4], np.int32)
    after = rounds.decode_loop(rounds.target(), drafter, before, slots, 1, round=decode.Round(7))
    others = np.asarray([0, 1, 3, 4, 6])
    kept, found = before.drafter, after.drafter
    np.testing.assert_array_equal(kept.hidden[others], found.hidden[others])
    for spec, old, new in zip(rounds.target().config.layers, kept.cache.layers, found.cache.layers, strict=True):
        pages = np.asarray(kept.cache.tables[spec.kind])[others]
        np.testing.assert_array_equal(old.k[pages], new.k[pages])
        np.testing.assert_array_equal(old.v[pages], new.v[pages])
        assert not np.array_equal(old.k, new.k)


def test_guesses_past_the_end_do_not_reach_the_beginning():
    """Three guesses find room in the last page, the others none."""
    drafter = DraftModel(rounds.target(), page_size=4)
    state = drafter.init(1, 16, 7)
    one = jnp.ones(1, jnp.int32)
    view = Target(rounds.target(), state.cache, 0 * one, one, 12 * one)  # of which only the lengths count
    greedy = sampling.Sampling(jnp.zeros((1, 2), jnp.uint32), jnp.zeros(1, jnp.float32))
    _, after = rounds.compiled(DraftModel.draft, static_argnums=4)(drafter, state, view, greedy, 7)
    written = np.any(after.cache.layers[-1].v != 0, axis=(2, 3))
    np.testing.assert_array_equal(written, [[False] * 4] * 3 + [[False, True, True, True]])


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
def test_saving_and_loading(tmp_path, prefix):
    """Whatever layout a target's checkpoint has, it is a draft model's too, and its towers are left alone."""
    config = {"model_type": "gemma4", "text_config": TEXT} if "language" in prefix else TEXT
    weights = rounds.random_weights(gemma4.abstract(Gemma4Config.from_hf(config), jnp.float32), 3)
    checkpoint.save_weights(tmp_path, weights, config, prefix=prefix)
    loaded = drafters.load_drafter(tmp_path, rounds.target().config, jnp.float32, progress=False)
    assert isinstance(loaded, DraftModel)
    jax.tree.map(np.testing.assert_array_equal, loaded.model, weights)


def test_another_vocabulary_is_refused(tmp_path):
    target = tiny.tiny_target(tmp_path / "target")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({**TEXT, "vocab_size": 4160, "vocab_size_per_layer_input": 4160}))
    with pytest.raises(
        ValueError, match="the drafter .*other cannot be used with this target: the draft model has vocab_size 4160, the target 4096"
    ):
        jaxspec.load(target, tmp_path / "other", progress=False)
    (tmp_path / "other" / "config.json").write_text(json.dumps({**TEXT, "attention_bias": True}))
    with pytest.raises(ValueError, match="the drafter .*other cannot be used with this target: config.json has attention_bias=True"):
        jaxspec.load(target, tmp_path / "other", progress=False)


def test_the_released_e2b_drafts_for_31b():
    """By shape alone: a round leaves the state as it found it, with a cache of the draft model's own layers."""
    target, small = (Gemma4Config.from_hf(real_configs.TARGETS[name]) for name in ("31B", "E2B"))
    weights = gemma4.abstract(target), draft_model.abstract(draft_model.bind(small, target))
    state = jax.eval_shape(functools.partial(decode.init_state, slots=4, max_len=8192, num_draft_tokens=4), *weights)
    assert sum(layer is not None for layer in state.drafter.cache.layers) == len(small.kv_owners) == 15
    assert state.drafter.cache.layers[0].k.shape == (4 * -(-(512 + 4) // 64), 64, 1, 256)
    assert state.drafter.cache.layers[4].v.shape == (4 * 128, 64, 1, 512)
    slots = jax.ShapeDtypeStruct((4,), jnp.int32)
    after = jax.eval_shape(functools.partial(decode.spec_step, round=decode.Round(4)), *weights, state, slots)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
