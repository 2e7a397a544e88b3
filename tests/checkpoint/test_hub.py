"""What a name may be: of a hub, of its cache, or of something that is no checkpoint for here, which is told before anything is fetched."""

import json
import shutil
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors
from safetensors.numpy import save_file

import jaxspec
from jaxspec import checkpoint, cli
from jaxspec.checkpoint.hub import HUB, Hub

MODEL = "google/gemma-4-E2B-it"


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """What the hub was asked for; it gives a folder, or raises what `answer` says."""
    calls, answer = [], {}
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "config.json").write_text("{}")

    def download(name, **settings):
        calls.append((name, {key: value for key, value in settings.items() if not key.endswith("patterns")}))
        if "error" in answer:
            raise answer["error"]
        return str(answer.get("folder", tmp_path / "given"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda self, name, **settings: answer.get("files", []))
    return calls, answer


def http(kind, status=401):
    """An answer of the hub."""
    return kind("no", response=SimpleNamespace(headers={}, request=None, status_code=status))


# Hub


def test_how_a_model_is_fetched(asked, tmp_path):
    calls, _ = asked
    hub = Hub("v1", "secret", tmp_path / "cache", True)
    checkpoint.resolve(MODEL, hub)
    checkpoint.resolve(MODEL, hub.of_others)
    checkpoint.resolve(f"{MODEL}@refs/pr/3", hub.of_others)
    checkpoint.resolve(MODEL)
    others = {"token": "secret", "cache_dir": tmp_path / "cache", "local_files_only": True}
    assert calls == [
        (MODEL, {"revision": "v1", **others}),
        (MODEL, others),
        (MODEL, {"revision": "refs/pr/3", **others}),
        (MODEL, {}),
    ]
    assert "secret" not in repr(hub)
    with pytest.raises(ValueError, match=f"revision is 'v1', but '{MODEL}@v2' names another; expected one of them"):
        checkpoint.resolve(f"{MODEL}@v2", hub)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            http(errors.GatedRepoError, 403),
            PermissionError,
            f"'{MODEL}' is gated: accept its conditions at https://huggingface.co/{MODEL}, then log in with `hf auth login`, set HF_TOKEN",
        ),
        (http(errors.RepositoryNotFoundError), FileNotFoundError, f"the hub has no model '{MODEL}', or it is private; .* give token="),
        (http(errors.RevisionNotFoundError, 404), FileNotFoundError, f"'{MODEL}' has no revision 'v9' on the hub"),
        (errors.LocalEntryNotFoundError("x"), FileNotFoundError, "is not in the hub's cache, or not whole, and no hub could be asked"),
        (errors.OfflineModeIsEnabled("x"), FileNotFoundError, "no hub could be asked .HF_HUB_OFFLINE is set.; download it first"),
        (OSError("the disk is full"), FileNotFoundError, "the hub did not provide a model of that id: the disk is full"),
    ],
)
def test_what_the_hub_answers_is_told(asked, error, kind, message):
    asked[1]["error"] = error
    with pytest.raises(kind, match=message):
        jaxspec.load(MODEL, revision="v9")


def test_a_cache_without_the_model_is_named(tmp_path):
    """The hub's own library, which asks nobody."""
    with pytest.raises(FileNotFoundError, match=f"'{MODEL}' is not in {tmp_path}, .* could be asked .local_files_only.; download it first"):
        checkpoint.resolve(MODEL, Hub(cache_dir=tmp_path, local_files_only=True))
    (tmp_path / "models--google--gemma-4-E2B-it" / "snapshots" / "abc").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="is not in"):
        checkpoint.resolve(MODEL, Hub(cache_dir=tmp_path, local_files_only=True))


def test_a_model_that_was_downloaded_is_found_in_its_cache(folders, tmp_path):
    snapshot = cache_of(tmp_path, folders[0])
    assert checkpoint.resolve(MODEL, Hub(cache_dir=tmp_path, local_files_only=True)) == snapshot
    assert checkpoint.resolve(f"{MODEL}@{'b' * 40}", Hub(cache_dir=tmp_path, local_files_only=True)).name == "b" * 40


