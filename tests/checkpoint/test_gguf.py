"""GGUF files, written by llama.cpp's library: every type of tensor, every member of the family, and the engine on one."""

import functools
import json
import os
import pwd
import shutil
import stat
import struct
from pathlib import Path

import gguf as library
import gguf_files as files
import huggingface_hub
import numpy as np
import oracle
import pytest
import quantised_files
import real_configs
import small_tokenizers
import transformers
from quantised_files import unpacked
from safetensors.numpy import load_file, save_file

import jaxspec.vllm
from jaxspec import SamplingParams, checkpoint, cli, comparing
from jaxspec.checkpoint import gguf
from jaxspec.checkpoint.gguf import blocks, gemma4
from jaxspec.checkpoint.gguf.file import Contents
from jaxspec.checkpoint.hub import Hub
from jaxspec.checks import cache_folder
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.trees import leaves_by_path
from pallas_kernels.packed import Packed

pytestmark = pytest.mark.usefixtures("quick_to_compile")
# Rows of the K types have a multiple of 256 weights.
WIDTHS = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 32, "global_head_dim": 64, "num_attention_heads": 4, "vocab_size": 500}
MORE = {
    "E2B": {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 500},
    "26B": {"moe_intermediate_size": 32},
    "31B": {"num_attention_heads": 8},
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "gguf-cache"))


@functools.cache
def tokenizer_folder():
    return small_tokenizers.save(small_tokenizers.byte_fallback(), oracle._temporary() / "gguf-tokenizer")


def config_of(member):
    return oracle.text_config(member, **{**WIDTHS, **MORE.get(member, {})})


@functools.cache
def original(member):
    folder = oracle._temporary() / f"gguf-{member}"
    oracle.build(config_of(member)).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def write(file, member="31B", type_of=lambda key: "Q4_0", **more):
    file.parent.mkdir(parents=True, exist_ok=True)
    return files.write(file, config_of(member), original(member), type_of, tokenizer_of=tokenizer_folder(), **more)


def load(name, **asked):
    return quantised_files.load(checkpoint.resolve(name), **asked)


def rounded(kind, data, shape):
    """What a tensor in blocks means here where it stays packed: its groups' numbers in float16, and so the weights."""
    made = blocks.BY_NAME[kind]
    codes, scale, least = made.numbers(data.reshape(-1, made.nbytes))
    wide = [None if x is None else x.astype(np.float16).astype(np.float64)[..., None] for x in (scale, least)]
    values = codes.reshape(*scale.shape, -1) * wide[0] + (0 if wide[1] is None else wide[1])
    return values.astype(np.float16).astype(np.float32).reshape(shape)


def means(held, member, floats=()):
    """By key, what a file's tensors mean."""
    return {
        key: files.meant(kind, data)
        if kind in files.PLAIN[:3] or any(name in key for name in floats)
        else rounded(kind, data, original(member)[key].shape)
        for key, (kind, data) in held.items()
    }


def plain(folder, member, tensors):
    folder.mkdir()
    save_file({key: np.ascontiguousarray(value.astype(np.float32)) for key, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config_of(member)))
    return load(folder)


def assert_same(found, wanted):
    found, wanted = leaves_by_path(unpacked(found)), leaves_by_path(wanted)
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[path]), np.asarray(value), err_msg=path)


def kinds(tree):
    return {
        path: (leaf.kind, leaf.groups, leaf.affine)
        for path, leaf in leaves_by_path(tree, whole=(Packed,)).items()
        if isinstance(leaf, Packed)
    }


