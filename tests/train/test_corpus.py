"""The pocket corpus, its tokenizer and its chat template."""

import json
import random
import re
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from jaxspec.train.pocket import chat_pairs, corpus

TOKENIZER = AutoTokenizer.from_pretrained(corpus.TARGET_FOLDER)


def module(name: str, functions: int) -> str:
    """Source of a made-up module: distinct lines, so that no two modules look like copies."""
    parts = [f'"""The module {name}."""\n']
    for i in range(functions):
        parts.append(
            f"def {name}_{i}(first, second={i}):\n"
            f'    """Join {name} number {i} to the first."""\n'
            f"    {name}_result = first + second * {i}\n"
            f"    return [{name}_result, {i}]\n"
        )
    return "\n\n".join(parts)


def write(folder, files: dict[str, str | bytes]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())


@pytest.fixture
def stdlib(tmp_path):
    """A small folder shaped like a standard library."""
    folder = tmp_path / "python3.99"
    alpha = module("alpha", 12)
    write(
        folder,
        {
            "os.py": module("opsys", 8),
            "alpha.py": alpha,
            "zcopy.py": alpha.replace('"""The module alpha."""', '"""A near-copy."""'),
            "heapq.py": module("heap", 6),
            "heapcopy.py": module("heap", 6),
            "json/decoder.py": module("decode", 6),
            "test/test_heapq.py": module("heaptest", 4),
            "test/test_json/test_decode.py": module("decodetest", 4),
            "test/test_alpha.py": module("alphatest", 3),
            "test/test_long.py": module("longtest", 400),
            "encodings/cp1.py": module("codepage", 3),
            "site-packages/other.py": module("other", 3),
            "table.py": "table = [\n" + "    0x12, 0x34, 5678, 91011,\n" * 50 + "]\n",
            "latin.py": "# caf\u00e9\n".encode("latin-1"),
            "wide.py": module("wide", 4) + f"\nwide = '{'w' * 2000}'\n",
            "pydoc_data/topics.py": "topics = {'assert': 'The \"assert\" statement\\n***********\\n\\nAsserts a condition.\\n'}\n",
        },
    )
    return folder


@pytest.fixture
def docs(tmp_path):
    folder = tmp_path / "_sources"
    page = ".. module:: alpha\n\n.. function:: alpha_0(first, second=0)\n\n   Joins two numbers, and returns them in a list.\n"
    write(
        folder,
        {
            "library/alpha.rst.txt": page,
            "library/heapq.rst.txt": page.replace("alpha", "heap"),
            "whatsnew/changelog.rst.txt": "Everything.\n",
            "whatsnew/3.9.rst.txt": "What was new a while ago\n",
            "whatsnew/3.11.rst.txt": "What is new\n",
        },
    )
    return folder


def test_held_out_files_and_what_tells_of_them_stay_out_of_training(stdlib, docs):
    training, held = corpus.collect(stdlib, docs)
    names = {d.name for d in training}
    assert {d.name for d in held} == {"heapq.py", "json/decoder.py", "library/heapq.rst"}
    assert {"heapq.py", "json/decoder.py", "test/test_heapq.py", "test/test_json/test_decode.py", "library/heapq.rst"}.isdisjoint(names)
    assert "heapcopy.py" not in names  # a copy of a held-out file would leak it
    assert not any("heap" in d.text or "decode" in d.text for d in training)


def test_collect_keeps_code_and_pages_and_drops_copies_and_tables(stdlib, docs):
    training, _ = corpus.collect(stdlib, docs)
    assert {d.name: d.kind for d in training} == {
        "alpha.py": "library",
        "os.py": "library",
        "wide.py": "library",
        "library/alpha.rst": "docs",
        "topics/assert": "docs",
        "whatsnew/3.11.rst": "docs",
        "whatsnew/3.9.rst": "docs",
        "test/test_alpha.py": "tests",  # test_long.py alone is longer than all the others: more than the tests' share
    }
    texts = {d.name: d.text for d in training}
    assert texts["topics/assert"] == 'The "assert" statement\n***********\n\nAsserts a condition.\n'
    assert texts["alpha.py"] == module("alpha", 12)
    assert max(map(len, texts["wide.py"].splitlines())) < 100  # the overlong line is gone, the rest is there
    assert "def wide_3" in texts["wide.py"]


