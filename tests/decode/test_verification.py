"""Adaptive verification: the drafts that are verified are the best ones, and whichever they are, the text stays the same."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_decode_loop as loops
import tiny
from flax import struct
from test_decode_loop import MAX_LEN, PROMPT, ROWS, SLOTS, numbers

from jaxspec import decode
from jaxspec.decode import STOPPED, accept
from jaxspec.decode.state import VERIFIED_ROUNDS
from jaxspec.decode.verification import HALF_LIFE, PRIOR_KEPT, PRIOR_TRIED, best_prefixes, seen, survival
from jaxspec.drafters.base import Drafts, NoDraft
from jaxspec.model.rows import Rows
from jaxspec.sampling.choice import Needs
from jaxspec.sampling.logprobs import MAX_LOGPROBS

pytestmark = pytest.mark.usefixtures("unoptimised")
best = jax.jit(best_prefixes, static_argnums=2)


def most_of(chances, most, rows):
    """By trying every way to hand out the rows: the largest sum of chances."""
    ways = itertools.product(*(range(max(n, 0) + 1) for n in most))
    left = rows - sum(n >= 0 for n in most)
    return max(sum(row[:n].sum() for row, n in zip(chances, way, strict=True)) for way in ways if sum(way) <= left)


def test_rows_go_to_the_best_drafts():
    """Beside every other way to hand them out; ties, drafts that may not be verified and slots without a sequence among them."""
    rng = np.random.default_rng(0)
    for case in range(60):
        chances = np.cumprod(rng.choice([1.0, 0.9, 0.5, 0.25, 0.0], (4, 3)) if case % 2 else rng.random((4, 3)), axis=1)
        most = rng.integers(-1, 4, 4)
        rows = int(rng.integers(4, 17))
        found = np.asarray(best(jnp.asarray(chances, jnp.float32), jnp.asarray(most, jnp.int32), rows))
        assert (found <= np.maximum(most, 0)).all() and (found >= 0).all()
        assert found.sum() + (most >= 0).sum() <= rows
        given = sum(row[:n].sum() for row, n in zip(chances, found, strict=True))
        assert given == pytest.approx(most_of(chances, most, rows), abs=1e-6), (chances, most, rows, found)


def test_equal_chances_are_shared_out_evenly():
    found = best(jnp.ones((5, 7)), jnp.full(5, 7, jnp.int32), 5 + 12)
    assert found.tolist() == [3, 3, 2, 2, 2]


def test_a_chance_is_the_product_of_confidences():
    tokens = jnp.asarray([[3, 4, 5], [3, -1, 5], [3, 4, 5]], jnp.int32)
    told = jnp.asarray([[0.5, 0.5, 1.0], [0.9, 0.9, 0.9], [jnp.nan, 1.0, 2.0]], jnp.float32)
    found = survival(Drafts(tokens, confidence=told), jnp.zeros((3, 2)))
    np.testing.assert_allclose(found, [[0.5, 0.25, 0.25], [0.9, 0, 0], [0, 0, 0]])


def test_without_confidence_a_chance_is_what_was_accepted():
    tokens = jnp.zeros((2, 3), jnp.int32)
    found = survival(Drafts(tokens), jnp.asarray([[0.0, 0.0], [16.0, 0.0]]))
    prior, low = PRIOR_KEPT / PRIOR_TRIED, PRIOR_KEPT / (PRIOR_TRIED + 16)
    np.testing.assert_allclose(found, [[prior, prior**2, prior**3], [low, low**2, low**3]], rtol=1e-6)


def test_what_was_not_verified_was_not_tried():
    """Of 4, 4, 2 and 0 verified drafts 2, 4, 2 and 0 were accepted: one rejection in all, and nothing of the last."""
    verified, accepted = jnp.asarray([4, 4, 2, 0], jnp.int32), jnp.asarray([2, 4, 2, 0], jnp.int32)
    found = seen(jnp.zeros((4, 2)), verified, accepted)
    assert found.tolist() == [[3, 2], [4, 4], [2, 2], [0, 0]]
    later = found
    for _ in range(int(HALF_LIFE)):
        later = seen(later, jnp.zeros_like(verified), jnp.zeros_like(verified))
    np.testing.assert_allclose(later, found / 2, rtol=1e-5)


def test_packed_rows_are_the_real_ones():
    count = jnp.asarray([2, 0, 3, 1], jnp.int32)
    ids = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    block = Rows(ids, jnp.asarray([10, 20, 30, 40], jnp.int32), count, jnp.asarray([3, 9, 1, 0], jnp.int32))
    packed = block.packed(8)
    assert packed.ids[:, 0].tolist() == [0, 1, 6, 7, 8, 9, 0, 0]
    assert packed.positions[:6, 0].tolist() == [10, 11, 30, 31, 32, 40]
    assert packed.slots[:6].tolist() == [3, 3, 1, 1, 1, 0] and (packed.slots[6:] >= SLOTS).all()
    assert packed.count.tolist() == [1] * 6 + [0, 0]
    real = np.arange(3) < np.asarray(count)[:, None]
    back = packed.packing.unpacked(packed.ids)
    assert np.array_equal(np.asarray(back)[real], np.asarray(ids)[real])
    assert np.array_equal(packed.packing.positions, np.where(real, block.positions, -1))


def of_rounds(state, guesses=False):
    """What the newest rounds of each row verified, or how many of that were guesses, 0 for rounds that it did not have: [6, 64]."""
    rounds = numbers(state, "rounds")
    assert rounds.max() <= VERIFIED_ROUNDS
    return np.where(np.arange(VERIFIED_ROUNDS) < rounds[:, None], numbers(state, "verified")[..., int(guesses)], 0)


@pytest.mark.parametrize("rows", [13, *(pytest.param(rows, marks=pytest.mark.slow) for rows in (7, 40))])
def test_the_text_does_not_depend_on_what_is_verified(rows):
    """A list of seven slots, one of them nobody's, whose row the others share; pages of five, rings of three such."""
    state = loops.run_rounds(decode.Round(7, rows=rows), loops.parrot())
    loops.assert_same(numbers(state, "tokens"))
    assert (numbers(state, "length") == MAX_LEN).all() and not state.starved
    verified, flags = of_rounds(state), numbers(state, "from_draft")
    assert np.array_equal(verified, of_rounds(state, guesses=True)) and np.array_equal(verified.sum(1), numbers(state, "drafted"))
    # All six have a round at the same time as long as none has ended.
    together = verified[:, : numbers(state, "rounds").min()]
    assert (together.sum(0) + len(ROWS) == min(rows, 8 * len(ROWS))).sum() >= together.shape[1] // 2
    assert (together.sum(0) + len(ROWS) <= rows).all()
    assert flags.any() and all(flags[row].sum() <= verified[row].sum() for row in ROWS)