@pytest.mark.parametrize("kind", [*files.PLAIN[3:], *files.RANDOM])
def test_blocks_mean_what_the_library_says(kind, tmp_path):
    shape = (6, 5, 512)
    value = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    data = files.coded(kind, value)
    (tmp_path / "blocks").write_bytes(b"before" + data.tobytes())
    made = blocks.stored(tmp_path / "blocks", blocks.BY_NAME[kind], shape, 6)
    floats, wanted = blocks.Floats.of(made), files.meant(kind, data)
    np.testing.assert_array_equal(floats.read(), wanted)
    np.testing.assert_array_equal(floats.rows((30, 512), 4, 9).read(), wanted.reshape(30, 512)[4:9])
    np.testing.assert_array_equal(floats.rows((6, 5, 512), 1, 2).read(np.empty((5, 512), np.float32)), wanted[1])
    with pytest.raises(ValueError, match="rows 1 .. 1 of .* are not made of blocks"):
        floats.rows((30 * 512,), 1, 2)
    # Packed, a weight differs from it by the rounding of a scale, a least number and itself to 11 bits.
    packed = rounded(kind, data, shape)
    assert np.abs(packed - wanted).max() <= 2**-11 * 3 * np.abs(wanted).max()
    if kind in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "Q4_1", "Q5_1"):  # whose numbers have 16 bits in the file
        np.testing.assert_array_equal(packed, wanted.astype(np.float16).astype(np.float32))


def q4_k_m(key):
    """A mixture as llama-quantize makes it, with rows that K types do not divide in types of 32."""
    if "v_proj" in key or "embed_tokens.weight" in key:
        return "Q6_K"
    if "o_proj" in key or "experts.down" in key or "per_layer_projection.weight" in key:
        return "Q5_0"
    return "Q5_K" if "down_proj" in key or "per_layer_model" in key else "Q8_0" if "per_layer" in key else "Q4_K"


@pytest.mark.parametrize(
    ("member", "type_of"),
    [("31B", lambda key: "Q4_0"), ("26B", q4_k_m), ("E2B", q4_k_m), ("12B", lambda key: "Q3_K" if "mlp" in key else "IQ4_NL")],
    ids=["31B", "26B", "E2B", "12B"],
)
def test_every_member(member, type_of, tmp_path):
    held = write(tmp_path / "model.gguf", member, type_of)
    found = load(tmp_path / "model.gguf")
    assert_same(found, plain(tmp_path / "plain", member, means(held, member)))
    same = {"model_type": "gemma4_text", "eos_token_id": [1, 5], "use_bidirectional_attention": None}  # images alone need the last
    assert found.config == Gemma4Config.from_hf(config_of(member) | same)


def test_matrices_of_one_leaf_share_the_wider_scheme(tmp_path):
    choice = {
        "q_proj": "Q4_0",
        "k_proj": "Q2_K",
        "v_proj": "Q6_K",
        "gate_proj": "Q4_1",
        "up_proj": "Q4_0",
        "down_proj": "Q3_K",
        "o_proj": "Q8_0",
    }
    type_of = lambda key: next((kind for name, kind in choice.items() if name in key), "BF16")  # noqa: E731
    held = write(tmp_path / "a.gguf", "31B", type_of)
    found = load(tmp_path / "a.gguf")
    assert_same(found, plain(tmp_path / "plain", "31B", means(held, "31B")))
    sliding, full = "layers.0.self_attn.qkv_proj.weight", "layers.2.self_attn.qkv_proj.weight"
    assert kinds(found)[sliding] == ("int8", 4, True) and kinds(found)[full] == ("int4", 4, True)
    assert kinds(found)["layers.0.mlp.gate_up_proj.weight"] == ("int4", 2, True)
    assert kinds(found)["layers.0.mlp.down_proj.weight"] == ("int4", 4, False)
    assert kinds(found)["layers.0.self_attn.o_proj.weight"] == ("int8", 2, False)


def test_a_leaf_with_a_float_matrix_is_float(tmp_path):
    held = write(tmp_path / "a.gguf", "31B", lambda key: "F16" if "k_proj" in key else "Q8_0")
    found = load(tmp_path / "a.gguf")
    assert_same(found, plain(tmp_path / "plain", "31B", means(held, "31B", ("q_proj", "v_proj"))))
    assert not any("qkv" in path for path in kinds(found)) and any("gate_up" in path for path in kinds(found))


def test_a_file_of_floats(tmp_path):
    held = write(tmp_path / "a.gguf", "E2B", lambda key: "BF16")
    assert_same(load(tmp_path / "a.gguf"), plain(tmp_path / "plain", "E2B", means(held, "E2B")))
    assert kinds(load(tmp_path / "a.gguf", quantize="int8", quantize_embedding="int8"))["embed_tokens.weight"][0] == "int8"


