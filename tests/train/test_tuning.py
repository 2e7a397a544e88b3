"""Training from files to a folder that `load` takes; a drafter that its target left behind catches up."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
import tiny
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import checkpoint, cli
from jaxspec.drafters import NoDraft
from jaxspec.drafters.registry import save_trained
from jaxspec.engine import memory
from jaxspec.learning.losses import Batch
from jaxspec.text import load_tokenizer
from jaxspec.train import distil, finetune, tuning
from jaxspec.train.data import batch_of, read
from jaxspec.train.generate import beginnings
from jaxspec.train.loop import alone, read_metrics

SOURCE = Path(jaxspec.__file__)
LICENSE = SOURCE.parents[1] / "LICENSE"
pytestmark = pytest.mark.usefixtures("unoptimised")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.tiny_target(tmp_path_factory.mktemp("target"), hidden_size_per_layer_input=0)


@pytest.fixture(scope="module")
def trained(target, tmp_path_factory):
    """(folder, command) of an assistant that the command line trained for the tiny target"""
    out = tmp_path_factory.mktemp("mtp") / "drafter"
    command = ["train", "--target", str(target), "--drafter-kind", "mtp", "--data", str(SOURCE), "--held-out", str(SOURCE)]
    command += [
        "--init",
        str(tiny.tiny_assistant(tmp_path_factory.mktemp("init"), vocab_size_per_layer_input=0)),
        "--out",
        str(out),
        "--self-generate",
        "3",
        "--k",
        "2",
    ]
    command += "--steps 4 --every 2 --batch 2 --length 24 --anchors 6 --unroll 2 --tv 0.5 --dtype float32".split()
    assert cli.main(command) == 0
    return out, command


def test_the_command_writes_a_drafter_that_load_takes(target, trained, capsys):
    out, command = trained
    rows = read_metrics(out)
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert {"loss", "acceptance_length", "held_out_loss", "held_out_acceptance_length", "measured_acceptance_length"} <= set(rows[-1])
    settings = json.loads((out / "settings.json").read_text())
    assert settings["objective"] == {"steps": 2, "anchors": 6, "decay": 0.9, "soft": 1.0, "hard": 1.0, "tv": 0.5, "confidence": 1.0}
    assert (out / "curves.png").exists() and sorted(p.name for p in (out / "checkpoints").iterdir()) == ["2", "4"]
    own = dict(np.load(out / "self_generated.npz"))
    assert own["ids"].shape == (3, 24) and (own["first"] >= 3).all() and (own["length"] > own["first"]).all()

    changed = (out / "model.safetensors").read_bytes()
    assert changed != (Path(command[command.index("--init") + 1]) / "model.safetensors").read_bytes()
    llm = jaxspec.load(target, out, num_draft_tokens=2, max_slots=1, max_len=64, progress=False)
    assert type(llm.drafter).__name__ == "Gemma4MTP"
    # A run that has ended is resumed to the same result. Of texts that were all but written when it was killed, only the rest is.
    np.savez(out / "self_generated.npz", asked=own["asked"], **{name: own[name][:2] for name in ("ids", "first", "length")})
    assert cli.main([*command, "--resume"]) == 0
    again = np.load(out / "self_generated.npz")
    assert all(np.array_equal(again[name], own[name]) for name in own)
    printed = capsys.readouterr()
    lengths = [row["measured_acceptance_length"] for row in rows]
    assert printed.out == f"{out}\n" and printed.err.endswith(f"tokens a step {lengths[0]:.2f} -> {lengths[-1]:.2f}, on held-out texts\n")
    assert (out / "model.safetensors").read_bytes() == changed and read_metrics(out) == rows


@pytest.mark.slow  # test_loop.py trains over four
def test_a_run_over_two_devices_trains_on_the_texts_of_one(trained, tmp_path, monkeypatch):
    """Of which there are more than are written at a time, so that the second's admission finds the state as the first left it."""
    monkeypatch.setattr(tuning, "AUTO_SLOTS", 2)
    out = tmp_path / "drafter"
    assert cli.main([*trained[1], "--devices", "2", "--steps", "2", "--out", str(out)]) == 0
    one, two = (np.load(folder / "self_generated.npz") for folder in (trained[0], out))
    assert all(np.array_equal(one[name], two[name]) for name in one)
    assert [row["step"] for row in read_metrics(out)] == [0, 2] and (out / "model.safetensors").exists()


