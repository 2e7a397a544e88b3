"""Attention over pages and fresh rows, against a softmax in float64 over the keys that a query may see, one row at a time."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering import for_cuda

from pallas_kernels import device, dialect
from pallas_kernels.paged_attention import (
    bench,
    mosaic,
    mosaic_parts,
    mosaic_rotary_few,
    mosaic_whole,
    mosaic_whole_prompt,
    paged_attention,
    triton,
)
from pallas_kernels.paged_attention.reference import ring_positions
from pallas_kernels.paged_attention.shapes import SHAPES

pytestmark = pytest.mark.usefixtures("unoptimised")
attention = jax.jit(paged_attention, static_argnames=("causal", "window", "scale", "ancestors", "implementation"))
NAN = np.float32("nan")


def plain(q, key, value, scale):
    """q: [KV, G, D]; key, value: [S, KV, D] -> [KV, G, D] in float64; zeros where there is no key."""
    if not len(key):
        return np.zeros(q.shape)
    scores = np.einsum("kgd,skd->kgs", q.astype(np.float64), key.astype(np.float64)) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("kgs,skd->kgd", weights / weights.sum(-1, keepdims=True), value.astype(np.float64))


class Case:
    """Random sequences, laid out in permuted pages as `paged_attention` expects them, with NaN in every cell outside the span of
    positions that a sequence's queries reach. rotary: how many dims of a key are stored, 0 for all. image: which queries see one another,
    as (the first, the one after the last)."""

    def __init__(
        self, seed, lengths, *, queries=4, kv=2, group=2, dim=8, page=4, width=3, fresh=4, counts=None, positions=None,
        causal=True, window=None, scale=0.6, dtype=np.float32, rotary=0, ancestors=None, image=None,
    ):  # fmt: skip
        rng = np.random.default_rng(seed)
        self.settings = {"causal": causal, "window": window, "scale": scale} | ({} if ancestors is None else {"ancestors": ancestors})
        lengths = np.asarray(lengths, np.int32)
        batch = len(lengths)
        counts = np.full(batch, min(fresh, queries), np.int32) if counts is None else np.asarray(counts, np.int32)
        counts = np.minimum(counts, fresh)
        if positions is None:
            positions = lengths[:, None] + np.arange(queries, dtype=np.int32)[None, :]
        positions = np.asarray(positions, np.int32)
        through = positions.copy()
        if image is not None:
            through[:, slice(*image)] = positions[:, image[1] - 1 : image[1]]
            self.settings["through"] = jnp.asarray(through)

        def normal(*shape):
            return rng.standard_normal(shape).astype(dtype).astype(np.float32)

        self.q = normal(batch, queries, kv, group, dim)
        total = int(lengths.max(initial=0)) + fresh
        content = normal(2, batch, total, kv, dim)  # every position's K and V
        weight, turns = normal(dim), np.arange(dim) % (dim // 2) < rotary // 2
        if rotary:
            content[0] = np.where(turns, content[0], content[1] * weight)
        ring = width * page
        pages = batch * width + 5
        pools = np.full((2, pages, page, kv, dim), NAN)
        table = rng.permutation(pages)[: batch * width].reshape(batch, width).astype(np.int32)
        new = np.full((2, batch, fresh, kv, dim), NAN)
        self.expected = np.zeros(self.q.shape)
        self.blind = np.zeros((batch, queries), bool)
        for b in range(batch):
            cached = range(max(0, lengths[b] - ring), lengths[b])
            own = range(lengths[b], lengths[b] + counts[b])
            for t in range(queries):
                at = positions[b, t]
                near = [p for p in (*cached, *own) if window is None or at - p < window]
                visible = [p for p in near if p <= through[b, t] or (not causal)]
                if ancestors is not None:
                    seen = [p for p in own if ancestors[t] >> (p - lengths[b]) & 1]
                    visible = [p for p in visible if p in cached] + seen
                self.blind[b, t] = not visible
                self.expected[b, t] = plain(self.q[b, t], *content[:, b, visible], scale)
            span = {
                p for p in (*cached, *own) if (window is None or p > min(positions[b]) - window) and (p <= max(through[b]) or not causal)
            }
            span |= set(own if ancestors is not None else ())
            for p in span & set(cached):
                pools[:, table[b, p // page % width], p % page] = content[:, b, p]
            for p in span & set(own):
                new[:, b, p - lengths[b]] = content[:, b, p]
        cast = functools.partial(jnp.asarray, dtype=dtype)

        def stored(pair):
            return cast(pair[0][..., turns] if rotary else pair[0]), cast(pair[1])

        self.arguments = [
            cast(self.q),
            jnp.asarray(positions),
            stored(pools) if width else None,
            jnp.asarray(table) if width else None,
            jnp.asarray(lengths),
            *((stored(new), jnp.asarray(counts)) if fresh else (None, None)),
            cast(weight) if rotary else None,
            None,
        ]

    def in_float8(self, k_scale, v_scale):
        """The same case with K and V divided by these scales and rounded to e4m3."""
        scales = np.asarray([k_scale, v_scale], np.float32)

        def rounded(pair):
            return tuple((x.astype(jnp.float32) / s).astype(jnp.float8_e4m3fn) for x, s in zip(pair, scales, strict=True))

        for at in (2, 5):
            self.arguments[at] = rounded(self.arguments[at])
        self.arguments[-1] = jnp.asarray(scales)
        widened = list(self.arguments)
        for at in (2, 5):
            widened[at] = tuple(x.astype(jnp.float32) * s for x, s in zip(self.arguments[at], scales, strict=True))
        widened[-1] = None
        self.expected = np.asarray(attention(*widened, **self.settings), np.float64)
        return self

    def check(self, rtol=2e-5, atol=2e-6):
        found = attention(*self.arguments, **self.settings)
        assert found.dtype == self.arguments[0].dtype and found.shape == self.q.shape
        found = np.asarray(found.astype(jnp.float32))
        np.testing.assert_allclose(found, self.expected, rtol=rtol, atol=atol)
        assert not found[self.blind].any()
        return found


# Around every edge of a page (4) and of the ring (12): empty, ragged, exactly full, wrapped once, wrapped often.
LENGTHS = [0, 1, 3, 4, 5, 11, 12, 13, 30, 47]


@pytest.mark.parametrize("window", [None, 1, 5, 9])
@pytest.mark.parametrize("causal", [True, False])
def test_cached_and_fresh_rows(causal, window):
    """A verify block, or a drafter's block that sees itself whole: each row's own K and V are fresh."""
    Case(0, LENGTHS, causal=causal, window=window).check()


@pytest.mark.parametrize("causal", [True, False])
def test_fewer_fresh_rows_than_queries(causal):
    """Rows past the count are padding: nobody sees them, and their own results are those of later rows without keys of their own."""
    case = Case(1, LENGTHS, counts=[i % 5 for i in range(10)], causal=causal)
    case.check()
    assert case.blind.sum() == 4  # those of the empty sequence


def test_a_query_that_sees_nothing_gives_zeros_beside_one_that_sees():
    """The ring forgets what a query far behind may see, and a window passes what a query far ahead could have."""
    case = Case(2, [30, 30, 30, 30], queries=2, positions=[[5, 31], [40, 30], [18, 17], [31, 39]], window=6)
    case.check()
    assert case.blind.tolist() == [[True, False], [True, False], [False, True], [False, True]]


@pytest.mark.parametrize("window", [None, 5])
def test_a_prefill_chunk_longer_than_the_ring(window):
    """The chunk attends to the ring as it was and to itself."""
    Case(3, [0, 7, 12, 25], queries=17, fresh=17, counts=[17, 17, 9, 1], window=window).check()


@pytest.mark.parametrize("window", [None, 5])
def test_no_cached_rows(window):
    case = Case(4, [0, 0, 0], width=0, queries=9, fresh=9, counts=[9, 3, 0], window=window)
    case.check()
    assert case.blind[2].all() and not case.blind[0].any()
    Case(5, [6, 0, 100], width=0, queries=9, fresh=9, counts=[9, 3, 0], window=window).check()  # whole sequences may start anywhere


@pytest.mark.parametrize("window", [None, 5])
def test_no_fresh_rows(window):
    """The assistant's query: it stands at the last cached position, and stores nothing."""
    case = Case(6, LENGTHS, queries=1, fresh=0, positions=[[max(0, n - 1)] for n in LENGTHS], window=window)
    case.check()
    assert case.blind.sum() == 1  # the empty sequence's


