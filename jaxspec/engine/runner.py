"""Runner: requests in slots, and the calls that work on them."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jaxspec import decode
from jaxspec.decode.accept import COUPLED
from jaxspec.drafters.base import Drafter
from jaxspec.engine.admission import arrays_of, init_state, packed
from jaxspec.engine.automata_pool import Pool
from jaxspec.engine.buckets import TREE_SEQUENCES, Buckets, padded, parts_end, prefill_rows, smallest
from jaxspec.engine.device_clock import Compiling, Times
from jaxspec.engine.pictures import Picture
from jaxspec.engine.program_kinds import Admit, DecodeRounds, FillMasks, Fork, PlaceStates, Prefill, Program, Score, padding
from jaxspec.engine.programs import Programs
from jaxspec.engine.request import UNWRITTEN, Request
from jaxspec.engine.round_shape import NO_DRAFTS, Adaptive, RoundShape, round_shapes
from jaxspec.engine.settings import Settings, in_kernels
from jaxspec.engine.slots import Slots
from jaxspec.engine.stats import accepted_by_call
from jaxspec.engine.structures import Structures
from jaxspec.engine.trials import Tally, Trial
from jaxspec.model.paged_kv import PagedKV
from jaxspec.model.target import TargetModel
from jaxspec.sampling.choice import PLAIN, Needs
from jaxspec.sampling.logprobs import Logprobs
from jaxspec.sharding.placement import Placement
from jaxspec.trees import bytes_per_device, nbytes

AnyProgram = TypeVar("AnyProgram", bound=Program)
# Rounds, or calls that compute prompts, that a larger program runs in place of one that is not compiled, or that programs of fewer
# sequences run in place of one for all. To compile a loop takes as long as some hundreds of its rounds, or thousands for a small model. It
# is no time, so that the same calls always take the same programs.
STANDS_IN = 256


class Call(NamedTuple):
    """A call that is under way."""

    requests: Sequence[Request | None]  # those it works on; None for one that is not to be told of it
    size: int  # its bucket
    shape: RoundShape  # of its rounds; no drafts where it computes prompts
    report: decode.Report  # what it returns
    known: Sequence[int] = ()  # of how many tokens of each request the host knew when the call was made: the report tells of those after
    rows: Sequence[int] = ()  # of each request's prompt that it computes, unless pages are lacking
    finished: Sequence[Request | None] = ()  # those whose prompts it computes to their ends then
    reaches: bool = True  # whether the host has something to do for one of these prompts then, so that the next call for prompts must wait
    number: int = 0  # its place in the order in which the device runs calls that tell how many pages are free
    variant: str | None = None  # the drafter's variant that guessed, if its rounds count in a trial
    until_ended: int = 0  # its rounds return once so many more have ended, unless this is 0

    def without(self, gone: Collection[Request]) -> Call | None:
        """The call, of which these requests are not told; None if that leaves nobody."""
        told, finished = ([None if r in gone else r for r in some] for some in (self.requests, self.finished))
        return self._replace(requests=told, finished=finished) if any(told) else None


class NextRows(NamedTuple):
    """What a call for prompts computes of one of them."""

    request: Request
    computed: int  # rows that are computed before
    goal: int  # up to which it is to be computed before the host has something to do, or an image begins
    rows: int  # that the call computes
    image: Picture | None = None  # among them


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
        self.target: Any = target  # this and the next: None once it is closed
        self.drafter: Any = drafter
        self.adaptive: Adaptive | None = None  # chooses the shape of rounds; None where all guess num_draft_tokens and verify them
        self.trial: Trial | None = None  # of two variants of the drafter, as long as it is open; see `begin_trial`
        self.watching = False  # whether `watched` counts
        self.watched = np.zeros(2)  # rounds with drafts, and accepted drafts, of calls with the drafter in use
        self.times = Times(clock, compiling)  # where the device's time went
        self._stood_in = collections.Counter[Program]()  # the work that other programs have done in place of these
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
        self.buckets = Buckets(settings.max_slots, settings.max_len, most, end, settings.image_rows)
        self.pool = Pool(self.programs, structures, lambda: self.held.running)
        parts = jax.tree.leaves(self.programs.state.drafter, is_leaf=lambda part: isinstance(part, PagedKV))
        # Whether the drafter keeps K and V of its own, which its weights have computed.
        self.drafter_owns_kv = any(isinstance(part, PagedKV) for part in parts)
        self._writer = self.held.writer = self._new_writer()  # of the drafter in use, see `Request.writer`
        self.weight_bytes, self.state_bytes = nbytes((target, drafter)), nbytes(self.programs.state)  # on all devices of the shard

    @property
    def free_slots(self) -> int:
        return self.settings.max_slots - len(self.held.running)

    def queues(self, needs: Needs) -> bool:
        """Whether rounds may be queued behind others before those are read. While a trial is open each call's drafter follows from what the
        calls before have shown."""
        return self.programs.loops_return and self.trial is None and self.settings.steps_for(needs, 1, unread=2) > 0

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

    def programs_for(self, needs: Needs, scores: Collection[int] = (), adaptive: bool = False) -> list[Program]:
        """All programs that requests with these needs use. scores: numbers of likely tokens, of texts that are scored. adaptive: whether
        calls choose the shape of rounds."""
        most = self.settings.num_draft_tokens
        shapes = {size: round_shapes(size, most) if adaptive else (RoundShape(most),) for size in self.chain_sizes}
        tree = self._tree
        return [
            *(DecodeRounds(size, needs, *tree) for size in self.buckets.trees if tree is not None),
            *(DecodeRounds(size, needs, *shape) for size, some in shapes.items() for shape in some),
            *(Prefill(size, chunk, needs) for size, chunk in self.buckets.prefill),
            *(Prefill(*bucket, needs, self.settings.image_rows) for bucket in self.buckets.images),
            *(Admit(size) for size in self.buckets.admit),
            *(Fork(size) for size in self.buckets.fork),
            *((PlaceStates(), FillMasks()) if needs.structured else ()),
            *(Score(*self.buckets.prefill[0], count) for count in scores),
        ]

    @property
    def chain_sizes(self) -> list[int]:
        """The sizes of decode calls whose rounds guess chains: all, without trees."""
        return [size for size in self.buckets.decode if size > TREE_SEQUENCES or self._tree is None]

    @property
    def _tree(self) -> RoundShape | None:
        """The shape of rounds of few sequences, if it is a tree."""
        tree = self.settings.tree
        return None if tree is None else RoundShape(tree.depth, tree=tree)

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
        program, some = self._next_rows(requests, needs, behind, work=1)
        self._written([each.request for each in some])
        # The first part of each request comes first: the report is read there.
        parts = [(each, 0) for each in some]
        parts += [(each, at) for each in some for at in range(program.chunk, each.rows, program.chunk)]
        values = [
            (each.goal, each.request.length, at, each.computed, *((0, 0) if (image := each.image) is None else (image.begin, image.count)))
            for each, at in parts
        ]
        columns = self._columns([each.request for each, _ in parts], program.size, *zip(*values, strict=True))
        report = self.programs.run(program, columns, *self._images(some, program))
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

    def _images(self, some: Sequence[NextRows], program: Prefill) -> list[Any]:
        """The rows of the image of each, [image_rows, H], where the programs run, and any for the other parts; none without images."""
        found, here = [each.image.rows() for each in some if each.image is not None], set(self.programs.devices)
        found = [rows if isinstance(rows, jax.Array) and rows.devices() == here else np.asarray(rows) for rows in found]
        return found + found[:1] * (program.size - len(found))

    def used(self, requests: Sequence[Request], needs: Needs, behind: Call | None = None) -> float:
        """The share of the next prefill call's rows that belong to prompts of these requests, 0 .. 1. behind: as for `prefill`."""
        program, some = self._next_rows(requests, needs, behind)
        return sum(each.rows for each in some) / (program.size * program.chunk)

    def _next_rows(
        self, requests: Sequence[Request], needs: Needs, behind: Call | None = None, work: int = 0
    ) -> tuple[Prefill, list[NextRows]]:
        """The program of the next call for prompts, and what it computes. behind: as for `prefill`. work: see `_at_hand`.

        Prompts whose next rows have an image among them have calls of their own, before the others."""
        coming = {} if behind is None else dict(zip(behind.requests, behind.rows, strict=True))
        computed = [r.computed + coming.get(r, 0) for r in requests]
        if self.buckets.images and (some := self._next_images(requests, computed)):
            bucket = next((size, chunk) for size, chunk in self.buckets.images if size >= len(some))
            return Prefill(*bucket, needs, self.settings.image_rows), some
        goals = [r.next_stop(rows + 1) for r, rows in zip(requests, computed, strict=True)]
        left = [goal - rows for goal, rows in zip(goals, computed, strict=True)]
        best, *others = self.buckets.prefill_by_worth(left, computed)
        least = sum(self.buckets.shared_out(left, computed, *best))
        larger = [bucket for bucket in others if sum(self.buckets.shared_out(left, computed, *bucket)) >= least]
        program = self._at_hand(Prefill(*best, needs), (Prefill(*bucket, needs) for bucket in larger), work)
        rows = self.buckets.shared_out(left, computed, program.size, program.chunk)
        return program, [NextRows(*each) for each in zip(requests, computed, goals, rows, strict=False)]

    def _next_images(self, requests: Sequence[Request], computed: Sequence[int]) -> list[NextRows]:
        """What a call with images computes, if these have an image among their next rows."""
        most, chunk = self.buckets.images[-1]
        found = list[NextRows]()
        for request, rows in zip(requests, computed, strict=True):
            image = request.picture_within(rows, chunk)
            if image is not None:
                goal = request.next_stop(image.end, image)
                found.append(NextRows(request, rows, goal, min(goal - rows, chunk), image))
        return found[:most]

    def _rounds(self, sequences: int, needs: Needs, shape: RoundShape | None = None, work: int = 0) -> DecodeRounds:
        """What runs rounds of so many sequences. shape: as for `decode`. work: see `_at_hand`."""
        sizes, tree = self.buckets.decode, self._tree
        if shape is None and tree is not None and sequences <= TREE_SEQUENCES:
            sizes, shape = self.buckets.trees, tree
        size = smallest(sizes, sequences)
        if shape is None:
            shape = self._shape(size, sequences, needs)
        larger = (DecodeRounds(other, needs, *shape) for other in sizes if other > size)
        return self._at_hand(DecodeRounds(size, needs, *shape), larger, work)

    def _at_hand(self, wanted: AnyProgram, larger: Iterable[AnyProgram], work: int) -> AnyProgram:
        """The program that is wanted, or a larger one that is ready in its place, until it has done so much work there that compiling would
        have been worth it. work: how much it does now, in rounds, or in calls that compute prompts."""
        if self._stood_in[wanted] < STANDS_IN and not self.programs.at_hand(wanted):
            for program in filter(self.programs.at_hand, larger):
                self._stood_in[wanted] += work
                return program
        return wanted

    def prepare(self, requests: Sequence[Request], sequences: int, needs: Needs) -> None:
        """Compiles what the next `prefill` of the requests takes and the rounds of so many sequences after it, both at a time."""
        programs: list[Program] = [self._next_rows(requests, needs)[0]]
        if sequences:
            programs.insert(0, self._rounds(sequences, needs))  # which takes longer
        self.programs.make_ready(programs)

    def decode(
        self,
        requests: Sequence[Request],
        steps: int,
        until_ended: int = 0,
        needs: Needs = PLAIN,
        shape: RoundShape | None = None,
        unread: int = 1,
    ) -> Call:
        """Starts up to `steps` rounds of the requests, fewer if `until_ended` of them end before, unless that is 0. shape: of each round,
        with at most the settings' number of drafts; by default a tree where the settings have one and there are few requests, else what
        `adaptive` chooses among the compiled shapes, or the settings' number without it. unread: decode calls that may be under way at a
        time with results that the host has not read, this one among them."""
        program = self._rounds(len(requests), needs, shape, work=steps)
        size, chosen = program.size, program.shape
        variant = None if self.trial is None or shape is not None or not chosen.num_draft_tokens else self.trial.name
        self._written(requests)
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
        if found and not self.programs.at_hand(program := self._rounds(len(requests) + len(found), needs)):
            self._stood_in[program] += steps
            return found if self._stood_in[program] >= STANDS_IN else []
        return found

    def use(self, drafter: Drafter) -> None:
        """Runs with these weights from now on, and ends a trial. They are like those before in shapes and shardings. What other weights
        have computed serves no prompt any more."""
        self._use(drafter, self._writer if drafter is self.drafter else self._new_writer())

    def _use(self, drafter: Drafter, writer: object) -> None:
        self.drafter = self.programs.drafter = drafter
        self._writer = self.held.writer = writer
        self.trial = None

    def _new_writer(self) -> object:
        return object() if self.drafter_owns_kv else None

    def _shape(self, size: int, sequences: int, needs: Needs) -> RoundShape:
        if self.adaptive is None or size not in self.adaptive.sizes:
            return RoundShape(self.settings.num_draft_tokens)
        compiled = [shape for shape in self.adaptive.shapes(size) if DecodeRounds(size, needs, *shape) in self.programs.compiled]
        if self.trial is not None:  # rounds without drafts would never end it
            compiled = [shape for shape in compiled if shape.num_draft_tokens] or compiled
        return self.adaptive.choose(size, sequences, compiled)

    def read(self, calls: Sequence[Call]) -> bool:
        """Waits for calls and tells their requests what they report. Returns whether a call lacked pages and left its requests as they
        were."""
        if not calls:
            return False
        reports = self.programs.fetch([call.report for call in calls])
        wanted = self.adaptive is not None or self.watching or self.trial is not None
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
                self._see(accepted_by_call(np.asarray(flags)), np.asarray(verified), Tally(rounds, drafts), call)
        self.settle()
        return any(report.starved for report in reports)

    def _see(self, accepted: np.ndarray, verified: np.ndarray, tally: Tally, call: Call) -> None:
        """Tells those who want to know what the rounds of a call verified and accepted. tally: of those rounds that count in a trial."""
        if self.adaptive is not None and call.shape.tree is None:  # what a tree accepts says nothing of a chain
            self.adaptive.see(accepted, verified, call.size, call.shape, len(call.requests))
        in_use = call.variant is None
        if call.variant is not None and self.trial is not None:
            in_use = self.trial.variants[call.variant] is self.drafter
            self.trial.see(call.variant, tally)
        if call.shape.num_draft_tokens and self.watching and in_use:
            self.watched = self.watched + (len(accepted), accepted.sum())

    def begin_trial(self, trial: Trial) -> None:
        """Lets variants of the drafter, which is one of them, take turns call by call, until there is a verdict: see `use`.

        They must have its shapes, static fields and placement. Raises ValueError for an acceptance rule with which the text depends on the
        drafter, and while another trial is open."""
        rule = self.settings.accept.name
        if rule != COUPLED.name:
            raise ValueError(
                f"the acceptance rule is {rule!r}; only with {COUPLED.name!r} can drafters be tried, since texts do not change"
            )
        if self.trial is not None:
            raise ValueError(f"a trial of {' and '.join(self.trial.comparison.names)} is open; expected none")
        for name, weights in trial.variants.items():
            if weights is self.drafter:  # what it has computed before serves its calls
                trial.writers[name] = self._writer
        self.trial = trial
        self.settle()

    def settle(self) -> None:
        """Takes the variant of the next call; after the verdict of a trial that is the drafter, from now on."""
        if self.trial is None:
            return
        weights, writer = self.trial.weights, self.trial.writer if self.trial.apart else self._writer
        if self.trial.verdict is None:
            self.programs.drafter, self.held.writer = weights, writer
        else:
            self._use(weights, writer)

    def _written(self, requests: Sequence[Request]) -> None:
        """Notes that the next call computes rows of these requests."""
        for request in requests:
            if request.writer is UNWRITTEN:
                request.writer = self.held.writer
            elif request.writer is not self.held.writer:
                request.writer = None

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

    def close(self) -> None:
        """Gives up the weights, the state and all programs. What was counted stays."""
        self.held.clear()
        self.pool.clear()
        self._free = 0
        self.target = self.drafter = self.trial = None
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