def test_transformers_loads_what_is_written(trained):
    from oracle import Gemma4AssistantForCausalLM

    _, info = Gemma4AssistantForCausalLM.from_pretrained(trained[0], output_loading_info=True)
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"--drafter-kind": "eagle3"}, "is a Gemma4MTP; drafter_kind 'eagle3' is a Eagle3"),
        ({"--data": "none.txt"}, "data file none.txt does not exist"),
        ({"--steps": "0"}, "steps is 0, expected at least 1"),
        ({"--devices": "99"}, "devices is 99; found 8"),
        ({"--unroll": "0"}, "the objective's steps is 0, expected at least 1"),
        ({"--unroll": "100000"}, "the objective's steps is 100000, expected 1 .. 23"),
        ({"--k": "-1"}, "num_draft_tokens is -1, expected 1 .. 23"),
        ({"--self-generate": "-1"}, "self_generate is -1, expected at least 0"),
        ({"--self-generate": "8", "--batch": "1"}, "batch is 1, expected at least 2 with self_generate"),
        ({"--temperature": "nan"}, "temperature is nan, expected a finite number of at least 0"),
        ({"--temperature": "-1"}, "temperature is -1.0, expected a finite number of at least 0"),
        ({"--init": "pocket-mtp"}, "cannot be used with this target"),
        ({}, "has checkpoints of an earlier run; resume it, or take another folder"),
    ],
)
def test_what_cannot_be_used_is_said_at_the_door(trained, capsys, monkeypatch, changes, message):
    """Before the target's weights are read, which takes long."""
    monkeypatch.setattr(tuning, "_target", lambda *args: pytest.fail("weights are read"))
    command = list(trained[1])
    for name, value in changes.items():
        command += [name, value]
    assert cli.main(command) == 2
    assert message in capsys.readouterr().err


def test_arguments_that_make_no_sense_are_named_before_weights_are_read(target, tmp_path, monkeypatch):
    monkeypatch.setattr(tuning, "_target", lambda *args: pytest.fail("weights are read"))
    sideways = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("x",))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    refused = [
        ({"objective": "soft"}, TypeError, "objective is 'soft', expected a dict of fields of Objective"),
        ({"objective": {"step": 2}}, TypeError, "the objective has no argument 'step'; the nearest is 'steps'"),
        ({"step": 3}, TypeError, "distil has no argument 'step'; the nearest is 'steps'"),
        ({"data": 5}, TypeError, "data is 5 of type int, expected a file, or a list of files"),
        ({"held_out": [SOURCE, None]}, TypeError, "held_out is None of type NoneType, expected a file, or a list of files"),
        ({"data": []}, ValueError, r"data is \[\], expected at least one file"),
        ({"init": 5}, TypeError, "init is 5, expected a drafter, a folder, a config.json as a dict, or None"),
        ({"init": {"model_type": "llama"}}, ValueError, "model_type is 'llama'; a Gemma 4 assistant has one of"),
        ({"target": 5}, TypeError, "target is 5 of type int, expected a hub id, a folder or a bundled name"),
        ({"out": None}, TypeError, "out is None of type NoneType, expected a folder"),
        ({"out": tmp_path / "file"}, NotADirectoryError, "file is a file; expected a folder, or nothing"),
        ({"out": tmp_path / "mine"}, FileExistsError, "mine holds another checkpoint"),
        ({"resume": "yes"}, TypeError, "resume is 'yes', expected True or False"),
        ({"resume": True}, FileNotFoundError, "out has no checkpoint to resume from"),
        ({"mesh": 2}, TypeError, "mesh is 2, expected a Mesh with an axis 'data', or None"),
        ({"mesh": sideways}, ValueError, r"mesh has the axes \('x',\); expected one called 'data', over which batches are spread"),
        ({"mesh": jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("data",)), "batch": 3}, ValueError, "do not divide a batch of 3 texts"),
    ]
    for changes, error, message in refused:
        given = {"target": target, "drafter_kind": "mtp", "data": SOURCE, "out": tmp_path / "out", "length": 32, **changes}
        with pytest.raises(error, match=message):
            distil(**given, progress=False)
    with pytest.raises(TypeError, match="finetune has no argument 'step'; the nearest is 'steps'"):
        finetune(target, data=SOURCE, out=tmp_path / "out", step=3)
    with pytest.raises(FileNotFoundError, match="data file none.txt does not exist"):
        finetune(target, data="none.txt", out=tmp_path / "out")


