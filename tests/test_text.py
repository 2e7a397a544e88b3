"""Tokenizer, chat template and incremental detokenizing, on small tokenizers of the three kinds of decoder that checkpoints have."""

import itertools
import json
import random
import subprocess
import sys

import pytest
import transformers
from small_tokenizers import CORPUS, KINDS, SPECIALS, byte_fallback, byte_level, save
from tokenizers import AddedToken

from jaxspec.text import CLASSES, CONTEXT_TOKENS, INCOMPLETE, IncrementalDetokenizer, OutputText, load_tokenizer

# Characters of 1 to 4 bytes that no merge covers, a skin tone, a joined family, combining marks, a flag.
TEXTS = ["a€😀", " 👍🏽", "e\u0301o\u0308", "漢😀字", "👩\u200d👧", "🇫🇷x"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}{{ raise_exception('system must be first') }}"
    "{% endif %}<|turn>{{ m['role'] }}\n{{ m['content'] }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
    "{% if think %}think{% endif %}"
)


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    return load_tokenizer(save(KINDS[request.param](), tmp_path_factory.mktemp("tokenizer") / request.param))


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory):
    folder = save(byte_level(), tmp_path_factory.mktemp("chat"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def pieces(tokenizer, blocks):
    detokenizer = IncrementalDetokenizer(tokenizer)
    return [detokenizer.push(block) for block in blocks] + [detokenizer.flush()]


def splits(ids):
    """Every way to cut ids into consecutive blocks."""
    for cuts in itertools.product([False, True], repeat=len(ids) - 1):
        blocks = [[ids[0]]]
        for i, cut in zip(ids[1:], cuts, strict=True):
            if cut:
                blocks.append([i])
            else:
                blocks[-1].append(i)
        yield blocks


def random_blocks(rng, ids):
    blocks = []
    while ids:
        size = rng.randint(0, 5)
        blocks.append(ids[:size])
        ids = ids[size:]
    return blocks


def test_encode_adds_bos_and_decode_gives_the_text_back(tokenizer):
    for text in CORPUS + TEXTS:
        ids = tokenizer.encode(text)
        assert ids[0] == tokenizer.bos_token_id == 2
        assert all(type(i) is int for i in ids)
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("") == [2]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.vocab_size == max(tokenizer.encode("".join(CORPUS)) + [tokenizer.vocab_size - 1]) + 1


def test_special_and_byte_ids(tokenizer):
    hidden = [i for i in range(tokenizer.vocab_size + 3) if not tokenizer.has_text(i)]
    assert hidden == [*range(len(SPECIALS)), *range(tokenizer.vocab_size, tokenizer.vocab_size + 3)]
    ids = tokenizer.encode("😀")[1:]
    # Held-back runs hang on this: a Gemma tokenizer must know its byte tokens, and a byte-level one has none.
    assert [i in tokenizer.byte_ids for i in ids][-4:] == [bool(tokenizer.byte_ids)] * 4
    assert len(tokenizer.byte_ids) in (0, 256)


def test_gemma_class_gives_the_same_ids(tmp_path):
    # Released checkpoints name GemmaTokenizer, which builds its own pipeline around the vocabulary instead of reading it from the file.
    plain = load_tokenizer(save(byte_fallback(), tmp_path / "plain"))
    gemma = load_tokenizer(save(byte_fallback(), tmp_path / "gemma", tokenizer_class="GemmaTokenizer"))
    for text in CORPUS + TEXTS:
        assert gemma.encode(text) == plain.encode(text)
        assert gemma.decode(gemma.encode(text)) == text
    assert gemma.byte_ids == plain.byte_ids and gemma.bos_token_id == 2


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("model_type", [None, "gemma4", "gemma4_text", "step3p5"])
def test_the_class_is_the_one_that_auto_tokenizer_takes(name, model_type, tmp_path):
    folder = save(byte_fallback(), tmp_path, tokenizer_class=name)
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = load_tokenizer(folder).transformers, transformers.AutoTokenizer.from_pretrained(folder)
    assert type(ours) is type(theirs)
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.backend_tokenizer.to_str() == theirs.backend_tokenizer.to_str()


@pytest.mark.parametrize("text", TEXTS)
def test_every_split_of_a_text(tokenizer, text):
    ids = tokenizer.encode(text)[1:]
    assert len(ids) <= 13
    for blocks in splits(ids):
        out = pieces(tokenizer, blocks)
        assert "".join(out) == text
        assert not any(INCOMPLETE in piece for piece in out)  # a broken character was shown


def test_text_is_not_held_longer_than_needed(tokenizer):
    ids = tokenizer.encode("the quick brown fox")[1:]
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = ""
    for n, i in enumerate(ids, 1):
        shown += detokenizer.push([i])
        assert shown == tokenizer.decode(ids[:n])


def test_text_before_a_broken_character_is_shown(tokenizer):
    ids = tokenizer.encode("fox😀")[1:]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(ids[:-1]) == "fox"
    assert detokenizer.push(ids[-1:]) + detokenizer.flush() == "😀"


def test_random_ids(tokenizer):
    """Any ids at all, as an untrained model gives them: broken characters, special tokens, ids without a token."""
    rng = random.Random(0)
    raw_bytes = sorted(tokenizer.byte_ids) or tokenizer.encode("é漢😀😀")[1:]
    for _ in range(300):
        pool = rng.choice([range(tokenizer.vocab_size), raw_bytes, [*raw_bytes, *range(0, tokenizer.vocab_size + 9, 7)]])
        ids = rng.choices(pool, k=rng.randint(0, 60))
        assert "".join(pieces(tokenizer, random_blocks(rng, ids))) == tokenizer.decode(ids)


def test_literal_replacement_character(tokenizer):
    text = f"a{INCOMPLETE}b{INCOMPLETE}"
    assert "".join(pieces(tokenizer, [[i] for i in tokenizer.encode(text)])) == text


def test_cost_of_a_push_is_bounded(tokenizer, monkeypatch):
    lengths = []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids: lengths.append(len(ids)) or decode(ids))
    ids = tokenizer.encode(" ".join(CORPUS) * 5)[1:]
    broken = tokenizer.encode("😀")[-2:-1] * 200  # second-last byte, over and over: never a character
    out = pieces(tokenizer, [[i] for i in ids + broken + ids])
    assert "".join(out) == decode(ids + broken + ids)
    if tokenizer.byte_ids:  # the run of byte tokens is decoded once, when it ends
        lengths.remove(CONTEXT_TOKENS + len(broken) + 1)
    assert max(lengths) == CONTEXT_TOKENS + 1


def test_flush_makes_ready_for_another_sequence(tokenizer):
    ids = tokenizer.encode("fox €")[1:]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push(ids[:-1]) + detokenizer.flush() == tokenizer.decode(ids[:-1])
    assert detokenizer.flush() == ""
    assert detokenizer.push(ids) + detokenizer.flush() == "fox €"


def output(tokenizer, blocks, stop=(), **settings):
    """(pieces, the object) of ids that come in these blocks."""
    text = OutputText(tokenizer, stop, **settings)
    return [*(text.push(block) for block in blocks), text.finish()], text


SENTENCE = CORPUS[1] + " 日本語 and naïve café 😀👍🏽 again"


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["fox", "x j", "quick brown", "gain", "日本", "語", "ïv", "👍", "n", "the quick brown fox jumps over t"])
def test_a_stop_string_ends_the_text_wherever_tokens_and_blocks_divide_it(tokenizer, stop, include):
    ids = tokenizer.encode(SENTENCE)
    whole = tokenizer.decode(ids)
    expected = whole[: whole.index(stop) + (len(stop) if include else 0)]
    rng = random.Random(stop)
    taken = set()
    for blocks in ([ids], [[i] for i in ids], *(random_blocks(rng, ids) for _ in range(10))):
        found, text = output(tokenizer, blocks, [stop, "never"], include_stop=include)
        assert ("".join(found), text.text, text.found) == (expected, expected, stop)
        taken.add(text.tokens)
    # However they come, as many tokens are taken: those that bring the stop string to light, and the last of them does.
    assert len(taken) == 1
    (count,) = taken
    if not set(ids[:count]) & tokenizer.byte_ids:
        assert stop in tokenizer.decode(ids[:count]) and stop not in tokenizer.decode(ids[: count - 1])


