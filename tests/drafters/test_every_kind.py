"""Every kind of drafter on one target: the texts are those without drafts, and the first draft is kept as often as shared noise lets it.

The target and the drafters are tiny and random, with flat distributions, so that drafts are accepted now and then. One round of thousands
of seeds behind each of five prefixes tells how often the first draft is accepted; p and q of these prefixes tell how often it should be:
sum_i 1 / sum_j max(p_j / p_i, q_j / q_i). Noise that is keyed by something else leaves every text as it is and loses most of the
acceptance: nothing but this test would notice. The same drafters guess for a target whose cache is float8.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import kinds
import numpy as np
import pytest
import rounds
from definitions import row_probabilities
from flax import struct
from kinds import KINDS, LAYOUTS

from jaxspec import decode
from jaxspec.drafters.base import NoDraft
from jaxspec.model import gemma4
from jaxspec.model import paged_kv as paged
from jaxspec.model.paged_kv import LayerKV
from jaxspec.model.rows import Rows
from jaxspec.sampling.choice import Needs
from jaxspec.sampling.filters import Filters

pytestmark = pytest.mark.usefixtures("unoptimised")
SEEDS = 500  # behind each prefix
# Of fewer tokens than there are, some of which recur: n-gram lookup finds nothing otherwise.
PROMPTS = np.random.default_rng(1).integers(2, 61, (len(rounds.LENGTHS), rounds.MAX_LEN)).astype(np.int32)
FILTERS = {"temperature": 1.0, "top_k": 40, "top_p": 0.95, "min_p": 0.0}


def flattened(abstract, seed):
    """Random weights, of which the norm before the head is small."""
    last = (".norm.weight", ".shared_head.norm.weight")

    def scaled(path, x):
        return x * np.float32(0.4) if jax.tree_util.keystr(path).endswith(last) else x

    return jax.tree_util.tree_map_with_path(scaled, kinds.weights(abstract, seed))


@functools.cache
def target():
    return flattened(gemma4.abstract(kinds.CONFIG, jnp.float32), 0)


@struct.dataclass
class Keyed(rounds.Wrapped):
    """A drafter whose noise is keyed by another seed: the request's and `shift`."""

    shift: jax.Array

    def draft(self, state, target, sampling, num_draft_tokens):
        return self.inner.draft(state, target, dataclasses.replace(sampling, seed=sampling.seed + self.shift), num_draft_tokens)


reserve = rounds.compiled(paged.reserve, static_argnums=3)
spec_step = rounds.compiled(decode.spec_step, static_argnames="round")


def many(state):
    """The five sequences, each with many seeds, over the same pages. Good for one draft of one round: all seeds write the anchor's K and V
    alike, and whatever the draft's are, the target's choice after the anchor does not see them."""
    cache, _ = reserve(state.cache, rounds.SLOT_IDS[:-1], rounds.lengths(state) + 2, 3)
    state = dataclasses.replace(state, cache=cache)
    slots = np.repeat(rounds.SLOT_IDS[:-1], SEEDS)

    def each(x):
        return x[slots] if x.ndim and x.shape[0] == rounds.SLOTS else x

    found = jax.tree.map(each, dataclasses.replace(state, logprobs=None))
    filters = Filters(*(jnp.full(len(slots), FILTERS[name]) for name in ("top_k", "top_p", "min_p")))
    return dataclasses.replace(
        found,
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
    rows = Rows(ids, *(jnp.full(1, value, jnp.int32) for value in (0, ids.shape[1], 0)))
    return model.unembed(model(rows, None)[0].hidden)[0]


def expected(p, q):
    both = [i for i in range(len(p)) if p[i] and q[i]]
    return sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in both)


@functools.cache
def prepared(kind):
    """The drafter, and a state in which the five prompts are computed and their first tokens chosen."""
    inner = flattened(LAYOUTS[kind](), 5)
    return inner, rounds.started(Keyed(inner, jnp.uint32(0)), target(), ids=PROMPTS)


def guesses(kind, state):
    """The logits that each sequence's first draft is chosen from, NaN for tokens that it knows nothing of. [5, VOCAB]"""
    drafts = rounds.drafts(target(), prepared(kind)[0], state, k=1)
    found = np.full((len(rounds.LENGTHS), rounds.VOCAB), np.nan)
    for row, of_token in enumerate(found):
        if drafts.logits is None:
            of_token[np.asarray(drafts.tokens)[row]] = np.where(np.asarray(drafts.tokens)[row] >= 0, 0, np.nan)
        else:
            of_token[slice(None) if drafts.ids is None else np.asarray(drafts.ids)[row, 0]] = np.asarray(drafts.logits)[row, 0]
    return found


def accepted(state, drafter):
    """Accepted drafts of one round of each sequence: [5, SEEDS]."""
    after = spec_step(target(), drafter, state, np.arange(state.slots, dtype=np.int32), round=decode.Round(1, needs=Needs("top")))
    assert not after.starved
    return np.asarray(after.length - state.length).reshape(-1, SEEDS) - 1


# A head of centroids. That the others draw with the target's noise their own files test: the drafts of their rounds are those that a
# reference chooses with it.
OFTEN = ("assistant",)


