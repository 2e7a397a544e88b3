"""Float weights that are quantised as they load: what they become, that they convert, and what is refused."""

import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import quantised_files as files
import tiny
from quick import few_programs
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import checkpoint, cli, drafters, sharding, targets
from jaxspec.checkpoint import from_floats, fused, load, quantisation
from jaxspec.checkpoint.quantisation import Scheme
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.trees import is_packed, leaves_by_path, weights_of
from pallas_kernels.packed import Packed, pack, unpack

KINDS = sorted(from_floats.GROUPS)
SETTINGS = {"max_slots": 1, "max_len": 48, "progress": False}
INT8 = files.compressed("pack-quantized"), files.pack_quantized(8, None)
PROMPT, PARAMS = "def f(x):", jaxspec.SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile(unoptimised):
    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        yield


def floats(tree):
    """The same with every packed matrix as the float matrix that it stands for."""
    return jax.tree.map(lambda w: unpack(w) if is_packed(w) else w, tree, is_leaf=is_packed)


def assert_same_weights(found, wanted):
    found, wanted = leaves_by_path(found), leaves_by_path(wanted)
    assert {path: leaf.dtype for path, leaf in found.items()} == {path: leaf.dtype for path, leaf in wanted.items()}
    for path in wanted:
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(wanted[path]), err_msg=path)


def text(llm):
    (done,) = llm.generate([PROMPT], PARAMS)
    return done.token_ids


@pytest.mark.slow  # below is what is packed; tests/drafters/test_quantised_target.py and test_quantize_embedding.py have texts
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_those_of_the_dequantised_weights(folders, tmp_path, kind):
    """The matrices of the layers are packed, all else is float; a drafter guesses for it."""
    llm = jaxspec.load(*folders, quantize=kind, **SETTINGS)
    target = llm.target
    packed = {path for path, leaf in leaves_by_path(target, whole=(Packed,)).items() if is_packed(leaf)}
    matrices = {path for path, leaf in leaves_by_path(floats(target)).items() if leaf.ndim > 1}
    left = {path for path in matrices if not quantisation.UNPACKED.search(path)} - packed
    assert left == {"embed_tokens.weight", "embed_tokens_per_layer.weight"} and packed < matrices
    attn = target.layers[0].self_attn
    whole = checkpoint.read_headers(folders[0])["model.language_model.layers.0.self_attn.q_proj.weight"].read()
    wanted = np.asarray(unpack(quantised(whole, kind)))
    np.testing.assert_array_equal(np.asarray(unpack(attn.qkv_proj.weight))[:, :2].reshape(wanted.shape), wanted)
    raw = checkpoint.read_config(folders[0])
    checkpoint.save_weights(tmp_path, floats(target), raw, prefix="model.language_model.")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folders[0] / name).read_bytes())
    assert text(llm) == text(jaxspec.load(tmp_path, **SETTINGS))


def quantised(weights, kind):
    """A float matrix by itself, as a Packed."""
    scheme = Scheme(kind, from_floats.GROUPS[kind], scale_dtype="bfloat16")
    return pack(*from_floats.quantise(weights, scheme), kind=kind, group=scheme.group)


