"""Acceptance: the longest prefix of drafts that the target chooses too."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import accept
from jaxspec.sampling import Sampling


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
    drafts, choices = rng.integers(0, 50, (COUNT, 4)).astype(np.int32), rng.integers(50, 100, (COUNT, 5)).astype(np.int32)
    seed = np.stack([np.arange(COUNT), np.zeros(COUNT)], axis=1).astype(np.uint32)
    sampling = Sampling(jnp.asarray(seed), jnp.zeros(COUNT, jnp.float32))
    tokens, accepted = jax.jit(accept.synthetic(RATES))(drafts, choices, sampling, jnp.full(COUNT, rounds, jnp.int32))
    return np.asarray(tokens), np.asarray(accepted), drafts, choices


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
    always = accept.synthetic([1.0, 1.0])
    seeds = Sampling(jnp.asarray(np.random.default_rng(1).integers(0, 2**32, (COUNT, 2)), jnp.uint32), jnp.zeros(COUNT, jnp.float32))
    drafts = jnp.broadcast_to(jnp.asarray([[3, -1]], jnp.int32), (COUNT, 2))
    accepted = always(drafts, jnp.zeros((COUNT, 3), jnp.int32), seeds, jnp.zeros(COUNT, jnp.int32))[1]
    assert (np.asarray(accepted) == 1).all()  # a rate of 1 is always; an id that is no token never


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
