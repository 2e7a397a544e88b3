"""The noise that target and drafters share: Gumbel-distributed, keyed by seed, position and id, the same wherever it is computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pallas_kernels.noise import gumbel, row_keys

M32 = 2**32 - 1
SIZE = 1 << 20


def noise(seeds, positions, ids):
    """Noise of N rows and C ids. seeds: N integers of 64 bits; positions: [N]; ids: [C] or [N, C] -> [N, C] float32 on the host."""
    seeds = np.asarray(seeds, np.uint64)
    words = np.stack([seeds & np.uint64(M32), seeds >> np.uint64(32)], axis=1).astype(np.uint32)
    ids = np.broadcast_to(np.asarray(ids, np.int32), (len(words), np.shape(ids)[-1]))
    return np.asarray(jitted(jnp.asarray(words), jnp.asarray(positions, jnp.int32), jnp.asarray(ids)))


def eager(seed, positions, ids):
    return gumbel(row_keys(seed, positions), ids)


jitted = jax.jit(eager)


def along(axis):
    """2**20 values that differ in one input alone."""
    if axis == "ids":
        return noise([2**40 + 7], [5], np.arange(SIZE))[0]
    counts = np.arange(SIZE, dtype=np.uint64)
    if axis == "positions":
        return noise(np.full(SIZE, 2**40 + 7), counts, [42])[:, 0]
    shift = {"low words of seeds": 0, "high words of seeds": 32}[axis]
    return noise(counts << np.uint64(shift), np.full(SIZE, 5), [42])[:, 0]


@pytest.fixture(scope="module", params=["ids", "positions", "low words of seeds", "high words of seeds"])
def sample(request):
    return along(request.param).astype(np.float64)


def test_moments_are_those_of_a_gumbel_variable(sample):
    error = 1 / np.sqrt(SIZE)
    centred = (sample - np.euler_gamma) / (np.pi / np.sqrt(6))
    assert abs(centred.mean()) < 4 * error
    assert abs((centred**2).mean() - 1) < 4 * np.sqrt(5.4 - 1) * error  # kurtosis 5.4
    assert abs((centred**3).mean() - 1.1395) < 4 * 12 * error
    tail = np.sum(sample > 10)  # a choice is made by the largest value of a vocabulary: expected 47.6
    assert abs(tail - SIZE * np.exp(-10)) < 4 * np.sqrt(SIZE * np.exp(-10))


def test_the_uniforms_are_uniform(sample):
    distance = -np.expm1(-np.exp(-sample))
    assert stats.kstest(distance, "uniform").pvalue > 1e-3
    counts = np.bincount((distance * 4096).astype(int), minlength=4096)
    assert stats.chisquare(counts).pvalue > 1e-3


def test_neighbours_are_uncorrelated(sample):
    uniform = np.exp(-np.exp(-sample)) - 0.5
    for lag in (1, 2, 3, 64, 4096):
        correlation = np.mean(uniform[lag:] * uniform[:-lag]) * 12
        assert abs(correlation) < 4 / np.sqrt(SIZE), f"lag {lag}"
        # Pairs fill the square evenly: a correlation of zero is not yet independence.
        cells = np.floor((uniform[lag:] + 0.5) * 16) * 16 + np.floor((uniform[:-lag] + 0.5) * 16)
        assert stats.chisquare(np.bincount(cells.astype(int), minlength=256)).pvalue > 1e-4, f"lag {lag}"


def test_rows_of_adjacent_seeds_and_positions_are_independent():
    # The rows whose noise must not resemble each other: the next position, the next sample, the other word, and swaps of them.
    keys = [(7, 5), (7, 6), (8, 5), (6, 5), (7 + 2**32, 5), (7 << 32, 5), (5, 7), (0, 0), (0, 1), (1, 0), (2**64 - 1, 0)]
    rows = noise([seed for seed, _ in keys], [position for _, position in keys], np.arange(1 << 16)).astype(np.float64)
    correlations = np.corrcoef(np.exp(-np.exp(-rows)))
    np.fill_diagonal(correlations, 0)
    assert np.abs(correlations).max() < 4.5 / np.sqrt(1 << 16)
    # Nor may the largest values, which decide, stand at the same ids.
    assert len(set(rows.argmax(axis=1))) == len(keys)


def test_every_word_of_the_key_counts():
    base = noise([2**33 + 3], [9], np.arange(64))
    for seed, position in ((2**33 + 2, 9), (2**32 + 3, 9), (3, 9), (2**63 + 2**33 + 3, 9), (2**33 + 3, 10)):
        assert (noise([seed], [position], np.arange(64)) != base).mean() > 0.95, (seed, position)
    assert np.array_equal(noise([2**33 + 3], [9], np.arange(64)), base)


def test_any_subset_of_ids_in_any_order_has_the_same_values():
    whole = noise([11, 2**50], [3, 70000], np.arange(262_144))
    rng = np.random.default_rng(0)
    for size in (1, 3, 16, 33, 4097):  # not multiples of a vector's width
        ids = rng.permutation(262_144)[:size]
        assert np.array_equal(noise([11, 2**50], [3, 70000], ids), whole[:, ids]), size
    per_row = rng.integers(0, 262_144, (2, 501))
    assert np.array_equal(noise([11, 2**50], [3, 70000], per_row), np.take_along_axis(whole, per_row, axis=1))


def test_jit_and_eager_agree_bit_by_bit():
    seed, positions = jnp.asarray([[5, 6], [M32, 0]], jnp.uint32), jnp.asarray([0, 2**31 - 1], jnp.int32)
    ids = jnp.broadcast_to(jnp.arange(1001, dtype=jnp.int32)[None, :], (2, 1001))
    assert np.array_equal(np.asarray(jitted(seed, positions, ids)), np.asarray(eager(seed, positions, ids)))
    chosen = jax.jit(lambda *args: jnp.argmax(eager(*args) * 1.5, axis=-1))(seed, positions, ids)
    assert np.array_equal(chosen, jnp.argmax(eager(seed, positions, ids) * 1.5, axis=-1))


def unmix(y):
    """The argument that the hash's 32-bit finaliser takes to y."""

    def unshift(y, bits):
        x = y
        for _ in range(32 // bits):
            x = y ^ (x >> bits)
        return x

    y = unshift(y, 16) * pow(0xC2B2AE35, -1, 2**32) & M32
    y = unshift(y, 13) * pow(0x85EBCA6B, -1, 2**32) & M32
    return unshift(y, 16)


def of_bits(bits):
    """The noise that 32 given random bits become: id 0 under a key that the hash takes there."""
    key = np.array([[0, unmix(b)] for b in bits], np.uint32)
    return np.asarray(jax.jit(gumbel)(jnp.asarray(key), jnp.zeros((len(bits), 1), jnp.int32)))[:, 0]


def test_every_bit_pattern_gives_a_finite_value_and_larger_ones_smaller_noise():
    edges = [0, 1, 2, 3, 2**8, 2**24 - 1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**32 - 2**9, 2**32 - 2**8, 2**32 - 2**7, M32 - 1, M32]
    found = of_bits(edges)
    exact = -np.log(-np.log1p(-np.minimum((np.array(edges, np.float64) + 0.5) / 2**32, 1 - 2**-24)))
    np.testing.assert_allclose(found, exact, rtol=3e-5)  # the smallest are coarse, and never chosen
    np.testing.assert_allclose(found[:10], exact[:10], rtol=1e-6)
    assert np.isfinite(found).all() and (np.diff(found) <= 0).all()
    assert abs(found[0] - 33 * np.log(2)) < 1e-5 and found[-1] > -2.82
    # The largest values keep all 32 bits: neighbours at the top are told apart.
    assert len(set(of_bits(list(range(4096))))) == 4096
