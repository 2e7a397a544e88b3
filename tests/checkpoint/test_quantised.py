"""Quantised checkpoints: in every format and for every kind of layer, the weights are those of the format's formula to the bit."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quantised_files as files
import torch
from definitions import relative_error
from quantised_files import load, unpacked
from safetensors.numpy import load_file, save_file

from jaxspec import targets
from jaxspec.checkpoint import safetensors
from jaxspec.checkpoint.formats.rules import Rules
from jaxspec.model import gemma4
from jaxspec.model.rows import Rows
from jaxspec.trees import leaves_by_path
from pallas_kernels.packed import Packed

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


def plain(folder, member: str, means: dict[str, np.ndarray]) -> gemma4.Gemma4:
    """Float weights, loaded from a float checkpoint."""
    folder.mkdir()
    save_file({key: np.ascontiguousarray(value.astype(np.float32)) for key, value in means.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(member)))
    return load(folder)


def assert_means(tree, wanted) -> None:
    """To the bit, and packed are all matrices but the router's, the embeddings and those that are unpacked as they are read."""
    packed = {path for path, leaf in leaves_by_path(tree, whole=(Packed,)).items() if isinstance(leaf, Packed)}
    found, wanted = leaves_by_path(unpacked(tree)), leaves_by_path(wanted)
    others = re.compile(r"embed|router|per_layer_input_gate|per_layer_projection")
    assert packed == {path for path, leaf in wanted.items() if leaf.ndim > 1 and not others.search(path)}
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
AUTO_ROUND = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32, "sym": True}
# As llm-compressor 0.14 writes it for a QuIPModifier.
TURNED = [{"targets": ["Linear"], "location": where} for where in ("input", "weight_input")]
QUIP = {"config_groups": {"v": {"type": "hadamard", "apply": TURNED}}}
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
    "gptq-2-format": (
        "E2B",
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "format": "GPTQ_v2"},
        files.gptq(4, sym=False, version=2),
    ),
    "gptq-one-sided": (  # groups of no negative weight, whose zero point is 0
        "12B",
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
        lambda key, w: files.gptq(4, sym=False)(key, np.abs(w) if "o_proj" in key else w),
    ),
    "awq": ("31B", {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}, files.awq()),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_means_its_formula(name: str, tmp_path) -> None:
    member, settings, write = FORMATS[name]
    means = written(tmp_path / "quantised", member, settings, write)
    assert_means(load(tmp_path / "quantised"), plain(tmp_path / "float", member, means))


SCALE_INV = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]}


def with_scale_inv(key: str, w: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    held, means = files.float8("block", (64, 64), np.float32)(key, w)
    return {name.replace("weight_scale", "weight_scale_inv"): value for name, value in held.items()}, means


@pytest.mark.parametrize(
    ("form", "prefix"),
    [
        (INT4, "language_model.model."),
        (INT4, "base_model.model.model."),
        ((SCALE_INV, with_scale_inv), "model."),
        ((SCALE_INV, with_scale_inv), "language_model.model."),
        ((SCALE_INV, with_scale_inv), "base_model.model.model."),
        (FORMATS["awq"][1:], "language_model."),
        (None, "base_model.model.model."),
    ],
)
def test_keys_may_begin_with_the_name_of_any_class_or_wrapper(form, prefix: str, tmp_path) -> None:
    def renamed(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {prefix + key.removeprefix("model."): value for key, value in tensors.items()}

    def rename(tensors: dict[str, np.ndarray]) -> None:
        named = renamed(tensors)
        tensors.clear()
        tensors |= named

    if form is not None:
        scale = {"model.layers.0.self_attn.k_scale": np.full(1, 0.5, np.float32)}
        means = written(tmp_path / "quantised", "31B", *form, more=scale, change=rename)
        found = load(tmp_path / "quantised")
        assert_means(found, plain(tmp_path / "float", "31B", means))
        assert found.kv_scales == ((0, 0.5, 1.0),)
        return
    wanted = plain(tmp_path / "usual", "31B", original("31B")[1])
    plain(tmp_path / "float", "31B", renamed(original("31B")[1]))
    found = load(tmp_path / "float", quantize="int8")
    again = load(tmp_path / "usual", quantize="int8")
    assert jax.tree.structure(found) == jax.tree.structure(again) != jax.tree.structure(wanted)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(again)))


