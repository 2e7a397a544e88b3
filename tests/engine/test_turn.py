"""What the host makes the device do next, with a runner that only takes notes."""

import collections
import dataclasses
import types

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import decode, released
from jaxspec.engine.buckets import Buckets, prefill_rows
from jaxspec.engine.call import Call
from jaxspec.engine.device_clock import Times
from jaxspec.engine.params import SamplingParams
from jaxspec.engine.request import Request
from jaxspec.engine.settings import Settings
from jaxspec.engine.slots import Slots
from jaxspec.engine.turn import AHEAD, BESIDE, BRIEF, PATIENCE, STEPS, TOGETHER, WATCHED, WATCHED_ALONE, Turn
from jaxspec.sampling.choice import PLAIN
from jaxspec.targets import abstract_target


class Text:
    found = None


class Notes:
    """A runner of a few slots and pages of 4 tokens. ends: orders of the requests that the next decode call ends. pages: free ones.
    queueing: whether rounds may be queued behind others."""

    settings = Settings(num_draft_tokens=0, max_slots=2, max_len=1000, page_size=4)

    def __init__(self, slots=2):
        self.settings, self.buckets = dataclasses.replace(self.settings, max_slots=slots), Buckets(slots, 1000)
        self.held, self.calls, self.free_pages, self.starved, self.ends = Slots(slots + 1), [], 100, False, set()
        self.count, self.times, self.queueing, self.unread, self.told, self.prepared = 0, Times(lambda: 0.0), False, [], [], []
        self.behind, self.prompts_read, self.steps, self.until_ended, self.others = [], 0, 0, 0, []
        self.choice = self  # it takes the same notes of what is asked of that

    @property
    def free_slots(self):
        return self.settings.max_slots - len(self.held.running)

    def ready(self):
        pass

    def queues(self, needs):
        return self.queueing

    def admit(self, requests):
        for request in requests:
            self.held.put(self.held.idle(), request)
            request.status = decode.RUNNING
            if request.order < 0:
                request.order, self.count = self.count, self.count + 1
        self.calls.append(("admit", [r.order for r in requests]))

    def prepare(self, requests, sequences, needs):
        self.prepared.append(([r.order for r in requests], sequences))

    def prefill(self, requests, needs, behind=None):
        self.calls.append(("prefill", [r.order for r in requests]))
        self.behind.append(behind is not None)
        first, computed = requests[0], self.computed(requests[0], behind)
        goal = next((goal for goal in first.goals if goal > computed), first.goal)
        until = min(computed + 8, goal)
        rows, finished = [until - computed], requests[: until == first.goal]
        return Call(requests[:1], "prefill", until, None, rows=rows, finished=finished, reaches=until == goal)

    def used(self, requests, needs, behind=None):
        return min(requests[0].goal - self.computed(requests[0], behind), 8) / 8

    def computed(self, request, behind):
        coming = {} if behind is None else dict(zip(behind.requests, behind.rows, strict=True))
        return request.computed + coming.get(request, 0)

    def decode(self, requests, steps, until_ended=0, needs=PLAIN, unread=1):
        self.calls.append(("decode", [r.order for r in requests]))
        self.steps, self.until_ended = steps, until_ended
        self.unread.append(unread)
        return Call(requests, "decode", 0, None, until_ended=until_ended)

    def read(self, calls):
        starved, self.starved = self.starved, False
        for requests, name, rows, *_ in calls:
            self.prompts_read += name == "prefill"
            for request in requests:
                if request is None:
                    continue
                if name == "prefill":
                    request.computed = rows
                    if rows == request.goal and not request.output:
                        request.output.append(7)
                    continue
                self.told.append(request.order)
                if request.order in self.ends:
                    request.status = decode.STOPPED
        return starved

    def companions(self, requests, needs, steps, fits):
        return [r for r in self.others if fits(r)]

    def snapshot(self, request):
        self.calls.append(("snapshot", request.computed))
        self.held.keep(self.held.idle(), request.tokens[: request.computed + 1], request)

    def preempt(self, request):
        self.calls.append(("preempt", request.order))
        self.held.take_from([request])
        self.flush()

    def flush(self):
        self.held.released(self.held.ended)

    def evict(self, needed=True, but=-1):
        found = next((slot for slot, kept in self.held.kept.items() if slot != but and (needed or not kept.needed)), -1)
        self.held.end([found] if found >= 0 else [])
        return found >= 0

    def end(self, requests):
        self.held.take_from(requests)


