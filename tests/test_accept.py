"""Acceptance: the longest prefix of drafts that the target chooses too."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode import accept
from jaxspec.drafters.base import Drafts
from jaxspec.sampling.choice import Sampling


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
