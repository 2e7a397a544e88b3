"""The loop of real models as it is lowered for CUDA: which kernels are in it, and that the state is updated in place."""

import math
import re

import pytest
from real_loops import KERNELS, PACKED, kernels, lowered


@pytest.mark.parametrize("name", KERNELS)
def test_the_loop_is_made_of_kernels(name):
    """A kernel that a layer or a head stops calling is missing here."""
    assert KERNELS[name] <= kernels(name, "triton")


def test_without_kernels_there_are_none():
    assert not kernels("31B", "xla")


@pytest.mark.parametrize("name", ["E2B", "26B-A4B", "31B"])
def test_no_row_of_the_target_s_logits_is_in_memory(name):
    """Of a verified block of five, where nothing but a temperature applies."""
    assert "5x262144xf32" not in lowered(name, "triton")[0] and "5x262144xf32" in lowered("31B", "xla")[0]


@pytest.mark.parametrize("name", KERNELS)
def test_every_array_of_the_state_is_updated_in_place(name):
    """Donated and returned with the same shape and dtype: a pool that is not would be in memory twice. Only `starved` is set anew."""
    text, arrays = lowered(name, "triton")
    assert text.count("tf.aliasing_output") == arrays - 1


@pytest.mark.parametrize(("name", "quantize", "inner"), [("E2B", "int4", 6144), ("26B-A4B", "int8", 704), ("31B", "int4", 21504)])
def test_a_quantised_target_s_weights_stay_packed(name, quantize, inner):
    """Its products have kernels of their own beside the drafter's, and nothing in the program is as large as a float matrix of its MLP, or
    as that which makes the E2B's inputs of layers."""
    wanted = {PACKED.get(kernel, kernel) for kernel in KERNELS[name]} | {"linear", "gated"}
    assert wanted <= kernels(name, "triton", quantize)

    def matrices(text):
        shapes = (tuple(map(int, found.split("x"))) for found in re.findall(r"tensor<([\dx]+)x(?:bf16|f32)>", text))
        return {shape for shape in shapes if inner in shape and math.prod(shape) >= inner * 1024 or shape == (35 * 256, 1536)}

    assert matrices(lowered(name, "triton")[0]) and not matrices(lowered(name, "triton", quantize)[0])
