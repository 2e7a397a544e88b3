"""Generator: rows of tables in, the same rows with their texts out, whatever batches they come in."""

import concurrent.futures
import json
import pickle
import time

import ignored
import jax
import numpy as np
import pytest

import jaxspec
from jaxspec import SamplingParams
from jaxspec.batch.lines import derived_seed
from jaxspec.engine import runner
from jaxspec.engine.completion import Completion

pytestmark = pytest.mark.usefixtures("quick_to_compile")

PROMPTS = ["def f():"[: 1 + i % 8] for i in range(30)]
PARAMS = SamplingParams(max_tokens=9, temperature=0.9, ignore_eos=True)
NEW = ["text", "prompt_tokens", "completion_tokens", "finish_reason", "acceptance_length", "error"]


@pytest.fixture(scope="module")
def generator(folders):
    with jaxspec.Generator(*folders, sampling_params=PARAMS, id_column="id", seed=3, max_len=64, max_slots=4) as made:
        yield made


def table(some=range(30)):
    return {"id": np.array([f"r{i}" for i in some], object), "prompt": np.array([PROMPTS[i] for i in some], object), "n": np.array(some)}


@pytest.fixture(scope="module")
def texts(generator):
    """By id, what each row alone gives."""
    params = [PARAMS.replace(seed=derived_seed(3, f"r{i}")) for i in range(30)]
    return {f"r{i}": out.text for i, out in enumerate(generator.llm.generate(PROMPTS, params))}


def test_a_batch_comes_back_with_texts(generator, texts):
    found = generator(table())
    assert list(found) == ["id", "prompt", "n", *NEW]
    assert dict(zip(found["id"], found["text"], strict=True)) == texts and len(set(texts.values())) == 30
    assert found["completion_tokens"].tolist() == [9] * 30 and found["completion_tokens"].dtype == np.int64
    assert found["prompt_tokens"].tolist() == [len(generator.llm.tokenizer.encode(prompt)) for prompt in PROMPTS]
    assert set(found["finish_reason"]) == {"length"} and set(found["error"]) == {None}
    assert (found["acceptance_length"] >= 1).all()


def test_texts_do_not_depend_on_batches_or_order(generator, texts):
    shuffled = np.random.default_rng(0).permutation(30)
    for some in (shuffled[:7], shuffled[7:8], shuffled[8:]):
        found = generator(table(some))
        assert dict(zip(found["id"], found["text"], strict=True)) == {f"r{i}": texts[f"r{i}"] for i in some}


@pytest.mark.parametrize("where", ["reading", "waiting"])
def test_an_interrupt_that_python_ignores_ends_a_call(generator, texts, monkeypatch, where):
    """While rows are read, and while they are waited for."""

    def interrupted(*args):
        ignored.interrupt()
        time.sleep(60)

    class Waiting(concurrent.futures.Future):
        result = interrupted

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        if where == "reading":
            patch.setattr(generator, "_request", interrupted)
        else:
            patch.setattr(concurrent.futures, "Future", Waiting)
        generator(table())
    found = generator(table())
    assert dict(zip(found["id"], found["text"], strict=True)) == texts and not generator._batches


def test_batches_that_are_mapped_come_in_order_and_share_the_slots(generator, texts, monkeypatch):
    """Rows of a later batch begin before the last row of an earlier one ends."""
    most, real = [], generator.llm.as_completed

    def as_completed(prompts, params=None):
        for done in real(prompts, params):
            most.append(sum(len(batch.rows) for batch in generator._batches))
            yield done

    monkeypatch.setattr(generator.llm, "as_completed", as_completed)
    for size, together in ((4, 8), (13, 26)):  # smaller and larger than the rows that wait
        found = list(generator.map(table(range(i, min(i + size, 30))) for i in range(0, 30, size)))
        assert [batch["n"][0] for batch in found] == list(range(0, 30, size))
        assert {name: text for batch in found for name, text in zip(batch["id"], batch["text"], strict=True)} == texts
        assert max(most) >= together and not generator._batches
        most.clear()
    first = next(iterator := generator.map(table([i]) for i in range(30)))
    iterator.close()  # what has no slot yet gets none
    assert first["text"][0] == texts["r0"] and not generator._batches


@pytest.mark.parametrize("bad", ["batch", "source"])
def test_results_before_an_error_come_first(generator, texts, bad):
    def batches():
        yield table([0, 1])
        yield table([2])
        if bad == "source":
            raise OSError("the source is gone")
        yield {"other": np.array([1])}

    found, message = [], "the source is gone" if bad == "source" else "the batch has no column 'prompt'"
    with pytest.raises((OSError, ValueError), match=message):
        for batch in generator.map(batches()):
            found.append(batch)
    assert [text for batch in found for text in batch["text"]] == [texts[f"r{i}"] for i in range(3)] and not generator._batches