def test_what_may_become_a_stop_string_is_not_shown(tokenizer):
    ids = tokenizer.encode("the quick brown fox jumps")
    for stops in (["quick brown bear"], ["quick brown bear", "own f!"], ["jumps!"]):
        found, text = output(tokenizer, [[i] for i in ids], stops)
        assert "".join(found) == text.text == tokenizer.decode(ids) and text.found is None
    text = OutputText(tokenizer, ["brown bear"])
    shown = text.push(tokenizer.encode("the quick brown"))
    assert shown == text.text[: len(text.text) - 9]
    assert OutputText(tokenizer, ["brown bear"], True).push(tokenizer.encode("the quick brown")).rstrip() == text.text.rstrip()


def test_the_stop_string_that_begins_first_ends_the_text(tokenizer):
    _, text = output(tokenizer, [tokenizer.encode("the quick brown fox")], ["fox", "quick", "uick b"])
    assert text.found in ("quick", "uick b") and text.text.endswith("the ") or text.text.endswith("the q")
    _, text = output(tokenizer, [tokenizer.encode("over and over")], ["er", "over"])
    assert text.found == "over"


def test_stop_strings_are_not_looked_for_in_the_first_tokens(tokenizer):
    ids = tokenizer.encode("fox fox fox fox")
    first, second = (next(n for n in range(1, len(ids)) if tokenizer.decode(ids[:n]).count("fox") == k) for k in (1, 2))
    for least, count in ((0, first), (first - 1, first), (first, second), (second - 1, second)):
        _, text = output(tokenizer, [ids], ["fox"], min_tokens=least)
        assert (text.tokens, text.found) == (count, "fox")
    _, text = output(tokenizer, [ids], ["fox"], min_tokens=len(ids))
    assert (text.tokens, text.found, text.text) == (len(ids), None, tokenizer.decode(ids))


