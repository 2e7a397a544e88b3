"""Choosing tokens: the distribution is softmax(logits / T), positions and seeds are independent, candidates choose as the full row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from jaxspec.model.layers import softcap
from jaxspec.sampling.choice import Sampling, choose, choose_among_likeliest, choose_by_head, seed_words
from jaxspec.sampling.filters import Filters
from pallas_kernels.noise import gumbel, row_keys

SEEDS = 200_000


def logits_of(vocabulary):
    return (2 * np.random.default_rng(vocabulary).standard_normal(vocabulary)).astype(np.float32)


def softmax(x):
    weights = np.exp(x.astype(np.float64) - x.max())
    return weights / weights.sum()


def counted(chosen, probabilities):
    """p-value of the chi-square test of chosen ids against their probabilities; cells that expect under 5 are counted as one."""
    observed = np.bincount(chosen, minlength=len(probabilities)).astype(np.float64)
    expected = probabilities * len(chosen)
    rare = expected < 5
    observed, expected = (np.append(x[~rare], x[rare].sum()) if rare.any() else x for x in (observed, expected))
    return stats.chisquare(observed, expected).pvalue


def jointly(first, second, probabilities):
    """p-value of pairs of chosen ids being drawn independently."""
    return counted(first * len(probabilities) + second, np.outer(probabilities, probabilities).reshape(-1))


def sampling_of(seeds, temperature):
    seeds = np.asarray(seeds, np.uint64)
    words = np.stack([seeds & np.uint64(0xFFFFFFFF), seeds >> np.uint64(32)], axis=1).astype(np.uint32)
    return Sampling(jnp.asarray(words), jnp.full(len(words), temperature, jnp.float32))


chosen_by = jax.jit(choose)


@jax.jit
def draw(logits, positions, sampling):
    """Every seed's choices from one row of logits at these positions: [seeds, positions]."""
    rows, count = sampling.temperature.shape[0], positions.shape[0]
    return choose(
        jnp.broadcast_to(logits[None, None, :], (rows, count, logits.shape[0])),
        jnp.broadcast_to(positions[None, :], (rows, count)),
        sampling,
    )


def chosen(logits, positions, temperature, seeds=range(SEEDS)):
    return np.asarray(draw(jnp.asarray(logits), jnp.asarray(positions, jnp.int32), sampling_of(seeds, temperature))).T


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("vocabulary", [7, 300])
def test_the_distribution_is_the_softmax(vocabulary, temperature):
    logits = logits_of(vocabulary)
    found = chosen(logits, [17], temperature)[0]
    assert counted(found, softmax(logits / temperature)) > 1e-3
    # The test has teeth: another temperature, a tenth away, would not pass.
    assert counted(found, softmax(logits / (temperature * 1.1))) < 1e-9


def test_seeds_of_64_bits_draw_from_the_same_distribution():
    logits = logits_of(7)
    high = np.arange(SEEDS, dtype=np.uint64) << np.uint64(32)
    found = chosen(logits, [17, 18], 1.0, high + np.uint64(99))[0]
    assert counted(found, softmax(logits)) > 1e-3
    assert jointly(found, chosen(logits, [17, 18], 1.0, high + np.uint64(100))[0], softmax(logits)) > 1e-3


def test_successive_positions_and_successive_seeds_are_independent():
    logits = logits_of(7)
    probabilities = softmax(logits / 0.7)
    first, second = chosen(logits, [17, 18], 0.7)
    assert counted(second, probabilities) > 1e-3
    assert jointly(first, second, probabilities) > 1e-3
    assert jointly(first[:-1], first[1:], probabilities) > 1e-3  # sample i of n uses seed + i
    assert jointly(first[:-1], second[1:], probabilities) > 1e-3


def test_the_tests_above_find_wrong_rules():
    logits = logits_of(7)
    probabilities = softmax(logits)
    seeds = sampling_of(range(SEEDS), 1.0).seed

    def wrong(positions, ids):
        keys = row_keys(seeds, jnp.full((SEEDS,), positions, jnp.int32))
        ids = jnp.broadcast_to(jnp.asarray(ids, jnp.int32)[None, :], (SEEDS, 7))
        return np.asarray(jnp.argmax(jnp.asarray(logits)[None, :] + gumbel(keys, ids), axis=-1))

    right, following = wrong(17, range(7)), wrong(18, range(7))
    assert np.array_equal(right, chosen(logits, [17, 18], 1.0)[0])
    assert counted(right, probabilities) > 1e-3 and jointly(right, following, probabilities) > 1e-3
    # Noise keyed without the position: each position alone is right, two together are not.
    assert jointly(right, wrong(17, range(7)), probabilities) < 1e-9
    # Noise keyed without the id: the largest logit always wins. Two ids that share theirs: a little off, and found.
    assert counted(wrong(17, [0] * 7), probabilities) < 1e-9
    shared = np.arange(7)
    two = np.argsort(probabilities)[-2:]
    shared[two] = two[0]
    assert counted(wrong(17, shared), probabilities) < 1e-9


