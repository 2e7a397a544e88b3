"""Automata accept what an expression matches as a whole, all of their states lead to an end, and tokens have the bytes of their texts."""

import itertools
import re

import numpy as np
import pytest
import small_tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import distances

from jaxspec.structured import StructuredOutputsParams
from jaxspec.structured.automaton import MARK, automaton_of
from jaxspec.structured.vocabulary import vocabulary_of
from jaxspec.text import load_tokenizer

TEXTS = [("".join(x)) for n in range(5) for x in itertools.product("abc", repeat=n)]


def accepts(automaton, text):
    return bool(automaton.accepting[automaton.after(text.encode())])


def of(**params):
    return automaton_of(StructuredOutputsParams(**params).expression)


def expressions(depth=3):
    leaves = st.sampled_from(["a", "b", "c", "[ab]", "[^a]", "."])
    if not depth:
        return leaves
    inner = expressions(depth - 1)
    return st.one_of(
        leaves,
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda x: f"({'|'.join(x)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "*?", "{1,}"])).map(lambda x: f"(?:{x[0]}){x[1]}"),
    )


def check(expression):
    automaton = of(regex=expression)
    for text in TEXTS:
        assert accepts(automaton, text) == bool(re.fullmatch(expression, text)), (expression, text)
    assert distances(automaton)[1:].max(initial=0) < 1 << 20
    kinds = automaton.alike(2)
    followed = [[bool(automaton.after(bytes(word), state)) for word in itertools.product(b"abcd", repeat=2)] for state in range(len(kinds))]
    for number in set(kinds):
        assert len({tuple(row) for row, kind in zip(followed, kinds, strict=True) if kind == number}) == 1


@given(expressions())
@settings(max_examples=60)
def test_an_automaton_accepts_what_the_expression_matches(expression):
    check(expression)


@pytest.mark.slow
@given(expressions(4))
@settings(max_examples=1500)
def test_many_automata_accept_what_the_expression_matches(expression):
    check(expression)


@pytest.mark.parametrize("expression", ["^a(b|c)$", "^a$|^bc$|b", "(?P<x>a)b", "(a|ab)(c|bcb)?", "a{0}", ""])
def test_anchors_groups_and_the_empty_text(expression):
    check(expression)


def test_a_choice_may_begin_another():
    automaton = of(choice=["a", "ab", "", "a.c", "é\n𝄞"])
    assert [x for x in [*TEXTS, "a.c", "adc", "é\n𝄞", "é"] if accepts(automaton, x)] == ["", "a", "ab", "a.c", "é\n𝄞"]


def test_texts_of_long_strings_are_short_to_build():
    schema = {"type": "object", "properties": {f"f{i}": {"type": "string", "maxLength": 100} for i in range(10)}}
    schema["required"] = sorted(schema["properties"])
    automaton = of(json=schema)
    assert automaton.states > 10_000
    assert automaton.alike(48).max() < 6000  # states alike but for how many characters are left count once


PIECES = [".", "[^a]", r"\D", r"[\s\S]", r"\PN", r"\P{N}", r"[b\x{0}-\x{10ffff}]", "[[^a]&&[^c]]", "[^]-]", "[[:^alpha:][:alpha:]]"]


@pytest.mark.parametrize("piece", PIECES)
def test_many_of_almost_any_character_are_short_to_build(piece):
    """If the piece matched what marks the ends of a text, 16 would take 2**16 states on the way, and 40 all memory."""
    assert not accepts(of(regex=piece), MARK), "builds of many would not end"
    automaton = of(regex=f"{piece}{{40}}")
    assert accepts(automaton, "é𝄞b" + "b" * 37) and not accepts(automaton, "b" * 39)


@pytest.mark.parametrize(
    "expression,texts",
    [("[a-c&&[^b]]{2}", ["aa", "ac", "ca", "cc"]), (r"[[:alpha:]&&\pL]", ["a", "b", "c"]), ("[[:digit:]^|$a]", ["a"])],
)
def test_classes_in_classes(expression, texts):
    automaton = of(regex=expression)
    assert [text for text in TEXTS if accepts(automaton, text)] == texts


@pytest.mark.parametrize(
    "expression,message", [("[", "a class that does not end"), ("a[^\\s\\S]", "a part of it matches no text"), ("a{3,2}", "cannot be made")]
)
def test_expressions_without_an_automaton_are_refused(expression, message):
    with pytest.raises(ValueError, match=message):
        of(regex=expression)


@pytest.mark.parametrize("kind", small_tokenizers.KINDS)
def test_tokens_have_the_bytes_of_their_texts(kind, tmp_path):
    tokenizer = load_tokenizer(small_tokenizers.save(small_tokenizers.KINDS[kind](), tmp_path / kind))
    vocabulary = vocabulary_of(tokenizer, tokenizer.vocab_size + 5)
    assert vocabulary.length[-5:].tolist() == [0] * 5
    assert vocabulary.strips_space == (kind == "metaspace")
    assert all(vocabulary.length[i] == 0 for i in range(len(small_tokenizers.SPECIALS)))
    assert {bytes([byte]) for byte in range(256)} <= {vocabulary.bytes_of(i) for i in range(tokenizer.vocab_size)}
    rng, plain = np.random.default_rng(0), [i for i in range(tokenizer.vocab_size) if vocabulary.length[i]]
    found = 0
    for _ in range(3000):
        ids = rng.choice(plain, 4).tolist()
        data = b"".join(map(vocabulary.bytes_of, ids))
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        found += 1
        assert tokenizer.decode(ids) == (text.removeprefix(" ") if vocabulary.strips_space else text)
    assert found > 300
    for text in ["the quick brown fox", " naïve 漢字 𝄞\n"]:
        assert b"".join(map(vocabulary.bytes_of, tokenizer.encode_word(text))).decode().lstrip(" ") == text.lstrip(" ")


def test_a_space_that_a_decoder_strips_does_not_count():
    automaton = of(regex="ab? c").behind_space()
    assert [accepts(automaton, x) for x in ("a c", " a c", "  a c", " ab c", "ac")] == [True, True, False, True, False]


def test_where_thoughts_begin():
    vocabulary = vocabulary_of(load_tokenizer("jaxspec/pocket/target"), 4096)
    opening, closing, think = vocabulary.opening, vocabulary.closing, vocabulary.think
    assert min(opening, closing, think) >= 0
    prompts = [[5, 6], [opening, closing], [5, opening, 6], [think, 6], [think, opening, closing], [think, opening, closing, 6]]
    assert [vocabulary.begins_in_thought(p) for p in prompts] == [False, False, True, None, False, None]


def test_where_thoughts_of_other_models_begin(tmp_path):
    """Step-3.5's marks are tokens with text, and a prompt may end within a thought."""
    backend = small_tokenizers.byte_level()
    backend.add_tokens(["<think>", "</think>"])
    tokenizer = load_tokenizer(small_tokenizers.save(backend, tmp_path))
    vocabulary = vocabulary_of(tokenizer, 512)
    prompts = map(tokenizer.encode_word, ["dog", "dog<think>\n", "<think>fox</think>dog", "<think>fox</think>dog<think>"])
    assert [vocabulary.begins_in_thought(p) for p in prompts] == [False, True, False, True]
    assert vocabulary.bytes_of(vocabulary.closing) == b"</think>"
