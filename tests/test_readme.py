"""README and Contributing run: Python and commands as they stand, but for those that are marked as needing weights, a GPU or a set-up.

A block of commands says so behind its language: `sh` runs here; of `sh weights` the options are parsed, and what bundled models can stand
in for runs with them; of `sh setup` the make targets and extras are looked up. The commands in docs and notebooks are parsed too.
"""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from quick import few_programs

from jaxspec import cli, loading
from jaxspec.compile_check import check

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
RECORDS = ROOT / "benchmarks" / "results"
BLOCKS = re.findall(r"```([^\n]*)\n(.*?)```", README + CONTRIBUTING, re.DOTALL)
PYTHON = [block for kind, block in BLOCKS if kind == "python"]
COMMANDS, WEIGHTS = ([line for kind, block in BLOCKS if kind == wanted for line in block.splitlines()] for wanted in ("sh", "sh weights"))


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile(unoptimised):
    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        patch.setattr(loading, "MAX_SLOTS", 2)  # as many as the most prompts of one call
        yield


def cells_of(path):
    return "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])


TEXTS = {
    "README.md": README,
    **{path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))},
    **{path.name: cells_of(path) for path in sorted((ROOT / "notebooks").glob("*.ipynb"))},
}


def test_every_block_says_what_it_is():
    assert {kind for kind, _ in BLOCKS} == {"python", "sh", "sh weights", "sh setup"}
    assert len(PYTHON) >= 2 and len(COMMANDS) >= 4


