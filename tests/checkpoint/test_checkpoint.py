"""Checkpoints: every layout of a released file loads, what is written reads back, and what does not fit is said before work starts."""

import json
import re
import shutil
from pathlib import Path

import adapters
import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
import torch
import transformers
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from jaxspec import checkpoint
from jaxspec.checkpoint import hub, jobs, onto_devices, safetensors
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import AssistantConfig, Gemma4Config

INDEX = "model.safetensors.index.json"


def stored(member: str) -> dict[str, np.ndarray]:
    """The tensors that transformers saved, by key."""
    return load_file(oracle.target(member)[1] / "model.safetensors")


def abstract(member: str, dtype=jnp.float32) -> gemma4.Gemma4:
    return gemma4.abstract(Gemma4Config.from_hf(oracle.text_config(member)), dtype)


def load(folder: Path, tree):
    return checkpoint.load_weights(folder, tree, prefixes=gemma4.CHECKPOINT_PREFIXES, skip=gemma4.TOWERS, progress=False)


def put(folder: Path, tensors: dict[str, np.ndarray], name: str = "model.safetensors") -> Path:
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / name, metadata={"format": "pt"})
    return folder


def shard(folder: Path, tensors: dict[str, np.ndarray], files: int = 3) -> dict[str, str]:
    """Deals tensors to several files in turn, so that most fused matrices come from more than one. Returns the index."""
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    weight_map = {key: names[i % files] for i, key in enumerate(sorted(tensors))}
    for name in names:
        put(folder, {key: tensors[key] for key in tensors if weight_map[key] == name}, name)
    return index(folder, weight_map)


def index(folder: Path, weight_map) -> dict[str, str]:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def assert_same(found, wanted) -> None:
    """Two trees, to the bit."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


def plain(member: str):
    return load(oracle.target(member)[1], abstract(member))


# What loads


@pytest.mark.parametrize("member", ["E2B", "26B"])
def test_what_is_written_is_what_was_read(member: str, tmp_path: Path) -> None:
    """Key for key and bit for bit what transformers wrote, and the same model again when transformers reads it."""
    checkpoint.save_weights(tmp_path, plain(member), oracle.text_config(member), prefix="model.")
    written = load_file(tmp_path / "model.safetensors")
    original = stored(member)
    assert written.keys() == original.keys()
    for key, value in original.items():
        np.testing.assert_array_equal(written[key], value, err_msg=key)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["config.json", "model.safetensors"]
    model = transformers.Gemma4ForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = np.arange(20)[None]
    np.testing.assert_array_equal(oracle.run(model, ids)[0], oracle.run(oracle.target(member)[0], ids)[0])


def test_assistant_round_trip(tmp_path: Path) -> None:
    config = oracle.assistant_config(
        oracle.text_config("E2B", vocab_size=128), use_ordered_embeddings=True, num_centroids=8, centroid_intermediate_top_k=2
    )
    model = oracle.build(config)
    model.save_pretrained(tmp_path / "theirs")
    original = load_file(tmp_path / "theirs" / "model.safetensors")
    assert original["masked_embedding.token_ordering"].dtype == np.int64
    tree = gemma4_mtp.abstract(AssistantConfig.from_hf(config), jnp.float32)
    weights = checkpoint.load_weights(tmp_path / "theirs", tree, progress=False)
    assert weights.masked_embedding.token_ordering.dtype == jnp.int32
    assert sorted(weights.masked_embedding.token_ordering.tolist()) == list(range(128))
    checkpoint.save_weights(tmp_path / "ours", weights, config)
    written = load_file(tmp_path / "ours" / "model.safetensors")
    assert written.keys() == original.keys()
    for key, value in original.items():
        assert written[key].dtype == value.dtype
        np.testing.assert_array_equal(written[key], value, err_msg=key)


@pytest.mark.parametrize(
    "towers", [("vision_tower.patch.weight", "audio_tower.x", "embed_audio.y"), ("vision_embedder.patch_dense.weight",)]
)
def test_conditional_generation_layout(towers: tuple[str, ...], tmp_path: Path) -> None:
    tensors = {key.replace("model.", "model.language_model.", 1): value for key, value in stored("12B").items()}
    tensors |= {f"model.{name}": np.zeros((2, 2), np.float32) for name in (*towers, "embed_vision.embedding_projection.weight")}
    assert_same(load(put(tmp_path, tensors), abstract("12B")), plain("12B"))


@pytest.mark.parametrize("kind", ["whole", "text", "text of the whole"])
def test_a_model_that_was_saved_without_its_head(kind: str, tmp_path: Path) -> None:
    """transformers' Gemma4Model and Gemma4TextModel: the head is the embedding, so nothing is missing."""
    model = adapters.text_model("31B") if kind == "text" else adapters.whole_model("31B")
    inner = {"whole": lambda: model.model, "text": lambda: model.model, "text of the whole": lambda: model.model.language_model}[kind]()
    model.save_pretrained(tmp_path / "model")
    inner.save_pretrained(tmp_path / "headless")
    headless = load_file(tmp_path / "headless" / "model.safetensors")
    assert not any(key.startswith("model.") for key in headless) and any("vision_tower." in key for key in headless) == (kind == "whole")
    assert_same(load(tmp_path / "headless", abstract("31B")), load(tmp_path / "model", abstract("31B")))


