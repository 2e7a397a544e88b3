"""Converted checkpoints: the same weights to the bit on any mesh, nothing finished before its time, and what does not fit is said."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import real_configs
import tensorstore
import tiny

import jaxspec
from jaxspec import checkpoint, cli, converting, drafters, loading, sharding, targets
from jaxspec.checkpoint import fused, onto_devices
from jaxspec.checkpoint.quantisation import Scheme, with_packed
from jaxspec.drafters import dflash, dflash2, dspark, eagle3
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.trees import leaves_by_path

pytestmark = pytest.mark.usefixtures("unoptimised")

INNER = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": tiny.VOCAB,
}
# A drafter of each kind that has a checkpoint of its own, beside the assistant: config, and the keys on which the tree depends.
KINDS = {
    "eagle3": (
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": INNER,
            "draft_vocab_size": 40,
            "eagle_aux_hidden_state_layer_ids": [1, 0],
        },
        ("lm_head.weight", "embed_tokens.weight", "layers.0.self_attn.q_norm.weight"),
    ),
    "dflash": (
        {
            **INNER,
            "architectures": ["DFlashDraftModel"],
            "block_size": 16,
            "num_target_layers": 2,
            "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 1]},
        },
        ("lm_head.weight", "mask_embedding"),
    ),
    "dflash2": (
        {
            "architectures": ["DFlash2DraftModel"],
            "speculators_model_type": "dflash2",
            "transformer_layer_config": INNER,
            "block_size": 8,
            "mask_token_id": 4,
            "aux_hidden_state_layer_ids": [1, 2],
            "conv_kernel_size": 2,
            "conv_group_size": 4,
            "selector_rank": 6,
            "selector_top_k": 5,
        },
        (),
    ),
    "dspark": (
        {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "transformer_layer_config": INNER,
            "block_size": 7,
            "draft_vocab_size": 40,
            "mask_token_id": 4,
            "aux_hidden_state_layer_ids": [1, 2],
            "sample_from_anchor": True,
            "markov_rank": 6,
            "markov_head_type": "rnn",
            "confidence_head_with_markov": True,
        },
        ("lm_head.weight", dspark.CONFIDENCE),
    ),
    "dspark gemma": (
        {
            **tiny.TEXT,
            "architectures": ["Gemma4DSparkModel"],
            "layer_types": ["full_attention"] * 2,
            "hidden_size_per_layer_input": 0,
            "num_target_layers": 2,
            "block_size": 7,
            "mask_token_id": 4,
            "target_layer_ids": [0, 1],
            "markov_rank": 6,
        },
        (),
    ),
}
READERS = {
    "dflash": (dflash, dflash.DFlashConfig),
    "dflash2": (dflash2, dflash2.DFlash2Config),
    "dspark": (dspark, dspark.DSparkConfig),
    "eagle3": (eagle3, eagle3.Eagle3Config),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target and its assistant, as released and converted together, in bfloat16."""
    root = tmp_path_factory.mktemp("models")
    target, assistant = tiny.tiny_target(root / "target"), tiny.tiny_assistant(root / "assistant")
    return target, assistant, jaxspec.convert(target, root / "deep" / "converted", drafter=assistant, progress=False)


def abstract(dtype=jnp.bfloat16) -> gemma4.Gemma4:
    return gemma4.abstract(Gemma4Config.from_hf(tiny.TARGET), dtype)