def test_every_row_of_a_text_may_query_at_once():
    """As in training: rows P see keys 0 .. P of the same text."""
    Case(7, [0, 0], width=0, queries=12, fresh=12, counts=[12, 12], positions=[range(12)] * 2, window=4).check()


@pytest.mark.parametrize(("kv", "group"), [(1, 1), (3, 1), (1, 4), (2, 3), (3, 2)])
def test_query_heads_belong_to_their_kv_head(kv, group):
    Case(8, [9, 20], kv=kv, group=group).check()


@pytest.mark.parametrize("scale", [1.0, 0.125])
def test_scale(scale):
    Case(9, LENGTHS, scale=scale).check()


def test_large_scores_do_not_overflow():
    Case(10, LENGTHS, scale=300.0).check(rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("causal", [True, False])
def test_bfloat16(causal):
    """Inputs are rounded to bf16 for both; what differs is the weights' and the result's own rounding, 2**-8 of values near one."""
    Case(11, LENGTHS, causal=causal, dtype=jnp.bfloat16).check(rtol=2e-2, atol=2e-2)


def test_a_cache_of_another_dtype_is_read_in_the_queries_dtype():
    case = Case(12, LENGTHS, dtype=jnp.bfloat16)
    case.arguments[0] = case.arguments[0].astype(jnp.float32)
    case.check()


def test_pages_outside_the_table_and_unseen_cells_change_nothing():
    case = Case(13, LENGTHS, window=5)
    first = case.check()
    pools, fresh = case.arguments[2], case.arguments[5]
    case.arguments[2] = tuple(jnp.where(jnp.isnan(pool), 1e30, pool) for pool in pools)
    case.arguments[5] = tuple(jnp.where(jnp.isnan(rows), -1e30, rows) for rows in fresh)
    assert np.array_equal(case.check(), first)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_random_lengths_counts_and_positions(seed, data):
    """Shapes stay the same, so that this compiles two programs."""
    numbers = functools.partial(st.lists, min_size=3, max_size=3)
    case = Case(
        seed,
        data.draw(numbers(st.integers(0, 40))),
        queries=3,
        group=3,
        fresh=3,
        counts=data.draw(numbers(st.integers(0, 3))),
        positions=data.draw(numbers(st.lists(st.integers(0, 45), min_size=3, max_size=3))),
        causal=data.draw(st.booleans()),
        window=6,
    )
    case.check()


@pytest.mark.parametrize("window", [None, 3, 5, 12])
@pytest.mark.parametrize("image", [(0, 8), (2, 7), (3, 8), (5, 6)])
def test_rows_of_an_image_see_one_another(image, window):
    """Beside rows that see those before them. They may be in the pages already."""
    Case(12, LENGTHS, queries=8, fresh=8, image=image, window=window).check()
    Case(12, LENGTHS, queries=8, fresh=8, image=image, window=window, counts=[8, 7, 6, 5, 4, 3, 8, 7, 8, 8]).check()
    Case(12, LENGTHS, queries=8, fresh=0, positions=[[n - 8 + t for t in range(8)] for n in LENGTHS], image=image, window=window).check()


def test_ring_positions_are_what_writing_in_order_leaves():
    size = 6
    for length in range(20):
        places = np.full(size, -1)
        for position in range(length):
            places[position % size] = position
        found = np.asarray(ring_positions(jnp.asarray([length], jnp.int32), size))[0]
        assert np.array_equal(np.maximum(found, -1), places), length


@pytest.mark.parametrize("window", [None, 5])
def test_keys_of_which_only_the_rotary_dims_are_stored(window):
    Case(14, LENGTHS, rotary=4, window=window).check()


# Two candidates after the root, two after the first of them and one after the second, and two more levels below that one.
TREE = (0b1, 0b11, 0b101, 0b1011, 0b10011, 0b100101, 0b1100101, 0b11100101)
TREE_DEPTHS = np.asarray([0, 1, 1, 2, 2, 2, 3, 4])


def tree_case(seed, lengths, **settings):
    """Rows of a tree after sequences of these lengths: a row sees its ancestors and itself, and rows of one depth stand at one position."""
    positions = np.asarray(lengths)[:, None] + TREE_DEPTHS
    return Case(seed, lengths, queries=8, fresh=8, positions=positions, ancestors=TREE, **settings)


@pytest.mark.parametrize("settings", [{}, {"window": 5}, {"counts": [3, 8, 0, 1, 7, 8, 6, 2, 8, 5]}, {"rotary": 4}, {"window": 12}])
def test_rows_of_a_tree(settings):
    tree_case(23, LENGTHS, **settings).check()


@pytest.mark.parametrize("settings", [{"causal": False}, {"ancestors": TREE}])
def test_rows_of_an_image_are_causal_and_in_order(settings):
    case = Case(12, LENGTHS, queries=8, fresh=8, image=(2, 7))
    with pytest.raises(ValueError, match="through is given for rows that are not causal or are a tree's; expected causal rows in order"):
        attention(*case.arguments, **case.settings | settings)


def test_a_tree_needs_fresh_rows_and_as_many_ancestors():
    case = tree_case(24, [3, 9])
    with pytest.raises(ValueError, match="3 ancestors are given for 8 rows and 8 fresh rows; expected one each, and 1 .. 32"):
        attention(*case.arguments, **{**case.settings, "ancestors": TREE[:3]})
    with pytest.raises(ValueError, match="8 ancestors are given for 8 rows and no fresh rows"):
        attention(*case.arguments[:5], **case.settings)


# Around every edge of a page (16) and of the ring (48).
KERNEL_LENGTHS = [0, 1, 15, 16, 17, 47, 48, 49, 130]


@functools.partial(jax.jit, static_argnames=("causal", "window", "scale", "ancestors", "tiles"))
def kernel(*arguments, tiles=None, **settings):
    return triton.paged_attention(*arguments, **settings, interpret=True, tiles=tiles)


def check_kernel(case, rtol=2e-5, atol=2e-6, tiles=None):
    found = np.asarray(kernel(*case.arguments, **case.settings, tiles=tiles).astype(jnp.float32))
    np.testing.assert_allclose(found, case.expected, rtol=rtol, atol=atol)
    assert not found[case.blind].any()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"causal": False, "window": 20},
        {"rotary": 4, "group": 5, "dim": 24},  # neither the group nor the width is a power of two
        {"rotary": 4, "window": 20, "queries": 17, "fresh": 17, "counts": [17, 0, 3, 17, 9, 1, 17, 16, 17]},
        {"queries": 1, "fresh": 0, "positions": [[max(0, n - 1)] for n in KERNEL_LENGTHS], "kv": 1, "group": 16},
        {"queries": 40, "fresh": 40, "window": 30},
        {"causal": False, "queries": 3, "fresh": 6},
    ],
)
def test_the_kernel_on_pages_and_fresh_rows(settings):
    check_kernel(Case(15, KERNEL_LENGTHS, page=16, **settings))


