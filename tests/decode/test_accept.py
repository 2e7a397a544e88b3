"""Acceptance: the longest prefix of drafts that the target chooses too."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec.decode import accept
from jaxspec.drafters.base import Drafts
from jaxspec.sampling import Sampling, choose, probabilities


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_coupled_keeps_the_common_prefix_of_every_pair_of_blocks(count):
    blocks = np.array(list(itertools.product(range(3), repeat=2 * count + 1)), np.int32)
    drafts, choices = blocks[:, :count], blocks[:, count:]
    expected = [next((i for i in range(count) if d[i] != c[i]), count) for d, c in zip(drafts, choices, strict=True)]
    accepted = jax.jit(accept.coupled)(jnp.asarray(drafts), jnp.asarray(choices))
    assert accepted.dtype == jnp.int32 and accepted.tolist() == expected
    assert count == 0 or set(expected) == set(range(count + 1))


def test_a_draft_that_no_target_chooses_ends_the_block():
    choices = jnp.asarray([[4, 5, 6, 7]], jnp.int32)
    for wrong, accepted in ((0, 0), (1, 1), (2, 2), (None, 3)):
        drafts = [-1 if i == wrong else 4 + i for i in range(3)]
        assert accept.coupled(jnp.asarray([drafts], jnp.int32), choices).tolist() == [accepted]


RATES = (0.92, 0.78, 0.67, 0.0)
COUNT = 100_000


@functools.cache
def synthetic_rounds(rounds=3):
    """(tokens, accepted, drafts, choices) of many sequences in one round, whose drafts no target chooses."""
    rng = np.random.default_rng(0)
    drafts, choices = rng.integers(0, 5, (COUNT, 4)).astype(np.int32), rng.integers(5, 10, (COUNT, 5)).astype(np.int32)
    seed = np.stack([np.arange(COUNT), np.zeros(COUNT)], axis=1).astype(np.uint32)
    return *decided(RATES, drafts, choices, seed, rounds), drafts, choices


def decided(rates, drafts, choices, seed, rounds):
    """(tokens, accepted) of a greedy target that chooses `choices`, of 10 tokens."""
    sampling = Sampling(jnp.asarray(seed), jnp.zeros(len(seed), jnp.float32))
    positions = jnp.asarray(np.broadcast_to(np.arange(choices.shape[1], dtype=np.int32), choices.shape))
    rule = jax.jit(accept.synthetic(rates))
    found = rule(Drafts(jnp.asarray(drafts)), jax.nn.one_hot(choices, 10), positions, sampling, jnp.full(len(seed), rounds, jnp.int32))
    return tuple(map(np.asarray, found))


def test_synthetic_accepts_at_its_rates_whatever_the_tokens():
    tokens, accepted, drafts, choices = synthetic_rounds()
    for i, rate in enumerate(RATES):
        assert abs((accepted > i).mean() - rate) < 4 * (0.25 / COUNT) ** 0.5, i
    assert accepted.max() == 3  # a rate of 0 is never
    row = np.arange(5)
    mine = row < accepted[:, None]
    assert np.array_equal(tokens[mine], np.pad(drafts, ((0, 0), (0, 1)))[mine])
    follows = row == accepted[:, None]
    assert np.array_equal(tokens[follows], choices[follows])


def test_synthetic_draws_anew_in_every_round_and_for_every_seed():
    first, second = synthetic_rounds(3)[1] > 0, synthetic_rounds(4)[1] > 0
    for a, b in ((first, second), (first[1:], first[:-1])):
        assert abs((a & b).mean() - a.mean() * b.mean()) < 4 * (0.1 / COUNT) ** 0.5
    seeds = np.random.default_rng(1).integers(0, 2**32, (COUNT, 2), np.uint32)
    drafts = np.broadcast_to(np.array([3, -1], np.int32), (COUNT, 2))
    accepted = decided([1.0, 1.0], drafts, np.zeros((COUNT, 3), np.int32), seeds, 0)[1]
    assert (accepted == 1).all()  # a rate of 1 is always; an id that is no token never


@pytest.mark.parametrize(("length", "rates"), [(1, (0, 0, 0)), (1.25, (0.25, 0, 0)), (3, (1, 1, 0)), (3.5, (1, 1, 0.5)), (4, (1, 1, 1))])
def test_a_synthetic_length_is_the_sum_of_its_rates_and_one(length, rates):
    assert accept.synthetic_length(length, 3).rates == rates


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: accept.synthetic(0.5), TypeError, "rates is 0.5, expected a list of numbers"),
        (lambda: accept.synthetic([0.5, "x"]), TypeError, r"rates\[1\] is 'x' of type str, expected a number"),
        (lambda: accept.synthetic([1.5]), ValueError, r"rates\[0\] is 1.5, expected 0 .. 1"),
        (lambda: accept.synthetic([float("nan")]), ValueError, r"rates\[0\] is nan, expected 0 .. 1"),
        (lambda: accept.synthetic([0.5, 0.6]), ValueError, r"rates\[1\] is 0.6, expected at most 0.5, the rate before it"),
        (lambda: accept.synthetic([0.5]).check(2), ValueError, "synthetic acceptance has 1 rates for 2 drafts; expected one for each"),
        (lambda: accept.synthetic_length("2", 3), TypeError, "length is '2' of type str, expected a number"),
        (lambda: accept.synthetic_length(4.5, 3), ValueError, "length is 4.5, expected 1 .. 4, the drafts and the target's own token"),
        (lambda: accept.rule_of("synthetic"), ValueError, r"accept is 'synthetic' without rates; expected accept.synthetic\(rates\)"),
        (lambda: accept.rule_of("fly"), ValueError, r"accept is 'fly'; available: 'coupled'.*, or accept.synthetic\(rates\)"),
        (lambda: accept.rule_of(3), TypeError, "accept is of type int, expected a name or an accept.Rule"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_rules_are_static_arguments():
    assert accept.synthetic([0.5, 0.25]) == accept.synthetic((0.5, 0.25)) and hash(accept.rule_of("coupled")) == hash(accept.COUPLED)
    assert accept.rule_of(accept.COUPLED) is accept.COUPLED


CANDIDATES = np.array([4, 0, 2], np.int32)  # of a drafter that knows no other of the target's five tokens
LOGITS = np.array([0.3, 1.0, -0.5, 0.2, 0.8], np.float32)


def one_round(keep, seed, logits, guessed, temperature):
    """(tokens [seeds, 3], accepted [seeds]) of a round of two drafts. logits: [5] of the target, guessed: [2, 3] of the candidates."""
    count = len(seed)
    sampling = Sampling(seed, jnp.broadcast_to(temperature, (count,)))
    none = jnp.zeros(count, jnp.int32)
    logits, ids = (jnp.broadcast_to(x, (count, n, x.shape[-1])) for x, n in ((logits, 3), (CANDIDATES, 2)))
    positions, guessed = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (count, 3)), jnp.broadcast_to(guessed, (count, 2, 3))
    drafts = choose(guessed, positions[:, :2], keep.drafting(sampling, none), ids)
    return keep(Drafts(drafts, guessed, ids), logits, positions, sampling, none)


MODES = {"eager": one_round, "jitted": jax.jit(one_round, static_argnums=0)}


def rounds_of(rule, mode, rows, allowed=range(5), temperature=1.0):
    seed = np.stack([np.arange(4000), np.zeros(4000)], axis=1).astype(np.uint32)
    logits = np.where(np.isin(np.arange(5), list(allowed)), LOGITS, -np.inf).astype(np.float32)
    found = MODES[mode](accept.Rule(rule), *map(jnp.asarray, (seed, logits, np.float32(rows), np.float32(temperature))))
    return tuple(map(np.asarray, found))


NONE, SOME = [-np.inf] * 3, [0.5, 0.1, 0.3]
NO_ROW = {"the first": [NONE, SOME], "the second": [SOME, NONE], "both": [NONE, NONE], "not a number": [[0.5, np.nan, 0.1], SOME]}


@pytest.mark.parametrize("mode", ["eager", "jitted"])
@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("kind", NO_ROW)
def test_a_guess_that_could_not_be_drawn_is_never_kept(rule, kind, mode):
    """Where a drafter has no candidate left its guess comes from no distribution: kept, it would change the target's, or be forbidden.
    A compiler may drop the NaN of a row that weighs nothing, so the rules run both ways."""
    p = np.exp(LOGITS) / np.exp(LOGITS).sum()
    tokens, accepted = rounds_of(rule, mode, NO_ROW[kind])
    assert accepted.max() == (kind == "the second")
    for column, rows in ((0, accepted >= 0), (1, accepted >= 1)):
        if rows.any():
            found = np.bincount(tokens[rows, column], minlength=5)
            assert stats.chisquare(found, p * rows.sum()).pvalue > 1e-3, (column, found)
    for temperature in (0.0, 1.0):
        tokens, accepted = rounds_of(rule, mode, NO_ROW[kind], allowed=(1, 3), temperature=temperature)
        assert not accepted.any() and set(tokens[:, 0]) == ({1, 3} if temperature else {1})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_which_nothing_can_be_drawn_has_no_probability(temperature):
    rows = np.array([[-np.inf] * 3, [1, np.nan, 2], [1, np.inf, 2], [1, -np.inf, 2]], np.float32)
    sampling = Sampling(jnp.zeros((4, 2), jnp.uint32), jnp.full(4, temperature, jnp.float32))
    mass = np.asarray(probabilities(jnp.asarray(rows)[:, None], sampling)[0])[:, 0]
    assert not mass[:3].any() and mass[3, 1] == 0 and abs(mass[3].sum() - 1) < 1e-6
