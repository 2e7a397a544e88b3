"""The notebooks run from top to bottom without a warning, and are stored with the outputs of the code that they hold.

They run on the bundled models, one after another in one kernel, which forgets its variables in between, and share compiled programs with
the other tests. JAXSPEC_SHORT leaves out what a first look needs but a test does not: most of the points of a curve, most of the steps of
a training run. Engines have fewer programs than a user's, which pick the one nearest to a call's size, and these are not optimised.
"""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from jaxspec.checkpoint import hub
from jaxspec.engine import html

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("run_notebooks", ROOT / "notebooks" / "run.py")
assert spec is not None and spec.loader is not None
runner = importlib.util.module_from_spec(spec)
spec.loader.exec_module(runner)
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
FIGURES = {"01": 1, "02": 3, "03": 3, "04": 1, "05": 1, "06": 1, "07": 1}  # how many pictures each draws
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
REPOSITORY = re.findall(r"^REPOSITORY = (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)[0]
STARTUP = """
import pytest, quick
quick.few_programs(pytest.MonkeyPatch())
del pytest, quick
"""


def numbered(number):
    (path,) = (path for path in NOTEBOOKS if path.name.startswith(number))
    return path


def cells(path, kind):
    return [cell for cell in nbformat.read(path, 4).cells if cell.cell_type == kind]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """A client of a kernel that has begun."""
    folder = tmp_path_factory.mktemp("kernel")
    settings = {
        "JAXSPEC_SHORT": "1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        # As in pyproject.toml: other processes may be at the same cache of compiled programs.
        "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry:UserWarning",
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        # A kernel finds the package as this process does, and not by the folder that it starts in.
        "PYTHONPATH": os.pathsep.join([str(Path(html.__file__).parents[2]), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]),
    }
    startup = folder / "ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "programs.py").write_text(STARTUP)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        where = {"metadata": {"path": str(folder)}}
        client = NotebookClient(nbformat.v4.new_notebook(), timeout=600, kernel_name="python3", resources=where)
        with client.setup_kernel():
            yield client


# Each is stored as it ran last, which is looked at below; one is run.
@pytest.mark.parametrize("number", [n if n == "01" else pytest.param(n, marks=pytest.mark.slow) for n in FIGURES])
def test_notebook_runs_without_a_warning_and_draws(number, kernel):
    kernel.nb = notebook = nbformat.read(numbered(number), 4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
    for i, cell in enumerate(notebook.cells):
        kernel.execute_cell(cell, i)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == FIGURES[number]
    pages = "".join(output.get("data", {}).get("text/html", "") for output in outputs)
    if number in ("01", "02", "04", "06"):  # they show completions
        assert html.TINTS["draft"] in pages and html.TITLES["target"] in pages
    if number == "01":
        assert "6.8 million parameters" in pages


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name[:2])
def test_notebook_is_stored_with_the_outputs_of_its_code(path):
    """After a change of its code, `make notebooks` runs it again."""
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    stored = notebook.metadata["jaxspec"]
    assert stored["code"] == runner.fingerprint(notebook) and stored["device"]
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert [output.text for output in outputs if output.output_type == "stream" and output.name == "stderr"] == []
    assert sum("image/png" in output.get("data", {}) for output in outputs) == FIGURES[path.name[:2]]
    assert not any("widget" in kind for output in outputs for kind in output.get("data", {}))
    assert path.stat().st_size < 1_000_000
    assert not any(set(cell.metadata) - {"tags"} for cell in notebook.cells)
    title, *rest = notebook.cells[0].source.splitlines()
    assert title.startswith(f"# {int(path.name[:2])}. ")
    address = f"https://colab.research.google.com/github/{REPOSITORY}/blob/main/notebooks/{path.name}"
    assert f"]({address})" in "\n".join(rest)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name[:2])
def test_memory_is_set_and_the_package_there_before_jax_starts(path):
    first, *rest = cells(path, "code")
    assert first.source == cells(NOTEBOOKS[0], "code")[0].source, "the first cell differs from that of the first notebook"
    extras = re.findall(r"jaxspec\[([\w,]+)\]", first.source)[0].split(",")
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])
    assert 'os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", ' in first.source and f'git+https://github.com/{REPOSITORY}"' in first.source
    python = "\n".join(line.replace("%pip install", "pass  #") for line in first.source.splitlines())
    imported = {alias.name for node in ast.walk(ast.parse(python)) if isinstance(node, ast.Import) for alias in node.names}
    assert imported == {"importlib.util", "os"}
    assert any(re.search(r"^(import|from) jax", cell.source, re.MULTILINE) for cell in rest)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name[:2])
def test_files_that_are_named_exist(path):
    text = "\n".join(cell.source for cell in cells(path, "markdown"))
    for name in re.findall(r"`((?:jaxspec|pallas_kernels|notebooks|docs)/[\w./]+)`", text):
        assert (ROOT / name).exists(), name


def test_every_bundled_drafter_is_compared():
    (listed,) = re.findall(r"^DRAFTERS = (\[.*\])$", "\n".join(cell.source for cell in cells(numbered("03"), "code")), re.MULTILINE)
    assert set(ast.literal_eval(listed)) == set(hub.bundled()) - {"pocket"} | {"ngram"}


def test_one_place_says_where_the_repository_is_published(tmp_path):
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns(".*"))
    shutil.copy(ROOT / "Makefile", tmp_path)
    subprocess.run(["make", "address", "REPOSITORY=some-one/spec.x"], cwd=tmp_path, check=True, capture_output=True)
    assert [path.name for path in sorted((tmp_path / "notebooks").iterdir())] == [*(path.name for path in NOTEBOOKS), "run.py"]
    for path in NOTEBOOKS:
        before, after = (folder.read_text(encoding="utf-8") for folder in (path, tmp_path / "notebooks" / path.name))
        assert after.count("some-one/spec.x") == 2 and after.replace("some-one/spec.x", REPOSITORY) == before
