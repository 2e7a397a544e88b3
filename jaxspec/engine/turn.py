"""Turn: the requests of one call on their way through the slots. It is host code that decides what the device does next."""

from __future__ import annotations

import collections
import concurrent.futures
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxspec import decode
from jaxspec.engine.call import Call
from jaxspec.engine.inserts import in_order
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.settings import STEPS
from jaxspec.engine.slots import boundary, common
from jaxspec.sampling.choice import Needs
from jaxspec.sampling.logprobs import Logprobs

AHEAD = 4  # requests that are read before there is a slot for them
LOOKAHEAD = 8  # inserts, as large as a call has room for, that are computed before their rows are needed
# While prompts are computed, a step runs one round for every SHARE decoding sequences per unfinished prompt, at least 1 and at most BESIDE.
# A round takes about as long for few sequences as for many, so while few of them decode, the time is better spent on prompts.
BESIDE, SHARE = 4, 8
# While others decode, a slot that comes free waits for company, since a call that computes one short prompt takes about as long as one for
# several: until so large a share of the slots is free, or until the prompts that wait for them fill the largest call, but for no more than
# PATIENCE rounds.
COMPANY, PATIENCE = 1 / 8, 16
# The next call is queued behind a step's before the host reads their results, so that the device does not pause: rounds by `_followers`. A
# call that computes prompts cannot include those that get a slot afterwards, so it is queued only if this share of its rows is of use.
ENOUGH = 0.5
# Rounds of a call at most while requests have stop strings, which the host looks for between calls: where the next rounds are queued before
# it has looked at these, and where they are not.
WATCHED, WATCHED_ALONE = 3, 8
# Rounds of a call at most in which sequences of other turns have a part. With more, these would run far ahead of their readers.
TOGETHER = 8
# Rounds that follow those that return once slots are free. They run while the host gives the slots to waiting requests.
BRIEF = 1
POLL = 0.05  # seconds that a step waits at most where there is nothing to do but to build automata
SOON = 8  # rounds of a step at most while a request waits for its automaton
SEEN = 32  # prompts that are remembered, to find out what later ones have in common with them


class NoRoom(RuntimeError):
    """Other calls hold all slots, or the memory of structured outputs."""


def no_slots(count: int) -> NoRoom:
    return NoRoom(f"all slots are held by open streams; close some, or load with more than {count} as max_slots")


def wait_for(expected: Sequence[concurrent.futures.Future[Any]]) -> None:
    """Waits a moment for the first of these, if there are any."""
    if expected:
        concurrent.futures.wait(expected, POLL, concurrent.futures.FIRST_COMPLETED)


