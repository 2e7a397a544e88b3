<<<<<<< HEAD
"""Kernels for packed weights, compiled for the GPU that is there, against products with the unpacked weights in float32."""

import functools
from concurrent.futures import ThreadPoolExecutor
=======
"""Kernels for packed matrices, compiled for the GPU that is there, against the unpacked weights."""

import functools
>>>>>>> tritonq

import jax
import jax.numpy as jnp
import numpy as np
import pytest
<<<<<<< HEAD

import jaxspec
from pallas_kernels import dialect, linear, packed
from pallas_kernels.linear.reference import activation
from pallas_kernels.linear.shapes import PACKINGS, SHAPES

pytestmark = pytest.mark.gpu

# The narrow ones of each kind, and widths of which no power of two is a factor.
NAMES = ("E2B gate_up", "E2B o", "26B gate_up", "26B down", "31B o")
ROWS = (5, 20, 64, 160, 256)
STEP = {"int4": 0.004, "int8": 0.0003, "fp8": 0.0002, "fp4": 0.01}  # about a scale of real weights

=======
from packed_matrices import FORMS, packed

import jaxspec
from pallas_kernels import dialect, linear, moe
from pallas_kernels.linear import packed_triton
from pallas_kernels.packed import unpack

pytestmark = pytest.mark.gpu

>>>>>>> tritonq

@pytest.fixture(autouse=True)
def device():
    if reason := dialect.obstacle():
        pytest.skip(reason)


<<<<<<< HEAD
def random(shape, packing, seed):
    """A packed matrix of random codes, scales and zeros."""
    kind, group, zeros = PACKINGS[packing]
    rng = np.random.default_rng(seed)
    bits = packed.KINDS[kind].bits
    codes = rng.integers(0, 2**bits, shape, np.uint8)
    if kind == "fp8":
        codes &= 0xF7  # without NaN
    inputs = shape[-1] // group if group else 1
    scale = jnp.asarray(STEP[kind] * rng.uniform(0.5, 1.5, (*shape[:-1], inputs)), jnp.bfloat16)
    zero = jnp.asarray(rng.integers(0, 2**bits, scale.shape), jnp.bfloat16) if zeros else None
    return packed.pack(jnp.asarray(codes), scale, zero, kind=kind, group=group)


@pytest.mark.parametrize("packing", PACKINGS)
def test_products(packing):
    matrices = {name: random(SHAPES[name].arguments(1, jnp.bfloat16)[1].shape, packing, seed) for seed, name in enumerate(NAMES)}
    dense = {name: jax.jit(packed.unpack, static_argnums=1)(matrix, jnp.float32) for name, matrix in matrices.items()}

    def error(case):
        name, rows, implementation = case
        x = jnp.asarray(np.random.default_rng(rows).standard_normal((rows, SHAPES[name].width)), jnp.bfloat16)
        wanted = jnp.einsum("nh,...h->n...", x.astype(jnp.float32), dense[name], precision="highest")
        if SHAPES[name].kind == "gated":
            found = jax.jit(functools.partial(linear.gated, implementation=implementation))(x, matrices[name])
            wanted, limit = activation(*(wanted[:, i].astype(jnp.bfloat16) for i in range(2))).astype(jnp.float32), 3e-3
        else:
            found, limit = jax.jit(functools.partial(linear.partials, implementation=implementation))(x, matrices[name]).sum(axis=0), 1e-5
        gap = float(jnp.max(jnp.linalg.norm(found.astype(jnp.float32) - wanted, axis=1) / jnp.linalg.norm(wanted, axis=1)))
        return gap / limit

    cases = [(name, rows, implementation) for name in NAMES for rows in ROWS for implementation in ("auto", "triton")]
    with ThreadPoolExecutor(12) as pool:
        found = dict(zip(cases, pool.map(error, cases), strict=True))
    wrong = {case: gap for case, gap in found.items() if not gap <= 1}
    assert not wrong, f"{len(wrong)} of {len(cases)}: {dict(list(wrong.items())[:10])}"


@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
def test_logits_of_pocket_by_kernels_and_by_xla(quantize):
    params = jaxspec.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    prompts = ["def main():\n    print(", "The quick brown fox", "class Point:\n    def __init__(self, x, y):"]
    scores = []
    for attention in ("xla", "triton"):
        llm = jaxspec.load("pocket", quantize=quantize, attention=attention, max_slots=4, progress=False)
        outs = llm.generate(prompts, params)
        scores.append([next(iter(entry.values())).logprob for out in outs for entry in out.prompt_logprobs[1:]])
    gap = np.abs(np.subtract(*scores))
    assert np.median(gap) < 0.05 and gap.max() < 0.5, (np.median(gap), gap.max())