class Counted(str):
    """Counts the characters that are copied, or searched, of texts made from it."""

    seen = 0

    def __add__(self, other):
        return self.made(str(self) + other)

    def __radd__(self, other):
        return self.made(other + str(self))

    def __getitem__(self, key):
        return self.made(str(self)[key])

    def find(self, text, start=0, end=None):
        Counted.seen += len(self) - start
        return str(self).find(text, start, end)

    @classmethod
    def made(cls, text):
        cls.seen += len(text)
        return cls(text)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("block", [1, 30, 10**6])
def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizer, monkeypatch, block, include):
    ids = tokenizer.encode(CORPUS[1])[1:]
    push = IncrementalDetokenizer.push
    monkeypatch.setattr(IncrementalDetokenizer, "push", lambda *args: Counted(push(*args)))
    stops, costs = ["never seen", "fox runs", "!"], []
    for repeats in (20, 80):
        monkeypatch.setattr(Counted, "seen", 0)
        text = OutputText(tokenizer, stops, include)
        taken = [text.push((ids * repeats)[i : i + block]) for i in range(0, len(ids) * repeats, block)]
        assert "".join([*taken, text.finish()]) == text.text == tokenizer.decode(ids * repeats)
        costs.append(Counted.seen / (len(ids) * repeats))
    assert costs[0] > 1 and costs[1] < 1.2 * costs[0], costs


def test_a_stop_string_in_held_back_bytes_is_found_at_the_end(tmp_path):
    save(byte_fallback(), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    letters = [tokenizer._hf.backend_tokenizer.token_to_id(f"<0x{ord(c):02X}>") for c in "abcd"]
    found, text = output(tokenizer, [letters[:2], letters[2:]], ["bc"])
    assert (found, text.found, text.text) == (["", "", "a"], "bc", "a")


def test_a_token_has_a_text_of_its_own(tokenizer):
    eos = tokenizer.eos_token_id
    assert tokenizer.token_text(eos) == "<eos>" and tokenizer.decode([eos]) == ""
    assert tokenizer.token_text(10**6) == ""
    assert tokenizer.bos_token_id not in tokenizer.encode_word("fox") and tokenizer.decode(tokenizer.encode_word("fox")) == "fox"


def test_chat_template(chat_folder):
    tokenizer = load_tokenizer(chat_folder)
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "Hi"}]
    opening = "<|turn>system\nshort<turn|>\n<|turn>user\nHi<turn|>\n"
    # encode() adds bos, and so does the template: once is right, also where the template's text is encoded.
    assert tokenizer.encode(f"<bos>{opening}") == tokenizer.encode(opening)
    assert tokenizer.apply_chat_template(messages) == tokenizer.encode(opening + "<|turn>model\n")
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == tokenizer.encode(opening)
    assert tokenizer.apply_chat_template(messages, think=True) == tokenizer.encode(opening + "<|turn>model\nthink")


