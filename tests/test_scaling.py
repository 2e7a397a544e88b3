"""The scripts on the page about scaling out are read by what reads them in the world, and name options that exist."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxspec import cli
from jaxspec.generator import COLUMNS

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)
SHELL, YAML, PYTHON = ([text for kind, text in BLOCKS if kind == wanted] for wanted in ("bash", "yaml", "python"))


@pytest.mark.parametrize("script", SHELL, ids=range(len(SHELL)))
def test_shell_scripts_parse(script):
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    for line in script.splitlines():
        if command := re.search(r"jaxspec ((?:batch|merge) .*)", line):
            words = command[1].replace('"${model[@]}"', "--target pocket").split()
            assert cli._parser().parse_args(words).command
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+(=\S+)?", line) for line in script.splitlines() if line.startswith("#SBATCH"))


def test_the_job_of_kubernetes_is_one_and_gives_its_number_to_the_command():
    (text,) = YAML
    job = yaml.safe_load(text)
    assert (job["apiVersion"], job["kind"], job["spec"]["completionMode"]) == ("batch/v1", "Job", "Indexed")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    asked = cli._parser().parse_args(container["command"][1:])
    assert asked.shard == f"auto/{job['spec']['completions']}"
    assert {mount["name"] for mount in container["volumeMounts"]} == {v["name"] for v in job["spec"]["template"]["spec"]["volumes"]}


@pytest.mark.parametrize("script", [*PYTHON, (ROOT / "examples" / "ray_batch.py").read_text(encoding="utf-8")])
def test_python_compiles(script):
    compile(script, "scaling.md", "exec")


def test_the_columns_that_spark_must_know_are_those_of_a_generator():
    (names,) = re.findall(r'COLUMNS = "(.*)"', PAGE)
    assert [name.split()[0] for name in names.split(", ")] == list(COLUMNS)


@pytest.mark.slow  # tests/test_readme.py runs another such loop
def test_the_loop_of_ones_own_runs(capsys, unoptimised):
    exec(compile(PYTHON[-1], "scaling.md", "exec"), {})
    assert "[16 16]" in capsys.readouterr().out