@pytest.mark.parametrize(
    "settings",
    [{}, {"window": 20, "group": 5, "dim": 24}, {"rotary": 4, "counts": [8, 3, 0, 8, 1, 6, 8, 2, 7]}],
    ids=["", "window", "rotary"],
)
def test_the_kernel_on_rows_of_a_tree(settings):
    check_kernel(tree_case(25, KERNEL_LENGTHS, page=16, **settings))


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("image", [(0, 8), (2, 7)])
def test_the_kernel_on_rows_of_an_image(image, window):
    sizes = {"page": 16, "queries": 8, "image": image, "window": window}
    check_kernel(Case(12, KERNEL_LENGTHS, fresh=8, **sizes))
    held = Case(12, KERNEL_LENGTHS, fresh=0, positions=[[n - 8 + t for t in range(8)] for n in KERNEL_LENGTHS], **sizes)
    check_kernel(held, tiles=triton.Tiles(16, 16, 2, 4, 2))


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_the_kernel_with_any_number_of_splits(splits):
    """More parts than there are keys, too."""
    check_kernel(Case(16, KERNEL_LENGTHS, page=16, rotary=4), tiles=triton.Tiles(16, 16, splits, 4, 2))


@pytest.mark.parametrize(
    ("tiles", "settings"),
    [
        (triton.Tiles(32, 32, 18, 4, 2), {"window": 512, "group": 8}),
        (triton.Tiles(32, 64, 10, 4, 2), {"window": 512, "group": 8}),
        (triton.Tiles(16, 32, 18, 4, 2), {"window": 512, "queries": 1, "fresh": 0, "group": 4}),
        (triton.Tiles(16, 32, 22, 4, 2), {"group": 8, "queries": 2, "fresh": 2}),
    ],
    ids=["verify", "verify many", "draft", "no window"],
)
def test_the_kernel_with_a_split_for_each_block(tiles, settings):
    """Of lengths on and around the edges of blocks of keys: the window begins in a block, and the fresh rows have one of their own."""
    lengths = [5, 512, 575, 576, 640]
    positions = None if settings.get("fresh", 1) else [[n - 1] for n in lengths]
    case = Case(21, lengths, kv=1, dim=32, page=64, width=10, positions=positions, **settings)
    check_kernel(case, tiles=tiles)