def assert_same(found, wanted) -> None:
    """Two trees, to the bit, dtypes and static fields included."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


def test_load_takes_a_converted_target_and_drafter(folders):
    target, assistant, converted = folders
    settings = {"max_slots": 1, "max_len": 64, "dtype": "bfloat16", "progress": False}
    released = jaxspec.load(target, assistant, **settings)
    llm = jaxspec.load(converted, converted / "drafter", **settings)
    assert_same((llm.target, llm.drafter), (released.target, released.drafter))
    assert (llm.num_draft_tokens, llm.eos_token_ids, llm.defaults) == (3, released.eos_token_ids, released.defaults)
    assert llm.tokenizer.encode("def f():") == released.tokenizer.encode("def f():")
    assert drafters.resolve("same", converted) == converted / "drafter"
    assert (converted / "chat_template.jinja").read_bytes() == (target / "chat_template.jinja").read_bytes()
    assert not list(converted.parent.glob(".*"))


def test_nothing_is_left_to_fuse_or_cast(folders):
    """What lies on disk has the shapes and dtypes of the trees that load makes, in OCDBT, for Orbax to read without us."""
    target, _, converted = folders
    stored = fused.stored_shapes(converted)
    assert stored == {path: leaf for path, leaf in leaves_by_path(abstract()).items()}
    draft = drafters.abstract_drafter(converted / "drafter", Gemma4Config.from_hf(tiny.TARGET), jnp.bfloat16)
    assert fused.stored_shapes(converted / "drafter") == leaves_by_path(draft)
    assert (converted / "weights" / "manifest.ocdbt").is_file()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        args = ocp.args.PyTreeRestore(restore_args={path: ocp.RestoreArgs(restore_type=np.ndarray) for path in stored})
        found = checkpointer.restore(converted / "weights", args=args)
    wanted = leaves_by_path(loading.load_target(target, abstract(), progress=False))
    for path in wanted:
        np.testing.assert_array_equal(found[path], np.asarray(wanted[path]), err_msg=path)
    assert checkpoint.read_config(converted) == {**checkpoint.read_config(target), "dtype": "bfloat16"}


def test_another_dtype(folders, tmp_path):
    """A conversion in float32 is what a load in float32 gives, and says so; any conversion can be cast as it is loaded."""
    target, _, converted = folders
    wide = jaxspec.convert(target, tmp_path / "wide", dtype="float32", progress=False)
    assert {leaf.dtype for leaf in fused.stored_shapes(wide).values()} == {np.dtype(np.float32)}
    assert targets.read_target(wide)[0].dtype == "float32"
    assert_same(loading.load_target(wide, abstract(jnp.float32), progress=False), loading.load_target(target, abstract(jnp.float32)))
    exact = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), loading.load_target(target, abstract()))
    assert_same(loading.load_target(converted, abstract(jnp.float32), progress=False), exact)
    assert_same(loading.load_target(wide, abstract(), progress=False), loading.load_target(target, abstract()))


def test_what_a_config_does_not_say_is_read_from_the_weights(folders, tmp_path):
    """As transformers does: else float32 would be rounded to bfloat16 without a word. And chat templates with names go along."""
    shutil.copytree(folders[0], source := tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    inner = {key: value for key, value in config.get("text_config", {}).items() if key not in ("dtype", "torch_dtype")}
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    (source / "config.json").write_text(json.dumps(config | ({"text_config": inner} if inner else {})))
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("TOOLS")
    assert targets.read_target(source)[0].dtype == "float32"
    jaxspec.convert(source, to := tmp_path / "converted")
    assert {leaf.dtype for leaf in fused.stored_shapes(to).values()} == {np.dtype(np.float32)}
    assert json.loads((to / "config.json").read_text())["dtype"] == "float32"
    assert (to / "additional_chat_templates" / "tool_use.jinja").read_text() == "TOOLS"


def test_from_one_mesh_to_another(folders, tmp_path):
    target, _, converted = folders
    wanted = loading.load_target(target, abstract())
    four = jaxspec.convert(target, tmp_path / "four", mesh=sharding.mesh(tensor=4), progress=False)
    assert_same(loading.load_target(four, abstract()), wanted)
    for folder, mesh in ((four, sharding.mesh(tensor=2)), (converted, sharding.mesh(data=2, tensor=4))):
        tree = sharding.shard_tree(abstract(), mesh)
        weights = loading.load_target(folder, tree, progress=False)
        assert_same(weights, wanted)
        assert jax.tree.all(jax.tree.map(lambda x, leaf: x.sharding == leaf.sharding, weights, tree))
        embedding, size = weights.embed_tokens.weight, mesh.shape["tensor"]
        assert {shard.data.shape for shard in embedding.addressable_shards} == {(tiny.VOCAB // size, 32)}


@pytest.mark.parametrize("kind", [*KINDS, "modules", "draft"])
def test_every_kind_of_drafter(kind, folders, tmp_path):
    target, source = Gemma4Config.from_hf(tiny.TARGET), tmp_path / "drafter"
    if kind == "draft":
        tiny.tiny_target(source, hidden_size=16)
    elif kind == "modules":
        text = {**tiny.TEXT, "layer_types": [*tiny.TEXT["layer_types"], "sliding_attention", "full_attention"]}
        config = {"model_type": "gemma4_mtp_modules", "num_nextn_predict_layers": 2, "text_config": text}
        source.mkdir()
        (source / "config.json").write_text(json.dumps(config))
        checkpoint.save_weights(source, tiny.random_weights(drafters.abstract_drafter(source, target, jnp.float32), 2), config)
    else:
        module, read = READERS[kind.split()[0]]
        config, keys = KINDS[kind]
        checkpoint.save_weights(source, tiny.random_weights(module.abstract(read.from_hf(config, target, keys), jnp.float32), 2), config)
    converted = jaxspec.convert(folders[0], tmp_path / "converted", drafter=source, progress=False)
    found = drafters.load_drafter(converted / "drafter", target, jnp.bfloat16, progress=False)
    assert_same(found, drafters.load_drafter(source, target, jnp.bfloat16, progress=False))


def test_a_converted_checkpoint_can_be_converted(folders, tmp_path, monkeypatch):
    """And loaded under a relative name, of any characters."""
    again = jaxspec.convert(folders[2], tmp_path / "a gain?#%41", progress=False)
    monkeypatch.chdir(tmp_path)
    assert_same(loading.load_target(checkpoint.resolve(again.name), abstract()), loading.load_target(folders[0], abstract()))
    assert sorted(path.name for path in again.iterdir()) == sorted(path.name for path in folders[2].iterdir() if path.name != "drafter")
    with pytest.raises(ValueError, match="drafter is 'same', but .*gain.* was converted without a drafter"):
        drafters.resolve("same", again)


def test_chunks_fit_meshes():
    """An array that a mesh cuts by heads or experts lies in chunks of one head or expert; widths are left to Orbax."""
    config = Gemma4Config.from_hf(real_configs.TARGETS["26B-A4B"])
    floats = gemma4.abstract(config)
    cut = converting._cut_axes(floats)
    assert cut["layers.0.self_attn.qkv_proj.weight"] == cut["layers.0.experts.down_proj"] == (0,)
    assert cut["layers.0.self_attn.o_proj.weight"] == (1,)
    assert cut["layers.0.mlp.gate_up_proj.weight"] == cut["embed_tokens.weight"] == ()
    packed = converting._cut_axes(with_packed(floats, lambda name: Scheme("int8")))
    for field in ("words", "scale"):
        assert packed[f"layers.0.self_attn.o_proj.weight.{field}"] == (1,) and packed[f"layers.0.experts.gate_up_proj.{field}"] == (0,)
        assert packed[f"layers.0.mlp.gate_up_proj.weight.{field}"] == packed[f"layers.0.mlp.down_proj.weight.{field}"] == ()


def test_large_arrays_are_read_by_rows(folders, tmp_path, monkeypatch, capsys):
    """Where devices have memory of their own the host holds a few rows of a large array at a time, and each part is read once."""
    put, read_array, read = jax.device_put, fused.read_array, list[int]()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "device_put", lambda x, *to: put(np.array(x) if isinstance(x, np.ndarray) else x, *to))
    monkeypatch.setattr(onto_devices, "LARGE_BYTES", 60_000)
    monkeypatch.setattr(onto_devices, "COPIED_BYTES", 20_000)
    monkeypatch.setattr(fused, "STORED_CHUNK_BYTES", 10_000)
    monkeypatch.setattr(fused, "read_array", lambda folder, source: read.append(fused._nbytes(source)) or read_array(folder, source))
    target = folders[0]
    converted = jaxspec.convert(target, tmp_path / "out", mesh=sharding.mesh(tensor=4), progress=False)
    wanted = loading.load_target(target, abstract())
    assert_same(loading.load_target(converted, abstract()), wanted)
    assert "Loading out: 100%" in capsys.readouterr().err
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(wanted))
    assert max(read) <= 60_000 and read.count(20_000 // 64 * 64) == 14 and whole <= sum(read) < 1.1 * whole
    read.clear()
    tree = sharding.shard_tree(abstract(jnp.float32), sharding.mesh(data=2, tensor=4))
    weights = loading.load_target(converted, tree, progress=False)
    assert_same(weights, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), wanted))
    assert jax.tree.all(jax.tree.map(lambda x, leaf: x.sharding == leaf.sharding, weights, tree))
    assert max(read) <= 60_000 and 2 * whole <= sum(read) < 2.2 * whole


def test_the_command_line(folders, tmp_path, capsys):
    target, assistant, converted = folders
    assert cli.main(["convert", str(target), str(tmp_path / "out"), "--drafter", str(assistant), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    for name in ("", "drafter"):
        assert fused.stored_shapes(tmp_path / "out" / name) == fused.stored_shapes(converted / name)
    assert cli.main(["convert", str(target), str(tmp_path / "out")]) == 2
    assert "jaxspec: " in (said := capsys.readouterr().err) and "expected nothing or an empty folder" in said


# Interrupted


def test_a_conversion_keeps_others_out_and_leaves_nothing_when_it_fails(folders, tmp_path, monkeypatch):
    target, assistant, _ = folders
    (tmp_path / "out").mkdir()
    write = fused.save_converted

    def fail(folder, *args):
        if folder.parent.name == "drafter":
            assert (tmp_path / ".out.unfinished" / "jaxspec.json").is_file()
            with pytest.raises(ValueError, match="out is being written by another process"):
                jaxspec.convert(target, tmp_path / "out", progress=False)
            assert (tmp_path / ".out.unfinished" / "jaxspec.json").is_file()
            raise KeyboardInterrupt
        write(folder, *args)

    monkeypatch.setattr(fused, "save_converted", fail)
    with pytest.raises(KeyboardInterrupt):
        jaxspec.convert(target, tmp_path / "out", drafter=assistant, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not list((tmp_path / "out").iterdir())
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        jaxspec.load(tmp_path / "out", progress=False)


KILLED = """
import os, signal, sys
from pathlib import Path
from jaxspec import converting
from jaxspec.checkpoint import fused
save = fused.save_converted
def kill(folder, *args):
    save(folder, *args)
    os.kill(os.getpid(), signal.SIGKILL)
