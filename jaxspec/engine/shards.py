"""Turns on several data shards at once. Each shard has a runner with its own slots, pages and programs, and its own pace: no shard waits
for another's prompts or for its longest sequence."""

from __future__ import annotations

import collections
import concurrent.futures
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.settings import STEPS
from jaxspec.engine.turn import AHEAD, SEEN, Turn, no_slots, wait_for
from jaxspec.sampling.choice import Needs
from jaxspec.sampling.logprobs import Logprobs

THREADS = "jaxspec-shard"  # how the names of shards' threads begin


class Shards:
    """The runners of all data shards. While it steps, each runs on its own thread. At any time, only one call has steps under way."""

    def __init__(self, runners: Sequence[Runner]):
        self.runners = list(runners)
        self.seen = [collections.deque[np.ndarray](maxlen=SEEN) for _ in runners]
        self.pool = concurrent.futures.ThreadPoolExecutor(len(self.runners), THREADS)
        self._owner: Turns | None = None

    def turn(self, requests: Iterator[Request], needs_of: Callable[[list[Request]], Needs], kinds: dict[tuple, Request]) -> Turn | Turns:
        """A call's turn: see `Turn`."""
        if len(self.runners) > 1:
            return Turns(self, requests, needs_of, kinds)
        return Turn(self.runners[0], requests, needs_of, self.seen[0], kinds)

    def take(self, owner: Turns | None) -> None:
        """Lets another call step, once the steps of the last one are done. owner: the call's turns; None for work outside of turns."""
        if self._owner is not owner:
            self.rest()
        self._owner = owner

    def may_rest(self, turn: Any) -> bool:
        """Whether the end of a turn that was dropped may wait for shards: for its own alone, and not in a shard's thread, where the garbage
        collector may find it."""
        if self._owner is None or not self._owner.stepping:
            return True
        return self._owner is turn and not threading.current_thread().name.startswith(THREADS)

    def rest(self) -> None:
        """Waits until no shard is stepping."""
        if self._owner is not None:
            self._owner.wait()

    def leave(self, owner: Turns) -> None:
        """Forgets a call that is over, with its requests and whatever they were read from."""
        if self._owner is owner:
            self._owner = None

    def close(self) -> None:
        """Gives up what the runners hold on the devices."""
        self.take(None)
        for runner in self.runners:
            runner.close()
        self.pool.shutdown()


class _Dealt(collections.deque[Request]):
    """Requests that a shard's turn reads. More may come after it was empty."""

    def __next__(self) -> Request:
        if not self:
            raise StopIteration
        return self.popleft()

    def __iter__(self) -> Iterator[Request]:
        return self


def _step(turn: Turn, steps: int, spared: int) -> bool:
    """A step of a shard. If its requests wait for automata, so does its thread for a moment, as others may be at work."""
    going = turn.step(steps, spared=spared)
    wait_for(turn.expected)
    return going


def _fulfil(step: concurrent.futures.Future[bool], work: Callable[[], bool]) -> None:
    """Does the work of a step that was not cancelled."""
    if step.set_running_or_notify_cancel():
        try:
            step.set_result(work())
        except BaseException as error:
            step.set_exception(error)