def test_several_threads_share_it(generator, texts):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        found = list(pool.map(generator, [table(range(i, i + 10)) for i in (0, 10, 20)]))
    assert {name: text for batch in found for name, text in zip(batch["id"], batch["text"], strict=True)} == texts


def test_other_kinds_of_tables(generator, texts):
    columns = {name: column.tolist() for name, column in table([3, 1]).items()}
    rows = generator.rows([{"id": "r3", "prompt": PROMPTS[3]}, {"id": "r1", "prompt": PROMPTS[1], "other": 1}])
    assert [row["text"] for row in rows] == [texts["r3"], texts["r1"]] and rows[1]["other"] == 1 and "other" not in rows[0]
    assert generator.rows([]) == []
    assert generator(columns)["text"].tolist() == [texts["r3"], texts["r1"]]
    pa, pd = pytest.importorskip("pyarrow", reason="needs pyarrow"), pytest.importorskip("pandas", reason="needs pandas")
    found = generator(pa.table(columns))
    assert found.column_names == ["id", "prompt", "n", *NEW] and found["text"].to_pylist() == [texts["r3"], texts["r1"]]
    assert found.schema.field("error").type == pa.string() and found["error"].null_count == 2
    assert generator(pa.table(columns).slice(0, 0)).num_rows == 0
    frame = generator(pd.DataFrame(columns, index=[7, 5]))
    assert frame["text"].tolist() == [texts["r3"], texts["r1"]] and frame.index.tolist() == [7, 5]
    ids = [generator.llm.tokenizer.encode(PROMPTS[i]) for i in (3, 1)]
    arrow = pa.table(columns | {"prompt": ids})
    assert generator(arrow)["text"].to_pylist() == [texts["r3"], texts["r1"]]
    assert generator(arrow.to_pandas())["text"].tolist() == [texts["r3"], texts["r1"]]


def test_a_bad_row_has_its_error_and_the_others_their_texts(generator, texts):
    batch = table(range(6))
    batch["prompt"][[1, 3, 4]] = ["", None, [5, 10**6]]
    batch["id"][5] = 1.5
    found = generator(batch)
    assert [found["text"][i] for i in (0, 2)] == [texts["r0"], texts["r2"]] and found["error"][0] is None
    assert found["finish_reason"].tolist() == ["length", "error", "length", "error", "error", "error"]
    assert found["text"][1] is None and found["completion_tokens"][1] == 0
    assert found["error"][1] == "the prompt is empty; expected at least one token"
    assert found["error"][3] == "the column 'prompt' has no value here"
    assert found["error"][4].startswith("the prompt has id 1000000 at position 1; expected 0 .. ")
    assert found["error"][5] == "id is 1.5, expected a text or an integer"
    for row, error in (({"id": "a"}, found["error"][3]), ({"prompt": "x"}, "id is None, expected a text or an integer")):
        assert generator.rows([row])[0]["error"] == error  # alone too, as the last row of a job may be


def test_cells_without_a_value_and_what_tables_make_of_others(generator):
    pd = pytest.importorskip("pandas", reason="needs pandas")
    given = pd.DataFrame({"id": [1, None, 3], "prompt": pd.array([PROMPTS[0], PROMPTS[1], pd.NA], dtype="string")})  # of floats and texts
    found = generator(given)
    whole = generator({"id": [1], "prompt": [PROMPTS[0]]})
    assert found["text"][0] == whole["text"][0]
    assert found["error"].tolist()[1:] == ["id is None, expected a text or an integer", "the column 'prompt' has no value here"]
    odd = generator({"id": [1, 2, 3], "prompt": [np.ma.masked, pd.NaT, b"x"]})["error"].tolist()
    none = "the column 'prompt' has no value here"
    assert odd == [none, none, "the prompt is of type bytes, expected a str or a list of token ids"]


def test_a_row_that_raises_while_it_is_served_has_its_error(generator, texts, monkeypatch):
    def arrays_of(requests, *sizes):
        if any(len(request.prompt) == poison for request in requests):
            raise OverflowError("out of bounds")
        return real(requests, *sizes)

    real, poison = runner.arrays_of, len(generator.llm.tokenizer.encode(PROMPTS[7]))
    monkeypatch.setattr(runner, "arrays_of", arrays_of)
    found = generator(table())
    hit = [len(generator.llm.tokenizer.encode(prompt)) == poison for prompt in PROMPTS]
    assert [error == "OverflowError: out of bounds" for error in found["error"]] == hit and any(hit)
    assert [text for text, bad in zip(found["text"], hit, strict=True) if not bad] == [
        text for text, bad in zip(texts.values(), hit, strict=True) if not bad
    ]