fused.save_converted = kill
converting.convert(sys.argv[1], sys.argv[2], progress=False)
"""


def test_a_conversion_that_is_killed_leaves_nothing_that_looks_finished(folders, tmp_path):
    done = subprocess.run([sys.executable, "-c", KILLED, folders[0], tmp_path / "out"], env=dict(os.environ), check=False)
    assert done.returncode == -signal.SIGKILL
    [left] = tmp_path.iterdir()
    assert left.name == ".out.unfinished" and (left / "weights").is_dir()
    with pytest.raises(FileNotFoundError, match="'.*out' is neither a folder"):
        jaxspec.load(tmp_path / "out", progress=False)
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors nor"):
        jaxspec.load(left, progress=False)
    again = jaxspec.convert(folders[0], tmp_path / "out", progress=False)
    assert list(tmp_path.iterdir()) == [again] and not list(again.glob(".*"))
    assert_same(loading.load_target(again, abstract()), loading.load_target(folders[0], abstract()))
    assert list(tmp_path.iterdir()) == [again]


# What is refused


@pytest.mark.parametrize(("make", "found"), [(Path.touch, "a file"), (Path.mkdir, "a folder with kept.txt")])
def test_a_destination_that_exists(make, found, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(targets, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    out = tmp_path / "out"
    make(out)
    if out.is_dir():
        (out / "kept.txt").touch()
    with pytest.raises(FileExistsError, match=f"out exists: found {found}, expected nothing or an empty folder"):
        jaxspec.convert(folders[0], out, progress=False)


def test_a_destination_within_a_file(folders, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file/more/out cannot be: .*file is a file; expected a folder"):
        jaxspec.convert(folders[0], tmp_path / "file" / "more" / "out", progress=False)


def test_a_link_and_a_mount_point(folders, tmp_path, monkeypatch):
    """A link to an empty folder stays one. A mount point cannot be replaced, which is said before weights are read."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert jaxspec.convert(folders[0], tmp_path / "link", progress=False) == tmp_path / "link"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "jaxspec.json").is_file()
    monkeypatch.setattr(targets, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "mounted")
    with pytest.raises(ValueError, match="mounted is a mount point, which the finished folder could not replace; name a folder in it"):
        jaxspec.convert(folders[0], tmp_path / "mounted", progress=False)
    with pytest.raises(OSError, match="File name too long"):
        jaxspec.convert(folders[0], tmp_path / ("x" * 250), progress=False)
    with pytest.raises(TypeError, match="destination is None of type NoneType, expected a folder"):
        jaxspec.convert(folders[0], None, progress=False)