def cache_of(root, folder):
    """A hub's cache of one model with two commits, of which main is the first. Returns its snapshot."""
    model = root / "models--google--gemma-4-E2B-it"
    for commit in "ab":
        shutil.copytree(folder, model / "snapshots" / (commit * 40))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    return model / "snapshots" / ("a" * 40)


def test_a_text_knows_the_revision_that_made_it(asked, folders):
    """So that a batch is not resumed with another one."""
    asked[1]["folder"] = folders[0]
    assert jaxspec.load(MODEL, revision="v1", max_slots=1, max_len=8, progress=False).name == f"{MODEL}@v1"


def test_a_folder_of_the_cache_is_its_snapshot(folders, tmp_path):
    snapshot = cache_of(tmp_path, folders[0])
    model = snapshot.parent.parent
    assert checkpoint.resolve(model) == snapshot
    assert checkpoint.resolve(model, Hub("b" * 40)).name == "b" * 40
    with pytest.raises(FileNotFoundError, match=f"has no snapshot of revision 'v1'; found {'a' * 40}, {'b' * 40}"):
        checkpoint.resolve(model, Hub("v1"))
    (model / "refs" / "main").unlink()
    with pytest.raises(FileNotFoundError, match="has no snapshot of revision 'main'; found"):
        checkpoint.resolve(model)
    shutil.rmtree(model / "snapshots" / ("b" * 40))
    assert checkpoint.resolve(model) == snapshot


def test_every_command_says_how_models_are_fetched(asked, folders, tmp_path, monkeypatch, capsys):
    """The revision is the target's; all else holds for the drafter and the adapter too."""
    calls, answer = asked
    asked_for = ["--revision", "v1", "--token", "T", "--cache-dir", str(tmp_path), "--local-files-only"]
    others = {"token": "T", "cache_dir": str(tmp_path), "local_files_only": True}
    answer["error"] = OSError("gone")
    for command in (["generate", "--prompt", "x", "--target", MODEL], ["info", MODEL], ["convert", MODEL, str(tmp_path / "out")]):
        assert cli.main([*command, *asked_for]) == 2
        assert calls.pop() == (MODEL, {"revision": "v1", **others}) and not calls
    answer.clear()
    answer["folder"] = folders[0]
    found = []
    monkeypatch.setattr("jaxspec.checkpoint.peft.located", lambda name, hub, patterns: found.append((name, hub)) or folders[0])
    for command in (["info", MODEL], ["convert", MODEL, str(tmp_path / "out")], ["generate", "--prompt", "x", "--target", MODEL]):
        assert cli.main([*command, "--adapter", "some/adapter", "--drafter", "some/drafter@v2", *asked_for]) == 2
        assert "the adapter 'some/adapter' has no adapter_config.json" in capsys.readouterr().err
        assert found.pop() == ("some/adapter", Hub(None, "T", str(tmp_path), True)) and not found
        assert {name: settings for name, settings in calls} == {
            MODEL: {"revision": "v1", **others},
            "some/drafter": {"revision": "v2", **others},
        }
        calls.clear()


def test_local_models_have_no_revisions(folders):
    with pytest.raises(ValueError, match="revision is 'main', but 'pocket' is no model of a hub, and has no revisions"):
        jaxspec.load("pocket", revision="main")


# What is no checkpoint for here