def test_a_quantised_embedding_stays_as_it_is(tmp_path):
    held = write(tmp_path / "a.gguf", "31B", lambda key: "Q6_K" if "embed" in key else "Q8_0")
    found = load(tmp_path / "a.gguf")
    assert_same(found, plain(tmp_path / "plain", "31B", means(held, "31B")))
    assert kinds(found)["embed_tokens.weight"] == ("int8", 4, False) and found.head[0] is found.embed_tokens.weight
    with pytest.raises(ValueError, match="the embedding in .* is quantised already"):
        load(tmp_path / "a.gguf", quantize_embedding="int8")
    with pytest.raises(ValueError, match=r"quantised already \(GGUF of Q8_0 and Q6_K\)"):
        load(tmp_path / "a.gguf", quantize="int4")


def test_a_float_embedding_may_be_quantised(tmp_path):
    write(tmp_path / "a.gguf", "31B", lambda key: "F16" if "embed" in key else "Q8_0")
    assert "embed_tokens.weight" not in kinds(load(tmp_path / "a.gguf"))
    found = kinds(load(tmp_path / "a.gguf", quantize_embedding="int8"))
    assert found["embed_tokens.weight"] == ("int8", None, False) and found["layers.0.mlp.down_proj.weight"] == ("int8", 2, False)


def test_a_head_that_is_the_embedding_written_twice(tmp_path):
    for name, scale in (("same", 1), ("other", 2)):
        tensors = original("31B") | {"lm_head.weight": scale * original("31B")["model.embed_tokens.weight"]}
        (tmp_path / name).mkdir()
        files.write(tmp_path / name / "a.gguf", config_of("31B"), tensors, lambda key: "Q8_0", tokenizer_of=tokenizer_folder())
    assert "embed_tokens.weight" not in kinds(load(tmp_path / "same" / "a.gguf"))
    with pytest.raises(ValueError, match="lm_head.weight: differs from model.embed_tokens.weight"):
        load(tmp_path / "other" / "a.gguf")


def test_a_model_in_parts(tmp_path):
    held = write(tmp_path / "m.gguf", "31B", split_max_tensors=30)
    parts = sorted(path.name for path in tmp_path.glob("*.gguf"))
    assert len(parts) > 2 and parts[0] == f"m-00001-of-{len(parts):05}.gguf"
    found = load(tmp_path / parts[0])
    assert_same(found, plain(tmp_path / "plain", "31B", means(held, "31B")))
    assert checkpoint.resolve(tmp_path).name.startswith("m-")
    (tmp_path / parts[1]).unlink()
    with pytest.raises(FileNotFoundError, match=f"is one of {len(parts)} parts of a model; {parts[1]} must lie beside it"):
        load(tmp_path / parts[0])


@pytest.mark.parametrize("name", real_configs.TARGETS)
def test_the_config_of_a_release(name):
    config = real_configs.TARGETS[name]
    text = config["text_config"]
    writer = library.GGUFWriter(None, "gemma4")
    files.metadata(writer, text)
    values = {key: value.value for part in writer.kv_data for key, value in part.items()}
    values["tokenizer.ggml.eos_token_id"] = 106

    class Factors:
        shape = (256,)

        def read(self):
            return np.asarray([1.0] * 64 + [1e30] * 192, np.float32)

    class Table:
        shape = (text["vocab_size"], text["hidden_size"])

    with_values = {
        f"blk.{i}.attn_v.weight": Table()
        for i in range(text["num_hidden_layers"])
        if not text.get("attention_k_eq_v") or text["layer_types"][i] == "sliding_attention"
    }
    tensors = {"rope_freqs.weight": Factors(), "token_embd.weight": Table(), **with_values}
    made = gemma4.config_of("release.gguf", Contents(values, tensors))
    found, wanted = Gemma4Config.from_hf(made), Gemma4Config.from_hf(config)
    same = {
        "eos_token_id": (106,),
        "bos_token_id": None,
        "pad_token_id": None,
        "use_bidirectional_attention": None,
        "initializer_range": 0.02,
    }
    assert wanted.layers == found.layers
    for field in wanted.__dataclass_fields__:
        assert getattr(found, field) == same.get(field, getattr(wanted, field)), field