def test_held_out_texts_begin_every_held_out_module():
    texts = corpus.held_out_texts()
    assert sorted(texts) == sorted(corpus.HELD_OUT) and len(texts) == 24
    assert texts["heapq.py"].startswith('"""Heap queue algorithm')
    # Acceptance is measured behind 160 tokens from each one's token 400 on.
    assert min(map(len, TOKENIZER(list(texts.values())).input_ids)) >= 560


def test_folders_without_the_expected_files_are_refused(stdlib, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"--stdlib .*empty: expected a standard library's folder, found no os\.py"):
        corpus.collect(tmp_path / "empty")
    with pytest.raises(FileNotFoundError, match=r"--docs .*empty: expected reStructuredText pages \(\*\.rst\.txt\), found none"):
        corpus.collect(stdlib, tmp_path / "empty")


def test_build_is_deterministic_and_delimits_documents(stdlib, docs, tmp_path):
    manifests = [corpus.build(stdlib, docs, tmp_path / out) for out in ("one", "two")]
    assert manifests[0] == manifests[1] == json.loads((tmp_path / "one" / "manifest.json").read_text())
    for name in ("train.npy", "val.npy"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()

    manifest = manifests[0]
    train, val = (np.load(tmp_path / "one" / f"{name}.npy") for name in ("train", "val"))
    assert train.dtype == val.dtype == np.uint16
    assert len(train) == manifest["train"]["total"]["tokens"] and len(val) == manifest["val"]["total"]["tokens"]
    starts, ends = np.flatnonzero(train == corpus.BOS), np.flatnonzero(train == corpus.EOS)
    assert len(starts) == manifest["train"]["total"]["documents"]
    np.testing.assert_array_equal(starts, np.concatenate([[0], ends[:-1] + 1]))
    assert manifest["stdlib"] == "python3.99" and manifest["docs"] == "3.11"

    first, end = manifest["val_spans"]["heapq.py"]
    assert TOKENIZER.decode(val[first + 1 : end - 1]) == module("heap", 6)
    chat = manifest["train"]["chat"]
    assert chat["documents"] > 0 and chat["bytes"] <= corpus.CHAT_SHARE * manifest["train"]["total"]["bytes"]


def test_main_writes_what_it_is_asked_for(stdlib, tmp_path, capsys):
    corpus.main(["--stdlib", str(stdlib), "--out", str(tmp_path)])
    manifest = json.loads(capsys.readouterr().out)
    assert manifest == json.loads((tmp_path / "manifest.json").read_text()) and manifest["docs"] is None
    with pytest.raises(SystemExit):
        corpus.main(["--stdlib", str(stdlib)])
    assert "found neither --out nor --train-tokenizer" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"tokenizer: found \d+ distinct tokens, expected 4096; the training text is too small"):
        corpus.main(["--stdlib", str(stdlib), "--train-tokenizer", str(tmp_path)])


