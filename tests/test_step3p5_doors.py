"""A Step-3.5 checkpoint through the doors: loading, quantised weights, conversion, the command line, the plan of the released model."""

import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import step3p5_files as files
import tiny
from quick import few_programs

import jaxspec
from jaxspec import checkpoint, cli, drafters, released
from jaxspec.drafters.mtp_modules import MTPModules
from jaxspec.info import describe as info
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.step3p5 import Step3p5
from jaxspec.sharding.placement import abstract_placement_of
from jaxspec.targets import abstract_target, asked_quantisation, load_target, read_target
from jaxspec.train import distil
from jaxspec.train.loop import read_metrics
from jaxspec.trees import bytes_per_device, is_packed, leaves_by_path, nbytes, weight_count
from pallas_kernels.packed import Packed, unpack

SETTINGS = {"max_slots": 2, "max_len": 48, "progress": False}
PROMPTS = ["def f(x):", [{"role": "user", "content": "Hi"}]]
PARAMS = jaxspec.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
CONFIG = files.tiny_config(vocab_size=tiny.VOCAB, hidden_size=128, moe_intermediate_size=128, moe_num_experts=4)


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile(unoptimised):
    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        yield


def with_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny.POCKET / name, folder / name)
    return folder


@functools.cache
def tensors():
    return files.random_tensors(CONFIG, 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return with_tokenizer(files.write(tmp_path_factory.mktemp("step") / "target", CONFIG, tensors()))


def texts(llm):
    (first,) = llm.generate(PROMPTS[:1], PARAMS)
    return [first.token_ids, llm.chat(PROMPTS[1], PARAMS).token_ids]


@pytest.fixture(scope="module")
def alone(folder):
    """What the target writes by itself."""
    return texts(jaxspec.load(folder, **SETTINGS))


@pytest.mark.slow  # tests/drafters/test_step3p5_modules.py has the modules
def test_the_modules_of_the_same_folder(folder, alone):
    """Texts through the chat template and without are those of the target alone, with as many drafts as there are modules."""
    llm = jaxspec.load(folder, "same", **SETTINGS)
    assert isinstance(llm.target, Step3p5) and isinstance(llm.drafter, MTPModules) and llm.settings.num_draft_tokens == 3
    assert texts(llm) == alone


def test_same_needs_modules(folder, tmp_path):
    config = {**CONFIG, "num_nextn_predict_layers": 0}
    shutil.copytree(folder, tmp_path / "none")
    (tmp_path / "none" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="drafter is 'same', but the config.json in .*none tells of no drafter in the target's checkpoint"):
        jaxspec.load(tmp_path / "none", "same", **SETTINGS)
    with pytest.raises(ValueError, match="drafter is 'same', but the config.json in .*pocket"):
        jaxspec.load("pocket", "same", **SETTINGS)


def blocks(x, size=128):
    """(codes, scales, what they stand for) of experts' matrices in float8 blocks."""
    lead, (out, into) = x.shape[:-2], x.shape[-2:]
    rows, columns = -(-out // size), -(-into // size)
    padded = np.pad(x, [(0, 0)] * len(lead) + [(0, rows * size - out), (0, columns * size - into)])
    cut = padded.reshape(*lead, rows, size, columns, size)
    scale = np.abs(cut).max(axis=(-3, -1)).astype(np.float32) / np.float32(448)
    codes = (cut / scale[..., :, None, :, None]).astype(jnp.float8_e4m3fn)
    whole = codes.astype(np.float32) * scale[..., :, None, :, None]
    codes, whole = (a.reshape(padded.shape)[..., :out, :into] for a in (codes, whole))
    return codes, scale, whole


@pytest.fixture(scope="module")
def fp8(tmp_path_factory):
    """(a folder in the layout of the FP8 release, one with the float weights that it means)."""
    held, meant = dict(tensors()), dict(tensors())
    for key in [key for key in held if ".moe." in key and "_proj" in key]:
        held[key], scale, meant[key] = blocks(held[key])
        held[f"{key}_scale_inv"] = scale
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    root = tmp_path_factory.mktemp("fp8")
    folder = files.write(root / "fp8", {**CONFIG, "quantization_config": quantised, "torch_dtype": "float32"}, held)
    return with_tokenizer(folder), with_tokenizer(files.write(root / "meant", {**CONFIG, "torch_dtype": "float32"}, meant))


def test_the_fp8_release(fp8):
    """Experts alone are packed, in the target alone, and stand for the weights that the codes mean."""
    folder, meant = fp8
    llm = jaxspec.load(folder, "same", **SETTINGS)
    leaves = leaves_by_path(llm.target, whole=(Packed,))
    packed = {path for path, leaf in leaves.items() if is_packed(leaf)}
    assert packed == {f"model.layers.{i}.moe.experts.{name}" for i in (3, 4) for name in ("gate_up_proj", "down_proj")}
    assert {leaves[path].kind for path in packed} == {"fp8"} and not any(
        map(is_packed, leaves_by_path(llm.drafter, whole=(Packed,)).values())
    )
    whole = leaves_by_path(jaxspec.load(meant, **SETTINGS).target)
    for path, leaf in leaves.items():
        np.testing.assert_allclose(unpack(leaf) if path in packed else leaf, whole[path], rtol=1e-6, err_msg=path)
    drafter = drafters.abstract_drafter(folder, llm.target.config, jnp.bfloat16, "int8")  # whose weights are float
    assert drafter.modules[0].shared_head.output.weight.kind == "int8"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": None}, r"weight_block_size None .*; served are blocks of outputs and inputs, such as \[128, 128\]"),
        ({"activation_scheme": "static"}, "activation_scheme 'static' .*; served is 'dynamic'"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'; served is 'dynamic', which is not applied, and 'e4m3'"),
        ({"quant_method": "mxfp8"}, "quant_method 'mxfp8'; served are .*fp8 in blocks"),
    ],
)
def test_other_fp8_is_refused(tmp_path, changes, message):
    quantised = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], **changes}
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantised}))
    with pytest.raises(ValueError, match=message):
        read_target(tmp_path)


