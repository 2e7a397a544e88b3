"""On the device: which tokens a state allows, where tokens lead, and what of the logits is left, against walks on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec
from scipy import stats

from jaxspec.collectives import TENSOR, Shard
from jaxspec.decode.accept import Rule
from jaxspec.drafters.base import Drafts
from jaxspec.sampling import Sampling, draw
from jaxspec.sampling.automata import BLOCK, FILLED, FREE, MAY_THINK, SAME, THINKING, Automata, Constraint, fill, place
from jaxspec.structured.automaton import automaton_of

pytestmark = pytest.mark.usefixtures("unoptimised")

WORDS = [b"", b"a", b"b", b"ab", b"ba", b"", b"aab", b"abababab", b"c", "é".encode()[:1], "é".encode()[1:], b"b" * 20, b"ca", b"x", b"bb"]
VOCAB = 43  # odd, and most of it without text
STOP, OPENING, CLOSING = 5, 40, 41
EXPRESSION = "(a|ba){1,3}c?|(é|b)+"


@functools.cache
def pool():
    """(automata, the automaton on the host, its states in the pool). It lies in the pool's third block."""
    length = np.asarray([len(w) for w in WORDS] + [0] * (VOCAB - len(WORDS)), np.int32)
    data = np.zeros((VOCAB, 24), np.uint8)
    for row, word in zip(data, WORDS, strict=False):
        row[: len(word)] = np.frombuffer(word, np.uint8)
    automata = Automata.empty(data, length, (OPENING, CLOSING), blocks=4, rows=70)
    own = automaton_of(EXPRESSION)
    assert own.states < BLOCK
    ids = np.concatenate([[0], 2 * BLOCK + np.arange(own.states)])
    following = np.zeros((BLOCK, SAME + 1), np.uint16)
    following[:, SAME] = 2 * BLOCK + np.arange(BLOCK)
    following[: own.states, :SAME] = ids[own.next[1:]]
    row, accepting = np.zeros(BLOCK, np.int32), np.zeros(BLOCK, bool)
    row[: own.states], accepting[: own.states] = 3 + np.arange(own.states), own.accepting[1:]
    automata = jax.jit(place)(automata, jnp.int32(2), following, row, accepting)
    states = np.zeros(FILLED, np.int32)
    states[: own.states] = ids[1:]
    rows = np.full(FILLED, 70, np.int32)
    rows[: own.states] = 3 + np.arange(own.states)
    return jax.jit(fill)(automata, states, rows), own, ids


def constraint(states):
    automata, own, ids = pool()
    begin = jnp.full(len(states), ids[own.start])
    stops = jnp.tile(jnp.asarray([[-1, STOP, -1]], jnp.int32), (len(states), 1))
    return Constraint(automata, jnp.asarray(states, jnp.int32), begin.astype(jnp.int32), stops)


def allowed(state, token):
    """By walks on the host. state: in the pool."""
    _, own, ids = pool()
    if token == STOP:
        return state == FREE or (state != THINKING and bool(own.accepting[list(ids).index(state) if state > MAY_THINK else own.start]))
    if state in (FREE, THINKING):
        return True
    if state == MAY_THINK and token == OPENING:
        return True
    word = WORDS[token] if token < len(WORDS) else b""
    return bool(word) and own.after(word, own.start if state == MAY_THINK else list(ids).index(state)) != 0


def every_state():
    _, _, ids = pool()
    return [FREE, THINKING, MAY_THINK, *ids[1:].tolist()]


def test_logits_of_tokens_that_may_not_come_are_gone():
    states, rng = every_state(), np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(len(states), 1, VOCAB)), jnp.float32)
    masked = constraint(states).masked(logits, jnp.asarray(states)[:, None], None)
    expected = [[allowed(state, token) for token in range(VOCAB)] for state in states]
    np.testing.assert_array_equal(masked, np.where(np.asarray(expected)[:, None], logits, -np.inf))
    ids = jnp.asarray(rng.permuted(np.tile(np.arange(VOCAB), (len(states), 1, 1)), axis=-1)[..., :30], jnp.int32)
    some = constraint(states).masked(jnp.take_along_axis(logits, ids, axis=-1), jnp.asarray(states)[:, None], None, ids)
    np.testing.assert_array_equal(some, jnp.take_along_axis(masked, ids, axis=-1))


