"""Products with packed matrices: the kernels, interpreted, and lowered for a GPU, against the unpacked weights."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import for_cuda
from packed_matrices import FORMS, SMALL_FORMS, in_one_program, packed, small

from jaxspec.model.layers import GatedMLP, Linear
from pallas_kernels import device, linear, moe
from pallas_kernels.activation import Activation
from pallas_kernels.linear import bench, packed_mosaic, packed_triton
from pallas_kernels.linear.shapes import PACKINGS, SHAPES
from pallas_kernels.moe import packed_triton as moe_triton
from pallas_kernels.moe.shapes import SHAPES as MOE_SHAPES
from pallas_kernels.packed import abstract, mosaic, tile, unpack
from pallas_kernels.packed.matrix import rounded

pytestmark = pytest.mark.usefixtures("unoptimised")

OPTIONS = {"xla_backend_optimization_level": 0}  # compiles in half the time, and computes the same
A100, L4, H200 = (device.Described(*x) for x in (("NVIDIA A100-SXM4-40GB", "8.0"), ("NVIDIA L4", "8.9"), ("NVIDIA H200", "9.0")))


def normal(*shape, dtype="bfloat16", seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def run(function, *arguments, **settings):
    return jax.jit(functools.partial(function, **settings), compiler_options=OPTIONS)(*arguments)


unpacked = jax.jit(unpack, static_argnums=1)


def difference(found, expected):
    """The largest, relative to the largest number."""
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    assert found.shape == expected.shape
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(
    ("dtype", "gpu"),
    [
        ("bfloat16", H200),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("bfloat16", A100), ("float32", A100), ("float32", H200))),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_unpack_to_the_last_bit(form, dtype, gpu):
    """Rows of the identity pick them one by one, on each kind of matrix unit; two blocks each way, the last ones not full."""
    w = packed(form, (100, 120))
    with device.described_as(gpu):
        (got,) = run(packed_triton.partials, jnp.eye(120, dtype=dtype), w, splits=1, interpret=True)
    np.testing.assert_array_equal(got.T, unpacked(w, dtype).astype(jnp.float32))


@pytest.mark.parametrize("form", [form if form in PACKINGS else pytest.param(form, marks=pytest.mark.slow) for form in FORMS])
def test_a_kernel_unpacks_whole_matrices_to_the_last_bit(form):
    """An even and an odd number of blocks of inputs."""
    for shape, dtype in (((128, 256), "bfloat16"), ((2, 64, 192), "float32")):
        w = packed(form, shape)
        got = run(linear.unpacked, w, jnp.ones((1, 1), dtype), implementation="triton-interpret")
        np.testing.assert_array_equal(got, unpacked(w, dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("form", SMALL_FORMS)
def test_small_weights_are_those_of_unpack_to_the_last_bit(form, dtype):
    """Scales, and products, that are subnormal in float16."""
    w = small(form, (100, 120))
    (got,) = run(packed_triton.partials, jnp.eye(120, dtype=dtype), w, splits=1, interpret=True)
    np.testing.assert_array_equal(got.T, unpacked(w, dtype).astype(jnp.float32))


def test_rounding_to_eleven_bits_is_that_of_unpack():
    """All numbers of 13 bits, so with every tie, at exponents that float16 has and that it has not."""
    x = jnp.asarray(np.multiply.outer(np.arange(-(2**13), 2**13), [2.0**-40, 2.0**-20, 1.0, 2.0**12]), jnp.float32)
    np.testing.assert_array_equal(jax.jit(tile._eleven_bits)(x), rounded(x, jnp.float16))


@pytest.mark.parametrize("kind", ["linear", "partials", "gated", "gated_by"])
@pytest.mark.parametrize(
    "dtype, form",
    [
        ("bfloat16", "int4"),
        ("float32", "int4"),
        ("bfloat16", "int4 zeros float16"),
        ("bfloat16", "int4 affine float16"),
        ("bfloat16", "fp4 float32"),
    ],
)
def test_equals_the_reference(kind, dtype, form):
    """Rows that are no power of two, and steps that do not divide the width."""
    w = packed(form, (*(2,) * (kind == "gated"), 70, 340))
    others = (normal(5, 3, 70, dtype=dtype), jnp.int32(1)) if kind == "gated_by" else ()
    arguments = normal(5, 340, dtype=dtype), w, *others
    kernel, plain = (run(getattr(linear, kind), *arguments, implementation=name) for name in ("triton-interpret", "xla"))
    assert kernel.dtype == plain.dtype == (jnp.float32 if kind == "partials" else dtype)
    if kind == "partials":
        kernel, plain = kernel.sum(0), plain.sum(0)
    assert difference(kernel, plain) < (1e-5 if plain.dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize("shape", [(64, 2, 128), (2, 64, 3, 64), (70, 2, 50)])
def test_affine_products_over_two_axes(shape):
    """Of heads, as an output's matrix has them. The kernel serves where all blocks are full."""
    rng = np.random.default_rng(0)
    codes, numbers = rng.integers(0, 16, shape).astype(np.uint8), (*shape[:-1], -(-shape[-1] // 32))
    scale, zero = (jnp.asarray(rng.uniform(*ends, numbers), "float16") for ends in ((0.01, 0.02), (-0.2, -0.1)))
    w, x = in_one_program(codes, scale, zero, kind="int4", over=2, group=32, affine=True), normal(3, *shape[-2:])
    expected = np.tensordot(x.astype(jnp.float32), unpacked(w, x.dtype).astype(jnp.float32), ((1, 2), (-2, -1)))
    assert difference(run(linear.reference.product, x, w, over=2), expected) < 1e-2
    if not any(w.cut):
        (found,) = run(Linear(w).parts, x, implementation="triton-interpret", over=2)
        assert difference(found, expected) < 1e-5


def test_an_activation_of_a_packed_product():
    x, w = normal(5, 340), packed("int4", (2, 70, 340))
    function = functools.partial(linear.gated, activation=Activation("silu", 0.3))
    kernel, plain = (run(function, x, w, implementation=name) for name in ("triton-interpret", "xla"))
    assert difference(kernel, plain) < 1e-5 < difference(run(linear.gated, x, w, implementation="xla"), plain)


# Most rows of a program, its blocks of outputs and of inputs in a step, and splits.
TILES = {
    "parts of the rows": (16, 1, 2, 1),
    "uneven splits": (48, 1, 2, 3),
    "several blocks": (48, 2, 4, 2),
    "an empty split": (48, 1, 1, 4),
}


@pytest.mark.parametrize("form", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", TILES)
def test_any_tiles_give_the_same(case, form):
    rows, blocks, depth, splits = TILES[case]
    tiles = packed_triton.Tiles(rows, blocks, depth, splits, 4, 3)
    x, w = normal(40, 320), packed(form, (190, 320))
    got = run(packed_triton.partials, x, w, tiles=tiles, interpret=True)
    steps = -(-5 // depth)
    assert len(got) == -(-steps // -(-steps // splits)), "a split is empty, or missing"
    expected = np.asarray(x, np.float64) @ np.asarray(unpack(w), np.float64).T
    assert difference(got.sum(0), expected) < 1e-5


def test_nan_stays_in_its_row():
    x, w = normal(3, 70).at[1].set(jnp.nan), packed("int4", (70, 70))
    (got,) = run(packed_triton.partials, x, w, splits=1, interpret=True)
    assert np.isnan(got[1]).all() and np.isfinite(np.asarray(got)[[0, 2]]).all()


def test_auto_takes_packed_matrices_to_the_kernel(monkeypatch):
    """For all rows that the kernel takes, also where an unpacked matrix would go to XLA."""
    monkeypatch.setattr("pallas_kernels.dialect.obstacle", lambda: None)
    for rows, kernel in ((1, True), (256, True), (768, True), (769, False)):
        x, w = SHAPES["26B gate_up"].arguments(rows, jnp.bfloat16, "int4")
        assert ("pallas_call" in str(jax.make_jaxpr(linear.gated)(x, w))) == kernel
    assert linear.most_rows(w) == 768


LOWERED = itertools.product(("int4", "int4 zeros", "int4 zeros float16", "int4 affine float16", "fp8", "fp4 float32"), (5, 160))
OFTEN = {("int4", 5), ("int4 zeros float16", 160), ("int4 affine float16", 5), ("fp8", 160), ("fp4 float32", 5)}


@pytest.mark.parametrize(("packing", "rows"), [case if case in OFTEN else pytest.param(*case, marks=pytest.mark.slow) for case in LOWERED])
def test_lowers_for_cuda(packing, rows):
    """All shapes in one program, in which equal products are lowered once."""

    def products(arguments):
        return [getattr(linear, s.kind)(*a, implementation="triton") for s, a in zip(SHAPES.values(), arguments, strict=True)]

    arguments = [shape.arguments(rows, jnp.bfloat16, packing) for shape in SHAPES.values()]
    assert for_cuda(jax.jit(products), arguments).count("__gpu$xla.gpu.triton") == len(set(SHAPES.values()))


@pytest.mark.parametrize("gpu", [A100, L4, H200])
@pytest.mark.parametrize("packing", PACKINGS)
def test_tiles_fit_into_the_gpu(packing, gpu):
    """With what weights need on their way to tensor cores before Hopper's, beside what lies in shared memory."""
    with device.described_as(gpu):
        for name, shape in SHAPES.items():
            for rows in (1, 5, 17, 40, 64, 65, 160, 256):
                x, w, *_ = shape.arguments(rows, jnp.bfloat16, packing)
                tiles = packed_triton.choose_tiles(x, w, None if shape.kind == "partials" else 1)
                assert tiles.shared(w, 2) + 4096 * tiles.depth <= device.SHARED_MEMORY[gpu.compute_capability], (name, rows, tiles)
                assert tiles.shared(w, 2) <= 101_376 and sum(packed_triton.heights(tiles.rows)) >= tiles.rows, (name, rows, tiles)
                assert tiles.splits * tiles.depth <= -(-shape.width // 64) or tiles.splits == 1, (name, rows, tiles)


candidates = bench.packed_candidates


@pytest.mark.slow
def test_candidates_compute_the_same(monkeypatch, capsys):
    """The benchmark on a shape of its own: it checks every cut against the reference."""
    monkeypatch.setattr(bench, "SHAPES", {"small": bench.Shape("partials", 64, 128)})
    monkeypatch.setattr(bench.bench, "TRIPS", 1)
    monkeypatch.setattr(bench.bench, "SAMPLE_SECONDS", 0.0)
    monkeypatch.setattr(bench, "MOST_TURNS", 1)
    monkeypatch.setattr(bench.bench, "copy_bandwidth", lambda: 4000.0)
    monkeypatch.setattr(bench, "packed_candidates", lambda *args: candidates(*args)[:3])
    monkeypatch.setattr(bench, "PACKED_KERNELS", {"partials": functools.partial(packed_triton.partials, interpret=True)})
    monkeypatch.setattr("sys.argv", ["bench", "--sweep", "--rows", "3", "--kind", "fp8"])
    bench.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "of copy" in line]
    assert ["what serves" in line for line in lines] == [True, False, False] and all("splits" in line for line in lines[1:])


def test_refusals():
    x, w = normal(2, 128), packed("int4", (64, 128))

    def refused(message, x, w, **settings):
        with pytest.raises(ValueError, match=message):
            linear.linear(x, w, implementation="triton", **settings)

    refused("x is float16; the kernel takes bfloat16 and float32 with a packed matrix", x.astype(jnp.float16), w)
    scale = w.scale.astype(jnp.float8_e5m2)
    refused("the scales are float8_e5m2; the kernel takes bfloat16, float16 and float32", x, dataclasses.replace(w, scale=scale))
    refused("16 groups lie in 64 inputs; the kernel takes at most 8", x, abstract((64, 128), "int4", group=4, scale_dtype=jnp.bfloat16))
    refused(
        "the matrix has 2 input axes; the kernel takes one", x, abstract((64, 2, 64), "int4", over=2, group=4, scale_dtype=jnp.bfloat16)
    )
    refused("x has 800 rows; the kernel takes at most 256", normal(800, 128), w)
    refused("splits is 0; expected at least 1", x, w, splits=0)


# Form, rows, experts, inner, hidden and choices.
EXPERTS = {
    "one row": ("int8", 1, 6, 64, 128, 2),
    "blocks that are not full": ("int8", 7, 5, 44, 80, 3),
    "several tiles of one expert": ("int4", 37, 2, 64, 64, 1),
    "float codes": ("fp4", 9, 12, 64, 64, 2),
    "scales in float32": ("fp4 float32", 9, 12, 64, 64, 2),
    "scales in float16": ("int4 zeros float16", 5, 4, 64, 128, 2),
    "affine": ("int4 affine float16", 5, 4, 44, 128, 2),
}


# The forms of scales are those of the products above, too.
FEW = ("one row", "blocks that are not full", "several tiles of one expert", "affine")


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
@pytest.mark.parametrize("case", [case if case in FEW else pytest.param(case, marks=pytest.mark.slow) for case in EXPERTS])
def test_experts_equal_those_of_unpacked_weights(case, implementation):
    """The last row's first choice is no expert."""
    form, rows, count, inner, hidden, top_k = EXPERTS[case]
    gate_up, down = packed(form, (count, 2, inner, hidden), 2), packed(form, (count, hidden, inner), 3)
    ids = np.stack([np.random.default_rng(row).permutation(count)[:top_k] for row in range(rows)]).astype(np.int32)
    ids[-1, 0] = count if rows > 1 else ids[-1, 0]
    x, weights = normal(rows, hidden), normal(rows, top_k, seed=4)
    got = run(moe.experts, x, gate_up, down, weights, ids, implementation=implementation)
    expected = run(moe.experts, x, unpacked(gate_up, x.dtype), unpacked(down, x.dtype), weights, ids, implementation="xla")
    assert difference(got, expected) < 1e-2


def test_experts_are_unpacked_one_at_a_time():
    """No float copy of all of them is among XLA's temporary arrays."""
    x, gate_up, down, scores, _ = dataclasses.replace(MOE_SHAPES["26B verify 1x5"], inner=128, hidden=256).layer(jnp.bfloat16, "int8")
    arguments = x, gate_up, down, jax.ShapeDtypeStruct((5, 8), jnp.float32), jax.ShapeDtypeStruct((5, 8), jnp.int32)
    compiled = jax.jit(functools.partial(moe.experts, implementation="xla")).lower(*arguments).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * (gate_up.size + down.size) / 4


@pytest.mark.parametrize("name, packing", [*((name, "int8") for name in MOE_SHAPES), ("26B verify 8x5", "fp4 float32")])
def test_experts_lower_for_cuda(name, packing):
    shape = MOE_SHAPES[name]

    def layer(x, gate_up, down, scores, scale):
        weights, ids, groups = moe.route(scores, scale, shape.top_k, scale=shape.scale, implementation="triton")
        return moe.experts(x, gate_up, down, weights, ids, groups, activation=shape.activation, implementation="triton")

    text = for_cuda(jax.jit(layer), *shape.layer(jnp.bfloat16, packing))
    assert all(text.count(f'name = "packed_moe_{kernel}"') == 1 for kernel in ("gate_up", "down"))


def test_experts_of_any_tiles_are_the_same():
    gate_up, down = packed("int8", (3, 2, 70, 140), 2), packed("int8", (3, 140, 70), 3)
    ids = np.random.default_rng(5).integers(0, 3, (40, 2)).astype(np.int32)
    arguments = normal(40, 140), gate_up, down, normal(40, 2, seed=4), ids
    tiles = moe_triton.Tiles(32, moe_triton.Blocks(128, 64, 4, 2), moe_triton.Blocks(64, 128, 4, 2))

    def experts(*arguments):
        return moe_triton.outputs(*arguments, tiles=tiles, interpret=True).summed()

    assert difference(run(experts, *arguments), run(moe.experts, *arguments, implementation="xla")) < 1e-2


def test_experts_are_packed_both_or_neither():
    gate_up, down = packed("int8", (2, 2, 64, 64)), packed("int8", (2, 64, 64))
    with pytest.raises(ValueError, match="one of gate_up_proj and down_proj is packed; expected both or neither"):
        moe.experts(normal(1, 64), gate_up, unpack(down), normal(1, 1), np.zeros((1, 1), np.int32))


@pytest.mark.parametrize("kind", ["int4", "int8", "fp8", "fp4", "int4 float16", "int4 affine float16", "int8 of 16 float16"])
@pytest.mark.parametrize(("name", "rows"), [("31B gate_up", 5), ("31B gate_up", 160), ("31B down", 20), ("26B down", 256)])
def test_the_hopper_kernel_lowers_for_cuda_at_real_shapes(name, rows, kind):
    with device.described_as(H200):
        shape = SHAPES[name]
        text = for_cuda(jax.jit(lambda x, w: getattr(linear, shape.kind)(x, w)), *shape.arguments(rows, jnp.dtype("bfloat16"), kind))
    # With many rows the activation is a kernel of its own.
    assert text.count("@mosaic_gpu_v2") == 1 and text.count("__gpu$xla.gpu.triton") == (shape.kind == "gated" and rows > 5)


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, "mosaic"),
        ({"rows": 256}, "mosaic"),
        ({"rows": 768}, "mosaic"),
        ({"rows": 769}, "xla"),
        ({"gpu": A100}, "triton"),
        ({"form": "int4 zeros"}, "mosaic"),
        ({"form": "int4 zeros of 16"}, "triton"),
        ({"form": "int8 of 16"}, "mosaic"),
        ({"form": "int4 of 8"}, "triton"),
        ({"form": "fp4"}, "mosaic"),
        ({"form": "fp4 float32"}, "triton"),
        ({"form": "fp8 float32"}, "triton"),
        ({"form": "int8 float16"}, "mosaic"),
        ({"form": "int8 affine blocks"}, "mosaic"),
        ({"form": "fp8 blocks float16"}, "triton"),
        ({"form": "fp4 float32", "gpu": A100}, "triton"),
        ({"name": "E2B per-layer projection"}, "triton"),
        ({"dtype": "float32"}, "triton"),
        ({"implementation": "triton"}, "triton"),
    ],
)
def test_auto_takes_the_hopper_kernel_where_it_serves(settings, chosen, monkeypatch):
    settings = {"name": "31B down", "form": "int4", "rows": 5, "gpu": H200, "dtype": "bfloat16", "implementation": "auto", **settings}
    called = []
    for module, name in ((packed_mosaic, "mosaic"), (packed_triton, "triton"), (linear.reference, "xla")):

        def partials(x, w, *args, name=name, **settings):
            called.append(name)
            return jnp.zeros((1, x.shape[0], w.shape[0]))

        monkeypatch.setattr(module, "partials", partials)
    shape = SHAPES[settings["name"]]
    w = FORMS[settings["form"]].abstract((shape.columns, shape.width), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((settings["rows"], shape.width), settings["dtype"])
    with device.described_as(settings["gpu"]):
        out = jax.eval_shape(lambda x: linear.partials(x, w, implementation=settings["implementation"]), x)
    assert out.shape == (1, *x.shape[:1], shape.columns) and set(called) == {chosen}


@pytest.mark.parametrize(
    ("gpu", "form", "rows", "message"),
    [
        (A100, "int4", 5, "the NVIDIA A100-SXM4-40GB has compute capability 8.0; the kernel needs 9.0"),
        (H200, "int4", 800, "x has 800 rows; the kernel takes at most 256"),
        (H200, "int4 zeros of 16", 5, "16 inputs share a scale and a zero point; the kernel needs 32 or more"),
        (H200, "fp8 float32", 5, "x is bfloat16 and the scales are float32; the kernel needs bfloat16, or scales in float16"),
        (H200, "fp8 blocks float16", 5, "the scales are float16 and the codes are of fp8; the kernel takes them with integers"),
        (H200, "int4 of 8", 5, "8 inputs share a scale; the kernel needs 16 or more"),
    ],
)
def test_what_the_hopper_kernel_cannot_serve_is_refused(gpu, form, rows, message):
    w = FORMS[form].abstract((2048, 2048), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((rows, 2048), jnp.bfloat16)
    with device.described_as(gpu), pytest.raises(ValueError, match=f"^implementation 'mosaic' cannot serve this: {message}$"):
        linear.partials(x, w, implementation="mosaic")


def test_the_tiles_of_the_hopper_kernel_fit_every_matrix():
    """Steps that divide the inputs, no more sums than registers hold, and at least two steps in shared memory, or all."""
    for shape, rows, bits in itertools.product(SHAPES.values(), (1, 5, *range(8, 257, 8)), (4, 8)):
        pair = 2 if shape.kind == "gated" else 1
        matrices = pair if rows <= packed_mosaic.MOST_GATED else 1
        outputs = shape.columns * pair // matrices
        tiles = packed_mosaic.choose_tiles(rows, outputs, shape.width, bits, matrices=matrices, splits=None)
        blocks, padded = shape.width // 64, -(-rows // 8) * 8
        assert blocks % tiles.step == 0 and tiles.step % tiles.deep == 0, (shape, rows, tiles)
        # With more than 64 rows some spill a few bytes, which costs less than fewer outputs at a time.
        operands = (2 if tiles.flying else 1) * packed_mosaic.OPERAND if padded <= 64 else 0
        held = matrices * padded // 2 + operands + packed_mosaic.OTHERS
        assert held <= mosaic.registers(tiles.wide * tiles.deep), (shape, rows, tiles)
        assert tiles.stages >= min(2, blocks // tiles.step), (shape, rows, tiles)
        assert 1 <= tiles.splits <= packed_mosaic.MOST_SPLITS


@pytest.mark.parametrize("bits", [4, 8])
def test_a_product_beside_others_has_one_warpgroup_for_many_rows(bits):
    for rows in (5, 64, 65, 160, 256):
        usual, slim = (packed_mosaic.choose_tiles(rows, 4224, 2816, bits, splits=None, slim=slim) for slim in (False, True))
        assert slim == usual if rows <= 64 else (slim.wide, slim.deep) == (1, 1), (rows, slim)


def test_a_kernel_unpacks_a_layer_s_matrices_for_many_rows():
    """For as many as a large prefill call has, whose products are then XLA's: of heads, of a gated pair, and of an output."""
    heads = in_one_program(jnp.ones((128, 2, 1, 64), jnp.uint8), jnp.full((128, 2, 1, 1), 0.5, jnp.bfloat16), kind="int8", over=3)
    layer = Linear(heads), GatedMLP(Linear(packed("int4", (2, 192, 128))), Linear(packed("fp8", (128, 192))))

    def outputs(layer, x, implementation):
        attended, mlp = layer[0].parts(x.reshape(*x.shape[:2], 2, 1, 64), implementation, over=3), layer[1]
        return attended, mlp.parts(x, implementation), mlp(x, implementation)

    x = normal(2, 400, 128)
    for found, expected in zip(*(run(outputs, layer, x, implementation=name) for name in ("triton-interpret", "xla")), strict=True):
        assert difference(found, expected) < 1e-2
    for rows, kernels in ((400, 3), (10, 0)):  # equal ones are traced once
        assert str(jax.make_jaxpr(outputs, static_argnums=2)(layer, x[:, :rows], "triton")).count("name=unpack") == kernels


def test_which_matrices_xla_unpacks_itself():
    """Those whose rows are rounded, those whose blocks are not full, and all where there are no kernels."""
    x, w = normal(800, 128), packed("fp8", (64, 128))
    for matrix, implementation in (
        (dataclasses.replace(w, inputs="fp8"), "triton"),
        (packed("fp8", (60, 128)), "triton"),
        (w, "xla"),
        (w, "auto"),
    ):
        assert linear.unpacked(matrix, x, implementation=implementation) is matrix


def test_small_matrices_are_unpacked_for_fewer_rows_on_hopper():
    """And large ones, whose rows are rounded, for more."""
    for shape, gpu, most in (((10240, 2560), H200, 511), ((15360, 3840), H200, 768), ((10240, 2560), L4, 768)):
        with device.described_as(gpu):
            assert linear.most_rows(abstract(shape, "int4", group=32, scale_dtype=jnp.bfloat16)) == most
            rounded = dataclasses.replace(abstract(shape, "fp8", group=None, scale_dtype=jnp.bfloat16), inputs="fp8")
            assert linear.most_rows(rounded) == (768 if shape == (10240, 2560) else 2048)


@pytest.mark.parametrize("kind", ["linear", "partials", "gated", "gated_by"])
def test_more_rows_than_a_kernel_takes_are_multiplied_in_passes(kind):
    w = packed("int8", (*(2,) * (kind == "gated"), 64, 128))
    others = (normal(515, 3, 64), jnp.int32(1)) if kind == "gated_by" else ()
    arguments = normal(515, 128), w, *others
    found, plain = (run(getattr(linear, kind), *arguments, implementation=name) for name in ("triton-interpret", "xla"))
    if kind == "partials":
        found, plain = found.sum(0), plain.sum(0)
    assert difference(found, plain) < 1e-2