def test_sharded(tmp_path: Path) -> None:
    shard(tmp_path, stored("E4B"))
    assert_same(load(tmp_path, abstract("E4B")), plain("E4B"))


def test_a_hub_cache_links_to_its_blobs(tmp_path: Path) -> None:
    folder, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for name in set(shard(folder, stored("E4B")).values()):
        shutil.move(folder / name, blobs / name)
        (folder / name).symlink_to(Path("../../blobs") / name)
    assert_same(load(folder, abstract("E4B")), plain("E4B"))


def test_dead_weights_of_shared_layers(tmp_path: Path) -> None:
    """Original releases keep K and V weights where layers share KV; later saves do not. Layers 4 to 6 of 7 share."""
    tensors = stored("E2B")
    for i in (4, 5, 6):
        tensors |= {f"model.layers.{i}.self_attn.{name}.weight": np.full((8, 32), np.nan, np.float32) for name in ("k_proj", "v_proj")}
        tensors[f"model.layers.{i}.self_attn.k_norm.weight"] = np.full(8, np.nan, np.float32)
    assert_same(load(put(tmp_path, tensors), abstract("E2B")), plain("E2B"))


def test_an_assistant_with_keys_of_its_own(tmp_path: Path) -> None:
    """It would be loaded without them and read the target's, of which it knows nothing."""
    config = oracle.assistant_config(oracle.text_config("12B"))
    oracle.build(config).save_pretrained(tmp_path)
    key = "model.layers.0.self_attn.k_proj.weight"
    put(tmp_path, {**load_file(tmp_path / "model.safetensors"), key: np.zeros((8, 16), np.float32)})
    with pytest.raises(ValueError, match=re.escape(f"{key}: unknown, found F32 [8, 16]")):
        checkpoint.load_weights(tmp_path, gemma4_mtp.abstract(AssistantConfig.from_hf(config), jnp.float32), progress=False)


def test_experts_one_by_one(tmp_path: Path) -> None:
    tensors = {}
    for key, value in stored("26B").items():
        stem = key.rpartition(".")[0]
        if key.endswith("experts.gate_up_proj"):
            for e, gate_up in enumerate(value):
                tensors[f"{stem}.{e}.gate_proj.weight"], tensors[f"{stem}.{e}.up_proj.weight"] = np.split(gate_up, 2)
        elif key.endswith("experts.down_proj"):
            tensors |= {f"{stem}.{e}.down_proj.weight": down for e, down in enumerate(value)}
        else:
            tensors[key] = value
    assert_same(load(put(tmp_path, tensors), abstract("26B")), plain("26B"))


def test_lm_head_that_is_the_embedding(tmp_path: Path) -> None:
    tensors = stored("12B")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    assert_same(load(put(tmp_path, tensors), abstract("12B")), plain("12B"))


def test_lm_head_in_place_of_the_embedding(tmp_path: Path) -> None:
    """Of two names of one tensor, safetensors' save_model keeps the first."""
    from safetensors.torch import save_model

    save_model(oracle.target("12B")[0], str(tmp_path / "model.safetensors"))
    assert "model.embed_tokens.weight" not in load_file(tmp_path / "model.safetensors")
    assert_same(load(tmp_path, abstract("12B")), plain("12B"))


