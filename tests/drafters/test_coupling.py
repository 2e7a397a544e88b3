"""How often the first draft of every kind of drafter is kept, against what shared noise makes of the two distributions.

A target and tiny random drafters with flat distributions. One round of thousands of seeds behind each of five prefixes tells how often
the first draft is accepted; p and q of these prefixes tell how often it should be: sum_i 1 / sum_j max(p_j / p_i, q_j / q_i). Noise that
is keyed by something else leaves every text as it is and loses most of the acceptance: nothing but this test would notice.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounds
import tiny
from flax import struct
from test_lossless import row_probabilities

from jaxspec import decode, gemma4
from jaxspec.config import FULL, SLIDING, AssistantConfig, Gemma4Config
from jaxspec.drafters import dflash, draft_model, eagle3, gemma4_mtp, mtp
from jaxspec.drafters.ngram import NGram
from jaxspec.filters import Filters
from jaxspec.sampling import Needs

VOCAB, SEEDS = 64, 500  # seeds behind each prefix
TEXT = {**rounds.TEXT, "vocab_size": VOCAB}
CONFIG = Gemma4Config.from_hf(TEXT)
SMALL = {**TEXT, "hidden_size": 16, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
LLAMA = {
    "hidden_size": 32,
    "vocab_size": VOCAB,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
FILTERS = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "min_p": 0.0}


def assistant():
    centroids = {"use_ordered_embeddings": True, "num_centroids": 16, "centroid_intermediate_top_k": 8}
    config = {**tiny.ASSISTANT, **centroids, "text_config": {**SMALL, "num_kv_shared_layers": 2}}
    return gemma4_mtp.abstract(gemma4_mtp.bind(AssistantConfig.from_hf(config), CONFIG), jnp.float32)


def block():
    own = {"block_size": 8, "num_hidden_layers": 2, "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2]}}
    return dflash.abstract(dflash.DFlashConfig.from_hf({**LLAMA, **own}, CONFIG), jnp.float32)


def eagle():
    own = {"draft_vocab_size": 48, "eagle_aux_hidden_state_layer_ids": [1, 3]}
    return eagle3.abstract(eagle3.Eagle3Config.from_hf({**LLAMA, **own}, CONFIG, ("lm_head.weight",)), jnp.float32)


def modules():
    text = {**TEXT, "layer_types": [*TEXT["layer_types"], SLIDING, FULL]}
    config = {"model_type": mtp.MODEL_TYPE, "num_nextn_predict_layers": 2, "text_config": text}
    return mtp.abstract(mtp.ModulesConfig.from_hf(config), jnp.float32)


KINDS = {
    "assistant": assistant,
    "dflash": block,
    "eagle3": eagle,
    "modules": modules,
    "draft model": lambda: draft_model.abstract(Gemma4Config.from_hf(SMALL), jnp.float32),
    "ngram": NGram,
}


def flattened(abstract, seed):
    """Random weights, of which the norm before the head is small."""
    last = (".norm.weight", ".shared_head.norm.weight")

    def scaled(path, x):
        return x * np.float32(0.4) if jax.tree_util.keystr(path).endswith(last) else x

    weights = jax.tree_util.tree_map_with_path(scaled, tiny.random_weights(abstract, seed))
    if isinstance(weights, eagle3.Eagle3):
        chosen = np.sort(np.random.default_rng(4).permutation(VOCAB)[:48]) - np.arange(48)
        weights = dataclasses.replace(weights, d2t=chosen.astype(np.int32))
    weights = jax.tree.map(jnp.asarray, weights)
    return dataclasses.replace(weights, page_size=rounds.PAGE) if hasattr(weights, "page_size") else weights


@functools.cache
def target():
    return flattened(gemma4.abstract(CONFIG, jnp.float32), 0)


@struct.dataclass
class Keyed:
    """A drafter whose noise is keyed by another seed: the request's and `shift`."""

    inner: object
    shift: jax.Array

    @property
    def taps(self):
        return self.inner.taps

    def init(self, slots, max_len, num_draft_tokens):
        return self.inner.init(slots, max_len, num_draft_tokens)

    def observe(self, state, rows):
        return self.inner.observe(state, rows)

    def draft(self, state, target, sampling, num_draft_tokens):
        return self.inner.draft(state, target, dataclasses.replace(sampling, seed=sampling.seed + self.shift), num_draft_tokens)


