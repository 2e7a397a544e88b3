"""What notebooks show: every token once, in the right tint, and nothing that a text could do to the page."""

import dataclasses
import pickle
import types
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import struct
from small_tokenizers import byte_fallback

from jaxspec.engine import html
from jaxspec.engine.completion import Completion
from jaxspec.engine.stats import RoundStats, Stats
from jaxspec.text import load_tokenizer


@pytest.fixture(scope="module")
def pocket():
    return load_tokenizer(tiny.POCKET)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory):
    """Characters that the vocabulary lacks are byte tokens, as Gemma's."""
    folder = tmp_path_factory.mktemp("fallback")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    byte_fallback().save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder)


def completion(ids, flags, **fields):
    stats = RoundStats.of(np.asarray(flags), drafted=4 * len(flags), num_draft_tokens=4)
    given = {"text": "", "finish_reason": "length", "stop_reason": None, "prompt_token_ids": [2], "seed": 5, **fields}
    return Completion(token_ids=list(ids), stats=stats, **given)


def parsed(page):
    """(what a reader sees, [(text, style) of every piece with a title]); fails where tags do not nest."""

    class Parser(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open, self.text, self.pieces = [], "", []

        def handle_starttag(self, tag, attrs):
            self.open.append((tag, dict(attrs)))

        def handle_endtag(self, tag):
            assert self.open.pop()[0] == tag

        def handle_data(self, data):
            self.text += data
            tips = [attrs for _, attrs in self.open if "title" in attrs]
            if tips:
                self.pieces.append((data, tips[-1]["style"], tips[-1]["title"]))

    parser = Parser()
    parser.feed(page)
    parser.close()
    assert not parser.open
    return parser.text, parser.pieces


@pytest.mark.parametrize("kind", ["pocket", "fallback"])
def test_spans_of_any_ids_make_up_their_text(kind, request):
    tokenizer = request.getfixturevalue(kind)
    rng = np.random.default_rng(0)
    for length in (0, 1, 2, 40, 40, 40):
        ids = rng.integers(0, tokenizer.vocab_size, length).tolist()
        found = list(html.spans(tokenizer, ids, rng.integers(0, 2, length)))
        assert "".join(span.text for span in found if not span.special) == tokenizer.decode(ids)
        shown = [i for span in found for i in span.token_ids]
        assert sorted(shown) == sorted(ids) and all(span.token_ids for span in found)


@pytest.mark.parametrize("kind", ["pocket", "fallback"])
def test_a_character_of_several_tokens_is_one_span_of_them_all(kind, request):
    tokenizer = request.getfixturevalue(kind)
    ids = [*tokenizer.encode_word("a"), *tokenizer.encode_word("😀"), *tokenizer.encode_word("b")]
    assert len(ids) > 4
    flags = [False, True, False, *[True] * (len(ids) - 4), False]
    found = list(html.spans(tokenizer, ids, flags))
    assert [(span.text, span.kind) for span in found if "😀" in span.text] == [("😀", "mixed")]
    assert found[0].text == "a" and found[0].kind == "target" and found[-1].text == "b"
    assert {span.kind for span in html.spans(tokenizer, ids, [True] * len(ids))} == {"draft"}
    assert {span.kind for span in html.spans(tokenizer, ids)} == {"prompt"}


def test_special_tokens_and_ids_without_a_token_are_named(pocket):
    found = list(html.spans(pocket, [2, *pocket.encode_word("x"), 106, 9999], [True, False, False, True]))
    assert [(span.text, span.kind, span.special) for span in found] == [
        ("<bos>", "draft", True),
        ("x", "target", False),
        ("<turn|>", "target", True),
        ("id 9999", "draft", True),
    ]


def test_html_shades_accepted_drafts_and_escapes_what_the_text_says(pocket):
    text = "<script>alert('&')</script>\n\x1b[0m\u202eabc"
    ids = pocket.encode_word(text)
    flags = [i % 3 == 1 for i in range(len(ids))]
    shown, pieces = parsed(html.completion_html(completion(ids, flags, prompt_token_ids=pocket.encode("if a < b:\n")), pocket))
    assert shown.startswith("<bos>if a < b:\n") and "<script>alert('&')</script>⏎\n\\x1b[0m\\u202eabc" in shown
    shaded = [piece for piece, style, _ in pieces if html.TINTS["draft"] in style]
    assert shaded and "".join(shaded).replace("⏎", "").startswith(pocket.token_text(ids[1]))
    assert any(tip == f"token {ids[1]}: an accepted draft" for _, _, tip in pieces)
    assert f"{len(ids)} tokens · finish_reason 'length' · seed 5 · {sum(flags)} of " in shown


def test_long_texts_are_cut_and_a_completion_without_a_tokenizer_shows_its_text(pocket):
    many = html.MAX_TOKENS + 7
    page = html.completion_html(completion([300] * many, [False] * many, prompt_token_ids=[300] * 500), pocket)
    shown, pieces = parsed(page)
    assert "… 7 more tokens" in shown and len(pieces) == html.MAX_TOKENS + html.MAX_PROMPT_TOKENS
    assert parsed(html.completion_html(completion([300], [False], text="a < b"), None))[0].startswith("a < b")
    failed = completion([300], [False], finish_reason="error", error="x < y is not finite")
    assert "finish_reason 'error' · seed 5 · x < y is not finite" in parsed(html.completion_html(failed, pocket))[0]


def test_a_completion_s_tokenizer_is_no_part_of_it(pocket):
    one, other = (completion([300], [False], text="a") for _ in range(2))
    object.__setattr__(one, "tokenizer", pocket)
    assert "title=" in one._repr_html_() and "title=" not in other._repr_html_()
    assert one == other and dataclasses.asdict(one) == dataclasses.asdict(other)
    copy = pickle.loads(pickle.dumps(one))
    assert copy == one and "title=" not in copy._repr_html_()


@struct.dataclass
class Weights:
    weight: jax.Array
    dtype = jnp.dtype("float32")


def test_html_of_an_llm_has_its_sizes_and_what_it_did():
    llm = types.SimpleNamespace(target=Weights(jnp.zeros((1000, 700))), drafter=Weights(jnp.zeros((1000, 300))))
    llm.num_draft_tokens, llm.max_slots, llm.max_len, llm.stats = 3, 2, 64, Stats(weight_bytes=3 << 20, state_bytes=1 << 19)
    shown = parsed(html.llm_html(llm, "a <b>"))[0]
    assert shown.startswith("targeta <b> (0.7 million parameters, float32)drafterWeights (0.3 million parameters), 3 drafts a step")
    assert "2 of 64 tokens" in shown and "weights 3.0 MiB, state 0.5 MiB" in shown and "so far" not in shown
    llm.stats = Stats(tokens=30, steps=10, stepped_tokens=25, seconds=2.0, histogram=(1, 2, 7))
    shown = parsed(html.llm_html(llm, "a"))[0]
    assert "30 tokens, 15.0 a second, compiling excluded" in shown and "2.50 tokens a step" in shown