def test_casts_to_the_dtype_of_the_tree(tmp_path: Path) -> None:
    """float32 to bfloat16 rounds to nearest; bfloat16 to float32 is exact."""
    narrow = load(oracle.target("31B")[1], abstract("31B", jnp.bfloat16))
    wide = stored("31B")["model.norm.weight"]
    np.testing.assert_array_equal(np.asarray(narrow.norm.weight), wide.astype(ml_dtypes.bfloat16))
    checkpoint.save_weights(tmp_path, plain("31B"), oracle.text_config("31B"), prefix="model.", dtype=jnp.bfloat16)
    assert load_file(tmp_path / "model.safetensors")["model.norm.weight"].dtype == ml_dtypes.bfloat16
    assert_same(load(tmp_path, abstract("31B")), jax.tree.map(lambda x: x.astype(jnp.float32), narrow))


def test_goes_to_the_sharding_of_the_tree() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:2]).reshape(1, 2), ("data", "tensor"))

    def place(leaf):
        spec = PartitionSpec("tensor") if leaf.shape[0] % 2 == 0 else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    tree = jax.tree.map(place, abstract("31B"))
    weights = load(oracle.target("31B")[1], tree)
    assert_same(weights, plain("31B"))
    assert jax.tree.all(jax.tree.map(lambda x, leaf: x.sharding == leaf.sharding, weights, tree))
    halves = {shard.data.shape for shard in weights.layers[0].self_attn.qkv_proj.weight.addressable_shards}
    assert halves == {(2, 4, 8, 32)}


def test_the_host_holds_no_more_leaves_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is room for one, a leaf is on its device before the next one is read: at most q, k and v are read in between."""
    events = []
    read, place = safetensors.Stored.read, onto_devices.put_on_devices
    monkeypatch.setattr(jobs, "HELD_BYTES", 1)
    monkeypatch.setattr(safetensors.Stored, "read", lambda *args: events.append("r") or read(*args))
    monkeypatch.setattr(onto_devices, "put_on_devices", lambda *args: events.append("p") or place(*args))
    plain("E2B")
    assert set("".join(events).split("p")) == {"r", "rr", "rrr", ""}


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        (None, jnp.bfloat16),
        (PartitionSpec(), jnp.float32),
        (PartitionSpec("tensor"), jnp.bfloat16),
        (PartitionSpec(None, "tensor"), jnp.float32),
        (PartitionSpec("data", None, "tensor"), jnp.bfloat16),
    ],
)
def test_a_large_tensor_goes_to_its_devices_by_chunks(
    spec: PartitionSpec | None, dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the sharding, five rows of it at a time, and each row of a device's range once but for those of its last chunk."""
    value = np.random.default_rng(0).standard_normal((96, 6)).astype(ml_dtypes.bfloat16)
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "tensor"))
    leaf = jax.ShapeDtypeStruct((12, 4, 2, 6), dtype, sharding=None if spec is None else NamedSharding(mesh, spec))
    tree = {"small": jax.ShapeDtypeStruct((3,), jnp.float32), "self_attn": {"q_proj": {"weight": leaf}}}
    put(tmp_path, {"small": np.ones(3, np.float32), "self_attn.q_proj.weight": value})
    sizes, read = [], safetensors.Stored.read
    monkeypatch.setattr(onto_devices, "LARGE_BYTES", 100)
    monkeypatch.setattr(onto_devices, "COPIED_BYTES", 5 * 96)
    monkeypatch.setattr(safetensors.Stored, "read", lambda self, into: sizes.append(self.nbytes) or read(self, into))
    found = checkpoint.load_weights(tmp_path, tree)["self_attn"]["q_proj"]["weight"]
    np.testing.assert_array_equal(np.asarray(found), value.astype(dtype).reshape(leaf.shape))
    halves = spec is not None and len(spec) > 0 and spec[0] is not None
    assert sorted(sizes) == [12, *[480] * (4 if halves else 3)]
    assert "100%" in (shown := capsys.readouterr().err) and "1.16k/1.16k" in shown
    if spec is None:
        assert not found.committed and found.devices() == {jax.devices()[0]}
    else:
        assert found.sharding == leaf.sharding


