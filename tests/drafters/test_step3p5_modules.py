"""Step-3.5's MTP layers: golden vectors, two rounds through their caches, and texts that are those of the target alone."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounds
import step3p5_files as files

from jaxspec import checkpoint, decode, drafters
from jaxspec.drafters.base import Drafts, NoDraft, Observed, Target
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.mtp_modules import MTPModules
from jaxspec.drafters.ngram import NGram
from jaxspec.model.rows import Keys
from jaxspec.sampling.choice import Sampling
from jaxspec.targets import abstract_target, load_target, read_target

pytestmark = pytest.mark.usefixtures("unoptimised")
LIMIT, SLOTS = 1e-4, 3
CASE = "step3p5_mtp"


def loaded(folder):
    """(target, the drafter in the same checkpoint), float32."""
    config, _ = read_target(folder)
    target = load_target(folder, abstract_target(config, jnp.float32), progress=False)
    return target, drafters.load_drafter(folder, config, jnp.float32, progress=False)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The golden modules beside a random target with the golden embeddings."""
    meta, weights, tensors = files.golden(CASE)
    config = meta["config"]
    whole = {key: x for key, x in files.random_tensors(config).items() if not files.is_module(key, config)} | weights
    whole["model.embed_tokens.weight"] = tensors["target.embed_tokens.weight"]
    return loaded(files.write(tmp_path_factory.mktemp("golden"), config, whole))


def test_golden_modules(golden):
    """Every module over a whole sequence: its block's output, and the logits of its last row."""
    target, drafter = golden
    _, _, tensors = files.golden(CASE)
    zero = jnp.zeros(1, jnp.int32)

    @jax.jit
    def run(module, embedded, hidden, positions):
        return module(embedded, hidden, positions, Keys(None, None, zero, None, zero + positions.shape[1], None))[0]

    for name in ("round1", "round2"):
        hidden = target.feature(jnp.asarray(tensors[f"input.{name}.target_hidden"]))
        positions = jnp.asarray(tensors[f"input.{name}.position_ids"], jnp.int32)
        for m, module in enumerate(drafter.modules):
            ids = jnp.asarray(tensors[f"input.{name}.module{m}.token_ids"], jnp.int32)
            hidden = run(module, target.embed(ids), hidden, positions)
            np.testing.assert_allclose(hidden, tensors[f"expected.{name}.module{m}.hidden"], rtol=LIMIT, atol=LIMIT)
            logits = drafter.logits(m, hidden[:, -1:])
            np.testing.assert_allclose(logits, tensors[f"expected.{name}.module{m}.logits"], rtol=LIMIT, atol=LIMIT)


@functools.partial(jax.jit, static_argnames="count")
def drafted(drafter, target, state, anchor, length, count) -> tuple[Drafts, object]:
    slots = jnp.asarray([1, SLOTS], jnp.int32)
    sampling = Sampling(jnp.zeros((2, 2), jnp.uint32), jnp.zeros(2, jnp.float32))
    view = Target(target, target.init_cache(slots=SLOTS, max_len=8, num_draft_tokens=1, dtype=jnp.float32), slots, anchor, length)
    return drafter.draft(state, view, sampling, count)


@jax.jit
def observed(drafter, target, state, ids, hidden, start, committed, anchor):
    """A block of rows [T] of slot 1, whose un-normed hidden states are given."""
    block = jnp.stack([ids, jnp.zeros_like(ids)])
    positions = start + jnp.broadcast_to(jnp.arange(block.shape[1], dtype=jnp.int32)[None], block.shape)
    taps = (jnp.concatenate([hidden, jnp.zeros_like(hidden)]),)
    slots, counts = jnp.asarray([1, SLOTS], jnp.int32), jnp.stack([committed, jnp.int32(0)])
    rows = Observed(target, slots, block, positions, taps[0][:, -1], taps, counts, jnp.stack([anchor, jnp.int32(0)]))
    return drafter.observe(state, rows)


