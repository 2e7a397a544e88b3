"""Fresh drafters of every kind: what they begin as, and that what is written of them is what `load` reads."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import real_configs
import small
from small import KINDS

from jaxspec import drafters
from jaxspec.drafters.assistant import balanced_clusters
from jaxspec.drafters.base import fitted
from jaxspec.drafters.blocks import draft_vocabulary
from jaxspec.drafters.registry import save_trained
from jaxspec.drafters.training import whole_rows
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.train import kinds
from jaxspec.train.pocket.recipes import RECIPES

pytestmark = pytest.mark.usefixtures("unoptimised")
COUNTED = np.repeat(np.arange(small.VOCAB), np.arange(small.VOCAB) % 5 + 1)


def test_another_word_lists_every_kind():
    with pytest.raises(
        ValueError, match="drafter_kind is 'ngram'; available: 'mtp', 'dflash', 'dflash2', 'dspark', 'eagle3', 'mtp-modules', 'draft-model'"
    ):
        kinds.kind_of("ngram")


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_what_is_loaded(kind, tmp_path):
    weights = small.drafter(kind)
    save_trained(tmp_path, weights, small.CONFIGS[kind], {"num_assistant_tokens": 3})
    found = drafters.load_drafter(tmp_path, small.CONFIG, jnp.float32, progress=False)
    # Written in bfloat16 where the config says so.
    exact = small.CONFIGS[kind].get("dtype") != "bfloat16"
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(weights), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=0 if exact else 4e-3, err_msg=jax.tree_util.keystr(path))
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {"num_assistant_tokens": 3}


def test_transformers_loads_a_draft_model_that_is_written(tmp_path):
    from transformers import AutoModelForCausalLM

    save_trained(tmp_path, small.drafter("draft-model"), small.CONFIGS["draft-model"], {})
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(model).__name__ == "Gemma4ForCausalLM"
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_drafter_begins_with_the_targets_heads(kind):
    model = small.target()
    found = kinds.fresh(KINDS[kind], small.CONFIGS[kind], model, COUNTED, 0)
    table, norm = np.asarray(model.embed_tokens.weight), np.asarray(model.norm.weight)
    if kind == "mtp":
        assert sorted(found.masked_embedding.token_ordering.tolist()) == list(range(small.VOCAB))
    if kind in ("dflash", "dflash2", "dspark", "eagle3"):
        np.testing.assert_array_equal(found.norm.weight, norm)
    if kind in ("dspark", "eagle3"):
        chosen = np.asarray(found.d2t) + np.arange(24)
        assert set(range(small.VOCAB)) - set(chosen) == {0, 5, 10, 15, 20, 25, 30, 31}  # counted once, or twice and last
        np.testing.assert_array_equal(found.lm_head.weight, table[chosen])
    if kind == "mtp-modules":
        for module in found.modules:
            np.testing.assert_array_equal(module.shared_head.output.weight, table)
            np.testing.assert_array_equal(module.shared_head.norm.weight, norm)
    if kind == "dspark":
        assert not np.any(found.markov_head.markov_w2.weight)
    if kind == "dflash2":
        assert not np.any(found.candidate_selector.successor_codebook)
        kernels = [conv.base_kernel for layer in found.layers for conv in (layer.attention_conv, layer.mlp_conv)]
        assert all(np.all(kernel[:, 0] == 1) and not np.any(kernel[:, 1:]) for kernel in kernels)
    again = kinds.fresh(KINDS[kind], small.CONFIGS[kind], model, COUNTED, 0)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(again), strict=True))
    for path, leaf in jax.tree_util.tree_leaves_with_path(found):
        assert np.isfinite(leaf).all() and (leaf.dtype != jnp.bfloat16), jax.tree_util.keystr(path)


def with_more_tokens(model, count):
    """The target after a fine-tune that gave it more tokens, whose rows are those of its first."""
    table = model.embed_tokens.weight
    embed_tokens = dataclasses.replace(model.embed_tokens, weight=jnp.concatenate([table, table[:count]]))
    return dataclasses.replace(model, embed_tokens=embed_tokens, config=dataclasses.replace(model.config, vocab_size=len(table) + count))


@pytest.mark.parametrize("kind", ["dspark", "eagle3"])
def test_a_draft_vocabulary_is_of_tokens_that_the_drafter_knows(kind):
    model, texts = with_more_tokens(small.target(), 5), np.concatenate([COUNTED, np.repeat(small.VOCAB + np.arange(5), 9)])
    found = kinds.fresh(KINDS[kind], small.CONFIGS[kind], model, texts, 0)
    np.testing.assert_array_equal(found.d2t, kinds.fresh(KINDS[kind], small.CONFIGS[kind], small.target(), COUNTED, 0).d2t)


def test_dflash2_scores_tokens_that_it_does_not_know_as_it_drafts_them():
    """As if they followed like its last token, whose row of the codebook serves for them."""
    model, drafter = with_more_tokens(small.target(), 5), small.drafter("dflash2")
    ids = jnp.arange(24, dtype=jnp.int32)[None, :] % len(model.embed_tokens.weight)

    @jax.jit
    def guessed(model, drafter, ids):
        out, _ = model(whole_rows(ids), None, taps=drafter.taps)
        return [(guess.logits, guess.shortlist.logits) for guess in drafter.guesses(model, out, ids, jnp.asarray([[3, 9]]), 2)]

    for logits, unary in guessed(model, drafter, ids):
        following = np.asarray(logits - unary)
        assert following.shape[-1] == small.VOCAB + 5 and np.any(following)
        np.testing.assert_allclose(following[..., small.VOCAB :], np.repeat(following[..., small.VOCAB - 1, None], 5, axis=-1), atol=1e-5)


def test_a_config_of_another_target_is_refused():
    config = {**small.CONFIGS["eagle3"], "vocab_size": 64}
    with pytest.raises(ValueError, match="the drafter has vocab_size 64, this target has 32"):
        kinds.fresh(KINDS["eagle3"], config, small.target(), np.arange(32), 0)


@pytest.mark.parametrize("kind", KINDS)
def test_default_configs_fit_every_release(kind):
    """A drafter of this kind for each published target, as it is and as transformers saves it again, and for tiny ones: as shapes."""
    released = real_configs.TARGETS.values()
    raws = [*released, *map(real_configs.saved_again, released), small.TARGET, small.TARGET["text_config"]]
    for raw in raws:
        target = Gemma4Config.from_hf(raw)
        config = KINDS[kind].default_config(raw, target)
        made = fitted(KINDS[kind].from_checkpoint(None, config, target, jnp.float32), target)
        assert isinstance(made, KINDS[kind].made)
        assert drafters.REGISTRY.keys() & set(drafters.names_of(config)), config


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind not in ("dflash2", "dspark", "mtp-modules")]
)  # which transformers does not know
def test_a_drafters_config_that_was_saved_again_says_what_it_said(kind):
    for raw in real_configs.TARGETS.values():
        target = Gemma4Config.from_hf(raw)
        config = KINDS[kind].default_config(raw, target)
        both = config, real_configs.saved_again(config)
        once, again = (KINDS[kind].from_checkpoint(None, found, target, jnp.float32) for found in both)
        assert jax.tree.structure(once) == jax.tree.structure(again) and jax.tree.leaves(once) == jax.tree.leaves(again)


def test_pocket_configs_fit_the_pocket_target():
    from jaxspec import checkpoint

    target = Gemma4Config.from_hf(checkpoint.read_config(checkpoint.resolve("pocket")))
    for recipe in RECIPES.values():
        kind = KINDS[recipe.kind]
        made = fitted(kind.from_checkpoint(None, recipe.config, target, jnp.float32), target)
        assert 2 * sum(leaf.size for leaf in jax.tree.leaves(made)) < 16 * 2**20 and recipe.config["dtype"] == "bfloat16"
        dataclasses.replace(kind.objective, **recipe.objective)


def test_a_draft_vocabulary_is_the_most_frequent_tokens():
    tokens = np.repeat([7, 3, 5, 1, 9], [4, 2, 9, 2, 1])
    assert draft_vocabulary(tokens, 3, 12).tolist() == [1, 5, 7]  # of 1 and 3, which are as frequent, the lower
    assert draft_vocabulary(tokens, 6, 12).tolist() == [0, 1, 3, 5, 7, 9]


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