@pytest.mark.parametrize("dim", [24, 128, 200, 256])
@pytest.mark.parametrize(("splits", "pitch"), [(2, 8), (16, 3), (18, 3), (33, 8)])  # of 33, blocks are narrower
def test_the_merge_is_the_sum_over_all_splits(splits, dim, pitch):
    """A split without keys has no weight, whatever its sums hold, and a row without any gives zeros. There are more rows than queries.
    pitch: numbers from one query's heads to the next's."""
    rng = np.random.default_rng(22)
    acc = rng.standard_normal((2, 3, splits, 16, dim)).astype(np.float32)
    top, total = rng.standard_normal((2, 2, 3, splits, 16)).astype(np.float32) * 3
    total, none = np.abs(total) + 0.1, rng.random(total.shape) < 0.3
    none[1, 2, :, 1] = True  # row 1 is query 0's second head
    acc[none], top[none], total[none] = 0, -1e30, 0
    weights = np.exp2(top.astype(np.float64) - top.max(2, keepdims=True))
    whole = (total * weights).sum(2)
    expected = (acc * weights[..., None]).sum(2) / np.where(whole > 0, whole, 1)[..., None]
    q = jnp.zeros((2, 5, 3, 3, dim), jnp.float32)
    apart = np.full((2, 2, 3, splits, 5, pitch), 7, np.float32)
    apart[..., :3] = np.stack([top, total])[..., :15].reshape(2, 2, 3, splits, 5, 3)
    top, total = apart.reshape(2, 2, 3, splits, 5 * pitch)
    found = np.asarray(jax.jit(lambda *parts: triton.merged(parts, q, splits, True, pitch))(acc, top, total))
    np.testing.assert_allclose(found, np.moveaxis(expected[:, :, :15].reshape(2, 3, 5, 3, dim), 1, 2), rtol=2e-5, atol=2e-6)
    assert not found[1, 0, 2, 1].any() and found[1, 0, 2, 0].any()


@pytest.mark.parametrize(
    ("name", "batch", "context", "keys", "splits"),
    [
        ("e2b-sliding", 1, 650, 32, 18),  # 512 keys and 4 fresh rows: 16 blocks, one more at each end
        ("e2b-assistant-sliding", 1, 650, 32, 18),
        ("e2b-sliding", 8, 650, 64, 10),  # with blocks of 32 there would be more programs than multiprocessors
        ("e2b-sliding", 32, 650, 32, 16),  # too many programs for either
        ("e2b-full", 1, 650, 32, 24),
        ("e2b-full", 1, 4000, 32, 32),  # more blocks than splits may be
        ("31b-sliding", 1, 4000, 64, 18),
        ("31b-sliding-prefill", 1, 4000, 32, 1),
    ],
)
def test_each_block_of_keys_has_a_split_where_there_is_room(name, batch, context, keys, splits):
    q, _, cached, table, _, fresh, _, weight, *_ = described(SHAPES[name], batch, context)
    tiles = triton.tiles_for(q, cached, table, fresh, weight, SHAPES[name].window)
    assert (tiles.keys, tiles.splits) == (keys, splits)


def test_the_tiles_of_image_towers():
    """Of the E2B's and of the 31B's, for an image of 280 tokens: the programs fill the card, so keys are not divided."""
    for heads, dim, keys in ((12, 64, 64), (16, 128, 32)):
        rows = jax.ShapeDtypeStruct((1, 2520, heads, 1, dim), jnp.bfloat16)
        fresh = (jax.ShapeDtypeStruct((1, 2520, heads, dim), jnp.bfloat16),) * 2
        assert triton.tiles_for(rows, None, None, fresh, None, None) == triton.Tiles(64, keys, 1, 4, 2)


def test_the_kernel_without_pages():
    check_kernel(Case(17, [0, 6, 0], width=0, queries=20, fresh=20, counts=[20, 3, 0], window=9))


def test_the_kernel_in_bfloat16_and_with_a_cache_of_another_dtype():
    check_kernel(Case(18, KERNEL_LENGTHS, page=16, dtype=jnp.bfloat16), rtol=2e-2, atol=2e-2)
    mixed = Case(18, KERNEL_LENGTHS, page=16, dtype=jnp.bfloat16)
    mixed.arguments[0] = mixed.arguments[0].astype(jnp.float32)
    check_kernel(mixed)


@pytest.mark.parametrize("rotary", [0, 4])
@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
def test_keys_and_values_in_float8(implementation, rotary):
    """As if they were float32 numbers that happen to be e4m3 numbers times a scale."""
    case = Case(18, KERNEL_LENGTHS, page=16, rotary=rotary, window=30).in_float8(0.5, 0.25)
    case.settings["implementation"] = implementation
    case.check(atol=1e-5)


@settings(max_examples=12)
@given(seed=st.integers(0, 2**32 - 1), data=st.data())
def test_the_kernel_on_random_lengths_counts_and_positions(seed, data):
    """Shapes stay the same, so that this compiles four programs."""
    numbers = functools.partial(st.lists, min_size=3, max_size=3)
    case = Case(
        seed,
        data.draw(numbers(st.integers(0, 120))),
        queries=3,
        page=16,
        fresh=3,
        counts=data.draw(numbers(st.integers(0, 3))),
        positions=data.draw(numbers(st.lists(st.integers(0, 130), min_size=3, max_size=3))),
        causal=data.draw(st.booleans()),
        window=data.draw(st.sampled_from([None, 20])),
        rotary=4,
    )
    check_kernel(case)


