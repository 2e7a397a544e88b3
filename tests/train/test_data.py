"""Data files: what is read of each format, and what is refused, by file and line."""

import json

import numpy as np
import pytest

from jaxspec.checkpoint.hub import resolve
from jaxspec.text import load_tokenizer
from jaxspec.train.data import batch_of, drawn, held_back, read, windows

BOS = 2


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve("pocket"))


def rows(tokenizer, *paths, length=32, vocab_size=4096):
    texts = read(paths, tokenizer, length=length, vocab_size=vocab_size)
    return [(texts.ids[i, : texts.length[i]].tolist(), int(texts.first[i])) for i in range(len(texts.ids))]


def lines(path, *entries):
    path.write_text("\n".join(e if isinstance(e, str) else json.dumps(e) for e in entries) + "\n", encoding="utf-8")
    return path


def test_a_text_is_cut_into_rows(tokenizer, tmp_path):
    path = tmp_path / "code.py"
    path.write_text("def f(x):\n    return x + 1\n" * 12, encoding="utf-8")
    ids = tokenizer.encode(path.read_text())
    found = rows(tokenizer, path, length=25)
    assert sum((row for row, _ in found), []) == ids[: sum(len(row) for row, _ in found)] and ids[0] == BOS
    assert [len(row) for row, _ in found[:-1]] == [25] * (len(found) - 1) and {first for _, first in found} == {0}
    texts = read([path], tokenizer, length=25, vocab_size=4096)
    assert texts.ids.shape[1] == 25 and not texts.ids[-1, texts.length[-1] :].any()


def test_lines_are_texts_or_conversations_whose_last_answer_is_learnt(tokenizer, tmp_path):
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello there."},
        {"role": "user", "content": "What is 1 + 1?"},
        {"role": "assistant", "content": "It is two, as it was before."},
    ]
    path = lines(tmp_path / "mixed.jsonl", {"text": "import os, sys\n"}, "", {"messages": messages})
    (text, first), (chat, begins) = rows(tokenizer, path, length=128)
    assert text == tokenizer.encode("import os, sys\n") and first == 0
    assert chat[:begins] == tokenizer.apply_chat_template(messages[:-1])  # what an answer is written after
    assert tokenizer.decode(chat[begins:]).strip() == "It is two, as it was before."
    assert chat[-11:] == tokenizer.apply_chat_template(messages, add_generation_prompt=False)[-11:]
    # A row that ends before the answer is no use; one in which it goes on is all answer.
    short = rows(tokenizer, path, length=begins - 4)[1:]
    assert [first for _, first in short] == [4] and short[0][0] == chat[begins - 4 :][: begins - 4]


