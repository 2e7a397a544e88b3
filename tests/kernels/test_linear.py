"""Products of few rows against NumPy in float64; the kernels, interpreted, and lowered for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import for_cuda

from jaxspec.model.layers import Linear
from pallas_kernels import device, linear
from pallas_kernels.activation import GELU, Activation
from pallas_kernels.linear import bench, reference, triton
from pallas_kernels.linear.shapes import SHAPES, Shape
from pallas_kernels.linear.triton import Tiles, choose_tiles

# Unoptimised code compiles in half the time, and computes the same.
OPTIONS = {"xla_backend_optimization_level": 0}
# Relative to the largest output.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
KINDS = ("linear", "partials", "gated", "gated_by")


def problem(kind, rows, columns, width, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0):
        return (scale * rng.standard_normal(shape)).astype(jnp.dtype(dtype))

    w = normal(*(2,) * (kind == "gated"), columns, width, scale=width**-0.5)
    others = (normal(rows, 3, columns), np.asarray(1, np.int32)) if kind == "gated_by" else ()
    return (normal(rows, width), w, *others)


def plain(kind, x, w, *others):
    """In float64, and rounded nowhere."""
    x, w, *others = (np.asarray(a, np.float64) for a in (x, w, *others))
    product = x @ np.swapaxes(w, -1, -2)
    if kind in ("linear", "partials"):
        return product
    gate, up = product if kind == "gated" else (product, others[0][:, int(others[1])])
    return 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def check(kind, arguments, dtype="float32", **settings):
    """settings: of the public function, or tiles. Returns what it gave."""
    run = getattr(linear, kind) if "implementation" in settings else functools.partial(getattr(triton, kind), interpret=True)
    got = jax.jit(functools.partial(run, **settings), compiler_options=OPTIONS)(*arguments)
    want = plain(kind, *arguments)
    assert got.dtype == (jnp.float32 if kind == "partials" else arguments[0].dtype)
    values = np.asarray(got, np.float64)
    assert values.shape[-2:] == want.shape and values.ndim == (3 if kind == "partials" else 2)
    np.testing.assert_allclose(values.sum(0) if kind == "partials" else values, want, rtol=0, atol=TOLERANCE[dtype] * np.abs(want).max())
    return got


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_numpy(kind, dtype, implementation):
    """Rows that are no power of two, columns that no block divides, a width that no step divides."""
    check(kind, problem(kind, 5, 45, 300, dtype), dtype, implementation=implementation)


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
@pytest.mark.parametrize("limit", [None, 0.4])
def test_silu_with_a_limit(limit, implementation):
    """The gate is cut off after its activation and from above alone, the other product on both sides."""
    x, w = problem("gated", 5, 45, 300)
    gate, up = np.asarray(x, np.float64) @ np.swapaxes(np.asarray(w, np.float64), -1, -2)
    wanted, cut = gate / (1 + np.exp(-gate)), np.inf if limit is None else limit
    assert (wanted > 0.4).any() and (wanted < -0.2).any() and (np.abs(up) > 0.4).any()
    got = jax.jit(functools.partial(linear.gated, activation=Activation("silu", limit), implementation=implementation))(x, w)
    np.testing.assert_allclose(got, np.minimum(wanted, cut) * np.clip(up, -cut, cut), rtol=0, atol=1e-5)


def test_an_activation_that_is_none_is_refused():
    with pytest.raises(ValueError, match="activation is 'relu'; available: 'gelu_tanh', 'silu'"):
        Activation("relu")
    with pytest.raises(ValueError, match="the activation's limit is 0; expected a positive number, or None"):
        Activation("silu", 0)


# Columns of a program, splits and the slice of a part in a step.
TILES = {
    "a part a program": Tiles(64, 1, 32, 4, 3),
    "columns of no power of two": Tiles(11, 1, 16, 4, 3),
    "many parts": Tiles(3, 1, 16, 4, 3),
    "uneven splits": Tiles(20, 3, 16, 4, 3),
    "a tile above the left operand": Tiles(100, 2, 32, 4, 3),
    "blocks of rows": Tiles(20, 2, 16, 4, 3, 16),
}


def test_a_program_has_four_columns_at_least_and_no_more_stages_than_steps():
    assert choose_tiles(4, 256, 1536, 2) == Tiles(4, 1, 64, 4, 3)
    assert choose_tiles(32, 512, 3072, 2) == Tiles(9, 1, 64, 4, 4)  # blocks that are wider for their rows stay as they are


def test_small_matrices_are_read_by_blocks_of_rows():
    assert choose_tiles(32, 256, 1536, 2) == choose_tiles(128, 256, 1536, 2) == Tiles(16, 1, 64, 4, 4, 16)
    # As few programs as run at once, or else a program has all rows.
    assert [(t.columns, t.rows) for t in (choose_tiles(rows, 1536, 256, 2) for rows in (32, 128))] == [(32, 16), (64, 32)]
    assert [choose_tiles(rows, 2560, 256, 2).rows for rows in (64, 128, 160)] == [32, 64, 64]
    assert choose_tiles(32, 256, 2048, 2, splits=None) == Tiles(16, 4, 64, 4, 4, 16)  # of 512 inputs at least
    assert choose_tiles(160, 128, 2816, 2, splits=None) == Tiles(16, 3, 64, 4, 4, 16)  # as many parts as run at once
    assert choose_tiles(16, 256, 1536, 2).rows == choose_tiles(32, 256, 1536, 4).rows == choose_tiles(32, 1024, 1536, 2).rows == 0
    small, wide = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 1536), (1536, 1536)))
    assert (triton.most_rows(small), triton.most_rows(wide)) == (160, 64)
    x = jax.ShapeDtypeStruct((161, 1536), jnp.bfloat16)
    assert triton.unsupported(x, small) == "x has 161 rows; the kernel takes at most 160"


@pytest.mark.parametrize("parts", [1, 3])
def test_both_products_of_a_gated_layer_may_come_in_parts(parts):
    """Their activation, of sums that are rounded first: more outputs than a program has, and more than divide them."""
    rng = np.random.default_rng(parts)
    products = rng.standard_normal((parts, 3, 2 * 1100)).astype(np.float32)
    for activation in (GELU, Activation("silu", 0.7)):
        gate, up = (jnp.asarray(half).astype(jnp.bfloat16) for half in np.split(products.sum(0), 2, axis=-1))
        wanted = np.asarray(activation(gate, up), np.float32)
        found = triton.activated(jnp.asarray(products), activation, jnp.bfloat16, interpret=True)
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("case", TILES)
def test_any_tiles_give_the_same(case, rows):
    tiles = TILES[case]
    kind = "partials" if tiles.splits > 1 else "gated_by" if rows == 7 else "gated"
    got = check(kind, problem(kind, rows, 70, 330), tiles=tiles)
    if kind == "partials":
        steps = -(-330 // tiles.depth)
        assert len(got) == -(-steps // -(-steps // tiles.splits)), "a split is empty, or missing"


@pytest.mark.parametrize("columns, width, splits", [(64, 320, 3), (40, 200, 2)])
def test_exact_blocks_and_split_sums(columns, width, splits):
    """Where everything divides, nothing is masked; the last split may be shorter. More splits than steps leave none empty."""
    tiles = Tiles(32, 3, 32, 4, 3)
    assert len(check("partials", problem("partials", 16, columns, width), tiles=tiles)) == splits
    check("linear", problem("linear", 16, columns, width), tiles=tiles)
    check("linear", problem("linear", 4, columns, width), implementation="triton-interpret", splits=100)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_outside_reaches_the_product(kind):
    """Tiles reach past the arrays on all sides; a NaN there, as in a row of its own, stays there."""
    arguments = problem(kind, 3, 21, 70)
    x = np.array(arguments[0])
    x[1] = np.nan
    run = jax.jit(functools.partial(getattr(triton, kind), tiles=Tiles(8, 1, 16, 4, 3), interpret=True), compiler_options=OPTIONS)
    got = np.asarray(run(x, *arguments[1:]))
    got = got[0] if kind == "partials" else got
    want = plain(kind, *arguments)
    assert np.isnan(got[1]).all()
    np.testing.assert_allclose(got[[0, 2]], want[[0, 2]], rtol=0, atol=1e-5)


def test_a_sum_of_parts_is_rounded_before_the_next_operation():
    """On a GPU, XLA leaves out a cast to bfloat16 and back if it computes both in one loop. It never leaves out this operation."""
    arguments = problem("linear", 5, 64, 512, "bfloat16")
    for splits, times in ((2, 1), (1, 0)):
        tiles = Tiles(32, splits, 32, 4, 3)
        traced = jax.make_jaxpr(functools.partial(triton.linear, tiles=tiles, interpret=True))(*arguments)
        assert str(traced).count("reduce_precision") == times


def test_activations_are_rounded_once():
    """The halves are rounded to bfloat16, then the result: kernel and reference agree but for a sum's last bit."""
    arguments = problem("gated", 8, 64, 128, "bfloat16")
    outs = [
        np.asarray(jax.jit(functools.partial(linear.gated, implementation=name))(*arguments), np.float64)
        for name in ("xla", "triton-interpret")
    ]
    assert np.mean(outs[0] != outs[1]) < 0.02