def test_quantised_here(folder):
    """Matrices of the layers are packed, but not routers, gates of heads, the head and the embedding. Of these the inputs of experts alone
    are never rounded."""
    config, _ = read_target(folder)
    leaves = leaves_by_path(abstract_target(config, jnp.bfloat16, asked_quantisation(config, jnp.bfloat16, "int8", None)), whole=(Packed,))
    kept = {path.rpartition(".layers.")[2].lstrip("0123456789.") for path, x in leaves.items() if len(x.shape) > 1 and not is_packed(x)}
    assert kept == {"model.embed_tokens.weight", "lm_head.weight", "self_attn.g_proj.weight", "moe.gate.weight"}
    leaves = leaves_by_path(
        abstract_target(config, jnp.bfloat16, asked_quantisation(config, jnp.bfloat16, "fp8", None, "fp8")), whole=(Packed,)
    )
    rounded = {path.rpartition(".layers.")[2].lstrip("0123456789.") for path, x in leaves.items() if is_packed(x) and x.inputs == "fp8"}
    assert rounded == {
        f"{name}.weight"
        for name in (
            *("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"),
            *("share_expert.gate_up_proj", "share_expert.down_proj"),
        )
    }
    with pytest.raises(ValueError, match="quantize_embedding quantises a token embedding that is the head too; this target's head is"):
        jaxspec.load(folder, quantize_embedding="int8", **SETTINGS)


@pytest.mark.slow  # tests/test_convert.py converts Gemma's, the released names are looked at above
def test_conversion(folder, alone, tmp_path):
    """The target and its modules, loaded again, also onto a mesh."""
    made = jaxspec.convert(folder, tmp_path / "made", drafter="same", progress=False)
    assert texts(jaxspec.load(made, made / "drafter", **SETTINGS)) == alone
    assert jaxspec.load(made, made / "drafter", tensor=2, **SETTINGS).generate(PROMPTS[:1], PARAMS)[0].token_ids == alone[0]


