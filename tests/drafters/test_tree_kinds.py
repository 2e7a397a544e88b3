"""Trees of every kind of drafter that draws them: the texts are those without drafts, and a path is what a chain would guess after it."""

import jax
import jax.numpy as jnp
import kinds
import numpy as np
import pytest
import rounds
from kinds import LAYOUTS

from jaxspec import decode
from jaxspec.drafters.base import Target
from jaxspec.model.draft_tree import DraftTree
from jaxspec.sampling.choice import Sampling

pytestmark = pytest.mark.usefixtures("unoptimised")
TREE = DraftTree.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [2, 0], [0, 0, 0], [0, 1, 0], [0, 1, 1], [1, 0, 0], [0, 1, 0, 0]])
CHAIN = DraftTree.of([[0] * depth for depth in range(1, 5)])
GROWING = [kind for kind in LAYOUTS if hasattr(kinds.drafter(kind), "draft_tree")]
FEW = ["eagle3"]


def some(kind_names):
    return [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in kind_names]


def test_who_draws_trees():
    assert {"assistant", "eagle3", "dspark"} <= set(GROWING) and not {"ngram", "modules", "draft model", "dflash"} & set(GROWING)


@pytest.mark.parametrize("kind", some(GROWING))
def test_texts_are_those_without_drafts(kind):
    drafter = kinds.drafter(kind)
    started = rounds.started(drafter)
    state = rounds.decode_loop(rounds.target(), drafter, started, rounds.SLOT_IDS, 1000, round=decode.Round(TREE.depth, tree=TREE))
    np.testing.assert_array_equal(rounds.tokens(state), rounds.texts())
    ids = rounds.SLOT_IDS[:-1]
    assert np.array_equal(np.asarray(state.drafted)[ids], TREE.nodes * np.asarray(state.rounds)[ids])


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.slow) for kind in GROWING])
def test_a_path_holds_what_a_chain_would_guess_after_it(kind):
    """The best path is the chain's drafts, and so are the best ones after any node, if that is the text."""
    drafter, state = kinds.drafter(kind), rounds.started(kinds.drafter(kind))
    slots = jnp.asarray(rounds.SLOT_IDS[:-1])
    length = state.computed[slots]
    anchor = state.tokens[slots, length]
    view = Target(rounds.target(), state.cache, slots, anchor, length)
    sampling = Sampling(state.seed[slots], state.temperature[slots])
    drafts = jax.jit(lambda d, s, v, how: d.draft(s, v, how, 4)[0].tokens)(drafter, state.drafter, view, sampling)
    trees = {tree: np.asarray(jax.jit(lambda d, s, v, how, tree=tree: d.draft_tree(s, v, how, tree)[0].tokens)(
        drafter, state.drafter, view, sampling
    )) for tree in (CHAIN, TREE)}  # fmt: skip
    np.testing.assert_array_equal(trees[CHAIN], drafts)
    paths = list(TREE.paths)
    best = [paths.index((0,) * depth) for depth in (1, 2, 3)]
    np.testing.assert_array_equal(trees[TREE][:, best], np.asarray(drafts)[:, :3])
    for parent in {path[:-1] for path in paths}:
        children = [i for i, path in enumerate(paths) if path[:-1] == parent]
        for row in trees[TREE][:, children]:
            assert len(set(row.tolist())) == len(children)
