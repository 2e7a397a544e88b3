"""The end of a layer with per-layer inputs: the reference against NumPy, where "auto" takes the kernel for Hopper, and what that refuses.
What the kernel computes is tested in tests/gpu."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lowering import for_cuda

from pallas_kernels import device
from pallas_kernels.layer_end import layer_end, mosaic, serves
from pallas_kernels.layer_end.bench import inputs
from pallas_kernels.layer_end.shapes import SHAPES, Shape
from pallas_kernels.packed import abstract, pack, unpack

H200, A100 = device.Described("NVIDIA H200", "9.0"), device.Described("NVIDIA A100-SXM4-40GB", "8.0")
EPS = 1e-6


def norm(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS) * weight


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("parts", [0, 1, 3])
def test_equals_numpy(parts, last):
    args = list(inputs(Shape(5, 64, 3, parts=max(parts, 1), last=last, inputs=16), jnp.float32))
    if parts == 0:
        args[1] = args[1][0]
    x, y, weight, gate, per_layer, index, projection, own, scalar, following = (
        None if a is None else np.asarray(a, np.float64 if a.dtype == jnp.float32 else None) for a in args
    )
    x = x + norm(y if y.ndim == 2 else y.sum(axis=0), weight)
    gated = x @ gate.T
    gated = 0.5 * gated * (1 + np.tanh(np.sqrt(2 / np.pi) * (gated + 0.044715 * gated**3))) * per_layer[:, int(index)]
    x = (x + norm(gated @ projection.T, own)) * scalar
    found, normed = layer_end(*args, eps=EPS)
    np.testing.assert_allclose(found, x, rtol=0, atol=2e-5)
    if last:
        assert normed is None
    else:
        np.testing.assert_allclose(normed, norm(x, following), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "gpu", "expected"),
    [
        ({}, H200, True),
        ({"rows": 64}, H200, True),
        ({"rows": 65}, H200, False),
        ({"hidden": 2560}, H200, True),
        ({"hidden": 3072}, H200, False),
        ({"hidden": 1600}, H200, False),
        ({"inputs": 128}, H200, False),
        ({}, A100, False),
        ({}, None, False),
    ],
)
def test_auto_takes_the_kernel_where_it_serves(changes, gpu, expected, monkeypatch):
    monkeypatch.setattr(mosaic, "SINCE", (0, 0))
    called = []
    monkeypatch.setattr(mosaic, "layer_end", lambda x, *_, **__: called.append(x.shape) or (x, x))
    args = dataclasses.replace(SHAPES["E2B 4"], **changes).arguments(jnp.bfloat16)
    with device.described_as(gpu) if gpu else pytest.MonkeyPatch.context():
        jax.eval_shape(lambda *args: layer_end(*args, eps=EPS), *args)
        jax.eval_shape(lambda *args: layer_end(*args, eps=EPS, implementation="xla"), *args)
    assert called == [args[0].shape] * expected


def test_the_kernel_serves_since_kernels_of_its_dialect_are_launched_early_in_graphs():
    x, _, _, gate, per_layer, _, projection, *_ = SHAPES["E2B 4"].arguments(jnp.bfloat16)
    with device.described_as(H200):
        assert serves(x, gate, projection, per_layer, "auto") == (jax.__version_info__ >= (0, 12))


@pytest.mark.parametrize("what", ["gate", "projection", "float32", "half of the projection", "implementation"])
def test_other_arrays_are_left_to_other_kernels(what, monkeypatch):
    monkeypatch.setattr(mosaic, "SINCE", (0, 0))
    dtype = jnp.float32 if what == "float32" else jnp.bfloat16
    x, _, _, gate, per_layer, _, projection, *_ = SHAPES["E2B 4"].arguments(dtype)
    if what == "half of the projection":  # a device's part of it
        projection = jax.ShapeDtypeStruct((projection.shape[0] // 2, projection.shape[1]), dtype)
    if what == "gate":
        gate = abstract(gate.shape, "int4", group=32, scale_dtype=dtype)
    if what == "projection":
        projection = abstract(projection.shape, "int4", group=32, scale_dtype=dtype)
    with device.described_as(H200):
        assert not serves(x, gate, projection, per_layer, "triton" if what == "implementation" else "auto")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"implementation": "cuda"}, "implementation is 'cuda'; expected 'auto', 'xla' or 'mosaic'"),
        ({"implementation": "triton"}, "implementation is 'triton'; expected 'auto', 'xla' or 'mosaic'"),
        ({"implementation": "mosaic"}, "'mosaic' cannot serve this: the device is a CPU; the kernel needs a Hopper GPU"),
    ],
)
def test_an_implementation_that_cannot_serve_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        layer_end(*inputs(Shape(2, 64, 2, inputs=16), jnp.bfloat16), eps=EPS, **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 65}, "x has 65 rows; the kernel takes at most 64"),
        ({"hidden": 3072}, r"x has 3072 columns; the kernel takes multiples of 512 up to 2560"),
        ({"inputs": 128}, r"the gate is \[128, 1536\], the projection \[1536, 128\]; the kernel needs \[256, 1536\], \[1536, 256\]"),
    ],
)
def test_shapes_that_the_kernel_cannot_serve_are_named(changes, message):
    args = dataclasses.replace(SHAPES["E2B 4"], **changes).arguments(jnp.bfloat16)
    with device.described_as(H200), pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda *args: layer_end(*args, eps=EPS, implementation="mosaic"), *args)


def test_packed_matrices_are_served_without_the_kernel():
    args = list(inputs(Shape(3, 128, 2, inputs=64), jnp.bfloat16))
    codes = np.random.default_rng(0).integers(0, 256, (64, 128)).astype(np.uint8)
    args[3] = pack(codes, jnp.full((64, 1), 2.0**-9, jnp.bfloat16), None, kind="int8", over=1, group=None)
    found, wanted = (layer_end(*args[:3], gate, *args[4:], eps=EPS)[0] for gate in (args[3], unpack(args[3], jnp.bfloat16)))
    np.testing.assert_array_equal(found, wanted)
    with device.described_as(H200), pytest.raises(ValueError, match="the gate or the projection is packed; the kernel needs both in bf"):
        jax.eval_shape(lambda *args: layer_end(*args, eps=EPS, implementation="mosaic"), *args)


@pytest.mark.parametrize("name", SHAPES)
def test_lowers_for_cuda(name):
    jax.clear_caches()
    with device.described_as(H200):
        function = jax.jit(lambda *args: layer_end(*args, eps=EPS, implementation="mosaic"))
        text = for_cuda(function, *SHAPES[name].arguments(jnp.bfloat16))
    assert "mosaic_gpu" in text
