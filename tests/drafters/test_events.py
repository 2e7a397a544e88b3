"""What a drafter guesses follows from the text alone, whatever befell a sequence on its way.

Here guesses become the text: they are accepted at given rates, whatever the target says. A drafter that lost track of a sequence, by a row,
a page, a hidden state or the token after a row, writes another text. With the other rules it would write the same one, with fewer drafts
accepted, which nobody would notice.
"""

import functools
from unittest import mock

import engines
import pytest
from engines import PLAIN, fixed, only
from kinds import KINDS

from jaxspec import SamplingParams
from jaxspec.decode.accept import synthetic
from jaxspec.drafters.ngram import NGram

# Those that know most of a sequence: rows that depend on the tokens after them, and rows that are still to be computed.
FEW = ("eagle3",)  # the texts of modules are looked at in test_every_kind.py
RULE = synthetic((0.95, 0.8, 0.6))


@pytest.fixture(scope="module", autouse=True)
def small(unoptimised):
    with engines.few_programs():
        yield


@functools.cache
def llm_of(kind):
    # N-gram lookup in itself alone: its index tells it what others said.
    with mock.patch.dict(KINDS, ngram=functools.partial(NGram, windows=0)):
        llm = engines.llm_of(kind, accept=RULE)
    vars(llm).pop("_needs", None)  # what its requests need, and no more
    return llm


def alone(llm, prompts, params):
    """What each has by itself, where nothing of it is computed beforehand and there are pages for all."""
    with only(llm, prefixes=False):
        return [llm.generate([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]


def told(completions):
    """All of it that a drafter can change."""
    return [(c.token_ids, c.stats.from_draft, c.stats.histogram) for c in completions]


def answer(llm, prompt, params):
    """The answer of a conversation that may go on."""
    return llm._generate(llm._requests([prompt], params, keep=[len(prompt)]))[0]


@pytest.mark.parametrize("kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS])
def test_sequences_that_share_give_way_and_go_on(kind):
    """Prompts of several chunks that begin alike, with few pages, and conversations that go on where they ended: each has the text that
    it has alone, computed from its first row."""
    llm = llm_of(kind)
    asked = [*fixed(4, 50, shared=37), *fixed(2, 17)]
    params = [SamplingParams(seed=i, max_tokens=40, **{**PLAIN, "temperature": float(i % 2)}) for i in range(len(asked))]
    before = llm.stats
    expected = alone(llm, asked, params)
    assert (llm.stats - before).preemptions == 0 and not any(c.num_cached_tokens for c in expected)
    with only(llm, pages=17):
        found = llm.generate(asked, params)
    assert told(found) == told(expected)
    assert (llm.stats - before).preemptions > 0 and any(c.num_cached_tokens for c in found)
    if kind != "ngram":  # which finds nothing in random text at first
        assert sum(sum(c.stats.from_draft) for c in found) > 0.5 * sum(len(c.token_ids) for c in found)

    longer = [[*prompt, *c.token_ids, *more] for prompt, c, more in zip(asked, expected, fixed(len(asked), 21), strict=True)]
    expected_next, found_next = alone(llm, longer, params), []
    with only(llm):
        for first, then, p in zip(asked, longer, params, strict=True):
            answer(llm, first, p)
            found_next.append(answer(llm, then, p))
    assert told(found_next) == told(expected_next)
    assert [c.num_cached_tokens for c in found_next] == [len(prompt) - 22 for prompt in longer]
