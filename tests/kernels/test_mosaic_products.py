"""Products in the Mosaic GPU dialect: interpreted against NumPy, lowered at real shapes, and who takes them."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import for_cuda

from pallas_kernels import device, dialect, linear
from pallas_kernels.activation import Activation
from pallas_kernels.linear import mosaic
from pallas_kernels.linear.mosaic import Tiles, choose_tiles
from pallas_kernels.linear.shapes import SHAPES, Shape

A100, H200 = device.Described("NVIDIA A100-SXM4-40GB", "8.0"), device.Described("NVIDIA H200", "9.0")

# Function, rows, outputs, inputs and tiles. Three programs run at a time.
CASES = {
    "rows that are no multiple of eight": ("linear", 11, 128, 256, Tiles(64, stages=2)),
    "blocks of 48, the last tile not full": ("linear", 8, 200, 128, Tiles(48, stages=3)),
    "splits of which the last is shorter": ("partials", 40, 72, 384, Tiles(40, stages=2, splits=2, step=128)),
    "a gated pair": ("gated", 24, 232, 192, Tiles(56, stages=3)),
    "rows on the left, the last tile not full": ("linear", 96, 72, 128, Tiles(40, stages=2, rows_left=True)),
    "splits with rows on the left": ("partials", 128, 72, 384, Tiles(24, stages=2, splits=2, step=128, rows_left=True)),
    "a gated pair with rows on the left": ("gated", 104, 88, 192, Tiles(48, stages=3, rows_left=True)),
}


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the interpreter of JAX 0.10 refuses transposed references in shared memory")
@pytest.mark.parametrize("case", CASES)
def test_equals_numpy(case, monkeypatch):
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    monkeypatch.setattr(dialect, "MULTIPROCESSORS", 3)
    kind, rows, outputs, width, tiles = CASES[case]
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((rows, width)), jnp.bfloat16)
    w = jnp.asarray(rng.standard_normal((2,) * (kind == "gated") + (outputs, width)) * width**-0.5, jnp.bfloat16)
    got = np.asarray(getattr(mosaic, kind)(x, w, tiles=tiles, interpret=InterpretGPUParams()), np.float64)
    exact = np.asarray(x, np.float64) @ np.swapaxes(np.asarray(w, np.float64), -1, -2)
    if kind == "gated":
        gate, up = exact
        exact = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    if kind == "partials":
        assert got.shape == (tiles.splits, rows, outputs)
        got = got.sum(0)
    np.testing.assert_allclose(got, exact, rtol=0, atol=1e-2 * np.abs(exact).max())


def test_programs_wait_on_memory_of_their_own_call():
    """A call writes to the semaphores of programs that share a tile. XLA would give two calls one array of zeros that they only read."""
    x, w = jax.ShapeDtypeStruct((40, 1536), jnp.bfloat16), jax.ShapeDtypeStruct((2, 2120, 1536), jnp.bfloat16)
    with device.described_as(H200):
        text = for_cuda(jax.jit(functools.partial(mosaic.gated, tiles=Tiles(40, stages=5, stream=True))), x, w)
    aliases = re.findall(r"#stablehlo.output_operand_alias<([^>]*)>", text)
    assert len(aliases) == 1 and "output_tuple_indices = [2]" in aliases[0] and "operand_index = 2" in aliases[0]


@pytest.mark.parametrize("rows", [33, 160])
def test_lowers_for_cuda_at_real_shapes(rows):
    """Large matrices in one program; small ones and products that are gated by other numbers are for other implementations."""
    with device.described_as(H200):
        kinds = {"linear": 1, "partials": 1, "gated": 2}
        shapes = [s for s in SHAPES.values() if s.kind in kinds]
        splits = {"partials": None}
        shapes = [s for s in shapes if mosaic.is_fastest(rows, s.arguments(1, jnp.bfloat16)[1], kinds[s.kind], splits.get(s.kind, 1))]
        arguments = [s.arguments(rows, jnp.bfloat16) for s in shapes]
        text = for_cuda(jax.jit(lambda arguments: [getattr(linear, s.kind)(*a) for s, a in zip(shapes, arguments, strict=True)]), arguments)
    assert text.count("@mosaic_gpu_v2") == len(shapes) >= 3 and "__gpu$xla.gpu.triton" not in text


@pytest.mark.parametrize(
    "tiles",
    [
        Tiles(64, stream=True),
        Tiles(56, cluster=2),
        Tiles(48, step=128, stages=3, cluster=2, stream=True),
        Tiles(128, stages=4, rows_left=True),
        Tiles(24, stages=8, cluster=2, stream=True, rows_left=True),
    ],
)
def test_any_tiles_lower_for_cuda(tiles):
    x, w = Shape("gated", 2120, 1536).arguments(100, jnp.bfloat16)
    with device.described_as(H200):
        text = for_cuda(jax.jit(functools.partial(mosaic.gated, activation=Activation("silu", 7.0), tiles=tiles)), x, w)
    assert text.count("@mosaic_gpu_v2") == 1


def test_tiles_fit_every_matrix():
    """Steps divide the inputs, shared memory and registers hold what they must, and parts are as many as were asked for at most."""
    for shape in (*SHAPES.values(), Shape("linear", 1000, 192), Shape("gated", 15360, 3840)):
        for rows in (17, 33, 40, 64, 72, 100, 128, 160, 256):
            for splits in (1, None):
                matrices = 2 if shape.kind == "gated" else 1
                tiles = choose_tiles(rows, shape.columns, shape.width, matrices=matrices, splits=splits)
                assert shape.width % tiles.step == 0 and tiles.stages >= 3, (shape, rows, tiles)
                assert tiles.shared(rows, matrices) <= mosaic.SHARED_MEMORY, (shape, rows, tiles)
                assert tiles.splits <= (splits or mosaic.MOST_SPLITS), (shape, rows, tiles)


@pytest.mark.parametrize(
    ("rows", "form"),
    [(40, Tiles(40)), (97, Tiles(80, rows_left=True)), (128, Tiles(80, rows_left=True)), (160, Tiles(64, stream=True, cluster=2))],
)
def test_form_depends_on_rows(rows, form):
    """About 128 rows are two blocks of the left operand. Programs with more share them, of which they would read more than of weights."""
    tiles = choose_tiles(rows, 10240, 2560, matrices=2)
    assert dataclasses.replace(tiles, step=64, stages=4) == form


@pytest.mark.parametrize(("rows", "fastest"), [(64, False), (65, True), (160, True), (192, True), (193, False)])
def test_the_dense_part_of_a_mixture_leaves_others_room(rows, fastest):
    """33 programs of whole tiles, where a graph lets the kernels that choose experts run beside them."""
    w = jax.ShapeDtypeStruct((2, 2112, 2816), jnp.bfloat16)
    with device.described_as(H200):
        assert mosaic.is_fastest(rows, w, 2) == (fastest and jax.__version_info__ >= mosaic.DENSE_SINCE)
        assert not mosaic.is_fastest(rows, jax.ShapeDtypeStruct((2, 2112, 1024), jnp.bfloat16), 2)
        if rows == 160:  # a large pair is served as ever
            assert mosaic.is_fastest(rows, jax.ShapeDtypeStruct((2, 4096, 5376), jnp.bfloat16), 2)
            assert choose_tiles(rows, 4096, 5376, matrices=2).stream
    tiles = choose_tiles(rows, 2112, 2816, matrices=2)
    assert (dataclasses.replace(tiles, step=64, stages=4) == Tiles(64)) >= fastest


# What serves few rows depends on whether CUDA graphs launch the kernel for Hopper early.
FEW_ROWS = "mosaic" if jax.__version_info__ >= mosaic.FEW_ROWS_SINCE else "triton"


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, "mosaic"),
        ({"rows": 8}, FEW_ROWS),
        ({"rows": 1, "name": "E2B o"}, FEW_ROWS),
        ({"rows": 12, "name": "E2B o"}, "triton"),
        ({"rows": 32, "name": "E2B o"}, FEW_ROWS),
        ({"rows": 33, "name": "E2B o"}, "triton"),
        ({"rows": 8, "gpu": A100}, "triton"),
        ({"rows": 9}, "mosaic"),
        ({"rows": 17}, "mosaic"),
        ({"rows": 96}, "mosaic"),
        ({"rows": 97}, "xla"),
        ({"name": "E2B o", "rows": 96}, "xla"),
        ({"name": "E2B o", "rows": 97}, "mosaic"),
        ({"name": "E2B o", "rows": 128}, "mosaic"),
        ({"name": "E2B o", "rows": 129}, "xla"),
        ({"rows": 256, "implementation": "mosaic"}, "mosaic"),
        ({"name": "26B qkv"}, "triton"),
        ({"gpu": A100}, "triton"),
        ({"gpu": A100, "rows": 160}, "xla"),
        ({"dtype": "float32"}, "triton"),
        ({"dtype": "float32", "rows": 160}, "xla"),
        ({"name": "E2B per-layer projection", "rows": 4}, FEW_ROWS),
        ({"name": "E2B per-layer projection", "rows": 160}, "triton"),
        ({"name": "E2B per-layer projection", "rows": 161}, "xla"),
        ({"implementation": "triton"}, "triton"),
        ({"implementation": "mosaic", "name": "E2B o", "rows": 2}, "mosaic"),
        ({"implementation": "xla"}, "xla"),
    ],
)
def test_auto_takes_the_hopper_kernel_where_it_pays(settings, chosen, monkeypatch):
    settings = {"name": "31B down", "rows": 40, "gpu": H200, "dtype": "bfloat16", "implementation": "auto", **settings}
    called = []
    for module, name in ((mosaic, "mosaic"), (linear.triton, "triton"), (linear.reference, "xla")):

        def partials(x, w, *args, name=name, **settings):
            called.append(name)
            return jnp.zeros((1, x.shape[0], w.shape[0]))

        monkeypatch.setattr(module, "partials", partials)
    x, w = SHAPES[settings["name"]].arguments(settings["rows"], jnp.dtype(settings["dtype"]))
    with device.described_as(settings["gpu"]):
        jax.eval_shape(functools.partial(linear.partials, implementation=settings["implementation"]), x, w)
        most = linear.most_rows(w), linear.most_rows(w, "triton")
    assert called == [chosen]
    size, fast = math.prod(w.shape), settings["gpu"] is H200 and settings["dtype"] == "bfloat16"
    of_triton = 160 if size <= linear.triton.SMALL and settings["dtype"] == "bfloat16" else 64
    of_mosaic = (96 if size >= mosaic.LEAST_WEIGHTS[1] else 128) if fast else 0
    assert most == (max(of_triton, of_mosaic), of_triton)


def test_gated_pairs_are_taken_up_to_more_rows():
    _, pair = SHAPES["E2B gate_up"].arguments(1, jnp.bfloat16)
    with device.described_as(H200):
        assert linear.most_rows(pair, gated=True) == 160
        assert [linear.most_rows(pair, name, gated=True) for name in ("triton", "mosaic")] == [64, 256]
    with device.described_as(A100):
        assert linear.most_rows(pair, gated=True) == 64


@pytest.mark.parametrize(
    ("gpu", "kind", "rows", "columns", "width", "dtype", "message"),
    [
        (A100, "linear", 40, 64, 64, "bfloat16", "the NVIDIA A100-SXM4-40GB has compute capability 8.0; the kernel needs 9.0"),
        (H200, "linear", 257, 64, 64, "bfloat16", "x has 257 rows; the kernel takes at most 256"),
        (H200, "gated_by", 40, 64, 64, "bfloat16", "the product is gated by other numbers; the kernel does not read any"),
        (H200, "linear", 40, 64, 64, "float16", "x is float16 and the matrix float16; the kernel needs bfloat16"),
        (H200, "linear", 40, 64, 96, "bfloat16", r"the matrix is \[64, 96\]; the kernel needs inputs in multiples of 64"),
        (H200, "gated", 40, 60, 64, "bfloat16", r"the matrix is \[2, 60, 64\]; .* and outputs in multiples of 8"),
    ],
)
def test_what_the_kernel_cannot_serve_is_refused(gpu, kind, rows, columns, width, dtype, message):
    arguments = Shape(kind, columns, width).arguments(rows, jnp.dtype(dtype))
    function = functools.partial(getattr(linear, kind), implementation="mosaic")
    with device.described_as(gpu), pytest.raises(ValueError, match=f"^implementation 'mosaic' cannot serve this: {message}"):
        jax.eval_shape(function, *arguments)