def test_a_pattern_may_say_what_a_name_is_not() -> None:
    rules = Rules(("re:^(?!.*language_model).*$", "re:.*q_proj"))
    assert rules.match("model.language_model.layers.0.self_attn.q_proj") == "re:.*q_proj"
    assert rules.match("model.language_model.layers.0.self_attn.k_proj") is None
    assert Rules((r"re:layers\.0",)).match("model.language_model.layers.0.mlp.up_proj") and not Rules((r"re:(?!.*up)",)).match("x.up")


def test_experts_in_one_tensor_of_fp8_are_refused_by_name(tmp_path) -> None:
    def fuse(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.experts.down_proj_scale_inv"] = np.ones((8, 1, 1), np.float32)

    written(tmp_path, "26B", SCALE_INV, with_scale_inv, names="index", change=fuse)
    with pytest.raises(ValueError, match=r"scales model.layers.0.experts.down_proj_scale_inv; served are those of single matrices"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("form", "names"), [(INT4, "index"), (INT4, "matrix"), (INT4_ZEROS, "fused"), (FLOAT8, "index"), (BLOCKS, "fused"), (FLOAT4, "index")]
)
def test_experts_under_every_name(form, names: str, tmp_path) -> None:
    means = written(tmp_path / "quantised", "26B", *form, names=names)
    assert_means(load(tmp_path / "quantised"), plain(tmp_path / "float", "26B", means))


# Against transformers


@pytest.mark.parametrize("name", ["int4", "fp8-blocks", "int8-zeros", "modelopt"])
def test_logits_are_those_of_transformers_on_the_weights_that_it_means(name: str, tmp_path) -> None:
    """In float32, and the choice of every next token is the same."""
    member, settings, write = FORMATS[name]
    means = written(tmp_path / "quantised", member, settings, write)
    model = oracle.build(config_of(member))
    model.load_state_dict({key: torch.from_numpy(value.astype(np.float32)) for key, value in means.items()}, strict=False)
    ids = np.random.default_rng(1).integers(0, oracle.BASE["vocab_size"], (2, 20))
    wanted, _ = oracle.run(model, ids)
    zero = jnp.zeros(2, jnp.int32)
    rows = Rows(jnp.asarray(ids, jnp.int32), zero, zero + 20, jnp.arange(2, dtype=jnp.int32))
    found = np.asarray(logits(load(tmp_path / "quantised"), rows))
    assert relative_error(found, wanted) <= 1e-4
    np.testing.assert_array_equal(found.argmax(-1), wanted.argmax(-1))
    assert relative_error(oracle.run(original(member)[0], ids)[0], wanted) > 1e-2  # the float weights have others


def in_float8(x: torch.Tensor) -> torch.Tensor:
    """Each row in e4m3 times the least power of two by which it fits."""
    largest = x.abs().amax(-1, keepdim=True)
    scale = torch.where(largest == 0, 1, torch.exp2(torch.ceil(torch.log2(largest.double() / 448)))).float()
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize(("member", "form"), [("E2B", FLOAT8), ("26B", FLOAT8), pytest.param("31B", BLOCKS, marks=pytest.mark.slow)])
def test_rounded_activations_are_those_of_every_quantised_linear(member: str, form, tmp_path) -> None:
    """The inputs of the modules whose weights are fp8, by hooks on them; not of experts, which are no such modules, and of routers. A few
    numbers lie so near the middle of two of e4m3 that the last bit of a sum decides which it is: half of the sequences have none."""
    settings, write = form
    means = written(tmp_path, member, settings, write, names="index" if member == "26B" else "fused")
    model = oracle.build(config_of(member))
    model.load_state_dict({key: torch.from_numpy(value.astype(np.float32)) for key, value in means.items()}, strict=False)
    ids = np.random.default_rng(1).integers(0, oracle.BASE["vocab_size"], (8, 5))
    plain, _ = oracle.run(model, ids)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "router" not in name and name != "lm_head":
            module.register_forward_pre_hook(lambda _, given: (in_float8(given[0]),))
    wanted, _ = oracle.run(model, ids)
    zero = jnp.zeros(8, jnp.int32)
    rows = Rows(jnp.asarray(ids, jnp.int32), zero, zero + 5, jnp.arange(8, dtype=jnp.int32))
    target = load(tmp_path, quantize_activations="fp8")
    found = np.asarray(logits(target, rows))
    errors = np.sort([relative_error(*pair) for pair in zip(found, wanted, strict=True)])
    assert errors[3] <= 1e-5 and errors[-1] <= 5e-2
    assert min(relative_error(*pair) for pair in zip(plain, wanted, strict=True)) > 1e-2
    packed = {path: leaf.inputs for path, leaf in leaves_by_path(target, whole=(Packed,)).items() if isinstance(leaf, Packed)}
    assert all((inputs is None) == ("experts" in path) for path, inputs in packed.items())


@jax.jit
def logits(target, rows):
    return target.unembed(target(rows, None, attention="xla")[0].hidden)


# What else a file may hold


def test_what_released_files_hold_besides(tmp_path) -> None:
    """A head beside the tied embedding, the towers, quantised K and V of layers that share KV, and scales of a cache."""
    settings, write = INT4
    tensors = original("E2B")[1]
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"], "model.vision_tower.a.weight": np.zeros((2, 2), np.float32)}
    for name in ("k_proj", "v_proj"):
        more |= write(f"model.layers.5.self_attn.{name}.weight", np.ones((8, 64), np.float32))[0]
    more["model.layers.0.self_attn.k_scale"] = np.ones(1, np.float32)
    means = written(tmp_path / "quantised", "E2B", settings, write, more=more)
    assert_means(load(tmp_path / "quantised"), plain(tmp_path / "float", "E2B", means))


def test_sharded_and_multimodal(tmp_path) -> None:
    """Under the prefix of conditional generation, with its rules and its config in text_config, in several files."""
    settings, write = INT4
    means = written(tmp_path / "quantised", "12B", settings, write)
    tensors = {
        key.replace("model.", "model.language_model.", 1): value
        for key, value in load_file(tmp_path / "quantised" / "model.safetensors").items()
    }
    (tmp_path / "quantised" / "model.safetensors").unlink()
    weight_map = {key: f"{i % 3}.safetensors" for i, key in enumerate(sorted(tensors))}
    for name in set(weight_map.values()):
        save_file({key: tensors[key] for key in tensors if weight_map[key] == name}, tmp_path / "quantised" / name)
    (tmp_path / "quantised" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = oracle.outer_config(config_of("12B", quantization_config=settings))
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    assert_means(load(tmp_path / "quantised"), plain(tmp_path / "float", "12B", means))


def test_modules_that_stay_float(tmp_path) -> None:
    """Rules by name, by pattern and by class; a float matrix among quantised ones keeps the dtype of the tree."""
    settings, write = INT8
    names = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]
    settings = settings | {"ignore": [*names, r"re:.*layers\.1\.self_attn.*", r"re:layers\.2\.mlp.*"]}
    left = ("layers.0.mlp.gate", "layers.0.mlp.up", "layers.1.self_attn", "layers.2.mlp")
    means = written(tmp_path / "quantised", "12B", settings, write, leave=lambda key: any(name in key for name in left))
    tree = load(tmp_path / "quantised", jnp.bfloat16)
    packed = {path for path, leaf in leaves_by_path(tree, whole=(Packed,)).items() if isinstance(leaf, Packed)}
    assert packed == {
        *("layers.0.mlp.down_proj.weight", "layers.0.self_attn.qkv_proj.weight", "layers.0.self_attn.o_proj.weight"),
        *("layers.1.mlp.gate_up_proj.weight", "layers.1.mlp.down_proj.weight"),
        *("layers.2.self_attn.qkv_proj.weight", "layers.2.self_attn.o_proj.weight"),
        *(f"layers.3.{name}.weight" for name in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")),
    }
    gate = np.asarray(tree.layers[0].mlp.gate_up_proj.weight[0])
    np.testing.assert_array_equal(gate, means["model.layers.0.mlp.gate_proj.weight"].astype(files.BF16))


def test_float_experts_in_one_tensor(tmp_path) -> None:
    """They are the parameter of a module that is no Linear, so a rule for that class does not mean them."""
    settings, write = FLOAT8
    written(tmp_path, "26B", settings, write, leave=lambda key: "router" in key or "experts" in key)
    layer = load(tmp_path).layers[0]
    assert isinstance(layer.mlp.down_proj.weight, Packed) and isinstance(layer.experts.down_proj, jax.Array)


def test_groups_with_formats_of_their_own(tmp_path) -> None:
    """Mixed precision: a name goes before a pattern, and that before a class."""
    four, eight = (form[0]["config_groups"]["group_0"] for form in (INT4, FLOAT8))
    settings = INT4[0] | {
        "format": "mixed-precision",
        "config_groups": {"a": four, "b": eight | {"targets": ["re:.*mlp.*"], "format": "float-quantized"}},
    }

    def write(key, w):
        return (FLOAT8 if "mlp" in key else INT4)[1](key, w)

    means = written(tmp_path / "quantised", "12B", settings, write)
    tree = load(tmp_path / "quantised")
    assert (tree.layers[0].mlp.down_proj.weight.kind, tree.layers[0].self_attn.o_proj.weight.kind) == ("fp8", "int4")
    assert_means(tree, plain(tmp_path / "float", "12B", means))


def test_auto_round_lists_what_it_left_in_16_bits(tmp_path) -> None:
    """auto-round 0.15.1 lists the layers of the image tower for a whole Gemma 4, and of the text part those that were to stay."""
    tower, left = "model.vision_tower.encoder.layers.0.mlp.up_proj.linear", "model.layers.1.self_attn.o_proj"
    more = {"model.layers.0.self_attn.o_proj": {"bits": 4, "sym": True}}
    settings = AUTO_ROUND | {"extra_config": {name: {"bits": 16, "data_type": "float"} for name in (tower, left)} | more}
    towers = {f"{tower}.weight": np.zeros((2, 2), np.float32)}
    means = written(tmp_path, "12B", settings, files.gptq(4), leave=lambda key: left in key, more=towers)
    tree = load(tmp_path)
    assert [isinstance(layer.self_attn.o_proj.weight, Packed) for layer in tree.layers] == [True, False, True, True]
    found = np.asarray(tree.layers[1].self_attn.o_proj.weight)
    np.testing.assert_array_equal(found.reshape(found.shape[0], -1), means[f"{left}.weight"])
    (tmp_path / "model.safetensors").unlink()
    quantisation = targets.read_quantisation(tmp_path)
    assert quantisation is not None
    assert [quantisation.scheme_of(f"model.layers.{i}.self_attn.o_proj") is None for i in range(2)] == [False, True]


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path) -> None:
    write = files.float4(modelopt=True)
    excluded = ["lm_head", "model.layers.1.self_attn*", "model.layers.2.self_attn"]
    settings = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": excluded}
    scales = {f"model.layers.{i}.self_attn.{n}_proj.{n}_scale": np.asarray(0.5 + i, np.float32) for i in range(3) for n in "kv"}
    del scales["model.layers.1.self_attn.v_proj.v_scale"]
    leave = ("layers.1.self_attn", "layers.2.self_attn")
    written(tmp_path, "12B", {}, write, leave=lambda key: any(name in key for name in leave), more=scales)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    tree = load(tmp_path)
    assert [isinstance(layer.self_attn.o_proj.weight, Packed) for layer in tree.layers] == [True, False, False, True]
    assert tree.kv_scales == ((0, 0.5, 0.5), (1, 1.5, 1.0), (2, 2.5, 2.5))
    cache = functools.partial(tree.init_cache, slots=2, max_len=20, num_draft_tokens=1)
    pools = cache(dtype=jnp.float8_e4m3fn).layers
    assert [None if layer.scales is None else layer.scales.tolist() for layer in pools] == [[0.5, 0.5], [1.5, 1.0], [2.5, 2.5], None]
    assert all(layer.scales is None for layer in cache(dtype=jnp.float32).layers)


def test_before_the_weights_are_there(tmp_path) -> None:
    """What load plans with before it downloads them is what it loads, where scales have the model's dtype."""
    for member, settings, write in (FORMATS["int4"], FORMATS["awq"], ("26B", *FLOAT8)):
        folder = tmp_path / member
        written(folder, member, settings, write, names="index")
        told = json.loads((folder / "config.json").read_text()) | {"dtype": "float16" if settings["quant_method"] == "awq" else "bfloat16"}
        (folder / "config.json").write_text(json.dumps(told))
        config, _ = targets.read_target(folder)
        there = targets.abstract_target(config, jnp.float32, targets.read_quantisation(folder))
        (folder / "model.safetensors").unlink()
        planned = targets.abstract_target(config, jnp.float32, targets.read_quantisation(folder))
        assert jax.tree.structure(planned) == jax.tree.structure(there)
        assert jax.tree.leaves(planned) == jax.tree.leaves(there)


# What does not load


def broken(folder, form, change, member="12B") -> str:
    """Writes a checkpoint, changes its tensors, and returns what loading says."""
    written(folder, member, *form, change=change)
    with pytest.raises(ValueError) as error:
        load(folder)
    return str(error.value)


def test_tensors_that_do_not_fit_are_all_listed_before_anything_is_read(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(tensors):
        down, up, k = (f"model.layers.0.{name}_proj.weight" for name in ("mlp.down", "mlp.up", "self_attn.k"))
        del tensors[f"{down}_scale"]
        tensors[f"{up}_packed"] = tensors[f"{up}_packed"][:, :7]
        tensors[f"{k}_packed"] = tensors[f"{k}_packed"].astype(np.int64)
        tensors["model.layers.1.mlp.up_proj.weight_scale"] = tensors["model.layers.1.mlp.up_proj.weight_scale"].astype(np.float32)
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((96, 64), np.float32)
        monkeypatch.setattr(safetensors.Stored, "read", lambda self: pytest.fail("read a tensor"))

    assert broken(tmp_path, INT4, change).splitlines() == [
        f"the weights in {tmp_path} do not fit the model, 5 problems:",
        "  model.layers.0.self_attn.k_proj.weight_packed: found I64, expected I32",
        "  model.layers.0.mlp.up_proj.weight_packed: found [96, 7], expected [96, 8]",
        "  model.layers.0.mlp.down_proj.weight_scale: missing, expected [64, 3]",
        "  model.layers.1.mlp.up_proj.weight_scale: found F32, expected BF16",
        "  model.layers.2.mlp.up_proj.weight: unknown, found F32 [96, 64]",
    ]


@pytest.mark.parametrize(
    ("form", "key", "value", "message"),
    [
        (INT4, "mlp.up_proj.weight_shape", np.asarray([96, 65]), r"weight_shape says \[96, 65\], but the matrix is \[96, 64\]"),
        (INT4, "mlp.up_proj.weight_g_idx", np.arange(64, dtype=np.int32) % 2, "weight_g_idx puts inputs into groups out of order"),
        (FORMATS["gptq"][1:], "mlp.up_proj.g_idx", np.arange(64, dtype=np.int32) % 2, "g_idx puts inputs into groups out of order"),
        (
            FORMATS["gptq"][1:],
            "mlp.up_proj.qzeros",
            np.zeros((2, 12), np.int32),
            r"qzeros has values 1 \.\. 1; expected 8, as the config says 'sym'",
        ),
        (FLOAT4, "mlp.up_proj.weight_global_scale", np.zeros(1, np.float32), r"weight_global_scale is \[0.0\]; expected positive numbers"),
        (INT4, "mlp.up_proj.weight_scale", np.full((96, 2), np.nan, jnp.bfloat16), "up_proj.weight: its scales are not all finite numbers"),
        (FLOAT8, "self_attn.k_scale", np.ones((4, 1, 1), np.float32), r"k_scale is F32 \[4, 1, 1\]; served is one scale for all heads"),
        (FLOAT8, "self_attn.v_scale", np.zeros(1, np.float32), r"v_scale is 0.0; expected a positive number"),
    ],
)
def test_contents_that_do_not_fit(form, key: str, value: np.ndarray, message: str, tmp_path) -> None:
    def change(tensors):
        tensors[f"model.layers.0.{key}"] = value

    assert re.search(message, broken(tmp_path, form, change))


def group(form, **changes) -> dict:
    """The config of a format with other settings of its group."""
    return form[0] | {"config_groups": {"group_0": form[0]["config_groups"]["group_0"] | changes}}


def weights(form, **changes) -> dict:
    return group(form, weights=form[0]["config_groups"]["group_0"]["weights"] | changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            weights(INT4, num_bits=3),
            "format 'pack-quantized' with 3 bits of type 'int', strategy 'group', group_size 32; served are",
        ),
        (weights(INT4, strategy="tensor"), "'pack-quantized' with 4 bits of type 'int', strategy 'tensor'"),
        (weights(INT4, strategy="odd"), "strategy 'odd'"),
        (weights(INT4, group_size=None), "group_size None; expected a positive group_size"),
        (weights(INT4, group_size=24), r"q_proj\.weight cannot be packed: groups have 24 inputs; expected a divisor or a multiple of 64"),
        (weights(BLOCKS, block_structure=None), r"strategy 'block', group_size None, block_structure None"),
        (INT4[0] | {"format": "mxfp4-pack-quantized"}, "format 'mxfp4-pack-quantized' with 4 bits"),
        (INT4[0] | {"config_groups": ["W4A16"]}, r"config_groups is \['W4A16'\]; expected an object"),
        (INT4[0] | {"ignore": ["re:("]}, r"the rule 're:\(' is no regular expression"),
        (group(INT4, output_activations={"num_bits": 8}), "group_0 of the quantization_config quantises activations by numbers fixed in"),
        (group(INT8, input_activations={"num_bits": 8, "type": "int", "dynamic": False}), "quantises activations by numbers fixed"),
        (group(INT8, weights="int8"), "group_0 of the quantization_config has weights 'int8' and input_activations None; expected objects"),
        (group(INT8, weights=False), "has weights False and input_activations None; expected objects"),
        (group(INT8, targets=["Embedding"]), "group_0 of the quantization_config quantises embeddings"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method 'bitsandbytes'; served are compressed-tensors"),
        ({"quant_method": "gemma"}, "quant_method 'gemma'; served are"),
        (MODELOPT | {"quant_algo": "W4A8_AWQ"}, "ModelOpt's quant_algo is 'W4A8_AWQ'; served are NVFP4, FP8"),
        (MODELOPT | {"group_size": 32}, "NVFP4 has group_size 32; expected 16"),
        (FORMATS["awq"][1] | {"version": "gemv"}, "quant_method 'awq' with 4 bits, group_size 32 has version 'gemv'"),
        (FORMATS["gptq"][1] | {"bits": 3}, "quant_method 'gptq' with 3 bits, group_size 32; served are 4 and 8 bits"),
        (AUTO_ROUND | {"extra_config": {"a": None}}, "has None for a in extra_config; expected an object of settings"),
        (AUTO_ROUND | {"extra_config": {"a": {"bits": "16"}}}, "for a in extra_config; expected an object of settings, with a"),
        (AUTO_ROUND | {"dynamic": ["x"]}, r"has dynamic \['x'\]; expected an object"),
        (AUTO_ROUND | {"extra_config": {"a.b": {"bits": 8}}}, r"of single layers \(extra_config\): a\.b has \{'bits': 8\}; expected"),
        (AUTO_ROUND | {"extra_config": {"a": {"group_size": 64}}}, "a has {'group_size': 64}; expected those of the rest, or 16 bits"),
        (INT4[0] | {"transform_config": QUIP}, r"group 'v', which transforms activations .* \(input\), as QuIP and SpinQuant do"),
        (INT4[0] | {"ignore": "lm_head"}, "ignore of the quantization_config is 'lm_head'; expected a list of names"),
        (group(INT4, targets=[5]), r"targets of the quantization_config is \[5\]; expected a list of names"),
        (weights(INT4, num_bits=4.0), "with 4.0 bits of type 'int', .*; expected a whole number of bits"),
        (INT4[0] | {"transform_config": 5}, "transform_config is 5; expected an object"),
        (INT4[0] | {"transform_config": {"config_groups": 5}}, "the quantization_config in .* cannot be read: AttributeError"),
        ({"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"}, "packing_format 'auto_round:auto_awq'"),
    ],
)
def test_formats_that_are_refused_by_name(settings: dict, message: str, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of("12B", quantization_config=settings)))
    with pytest.raises(ValueError, match=message):
        config, _ = targets.read_target(tmp_path)
        targets.abstract_target(config, jnp.float32, targets.read_quantisation(tmp_path))


