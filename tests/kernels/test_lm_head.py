"""The fused head chooses what logits and noise of the whole vocabulary would: the reference, and the kernel step by step."""

import dataclasses
import functools

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
from pallas_kernels.choice import best
from pallas_kernels.lm_head import choose, lm_head, most_rows, packed_mosaic, triton
from pallas_kernels.lm_head.mosaic_choice import Choice
from pallas_kernels.lm_head.shapes import SHAPES
from pallas_kernels.noise import gumbel
from pallas_kernels.packed import KINDS, abstract, unpack
from pallas_kernels.packed.mosaic import SHARED_MEMORY

pytestmark = pytest.mark.usefixtures("unoptimised")
BOTH = ("xla", "triton-interpret")
run = jax.jit(lm_head, static_argnames=("softcap", "suppressed", "implementation"))


@functools.cache
def problem(rows, vocab, width, dtype, whole=False):
    """Hidden states, a table, keys and temperatures; whole: small integers, so that products are exact and many are equal."""
    rng = np.random.default_rng([rows, vocab, width])

    def draw(count):
        values = rng.integers(-1, 2, (count, width)) if whole else rng.standard_normal((count, width))
        return choices.array(values, dtype)

    hidden, table = draw(rows), draw(vocab)
    return hidden, table, choices.keys(rng, rows), choices.temperatures(rng, rows)


def expected(hidden, table, keys, temperature, softcap, suppressed, first_id):
    logits = choices.exact(hidden) @ choices.exact(table).T
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    ids = np.broadcast_to(np.arange(table.shape[0]) + first_id, logits.shape)
    return choices.scores(logits, keys, temperature, ids, suppressed), ids