def refuse(name, message, capsys, tmp_path, kind=ValueError):
    """By load, info and convert alike, and by load as a drafter."""
    for call in (lambda: jaxspec.load(name), lambda: jaxspec.convert(name, tmp_path / "out"), lambda: jaxspec.load("pocket", name)):
        with pytest.raises(kind, match=message):
            call()
    assert cli.main(["info", str(name), "--plan", "--memory", "80GB"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("jaxspec: ")


def test_gguf(asked, capsys, tmp_path):
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF" + bytes(20))
    refuse(file, "Q4_K_M.gguf is a GGUF of version 0; expected 2 or 3", capsys, tmp_path)
    file.rename(tmp_path / "renamed")
    refuse(tmp_path / "renamed", "renamed is a GGUF of version 0", capsys, tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "model-Q4_0.gguf").touch()
    refuse(folder, "model-Q4_0.gguf is no GGUF file: it is empty", capsys, tmp_path)
    (folder / "config.json").write_text("{}")  # some bring one along
    refuse(folder, "is no GGUF file: it is empty", capsys, tmp_path)
    (folder / "model-Q8_0.gguf").touch()
    refuse(folder, r"folder holds 2 models \(model-Q4_0.gguf, model-Q8_0.gguf\); expected one", capsys, tmp_path)
    calls, answer = asked
    name = "unsloth/gemma-4-E2B-it-GGUF"
    answer["files"] = ["README.md", "e2b-Q4_K_M.gguf", "e2b-Q8_0.gguf", "mmproj-F16.gguf"]
    refuse(name, f"'{name}' holds 2 GGUF models .e2b-Q4_K_M.gguf, e2b-Q8_0.gguf.; expected one, as {name}:Q4_0 names", capsys, tmp_path)
    refuse(f"{name}:Q6_K", f"'{name}:Q6_K' names 0 of the GGUF models there .e2b-Q4_K_M.gguf, e2b-Q8_0.gguf.", capsys, tmp_path)
    assert not calls  # nothing was downloaded
    (tmp_path / "empty").mkdir()
    answer["folder"] = tmp_path / "empty"
    refuse("some/quants", "'some/quants' holds 2 GGUF models", capsys, tmp_path)
    answer["error"] = http(errors.RepositoryNotFoundError)
    answer["files"] = []
    refuse(f"{name}:Q4_0", f"the hub has no model '{name}'", capsys, tmp_path, FileNotFoundError)


def test_mlx(folders, capsys, tmp_path):
    config = json.loads((folders[0] / "config.json").read_text())
    for name, more, about in (("packed", {"quantization": {"group_size": 64, "bits": 4}}, {}), ("float", {}, {"format": "mlx"})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config | more))
        save_file({"a": np.zeros(2, np.float32)}, folder / "model.safetensors", metadata=about)
        refuse(folder, f"{name}' is a model for MLX; expected a checkpoint in Hugging Face's layout: take the model", capsys, tmp_path)


def test_an_adapter_for_mlx(folders, capsys, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"fine_tune_type": "lora", "num_layers": 16}))
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "adapters.safetensors")
    refuse(tmp_path, "is an adapter for MLX; expected a checkpoint in Hugging Face's layout", capsys, tmp_path / "x")
    with pytest.raises(ValueError, match="is one for MLX; expected a folder that PEFT's save_pretrained wrote"):
        jaxspec.load(folders[0], adapter=tmp_path)


def test_an_adapter_in_place_of_a_target(capsys, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": MODEL}))
    (folder / "adapter_model.safetensors").touch()
    message = rf"is an adapter \(LORA\) and no model of its own; .*: load\('{MODEL}', adapter='.*adapter'\), or jaxspec convert {MODEL} "
    refuse(folder, message, capsys, tmp_path)
    (folder / "config.json").write_text("{}")  # some trainers leave one there
    refuse(folder, message, capsys, tmp_path)


def test_a_pointer_in_place_of_a_file(folders, capsys, tmp_path):
    for name in ("model-00001-of-00002.safetensors", "model.safetensors", "tokenizer.json"):
        folder = tmp_path / name.replace(".", "-")
        shutil.copytree(folders[0], folder)
        (folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456789\n")
        refuse(folder, f"{name} is a Git LFS pointer and not the file itself, .* run `git lfs pull` in ", capsys, tmp_path)


def test_a_pickle_alone(folders, capsys, tmp_path):
    shutil.copy(folders[0] / "config.json", tmp_path / "config.json")
    (tmp_path / "pytorch_model.bin").touch()
    refuse(tmp_path, "pytorch_model.bin is a pickle, which can run code", capsys, tmp_path / "x")


def test_a_config_of_another_model(folders, capsys, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
    refuse(tmp_path, "model_type '?(is )?'llama'", capsys, tmp_path / "x")


def test_a_format_that_is_not_served_is_not_planned(folders, capsys, tmp_path):
    shutil.copytree(folders[0], tmp_path / "model")
    (tmp_path / "model" / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ValueError, match="W4A8_AWQ"):
        jaxspec.load(tmp_path / "model")
    assert cli.main(["info", str(tmp_path / "model"), "--plan", "--memory", "80GB"]) == 2
    assert "W4A8_AWQ" in capsys.readouterr().err
    assert HUB == Hub()
