"""A head with a guide chooses what the whole table gives: intervals hold, near ties are settled by the table, and nothing is missed."""

import functools
from unittest import mock

import choices
import jax
import jax.numpy as jnp
import numpy as np
import packed_matrices
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import for_cuda

from pallas_kernels import device
from pallas_kernels.lm_head import abstract_guide, guide_of, guide_pays, guided, likely_logits, lm_head, unguided
from pallas_kernels.packed import unpack

pytestmark = pytest.mark.usefixtures("unoptimised")
run = jax.jit(lm_head, static_argnames=("softcap", "suppressed", "implementation"))


def problem(rows, vocab, width, dtype):
    rng = np.random.default_rng([rows, vocab, width])
    hidden, table = (choices.array(rng.standard_normal((count, width)), dtype) for count in (rows, vocab))
    return hidden, table, choices.keys(rng, rows), choices.temperatures(rng, rows)


@settings(max_examples=6)
@given(
    rows=st.integers(1, 9),
    blocks=st.sampled_from([1, 3, 17, 33]),
    width=st.sampled_from([64, 192]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    softcap=st.sampled_from([None, 30.0]),
    suppressed=st.sampled_from([(), (3000,), (3001, 3070)]),
)
def test_the_choice_is_the_whole_tables(rows, blocks, width, dtype, softcap, suppressed):
    """Also where the last block of tokens is not full."""
    hidden, table, keys, temperature = problem(rows, 64 * blocks, width, dtype)
    settings = {"softcap": softcap, "suppressed": suppressed, "first_id": jnp.int32(3000)}
    wanted, maxima = run(hidden, table, keys, temperature, **settings, implementation="xla")
    chosen, values = run(hidden, table, keys, temperature, **settings, guide=guide_of(table), implementation="triton-interpret")
    np.testing.assert_array_equal(chosen, wanted)
    np.testing.assert_allclose(values, maxima, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_product_is_further_off_than_its_distance(dtype):
    """Nor the one with the hidden state for which the 8 bits are worst, to which the distance is no more than a tenth too long."""
    _, table, _, _ = problem(1, 128, 192, dtype)
    guide = guide_of(table)
    off = choices.exact(table) - choices.exact(unpack(guide.codes))
    worst = off / np.linalg.norm(off, axis=1, keepdims=True)
    products = np.abs(np.sum(off * worst, axis=1))
    assert np.all(products <= guide.distance) and np.all(guide.distance <= 1.1 * products)
    step = np.abs(choices.exact(table)).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(off) <= step * (0.51 if dtype == "float32" else 0.9))  # a bfloat16 is a code by a scale, rounded once more


def test_tokens_that_the_guide_cannot_tell_apart_are_told_apart_by_the_table():
    """All rows of a block are the same in 8 bits; the largest product is in the middle, and of equal ones the lowest id wins."""
    rng = np.random.default_rng(0)
    base = np.round(rng.standard_normal(64) * 20).clip(-126, 126)
    base[0] = 127.0  # so that a step of the codes is 1
    rows = np.tile(base, (2048, 1))
    for token, more in ((700, 0.25), (1500, 0.375), (1600, 0.375)):
        rows[token, 1:9] += more
    table = choices.array(rows, "float32")
    guide = guide_of(table)
    np.testing.assert_array_equal(unpack(guide.codes), np.tile(base, (2048, 1)))
    hidden = choices.array(np.ones((3, 64)), "float32")
    keys, temperature = jnp.zeros((3, 2), jnp.uint32), jnp.zeros(3, jnp.float32)
    chosen, values = run(hidden, table, keys, temperature, guide=guide, implementation="triton-interpret")
    assert chosen.tolist() == [1500] * 3
    np.testing.assert_allclose(values, base.sum() + 3, rtol=1e-6)


def test_few_rows_of_the_table_are_multiplied():
    """The table has NaN in all rows that are surely not the best: the choice would be NaN if one of them were read."""
    hidden, table, keys, _ = problem(4, 2048, 192, "float32")
    guide, temperature = guide_of(table), jnp.zeros(4, jnp.float32)
    near, reach = (
        choices.exact(hidden) @ choices.exact(unpack(guide.codes)).T,
        np.linalg.norm(hidden, axis=1)[:, None] * choices.exact(guide.distance),
    )
    matters = np.any(near + reach >= (near - reach).max(axis=1, keepdims=True) - 1e-3, axis=0)
    assert matters.sum() < 100
    holed = jnp.where(matters[:, None], table, jnp.nan)
    whole, _ = run(hidden, table, keys, temperature, implementation="xla")
    chosen, values = run(hidden, holed, keys, temperature, guide=guide, implementation="triton-interpret")
    np.testing.assert_array_equal(chosen, whole)
    assert np.all(np.isfinite(values))


def test_a_row_that_is_no_number_stays_none():
    """In the hidden state or in the table: the value is NaN, so that whoever asked knows, and the token is one of the table."""
    hidden, table, keys, temperature = problem(3, 1024, 64, "float32")
    for broken in ((hidden.at[1].set(jnp.nan), table), (hidden, table.at[7, 3].set(jnp.nan))):
        chosen, values = run(*broken, keys, temperature, guide=guide_of(broken[1]), implementation="triton-interpret")
        assert np.isnan(values[1]) and 0 <= chosen[1] < 1024
        assert np.all(np.isfinite(values[jnp.asarray([0, 2])])) == (broken[0] is not hidden)


def test_a_guide_is_made_in_pieces_and_has_the_announced_shape():
    """The last piece overlaps the one before."""
    table = choices.array(np.random.default_rng(0).standard_normal((64 * 5, 64)), "bfloat16")
    whole = guide_of(table)
    with mock.patch.object(guided, "CHUNK", 128):
        pieces = jax.jit(guide_of.__wrapped__)(table)
    jax.tree.map(np.testing.assert_array_equal, whole, pieces)
    same = jax.tree.map(lambda leaf, shape: (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype), whole, abstract_guide(table))
    assert all(jax.tree.leaves(same))


def test_which_tables_have_a_guide():
    leaf = jax.ShapeDtypeStruct
    assert unguided(leaf((128, 64), jnp.bfloat16)) is None
    assert unguided(leaf((130, 64), jnp.bfloat16)) == "the table is [130, 64]; a guide needs multiples of 64"
    assert unguided(leaf((128, 96), jnp.float32)) == "the table is [128, 96]; a guide needs multiples of 64"
    assert unguided(leaf((128, 64), jnp.float8_e4m3fn)) == "the table is float8_e4m3fn; a guide is made of bfloat16, float16, float32"
    assert unguided(packed_matrices.packed("int8", (128, 64))) == "the table has int8 already"


@pytest.mark.parametrize(("gpu", "rows", "guided_rows"), [("9.0", 5, True), ("9.0", 48, True), ("9.0", 49, False), ("8.0", 5, True)])
def test_few_rows_take_the_kernels_on_a_gpu(gpu, rows, guided_rows):
    """More rows read the table, as all do on a CPU. It pays where it was timed."""
    leaf = jax.ShapeDtypeStruct
    table = leaf((262_144, 1536), jnp.bfloat16)
    arrays = leaf((rows, 1536), jnp.bfloat16), table, leaf((rows, 2), jnp.uint32), leaf((rows,), jnp.float32)
    head = jax.jit(functools.partial(lm_head, softcap=30.0))
    with device.described_as(device.Described("a GPU", gpu)):
        text = for_cuda(head, *arrays, guide=abstract_guide(table))
        assert guide_pays() == (gpu == "9.0")
    assert (text.count('name = "head_ends"'), text.count('name = "head_choice"')) == ((1, 1) if guided_rows else (0, 0))
    on_cpu = jax.jit(functools.partial(lm_head, softcap=30.0, suppressed=(0,)))  # not traced before
    assert not guide_pays() and "head_ends" not in on_cpu.lower(*arrays, guide=abstract_guide(table)).as_text()


likely = jax.jit(likely_logits, static_argnames=("implementation",))


@pytest.mark.slow  # below is the choice among them
@settings(max_examples=8)
@given(
    rows=st.integers(1, 9),
    blocks=st.sampled_from([1, 3, 17, 33]),
    width=st.sampled_from([64, 192, 576]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_the_likeliest_logits_are_the_whole_tables(rows, blocks, width, dtype, seed):
    """Of each row its own number of them, in their order; the others are below. Also where more are wanted than there are tiles."""
    hidden, table, _, _ = problem(rows, 64 * blocks, width, dtype)
    most = np.random.default_rng(seed).integers(1, 140, rows).astype(np.int32)
    wanted = np.asarray(likely(hidden, table, guide_of(table), most, implementation="xla"))
    found = np.asarray(likely(hidden, table, guide_of(table), most, implementation="triton-interpret"))
    near = np.abs(found - wanted) <= 1e-4 * np.abs(wanted).max()
    for i, count in enumerate(np.minimum(most, 64 * blocks)):
        largest = np.argsort(-wanted[i], kind="stable")[:count]
        assert np.all(near[i, largest])
        others = np.setdiff1d(np.arange(64 * blocks), largest)
        assert np.all(near[i, others] | (found[i, others] < wanted[i, largest].min()))
    np.testing.assert_array_equal(np.argmax(found, axis=1), np.argmax(wanted, axis=1))


def test_rows_of_the_table_that_do_not_matter_are_not_read():
    hidden, table, _, _ = problem(4, 64 * 64, 192, "float32")
    guide, most = guide_of(table), jnp.asarray([1, 3, 5, 20], jnp.int32)
    near, reach = (
        choices.exact(hidden) @ choices.exact(unpack(guide.codes)).T,
        np.linalg.norm(hidden, axis=1)[:, None] * choices.exact(guide.distance),
    )
    tiles = np.sort((near - reach).reshape(4, -1, 64).max(axis=2), axis=1)
    matters = np.any(near + reach >= tiles[np.arange(4), -np.asarray(most) - 1][:, None] - 1e-2, axis=0)
    assert 40 < matters.sum() < 800
    holed = jnp.where(matters[:, None], table, jnp.nan)
    assert np.all(np.isfinite(likely(hidden, holed, guide, most, implementation="triton-interpret")))


@pytest.mark.parametrize(("rows", "dtype", "kernels"), [(5, "bfloat16", 1), (9, "bfloat16", 0), (5, "float32", 0)])
def test_few_rows_have_likely_logits_by_kernels_on_a_gpu(rows, dtype, kernels):
    leaf = jax.ShapeDtypeStruct
    table = leaf((262_144, 1536), jnp.dtype(dtype))
    with device.described_as(device.Described("a GPU", "9.0")):
        text = for_cuda(jax.jit(likely_logits), leaf((rows, 1536), table.dtype), table, abstract_guide(table), leaf((rows,), jnp.int32))
    for name in ("head_lower_ends", "head_bound", "head_likely"):
        assert text.count(f'name = "{name}"') == kernels