def test_stop_ids_and_limits_hold():
    stops = np.random.default_rng(0).integers(0, loops.VOCAB, (len(ROWS), 4))
    limit = PROMPT + 30 - ROWS
    alone = loops.run(NoDraft(), 0, stops=stops, limit=limit)
    for rows in (9, 20):
        found = loops.run_rounds(decode.Round(7, rows=rows), loops.parrot(0.1), stops=stops, limit=limit)
        for name in ("tokens", "length", "computed", "status"):
            assert np.array_equal(numbers(alone, name), numbers(found, name)), name
    assert STOPPED in numbers(alone, "status")


@pytest.mark.slow  # test_decode_loop.py has the same of rounds that verify everything
@pytest.mark.parametrize("scope", ["top", "whole"])
def test_filters_edits_and_log_probabilities_hold(scope):
    stops = np.tile(np.arange(40, 44), (len(ROWS), 1))
    static = {"needs": Needs(scope, edits=True, suppress_tokens=(11, 50), logprobs=MAX_LOGPROBS)}
    begun = loops.prefill(loops.admit(loops.empty(), ROWS, stops=stops, **loops.choosing(scope)), ROWS, **static)
    alone = loops.loop(begun, ROWS, NoDraft(), 0, **static)
    answers = numbers(alone, "tokens")
    wrong = np.random.default_rng(0).random(answers.shape) < 0.2
    found = loops.loop(begun, ROWS, tiny.Parrot(jnp.asarray(answers), jnp.asarray(wrong)), 4, rows=17, **static)
    assert numbers(found, "from_draft").sum() > 50
    for name in ("tokens", "length", "status"):
        assert np.array_equal(numbers(found, name), numbers(alone, name)), name
    for row, n in enumerate(numbers(alone, "length")):
        kept = slice(PROMPT[row], n)
        for name in ("chosen", "top", "rank", "ids"):
            both = (np.asarray(getattr(state.logprobs, name))[row, kept] for state in (alone, found))
            np.testing.assert_allclose(*both, atol=1e-4, err_msg=name)


@struct.dataclass
class Shy:
    """A parrot that guesses so many tokens as the place says, and right ones after them, which are no guesses."""

    inner: tiny.Parrot
    abstains: bool = struct.field(pytree_node=False, default=True)
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def observe(self, state, rows):
        return state

    def draft(self, state, target, sampling, num_draft_tokens):
        drafts, state = self.inner.draft(state, target, sampling, num_draft_tokens)
        at = jnp.arange(num_draft_tokens)[None, :] == guesses_at(target.length[:, None], num_draft_tokens)
        return Drafts(jnp.where(at, -1, drafts.tokens % loops.VOCAB)), state


def guesses_at(length, k):
    """How many guesses of a `Shy` drafter come before the first that is none, where so many rows are computed."""
    return length % (k + 1)