def test_a_converted_drafter_is_gone_on_from(target, trained, tmp_path):
    given = trained[1][trained[1].index("--init") + 1]
    converted = jaxspec.convert(target, tmp_path / "float", drafter=given, dtype="float32", progress=False) / "drafter"
    packed = jaxspec.convert(target, tmp_path / "packed", drafter=given, quantize_drafter="int8", progress=False) / "drafter"

    def first(init):
        return tuning._init("mtp", init, {}, tuning.read_target(target)[0])[0]

    assert all(map(np.array_equal, *(jax.tree.leaves(first(init)) for init in (converted, given))))
    with pytest.raises(ValueError, match=r"the weights of init .*drafter are quantised \(int8\); a drafter that is trained is float"):
        first(packed)
    (converted / "jaxspec.json").unlink()
    (converted / "other.safetensors").touch()
    with pytest.raises(FileNotFoundError, match="other.safetensors"):
        first(converted)


def test_two_runs_do_not_write_into_one_folder(trained, capsys):
    """As where a run was stopped, but a process of its was not."""
    out, command = trained
    before = read_metrics(out)
    with alone(out):
        assert cli.main([*command, "--resume"]) == 2
    assert f"{out} is being written by another process; wait for it, or name another output" in capsys.readouterr().err
    assert read_metrics(out) == before


@pytest.mark.parametrize("changed", ["masked_embedding.token_ordering", "model.norm.weight"])
def test_a_run_begins_with_one_init(trained, tmp_path, capsys, changed):
    """Wherever its folder is. Integers stay as the init has them, so those of another would not fit the weights of a checkpoint."""
    out, command = shutil.copytree(trained[0], tmp_path / "out"), [*trained[1], "--out", str(tmp_path / "out")]
    moved = shutil.copytree(command[command.index("--init") + 1], tmp_path / "moved")
    assert cli.main([*command, "--resume", "--init", str(moved)]) == 0
    before = (out / "model.safetensors").read_bytes()
    weights = load_file(moved / "model.safetensors")
    save_file({**weights, changed: np.roll(weights[changed], 1)}, moved / "model.safetensors")
    assert cli.main([*command, "--resume", "--init", str(moved)]) == 2
    assert re.search(r"init is '\w{8}'; the run in .*out has '\w{8}', and a resumed run must have the same", capsys.readouterr().err)
    shutil.rmtree(out / "checkpoints")  # as a run leaves it that writes none
    settings = json.loads((out / "settings.json").read_text())
    (out / "settings.json").write_text(json.dumps({**settings, "save_every": 0}, indent=2) + "\n")
    assert cli.main([*command, "--save-every", "0", "--init", str(moved)]) == 2
    assert "out holds another checkpoint (config.json, model.safetensors), which stays" in capsys.readouterr().err
    assert (out / "model.safetensors").read_bytes() == before


def test_a_run_resumes_with_its_own_texts_in_their_order_and_measures_as_before(target, trained, tmp_path, capsys):
    """A batch draws texts by their places, so the same ones in another order are others. And what a run brought is the difference of its
    first measurement and its last."""
    out, command = trained
    rows = read([SOURCE], load_tokenizer(target), length=24, vocab_size=tiny.VOCAB)
    stream = np.concatenate([ids[:length] for ids, length in zip(rows.ids, rows.length, strict=True)])
    np.save(tmp_path / "same.npy", stream)
    np.save(tmp_path / "swapped.npy", np.concatenate([stream[24:48], stream[:24], stream[48:]]))
    assert cli.main([*command, "--resume", "--data", str(tmp_path / "same.npy")]) == 0
    changed = {
        ("--data", str(tmp_path / "swapped.npy")): "data is",
        ("--held-out", str(tmp_path / "swapped.npy")): "held_out is",
        ("--k", "1"): "num_draft_tokens is 1; the run in",
    }
    for more, message in changed.items():
        assert cli.main([*command, "--resume", *more]) == 2
        assert message in (said := capsys.readouterr().err) and "a resumed run must have the same" in said