def test_the_tokenizer(tmp_path):
    from jaxspec.text import load_tokenizer

    write(
        tmp_path / "a.gguf",
        change=lambda writer: writer.add_chat_template("{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"),
    )
    folder = checkpoint.resolve(tmp_path / "a.gguf")
    found, wanted = load_tokenizer(folder), load_tokenizer(tokenizer_folder())
    for text in [*small_tokenizers.CORPUS, "<bos>a<|turn>user\n  b<turn|>", "\u0000 zażółć", " leading", "tail  "]:
        ids = found.encode(text)
        assert ids == wanted.encode(text) and ids[0] == 2
        assert found.decode(ids) == wanted.decode(ids) and found.decode(ids, special=True) == wanted.decode(ids, special=True)
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (2, 1, 0)
    assert checkpoint.read_generation_config(folder)["eos_token_id"] == [1, 5]
    assert found.transformers.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "<bos>x"


def test_how_a_file_says_it_samples(tmp_path):
    def change(writer):
        writer.add_float32("general.sampling.temp", 1.0)
        writer.add_float32("general.sampling.top_p", 0.95)
        writer.add_int32("general.sampling.top_k", 64)
        writer.add_array("tokenizer.ggml.suppress_tokens", [7, 9])

    write(tmp_path / "a.gguf", change=change)
    found = checkpoint.read_generation_config(checkpoint.resolve(tmp_path / "a.gguf"))
    assert found == {"eos_token_id": [1, 5], "do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 64, "suppress_tokens": [7, 9]}


def test_a_folder_with_a_config_and_a_tokenizer_of_its_own(tmp_path):
    held = write(tmp_path / "own" / "a.gguf")
    (tmp_path / "own" / "config.json").write_text(json.dumps(config_of("31B")))
    shutil.copytree(tokenizer_folder(), tmp_path / "own", dirs_exist_ok=True)
    (tmp_path / "own" / "mmproj-F16.gguf").touch()
    assert checkpoint.resolve(tmp_path / "own") == tmp_path / "own"
    assert_same(load(tmp_path / "own"), plain(tmp_path / "plain", "31B", means(held, "31B")))
    first = checkpoint.fingerprint(tmp_path / "own")
    write(tmp_path / "own" / "a.gguf", type_of=lambda key: "Q5_0")
    assert first != checkpoint.fingerprint(tmp_path / "own")


def test_the_folder_is_made_once_for_a_file(tmp_path):
    write(tmp_path / "a.gguf")
    folder = checkpoint.resolve(tmp_path / "a.gguf")
    (folder / "mark").touch()
    assert checkpoint.resolve(tmp_path) == folder == checkpoint.resolve(str(tmp_path / "a.gguf")) and (folder / "mark").exists()
    write(tmp_path / "a.gguf", "12B")
    again = checkpoint.resolve(tmp_path / "a.gguf")
    assert again != folder and checkpoint.read_config(again)["num_hidden_layers"] == config_of("12B")["num_hidden_layers"]


def test_a_folder_that_was_emptied_is_made_again(tmp_path):
    write(tmp_path / "a.gguf")
    folder = checkpoint.resolve(tmp_path / "a.gguf")
    shutil.rmtree(folder)
    folder.mkdir()
    assert checkpoint.resolve(tmp_path / "a.gguf") == folder and (folder / "config.json").exists()
    (folder / "config.json").unlink()
    other = checkpoint.resolve(tmp_path / "a.gguf")
    assert other != folder and (other / "config.json").exists()


def test_a_user_without_a_home_folder(tmp_path, monkeypatch):
    """As some containers have; what is kept may be read by its owner alone, and so lies in no folder that users share."""
    for name in ("JAXSPEC_CACHE_DIR", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    write(tmp_path / "a.gguf")
    folder = checkpoint.resolve(tmp_path / "a.gguf")
    assert folder == checkpoint.resolve(tmp_path / "a.gguf") and cache_folder() in folder.parents
    assert stat.S_IMODE(cache_folder().stat().st_mode) == 0o700


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    held = write(tmp_path / "a.gguf")
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXSPEC_CACHE_DIR", str(tmp_path / "file"))
    folder = checkpoint.resolve(tmp_path / "a.gguf")
    assert folder == checkpoint.resolve(tmp_path / "a.gguf") and (folder / "a.gguf").resolve() == tmp_path / "a.gguf"
    assert_same(load(tmp_path / "a.gguf"), plain(tmp_path / "plain", "31B", means(held, "31B")))


@pytest.mark.parametrize("refuses", ["links", "room"])
def test_a_cache_that_does_not_take_all(refuses, tmp_path, monkeypatch):
    """Such as a drive without links, and a full one."""
    write(tmp_path / "a.gguf")
    cache = checkpoint.resolve(tmp_path / "a.gguf").parent
    shutil.rmtree(cache)
    link, save = os.symlink, transformers.GemmaTokenizer.save_pretrained

    def refused(call, to, error):
        if cache in Path(to).parents:
            raise error
        return call()

    if refuses == "links":
        monkeypatch.setattr(os, "symlink", lambda a, to: refused(lambda: link(a, to), to, OSError("no links here")))
    else:
        full = Exception("No space left on device (os error 28)")  # as the tokenizers' Rust says it
        monkeypatch.setattr(transformers.GemmaTokenizer, "save_pretrained", lambda self, to: refused(lambda: save(self, to), to, full))
    folder = checkpoint.resolve(tmp_path / "a.gguf")
    assert cache not in folder.parents and (folder / "a.gguf").resolve() == tmp_path / "a.gguf" and not any(cache.iterdir())


def test_others_may_read_the_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE_DIR", str(tmp_path / "cache"))
    write(tmp_path / "a.gguf")
    before = os.umask(0o022)
    try:
        assert stat.S_IMODE(checkpoint.resolve(tmp_path / "a.gguf").stat().st_mode) == 0o755
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["0a1b2c", "a.GGUF", "a-imatrix-Q4_0.gguf", "a" * 250])
def test_a_file_of_any_name(name, tmp_path):
    """The files in a hub's cache have names without an end."""
    held = write(tmp_path / name)
    assert_same(load(tmp_path / name), plain(tmp_path / "plain", "31B", means(held, "31B")))


def test_a_folder_with_what_is_no_file(tmp_path):
    (tmp_path / "a.gguf").mkdir()
    assert checkpoint.resolve(tmp_path) == tmp_path
    (tmp_path / "b.gguf").symlink_to(tmp_path / "gone.gguf")
    with pytest.raises(FileNotFoundError, match=r"b\.gguf is a link to .*gone\.gguf, which is not there"):
        checkpoint.resolve(tmp_path)


def damaged(name, tmp_path):
    file = tmp_path / "a.gguf"
    write(file)
    data = file.read_bytes()
    changes = {
        "empty": lambda: b"",
        "pointer": lambda: b"version https://git-lfs",
        "short": lambda: data[: len(data) - 1000],
        "header": lambda: data[:500],
        "nested": lambda: data[:24] + struct.pack("<QcI", 1, b"x", 9) + struct.pack("<IQ", 9, 1) * 5000,
        "axes": lambda: data.replace(b"rope_freqs.weight\x01", b"rope_freqs.weight\xff"),
        "version": lambda: data[:4] + (1).to_bytes(4, "little") + data[8:],
        "order": lambda: data[:4] + (3).to_bytes(4, "big") + data[8:],
        "type": lambda: data.replace(
            b"blk.0.ffn_down.weight\x02\0\0\0" + (256).to_bytes(8, "little") * 2 + (2).to_bytes(4, "little"),
            b"blk.0.ffn_down.weight\x02\0\0\0" + (256).to_bytes(8, "little") * 2 + (16).to_bytes(4, "little"),
        ),
        "architecture": lambda: data.replace(
            b"general.architecture\x08\0\0\0\x06\0\0\0\0\0\0\0gemma4", b"general.architecture\x08\0\0\0\x06\0\0\0\0\0\0\0step35"
        ),
    }
    file.write_bytes(changes[name]())
    return file


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("empty", "is no GGUF file: it is empty"),
        ("pointer", "is no GGUF file: it begins with b'vers', expected b'GGUF'; it is a Git LFS pointer"),
        ("short", "is truncated or damaged: it ends at byte"),
        ("header", "is truncated or damaged: "),
        ("nested", "is truncated or damaged: maximum recursion depth"),
        ("axes", "is truncated or damaged: rope_freqs.weight has 255 axes; expected at most 4"),
        ("version", "is a GGUF of version 1; expected 2 or 3"),
        ("order", r"is a GGUF of version 50331648 \(its bytes are in another order\)"),
        ("type", "holds blk.0.ffn_down.weight in the type IQ2_XXS; served are F32, F16, Q4_0"),
        ("architecture", "is a GGUF of the architecture 'step35'; served is 'gemma4'"),
    ],
)
def test_what_is_refused(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(damaged(name, tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", None, "has gemma4.block_count None; expected a whole number"),
        ("attention.sliding_window_pattern", 6, "has gemma4.attention.sliding_window_pattern .*; expected a flag for each of 6 layers"),
        ("feed_forward_length", [256, 512, 256, 256, 256, 256], "expected one width, twice as wide in layers that share K and V"),
        ("attention.head_count_kv", [4, 2, 2, 4, 4, 2], "expected one value for all layers of sliding_attention"),
        ("rope.freq_base", "x", "has gemma4.rope.freq_base 'x'; expected a number"),
        ("attention.key_length", 48, "self_attn.q_proj.weight: found"),
    ],
)
def test_metadata_that_cannot_be(key, value, message, tmp_path):
    def change(writer):
        writer.kv_data[0].pop(f"gemma4.{key}")
        if value is not None:
            kind = library.GGUFValueType.get_type(value)
            sub_type = library.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
            writer.add_key_value(f"gemma4.{key}", value, kind, sub_type)

    write(tmp_path / "a.gguf", change=change)
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "a.gguf")