def test_temperature_zero_is_argmax_whatever_the_seed():
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((6, 4, 50)).astype(np.float32)
    logits[2, 1, [7, 30]] = 9.0  # of equal values the first wins
    positions = jnp.asarray(rng.integers(0, 1000, (6, 4)), jnp.int32)
    for seed in (0, 1, 2**40):
        found = chosen_by(jnp.asarray(logits), positions, sampling_of([seed] * 6, 0.0))
        assert found.dtype == jnp.int32 and np.array_equal(found, logits.argmax(-1))
    # Rows choose for themselves: greedy beside sampled.
    mixed = Sampling(sampling_of(range(6), 1.0).seed, jnp.asarray([0, 1, 0, 1, 0, 1], jnp.float32))
    greedy, hot = chosen_by(jnp.asarray(logits), positions, mixed), chosen_by(jnp.asarray(logits), positions, sampling_of(range(6), 1.0))
    assert np.array_equal(greedy[::2], logits[::2].argmax(-1)) and np.array_equal(greedy[1::2], hot[1::2])
    # A temperature near zero is all but greedy, without overflow to a tie.
    cold = chosen_by(jnp.asarray(logits * 30), positions, sampling_of(range(6), 1e-36))
    untied = np.ones((6, 4), bool)
    untied[2, 1] = False
    assert np.array_equal(np.asarray(cold)[untied], logits.argmax(-1)[untied])


def test_candidates_choose_what_the_full_row_would_with_all_others_masked():
    rng = np.random.default_rng(4)
    rows, count, vocabulary = 64, 3, 90
    logits = rng.standard_normal((rows, count, vocabulary)).astype(np.float32)
    positions = jnp.asarray(rng.integers(0, 5000, (rows, count)), jnp.int32)
    temperature = np.where(np.arange(rows) % 4 == 0, 0.0, 0.9).astype(np.float32)
    sampling = Sampling(sampling_of(range(rows), 0.9).seed, jnp.asarray(temperature))
    whole = np.asarray(chosen_by(jnp.asarray(logits), positions, sampling))
    for size in (vocabulary, 20):
        ids = np.argsort(rng.random(logits.shape), axis=-1)[..., :size].astype(np.int32)
        masked = np.full_like(logits, -np.inf)
        np.put_along_axis(masked, ids, np.take_along_axis(logits, ids, -1), -1)
        found = chosen_by(jnp.asarray(np.take_along_axis(logits, ids, -1)), positions, sampling, jnp.asarray(ids))
        assert np.array_equal(found, chosen_by(jnp.asarray(masked), positions, sampling)), size
        if size == vocabulary:
            assert np.array_equal(found, whole)
        else:  # and where the winner is among the candidates, it wins
            among = (ids == whole[..., None]).any(-1)
            assert 0.1 < among.mean() < 0.5 and np.array_equal(np.asarray(found)[among], whole[among])


def test_a_masked_id_is_never_chosen():
    logits = logits_of(7)
    logits[[1, 4]] = -np.inf
    for temperature in (0.0, 0.7):
        assert not {1, 4} & set(chosen(logits, [3, 4], temperature)[0])


def test_a_seed_is_split_into_low_and_high_words():
    assert seed_words(0) == (0, 0)
    assert seed_words(5 + (9 << 32)) == (5, 9)
    assert seed_words(2**64 - 1) == (2**32 - 1, 2**32 - 1)


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
def test_a_head_chooses_as_its_logits_do(implementation):
    """Greedy and sampled rows of two sequences, with a suppressed token that would have been chosen."""
    rng = np.random.default_rng(7)
    hidden, table = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 3, 32), (101, 32)))
    positions, sampling = jnp.asarray([[5, 6, 7], [0, 1, 2]], jnp.int32), sampling_of([1, 2**40], jnp.asarray([0.0, 0.7], jnp.float32))
    logits = softcap(jnp.einsum("bth,vh->btv", hidden, table), 30.0)
    unwanted = int(choose(logits, positions, sampling)[1, 2])
    want = choose(logits.at[..., unwanted].set(-jnp.inf), positions, sampling)
    settings = {"softcap": 30.0, "suppressed": (unwanted,), "implementation": implementation}
    found, most = choose_by_head(hidden, table, positions, sampling, **settings)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_allclose(most[0], jnp.take_along_axis(logits[0], want[0, :, None], axis=-1)[:, 0], rtol=1e-5)


def test_a_softcap_of_the_likeliest_alone_changes_no_choice():
    """Rows without a temperature beside others, under filters. A softcap makes logits equal that were not, some of them within a
    nucleus and some at its edge: the lowest id counts as the first, as it does in a row of which all are capped."""
    rng = np.random.default_rng(8)
    rows, count, vocabulary = 48, 4, 700
    logits = (9 * rng.standard_normal((rows, count, vocabulary))).astype(np.float32)
    logits[..., rng.integers(0, vocabulary, 60)] = 400 + np.arange(60, dtype=np.float32)  # all of them are 30 then
    logits[: rows // 2, ..., rng.integers(0, vocabulary, 60)] = 0
    logits[:, 0] = np.where(logits[:, 0] > 100, 0, logits[:, 0])
    values, positions = jnp.asarray(logits), jnp.asarray(rng.integers(0, 5000, (rows, count)), jnp.int32)
    temperature = jnp.asarray(np.where(np.arange(rows) % 3 == 0, 0.0, 5.0), jnp.float32)
    top_k, top_p = jnp.asarray(rng.integers(1, 129, rows), jnp.int32), jnp.asarray(rng.uniform(0.2, 1.1, rows).clip(max=1), jnp.float32)
    filters = Filters(top_k, top_p, jnp.zeros(rows, jnp.float32), scope="top")
    sampling = Sampling(sampling_of(range(rows), 1.0).seed, temperature, filters)
    for cap in (30.0, None):
        capped = softcap(values, cap)
        found, most = jax.jit(choose_among_likeliest, static_argnames="softcap")(values, positions, sampling, softcap=cap)
        np.testing.assert_array_equal(found, chosen_by(capped, positions, sampling))
        np.testing.assert_allclose(most, capped.max(-1), rtol=1e-6)  # one program rounds tanh as another does or not
