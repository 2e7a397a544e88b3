"""Batch jobs whose drafter learns from them: the same texts, a drafter beside the results, and a killed run that goes on with it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from fake_llm import read_lines, write_lines
from quick import few_programs

import jaxspec
from jaxspec import cli
from jaxspec.batch import job
from jaxspec.engine.params import SamplingParams
from jaxspec.learning import checkpoints
from jaxspec.learning.settings import Learn


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile(unoptimised):
    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        yield


COUNT = 40
LOADED = {"max_len": 64, "max_slots": 2, "num_draft_tokens": 2, "progress": False}
ASKED = SamplingParams(max_tokens=40, temperature=0.8, ignore_eos=True)
EAGER = {"share": 0.9, "batch": 1, "length": 32, "anchors": 4, "every": 1}
# A job as a process of its own, which writes the drafter often.
JOB = """
import json, sys
import jaxspec
from jaxspec.batch import job
from jaxspec.engine.params import SamplingParams
from jaxspec.learning.settings import Learn
target, drafter, source, out, loaded, asked, eager = map(json.loads, sys.argv[1:])
llm = jaxspec.load(target, drafter, **loaded)
job.run_batch(llm, source, out, SamplingParams(**asked), learn=Learn(save_seconds=0.5, **eager))
"""


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    folder = tmp_path_factory.mktemp("input")
    return write_lines(folder / "in.jsonl", [{"id": f"r{i}", "prompt": "def f():"[: i % 7 + 1]} for i in range(COUNT)])


@pytest.fixture(scope="module")
def plain(folders, lines, tmp_path_factory):
    """The texts of the job without learning."""
    out = tmp_path_factory.mktemp("plain") / "out.jsonl"
    with jaxspec.load(*folders, **LOADED) as llm:
        job.run_batch(llm, lines, out, ASKED)
    return texts(out)


def texts(*paths):
    return {record["id"]: record["text"] for path in paths for record in read_lines(path)}


@pytest.mark.slow  # tests/engine/test_learn.py has an LLM that learns, tests/batch/test_batch.py jobs that are killed
def test_a_job_that_learns_writes_the_same_texts_and_a_drafter(folders, lines, plain, tmp_path, monkeypatch):
    out, told = tmp_path / "out.jsonl", []
    monkeypatch.setattr("tqdm.std.tqdm.set_postfix_str", lambda bar, text, refresh: told.append(text))
    with jaxspec.load(*folders, **LOADED | {"progress": True}) as llm:
        job.run_batch(llm, lines, out, ASKED, learn=Learn(**EAGER))
        learnt = llm.stats.learning
        assert learnt.updates > 0 and learnt.ended == "closed"
        assert told[-1].endswith(f", acceptance length {learnt.start:.2f} -> {told[-1][-4:]}") and "tokens/s" in told[-1]
    assert texts(out) == plain
    drafter = tmp_path / "out.jsonl.drafter"
    assert (drafter / "config.json").exists() and checkpoints.steps_of(drafter / "learning")
    with jaxspec.load(folders[0], drafter, **LOADED) as llm:
        assert texts(out)["r3"] == llm.generate("def ", ASKED.replace(seed=read_line(out, "r3")["seed"]))[0].text


def read_line(out, name):
    return next(record for record in read_lines(out) if record["id"] == name)


@pytest.mark.slow  # test_batch.py kills a job, and tests/engine/test_learn.py goes on from what a run that was killed had saved
def test_a_killed_job_goes_on_with_what_its_drafter_learnt(folders, lines, plain, tmp_path):
    out = tmp_path / "out.jsonl"
    kept = {  # so that programs are those that other runs have compiled
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    asked = {"max_tokens": ASKED.max_tokens, "temperature": ASKED.temperature, "ignore_eos": True}
    arguments = [*map(str, folders), str(lines), str(out), LOADED, asked, EAGER]
    process = subprocess.Popen([sys.executable, "-c", JOB, *map(json.dumps, arguments)], env=os.environ | kept)
    state, deadline = tmp_path / "out.jsonl.drafter" / "learning", time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline and max(checkpoints.steps_of(state), default=0) < 1:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    steps, done = checkpoints.steps_of(state)[-1], out.read_bytes().count(b"\n")
    assert 0 < done < COUNT
    with jaxspec.load(*folders, **LOADED) as llm:
        job.run_batch(llm, lines, out, ASKED, learn=Learn(**EAGER))
        assert llm.stats.learning.updates >= steps >= 1
    assert texts(out) == plain


@pytest.mark.slow
def test_each_shard_has_a_drafter_of_its_own(folders, lines, plain, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    with jaxspec.load(*folders, **LOADED) as llm:
        job.run_batch(llm, lines, out, ASKED, shard="1/2", learn=Learn(**EAGER))
    command = ["batch", str(lines), str(out), "--shard", "2/2", "--learn", "0.5", "--target", str(folders[0]), "--drafter", str(folders[1])]
    sampling = ["--temperature", "0.8", "--ignore-eos", "--max-tokens", "40", "--max-len", "64", "--max-slots", "2", "--k", "2"]
    assert cli.main([*command, *sampling]) == 0
    assert texts(*(tmp_path / f"out-{i}-of-2.jsonl" for i in (1, 2))) == plain
    assert all((tmp_path / f"out-{i}-of-2.jsonl.drafter" / "model.safetensors").exists() for i in (1, 2))


def test_what_cannot_learn_is_refused_before_anything_is_computed(folders, lines, tmp_path):
    with jaxspec.load(folders[0], "ngram", **LOADED) as llm, pytest.raises(ValueError, match="the drafter is a NGram, which has nothing"):
        job.run_batch(llm, lines, tmp_path / "out.jsonl", learn=0.05)
    with jaxspec.load(*folders, **LOADED) as llm, pytest.raises(ValueError, match="share is 1.5, expected more than 0 and less than 1"):
        job.run_batch(llm, lines, tmp_path / "out.jsonl", learn=1.5)
    assert not list(tmp_path.glob("out.*"))