@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_lowers_for_cuda_at_real_shapes(name):
    shape = SHAPES[name]
    args = jax.eval_shape(functools.partial(bench.arguments, shape, 8, 4096))
    function = functools.partial(paged_attention, causal=shape.causal, window=shape.window, implementation="triton")
    text = for_cuda(jax.jit(function), *args)
    assert text.count('name = "paged_attention"') == 1 and text.count("__gpu$xla.gpu.triton") >= 1


HOPPER, AMPERE = device.Described("NVIDIA H200", "9.0"), device.Described("NVIDIA A100-SXM4-40GB", "8.0")


def described(shape, batch=8, context=4096):
    """The shapes of a call's arguments."""
    return list(jax.eval_shape(functools.partial(bench.arguments, shape, batch, context)))


@pytest.mark.parametrize(
    ("name", "batch", "merged"),
    [
        ("31b-full", 32, False),
        ("12b-full", 1, True),
        ("31b-sliding", 32, False),
        ("12b-sliding", 1, False),
        ("31b-sliding-17-rows", 8, False),
        ("e2b-assistant-sliding", 8, False),
        ("31b-dspark", 8, False),
        ("31b-sliding-prefill", 1, False),
        ("31b-image", 1, False),
        ("31b-full-prefill", 1, False),
    ],
)
def test_the_hopper_kernels_lower_for_cuda_at_real_shapes(name, batch, merged):
    shape = SHAPES[name]
    function = functools.partial(paged_attention, causal=shape.causal, window=shape.window, implementation="mosaic")
    with device.described_as(HOPPER):
        text = for_cuda(jax.jit(function), *described(shape, batch))
    assert text.count("@mosaic_gpu_v2") == 1 and 'name = "paged_attention"' not in text
    assert text.count('name = "paged_attention_merge"') == merged


@pytest.mark.parametrize("name", ["31b-sliding", "31b-full"])
def test_the_hopper_kernels_take_a_window_shorter_than_a_block_of_keys(name):
    """A window and the rows of a verify block that together hold fewer than the 64 keys of a block are one block all the same."""
    function = functools.partial(paged_attention, window=16, implementation="mosaic")
    with device.described_as(HOPPER):
        text = for_cuda(jax.jit(function), *described(SHAPES[name], 8))
    assert text.count("@mosaic_gpu_v2") == 1 and 'name = "paged_attention_merge"' not in text


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 700), min_size=2, max_size=2),
    offsets=st.lists(st.integers(-300, 300), min_size=3, max_size=3),
    counts=st.lists(st.integers(0, 70), min_size=2, max_size=2),
    page=st.sampled_from([64, 128]),
    fresh=st.sampled_from([0, 3, 70]),
    window=st.sampled_from([None, 1, 64, 200]),
    causal=st.booleans(),
    splits=st.integers(1, 4),
)
def test_the_hopper_kernels_read_each_key_that_a_row_sees_once(lengths, offsets, counts, page, fresh, window, causal, splits):
    """Over all items of a head; and every head of every sequence has the same number of items."""
    heads, places = 2, 256 // page
    positions = np.maximum(np.add.outer(lengths, offsets), 0)
    plan = mosaic_parts.Plan((2, 3, heads, 32, 8), causal, window, 1.0, splits)  # 32 query heads: two queries an item
    refs = {"lengths": lengths, "positions": positions} | ({"count": counts} if fresh else {})
    refs = {name: jnp.asarray(x, jnp.int32) for name, x in refs.items()}
    refs |= {"k": np.empty((9, page, heads, 8)), "table": np.empty((2, places)), "fresh_k": np.empty((2, fresh, heads, 8))}
    found = {}
    with jax.disable_jit():
        for number in range(plan.items):
            item = plan.item(refs, number)
            keys = found.setdefault((int(item.b), int(item.head), int(item.first)), [])
            for block in range(int(item.start), int(item.stop)):
                base, end = map(int, item.span.seen(block))
                keys += range(max(base, int(item.span.begin)), min(base + mosaic_parts.KEYS, end))
    assert set(found) == {(b, head, first) for b in range(2) for head in range(heads) for first in (0, 2)}
    for (b, _, first), keys in found.items():
        at = positions[b, first : first + 2]
        held = range(max(0, lengths[b] - 256), lengths[b] + min(counts[b], fresh))
        seen = [p for p in held if (window is None or p > min(at) - window) and (p <= max(at) or not causal)]
        assert sorted(keys) == seen


