"""Rounds with a tree of drafts: the text is that without drafts, and the path that is kept is the one that the target chooses."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_decode_loop as loops
from flax import struct
from test_decode_loop import MAX_LEN, PROMPT, ROWS, TEMPERATURE, VOCAB, numbers

from jaxspec.decode import FULL_LENGTH, STOPPED, Round, accept
from jaxspec.decode.accept import coupled_path
from jaxspec.drafters.base import Drafts, NoDraft
from jaxspec.model.draft_tree import DraftTree
from jaxspec.sampling import Needs, Sampling, best, choose
from jaxspec.sampling.logprobs import MAX_LOGPROBS

pytestmark = pytest.mark.usefixtures("unoptimised")

WIDE = DraftTree.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [0, 0, 0], [0, 1, 0], [1, 0, 0], [0, 0, 0, 0]])
DEEP = DraftTree.default(22)  # 7 deep, the most that the window of 8 lets a row see, and as deep as the state was made for
NOWHERE = 9  # the rank of a token that is no candidate


@struct.dataclass
class Orchard:
    """A drafter of which the candidate of rank `place` is right. answers: [N, L] int32, whole sequences; a request is known by its seed,
    which is its row. place: [N, L] int32, NOWHERE where none is."""

    answers: jax.Array
    place: jax.Array
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def observe(self, state, rows):
        return state

    def draft_tree(self, state, target, sampling, tree):
        at = target.length[:, None] + jnp.asarray(tree.depths[1:], jnp.int32)[None, :]
        row = sampling.seed[:, :1].astype(jnp.int32)
        right, place = (field.at[row, at].get(mode="clip") for field in (self.answers, self.place))
        rank = jnp.asarray(tree.ranks, jnp.int32)[None, :]
        return Drafts(jnp.where(rank == place, right, (right + 1 + rank) % VOCAB)), state


@functools.cache
def orchard():
    place = np.random.default_rng(3).choice([0, 1, 2, NOWHERE], (len(ROWS), MAX_LEN), p=[0.6, 0.2, 0.08, 0.12])
    return Orchard(jnp.asarray(loops.texts()), jnp.asarray(place, jnp.int32))


def walked(row, tree, limit=MAX_LEN):
    """(rounds, from_draft [MAX_LEN]) of the orchard's guesses for a row, by the paths of ranks alone."""
    place, paths = np.asarray(orchard().place)[row], set(tree.paths)
    flags, count, length = np.zeros(MAX_LEN, bool), 0, PROMPT[row] + 1
    while length < limit:
        accepted = 0
        while length + accepted < limit and tuple(place[length : length + accepted + 1].tolist()) in paths:
            accepted += 1
        flags[length : length + accepted] = True
        count, length = count + 1, length + accepted + 1
    return count, flags