def test_integers_of_a_large_tensor_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onto_devices, "LARGE_BYTES", 10)
    put(tmp_path, {"ids": np.asarray([0, 7, -1])})
    with pytest.raises(ValueError, match=r"ids of .* has values -1 \.\. 7, which do not fit int32"):
        checkpoint.load_weights(tmp_path, {"ids": jax.ShapeDtypeStruct((3,), jnp.int32)}, progress=False)


def test_progress_counts_bytes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = oracle.target("E2B")[1]
    plain("E2B")
    assert capsys.readouterr().err == ""
    checkpoint.load_weights(folder, abstract("E2B"), prefixes=("model.",))
    shown = capsys.readouterr().err
    size = sum(value.nbytes for value in stored("E2B").values())
    assert f"Loading {folder.name}" in shown and "100%" in shown and f"{size / 1000:.0f}k" in shown


# What does not


def refuse(folder: Path, tree, message: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind, match=message):
        load(folder, tree)


def test_all_that_does_not_fit_is_listed_before_anything_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = stored("E2B")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.norm.weight"] = np.zeros(31, np.float32)
    tensors["model.layers.0.self_attn.k_proj.weight"] = tensors["model.layers.0.self_attn.k_proj.weight"].T
    tensors["model.layers.0.layer_scalar"] = np.zeros(1, np.int64)
    tensors["model.layers.2.self_attn.sinks"] = np.zeros(4, np.float32)
    monkeypatch.setattr(safetensors.Stored, "read", lambda *args: pytest.fail("read a tensor"))
    with pytest.raises(ValueError) as error:
        load(put(tmp_path, tensors), abstract("E2B"))
    assert str(error.value).splitlines() == [
        f"the weights in {tmp_path} do not fit the model, 5 problems:",
        "  model.layers.0.self_attn.k_proj.weight: found [32, 8], expected [8, 32]",
        "  model.layers.0.layer_scalar: found I64, expected one of F64, F32, F16, BF16",
        "  model.layers.1.mlp.up_proj.weight: missing, expected [48, 32]",
        "  model.norm.weight: found [31], expected [32]",
        "  model.layers.2.self_attn.sinks: unknown, found F32 [4]",
    ]


def test_a_long_list_of_problems_is_cut(tmp_path: Path) -> None:
    """It shows what is missing and what is there in its place, as where a wrapper's name stands before each key."""
    put(tmp_path, {f"outer.{i:03}.weight": np.zeros(3, np.float32) for i in range(30)})
    with pytest.raises(ValueError, match=r"\d+ problems:") as error:
        load(tmp_path, abstract("E2B"))
    lines = str(error.value).splitlines()
    assert len(lines) == 22
    assert re.fullmatch(r"  \.\.\. \d+ more", lines[11])
    assert lines[1].startswith("  model.embed_tokens.weight: missing")
    assert lines[-1].startswith("  outer.029.weight: unknown, found F32")


@pytest.mark.parametrize("outer", ["_orig_mod.", "module.", "module._orig_mod.", "base_model.model.", "language_model."])
@pytest.mark.parametrize("member", ["E2B", "12B"])
def test_names_of_modules_around_the_model_are_left_out(member: str, outer: str, tmp_path: Path) -> None:
    tensors = stored(member)
    head = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    found = load(put(tmp_path, {outer + key: tensor for key, tensor in (tensors | head).items()}), abstract(member))
    assert_same(found, load(oracle.target(member)[1], abstract(member)))


def test_names_of_compiled_layers_are_those_of_the_layers(tmp_path: Path) -> None:
    """As where torch.compile wrapped one layer after the other."""
    compiled = {re.sub(r"(layers\.[02]\.)", r"\1_orig_mod.", key): tensor for key, tensor in stored("E2B").items()}
    assert_same(load(put(tmp_path, compiled), abstract("E2B")), load(oracle.target("E2B")[1], abstract("E2B")))