@settings(max_examples=8)
@given(
    lengths=st.lists(st.integers(0, 700), min_size=2, max_size=2),
    counts=st.lists(st.integers(0, 136), min_size=2, max_size=2),
    window=st.sampled_from([None, 1, 64, 200]),
    causal=st.booleans(),
    members=st.sampled_from([1, 2]),
    image=st.sampled_from([None, (0, 136), (20, 120)]),
)
def test_the_hopper_kernels_for_prompts_mask_no_block_too_few(lengths, counts, window, causal, members, image):
    """Each key that a row sees is in one block of its item, and of a block that is not masked each row sees each key."""
    queries, heads, group = 136, 2, 4
    positions = np.add.outer(lengths, np.arange(queries))
    plan = mosaic_whole_prompt.Plan((2, queries, heads, group, 8), causal, window, 1.0, members)
    through, given = positions.copy(), {"positions": positions}
    if image is not None:
        through[:, slice(*image)] = positions[:, image[1] - 1 : image[1]]
        given["through"] = through
    refs = {name: jnp.asarray(x, jnp.int32) for name, x in {"lengths": lengths, "count": counts, **plan.ends(given)}.items()}
    refs |= {"k": np.empty((9, 64, heads, 8)), "table": np.empty((2, 4)), "fresh_k": np.empty((2, queries, heads, 8))}
    found = {}
    with jax.disable_jit():
        for number in range(plan.items):
            item = plan.item(refs, number)
            found[int(item.b), int(item.head), int(item.member), int(item.first)] = keys = []
            at, last = (x[item.b, item.first : item.first + 64] for x in (positions, through))
            for block in range(int(item.start), int(item.stop)):
                base, end = map(int, item.span.seen(block))
                keys += range(max(base, int(item.span.begin)), min(base + mosaic_parts.KEYS, end))
                if plan.plain(item, (base, end), item.low, item.high):
                    assert base >= item.span.begin and base + mosaic_parts.KEYS <= min(end, min(last) + 1 if causal else end)
                    assert window is None or max(at) - base < window
    assert set(found) == {
        (b, head, member, first) for b in range(2) for head in range(heads) for member in range(0, group, members) for first in (0, 64, 128)
    }
    for (b, _, _, first), keys in found.items():
        at, last = (x[b, first : first + 64] for x in (positions, through))
        held = range(max(0, lengths[b] - 256), lengths[b] + counts[b])
        assert sorted(keys) == [p for p in held if (window is None or p > min(at) - window) and (p <= max(last) or not causal)]


@pytest.mark.parametrize("name", SHAPES)
def test_auto_takes_a_hopper_kernel_where_it_is_faster(name, monkeypatch):
    """Where rotary dims are stored, for many rows or items; for a window's whole keys, if rows are few, and for prompts. Before JAX 0.12,
    few rows need more items."""
    for module in (mosaic, triton):
        monkeypatch.setattr(module, "paged_attention", lambda *args, name=module.__name__, **settings: name.rpartition(".")[2])
    shape = SHAPES[name]

    def call(batch=8, **settings):
        return paged_attention(*described(shape, batch), causal=shape.causal, window=shape.window, **settings)

    with device.described_as(HOPPER):
        for batch in (1, 8, 32):
            if shape.rotary:
                enough = shape.queries * shape.group > 16 or batch * shape.kv_heads >= 32
                assert call(batch) == ("mosaic" if enough else "triton")
        for items in (1, 2, 8, 16, 144, 512):
            if not shape.rotary and items >= shape.kv_heads:
                few = shape.window is not None and shape.head_dim == 256 and shape.queries * shape.group <= 40
                few = few and (items >= 32 or jax.__version_info__ >= (0, 12))
                many = shape.queries >= 64
                wide = shape.head_dim == 512 and shape.queries * shape.group <= 32 and items >= 8
                assert call(items // shape.kv_heads) == ("mosaic" if few or many or wide else "triton")
        assert call(implementation="triton") == "triton"
    with device.described_as(AMPERE):
        assert call() == "triton"


@pytest.mark.parametrize(
    ("name", "queries", "expected"),
    [
        ("31b-sliding-prefill", 56, "triton"),
        ("31b-sliding-prefill", 64, "triton"),
        ("31b-sliding-prefill", 72, "mosaic"),
        ("31b-sliding-prefill", 76, "triton"),
        ("e4b-full-prefill", 192, "triton"),
        ("e4b-full-prefill", 200, "mosaic"),
        ("e4b-full-prefill", 204, "triton"),
    ],
)
def test_auto_takes_a_hopper_kernel_for_prompts_if_tiles_and_heads_are_enough(name, queries, expected, monkeypatch):
    """16 KV heads with a pair of query heads: 16 items of up to 64 rows, 32 of up to 128. Eight wide heads, an item each: 24 of up
    to 192 rows, 32 of up to 256. Both kernels take rows in multiples of eight."""
    for module in (mosaic, triton):
        monkeypatch.setattr(module, "paged_attention", lambda *args, name=module.__name__, **settings: name.rpartition(".")[2])
    with device.described_as(HOPPER):
        shape = dataclasses.replace(SHAPES[name], queries=queries)
        assert paged_attention(*described(shape, 1), causal=True, window=shape.window) == expected


def test_the_hopper_kernels_divide_the_keys_where_that_keeps_more_multiprocessors_busy():
    """All of one sequence's, half of them for 66 items, none of 128 or of several times as many."""
    found = {items: mosaic.splits_for(items, 256) for items in (1, 4, 32, 66, 80, 128, 132, 1024)}
    assert found == {1: 64, 4: 33, 32: 4, 66: 2, 80: 3, 128: 1, 132: 1, 1024: 1}
    assert mosaic.splits_for(1, 3) == 3  # no more parts than there are blocks


def test_programs_that_share_whole_keys_run_all_at_once():
    """As clusters, of which fewer fit than there are multiprocessors for. With more items nothing is gained, unless they are slow."""

    def splits(batch, queries=5, heads=16, blocks=16):
        plan = mosaic_whole.Plan((batch, queries, heads, 2, 256), True, 1024, 1.0)
        return mosaic_whole.splits_for(plan, blocks)

    assert [mosaic_whole.clusters(n) for n in (1, 2, 3, 4, 6, 8)] == [132, 66, 38, 29, 16, 10]
    assert [splits(batch) for batch in (1, 2, 4, 8, 32)] == [6, 3, 1, 1, 1]
    assert splits(4, queries=16) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({2: None}, "there are no pages, which it reads"),
        ({7: None}, "head_dim is 512 with keys of 128, the kernel needs 256 with keys of 256 or 512 with keys of 512"),
        ({0: (8, 5, 4, 8, 256)}, "head_dim is 256 with keys of 128, the kernel needs 512 with keys of 128"),
        ({0: (8, 5, 4, 12, 512)}, "a KV head has 12 query heads, the kernel needs at most 8, or 16, 32 or 64"),
        ({0: jnp.float32}, "queries and keys are float32 and bfloat16, the kernel needs bfloat16"),
        ({8: (2,)}, "queries and keys are bfloat16 and bfloat16 with scales, the kernel needs bfloat16"),
        ({2: 48}, "pages hold 48 positions, the kernel needs a multiple of 64"),
        ({9: (8, 5)}, "rows see past their own positions, which only the kernels for many rows with whole keys know of"),
        ({"device": AMPERE}, "the NVIDIA A100-SXM4-40GB has compute capability 8.0; the kernel needs 9.0"),
        ({"device": device.Described("NVIDIA R100", "11.0")}, "the NVIDIA R100 has compute capability 11.0; the kernel needs 9.0"),
        ({"device": None}, "the device is a CPU; the kernel needs a Hopper GPU"),
    ],
)
def test_what_the_hopper_kernels_cannot_serve_is_refused(changes, message):
    args, changes = described(SHAPES["31b-full"]), dict(changes)
    kind = changes.pop("device", HOPPER)
    for at, change in changes.items():
        if change is None:
            args[at] = None
        elif isinstance(change, tuple):
            args[at] = jax.ShapeDtypeStruct(change, jnp.bfloat16)
        elif isinstance(change, int):
            args[at] = tuple(jax.ShapeDtypeStruct((x.shape[0], change, *x.shape[2:]), x.dtype) for x in args[at])
        else:
            args[at] = jax.ShapeDtypeStruct(args[at].shape, change)
    with (
        pytest.raises(ValueError, match=f"^implementation 'mosaic' cannot serve this: {message}$"),
        contextlib.nullcontext() if kind is None else device.described_as(kind),
    ):
        paged_attention(*args, implementation="mosaic")


