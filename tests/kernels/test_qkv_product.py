"""The kernel for Hopper that makes a layer's heads of its rows: interpreted against the reference, where "auto" takes it, what it refuses,
and what serves otherwise. What it computes on a GPU is tested in tests/gpu."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_heads import CASES
from lowering import for_cuda

from pallas_kernels import device
from pallas_kernels.linear import partials
from pallas_kernels.packed import abstract
from pallas_kernels.qkv import Pages, mosaic, projected, qkv, serves
from pallas_kernels.qkv.bench import chain, inputs
from pallas_kernels.qkv.shapes import SHAPES, Shape

pytestmark = pytest.mark.usefixtures("unoptimised")

H200, A100 = device.Described("NVIDIA H200", "9.0"), device.Described("NVIDIA A100-SXM4-40GB", "8.0")
EPS = 1e-6


def arguments(shape, rows, batch=1, dtype=jnp.bfloat16):
    """Shapes of the arguments of `projected`, with the pages as one."""
    *others, k, v, table, start, count = shape.arguments(batch, rows, dtype)
    return *others, None if table is None else Pages(k, v, table, start, count)


def call(shape, **settings):
    return functools.partial(projected, group=shape.group, key_dims=shape.dim, eps=EPS, **settings)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="the interpreter of JAX 0.10 refuses transposed references in shared memory")
def test_equals_the_reference():
    script = Path(__file__).parent / "interpreted_heads.py"
    run = subprocess.run([sys.executable, script], env=os.environ | {"PJRT_NPROC": "64"}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines() == list(CASES)


def test_cuts_fit_shared_memory_and_divide_the_inputs():
    for shape in (*SHAPES.values(), Shape(1, 4, 0, 512, 1024)):
        for rows in range(8, mosaic.MOST_ROWS + 1, 8):
            cut, splits = mosaic.choose_cut(rows, shape.dim, shape.width), 512 // shape.dim
            assert cut.warpgroups * cut.steps * cut.step * splits == shape.width, (shape, rows, cut)
            assert 1 <= cut.stages <= cut.steps, (shape, rows, cut)
            held = cut.warpgroups * (cut.stages * cut.step * (64 + rows) * 2 + rows * 64 * 4) + rows * 64 * 4
            assert held <= 227 << 10, (shape, rows, cut)
    assert mosaic.choose_cut(8, 512, 1536).stages * mosaic.choose_cut(8, 512, 1536).step * 3 == 1536  # all of the E2B's at once


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"rows": 1}, True),
        ({"rows": 40}, True),
        ({"rows": 5, "batch": 8}, True),
        ({"rows": 12}, False),
        ({"rows": 48}, False),
        ({"name": "E4B full"}, True),
        ({"name": "E2B assistant sliding"}, True),
        ({"shape": Shape(16, 2, 2, 256, 5376)}, False),
        ({"shape": Shape(8, 1, 0, 128, 1536)}, False),
        ({"dtype": jnp.float32}, False),
        ({"gpu": A100}, False),
        ({"gpu": None}, False),
        ({"implementation": "triton"}, False),
        ({"implementation": "xla"}, False),
    ],
)
def test_auto_takes_the_kernel_where_it_serves(changes, expected, monkeypatch):
    given = {"name": "E2B sliding", "shape": None, "rows": 4, "batch": 1, "dtype": jnp.bfloat16, "gpu": H200, "implementation": "auto"}
    given |= changes
    monkeypatch.setattr(mosaic, "SINCE", (0, 0))
    called = []

    def kernel(x, w, cos, sin, q_weight, k_weight, pages, *, group, **_):
        called.append(x.shape)
        heads = jnp.zeros((x.shape[0], w.shape[0] * group, w.shape[2]), x.dtype)
        return heads, None if pages is None else pages.k, None if pages is None else pages.v

    monkeypatch.setattr(mosaic, "projected", kernel)
    shape = given["shape"] or SHAPES[given["name"]]
    args = arguments(shape, given["rows"], given["batch"], given["dtype"])
    with device.described_as(given["gpu"]) if given["gpu"] else pytest.MonkeyPatch.context():
        out = jax.eval_shape(call(shape, implementation=given["implementation"]), *args)
    assert called == [(given["rows"] * given["batch"], shape.width)] * expected
    assert out[0].shape == (given["batch"], given["rows"], shape.kv_heads, shape.group, shape.dim)


def test_the_kernel_serves_since_kernels_of_its_dialect_are_launched_early_in_graphs():
    x, w, _, _, _, k_weight, pages = arguments(SHAPES["E2B sliding"], 4)
    with device.described_as(H200):
        assert serves(x, w, k_weight, pages, key_dims=256) == (jax.__version_info__ >= (0, 12))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu": None}, "the device is a CPU; the kernel needs a Hopper GPU"),
        ({"packed": True}, "the matrix is packed; the kernel needs it in bfloat16"),
        ({"dtype": jnp.float32}, "the arrays are float32; the kernel needs bfloat16"),
        ({"pools": jnp.float8_e4m3fn}, "the arrays are bfloat16, float8_e4m3fn; the kernel needs bfloat16"),
        ({"shape": Shape(1, 8, 2, 128, 1536)}, "heads have 128 numbers; the kernel takes 256 and 512"),
        ({"shape": Shape(1, 8, 2, 256, 1600)}, "the matrix has 1600 inputs; the kernel takes multiples of 128"),
        ({"shape": Shape(1, 16, 2, 512, 3840)}, "the matrix has 18 heads; the kernel takes at most 12"),
        ({"key_dims": 128}, "keys keep 128 of 256 numbers; the kernel stores them whole"),
        ({"rows": 12}, "x has 12 rows; the kernel takes at most 8, or multiples of 8 up to 40"),
        ({"rows": 48}, "x has 48 rows; the kernel takes at most 8, or multiples of 8 up to 40"),
    ],
)
def test_what_the_kernel_cannot_serve_is_refused(changes, message):
    given = {"shape": SHAPES["E2B sliding"], "rows": 4, "dtype": jnp.bfloat16, "gpu": H200, "key_dims": None} | changes
    shape = given["shape"]
    x, w, *others, pages = arguments(shape, given["rows"], dtype=given["dtype"])
    if "packed" in given:
        w = abstract(w.shape, "int4", group=32, scale_dtype=x.dtype)
    if "pools" in given:
        pages = pages._replace(**{name: jax.ShapeDtypeStruct(pages.k.shape, given["pools"]) for name in ("k", "v")})
    function = functools.partial(call(shape, implementation="mosaic"), key_dims=given["key_dims"] or shape.dim)
    with device.described_as(given["gpu"]) if given["gpu"] else pytest.MonkeyPatch.context():
        with pytest.raises(ValueError, match=f"^implementation 'mosaic' cannot serve this: {message}"):
            jax.eval_shape(function, x, w, *others, pages)


def test_an_unknown_implementation_is_refused():
    shape = SHAPES["E2B sliding"]
    with pytest.raises(ValueError, match="implementation is 'cuda'; expected 'auto' or one of 'xla', 'triton'"):
        jax.eval_shape(call(shape, implementation="cuda"), *arguments(shape, 4))


@pytest.mark.parametrize("implementation", ["xla", "triton-interpret"])
@pytest.mark.parametrize("owned", [0, 1, 2])
def test_without_the_kernel_it_is_a_product_and_its_heads(owned, implementation):
    shape = Shape(2, 2, owned, 32, 64)
    args = inputs(shape, 2, 3, jnp.bfloat16)
    x, w, *others = args
    parts = partials(x.reshape(6, 64), w.reshape(-1, 64), implementation=implementation).reshape(-1, 2, 3, *w.shape[:-1])
    settings = {"group": 2, "key_dims": 32, "eps": EPS, "implementation": implementation}
    found, wanted = projected(*args, **settings), qkv(parts, *others, **settings)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))
    assert (found[1] is None) == (owned == 0)


@pytest.mark.parametrize("rows", [4, 40])
@pytest.mark.parametrize("name", SHAPES)
def test_lowers_for_cuda_in_place(name, rows):
    jax.clear_caches()
    shape = SHAPES[name]
    with device.described_as(H200):
        text = for_cuda(jax.jit(call(shape, implementation="mosaic")), *arguments(shape, rows))
    assert text.count("@mosaic_gpu") == 1
    assert text.count("#stablehlo.output_operand_alias<") == (2 if shape.owned else 0)


def test_a_chain_of_the_benchmark_stores_in_the_same_pools():
    shape = Shape(1, 2, 2, 32, 64)
    x, w, *others, pages = inputs(shape, 1, 3, jnp.bfloat16)
    heads, pools = chain(call(shape), x, [(w, *others)] * 2, pages, False)
    assert [q.shape for q in heads] == [(1, 3, 1, 2, 32)] * 2
    assert [int(jnp.sum(~jnp.isnan(pool[..., 0]))) for pool in pools] == [3, 3]
