"""The choice of a token written out in NumPy, for the tests of the kernels that choose."""

import jax.numpy as jnp
import numpy as np


def keys(rng, rows):
    return rng.integers(0, 2**32, (rows, 2), dtype=np.uint32)


def temperatures(rng, rows):
    """Greedy and sampled rows mixed."""
    return rng.choice(np.array([0.0, 0.7, 1.5], np.float32), rows)


def mixed(x):
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def bits(keys, ids):
    """The random bits of token ids: small ones are large noise. keys: [N, 2] uint32, ids: [N, C] -> [N, C] uint32."""
    return mixed(mixed((ids.astype(np.uint32) * np.uint32(0x9E3779B1)) ^ keys[:, :1]) + keys[:, 1:])


def scores(logits, keys, temperature, ids, suppressed=()):
    """What a choice maximises, in float64. logits, ids: [N, C]."""
    logits = np.where(np.isin(ids, suppressed), -np.inf, np.asarray(logits, np.float64))
    distance = np.minimum((bits(keys, ids).astype(np.float64) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    noise = -np.log(-np.log1p(-distance))
    t = temperature[:, None].astype(np.float64)
    return np.where(t > 0, logits / np.where(t > 0, t, 1) + noise, logits)


def assert_best(chosen, scores, ids, tolerance=1e-4):
    """Every chosen id reaches the row's largest score, up to rounding."""
    at = np.argmax(ids == np.asarray(chosen)[:, None], axis=1)
    rows = np.arange(len(ids))
    assert np.array_equal(ids[rows, at], chosen), "an id that is no candidate"
    np.testing.assert_allclose(scores[rows, at], scores.max(axis=1), rtol=0, atol=tolerance)


def array(x, dtype):
    return jnp.asarray(np.asarray(x, np.float32)).astype(dtype)


def exact(x):
    return np.asarray(x.astype(jnp.float32), np.float64)