@pytest.mark.parametrize(
    "template",
    [
        None,  # writes content down
        "<|turn>{{ messages[0].role }}\n{{ messages[0].content | trim }}<turn|>\n",
        "{{ '<|turn>user\n' + messages[0]['content'] + '<turn|>\n' }}",
        "<|turn>user\n{% for part in messages[0].content %}{{ part.text }}{{ '\n' if not loop.last }}{% endfor %}<turn|>\n",
    ],
)
def test_content_in_parts_is_its_text_in_every_template(chat_folder, template):
    """Not the list as Python shows it, in a template that knows no parts."""
    tokenizer = load_tokenizer(chat_folder)
    messages = [{"role": "user", "content": [{"type": "text", "text": "fox"}, {"type": "text", "text": "dog"}]}]
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=False, chat_template=template)
    assert tokenizer.decode(found, special=True).removeprefix("<bos>").rstrip() == "<|turn>user\nfox\ndog<turn|>"


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"city": "Paris", "days": 2}', "city=Paris;days=2;"),
        ({"city": "Paris"}, "city=Paris;"),
        ("", ""),
        ("city:Paris", "'city:Paris'"),
        ("[1]", "'[1]'"),
    ],
)
def test_arguments_of_calls_are_read_where_they_are_a_json_text(chat_folder, arguments, written):
    """As in OpenAI's form, which a template that wants a dict would write as it is."""
    template = (
        "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls %}{% set given = call.function.arguments %}[{{ call.id }}:"
        "{% if given is mapping %}{% for key in given %}{{ key }}={{ given[key] }};{% endfor %}{% else %}'{{ given }}'{% endif %}]"
        "{% endfor %}{% endfor %}"
    )
    calls = [{"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}, {"id": "b", "function": {}}]
    messages = [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    tokenizer = load_tokenizer(chat_folder)
    found = tokenizer.decode(tokenizer.apply_chat_template(messages, chat_template=template))
    assert found == f"Go[a:{written}][b:'']" and calls[0]["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    "messages, error",
    [
        ([], "at least one message.*found \\[\\]"),
        ("Hi", "list of at least one message.*found 'Hi'"),
        ({"role": "user", "content": "Hi"}, "list of at least one message"),
        (iter([{"role": "user", "content": "Hi"}]), "list of at least one message.*found <list_iterator"),
        ([{"role": "user", "content": "Hi"}, "Hi"], "message 1 is 'Hi', expected a dict with 'role' and 'content'"),
        ([{"content": "Hi"}], "message 0 is {'content': 'Hi'}, expected a dict"),
        ([{"role": "user", "text": "Hi"}], "message 0 has no content; found role, text, expected 'role' and 'content'"),
        ([{"role": "user", "content": None}], "message 0 has no content"),
        ([{"role": "user", "content": 5}], "the content of message 0 is 5, expected a str or a list of parts"),
        ([{"role": "user", "content": "a\ud800"}], r"the text has '\\ud800' at position 1: half of a surrogate pair, no character"),
        ([{"role": "user", "content": "Hi"}, {"role": "system", "content": "x"}], "refused the conversation: system must be first"),
    ],
)
def test_bad_conversations(chat_folder, messages, error):
    with pytest.raises(ValueError, match=error):
        load_tokenizer(chat_folder).apply_chat_template(messages)


def test_no_chat_template(tokenizer):
    with pytest.raises(ValueError, match="has no chat template .*instruction-tuned"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_encode_takes_text_only(tokenizer):
    with pytest.raises(TypeError, match="takes one str, found list"):
        tokenizer.encode(["Hi"])
    for encode in (tokenizer.encode, tokenizer.encode_word):
        with pytest.raises(ValueError, match=r"the text has '\\ud83c' at position 2: half of a surrogate pair"):
            encode("é \ud83c")


def test_missing_folder_and_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere has no tokenizer.json: there is no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="has no tokenizer.json: it has no files"):
        load_tokenizer(tmp_path)
    for i in range(10):
        (tmp_path / f"{i}.json").touch()
    with pytest.raises(FileNotFoundError, match="it has 0.json, 1.json, .*7.json, ..."):
        load_tokenizer(tmp_path)


def test_broken_file(tmp_path):
    folder = save(byte_level(), tmp_path)
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model":')
    with pytest.raises(ValueError, match="tokenizer.json cannot be loaded: "):
        load_tokenizer(folder)


def test_a_template_that_begins_with_a_token_that_there_is_not(tmp_path):
    folder = save(byte_level(), tmp_path)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    (folder / "tokenizer_config.json").unlink()
    with pytest.warns(UserWarning, match="the chat template of .* writes bos_token, which no tokenizer_config.json there names"):
        load_tokenizer(folder)


@pytest.mark.parametrize(("text", "found"), [("{", "is no JSON: "), ("[]", "holds a list, expected an object")])
def test_a_broken_tokenizer_config(text, found, tmp_path):
    folder = save(byte_level(), tmp_path)
    (folder / "tokenizer_config.json").write_text(text)
    with pytest.raises(ValueError, match=f"tokenizer_config.json {found}"):
        load_tokenizer(folder)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    folder = save(byte_level(), tmp_path / "odd", tokenizer_class="Odd", auto_map={"AutoTokenizer": ["odd.Odd", "odd.Odd"]})
    (folder / "odd.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Odd: pass\n")
    try:
        load_tokenizer(folder)
    except ValueError:
        pass  # refused, or loaded from the json file alone: either is right
    assert not (tmp_path / "ran").exists()


def test_no_tokenizer_file_is_read_from_another_folder(tmp_path):
    other = save(byte_fallback(), tmp_path / "other")
    (other / "tokenizer.json").rename(other / "tokenizer.4.0.0.json")
    for name in ("../other/tokenizer.4.0.0.json", str(other / "tokenizer.4.0.0.json")):
        folder = save(byte_level(), tmp_path / "folder", fast_tokenizer_files=[name])
        with pytest.raises(ValueError, match=f"tokenizer_config.json names '{name}', which is outside its folder"):
            load_tokenizer(folder)


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__ }}", "{% include '/etc/hostname' %}", "{% import 'os' as os %}"])
def test_a_chat_template_reaches_nothing_but_the_messages(template, tmp_path):
    folder = save(byte_level(), tmp_path)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ValueError, match="refused the conversation"):
        load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "Hi"}])