@pytest.mark.parametrize("name", ["cuda", "XLA", ""])
def test_an_unknown_implementation_is_refused(name):
    case = Case(14, LENGTHS)
    offered = "'auto' or one of 'xla', 'triton', 'triton-interpret', 'mosaic'"
    with pytest.raises(ValueError, match=f"implementation is '{name}'; expected {offered}"):
        paged_attention(*case.arguments, implementation=name)


def test_shapes_that_the_kernel_cannot_serve_are_refused():
    with pytest.raises(ValueError, match="'triton' cannot serve this: pages hold 4 positions, the kernel needs a multiple of 16"):
        paged_attention(*Case(14, LENGTHS).arguments, implementation="triton")
    with pytest.raises(ValueError, match="'triton' cannot serve this: head_dim is 520, the kernel holds at most 512"):
        paged_attention(*Case(14, [3], page=16, dim=520).arguments, implementation="triton")


@pytest.mark.parametrize("name", ["xla", "triton-interpret"])
def test_the_named_implementation_serves(name):
    case = Case(14, LENGTHS, page=16)
    case.settings["implementation"] = name
    case.check()
    jaxpr = str(jax.make_jaxpr(functools.partial(paged_attention, **case.settings))(*case.arguments))
    assert ("pallas_call" in jaxpr) == (name != "xla")


@pytest.mark.parametrize(
    ("capability", "rows"), [("8.9", {"bfloat16": 32, "float8_e4m3fn": 16}), ("9.0", {"bfloat16": 32, "float8_e4m3fn": 32})]
)
def test_tiles_leave_room_for_float8_that_is_widened(capability, rows):
    """On an L4, 32 query rows and 32 float8 keys of head_dim 512 take 118,784 bytes of the 101,376 that a program may have."""
    q, table = jax.ShapeDtypeStruct((1, 17, 4, 8, 512), jnp.bfloat16), jax.ShapeDtypeStruct((1, 16), jnp.int32)
    with device.described_as(device.Described("some GPU", capability)):
        for dtype, wanted in rows.items():
            pools = tuple(jax.ShapeDtypeStruct((32, 64, 4, size), jnp.dtype(dtype)) for size in (128, 512))
            assert triton.tiles_for(q, pools, table, None, jax.ShapeDtypeStruct((512,), jnp.bfloat16), None).rows == wanted


class Sums:
    """A product's sums as an array, in place of the tensor cores' accumulator."""

    def __init__(self, value):
        self.value = value

    def __getitem__(self, _):
        return self.value


@pytest.fixture
def interpreted(monkeypatch):
    """Hopper's kernels run in Pallas' interpreter, where warpgroups are threads that copy, arrive and wait. Here is what it does not know:
    products of the tensor cores, how registers are laid out, and the wait for kernels before."""
    import jax.experimental.pallas.mosaic_gpu as mgpu
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams
    from jax.experimental import pallas as pl

    def wgmma(sums, left, right):
        left = left if isinstance(left, jax.Array) else left[...]
        sums.value = sums.value + jnp.dot(left, right[...], preferred_element_type=jnp.float32)

    class Accumulator:
        def __init__(self, shape, dtype):
            self.zeros = jnp.zeros(shape, dtype)

        init = staticmethod(lambda value: value)

    def run_state(do):
        def run(value):
            sums = jax.tree.map(Sums, value)
            do(sums)
            return jax.tree.map(lambda x: x.value, sums)

        return run

    monkeypatch.setattr(pl, "run_scoped", lambda do, accumulator: do(Sums(accumulator.zeros)))
    monkeypatch.setattr(pl, "run_state", run_state)
    monkeypatch.setattr(mgpu, "kernel", functools.partial(mgpu.kernel, interpret=InterpretGPUParams()))
    monkeypatch.setattr(mgpu, "wgmma", wgmma)
    monkeypatch.setattr(mgpu, "wgmma_wait", lambda n: None)
    monkeypatch.setattr(mgpu, "ACC", Accumulator)
    monkeypatch.setattr(mgpu, "layout_cast", lambda x, layout: x)
    monkeypatch.setattr(mgpu, "broadcasted_iota", lambda dtype, shape, axis, layout: jax.lax.broadcasted_iota(dtype, shape, axis))
    monkeypatch.setattr(dialect, "mosaic_load", lambda ref, layout: ref[...])
    monkeypatch.setattr(dialect, "mosaic_wait", lambda launch_dependents=False: None)
    monkeypatch.setattr(mosaic_rotary_few, "exchange", functools.partial(mosaic_rotary_few.exchange, interpret=True))
    for name in ("over_rows", "load", "store", "store_block"):
        monkeypatch.setattr(mosaic_whole, name, functools.partial(getattr(mosaic_whole, name), interpret=True))
    monkeypatch.setattr(triton, "merged", lambda *args, merged=triton.merged, **settings: merged(*args, **settings | {"interpret": True}))
    monkeypatch.setattr(dialect, "MULTIPROCESSORS", 3)  # so that a program serves several items


