"""The paged cache: pages are neither lost nor owned twice, and rows land where attention looks for them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxspec.model import paged_kv as paged
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.layer_spec import FULL, SLIDING
from pallas_kernels.paged_attention.reference import ring_positions

pytestmark = pytest.mark.usefixtures("unoptimised")

LAYERS = Gemma4Config.from_hf(tiny.TARGET).layers  # sliding with window 8 (1 KV head x 8), full (1 x 16)
SLOTS, PAGE, MAX_LEN = 6, 4, 22

release = jax.jit(paged.release)
reserve = jax.jit(paged.reserve, static_argnames="rows")
share = jax.jit(paged.share)
write = jax.jit(paged.write, static_argnames="implementation")


def ids(*numbers):
    return jnp.asarray(numbers, jnp.int32)


def empty(**settings):
    settings = {"slots": SLOTS, "max_len": MAX_LEN, "num_draft_tokens": 3, "page_size": PAGE, "dtype": jnp.float32, **settings}
    return paged.init(LAYERS, **settings)


def owned(cache, slot):
    return np.asarray(cache.tables[FULL])[slot, : int(cache.held[slot])].tolist()


def check(cache, held):
    """Every full page is free once, or counts how many slots hold it; each slot holds as many as expected, none of them twice."""
    assert cache.held.tolist() == held
    free = np.asarray(cache.free)[: int(cache.free_count)].tolist()
    pages = [owned(cache, slot) for slot in range(cache.slots)]
    assert all(len(set(some)) == len(some) for some in pages)
    holders = np.bincount(sum(pages, []), minlength=cache.free.shape[0])
    assert cache.refs.tolist() == holders.tolist()
    assert sorted(free) == np.flatnonzero(holders == 0).tolist()


def test_sizes():
    cache = empty()
    assert paged.page_size_of(cache) == PAGE and cache.slots == SLOTS
    assert cache.tables[SLIDING].shape == (SLOTS, 3)  # the window 8 and 3 drafts: 11 positions
    assert cache.tables[FULL].shape == (SLOTS, 6)  # 22 positions
    assert cache.layers[0].k.shape == (SLOTS * 3, PAGE, 1, 8) and cache.layers[1].v.shape == (SLOTS * 6, PAGE, 1, 16)
    assert len(set(np.asarray(cache.tables[SLIDING]).flat)) == SLOTS * 3  # no slot shares a ring
    small = empty(full_pages=5, dtype=jnp.bfloat16, page_size=8, num_draft_tokens=0)
    assert small.layers[1].k.shape == (5, 8, 1, 4) and small.layers[1].v.shape == (5, 8, 1, 16)  # K = V: the rotary dims alone
    assert small.layers[1].k.dtype == jnp.bfloat16
    assert small.tables[SLIDING].shape == (SLOTS, 1) and small.tables[FULL].shape == (SLOTS, 3)
    check(small, [0] * SLOTS)


def test_a_layer_that_shares_has_no_pools():
    shared = dataclasses.replace(LAYERS[1], kv_source=1)
    cache = paged.init((*LAYERS, shared), slots=1, max_len=8, num_draft_tokens=0)
    assert cache.layers[2] is None and cache.layers[1] is not None


def test_pages_are_never_lost_or_owned_twice():
    """Sequences grow, end and start again at random, over slot lists in any order with ids that stand for nobody."""
    rng = np.random.default_rng(0)
    cache, lengths, refused = empty(full_pages=14), np.zeros(SLOTS, int), 0
    for step in range(300):
        chosen = rng.permutation(SLOTS + 3)[:4]  # ids from SLOTS on are out of range
        if rng.random() < 0.3:
            cache = release(cache, ids(*chosen))
            lengths[chosen[chosen < SLOTS]] = 0
        else:
            grown = np.array([0 if s >= SLOTS else min(MAX_LEN, lengths[s] + rng.integers(0, 10)) for s in chosen])
            grown[rng.random(4) < 0.2] = 0  # a row that is inactive asks for nothing
            before = cache
            cache, ok = reserve(cache, ids(*chosen), ids(*np.where(chosen < SLOTS, grown, 99)), rows=9)
            missing = sum(max(0, -(-n // PAGE) - len(owned(before, s))) for s, n in zip(chosen, grown, strict=True) if s < SLOTS)
            assert bool(ok) == (missing <= int(before.free_count)), f"step {step}"
            if ok:
                for s, n in zip(chosen, grown, strict=True):
                    if s < SLOTS:
                        assert owned(cache, s)[: len(owned(before, s))] == owned(before, s)  # what a slot has, stays where it is
                        lengths[s] = max(lengths[s], n)
            else:
                refused += 1
                jax.tree.map(np.testing.assert_array_equal, cache, before)
        check(cache, [-(-n // PAGE) for n in lengths])
    assert 20 < refused < 200  # both ends were met


def test_shared_pages_are_never_lost_or_written_by_two():
    """As above, with sequences that begin as another one does. A page that a slot may still write to is held by it alone."""
    rng = np.random.default_rng(1)
    cache, lengths, forks, refused = empty(full_pages=11), np.zeros(SLOTS, int), 0, 0
    floor = np.zeros(SLOTS, int)  # rows that a slot never writes again
    for _ in range(400):
        action = rng.random()
        if action < 0.25:
            chosen = rng.permutation(SLOTS + 2)[:3]
            cache = release(cache, ids(*chosen))
            lengths[chosen[chosen < SLOTS]] = floor[chosen[chosen < SLOTS]] = 0
        elif action < 0.55:
            idle, busy = np.flatnonzero(lengths == 0), np.flatnonzero(lengths)
            if len(idle) < 2 or not len(busy):
                continue
            into, sources = np.append(rng.permutation(idle)[:2], SLOTS), rng.choice(busy, 3)
            rows = lengths[sources]
            before = cache
            cache, ok = share(cache, ids(*sources), ids(*into), ids(*rows))
            assert bool(ok) == (np.sum(rows[:2] % PAGE > 0) <= int(before.free_count))
            if not ok:
                refused += 1
                jax.tree.map(np.testing.assert_array_equal, cache, before)
                continue
            forks += 1
            for slot, source, n in zip(into[:2], sources, rows, strict=False):
                assert owned(cache, slot)[: n // PAGE] == owned(cache, source)[: n // PAGE]
                lengths[slot] = floor[slot] = n
                floor[source] = max(floor[source], n)
        else:
            chosen = rng.permutation(SLOTS)[:3]
            grown = np.minimum(MAX_LEN, lengths[chosen] + rng.integers(0, 10, 3))
            cache, ok = reserve(cache, ids(*chosen), ids(*grown), rows=9)
            lengths[chosen] = np.where(ok, grown, lengths[chosen])
        check(cache, [-(-n // PAGE) for n in lengths])
        for slot in range(SLOTS):
            assert all(int(cache.refs[page]) == 1 for page in owned(cache, slot)[floor[slot] // PAGE + 1 :])
            if floor[slot] % PAGE and len(owned(cache, slot)) > floor[slot] // PAGE:
                assert int(cache.refs[owned(cache, slot)[floor[slot] // PAGE]]) == 1
    assert forks > 30 and refused > 3


def test_sharing_copies_the_ring_and_the_page_that_both_go_on_in():
    rng = np.random.default_rng(2)
    cache, _ = reserve(empty(), ids(4, 1), ids(10, 6), rows=12)
    layers = tuple(paged.LayerKV(*(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in (pool.k, pool.v))) for pool in cache.layers)
    cache = dataclasses.replace(cache, layers=layers)
    after, ok = share(cache, ids(4, SLOTS, 1), ids(0, 3, SLOTS + 1), ids(10, 4, 6))
    assert ok
    check(after, [3, 2, 0, 0, 3, 0])
    assert owned(after, 0)[:2] == owned(cache, 4)[:2] and owned(after, 0)[2] not in owned(cache, 4)
    rings = np.asarray(cache.tables[SLIDING])
    for layer, old, new in ((0, rings[4], rings[0]), (1, [owned(cache, 4)[2]], [owned(after, 0)[2]])):
        for name in ("k", "v"):
            before, now = (np.asarray(getattr(c.layers[layer], name)) for c in (cache, after))
            expected = before.copy()
            expected[np.asarray(new)] = before[np.asarray(old)]
            assert np.array_equal(now, expected)
    whole = paged.fixed(paged.init(LAYERS, slots=3, max_len=10, num_draft_tokens=0, page_size=PAGE, dtype=jnp.float32))
    layers = tuple(paged.LayerKV(*(jnp.asarray(rng.standard_normal(x.shape), x.dtype) for x in (pool.k, pool.v))) for pool in whole.layers)
    whole = dataclasses.replace(whole, layers=layers)
    copied = paged.duplicate(whole, ids(2, 0), ids(1, 3))
    for kind, before, now in zip(whole.kinds, whole.layers, copied.layers, strict=True):
        table, expected = np.asarray(whole.tables[kind]), np.asarray(before.v).copy()
        expected[table[1]] = expected[table[2]]
        assert np.array_equal(now.v, expected)


def test_all_or_nothing():
    cache, ok = reserve(empty(full_pages=5), ids(0), ids(9), rows=9)
    assert ok and owned(cache, 0) == [0, 1, 2]
    short, ok = reserve(cache, ids(1, 0, 2), ids(4, 12, 8), rows=9)
    assert not ok
    jax.tree.map(np.testing.assert_array_equal, short, cache)
    exact, ok = reserve(cache, ids(1, 0, 2), ids(4, 12, 4), rows=9)
    assert ok and int(exact.free_count) == 0
    check(exact, [3, 1, 1, 0, 0, 0])
    nothing, ok = reserve(exact, ids(0, 3, SLOTS), ids(12, 0, 20), rows=9)  # nobody needs more: an empty list is no obstacle
    assert ok
    jax.tree.map(np.testing.assert_array_equal, nothing, exact)
    back = release(exact, ids(SLOTS, 0, SLOTS + 5))
    check(back, [0, 1, 1, 0, 0, 0])
    again, ok = reserve(back, ids(5), ids(12), rows=12)
    assert ok and set(owned(again, 5)) == {0, 1, 2}  # the pages that were given back


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_call_may_add_as_many_positions_as_it_says(rows):
    for length in range(MAX_LEN - rows + 1):
        cache, _ = reserve(empty(slots=1), ids(0), ids(length), rows=MAX_LEN)
        cache, ok = reserve(cache, ids(0), ids(length + rows), rows=rows)
        assert ok
        check(cache, [-(-(length + rows) // PAGE)])


@dataclasses.dataclass
class Recorder:
    """Stands for a pool and notes where rows are put."""

    shape: tuple[int, ...]
    dtype: object = np.float32
    puts: list = dataclasses.field(default_factory=list)

    @property
    def at(self):
        return self

    def __getitem__(self, places):
        self.puts.append(np.stack(jnp.broadcast_arrays(*places), axis=-1))
        return self

    def set(self, rows, mode):
        assert mode == "drop" and rows.shape[:2] == self.puts[-1].shape[:2]
        return self


# (start, count) of three sequences: within a page, across pages, past the ring, longer than the ring once and twice, nothing.
CHUNKS = [((0, 3), (5, 6), (11, 1)), ((7, 25), (0, 12), (1, 13)), ((9, 0), (100, 25), (3, 24))]


@pytest.mark.parametrize("chunks", CHUNKS)
def test_no_two_rows_of_a_write_share_a_place(chunks):
    """The order of a scatter's rows is undefined: of a chunk longer than the ring, older rows must go nowhere."""
    pool = Recorder((20, PAGE, 1, 2))
    table = jnp.asarray(np.random.default_rng(0).permutation(20)[:9].reshape(3, 3), jnp.int32)
    start, count = (jnp.asarray(x, jnp.int32) for x in zip(*chunks, strict=True))
    rows = jnp.zeros((3, 25, 1, 2), jnp.float32)
    paged.write(paged.LayerKV(pool, pool), table, start, count, rows, rows)
    assert len(pool.puts) == 2 and np.array_equal(*pool.puts)
    places = pool.puts[0].reshape(-1, 2)
    kept = places[places[:, 0] < 20]
    assert (places[places[:, 0] >= 20, 0] == 20).all()
    assert len(kept) == len(set(map(tuple, kept.tolist()))) == sum(min(12, n) for _, n in chunks)


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
@pytest.mark.parametrize("chunks", CHUNKS)
def test_rows_land_where_attention_looks_for_them(chunks, implementation):
    rng = np.random.default_rng(1)
    table = rng.permutation(20)[:9].reshape(3, 3)
    before = rng.standard_normal((2, 20, PAGE, 1, 2)).astype(np.float32)
    rows = rng.standard_normal((2, 3, 25, 1, 2)).astype(np.float32)
    expected = before.copy()
    for b, (start, count) in enumerate(chunks):
        for i in range(count):  # one by one, in order
            expected[:, table[b, (start + i) // PAGE % 3], (start + i) % PAGE] = rows[:, b, i]
    start, count = (jnp.asarray(x, jnp.int32) for x in zip(*chunks, strict=True))
    layer = paged.LayerKV(*map(jnp.asarray, before))
    new = [jnp.asarray(table, jnp.int32), start, count, *map(jnp.asarray, rows)]
    layer = write(layer, *new, after=-layer.k, implementation=implementation)
    assert np.array_equal(np.stack([layer.k, layer.v]), expected)
    # The same by the reader's rule: place j of the ring holds the newest position congruent to j.
    held = np.asarray(ring_positions(start + count, 12))
    for b, (start, _) in enumerate(chunks):
        for place, position in enumerate(held[b]):
            if position >= start:
                assert np.array_equal(expected[:, table[b, place // PAGE], place % PAGE], rows[:, b, position - start]), (b, position)


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
def test_rows_of_a_path_are_stored_in_its_order(implementation):
    """As where the rows on the path are taken first."""
    rng = np.random.default_rng(2)
    layer = paged.LayerKV(*(jnp.asarray(rng.standard_normal((9, PAGE, 2, 4)), jnp.float32) for _ in range(2)))
    table, start, count = ids(4, 2, 7, 0, 8, 3).reshape(2, 3), ids(9, 3), ids(4, 2)
    rows, path = [jnp.asarray(rng.standard_normal((2, 8, 2, 4)), jnp.float32) for _ in range(2)], ids(0, 3, 1, 7, 6, 2, 2, 5).reshape(2, 4)
    found = write(layer, table, start, count, *rows, path, implementation=implementation)
    taken = [jnp.stack([x[b, path[b]] for b in range(2)]) for x in rows]
    expected = write(layer, table, start, count, *taken, implementation="xla")
    assert not np.array_equal(expected.k, layer.k)
    assert np.array_equal(found.k, expected.k) and np.array_equal(found.v, expected.v)


def test_rows_are_stored_in_the_pools_dtype():
    layer = empty(slots=1, dtype=jnp.bfloat16).layers[0]
    rows = jnp.full((1, 2, 1, 8), 1.001, jnp.float32)
    layer = write(layer, ids(0, 1, 2)[None], ids(0), ids(2), rows, rows)
    assert layer.k.dtype == jnp.bfloat16 and layer.k[0, 1, 0, 3] == 1.0


def test_float8_pools_hold_what_the_scales_and_the_range_allow():
    pool = jnp.zeros((2, PAGE, 1, 4), jnp.float8_e4m3fn)
    layer = paged.LayerKV(pool, pool, jnp.asarray([2.0, 0.5], jnp.float32))
    k = jnp.asarray([1.0, 2.0, -6.0, 5000.0]).reshape(1, 1, 1, 4)
    after = paged.write(layer, jnp.asarray([[1]], jnp.int32), jnp.asarray([0], jnp.int32), jnp.asarray([1], jnp.int32), k, k)
    assert after.k[1, 0, 0].astype(jnp.float32).tolist() == [0.5, 1.0, -3.0, 448.0]
    assert after.v[1, 0, 0].astype(jnp.float32).tolist() == [2.0, 4.0, -12.0, 448.0]
    assert after.scales is layer.scales
    # Rows in the pools' dtype are taken as they are.
    again = paged.write(
        after, jnp.asarray([[0]], jnp.int32), jnp.asarray([0], jnp.int32), jnp.asarray([1], jnp.int32), after.k[1:, :1], after.v[1:, :1]
    )
    assert again.k[0, 0, 0].astype(jnp.float32).tolist() == [0.5, 1.0, -3.0, 448.0]