def test_an_adapter_that_was_not_merged_is_told(tmp_path: Path) -> None:
    tensors = {key.replace("q_proj.weight", "q_proj.base_layer.weight"): tensor for key, tensor in stored("12B").items()}
    tensors["model.layers.0.self_attn.q_proj.lora_A.default.weight"] = np.zeros((2, 32), np.float32)
    refuse(put(tmp_path, tensors), abstract("12B"), r"adapter that PEFT has put around its layers \(.*merge_and_unload\(\) before")


def test_values_of_a_layer_whose_values_are_its_keys(tmp_path: Path) -> None:
    """A v_proj where the config says K = V means that one of the two is wrong."""
    tensors = stored("12B") | {"model.layers.3.self_attn.v_proj.weight": np.zeros((16, 32), np.float32)}
    refuse(put(tmp_path, tensors), abstract("12B"), r"layers\.3\.self_attn\.v_proj\.weight: unknown")


def test_lm_head_that_is_not_the_embedding(tmp_path: Path) -> None:
    tensors = stored("12B")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(1)
    refuse(put(tmp_path, tensors), abstract("12B"), r"lm_head\.weight: differs from model\.embed_tokens\.weight; expected none")
    tensors["lm_head.weight"] = np.zeros((3, 32), np.float32)
    refuse(put(tmp_path, tensors), abstract("12B"), r"lm_head\.weight: differs")


def test_lm_head_of_the_same_numbers_in_another_dtype(tmp_path: Path) -> None:
    tensors = stored("12B")
    table = tensors["model.embed_tokens.weight"].astype(np.float16)
    tensors |= {"model.embed_tokens.weight": table, "lm_head.weight": table.astype(np.float32)}
    load(put(tmp_path, tensors), abstract("12B"))
    tensors["lm_head.weight"][-1, -1] += 1e-4
    refuse(put(tmp_path, tensors), abstract("12B"), r"lm_head\.weight: differs from model\.embed_tokens\.weight")


@pytest.mark.parametrize("name", ["weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale"])
def test_quantised_by_name(name: str, tmp_path: Path) -> None:
    tensors = stored("12B") | {f"model.layers.0.mlp.up_proj.{name}": np.zeros((48, 4), np.float32)}
    refuse(
        put(tmp_path, tensors),
        abstract("12B"),
        rf"quantised weights \(model\.layers\.0\.mlp\.up_proj\.{name}\), and no config there says how",
    )