def test_what_concerns_all_rows_is_raised_and_the_next_call_is_served(generator, texts, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(runner, "arrays_of", lambda *_: (_ for _ in ()).throw(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory")))
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            generator(table())
    assert generator(table([2]))["text"].tolist() == [texts["r2"]]


def test_batches_and_settings_that_make_no_sense(generator, folders):
    for batch, error in (
        ({"id": ["a"], "promt": ["x"]}, "the batch has no column 'prompt'; found 'id', 'promt'"),
        ({"prompt": ["x"]}, "the batch has no column 'id'; found 'prompt'"),
        ({}, "the batch has no column 'prompt'; found none"),
        (table([1]) | {"text": ["x"]}, "the batch has a column 'text' already; rename it, or set output_prefix"),
        ({"id": ["a", "b"], "prompt": ["x"]}, "columns differ in length: 'prompt' has 1, 'id' has 2"),
    ):
        with pytest.raises(ValueError, match=error):
            generator(batch)
    with pytest.raises(TypeError, match=r"the batch is of type list, expected a dict of columns, a pyarrow\.Table or a pandas"):
        generator([{"prompt": "x"}])
    for column in (5, "def"):
        with pytest.raises(TypeError, match=f"the column 'prompt' is of type {type(column).__name__}, expected an array or a list"):
            generator({"prompt": column, "id": ["a"]})
    for rows, error in ((None, "rows are of type NoneType, expected a list of dicts"), ([5], "row 0 is 5, expected a dict")):
        with pytest.raises(TypeError, match=error):
            generator.rows(rows)
    for setting in ({"prompt_column": 5}, {"messages_column": 5}, {"id_column": ("a",)}):
        with pytest.raises(TypeError, match=f"{next(iter(setting))} is .*, expected the name of a column"):
            jaxspec.Generator("no such folder", **setting)
    with pytest.raises(ValueError, match="tools has <built-in function len>; expected a list of"):
        jaxspec.Generator("no such folder", tools=[len])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="output_prefix is None, expected a str"):
        jaxspec.Generator("no such folder", output_prefix=None)  # pyright: ignore[reportArgumentType]
    for params, error in (
        (SamplingParams(seed=1), "seed is 1, which all rows would share"),
        (SamplingParams(n=2), "n is 2; a row has one"),
    ):
        with pytest.raises(ValueError, match=error):
            jaxspec.Generator(folders[0], sampling_params=params)
    with pytest.raises(TypeError, match="sampling_params is dict, expected jaxspec.SamplingParams or None"):
        jaxspec.Generator(folders[0], sampling_params={})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Generator has no argument 'max_model_len'; here it is called max_len"):
        jaxspec.Generator(folders[0], max_model_len=64)
    with pytest.raises(TypeError, match="Generator has no argument 'promt_column'; the nearest is 'prompt_column'"):
        jaxspec.Generator(folders[0], promt_column="text")


def test_it_is_pickled_as_its_arguments_and_closed(folders, monkeypatch):
    """Without a column of ids, a row's prompt stands for its id. Here it is a conversation."""
    kept = {"max_len": 64, "max_slots": 1, "output_prefix": "new_", "messages_column": "talk"}
    talks = [[{"role": "user", "content": said}] for said in ("def", "x", "def")]
    made = jaxspec.Generator(folders[0], sampling_params=PARAMS, seed=3, **kept)
    assert len(pickle.dumps(made)) < 2000
    copy = pickle.loads(pickle.dumps(made))
    made.close()
    made.close()
    with pytest.raises(RuntimeError, match="the Generator is closed; make another"):
        made({"talk": talks})
    with copy:
        found = copy({"talk": [*talks, []]})
        assert found["new_text"][0] == found["new_text"][2] != found["new_text"][1]
        answer = copy.llm.chat(talks[0], PARAMS.replace(seed=derived_seed(3, talks[0])))
        assert found["new_text"][0] == answer.text and json.loads(found["new_message"][0]) == answer.message
        last = copy.rows([{"talk": talk} for talk in [*talks, []]])[3]
        half = {"role": "assistant", "content": "\ud83d"}  # of a surrogate pair, which arguments of a call may have
        monkeypatch.setattr(Completion, "message", half)
        assert json.loads(copy({"talk": talks[:1]})["new_message"][0].encode()) == half  # UTF-8, as tables hold it
    assert found["new_error"].tolist()[:3] == [None] * 3 and "at least one message" in found["new_error"][3]
    assert found["new_message"][3] is last["new_message"] is None and last["new_error"] == found["new_error"][3]
