"""What kernels for Hopper compute before they multiply, and where they serve. Their products run on a GPU alone (see tests/gpu)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import for_cuda
from packed_matrices import FORMS

from pallas_kernels import device, moe
from pallas_kernels.activation import Activation
from pallas_kernels.linear import packed_mosaic as products
from pallas_kernels.moe import packed_mosaic, packed_triton, triton
from pallas_kernels.moe.shapes import SHAPES
from pallas_kernels.packed import mosaic

A100, H200 = device.Described("NVIDIA A100-SXM4-40GB", "8.0"), device.Described("NVIDIA H200", "9.0")


@pytest.mark.parametrize("tiles, steps, programs", [(168, 42, 132), (144, 21, 132), (133, 84, 132), (5, 7, 4), (3, 4, 3)])
def test_programs_share_all_steps(tiles, steps, programs):
    """Each step belongs to one program, and only a program's last piece may lack steps: those are the next program's first piece."""
    share = -(-tiles * steps // programs)
    found, lacking = np.zeros((tiles, steps), int), None
    counts = np.asarray(mosaic.shares(tiles, steps, share, jnp.arange(-(-tiles * steps // share))))
    places = np.asarray([(program, i) for program, count in enumerate(counts) for i in range(count)])
    pieces = np.stack(mosaic.shared(tiles, steps, share, *jnp.asarray(places).T), axis=1)
    for (program, i), (tile, first, taken) in zip(places, pieces, strict=True):
        assert taken > 0 and (first > 0) <= (i == 0) and (first + taken < steps) <= (i == counts[program] - 1)
        assert lacking is None or (tile, first, taken) == (lacking[0], lacking[1], steps - lacking[1])
        lacking = (tile, first + taken) if first + taken < steps else None
        found[tile, first : first + taken] += 1
    assert (found == 1).all() and lacking is None


def test_no_three_programs_share_a_tile():
    """The program that has a tile's first step adds what the next one has, and no more."""
    joined = [(tiles, steps) for tiles in range(1, 500, 7) for steps in (1, 2, 5, 6, 21, 84) if products.joins(tiles, steps)]
    assert len(joined) > 20
    for tiles, steps in joined:
        share = -(-tiles * steps // products.PROGRAMS)
        ends = np.arange(share, tiles * steps, share)
        assert np.bincount(ends[ends % steps > 0] // steps, minlength=1).max() <= 1, (tiles, steps)


@pytest.mark.parametrize("rows, count, top_k, tall", [(1, 6, 2, 8), (7, 3, 2, 8), (40, 16, 4, 16), (90, 4, 3, 32)])
def test_rows_are_arranged_by_expert(rows, count, top_k, tall):
    """Every pair of an expert has a place in one of its tiles, with its row of x; a tile begins at a multiple of 8."""
    rng = np.random.default_rng(rows)
    ids = np.stack([rng.permutation(count)[:top_k] for _ in range(rows)]).astype(np.int32)
    ids[-1, 0] = count if rows > 1 else ids[-1, 0]  # no expert
    x = jnp.asarray(rng.standard_normal((rows, 576)), jnp.bfloat16)
    groups = triton.group(jnp.asarray(ids), count, interpret=True)
    table, places, found = map(np.asarray, packed_mosaic.arrange(x, *groups, tall, top_k, interpret=True))
    pairs = []
    for expert, first, size in table[:3, : table[3, 0]].T:
        assert first % 8 == 0 and 0 < size <= tall
        own = places[first : first + size]
        assert (ids.reshape(-1)[own] == expert).all()
        np.testing.assert_array_equal(found[first : first + size], np.asarray(x)[own // top_k])
        pairs += [*own]
    assert sorted(pairs) == [*np.flatnonzero(ids.reshape(-1) < count)]
    assert found.shape[0] % 8 == 0 and table.shape[1] >= table[3, 0]


@pytest.mark.parametrize("name, kind", [("26B verify 1x5", "int8"), ("26B verify 32x5", "int4"), ("Step-3.5 verify 1x4", "fp8")])
def test_experts_lower_for_cuda_at_real_shapes(name, kind):
    shape = SHAPES[name]

    def layer(x, gate_up, down, scores, scale):
        weights, ids, groups = moe.route(scores, scale, shape.top_k, scale=shape.scale, implementation="triton")
        return moe.experts(x, gate_up, down, weights, ids, groups, activation=shape.activation)

    with device.described_as(H200):
        text = for_cuda(jax.jit(layer), *shape.layer(jnp.dtype("bfloat16"), kind))
    assert text.count("@mosaic_gpu_v2") == 2 and text.count('name = "moe_arrange"') == 1 and 'name = "packed_moe' not in text


def experts(rows, form, gpu, implementation="auto", inner=128):
    """Calls `moe.experts` as on a GPU, with packed experts that hold nothing."""
    spec = jax.ShapeDtypeStruct
    arguments = spec((rows, 128), jnp.bfloat16), spec((rows, 2), jnp.float32), spec((rows, 2), jnp.int32)
    gate_up, down = (FORMS[form].abstract(shape, jnp.bfloat16) for shape in ((8, 2, inner, 128), (8, 128, inner)))

    def call(x, weights, ids):
        activation = Activation("silu", 7.0)
        return moe.experts(x, gate_up, down, weights, ids, activation=activation, implementation=implementation)

    with device.described_as(gpu):
        return jax.eval_shape(call, *arguments)


@pytest.mark.parametrize(
    ("settings", "chosen"),
    [
        ({}, packed_mosaic),
        ({"rows": 96}, packed_mosaic),
        ({"rows": 97}, packed_triton),
        ({"gpu": A100}, packed_triton),
        ({"form": "int4 zeros"}, packed_mosaic),
        ({"form": "int4 zeros of 16"}, packed_triton),
        ({"form": "fp8 float32"}, packed_triton),
        ({"form": "int8 affine blocks"}, packed_mosaic),
        ({"inner": 96}, packed_triton),
        ({"implementation": "triton"}, packed_triton),
    ],
)
def test_auto_takes_hoppers_kernels_where_they_serve(settings, chosen, monkeypatch):
    called = []
    for module in (packed_mosaic, packed_triton):

        def found(x, *args, module=module, **settings):
            called.append(module)
            return moe.Choices(jnp.zeros((2 * len(x), 128)), *args[2:4], 8)

        monkeypatch.setattr(module, "outputs", found)
    experts(**({"rows": 5, "form": "int8", "gpu": H200} | settings))
    assert called == [chosen]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu": A100}, "the NVIDIA A100-SXM4-40GB has compute capability 8.0; the kernel needs 9.0"),
        ({"form": "int4 zeros of 16"}, "16 inputs share a scale and a zero point; the kernel needs 32 or more"),
        ({"form": "int4 of 8"}, "8 inputs share a scale; the kernel needs 16 or more"),
        ({"form": "fp8 float32"}, "x is bfloat16 and the scales are float32; the kernel needs bfloat16, or scales in float16"),
        ({"inner": 96}, r"the matrix is \[.*96, 128\]; the kernel needs multiples of 64"),
        ({"rows": 97}, "194 pairs chose 8 experts; the kernel takes at most 24 for each"),
    ],
)
def test_what_hoppers_kernels_cannot_serve_is_refused(settings, message):
    with pytest.raises(ValueError, match=f"(?m)^implementation 'mosaic' cannot serve this: {message}$"):
        experts(**({"rows": 5, "form": "int8", "gpu": H200, "implementation": "mosaic"} | settings))


def test_experts_that_are_not_packed_are_refused():
    x, ids = jnp.zeros((2, 64), jnp.bfloat16), jnp.zeros((2, 1), jnp.int32)
    with device.described_as(H200), pytest.raises(ValueError, match="cannot serve this: the weights are not packed$"):
        moe.experts(x, jnp.zeros((2, 2, 64, 64)), jnp.zeros((2, 64, 64)), ids, ids, implementation="mosaic")


def test_the_tiles_of_hoppers_kernels_fit_every_number_of_rows():
    for shape in SHAPES.values():
        for bits in (4, 8):
            pairs = min(shape.rows * shape.top_k, packed_mosaic.MOST_SHARE * shape.experts)
            tiles = packed_mosaic.choose_tiles(pairs, shape.experts, bits)
            assert tiles.rows % 8 == 0 and tiles.rows >= pairs / shape.experts
            for matrices, cut in ((2, tiles.gate_up), (1, tiles.down)):
                step, sums = cut.room(matrices, bits, tiles.rows)
                assert cut.stages >= 3 and cut.step % cut.deep == 0 and cut.stages * step + sums <= mosaic.SHARED_MEMORY
