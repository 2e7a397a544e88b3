"""What is counted of quantised weights: bytes as they lie, operations and parameters by the numbers that they stand for."""

import jax.numpy as jnp
import numpy as np
import pytest
import real_configs

from jaxspec.bench import roofline
from jaxspec.bench.random_weights import random_weights
from jaxspec.checkpoint.quantisation import Scheme, with_packed
from jaxspec.drafters.base import NoDraft
from jaxspec.engine import memory
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.trees import nbytes, weight_count
from pallas_kernels import packed

pytestmark = pytest.mark.usefixtures("unoptimised")


def w4a16(name):
    """A released model's shapes, float and as Google's w4a16 checkpoints are."""
    floats = gemma4.abstract(Gemma4Config.from_hf(real_configs.TARGETS[name]))
    return floats, with_packed(floats, lambda name: None if "router" in name else Scheme("int4", 32))


@pytest.mark.parametrize("name", ["31B", "26B-A4B", "E2B"])
def test_operations_and_parameters_are_those_of_the_float_model(name):
    floats, quantised = w4a16(name)
    assert quantised.weights_multiplied() == floats.weights_multiplied()
    assert weight_count(quantised) == weight_count(floats)
    assert roofline.prefill_flops(quantised, 700) == roofline.prefill_flops(floats, 700)


def test_bytes_of_the_31b():
    """Four bits a weight, and a 16-bit scale for 32 of them; the head is float, and 1,331,516 parameters of norms."""
    _, quantised = w4a16("31B")
    head = nbytes(quantised.embed_tokens)
    matrices = sum(quantised.weights_multiplied()[1])
    assert quantised.weights_read(5) == matrices * 4.5 / 8 + head + 2 * 1_331_516 == 19_295_019_640


def test_experts_that_nobody_chose_are_not_read():
    _, quantised = w4a16("26B-A4B")
    experts = sum(nbytes(layer.experts) for layer in quantised.layers)
    assert nbytes(quantised) - quantised.weights_read(1) == pytest.approx((1 - 8 / 128) * experts)


def test_the_memory_plan_has_room_to_unpack_a_piece():
    floats, quantised = w4a16("31B")
    of_floats, of_quantised = (memory.sizes_of(tree, NoDraft(), max_len=4096, num_draft_tokens=0) for tree in (floats, quantised))
    assert of_quantised.target < 0.34 * of_floats.target
    assert of_quantised.work(1) - of_floats.work(1) == memory.UNPACKING


CODES = (("int4", 32), ("int8", None), ("fp8", None), ("fp4", 16))


@pytest.mark.parametrize(
    ("kind", "group", "zeros", "affine"),
    [*((*codes, zeros, False) for codes in CODES for zeros in (False, True)), *((*codes, True, True) for codes in CODES[:2])],
)
def test_random_packed_weights(kind, group, zeros, affine):
    """They are finite, of the deviation of float ones and about 0, and what fills up blocks has scales of 0."""
    made = random_weights(packed.abstract((2, 96, 96), kind, group=group, zeros=zeros, affine=affine, scale_dtype=jnp.float32))
    weights = np.asarray(packed.unpack(made))
    assert np.isfinite(weights).all() and weights.std() == pytest.approx(0.02, rel=0.05)
    assert abs(weights.mean()) < (0.001 if affine or kind != "int4" else 0.004)  # a code of int4 is 7.5 in the mean, and its zero is 8
    outputs = np.asarray(made.scale).reshape(2, 2, -1, 4, 8, made.scale.shape[-1])
    assert (outputs[:, 1, :, 2:] == 0).all() and (outputs[:, :, 0, :2] > 0).all()