@settings(max_examples=8)
@given(
    rows=st.integers(1, 56),
    vocab=st.integers(3, 400),
    width=st.integers(1, 140),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    softcap=st.sampled_from([None, 30.0]),
    suppressed=st.sampled_from([(), (1,), (0, 2, 70)]),
    first_id=st.sampled_from([None, 3000]),
)
def test_both_choose_what_the_whole_row_of_logits_would(rows, vocab, width, dtype, softcap, suppressed, first_id):
    hidden, table, keys, temperature = problem(rows, vocab, width, dtype)
    suppressed = tuple(i + (first_id or 0) for i in suppressed)
    scores, ids = expected(hidden, table, keys, temperature, softcap, suppressed, first_id or 0)
    for implementation in BOTH:
        shard = None if first_id is None else jnp.int32(first_id)
        chosen, maxima = run(
            hidden, table, keys, temperature, softcap=softcap, suppressed=suppressed, first_id=shard, implementation=implementation
        )
        choices.assert_best(chosen, scores, ids)
        np.testing.assert_allclose(maxima, scores.max(axis=1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_equal_logits_the_lowest_id_is_chosen(dtype):
    hidden, table, keys, temperature = problem(20, 700, 5, dtype, whole=True)
    logits = choices.exact(hidden) @ choices.exact(table).T
    assert ((logits == logits.max(axis=1, keepdims=True)).sum(axis=1) > 1).sum() > 10
    for implementation in BOTH:
        chosen, maxima = run(hidden, table, keys, np.zeros_like(temperature), implementation=implementation)
        assert np.array_equal(chosen, logits.argmax(axis=1)), implementation
        assert np.array_equal(maxima, logits.max(axis=1)), implementation


@pytest.mark.parametrize("first_id", [0, 262_000])
def test_the_noise_is_the_position_keyed_one_bit_by_bit(first_id):
    # All logits are 0, so the choice is the id with the smallest bits, and what it reaches is its noise.
    rng = np.random.default_rng(1)
    keys, ids = choices.keys(rng, 40), np.broadcast_to(np.arange(300) + first_id, (40, 300))
    smallest = choices.bits(keys, ids).argmin(axis=1) + first_id
    noise = gumbel(jnp.asarray(keys), jnp.asarray(smallest[:, None], jnp.int32))[:, 0]
    for implementation in BOTH:
        chosen, maxima = run(
            jnp.zeros((40, 16)),
            jnp.zeros((300, 16)),
            keys,
            np.ones(40, np.float32),
            first_id=jnp.int32(first_id),
            implementation=implementation,
        )
        assert np.array_equal(chosen, smallest), implementation
        np.testing.assert_allclose(maxima, noise, rtol=1e-6)


def test_shards_of_a_vocabulary_together_choose_what_the_whole_does():
    hidden, table, keys, temperature = problem(6, 384, 32, "float32")
    whole, best = run(hidden, table, keys, temperature, softcap=30.0)
    shards = [
        run(hidden, table[i : i + 128], keys, temperature, softcap=30.0, first_id=jnp.int32(i), implementation="triton-interpret")
        for i in (0, 128, 256)
    ]
    ids, maxima = (np.stack(x) for x in zip(*shards, strict=True))
    assert np.array_equal(ids[maxima.argmax(axis=0), np.arange(6)], whole)
    np.testing.assert_allclose(maxima.max(axis=0), best, rtol=1e-5)


def test_more_rows_than_a_program_holds_take_several_passes(monkeypatch):
    monkeypatch.setattr(triton, "ROWS_OF_A_PASS", 16)
    hidden, table, keys, temperature = problem(37, 200, 24, "float32")
    chosen, maxima = run(hidden, table, keys, temperature, implementation="triton-interpret")
    wanted, best = run(hidden, table, keys, temperature)
    assert np.array_equal(chosen, wanted)
    np.testing.assert_allclose(maxima, best, rtol=1e-5)


def test_a_row_of_nan_chooses_a_token_of_the_table():
    hidden, table, keys, temperature = problem(3, 300, 16, "float32")
    hidden = hidden.at[1].set(jnp.nan)
    for implementation in BOTH:
        chosen, _ = run(hidden, table, keys, temperature, implementation=implementation)
        assert (np.asarray(chosen) >= 0).all() and (np.asarray(chosen) < 300).all(), implementation
        assert np.array_equal(chosen[::2], run(hidden, table, keys, temperature)[0][::2])


@pytest.mark.parametrize("vocab", [64, 100, 300])
@pytest.mark.parametrize(("softcap", "suppressed", "first_id"), [(None, (), None), (30.0, (3000, 3099), 3000)])
def test_both_choose_among_logits_in_memory(vocab, softcap, suppressed, first_id, monkeypatch):
    """Of vocabularies of one tile and of several, of which the last is a part; of equal logits the lowest id, also in different tiles."""
    monkeypatch.setattr(triton, "LOGITS", 64)
    rng = np.random.default_rng(vocab)
    logits, keys, temperature = rng.integers(-40, 40, (7, vocab)).astype(np.float32), choices.keys(rng, 7), choices.temperatures(rng, 7)
    capped, first = logits if softcap is None else softcap * np.tanh(logits / softcap), first_id or 0
    ids = np.broadcast_to(np.arange(vocab) + first, logits.shape)
    scores = choices.scores(capped, keys, temperature, ids, suppressed)
    for implementation in BOTH:
        at = None if first_id is None else jnp.int32(first_id)
        chosen, maxima = choose(jnp.asarray(logits), keys, temperature, softcap, suppressed, at, implementation=implementation)
        choices.assert_best(chosen, scores, ids)
        np.testing.assert_allclose(maxima, scores.max(axis=1), rtol=0, atol=1e-4)
        greedy, _ = choose(jnp.asarray(logits), keys, np.zeros_like(temperature), implementation=implementation)
        assert np.array_equal(greedy, logits.argmax(axis=1)), implementation


def test_rows_are_divided_into_powers_of_two_that_waste_less_than_sixteen():
    for rows in range(1, 257):
        for most in (16, 32, 128):
            parts = triton.chunks(rows, most)
            assert [start for start, _ in parts] == [sum(size for _, size in parts[:i]) for i in range(len(parts))]
            assert all(16 <= size <= most and size & (size - 1) == 0 for _, size in parts)
            assert 0 <= sum(size for _, size in parts) - rows < 16


def test_the_last_reduction_takes_the_lowest_id_of_the_largest_value_and_a_nan_above_all():
    values = jnp.array([[1.0, 3.0, 3.0, 2.0], [-jnp.inf] * 4, [5.0, jnp.nan, 9.0, 9.0]])
    ids = jnp.array([[9, 8, 4, 7], [6, 5, 3, 4], [1, 2, 3, 4]], jnp.int32)
    chosen, maxima = jax.jit(best)(values, ids)
    assert chosen.tolist() == [4, 3, 2]
    np.testing.assert_array_equal(maxima, [3, -np.inf, np.nan])


@pytest.mark.parametrize("name", SHAPES)
def test_every_real_shape_lowers_for_cuda_as_one_kernel(name):
    shape = SHAPES[name]
    leaf = jax.ShapeDtypeStruct
    arrays = (
        leaf((shape.rows, shape.hidden), jnp.bfloat16),
        leaf((shape.vocab, shape.hidden), jnp.bfloat16),
        leaf((shape.rows, 2), jnp.uint32),
        leaf((shape.rows,), jnp.float32),
    )
    text = for_cuda(run, *arrays, softcap=shape.softcap, implementation="triton")
    assert text.count('name = "lm_head"') == 1
    cut = triton.tiles(shape.rows, jnp.dtype(jnp.bfloat16), shared=101_376)
    assert cut.stages >= 2, "an L4 has less shared memory"


def test_what_does_not_fit_is_refused_by_name():
    hidden, table, keys, temperature = problem(2, 40, 16, "float32")
    with pytest.raises(ValueError, match="implementation is 'cuda'; expected 'auto' or one of 'xla', 'triton', 'triton-interpret'"):
        lm_head(hidden, table, keys, temperature, implementation="cuda")
    small = jnp.float8_e4m3fn
    with pytest.raises(ValueError, match="'triton' cannot serve this: the table is float8_e4m3fn; the kernel takes bfloat16"):
        lm_head(hidden.astype(small), table.astype(small), keys, temperature, implementation="triton")
    with pytest.raises(ValueError, match="cannot serve this: 33 ids are suppressed; the kernel takes at most 32"):
        lm_head(hidden, table, keys, temperature, suppressed=tuple(range(33)), implementation="triton-interpret")
    jax.eval_shape(functools.partial(lm_head, suppressed=tuple(range(33))), hidden, table, keys, temperature)  # "auto" falls back
    with pytest.raises(ValueError, match=r"hidden states are float32\[2, 16\] and the table float32\[40, 15\]; expected"):
        lm_head(hidden, table[:, :15], keys, temperature)
    with pytest.raises(ValueError, match=r"hidden states are float32\[2, 16\] and the table bfloat16\[40, 16\]; expected"):
        lm_head(hidden, table.astype(jnp.bfloat16), keys, temperature)
    with pytest.raises(ValueError, match=r"keys are \[1, 2\] and temperatures \[2\]; expected \[N, 2\] and \[N\] for 2 rows"):
        lm_head(hidden, table, keys[:1], temperature)


@pytest.mark.parametrize(
    ("form", "rows", "vocab", "width"),
    [
        ("int8", 5, 256, 128),
        ("int8", 37, 200, 96),
        ("int8", 70, 130, 64),
        ("int4 affine float16", 5, 200, 96),
        ("int8 of 16 float16", 5, 200, 96),
    ],
)
def test_a_packed_table_is_chosen_from_as_the_unpacked_one(form, rows, vocab, width):
    """Also where neither vocabulary nor width are whole blocks."""
    rng = np.random.default_rng(rows)
    hidden, table = choices.array(rng.standard_normal((rows, width)), "bfloat16"), packed_matrices.packed(form, (vocab, width))
    keys, temperature = choices.keys(rng, rows), choices.temperatures(rng, rows)
    settings = {"softcap": 30.0, "suppressed": (1002, 1070), "first_id": jnp.int32(1000)}
    scores, ids = expected(hidden, unpack(table, hidden.dtype), keys, temperature, settings["softcap"], settings["suppressed"], 1000)
    for implementation in BOTH:
        chosen, maxima = run(hidden, table, keys, temperature, **settings, implementation=implementation)
        choices.assert_best(chosen, scores, ids)
        np.testing.assert_allclose(maxima, scores.max(axis=1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows", [5, 160])
def test_a_packed_table_lowers_for_cuda_as_one_kernel(rows):
    leaf = jax.ShapeDtypeStruct
    table = abstract((262_144, 1536), "int8", group=None, scale_dtype=jnp.bfloat16)
    arrays = leaf((rows, 1536), jnp.bfloat16), table, leaf((rows, 2), jnp.uint32), leaf((rows,), jnp.float32)
    assert for_cuda(run, *arrays, softcap=30.0, implementation="triton").count('name = "packed_lm_head"') == 1


@pytest.mark.parametrize(("rows", "gpu", "stored"), [(1, "9.0", False), (64, "9.0", False), (65, "9.0", True), (64, "8.0", False)])
def test_a_packed_table_stores_no_logits_of_few_rows(rows, gpu, stored):
    """On Hopper a kernel of the Mosaic GPU dialect serves; of many rows that gives logits, from which another kernel chooses."""
    leaf = jax.ShapeDtypeStruct
    table = abstract((262_144, 1024), "int8", group=None, scale_dtype=jnp.bfloat16)
    arrays = leaf((rows, 1024), jnp.bfloat16), table, leaf((rows, 2), jnp.uint32), leaf((rows,), jnp.float32)
    head = jax.jit(functools.partial(lm_head, softcap=30.0, suppressed=(rows,)))  # not traced before
    with device.described_as(device.Described("a GPU", gpu)):
        text = for_cuda(head, *arrays)
    assert text.count("@mosaic_gpu_v2") == (gpu == "9.0") and text.count('name = "packed_lm_head"') == (gpu == "8.0")
    assert (f"tensor<{rows}x262144xf32>" in text) == stored


def test_the_tiles_of_a_packed_head_fit():
    for kind, group in (("int8", None), ("int4", 32), ("fp8", None), ("int8", 16)):
        for width in (1024, 1536, 2560, 2816, 3840, 5376):
            table = abstract((262_144, width), kind, group=group, scale_dtype=jnp.bfloat16)
            for rows in range(8, packed_mosaic.MOST_ROWS + 1, 8):
                tiles = packed_mosaic.choose_tiles(rows, table)
                step, sums = tiles.room(1, KINDS[kind].bits, rows)
                assert tiles.stages >= 2 and tiles.splits == 1 and not tiles.joined
                assert tiles.stages * step + sums + Choice.room(rows, tiles.wide) <= SHARED_MEMORY


def test_which_packed_tables_a_kernel_serves():
    hidden, _, keys, temperature = problem(2, 40, 16, "float32")
    table = packed_matrices.packed("int8", (64, 16))
    double = dataclasses.replace(table, scale=jax.ShapeDtypeStruct(table.scale.shape, jnp.float64))
    assert (most_rows(table), most_rows(double)) == (256, 0)
    with pytest.raises(ValueError, match="cannot serve this: the scales are float64; the kernel takes bfloat16"):
        lm_head(hidden, double, keys, temperature, implementation="triton-interpret")
    with pytest.raises(ValueError, match=r"the table int8\[64, 15\]; expected"):
        lm_head(hidden, packed_matrices.packed("int8", (64, 15)), keys, temperature)


@pytest.mark.parametrize(
    ("gpu", "rows", "kernel"),
    [("9.0", 32, "triton"), ("9.0", 40, "mosaic"), ("9.0", 160, "mosaic"), ("9.0", 161, "of logits"), ("8.0", 160, "of logits")],
)
def test_on_hopper_many_rows_take_a_kernel_of_its_own(gpu, rows, kernel):
    leaf = jax.ShapeDtypeStruct
    table = leaf((262_144, 1536), jnp.bfloat16)
    arrays = leaf((rows, 1536), jnp.bfloat16), table, leaf((rows, 2), jnp.uint32), leaf((rows,), jnp.float32)
    head = jax.jit(functools.partial(lm_head, softcap=30.0, suppressed=(0, 258_881)))
    with device.described_as(device.Described("a GPU", gpu)):
        most = most_rows(table), most_rows(table, "triton")
        text = for_cuda(head, *arrays)
    assert most == (160 if gpu == "9.0" else 64, 64)
    assert text.count("@mosaic_gpu_v2") == (kernel == "mosaic") and text.count('name = "lm_head"') == (kernel == "triton")
    assert text.count('name = "choose"') == (kernel == "of logits")


def test_what_the_hopper_kernel_cannot_serve_is_refused():
    hidden, table, keys, temperature = problem(2, 64, 64, "float32")
    refused = functools.partial(lm_head, keys=keys, temperature=temperature, implementation="mosaic")
    with pytest.raises(ValueError, match="'mosaic' cannot serve this: the device is a CPU; the kernel needs a Hopper GPU"):
        refused(hidden, table)
    with device.described_as(device.Described("NVIDIA H200", "9.0")):
        with pytest.raises(ValueError, match="'mosaic' cannot serve this: x is float32 and the matrix float32; the kernel needs bfloat16"):
            refused(hidden, table)
        hidden, table = hidden.astype(jnp.bfloat16), table.astype(jnp.bfloat16)
        with pytest.raises(ValueError, match="'mosaic' cannot serve this: 33 ids are suppressed; the kernel takes at most 32"):
            refused(hidden, table, suppressed=tuple(range(33)))