spec_step = rounds.compiled(decode.spec_step, static_argnames=("num_draft_tokens", "needs"))


def many(state):
    """The five sequences, each with many seeds, over the same pages: good for one round, which reads them before it writes."""
    slots = np.repeat(rounds.SLOT_IDS[:-1], SEEDS)

    def each(x):
        return x[slots] if x.ndim and x.shape[0] == rounds.SLOTS else x

    found = jax.tree.map(each, dataclasses.replace(state, logprobs=None))
    held = jnp.full_like(found.cache.held, found.cache.tables[FULL].shape[1])  # nothing is left to reserve
    filters = Filters(*(jnp.full(len(slots), FILTERS[name]) for name in ("top_k", "top_p", "min_p")))
    return dataclasses.replace(
        found,
        cache=dataclasses.replace(found.cache, held=held),
        seed=jnp.stack([jnp.arange(len(slots), dtype=jnp.uint32) + 1000, jnp.zeros(len(slots), jnp.uint32)], axis=1),
        temperature=jnp.full(len(slots), FILTERS["temperature"], jnp.float32),
        filters=dataclasses.replace(filters, scope=found.filters.scope),
        logprobs=state.logprobs,
    )


@functools.cache
def wanted(text):
    """The target's distribution of the token after a text, int32 ids as bytes."""
    ids = np.zeros((1, rounds.MAX_LEN), np.int32)
    count = len(text) // 4
    ids[0, :count] = np.frombuffer(text, np.int32)
    return row_probabilities(np.asarray(logits(target(), ids)[count - 1]), **FILTERS)


@rounds.compiled
def logits(model, ids):
    rows = gemma4.Rows(ids, *(jnp.full(1, value, jnp.int32) for value in (0, ids.shape[1], 0)))
    return model.unembed(model(rows, None)[0].hidden)[0]


def expected(p, q):
    both = [i for i in range(len(p)) if p[i] and q[i]]
    return sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in both)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_draft_is_kept_as_often_as_shared_noise_lets_it(kind):
    made = KINDS[kind]()
    inner = made if kind == "ngram" else flattened(made, 5)
    state = rounds.started(Keyed(inner, jnp.uint32(0)), target())
    known, texts = rounds.lengths(state), rounds.tokens(state)

    drafts = rounds.drafts(target(), inner, state, k=1)
    chances, apart = [], []
    for row, n in enumerate(known):
        p, q = wanted(texts[row, :n].tobytes()), np.zeros(VOCAB)
        if drafts.logits is None:
            q[drafts.tokens[row, 0]] = drafts.tokens[row, 0] >= 0
        else:
            q[np.arange(VOCAB) if drafts.ids is None else drafts.ids[row, 0]] = row_probabilities(
                np.asarray(drafts.logits[row, 0]), **FILTERS
            )
        chances.append(expected(p, q))
        apart.append(p @ q)  # where each draws by itself

    def kept(shift):
        first = many(state)
        slots = jnp.arange(first.slots, dtype=jnp.int32)
        drafter = Keyed(inner, jnp.uint32(shift))
        after = spec_step(target(), drafter, first, slots, num_draft_tokens=1, needs=Needs("top"))
        assert not after.starved
        return (np.asarray(after.length - first.length) - 1).reshape(len(known), SEEDS)

    def errors(found, chances):
        """How far the mean lies from what is expected, in standard errors."""
        deviation = np.sqrt(np.sum(found.mean(1) * (1 - found.mean(1)) / SEEDS)) / len(known)
        return abs(found.mean() - np.mean(chances)) / deviation

    assert errors(kept(0), chances) < 4
    if kind != "ngram":  # which draws nothing
        apart_found = kept(1)
        assert errors(apart_found, chances) > 15 and errors(apart_found, apart) < 4