def test_missing_and_unknown_tensors_are_named(tmp_path, monkeypatch):
    write(tmp_path / "a.gguf", change=lambda writer: writer.add_tensor("blk.0.other.weight", np.ones(4, np.float32)))
    with pytest.raises(ValueError, match=r"blk.0.other.weight: unknown, found F32 \[4\]"):
        load(tmp_path / "a.gguf")
    add = library.GGUFWriter.add_tensor

    def without_queries(self, name, *more, **how):
        return name == "blk.0.attn_q.weight" or add(self, name, *more, **how)

    monkeypatch.setattr(library.GGUFWriter, "add_tensor", without_queries)
    write(tmp_path / "a.gguf")
    with pytest.raises(ValueError, match=r"1 problem:\n  model.layers.0.self_attn.q_proj.weight: missing"):
        load(tmp_path / "a.gguf")


@pytest.mark.parametrize("local", [False, True, None])  # None: no hub answers
def test_a_file_of_the_hub(local, tmp_path, monkeypatch):
    held = write(tmp_path / "hub" / "Q4" / "e-Q4_0.gguf")
    (tmp_path / "hub" / "e-Q8_0.gguf").touch()
    fetched = []

    def download(name, *, allow_patterns, ignore_patterns, **settings):
        fetched.append((name, allow_patterns, ignore_patterns, settings))
        return str(tmp_path / "hub")

    def files_there(self, name, revision):
        if local is None:
            raise OSError("no network")
        return ["e-Q8_0.gguf", "Q4/e-Q4_0.gguf"]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", files_there)
    hub = Hub(local_files_only=bool(local))
    folder = checkpoint.resolve("unsloth/e-GGUF@v1:q4_0", hub)
    more = {"local_files_only": True} if local else {}
    assert fetched[-1] == ("unsloth/e-GGUF", ["Q4/e-Q4_0.gguf"], [], {"revision": "v1", **more})
    assert_same(load(folder), plain(tmp_path / "plain", "31B", means(held, "31B")))
    with pytest.raises(ValueError, match="'unsloth/e-GGUF' holds 2 GGUF models"):
        checkpoint.resolve("unsloth/e-GGUF", hub)


