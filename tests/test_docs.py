"""The pages in docs are built with warnings as errors, fetch nothing, and leave out no public name and no module."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jaxspec

ROOT = Path(__file__).parent.parent
PACKAGES = [*(path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("jaxspec/**/__init__.py")), "pallas_kernels"]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """{page: html} of one build, and its folder."""
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    assert (built.returncode, built.stdout, built.stderr) == (0, "", "")
    return {"folder": str(folder)} | {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.html")}


def test_nothing_is_fetched_to_read_them(pages):
    loads = re.compile(r"""<(?:script|img|iframe|source)[^>]*\ssrc=["']?(?:https?:)?//|<link[^>]*\shref=["']?(?:https?:)?//|@import""")
    assert [name for name, page in pages.items() if loads.search(page)] == []


def test_every_public_name_is_described(pages):
    described = {name for page in pages.values() for name in re.findall(r'id="((?:jaxspec|pallas_kernels)[\w.]*)"', page)}
    names = {f"{module}.{name}" for name, module in jaxspec._EXPORTS.items()}
    assert names - described == set()


def test_every_member_that_a_page_lists_is_on_it(pages):
    """mkdocstrings leaves out, without a word, what is not where a page says it is."""
    missing, entry = [], re.compile(r"^::: ([\w.]+)\n    options:\n      members: \[([\w, ]+)\]", re.MULTILINE)
    for path in (ROOT / "docs" / "api").glob("*.md"):
        for name, members in entry.findall(path.read_text(encoding="utf-8")):
            page = pages[f"api/{path.stem}.html"]
            missing += [f"{name}.{member}" for member in members.split(", ") if f'id="{name}.{member}"' not in page]
    assert missing == []


def test_arguments_are_a_list_and_long_signatures_have_lines(pages):
    entry = pages["api/engine.html"].partition('id="jaxspec.loading.load"')[2]
    signature, _, text = entry.partition("doc-contents")
    assert 5 < signature.count("\n") and "num_draft_tokens" in signature
    assert re.search(r"<li>\s*<p>?<strong>num_draft_tokens</strong>:|<li><strong>num_draft_tokens</strong>:", text)


def test_the_search_works_in_pages_that_are_opened_from_the_disk(pages):
    """It has its index as a script, and a frame in the place of a worker, before the script that starts the worker."""
    folder = Path(pages["folder"])
    assert "jaxspec.loading.load" in (folder / "search" / "search_index.js").read_text(encoding="utf-8")
    assert re.search(r'src="(\.\./)?javascripts/frame_worker\.js".*assets/javascripts/bundle', pages["index.html"], re.DOTALL)
    assert "IFrameWorker" in (folder / "javascripts" / "frame_worker.js").read_text(encoding="utf-8")


def test_a_notebook_is_a_page_with_what_it_showed(pages):
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        page = pages[f"notebooks/{path.stem}.html"]
        assert page.count("data:image/png;base64,") == path.read_text(encoding="utf-8").count('"image/png": ')
    assert "</mark>" in pages["notebooks/01_generate_and_stream.html"]


def test_every_module_is_listed_with_what_it_is_for(pages):
    listed = re.findall(r"<td><code>([\w/.]+)</code></td>\s*<td>(.+?)</td>", pages["files.html"])
    rows = {name.rstrip("/"): sentence for name, sentence in listed}
    assert [name for name, sentence in rows.items() if sentence.count("(") != sentence.count(")")] == []
    for package in PACKAGES:
        for path in (ROOT / package).glob("*.py"):
            if path.name not in ("__init__.py", "__main__.py"):
                assert rows.pop(f"{package}/{path.name}"), path
    assert rows["jaxspec/drafters"] and rows["pallas_kernels/moe"]
    assert [name for name in rows if not (ROOT / name).exists()] == []


@pytest.mark.parametrize(("name", "height"), [("step.svg", 560), ("scaling.svg", 510)])
def test_the_figures_are_legible_on_light_and_dark_pages(name, height):
    """They bring their own background, since a page's colours do not reach into an image."""
    figure = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert f'viewBox="0 0 1000 {height}"' in figure
    assert re.search(rf'<rect width="1000" height="{height}"[^>]*fill="#ffffff"', figure) and "http" not in figure.replace(
        "http://www.w3.org/2000/svg", ""
    )