def test_every_device_masks_its_part_of_the_vocabulary(devices=4):
    states, size = every_state(), -(-VOCAB // devices)
    logits = jnp.pad(jnp.ones((len(states), 1, VOCAB)), ((0, 0), (0, 0), (0, size * devices - VOCAB)))
    mesh = Mesh(np.asarray(jax.devices()[:devices]), (TENSOR,))

    def part(logits):
        return constraint(states).masked(logits, jnp.asarray(states)[:, None], Shard(TENSOR, size))

    spec = PartitionSpec(None, None, TENSOR)
    found = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(logits)[..., :VOCAB]
    np.testing.assert_array_equal(found, constraint(states).masked(logits[..., :VOCAB], jnp.asarray(states)[:, None], None))


def test_tokens_lead_where_their_bytes_lead():
    _, own, ids = pool()
    states = every_state()
    for token in range(-1, VOCAB):
        found = constraint(states).after(jnp.full(len(states), token, jnp.int32)).state
        for state, after in zip(states, np.asarray(found).tolist(), strict=True):
            expected = state
            if state == THINKING and token == CLOSING:
                expected = ids[own.start]
            elif state == MAY_THINK and token == OPENING:
                expected = THINKING
            elif state not in (FREE, THINKING) and 0 <= token != STOP and allowed(state, token):
                expected = ids[own.after(WORDS[token], own.start if state == MAY_THINK else list(ids).index(state))]
            assert after == expected, (token, state)


@given(st.lists(st.sampled_from(range(VOCAB)), min_size=3, max_size=3))
@settings(max_examples=20)
def test_states_along_a_block_are_those_after_each_token(tokens):
    _, own, ids = pool()
    along = constraint([ids[own.start]]).along(jnp.asarray([tokens], jnp.int32))
    one, expected = constraint([ids[own.start]]), [ids[own.start]]
    for token in tokens:
        one = one.after(jnp.asarray([token], jnp.int32))
        expected.append(int(one.state[0]))
    assert along[0].tolist() == expected


def test_drafts_follow_each_other():
    _, own, ids = pool()
    count, seeds = 5, 64
    rng = np.random.default_rng(1)
    logits = jnp.asarray(rng.normal(size=(seeds, count, VOCAB)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None], (seeds, count))
    seed = jnp.stack([jnp.arange(seeds, dtype=jnp.uint32), jnp.zeros(seeds, jnp.uint32)], axis=1)
    given = Sampling(seed, jnp.ones(seeds), constraint=constraint([ids[own.start]] * seeds))
    tokens, masked, after = jax.jit(draw)(logits, positions, given)
    for row, weights, end in zip(np.asarray(tokens), np.asarray(masked), np.asarray(after.constraint.state), strict=True):
        state = own.start
        for token, left in zip(row, weights, strict=True):
            assert np.isfinite(left[token]) and (np.isfinite(left) == [allowed(ids[state], i) for i in range(VOCAB)]).all()
            if token == STOP:
                break
            state = own.after(WORDS[token], state)
        else:
            assert end == ids[state]


SEEDS = 40_000


@functools.cache
def rows():
    """Logits of three rows, and the probabilities of the tokens in a state behind each: softmax over what is allowed."""
    logits = np.random.default_rng(3).normal(0, 1.5, (3, VOCAB)).astype(np.float32)

    def after(row, state):
        kept = np.array([allowed(state, token) for token in range(VOCAB)])
        weights = np.where(kept, np.exp(logits[row]), 0)
        return weights / weights.sum()

    return logits, after


def chi_square(found, expected):
    """The p-value of counts [...] against probabilities [...]; cells of few counts are one."""
    counts, wanted = found.reshape(-1), expected.reshape(-1) * found.sum()
    assert counts[wanted == 0].sum() == 0
    rare = wanted < 10
    counts, wanted = (np.append(x[~rare], x[rare].sum()) for x in (counts, wanted))
    return stats.chisquare(counts[wanted > 0], wanted[wanted > 0]).pvalue


def every_seed(count):
    seed = jnp.stack([jnp.arange(SEEDS, dtype=jnp.uint32), jnp.zeros(SEEDS, jnp.uint32)], axis=1)
    positions = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32)[None], (SEEDS, count))
    _, own, ids = pool()
    return Sampling(seed, jnp.ones(SEEDS), constraint=constraint([ids[own.start]] * SEEDS)), positions


def test_two_tokens_have_the_enumerated_distribution():
    logits, after = rows()
    _, own, ids = pool()
    sampling, positions = every_seed(2)
    tokens = np.asarray(jax.jit(draw)(jnp.broadcast_to(logits[:2], (SEEDS, 2, VOCAB)), positions, sampling)[0])
    first, joint = after(0, ids[own.start]), np.zeros((VOCAB, VOCAB))
    for token in np.flatnonzero(first):
        joint[token] = first[token] * after(1, ids[own.start if token == STOP else own.after(WORDS[token])])
    found = np.zeros_like(joint)
    np.add.at(found, (tokens[:, 0], tokens[:, 1]), 1)
    assert chi_square(found, joint) > 1e-3


@pytest.mark.parametrize("rule", ["coupled", "standard", "block"])
def test_no_rule_changes_the_distribution(rule):
    """The first token of a round of two drafts, whose drafter's logits are others."""
    logits, after = rows()
    _, own, ids = pool()
    sampling, positions = every_seed(3)
    none = jnp.zeros(SEEDS, jnp.int32)
    keep = Rule(rule)

    @jax.jit
    def first():
        theirs = jnp.broadcast_to(jnp.asarray(logits[:2]) * 0.5 + jnp.asarray(logits[1:]), (SEEDS, 2, VOCAB))
        tokens, masked, _ = draw(theirs, positions[:, :2], keep.drafting(sampling, none))
        target = sampling.constraint.masked(jnp.broadcast_to(logits, (SEEDS, 3, VOCAB)), sampling.constraint.along(tokens), None)
        chosen, accepted = keep(Drafts(tokens, masked), target, positions, sampling, none)
        return chosen[:, 0], accepted

    tokens, accepted = first()
    assert 0.2 < np.mean(np.asarray(accepted) > 0) < 0.99
    assert chi_square(np.bincount(tokens, minlength=VOCAB), after(0, ids[own.start])) > 1e-3
