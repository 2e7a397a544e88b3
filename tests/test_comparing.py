"""A checkpoint here and in transformers, and checkpoints that are not the same."""

import dataclasses
import shutil
import sys
import unittest.mock

import numpy as np
import pytest
import safetensors.numpy
from vision_oracle import in_prompts as saved

import jaxspec
from jaxspec import comparing
from jaxspec.cli import main

pytestmark = pytest.mark.usefixtures("quick_to_compile")
TEXTS = ("def read(path, mode):", "The ferry left at six.", "a b c a b c a b c")
SIZES = {"max_len": 160, "max_slots": 4, "progress": False}


@pytest.fixture(scope="module")
def llm():
    return jaxspec.load(saved("plain")[1], "ngram", num_draft_tokens=3, **SIZES)


def compared(llm, folder, **settings):
    return comparing.compare(llm, folder, texts=TEXTS, tokens=12, **settings)


@pytest.mark.parametrize("kind", ["plain", pytest.param("unified", marks=pytest.mark.slow)])
def test_one_checkpoint_is_the_same(kind, llm):
    """Also beyond a window, and what was written with drafts."""
    llm = llm if kind == "plain" else jaxspec.load(saved(kind)[1], "ngram", num_draft_tokens=3, **SIZES)
    found = compared(llm, saved(kind)[1])
    assert found.agrees and found.exact and found.reference.startswith(type(saved(kind)[0]).__name__)
    lengths = [len(llm.tokenizer.encode(text)) for text in TEXTS]
    longest = llm.config.sliding_window + comparing.BEYOND
    assert len(found.here) == sum(lengths) - 3 + longest - 1 and len(found.gaps) == 4 * 12
    assert found.differences.max() < 1e-4 and found.same.all() and not found.gaps.any()
    before = llm.stats
    again = compared(llm, saved(kind)[1])  # what it says of drafts is about its own call
    length = (llm.stats.stepped_tokens - before.stepped_tokens) / (llm.stats.steps - before.steps)
    assert again.drafts == f"3 drafts a step, {length:.2f} tokens a step" and length > 1
    assert (
        "48 tokens with 3 drafts a step" in str(found) and ": 48 are the reference's choice\n" in str(found) and "they agree" in str(found)
    )


def test_what_rounding_explains(llm):
    """A reference in bfloat16 has more room: random weights round to much, and trained ones to less."""
    found = compared(llm, saved("plain")[1], dtype="bfloat16")
    assert not found.exact and "bfloat16 on the CPU" in found.reference and 1e-3 < found.differences.mean() < 0.3
    assert found.limits > compared(llm, saved("plain")[1]).limits == (1e-3, 1e-2)
    trained = comparing.Comparison(
        "", "", False, np.float32([-2, -3]), np.float32([-2.1, -3.05]), np.array([True, True]), np.float32([0, 0.4])
    )
    assert trained.agrees and not dataclasses.replace(trained, exact=True).agrees


def test_another_checkpoint_differs(llm, tmp_path, capsys):
    """One of whose matrices is another, which is seen in log-probabilities and in what was written."""
    folder = shutil.copytree(saved("plain")[1], tmp_path / "other")
    (file,) = folder.glob("*.safetensors")
    weights = safetensors.numpy.load_file(file)
    name = next(name for name in weights if name.endswith("layers.0.mlp.down_proj.weight") and "language" in name)
    weights[name] = np.ascontiguousarray(weights[name][::-1])
    safetensors.numpy.save_file(weights, file, {"format": "pt"})
    found = compared(llm, folder)
    assert not found.agrees and found.differences.mean() > 0.1 and found.gaps.max() > 0.1 and "THEY DIFFER" in str(found)
    assert "are the reference's choice, and the others are up to" in str(found)
    nan = np.full(3, np.nan, np.float32)
    assert not comparing.Comparison("", "", True, nan, nan, nan > 0, nan).agrees


def test_what_cannot_be_compared_is_refused(llm, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="a text has fewer than two tokens, or max_len, 160, has no room"):
        comparing.compare(llm, saved("plain")[1], texts=[""])
    for tokens in (158, 1000):
        with pytest.raises(ValueError, match=f"or max_len, 160, has no room for two and for {tokens} others"):
            comparing.compare(llm, saved("plain")[1], tokens=tokens)
    with pytest.raises(ValueError, match="tokens is 0"):
        comparing.compare(llm, saved("plain")[1], tokens=0)
    folder = shutil.copytree(saved("plain")[1], tmp_path / "without")
    (file,) = folder.glob("*.safetensors")
    weights = safetensors.numpy.load_file(file)
    for part in ("mlp.up_proj", "mlp.down_proj"):
        del weights[f"model.language_model.layers.0.{part}.weight"]
    safetensors.numpy.save_file(weights, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"it finds no model.*0\.mlp\.down_proj\.weight there, which is 1 of 2 missing weights"):
        compared(llm, folder)
    (tmp_path / "config.json").write_text('{"architectures": ["StepModel"]}')
    with pytest.raises(ValueError, match="has no model 'StepModel', which its config.json names"):
        comparing.reference_class(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="has no model 'none'"):
        comparing.reference_class(tmp_path)
    (tmp_path / "jaxspec.json").write_text("{}")
    with pytest.raises(ValueError, match="was converted, and transformers cannot read it; expected the checkpoint that it was made from"):
        comparing.reference_class(tmp_path)
    kind = comparing.reference_class(saved("plain")[1])
    for error, reason in ((ZeroDivisionError("division by zero"), "division by zero"), (MemoryError(), "MemoryError")):
        monkeypatch.setattr(kind, "forward", unittest.mock.Mock(side_effect=error))
        with pytest.raises(ValueError, match=f"transformers cannot run .*prompts-plain: {reason}"):
            compared(llm, saved("plain")[1])
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="transformers runs models with PyTorch: pip install torch"):
        comparing.reference_class(saved("plain")[1])


def test_the_command(tmp_path, capsys, monkeypatch):
    (tmp_path / "text.txt").write_text("\ufeffsome more words, and others", encoding="utf-8")
    monkeypatch.setattr(comparing, "TEXTS", TEXTS)
    command = ["compare", str(saved("plain")[1]), "--drafter", "ngram", "--k", "3", "--tokens", "4", "--text", str(tmp_path / "text.txt")]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "20 tokens with 3 drafts a step" in said and said.splitlines()[-1].startswith("result      they agree")
    monkeypatch.setattr(comparing.Comparison, "agrees", False)
    assert main(command) == 1
    assert main(["compare", str(tmp_path)]) == 2 and "config.json" in capsys.readouterr().err
    (tmp_path / "text.txt").write_bytes(b"caf\xe9")
    assert main(command) == 2 and f"{tmp_path / 'text.txt'} is not UTF-8: " in capsys.readouterr().err
