"""Quantised checkpoints: in every format and for every kind of layer, the weights are those of the format's formula to the bit."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quantised_files as files
from safetensors.numpy import load_file, save_file

from jaxspec import targets
from jaxspec.model import gemma4
from jaxspec.trees import leaves_by_path
from pallas_kernels.packed import Packed, unpack

pytestmark = pytest.mark.usefixtures("unoptimised")
WIDTHS = {"hidden_size": 64, "intermediate_size": 96}  # which groups of 32 divide
MORE = {"E2B": {"hidden_size_per_layer_input": 32}, "E4B": {"hidden_size_per_layer_input": 32}, "26B": {"moe_intermediate_size": 32}}


def config_of(member: str, **more) -> dict:
    return oracle.text_config(member, **WIDTHS, **MORE.get(member, {})) | more


@functools.cache
def original(member: str) -> tuple[object, dict[str, np.ndarray]]:
    """A tiny random target, and the tensors that transformers saves of it."""
    model = oracle.build(config_of(member))
    folder = oracle._temporary() / f"quantised-{member}"
    model.save_pretrained(folder)
    return model, load_file(folder / "model.safetensors")


def written(folder, member: str, settings: dict, write, **more) -> dict[str, np.ndarray]:
    """Writes a member in a format, and returns the tensors that it means."""
    return files.write_folder(folder, config_of(member, quantization_config=settings), original(member)[1], write, **more)


def load(folder, dtype=jnp.float32) -> gemma4.Gemma4:
    config, _ = targets.read_target(folder)
    quantisation = targets.read_quantisation(folder)
    return targets.load_target(folder, targets.abstract_target(config, dtype, quantisation), quantisation, progress=False)


def unpacked(tree):
    """A tree with every Packed as the array that it means, in float32."""
    return jax.tree.map(lambda x: unpack(x, jnp.float32) if isinstance(x, Packed) else x, tree, is_leaf=lambda x: isinstance(x, Packed))


def plain(folder, member: str, means: dict[str, np.ndarray]) -> gemma4.Gemma4:
    """Float weights, loaded from a float checkpoint."""
    folder.mkdir()
    save_file({key: np.ascontiguousarray(value.astype(np.float32)) for key, value in means.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(member)))
    return load(folder)


def assert_means(tree, wanted) -> None:
    """To the bit, and quantised are all matrices but the router's and the embeddings."""
    packed = {path for path, leaf in leaves_by_path(tree, whole=(Packed,)).items() if isinstance(leaf, Packed)}
    found, wanted = leaves_by_path(unpacked(tree)), leaves_by_path(wanted)
    matrices = {path for path, leaf in wanted.items() if leaf.ndim > 1 and "embed" not in path and "router" not in path}
    assert packed == matrices
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(value), err_msg=path)


INT4 = (files.compressed("pack-quantized", num_bits=4, strategy="group", group_size=32), files.pack_quantized(4))
INT4_ZEROS = (
    files.compressed("pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False),
    files.pack_quantized(4, 16, zeros=True),
)
INT8 = (files.compressed("pack-quantized"), files.pack_quantized(8, None))
INT8_ZEROS = (files.compressed("pack-quantized", symmetric=False), files.pack_quantized(8, None, zeros=True))
FLOAT8 = (files.compressed("float-quantized", type="float"), files.float8("channel"))
BLOCKS = (files.compressed("float-quantized", type="float", strategy="block", block_structure=[64, 64]), files.float8("block", (64, 64)))
FLOAT4 = (
    files.compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    files.float4(modelopt=False),
)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ["lm_head", "*router*"]}
FORMATS = {
    "int4": ("E2B", *INT4),
    "int4-31B": ("31B", *INT4),
    "int4-channel": ("12B", files.compressed("pack-quantized", num_bits=4), files.pack_quantized(4, None)),
    "int4-zeros": ("E4B", *INT4_ZEROS),
    "int8": ("12B", *INT8),
    "int8-zeros": ("E2B", *INT8_ZEROS),
    "int8-plain": ("12B", files.compressed("int-quantized"), files.plain_integers),
    "float16-scales": ("12B", INT4[0], files.pack_quantized(4, dtype=np.float16)),
    "float32-scales": ("12B", INT4[0], files.pack_quantized(4, dtype=np.float32, shape=False)),
    "fp8": ("E2B", *FLOAT8),
    "fp8-tensor": ("12B", files.compressed("float-quantized", type="float", strategy="tensor"), files.float8("tensor")),
    "fp8-blocks": ("31B", *BLOCKS),
    "fp8-large-blocks": (
        "E2B",
        files.compressed("float-quantized", type="float", strategy="block", block_structure=[128, 128]),
        files.float8("block"),
    ),
    "nvfp4": ("31B", *FLOAT4),
    "modelopt": ("E2B", MODELOPT, files.float4(modelopt=True)),
    "modelopt-fp8": ("12B", MODELOPT | {"quant_algo": "FP8"}, files.float8("tensor", dtype=np.float32)),
    "gptq": ("12B", {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}, files.gptq(4)),
    "gptq-8": ("31B", {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False}, files.gptq(8, None, sym=False)),
    "gptq-2": (
        "E2B",
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "checkpoint_format": "gptq_v2"},
        files.gptq(4, sym=False, version=2),
    ),
    "awq": ("31B", {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, files.awq()),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_means_its_formula(name: str, tmp_path) -> None:
    member, settings, write = FORMATS[name]
    means = written(tmp_path / "quantised", member, settings, write)
    assert_means(load(tmp_path / "quantised"), plain(tmp_path / "float", member, means))


@pytest.mark.parametrize(
    ("form", "names"), [(INT4, "index"), (INT4, "matrix"), (INT4_ZEROS, "fused"), (FLOAT8, "index"), (BLOCKS, "fused"), (FLOAT4, "index")]
)
def test_experts_under_every_name(form, names: str, tmp_path) -> None:
    means = written(tmp_path / "quantised", "26B", *form, names=names)
    assert_means(load(tmp_path / "quantised"), plain(tmp_path / "float", "26B", means))