ROTARY = {"kv": 1, "group": 8, "dim": 512, "rotary": 128, "page": 64}
WIDE = {"kv": 1, "group": 8, "dim": 512, "page": 64}
PROMPT = {"queries": 72, "fresh": 72, "counts": [72, 40, 0]}
HOPPER_CASES = {
    "rows of a step": ({**ROTARY, "queries": 5, "fresh": 5, "width": 6}, [330, 65, 0], 1),
    "rows of four heads": ({**ROTARY, "group": 4, "kv": 2, "queries": 3, "fresh": 3, "width": 4}, [200, 65, 63], 1),
    "more rows": ({**ROTARY, "queries": 7, "fresh": 7, "width": 6}, [330, 65, 0], 1),
    "more rows, keys in three parts": ({**ROTARY, "queries": 7, "fresh": 7, "width": 6, "counts": [7, 3, 0]}, [330, 64, 1], 3),
    "more rows, two tiles": ({**ROTARY, "queries": 9, "fresh": 9, "width": 4, "causal": False}, [200, 65, 1], 2),
    "rows of a step, keys in three parts": ({**ROTARY, "queries": 5, "fresh": 5, "width": 6, "counts": [5, 3, 0]}, [330, 64, 1], 3),
    "rows that see both ways": ({**ROTARY, "queries": 3, "fresh": 3, "width": 2, "causal": False}, [128, 40], 2),
    "wide keys stored whole": ({**WIDE, "queries": 4, "fresh": 4, "width": 4, "counts": [4, 3, 0]}, [200, 65, 63], 1),
    "wide keys stored whole, four heads": ({**WIDE, "kv": 2, "group": 4, "queries": 5, "fresh": 5, "width": 4}, [250, 64, 1], 1),
    "a row over wide keys": ({**WIDE, "group": 4, "queries": 1, "fresh": 0, "width": 4}, [200, 65], 1),
    "keys of windows": (
        {"kv": 1, "group": 8, "dim": 256, "page": 64, "queries": 4, "fresh": 4, "width": 4, "window": 100},
        [200, 65, 63],
        1,
    ),
    "keys of windows, three heads": (
        {"kv": 2, "group": 3, "dim": 256, "page": 64, "queries": 5, "fresh": 5, "width": 4, "window": 100, "counts": [5, 2, 0]},
        [200, 65, 63],
        1,
    ),
    "keys of windows, two tiles": (
        {"kv": 1, "group": 3, "dim": 256, "page": 64, "queries": 15, "fresh": 15, "width": 4, "window": 100},
        [200, 65],
        1,
    ),
    "a row that stores nothing": ({**ROTARY, "queries": 1, "fresh": 0, "width": 4}, [200, 65], 1),
    "a prompt": ({**ROTARY, **PROMPT, "group": 4, "width": 4}, [150, 64, 1], 1),
    "a prompt over wide keys": ({**PROMPT, **WIDE, "group": 2, "width": 4}, [150, 64, 1], None),
    "a prompt over wide keys, both ways": (
        {**PROMPT, **WIDE, "kv": 2, "group": 1, "width": 3, "window": 100, "causal": False},
        [192, 0, 7],
        None,
    ),
    "a prompt over windows": ({**PROMPT, "kv": 1, "group": 4, "dim": 256, "page": 64, "width": 4, "window": 100}, [300, 64, 1], None),
    "an image in a prompt": ({**PROMPT, "kv": 1, "dim": 256, "page": 64, "width": 4, "window": 100, "image": (5, 70)}, [200, 64, 1], None),
    "an image that is in the pages": (
        {"kv": 1, "dim": 256, "page": 64, "queries": 72, "fresh": 0, "width": 5, "window": 100, "image": (0, 66)},
        [250, 72],
        None,
    ),
    "an image in a prompt over wide keys": ({**PROMPT, **WIDE, "group": 2, "width": 4, "image": (8, 72)}, [150, 64, 1], None),
    "a prompt over windows, both ways": (
        {**PROMPT, "kv": 2, "dim": 256, "page": 64, "width": 3, "window": 200, "causal": False},
        [192, 0, 7],
        None,
    ),
}


@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="before, the interpreter refuses a kernel that ends before it waits for each arrival"
)
@pytest.mark.parametrize("name", HOPPER_CASES)
def test_hopper_kernels_interpreted(name, interpreted):
    """Copies, barriers and the walk over blocks, with NaN wherever no row looks."""
    settings, lengths, splits = HOPPER_CASES[name]
    case = Case(3, lengths, scale=0.05, dtype=jnp.bfloat16, **settings)
    found = mosaic.paged_attention(*case.arguments[:-1], **case.settings, splits=splits)
    np.testing.assert_allclose(np.asarray(found, np.float64), case.expected, rtol=0, atol=2e-2)
