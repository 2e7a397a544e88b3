"""Every kernel, compiled for the GPU that is there, at the named shapes of real models against its XLA reference in float32."""

import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from packed_matrices import packed
from real_loops import KERNELS, kernels_of_any_dialect

from pallas_kernels import (
    add_norm,
    byte_walk,
    centroid_head,
    choice,
    dialect,
    layer_end,
    linear,
    lm_head,
    moe,
    noise,
    paged_attention,
    qkv,
    top_candidates,
)
from pallas_kernels.add_norm import bench as add_norm_bench
from pallas_kernels.add_norm import shapes as add_norm_shapes
from pallas_kernels.byte_walk import shapes as byte_walk_shapes
from pallas_kernels.centroid_head import shapes as centroid_head_shapes
from pallas_kernels.layer_end import bench as layer_end_bench
from pallas_kernels.layer_end import mosaic as layer_end_mosaic
from pallas_kernels.layer_end import shapes as layer_end_shapes
from pallas_kernels.linear import mosaic
from pallas_kernels.linear import shapes as linear_shapes
from pallas_kernels.lm_head import guided
from pallas_kernels.lm_head import shapes as lm_head_shapes
from pallas_kernels.moe import shapes as moe_shapes
from pallas_kernels.paged_attention import mosaic as attention_mosaic
from pallas_kernels.paged_attention import shapes as attention_shapes
from pallas_kernels.qkv import bench as qkv_bench
from pallas_kernels.qkv import mosaic as qkv_mosaic
from pallas_kernels.qkv import reference as qkv_reference
from pallas_kernels.qkv import shapes as qkv_shapes
from pallas_kernels.top_candidates import shapes as top_candidates_shapes

pytestmark = pytest.mark.gpu

# What XLA makes of a product is run once: the search for the fastest would take most of the time.
jit = functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0})
KERNEL = {"implementation": "triton"}
LIMITS = {"bfloat16": 1e-2, "float32": 1e-5}  # length of the difference beside that of what is wanted
TIE = 1e-3  # scores of tokens below this are summed in another order, no more
SUPPRESSED = (0, 258_881)


@pytest.fixture(autouse=True)
def device():
    if reason := dialect.obstacle():
        pytest.skip(reason)


def assert_close(found, wanted, dtype):
    """Along the first axis, every row, sequence or page by itself."""
    found, wanted = (x.astype(jnp.float32).reshape(len(x), -1) for x in (found, wanted))
    gap, size = (jnp.linalg.norm(x, axis=1) for x in (found - wanted, wanted))
    worst = jnp.max(jnp.where(gap == 0, 0.0, gap / size))
    assert worst <= LIMITS[dtype], f"the largest relative error is {worst:.1e}"


def results(*calls):
    """What functions make of arguments, for pairs of them, compiled side by side: most of the time is spent there."""
    with ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda call: jit(call[0]).lower(*call[1]).compile(), calls))
    return [program(*arguments) for program, (_, arguments) in zip(programs, calls, strict=True)]


def normal(rng, *shape, deviation=1.0, dtype="float32"):
    return jnp.asarray(deviation * rng.standard_normal(shape, np.float32)).astype(dtype)


@functools.partial(jit, static_argnums=(1, 2, 3))
def draw(key, shape, deviation, dtype):
    """Normal numbers made on the device, of which there may be many."""
    return jax.random.normal(key, shape, dtype) * jnp.asarray(deviation, dtype)


