"""Answers as messages: thoughts, texts and calls of functions."""

import dataclasses
import pickle
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_tokenizers import byte_fallback, byte_level, save

from jaxspec import checkpoint
from jaxspec.engine.answers import FORMS, Deltas, arguments_of
from jaxspec.engine.completion import Completion
from jaxspec.engine.stats import RoundStats
from jaxspec.text import OutputText, load_tokenizer

TURN = "<bos><|turn>user\nHi<turn|>\n<|turn>model\n"
EMPTY = TURN + "<|channel>thought\n<channel|>"
WEATHER = '<|tool_call>call:get_weather{city:<|"|>New {York}, "NY"<|"|>,days:3,near:[1,2.5,true,null],at:{x:<|"|>a:b<|"|>}}<tool_call|>'
TAGGED = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
PARAMETERS = "<parameter=city>\nParis\n</parameter>\n<parameter=code>\n  if x:\n    y\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}}},
    }
]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(checkpoint.resolve("pocket"))


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    """A tokenizer whose tags are text, as Step-3.5's are."""
    backend = byte_level()
    backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return load_tokenizer(save(backend, tmp_path_factory.mktemp("tagged")))


def answer(tokenizer, prompt, written, *, stop=(), tools=None):
    """A completion as the engine makes it, and what its deltas come to when each token is a chunk."""
    ids = tokenizer.encode_word(written) if isinstance(written, str) else written
    text, made, deltas = OutputText(tokenizer, stop), {}, Deltas(tokenizer, prompt)
    for i, token in enumerate(ids):
        piece = text.push([token])
        last = i + 1 == len(ids) or text.found is not None
        piece += text.finish() if last else ""
        for name, new in deltas.push([token], piece, last).items():
            made[name] = made.get(name, "") + new
        if last:
            ids = ids[: i + 1]
            break
    stats = RoundStats.of([], 0, 0)
    reason = "length" if text.found is None else "stop"
    done = Completion(text.text, ids, reason, text.found, [], 0, stats, prompt=prompt, tokenizer=tokenizer, tools=tools)
    return done, made


def calls_of(message):
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]


@pytest.mark.parametrize(
    ("prompt", "written", "thought", "said", "calls"),
    [
        (EMPTY, "The answer  is\n 4.\n<turn|>", None, "The answer  is\n 4.\n", []),
        (TURN, "<|channel>thought\nlong\n\nand more\n<channel|>It is 4.<turn|>", "long\n\nand more", "It is 4.", []),
        (TURN, "<|channel>thought\n<channel|>4<turn|>", None, "4", []),
        (TURN, "<|channel>though<channel|>4<turn|>", "though", "4", []),  # not the label
        (TURN, "<|channel>thought\nlong and c", "long and c", "", []),
        (
            TURN,
            f"<|channel>thought\nlook<channel|>I look.{WEATHER}<|tool_call>call:get.time-now{{}}<tool_call|><|tool_response>",
            "look",
            "I look.",
            [
                ("get_weather", {"city": 'New {York}, "NY"', "days": 3, "near": [1, 2.5, True, None], "at": {"x": "a:b"}}),
                ("get.time-now", {}),
            ],
        ),
        (TURN, "<|tool_call>call:f<tool_call|>", None, "", [("f", {})]),
        (TURN, '<|tool_call>call:f{x:<|"|>cut', None, "", [("f", '{x:<|"|>cut')]),  # what is no object stays as it is
        (TURN, "<|channel>thought\nlook<|tool_call>call:f{}<turn|>", "look", "", [("f", {})]),  # which end neither
        (
            f"{TURN}<|tool_call>call:f{{}}<tool_call|><|tool_response>response:f{{value:1}}<tool_response|>",
            "It is 1.",
            None,
            "It is 1.",
            [],
        ),
        (TURN + "Once upon", " a time<turn|>", None, "Once upon a time", []),
        (TURN + "<|channel>thought\nOnce", " upon<channel|>a time", "Once upon", "a time", []),
        ("def f():", " return 1", None, " return 1", []),
    ],
)
def test_an_answer_in_channels_is_a_message(tokenizer, prompt, written, thought, said, calls):
    done, made = answer(tokenizer, prompt, written)
    message = done.message
    assert message["role"] == "assistant" and message["content"] == said and message.get("reasoning_content") == thought
    assert calls_of(message) == calls and ("tool_calls" in message) == bool(calls)
    # Deltas are what is new.
    assert (thought or "").endswith(made.get("reasoning_content", "").strip()) and said.strip().endswith(made.get("content", "").strip())
    assert bool(made.get("content")) == bool(said)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("{x:None}", {"x": None}),
        ('{"url": "a:b", \'n\': [true, false]}', {"url": "a:b", "n": [True, False]}),
        ("{ids:['a, b', \"c\"], at:{mode: 'x=1'}}", {"ids": ["a, b", "c"], "at": {"mode": "x=1"}}),
        ("{as='it\\'s \"so\"\\n', user-id = 3}", {"as": 'it\'s "so"\n', "user-id": 3}),
        (r"{x:'\d+ \"a\"',y:\"\w\",z:None}".replace('\\"', '"'), {"x": r'\d+ "a"', "y": r"\w", "z": None}),
        ('{user-id:<|"|>say "no": true<|"|>,v.1:-2.5}', {"user-id": 'say "no": true', "v.1": -2.5}),
        ("{city:Paris}", "{city:Paris}"),
        (r'{x:"a\/b \ud83d\ude00",y:None}', {"x": "a/b 😀", "y": None}),
        (r'{x:"\x41",y:None}', {"x": r"\x41", "y": None}),
        ("{x:{1}}", "{x:{1}}"),
        ("{x:1", "{x:1"),
        ('(x: "1")', '(x: "1")'),
        ("{x:" + "[" * 300, "{x:" + "[" * 300),
    ],
)
def test_arguments_are_read_as_models_write_them(tokenizer, written, arguments):
    done = answer(tokenizer, TURN, f"<|tool_call>call:f{written}<tool_call|>")[0]
    assert calls_of(done.message) == [("f", arguments)]