def request(*tokens):
    found = Request.__new__(Request)
    found.prompt, found.output, found.goals = np.asarray(tokens, np.int32), [], []
    found.params, found.limit = SamplingParams(), 100
    found.slot, found.order, found.computed, found.status, found.keep, found.text = -1, -1, 0, decode.EMPTY, False, Text()
    found.under_way = set()
    return found


@pytest.fixture
def turn(monkeypatch):
    monkeypatch.setattr(Request, "profile", ())

    def made(*requests, slots=2):
        runner = Notes(slots)
        return runner, Turn(runner, iter(requests), lambda _: PLAIN, collections.deque())

    return made


def test_the_youngest_gives_way_and_is_the_next_to_get_a_slot(turn):
    runner, turn = turn(*(request(i, i, i) for i in range(9)))
    assert turn.step() and turn.step()
    assert len(turn.active) == 2 and len(turn.waiting) == AHEAD
    runner.starved = True
    turn.step()
    assert runner.calls[-1] == ("preempt", 1) and [r.order for r in turn.active] == [0] and turn.waiting[0].order == 1
    runner.ends = {0}
    turn.step()
    assert ("admit", [1]) in runner.calls and [r.order for r in turn.end()] == [0]


def test_none_gives_way_where_another_has_ended(turn):
    """It would be computed again, past its own end."""
    runner, turn = turn(request(1, 2), request(3, 4))
    for _ in range(3):
        turn.step()
    runner.starved, runner.ends = True, {1}
    turn.step()
    assert [r.order for r in turn.end()] == [1] and not any(name == "preempt" for name, _ in runner.calls)


def test_programs_are_prepared_for_what_will_decode(turn):
    """Not for what ends with its first token."""
    short = request(5)
    short.limit = 2
    runner, turn = turn(short, request(1, 2))
    turn.step()
    assert runner.prepared == [([0, 1], 1)]


def test_a_sequence_waits_until_there_are_pages_for_what_it_knows(turn):
    runner, turn = turn(request(1, 2), request(*range(20)))
    runner.free_pages = 5
    turn.step()
    assert [len(r.prompt) for r in turn.active] == [2] and len(turn.waiting) == 1  # 5 pages and one to spare for the other
    runner.free_pages = 7
    turn.step()
    assert len(turn.active) == 2


@pytest.mark.parametrize(("decoding", "computing", "rounds"), [(1, 1, 1), (15, 1, 1), (16, 1, 2), (31, 1, 3), (64, 1, BESIDE), (31, 3, 1)])
def test_prompts_are_computed_the_sooner_the_more_slots_wait_for_theirs(turn, monkeypatch, decoding, computing, rounds):
    """A round is as long for few sequences as for many. But a long prompt costs many that decode no more than a part of their speed."""
    monkeypatch.setattr(Notes, "used", lambda *_: 0.0)
    short, long = (request(i) for i in range(decoding)), (request(*range(90, 120), i) for i in range(computing))
    (runner, turn), events = turn(*short, *long, slots=decoding + computing), []
    while len(turn.active) < decoding + computing or any(r.computed == 0 for r in turn.active):
        turn.step()
        for r in turn.active:  # all that have begun get on, and only the long ones have something left
            r.computed, r.goals = min(max(r.computed, 8), len(r.prompt)), []
            r.output[:] = [7] if len(r.prompt) == 1 else []
    runner.calls.clear()
    turn.step(64, meanwhile=lambda: events.extend(runner.calls))
    assert [name for name, _ in runner.calls] == ["prefill", "decode"] and [name for name, _ in events] == ["prefill"]
    assert len(runner.calls[1][1]) == decoding and runner.steps == rounds