def test_what_a_run_refuses_it_refuses_before_texts_are_written(target, trained, tmp_path, capsys, monkeypatch):
    """Which takes long, and would take the place of those that the run in the folder has."""
    monkeypatch.setattr(tuning, "_own", lambda *args: pytest.fail("texts are written"))
    out, other, command = trained[0], tmp_path / "other", trained[1]
    refused = {
        ("--resume", "--self-generate", "5"): f"self_generate is 5; the run in {out} has 3, and a resumed run must have the same",
        ("--resume", "--out", str(other)): f"{other} has no checkpoint to resume from",
        ("--out", str(other), "--devices", "2", "--batch", "3"): "2 devices along the mesh's axis 'data' do not divide a batch of 3 texts",
    }
    for more, message in refused.items():
        assert cli.main([*command, *more]) == 2
        assert message in capsys.readouterr().err
    config, more = {**small.CONFIGS["dflash"], "vocab_size": tiny.VOCAB}, {"self_generate": 3, "objective": {"steps": 2}, "length": 32}
    with pytest.raises(ValueError, match="num_draft_tokens is 7; the drafter's block_size of 5 holds the anchor and 4 drafts"):
        distil(target, "dflash", data=SOURCE, out=other, init=config, num_draft_tokens=7, **more)
    assert not other.exists()


def test_a_run_resumes_with_the_target_that_it_began_with(target, trained, tmp_path, capsys):
    """Not with another that has taken its folder, though all shapes are the same; nor are texts kept that the one before wrote."""
    (out, command), file = trained, Path(target) / "model.safetensors"
    asked, weights = str(np.load(out / "self_generated.npz")["asked"]), load_file(file)
    assert checkpoint.fingerprint(Path(target)) in asked
    shutil.copy(file, tmp_path)
    key = next(key for key in weights if key.endswith("layers.0.mlp.down_proj.weight"))
    save_file({**weights, key: np.roll(weights[key], 1)}, file, {"format": "pt"})
    try:
        assert checkpoint.fingerprint(Path(target)) not in asked
        assert cli.main([*command, "--resume"]) == 2
    finally:
        shutil.copy(tmp_path / "model.safetensors", file)
    assert re.search(r"target_files is '\w{8}'; the run in .* has '\w{8}', and a resumed run must have the same", capsys.readouterr().err)


def test_what_was_removed_or_emptied_in_a_folder_is_said(trained, tmp_path, capsys):
    out, command = shutil.copytree(trained[0], tmp_path / "copy"), trained[1]
    (out / "metrics.jsonl").unlink()
    assert cli.main([*command, "--resume", "--out", str(out)]) == 0
    assert capsys.readouterr().err.endswith("metrics.jsonl has nothing to tell: it was removed after the run\n")
    (out / "settings.json").write_text("")
    assert cli.main([*command, "--resume", "--out", str(out)]) == 2
    assert "copy/settings.json is no JSON, so what the run was started with is not known" in capsys.readouterr().err


def test_several_arrays_in_a_file_are_no_stream(tmp_path):
    with open(tmp_path / "x.npy", "wb") as file:
        np.savez(file, a=np.arange(3), b=np.arange(3))
    with pytest.raises(ValueError, match=r"x\.npy holds several arrays of numpy; expected one, a stream of integers"):
        read([tmp_path / "x.npy"], None, length=4, vocab_size=9)  # pyright: ignore[reportArgumentType]


def test_the_shortest_rows_have_beginnings():
    texts = batch_of([np.arange(1, 5, dtype=np.int32)] * 64, [0] * 64, 4)
    assert {len(ids) for ids in beginnings(texts, 64, 0)} == {1, 2}