@pytest.mark.parametrize("block", range(len(PYTHON)))
def test_block_runs(block, capsys):
    exec(compile(PYTHON[block], f"README.md block {block}", "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip(), "the block printed nothing"


def ran(line, capsys):
    """What a command prints, run in this process where it is one of ours."""
    ours = {"jaxspec ": cli.main, "python -m jaxspec.compile_check ": check.main}
    for name, main in ours.items():
        if line.startswith(name):
            assert main(shlex.split(line.removeprefix(name))) == 0, line
            said = capsys.readouterr()
            assert said.out.strip() or said.err.strip(), line
            return said.out
    return subprocess.run(line, shell=True, check=True, capture_output=True, text=True).stdout


@pytest.mark.slow  # below their options are parsed, and tests/test_cli.py runs such commands on tiny models
def test_commands_run_one_after_the_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for line in COMMANDS:
        ran(line, capsys)
    assert json.loads((tmp_path / "results.jsonl").read_text())["text"]


def test_commands_for_real_weights_run_on_the_bundled_models(tmp_path, monkeypatch, capsys):
    """Those that compile nothing: `train` and `bench` have tests of their own."""
    monkeypatch.chdir(tmp_path)
    lines = [re.sub(r"google/\S+-it\b", "pocket", re.sub(r"google/\S+-assistant", "pocket-mtp", line)) for line in WEIGHTS]
    ran(next(line for line in lines if " info " in line), capsys)
    ran(next(line for line in lines if " convert " in line), capsys)
    assert (tmp_path / "gemma-4-31B-fused" / "config.json").is_file()


def test_make_demo_does_what_a_command_above_does():
    """But for more tokens."""
    (recipe,) = re.findall(r"^demo:.*\n\t\$\(BIN\)/jaxspec (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    demo, shown = (vars(cli._parser().parse_args(shlex.split(line))) for line in (recipe, COMMANDS[0].removeprefix("jaxspec ")))
    assert {name for name in demo if demo[name] != shown[name]} == {"max_tokens", "prompt"}


@pytest.mark.parametrize("name", TEXTS)
def test_options_of_every_command_exist(name):
    text = TEXTS[name]
    commands = re.findall(r"^ *(?:CUDA_VISIBLE_DEVICES=\d )?(jaxspec [a-z]+ .*?)(?: &)?$", text, re.MULTILINE)
    commands += re.findall(r"`(jaxspec [a-z]+ [^`]*--[^`]*)`", text)
    for command in commands:
        cli._parser().parse_args(shlex.split(command, comments=True)[1:])
    assert len(commands) >= 8 or name != "README.md"


def test_make_targets_extras_and_links_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"(?:`|^)make ([a-z-]+)\b", README + CONTRIBUTING, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for named in re.findall(r"\.\[([\w,]+)\]", README + CONTRIBUTING):
        assert set(named.split(",")) <= set(extras), named
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def rows_of(text):
    """The cells of every row of every table."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def test_the_table_of_steps_is_the_record_s():
    """Step, vLLM's step, tokens/s and the floor's share, of each target and batch: otherwise the README claims what nobody measured."""
    name, recorded = "", {}
    records = (RECORDS / f"2026-11-{record}-h200-steps.md" for record in (26, 28))  # the newest counts
    for first, *cells in (row for record in records for row in rows_of(record.read_text(encoding="utf-8"))):
        name = first or name
        if len(cells) in (6, 7) and cells[0].isdigit() and (found := re.fullmatch(r"([\w-]+(?: \w+)?), K = (\d)", name)):
            batch, step, tokens, floor, *_, other = cells
            step = float(step.split()[0])
            recorded[(*found.groups(), batch)] = [step, float(other), tokens, f"{100 * float(floor) / step:.0f} %"]
    shown = {tuple(row[:3]): row[3:] for row in rows_of(README) if len(row) == 7 and row[1].isdigit()}
    assert shown.keys() == recorded.keys() and len(shown) == 21
    for cell, (step, other, *rest) in shown.items():
        assert rest == recorded[cell][2:], cell
        assert [abs(float(step) - recorded[cell][0]) <= 0.0501, abs(float(other) - recorded[cell][1]) <= 0.0501] == [True, True], cell
    for quantised in (False, True):
        saved = [1 - found[0] / found[1] for (name, *_), found in recorded.items() if (" " in name) is quantised]
        assert f"{100 * min(saved):.0f} to {100 * max(saved):.0f} % less" in README


def test_the_gains_of_several_gpus_are_the_records():
    mesh, four, later = "2026-11-22-h200-mesh.md", "2026-11-22-h200-four.md", "2026-11-26-h200-four.md"
    for record, gain in ((mesh, "1.97"), (four, "3.98"), (mesh, "1.7"), (later, "2.9")):
        text = (RECORDS / record).read_text(encoding="utf-8")
        found = re.findall(r"\| (\d\.\d\d)(?: to \d\.\d+)? times", text)
        assert any(abs(float(number) - float(gain)) <= 0.0501 for number in found), record
        assert f"{gain} times" in README and record in README


def test_the_speed_of_a_stream_is_the_record_s():
    text = (RECORDS / "2026-11-26-h200-calls.md").read_text(encoding="utf-8")
    assert "[1,816 tokens/s](benchmarks/results/2026-11-26-h200-calls.md)" in README and "| 1,816 (" in text
    text = (RECORDS / "2026-11-29-open-streams.md").read_text(encoding="utf-8")
    assert "eight open ones [7,048](benchmarks/results/2026-11-29-open-streams.md) and eight threads 5,327" in README
    assert "--open 8 --repeats 3` | 8 | 7,048 (" in text and ": 5,327 tokens/s (" in text


def test_nothing_says_to_install_another_project_s_package():
    """The name on the public index is not ours."""
    for name, text in TEXTS.items():
        assert not re.search(r"pip install (--?\w[\w-]* )*[\"']?jaxspec(?!\[[\w,]+\] @ git)", text), name


def test_the_first_screen_has_eight_lines_of_python():
    assert len([line for line in PYTHON[0].splitlines() if line.strip()]) == 8


def test_the_part_before_the_reference_is_two_screens():
    assert README.split("\n## Reference\n")[0].count("\n") <= 90


def test_the_batch_script_stays_short():
    """What a batch-generation script needs of the functional layer is about thirty lines."""
    lines = [line for line in PYTHON[-1].splitlines() if line.strip() and not line.startswith(("import", "from"))]
    assert len(lines) <= 32
