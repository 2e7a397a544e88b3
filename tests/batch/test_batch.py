"""Batch jobs: what is written, what a killed run leaves behind, and that nothing is lost or made twice."""

import errno
import gzip
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest
from fake_llm import FakeLLM, read_lines, sorted_lines, write_lines

import jaxspec
from jaxspec import cli
from jaxspec.batch import job, results
from jaxspec.batch.lines import derived_seed
from jaxspec.engine import runner
from jaxspec.engine.params import SamplingParams

pytestmark = pytest.mark.usefixtures("unoptimised")


@pytest.fixture(scope="module")
def model(folders):
    """A target's folder, and an LLM of it."""
    return folders[0], jaxspec.load(folders[0], max_len=64, max_slots=1, progress=False)


@pytest.fixture
def requests(tmp_path):
    lines = [{"id": f"r{i}", "prompt": f"text {i}", "params": {"temperature": i / 10}} for i in range(1, 21)]
    lines[4] = {"id": 5, "prompt": [1, 2, 3], "params": {"n": 3, "seed": 2**63 - 2, "temperature": 1}}
    lines[9] = {"messages": [{"role": "user", "content": "Hi"}]}
    lines[14] = "   "
    return write_lines(tmp_path / "in.jsonl", lines)


@pytest.fixture
def whole(requests, tmp_path):
    """The results of a run that nothing interrupted."""
    result = job.run_batch(FakeLLM(), requests, tmp_path / "whole.jsonl")
    assert (result.written, result.kept, result.failed, result.bad) == (21, 0, 0, 0)
    return sorted_lines(tmp_path / "whole.jsonl")


class Unlearning(FakeLLM):
    def learn(self, _):
        raise ValueError("the drafter has nothing to learn")


@pytest.mark.parametrize("name", ["out.jsonl", "out.parquet", "there.jsonl"])
def test_a_run_that_is_refused_leaves_no_file(name, requests, tmp_path):
    """None, at least, that was not there before."""
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")
    (tmp_path / "there.jsonl").touch()
    with pytest.raises(TypeError, match="seed"):
        job.run_batch(FakeLLM(), requests, tmp_path / name, seed="x")
    with pytest.raises(ValueError, match="nothing to learn"):
        job.run_batch(Unlearning(), requests, tmp_path / name, learn=0.05)
    with pytest.raises(KeyError), job.BatchJob(requests, tmp_path / name):
        raise KeyError  # as if a model could not be loaded
    assert {path.name for path in tmp_path.iterdir()} - {requests.name} == {"there.jsonl"}


def test_a_run_that_is_refused_leaves_links_and_runs_that_began(requests, tmp_path):
    (link := tmp_path / "link.jsonl").symlink_to(tmp_path / "real.jsonl")
    with pytest.raises(TypeError, match="seed"):
        job.run_batch(FakeLLM(), requests, link, seed="x")
    assert link.is_symlink() and not link.exists()
    (empty := tmp_path / "empty").touch()
    for _ in range(2):
        job.run_batch(FakeLLM(), empty, out := tmp_path / "none.jsonl")
        out.unlink()  # with settings beside it, a run that began leaves it all the same


def test_files_at_home(requests, whole, tmp_path, monkeypatch):
    """As a shell leaves --errors=~/errors.jsonl, and as Python is given it."""
    monkeypatch.setenv("HOME", str(tmp_path))
    requests.write_text(requests.read_text() + "no JSON\n")
    assert job.run_batch(FakeLLM(), f"~/{requests.name}", "~/out.jsonl", errors="~/errors.jsonl").bad == 1
    assert sorted_lines(tmp_path / "out.jsonl") == whole and (tmp_path / "errors.jsonl").exists()