def test_a_stream_of_token_ids_is_taken_as_it_is(tokenizer, tmp_path):
    stream = np.random.default_rng(0).integers(0, 4096, 100).astype(np.uint16)
    np.save(tmp_path / "ids.npy", stream)
    assert rows(tokenizer, tmp_path / "ids.npy") == [(stream[at : at + 32].tolist(), 0) for at in (0, 32, 64, 96)]
    np.save(tmp_path / "floats.npy", stream.astype(np.float32))
    with pytest.raises(ValueError, match=r"floats.npy holds float32 \[100\], expected a stream of integers"):
        rows(tokenizer, tmp_path / "floats.npy")
    (tmp_path / "text.npy").write_text("x")
    with pytest.raises(ValueError, match="text.npy is no array of numpy, or one of objects; expected a stream of integers"):
        rows(tokenizer, tmp_path / "text.npy")
    with pytest.raises(ValueError, match=r"ids.npy has token ids \d+ .. \d+; this target has 0 .. 999"):
        rows(tokenizer, tmp_path / "ids.npy", vocab_size=1000)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"bad.jsonl line 2: not JSON: Expecting property name.* at character \d$"),
        ("[" * 100_000, "bad.jsonl line 2: the JSON is nested too deeply"),
        ("[1]", r"bad.jsonl line 2: found list; expected \{\"text\": ...\} or \{\"messages\": \[...\]\}"),
        ('{"prompt": "x"}', r"bad.jsonl line 2: found \['prompt'\]; expected"),
        ('{"messages": []}', "bad.jsonl line 2: the last message has role None; expected 'assistant'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "line 2: the last message has role 'user'; expected 'assistant'"),
        ('{"text": "\\ud800"}', "bad.jsonl line 2: .*surrogate"),
        ('{"text": "torn', "bad.jsonl line 2: not JSON: Invalid control character"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "bad.jsonl line 2: .*"),
    ],
)
def test_lines_that_are_neither_are_refused(tokenizer, tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        rows(tokenizer, lines(tmp_path / "bad.jsonl", {"text": "fine"}, line))


def test_lines_end_at_line_feeds_and_a_byte_order_mark_says_nothing(tokenizer, tmp_path):
    texts = ["x = 1\u2028y = 2", "a\x85b\x1c\x0c\x0bc", "x = 3\r\n"]
    written = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*written[:1], "", *written[1:]]).encode())
    assert [row for row, _ in rows(tokenizer, path)] == [tokenizer.encode(text) for text in texts]
    path.write_bytes(f"{written[0]}\n".encode() + b'{"text": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"lines.jsonl line 2: not JSON: 'utf-8' codec can't decode byte 0xe9"):
        rows(tokenizer, path)
    (tmp_path / "marked.txt").write_bytes(b"\xef\xbb\xbfx = 1")
    assert rows(tokenizer, tmp_path / "marked.txt") == [(tokenizer.encode("x = 1"), 0)]


def test_files_at_home(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "text.txt").write_text("x = 1")
    assert rows(tokenizer, "~/text.txt") == rows(tokenizer, tmp_path / "text.txt")


def test_files_that_cannot_be_learnt_from_are_refused(tokenizer, tmp_path):
    with pytest.raises(FileNotFoundError, match="data file .*none.txt does not exist"):
        rows(tokenizer, tmp_path / "none.txt")
    with pytest.raises(FileNotFoundError, match="data file .* is a folder"):
        rows(tokenizer, tmp_path)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="latin.txt is not UTF-8"):
        rows(tokenizer, tmp_path / "latin.txt")
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ValueError, match="found no text of 3 tokens or more to learn from in .*empty.txt"):
        rows(tokenizer, tmp_path / "empty.txt")


def test_batches_depend_on_seed_and_step_alone():
    texts = batch_of([np.full(5, i) for i in range(40)], [0] * 40, 8)
    own = batch_of([np.full(5, 100 + i) for i in range(40)], [2] * 40, 8)
    first, again, later, other = drawn(texts, 6, 0)(3), drawn(texts, 6, 0)(3), drawn(texts, 6, 0)(4), drawn(texts, 6, 1)(3)
    assert np.array_equal(first.ids, again.ids) and first.ids.shape == (6, 8)
    assert not np.array_equal(first.ids, later.ids) and not np.array_equal(first.ids, other.ids)
    mixed = drawn(texts, 5, 0, own=own)(0)
    assert (mixed.ids[:, 0] >= 100).tolist() == [False] * 3 + [True] * 2 and mixed.first.tolist() == [0, 0, 0, 2, 2]
    assert set(mixed.length.tolist()) == {5}


def test_windows_lie_anywhere_in_a_stream():
    drawn = [windows(np.arange(30), 8, 4, seed=0)(step) for step in range(60)]
    starts = np.concatenate([batch.ids[:, 0] for batch in drawn])
    assert set(starts.tolist()) == set(range(23)) and drawn[0].length.tolist() == [8] * 4
    assert all((batch.ids - batch.ids[:, :1] == np.arange(8)).all() for batch in drawn)
    assert np.array_equal(windows(np.arange(30), 8, 4, seed=0)(7).ids, drawn[7].ids)


def test_a_fiftieth_is_held_back():
    texts = batch_of([np.full(5, i) for i in range(100)], [0] * 100, 8)
    rest, held = held_back(texts)
    assert rest.ids[:, 0].tolist() == list(range(98)) and held.ids[:, 0].tolist() == [98, 99]
    with pytest.raises(ValueError, match="the data is a single row, of which none can be held out"):
        held_back(batch_of([np.arange(5)], [0], 8))