def test_the_command_line(folder, capsys):
    cli.main(["info", str(folder), "--drafter", "same", "--plan", "--mesh", "tensor=2"])
    out = capsys.readouterr().out
    assert "3 sliding (window 8), 2 full" in out and "MTPModules, fits" in out and "full        4 heads, 2 KV heads of 8" in out
    assert "sliding     6 heads, 2 KV heads of 8" in out and "4 experts" in out and "2 x model.layers.*.moe.experts.down_proj" in out


def test_a_drafter_in_the_targets_keys_is_unknown_elsewhere(folder, tmp_path):
    """A tensor that neither the target nor the modules have is an error of both."""
    config = checkpoint.read_config(folder)
    files.write(tmp_path, config, {**tensors(), "model.layers.2.self_attn.sinks": np.zeros(4, np.float32)})
    with pytest.raises(ValueError, match="model.layers.2.self_attn.sinks: unknown"):
        jaxspec.load(with_tokenizer(tmp_path), **SETTINGS)


REAL = released.TARGETS["step3p5"]
PARAMETERS, OF_MODULES = 196_956_130_368, 3 * 809_390_336


@functools.cache
def real():
    config = released.target_config("step3p5")
    return abstract_target(config, jnp.bfloat16), released.abstract_drafter("modules", "step3p5", config, jnp.bfloat16)


def test_the_released_model():
    """Its parameters, its layers, and K and V of a token; a position of the modules takes as much as one of a layer."""
    target, drafter = real()
    assert weight_count(target) == PARAMETERS and weight_count(drafter) == OF_MODULES
    config = target.config
    assert config.layer_types.count(FULL) == 12 and len(config.modules) == 3 and {spec.kind for spec in config.modules} == {SLIDING}
    assert [i for i, spec in enumerate(config.layers) if spec.limit] == [43, 44] and config.layers[44].shared_limit == 16
    assert {spec.num_heads for spec in config.layers if spec.kind == SLIDING} == {96}
    assert info.kv_bytes_per_token(config, FULL, 2) == 49_152 and info.kv_bytes_per_token(config, SLIDING, 2) == 135_168
    keys = {part.key: part.shape for path, shape in _shapes(target).items() for part in target.layouts(path, _shapes(target))[0]}
    keys |= {part.key: part.shape for path, shape in _shapes(drafter).items() for part in drafter.layouts(path, _shapes(drafter))[0]}
    assert keys == files.shapes(REAL)


def _shapes(tree):
    return {path: tuple(leaf.shape) for path, leaf in leaves_by_path(tree).items()}


def test_frequencies_of_the_released_model():
    """Reference values of the scaled rotation, of pairs 14, 16 and 20; those past 20 are halved, those below 14 as they were."""
    full, sliding = (released.target_config("step3p5").layers[i] for i in (0, 1))
    plain = 5e6 ** -(np.arange(32) / 32)
    np.testing.assert_allclose(full.frequencies[[14, 16, 20]], [1.0302e-3, 2.83686e-4, 3.28914e-5], rtol=1e-4)
    np.testing.assert_allclose(full.frequencies[:14], plain[:14], rtol=1e-6)
    np.testing.assert_allclose(full.frequencies[21:32], plain[21:] / 2, rtol=1e-6)
    assert not full.frequencies[32:].any() and full.order[:34] == (*range(32), 64, 65)
    np.testing.assert_allclose(sliding.frequencies, 1e4 ** -(np.arange(64) / 64), rtol=1e-6)
    assert sliding.order is None


@pytest.mark.parametrize("tensor", [4, 8])
def test_the_released_model_on_a_mesh(tensor):
    """Experts, heads, gates and vocabularies lie in equal parts; what is whole everywhere is routers and norms."""
    placement = abstract_placement_of(f"tensor={tensor}")
    for tree in real():
        placed = placement.spread(placement.place(tree))
        whole = nbytes([x for x in jax.tree.leaves(placed) if all(axis is None for axis in x.sharding.spec)])
        assert bytes_per_device(placed) == (nbytes(placed) - whole) // tensor + whole and whole < nbytes(placed) / 1000
        assert nbytes(placed) == nbytes(tree)  # no KV head is repeated


