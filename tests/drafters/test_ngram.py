"""N-gram lookup against a search in plain Python, in rounds too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounds
from quick import few_programs

import jaxspec
from jaxspec.decode import Round
from jaxspec.drafters import ngram
from jaxspec.drafters.base import Observed
from jaxspec.drafters.ngram import NGram

pytestmark = pytest.mark.usefixtures("unoptimised")
lookup = jax.jit(ngram.lookup, static_argnums=(2, 3, 4))


def searched(text, count, longest, shortest):
    """The longest suffix that occurs before, its latest occurrence, and what followed: on and on where that is short."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[len(text) - n :]:
                after = text[start + n :]
                return [after[i % len(after)] for i in range(count)]
    return [-1] * count


@pytest.mark.parametrize(("longest", "shortest"), [(5, 1), (3, 2), (1, 1), (40, 3)])
def test_lookup_finds_what_a_search_finds(longest, shortest):
    """Every length of texts over 2, 3 and 30 tokens; what lies past a length is never seen."""
    rng = np.random.default_rng(0)
    texts = np.concatenate([rng.integers(0, n, (40, 24)) for n in (2, 3, 30)]).astype(np.int32)
    length = np.resize(np.arange(1, 25, dtype=np.int32), len(texts))
    found = np.asarray(lookup(texts, length, 7, longest, shortest))
    wanted = [searched(text[:n].tolist(), 7, longest, shortest) for text, n in zip(texts, length, strict=True)]
    assert {-1} < {row[0] for row in wanted}
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ([7, 1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3, 8]),  # three tokens win over a later match of two
        ([1, 2, 5, 1, 2, 6, 1, 2], [6, 1, 2, 6]),  # of two that match two, the later; then round again
        ([4, 4], [4, 4, 4, 4]),
        ([1, 2, 3], [-1, -1, -1, -1]),
        ([1], [-1, -1, -1, -1]),
    ],
)
def test_which_occurrence_wins(text, guess):
    padded = np.pad(np.asarray([text], np.int32), ((0, 0), (0, 12 - len(text))), constant_values=1)
    assert lookup(padded, np.asarray([len(text)], np.int32), 4, 5, 1)[0].tolist() == guess


def test_only_what_is_committed_is_remembered():
    drafter = NGram()
    state = jax.tree.map(lambda x: x - 1, drafter.init(3, 9, 4))
    ids = np.arange(10, 22, dtype=np.int32).reshape(3, 4)
    at = np.asarray([0, 2, 5], np.int32)[:, None] + np.arange(4, dtype=np.int32)
    rows = {"taps": (), "hidden": jnp.zeros((3, 1)), "anchor": np.asarray([91, 92, 93], np.int32), "model": rounds.target()}
    slots, committed = np.asarray([2, 0, 1], np.int32), np.asarray([2, 0, 4], np.int32)
    observed = Observed(slots=slots, ids=ids, positions=at, committed=committed, **rows)
    state = drafter.observe(state, observed)
    wanted = np.full((3, 9), -1)
    wanted[2, :3] = [10, 11, 91]
    wanted[1, 5:9] = [18, 19, 20, 21]  # its anchor lies past the end
    np.testing.assert_array_equal(state.tokens, wanted)
    nobody = np.asarray([3, 4, 7], np.int32)
    after = drafter.observe(state, Observed(slots=nobody, ids=ids, positions=at, committed=np.full(3, 4, np.int32), **rows))
    np.testing.assert_array_equal(after.tokens, wanted)


def test_the_loop_looks_up_what_a_search_finds():
    """After prompts in chunks of 5 and after each of three rounds; every guess that is found comes from the known tokens alone."""
    drafter = NGram()
    state = rounds.started(drafter)
    for accepted in ([3, 0, 1, 2, 0], [0, 3, 2, 0, 1], [2, 1, 0, 3, 3]):
        state = rounds.spec_step(rounds.target(), rounds.told(drafter, state, accepted, 3), state, rounds.SLOT_IDS, round=Round(3))
        found = np.asarray(rounds.drafts(rounds.target(), drafter, state, k=7).tokens)
        for row, (text, n) in enumerate(zip(rounds.tokens(state), rounds.lengths(state), strict=True)):
            assert found[row].tolist() == searched(text[:n].tolist(), 7, 5, 1)
    np.testing.assert_array_equal(rounds.lengths(state), rounds.LENGTHS + 1 + [8, 7, 6, 8, 7])


def test_a_repetitive_prompt_is_guessed(monkeypatch):
    few_programs(monkeypatch)
    llm = jaxspec.load("pocket", drafter="ngram", num_draft_tokens=3, max_slots=1, max_len=64, progress=False)
    assert llm.drafter == NGram()
    out = llm.generate(["| 1 | 2 |\n" * 5], jaxspec.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))[0]
    assert out.stats.acceptance_length > 1.3


@pytest.mark.parametrize("sizes", [(3, 4), (2, 0), (0, 0)])
def test_sizes_that_make_no_sense(sizes):
    with pytest.raises(ValueError, match=f"n-grams of {sizes[1]} to {sizes[0]} tokens were asked for; expected 1 <= shortest <= longest"):
        NGram(*sizes)