def test_a_result_says_what_it_is_of_and_what_it_took(requests, tmp_path):
    out = tmp_path / "out.jsonl"
    job.run_batch(FakeLLM(), requests, out, SamplingParams(temperature=0.5), seed=3, token_ids=True)
    found = {(r["id"], r.get("index")): r for r in read_lines(out)}
    assert len(found) == 21
    first = found["r1", None]
    seed = first["seed"]
    assert first == {
        "id": "r1",
        "line": 1,
        "request": first["request"],
        "text": f"{FakeLLM.tokenizer.encode('text 1')} 0.1 {seed}",
        "token_ids": [7, 8, 9],
        "finish_reason": "length",
        "stop_reason": None,
        "seed": seed,
        "model": "fake",
        "usage": {"prompt_tokens": 6, "completion_tokens": 3},
        "acceptance": {"steps": 1, "drafted": 2, "accepted": 1, "length": 2.0},
    }
    assert [found[5, i]["seed"] for i in range(3)] == [2**63 - 2, 2**63 - 1, 0]
    assert found[10, None]["text"].startswith("[1, 0] 0.5 ")
    seeds = {r["seed"] for r in found.values()}
    assert len(seeds) == 21
    # Seeds follow the run's.
    job.run_batch(FakeLLM(), requests, tmp_path / "other.jsonl", seed=4)
    assert len(seeds & {r["seed"] for r in read_lines(tmp_path / "other.jsonl")}) == 3


@pytest.mark.parametrize(
    "torn", [b"", b'{"id": "r9", "li', b'{"id": "r9", "line": 9}', b"\0" * 70, b'{"id": \0\0\0}\n{"id": "r1", "line": 1}\n']
)
def test_an_interrupted_run_goes_on_where_it_was(torn, requests, whole, tmp_path):
    out = tmp_path / "out.jsonl"
    done, left = 0, 21
    for dies in (0, 7, 6):
        llm = FakeLLM(dies)
        with pytest.raises(KeyboardInterrupt):
            job.run_batch(llm, requests, out)
        assert len(llm.served) == dies and len(read_lines(out)) == done + dies
        done, left = done + dies, left - dies
        with open(out, "ab") as file:
            file.write(torn)
    llm = FakeLLM()
    result = job.run_batch(llm, requests, out)
    assert sorted_lines(out) == whole
    assert (result.written, result.kept, len(llm.served)) == (left, done, left)
    assert job.run_batch(FakeLLM(dies=0), requests, out).written == 0