def test_no_checkpoint_is_written_over(trained, target, tmp_path, capsys, monkeypatch):
    """Such as the fine-tuned target that a drafter is trained for."""
    mine = shutil.copytree(target, tmp_path / "mine")
    before = {path.name: path.read_bytes() for path in mine.iterdir()}
    (tmp_path / "file").write_text("x")
    kept = "mine holds another checkpoint (config.json, model.safetensors), which stays; take another folder"
    monkeypatch.setenv("HOME", str(tmp_path))
    for out, message in ((mine, kept), ("~/mine", kept), (tmp_path / "file", "file is a file")):
        assert cli.main([*trained[1], "--out", str(out)]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(FileExistsError, match="mine holds another checkpoint"):
        finetune(mine, data=SOURCE, out=mine, steps=1, batch=2, length=16, progress=False)
    assert {path.name: path.read_bytes() for path in mine.iterdir()} == before
    run = {"steps": 1, "every": 1, "save_every": 0, "batch": 2, "length": 16, "progress": False}
    for _ in range(2):  # as when a notebook's cell runs twice: nothing is lost
        finetune(mine, data=SOURCE, out=tmp_path / "tuned", **run)
    with pytest.raises(FileExistsError, match="tuned holds another checkpoint"):
        finetune(mine, data=SOURCE, out=tmp_path / "tuned", **{**run, "seed": 1})


@pytest.mark.slow  # test_loop.py trains over two devices, and below a fresh drafter is made
def test_a_fresh_drafter_over_two_devices(target, tmp_path):
    """EAGLE-3 with a draft vocabulary of the data's most frequent tokens, from its config alone; the rest of the data is held back."""
    config = {**small.CONFIGS["eagle3"], "vocab_size": tiny.VOCAB, "draft_vocab_size": 64, "num_hidden_layers": 1}
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:2]), ("data",))
    run = {"steps": 2, "every": 2, "batch": 2, "length": 16, "dtype": "float32", "save_every": 0, "progress": False}
    out = distil(target, "eagle3", data=SOURCE, out=tmp_path / "drafter", init=config, objective={"steps": 2}, mesh=mesh, **run)
    found = jaxspec.drafters.load_drafter(out, small_config(target), jnp.float32, progress=False)
    tokens = jaxspec.load(target, max_slots=1, max_len=32, progress=False).tokenizer.encode(SOURCE.read_text())
    assert set(tokens[:4]) & set(np.asarray(found.d2t) + np.arange(64)) and not (out / "checkpoints").exists()


def test_as_many_texts_are_written_at_a_time_as_memory_holds(monkeypatch):
    model = small.target()
    held = {}
    for limit in (None, 2**20, 2**24, 2**40):
        monkeypatch.setattr(tuning, "memory_limit", lambda device, limit=limit: limit)
        held[limit] = tuning._slots(model, 64)
    assert held[None] == 64 and held[2**40] == tuning.WRITING_SLOTS
    sizes = memory.sizes_of(model, NoDraft(), max_len=64, num_draft_tokens=0, kernels=False)
    for limit in (2**20, 2**24):  # the weights are there already, and are not what slots are counted against
        slots, left = held[limit], int(0.9 * limit)
        assert 1 <= slots < tuning.WRITING_SLOTS
        taken = sizes.kept(slots, slots * sizes.width) + sizes.work(slots) - sizes.weights
        one_more = sizes.kept(slots + 1, (slots + 1) * sizes.width) + sizes.work(slots + 1) - sizes.weights
        assert (taken <= left or slots == 1) and one_more > left


def test_more_draft_steps_than_a_block_holds_are_refused(target, tmp_path):
    config = {**small.CONFIGS["dflash"], "vocab_size": tiny.VOCAB}
    with pytest.raises(ValueError, match="the objective has 7 draft steps: .*the drafter's block_size of 5 holds the anchor and 4 drafts"):
        distil(target, "dflash", data=SOURCE, out=tmp_path / "drafter", init=config, length=32)


def small_config(folder):
    return jaxspec.config.Gemma4Config.from_hf(jaxspec.checkpoint.read_config(folder))


def story(target, drafter, other, out, *, tune, teach):
    """Acceptance lengths: of the drafter for the target after that was trained on other text, before and after it was tuned itself."""
    changed = finetune(target, data=other, out=out / "target", progress=False, **teach)
    distil(changed, "mtp", data=other, init=drafter, out=out / "drafter", progress=False, **tune)
    rows = read_metrics(out / "drafter")
    return rows[0]["measured_acceptance_length"], rows[-1]["measured_acceptance_length"]


