"""Embeddings in int8: what it becomes, beside matrices of any kind, that it converts, where it lies, and what is refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantised_files as files
import tiny
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import cli, sharding
from jaxspec.checkpoint import from_floats
from jaxspec.checkpoint.quantisation import Scheme
from jaxspec.info.describe import describe_mesh, read
from jaxspec.trees import is_packed, leaves_by_path
from pallas_kernels.packed import Packed, pack, unpack

pytestmark = pytest.mark.usefixtures("quick_to_compile")

SETTINGS = {"max_slots": 1, "max_len": 48, "progress": False}
PROMPT, PARAMS = "def f(x):", jaxspec.SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
KEY, PER_LAYER = (f"model.language_model.{name}.weight" for name in ("embed_tokens", "embed_tokens_per_layer"))
TABLES = {"embed_tokens.weight", "embed_tokens_per_layer.weight"}


@pytest.fixture(scope="module")
def llm(folders):
    return jaxspec.load(*folders, quantize_embedding="int8", **SETTINGS)


def text(llm):
    (done,) = llm.generate([PROMPT], PARAMS)
    return done.token_ids


def packed_paths(target):
    return {path for path, leaf in leaves_by_path(target, whole=(Packed,)).items() if is_packed(leaf)}


def copied(folder, to, tensors, config=None):
    """A folder of a target with these weights."""
    to.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        (to / name).write_bytes((folder / name).read_bytes())
    if config is not None:
        (to / "config.json").write_text(json.dumps(config))
    save_file(tensors, to / "model.safetensors")
    return to


@pytest.mark.slow  # tests/drafters/test_quantised_target.py has texts, tests/model/test_embedding.py rows
def test_texts_are_those_of_the_dequantised_embedding(folders, llm, tmp_path):
    """With a drafter, and by the numbers of compressed-tensors; all else stays float."""
    assert packed_paths(llm.target) == TABLES and llm.target.dtype == jnp.float32
    tensors = load_file(folders[0] / "model.safetensors")
    tables = {}
    for key, group in ((KEY, None), (PER_LAYER, 64)):
        scheme = Scheme("int8", group, scale_dtype="bfloat16")
        table = unpack(pack(*from_floats.quantise(tensors[key], scheme), kind="int8", group=group))
        tables[key] = np.asarray(table).astype(tensors[key].dtype)
        np.testing.assert_array_equal(unpack(getattr(llm.target, key.split(".")[-2]).weight), table)
    dequantised = copied(folders[0], tmp_path / "dequantised", tensors | tables)
    assert text(llm) == text(jaxspec.load(dequantised, **SETTINGS))
    assert text(llm) != text(jaxspec.load(folders[0], **SETTINGS))


def test_matrices_may_be_quantised_here_or_in_the_file(folders, tmp_path):
    """A head beside the tied embedding is compared with it and left out."""
    settings = files.compressed("pack-quantized", num_bits=8, strategy="channel")
    tensors = load_file(folders[0] / "model.safetensors")
    copied(folders[0], tmp_path / "int8", {})
    config = {**tiny.TARGET, "quantization_config": settings}
    files.write_folder(tmp_path / "int8", config, tensors, files.pack_quantized(8, None), more={"lm_head.weight": tensors[KEY]})
    here = jaxspec.load(folders[0], quantize="int8", quantize_embedding="int8", **SETTINGS)
    stored = jaxspec.load(tmp_path / "int8", quantize_embedding="int8", **SETTINGS)
    assert packed_paths(here.target) == packed_paths(stored.target) > {*TABLES, "layers.0.mlp.down_proj.weight"}
    assert here.text_settings["quantised"] == "int8 and int8 embedding"
    assert len(text(stored)) == 16


@pytest.mark.parametrize("quantize", [None, "int4"])
def test_a_conversion_is_what_a_load_makes(folders, llm, tmp_path, quantize):
    asked = ["--quantize-embedding", "int8", "--dtype", "float32", *(["--quantize", quantize] if quantize else [])]
    assert cli.main(["convert", str(folders[0]), str(tmp_path / "converted"), *asked]) == 0
    again = jaxspec.convert(tmp_path / "converted", tmp_path / "again", progress=False)
    wanted = jaxspec.load(folders[0], quantize=quantize, quantize_embedding="int8", **SETTINGS).target if quantize else llm.target
    for folder in (tmp_path / "converted", again):
        found = jaxspec.load(folder, **SETTINGS).target
        assert packed_paths(found) == packed_paths(wanted) >= TABLES
        for (path, leaf), other in zip(leaves_by_path(found).items(), leaves_by_path(wanted).values(), strict=True):
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(other), err_msg=path)
    with pytest.raises(ValueError, match="quantize_embedding is 'int8', but the embedding in .* is quantised already; expected None"):
        jaxspec.load(tmp_path / "converted", quantize_embedding="int8", **SETTINGS)


@pytest.mark.slow  # tests/sharding/test_packed.py has packed matrices on a mesh
def test_a_mesh_spreads_it(folders, llm):
    on_mesh = jaxspec.load(*folders, quantize_embedding="int8", mesh=sharding.mesh(tensor=2), **SETTINGS)
    table = on_mesh.target.embed_tokens
    assert table.axis == "tensor" and {x.sharding.shard_shape(x.shape)[0] for x in jax.tree.leaves(table)} == {tiny.VOCAB // 128}
    assert text(on_mesh) == text(llm)


def test_what_is_refused(folders, tmp_path):
    with pytest.raises(ValueError, match="quantize_embedding is 'int4'; available: 'int8', or None"):
        jaxspec.load("pocket", quantize_embedding="int4", **SETTINGS)
    converted = jaxspec.convert(folders[0], tmp_path / "converted", progress=False)
    with pytest.raises(ValueError, match="was converted with a float embedding; convert the original with quantize_embedding"):
        jaxspec.load(converted, quantize_embedding="int8", **SETTINGS)
    config = {**tiny.TARGET, "text_config": {**tiny.TEXT, "vocab_size": 96, "hidden_size_per_layer_input": 0}}
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    assert list(describe_mesh(read(str(tmp_path / "small")), "tensor=2"))
    packed = read(str(tmp_path / "small"), quantize_embedding="int8")
    with pytest.raises(ValueError, match="embedding of 96 tokens is quantised, and its blocks of 64 cannot be spread over 2 devices"):
        list(describe_mesh(packed, "tensor=2"))
    assert list(describe_mesh(packed, "tensor=5"))
    config["text_config"] |= {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 96}  # another table over the vocabulary
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    helps = "expected fewer devices, a float embedding, or a vocabulary padded to a multiple of 128 tokens"
    with pytest.raises(ValueError, match=f"the embedding of 96 tokens is quantised, .*; {helps}"):
        list(describe_mesh(read(str(tmp_path / "small"), quantize_embedding="int8"), "tensor=2"))


@pytest.mark.slow  # tests/test_quantize.py has what `info` says of packed matrices
def test_info_and_bench_count_its_bytes(folders, tmp_path, capsys):
    lines, found = {}, {}
    for more in ([], ["--quantize-embedding", "int8"]):
        assert cli.main(["info", "pocket", "--plan", "--memory", "1GB", "--mesh", "tensor=2", *more]) == 0
        lines[bool(more)] = capsys.readouterr().out.splitlines()
        asked = ["--drafter", "none", "--context", "4", "--tokens", "4", "--repeats", "1", "--dtype", "float32"]
        assert cli.main(["bench", "--config", str(folders[0]), *asked, *more, "--json", str(tmp_path / "json")]) == 0
        found[bool(more)] = json.loads((tmp_path / "json").read_text())
        capsys.readouterr()
    before, after = (dict(line.split(maxsplit=1) for line in lines[more] if line[:1].strip()) for more in (False, True))
    assert before["parameters"] == after["parameters"] and after["quantised"] == "int8 embedding"
    assert before["weights"] != after["weights"] and any("in int8 and bfloat16" in line for line in lines[True])
    assert found[True]["quantize_embedding"] == "int8"
    table = tiny.VOCAB * tiny.TEXT["hidden_size"]
    packed = tiny.VOCAB * 64 + 2 * tiny.VOCAB  # 64 inputs of a block, and scales
    # The head is read whole, and of the per-layer embeddings a row.
    rows = (4 - 1) * tiny.TEXT["num_hidden_layers"] * tiny.TEXT["hidden_size_per_layer_input"]
    less = found[False]["decode"][0]["bytes"]["target"] - found[True]["decode"][0]["bytes"]["target"]
    assert 4 * table - packed <= less <= 4 * table - packed + rows