class Turns:
    """The turns of one call on all data shards, with the methods of one `Turn`. Requests are dealt out one by one to the shard that has
    the fewest of the call's, then to the one with most free slots; a conversation goes where it was kept before. `active` and `end`
    cover only the shards that are not stepping."""

    def __init__(
        self,
        shards: Shards,
        requests: Iterator[Request],
        needs_of: Callable[[list[Request]], Needs],
        kinds: dict[tuple, Request],
    ):
        self._shards, self._requests = shards, requests
        self._read = collections.deque[Request]()  # requests that no shard has yet; some, as long as there are more to read
        self._dealt = [_Dealt() for _ in shards.runners]
        parts = zip(shards.runners, self._dealt, shards.seen, strict=True)
        self._turns = [Turn(runner, dealt, needs_of, seen, kinds) for runner, dealt, seen in parts]
        self._stepping: dict[concurrent.futures.Future[bool], int] = {}

    @property
    def _resting(self) -> list[int]:
        return [i for i in range(len(self._turns)) if i not in self._stepping.values()]

    @property
    def stepping(self) -> bool:
        """Whether a shard is at work on a step, or about to be."""
        return not all(step.done() for step in list(self._stepping))

    @property
    def active(self) -> list[Request]:
        return [request for i in self._resting for request in self._turns[i].active]

    @property
    def held(self) -> int:
        """How many slots it has."""
        return sum(turn.held for turn in self._turns)

    @property
    def _slots(self) -> int:
        return sum(runner.settings.max_slots for runner in self._shards.runners)

    @property
    def waiting(self) -> bool:
        """Whether there are requests without a slot."""
        return bool(self._read) or any(map(len, self._dealt)) or any(self._turns[i].waiting for i in self._resting)

    @property
    def expected(self) -> list[concurrent.futures.Future[Any]]:
        """See `Turn.expected`."""
        if self._stepping or self.active:
            return []
        return [future for turn in self._turns for future in turn.expected]

    def step(self, steps: int = STEPS, meanwhile: Callable[[], None] = lambda: None, spared: int = 0) -> bool:
        """Starts a step on every idle shard that has something to do, and waits until a step of one of them is done. meanwhile: called in
        between. spared: how many free slots are left to other calls, of each shard where this call has slots. Returns False once nothing is
        left to do. Raises NoRoom if other calls hold all slots, or are left them."""
        self._shards.take(self)
        self._deal()
        self._shards.take(self)  # what gives the requests may have used the LLM
        if self.waiting and not (self.held or self._stepping) and sum(r.free_slots for r in self._shards.runners) <= spared:
            raise no_slots(self._slots)
        for i in self._resting:
            if self._load(i):
                left = spared if self._turns[i].active else 0
                step = concurrent.futures.Future[bool]()
                self._stepping[step] = i  # first, so that an interrupt finds it here
                self._shards.pool.submit(_fulfil, step, functools.partial(_step, self._turns[i], steps, left))
        if not self._stepping:
            return False
        meanwhile()
        done, _ = concurrent.futures.wait(self._stepping, return_when=concurrent.futures.FIRST_COMPLETED)
        for step in done:
            del self._stepping[step]
        for step in done:
            step.result()
        return True

    def end(self) -> list[Request]:
        """Takes out the requests that have ended."""
        return [request for i in self._resting for request in self._turns[i].end()]

    def score(self, request: Request, count: int) -> Logprobs:
        """As `Turn.score`, for a request that `end` has just returned. The shard where it ended is not stepping and has a free slot, so the
        idle shard with most free slots has one too."""
        self._shards.take(self)
        free = max(self._resting, key=lambda i: self._shards.runners[i].free_slots)
        return self._turns[free].score(request, count)

    def wait(self) -> None:
        """Waits until no shard is stepping. The next `step` takes in the results, and begins anew what has not begun."""
        for step in list(self._stepping):
            if step.cancel():
                del self._stepping[step]
        concurrent.futures.wait(self._stepping)

    def close(self) -> None:
        """Frees all slots. If an interrupt cuts it short, it is to be called again."""
        self.wait()
        self._stepping.clear()
        for turn, dealt in zip(self._turns, self._dealt, strict=True):
            turn.close()
            dealt.clear()
        self._shards.leave(self)

    def _read_on(self) -> None:
        self._read.extend(itertools.islice(self._requests, 1))

    def _stuck(self, i: int) -> bool:
        """Whether other calls hold all slots of a shard, so that what it was dealt waits for them. One that had a slot takes it back."""
        turn = self._turns[i]
        return not (turn.active or self._shards.runners[i].free_slots or (turn.waiting and turn.waiting[0].order >= 0))

    def _take_back(self) -> None:
        """Takes back what shards that are stuck were dealt."""
        for i in self._resting:
            if self._stuck(i):
                self._read.extendleft(reversed([*self._turns[i].waiting, *self._dealt[i]]))
                self._turns[i].waiting.clear()
                self._dealt[i].clear()

    def _load(self, i: int) -> int:
        return len(self._dealt[i]) + len(self._turns[i].waiting) + len(self._turns[i].active)

    def _usable(self) -> list[int]:
        """The shards that are not stepping and can have one more request."""

        def has_room(i: int) -> bool:
            free, active = self._shards.runners[i].free_slots, len(self._turns[i].active)
            return free + AHEAD - self._load(i) + active > 0 and bool(active or free)

        return [i for i in self._resting if has_room(i)]

    def _deal(self) -> None:
        """Deals requests to the shards that are not stepping, a few more than they have slots for."""
        runners = self._shards.runners
        self._take_back()
        if not self._read:  # the requests may have stopped for a while
            self._read_on()
        while self._read:
            if (usable := self._usable()) and len(self._read) == 1:
                self._read_on()
                self._take_back()  # what gives the requests may have taken slots
                usable = self._usable()
            if not usable:
                if self._stepping or any(map(self._load, self._resting)):
                    return
                raise no_slots(self._slots)
            request = self._read.popleft()
            kept = {i: runners[i].held.find(request.key)[1] if request.keep and request.seen else 0 for i in usable}
            self._dealt[max(usable, key=lambda i: (kept[i], -self._load(i), runners[i].free_slots))].append(request)