def test_rows_of_prompts_follow_the_rounds_at_once_if_they_fill_a_call(turn):
    runner, turn = turn(request(1), request(*range(50, 80)), request(2))

    def step():
        runner.calls.clear()
        turn.step()
        return runner.calls

    assert step() == [("admit", [0, 1]), ("prefill", [0, 1]), ("prefill", [1])]
    assert step() == [("decode", [0]), ("prefill", [1])]
    runner.ends = {0}
    assert step() == [("decode", [0]), ("prefill", [1])]
    assert [r.order for r in turn.end()] == [0]
    assert step() == [("admit", [2]), ("prefill", [1, 2])]
    assert turn.active[0].computed == 24
    assert step() == []  # the last of the long prompt's rows were under way, and the short one's do not fill a call
    assert step() == [("prefill", [2]), ("decode", [1])]


def test_rows_of_a_long_prompt_are_queued_before_those_before_them_are_read(turn):
    """Not behind the rows at which the prompt is kept for others, and not behind its last."""
    runner, turn = turn(long := request(*range(50, 90)), request(*range(50, 70), 1))
    found = []
    while not long.output:
        turn.step()
        found.append((long.computed, runner.prompts_read))
    assert found == [(8, 1), (16, 2), (19, 3), (27, 4), (35, 5), (40, 6)]
    assert runner.behind[:6] == [False, True, True, False, True, True]
    assert ("snapshot", 19) in runner.calls


def test_rows_of_prompts_that_lacked_pages_with_those_before_them_make_room_once(turn):
    """And what is to be kept for others is kept."""
    runner, turn = turn(request(*range(50, 90)), request(*range(10, 60)), request(*range(50, 65), 1))
    runner.starved = True
    turn.step()
    assert runner.behind == [False, True] and runner.prompts_read == 2
    assert runner.calls[-2:] == [("snapshot", 14), ("preempt", 1)]
    turn.step()
    assert runner.prompts_read == 3


def test_who_ends_while_its_rows_are_computed_is_told_nothing_more(turn):
    """A sequence that gave way before its text was looked at ends by a stop string while it is computed again."""
    runner, turn = turn(request(*range(50, 80)), request(*range(60, 90)))
    turn.step()
    first, second = turn.active
    assert first.computed == 8
    first.text.found = "stop"
    assert turn.end() == [first] and turn.active == [second]
    turn.step()
    assert first.computed == 0 and second.computed == 8  # it gave its rows back


def test_who_loses_its_slot_is_told_nothing_of_what_was_computed_there(turn):
    runner, turn = turn(request(*range(50, 80)))
    turn.step()
    (lost,) = turn.active
    runner.preempt(lost)
    lost.computed = 0
    runner.calls.clear()
    turn.step()
    assert runner.calls == [("admit", [0]), ("prefill", [0]), ("prefill", [0])] and lost.computed == 8


@pytest.mark.parametrize(
    ("slots", "max_len", "rows", "buckets"),
    [
        (64, 4096, 512, [(1, 64), (1, 512), (2, 256), (8, 64)]),
        (1, 4096, 512, [(1, 64), (1, 512)]),
        (4, 300, 512, [(1, 64), (1, 300), (4, 64)]),
        (4, 100, 512, [(1, 64), (1, 100), (4, 64)]),
        (4, 40, 512, [(1, 40), (4, 40)]),
        (64, 4096, 2048, [(1, 64), (1, 512), (1, 2048), (4, 512), (8, 64), (32, 64)]),
        (8, 1000, 1024, [(1, 64), (1, 512), (1, 1000), (2, 512), (8, 64)]),
        (1, 4096, 2048, [(1, 64), (1, 512), (1, 2048)]),
        (4, 40, 2048, [(1, 40), (4, 40)]),
    ],
)
def test_prompts_are_computed_one_by_one_some_or_many_at_a_time(slots, max_len, rows, buckets):
    assert Buckets(slots, max_len, rows).prefill == buckets