def test_shards_share_the_lines_and_their_results_are_those_of_one_run(requests, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        job.run_batch(FakeLLM(3), requests, tmp_path / "out.jsonl", shard="2/3")
    for shard in ("3/3", "1/3", "2/3"):
        job.run_batch(FakeLLM(), requests, tmp_path / "out.jsonl", shard=shard)
    paths = [tmp_path / f"out-{i}-of-3.jsonl" for i in (1, 2, 3)]
    assert sorted_lines(*paths) == whole
    assert {r["line"] % 3 for r in read_lines(paths[1])} == {2}


def test_input_is_read_as_it_is_needed(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"} for _ in range(500)])
    llm = FakeLLM()
    job.run_batch(llm, path, tmp_path / "out.jsonl")
    assert len(llm.served) == 500 and llm.most_ahead <= 4
    # A job may grow.
    with open(path, "a") as file:
        file.write('{"prompt": "y"}')
    assert job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl").written == 1


BAD = {
    "{": "not JSON: Expecting property name",
    "[" * 100_000: "the JSON is nested too deeply",
    '"text"': "the line is a str, expected an object",
    '{"prompt": "x", "parms": {}}': "found 'parms'; expected 'params', or a name less like it for a column that is passed on",
    '{"prompt": "x", "sampling_params": {}}': "found 'sampling_params'; expected 'params', or a name less like it",
    '{"prompt": "x", "max_tokens": 9}': "found 'max_tokens', which belongs into params",
    '{"prompt": "x", "multi_modal_data": {}}': "found 'multi_modal_data', which no line has; images, sounds and videos belong",
    '{"prompt": "x", "text": "y"}': "found 'text', which results have themselves; name the column otherwise",
    '{"prompt": "x", "params": {"top_q": 1}}': "params has 'top_q'; expected some of allowed_token_ids, bad_words,",
    '{"prompt": "x", "params": [1]}': "params is [1], expected an object",
    '{"prompt": "x", "params": []}': "params is [], expected an object",
    '{"prompt": "x", "params": {"temperature": -1}}': "temperature is -1.0, expected a finite number",
    '{"prompt": "x", "params": {"max_tokens": "9"}}': "max_tokens is '9' of type str, expected an integer",
    '{"prompt": "x", "id": 1.5}': "id is 1.5, expected a text or an integer",
    '{"prompt": "x", "messages": []}': "found both prompt and messages; expected one of them",
    '{"id": 70}': "found neither prompt nor messages; expected one of them",
    '{"prompt": ""}': "the prompt is empty; expected at least one token",
}


def test_bad_lines_are_put_aside_with_their_number_and_the_reason(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", ['{"prompt": "first"}', *BAD, '{"id": "\\ud800", "prompt": "last"}'])
    with open(path, "ab") as file:
        file.write(b'{"prompt": "\xff"}\n')
    for _ in range(2):  # another run finds them again
        result = job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl")
        assert (result.bad, result.errors) == (len(BAD) + 1, tmp_path / "out.errors.jsonl")
        found = read_lines(result.errors)
        assert [r["line"] for r in found] == [*range(2, len(BAD) + 2), len(BAD) + 3]
        for record, reason in zip(found, [*BAD.values(), "not JSON: 'utf-8' codec can't decode byte 0xff"], strict=True):
            assert record["error"].startswith(reason)
        assert sorted(map(str, (r["id"] for r in read_lines(tmp_path / "out.jsonl")))) == ["1", "\ud800"]
    write_lines(path, ['{"prompt": "first"}', '{"id": 2, "prompt": "mended"}'])
    result = job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl")
    assert (result.written, result.bad, result.errors.exists()) == (1, 0, False)


@pytest.mark.parametrize("torn", [b"", b'{"li', b'{"line": 2, "id": 2, "err', b'{"line": 2, "id"\0\0\0', b"\0" * 80])
def test_errors_that_a_killed_run_left_torn_are_found_again(torn, tmp_path):
    path, errors = write_lines(tmp_path / "in.jsonl", ['{"prompt": "x"}', "bad"]), tmp_path / "out.errors.jsonl"
    errors.write_bytes(torn)
    assert job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl").bad == 1
    assert [r["line"] for r in read_lines(errors)] == [2]


def test_a_request_that_fails_alone_has_an_error_in_its_result(tmp_path):
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "x", "params": {"seed": i}} for i in range(3)])
    result = job.run_batch(FakeLLM(fails=(1,)), path, tmp_path / "out.jsonl")
    assert (result.written, result.failed) == (3, 1)
    assert [r.get("error") for r in sorted(read_lines(result.out), key=lambda r: r["line"])] == [None, "row 3 is NaN", None]
    assert job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl").failed == 1


@pytest.mark.parametrize("raises", [OverflowError("out of bounds"), RuntimeError(), jax.errors.JaxRuntimeError("INTERNAL")], ids=repr)
def test_a_line_that_raises_while_it_is_served_is_put_aside(raises, requests, whole, tmp_path):
    """The lines beside it are served again and those behind it are not forgotten; mended, it is served by the next run."""
    poison = [[1, 2, 3], *map(FakeLLM.tokenizer.encode, ("text 7", "text 8", "text 20"))]
    for _ in range(2):
        llm = FakeLLM(raises=raises, poison=poison)
        result = job.run_batch(llm, requests, tmp_path / "out.jsonl")
        assert (result.written + result.kept, result.bad) == (21 - 6, 4)
        found = sorted(read_lines(result.errors), key=lambda record: record["line"])
        name = type(raises).__name__
        assert found == [{"line": i, "id": i if i == 5 else f"r{i}", "error": f"{name}: {raises}"} for i in (5, 7, 8, 20)]
        assert sorted_lines(result.out) == [line for line in whole if json.loads(line)["line"] not in (5, 7, 8, 20)]
    assert job.run_batch(FakeLLM(), requests, tmp_path / "out.jsonl").written == 6
    assert sorted_lines(tmp_path / "out.jsonl") == whole and not result.errors.exists()


