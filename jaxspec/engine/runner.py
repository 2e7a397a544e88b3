"""Runner: requests in slots, and the calls that work on them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec import decode
from jaxspec.drafters.base import Drafter
from jaxspec.engine.admission import arrays_of, init_state, packed
from jaxspec.engine.automata_pool import Pool
from jaxspec.engine.buckets import Buckets, padded, parts_end, prefill_rows, smallest
from jaxspec.engine.call import Call
from jaxspec.engine.device_clock import Compiling, Times
from jaxspec.engine.drafting import Drafting
from jaxspec.engine.inserts import in_turn
from jaxspec.engine.program_choice import NextRows, ProgramChoice
from jaxspec.engine.program_kinds import Admit, Fork, Program, Score, padding
from jaxspec.engine.programs import Programs
from jaxspec.engine.request import UNWRITTEN, Request
from jaxspec.engine.round_shape import NO_DRAFTS, RoundShape
from jaxspec.engine.settings import Settings, in_kernels
from jaxspec.engine.slots import Slots
from jaxspec.engine.stats import accepted_by_call
from jaxspec.engine.structures import Structures
from jaxspec.engine.trials import Tally
from jaxspec.model.target import TargetModel
from jaxspec.sampling.choice import PLAIN, Needs
from jaxspec.sampling.logprobs import Logprobs
from jaxspec.sharding.placement import Placement
from jaxspec.trees import bytes_per_device, nbytes


class Runner:
    """Puts requests into slots, computes their prompts and decodes them. One call at a time: the caller holds a lock.

    target, drafter: the weights of one data shard, as its placement spreads them. settings: those of one data shard, see
    `Settings.of_shard`. structures: makes the automata of structured texts. clock: in seconds, what `times` go by. compiling: see `Times`.

    Idle slots beside those that run hold snapshots of prompts. These share pages, which they give up when running sequences need them.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        settings: Settings,
        placement: Placement,
        *,
        structures: Structures,
        clock: Callable[[], float] = time.perf_counter,
        compiling: Compiling | None = None,
    ):
        self.settings = settings
        self.times = Times(clock, compiling)  # where the device's time went
        self.preemptions = 0  # sequences that made room for others and were computed again
        self._orders = itertools.count()
        states = (functools.partial(init_state, target, drafter, slots=n, **settings.state_sizes) for n in (1, 2))
        one, two = (bytes_per_device(placement.layout(drafter, state).shapes) for state in states)
        # Slots of the state: those that run and those for snapshots.
        self.total_slots = settings.max_slots + min(settings.prefix_bytes // (two - one), settings.max_slots)
        self.held = Slots(self.total_slots)  # what each slot holds
        self._free: Any = settings.kv_pages  # free pages: a number, or the result of a call that is under way
        self._numbers, self._told = itertools.count(1), 0  # of calls that tell of free pages, and which one `_free` is from
        self.programs = Programs(target, drafter, settings, slots=self.total_slots, placement=placement, times=self.times)
        most = prefill_rows(target, in_kernels(settings.attention))
        end = parts_end(target, drafter, self.programs.state)
        self.buckets = Buckets(settings.max_slots, settings.max_len, most, end)
        self.drafting = Drafting(drafter, self.programs, self.held)
        # Rounds without drafts would never end a trial.
        self.choice = ProgramChoice(self.programs, self.buckets, must_draft=lambda: self.drafting.trial is not None)
        self.pool = Pool(self.programs, structures, lambda: self.held.running)
        self.weight_bytes, self.state_bytes = nbytes((target, drafter)), nbytes(self.programs.state)  # on all devices of the shard

    @property
    def target(self) -> Any:
        """The target's weights; None once this is closed."""
        return self.programs.target

    def use_target(self, target: TargetModel | None) -> None:
        """Computes with these weights from now on. They are like those before in shapes and shardings. What those have computed serves no
        prompt any more; sequences that are under way go on over it. None gives the weights up, until there are others."""
        self.programs.target = target
        self.forget()
        self.drafting.begin_anew()

    @property
    def free_slots(self) -> int:
        return self.settings.max_slots - len(self.held.running)

    def queues(self, needs: Needs) -> bool:
        """Whether rounds may be queued behind others before those are read. While a trial is open each call's drafter follows from what the
        calls before have shown."""
        return self.programs.loops_return and self.drafting.trial is None and self.settings.steps_for(needs, 1, unread=2) > 0

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes that were in use on this process's first device, or None where it does not say (a CPU)."""
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    @property
    def free_pages(self) -> int:
        """Full-attention pages that no slot holds. Waits for the call that is under way, if only that knows."""
        if not isinstance(self._free, int):
            self._free = int(self.programs.fetch(self._free))
        return self._free

    def warmup(self, programs: Collection[Program], *, structured: bool) -> Iterator[str]:
        """Compiles programs, and gives a line about each that is ready. structured: whether some are of structured texts."""
        self.ready()
        if structured:
            self.pool.begin()
        return self.programs.compile(programs)

    def admit(self, requests: Sequence[Request]) -> None:
        """Puts requests into slots, together with the rows of their tokens that are kept. `prefill` computes the rest. There must be slots
        for all of them."""
        self.ready()
        size, left = max(self.buckets.admit), collections.deque(requests)
        while left:
            group, ended, forks = list[Request](), self.held.ended, list[tuple[int, int, int]]()
            while left and len(group) < size:
                source, rows = self.held.find(left[0].key)
                slot = self.held.idle([source, *(other for other, _, _ in forks)])
                if slot < 0 and not rows and forks:
                    break  # the only idle slots are those that this call copies from; the next call can have them
                request = left.popleft()
                group.append(request)
                kept = self.held.serve(source, request) if rows else None
                request.writer = UNWRITTEN if kept is None else kept.writer
                if kept is not None and (kept.over or slot < 0):
                    slot = source
                elif slot in self.held.kept:
                    ended.append(slot)
                if slot != source and rows:
                    forks.append((source, slot, rows))
                if request.order < 0:
                    request.order, request.shared = next(self._orders), rows
                self.held.put(slot, request)
                if request.structure is not None:
                    request.automaton = self.pool.states_of(request.structure, request.prompt, request.output)
                request.computed, request.status = rows, decode.RUNNING
            self._release(ended, group)
            self._fork(forks)

    def snapshot(self, request: Request) -> None:
        """Copies the rows that a request has computed into an idle slot, for other prompts. Does nothing if there is no slot or page."""
        slot = self.held.idle()
        if slot < 0 or not self.free_pages:
            return
        if slot in self.held.kept or slot in self.held.ended:
            self.held.end([slot])
            self.flush()
        self.held.end([slot])  # first: if an interrupt comes before it is kept, its pages are released
        self._fork([(request.slot, slot, request.computed)])
        self.held.keep(slot, request.key[: request.computed + 1], request, request.writer)

    def evict(self, needed: bool = True, but: int = -1) -> bool:
        """Gives up the kept sequence that served longest ago; False if there is none. needed: whether it may be one that shares its pages
        with running sequences. but: a slot whose sequence stays."""
        kept = self.held.kept.items()
        oldest = next((slot for slot, held in kept if slot != but and (needed or not held.needed)), -1)
        if oldest >= 0:
            self.held.end([oldest])
            self.flush()
        return oldest >= 0

    def preempt(self, request: Request) -> None:
        """Takes a running request's slot and pages. Once it is admitted again, it resumes where it was."""
        self.preemptions += 1
        self.held.take_from([request])
        self.flush()

    def flush(self) -> None:
        """Releases the pages of sequences that have ended."""
        self.ready()
        if self.held.ended:
            self._release(self.held.ended, [])

    def prefill(self, requests: Sequence[Request], needs: Needs, behind: Call | None = None) -> Call:
        """Starts one call that computes rows of some of the requests; the first ones come first. behind: a call before it that computes
        such rows and has not been read."""
        program, some = self.choice.prompts(requests, needs, behind, work=1)
        self.drafting.written([each.request for each in some])
        # The first part of each request comes first: the report is read there.
        parts = [(each, 0) for each in some]
        parts += [(each, at) for each in some for at in range(program.chunk, each.rows, program.chunk)]
        values = [(each.goal, each.request.length, at, each.computed, *each.places) for each, at in parts]
        columns = self._columns([each.request for each, _ in parts], program.size, *zip(*values, strict=True))
        report = self.programs.run(program, columns, *self._inserted(some, program.size))
        reached = [each for each in some if each.computed + each.rows == each.goal]
        return Call(
            requests=[each.request for each in some],
            size=program.size,
            shape=NO_DRAFTS,
            report=report,
            known=[each.request.length for each in some],
            rows=[each.rows for each in some],
            finished=[each.request for each in reached if each.goal == each.request.goal],
            reaches=any(each.goal in (*each.request.goals, each.request.goal) for each in reached),
            number=next(self._numbers),
        )

    def _inserted(self, some: Sequence[NextRows], size: int) -> list[Any]:
        """The rows of the inserts of each, [room, H], where the programs run, and any for the others of `size` parts; none without
        inserts."""
        found, here = [in_turn(each.inserts) for each in some if each.inserts], set(self.programs.devices)
        found = [rows if isinstance(rows, jax.Array) and rows.devices() == here else np.asarray(rows) for rows in found]
        return found + found[:1] * (size - len(found))

    def decode(
        self,
        requests: Sequence[Request],
        steps: int,
        until_ended: int = 0,
        needs: Needs = PLAIN,
        shape: RoundShape | None = None,
        unread: int = 1,
    ) -> Call:
        """Starts up to `steps` rounds of the requests, fewer if `until_ended` of them end before, unless that is 0. shape: as for
        `ProgramChoice.rounds`. unread: decode calls that may be under way at a time with results that the host has not read, this one among
        them."""
        program = self.choice.rounds(len(requests), needs, shape, work=steps)
        size, chosen, trial = program.size, program.shape, self.drafting.trial
        variant = None if trial is None or shape is not None or not chosen.num_draft_tokens else trial.name
        self.drafting.written(requests)
        unread = max([unread, *(1 + len(r.under_way) for r in requests)])
        steps, known = self.settings.steps_for(needs, steps, unread), [r.length for r in requests]
        columns = self._columns(requests, size, known, [steps] * size, [until_ended] * size)
        report = self.programs.run(program, columns)
        number = next(self._numbers)
        for request in requests:
            request.under_way.add(number)
        return Call(requests, size, chosen, report, known, number=number, variant=variant, until_ended=until_ended)

    def companions(self, requests: Sequence[Request], needs: Needs, steps: int, fits: Callable[[Request], bool]) -> list[Request]:
        """Sequences of other turns that `steps` rounds of these could include, since a round takes about as long for several: their readers
        are not further behind than by such a call, and the program need not be compiled, or that is worth it. fits: whether a call with
        these needs serves a request."""
        most = steps * (self.settings.most_accepted + 1)
        found = [
            r for r in self.held.running if r.ready and not r.ended and r not in requests and len(r.output) - r.taken < most and fits(r)
        ]
        return found if found and self.choice.worth_running(len(requests) + len(found), needs, steps) else []

    def read(self, calls: Sequence[Call]) -> bool:
        """Waits for calls and tells their requests what they report. Returns whether a call lacked pages and left its requests as they
        were."""
        if not calls:
            return False
        reports = self.programs.fetch([call.report for call in calls])
        wanted = self.choice.adaptive is not None or self.drafting.watching or self.drafting.trial is not None
        for call, report in zip(calls, reports, strict=True):
            if call.number > self._told:  # rounds that were queued behind others may be read before them
                self._free, self._told = int(report.free_pages), call.number
            flags, verified, rounds, drafts = list[bool](), list[int](), 0, 0
            for row, request in enumerate(call.requests):
                if request is None:
                    continue
                # This tells of what came before, too: an interrupt may have cost another turn the report of its call.
                request.under_way -= {number for number in request.under_way if number <= call.number}
                known, before = len(request.output), len(request.verified)
                request.advance(report, row, call.known[row], call.shape)
                if wanted and 0 < known < len(request.output):
                    some = request.from_draft[known:]
                    if request.ended:  # the last round was cut short, and says nothing
                        accepted = accepted_by_call(np.asarray(some))[:-1]
                        some = some[: len(accepted) + int(accepted.sum())]
                    kept = sum(some)
                    flags += some
                    verified += request.verified[before : before + len(some) - kept]
                    if request.writer is self.held.writer:
                        rounds, drafts = rounds + len(some) - kept, drafts + kept
            if flags:
                accepted = accepted_by_call(np.asarray(flags))
                self.choice.see(accepted, np.asarray(verified), call)
                self.drafting.see(accepted, Tally(rounds, drafts), call)
        self.drafting.settle()
        return any(report.starved for report in reports)

    def score(self, request: Request, count: int, make_room: Callable[[Request], None]) -> Logprobs:
        """The log-probabilities of a whole text, by another pass over it in a free slot: entry i is of token i + 1, with the `count` most
        likely tokens. make_room: called where pages are lacking."""
        size, chunk = self.buckets.prefill[0]
        reader = dataclasses.replace(request, prompt=request.tokens, output=[], goals=[], computed=0, keep=0)
        slot = self.held.idle()
        ended = [*self.held.ended, *([slot] if slot in self.held.kept else [])]
        try:
            self.held.put(slot, reader)
            self._release(ended, [reader])
            found = list[Logprobs]()
            while len(found) < math.ceil(reader.length / chunk):
                call = self.programs.run(Score(size, chunk, count), self._ids([reader], size))
                some, starved = self.programs.fetch(call)
                if starved:
                    make_room(reader)
                else:
                    found.append(jax.tree.map(lambda x: x[0], some))
        finally:
            self.end([reader])
        return jax.tree.map(lambda *x: np.concatenate(x)[: reader.length - 1], *found)

    def end(self, requests: Collection[Request]) -> None:
        """Gives the requests' slots back. It touches nothing on the device, so it may be called at any time, also twice."""
        for request in requests:
            complete = request.status in (decode.STOPPED, decode.FULL_LENGTH) and request.text.found is None
            if request.keep == len(request.prompt) and complete and request.slot >= 0 and request.computed == request.length - 1:
                self.held.keep(request.slot, request.key, writer=request.writer)
        self.held.take_from(requests)

    def forget(self) -> None:
        """Gives up what is kept for prompts to come."""
        self.held.end(list(self.held.kept))

    def sleep(self) -> None:
        """Gives the state's memory back until the next call. There must be no running requests."""
        self.programs.wait()
        self.held.clear()
        self.pool.clear()
        self.programs.give_back()

    def close(self) -> None:
        """Gives up the weights, the state and all programs. What was counted stays."""
        self.held.clear()
        self.pool.clear()
        self._free = 0
        self.drafting.close()
        self.programs.close()

    def ready(self) -> None:
        """Makes a new state if a call that failed has taken the old one along, or the automata that its slots name. All requests then lose
        their slots."""
        if self.pool.lost:
            self.programs.state = None
            self.pool.clear()
        if self.programs.state is None:
            self.held.clear()
            self._free, self._told = self.settings.kv_pages, next(self._numbers)
            self.programs.begin()

    def _ids(self, requests: Sequence[Request], size: int) -> np.ndarray:
        return padded([request.slot for request in requests], size, self.total_slots)

    def _columns(self, requests: Sequence[Request], size: int, *values: Sequence[int]) -> np.ndarray:
        """Slot ids and further numbers of requests as one array [size, 1 + values], since handing over each array has its cost."""
        return np.stack([self._ids(requests, size), *(padded(of, size) for of in values)], axis=1)

    def _release(self, ended: Sequence[int], requests: Sequence[Request]) -> None:
        """Releases slots, then puts requests into theirs."""
        size = smallest(self.buckets.admit, len(requests))
        arrays = arrays_of(requests, size, self.settings.max_len)
        taken = padded(ended, self.total_slots, self.total_slots), self._ids(requests, size), arrays
        free = self.programs.run(Admit(size), packed(taken))
        self.held.released(ended)
        self._free, self._told = free, next(self._numbers)

    def _fork(self, forks: Sequence[tuple[int, int, int]]) -> None:
        """Copies kept sequences: (the slot that holds it, the slot that gets it, its rows) for each."""
        most = max(self.buckets.fork)
        for first in range(0, len(forks), most):
            some = forks[first : first + most]
            columns = padding(self.total_slots, smallest(self.buckets.fork, len(some)), 3)
            columns[: len(some)] = some
            self._free = self.programs.run(Fork(len(columns)), columns)
            self._told = next(self._numbers)