class Turn:
    """Requests that share the slots until all have ended.

    requests: read as slots come free. needs_of: what a call that works on some requests must be compiled for. seen: the last SEEN prompts
    of earlier turns and of this one. kinds: one request of each profile, if all requests are known; else calls are compiled for the
    profiles that have come so far.
    """

    def __init__(
        self,
        runner: Runner,
        requests: Iterator[Request],
        needs_of: Callable[[list[Request]], Needs],
        seen: collections.deque[np.ndarray],
        kinds: dict[tuple, Request] | None = None,
    ):
        self._runner, self._requests, self._needs_of, self._seen = runner, requests, needs_of, seen
        self._kinds = dict(kinds or {})
        self.waiting = collections.deque[Request]()  # requests that were read and have no slot
        self.active = list[Request]()  # requests with a slot, oldest first
        self._expecting = False  # whether a waiting request's automaton, image or sound is on its way
        self._spared = 0  # see `step`
        self._lacking = 0  # how many more slots are to come free before those that are free are given to waiting requests
        self._prompts: Call | None = None  # the call that computes prompts for the next step, if it is under way
        self._rounds: Call | None = None  # the same of its rounds

    def step(self, steps: int = STEPS, meanwhile: Callable[[], None] = lambda: None, spared: int = 0) -> bool:
        """Fills free slots, computes some rows of unfinished prompts, and runs up to `steps` rounds of the sequences that decode. The next
        rows of prompts or the next rounds may be under way when it returns; the next step reads them.

        meanwhile: work for the host, called while the device computes rows of prompts, if there are any. spared: how many free slots are
        left to other turns. Returns False once nothing is left to do; True at once, if there are automata that are `expected`. Raises
        NoRoom if other turns hold all slots, or are left them."""
        self._spared = spared
        self._take_in()
        if not (self.waiting or self.active):
            return False
        self._fill_slots()
        self._look_ahead()
        if not self.active:
            self._idle(meanwhile)
            return True
        needs = self._needs_of(list(self._kinds.values()))
        if needs.structured:
            self._runner.pool.begin()
        computing = [r for r in self.active if not (r.ready or r.ended)]
        prompts = self._begin_prompts(computing, needs)
        rounds = self._begin_rounds(computing, prompts, steps, needs, meanwhile)
        self._read(computing, prompts, rounds, needs)
        return True

    def _take_in(self) -> None:
        """Reads requests, as many as slots are free and AHEAD more, and notes who has lost its slot."""
        runner = self._runner
        runner.ready()
        fresh = list(itertools.islice(self._requests, max(runner.free_slots + AHEAD - len(self.waiting), 0)))
        for insert in itertools.chain.from_iterable(request.inserts for request in fresh):
            insert.decode()
        self.waiting.extend(fresh)
        runner.ready()
        self._readmit([r for r in self.active if r.slot < 0])  # what gives the requests may have used the LLM, which made room

    def _fill_slots(self) -> None:
        """Gives slots to waiting requests, unless more slots should come free first."""
        runner = self._runner
        if not self.active and not runner.free_slots and self.waiting[0].order >= 0:
            self._preempt(runner.held.running[-1])  # for a request that had a slot and lost it
        if self._rounds is not None and self._rounds.until_ended:
            return  # once these return, more are free
        company, free = 1 if self._lacking else self._company(), self._free
        self._lacking = max(company - free, 0) if free else 0
        if free >= company:
            self._admit()

    def _look_ahead(self) -> None:
        """Begins to compute the inserts that are next, while the device does other work."""
        find, call = self._runner.held.find, self._prompts
        under_way = {} if call is None else call.under_way
        with_insert = [r for r in itertools.chain(self.active, self.waiting) if r.inserts and r.seen]
        rows = ((r, r.computed + under_way.get(r, 0) if r.slot >= 0 else find(r.key)[1]) for r in with_insert)
        coming = [[insert for insert in request.inserts if insert.begin >= computed] for request, computed in rows]
        coming, left = [inserts for inserts in coming if inserts], float(LOOKAHEAD)
        size = self._runner.buckets.inserts(coming[0][0].room)[-1][0] if coming else 1
        for insert in in_order(coming, size):
            left -= insert.count / insert.room
            if left < 0:
                break
            insert.start()

    @property
    def _free(self) -> int:
        """How many slots it may take."""
        return max(self._runner.free_slots - self._spared, 0)

    def _idle(self, meanwhile: Callable[[], None]) -> None:
        """What a step does if no request has a slot. Raises NoRoom if none will get one before other turns give up theirs."""
        runner = self._runner
        if not self._free:
            raise no_slots(runner.settings.max_slots)
        if self._expecting:
            meanwhile()
        elif self.waiting[0].order >= 0 and (others := [r for r in runner.held.running if r.structure is not None]):
            self._preempt(others[-1])  # for a structured request that had a slot and lost it
        else:
            raise NoRoom("the memory of structured outputs is held by open streams; close some")

    def _begin_prompts(self, computing: list[Request], needs: Needs) -> Call | None:
        """The call for prompts that this step reads: the one that is under way, or a new one."""
        call, self._prompts = self._prompts, None
        if call is None and computing:
            to_decode = sum(not r.ended and r.length + 1 < r.limit for r in self.active)  # the others end with their first token
            self._runner.choice.prepare(computing, to_decode, needs)
            call = self._runner.prefill(computing, needs)
        return call

    def _begin_rounds(
        self, computing: list[Request], prompts: Call | None, steps: int, needs: Needs, meanwhile: Callable[[], None]
    ) -> Call | None:
        """The rounds that this step reads: those that are under way, or new ones. Queues the next behind them if it can."""
        runner, decoding = self._runner, [r for r in self.active if r.ready]
        followers = self._followers(decoding, [] if prompts is None else prompts.finished, needs)
        beside = self._companions(decoding or followers, steps, needs)
        if beside:  # in a call that is read at once, and only those of which no other call will tell
            followers, beside = [], [r for r in beside if not r.under_way]
        unread = 2 if followers else 1
        if not followers:  # before the rounds, since their call may not return before they are over
            meanwhile()
        ends = self._lacking or (1 if computing or self.waiting else 0)
        if any(r.params.stop for r in self.active):
            steps = min(steps, WATCHED if followers else WATCHED_ALONE)
        if self._expecting:
            steps = min(steps, SOON)
        if self._lacking:
            steps = min(steps, PATIENCE)
        rounds, self._rounds = self._rounds, None
        if decoding and rounds is None:
            fewer = steps
            if computing:
                fewer = min(fewer, BESIDE, max(len(decoding) // (SHARE * len(computing)), 1))
            rounds = runner.decode(decoding + beside, fewer, until_ended=ends, needs=needs, unread=unread)
        if followers:
            if not self.waiting:
                ends = 0
            elif rounds is not None and rounds.until_ended:
                ends, steps = 0, min(steps, BRIEF)
            self._rounds = runner.decode(followers, steps, until_ended=ends, needs=needs, unread=unread)
            meanwhile()
        return rounds

    def _read(self, computing: list[Request], prompts: Call | None, rounds: Call | None, needs: Needs) -> None:
        """Waits for a step's calls, and queues the next rows of prompts as soon as it can. Keeps prompts that have come to where they are
        to be kept, and makes room if pages were lacking."""
        runner = self._runner
        if prompts is not None and not prompts.reaches and runner.choice.used(computing, needs, prompts) >= ENOUGH:
            self._prompts = runner.prefill(computing, needs, prompts)
        starved = runner.read([] if prompts is None else [prompts])
        left, to_keep = [r for r in computing if not (r.ready or r.ended)], any(r.computed in r.goals for r in computing)
        if left and not (starved or to_keep or self._rounds or self._prompts) and runner.choice.used(left, needs) >= ENOUGH:
            self._prompts = runner.prefill(left, needs)
        starved |= runner.read([] if rounds is None else [rounds])
        if starved:  # what is queued lacked the same pages
            queued, self._prompts, self._rounds = [x for x in (self._prompts, self._rounds) if x is not None], None, None
            runner.read(queued)
        runner.times.turn()
        for request in [r for r in computing if r.computed in r.goals]:
            request.goals.remove(request.computed)
            runner.snapshot(request)
        if starved and not any(r.ended for r in self.active):  # the pages of one that has ended come free anyway
            self.make_room()

    @property
    def held(self) -> int:
        """How many slots it has."""
        return len(self.active)

    @property
    def expected(self) -> list[concurrent.futures.Future[Any]]:
        """The automata that are being built and what is being decoded, if there is nothing to do before one is there."""
        if self.active or not self._expecting:
            return []
        found = [r.structure.future for r in self.waiting if r.structure]
        found += [insert.decode() for r in self.waiting for insert in r.inserts]
        return [future for future in found if not future.done()]

    def end(self) -> list[Request]:
        """Takes out the requests that have ended."""
        ended = [r for r in self.active if r.ended]
        if ended:
            self._runner.end(ended)
            self._leave(ended)
        return ended

    def close(self) -> None:
        """Frees all slots."""
        self._runner.end(self.active)
        self.active.clear()
        self.waiting.clear()
        self._prompts = self._rounds = None

    def score(self, request: Request, count: int) -> Logprobs:
        """See `Runner.score`."""
        return self._runner.score(request, count, self.make_room)

    def make_room(self, reader: Request | None = None) -> None:
        """Frees pages: first those of sequences that have ended, then those that are kept for later prompts and that no running sequence
        shares, then those of this turn's youngest sequence. If this turn has only one user of the room left, a sequence or the `reader`
        of `Runner.score`, all kept pages go next, and then those of another turn's youngest sequence."""
        runner = self._runner
        if runner.held.ended:
            runner.flush()
        elif runner.evict(needed=False):
            pass
        elif len(self.active) > (reader is None):
            self._preempt(self.active[-1])
        elif not runner.evict():
            others = [r for r in runner.held.running if r is not reader and r not in self.active]
            if others:  # else they have ended since the call began that lacked pages
                self._preempt(others[-1])

    def _preempt(self, request: Request) -> None:
        self._runner.preempt(request)
        self._readmit([r for r in self.active if r is request])

    def _readmit(self, lost: list[Request]) -> None:
        """Puts active requests that have lost their slots at the head of the waiting ones."""
        self._leave(lost)
        self.waiting.extendleft(reversed(lost))

    def _leave(self, gone: list[Request]) -> None:
        """Takes out active requests. What a call that is under way reports about them is no longer true, so they are not told of it."""
        self.active = [r for r in self.active if r not in gone]
        self._prompts, self._rounds = (call and call.without(gone) for call in (self._prompts, self._rounds))

    def _followers(self, decoding: list[Request], finished: Sequence[Request | None], needs: Needs) -> list[Request]:
        """The sequences whose next rounds can be queued before the host reads what this step's calls report, since it will have nothing
        else for the device to do. None, if others will still be computed.

        decoding: those that decode. finished: those whose prompts this step computes to their ends. needs: of all requests."""
        more = [r for r in finished if r is not None and r.length + 1 < r.limit]  # the others end with their first token
        if self._expecting or not self._runner.queues(needs):
            return []
        if any(not (r.ready or r.ended or r in finished) for r in self.active):
            return []
        return decoding + more

    def _companions(self, decoding: list[Request], steps: int, needs: Needs) -> list[Request]:
        """Sequences of other turns, of open streams or of other threads' calls, to run rounds of beside those of this turn that decode."""
        if not decoding or steps > TOGETHER:
            return []
        kinds = list(self._kinds.values())
        return self._runner.companions(decoding, needs, steps, lambda r: self._needs_of([*kinds, r]) == needs)

    def _company(self) -> int:
        """How many slots should be free before waiting requests get them. One, if prompts are computed anyway or nobody decodes."""
        runner = self._runner
        if not all(r.ready or r.ended for r in self.active):
            return 1
        most = max(int(COMPANY * (len(self.active) + runner.free_slots)), 1) if self.active else 1
        rows = 0
        for count, request in enumerate(itertools.islice(self.waiting, most), 1):
            rows += request.goal - (runner.held.find(request.key)[1] if request.seen else 0)
            if rows >= runner.buckets.prefill_rows:
                return count
        return min(most, len(self.waiting))

    def _admit(self) -> None:
        """Gives slots to waiting requests, in order, as long as there are pages for their tokens. A request waits longer if its prompt
        begins like one that is being computed and will be kept."""
        runner, fresh, free = self._runner, list[Request](), self._free
        settings = runner.settings
        promised = sum(self._to_come(r) for r in self.active if not r.ready)
        full = self._expecting = False
        older = list[Request]()  # structured ones that come first
        for request in list(self.waiting) if free else ():
            if not self._decoded(request):
                continue
            if request.structure is not None:
                offered = self._offered(request, older, full)
                full |= offered is None
                if not offered:
                    continue
            source, rows = runner.held.find(request.key)
            beside = len(self.active) + len(fresh)
            # One page is left over for each sequence beside it, which may soon need one. A sequence alone always finds room.
            own = settings.pages_for(request.length + settings.most_accepted) - rows // settings.page_size
            needed = own + promised + beside
            if len(fresh) >= free or (beside and not self._room(needed, source)):
                break
            if self._deferred(request, rows, fresh):
                continue
            self.waiting.remove(request)
            self._plan(request, rows)
            fresh.append(request)
            promised += self._to_come(request)
        if fresh:
            self.active += fresh  # first, so that an interrupt finds them here
            runner.admit(fresh)
            self._kinds |= {r.profile: r for r in fresh}
            self.active.sort(key=lambda r: r.order)

    def _decoded(self, request: Request) -> bool:
        """Whether its images, sounds and videos are there. A request with one that cannot be decoded has failed."""
        if not all(insert.decoded for insert in request.inserts):
            self._expecting = True
            return False
        failure = next((insert.failure for insert in request.inserts if insert.failure is not None), None)
        if failure is not None:
            self._refuse(request, failure)
        return failure is None

    def _refuse(self, request: Request, reason: str) -> None:
        request.refusal, request.status = reason, decode.FAILED
        self.waiting.remove(request)
        self.active.append(request)

    def _offered(self, request: Request, older: list[Request], full: bool) -> bool | None:
        """Whether the automaton of a structured text is there; None if it waits for room. older: requests whose automata it may not drive
        out of the pool; it becomes one of them. full: whether one of them waits for room, and should not be overtaken. A request whose
        automaton cannot be built has failed."""
        assert request.structure is not None
        if not request.structure.future.done():
            self._expecting = True
            return False
        if request.structure.failure is not None:
            self._refuse(request, request.structure.failure)
            return False
        # Others are served meanwhile, or could be.
        busy = any(r.structure is not request.structure for r in [*self.active, *self.waiting])
        offered = None if full else self._runner.pool.offers(request.structure, older, busy)
        older.append(request)
        self._expecting |= offered is False
        return offered

    def _to_come(self, request: Request) -> int:
        """Pages that the rest of its prompt will take."""
        return self._runner.settings.pages_for(request.goal) - self._runner.settings.pages_for(request.computed)

    def _room(self, needed: int, source: int) -> bool:
        """Whether there are so many free pages. If need be, kept sequences give up theirs, except the one in slot `source`."""
        runner = self._runner
        while runner.free_pages < needed:
            if runner.held.ended:
                runner.flush()
            elif not runner.evict(needed=False, but=source):
                return False
        return True

    def _deferred(self, request: Request, rows: int, fresh: list[Request]) -> bool:
        """Whether a prompt that is being computed will be kept at a row that serves this request, and saves it at least a page more than
        the `rows` that are kept now."""
        ahead, least = [r for r in [*self.active, *fresh] if r.goals], rows + self._runner.settings.page_size
        return any(goal >= least and common(request.key, r.prompt_key) > goal for r in ahead for goal in r.goals)

    def _plan(self, request: Request, rows: int) -> None:
        """Decides at which rows its prompt is kept: where that saves most work for others, and up to where its conversation may continue
        from it. rows: how many of its rows are kept already."""
        if request.output:
            return
        prompt, page_size = request.prompt_key, self._runner.settings.page_size
        others = [r.prompt_key for r in self.waiting if r.seen] + [other for other in self._seen if other is not prompt]
        goal = boundary(prompt, rows, others, page_size)
        goals = {request.outside(goal), request.outside(request.keep - 1)}
        request.goals[:] = sorted(goal for goal in goals if goal >= rows + page_size)
        self._seen.append(prompt)
