"""When learning is due, which texts it learns from, and which settings make sense."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jaxspec
from jaxspec.drafters.base import NoDraft
from jaxspec.drafters.ngram import NGram
from jaxspec.learning.pace import Pace
from jaxspec.learning.reservoir import Reservoir
from jaxspec.learning.settings import PART, Learn, learn_of, learnable, parts

times = st.floats(0.1, 10)


@given(st.floats(0.01, 0.7), times, st.lists(st.tuples(times, st.floats(0.5, 2)), max_size=40), st.sampled_from([1, 4]))
def test_the_share_is_kept_whatever_calls_and_updates_take(share, expected, calls, pieces):
    """Of all time that has passed at any moment, but for what the work in hand took longer than was expected of it."""
    now = [5.0]
    pace = Pace(share, lambda: now[0])
    pace.expected = expected
    for call, unlike in calls:
        now[0] += call
        while pace.due(pieces):
            wanted, took = pieces * pace.expected, pieces * expected * unlike
            now[0] += took
            pace.took(took, pieces)
            assert pace.spent <= share * pace.passed + max(took - wanted, 0) + 1e-9
    assert pace.passed == pytest.approx(now[0] - 5.0)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_share_is_used(share):
    now = [0.0]
    pace = Pace(share, lambda: now[0])
    pace.expected = 0.3
    for _ in range(2000):
        now[0] += 0.1
        if pace.due():
            now[0] += 0.3
            pace.took(0.3)
    assert pace.share == pytest.approx(share, rel=0.01)
    pace.cost(20.0)
    assert not pace.due()


def test_a_reservoir_forgets_old_texts_slowly():
    """A text of `size` texts ago is still there with probability 1/e."""
    size, count, kept = 50, 2000, 0
    reservoir = Reservoir(size, 0)
    for i in range(count):
        reservoir.add(np.full(4, i, np.int32), 1)
        assert len(reservoir) == min(i + 1, size)
    ages = count - 1 - np.array([text[0] for text, _ in reservoir._texts])
    kept = np.mean(ages >= size)
    assert abs(kept - math.exp(-1)) < 4 * (math.exp(-1) / size) ** 0.5
    assert len(set(ages.tolist())) == size


def test_a_batch_holds_what_was_written():
    """Of every text a part of the row's length with some of its own tokens; no text twice; the same for the same step."""
    reservoir, rng = Reservoir(20, 3), np.random.default_rng(0)
    for i in range(20):
        given, written = int(rng.integers(1, 40)), int(rng.integers(2, 40))
        reservoir.add(np.concatenate([np.full(given, 1000), 10_000 + 100 * i + np.arange(written)]).astype(np.int32), given)
    for step in range(30):
        batch, again = reservoir.batch(step, 8, 16), reservoir.batch(step, 8, 16)
        assert (batch.ids == again.ids).all() and (batch.first == again.first).all()
        rows = list(zip(batch.ids, batch.first, batch.length, strict=True))
        own = [ids[first:length] for ids, first, length in rows]
        assert all(len(part) and (part >= 10_000).all() for part in own)
        assert all((ids[:first] == 1000).all() and not ids[length:].any() for ids, first, length in rows)
        assert len({int(part[0] - 10_000) // 100 for part in own}) == 8
    assert reservoir.batch(0, 30, 16).ids.shape == (30, 16)


@pytest.mark.parametrize("vocab", [1, 100, 262_144])
@pytest.mark.parametrize("shards", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 3, 4, 16])
def test_parts_of_a_batch(vocab, shards, batch):
    count, texts = parts(Learn(batch=batch), vocab, shards)
    assert texts % shards == 0 and batch <= count * texts < batch + texts
    assert texts == shards or texts // shards * vocab * Learn().anchors <= PART


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"share": 0}, "share is 0, expected more than 0 and less than 1"),
        ({"share": 1.0}, "share is 1.0, expected more than 0 and less than 1"),
        ({"batch": 0}, "batch is 0, expected at least 1"),
        ({"rate": 0.0}, "rate is 0.0, expected a finite number of more than 0"),
        ({"save_seconds": -1}, "save_seconds is -1.0, expected a finite number of at least 0"),
        ({"rate": float("inf")}, "rate is inf, expected a finite number of more than 0"),
        ({"objective": {"steps": 3}}, "the objective names steps; expected other fields"),
    ],
)
def test_settings_that_make_no_sense(changes, told):
    with pytest.raises(ValueError, match=told):
        Learn(**changes)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({"rate": "x"}, "rate is 'x' of type str, expected a number"),
        ({"save_seconds": "x"}, "save_seconds is 'x' of type str, expected a number"),
        ({"resume": "yes"}, "resume is 'yes', expected True or False"),
        ({"out": 3}, "out is 3 of type int, expected a folder or None"),
        ({"objective": 3}, "objective is 3, expected a dict of fields of Objective"),
        ({"objective": {"sofd": 1}}, "the objective has no argument 'sofd'; the nearest is 'soft'"),
    ],
)
def test_settings_of_a_wrong_type(changes, told):
    with pytest.raises(TypeError, match=told):
        Learn(**changes)


def test_a_share_must_be_a_number():
    with pytest.raises(TypeError, match="share is True, expected a number above 0 and below 1"):
        learn_of(True)
    assert learn_of(0.1) == Learn(share=0.1) and learn_of(Learn(batch=2)).batch == 2
    assert jaxspec.Learn is Learn


@pytest.mark.parametrize("drafter", [NoDraft(), NGram()])
def test_drafters_that_have_nothing_to_learn(drafter):
    told = f"the drafter is a {type(drafter).__name__}, which has nothing to learn; expected one of .*Gemma4MTP"
    with pytest.raises(ValueError, match=told):
        learnable(drafter)