@pytest.mark.parametrize("kind", [kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_the_first_draft_is_kept_as_often_as_shared_noise_lets_it(kind):
    inner, state = prepared(kind)
    known, texts = rounds.lengths(state), rounds.tokens(state)
    chances, apart = [], []
    for row, (n, logits) in enumerate(zip(known, guesses(kind, state), strict=True)):
        p, q, drafted = wanted(texts[row, :n].tobytes()), np.zeros(rounds.VOCAB), ~np.isnan(logits)
        if drafted.any():
            q[drafted] = row_probabilities(logits[drafted], **FILTERS)
        chances.append(expected(p, q))
        apart.append(p @ q)  # where each draws by itself

    def errors(shift, chances):
        """(how far the accepted share lies from what is expected, in standard errors; one of them)."""
        kept = accepted(many(state), Keyed(inner, jnp.uint32(shift)))
        deviation = np.sqrt(np.sum(kept.mean(1) * (1 - kept.mean(1)) / SEEDS)) / len(known)
        return abs(kept.mean() - np.mean(chances)) / deviation, deviation

    off, deviation = errors(0, chances)
    assert max(chances) > 0 and off < 4
    if kind != "ngram":  # which draws nothing; the others would be found out
        assert abs(np.mean(chances) - np.mean(apart)) / deviation > 10
    if kind == "assistant":
        assert errors(1, apart)[0] < 4


def quantised(state, told=2.0):
    """The same with the target's K and V in float8, stored as a half and a quarter of themselves."""
    scales = jnp.asarray([told, 4.0], jnp.float32)
    pools = (
        LayerKV(*(x.astype(jnp.float8_e4m3fn) for x in (layer.k / 2, layer.v / 4)), scales) if layer is not None else None
        for layer in state.cache.layers
    )
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=tuple(pools)))


@functools.cache
def alone(float8=False):
    """Every sequence to its end, one token at a time: what all kinds are to give. [5, MAX_LEN]"""
    state = dataclasses.replace(prepared("ngram")[1], drafter=())
    return rounds.tokens(rounds.ended(target(), NoDraft(), quantised(state) if float8 else state, 0))


def check_texts(kind, *ks, float8=False):
    inner, state = prepared(kind)
    state = quantised(state) if float8 else state
    after = rounds.ended(target(), Keyed(inner, jnp.uint32(0)), state, *ks)
    np.testing.assert_array_equal(rounds.tokens(after), alone(float8))
    return after


# K of each round in turn, with none among them where a kind takes in rows in a way of its own: DSpark and DFlash2 do as DFlash,
# and the assistant has its in tests/decode/test_decode_loop.py.
TURNS = {
    "dflash": (7, 0),
    "dspark": (7,),
    "eagle3": (3, 0),
    "modules": (3, 0),
    "draft model like E2B": (3, 0),
    "ngram": (3, 0),
}


# Each kind once, the draft model in the layout that is least like the target; most of them, and the other layouts below, are marked slow.
# That they guess what they should, round after round, their own files test. DFlash2 and DSpark take in rows as DFlash does. Texts of DFlash
# are looked at in test_dflash.py, of n-grams in test_ngram.py, of EAGLE-3 in test_events.py, of a draft model in test_step3p5_modules.py.
FEW = ("assistant", "modules")
MORE = ("dflash", "dflash2", "dspark", "eagle3", "draft model like E2B", "ngram")


@pytest.mark.parametrize("kind", [*FEW, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE)])
def test_texts_are_those_without_drafts(kind):
    """Greedy and sampled, from prompts of 1 to 22 tokens past the window to the very end of the slots, where drafts find no room."""
    after = check_texts(kind, *TURNS.get(kind, (3,)))
    assert np.asarray(after.from_draft).any()  # some drafts were accepted


@pytest.mark.slow
@pytest.mark.parametrize("ks", [(1,), (3,), (7,), (3, 1, 0)], ids=str)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_texts_are_those_without_drafts_more(kind, ks):
    check_texts(kind, *ks)


# One that reads the target's cache, and one that has its own.
FLOAT8 = ("assistant", "modules")


@pytest.mark.parametrize("kind", [kind if kind in FLOAT8 else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_a_target_with_a_float8_cache(kind):
    """A drafter with a cache of its own keeps that cache's dtype and guesses the same as ever; one that reads the target's reads it with
    its scales, and guesses nearly the same. Texts are those without drafts."""
    inner, state = prepared(kind)
    made = jax.eval_shape(lambda: decode.init_state(target(), inner, slots=2, max_len=32, num_draft_tokens=1, kv_dtype=jnp.float8_e4m3fn))
    assert {leaf.dtype for leaf in jax.tree.leaves(made.drafter)} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
    assert made.cache.layers[0].k.dtype == jnp.float8_e4m3fn

    before, after, mistaken = (guesses(kind, x) for x in (state, quantised(state), quantised(state, told=1.0)))
    if kind == "assistant":
        spread = before[~np.isnan(before)].std()
        assert 0 < np.nanmax(np.abs(after - before)) < 0.7 * spread < spread < np.nanmax(np.abs(mistaken - before))
    else:
        np.testing.assert_array_equal(after, before)
    if kind == "modules":  # that guess what they always guess; the assistant has its in tests/decode/test_decode_loop.py
        check_texts(kind, 3, float8=True)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("eagle3", "eagle3 speculators")]


@pytest.mark.parametrize("name", ["dflash", "eagle3 gemma", *SLOW])
def test_parts_of_a_prompt_side_by_side(name):
    """They leave what they do one after the other."""
    drafter = kinds.drafter(name)
    assert drafter.takes_parts
    found, expected = (rounds.started(drafter, parts=parts) for parts in (True, False))
    for field in ("tokens", "length", "computed"):
        np.testing.assert_array_equal(getattr(found, field), getattr(expected, field))
    guessed, wanted = (rounds.drafts(rounds.target(), drafter, state, 3) for state in (found, expected))
    np.testing.assert_array_equal(guessed.tokens[:-1], wanted.tokens[:-1])
    np.testing.assert_allclose(guessed.logits[:-1], wanted.logits[:-1], rtol=1e-4, atol=1e-5)