@pytest.mark.parametrize("rows", [1, 5, 40, 64])
def test_lowers_for_cuda(rows):
    """All shapes in one program, in which equal products are lowered once."""

    def products(arguments):
        return [getattr(linear, s.kind)(*a, implementation="triton") for s, a in zip(SHAPES.values(), arguments, strict=True)]

    arguments = [shape.arguments(rows, jnp.bfloat16) for shape in SHAPES.values()]
    text = for_cuda(jax.jit(products), arguments)
    assert text.count("__gpu$xla.gpu.triton") == len(set(SHAPES.values()))


@pytest.mark.parametrize("rows", [1, 4, 5, 16, 17, 32, 40, 64])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fill_the_gpu_and_fit_into_it(rows, itemsize):
    for name, shape in SHAPES.items():
        matrices, splits = 2 if shape.kind == "gated" else 1, None if shape.kind == "partials" else 1
        tiles = triton.choose_tiles(rows, shape.columns, shape.width, itemsize, matrices=matrices, splits=splits)
        assert tiles.num_stages >= 2 and tiles.num_stages * tiles.step(rows, matrices, itemsize) <= triton.PROGRAM_BYTES, (name, tiles)
        assert tiles.tile * tiles.parts >= triton.LEFT and tiles.parts * tiles.height(rows) <= 128, (name, tiles)
        if itemsize > 2:
            continue
        programs = -(-shape.columns // tiles.columns) * tiles.splits
        most = -(-programs // triton.MULTIPROCESSORS)
        assert programs < triton.MULTIPROCESSORS or programs / most > 0.9 * triton.MULTIPROCESSORS, (name, tiles)


@pytest.mark.slow
def test_candidates_compute_the_same(monkeypatch, capsys):
    """The benchmark on a shape of its own: it checks every cut against the reference."""
    monkeypatch.setattr(bench, "SHAPES", {"small": bench.Shape("partials", 96, 512)})
    monkeypatch.setattr(bench.bench, "TRIPS", 1)
    monkeypatch.setattr(bench.bench, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(bench, "MOST_TURNS", 1)
    monkeypatch.setattr(bench.bench, "copy_bandwidth", lambda: 4000.0)
    monkeypatch.setattr(bench, "KERNELS", {"partials": functools.partial(triton.partials, interpret=True)})
    monkeypatch.setattr("sys.argv", ["bench", "--sweep", "--rows", "3"])
    bench.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "small x 3" and sum("splits" in line and "of copy" in line for line in lines) >= 4


def test_auto_leaves_many_rows_to_xla():
    x, w = problem("linear", 65, 16, 32)
    assert "triton" not in str(jax.make_jaxpr(linear.linear)(x, w))
    with pytest.raises(ValueError, match="implementation 'triton' cannot serve this: x has 65 rows; the kernel takes at most 64"):
        linear.linear(x, w, implementation="triton")


def test_auto_leaves_narrow_products_of_many_rows_to_xla(monkeypatch):
    """Each program would read all rows for a handful of columns."""
    monkeypatch.setattr("pallas_kernels.dialect.obstacle", lambda: None)

    def chosen(kind, rows, columns, width):
        arguments = Shape(kind, columns, width).arguments(rows, jnp.bfloat16)
        return "triton" if "pallas_call" in str(jax.make_jaxpr(getattr(linear, kind))(*arguments)) else "xla"

    assert [chosen("gated", rows, 2112, 2816) for rows in (5, 40)] == ["triton", "xla"]
    assert [chosen("linear", rows, 1024, 10752) for rows in (8, 40)] == ["triton", "xla"]
    assert [chosen("partials", 40, 1536, width) for width in (2048, 1024)] == ["triton", "xla"]
    assert chosen("partials", 40, 1536, 256) == "triton"  # so small that blocks of rows have programs of their own
    assert chosen("gated", 40, 21504, 5376) == "triton"


@pytest.mark.parametrize(
    ("rows", "outputs", "width", "parts"),
    [(160, 5376, 21504, 2), (160, 5376, 8192, 2), (160, 3840, 15360, 3), (160, 3840, 4096, 2), (128, 3840, 15360, 1), (193, 3840, 15360, 1)]
    + [(160, 8192, 3840, 1), (160, 2816, 4096, 1), (160, 3840, 64 * 101, 1)]  # many outputs; few weights; a width without parts
    + [(256, 1536, 6144, 4), (200, 2560, 10240, 4), (256, 1536, 64 * 18, 1), (257, 1536, 6144, 1), (193, 1536, 512, 1)],
)
def test_xla_leaves_sums_of_many_rows_to_the_next_kernel_on_hopper(rows, outputs, width, parts):
    x, w = (jax.ShapeDtypeStruct((count, width), jnp.bfloat16) for count in (rows, outputs))
    layer = Linear(jax.ShapeDtypeStruct((outputs, width), jnp.bfloat16))
    for gpu, found in (("9.0", parts), ("8.0", 1)):
        with device.described_as(device.Described("a GPU", gpu)):
            assert linear.xla_parts(rows, w) == found
            shape = jax.eval_shape(lambda x, layer: layer.parts(x, "auto"), x, layer).shape
            assert shape == ((found, rows, outputs) if found > 1 else (rows, outputs))


def test_parts_of_xlas_product_add_up():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal((count, 192)), jnp.float32) for count in (5, 7))
    parts = reference.partials(x, w, 3)
    assert parts.shape == (3, 5, 7) and parts.dtype == jnp.float32
    np.testing.assert_allclose(parts.sum(0), x @ w.T, rtol=0, atol=1e-5)
    np.testing.assert_allclose(parts[1], x[:, 64:128] @ w[:, 64:128].T, rtol=0, atol=1e-5)


def test_refusals():
    x, w, u, index = problem("gated_by", 2, 16, 32)
    with pytest.raises(ValueError, match="implementation is 'cuda'; expected 'auto' or one of"):
        linear.linear(x, w, implementation="cuda")
    with pytest.raises(ValueError, match="the arrays are float32, float16; the kernel needs one dtype"):
        linear.partials(x, w.astype(np.float16), implementation="triton")
    with pytest.raises(ValueError, match="the arrays are float32, float32, float16; the kernel needs one dtype"):
        linear.gated_by(x, w, u.astype(np.float16), index, implementation="triton")
    with pytest.raises(ValueError, match="x is int8; the kernel takes bfloat16, float16 and float32"):
        linear.gated(x.astype(np.int8), w[None].repeat(2, 0).astype(np.int8), implementation="triton")
    for function in (linear.linear, linear.partials):
        with pytest.raises(ValueError, match="splits is 0; expected at least 1"):
            function(x, w, splits=0)