def test_what_load_refuses(folders, tmp_path, monkeypatch):
    target, assistant, _ = folders
    monkeypatch.setattr(targets, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ValueError, match="it is a drafter, to be given as drafter="):
        jaxspec.convert(assistant, tmp_path / "out")
    with pytest.raises(ValueError, match="made for a target of hidden_size 40, this target has 32"):
        jaxspec.convert(target, tmp_path / "out", drafter=tiny.tiny_assistant(tmp_path / "misfit", backbone_hidden_size=40))
    with pytest.raises(ValueError, match="dtype is 'float16'; available: "):
        jaxspec.convert(target, tmp_path / "out", dtype="float16")
    with pytest.raises(ValueError, match="the drafter 'ngram' is not a checkpoint: it has no weights to convert, and fits every target"):
        jaxspec.convert(target, tmp_path / "out", drafter="ngram")
    bare = Path(shutil.copytree(target, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer.json")))
    with pytest.raises(FileNotFoundError, match=r"bare has no tokenizer\.json: it has .*copy it from there"):
        jaxspec.convert(bare, tmp_path / "out")
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="a conversion runs in one process; found 2"):
        jaxspec.convert(target, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"misfit", "bare"}


@pytest.fixture
def copy(folders, tmp_path):
    return Path(shutil.copytree(folders[2], tmp_path / "copy"))


def refuse(folder: Path, message: str, kind: type[Exception] = ValueError, tree=None) -> None:
    with pytest.raises(kind, match=message):
        loading.load_target(folder, tree or abstract(), progress=False)


def test_another_version(copy):
    for version in (1, 2, None):
        (copy / "jaxspec.json").write_text(json.dumps({"version": version}))
        refuse(copy, rf"jaxspec\.json has version {version}; this jaxspec reads version 3: convert the checkpoint again")
    (copy / "jaxspec.json").write_text("{")
    refuse(copy, r"jaxspec\.json is not JSON")


@pytest.mark.parametrize(
    ("quantised", "message"),
    [
        ({"name": "x"}, "its 'quantised' cannot be read: KeyError"),
        ({"name": "x", "schemes": [{"kind": "int3", "group": 32, "zeros": False, "scale_dtype": "float32"}]}, "it has codes of int3"),
        ({"schemes": [{"kind": "int8", "group": "x", "zeros": False, "scale_dtype": "float32"}]}, "it has groups of 'x' with scales in"),
        ({"schemes": [{"kind": "int8", "group": 32, "zeros": False, "scale_dtype": "x"}]}, "it has groups of 32 with scales in 'x'"),
        ([], "its 'quantised' cannot be read: TypeError"),
    ],
)
def test_what_a_file_says_of_quantised_matrices(quantised, message, copy):
    about = json.loads((copy / "jaxspec.json").read_text())
    (copy / "jaxspec.json").write_text(json.dumps(about | {"quantised": quantised}))
    with pytest.raises(ValueError, match=rf"jaxspec\.json is damaged: .*{message}.*; convert the checkpoint again"):
        targets.read_quantisation(copy)
    (copy / "jaxspec.json").write_text(json.dumps(about | {"quantised": quantised, "version": 4}))
    with pytest.raises(ValueError, match=r"jaxspec\.json has version 4; this jaxspec reads version 3"):
        targets.read_quantisation(copy)
    (copy / "jaxspec.json").write_text(json.dumps(about | {"files": 5}))
    refuse(copy, r"jaxspec\.json is damaged: its 'files' are 5, expected names and sizes; convert the checkpoint again")


def test_missing_pieces(copy):
    [data, *_] = sorted((copy / "weights" / "ocdbt.process_0" / "d").iterdir(), key=lambda path: -path.stat().st_size)
    size = data.stat().st_size
    data.write_bytes(data.read_bytes()[:-1])
    refuse(copy, rf"{data}: found {size - 1} bytes, expected the {size} bytes of jaxspec\.json: convert the checkpoint again")
    data.unlink()
    refuse(copy, rf"{data}: found none, expected the {size} bytes of jaxspec\.json")
    shutil.rmtree(copy / "weights")
    refuse(copy, "found none, expected the")


def test_weights_that_cannot_be_read(copy, monkeypatch):
    def fail(value):
        raise Exception("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(tensorstore, "array", fail)
        refuse(copy, "copy/weights cannot be read: the disk is gone")
    [data] = (copy / "weights" / "d").iterdir()
    data.write_bytes(bytes(data.stat().st_size))
    refuse(copy, "copy/weights cannot be read: DATA_LOSS")


def test_a_checkpoint_of_another_config(copy, monkeypatch):
    monkeypatch.setattr(fused, "read_array", lambda *_: pytest.fail("weights were read"))
    other = gemma4.abstract(Gemma4Config.from_hf({**tiny.TEXT, "intermediate_size": 64, "attention_k_eq_v": False}), jnp.bfloat16)
    with pytest.raises(ValueError) as error:
        loading.load_target(copy, other, progress=False)
    assert str(error.value).splitlines()[:3] == [
        f"the weights in {copy} do not fit the model, 5 problems:",
        "  layers.0.mlp.gate_up_proj.weight: found [2, 48, 32], expected [2, 64, 32]",
        "  layers.0.mlp.down_proj.weight: found [32, 48], expected [32, 64]",
    ]
    deeper = {**tiny.TEXT, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    refuse(
        copy, r"layers\.1\.layer_scalar: unknown, found bfloat16 \[1\]", tree=gemma4.abstract(Gemma4Config.from_hf(deeper), jnp.bfloat16)
    )
    whole = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.int32), abstract())
    refuse(copy, r"norm\.weight: found bfloat16, expected int32", tree=whole)
    more = {"extra": jax.ShapeDtypeStruct((3,), jnp.float32)}
    with pytest.raises(ValueError, match=r"extra: missing, expected \[3\]"):
        checkpoint.load_weights(copy, more)