def test_the_engine_runs_on_a_file(tmp_path):
    held = write(tmp_path / "a.gguf", "31B", q4_k_m)
    plain(tmp_path / "plain", "31B", means(held, "31B"))
    shutil.copytree(tokenizer_folder(), tmp_path / "plain", dirs_exist_ok=True)
    prompts, params = [[2, 40, 77, 300], [2, 9]], SamplingParams(max_tokens=24, temperature=1.0, seed=3, ignore_eos=True)
    settings = dict(dtype="float32", max_slots=2, max_len=128)
    packed, floats = jaxspec.load(tmp_path / "a.gguf", "ngram", **settings), jaxspec.load(tmp_path / "plain", **settings)
    texts = [[answer.token_ids for answer in llm.generate(prompts, params)] for llm in (packed, floats)]
    assert texts[0] == texts[1] and all(len(set(ids)) > 8 for ids in texts[0])
    assert packed.text_settings["quantised"] == "int4 and int8 and int8 embedding"


def test_another_tokenizer(tmp_path):
    write(tmp_path / "a.gguf", change=lambda writer: files.replace(writer, writer.add_add_bos_token, False))
    settings = dict(dtype="float32", max_slots=1, max_len=64)
    own, other = (jaxspec.load(tmp_path / "a.gguf", tokenizer=name, **settings).tokenizer for name in (None, tokenizer_folder()))
    assert other.encode("fox") == [2, *own.encode("fox")]  # this one adds a bos
    with pytest.raises(TypeError, match="tokenizer is 5 of type int, expected a hub id, a folder, a bundled name or None"):
        jaxspec.load("pocket", tokenizer=5)
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json"):
        jaxspec.load("pocket", tokenizer=tmp_path, **settings)


