"""Float weights quantised as they are read: compressed-tensors' formula, in NumPy."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.checkpoint import from_floats
from jaxspec.checkpoint.formats import compressed_tensors
from jaxspec.checkpoint.quantisation import Scheme
from jaxspec.checkpoint.safetensors import read_folder
from pallas_kernels.packed import pack, unpack

RNG = np.random.default_rng(0)


def expected(weights, kind, group, scale_dtype):
    """What a dequantised matrix is: [out, in] float32."""
    wide = weights.astype(np.float32)
    parts = [wide] if group is None else [wide[:, i : i + group] for i in range(0, wide.shape[1], group)]
    found = []
    for part in parts:
        scale = (np.abs(part).max(axis=1, keepdims=True) / np.float32({"int8": 127.5, "int4": 7.5, "fp8": 448}[kind])).astype(scale_dtype)
        numbers = part / scale.astype(np.float32)
        if kind == "fp8":
            rounded = np.clip(numbers, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        else:
            half = {"int8": 128, "int4": 8}[kind]
            rounded = np.clip(np.round(numbers), -half, half - 1)
        found.append((rounded.astype(np.float32) * scale.astype(np.float32)).astype(scale_dtype))
    return np.concatenate(found, axis=1).astype(np.float32)


@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("kind", "group"), list(from_floats.GROUPS.items()))
@pytest.mark.parametrize("shape", [(70, 80), (512, 256)])
def test_numbers_are_compressed_tensors(kind, group, scale_dtype, shape):
    """Also of a width that groups do not divide, and of outputs that are all zeros; and of as many that XLA makes another program."""
    weights = RNG.standard_normal(shape).astype(ml_dtypes.bfloat16)
    weights[3] = 0
    weights[3, 1] = 1e-40
    scheme = Scheme(kind, group, scale_dtype=scale_dtype)
    codes, scale = from_floats.quantise(weights, scheme)
    assert scale.dtype == scale_dtype
    found = unpack(pack(codes, scale, kind=kind, group=group), jnp.float32)
    with np.errstate(all="ignore"):
        wanted = np.where(np.abs(weights) < 1e-30, 0, expected(weights, kind, group, scale_dtype))
    np.testing.assert_array_equal(found, wanted)


def test_a_matrix_is_read_in_rows(tmp_path, monkeypatch):
    """Experts' matrices are one tensor: it is read 3 rows at a time, the last of which were read before."""
    weights = RNG.standard_normal((4, 5, 64)).astype(np.float32)
    save_file({"experts": weights}, tmp_path / "model.safetensors")
    monkeypatch.setattr(from_floats, "COPIED_BYTES", 3 * 64 * 4)
    read = []
    quantise = from_floats.quantise
    monkeypatch.setattr(from_floats, "quantise", lambda floats, scheme: read.append(floats.shape) or quantise(floats, scheme))
    format = from_floats.quantisation("int4", "bfloat16").format_of("model.layers.0.experts.0.gate_proj")
    assert format is not None and [*format.tensors("experts", weights.shape)] == ["experts"]
    matrix = format.read("experts", weights.shape, read_folder(tmp_path))
    assert read == [(3, 64)] * 7
    codes, scale = quantise(weights.reshape(20, 64), format.scheme)
    np.testing.assert_array_equal(matrix.codes, np.asarray(codes).reshape(4, 5, 64))
    np.testing.assert_array_equal(matrix.scale, np.asarray(scale).reshape(4, 5, 2))


def test_routers_and_heads_stay_float():
    made = from_floats.quantisation("int8", "float32")
    for module in ("model.layers.0.router.proj", "lm_head"):
        assert made.scheme_of(module) is None
    for module in ("model.layers.0.self_attn.q_proj", "model.layers.3.experts.7.down_proj", "model.per_layer_model_projection"):
        assert made.scheme_of(module) == Scheme("int8", scale_dtype="float32")


MODULES = ("mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj", "experts.3.gate_proj", "moe.share_expert.gate_proj")
STAY_FLOAT = ("moe.gate", "router.proj", "self_attn.g_proj", "per_layer_input_gate", "per_layer_projection")


@pytest.mark.parametrize("kind", from_floats.GROUPS)
def test_the_config_of_a_conversion_names_what_is_quantised(kind):
    """As compressed-tensors reads it."""
    told = compressed_tensors.read(from_floats.config_of(kind), scale_dtype="bfloat16", fused_float_experts=False)
    made = from_floats.quantisation(kind, "bfloat16")
    for name in (*MODULES, *STAY_FLOAT):
        module = f"model.language_model.layers.0.{name}"
        assert told.scheme_of(module) == made.scheme_of(module) and (made.scheme_of(module) is None) == (name in STAY_FLOAT), name