@pytest.mark.parametrize(
    ("raises", "poison"),
    [
        (OSError(28, "No space left on device"), [[1, 2, 3]]),
        (MemoryError(), [[1, 2, 3]]),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate"), [[1, 2, 3]]),
        (ValueError("no request is served"), None),
    ],
    ids=repr,
)
def test_what_concerns_the_whole_job_ends_it(raises, poison, requests, whole, tmp_path):
    """A line is not blamed for what other requests raise too."""
    with pytest.raises(type(raises)) as caught:
        job.run_batch(FakeLLM(raises=raises, poison=poison), requests, tmp_path / "out.jsonl")
    assert caught.value is raises and not (tmp_path / "out.errors.jsonl").exists()
    job.run_batch(FakeLLM(), requests, tmp_path / "out.jsonl")
    assert sorted_lines(tmp_path / "out.jsonl") == whole


def test_a_line_whose_request_or_result_raises_is_put_aside(requests, tmp_path, monkeypatch):
    def chat_input(self, messages, *, enable_thinking=False):
        raise KeyError("a template's own")

    def result_of(line, sample, done, **settings):
        return {"text": object()} if line.number == 12 else kept(line, sample, done, **settings)

    kept = job.result_of
    monkeypatch.setattr(FakeLLM, "chat_input", chat_input)
    monkeypatch.setattr(job, "result_of", result_of)
    result = job.run_batch(FakeLLM(), requests, tmp_path / "out.jsonl")
    assert (result.written, result.bad) == (19, 2) and len(read_lines(result.out)) == 19
    assert {r["line"]: r["error"] for r in read_lines(result.errors)} == {
        10: 'KeyError: "a template\'s own"',
        12: "Object of type object is not JSON serializable",
    }


def test_a_line_that_passes_the_check_and_cannot_be_computed_is_put_aside(model, tmp_path, monkeypatch):
    lines = [{"prompt": "def f():"[: 1 + i % 7], "params": {"max_tokens": 4 + i % 5}} for i in range(20)]
    path = write_lines(tmp_path / "in.jsonl", lines)
    llm = model[1]
    params = SamplingParams(temperature=0.8, ignore_eos=True)
    job.run_batch(llm, path, tmp_path / "whole.jsonl", params)

    def arrays_of(requests, *sizes):
        if any(request.params.max_tokens == 7 for request in requests):
            raise OverflowError("Python integer 10000000000 out of bounds for int32")
        return real(requests, *sizes)

    real = runner.arrays_of
    monkeypatch.setattr(runner, "arrays_of", arrays_of)
    result = job.run_batch(llm, path, tmp_path / "out.jsonl", params)
    bad = [4, 9, 14, 19]
    error = "OverflowError: Python integer 10000000000 out of bounds for int32"
    assert read_lines(result.errors) == [{"line": i, "id": i, "error": error} for i in bad]
    expected = [line for line in sorted_lines(tmp_path / "whole.jsonl") if json.loads(line)["line"] not in bad]
    assert sorted_lines(result.out) == expected


def test_a_full_disk_is_one_line_that_says_what_to_do(requests, whole, tmp_path, monkeypatch, capsys):
    """The line that had no room for its end is made again."""
    out, room = tmp_path / "out.jsonl", 0

    class File(io.FileIO):
        def write(self, text):
            size = min(len(text), room - self.tell() if Path(self.name) == full else len(text))
            if not size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(text[:size])

    monkeypatch.setattr(job, "open", lambda path, mode, **_: File(path, mode.replace("b", "")), raising=False)
    monkeypatch.setattr("jaxspec.cli.options.load_model", lambda args, **settings: (FakeLLM(), SamplingParams(seed=args.seed)))
    for full, room in ((tmp_path / "out.jsonl.run.json", 5), (out, 1000), (out, 2000)):
        assert cli.main(["batch", str(requests), str(out)]) == 2
        said = f"{full} cannot be written: No space left on device; what is written stays, and the same command goes on with it"
        assert capsys.readouterr().err == f"jaxspec: [Errno 28] {said}\n"
        assert out.stat().st_size == (room if full == out else 0)
    room = 10**6
    assert cli.main(["batch", str(requests), str(out)]) == 0
    assert sorted_lines(out) == whole