def test_a_long_word_is_looked_at_once():
    begun = time.process_time()
    assert arguments_of(cut := '{x:<|"|>' + "a" * 20_000) == cut
    assert time.process_time() - begun < 1  # from each of its letters on it takes six seconds


def test_calls_have_ids_of_their_own_and_a_copy_has_the_message(tokenizer):
    done = answer(tokenizer, TURN, WEATHER + WEATHER)[0]
    first, second = done.message["tool_calls"]
    other = answer(tokenizer, EMPTY, WEATHER + WEATHER)[0].message["tool_calls"]
    assert len({first["id"], second["id"], *(call["id"] for call in other)}) == 4 and first["type"] == "function"
    assert answer(tokenizer, TURN, WEATHER + WEATHER)[0].message == done.message

    def look(days: int):
        """Looks.

        Args:
            days: how many
        """

    copy = pickle.loads(pickle.dumps(answer(tokenizer, TURN, WEATHER, tools=[look])[0]))
    assert calls_of(copy.message) == calls_of(done.message)[:1]
    done = answer(tokenizer, TURN, f"<|channel>thought\nlook<channel|>{WEATHER}", tools=TOOLS)[0]
    assert dataclasses.replace(done, prompt_index=1).message == done.message and done.message["reasoning_content"] == "look"
    bare = Completion("x", [5], "stop", None, [7], 0, RoundStats.of([], 0, 0))
    assert bare.message == {"role": "assistant", "content": "x"}


def test_a_character_of_byte_tokens_stays_on_its_side_of_a_mark(tmp_path):
    """Its text comes only with the next token of text, which may stand behind the mark."""
    backend = byte_fallback()
    backend.add_special_tokens(sorted(FORMS[0][2]))
    channels = load_tokenizer(save(backend, tmp_path))
    assert channels.byte_ids.intersection(channels.encode_word("ñ€"))
    call = '<|tool_call>call:the{the:<|"|>€<|"|>,a:[<|"|>the ñ<|"|>,<|"|>ñ the<|"|>]}<tool_call|>'
    done, made = answer(channels, TURN, f"<|channel>thought\nthe €<channel|>ñ{call}")
    assert (done.message["reasoning_content"], done.message["content"]) == ("the €", "ñ")
    assert calls_of(done.message) == [("the", {"the": "€", "a": ["the ñ", "ñ the"]})]
    assert made == {"reasoning_content": "the €", "content": "ñ"}
    # Bytes that are no character take the one before them with them.
    marks = [channels.encode_word(mark) for mark in ("<|channel>", "<channel|>")]
    ids = [*channels.encode_word("the K"), *marks[0], max(channels.byte_ids), *marks[1], *channels.encode_word("the fox")]
    done, made = answer(channels, TURN, ids)
    assert done.message["content"] == "the \ufffd\n\ufffdthe fox" and made == {"content": done.text}


@pytest.mark.parametrize(
    ("written", "stop", "thought", "said"),
    [
        ("<|channel>thought\nabc<channel|>one # two", "#", "abc", "one"),
        ("<|channel>thought\nabc # d<channel|>one", "#", "abc", ""),
        ("<|channel>thought\nabc<channel|>one two", "|", "abc", "one two"),  # marks are no text
        ("<|channel>thought\nabc<channel|>one", "cone", "ab", ""),  # across a mark
    ],
)
def test_a_stop_string_ends_a_message_where_it_ends_the_text(tokenizer, written, stop, thought, said):
    done, made = answer(tokenizer, TURN, written, stop=(stop,))
    assert done.message.get("reasoning_content") == thought and done.message["content"] == said
    assert made.get("reasoning_content", "").strip() == thought and made.get("content", "").strip() == said