@pytest.mark.parametrize("kind", [kind if kind == "int4" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_a_conversion_is_what_a_load_makes(folders, tmp_path, kind):
    """Without work: what lies on disk has the shapes and dtypes of the packed matrices, and the config says how they are quantised."""
    assert cli.main(["convert", str(folders[0]), str(tmp_path / "converted"), "--quantize", kind, "--dtype", "float32"]) == 0
    converted, wanted = tmp_path / "converted", jaxspec.load(folders[0], quantize=kind, **SETTINGS).target
    assert {path: (x.shape, x.dtype) for path, x in fused.stored_shapes(converted).items()} == {
        path: (x.shape, x.dtype) for path, x in leaves_by_path(wanted).items()
    }
    llm = jaxspec.load(converted, **SETTINGS)
    assert_same_weights(llm.target, wanted)
    assert checkpoint.read_config(converted)["quantization_config"]["quant_method"] == "compressed-tensors"
    with pytest.raises(ValueError, match=f"quantize is 'int8', but the weights in .* are quantised already .*{kind}"):
        jaxspec.load(converted, quantize="int8", **SETTINGS)
    again = jaxspec.convert(converted, tmp_path / "again", progress=False)
    assert_same_weights(jaxspec.load(again, **SETTINGS).target, wanted)


@pytest.mark.parametrize(
    ("member", "settings", "write"),
    [
        (
            "26B",
            files.compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
            files.float4(False),
        ),
        ("31B", {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}, files.gptq(4, sym=False)),
        ("E2B", *INT8),
    ],
)
def test_a_quantised_checkpoint_converts(tmp_path, member, settings, write):
    """Also one that only its weights' headers describe, and what it says of a cache of float8."""
    source = written(tmp_path, member, settings, write)
    converted = jaxspec.convert(source, tmp_path / "converted", progress=False)
    assert checkpoint.read_config(converted)["quantization_config"] == settings
    found, wanted = map(loaded, (converted, source))
    assert_same_weights(found, wanted)
    assert found.kv_scales == wanted.kv_scales == ((0, 0.5, 2.0),)
    assert jax.tree.structure(found.layers) == jax.tree.structure(wanted.layers)


def test_a_conversion_with_small_matrices_packed_is_read_as_it_is(tmp_path, monkeypatch):
    """As those have them that were made before small matrices were unpacked."""
    source = written(tmp_path, "E2B", *INT8)
    with monkeypatch.context() as patch:
        for module in (quantisation, load):
            patch.setattr(module, "UNPACKED", re.compile("no such matrix"))
        converted = jaxspec.convert(source, tmp_path / "converted", progress=False)
    found, wanted = map(loaded, (converted, source))
    assert is_packed(found.layers[0].per_layer_projection.weight) and not is_packed(wanted.layers[0].per_layer_projection.weight)
    assert_same_weights(floats(found), floats(wanted))


def written(tmp_path, member, settings, write):
    """A folder of a quantised target of a few layers."""
    config = oracle.text_config(member, hidden_size=64, intermediate_size=96, moe_intermediate_size=32)
    weights = tiny.random_weights(gemma4.abstract(Gemma4Config.from_hf(config), jnp.float32), 0)
    checkpoint.save_weights(tmp_path / "float", weights, config, prefix="model.")
    scales = {"model.layers.0.self_attn.k_proj.k_scale": np.float32(0.5), "model.layers.0.self_attn.v_proj.v_scale": np.float32(2)}
    more = {"names": "index", "more": scales}
    config |= {"quantization_config": settings}
    files.write_folder(tmp_path / "source", config, load_file(tmp_path / "float" / "model.safetensors"), write, **more)
    (tmp_path / "source" / "tokenizer.json").touch()  # without one it would be no target
    return tmp_path / "source"


def loaded(folder):
    config, _ = targets.read_target(folder)
    quantisation = targets.read_quantisation(folder)
    return targets.load_target(folder, targets.abstract_target(config, jnp.bfloat16, quantisation), quantisation, progress=False)


def test_a_config_for_the_cache_alone_leaves_float_weights(folders, tmp_path):
    """As a recipe for the cache alone writes it: weights may be quantised and trained, the cache keeps its scales, and a draft model has
    no use for them."""
    folder = shutil.copytree(folders[0], tmp_path / "target")
    config = checkpoint.read_config(folder)
    cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    settings = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": cache, "ignore": []}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    tensors = load_file(folder / "model.safetensors")
    prefix = next(key for key in tensors if "layers.0.self_attn" in key).partition("self_attn")[0]
    scales = {f"{prefix}self_attn.{name}_scale": np.asarray([value], np.float32) for name, value in (("attn.k", 0.5), ("attn.v", 2))}
    save_file(tensors | scales, folder / "model.safetensors", {"format": "pt"})
    config, _ = targets.read_target(folder)
    for quantize in (None, "int8"):
        quantisation = targets.quantisation_of(folder, config, jnp.float32, quantize)
        found = targets.load_target(folder, targets.abstract_target(config, jnp.float32, quantisation), quantisation, progress=False)
        assert found.kv_scales == ((0, 0.5, 2.0),) and any(map(is_packed, weights_of(found))) == (quantize is not None)
    assert targets.read_quantisation(folder).dense and not quantisation.dense
    for quantize in (None, "int8"):
        guesses = drafters.load_drafter(folder, config, jnp.float32, quantize=quantize, progress=False)
        assert any(map(is_packed, weights_of(guesses))) == (quantize is not None)


@pytest.mark.slow  # tests/sharding/test_packed.py has packed matrices on a mesh
def test_a_conversion_loads_onto_a_mesh(folders, tmp_path):
    converted = jaxspec.convert(folders[0], tmp_path / "converted", dtype="float32", quantize="int4", progress=False)
    mesh = sharding.mesh(tensor=2)
    assert text(jaxspec.load(converted, mesh=mesh, **SETTINGS)) == text(jaxspec.load(folders[0], quantize="int4", mesh=mesh, **SETTINGS))


def test_a_batch_is_not_resumed_with_other_weights(folders, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x"}\n')
    command = ["batch", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--target", str(folders[0]), "--max-len", "16"]
    assert cli.main([*command, "--max-slots", "1"]) == 0
    assert cli.main([*command, "--max-slots", "1", "--quantize", "int8"]) == 2
    assert "was made with quantised None, not 'int8'" in capsys.readouterr().err


def test_scales_have_the_dtype_of_the_checkpoint():
    """So that the numbers are the same in float32, which a CPU computes in."""
    llm = jaxspec.load("pocket", quantize="int8", **SETTINGS)
    packed = [weight for weight in weights_of(llm.target) if is_packed(weight)]
    assert llm.target.dtype == jnp.float32 and {weight.scale.dtype.name for weight in packed} == {"bfloat16"}


def test_what_is_refused(folders, tmp_path, capsys):
    with pytest.raises(ValueError, match="quantize is 'int3'; available: 'int8', 'int4', 'fp8', or None"):
        jaxspec.load("pocket", quantize="int3", **SETTINGS)
    converted = jaxspec.convert(folders[0], tmp_path / "converted", progress=False)
    with pytest.raises(ValueError, match="was converted with float weights; convert the original with quantize"):
        jaxspec.load(converted, quantize="int8", **SETTINGS)
    assert cli.main(["generate", "--target", str(folders[0]), "--prompt", "x", "--quantize", "gguf"]) == 2
    assert "quantize is 'gguf'" in capsys.readouterr().err


def test_info_counts_packed_bytes_and_all_parameters(capsys):
    lines = {}
    for more in ([], ["--quantize", "int4"]):
        assert cli.main(["info", "pocket", "--plan", "--memory", "1GB", "--mesh", "tensor=2", *more]) == 0
        lines[bool(more)] = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line[:1].strip())
    assert lines[True]["parameters"] == lines[False]["parameters"]
    assert lines[True]["weights"] != lines[False]["weights"] and lines[True]["layers"] == lines[False]["layers"]


@pytest.mark.slow
def test_a_bench_of_quantised_weights(folders, tmp_path):
    asked = ["--drafter", "none", "--context", "4", "--tokens", "4", "--repeats", "1", "--dtype", "float32"]
    found = {}
    for kind in (None, "int8"):
        more = ["--quantize", kind] if kind else []
        assert cli.main(["bench", "--config", str(folders[0]), *asked, *more, "--json", str(tmp_path / f"{kind}.json")]) == 0
        found[kind] = json.loads((tmp_path / f"{kind}.json").read_text())
    assert found["int8"]["quantize"] == "int8" and found[None]["quantize"] is None
    assert found["int8"]["decode"][0]["bytes"]["target"] != found[None]["decode"][0]["bytes"]["target"]