def test_as_a_script_for_vllm_names_it(tmp_path):
    write(tmp_path / "a.gguf")
    given = dict(load_format="gguf", quantization="gguf", max_num_seqs=1, max_model_len=64, dtype="float32")
    with pytest.warns(UserWarning, match="accepted but without effect here: load_format"):
        llm = jaxspec.vllm.LLM(str(tmp_path / "a.gguf"), tokenizer=str(tokenizer_folder()), **given)
    assert llm.get_tokenizer().name_or_path == str(tokenizer_folder())
    with pytest.raises(ValueError, match="quantization is 'awq', but the weights of .* are quantised as GGUF of Q4_0"):
        jaxspec.vllm.LLM(str(tmp_path / "a.gguf"), **given | {"quantization": "awq"})


def test_what_else_takes_a_file(tmp_path, capsys):
    write(tmp_path / "a.gguf", type_of=q4_k_m)
    assert cli.main(["info", str(tmp_path / "a.gguf"), "--plan", "--memory", "1GB"]) == 0
    assert "GGUF of" in capsys.readouterr().out
    jaxspec.convert(tmp_path / "a.gguf", tmp_path / "converted", dtype="float32")
    assert_same(load(tmp_path / "converted"), unpacked(load(tmp_path / "a.gguf")))
    with pytest.raises(ValueError, match="holds a GGUF file, which transformers does not read as it is"):
        comparing.reference_class(checkpoint.resolve(tmp_path / "a.gguf"))
    with pytest.raises(ValueError, match="has no image tower"):
        jaxspec.load(tmp_path / "a.gguf", images=True)


def test_a_variant_names_a_file():
    names = [
        "g-Q4_K_M.gguf",
        "g-Q4_K_S.gguf",
        "UD/g-UD-Q4_K_XL-00001-of-00002.gguf",
        "UD/g-UD-Q4_K_XL-00002-of-00002.gguf",
        "mmproj-F16.gguf",
        "x.txt",
    ]
    assert gguf.chosen(names, None) == ["UD/g-UD-Q4_K_XL-00001-of-00002.gguf", "g-Q4_K_M.gguf", "g-Q4_K_S.gguf"]
    assert gguf.chosen(names, "q4_k_m") == ["g-Q4_K_M.gguf"] and gguf.chosen(names, "Q4_K_XL") == [names[2]]
    assert gguf.chosen(names, "Q4_K") == gguf.chosen(names, None) and gguf.chosen(names, "Q8_0") == []
    assert gguf.chosen(["gemma-4-31B_q4_0-it.gguf"], "Q4_0") == ["gemma-4-31B_q4_0-it.gguf"]
    assert gguf.names_of_parts(names[3]) == names[2:4]