def test_a_small_matrix_that_cannot_be_packed_is_named_before_weights_are_read(tmp_path) -> None:
    """Though it would be unpacked as it is read."""
    settings = weights(INT4, group_size=24) | {"ignore": ["re:.*_proj", "re:.*model_projection"]}
    (tmp_path / "config.json").write_text(json.dumps(config_of("E2B", quantization_config=settings)))
    config, _ = targets.read_target(tmp_path)
    with pytest.raises(ValueError, match=r"layers\.0\.per_layer_input_gate\.weight cannot be packed: groups have 24 inputs"):
        targets.abstract_target(config, jnp.float32, targets.read_quantisation(tmp_path))


def test_parts_of_a_fused_matrix_have_one_format(tmp_path) -> None:
    settings = INT4[0] | {"ignore": ["model.layers.0.self_attn.k_proj"]}
    (tmp_path / "config.json").write_text(json.dumps(config_of("12B", quantization_config=settings)))
    config, _ = targets.read_target(tmp_path)
    with pytest.raises(
        ValueError, match=r"layers\.0\.self_attn\.qkv_proj\.weight is made of matrices that are quantised in different ways"
    ):
        targets.abstract_target(config, jnp.float32, targets.read_quantisation(tmp_path))


# The library


@pytest.mark.parametrize(
    "name", ["int4", "int4-channel", "int4-zeros", "int8", "int8-zeros", "int8-plain", "fp8", "fp8-tensor", "fp8-blocks", "nvfp4"]
)
def test_the_library_means_the_same(name: str) -> None:
    """The library compressed-tensors takes what the writers write for what they say. It rounds weights of NVFP4 to bfloat16."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    _, settings, write = FORMATS[name]
    scheme = QuantizationScheme(**settings["config_groups"]["group_0"])
    tensors, means = write("weight", np.random.default_rng(0).standard_normal((80, 96)).astype(np.float32))

    def to_torch(x: np.ndarray) -> torch.Tensor:
        wide = {"bfloat16": np.int16, "float8_e4m3fn": np.int8}.get(x.dtype.name)
        return torch.from_numpy(np.array(x)) if wide is None else torch.from_numpy(x.view(wide).copy()).view(getattr(torch, x.dtype.name))

    state = {key: to_torch(value) for key, value in tensors.items() if "input" not in key}
    made = BaseCompressor.get_value_from_registry(settings["format"]).decompress(state, scheme)["weight"]
    assert made.dtype == torch.bfloat16
    np.testing.assert_array_equal(made.float().numpy(), means.astype(files.BF16).astype(np.float32))
