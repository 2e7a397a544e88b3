"""Structured texts with every kind of drafter, acceptance rule and number of drafts: they match, and those of the rule "coupled" are what
they are without drafts."""

import functools
import re

import kinds
import numpy as np
import pytest
import rounds
import tiny
from engines import EOS, few_programs
from kinds import KINDS, LAYOUTS

from jaxspec import SamplingParams
from jaxspec.decode.accept import COUPLED, Rule
from jaxspec.drafters.base import NoDraft
from jaxspec.engine.llm import LLM
from jaxspec.engine.round_shape import RoundShape
from jaxspec.engine.settings import Settings
from jaxspec.model.draft_tree import DraftTree
from jaxspec.sampling.choice import Needs
from jaxspec.structured.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("unoptimised")
LETTERS = [chr(0x4E00 + i) for i in range(rounds.VOCAB)]  # as tiny.Letters decodes them
EXPRESSIONS = [
    f"(?:[{LETTERS[20]}-{LETTERS[30]}]{{2}}{LETTERS[3]}){{1,4}}{LETTERS[5]}",
    None,
    f"{LETTERS[40]}{{0,9}}|[^{LETTERS[2]}-{LETTERS[50]}]{{12}}",
    "",
    f"(?:{LETTERS[8]}|{LETTERS[9]}{LETTERS[10]})+{LETTERS[12]}?",
]


def vocabulary():
    pieces = [letter.encode() for letter in LETTERS]
    length = np.asarray([0 if i in EOS else len(piece) for i, piece in enumerate(pieces)], np.int32)
    data = np.zeros((len(pieces), 8), np.uint8)
    for row, piece in zip(data, pieces, strict=True):
        row[: len(piece)] = np.frombuffer(piece, np.uint8)
    return Vocabulary(data, length, strips_space=False, opening=-1, closing=-1, think=-1)


def texts(kind, count=0, rule=COUPLED, rows=None, tree=None):
    """The completions of all expressions. kind: of the drafter, which guesses so many tokens. rows, tree: of each round."""
    drafter = NoDraft() if kind is None else kinds.weights(LAYOUTS[kind](), 3)
    with few_programs():
        settings = Settings(num_draft_tokens=count, max_slots=3, max_len=64, page_size=8, accept=rule, tree=tree, progress=False)
        with LLM(rounds.target(), drafter, tiny.Letters(), settings, eos_token_ids=EOS) as llm:
            llm._structures.__dict__["vocabulary"] = vocabulary()
            llm._needs = lambda requests: Needs(structured=True)
            llm._runner.choice._shape = lambda *_: RoundShape(count, rows)
            asked = [
                SamplingParams(temperature=1.0, seed=i, max_tokens=40, structured_outputs=None if e is None else {"regex": e})
                for i, e in enumerate(EXPRESSIONS)
            ]
            found = llm.generate([[2 + i, 3, 4] for i in range(len(asked))], asked)
    for completion, expression in zip(found, EXPRESSIONS, strict=True):
        if expression is not None:
            assert completion.finish_reason == "stop" and re.fullmatch(expression, completion.text), completion
    return [c.token_ids for c in found], found


@functools.cache
def without_drafts():
    return texts(None)[0]


@pytest.mark.slow  # tests/engine/test_structured.py has such texts with an assistant
@pytest.mark.parametrize("kind", LAYOUTS)
def test_texts_match_and_are_those_without_drafts(kind):
    assert texts(kind, 3)[0] == without_drafts()


@pytest.mark.slow
@pytest.mark.parametrize("rows", [3, 5, 11])
def test_texts_match_whatever_is_verified(rows):
    assert texts("assistant", 3, rows=rows)[0] == without_drafts()


@pytest.mark.slow  # tests/engine/test_structured.py has such texts, tests/decode/test_trees.py trees
def test_texts_match_on_every_path_of_a_tree():
    assert texts("assistant", 3, tree=DraftTree.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]))[0] == without_drafts()


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 4, 7])
def test_any_number_of_drafts_gives_the_same(count):
    assert texts("assistant", count)[0] == without_drafts()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["standard", "block"])
@pytest.mark.parametrize("kind", ["assistant", "ngram"])
def test_texts_of_rejection_sampling_match(kind, rule):
    texts(kind, 3, Rule(rule))


@pytest.mark.parametrize("tree", [None, pytest.param(DraftTree.default(6), marks=pytest.mark.slow)])
def test_drafts_are_what_may_come(tree):
    """Where one token alone may come, or has a bias that no other has a chance against, every draft is it, so that all are accepted: also
    behind a centroid head, whose best centroids do not have it."""
    drafter = kinds.weights(KINDS["assistant"](), 3)
    ways = {"structured_outputs": {"regex": f"{LETTERS[33]}{{30}}"}}, {"allowed_token_ids": [33]}, {"logit_bias": {33: 100.0}}
    with few_programs():
        settings = Settings(num_draft_tokens=3, max_slots=3, max_len=64, page_size=8, tree=tree, progress=False)
        with LLM(rounds.target(), drafter, tiny.Letters(), settings, eos_token_ids=EOS) as llm:
            llm._structures.__dict__["vocabulary"] = vocabulary()
            llm._needs = lambda requests: Needs(edits=True, structured=True)
            found = llm.generate([[2, 3]] * 3, [SamplingParams(temperature=1.0, seed=1, max_tokens=31, **way) for way in ways])
    for way, completion in zip(ways, found, strict=True):
        assert completion.text[:30] == LETTERS[33] * 30 and completion.stats.acceptance_length > 3.5, way
