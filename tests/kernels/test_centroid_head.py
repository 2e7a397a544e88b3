"""The centroid head: the best centroids' tokens with their logits, and the choice among them, against NumPy and step by step."""

import functools

import choices
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import for_cuda

from pallas_kernels.centroid_head import candidates, choose
from pallas_kernels.centroid_head.shapes import SHAPES

pytestmark = pytest.mark.usefixtures("unoptimised")
BOTH = ("xla", "triton-interpret")
STATIC = ("top_k", "suppressed", "implementation")
run_candidates = jax.jit(candidates, static_argnames=STATIC)
run_choose = jax.jit(choose, static_argnames=STATIC)


@functools.cache
def problem(rows, centroids, each, width, dtype, whole=False):
    """The head's arrays, keys and temperatures; whole: small integers, so that products are exact and many are equal."""
    rng = np.random.default_rng([rows, centroids, each, width])

    def draw(count):
        values = rng.integers(-1, 2, (count, width)) if whole else rng.standard_normal((count, width))
        return choices.array(values, dtype)

    ordering = rng.permutation(centroids * each).astype(np.int32)
    arrays = draw(rows), draw(centroids), ordering, draw(centroids * each)
    return arrays, choices.keys(rng, rows), choices.temperatures(rng, rows)


def expected(arrays, top_k, suppressed=()):
    """Logits and ids of the candidates, in NumPy."""
    hidden, centroids, ordering, table = arrays
    products = choices.exact(hidden) @ choices.exact(centroids).T
    selected = np.sort(np.argsort(-products, axis=1, kind="stable")[:, :top_k], axis=1)
    ids = ordering.reshape(centroids.shape[0], -1)[selected].reshape(hidden.shape[0], -1)
    logits = np.einsum("nch,nh->nc", choices.exact(table)[ids], choices.exact(hidden))
    return np.where(np.isin(ids, suppressed), -np.inf, logits), ids


def check(case, top_k, suppressed):
    arrays, keys, temperature = case
    logits, ids = expected(arrays, top_k, suppressed)
    scores = choices.scores(logits, keys, temperature, ids)
    for implementation in BOTH:
        static = {"top_k": top_k, "suppressed": suppressed, "implementation": implementation}
        found, where = run_candidates(*arrays, **static)
        np.testing.assert_array_equal(where, ids, err_msg=implementation)
        np.testing.assert_allclose(found, logits, rtol=0, atol=1e-4, err_msg=implementation)
        choices.assert_best(run_choose(*arrays, keys, temperature, **static), scores, ids)


@settings(max_examples=4)
@given(
    rows=st.integers(1, 5),
    centroids=st.integers(2, 40),
    each=st.integers(1, 40),
    width=st.integers(1, 70),
    part=st.floats(0, 1),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    suppressed=st.sampled_from([(), (0, 3, 17)]),
)
def test_both_give_the_best_centroids_tokens_and_choose_among_them(rows, centroids, each, width, part, dtype, suppressed):
    suppressed = suppressed if each > len(suppressed) else ()  # a token is left to choose
    check(problem(rows, centroids, each, width, dtype), max(1, round(part * centroids)), suppressed)


def test_centroids_are_chosen_with_their_bias():
    """Also where fewer than a row takes have another one than -inf: of the rest, the first come."""
    arrays, _, _ = problem(6, 24, 5, 8, "float32")
    hidden, centroids, ordering, _ = arrays
    rng = np.random.default_rng(0)
    bias = np.where(rng.random((6, 24)) < np.linspace(0, 0.9, 6)[:, None], rng.normal(0, 9, (6, 24)), -np.inf).astype(np.float32)
    scores = choices.exact(hidden) @ choices.exact(centroids).T + bias
    selected = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :7], axis=1)
    ids = ordering.reshape(24, -1)[selected].reshape(6, -1)
    for implementation in BOTH:
        found = run_candidates(*arrays, top_k=7, bias=bias, implementation=implementation)[1]
        np.testing.assert_array_equal(found, ids, err_msg=implementation)


def test_of_equal_centroids_the_lower_and_of_equal_tokens_the_lowest_id():
    arrays, keys, temperature = problem(6, 24, 20, 4, "bfloat16", whole=True)
    logits, ids = expected(arrays, 7)
    best = np.where(logits == logits.max(axis=1, keepdims=True), ids, 10**6)
    assert ((best < 10**6).sum(axis=1) > 1).all()
    for implementation in BOTH:
        static = {"top_k": 7, "implementation": implementation}
        found, where = run_candidates(*arrays, **static)
        assert np.array_equal(where, ids) and np.array_equal(found, logits), implementation
        assert np.array_equal(run_choose(*arrays, keys, np.zeros_like(temperature), **static), best.min(axis=1)), implementation


def test_the_noise_is_the_position_keyed_one_bit_by_bit():
    (hidden, centroids, ordering, table), keys, temperature = problem(5, 16, 24, 8, "float32")
    arrays = hidden, centroids, ordering, jnp.zeros_like(table)
    ids = expected(arrays, 6)[1]
    smallest = np.take_along_axis(ids, choices.bits(keys, ids).argmin(axis=1)[:, None], axis=1)[:, 0]
    for implementation in BOTH:
        chosen = run_choose(*arrays, keys, np.ones_like(temperature), top_k=6, implementation=implementation)
        assert np.array_equal(chosen, smallest), implementation


