"""`jaxspec info` of released shapes and of GPUs: what fits, in the README's words, and what would make fit what does not."""

import re
from pathlib import Path

import jax
import pytest
import tiny

import jaxspec
from jaxspec import cli, loading
from jaxspec.engine import memory
from jaxspec.info import cards
from jaxspec.released import TARGETS

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
# The README's columns, as the command is asked for them.
COLUMNS = {"16 GB (T4)": "T4", "24 GB (L4)": "24GB", "40 GB": "40GB", "80 GB": "H100", "141 GB": "141GB"}


@pytest.fixture(autouse=True)
def share(monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")


def said(capsys, *options):
    assert cli.main(["info", *options]) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys, *options):
    assert cli.main(["info", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_the_table_in_the_readme_is_what_the_command_prints(capsys):
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in README.splitlines() if line.startswith("|")]
    header = next(row for row in rows if row[:2] == ["target", "weights"])
    assert header[2:] == list(COLUMNS)
    shown = {(row[0].replace("-A4B", ""), header[i]): (row[1], row[i]) for row in rows if len(row) == 7 for i in range(2, 7)}
    found = {}
    for column, card in COLUMNS.items():
        for line in said(capsys, "--memory", card)[2:]:
            name, weights, slots = re.fullmatch(r"(\S+(?:, \w+)?) +([\d.]+ GB)   (.*)", line).groups()
            found[name, column] = (weights, "" if slots == "does not fit" else slots)
    assert found == {key: cells for key, cells in shown.items() if key in found} and len(found) == 9 * 5


def test_a_card_is_named_with_or_without_memory(capsys):
    lines = said(capsys, "--memory", "L4")
    assert lines == said(capsys, "l4") == said(capsys, "--memory", "24GB") == said(capsys, "NVIDIA L4")
    assert lines[0] == "memory      24.0 GB, of which JAX takes 0.9 (XLA_CLIENT_MEM_FRACTION); memory_fraction 0.9 of it is 19.4 GB"
    assert cards.card_of("Tesla T4").kernels is False and cards.card_of("rtx-4090").memory == 24 * 10**9
    assert said(capsys, "--memory", "24GiB")[0].startswith("memory      24.00 GiB")


@pytest.mark.parametrize("name", TARGETS)
def test_released_shapes_need_no_network(name, capsys):
    drafter, devices = "modules" if "step3p5" in name else "mtp", ("--mesh", "tensor=4") if "step3p5" in name else ()
    lines = said(capsys, name, "--drafter", drafter, "--plan", "--memory", "H200", "--max-len", "2048", *devices)
    assert lines[0] == f"target      {name}" and f"drafter     {drafter}" in lines
    assert any(line.startswith("plan        64 slots") for line in lines) or name == "31b"


def test_what_learning_takes_is_told(capsys):
    """Beside it fewer sequences fit, and the same as `load` with `learn` plans."""
    asked = ("31b", "--drafter", "mtp", "--memory", "H200", "--max-len", "4096")
    plain, learns = said(capsys, *asked), said(capsys, *asked, "--learn")
    # 16 bytes for each of 469,518,596 parameters, and 269 MB for the guide of the head on trial.
    assert "learning    7.8 GB kept, 4.6 GB for an update of 4 texts of 512 tokens" in learns
    slots = [next(int(line.split()[1]) for line in lines if line.startswith("plan ")) for lines in (plain, learns)]
    assert slots[1] < slots[0] and not any(line.startswith("learning") for line in plain)
    assert "the drafter is a NoDraft, which has nothing to learn" in refused(capsys, "31b", "--memory", "H200", "--learn")
    assert "--learn is about a model, and none is named" in refused(capsys, "--memory", "24GB", "--learn")


def test_what_images_take_is_told(capsys):
    """The tower of the release, and rows of images on their way; the rest is left to sequences."""
    asked = ("31b", "--memory", "H200")
    plain, seeing = said(capsys, *asked), said(capsys, *asked, "--images")
    (line,) = [line for line in seeing if line.startswith("images ")]
    assert line.startswith("images      1.2 GB tower, ") and line.endswith(" for images of 280 tokens")
    assert [line for line in seeing if line.startswith(("memory", "weights"))] == [x for x in plain if x.startswith(("memory", "weights"))]
    assert plain[-6:] != seeing[-6:]  # how many sequences of some lengths there is room for
    assert "max_soft_tokens is 100; expected one of 70, 140" in refused(capsys, *asked, "--images", "100")
    assert "'step3p5' has no image tower" in refused(capsys, "step3p5", "--memory", "H200", "--images")
    assert "has no image tower" in refused(capsys, "pocket", "--memory", "H200", "--images")


def test_what_sounds_take_is_told(capsys):
    asked = ("e2b", "--memory", "L4")
    plain, hearing = said(capsys, *asked), said(capsys, *asked, "--audio")
    assert "audio       307,184,384 parameters, 614.4 MB; with audio=True" in plain
    (line,) = [line for line in hearing if line.startswith("audio ") and "tower" in line]
    assert line.startswith("audio       614.4 MB tower, ") and line.endswith(" for sounds of 30 seconds")
    assert plain[-4:] != hearing[-4:]  # how many sequences of some lengths there is room for
    assert not any(line.startswith("audio ") for line in said(capsys, "31b", "--memory", "H200"))
    assert "'31b' has no audio tower; expected one of e2b, e4b, 12b" in refused(capsys, "31b", "--memory", "H200", "--audio")
    assert "has no audio tower" in refused(capsys, "pocket", "--memory", "H200", "--audio")
    assert "--audio is about a model, and none is named" in refused(capsys, "--memory", "24GB", "--audio")


def test_what_a_drafters_config_leaves_open_is_told(capsys):
    """z-lab's configs for Gemma name no scale."""
    line = "            its config.json leaves open input_embedding_scale=1.0 or input_embedding_scale=73.3212: the first rounds try both"
    assert line in said(capsys, "31b", "--drafter", "dflash")
    assert not any("leaves open" in line for line in said(capsys, "31b", "--drafter", "dspark"))


def test_how_many_tokens_a_drafter_can_guess_is_told(capsys):
    """Where they are fewer than the target's. A drafter without a head of its own guesses all."""
    line = "            guesses 32,000 of the target's 262,144 tokens"
    for drafter, told in {"eagle3": True, "dspark": True, "mtp": False, "dflash2": False}.items():
        assert (line in said(capsys, "31b", "--drafter", drafter)) == told


def test_the_plan_of_an_old_card_is_made_without_kernels(capsys):
    """For one card the table and the plan agree, which they do not with kernels."""
    for card, slots in (("T4", "62"), ("16GB", "64")):
        lines = said(capsys, "e2b", "--drafter", "mtp", "--memory", card)
        assert f"plan        {slots} slots, " in "\n".join(lines)
        assert ("            no kernels: the T4 runs XLA, whose attention takes more memory" in lines) == (card == "T4")


def test_dtypes_quantisation_and_meshes_are_planned(capsys):
    def planned(*options):
        lines = said(capsys, "12b", "--memory", "80GB", *options)
        return {line.split()[0]: line for line in lines if line[:1].strip()}

    plain = planned()
    fp8 = planned("--kv-dtype", "fp8")
    assert fp8["page"].startswith("page        0.3 MB") and plain["page"].startswith("page        0.7 MB")
    assert [line["KV"].rpartition("; ")[2] for line in (fp8, plain)] == ["full 5,120 bytes a token", "full 10,240 bytes a token"]
    assert planned("--quantize", "int4")["weights"].startswith("weights     8.1 GB target")
    assert planned("--mesh", "tensor=2")["weights"].startswith("weights     11.9 GB target")
    assert "kv_dtype is 'int8'; available: 'auto'" in refused(capsys, "12b", "--kv-dtype", "int8")
    assert "quantize is 'int3'; available" in refused(capsys, "12b", "--quantize", "int3")


def test_what_does_not_fit_is_told_what_would_help(capsys):
    text = refused(capsys, "31b", "--memory", "48GB")
    assert "the weights take 61.4 GB and the state 1.0 GB (slots: 1, pages: 64) " in text and "there is 38.9 GB of it" in text
    assert text.endswith(
        "With quantize='int8' (--quantize int8), or tensor=2 (--mesh tensor=2), or a smaller target, such as 26B in int8, it fits\n"
    )
    text = refused(capsys, "31b", "--memory", "23GiB")
    helps = "With quantize='int4' and quantize_embedding='int8' (--quantize int4 --quantize-embedding int8), or "
    helps += "tensor=4 (--mesh tensor=4), or a smaller target, such as 12B in int4, it fits\n"
    assert "take 57.18 GiB" in text and text.endswith(helps)
    text = refused(capsys, "e4b", "--memory", "8GB")
    assert "With quantize='int4' and quantize_embedding='int8' (--quantize int4 --quantize-embedding int8), or tensor=" in text
    assert "With quantize_embedding='int8' (--quantize-embedding int8), or" in refused(
        capsys, "e4b", "--memory", "8GB", "--quantize", "int4"
    )
    text = refused(capsys, "31b", "--memory", "L4", "--quantize", "int4")
    helps = "With quantize_embedding='int8' (--quantize-embedding int8), or tensor=2 (--mesh tensor=2), or a smaller target, such as 12B in"
    assert text.endswith(f"{helps} int4, it fits\n")
    assert refused(capsys, "26b", "--memory", "40GB").endswith("or a smaller target, such as 12B, it fits\n")
    assert refused(capsys, "e2b", "--memory", "1GB").endswith("or XLA_CLIENT_MEM_FRACTION before JAX starts, allows more\n")
    text = refused(capsys, "e2b", "--drafter", "mtp", "--memory", "24GB", "--max-slots", "1000")
    assert "(slots: 1000, pages: 64) of a device" in text and ", calls " in text and "; there is 19.4 GB of it" in text


def test_load_says_what_would_help_too(tmp_path, monkeypatch):
    target = tiny.tiny_target(tmp_path / "target", hidden_size=128, hidden_size_per_layer_input=0, intermediate_size=4096)
    monkeypatch.setattr(memory, "UNPACKING", 0)
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    monkeypatch.setattr(loading, "memory_limit", lambda device: 52 * 2**20)
    helps = r"With quantize='int8' \(--quantize int8\), or tensor=2 \(--mesh tensor=2\), it fits"
    with pytest.raises(ValueError, match=rf"the weights take .* MiB and the state .* MiB \(slots: 1, pages: 1\) .*{helps}"):
        jaxspec.load(target, max_len=64, memory_fraction=0.5, progress=False)


def test_what_info_cannot_answer(capsys, monkeypatch):
    assert "--drafter is about a model, and none is named" in refused(capsys, "--memory", "24GB", "--drafter", "mtp")
    assert "--kv-dtype is about a model, and none is named" in refused(capsys, "L4", "--kv-dtype", "fp8")
    assert "'L4' is a GPU, and --memory is '24GB' too; expected one of them" in refused(capsys, "L4", "--memory", "24GB")
    assert "neither a model is named nor --memory given, and this device does not say what memory it has" in refused(capsys)
    assert "drafter 'dflash' is there for config 26b, 31b" in refused(capsys, "e4b", "--drafter", "dflash")
    assert "expected a number and one of MB, GB, TB, MiB, GiB, TiB, such as 80GB, or a card: T4, " in refused(capsys, "--memory", "L5")
    for share in ("most", "2", "nan", "-1", "0"):
        with monkeypatch.context() as patch:
            patch.setenv("XLA_CLIENT_MEM_FRACTION", share)
            expected = "expected more than 0 and at most 1, such as 0.9"
            assert f"XLA_CLIENT_MEM_FRACTION is {share!r} in the environment, {expected}" in refused(capsys, "L4")
    assert "'bogus' is neither" in (text := refused(capsys, "e2b", "--drafter", "bogus")) and "; named drafters: " in text
    assert "drafter      MTPModules" not in text and "fits" in "\n".join(said(capsys, "step3p5", "--drafter", "same"))
    monkeypatch.setattr("jaxspec.engine.memory.memory_limit", lambda device: 24 * 2**30)
    monkeypatch.setattr(jax, "devices", lambda: [type("Gpu", (), {"device_kind": "G", "platform": "gpu", "compute_capability": "9.0"})()])
    assert said(capsys)[0] == "memory      24.00 GiB; memory_fraction 0.9 of it is 21.60 GiB"