def test_guesses_alone_are_counted():
    """Of a drafter that guesses 0 to K tokens, its guesses that were verified; of one that does not say that it may guess fewer, K."""
    k, shy = 4, Shy(loops.parrot())
    state = loops.run(shy, k)
    loops.assert_same(numbers(state, "tokens"))
    for row in ROWS:
        length, told, flags = PROMPT[row] + 1, [], np.zeros(MAX_LEN, bool)
        while length < MAX_LEN:
            checked = min(k, MAX_LEN - length)
            guesses = min(guesses_at(length - 1, k), checked)
            kept = int(np.cumprod(loops.right(row)[length : length + guesses]).sum())
            flags[length : length + kept] = True
            told, length = [*told, (checked, guesses)], length + kept + 1
        count = numbers(state, "rounds")[row]
        assert count == len(told) <= VERIFIED_ROUNDS and np.array_equal(numbers(state, "from_draft")[row], flags)
        assert numbers(state, "verified")[row, :count].tolist() == [list(both) for both in told]
        assert numbers(state, "drafted")[row] == sum(guesses for _, guesses in told) < k * count
    silent = loops.run(Shy(loops.parrot(), abstains=False), k)
    loops.assert_same(numbers(silent, "tokens"))
    assert np.array_equal(numbers(silent, "drafted"), k * numbers(silent, "rounds"))
    assert not numbers(silent, "verified").any()


def test_rows_that_are_left_go_to_what_is_no_guess_and_count_as_none():
    state = loops.run_rounds(decode.Round(4, rows=20), Shy(loops.parrot()))
    loops.assert_same(numbers(state, "tokens"))
    verified, guesses, flags = of_rounds(state), of_rounds(state, guesses=True), numbers(state, "from_draft")
    assert (guesses <= verified).all() and (guesses < verified).any() and (guesses == verified).any()
    assert np.array_equal(guesses.sum(1), numbers(state, "drafted")) and (flags.sum(1) <= guesses.sum(1)).all()


@struct.dataclass
class Sure:
    """A drafter that is always right and says how sure it is of each row of prompts: [6]."""

    inner: tiny.Parrot
    confidence: jax.Array
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def observe(self, state, rows):
        return state

    def draft(self, state, target, sampling, num_draft_tokens):
        drafts, state = self.inner.draft(state, target, sampling, num_draft_tokens)
        sure = self.confidence.at[sampling.seed[:, 0].astype(jnp.int32)].get(mode="clip")
        return drafts.__class__(drafts.tokens, confidence=jnp.broadcast_to(sure[:, None], drafts.tokens.shape)), state


def test_a_drafter_that_is_sure_has_more_verified():
    """Six anchors and five drafts a round: all of them are of the row whose drafter is sure, whatever was accepted."""
    drafter = Sure(loops.parrot(0.0), jnp.asarray([0.1, 0.1, 0.99, 0.1, 0.1, 0.1]))
    state = loops.run_rounds(decode.Round(7, rows=11), drafter)
    loops.assert_same(numbers(state, "tokens"))
    rounds = numbers(state, "rounds")
    assert rounds[2] == -(-(MAX_LEN - PROMPT[2] - 1) // 6) and rounds.argmin() == 2
    assert (of_rounds(state)[2, : rounds[2] - 2] == 5).all() and not of_rounds(state)[:2, : rounds[2] - 2].any()


def test_what_was_accepted_decides_where_nothing_is_said():
    """Of two kinds of rows, those with wrong drafts get fewer and fewer verified."""
    answers = loops.texts()
    wrong = np.zeros(answers.shape, bool)
    wrong[::2] = True
    state = loops.run_rounds(decode.Round(4, rows=SLOTS * 2), tiny.Parrot(jnp.asarray(answers), jnp.asarray(wrong)))
    loops.assert_same(numbers(state, "tokens"))
    kept = numbers(state, "acceptance")[:, 1] / numbers(state, "acceptance")[:, 0]
    assert (kept[1::2] == 1).all() and (kept[::2] == 0).all()
    early, late = of_rounds(state)[:, 0], of_rounds(state)[:, 8]
    assert (late[1::2] > late[::2]).all() and late[::2].max() <= early[::2].max()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 6}, "rows is 6 for 7 sequences of 2 drafts; expected 7 .. 21: one for each sequence"),
        ({"rows": 22}, "rows is 22 for 7 sequences of 2 drafts; expected 7 .. 21"),
        (
            {"rows": 8, "accept": accept.Rule("standard")},
            "acceptance rule is 'standard', which needs a row for each draft; expected 'coupled'",
        ),
        ({"rows": 8, "accept": accept.Rule("block")}, "acceptance rule is 'block', which needs a row for each draft"),
    ],
)
def test_rows_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        loops.loop(loops.empty(), ROWS, NoDraft(), 2, **settings)
