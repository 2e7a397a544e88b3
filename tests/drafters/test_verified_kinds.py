"""Every kind of drafter in rounds that verify some of its drafts: the texts are those without drafts."""

import jax.numpy as jnp
import kinds
import numpy as np
import pytest
import rounds
from kinds import LAYOUTS

from jaxspec import decode
from jaxspec.drafters.base import Target
from jaxspec.sampling.choice import Sampling

pytestmark = pytest.mark.usefixtures("unoptimised")
FEW = [("dspark", 7, 11), ("assistant", 3, 8)]
ALL = [(kind, *size) for kind in LAYOUTS for size in ((7, 6), (7, 11), (7, 30), (3, 8))]


def check(kind, k, rows):
    drafter = kinds.drafter(kind)
    state = rounds.decode_loop(rounds.target(), drafter, rounds.started(drafter), rounds.SLOT_IDS, 1000, round=decode.Round(k, rows=rows))
    np.testing.assert_array_equal(rounds.tokens(state), rounds.texts())
    ids = rounds.SLOT_IDS[:-1]
    drafted, count = np.asarray(state.drafted)[ids], np.asarray(state.rounds)[ids]
    assert (drafted < k * count).all() and drafted.sum() <= (rows - 1) * count.max()


@pytest.mark.parametrize(("kind", "k", "rows"), FEW)
def test_texts_are_those_without_drafts(kind, k, rows):
    check(kind, k, rows)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "k", "rows"), [case for case in ALL if case not in FEW])
def test_texts_are_those_without_drafts_everywhere(kind, k, rows):
    check(kind, k, rows)


@pytest.mark.parametrize(
    "kind", ["dspark", pytest.param("dspark rnn", marks=pytest.mark.slow), pytest.param("dspark gemma", marks=pytest.mark.slow)]
)
def test_dspark_says_how_sure_it_is(kind):
    """Of each guess, from its row and the token before it, what the confidence head says in training."""
    drafter, state = kinds.drafter(kind), rounds.started(kinds.drafter(kind))
    slots = jnp.asarray(rounds.SLOT_IDS[:-1])
    length = state.computed[slots]
    anchor = state.tokens[slots, length]
    view = Target(rounds.target(), state.cache, slots, anchor, length)
    count = drafter.num_draft_tokens
    drafts, _ = drafter.draft(state.drafter, view, Sampling(state.seed[slots], state.temperature[slots]), count)
    rows = drafter.rows(state.drafter, view, count)[:, drafter.config.first_row :]
    before = jnp.concatenate([anchor[:, None], drafts.tokens[:, :-1]], axis=1)
    wanted = 1 / (1 + np.exp(-np.asarray(drafter.confidence(before, rows), np.float64)))
    np.testing.assert_allclose(drafts.confidence, wanted, atol=1e-5)
    assert np.std(wanted) > 0.01