def test_an_answer_in_tags_is_a_message(tagged):
    call = f"<tool_call>\n<function=look>\n{PARAMETERS}</function>\n</tool_call>"
    done, made = answer(tagged, TAGGED, f"I look.\n</think>\nSoon.\n{call}", tools=TOOLS)
    assert (done.message["reasoning_content"], done.message["content"]) == ("I look.", "Soon.")
    assert calls_of(done.message) == [("look", {"city": "Paris", "code": "  if x:\n    y", "days": 3})]
    assert made == {"reasoning_content": "I look.\n", "content": "\nSoon.\n"}
    done, made = answer(tagged, TAGGED, f"I look.\n{call}")  # the call ends the thought
    assert calls_of(done.message)[0][1]["days"] == "3" and done.message["content"] == ""  # nobody said that it is a number
    assert done.message["reasoning_content"] == made["reasoning_content"].strip() == "I look."


def test_the_loop_of_the_page_calls_what_the_model_calls(tokenizer, monkeypatch, capsys):
    """With a model that calls the function and then says what came of it."""
    written = [
        '<|channel>thought\nWhat?<channel|><|tool_call>call:weather{city:<|"|>Lisbon<|"|>}<tool_call|><|tool_response>',
        "Yes, 21.<turn|>",
    ]
    asked = []

    def chat(messages, *, tools, enable_thinking):
        asked.append([dict(message) for message in messages])
        assert enable_thinking
        return answer(tokenizer, TURN, written[len(asked) - 1], tools=tools)[0]

    monkeypatch.setattr("jaxspec.load", lambda *_, **__: SimpleNamespace(chat=chat))
    loop, _ = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "chat.md").read_text(), re.DOTALL)
    exec(loop, {})
    assert capsys.readouterr().out == "Yes, 21.\n"
    user, assistant, tool = asked[1]
    assert user["content"] == "Is it warm in Lisbon?" and assistant["reasoning_content"] == "What?"
    assert tool == {"role": "tool", "tool_call_id": assistant["tool_calls"][0]["id"], "content": '{"city": "Lisbon", "degrees": 21}'}


def test_without_marks_a_message_is_the_text(tmp_path):
    plain = load_tokenizer(save(byte_level(), tmp_path))
    done, made = answer(plain, TURN, "fox dog")
    assert done.message == {"role": "assistant", "content": "fox dog"} and made == {"content": "fox dog"}


def test_a_checkpoints_own_response_template_comes_first(tmp_path, tokenizer):
    own = load_tokenizer(checkpoint.resolve("pocket"))
    own.transformers.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|turn>model\n",
        "fields": {"thinking": {"open": "<|channel>", "close": "<channel|>"}, "content": {"close": "<turn|>"}},
    }
    done, made = answer(own, TURN, "<|channel>thought\nabc<channel|>one<turn|>")
    assert done.message == {"role": "assistant", "content": "one", "reasoning_content": "thought\nabc"}
    assert made == {"reasoning_content": "thought\nabc", "content": "one"}
    own.transformers.response_template["fields"]["content"]["content"] = "json"  # of which the answer is none
    done, made = answer(own, TURN, "one<turn|>")
    assert done.message == {"role": "assistant", "content": "one"}
    calls = {"open": "<|tool_call>", "close": "<tool_call|>"}  # in another form than OpenAI's
    own.transformers.response_template["fields"] |= {"content": {"close": "<turn|>"}, "tool_calls": calls}
    assert answer(own, TURN, "one<|tool_call>f<tool_call|><turn|>")[0].message == {"role": "assistant", "content": "onef"}
    own.transformers.response_template = {"fields": {}}  # no template
    assert answer(own, TURN, "one<turn|>")[1] == {"content": "one"}


def test_nothing_that_a_model_writes_breaks_a_message(tokenizer):
    """Nor does it lose a word; and what comes piece by piece is what comes at once."""
    rng, words = random.Random(0), ["fox", " dog", "\n", "thought\n", "{", "}", "call:f", ":", "é", "\x01", ","]
    marks = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>", "<|tool_response>"]
    assert {*marks} > FORMS[0][2]
    for _ in range(300):
        written = "".join(rng.choice(rng.choice([words, marks])) for _ in range(rng.randrange(12)))
        prompt = rng.choice([TURN, EMPTY, "", TURN + "<|channel>thought\nI"])
        if not tokenizer.encode_word(written):
            continue
        done, made = answer(tokenizer, prompt, written)
        message = done.message
        told = " ".join([str(message["content"]), str(message.get("reasoning_content")), str(message.get("tool_calls"))])
        assert not any(mark in f"{message['content']}{message.get('reasoning_content')}{made}" for mark in marks[:5]), (written, message)
        assert all(done.text.count(word) <= told.count(word) for word in ("fox", "dog", "é")), (written, message)
        for name, piece in made.items():
            assert all(piece.count(word) <= message.get(name, "").count(word) for word in ("fox", "dog", "é")), (written, message, made)
