"""top_k, top_p and min_p against their definitions, over whole rows and over candidates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from definitions import row_probabilities

from jaxspec.sampling import filters
from jaxspec.sampling.choice import Sampling, choose, probabilities
from jaxspec.sampling.filters import CANDIDATES, Filters, filtered

pytestmark = pytest.mark.usefixtures("unoptimised")

ROWS, VOCAB = 40, 700


@functools.cache
def logits():
    """Rows of every temper: sharp, flat, with equal values, with masked ids, all equal."""
    rng = np.random.default_rng(0)
    rows = rng.normal(0, rng.uniform(0.05, 6, (ROWS, 1)), (ROWS, VOCAB)).astype(np.float32)
    rows[5] = np.round(rows[5])
    rows[6] = np.round(4 * rows[6]) / 4
    rows[7, ::3] = -np.inf
    rows[8] = 0.0
    rows[9, :350] = -0.0
    return rows


def settings(seed, few):
    """Filters of each row. few: every top_k is among the candidates."""
    rng = np.random.default_rng(seed)
    top_k = rng.integers(1, CANDIDATES + 1, ROWS) if few else rng.choice([0, 0, 1, 5, 64, 128, 129, 400, 10_000], ROWS)
    top_p = np.where(rng.random(ROWS) < 0.3, 1, rng.uniform(0.01, 0.999, ROWS))
    min_p = np.where(rng.random(ROWS) < 0.5, 0, rng.uniform(0, 0.5, ROWS))
    temperature = rng.choice([0.0, 0.3, 1.0, 1.7], ROWS)
    return temperature.astype(np.float32), top_k.astype(np.int32), top_p.astype(np.float32), min_p.astype(np.float32)


@functools.partial(jax.jit, static_argnames="scope")
def kept(rows, ids, temperature, top_k, top_p, min_p, scope):
    out, names = filtered(rows[:, None], None if ids is None else ids[:, None], temperature, Filters(top_k, top_p, min_p, scope=scope))
    return out[:, 0], None if names is None else names[:, 0]


def kept_ids(rows, values, scope, ids=None):
    out, names = map(lambda x: None if x is None else np.asarray(x), kept(rows, ids, *values, scope=scope))
    return [set(np.flatnonzero(row > -np.inf) if names is None else names[i][row > -np.inf]) for i, row in enumerate(out)]


def defined(rows, values):
    """Of each row the ids that the definition keeps, and those whose fate a rounding decides."""

    def ids(row, t, k, p, m):
        return set(np.flatnonzero(row_probabilities(row, float(t), int(k), float(p), float(m))))

    found = []
    for row, t, k, p, m in zip(rows, *values, strict=True):
        less, more = (ids(row, t, k, min(p * (1 + e), 1), m * (1 - e)) for e in (-1e-5, 1e-5))
        found.append((ids(row, t, k, p, m), less ^ more))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_a_whole_row_is_filtered_as_defined(seed):
    values = settings(seed, few=False)
    compared = 0
    for i, (found, (expected, near)) in enumerate(zip(kept_ids(logits(), values, "search"), defined(logits(), values), strict=True)):
        if i == 8 and values[2][i] < 1:  # equal values share their fate, where a sort would cut between them
            assert found == set(range(VOCAB)) or values[0][i] == 0
        elif values[0][i] > 0 and i not in (5, 6, 9):
            assert found ^ expected <= near, (i, [v[i] for v in values])
            compared += not near
    assert compared > 12


@pytest.mark.parametrize("seed", range(3))
def test_the_best_candidates_are_filtered_as_the_whole_row(seed):
    values = settings(seed, few=True)
    ids = np.random.default_rng(seed).permutation(VOCAB).astype(np.int32)
    names = np.broadcast_to(ids, (ROWS, VOCAB))
    few, whole = kept_ids(logits(), values, "top"), kept_ids(logits(), values, "search")
    renamed = kept_ids(logits(), values, "top", names)
    for i in range(ROWS):
        if i not in (8, 9):  # of hundreds of equal logits the candidates are the first
            assert few[i] == whole[i] and {ids[x] for x in few[i]} == renamed[i], i
    assert kept_ids(logits(), values, "whole") == whole


def test_min_p_alone_needs_no_search():
    temperature, top_k, top_p, min_p = settings(3, few=True)
    values = temperature, 0 * top_k, 0 * top_p + 1, min_p
    assert kept_ids(logits(), values, "whole") == kept_ids(logits(), values, "search")


def test_equal_logits_share_their_fate():
    row = np.array([[3, 1, 3, 2, 2, 2, 0]], np.float32)
    one = np.ones(1, np.float32)
    for k, kept_by_k in ((1, {0, 2}), (2, {0, 2}), (3, {0, 2, 3, 4, 5}), (6, {0, 1, 2, 3, 4, 5}), (0, set(range(7)))):
        values = one, np.full(1, k, np.int32), one, 0 * one
        assert kept_ids(row, values, "search") == [kept_by_k]
        assert not k or kept_ids(row, values, "top") == [kept_by_k]
    p = np.exp(row[0]) / np.exp(row[0]).sum()
    for top_p, kept_by_p in ((p[0], {0, 2}), (p[0] * 2.01, {0, 2, 3, 4, 5}), (0.999, set(range(7)))):
        values = one, np.zeros(1, np.int32), np.full(1, top_p, np.float32), 0 * one
        assert kept_ids(row, values, "search") == [kept_by_p]


def test_a_search_finds_what_a_sort_finds():
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.normal(0, 10.0 ** rng.integers(-30, 30, 500)), [0.0, -0.0, np.inf, -np.inf]]).astype(np.float32)
    keys = np.asarray(filters._sortable(jnp.asarray(x)))
    order = np.argsort(x)
    assert (np.diff(keys[order].astype(np.int64)) >= 0).all() and keys[500] == keys[501]
    assert np.array_equal(np.asarray(filters._unsortable(jnp.asarray(keys))), x)
    for k in (1, 2, 250, 504):
        found = filters.largest_key(jnp.asarray(keys)[None, None], jnp.ones((1, 1, len(x))), jnp.full((1, 1), float(k)))
        assert found == np.sort(keys)[-k]


def test_tokens_are_chosen_and_weighed_by_what_is_kept():
    values = settings(2, few=True)
    sampling = Sampling(jnp.zeros((ROWS, 2), jnp.uint32), jnp.asarray(values[0]), Filters(*map(jnp.asarray, values[1:]), scope="top"))
    position = jnp.arange(ROWS, dtype=jnp.int32)[:, None]
    rows = jnp.asarray(logits())[:, None]
    chosen = np.asarray(jax.jit(choose)(rows, position, sampling))[:, 0]
    mass, ids = map(lambda x: np.asarray(x)[:, 0], jax.jit(probabilities)(rows, sampling))
    np.testing.assert_allclose(mass.sum(-1), 1, rtol=1e-5)
    for i in range(ROWS):
        if i in (5, 6, 8, 9) or values[0][i] == 0:
            continue
        expected = row_probabilities(logits()[i], *(float(v[i]) if j != 1 else int(v[i]) for j, v in enumerate(values)))
        assert expected[chosen[i]] > 0
        found = np.zeros(VOCAB)
        np.add.at(found, ids[i], mass[i])
        np.testing.assert_allclose(found, expected, atol=2e-5)
    greedy = values[0] == 0
    assert np.array_equal(chosen[greedy], logits()[greedy].argmax(-1)) and (mass[greedy].max(-1) == 1).all()


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_one_filter_alone_is_that_of_transformers(name):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    value, warper = {
        "top_k": (40, hf.TopKLogitsWarper(40)),
        "top_p": (0.7, hf.TopPLogitsWarper(0.7)),
        "min_p": (0.2, hf.MinPLogitsWarper(0.2)),
    }[name]
    rows = logits()[10:]
    expected = warper(None, torch.tensor(rows)).numpy()
    values = [np.full(len(rows), x, t) for x, t in ((1, np.float32), (0, np.int32), (1, np.float32), (0, np.float32))]
    values[["top_k", "top_p", "min_p"].index(name) + 1][:] = value
    assert kept_ids(rows, values, "search") == [set(np.flatnonzero(row > -np.inf)) for row in expected]


TINY, HUGE = np.float32(1e-45), np.float32(2.0**99)
LEAST = np.float32(1.2e-38)  # the smallest that is no denormal, about
EXTREMES = [
    *({"top_p": x} for x in (0, TINY, 1e-38, LEAST, 1e-30)),
    *({"min_p": x} for x in (TINY, LEAST, 1)),
    *({"temperature": t, "top_p": 0.9, "min_p": m} for t in (TINY, LEAST, 1e-30, 1e-5, 1e30, HUGE) for m in (0, TINY, 0.5)),
    *({"temperature": t, "top_p": 1e-38, "min_p": 1} for t in (TINY, HUGE)),
]


@pytest.mark.parametrize("mode", ["eager", "jitted"])
@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("scope", ["search", "whole", "top"])
def test_the_most_likely_token_stays_however_small_or_large_the_settings(scope, top_k, mode):
    """What a float32 takes for 0 must not drop all tokens: the first of a row without any would be chosen for ever."""
    asked = [{"temperature": 1, "top_k": top_k, "top_p": 1, "min_p": 0, **changes} for changes in EXTREMES]
    values = [np.array([x[name] for x in asked], np.int32 if name == "top_k" else np.float32) for name in asked[0]]
    row = np.array([-3, 1, 2.5, 4, -1, 3.5, 0, 2], np.float32)
    rows = jnp.asarray(np.broadcast_to(row, (len(asked), 1, len(row))))
    sampling = Sampling(jnp.ones((len(asked), 2), jnp.uint32), jnp.asarray(values[0]), Filters(*map(jnp.asarray, values[1:]), scope=scope))
    position = jnp.zeros((len(asked), 1), jnp.int32)

    def both():
        return choose(rows, position, sampling), *probabilities(rows, sampling)

    chosen, mass, ids = both() if mode == "eager" else jax.jit(both)()
    for i, settings in enumerate(asked):
        p = np.zeros(len(row))
        p[np.arange(len(row)) if ids is None else np.asarray(ids)[i, 0]] = np.asarray(mass)[i, 0]
        assert abs(p.sum() - 1) < 1e-5 and p[3] == p.max() and p[chosen[i, 0]] > 0, (settings, p)
        alone = settings["min_p"] == 1 or settings["temperature"] <= 1e-5 or (settings["top_p"] < 1e-3 and scope != "whole")
        if alone:
            assert chosen[i, 0] == 3, settings
        elif settings["temperature"] >= 1e30 and settings["top_p"] == 0.9 and not top_k and scope == "search":
            assert p.min() > 0.1, p  # all alike