def test_a_call_computes_several_parts_of_prompts_that_fit_a_ring():
    some, few = Buckets(64, 4096, 2048, 576), Buckets(3, 4096, 512, 1088)
    assert some.prefill == Buckets(64, 4096, 2048).prefill and few.prefill == [(1, 64), (1, 512), (8, 64)]
    assert Buckets(2, 4096, 2048, 320).prefill == [(1, 64), (1, 512), (1, 2048), (2, 512), (8, 64), (10, 64)]
    assert some.shared_out([300, 700, 20, 900], [0, 0, 0, 500], 32, 64) == [300, 576, 20, 64]
    assert some.shared_out([300, 700, 20], [0, 0, 0], 8, 64) == [300, 192]
    assert some.shared_out([300, 700, 20], [0, 0, 0], 4, 512) == [300, 512, 20]
    assert some.shared_out([300], [0], 1, 64) == [64] and Buckets(64, 4096, 2048).shared_out([300, 20], [0, 0], 32, 64) == [64, 20]
    assert some.prefill_by_worth([300] * 7, [0] * 7)[0] == (32, 64) and some.prefill_by_worth([900] * 4, [600] * 4)[0] == (4, 512)
    assert few.prefill_by_worth([200, 250], [0, 512])[0] == (8, 64) and few.prefill_by_worth([400], [0])[0] == (1, 512)


@pytest.mark.parametrize(("config", "rows"), [("31b", 512), ("12b", 1024), ("26b", 2048), ("e2b", 2048)])
def test_targets_that_do_little_for_a_row_get_more_rows_where_attention_has_kernels(config, rows):
    found = released.target_config(config)
    target = abstract_target(found, jnp.bfloat16)
    assert prefill_rows(target, kernels=True) == rows and prefill_rows(target, kernels=False) == 512
    packed = abstract_target(found, jnp.bfloat16, released.target_quantisation(config, found, jnp.bfloat16, "int8", None, None))
    assert prefill_rows(packed, kernels=True) == rows and prefill_rows(packed, kernels=False) == 512


@pytest.fixture
def full(turn):
    """A function of the requests that wait while 24 sequences decode. It gives a runner and step(n), a step in which n sequences end. That
    gives its first call, after how many ends its rounds were to return, and after how many rounds at the latest."""

    def made(*waiting):
        runner, turn_ = turn(*(request(i) for i in range(24)), *waiting, slots=24)
        runner.free_pages = 1000

        def step(ends=0):
            runner.calls.clear()
            runner.ends = {r.order for r in turn_.active[:ends]}
            turn_.step()
            turn_.end()
            found = runner.calls[0], runner.until_ended, runner.steps
            while not turn_.active or not all(r.ready for r in turn_.active):
                turn_.step()
            return found

        step()
        return runner, step

    return made


def test_slots_that_come_free_wait_until_prompts_share_a_call(full):
    """Until an eighth of the slots are free, or as many as there are prompts."""
    _, step = full(*(request(i) for i in range(5)))
    assert step(1) == (("decode", [*range(24)]), 1, STEPS)
    assert step(2) == (("decode", [*range(1, 24)]), 2, PATIENCE)
    assert step(0)[0] == ("admit", [24, 25, 26])
    assert step(1) == (("decode", [*range(3, 27)]), 1, STEPS)
    assert step(1) == (("decode", [*range(4, 27)]), 1, PATIENCE)
    assert step(0)[0] == ("admit", [27, 28])
    assert step(0)[1:] == (0, STEPS)


def test_slots_that_come_free_do_not_wait_for_long(full):
    _, step = full(*(request(i) for i in range(5)))
    for first in range(2):
        assert step(1)[0] == ("decode", [*range(first, 24 + first)])
        assert step(0) == (("decode", [*range(first + 1, 24 + first)]), 2, PATIENCE)
        assert step(0)[0] == ("admit", [24 + first])


