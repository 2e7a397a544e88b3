"""From requests to completions: the turns of calls and streams, and what is made of the sequences that end."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any

from jaxspec.engine.accounts import Accounts
from jaxspec.engine.completion import Chunk, Completion
from jaxspec.engine.device_lock import DeviceLock
from jaxspec.engine.finish import completion_of, final_logprobs, look
from jaxspec.engine.intake import Requests
from jaxspec.engine.learn import Learning
from jaxspec.engine.request import Request
from jaxspec.engine.settings import STEPS
from jaxspec.engine.shards import Shards, Turns
from jaxspec.engine.turn import TOGETHER, NoRoom, Turn, wait_for
from jaxspec.interrupts import heeded
from jaxspec.sampling.choice import Needs
from jaxspec.text import Tokenizer

YIELDING = 1e-4  # seconds in which other threads take what a call of this one has brought them
LEAVING = 0.05  # seconds in which a thread that has read a stream lets go of it
SHARING = 1.0  # seconds in which calls of other threads are expected to come again
IDLE = 5.0  # seconds after which a stream that nobody reads is not expected to give its slots up

Waits = Sequence[concurrent.futures.Future[Any]]  # the first of them is to be waited for, with the lock free


@dataclasses.dataclass(eq=False)
class _Call:
    """A call, a stream or an iterator that is open."""

    turn: Turn | Turns
    thread: threading.Thread = dataclasses.field(default_factory=threading.current_thread)  # that runs it, or has read it last
    left: float = math.inf  # since when nobody reads it
    lacks: float = math.inf  # since when it waits for slots

    @property
    def elsewhere(self) -> bool:
        """Whether somebody else is at work on it, so that slots of it will come free. Between two reads that may be another thread of the
        pool whose thread read it last; but the main thread's reads are its own."""
        here = threading.current_thread()
        own = self.thread is here and (self.left == math.inf or here is threading.main_thread())
        return self.turn.held > 0 and not own and time.monotonic() < self.left + IDLE

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While its reader has what it gave."""
        self.left = time.monotonic()
        yield
        self.thread, self.left = threading.current_thread(), math.inf


class Serving:
    """Runs the requests of calls and streams.

    lock: held while anything computes. needs_of: what a call that works on some requests must be compiled for. check_open: raises once
    the LLM is closed.
    """

    def __init__(
        self,
        shards: Shards,
        accounts: Accounts,
        lock: DeviceLock,
        tokenizer: Tokenizer,
        vocab_size: int,
        needs_of: Callable[[Sequence[Request]], Needs],
        check_open: Callable[[], None],
    ):
        self._shards, self._accounts, self._lock = shards, accounts, lock
        self.learning: Learning | None = None
        self._over = collections.deque[Callable[[], object]]()  # what is still to be done about turns that are over
        self._calls = set[_Call]()  # those under way
        self._freed: concurrent.futures.Future[None] = concurrent.futures.Future()  # done once one of them is over
        self._shared = -SHARING  # when a call of another thread last waited for its part
        self._tokenizer, self._vocab_size, self._needs_of, self._check_open = tokenizer, vocab_size, needs_of, check_open

    def together(self, requests: Iterable[Request], closing: threading.Event | None = None) -> Generator[list[Completion], None, None]:
        """Runs requests to their ends, and gives completions as they come. The lock is free whenever the caller has completions, while all
        that is left waits for automata or slots, and between steps that are shared with calls of other threads. closing: once it is set,
        this ends where it would wait or let others in."""
        ended, failed = list[Request](), list[Exception]()
        with self._call(requests) as call:
            going = True
            while going and not (closing and closing.is_set()):
                with heeded(), self._lock(), self._accounts.timed():  # not while the caller has a completion: the hook is the process's
                    completions, going, waits = self._advance(call, ended, failed)
                if completions:
                    with call.paused():
                        yield completions
                self._let_in(waits)

    def apart(self, requests: Requests, closing: threading.Event) -> Generator[Completion, None, None]:
        """The same with requests that are read as slots come free. What is wrong with an item that was refused is raised at the end."""
        with contextlib.closing(self.together(requests, closing)) as parts:
            for some in parts:
                yield from some
        if requests.refused:
            raise requests.refused.pop()

    def stream(self, request: Request, steps: int, closing: threading.Event) -> Generator[Chunk, None, None]:
        """Gives the text of one request as it comes, what `steps` rounds add at a time. closing: see `together`."""
        known, ending = 0, sys.is_finalizing  # when the interpreter ends, the module's names may be gone
        try:
            with self._call([request]) as call:
                while not closing.is_set():
                    waits: Waits = ()
                    if len(request.output) == known and self._unread(request):
                        time.sleep(YIELDING)
                    with heeded(), self._lock(), self._accounts.timed():
                        while len(request.output) == known and not (request.ended or waits):
                            waits = self._step(call, steps)[1] or call.turn.expected
                        new, piece = look(request, self._tokenizer)
                        completion = self._completion(request, call.turn) if call.turn.end() else None
                    if waits:
                        self._let_in(waits)
                        continue
                    logprobs = request.logprobs[known:] if request.in_loop else None
                    known = len(request.output)
                    if completion is not None:
                        yield Chunk(piece, new, completion.finish_reason, completion, logprobs)
                        return
                    with call.paused():
                        yield Chunk(piece, new, logprobs=logprobs)
        finally:
            if request.output and not ending():
                self._over.append(functools.partial(self._account, request))
                self.settle(waits=False)

    def _let_in(self, waits: Waits) -> None:
        """Waits, with the lock free, and lets another thread have it."""
        wait_for(waits)
        if self._lock.wanted:
            time.sleep(YIELDING)

    def _unread(self, request: Request) -> bool:
        """Whether another request has tokens that its reader has not taken."""
        others = (r for runner in self._shards.runners for r in runner.held.running if r is not request)
        return any(len(r.output) > r.taken for r in others)

    @contextlib.contextmanager
    def _call(self, requests: Iterable[Request]) -> Iterator[_Call]:
        """A call with a turn of requests, which ends with the context."""
        self._check_open()
        known = requests if isinstance(requests, list) else []
        for request in known:
            request.asked = self._accounts.clock()
        turn = self._shards.turn(iter(requests), self._needs_of, {r.profile: r for r in known})
        call, dropped = _Call(turn), False
        try:
            self._calls.add(call)
            yield call
        except GeneratorExit:
            dropped = True
            raise
        finally:
            self._over.append(turn.close)  # first: if an interrupt comes before it is called, the next step calls it
            self._calls.discard(call)
            self.settle(waits=not dropped, turn=turn)

    def _tell(self) -> None:
        """Wakes calls that wait for slots."""
        freed, self._freed = self._freed, concurrent.futures.Future()
        with contextlib.suppress(concurrent.futures.InvalidStateError):  # another thread does so too
            freed.set_result(None)

    def settle(self, *, waits: bool = True, turn: Turn | Turns | None = None) -> None:
        """Frees the slots of turns that are over, and counts their requests. waits: whether it waits for the lock. It may not where a
        generator is closed: the garbage collector does that in any thread, and while that holds any lock, this one too. Nor does it wait
        for shards then, but for those that step for `turn`, which is over. Whoever computes next does what is left."""
        with self._lock() if waits else self._lock.if_free() as entered:
            if entered is not False and (waits or self._shards.may_rest(turn)):
                self._settle()
        if waits:  # else the garbage collector may have stopped this thread within a lock that this takes; who waits looks by itself, too
            self._tell()

    def _settle(self) -> None:
        if self._over:
            self._shards.rest()  # the threads of shards read and change what is freed here
        while self._over:
            self._over[0]()
            self._over.popleft()

    def _account(self, request: Request) -> None:
        if not request.accounted:
            self._accounts.add(request)

    def _step(self, call: _Call, steps: int = STEPS, meanwhile: Callable[[], None] = lambda: None) -> tuple[bool, Waits]:
        """One step of a call's turn. Returns whether something is left to do, and what the next step waits for if all slots are held by
        what other threads are at work on. Raises NoRoom if streams hold them that nobody reads."""
        self._check_open()
        self._settle()
        if self.learning is not None:
            self.learning.between()
        others = [other for other in list(self._calls) if other is not call]
        before = [] if self._lock.nested else [other for other in others if other.lacks < call.lacks]
        try:
            going = call.turn.step(steps, meanwhile, len(before))
        except NoRoom:
            if not self._lock.nested and (before or any(other.elsewhere for other in others)):
                call.lacks = min(call.lacks, time.monotonic())
                return True, [self._freed]
            # Of a stream whose read was cancelled, the thread that read may be all that still has it.
            time.sleep(LEAVING)
            self._settle()
            going = call.turn.step(steps, meanwhile)
        call.lacks = math.inf
        for request in call.turn.active:
            if request.output and not request.first_token_seconds:
                request.first_token_seconds = self._accounts.clock() - request.asked
        return going, []

    def _advance(self, call: _Call, ended: list[Request], failed: list[Exception]) -> tuple[list[Completion], bool, Waits]:
        """Runs a call's turn until there are completions, for one step if it is shared, or until it waits for automata or slots alone.
        Returns completions, whether there may be more, and what to wait for.

        Two lists are carried from one call of this to the next. ended: requests that have ended and whose completions are still to be made;
        that work is done while the device computes prompts for others. failed: an error that is raised once these are returned."""
        turn, completions = call.turn, list[Completion]()

        def complete() -> None:
            while ended:
                request = ended.pop(0)
                if not request.params.stop:
                    look(request, self._tokenizer)
                completions.append(self._completion(request, turn))

        going, waits = True, list[Any]()
        while going and not completions:
            if failed:
                raise failed.pop()
            shared = self._is_shared(turn)
            # What calls of others have brought is taken first.
            if not any(request.ended or (shared and len(request.output) > request.taken) for request in turn.active):
                try:
                    going, waits = self._step(call, TOGETHER if shared else STEPS, complete)
                except Exception as error:
                    if not (ended or completions):
                        raise
                    failed.append(error)
                    complete()
                    break
            for request in turn.active:
                if request.params.stop or (shared and not request.ended):  # what calls of others add is limited by what was looked at
                    look(request, self._tokenizer)
            over = turn.end()
            if over and any(other.lacks < math.inf for other in list(self._calls)):
                self._tell()
            ended += over
            # Another pass over a text makes calls, which it cannot do in the middle of a step.
            if waits or not turn.waiting or any(request.rescored for request in ended):
                complete()
            waits = waits or turn.expected
            if waits or shared:
                break
        return completions, going or bool(completions), waits

    def _is_shared(self, turn: Turn | Turns) -> bool:
        """Whether calls of other threads are to have a part in the next step: since one waits for the lock and could do something, or
        did so a moment ago."""
        runners = self._shards.runners
        if self._lock.wanted and (any(r.free_slots for r in runners) or sum(len(r.held.running) for r in runners) > turn.held):
            self._shared = time.monotonic()
        return time.monotonic() < self._shared + SHARING

    def _completion(self, request: Request, turn: Turn | Turns) -> Completion:
        if self.learning is not None:
            self.learning.add(request)
        logprobs = final_logprobs(request, self._tokenizer, self._vocab_size, turn.score)
        request.inserts = ()  # a call may hold its requests to its end, and these hold what was decoded
        return completion_of(request, self._tokenizer, self._accounts.add(request), *logprobs)