def test_golden_rounds(golden):
    """A prompt in two chunks, a round of which one draft is accepted and the next replaced, and what is drafted before and after."""
    target, drafter = golden
    _, _, tensors = files.golden(CASE)
    first, second = (tensors[f"input.round{n}.token_ids"][0].astype(np.int32) for n in (1, 2))
    drafter = dataclasses.replace(drafter, page_size=4)
    count = len(drafter.modules)
    state = drafter.init(SLOTS, 64, count)
    hidden = jnp.asarray(tensors["input.round1.target_hidden"])
    rows, cut = hidden.shape[1], 4
    for start, end in ((0, cut), (cut, rows)):
        state = observed(drafter, target, state, first[start:end], hidden[:, start:end], start, np.int32(end - start), first[end])
    found, state = drafted(drafter, target, state, first[[rows, 0]], np.asarray([rows, 0], np.int32), count)
    np.testing.assert_array_equal(found.tokens[:1], tensors["expected.round1.draft_ids"])
    wanted = np.concatenate([tensors[f"expected.round1.module{m}.logits"] for m in range(count)], axis=1)
    np.testing.assert_allclose(found.logits[:1], wanted, rtol=LIMIT, atol=LIMIT)

    # The block of the round: the newest token and the drafts. Its hidden states past the committed rows belong to rejected tokens.
    committed = len(second) - len(first)
    ids = np.concatenate([first[rows:], found.tokens[0]]).astype(np.int32)
    assert list(ids[:committed]) == list(second[rows : rows + committed]) and ids[committed] != second[rows + committed]
    new = jnp.asarray(tensors["input.round2.target_hidden"])[:, rows:]
    new = jnp.pad(new, ((0, 0), (0, len(ids) - committed), (0, 0)), constant_values=3.0)
    state = observed(drafter, target, state, ids, new, rows, np.int32(committed), second[-1])
    found, _ = drafted(drafter, target, state, second[[-1, 0]], np.asarray([len(second) - 1, 0], np.int32), count)
    np.testing.assert_array_equal(found.tokens[:1], tensors["expected.round2.draft_ids"])
    wanted = np.concatenate([tensors[f"expected.round2.module{m}.logits"] for m in range(count)], axis=1)
    np.testing.assert_allclose(found.logits[:1], wanted, rtol=LIMIT, atol=LIMIT)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A tiny target and its modules, from one checkpoint, and the folder."""
    config = files.tiny_config()
    folder = files.write(tmp_path_factory.mktemp("step") / "target", config, files.random_tensors(config))
    return *loaded(folder), folder


@functools.cache
def small():
    """A draft model of the family: dense, with other sizes."""
    config = files.tiny_config(hidden_size=16, num_hidden_layers=2, moe_layers_enum="", num_nextn_predict_layers=0)
    kind = drafters.KINDS["draft-model"]
    return rounds.random_weights(kind.from_checkpoint(None, config, None, jnp.float32), 4)


@pytest.fixture(scope="module")
def texts(pair):
    target = pair[0]
    state = rounds.ended(target, NoDraft(), rounds.started(NoDraft(), target), 0)
    return rounds.tokens(state)


def paged(drafter):
    return dataclasses.replace(drafter, page_size=rounds.PAGE)


@pytest.mark.slow  # below are the guesses of the loop, and test_every_kind.py has texts with modules
@pytest.mark.parametrize("ks", [(1,), (2,), (3,), (7,), (5, 0), (3, 0, 5)], ids=str)
def test_texts_are_those_of_the_target_alone(pair, texts, ks):
    """For every K, below and above the number of modules, and one that changes; of sequences that begin and end apart."""
    target, drafter, _ = pair
    state = rounds.ended(target, paged(drafter), rounds.started(paged(drafter), target), *ks)
    np.testing.assert_array_equal(rounds.tokens(state), texts)


@pytest.mark.slow  # test_every_kind.py has their texts
@pytest.mark.parametrize("made", [NGram, lambda: paged(small())], ids=["ngram", "draft model"])
def test_other_drafters(pair, texts, made):
    drafter = made()
    state = rounds.ended(pair[0], drafter, rounds.started(drafter, pair[0]), 3)
    np.testing.assert_array_equal(rounds.tokens(state), texts)


def test_guesses_of_the_loop_are_those_of_whole_texts(pair):
    """What training guesses from whole texts, without pages and rounds, the loop drafts."""
    target, drafter, _ = pair
    drafter, k = paged(drafter), 5
    state = rounds.started(drafter, target)
    drafts = rounds.drafts(target, drafter, state, k=k)
    ids, lengths = rounds.tokens(state), rounds.lengths(state)

    @jax.jit
    def guesses(drafter, target, ids, at):
        from jaxspec.drafters.training import whole_rows

        out, _ = target(whole_rows(ids), None, taps=drafter.taps)
        return [guess.logits[:, 0] for guess in drafter.guesses(target, out, ids, at, k)]

    for b, length in enumerate(lengths):
        # The text is the tokens that are there, the anchor last, then the guesses.
        text = np.zeros(rounds.MAX_LEN + k, np.int32)
        text[:length] = ids[b, :length]
        text[length : length + k] = drafts.tokens[b]
        found = guesses(drafter, target, jnp.asarray(text[None]), jnp.asarray([[length - 2]], jnp.int32))
        for step, logits in enumerate(found):
            np.testing.assert_allclose(logits[0], drafts.logits[b, step], rtol=LIMIT, atol=LIMIT)


def test_modules_alone(tmp_path, pair):
    """A folder of modules with the target's config.json, one with a config of their own, and what is saved."""
    target, drafter, folder = pair
    config = checkpoint.read_config(folder)
    whole = {key: x for key, x in files.random_tensors(config).items() if files.is_module(key, config)}
    alone = files.write(tmp_path / "alone", config, whole)
    named = files.write(tmp_path / "named", {**config, "model_type": "step3p5_mtp", "architectures": ["Step3p5MTP"]}, whole)
    plain = {key.replace(".transformer.", "."): x for key, x in whole.items()}
    other = files.write(tmp_path / "plain", config, plain)
    for path in (alone, named, other):
        again = drafters.load_drafter(path, target.config, jnp.float32, progress=False)
        assert isinstance(again, MTPModules)
        jax.tree.map(np.testing.assert_array_equal, again.model, drafter.model)
    drafters.save_drafter(tmp_path / "saved", drafter, config)
    stored = checkpoint.read_headers(tmp_path / "saved")
    assert {key: tensor.shape for key, tensor in stored.items()} == {key: x.shape for key, x in whole.items()}
    for key, tensor in stored.items():
        np.testing.assert_allclose(tensor.read(), whole[key], rtol=1e-6, atol=1e-6)