@pytest.mark.parametrize(("lengths", "company"), [((600, 1, 1), 1), ((300, 300, 1), 2), ((1, 600, 1), 2), ((170, 170, 172), 3)])
def test_slots_wait_no_longer_than_until_prompts_fill_a_call(full, lengths, company):
    _, step = full(*(request(*range(7, 7 + length)) for length in lengths))
    step(1)
    call, ends, _ = step()
    assert call[0] == ("admit" if company == 1 else "decode") and (company == 1 or ends == company - 1)


def test_rows_that_are_kept_do_not_fill_a_call(full):
    runner, step = full(*(request(*range(600), i) for i in range(3)))
    runner.held.keep(24, np.arange(597), request(*range(600)))
    step(1)
    assert step()[1] == 2


def test_who_begins_alike_waits_for_what_is_being_computed(turn):
    stem = list(range(50, 70))
    runner, turn = turn(request(*stem, 1), request(*stem, 2), request(3))
    turn.step()
    assert [r.prompt[-1] for r in turn.active] == [1, 3]
    assert turn.active[0].goals == [19]
    while ("snapshot", 19) not in runner.calls:
        assert len(turn.waiting) == 1
        turn.step()
    runner.ends = {1}
    while not (ended := turn.end()):
        turn.step()
    assert [r.order for r in ended] == [1]
    turn.step()
    assert [int(r.prompt[-1]) for r in turn.active] == [1, 2] and not turn.waiting
    turn.close()
    assert not runner.held.running


@pytest.fixture
def queueing(turn):
    def made(*requests):
        runner, turn_ = turn(*requests)
        runner.queueing = True
        return runner, turn_

    return made


def test_rounds_are_queued_before_what_they_follow_is_read(queueing):
    runner, turn = queueing(request(1, 2), request(3))
    turn.step()
    assert runner.calls == [("admit", [0, 1]), ("prefill", [0, 1])]  # the second prompt is still to be computed
    turn.step()
    assert runner.calls[2:] == [("prefill", [1]), ("decode", [0]), ("decode", [0, 1])] and runner.told == [0]
    turn.step()
    assert runner.calls[5:] == [("decode", [0, 1])] and runner.told == [0, 0, 1]
    runner.ends = {0}
    turn.step()
    assert [r.order for r in turn.end()] == [0] and runner.told == [0, 0, 1, 0, 1]
    runner.calls.clear()
    turn.step()
    assert runner.calls == [("decode", [1])] and runner.told == [0, 0, 1, 0, 1, 1] and set(runner.unread) == {2}
    runner.ends = {1}
    turn.step()
    assert [r.order for r in turn.end()] == [1] and not turn.step()
    turn.close()
    assert not runner.held.running


def test_the_device_goes_on_while_slots_are_given_to_requests_that_wait(queueing):
    """Behind rounds that return once a slot is free, a brief call is queued; behind that, the next request's prompt and long rounds."""
    runner, turn = queueing(*(request(i) for i in range(4)))

    def step(*ends):
        runner.calls.clear()
        runner.ends = set(ends)
        turn.step()
        turn.end()
        return runner.calls, runner.until_ended, runner.steps

    while len(runner.held.running) < 2 or not all(r.ready for r in turn.active) or runner.steps != STEPS:
        step()
    assert step(0) == ([("decode", [0, 1])], 0, BRIEF) and [r.order for r in turn.active] == [1]
    assert step() == ([("admit", [2]), ("prefill", [2]), ("decode", [1, 2])], 1, STEPS)
    assert step(1, 2) == ([("decode", [1, 2])], 0, BRIEF) and not turn.active
    assert step() == ([("admit", [3]), ("prefill", [3]), ("decode", [3])], 0, STEPS) and not turn.waiting
    assert step() == ([("decode", [3])], 0, STEPS)