def wide(tree):
    """The same numbers in float32."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


# Paged attention: contexts of many pages, around a page's end, and none; in a prefill fewer, since XLA keeps all scores.
CONTEXTS, PREFILL_CONTEXTS = (2500, 65, 64, 1, 0), (700, 0)


def attention_case(shape, dtype, stored=None):
    """Arguments of `paged_attention` for sequences of any lengths, with NaN wherever none of their queries looks. stored: the dtype
    of keys and values, by default `dtype`."""
    rng = np.random.default_rng(shape.queries)
    page, rows = attention_shapes.PAGE, shape.queries
    lengths = np.array(CONTEXTS if rows <= 64 else PREFILL_CONTEXTS, np.int32)
    batch, most = len(lengths), int(lengths.max()) + rows
    places = -(-(most if shape.window is None else min(most, shape.window + rows)) // page)
    table = rng.permutation(batch * places).reshape(batch, places).astype(np.int32)
    counts = np.maximum(rows - np.arange(batch, dtype=np.int32), 0)
    first = lengths if shape.fresh else np.maximum(lengths - 1, 0)
    used = np.zeros((batch * places, page), bool)
    for b, length in enumerate(lengths):
        oldest = 0 if shape.window is None else first[b] - shape.window + 1
        at = np.arange(max(oldest, length - places * page, 0), length)
        used[table[b, at // page % places], at % page] = True

    def pair(seen):
        """K and V of places that are seen or not."""
        dims = (shape.rotary or shape.head_dim, shape.head_dim)
        pools = (normal(rng, *seen.shape, shape.kv_heads, d) for d in dims)
        return tuple(jnp.where(seen[:, :, None, None], pool, jnp.nan).astype(stored or dtype) for pool in pools)

    fresh = pair(np.arange(rows)[None, :] < counts[:, None]) if shape.fresh else None
    return (
        normal(rng, batch, rows, shape.kv_heads, shape.group, shape.head_dim, deviation=0.1, dtype=dtype),
        jnp.asarray(first[:, None] + np.arange(rows, dtype=np.int32)[None, :]),
        pair(used),
        jnp.asarray(table),
        jnp.asarray(lengths),
        fresh,
        jnp.asarray(counts) if shape.fresh else None,
        normal(rng, shape.head_dim, dtype=dtype) if shape.rotary else None,
        jnp.array([0.5, 2.0], jnp.float32) if stored else None,
        shape.through(jnp.asarray(first)),
    )


def alone(case):
    """The first sequence by itself, its fresh rows already in its pages, as a verify block has them."""
    q, positions, pools, table, lengths, fresh, counts, weight, scales, through = case
    q, positions, table, lengths = q[:1], positions[:1], table[:1], lengths[:1]
    if fresh is not None:
        pools = tuple(qkv_reference.write_rows(pool, table, lengths, counts[:1], new[:1]) for pool, new in zip(pools, fresh, strict=True))
        lengths = lengths + counts[:1]
    return q, positions, pools, table, lengths, None, None, weight, scales, through if through is None else through[:1]


@pytest.mark.parametrize("name", attention_shapes.SHAPES)
def test_paged_attention(name):
    shape = attention_shapes.SHAPES[name]
    function = functools.partial(paged_attention.paged_attention, causal=shape.causal, window=shape.window)
    kernel, reference = functools.partial(function, **KERNEL), jit(functools.partial(function, implementation="xla"))
    half, single = attention_case(shape, "bfloat16"), attention_case(shape, "float32")
    batched, one, exact = results((kernel, half), (kernel, alone(half)), (kernel, single))
    wanted = reference(*wide(half))
    assert_close(batched, wanted, "bfloat16")
    assert_close(one, wanted[:1], "bfloat16")
    assert_close(exact, reference(*single), "float32")


@pytest.mark.parametrize("name", [name for name, shape in attention_shapes.SHAPES.items() if shape.head_dim >= 256])
def test_paged_attention_on_hopper(name):
    if reason := dialect.mosaic_obstacle():
        pytest.skip(reason)
    shape = attention_shapes.SHAPES[name]
    case = attention_case(shape, "bfloat16")
    function = functools.partial(paged_attention.paged_attention, causal=shape.causal, window=shape.window)
    kernel = functools.partial(function, implementation="mosaic")
    batched, one = results((kernel, case), (kernel, alone(case)))
    wanted = jit(functools.partial(function, implementation="xla"))(*wide(case))
    assert_close(batched, wanted, "bfloat16")
    assert_close(one, wanted[:1], "bfloat16")


def check_on_hopper(shape, splits=None):
    if reason := dialect.mosaic_obstacle():
        pytest.skip(reason)
    case = attention_case(shape, "bfloat16")
    settings = {"causal": shape.causal, "window": shape.window}
    kernel = functools.partial(attention_mosaic.paged_attention, **settings, scale=1.0, splits=splits)
    (found,) = results((kernel, (*case[:8], case[9])))
    wanted = jit(functools.partial(paged_attention.paged_attention, **settings, implementation="xla"))(*wide(case))
    assert_close(found, wanted, "bfloat16")


@pytest.mark.parametrize(
    "shape", [attention_shapes.Shape(136, 2, 2, 256, window=100, image=130), attention_shapes.Shape(200, 1, 2, 512, image=90)], ids=str
)
def test_paged_attention_on_hopper_of_an_image_that_fills_no_tile(shape):
    check_on_hopper(shape)


@pytest.mark.parametrize("splits", [1, 3, None])
@pytest.mark.parametrize(
    "shape",
    [
        attention_shapes.Shape(72, 2, 4, 256, window=512),
        attention_shapes.Shape(72, 2, 3, 512),
        attention_shapes.Shape(136, 1, 2, 512, window=100, causal=False),
        attention_shapes.Shape(3, 2, 4, 256, window=512),
        attention_shapes.Shape(5, 2, 3, 256, window=512),
        attention_shapes.Shape(25, 2, 2, 256, window=512),
        attention_shapes.Shape(9, 1, 4, 512),
        attention_shapes.Shape(7, 1, 3, 512, causal=False),
    ],
    ids=lambda x: f"{x.queries} rows of {x.group} heads of {x.head_dim}" if isinstance(x, attention_shapes.Shape) else f"{x} parts",
)
def test_paged_attention_on_hopper_of_rows_that_fill_no_tile(shape, splits):
    check_on_hopper(shape, splits)


@pytest.mark.parametrize("name", ["e2b-full", "31b-full", "31b-sliding", "31b-assistant-full"])
def test_paged_attention_over_float8(name):
    shape = attention_shapes.SHAPES[name]
    function = functools.partial(paged_attention.paged_attention, causal=shape.causal, window=shape.window)
    case = attention_case(shape, "bfloat16", jnp.float8_e4m3fn)
    batched, one = results(*((functools.partial(function, **KERNEL), arguments) for arguments in (case, alone(case))))
    wanted = jit(functools.partial(function, implementation="xla"))(*wide(case))
    assert_close(batched, wanted, "bfloat16")
    assert_close(one, wanted[:1], "bfloat16")


# KV heads, query heads of each, width, rotary dims stored, and how many heads of K and V a layer projects.
HEADS = {(s.kv_heads, s.group, s.head_dim, s.rotary, s.fresh * (1 if s.rotary else 2)) for s in attention_shapes.SHAPES.values()}


@pytest.mark.parametrize("heads", sorted(HEADS), ids=str)
def test_qkv(heads):
    """Stored in pages, where nothing else may change, and as fresh rows."""
    kv_heads, group, dim, rotary, owned = heads
    rng, (batch, rows, places, page) = np.random.default_rng(0), (3, 5, 3, attention_shapes.PAGE)

    def case(dtype, stored):
        angles = rng.standard_normal((batch, rows, dim // 2)).astype(np.float32)
        pool = functools.partial(jnp.full, fill_value=jnp.nan, dtype=dtype)
        pages = qkv.Pages(
            pool((batch * places, page, kv_heads, rotary or dim)),
            pool((batch * places, page, kv_heads, dim)),
            jnp.asarray(rng.permutation(batch * places).reshape(batch, places), jnp.int32),
            jnp.array([62, 0, 1000], jnp.int32),
            jnp.array([rows, 0, rows - 2], jnp.int32),
        )
        projected = normal(rng, batch, rows, kv_heads, group + owned, dim, dtype=dtype)
        weights = [1 + normal(rng, dim, deviation=0.1, dtype=dtype) for _ in range(1 + bool(owned))]
        turns = jnp.cos(angles), jnp.sin(angles)
        return (projected, *turns, *weights, *([None] * (not owned)), pages if stored and owned else None)

    function = functools.partial(qkv.qkv, group=group, key_dims=rotary or dim, eps=1e-6)
    cases = [(dtype, case(dtype, stored)) for dtype in LIMITS for stored in (True, False)]
    found = results(*((functools.partial(function, **KERNEL), arguments) for _, arguments in cases))
    reference = jit(functools.partial(function, implementation="xla"))
    for (dtype, arguments), out in zip(cases, found, strict=True):
        for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(reference(*wide(arguments))), strict=True):
            assert a.dtype == dtype and bool(jnp.all(jnp.isnan(a) == jnp.isnan(b)))
            assert_close(jnp.nan_to_num(a), jnp.nan_to_num(b), dtype)


@pytest.mark.parametrize(("batch", "rows"), [(1, 1), (1, 4), (1, 8), (4, 8), (8, 5)])
@pytest.mark.parametrize("name", qkv_shapes.SHAPES)
def test_qkv_product_on_hopper(name, batch, rows):
    """One kernel beside the two that serve otherwise and the reference. Nothing else changes in pools, and calls give the same bits."""
    if reason := dialect.mosaic_obstacle():
        pytest.skip(reason)
    shape = qkv_shapes.SHAPES[name]
    args, settings = qkv_bench.inputs(shape, batch, rows, jnp.bfloat16), {"group": shape.group, "key_dims": shape.dim, "eps": 1e-6}
    kernel, reference = (functools.partial(qkv.projected, **settings, implementation=name) for name in ("mosaic", "xla"))
    apart = functools.partial(qkv_bench.apart, **settings, launch_dependents=False)
    fresh = (*args[:-1], None)
    *found, two, alone = results(*[(kernel, args)] * 3, (apart, args), (kernel, fresh))
    for given, outs in ((args, (*found, two)), (fresh, (alone,))):
        wanted = jax.tree.leaves(jit(reference)(*wide(given)))
        for out in outs:
            for a, b in zip(jax.tree.leaves(out), wanted, strict=True):
                assert a.dtype == jnp.bfloat16 and bool(jnp.all(jnp.isnan(a) == jnp.isnan(b)))
                assert_close(jnp.nan_to_num(a), jnp.nan_to_num(b), "bfloat16")
    for out in found[1:]:
        for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(found[0]), strict=True):
            np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("name", ["E2B sliding", "E2B full", "E4B full", "E2B assistant sliding"])
def test_qkv_products_launched_early_on_hopper(name):
    """A chain of them and of norms, each of which may begin before the one that it reads has ended."""
    if reason := dialect.mosaic_obstacle():
        pytest.skip(reason)
    shape = qkv_shapes.SHAPES[name]
    x, w, *others, pages = qkv_bench.inputs(shape, 1, 8, jnp.bfloat16)
    kernel = functools.partial(qkv.projected, group=shape.group, key_dims=shape.dim, eps=1e-6, implementation="mosaic")
    layers, y, norm = [(w * (1 + i), *others) for i in range(12)], jnp.flip(x), jnp.ones(shape.width, x.dtype)

    def chain(x, pages, launch):
        def heads(_, *args, **settings):
            nonlocal x
            x, normed = add_norm.add_norm(x, y, norm, next_weights=(norm,), eps=1e-6, launch_dependents=launch)
            return kernel(normed, *args, **settings)

        return qkv_bench.chain(heads, x, layers, pages, launch)

    run = jax.jit(chain, static_argnums=2)
    apart = run(x, pages, False)
    for _ in range(5):
        for found, wanted in zip(jax.tree.leaves(run(x, pages, True)), jax.tree.leaves(apart), strict=True):
            np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


@pytest.mark.parametrize("rows", [5, 300], ids=["a few rows", "more rows than the ring holds"])
def test_write(rows):
    """Keys and values of a chunk land in their places, and nothing else changes."""
    rng, (batch, places, page, kv_heads, dims) = np.random.default_rng(0), (3, 4, attention_shapes.PAGE, 3, (128, 256))
    pools = [jnp.full((batch * places, page, kv_heads, dim), jnp.nan, jnp.bfloat16) for dim in dims]
    table = jnp.asarray(rng.permutation(batch * places).reshape(batch, places), jnp.int32)
    pages = qkv.Pages(*pools, table, jnp.array([62, 0, 1000], jnp.int32), jnp.array([rows, 0, rows - 2], jnp.int32))
    new = [normal(rng, batch, rows, kv_heads, dim, dtype="bfloat16") for dim in dims]
    kernel = functools.partial(qkv.write, **KERNEL)
    (found,) = results((kernel, (pages, *new)))
    wanted = jit(functools.partial(qkv.write, implementation="xla"))(pages, *new)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.parametrize("pages", [20_000, 28_160], ids=["2.4 GiB", "3.4 GiB"])
def test_a_pool_of_more_than_2_31_elements(pages):
    """Values of float8, of which offsets have 64 bits: what its last pages hold and give is what a small pool's do."""
    shape, page, rows = attention_shapes.SHAPES["31b-full"], attention_shapes.PAGE, 64
    dim, key_dims, heads = shape.head_dim, shape.rotary, shape.group + 1
    size = pages * page * shape.kv_heads * (key_dims + dim)
    if size > 0.5 * (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0):
        pytest.skip("the pools are too large for this device")
    assert pages * page * shape.kv_heads * dim > 2**31
    rng = np.random.default_rng(0)
    projected = normal(rng, 1, rows, shape.kv_heads, heads, dim, dtype="bfloat16")
    angles = rng.standard_normal((1, rows, dim // 2)).astype(np.float32)
    weight = 1 + normal(rng, dim, deviation=0.1, dtype="bfloat16")
    start, count = jnp.array([40], jnp.int32), jnp.array([rows], jnp.int32)  # in two pages

    @functools.partial(jit, static_argnums=1)
    def run(table, pages):
        pools = (jnp.zeros((pages, page, shape.kv_heads, dims), jnp.float8_e4m3fn) for dims in (key_dims, dim))
        where = qkv.Pages(*pools, table, start, count)
        settings = {"group": shape.group, "key_dims": key_dims, "eps": 1e-6, **KERNEL}
        q, k, v = qkv.qkv(projected, jnp.cos(angles), jnp.sin(angles), weight, weight, where, **settings)
        positions = start[:, None] + jnp.arange(rows, dtype=jnp.int32)[None, :]
        scales = jnp.ones(2, jnp.float32)
        out = paged_attention.paged_attention(q, positions, (k, v), table, start + count, key_weight=weight, scales=scales, **KERNEL)
        return out, k[table[0]], v[table[0]]

    small, large = (run(jnp.array([[count - 1, count - 2]], jnp.int32), count) for count in (2, pages))
    assert jnp.any(small[2].astype(jnp.float32) != 0)
    for found, wanted in zip(large, small, strict=True):
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(wanted, np.float32))


@pytest.mark.parametrize("name", add_norm_shapes.SHAPES)
def test_add_norm(name):
    def function(x, y, weight, scalar, next_weights, implementation):
        settings = {"scalar": scalar, "next_weights": next_weights, "eps": 1e-6}
        return add_norm.add_norm(x, y, weight, **settings, implementation=implementation)

    cases = [add_norm_bench.inputs(add_norm_shapes.SHAPES[name], jnp.dtype(dtype)) for dtype in LIMITS]
    found = results(*((functools.partial(function, **KERNEL), case) for case in cases))
    reference = jit(functools.partial(function, implementation="xla"))
    for dtype, arguments, out in zip(LIMITS, cases, found, strict=True):
        for a, b in zip(out, reference(*wide(arguments)), strict=True):
            assert a.dtype == dtype
            assert_close(a, b, dtype)


@pytest.mark.parametrize("name", linear_shapes.SHAPES)
def test_linear(name):
    shape = linear_shapes.SHAPES[name]

    def case(rows, dtype):
        specs = shape.arguments(rows, dtype)
        numbers = [draw(jax.random.key(i), x.shape, shape.width**-0.5 if i == 1 else 1.0, dtype) for i, x in enumerate(specs[:3])]
        return [*numbers, *(jnp.asarray(7, x.dtype) for x in specs[3:])]

    cases = [(dtype, case(rows, dtype)) for rows, dtype in ((1, "bfloat16"), (5, "bfloat16"), (40, "bfloat16"), (5, "float32"))]
    function = getattr(linear, shape.kind)
    found = results(*((functools.partial(function, **KERNEL), arguments) for _, arguments in cases))
    reference = jit(functools.partial(function, implementation="xla"))
    for (dtype, arguments), out in zip(cases, found, strict=True):
        wanted = reference(*wide(arguments))
        assert out.dtype == ("float32" if shape.kind == "partials" else dtype)
        assert_close(*(x.sum(axis=0) if shape.kind == "partials" else x for x in (out, wanted)), dtype)


# Tiles of every form: rows that are padded, blocks of fewer outputs, programs that share sums, or what they read of x.
ON_HOPPER = [
    ("linear", 1, 5128, 1536, mosaic.Tiles(64)),
    ("partials", 5, 5376, 8192, mosaic.Tiles(64, stages=6, splits=3)),
    ("gated", 5, 2120, 1536, mosaic.Tiles(56, stages=5)),
    ("partials", 32, 1536, 2048, mosaic.Tiles(40, step=128, splits=4)),
    ("linear", 33, 5128, 1536, mosaic.Tiles(64)),
    ("linear", 100, 5128, 1536, mosaic.Tiles(64, cluster=2, stream=True)),
    ("partials", 160, 5376, 8192, mosaic.Tiles(64, stages=6, splits=3)),
    ("partials", 39, 5128, 1536, mosaic.Tiles(64, step=128, stream=True)),
    ("gated", 40, 2120, 1536, mosaic.Tiles(56, stages=5, cluster=2)),
    ("linear", 97, 5128, 1536, mosaic.Tiles(40, stages=8, rows_left=True)),
    ("partials", 128, 5376, 8192, mosaic.Tiles(64, stages=6, splits=3, rows_left=True)),
    ("gated", 100, 2120, 1536, mosaic.Tiles(24, stages=8, rows_left=True)),
    ("gated", 128, 2120, 1536, mosaic.Tiles(96, stages=5, rows_left=True)),
    ("gated", 128, 2120, 1536, mosaic.Tiles(64, stages=6, cluster=2, stream=True, rows_left=True)),
    ("gated", 160, 2120, 1536, mosaic.Tiles(40, stages=5, stream=True)),
    ("gated", 160, 2112, 2816, mosaic.Tiles(48, stages=5)),
    ("gated", 256, 2120, 1536, mosaic.Tiles(64, stages=3, cluster=2)),
]


@pytest.mark.parametrize(("kind", "rows", "columns", "width", "tiles"), ON_HOPPER)
def test_linear_on_hopper(kind, rows, columns, width, tiles):
    """These tiles and those that are chosen, each three times: programs that wait for each other must give the same every time."""
    if reason := dialect.mosaic_obstacle():
        pytest.skip(reason)
    specs = linear_shapes.Shape(kind, columns, width).arguments(rows, jnp.bfloat16)
    arguments = [draw(jax.random.key(i), x.shape, width**-0.5 if i == 1 else 1.0, "bfloat16") for i, x in enumerate(specs)]
    kernels = functools.partial(getattr(mosaic, kind), tiles=tiles), functools.partial(getattr(linear, kind), implementation="mosaic")
    wanted = jit(functools.partial(getattr(linear, kind), implementation="xla"))(*wide(arguments))
    for kernel in kernels:
        found = results(*[(kernel, arguments)] * 3)
        for out in found:
            assert_close(*(x.sum(axis=0) if kind == "partials" else x for x in (out, wanted)), "bfloat16")
            np.testing.assert_array_equal(out, found[0])


@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("form", [None, "int4", "int4 zeros"])
def test_kernels_launched_early_on_hopper(form, rows):
    """A chain of kernels, each of which may be launched, and may read its weights, before the one that it depends on has ended."""
    if reason := dialect.mosaic_obstacle():
        pytest.skip(reason)
    hidden, inner, layers = 2048, 4096, 6
    x, norm = draw(jax.random.key(0), (rows, hidden), 1.0, "bfloat16"), jnp.ones(hidden, jnp.bfloat16)

    def weights(i, *shape):
        if form is not None:
            return packed(form, shape, i)
        return draw(jax.random.key(i), shape, shape[-1] ** -0.5, "bfloat16")

    pairs = [(weights(2 * i + 1, 2, inner, hidden), weights(2 * i + 2, hidden, inner)) for i in range(layers)]

    def chain(x, pairs, implementation, launch):
        settings = {"implementation": implementation, "launch_dependents": launch}
        entered, found = x, []
        for gate_up, down in pairs:
            out = linear.partials(linear.gated(entered, gate_up, **settings), down, **settings)
            x, entered = add_norm.add_norm(x, out, norm, next_weights=(norm,), eps=1e-6, launch_dependents=launch)
            found.append(x)
        return found

    run = functools.partial(jax.jit(chain, static_argnums=(2, 3)), x, pairs, "mosaic")
    apart = run(False)
    for _ in range(5):
        for found, wanted in zip(run(True), apart, strict=True):
            np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("name", layer_end_shapes.SHAPES)
def test_layer_end_on_hopper(name):
    if reason := dialect.mosaic_obstacle():
        pytest.skip(reason)
    args = layer_end_bench.inputs(layer_end_shapes.SHAPES[name], jnp.bfloat16)
    call = functools.partial(layer_end.layer_end, eps=1e-6)
    kernel = functools.partial(call, implementation="mosaic")
    *found, wanted = results(*[(kernel, args)] * 3, (functools.partial(call, implementation="xla"), wide(args)))
    for out in found:
        for value, expected, same in zip(out, wanted, found[0], strict=True):
            if value is not None:
                assert_close(value, expected, "bfloat16")
                np.testing.assert_array_equal(value, same)


def test_layer_ends_launched_early_on_hopper():
    """A chain of them, each of which may begin before the one that it reads has ended."""
    if reason := dialect.mosaic_obstacle():
        pytest.skip(reason)
    shape = layer_end_shapes.SHAPES["E2B 32"]
    x, y, *others = layer_end_bench.inputs(shape, jnp.bfloat16)

    def chain(x, launch):
        found = []
        for _ in range(12):
            x, normed = layer_end.layer_end(x, y, *others, eps=1e-6, launch_dependents=launch, implementation="mosaic")
            found += [x, normed]
        return found

    run = jax.jit(chain, static_argnums=1)
    apart = run(x, False)
    for _ in range(5):
        for found, wanted in zip(run(x, True), apart, strict=True):
            np.testing.assert_array_equal(found, wanted)


@functools.partial(jit, static_argnames="shape")
def experts_one_by_one(x, gate_up, down, scores, per_expert, shape):
    """Router and experts in float32, an expert at a time: XLA's grouped product takes more memory than many a GPU has."""
    weights, ids = moe.reference.route(wide(scores), wide(per_expert), shape.top_k, shape.scale)
    x = wide(x)

    def add(expert, total):
        share = jnp.sum(jnp.where(ids == expert, weights, 0), axis=1, keepdims=True)
        gate, up = (x @ wide(gate_up[expert, half]).T for half in (0, 1))
        out = shape.activation(gate, up) @ wide(down[expert]).T
        return total + jnp.where(share != 0, share * out, 0)

    return ids, jax.lax.fori_loop(0, gate_up.shape[0], add, jnp.zeros_like(x))


@functools.lru_cache(maxsize=1)
def expert_weights(dtype, shape):
    """gate_up_proj and down_proj, with NaN in the experts that nobody may choose: every fourth."""
    _, gate_up, down, _, _ = shape.layer(dtype)

    idle = jnp.arange(shape.experts) % 4 == 3
    weights = [draw(jax.random.key(i), x.shape, x.shape[-1] ** -0.5, dtype) for i, x in enumerate((gate_up, down))]
    return [jnp.where(idle.reshape(-1, *(1,) * (w.ndim - 1)), jnp.nan, w) for w in weights]


@pytest.mark.parametrize("name", moe_shapes.SHAPES)
@pytest.mark.parametrize("dtype", LIMITS)
def test_moe(dtype, name):
    shape, rng = moe_shapes.SHAPES[name], np.random.default_rng(0)
    shape = dataclasses.replace(shape, inner=shape.inner if shape.scale is None else 256)  # 288 whole experts would fill a small GPU
    idle = jnp.arange(shape.experts) % 4 == 3
    scores = jnp.where(idle[None, :], -jnp.inf, normal(rng, shape.rows, shape.experts)).astype(dtype)
    x, per_expert = normal(rng, shape.rows, shape.hidden, dtype=dtype), normal(rng, shape.experts, deviation=0.1, dtype=dtype) + 1
    if shape.scale is not None:  # a bias, which must not choose an idle expert
        per_expert = jnp.where(idle, -2, per_expert).astype(dtype)

    def layer(x, gate_up, down, scores, per_expert):
        weights, ids, groups = moe.route(scores, per_expert, shape.top_k, scale=shape.scale, **KERNEL)
        return ids, moe.experts(x, gate_up, down, weights, ids, groups, activation=shape.activation, **KERNEL)

    arguments = (x, *expert_weights(dtype, dataclasses.replace(shape, rows=1)), scores, per_expert)
    ((ids, found),) = results((layer, arguments))
    wanted_ids, wanted = experts_one_by_one(*arguments, shape=shape)
    np.testing.assert_array_equal(ids, wanted_ids)
    assert_close(found, wanted, dtype)


@functools.partial(jit, static_argnames="softcap")
def head_scores(hidden, table, keys, temperature, softcap):
    """What a choice among the whole table maximises, [N, V] float32."""
    logits = jax.lax.dot_general(hidden, table, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    ids = jnp.arange(table.shape[0], dtype=jnp.int32)[None, :]
    logits = choice.capped(logits, ids, softcap, SUPPRESSED)
    return noise.perturbed(logits, temperature[:, None], keys[:, :1], keys[:, 1:], ids)


def assert_best(chosen, scores):
    """Every id has its row's best score, or one that ties with it."""
    found = jnp.take_along_axis(scores, chosen[:, None], axis=1)[:, 0]
    assert jnp.all(found >= jnp.max(scores, axis=1) - TIE)


# In float32 a table of 262,144 rows of more than 1,536 numbers would take many GB, and the kernel is the same as at smaller widths.
HEADS = [
    (dtype, hidden, softcap)
    for hidden, softcap in sorted({(shape.hidden, shape.softcap) for shape in lm_head_shapes.SHAPES.values()}, key=str)
    for dtype in LIMITS
    if dtype != "float32" or hidden <= 1536
]


@pytest.mark.parametrize("implementation", ["triton", "mosaic", "guided"])
@pytest.mark.parametrize(("dtype", "hidden", "softcap"), HEADS)
def test_lm_head(dtype, hidden, softcap, implementation):
    """Greedy and sampled rows mixed, and greedy ones alone. With a guide few rows alone are served."""
    if implementation == "mosaic" and (reason := dialect.mosaic_obstacle() or (dtype != "bfloat16" and "the kernel needs bfloat16")):
        pytest.skip(reason)
    with_guide = implementation == "guided"
    shapes = [s for s in lm_head_shapes.SHAPES.values() if (s.hidden, s.softcap) == (hidden, softcap)]
    shapes = [s for s in shapes if not with_guide or s.rows <= guided.MOST_ROWS]
    rows, vocab = max(s.rows for s in shapes), lm_head_shapes.VOCAB
    states = draw(jax.random.key(0), (rows, hidden), 1.0, dtype)
    table = draw(jax.random.key(1), (vocab, hidden), 5 * hidden**-0.5, dtype)
    keys = jax.random.bits(jax.random.key(2), (rows, 2), jnp.uint32)
    mixed = jnp.tile(jnp.array([0.7, 0.0, 1.5], jnp.float32), rows)[:rows]

    guide = lm_head.guide_of(table) if with_guide else None

    @functools.partial(jit, static_argnames="rows")
    def function(states, table, guide, keys, temperature, rows):
        arrays = states[:rows], table, keys[:rows], temperature[:rows]
        settings = {"guide": guide, "implementation": "auto" if with_guide else implementation}
        return lm_head.lm_head(*arrays, softcap=softcap, suppressed=SUPPRESSED, **settings)

    with ThreadPoolExecutor() as pool:
        lower = functools.partial(function.lower, states, table, guide, keys, mixed)
        programs = list(pool.map(lambda shape: lower(rows=shape.rows).compile(), shapes))
    for temperature in (mixed, jnp.zeros_like(mixed)):
        scores = head_scores(states, table, keys, temperature, softcap)
        for shape, program in zip(shapes, programs, strict=True):
            chosen, maxima = program(states, table, guide, keys, temperature)
            assert_best(chosen, scores[: shape.rows])
            assert_close(maxima, jnp.max(scores[: shape.rows], axis=1), dtype)


@pytest.mark.parametrize("vocab", [lm_head_shapes.VOCAB, 50_257, 1000])
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_choice_among_logits_in_memory(vocab, softcap):
    """Greedy and sampled rows mixed, among others one with many equal logits and one of -inf but for one."""
    rows = 200
    logits = draw(jax.random.key(0), (rows, vocab), 10.0, "float32")
    logits = logits.at[3].set(jnp.round(logits[3] / 20)).at[6].set(-jnp.inf).at[6, 900].set(1.0)
    keys = jax.random.bits(jax.random.key(2), (rows, 2), jnp.uint32)
    temperature = jnp.tile(jnp.array([0.7, 0.0, 1.5, 0.0], jnp.float32), rows)[:rows]
    arrays, settings = (logits, keys, temperature), {"softcap": softcap, "suppressed": SUPPRESSED}
    (ids, maxima), (wanted, expected) = results(
        (functools.partial(lm_head.choose, **settings), arrays),
        (functools.partial(lm_head.choose, **settings, implementation="xla"), arrays),
    )
    scores = choice.capped(logits, jnp.arange(vocab, dtype=jnp.int32)[None, :], softcap, SUPPRESSED)
    scores = noise.perturbed(scores, temperature[:, None], keys[:, :1], keys[:, 1:], jnp.arange(vocab, dtype=jnp.int32)[None, :])
    assert_best(ids, scores)
    assert ids[3] == wanted[3] and ids[6] == 900, "of equal logits the lowest id"
    assert_close(maxima, expected, "float32")


@pytest.mark.parametrize("hidden", sorted({hidden for _, hidden, _ in HEADS}))
def test_likely_logits(hidden):
    """A row's largest logits, as many as it wants, are the table's, and all others are smaller."""
    rows, vocab, most, dtype = guided.MOST_LIKELY_ROWS, lm_head_shapes.VOCAB, 128, "bfloat16"
    states = draw(jax.random.key(0), (rows, hidden), 1.0, dtype)
    table = draw(jax.random.key(1), (vocab, hidden), 5 * hidden**-0.5, dtype)
    counts = jnp.arange(rows, dtype=jnp.int32) * 18 + 1
    found, wanted = results(
        (lm_head.likely_logits, (states, table, lm_head.guide_of(table), counts)),
        (functools.partial(lm_head.likely_logits, implementation="xla"), (states, table, lm_head.guide_of(table), counts)),
    )
    values, ids = jax.lax.top_k(wanted, most)
    place = jnp.arange(most)[None, :]
    close = jnp.abs(jnp.take_along_axis(found, ids, axis=1) - values) <= TIE
    assert bool(jnp.all(close | (place >= counts[:, None])))
    least = jnp.take_along_axis(values, counts[:, None] - 1, axis=1)
    assert bool(jnp.all((found < least + TIE) | (wanted >= least)))


@pytest.mark.parametrize("name", centroid_head_shapes.SHAPES)
@pytest.mark.parametrize("dtype", LIMITS)
def test_centroid_head(dtype, name):
    shape, rng = centroid_head_shapes.SHAPES[name], np.random.default_rng(0)
    each = shape.vocab // shape.centroids
    hidden, centroids, table = (normal(rng, count, shape.hidden, dtype=dtype) for count in (shape.rows, shape.centroids, shape.vocab))
    table = table * jnp.asarray(5 * shape.hidden**-0.5, dtype)
    ordering = rng.permutation(shape.vocab).astype(np.int32)
    arrays = (hidden, centroids, jnp.asarray(ordering), table)
    keys = jnp.asarray(rng.integers(0, 2**32, (shape.rows, 2), np.uint32))
    temperature = jnp.tile(jnp.array([0.7, 0.0, 1.5], jnp.float32), shape.rows)[: shape.rows]
    settings = {"top_k": shape.top_k, "suppressed": SUPPRESSED, **KERNEL}
    (logits, ids), chosen = results(
        (functools.partial(centroid_head.candidates, **settings), arrays),
        (functools.partial(centroid_head.choose, **settings), (*arrays, keys, temperature)),
    )
    places = np.argsort(ordering)[np.asarray(ids)].reshape(shape.rows, shape.top_k, each)
    taken = places[:, :, 0] // each
    np.testing.assert_array_equal(places, taken[:, :, None] * each + np.arange(each))
    assert (np.diff(taken, axis=1) > 0).all()
    products = np.asarray(wide(hidden), np.float64) @ np.asarray(wide(centroids), np.float64).T
    least = np.sort(products, axis=1)[:, -shape.top_k]
    assert (np.take_along_axis(products, taken, axis=1).min(axis=1) >= least - TIE).all()

    wanted = jnp.einsum("nch,nh->nc", wide(table[ids]), wide(hidden))
    allowed = ~jnp.isin(ids, jnp.array(SUPPRESSED))
    assert bool(jnp.all(jnp.where(allowed, 0.0, logits) == jnp.where(allowed, 0.0, -jnp.inf)))
    assert_close(jnp.where(allowed, logits, 0.0), jnp.where(allowed, wanted, 0.0), "float32")
    scores = noise.perturbed(jnp.where(allowed, wanted, -jnp.inf), temperature[:, None], keys[:, :1], keys[:, 1:], ids)
    assert bool(jnp.all(jnp.any(ids == chosen[:, None], axis=1)))
    assert_best(jnp.argmax(ids == chosen[:, None], axis=1), scores)


@functools.cache
def many_logits():
    """Logits in steps of 1/16, so that many are equal, and the best of each row in NumPy's order."""
    shapes = top_candidates_shapes.SHAPES.values()
    rows, most, vocab = max(s.rows for s in shapes), max(s.k for s in shapes), next(iter(shapes)).vocab
    logits = np.round(16 * np.random.default_rng(0).standard_normal((rows, vocab), np.float32)) / np.float32(16) + np.float32(0)
    # Only those that reach the least of the best have to be sorted.
    least = -np.partition(-logits, most, axis=1)[:, most]
    few = [np.flatnonzero(row >= bound) for row, bound in zip(logits, least, strict=True)]
    best = np.stack([ids[np.argsort(-row[ids], kind="stable")[:most]] for row, ids in zip(logits, few, strict=True)])
    return logits, best


def test_top_candidates():
    logits, best = many_logits()
    shapes = list(top_candidates_shapes.SHAPES.values())
    calls = [(functools.partial(top_candidates.top_candidates, k=s.k, **KERNEL), (jnp.asarray(logits[: s.rows]),)) for s in shapes]
    for shape, (values, ids) in zip(shapes, results(*calls), strict=True):
        wanted = best[: shape.rows, : shape.k]
        np.testing.assert_array_equal(ids, wanted, err_msg=str(shape))
        np.testing.assert_array_equal(values, np.take_along_axis(logits[: shape.rows], wanted, axis=1), err_msg=str(shape))


def test_choices_among_candidates():
    """Rows with and without a temperature and each filter, of tokens and of named candidates. Their logits are in steps, so that many are
    equal, and a softcap makes more so; both sum what comes before a token in another order."""
    rows, each, vocab = 160, 4, 262_144
    logits, rng = jnp.asarray(many_logits()[0][:rows]).reshape(-1, each, vocab), np.random.default_rng(1)
    requests = rows // each
    settings = [
        jnp.asarray(rng.integers(0, 9000, (requests, each)), jnp.int32),
        jax.random.bits(jax.random.key(3), (requests, 2), jnp.uint32),
    ]
    settings += [jnp.asarray(rng.choice([0.0, 0.7, 2.0], requests), jnp.float32), jnp.asarray(rng.integers(0, 129, requests), jnp.int32)]
    settings += [jnp.asarray(rng.choice([kept, 0.4, 0.9], requests), jnp.float32) for kept in (1.0, 0.0)]
    names = jnp.asarray(rng.permuted(np.tile(np.arange(4096, dtype=np.int32), (rows, 1)), axis=1)).reshape(-1, each, 4096)
    few = {"logits": logits[..., :4096] * 400, "ids": names, "softcap": 30.0}
    calls = [{"logits": logits}, {"logits": logits, "softcap": 30.0}, few]
    both = [functools.partial(top_candidates.choose, k=128, implementation=name) for name in ("triton", "xla")]
    for call in calls:
        kept = {key: call.pop(key) for key in ("softcap",) if key in call}
        (found, most), (wanted, largest) = (jit(functools.partial(f, **kept))(call["logits"], *settings, ids=call.get("ids")) for f in both)
        assert_close(most, largest, "float32")
        assert np.mean(np.asarray(found != wanted)) <= 0.01


def test_byte_walk():
    rng = np.random.default_rng(0)
    shapes = byte_walk_shapes.SHAPES.values()
    states, vocab, longest = (max(getattr(shape, field) for shape in shapes) for field in ("states", "vocab", "longest"))
    length = jnp.asarray(rng.integers(0, longest + 1, vocab), jnp.int32)
    pool = jnp.asarray(rng.integers(0, states, (states, 257)), jnp.uint16), jnp.asarray(rng.integers(0, 256, (vocab, longest)), jnp.uint8)
    for shape in shapes:
        ids = [jnp.asarray(rng.integers(0, n, shape.rows), jnp.int32) for n in (states, vocab)]
        found, expected = (byte_walk.byte_walk(*pool, length, *ids, implementation=name) for name in ("triton", "xla"))
        np.testing.assert_array_equal(found, expected, err_msg=str(shape))


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_serve_unless_told_otherwise(name):
    """The loop of a model whose user chose nothing has all kernels that it could have."""
    wanted = KERNELS[name]
    if name == "E2B" and not dialect.mosaic_obstacle() and jax.__version_info__ >= layer_end_mosaic.SINCE:
        wanted = wanted - {"gated_by"} | {"layer_end"}
    if name == "E2B" and not dialect.mosaic_obstacle() and jax.__version_info__ >= qkv_mosaic.SINCE:
        wanted = wanted - {"qkv"} | {"qkv_product", "q_product"}
    assert wanted <= kernels_of_any_dialect(name, "auto")