@pytest.mark.parametrize(("dtype", "name"), [(np.uint8, "U8"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")])
def test_quantised_by_dtype(dtype, name: str, tmp_path: Path) -> None:
    tensors = stored("12B")
    key = "model.layers.0.mlp.up_proj.weight"
    tensors[key] = tensors[key].astype(dtype)
    refuse(put(tmp_path, tensors), abstract("12B"), f"up_proj.weight: found {name}, expected one of F64, F32, F16, BF16")


def test_integers_that_do_not_fit(tmp_path: Path) -> None:
    put(tmp_path, {"token_ordering": np.asarray([0, 2**31])})
    with pytest.raises(ValueError, match=r"token_ordering of .* has values 0 \.\. 2147483648, which do not fit int32"):
        checkpoint.load_weights(tmp_path, {"token_ordering": jax.ShapeDtypeStruct((2,), jnp.int32)}, progress=False)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated(keep: int, tmp_path: Path) -> None:
    data = (oracle.target("12B")[1] / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:keep])
    refuse(tmp_path, abstract("12B"), rf"model\.safetensors is truncated or .*: found {len(data[:keep])} bytes, expected (at least )?\d+")


def test_truncated_while_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensor = safetensors.read_header(put(tmp_path, {"a": np.zeros(4, np.float32)}) / file.name)["a"]
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="ended while it was read: found 13 bytes of a tensor of 16"):
        tensor.read()


def test_git_lfs_pointer(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456789\n")
    refuse(tmp_path, abstract("12B"), "a Git LFS pointer: fetch the file itself")


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]}}',
        b'{"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "b": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b"[" * 100_000,
    ],
    ids=lambda header: header[:90].decode(),
)
def test_damaged_header(header: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    refuse(tmp_path, abstract("12B"), "has an invalid safetensors header: ")


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    refuse(tmp_path, abstract("12B"), r"has neither model\.safetensors nor .*; found \['notes\.txt'\]", FileNotFoundError)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused_with_the_way_to_convert(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    (tmp_path / "optimizer.pt").touch()  # a trainer's
    refuse(tmp_path, abstract("12B"), rf"{name} is a pickle.*expected safetensors.*torch\.load\('{name}', weights_only=True\)")
    with pytest.raises(ValueError, match=f"{name} is a pickle"):
        checkpoint.resolve(tmp_path / name)


def test_a_pickle_converts_as_the_error_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedding and head share their memory in it, which safetensors refuses."""
    torch.save(oracle.target("12B")[0].state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError) as error:
        load(tmp_path, abstract("12B"))
    monkeypatch.chdir(tmp_path)
    exec(str(error.value).split('python -c "')[1].removesuffix('"'), {})
    assert_same(load(tmp_path, abstract("12B")), plain("12B"))


def test_parts_in_pickles_convert_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = list(oracle.target("12B")[0].state_dict().items())
    for n in range(2):
        torch.save(dict(pairs[n::2]), tmp_path / f"pytorch_model-0000{n + 1}-of-00002.bin")
    torch.save({}, tmp_path / "random_states_0.pkl")
    with pytest.raises(ValueError, match="^pytorch_model-00001-of-00002.bin is a pickle") as error:
        load(tmp_path, abstract("12B"))
    monkeypatch.chdir(tmp_path)
    exec(str(error.value).split('python -c "')[1].removesuffix('"'), {})
    assert_same(load(tmp_path, abstract("12B")), plain("12B"))


def test_what_a_trainer_leaves_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("optimizer.pt", "rng_state_0.pth", "scheduler.pt", "training_args.bin", "random_states_0.pkl", "sampler.bin"):
        (tmp_path / name).touch()
    refuse(tmp_path, abstract("12B"), r"has neither model\.safetensors nor ", FileNotFoundError)
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    refuse(tmp_path, abstract("12B"), r"\(`accelerate merge-weights` merges", FileNotFoundError)
    (tmp_path / "zero_to_fp32.py").touch()
    refuse(tmp_path, abstract("12B"), r"\(DeepSpeed's zero_to_fp32.py there merges", FileNotFoundError)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/model.safetensors", "a/../../model.safetensors"])
def test_an_index_stays_in_its_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    put(tmp_path, stored("12B"))
    index(folder, {key: name for key in stored("12B")})
    refuse(folder, abstract("12B"), f"names '{name}', which is outside its folder")


def test_links_to_parts_are_followed(tmp_path: Path) -> None:
    """As of somebody who tries another config with the same weights."""
    for folder in (original := tmp_path / "original", linked := tmp_path / "linked"):
        folder.mkdir()
    shard(original, stored("12B"), files=2)
    for file in original.iterdir():
        (linked / file.name).symlink_to(file)
    assert_same(load(linked, abstract("12B")), plain("12B"))


@pytest.mark.parametrize("name", ["", ".", "a\0b"], ids=["nothing", "dot", "zero"])
def test_an_index_names_files(name: str, tmp_path: Path) -> None:
    index(tmp_path, {key: name for key in stored("12B")})
    refuse(tmp_path, abstract("12B"), "index.json names the file '.*'; expected a file in its folder")


def test_an_index_says_which_files_there_are_and_these_what_is_in_them(tmp_path: Path) -> None:
    """Tools that drop, add or move a tensor leave the index as it was."""
    weight_map = shard(tmp_path, stored("12B"), files=2)
    key = "model.norm.weight"
    missing = tmp_path / weight_map[key]
    other = next(name for name in weight_map.values() if name != missing.name)
    for changed in ({k: v for k, v in weight_map.items() if k != key}, weight_map | {"extra": other}, weight_map | {key: other}):
        index(tmp_path, changed)
        assert_same(load(tmp_path, abstract("12B")), plain("12B"))
    index(tmp_path, weight_map | {"extra": "extra.safetensors"})
    for copied in (True, False):
        put(tmp_path, {key: stored("12B")[key] + (0 if copied else 1)}, "extra.safetensors")
        if copied:
            assert_same(load(tmp_path, abstract("12B")), plain("12B"))
    refuse(tmp_path, abstract("12B"), rf"{key}: in extra.safetensors and, with other numbers, in {missing.name}")
    index(tmp_path, weight_map)
    missing.unlink()
    refuse(tmp_path, abstract("12B"), f"has no {missing.name}", FileNotFoundError)
    index(tmp_path, ["a"])
    refuse(tmp_path, abstract("12B"), "has no weight_map of tensor to file name")


# Names and configs


def test_resolve_a_folder_and_a_bundled_name(tmp_path: Path) -> None:
    assert checkpoint.resolve(tmp_path) == tmp_path
    assert checkpoint.resolve(str(tmp_path)) == tmp_path
    target = checkpoint.resolve("pocket")
    assert target == Path(checkpoint.__file__).parents[1] / "pocket" / "target"
    assert (target / "tokenizer.json").is_file()


def test_resolve_a_folder_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert checkpoint.resolve("~/model") == tmp_path / "model"
    with pytest.raises(FileNotFoundError, match="'~nobody-of-that-name/model' is neither a folder"):
        checkpoint.resolve("~nobody-of-that-name/model")


def test_resolve_other_bundled_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of the package's pocket that holds a config is a model."""
    for name in ("target", "mtp"):
        (tmp_path / "pocket" / name).mkdir(parents=True)
        (tmp_path / "pocket" / name / "config.json").touch()
    (tmp_path / "pocket" / "notes").mkdir()
    monkeypatch.setattr(hub, "__file__", str(tmp_path / "checkpoint" / "hub.py"))
    assert checkpoint.resolve("pocket-mtp") == tmp_path / "pocket" / "mtp"
    with pytest.raises(FileNotFoundError, match=r"'pocket-notes' is neither .* nor bundled \(pocket, pocket-mtp\)"):
        checkpoint.resolve("pocket-notes")


def test_resolve_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo_id: str, **settings) -> str:
        asked.append((repo_id, settings))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "config.json").touch()
    assert checkpoint.resolve("google/gemma-4-E2B-it") == tmp_path
    [(repo_id, settings)] = asked
    files = ["config.json", "model-00001-of-00002.safetensors", "chat_template.jinja", "tokenizer.json", "pytorch_model.bin", "a/x.json"]
    wanted = list(huggingface_hub.utils.filter_repo_objects(files, **settings))
    assert (repo_id, wanted) == ("google/gemma-4-E2B-it", files[:4])