def test_what_fills_a_program_past_the_last_candidate_is_not_chosen():
    # Of 15 candidates in a program of 32, the rest stands on token 0, which is no candidate here and would win by far.
    (hidden, centroids, ordering, table), keys, temperature = problem(1, 4, 5, 8, "float32")
    worst = int(np.argmin(choices.exact(hidden) @ choices.exact(centroids).T))
    ordering = ordering.copy()
    ordering[ordering == 0], ordering[5 * worst] = ordering[5 * worst], 0
    winning = table.at[0].set(100 * hidden[0])
    assert 0 not in expected((hidden, centroids, ordering, table), 3)[1]
    chosen = [
        run_choose(hidden, centroids, ordering, winning, keys, temperature, top_k=3, implementation=implementation)
        for implementation in BOTH
    ]
    assert chosen[0] != 0 and chosen[0] == chosen[1]


def test_where_nothing_can_be_chosen_the_id_is_still_a_candidate():
    (hidden, centroids, ordering, table), keys, temperature = problem(2, 4, 5, 8, "float32")
    spoilt = hidden.at[0].set(jnp.nan), centroids, ordering, table
    everything = (hidden, centroids, ordering, table)
    for implementation in BOTH:
        static = {"top_k": 3, "implementation": implementation}
        chosen = run_choose(*everything, keys, temperature, suppressed=tuple(range(20)), **static)
        candidate_ids = expected(everything, 3)[1]
        assert all(chosen[i] in candidate_ids[i] for i in range(2)), implementation
        chosen = run_choose(*spoilt, keys, temperature, **static)
        assert 0 <= chosen[0] < 20 and chosen[1] == run_choose(*everything, keys, temperature, **static)[1], implementation


@pytest.mark.parametrize("name", SHAPES)
def test_every_real_shape_lowers_for_cuda_as_two_kernels_without_a_sort(name):
    shape, leaf = SHAPES[name], jax.ShapeDtypeStruct
    arrays = (
        leaf((shape.rows, shape.hidden), jnp.bfloat16),
        leaf((shape.centroids, shape.hidden), jnp.bfloat16),
        leaf((shape.vocab,), jnp.int32),
        leaf((shape.vocab, shape.hidden), jnp.bfloat16),
    )
    choice = leaf((shape.rows, 2), jnp.uint32), leaf((shape.rows,), jnp.float32)
    static = {"top_k": shape.top_k, "suppressed": (0, 258_881), "implementation": "triton"}
    for function, args, kernel in (
        (run_candidates, arrays, "centroid_candidates"),
        (run_choose, (*arrays, *choice), "centroid_choose"),
    ):
        text = for_cuda(function, *args, **static)
        assert text.count(f'name = "{kernel}"') == 1 and text.count('name = "select"') == 1
        assert "sort" not in text and "top_k" not in text


def test_what_does_not_fit_is_refused_by_name():
    (hidden, centroids, ordering, table), keys, temperature = problem(2, 4, 5, 8, "float32")

    def give(message, *, hidden=hidden, centroids=centroids, ordering=ordering, table=table, top_k=3, **options):
        with pytest.raises(ValueError, match=message):
            candidates(hidden, centroids, ordering, table, top_k=top_k, **options)

    give("implementation is 'cuda'; expected 'auto' or one of 'xla', 'triton', 'triton-interpret'", implementation="cuda")
    small = {name: x.astype(jnp.float8_e4m3fn) for name, x in (("hidden", hidden), ("centroids", centroids), ("table", table))}
    give("'triton' cannot serve this: the table is float8_e4m3fn; the kernel takes bfloat16", **small, implementation="triton")
    suppressed = tuple(range(33))
    give("cannot serve this: 33 ids are suppressed; the kernel takes at most 32", suppressed=suppressed, implementation="triton")
    wide = {"hidden": jnp.zeros((1, 1025)), "centroids": jnp.zeros((4, 1025)), "table": jnp.zeros((20, 1025))}
    give("cannot serve this: the table is 1025 wide; the kernel holds at most 1024", **wide, implementation="triton")
    many = {"centroids": jnp.zeros((20_000, 8)), "table": jnp.zeros((20_000, 8)), "ordering": jnp.zeros(20_000, jnp.int32)}
    give("cannot serve this: there are 20000 centroids; the kernel holds at most 16384", **many, implementation="triton")
    give(r"are float32\[2, 8\], float32\[4, 7\], float32\[20, 8\]; expected \[N, h\], \[C, h\] and \[V, h\]", centroids=centroids[:, :7])
    give(r"are float32\[2, 8\], bfloat16\[4, 8\], float32\[20, 8\]; expected", centroids=centroids.astype(jnp.bfloat16))
    give(r"token_ordering is \[19\] for a table of 20 rows and 4 centroids; expected one id a row", ordering=ordering[:19])
    give(r"token_ordering is \[20\] for a table of 20 rows and 3 centroids; expected one id a row", centroids=centroids[:3])
    for top_k in (0, 5):
        give(f"top_k is {top_k}; expected 1 .. 4, the number of centroids", top_k=top_k)
    with pytest.raises(ValueError, match=r"keys are \[2, 1\] and temperatures \[2\]; expected \[N, 2\] and \[N\] for 2 rows"):
        choose(hidden, centroids, ordering, table, keys[:, :1], temperature, top_k=2)