@pytest.mark.parametrize("tree", [WIDE, pytest.param(DEEP, marks=pytest.mark.slow)], ids=str)
def test_the_text_and_the_rounds_are_those_of_the_paths(tree):
    """Ragged prompts, greedy and sampled, pages of 5, a window of 8 that wraps, up to exactly max_len."""
    state = loops.run_rounds(Round(tree.depth, tree=tree), orchard())
    loops.assert_same(numbers(state, "tokens"))
    assert (numbers(state, "length") == MAX_LEN).all() and (numbers(state, "computed") == MAX_LEN - 1).all()
    assert (numbers(state, "status") == FULL_LENGTH).all() and not state.starved
    for row in ROWS:
        count, flags = walked(row, tree)
        assert numbers(state, "rounds")[row] == count and numbers(state, "drafted")[row] == tree.nodes * count, row
        assert np.array_equal(numbers(state, "from_draft")[row], flags), row
    # Rows past max_len take no page, and neither do those of other paths.
    assert np.array_equal(state.cache.held, [*[-(-MAX_LEN // loops.PAGE)] * len(ROWS), 0])


def test_the_assistant_changes_nothing_but_the_rounds():
    """It ranks candidates of its centroids, with the noise of their position where texts are sampled."""
    state = loops.run_rounds(Round(WIDE.depth, tree=WIDE), loops.assistant())
    loops.assert_same(numbers(state, "tokens"))
    flags = numbers(state, "from_draft")
    assert flags[TEMPERATURE > 0].any() and flags[TEMPERATURE == 0].any()


@pytest.mark.slow
def test_a_tree_without_branches_is_a_chain():
    """The same drafts are accepted, and the drafter sees the same of them."""
    chain = loops.run_rounds(Round(4), loops.assistant())
    tree = loops.run_rounds(Round(4, tree=DraftTree.of([[0] * depth for depth in range(1, 5)])), loops.assistant())
    for name in ("tokens", "from_draft", "rounds", "drafted", "length", "computed", "status"):
        np.testing.assert_array_equal(numbers(tree, name), numbers(chain, name), err_msg=name)


def test_chains_and_trees_take_turns():
    """What is kept of a tree lies in the cache, the rings and the drafter as a chain's would."""
    state, slots = loops.prefill(loops.admit(loops.empty(), ROWS), ROWS), loops.padded(ROWS)
    rounds = [Round(WIDE.depth, tree=WIDE), Round(4), Round(0)]
    for turn in range(60):
        state = loops.jit_loop(loops.target(), loops.assistant(), state, slots, 1, 0, round=rounds[turn % 3])
    loops.assert_same(numbers(state, "tokens"))
    assert (numbers(state, "status") == FULL_LENGTH).all()


def test_ends_inside_a_path():
    """A stop id, and a limit, among the tokens that a round accepts: nothing after it is kept, and its rows are computed."""
    flags = [walked(row, WIDE)[1] for row in ROWS]
    ends = np.array([next(at for at in range(20 + row, MAX_LEN) if flags[row][at] and flags[row][at - 1]) for row in ROWS])
    stops = np.full((len(ROWS), 4), -1)
    stops[:, 1] = loops.texts()[ROWS, ends]
    first = [int(np.flatnonzero(loops.texts()[row, PROMPT[row] :] == stops[row, 1])[0]) + PROMPT[row] + 1 for row in ROWS]
    state = loops.run_rounds(Round(WIDE.depth, tree=WIDE), orchard(), stops=stops)
    assert (numbers(state, "status") == STOPPED).all()
    assert np.array_equal(numbers(state, "length"), first) and np.array_equal(numbers(state, "computed"), np.asarray(first) - 1)
    loops.assert_same(numbers(state, "tokens"), first)
    state = loops.run_rounds(Round(WIDE.depth, tree=WIDE), orchard(), limit=ends)
    assert (numbers(state, "status") == FULL_LENGTH).all() and np.array_equal(numbers(state, "length"), ends)
    loops.assert_same(numbers(state, "tokens"), ends)


def test_slots_in_any_order_beside_ids_of_nobody():
    order = [4, 6, 0, 2, 5, 1]
    state = loops.prefill(loops.admit(loops.empty(), order), order)
    for slots in ([loops.NOBODY, 6, loops.SLOTS, 4], [0, 1, 2, 5]):
        state = loops.jit_loop(loops.target(), orchard(), state, loops.padded(slots), 1000, 0, round=Round(WIDE.depth, tree=WIDE))
    loops.assert_same(numbers(state, "tokens", order))


def test_pages_that_run_out_leave_every_sequence_as_it_was():
    state = loops.prefill(loops.admit(loops.empty(), ROWS), ROWS)
    none = dataclasses.replace(state, cache=dataclasses.replace(state.cache, free_count=jnp.zeros_like(state.cache.free_count)))
    while True:
        after = loops.jit_loop(loops.target(), orchard(), none, loops.padded(ROWS), 1, 0, round=Round(WIDE.depth, tree=WIDE))
        if after.starved:
            break
        none = after
    for name in ("tokens", "length", "computed", "rounds", "status"):
        np.testing.assert_array_equal(numbers(after, name), numbers(none, name), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["top", "search"])
def test_filters_edits_and_log_probabilities(scope):
    """Those of the tokens that are kept, of the rows after which they were chosen; penalties count the drafts of a row's own path."""
    needs, asked = Needs(scope, edits=True, logprobs=MAX_LOGPROBS), loops.choosing(scope)

    def run(drafter, round):
        state = loops.admit(loops.empty(), ROWS, **asked)
        for _ in range(2):
            state = loops.jit_prefill(loops.target(), loops.assistant(), state, loops.padded(ROWS), chunk=32, round=Round(0, needs=needs))
        return loops.jit_loop(loops.target(), drafter, state, loops.padded(ROWS), 1000, 0, round=round)

    plain = run(NoDraft(), Round(0, needs=needs))
    right = dataclasses.replace(orchard(), answers=jnp.asarray(numbers(plain, "tokens")))
    for drafter in (right, loops.assistant()):
        tree = run(drafter, Round(WIDE.depth, tree=WIDE, needs=needs))
        np.testing.assert_array_equal(numbers(tree, "tokens"), numbers(plain, "tokens"))
        assert numbers(tree, "from_draft").any()
        for row, start in enumerate(PROMPT):
            np.testing.assert_allclose(tree.logprobs.chosen[row, start:MAX_LEN], plain.logprobs.chosen[row, start:MAX_LEN], atol=1e-4)
        if drafter is right:  # on every path as far as the candidates' ranks lead
            assert [numbers(tree, "rounds")[row] for row in ROWS] == [walked(row, WIDE)[0] for row in ROWS]


def test_a_node_is_kept_exactly_as_far_as_the_target_chooses_it():
    """Against a walk from node to node, over random choices, ids that are no token among the drafts."""
    rng, tree, size = np.random.default_rng(0), WIDE, 400
    drafts = np.full((size, tree.nodes), -1)
    for row, parent in enumerate(tree.parents):  # siblings differ
        drafts[:, row] = np.where(rng.random(size) < 0.1, -1, tree.ranks[row] + 3 * (parent % 2))
    choices = rng.integers(0, 2, (size, tree.rows)) + 3 * (np.arange(tree.rows) % 2)
    path, accepted = jax.jit(functools.partial(coupled_path, tree))(jnp.asarray(drafts, jnp.int32), jnp.asarray(choices, jnp.int32))
    for b in range(size):
        walk = [0]
        while True:
            found = [i + 1 for i in range(tree.nodes) if tree.parents[i] == walk[-1] and drafts[b, i] == choices[b, walk[-1]]]
            assert len(found) <= 1
            if not found:
                break
            walk.append(found[0])
        assert accepted[b] == len(walk) - 1 and path[b, : len(walk)].tolist() == walk
    assert set(np.asarray(accepted).tolist()) == set(range(tree.depth + 1))


def test_equal_siblings_count_once():
    tree = DraftTree.of([[0], [1], [2], [0, 0], [1, 0]])
    drafts = jnp.asarray([[7, 7, 8, 9, 9], [7, 7, 8, 9, 3], [8, 7, 7, 9, 9], [1, 1, 1, 1, 1]], jnp.int32)
    choices = jnp.broadcast_to(jnp.asarray([7, 9, 9, 9, 5, 5], jnp.int32), (4, 6))
    path, accepted = coupled_path(tree, drafts, choices)
    assert accepted.tolist() == [2, 2, 2, 0]
    assert [p[: n + 1] for p, n in zip(path.tolist(), accepted.tolist(), strict=True)] == [[0, 2, 5], [0, 2, 4], [0, 3, 5], [0]]


def test_candidates_rank_by_what_they_are_chosen_by():
    rng, ranked, chosen = np.random.default_rng(1), jax.jit(best, static_argnums=3), jax.jit(choose)
    logits = jnp.asarray(rng.standard_normal((3, 2, 9)), jnp.float32).at[2, 1, 2:].set(-jnp.inf)
    sampling = Sampling(jnp.asarray(rng.integers(0, 99, (3, 2)), jnp.uint32), jnp.asarray([0.0, 1.0, 0.5], jnp.float32))
    at = jnp.asarray([[3, 4], [5, 9], [1, 1]], jnp.int32)
    ids = jnp.asarray(rng.permuted(np.tile(np.arange(30), (3, 2, 1)), axis=-1)[..., :9], jnp.int32)
    for names in (None, ids):
        found = np.asarray(ranked(logits, at, sampling, 4, names))
        left = logits
        for rank in range(4):
            wanted = chosen(left, at, sampling, names)
            some = np.isfinite(np.asarray(left)).any(-1)
            np.testing.assert_array_equal(found[..., rank], np.where(some, wanted, -1))
            taken = jnp.arange(9)[None, None] == wanted[..., None] if names is None else names == wanted[..., None]
            left = jnp.where(taken, -jnp.inf, left)
    assert (np.asarray(ranked(logits, at, sampling, 12))[..., 9:] == -1).all()


@pytest.mark.parametrize(
    ("round", "message"),
    [
        (Round(WIDE.depth, tree=WIDE, accept=accept.Rule("standard")), "the acceptance rule is 'standard', which keeps drafts of a chain"),
        (Round(WIDE.depth, tree=WIDE, accept=accept.Rule("block")), "the acceptance rule is 'block'"),
        (Round(WIDE.depth, tree=WIDE, accept=accept.synthetic([0.5] * 4)), "the acceptance rule is 'synthetic'"),
        (Round(WIDE.depth, tree=WIDE, rows=12), "a tree that is 4 deep, 4 draft tokens and rows=12; expected its depth, and None"),
        (Round(3, tree=WIDE), "a tree that is 4 deep, 3 draft tokens and rows=None"),
        (Round(8, tree=DraftTree.of([[0] * n for n in range(1, 9)])), "is 8 deep, the target has a window of 8 tokens; expected at most 7"),
    ],
)  # fmt: skip
def test_what_a_tree_does_not_go_with(round, message):
    with pytest.raises(ValueError, match=message):
        loops.jit_loop(loops.target(), orchard(), loops.empty(), loops.padded(ROWS), 1, 0, round=round)


def test_a_drafter_of_chains():
    with pytest.raises(ValueError, match="the drafter Parrot drafts one token after the other and no tree; expected no tree"):
        loops.jit_loop(loops.target(), loops.parrot(), loops.empty(), loops.padded(ROWS), 1, 0, round=Round(WIDE.depth, tree=WIDE))