=======
def normal(*shape, seed=1):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


def assert_close(found, expected):
    found, expected = (np.asarray(a.astype(jnp.float32)) for a in (found, expected))
    assert np.abs(found - expected).max() <= 1e-2 * np.abs(expected).max()


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_of_unpack_to_the_last_bit(form):
    """Rows of the identity pick them one by one; two blocks each way, the last ones not full."""
    w = packed(form, (100, 120))
    (got,) = jax.jit(functools.partial(packed_triton.partials, splits=1))(jnp.eye(120, dtype=jnp.bfloat16), w)
    np.testing.assert_array_equal(got.T, unpack(w, jnp.float32))


@pytest.mark.parametrize("rows", [1, 5, 40, 160, 256])
@pytest.mark.parametrize("form", ["int4", "int4 zeros", "int8", "fp8", "fp8 blocks", "fp4"])
def test_products_equal_those_of_unpacked_weights(form, rows):
    x, w, gate_up = normal(rows, 704), packed(form, (1000, 704)), packed(form, (2, 512, 704), 2)
    for splits in (1, 3):
        parts = jax.jit(functools.partial(linear.partials, splits=splits, implementation="triton"))(x, w)
        assert_close(parts.sum(0), linear.reference.linear(x, unpack(w), jnp.float32))
    got = jax.jit(functools.partial(linear.gated, implementation="triton"))(x, gate_up)
    assert_close(got, linear.reference.gated(x, unpack(gate_up)))


# Widths of which no power of two is a factor; more outputs than the programs' blocks; and as large as makes Hopper's kernel pay.
@pytest.mark.parametrize("rows", [1, 5, 20, 40, 64, 130, 160, 256])
@pytest.mark.parametrize("form", ["int4", "int8", "fp8", "fp8 blocks", "fp4"])
def test_the_kernel_of_this_gpu_multiplies_with_unpacked_weights(form, rows):
    x = normal(rows, 2112)
    for shape, multiply, limit in (((2816, 2112), linear.partials, 1e-5), ((5376, 2112), linear.partials, 1e-5), ((2, 832, 2112), linear.gated, 3e-3)):
        w = packed(form, shape, rows)
        wanted = jnp.einsum("nh,...h->n...", x.astype(jnp.float32), unpack(w, jnp.float32), precision="highest")
        found = jax.jit(multiply)(x, w).astype(jnp.float32)
        if len(shape) == 3:
            wanted = linear.reference.activation(*(wanted[:, i].astype(jnp.bfloat16) for i in range(2))).astype(jnp.float32)
        else:
            found = found.sum(0)
        gap = jnp.linalg.norm(found - wanted, axis=1) / jnp.linalg.norm(wanted, axis=1)
        assert float(gap.max()) <= limit, (shape, float(gap.max()))


@pytest.mark.parametrize("quantize", ["int4", "int8", "fp8"])
def test_logits_of_pocket_by_kernels_and_by_xla(quantize):
    params = jaxspec.SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    prompts = ["def main():\n    print(", "The quick brown fox", "class Point:\n    def __init__(self, x, y):"]
    scores = []
    for attention in ("xla", "auto"):
        llm = jaxspec.load("pocket", quantize=quantize, attention=attention, max_slots=4, progress=False)
        outs = llm.generate(prompts, params)
        scores.append([next(iter(entry.values())).logprob for out in outs for entry in out.prompt_logprobs[1:]])
    gap = np.abs(np.subtract(*scores))
    assert np.median(gap) < 0.05 and gap.max() < 0.5, (np.median(gap), gap.max())


@pytest.mark.parametrize("rows", [1, 5, 40, 160, 700])
@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_experts_equal_those_of_unpacked_weights(form, rows):
    gate_up, down = packed(form, (16, 2, 704, 384), 2), packed(form, (16, 384, 704), 3)
    ids = np.stack([np.random.default_rng(row).permutation(16)[:4] for row in range(rows)]).astype(np.int32)
    x, weights = normal(rows, 384), normal(rows, 4, seed=4)
    got, plain = (
        jax.jit(functools.partial(moe.experts, implementation=name))(x, gate_up, down, weights, ids) for name in ("triton", "xla")
    )
    expected = moe.reference.experts(x, unpack(gate_up), unpack(down), weights, ids)
    assert_close(got, expected)
    assert_close(plain, expected)
>>>>>>> tritonq
