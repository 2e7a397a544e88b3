"""The host's view of slots: where prompts are kept, and which slot is given up first."""

import numpy as np
import pytest

from jaxspec.engine.request import Request
from jaxspec.engine.slots import KeptSequence, Slots, boundary, common


def ids(*numbers):
    return np.asarray(numbers, np.int32)


def request(order=0):
    """As much of one as slots look at."""
    found = Request.__new__(Request)
    found.slot, found.computed, found.goals, found.under_way, found.order = -1, 0, [], set(), order
    return found


@pytest.mark.parametrize(("a", "b", "expected"), [((1, 2, 3), (1, 2, 4, 5), 2), ((1, 2), (1, 2, 3), 2), ((7,), (1,), 0), ((), (1,), 0)])
def test_how_much_two_sequences_have_in_common(a, b, expected):
    assert common(ids(*a), ids(*b)) == common(ids(*b), ids(*a)) == expected


def test_a_prompt_is_kept_where_that_saves_most():
    prompt = ids(*range(20))
    short, long = ids(*range(8), 99), ids(*range(15), 99, 98)
    assert boundary(prompt, 0, [long], 4) == 14  # the 15 tokens in common are 14 rows, and what the drafter has seen behind them
    assert boundary(prompt, 0, [short, long], 4) == 14  # as much work as twice 7
    assert boundary(prompt, 0, [short] * 3 + [long], 4) == 7  # 4 times 7 rows rather than 14
    assert boundary(prompt, 5, [short] * 3 + [long], 4) == 14  # of 7 rows, 5 are there already
    assert boundary(prompt, 11, [short, long], 4) == 0 and boundary(prompt, 0, [], 1) == 0
    assert boundary(prompt, 0, [prompt, ids(*range(30))], 4) == 19  # the whole prompt, but for the row that chooses a token


def test_slots_are_given_up_in_order():
    slots = Slots(4)
    running = [request(i) for i in range(2)]
    slots.put(0, running[0])
    slots.keep(1, ids(1, 2, 3), running[0])
    slots.keep(2, ids(1, 2, 3, 4, 5))
    assert slots.idle() == 3 and slots.running == running[:1]
    slots.put(3, running[1])
    assert slots.idle() == 1 and slots.idle([1]) == 2 and slots.idle([1, 2]) == -1
    assert slots.find(ids(1, 2, 3, 4)) == (1, 2) and slots.find(ids(1, 2, 3, 4, 5)) == (2, 4) and slots.find(ids(1, 2)) == (-1, 0)
    slots.serve(1, running[1])
    assert slots.idle() == 2 and slots.kept[1].needed and not slots.kept[2].needed
    slots.take_from(running)
    assert slots.ended == [0, 3] and [r.slot for r in running] == [-1, -1] and not slots.kept[1].needed
    assert slots.idle() == 0
    slots.end([2])
    slots.released([0, 1, 2])
    assert slots.ended == [3] and list(slots.kept) == [1] and isinstance(slots.kept[1], KeptSequence)
    slots.put(0, running[0])
    slots.released([0])  # another sequence is in it
    assert slots.running == running[:1]
    slots.clear()
    assert not slots.running and not slots.kept and not slots.ended and running[0].slot == -1