def test_the_plan_for_four_devices(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(REAL))
    cli.main(["info", str(tmp_path), "--drafter", "same", "--plan", "--mesh", "tensor=4", "--memory", "141GB", "--max-len", "32768"])
    out = capsys.readouterr().out
    planned = re.search(r"weights +([\d.]+) G(i?)B target, ([\d.]+) ", out)
    unit = 2**30 if planned[2] else 10**9
    assert f"parameters  {PARAMETERS:,}" in out and float(planned[1]) * unit == pytest.approx(PARAMETERS / 2, rel=2e-3)
    slots = [int(line.split()[1]) for line in out.splitlines() if line.split()[:1] == ["32768"] or line.startswith("plan ")]
    assert slots and slots[0] > 30  # sequences of 32 Ki positions, beside weights of 400 GB


def test_a_checkpoint_of_the_released_depth(tmp_path):
    """All 45 layers and the three modules, at a tiny width, with the file's norms one less than in memory."""
    heads = {"num_attention_heads": 8, "num_attention_groups": 4, "head_dim": 8}
    other = {**heads, "attention_type": SLIDING, "num_attention_heads": 12, "true_head_dim": 8}
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 61, "moe_num_experts": 12, "moe_intermediate_size": 8}
    config = {**REAL, **heads, **sizes, "attention_other_setting": other, "share_expert_dim": 8, "sliding_window": 8}
    held = files.random_tensors(config, 3)
    read, _ = read_target(files.write(tmp_path, config, held))
    target = load_target(tmp_path, abstract_target(read, jnp.float32), progress=False)
    modules = drafters.load_drafter(tmp_path, read, jnp.float32, progress=False)
    assert weight_count(target) + weight_count(modules) == sum(x.size for x in held.values())
    np.testing.assert_allclose(target.layers[44].input_layernorm.weight - 1, held["model.layers.44.input_layernorm.weight"], atol=1e-6)
    np.testing.assert_array_equal(target.layers[9].moe.experts.gate_up_proj[:, 1], held["model.layers.9.moe.up_proj.weight"])
    head = modules.modules[2].shared_head
    np.testing.assert_array_equal(head.output.weight, held["model.layers.47.transformer.shared_head.output.weight"])


@pytest.mark.slow  # tests/train/test_tuning.py trains a drafter, tests/train/test_guesses.py has the guesses of modules
def test_modules_are_trained(folder, tmp_path):
    """Fresh modules begin with the target's own head and norm, learn, and are loaded again from what was written."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "texts.npy", rng.integers(5, 40, 600).astype(np.int32))
    run = {"steps": 4, "batch": 4, "length": 20, "every": 4, "dtype": "float32", "peak": 1e-3}
    made = distil(folder, "mtp-modules", data=tmp_path / "texts.npy", out=tmp_path / "out", progress=False, num_draft_tokens=2, **run)
    told = json.loads((made / "config.json").read_text())
    assert told["model_type"] == "step3p5_mtp" and told["num_nextn_predict_layers"] == 3
    losses = [row["loss"] for row in read_metrics(made) if "loss" in row]
    assert losses and np.isfinite(losses).all()
    config, _ = read_target(folder)
    drafter = drafters.load_drafter(made, config, jnp.float32, progress=False)
    head, norm = drafter.modules[0].shared_head.output.weight, drafter.modules[0].shared_head.norm.weight
    np.testing.assert_allclose(head, tensors()["lm_head.weight"], atol=0.03)  # the learning rate, and bfloat16
    np.testing.assert_allclose(norm, 1 + tensors()["model.norm.weight"], atol=0.03)


def test_fresh_draft_models(folder):
    """What training begins with for a target of this family: a smaller one, without experts."""
    config, _ = read_target(folder)
    kind = drafters.KINDS["draft-model"]
    raw = kind.default_config(CONFIG, config)
    made = kind.from_checkpoint(None, raw, config, jnp.float32).bind(config)
    assert made.model.config.num_hidden_layers == 4 and {spec.num_experts for spec in made.model.config.layers} == {0}
    for name in ("dflash", "eagle3"):
        kind = drafters.KINDS[name]
        kind.from_checkpoint(None, kind.default_config(CONFIG, config), config, jnp.float32).bind(config)
