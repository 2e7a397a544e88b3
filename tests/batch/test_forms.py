"""The forms that requests and results of a batch come in, and shards: which lines a process serves, and putting their results together."""

import decimal
import io
import json
import sys
import uuid
from types import SimpleNamespace

import pytest
from fake_llm import FakeLLM, read_lines, sorted_lines, write_lines

import jaxspec
from jaxspec import cli
from jaxspec.batch import job, merging, openai, parquet, places
from jaxspec.batch.lines import LineReader, derived_seed
from jaxspec.engine.completion import Logprob
from jaxspec.engine.params import SamplingParams

pytestmark = pytest.mark.usefixtures("unoptimised")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def asked(name, body, url=CHAT, **more):
    return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "gpt-4o-mini", **body}, **more}


def said(text="Hi"):
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def llm(folders):
    return jaxspec.load(folders[0], max_len=64, max_slots=2, progress=False)


def test_lines_in_openais_form_are_answered_in_it(llm, tmp_path):
    lines = [
        asked("a", {"prompt": "def f():", "max_tokens": 3, "temperature": 0, "seed": 4}, COMPLETIONS),
        asked("b", {"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 1, "n": 3, "seed": 9, "logprobs": 2, "user": "u"}, COMPLETIONS),
        {"id": "plain", "prompt": "def f():", "params": {"max_tokens": 3, "temperature": 0, "seed": 4}},
    ]
    out = tmp_path / "out.jsonl"
    job.run_batch(llm, write_lines(tmp_path / "in.jsonl", lines), out, SamplingParams(ignore_eos=True))
    found = {record.get("custom_id", record["id"]): record for record in read_lines(out)}
    plain, a, b = found["plain"], found["a"], found["b"]
    assert a["error"] is None and a["response"]["status_code"] == 200 and set(a) == {"id", "custom_id", "response", "error"}
    body = a["response"]["body"]
    assert body["choices"] == [{"index": 0, "text": plain["text"], "logprobs": None, "finish_reason": "length"}]
    prompt = plain["usage"]["prompt_tokens"]
    assert body["usage"] == {"prompt_tokens": prompt, "completion_tokens": 3, "total_tokens": prompt + 3}
    assert (body["object"], body["model"], plain["model"]) == ("text_completion", llm.name, llm.name)

    params = SamplingParams(max_tokens=4, temperature=1, n=3, seed=9, logprobs=2, ignore_eos=True)
    expected = llm.generate([[5, 6, 7]], params)
    choices = b["response"]["body"]["choices"]
    assert [choice["text"] for choice in choices] == [done.text for done in expected]
    assert [choice["index"] for choice in choices] == [0, 1, 2] and b["response"]["body"]["usage"]["completion_tokens"] == 12
    logprobs = choices[1]["logprobs"]
    own = [row[token] for row, token in zip(expected[1].logprobs, expected[1].token_ids, strict=True)]
    assert logprobs["token_logprobs"] == [one.logprob for one in own] and [len(most) for most in logprobs["top_logprobs"]] == [2] * 4
    assert [max(most.values()) for most in logprobs["top_logprobs"]] == [max(o.logprob for o in r.values()) for r in expected[1].logprobs]
    assert logprobs["text_offset"] == [sum(len(one.decoded_token) for one in own[:i]) for i in range(4)]


def test_a_conversation_in_openais_form_and_a_run_that_resumes(tmp_path):
    """A line's samples are one result, so of a line whose samples were not all done nothing is kept."""
    lines = [asked(f"r{i}", {"messages": said(), "n": 3, "temperature": 1, "max_completion_tokens": i + 1}) for i in range(6)]
    path, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        job.run_batch(FakeLLM(8), path, out)
    kept = read_lines(out)
    assert 0 < len(kept) < 3
    result = job.run_batch(FakeLLM(), path, out, include_prompt=False)
    assert (result.written, result.kept) == (6 - len(kept), len(kept))
    found = {record["custom_id"]: record["response"]["body"] for record in read_lines(out)}
    assert sorted(found) == [f"r{i}" for i in range(6)]
    message = {"role": "assistant", "content": f"[1, 0] 1.0 {derived_seed(0, 'r2') + 1}", "refusal": None}
    assert found["r2"]["choices"][1] == {"index": 1, "message": message, "logprobs": None, "finish_reason": "length"}
    assert found["r2"]["usage"] == {"prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11}
    write_lines(path, [*lines[:2], asked("r2", {"messages": said("Changed")}), *lines[3:]])
    with pytest.raises(ValueError, match="line 3 is not the request that its result in .* answers"):
        job.run_batch(FakeLLM(), path, out)


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
REFUSED = {
    "body has 'top_q', which is not known; known are allowed_token_ids, bad_words,": asked("r", {"messages": said(), "top_q": 1}),
    "body has stream True, which cannot be served: a batch has no streams": asked("r", {"messages": said(), "stream": True}),
    "tools has {'type': 'function'}; expected a list of": asked("r", {"messages": said(), "tools": [{"type": "function"}]}),
    "tools has 'f'; expected a list of": asked("r", {"messages": said(), "tools": "f"}),
    "body has tools, which /v1/completions does not know": asked("r", {"prompt": "x", "tools": TOOLS}, COMPLETIONS),
    "body has tool_choice 'required', which cannot be served: the model chooses": asked(
        "r", {"messages": said(), "tools": TOOLS, "tool_choice": "required"}
    ),
    "body has parallel_tool_calls False, which cannot be served: the model chooses": asked(
        "r", {"messages": said(), "tools": TOOLS, "parallel_tool_calls": False}
    ),
    "body has top_logprobs 3 and logprobs None; expected True": asked("r", {"messages": said(), "top_logprobs": 3}),
    "body has no messages, which /v1/chat/completions needs": asked("r", {"prompt": "x"}),
    "prompt of body is a list of prompts; expected one": asked("r", {"prompt": ["x", "y"]}, COMPLETIONS),
    "body has echo True, which cannot be served: --include-prompt": asked("r", {"prompt": "x", "echo": True}, COMPLETIONS),
    "url is '/v1/embeddings', expected '/v1/chat/completions' or '/v1/completions'": asked("r", {"input": "x"}, "/v1/embeddings"),
    "body has max_tokens and max_completion_tokens; expected one of them": asked(
        "r", {"messages": said(), "max_tokens": 2, "max_completion_tokens": 3}
    ),
    "url is ['x'], expected '/v1/chat/completions' or": asked("r", {"messages": said()}, ["x"]),
    "method is 'GET', expected 'POST'": asked("r", {"messages": said()}) | {"method": "GET"},
    "found 'params' in a line with custom_id and body": asked("r", {"messages": said()}, params={}),
    "temperature is -1.0, expected a finite number": asked("r", {"messages": said(), "temperature": -1}),
    "response_format of body is {'type': 'xml'}; expected type text": asked("r", {"messages": said(), "response_format": {"type": "xml"}}),
    "custom_id is None, expected a text": {"method": "POST", "url": CHAT, "body": {"messages": said()}},
    "body is [], expected an object": asked("r", {}) | {"body": []},
}


def test_fields_that_cannot_be_served_are_refused_by_name(tmp_path):
    lines = [line | ({"custom_id": f"r{i}"} if "custom_id" in line else {}) for i, line in enumerate(REFUSED.values())]
    quiet = {"stream": False, "n": 1, "tools": [], "response_format": {"type": "text"}, "top_p": None, "metadata": {"a": "b"}}
    path = write_lines(tmp_path / "in.jsonl", [*lines, asked("good", {"messages": said(), **quiet})])
    result = job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl")
    assert (result.written, result.bad) == (1, len(REFUSED))
    for record, line, reason in zip(read_lines(result.errors), lines, REFUSED, strict=True):
        assert record["custom_id"] == line.get("custom_id") and record["response"] is None
        assert record["error"]["message"].startswith(reason), record
    assert job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl").bad == len(REFUSED)  # an errors file of this form is known again


def test_tools_go_to_the_template_and_calls_come_back(tmp_path):
    bodies = [{"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "none"}, {"tool_choice": "auto", "parallel_tool_calls": False}]
    lines = [asked(f"r{i}", {"messages": said(), **body}) for i, body in enumerate(bodies)]
    plain = [{"messages": said(), "tools": tools} for tools in (TOOLS, json.dumps(TOOLS), None)]
    assert job.run_batch(llm := FakeLLM(), write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl").written == 3
    assert sorted(llm.served) == [[1, 0], [1, 0], [1, 0, 4]]
    bad = [{"prompt": "x", "tools": TOOLS}, {"messages": said(), "tools": "[f"}, {"messages": said(), "tools": {"name": "f"}}]
    result = job.run_batch(llm := FakeLLM(), write_lines(tmp_path / "plain.jsonl", [*plain, *bad]), tmp_path / "plain.out.jsonl")
    assert sorted(llm.served) == [[1, 0], [1, 0, 4], [1, 0, 4]] and result.bad == 3
    told = ("found tools without messages", "tools is '[f', which is no JSON", "tools has {'name': 'f'}; expected a list of")
    for record, wanted in zip(read_lines(result.errors), told, strict=True):
        assert wanted in record["error"], record
    assert all(record["message"] == {"role": "assistant", "content": record["text"]} for record in read_lines(tmp_path / "plain.out.jsonl"))

    reader = LineReader(FakeLLM(), SamplingParams(), 0, True, openai.functions(tuple(TOOLS)))  # of a Generator
    assert [reader.prompt(reader.read(1, values)) for values in ({"messages": said()}, {"messages": said(), "tools": []})] == [
        [1, 1, 4],
        [1, 1],
    ]

    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": {"é": 1}}}
    message = {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    done = SimpleNamespace(text="", message=message, token_ids=(5,), prompt_token_ids=(7,), logprobs=None, finish_reason="stop", error=None)
    choice = openai.record(1, 2, CHAT, "r", [done], "m", 0, None)["response"]["body"]["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    function = {"name": "look", "arguments": '{"é": 1}'}
    assert choice["message"] == message | {"content": None, "refusal": None, "tool_calls": [call | {"function": function}]}


def test_a_response_format_is_a_structured_output():
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}}
    formats = {"json_object": {}, "json_schema": {"json_schema": {"name": "point", "schema": schema}}, "text": {}}
    found = [openai.read(asked("r", {"messages": said(), "response_format": {"type": t, **more}})).params for t, more in formats.items()]
    assert found == [{"structured_outputs": {"json_object": True}}, {"structured_outputs": {"json": schema}}, {}]


def test_other_columns_and_the_prompt_go_to_the_result(tmp_path):
    lines = [{"prompt": "x", "topic": "a", "nested": {"b": [1]}}, {"messages": said(), "id": "m", "topic": None}]
    path = write_lines(tmp_path / "in.jsonl", lines)
    job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl", include_prompt=True)
    first, second = sorted(read_lines(tmp_path / "out.jsonl"), key=lambda record: record["line"])
    assert (first["topic"], first["nested"], first["prompt"]) == ("a", {"b": [1]}, "x") and "messages" not in first
    assert (second["topic"], second["messages"]) == (None, said()) and "prompt" not in second
    # They are no part of what was asked for.
    write_lines(path, [{**lines[0], "topic": "c"}, lines[1]])
    assert job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl", include_prompt=True).written == 0
    with pytest.raises(ValueError, match="was made with include_prompt True, not False"):
        job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl")


def test_ids_that_come_twice_are_said_before_anything_is_served(tmp_path):
    lines = [{"id": "a", "prompt": "x"}, {"prompt": "x"}, "", "{", {"id": 2, "prompt": "y"}, {"id": "a", "prompt": "z"}, asked("a", {})]
    path, llm = write_lines(tmp_path / "in.jsonl", lines), FakeLLM()
    found = r"in\.jsonl has ids twice: 2 in lines 2 and 5, 'a' in lines 1 and 6, 'a' in lines 6 and 7; expected an id of its own"
    with pytest.raises(ValueError, match=found):
        job.run_batch(llm, path, tmp_path / "out.jsonl")
    assert not llm.served and not (tmp_path / "out.jsonl").exists()


def test_what_is_no_id_is_said_for_each_line_alone(tmp_path):
    lines = [{"id": None, "prompt": "x"}] * 2 + [{"id": [1], "prompt": "x"}] * 2 + [{"id": True, "prompt": "x"}] * 2
    lines += [asked(None, {"messages": said()})] * 2 + [{"id": 1, "prompt": "y"}]
    result = job.run_batch(FakeLLM(), write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl")
    assert (result.written, result.bad) == (1, 8)


def test_a_row_has_the_seed_of_its_id_wherever_it_stands(tmp_path):
    lines = [{"id": f"r{i}", "prompt": f"{i}"} for i in range(9)]
    texts = []
    for name, some in (("a", lines), ("b", lines[::-1]), ("c", lines[3:])):
        out = tmp_path / f"{name}.jsonl"
        job.run_batch(FakeLLM(), write_lines(tmp_path / f"{name}-in.jsonl", some), out, seed=5)
        texts.append({record["id"]: record["text"] for record in read_lines(out)})
    assert texts[0] == texts[1] and texts[2] == {name: text for name, text in texts[0].items() if name in texts[2]}
    assert derived_seed(5, 3) != derived_seed(5, "3")
    assert derived_seed(5, [{"role": "user", "content": "x"}]) == derived_seed(5, [{"content": "x", "role": "user"}])


def test_standard_input_and_output(tmp_path, monkeypatch, capfd):
    lines = [{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}, {"id": "b", "prompt": "z"}]
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    monkeypatch.setattr("jaxspec.cli.options.load_model", lambda args, **settings: (FakeLLM(), SamplingParams(seed=args.seed)))

    def run(*arguments):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
        status = cli.main(["batch", *map(str, arguments)])
        return status, capfd.readouterr()

    status, (out, err) = run("-", "-")
    assert status == 1 and sorted(json.loads(line)["id"] for line in out.splitlines()) == ["a", "b"]
    assert "results go to standard output, so this run cannot be resumed" in err
    assert '{"line": 2, "id": "a", "error": "line 2 has the id \'a\' of line 1; expected an id of its own for each line"}' in err
    assert err.endswith("standard output: 2 results written\nabove: 1 lines cannot be served\n")
    # With a file for the results, the same input once more resumes.
    assert [run("-", tmp_path / "out.jsonl")[1].err.splitlines()[0] for _ in range(2)] == [
        f"{tmp_path}/out.jsonl: 2 results written",
        f"{tmp_path}/out.jsonl: 0 results written, 2 were already there",
    ]
    assert len(read_lines(tmp_path / "out.errors.jsonl")) == 1
    write_lines(tmp_path / "in.jsonl", lines[1:])
    status, (out, err) = run(tmp_path / "in.jsonl", "-", "--errors", tmp_path / "bad.jsonl")
    assert status == 0 and len(out.splitlines()) == 2 and list(tmp_path.glob("-*")) == []


def test_parquet_in_and_out(requests_of, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")
    path, out = requests_of(20), tmp_path / "out.parquet"
    with pytest.raises(KeyboardInterrupt):
        job.run_batch(FakeLLM(8), path, out, SamplingParams(temperature=0.5))
    assert not out.exists()
    result = job.run_batch(FakeLLM(), path, out, SamplingParams(temperature=0.5))
    assert (result.written, result.kept, result.out, result.errors.name) == (12, 8, out, "out.errors.jsonl")
    rows = {row["id"]: row for row in pq.read_table(out).to_pylist()}
    assert len(rows) == 20 and rows["r3"]["score"] == 1.5 and rows["r4"]["score"] is None
    assert rows["r3"]["day"] == "2026-11-04" and rows["r3"]["usage"] == {"prompt_tokens": 1, "completion_tokens": 3}
    assert rows["r3"]["text"] == f"{FakeLLM.tokenizer.encode('3')} 0.5 {derived_seed(0, 'r3')}"
    assert rows["r5"]["text"].startswith("[1, 0] ")  # messages
    # The same requests as JSON lines have the same texts.
    lines = [{"id": f"r{i}", "prompt": str(i)} if i != 5 else {"id": "r5", "messages": said()} for i in range(20)]
    job.run_batch(FakeLLM(), write_lines(tmp_path / "in.jsonl", lines), tmp_path / "lines.jsonl", SamplingParams(temperature=0.5))
    assert {r["id"]: r["text"] for r in read_lines(tmp_path / "lines.jsonl")} == {name: row["text"] for name, row in rows.items()}


def test_columns_of_several_types_become_texts(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")
    lines = [{"id": i if i % 3 else f"r{i}", "prompt": [1, i], "mark": i} for i in range(5000)]
    lines += [{"id": f"s{i}", "prompt": "x", "mark": "text", "late": {"a": i}} for i in range(10)]
    out = tmp_path / "out.parquet"
    job.run_batch(FakeLLM(), write_lines(tmp_path / "in.jsonl", lines), out, include_prompt=True)
    table = pq.read_table(out)
    rows = {row["id"]: row for row in table.to_pylist()}
    assert table.num_rows == 5010 and rows["7"]["mark"] == "7" and rows["s3"]["mark"] == "text" and rows["s3"]["late"] == {"a": 3}
    assert rows["7"]["prompt"] == "[1, 7]" and rows["s3"]["prompt"] == "x"


MIXED = {
    "an object without fields": [{}, {}],
    "one of them within": [{"a": {}}, {"a": {}}],
    "types that differ within objects": [{"score": 1}, {"score": "n/a"}],
    "types that differ within lists": [[1, "x"], []],
    "an integer that no float is": [2**60 + 1, 1.5],
    "an integer of more than 64 bits": [2**64, 1],
    "truth and number within objects": [{"a": True}, {"a": 1}],
    "half a surrogate pair": ["\ud800", "x"],
    "one in a name within": [{"\ud800": 1}, {"\ud800": 1}],
}


@pytest.mark.parametrize("values", MIXED.values(), ids=MIXED)
@pytest.mark.parametrize("between", [0, parquet.ROWS])
def test_values_without_a_common_type_are_json_texts(values, between, tmp_path):
    """Those of one chunk of rows, and of two."""
    pq = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")
    lines = [{"id": "a", "mark": values[0]}, *[{"id": f"r{i}"} for i in range(between)], {"id": "b", "mark": values[1]}]
    parquet.write(write_lines(tmp_path / "lines.jsonl", lines), tmp_path / "out.parquet")
    found = {row["id"]: row["mark"] for row in pq.read_table(tmp_path / "out.parquet").to_pylist()}
    assert [found["a"], found["b"]] == [value if value == "x" else json.dumps(value) for value in values]


def test_a_column_whose_name_has_half_a_surrogate_pair_gets_its_form_in_json(tmp_path):
    pq = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")
    parquet.write(write_lines(tmp_path / "lines.jsonl", [{"id": 1, "\ud800": "x"}]), tmp_path / "out.parquet")
    [row] = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert row == {"id": 1, '"\\ud800"': "x", "stop_reason": None, "error": None}


def test_files_of_several_jobs_are_read_as_one(tmp_path):
    """Where no text of one ended at a stop string, no request of it failed, and a column of the user's has no value."""
    dataset = pytest.importorskip("pyarrow.dataset", reason="parquet files need pyarrow")
    rows = [{"id": "a", "stop_reason": None, "mark": None}, {"id": "b", "stop_reason": "\n", "mark": "x", "error": "too long"}]
    files = [tmp_path / f"{row['id']}.parquet" for row in rows]
    for row, file in zip(rows, files, strict=True):
        parquet.write(write_lines(tmp_path / "lines.jsonl", [row]), file)
    for order in (files, files[::-1]):
        found = {row["id"]: row for row in dataset.dataset(order).to_table().to_pylist()}
        assert found == {row["id"]: {"error": None, **row} for row in rows}


def test_decimals_lose_no_digit(tmp_path):
    pa, pq = pytest.importorskip("pyarrow", reason="parquet files need pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = ["0.10", "-12.50", "12345678901234567890.12"]
    pq.write_table(pa.table({"price": pa.array(map(decimal.Decimal, texts), pa.decimal128(30, 2))}), tmp_path / "in.parquet")
    assert [row["price"] for row in parquet.rows(tmp_path / "in.parquet")] == [0.1, -12.5, texts[2]]


def test_a_value_that_python_cannot_hold_is_said_with_its_column(tmp_path):
    pa, pq = pytest.importorskip("pyarrow", reason="parquet files need pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"prompt": ["x"], "day": pa.array([2**30], pa.date32())}), tmp_path / "in.parquet")
    with pytest.raises(ValueError, match=r"column 'day' of .*in\.parquet, of type date32\[day\], has a value that cannot be read: days="):
        job.run_batch(FakeLLM(), tmp_path / "in.parquet", tmp_path / "out.jsonl")


def test_a_parquet_file_that_is_no_result_stays(tmp_path):
    pa, pq = pytest.importorskip("pyarrow", reason="parquet files need pyarrow"), pytest.importorskip("pyarrow.parquet")
    mine = tmp_path / "mine.parquet"
    pq.write_table(pa.table({"kept": [1]}), mine)
    with pytest.raises(ValueError, match=r"mine\.parquet exists but mine\.parquet\.run\.json, which a run writes"):
        job.run_batch(FakeLLM(), write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}]), mine)
    assert pq.read_table(mine).to_pydict() == {"kept": [1]}


def test_parquet_files_that_cannot_be_served_are_refused_before_anything_is_computed(tmp_path):
    pa = pytest.importorskip("pyarrow", reason="parquet files need pyarrow")
    import pyarrow.parquet as pq

    path, fine = tmp_path / "in.parquet", {"prompt": ["x"], "tags": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))}
    path.write_text("no parquet")
    with pytest.raises(ValueError, match="in.parquet is no parquet file: "):
        job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl")
    for kind, value in ((pa.binary(), b"x"), (pa.list_(pa.binary()), [b"x"]), (pa.duration("s"), 1)):
        pq.write_table(pa.table({**fine, "image": pa.array([value], kind)}), path)
        with pytest.raises(ValueError, match="column 'image' of .*in.parquet is of type .*, which results cannot hold"):
            job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl")
    pq.write_table(pa.table(fine), path)
    assert job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl").written == 1


def test_ids_that_are_uuids_are_texts(tmp_path):
    pa, pq = pytest.importorskip("pyarrow", reason="parquet files need pyarrow"), pytest.importorskip("pyarrow.parquet")
    path, number = tmp_path / "in.parquet", uuid.UUID(int=7)
    pq.write_table(pa.table({"id": pa.array([number.bytes], pa.uuid()), "prompt": ["x"]}), path)
    parquet.check(path)
    assert list(parquet.rows(path)) == [{"id": str(number), "prompt": "x"}]


def test_parquet_without_pyarrow_names_the_package(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    path = write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}])
    assert cli.main(["batch", str(path), str(tmp_path / "out.parquet")]) == 2
    expected = "jaxspec: parquet files need the package pyarrow: pip install pyarrow, or use JSON lines\n"
    assert capsys.readouterr().err == expected
    path.rename(tmp_path / "in.parquet")
    with pytest.raises(ImportError, match="need the package pyarrow"):
        job.run_batch(FakeLLM(), tmp_path / "in.parquet", tmp_path / "out.jsonl")


@pytest.fixture
def requests_of(tmp_path):
    """Makes a parquet file of so many requests, with columns of other types and cells without a value."""

    def make(count):
        import datetime

        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [{"id": f"r{i}", "prompt": str(i), "score": i / 2 if i % 2 else None} for i in range(count)]
        rows = [row | {"day": datetime.date(2026, 11, i + 1), "messages": None} for i, row in enumerate(rows)]
        rows[5] |= {"prompt": None, "messages": said()}
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "in.parquet", row_group_size=7)
        return tmp_path / "in.parquet"

    return make


SLURM = {"SLURM_STEP_NODELIST": "node[01-02]", "SLURM_PROCID": "3", "SLURM_NTASKS": "8"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "4"}


@pytest.mark.parametrize(
    ("shard", "environment", "expected"),
    [
        ("2/4", SLURM, (2, 4)),
        ("auto", SLURM, (4, 8)),
        ("auto", OPEN_MPI, (1, 2)),
        ("auto", SLURM | OPEN_MPI, (1, 2)),  # mpirun in a step
        ("auto", OPEN_MPI | {"PMIX_RANK": "0"}, (1, 2)),  # Open MPI 5
        ("auto/8", SLURM, (4, 8)),
        ("auto/5", KUBERNETES, (5, 5)),
        ("auto", {**SLURM, "SLURM_ARRAY_TASK_ID": "1"}, (4, 8)),
        ("auto", KUBERNETES, "shard is 'auto', and Kubernetes says that this is process 5 but not of how many; expected auto/n"),
        ("auto/4", KUBERNETES, "shard is 'auto/4', and Kubernetes says that this is process 5; expected more shards"),
        ("auto/4", SLURM, "shard is 'auto/4', and SLURM says that this is process 4 of 8; expected auto"),
        ("auto/x", KUBERNETES, "shard is 'auto/x', and Kubernetes says that this is process 5 of n; expected auto/n"),
        ("auto", {}, r"shard is 'auto', but no launcher says which process this is; known are SLURM \(in a step"),
        ("auto", {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, "but no launcher says"),  # a script of sbatch without srun
        (
            "auto",
            {"SLURM_ARRAY_TASK_ID": "3", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"},
            r"in a job array of SLURM.* expected i/n, such as",
        ),
    ],
)
def test_a_launcher_says_which_shard_a_process_serves(shard, environment, expected):
    if isinstance(expected, tuple):
        assert places.share_of(shard, environment) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            places.share_of(shard, environment)


@pytest.fixture
def shards(tmp_path):
    """The input of three shards, of which the third has yet to run and the first was interrupted; and the results of one run."""
    lines = [{"id": f"r{i}", "prompt": f"text {i}"} for i in range(30)]
    lines[6] = {"id": "many", "prompt": "x", "params": {"n": 3, "temperature": 1}}
    lines[7], lines[10], lines[11] = "  ", "nothing", asked("o", {"messages": said(), "n": 2, "temperature": 1})
    path = write_lines(tmp_path / "in.jsonl", lines)
    job.run_batch(FakeLLM(), path, tmp_path / "whole.jsonl")
    with pytest.raises(KeyboardInterrupt):
        job.run_batch(FakeLLM(4), path, tmp_path / "out.jsonl", shard="1/3")
    job.run_batch(FakeLLM(), path, tmp_path / "out.jsonl", shard="2/3")
    return path


def test_shards_are_put_together_and_what_is_missing_is_said(shards, tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert cli.main(["merge", str(shards), str(out)]) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"{out}: ") and said[0].endswith(" results of 3 shards")
    assert said[1] == f"shard 3 of 3 has no results: {tmp_path}/out-3-of-3.jsonl does not exist"
    assert said[2] == "1 lines could not be served: the errors say why"
    there = [record["line"] for record in read_lines(tmp_path / "out-1-of-3.jsonl")]
    gone = [i for i in range(1, 31) if i % 3 == 0 or i % 3 == 1 and there.count(i) < (3 if i == 7 else 1)]
    assert said[3].startswith(f"{len(gone)} lines have no result, or not all of theirs: {gone[0]}")
    # One run goes on with what was put together, and finds the same as one that was never split.
    job.run_batch(FakeLLM(), shards, out)
    timeless = [
        [json.dumps({**json.loads(line), "response": None}) for line in sorted_lines(path)] for path in (out, tmp_path / "whole.jsonl")
    ]
    assert sorted(timeless[0]) == sorted(timeless[1])
    with pytest.raises(ValueError, match=r"out\.jsonl exists; expected a name that only the shards' files begin with"):
        merging.merge(shards, out)


def test_results_of_all_shards_are_in_the_order_of_the_input(shards, tmp_path):
    for shard in ("1/3", "3/3"):
        job.run_batch(FakeLLM(), shards, tmp_path / "out.jsonl", shard=shard)
    merged = merging.merge(shards, tmp_path / "out.jsonl")
    records = read_lines(tmp_path / "out.jsonl")
    places = [(record.get("line", 12), record.get("index", 0)) for record in records]
    assert places == sorted(places) and len(places) == merged.results == 30
    assert merged.missing == ["1 lines could not be served: the errors say why"]
    assert [record["line"] for record in read_lines(tmp_path / "out.errors.jsonl")] == [11]


def test_a_merge_or_a_parquet_file_without_room_names_the_file(shards, tmp_path, capsys, monkeypatch):
    (tmp_path / "out.jsonl.part").symlink_to("/dev/full")
    assert cli.main(["merge", str(shards), str(tmp_path / "out.jsonl")]) == 2
    assert capsys.readouterr().err == f"jaxspec: [Errno 28] {tmp_path}/out.jsonl cannot be written: No space left on device\n"
    pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")
    monkeypatch.setattr("jaxspec.cli.options.load_model", lambda args, **_: (FakeLLM(), SamplingParams(seed=args.seed)))
    path, out = write_lines(tmp_path / "one.jsonl", [{"prompt": "x"}]), tmp_path / "one.parquet"
    full = tmp_path / "one.parquet.part"
    full.symlink_to("/dev/full")
    assert cli.main(["batch", str(path), str(out)]) == 2
    told = f"{out} cannot be written: No space left on device; what is written stays, and the same command goes on with it"
    assert capsys.readouterr().err == f"jaxspec: [Errno 28] {told}\n"
    full.unlink()
    assert cli.main(["batch", str(path), str(out)]) == 0
    assert out.is_file()


def test_the_errors_of_shards_that_were_given_a_file_for_them(tmp_path, capsys):
    path, out = write_lines(tmp_path / "in.jsonl", [{"id": 1, "prompt": "x"}, "no", "nor"]), tmp_path / "out.jsonl"
    bad = tmp_path / "bad.jsonl"
    for shard in ("1/2", "2/2"):
        job.run_batch(FakeLLM(), path, out, shard=shard, errors=bad)
    assert cli.main(["merge", str(path), str(out), "--errors", str(bad)]) == 1
    assert "2 lines could not be served: the errors say why" in capsys.readouterr().err.splitlines()[-1]
    assert [record["line"] for record in read_lines(bad)] == [2, 3]


def test_shards_that_do_not_belong_together(shards, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there are no results of shards, such as .*other-1-of-2\.jsonl"):
        merging.merge(shards, tmp_path / "other.jsonl")
    with job.BatchJob(shards, tmp_path / "out.jsonl", shard="2/3"):
        with pytest.raises(ValueError, match=r"out-2-of-3\.jsonl is still being written; wait for its process"):
            merging.merge(shards, tmp_path / "out.jsonl")
    job.run_batch(FakeLLM(), shards, tmp_path / "out.jsonl", shard="3/3", seed=1)
    with pytest.raises(
        ValueError, match=r"out-1-of-3\.jsonl and .*out-3-of-3\.jsonl were made with run_seed 0 and 1; expected shards of one"
    ):
        merging.merge(shards, tmp_path / "out.jsonl")
    [settings] = tmp_path.glob("out-3-of-3*.run.json")
    for text, found in (("5", "holds a int; expected an object"), ("{", "is not JSON: ")):
        settings.write_text(text)
        with pytest.raises(ValueError, match=rf"out-3-of-3.*run\.json {found}"):
            merging.merge(shards, tmp_path / "out.jsonl")
    job.run_batch(FakeLLM(), shards, tmp_path / "out.jsonl", shard="2/2")
    with pytest.raises(ValueError, match="has results of 2 and of 3 shards; expected those of one number"):
        merging.merge(shards, tmp_path / "out.jsonl")


def test_results_that_are_not_those_of_their_shard_and_input_are_not_put_together(shards, tmp_path):
    """Each result is in the merged file once, and every one answers a line of this input."""
    out, second = tmp_path / "out.jsonl", tmp_path / "out-2-of-3.jsonl"
    lines = second.read_bytes().splitlines(keepends=True)
    for wrong, said in (
        (b"".join([*lines, lines[3]]), r"out-2-of-3\.jsonl has a result of line \d+ twice; expected it once"),
        (
            (tmp_path / "out-1-of-3.jsonl").read_bytes(),
            r"out-2-of-3\.jsonl has a result of line 7, which is shard 1's",
        ),
    ):
        second.write_bytes(wrong)
        with pytest.raises(ValueError, match=said):
            merging.merge(shards, out)
    second.write_bytes(b"".join(lines))
    asked_for = shards.read_text().splitlines()
    shards.write_text("\n".join([*asked_for[:28], asked_for[29]]) + "\n")
    with pytest.raises(ValueError, match="line 29 is not the request that its result in a shard of .* answers; expected the shards' input"):
        merging.merge(shards, out)
    shards.write_text("\n".join(asked_for[:20]) + "\n")
    with pytest.raises(ValueError, match=r"have a result of line 2\d, which .*in\.jsonl does not have; expected their input"):
        merging.merge(shards, out)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out.")]
    for path in tmp_path.glob("out-*-of-3.jsonl"):
        path.unlink()
    with pytest.raises(FileNotFoundError, match="there are no results of shards"):
        merging.merge(shards, out)


def test_standard_output_has_no_shards(tmp_path):
    with pytest.raises(ValueError, match="the output is standard output, '-', which no shards have written"):
        merging.merge(write_lines(tmp_path / "in.jsonl", [{"prompt": "x"}]), "-")


def test_tokens_that_are_parts_of_characters_are_shown_with_their_bytes():
    """A byte token has no text of its own: OpenAI writes its bytes, and two of them are two names."""
    tokens = {1: b"a", 2: "€".encode()[:1], 3: "€".encode()[1:2], 4: "€".encode()[2:], 5: b"b", 6: b"\xff"}
    tokens[7] = b"<eos>"
    tokenizer = SimpleNamespace(token_bytes=tokens.__getitem__, has_text=lambda token: token != 7)
    ids = (1, 7, 2, 3, 4, 5)
    rows = [{token: Logprob(-1.0, 1, "?"), 6: Logprob(-2.0, 2, "?")} for token in ids]
    message = {"role": "assistant", "content": "a€b"}
    done = SimpleNamespace(
        text="a€b", message=message, token_ids=ids, prompt_token_ids=(7,), logprobs=rows, finish_reason="length", error=None
    )

    def shown(url):
        body = openai.record(1, 2, url, "r", [done], "m", 2, tokenizer)["response"]["body"]
        return body["choices"][0]["logprobs"]

    found = shown(COMPLETIONS)
    assert found["tokens"] == ["a", "<eos>", r"bytes:\xe2", r"bytes:\x82", r"bytes:\xac", "b"]
    assert found["text_offset"] == [0, 1, 1, 1, 1, 2]  # a special token is not in the text
    assert found["top_logprobs"][2] == {r"bytes:\xe2": -1.0, r"bytes:\xff": -2.0}
    content = shown(CHAT)["content"]
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == "a<eos>€b"
    assert content[2]["top_logprobs"][1] == {"token": r"bytes:\xff", "logprob": -2.0, "bytes": [255]}


def test_the_bytes_of_a_texts_tokens_are_the_text(llm):
    text = "naïve 🎉 " + "\u2028" + "\U0001f9d1\u200d\U0001f680 ẞ"
    pieces = [llm.tokenizer.token_bytes(i) for i in llm.tokenizer.encode_word(text)]
    assert b"".join(pieces).decode() == text
    assert any("\ufffd" in piece.decode(errors="replace") for piece in pieces)
    assert llm.tokenizer.token_bytes(10**6) == b""