def test_added_tokens_that_are_not_special_are_text(tmp_path):
    backend = byte_fallback()
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    tokenizer = load_tokenizer(save(backend, tmp_path))
    ids = tokenizer.encode("a<tool>b")
    assert "".join(pieces(tokenizer, [[i] for i in ids])) == tokenizer.decode(ids) == "a<tool>b"


def test_loading_says_nothing_and_importing_is_light(chat_folder):
    # transformers takes seconds to import and, without PyTorch, advises to install it: neither is for someone who asks for --help.
    code = f"""
import sys, jaxspec, jaxspec.text
assert "transformers" not in sys.modules and "jax" not in sys.modules
sys.modules["torch"] = None
jaxspec.text.load_tokenizer({str(chat_folder)!r})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_loading_imports_neither_pytorch_nor_scipy(chat_folder):
    # PyTorch, where it is installed, takes more time than all else that a start imports. scipy is for structured outputs alone.
    code = f"""
import sys
sys.modules.pop("torch", None)  # which tests/alone hides
import jaxspec.loading
jaxspec.loading.load_tokenizer({str(chat_folder)!r})
print([name for name in ("torch", "scipy") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_threads_that_load_their_first_tokenizers_at_a_time():
    """In a process of its own, where transformers has not been imported."""
    code = """
import sys, threading
from jaxspec import checkpoint
from jaxspec.text import load_tokenizer
sys.setswitchinterval(1e-5)
made, start = [], threading.Barrier(3)
def load():
    start.wait()
    made.append(load_tokenizer(checkpoint.resolve("pocket")))
threads = [threading.Thread(target=load) for _ in range(3)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(made) == 3
"""
    subprocess.run([sys.executable, "-c", code], check=True)