def test_resolve_an_id_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, as the tests are, the real call fails by itself."""
    with pytest.raises(FileNotFoundError, match="'nobody/no-such-model' is not in the hub's cache, .*HF_HUB_OFFLINE is set"):
        checkpoint.resolve("nobody/no-such-model")


@pytest.mark.parametrize("name", ["", "no-such-model", "./no-such-folder", "/no/such/folder", "a/b/c"])
def test_resolve_nothing(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=rf"'{name}' is neither a folder, nor a hub id \(owner/name\), nor bundled"):
        checkpoint.resolve(name)


def test_resolve_a_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match="is a file; expected the folder that holds it"):
        checkpoint.resolve(tmp_path / "model.safetensors")


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """What safetensors raises is no OSError, and neither names the file."""
    (tmp_path / ".model.safetensors.unfinished").mkdir()
    with pytest.raises(IsADirectoryError, match=r"/model\.safetensors cannot be written: Is a directory$"):
        checkpoint.save_weights(tmp_path, {"weight": np.zeros(4, np.float32)}, {})
    (tmp_path / ".config.json.unfinished").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"/config\.json cannot be written: No space left on device$"):
        checkpoint.save_weights(tmp_path, {"weight": np.zeros(4, np.float32)}, {})


def test_configs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        checkpoint.read_config(tmp_path)
    assert checkpoint.read_generation_config(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"model_type": "gemma4"}')
    (tmp_path / "generation_config.json").write_text('{"top_k": 64}')
    assert checkpoint.read_config(tmp_path) == {"model_type": "gemma4"}
    assert checkpoint.read_generation_config(tmp_path) == {"top_k": 64}
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        checkpoint.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="holds a list; expected an object"):
        checkpoint.read_config(tmp_path)