def test_only_one_process_writes_an_output(requests, tmp_path):
    with job.BatchJob(requests, tmp_path / "out.jsonl"):
        with pytest.raises(ValueError, match=r"out\.jsonl is being written by another process; wait for it, or name another output"):
            job.BatchJob(requests, tmp_path / "out.jsonl")
        job.BatchJob(requests, tmp_path / "out.jsonl", shard="1/2").__exit__()
    job.BatchJob(requests, tmp_path / "out.jsonl").__exit__()


def test_a_device_or_a_link_for_errors_is_never_removed(requests, tmp_path):
    """As --errors /dev/null would be, where the user is root."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "log").touch()
    (tmp_path / "link").symlink_to("log")
    for name in ("pipe", "link"):
        job.BatchJob(requests, tmp_path / "out.jsonl", errors=tmp_path / name).__exit__()
        assert (tmp_path / name).exists() and (tmp_path / "log").is_file()


def test_files_and_arguments_that_make_no_sense(requests, tmp_path):
    llm, out = FakeLLM(), tmp_path / "out.jsonl"
    for shard in ("0/2", "3/2", "1", "a/b"):
        with pytest.raises(ValueError, match=f"shard is '{shard}', expected i/n with i from 1 to n, such as 2/4, or auto"):
            job.run_batch(llm, requests, out, shard=shard)
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl is not a file; expected a file of JSON lines"):
        job.run_batch(llm, tmp_path / "no.jsonl", out)
    forms = {"gzip": gzip.compress(b"{}"), "UTF-16": "{}".encode("utf-16"), "parquet": b"PAR1 and more"}
    for name, content in forms.items():
        (tmp_path / "other.jsonl").write_bytes(content)
        with pytest.raises(ValueError, match=f"other.jsonl is .*{name}.*; expected"):
            job.BatchJob(tmp_path / "other.jsonl", out)
    with pytest.raises(IsADirectoryError, match="the output .* is a folder; expected a file to write"):
        job.run_batch(llm, requests, tmp_path)
    assert not list(tmp_path.parent.glob(f"{tmp_path.name}.*"))
    with pytest.raises(FileNotFoundError, match="the folder .*no of the output does not exist"):
        job.run_batch(llm, requests, tmp_path / "no" / "out.jsonl")
    for place in (out, "-"):  # before any line is served
        with pytest.raises(FileNotFoundError, match="the folder .*no of the errors does not exist"):
            job.run_batch(llm, requests, place, errors=tmp_path / "no" / "errors.jsonl")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="the output .*pipe is a device or a pipe, where no run resumes; expected a file, or -"):
        job.run_batch(llm, requests, tmp_path / "pipe")
    settings = tmp_path / "out.jsonl.run.json"
    (tmp_path / "link").symlink_to(settings.name)
    for given in (
        {"out_path": requests},
        {"out_path": out, "errors": out},
        {"out_path": out, "errors": requests},
        {"out_path": out, "errors": settings},
        {"out_path": out, "errors": tmp_path / ".." / tmp_path.name / settings.name},
        {"out_path": out, "in_path": tmp_path / "link"},
        {"out_path": out, "in_path": settings},
    ):
        with pytest.raises(ValueError, match=r"found the input .*, the run file .*out\.jsonl\.run\.json|expected four different files"):
            job.run_batch(llm, **{"in_path": requests, **given})
    assert not settings.exists()
    with pytest.raises(TypeError, match="params is dict, expected jaxspec.SamplingParams or None"):
        job.run_batch(llm, requests, out, {})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"params\.seed is 3, which all lines would share; expected None"):
        job.run_batch(llm, requests, out, SamplingParams(seed=3))
    mine = write_lines(tmp_path / "mine.jsonl", ["dear diary"])
    with pytest.raises(
        ValueError, match=r"mine\.jsonl exists but mine\.jsonl\.run\.json, which a run writes next to its results, does not"
    ):
        job.run_batch(llm, requests, mine)
    with pytest.raises(ValueError, match=r"mine\.jsonl exists and is not a file of errors; name another"):
        job.run_batch(llm, requests, out, errors=mine)
    assert mine.read_text() == "dear diary\n"


def test_a_damaged_file_of_settings_is_named(requests, tmp_path):
    job.run_batch(FakeLLM(), requests, out := tmp_path / "out.jsonl")
    for text, said in (('{"top_k": ', "is not JSON: "), ("[1]", "holds a list; expected an object")):
        (tmp_path / "out.jsonl.run.json").write_text(text)
        with pytest.raises(ValueError, match=rf"^{tmp_path}/out\.jsonl\.run\.json {said}"):
            job.run_batch(FakeLLM(), requests, out)


def test_a_run_that_is_refused_leaves_the_errors_of_an_earlier_one(tmp_path):
    requests, out = write_lines(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": 1}]), tmp_path / "out.jsonl"
    found = job.run_batch(FakeLLM(), requests, out)
    said = found.errors.read_text()
    with pytest.raises(ValueError, match="use the same to resume"):
        job.run_batch(FakeLLM(), requests, out, seed=2)
    with pytest.raises(KeyError), job.BatchJob(requests, out):
        raise KeyError  # as if a model could not be loaded
    assert found.errors.read_text() == said and json.loads(said)["line"] == 2
    write_lines(requests, [{"prompt": "a"}, {"prompt": "b"}])  # mended
    job.run_batch(FakeLLM(), requests, out)
    assert not found.errors.exists()


def test_results_of_another_run_are_not_gone_on_with(requests, tmp_path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        job.run_batch(FakeLLM(8), requests, out, seed=1)
    with pytest.raises(ValueError, match=r"was made with run_seed 1, not 2; temperature None, not 0\.5: use the same to resume"):
        job.run_batch(FakeLLM(), requests, out, SamplingParams(temperature=0.5), seed=2)
    other = FakeLLM()
    other.text_settings = {**other.text_settings, "dtype": "bfloat16"}
    with pytest.raises(ValueError, match=r"was made with dtype 'float32', not 'bfloat16': use the same to resume"):
        job.run_batch(other, requests, out, seed=1)
    line = read_lines(out)[0]["line"]
    lines = requests.read_text().splitlines()
    changed = write_lines(tmp_path / "changed.jsonl", [*lines[: line - 1], '{"id": "other", "prompt": "x"}', *lines[line:]])
    with pytest.raises(
        results.ChangedInput, match=rf"the result of line {line} in .* has another id than 'other', so it is of another input"
    ):
        job.run_batch(FakeLLM(), changed, out, seed=1)
    asked = json.loads(lines[line - 1])
    write_lines(changed, [*lines[: line - 1], {"id": asked.get("id", line), "prompt": "x"}, *lines[line:]])
    with pytest.raises(results.ChangedInput, match=rf"line {line} is not the request that its result in .* answers; name another"):
        job.run_batch(FakeLLM(), changed, out, seed=1)
    respelt = json.dumps(dict(reversed(asked.items())), separators=(" ,", " : "))  # the same request
    write_lines(changed, [*lines[: line - 1], respelt, *lines[line:]])
    assert job.run_batch(FakeLLM(), changed, out, seed=1).kept == 8
    text = out.read_text().splitlines()
    write_lines(out, [text[0], "something", *text[1:]])
    with pytest.raises(ValueError, match=r"line 2 of .*out\.jsonl is not a result; remove it, and its request is served again"):
        job.run_batch(FakeLLM(), requests, out, seed=1)


def test_the_command_says_what_it_did_and_its_status_says_whether_all_was_served(requests, tmp_path, monkeypatch, capsys):
    fails = (derived_seed(3, "r1"),)
    monkeypatch.setattr("jaxspec.cli.options.load_model", lambda args, **settings: (FakeLLM(fails=fails), SamplingParams(seed=args.seed)))
    out = tmp_path / "out.jsonl"
    assert cli.main(["batch", str(requests), str(out)]) == 0
    assert capsys.readouterr().err == f"{out}: 21 results written\n"
    with open(requests, "a") as file:
        file.write("nothing\n")
    assert cli.main(["batch", str(requests), str(out)]) == 1
    assert capsys.readouterr().err == (
        f"{out}: 0 results written, 21 were already there\n{tmp_path}/out.errors.jsonl: 1 lines cannot be served\n"
    )
    other = [str(requests), str(tmp_path / "other.jsonl"), "--seed", "3", "--shard", "1/20", "--errors", str(tmp_path / "bad")]
    assert cli.main(["batch", *other]) == 1
    assert capsys.readouterr().err == (
        f"{tmp_path}/other-1-of-20.jsonl: 1 results written; 1 requests failed, their results say why\n"
        f"{tmp_path}/bad-1-of-20: 1 lines cannot be served\n"
    )
    assert cli.main(["batch", str(requests), str(out), "--seed", "4"]) == 2
    assert capsys.readouterr().err.startswith(f"jaxspec: {out} was made with run_seed 0, not 4: use the same to resume")
    monkeypatch.setattr("jaxspec.cli.options.load_model", lambda args, **settings: (FakeLLM(dies=3), SamplingParams(seed=args.seed)))
    assert cli.main(["batch", str(requests), str(tmp_path / "third.jsonl")]) == 130
    assert capsys.readouterr().err == (
        f"\njaxspec: interrupted; the results so far are in {tmp_path}/third.jsonl, and the same command resumes\n"
    )
    changed = write_lines(tmp_path / "changed.jsonl", [{"prompt": "x"}])
    assert cli.main(["batch", str(changed), str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"jaxspec: the result of line 1 in {out} has another id than 1")


def test_a_killed_process_goes_on_with_the_same_command(model, tmp_path, capsys):
    """Here one of two shards, the other of which knows nothing of it."""
    target, llm = model
    lines = [{"id": f"r{i}", "prompt": "def f():"[: i % 7 + 1], "params": {"max_tokens": 20 + i % 13}} for i in range(80)]
    path = write_lines(tmp_path / "in.jsonl", lines)
    params = SamplingParams(temperature=0.8, ignore_eos=True)
    assert job.run_batch(llm, path, tmp_path / "whole.jsonl", params, seed=6).written == 80
    assert job.run_batch(llm, path, tmp_path / "out.jsonl", params, seed=6, shard="1/2").written == 40

    settings = ["--target", str(target), "--max-len", "64", "--max-slots", "1"]
    command = [
        "batch",
        *settings,
        "--temperature",
        "0.8",
        "--ignore-eos",
        "--seed",
        "6",
        str(path),
        str(tmp_path / "out.jsonl"),
        "--shard",
        "2/2",
    ]
    kept = {  # so that programs are those that the run above has compiled
        "JAX_DEFAULT_MATMUL_PRECISION": "highest",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    process = subprocess.Popen([sys.executable, "-m", "jaxspec", *command], env=os.environ | kept, stderr=subprocess.DEVNULL)
    out, deadline = tmp_path / "out-2-of-2.jsonl", time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline and not (out.exists() and out.stat().st_size):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    found = out.read_bytes().count(b"\n")
    assert 0 < found < 40
    assert cli.main(command) == 0
    assert capsys.readouterr().err == f"{out}: {40 - found} results written, {found} were already there\n"
    assert sorted_lines(tmp_path / "out-1-of-2.jsonl", out) == sorted_lines(tmp_path / "whole.jsonl")


def test_numbers_that_json_cannot_hold_become_null(tmp_path):
    """Columns that are passed on may hold them, from a table or as Python writes them. Other readers refuse them."""
    (tmp_path / "in.jsonl").write_text('{"prompt": "x", "score": NaN, "more": {"list": [1.5, -Infinity, "\\ud800"]}}\n')
    result = job.run_batch(FakeLLM(), tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    text = (tmp_path / "out.jsonl").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"found {name}"))
    assert result.written == 1 and record["score"] is None and record["more"] == {"list": [1.5, None, "\ud800"]}