@pytest.mark.slow
def test_a_drafter_catches_up_with_its_target(target, tmp_path):
    """A tiny pair that agreed on one text: trained on another the target leaves the drafter behind, which then learns."""
    rng = np.random.default_rng(0)
    first, other = (np.tile(rng.permutation(np.arange(200, 1000))[:20], 40).astype(np.uint16) for _ in range(2))
    for name, stream in (("first.npy", first), ("other.npy", other)):
        np.save(tmp_path / name, stream)
    sizes = {"batch": 4, "length": 24, "dtype": "float32", "save_every": 0, "peak": 1e-2}
    tuned_by = {"objective": {"steps": 2, "anchors": 8}, "num_draft_tokens": 2}
    teach, tune = {"steps": 60, "every": 60, **sizes}, {"steps": 50, "every": 50, **tuned_by, **sizes}
    known = finetune(target, data=tmp_path / "first.npy", out=tmp_path / "known", progress=False, **teach)
    drafter = distil(known, "mtp", data=tmp_path / "first.npy", out=tmp_path / "drafter", init=ASSISTANT, progress=False, **tune)
    released = read_metrics(drafter)[-1]["measured_acceptance_length"]
    stale, tuned = story(known, drafter, tmp_path / "other.npy", tmp_path / "after", teach=teach, tune=tune)
    assert released > 2.5 and stale < released - 1 and tuned - stale > 0.5 * (released - stale), (released, stale, tuned)


ASSISTANT = {**tiny.ASSISTANT, "num_centroids": 8, "centroid_intermediate_top_k": 4}


@pytest.mark.slow
def test_pockets_assistant_catches_up_with_a_fine_tuned_pocket(tmp_path):
    """On a licence, which is no Python: the loss of acceptance, and that more than half of it comes back."""
    shutil.copy(LICENSE, tmp_path / "licence.txt")
    sizes = {"steps": 32, "every": 32, "batch": 4, "length": 64, "peak": 1e-3, "dtype": "float32", "save_every": 0}
    teach, tune = sizes, {"self_generate": 32, **sizes}
    prompts = [LICENSE.read_text()[at : at + 300] for at in range(500, 8500, 1000)]

    def acceptance(target, drafter):
        llm = jaxspec.load(target, drafter, num_draft_tokens=4, max_slots=8, max_len=256, progress=False)
        llm.generate(prompts, jaxspec.SamplingParams(max_tokens=96, temperature=0, ignore_eos=True))
        return llm.stats.acceptance_length

    released = acceptance("pocket", "pocket-mtp")
    story("pocket", "pocket-mtp", tmp_path / "licence.txt", tmp_path, teach=teach, tune=tune)
    stale, tuned = acceptance(tmp_path / "target", "pocket-mtp"), acceptance(tmp_path / "target", tmp_path / "drafter")
    print(f"released {released:.2f}, stale {stale:.2f}, tuned {tuned:.2f}")
    assert stale < released and tuned - stale > 0.5 * (released - stale)


def test_a_quantised_target_is_not_finetuned(target, tmp_path):
    folder = shutil.copytree(target, tmp_path / "quantised")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is quantised \(ModelOpt FP8\); only float weights can be trained"):
        finetune(folder, data=LICENSE, out=tmp_path / "out", progress=False)


def test_what_a_config_leaves_open_is_decided_for_a_fresh_drafter_and_asked_for_a_trained_one(tmp_path):
    """A config for Gemma without input_embedding_scale: a fresh drafter learns without one, and its config.json says so."""
    config, model, texts = small.CONFIGS["dflash"], small.target(), Batch(np.arange(8, dtype=np.int32)[None], None, None)
    fresh, written, *_ = tuning._drafter("dflash", tuning._init("dflash", config, {}, model.config), model, texts, 0)
    assert fresh.reading is None and written == {**config, "input_embedding_scale": 1.0}
    save_trained(tmp_path / "open", fresh, config, {})
    message = "leaves open input_embedding_scale=1.0 or input_embedding_scale=.*; expected the one that the drafter was trained with"
    with pytest.raises(ValueError, match=message):
        tuning._init("dflash", tmp_path / "open", {}, model.config)
    save_trained(tmp_path / "said", fresh, written, {})
    assert tuning._init("dflash", tmp_path / "said", {}, model.config)[0].readings == ()