def test_no_slot_is_given_away_before_rounds_that_return_once_more_are_free(turn):
    """Three of 24 slots are to be free; one is when the long rounds begin."""
    runner, turn = turn(*(request(i) for i in range(28)), slots=24)
    runner.queueing, runner.free_pages = True, 1000

    def step(*ends):
        runner.calls.clear()
        runner.ends = set(ends)
        turn.step()
        turn.end()
        return runner.calls[0], runner.until_ended, runner.steps

    while len(turn.active) < 24 or not all(r.ready for r in turn.active) or runner.steps != STEPS:
        step()
    assert step(0) == (("decode", [*range(24)]), 0, BRIEF)
    assert step() == (("decode", [*range(1, 24)]), 2, PATIENCE)
    assert step(1) == (("decode", [*range(1, 24)]), 0, BRIEF)
    assert step()[0] == ("admit", [24, 25])


def test_no_rounds_are_queued_for_who_ends_with_its_first_token(queueing):
    runner, turn = queueing(one := request(1))
    one.limit = 2
    turn.step()
    assert [name for name, _ in runner.calls] == ["admit", "prefill"]


def test_calls_are_short_while_the_host_looks_for_stop_strings(queueing):
    """Where the next rounds are queued before it has looked they are shorter, and who is found to have ended is told nothing of them."""
    runner, turn = queueing(one := request(1), request(2))
    one.params = SamplingParams(stop="x")
    for _ in range(3):
        turn.step()
    assert runner.calls[-1] == ("decode", [0, 1]) and runner.steps == WATCHED
    one.text = types.SimpleNamespace(found="x")
    assert turn.end() == [one]
    runner.told.clear()
    turn.step()
    assert runner.told == [1] and runner.calls[-1] == ("decode", [1]) and runner.steps == STEPS
    runner.queueing = False
    two = request(1)
    two.params = SamplingParams(stop="x")
    turn.waiting.append(two)
    while not two.ready:
        turn.step()
    turn.step()
    assert runner.calls[-1] == ("decode", [1, 2]) and runner.steps == WATCHED_ALONE


def test_sequences_of_other_turns_have_their_rounds_beside_these(queueing):
    """In calls of few rounds that are read at once, if they are as many as the turn's own and no other call tells of them."""
    runner, turn = queueing(request(1))
    others = [request(2), request(3)]
    for order, other in enumerate(others, 7):
        other.order, other.output, other.computed = order, [7], 1
    for _ in range(2):
        turn.step(4)
    assert runner.calls[-1] == ("decode", [0]) and turn._rounds is not None
    runner.others, runner.calls = others, []
    turn.step(4)
    assert not runner.calls and turn._rounds is None  # what was queued is read
    turn.step(4)
    assert runner.calls == [("decode", [0, 7, 8])] and runner.unread[-1] == 1 and runner.told[-3:] == [0, 7, 8] and turn._rounds is None
    others[0].under_way.add(99)
    turn.step(4)
    assert runner.calls[1:] == [("decode", [0, 8])]
    turn.step(TOGETHER + 1)
    assert runner.calls[2:] == [("decode", [0]), ("decode", [0])] and runner.unread[-1] == 2


def test_rounds_that_lacked_pages_with_those_before_them_make_room_once(queueing):
    runner, turn = queueing(request(1), request(2))
    for _ in range(3):
        turn.step()
    assert len(runner.told) == 3
    runner.starved = True
    turn.step()
    assert len(runner.told) == 7  # the queued rounds are read too
    assert [call for call in runner.calls if call[0] == "preempt"] == [("preempt", 1)]
    assert [r.order for r in turn.active] == [0] and [r.order for r in turn.waiting] == [1]


def test_who_loses_its_slot_is_told_nothing_of_rounds_that_were_queued(queueing):
    runner, turn = queueing(request(1, 2))
    turn.step()
    (lost,) = turn.active
    runner.preempt(lost)
    lost.computed = 0
    runner.calls.clear()
    turn.step()
    assert runner.calls[:2] == [("admit", [0]), ("prefill", [0])] and not runner.told