def test_tokenizer_training_is_deterministic(tmp_path):
    texts = [module("alpha", 20), module("beta", 20)]
    one, two = (corpus.train_tokenizer(texts, 430) for _ in range(2))
    assert one.to_str() == two.to_str() and one.get_vocab_size() == 430
    corpus.save_tokenizer(one, tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("def f").input_ids == one.encode("def f").ids


def test_ids_are_those_of_gemma_4():
    assert len(TOKENIZER) == TOKENIZER.vocab_size == 4096
    gemma = {
        0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>", 46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>", 49: "<tool_call|>",
        50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>", 100: "<|channel>", 101: "<channel|>",
        105: "<|turn>", 106: "<turn|>",
    }  # fmt: skip
    for i in range(107):
        name = gemma.get(i, f"<unused{i}>")
        assert TOKENIZER.convert_tokens_to_ids(name) == i
        assert TOKENIZER(f"a{name}").input_ids[-1] == i
    assert TOKENIZER("\n").input_ids == [2, 107]
    named = (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.bos_token_id, TOKENIZER.unk_token_id, TOKENIZER.mask_token_id)
    assert named == (0, 1, 2, 3, 4)
    generation = json.loads((corpus.TARGET_FOLDER / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 106, 50] and generation["bos_token_id"] == 2 and generation["pad_token_id"] == 0


HARD = ("<|turn>", "<bos>", "<unk>", "<unused7>", "    ", "\n        ", "é", "日本")


@settings(max_examples=300)
@given(st.lists(st.one_of(st.text(), st.text("ab_ .:()\n\t\r01"), st.sampled_from(HARD))).map("".join))
def test_decode_undoes_encode(text):
    ids = TOKENIZER(text).input_ids
    assert ids[0] == corpus.BOS and (3 in ids) == ("<unk>" in text)  # every byte has a token: nothing is unknown
    assert TOKENIZER.decode(ids[1:]) == text


def test_every_byte_has_its_token():
    ids = {i for c in range(256) for i in TOKENIZER(chr(c)).input_ids}
    singles = {i for word, i in TOKENIZER.get_vocab().items() if i >= 107 and len(word) == 1}
    assert len(singles) == 256 and len(ids - {2}) >= 128


def test_code_takes_less_than_a_third_of_a_token_a_byte():
    texts = corpus.held_out_texts().values()
    tokens = sum(len(ids) for ids in TOKENIZER(list(texts), add_special_tokens=False).input_ids)
    assert tokens / sum(len(text.encode()) for text in texts) < 1 / 3
    indent = TOKENIZER("if x:\n        return", add_special_tokens=False).input_ids
    assert [TOKENIZER.decode([i]) for i in indent] == ["if", " x", ":", "\n        ", "return"]


def test_a_folder_with_a_gemma_4_config_gives_the_same_tokenizer(tmp_path):
    """AutoTokenizer looks at config.json first: Gemma's own tokenizer class would split text its own way."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(corpus.TARGET_FOLDER / name, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma4_text"}))
    text = "def f(x):\n    return x  # ok\n"
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == TOKENIZER(text).input_ids


def test_names_of_special_tokens_are_text_in_files_and_tokens_in_chat():
    tokenizer = Tokenizer.from_file(str(corpus.TARGET_FOLDER / "tokenizer.json"))
    documents = [corpus.Document("a.py", "library", "<|turn>"), corpus.Document("c", "chat", "<|turn>")]
    code, chat = corpus.encode(tokenizer, documents)
    assert 105 not in code and TOKENIZER.decode(code[1:-1]) == "<|turn>"
    assert chat.tolist() == [2, 105, 1]


def rendered(messages, **options) -> str:
    return TOKENIZER.apply_chat_template(messages, tokenize=False, **options)


USER, SYSTEM = {"role": "user", "content": " Hi \n"}, {"role": "system", "content": "Be brief."}
NO_THOUGHT = "<|channel>thought\n<channel|>"


def test_template_of_one_question():
    assert rendered([USER]) == "<bos><|turn>user\nHi<turn|>\n"
    assert rendered([USER], add_generation_prompt=True) == f"<bos><|turn>user\nHi<turn|>\n<|turn>model\n{NO_THOUGHT}"
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    assert rendered([parts]) == rendered([USER])
    ids = TOKENIZER.apply_chat_template([USER], add_generation_prompt=True, return_dict=False)
    assert ids.count(2) == 1 and ids[:2] == [2, 105]


def test_template_of_a_system_turn_and_thinking():
    assert rendered([SYSTEM, USER]) == "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n"
    assert rendered([{**SYSTEM, "role": "developer"}, USER]) == rendered([SYSTEM, USER])  # as OpenAI calls it; Gemma 4's own takes it
    thinking = rendered([SYSTEM, USER], add_generation_prompt=True, enable_thinking=True)
    assert thinking == "<bos><|turn>system\n<|think|>\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n"
    assert rendered([USER], enable_thinking=True) == "<bos><|turn>system\n<|think|>\n<turn|>\n<|turn>user\nHi<turn|>\n"


@pytest.mark.parametrize("role", ["assistant", "model"])
def test_template_of_several_turns_strips_past_thoughts(role):
    answer = {"role": role, "content": "<|channel>thought\nA greeting.\n<channel|>Hello."}
    text = rendered([USER, answer, USER], add_generation_prompt=True)
    assert text == f"<bos><|turn>user\nHi<turn|>\n<|turn>model\nHello.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n{NO_THOUGHT}"


@pytest.mark.parametrize(
    ("messages", "options", "error"),
    [
        ([{"role": "tool", "content": "x"}], {}, "unexpected role tool: expected system"),
        ([USER, SYSTEM], {}, "unexpected role system"),
        ([{"role": "user", "content": [{"type": "image"}]}], {}, "takes text only: found a part of type image"),
        ([USER], {"tools": [{"type": "function", "function": {"name": "f"}}]}, "has no tools: found 1, expected none"),
    ],
)
def test_template_refuses_what_it_does_not_have(messages, options, error):
    with pytest.raises(Exception, match=error):  # jinja2's TemplateError
        rendered(messages, **options)


def test_chat_of_a_source_file_asks_and_answers():
    source = (
        '"""Tools."""\n\n\nclass Box:\n    """A box."""\n\n    def size(self, unit="cm"):\n        """Return the size.\n\n'
        '        In `unit`.\n        """\n        return self.n, unit\n'
    )
    pairs = list(chat_pairs.source_pairs(source, "pkg/tools.py", random.Random(0)))
    function = 'def size(self, unit="cm"):\n    """Return the size.\n\n    In `unit`.\n    """\n    return self.n, unit'
    bare = 'def size(self, unit="cm"):\n    return self.n, unit'
    assert [answer for _, answer in pairs] == ["Tools.", "Return the size.\n\nIn `unit`.", f"```python\n{function}\n```",
                                               "Return the size.\n\nIn `unit`.", "A box."]  # fmt: skip
    questions = [question for question, _ in pairs]
    assert "`pkg.tools.Box.size`" in questions[1] and questions[3].endswith(f"```python\n{bare}\n```")
    assert "`size(self, unit='cm')`" in questions[2] and "Return the size." in questions[2]
    assert list(chat_pairs.source_pairs("def broken(:", "broken.py", random.Random(0))) == []


def test_chat_of_a_page_names_objects_in_full():
    page = (
        ".. module:: queue\n\n.. class:: Queue(maxsize=0)\n\n   A first-in, first-out queue of things.\n\n"
        "   .. method:: put(item)\n               put_all(items)\n\n      Put an item into the queue, waiting for room.\n\n"
        "Text between.\n\n.. method:: Queue.get()\n\n   Remove an item from the queue and return it.\n"
    )
    pairs = list(chat_pairs.page_pairs(page, random.Random(3)))
    assert [re.search(r"`(.*?)(\(.*)?`", question)[1] for question, _ in pairs] == ["queue.Queue", "queue.Queue.put", "queue.Queue.get"]
    assert [answer for _, answer in pairs] == ["A first-in, first-out queue of things.", "Put an item into the queue, waiting for room.",
                                               "Remove an item from the queue and return it."]  # fmt: skip


def test_conversations_end_their_last_turn_and_respect_the_budget():
    documents = [corpus.Document("alpha.py", "library", module("alpha", 30))]
    texts = chat_pairs.conversations(documents, TOKENIZER.apply_chat_template, 6000, seed=1)
    assert texts == chat_pairs.conversations(documents, TOKENIZER.apply_chat_template, 6000, seed=1)
    assert 3000 < sum(map(len, texts)) <= 6000
    for text in texts:
        assert text.endswith("<turn|>\n") and "<bos>" not in text
        assert text.count("<|turn>user\n") == text.count("<|turn>model\n") and text.count(NO_THOUGHT) == 1
