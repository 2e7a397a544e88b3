"""Families of targets are files of `model`: elsewhere nothing is decided by which family a target is of."""

import ast
import re
from pathlib import Path

import pytest

import jaxspec

ROOT = Path(jaxspec.__file__).parent
NAMES = re.compile(r"gemma|step3", re.IGNORECASE)
# Where a family's name may stand in code, and why.
ALLOWED = {
    "model": "the families",
    "released.py": "shapes of released models",
    "vision": "image towers, which one family has",
    "audio": "audio towers, which one family has",
    "train/pocket": "how the bundled model, which is of one family, was made",
    "drafters/assistant.py": "a kind of drafter that reads that family's cache",
    "drafters/eagle3.py": "checkpoints of one architecture have that family's layers",
    "drafters/eagle3_config.py": "the same",
    "drafters/dspark.py": "the same",
    "drafters/dspark_config.py": "the same",
    "drafters/block_drafter.py": "the same",
    "drafters/blocks.py": "what those read",
    "vllm/arguments.py": "vLLM's names of methods",
    "checkpoint/gguf": "the one architecture of GGUF files that is read",
    "checkpoint/formats/rules.py": "transformers' name of a class",
    "text.py": "transformers' names of classes, which all mean what AutoTokenizer takes",
    "compile_check/check.py": "names of released shapes",
    "__init__.py": "the functional layer's modules by name",
}


def named(path):
    """(line, text) of every identifier, import and string of a file that names a family; not of docstrings and comments."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    for node in ast.walk(tree):
        texts = [getattr(node, field, None) for field in ("id", "attr", "name", "arg", "module", "asname")]
        if isinstance(node, ast.Constant) and id(node) not in docs:
            texts.append(node.value)
        yield from ((getattr(node, "lineno", 0), text) for text in texts if isinstance(text, str) and NAMES.search(text))


def allowed(path):
    return any(path.is_relative_to(place) for place in ALLOWED)


FILES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def test_no_family_is_named_outside_its_place():
    # What a person reads may name models; what decides may not.
    spoken = {("cli/__init__.py", "Speculative decoding in JAX, for Gemma 4 and Step-3.5.")}
    found = [(str(path), text) for path in FILES if not allowed(path) for _, text in named(ROOT / path)]
    assert [where for where in found if where not in spoken] == []


@pytest.mark.parametrize("place", ALLOWED)
def test_every_exception_is_needed(place):
    assert any(path.is_relative_to(place) and any(named(ROOT / path)) for path in FILES), place