def test_which_kind_a_folder_is(pair):
    """A config with MTP layers is theirs; without any it is a draft model's."""
    config = checkpoint.read_config(pair[2])
    assert drafters.registry.kind_of(config).made is MTPModules
    assert drafters.registry.kind_of({**config, "num_nextn_predict_layers": 0}).made is DraftModel
    assert not drafters.is_drafter(config) and drafters.is_drafter({**config, "model_type": "step3p5_mtp"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "the modules were made for a target of hidden_size 48, this target has 32"),
        ({"num_hidden_layers": 4, "moe_layers_enum": "3"}, "for a target of num_hidden_layers 4, this target has 5"),
        ({"model_type": "gemma4_mtp_modules"}, "text_config must be the target's"),
        ({"model_type": "step3p5_mtp", "num_nextn_predict_layers": 0}, "num_nextn_predict_layers is 0; expected at least 1"),
    ],
)
def test_modules_that_do_not_fit_are_refused(tmp_path, pair, changes, message):
    config = {**checkpoint.read_config(pair[2]), **changes}
    with pytest.raises(ValueError, match=message):
        drafters.load_drafter(files.write(tmp_path, config, {}), pair[0].config, jnp.float32, progress=False)


def test_modules_of_another_family_are_refused(pair):
    import kinds

    with pytest.raises(ValueError, match="model_type 'gemma4_mtp_modules'; modules for this target have 'step3p5_mtp'"):
        kinds.modules(2).bind(pair[0].config)


def test_a_round_compiles_once_for_all_texts(pair):
    """The state has the same shapes before and after a round, so that the loop can run it."""
    target, drafter, _ = pair
    state = jax.eval_shape(lambda: decode.init_state(target, drafter, slots=4, max_len=32, num_draft_tokens=3))
    slots = jax.ShapeDtypeStruct((4,), jnp.int32)
    after = jax.eval_shape(functools.partial(decode.spec_step, round=decode.Round(3)), target, drafter, state, slots)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
