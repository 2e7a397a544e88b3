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
from jaxspec.decode.accept import COUPLED, Rule
from jaxspec.drafters.base import Drafter
from jaxspec.engine.admission import packed
from jaxspec.engine.buckets import padded
from jaxspec.engine.device_clock import Times
from jaxspec.engine.draft_count import Adaptive
from jaxspec.engine.intake import MAX_STOP_IDS
from jaxspec.engine.programs import Key, Programs
from jaxspec.engine.request import Request
from jaxspec.engine.slots import Slots
from jaxspec.engine.stats import accepted_by_call, histogram_of
from jaxspec.model.target import TargetModel
from jaxspec.sampling.choice import PLAIN, Needs
from jaxspec.sampling.logprobs import Logprobs
from jaxspec.trees import nbytes

BUCKET_RATIO = 8
PREFILL_ROWS = 512  # rows of the largest prefill call; enough that reading the weights is not what it waits for
PREFILL_CHUNK = 64  # rows for each sequence where several, or short ones, are prefilled
CALL_ROWS = 256  # what a prefill call costs beside its rows, in rows: reading the weights
PAGE = 64  # positions in a page
PREFIX_BYTES = 2**30  # snapshots of prompts, on each device

# A call that is under way: the requests it works on, None for one that it is not to tell; how many tokens its rounds guess; what it
# will report.
Call = tuple[Sequence[Request | None], int, decode.Report]


class Runner:
    """Puts requests into slots, computes their prompts and decodes them. One call at a time: the caller holds a lock.

    target, drafter: weights. slots: sequences that run at a time. accept: the acceptance rule. attention, draft_attention:
    implementations for the target's and the drafter's attention. kv_dtype: of the target's cache, None for that of its weights.
    kv_pages: full-attention pages that all sequences share, None for as many as they can fill. prefix_bytes: what snapshots of prompts
    may take, in idle slots beside those that run; they hold shared pages until sequences need these. mesh: the devices of one data shard,
    over which the weights lie as `sharding.spread` gives them, or None for one device. clock: what `times` go by. progress: as in
    `Programs`.

    adaptive: chooses how many tokens rounds guess, None where all guess num_draft_tokens. times: where the device's time went.
    preemptions: sequences that made room and were computed again.
    Raises ValueError for fewer pages than one sequence can need.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        *,
        slots: int,
        max_len: int,
        num_draft_tokens: int,
        accept: Rule = COUPLED,
        attention: str = "auto",
        draft_attention: str = "auto",
        kv_dtype: Any = None,
        kv_pages: int | None = None,
        page_size: int = PAGE,
        prefix_bytes: int = PREFIX_BYTES,
        mesh: jax.sharding.Mesh | None = None,
        clock: Callable[[], float] = time.perf_counter,
        progress: bool = False,
    ):
        self.target, self.drafter = target, drafter
        self.slots, self.max_len, self.num_draft_tokens, self.page_size = slots, max_len, num_draft_tokens, page_size
        self.preemptions, self.times = 0, Times(clock)
        self.adaptive: Adaptive | None = None
        accept.check(num_draft_tokens)
        self.kv_pages = slots * self.pages_for(max_len) if kv_pages is None else kv_pages
        check_pages(self.kv_pages, max_len, page_size)
        self._orders = itertools.count()
        init = functools.partial(
            self.init_state,
            target,
            drafter,
            max_len=max_len,
            num_draft_tokens=num_draft_tokens,
            kv_dtype=kv_dtype,
            page_size=page_size,
            full_pages=self.kv_pages,
        )
        one, two = (nbytes(jax.eval_shape(functools.partial(init, slots=n))) for n in (1, 2))
        self.total_slots = slots + min(prefix_bytes // (two - one), slots)
        self.held = Slots(self.total_slots)
        self._free: Any = self.kv_pages  # an int, or what a call has yet to give
        self.programs = Programs(
            target,
            drafter,
            functools.partial(init, slots=self.total_slots),
            slots=self.total_slots,
            max_len=max_len,
            num_draft_tokens=num_draft_tokens,
            accept=accept,
            attention=attention,
            draft_attention=draft_attention,
            mesh=mesh,
            times=self.times,
            limits={"max_slots": slots, "max_len": max_len, "kv_pages": self.kv_pages},
            progress=progress,
        )
        self.weight_bytes, self.state_bytes = nbytes((target, drafter)), nbytes(self.programs.state)

    @staticmethod
    def init_state(target: TargetModel, drafter: Drafter, **sizes: Any) -> decode.DecodeState:
        """A state as `decode.init_state` makes it, with room for the stop ids of a request."""
        return decode.init_state(target, drafter, max_stop_ids=MAX_STOP_IDS, **sizes)

    @property
    def decode_buckets(self) -> list[int]:
        """1, 8, 64, ... and the number of slots."""
        sizes = [1]
        while sizes[-1] < self.slots:
            sizes.append(min(sizes[-1] * BUCKET_RATIO, self.slots))
        return sizes

    @property
    def prefill_buckets(self) -> list[tuple[int, int]]:
        """(sequences, rows for each of them)."""
        short, long = min(PREFILL_CHUNK, self.max_len), min(PREFILL_ROWS, self.max_len)
        # Two that share a call's rows finish what is left of prompts that the long chunk has been through, with little to spare.
        halves = {(2, long // 2)} if self.slots > 1 and long == PREFILL_ROWS > 2 * short else set()
        return sorted({(1, short), (1, long), *halves, (min(self.slots, PREFILL_ROWS // PREFILL_CHUNK), short)})

    @property
    def admit_buckets(self) -> list[int]:
        return sorted({1, min(self.slots, BUCKET_RATIO)})

    @property
    def free_slots(self) -> int:
        return self.slots - len(self.held.running)

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that was in use on the first device of this process, or None where it does not say (a CPU)."""
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    @property
    def free_pages(self) -> int:
        """Full-attention pages that nothing holds."""
        if not isinstance(self._free, int):
            self._free = int(self.programs.fetch(self._free))
        return self._free

    def pages_for(self, rows: int) -> int:
        """Full-attention pages of a sequence with so many rows, the drafts of its next round among them."""
        return math.ceil(min(rows, self.max_len) / self.page_size)

    def programs_for(self, needs: Needs, choices: Sequence[int] = ()) -> list[Key]:
        """Keys of all programs that requests with these needs use. choices: numbers of drafts beside the runner's own."""
        counts = sorted({self.num_draft_tokens, *choices})
        return [
            *(("decode", size, needs, count) for size in self.decode_buckets for count in counts),
            *(("prefill", size, chunk, needs) for size, chunk in self.prefill_buckets),
            *(("admit", size) for size in self.admit_buckets),
            ("fork",),
        ]

    def warmup(self, needs: Needs, choices: Sequence[int] = ()) -> Iterator[str]:
        """Compiles every program that requests with these needs use, and gives a line about each that is ready."""
        self.ready()
        return self.programs.compile(self.programs_for(needs, choices))

    def admit(self, requests: Sequence[Request]) -> None:
        """Puts requests into slots, which there must be, with what others have computed of their tokens. `prefill` computes the rest."""
        self.ready()
        size, left = max(self.admit_buckets), collections.deque(requests)
        while left:
            group, ended, forks = list[Request](), self.held.ended, list[tuple[int, int, int]]()
            while left and len(group) < size:
                source, rows = self.held.find(left[0].tokens)
                slot = self.held.idle([source, *(other for other, _, _ in forks)])
                if slot < 0 and not rows and forks:
                    break  # the only idle slots are those that others are to be copied from; after that they can be had
                request = left.popleft()
                group.append(request)
                if rows and (self.held.serve(source, request).over or slot < 0):
                    slot = source
                elif slot in self.held.kept:
                    ended.append(slot)
                if slot != source and rows:
                    forks.append((source, slot, rows))
                if request.order < 0:
                    request.order, request.shared = next(self._orders), rows
                self.held.put(slot, request)
                request.computed, request.status = rows, decode.RUNNING
            self._release(ended, group)
            for source, slot, rows in forks:
                self._fork(source, slot, rows)

    def snapshot(self, request: Request) -> None:
        """Keeps the rows that a request has computed for other prompts, if there is a slot for them."""
        slot = self.held.idle()
        if slot < 0 or not self.free_pages:
            return
        self.held.end([slot])
        if slot in self.held.ended:
            self.flush()
        self._fork(request.slot, slot, request.computed)
        self.held.keep(slot, request.tokens[: request.computed + 1], request)

    def evict(self, needed: bool = True, but: int = -1) -> bool:
        """Gives up the kept sequence that served longest ago; False if there is none. needed: even one that shares its pages with
        running sequences. but: not the one in this slot."""
        kept = self.held.kept.items()
        oldest = next((slot for slot, held in kept if slot != but and (needed or not held.needed)), -1)
        if oldest >= 0:
            self.held.end([oldest])
            self.flush()
        return oldest >= 0

    def preempt(self, request: Request) -> None:
        """Takes a running request's slot and pages. It is to be admitted again, and goes on where it was."""
        self.preemptions += 1
        self.held.take_from([request])
        self.flush()

    def flush(self) -> None:
        """Releases the pages of sequences that have ended."""
        self.ready()
        if self.held.ended:
            self._release(self.held.ended, [])

    def prefill(self, requests: Sequence[Request], needs: Needs) -> Call:
        """Starts one call that computes rows of some of the requests, those that came first before others."""
        goals, _, size, chunk = self._next_rows(requests)
        some = requests[:size]
        until, known = padded(goals[:size], size), padded([r.length for r in some], size)
        return some, 0, self.programs.run(("prefill", size, chunk, needs), self._ids(some, size), until, known)

    def used(self, requests: Sequence[Request]) -> float:
        """The share of the rows that a prefill call of the requests computes which is of use."""
        _, left, size, chunk = self._next_rows(requests)
        return _used(left, size, chunk) / (size * chunk)

    def _next_rows(self, requests: Sequence[Request]) -> tuple[list[int], list[int], int, int]:
        """How many rows of each request are to be computed next, how many of these are left, and the bucket of the call that begins."""
        goals = [next((goal for goal in r.goals if goal > r.computed), r.goal) for r in requests]
        left = [goal - r.computed for goal, r in zip(goals, requests, strict=True)]
        return goals, left, *max(self.prefill_buckets, key=functools.partial(_worth, left))

    def decode(
        self, requests: Sequence[Request], steps: int, until_any: bool = False, needs: Needs = PLAIN, num_draft_tokens: int | None = None
    ) -> Call:
        """Starts up to `steps` rounds of the requests; with until_any, fewer if one of them ends. num_draft_tokens: of each round, at
        most the runner's own; by default what `adaptive` chooses among those that are compiled, else the runner's own."""
        size = next(size for size in self.decode_buckets if size >= len(requests))
        count = self._count(size, needs) if num_draft_tokens is None else num_draft_tokens
        known, steps = padded([r.length for r in requests], size), self.programs.steps_for(needs, steps)
        args = self._ids(requests, size), known, np.int32(steps), np.bool_(until_any)
        return requests, count, self.programs.run(("decode", size, needs, count), *args)

    def _count(self, size: int, needs: Needs) -> int:
        if self.adaptive is None:
            return self.num_draft_tokens
        there = [k for k in self.adaptive.choices if ("decode", size, needs, k) in self.programs.compiled]
        return self.adaptive.choose(size, there)

    def read(self, calls: Sequence[Call]) -> bool:
        """Waits for calls and tells their requests. Whether one of them lacked pages, and left its requests as they were."""
        reports = self.programs.fetch([report for *_, report in calls])
        for (requests, count, _), report in zip(calls, reports, strict=True):
            self._free = int(report.free_pages)
            for row, request in enumerate(requests):
                if request is None:
                    continue
                known = len(request.output)
                request.advance(report, row, count)
                if self.adaptive is not None and 0 < known < len(request.output):
                    accepted = accepted_by_call(np.asarray(request.from_draft[known:]))
                    # Where the sequence ended it cut its last round.
                    self.adaptive.see(histogram_of(accepted[:-1] if request.ended else accepted, count), count)
        return any(report.starved for report in reports)

    def score(self, request: Request, count: int, make_room: Callable[[Request], None]) -> Logprobs:
        """The log-probabilities of a whole text, by another pass over it in a free slot: of token i + 1 at entry i, with `count` most
        likely tokens. make_room: called where pages are lacking."""
        size, chunk = self.prefill_buckets[0]
        reader = dataclasses.replace(request, prompt=request.tokens, output=[], goals=[], computed=0, keep=False)
        slot = self.held.idle()
        ended = [*self.held.ended, *([slot] if slot in self.held.kept else [])]
        try:
            self.held.put(slot, reader)
            self._release(ended, [reader])
            found = list[Logprobs]()
            while len(found) < math.ceil(reader.length / chunk):
                call = self.programs.run(("score", size, chunk, count), self._ids([reader], size))
                some, starved = self.programs.fetch(call)
                if starved:
                    make_room(reader)
                else:
                    found.append(jax.tree.map(lambda x: x[0], some))
        finally:
            self.end([reader])
        return jax.tree.map(lambda *x: np.concatenate(x)[: reader.length - 1], *found)

    def end(self, requests: Collection[Request]) -> None:
        """Gives the requests' slots back. Touches nothing on the device, so it may be called at any time, twice too."""
        for request in requests:
            whole = request.status in (decode.STOPPED, decode.FULL_LENGTH) and request.text.found is None
            if request.keep and whole and request.slot >= 0 and request.computed == request.length - 1:
                self.held.keep(request.slot, request.tokens)
        self.held.take_from(requests)

    def ready(self) -> None:
        """Begins anew after a call that failed has taken the state along."""
        if self.programs.state is None:
            self.held.clear()
            self._free = self.kv_pages
            self.programs.begin()

    def _ids(self, requests: Sequence[Request], size: int) -> np.ndarray:
        return padded([request.slot for request in requests], size, self.total_slots)

    def _release(self, ended: Sequence[int], requests: Sequence[Request]) -> None:
        """Releases slots, then puts requests into theirs."""
        size = next(size for size in self.admit_buckets if size >= len(requests))
        args = padded(ended, self.total_slots, self.total_slots), self._ids(requests, size), packed(requests, size, self.max_len)
        free = self.programs.run(("admit", size), *args)
        self.held.released(ended)
        self._free = free

    def _fork(self, source: int, slot: int, rows: int) -> None:
        self._free = self.programs.run(("fork",), *(padded([n], 1) for n in (source, slot, rows)))


def check_pages(kv_pages: int, max_len: int, page_size: int = PAGE) -> None:
    """Raises ValueError for fewer pages than one sequence can need."""
    least = math.ceil(max_len / page_size)
    if kv_pages < least:
        raise ValueError(
            f"kv_pages is {kv_pages}; one sequence of max_len {max_len} takes {least} pages of {page_size} tokens: expected at least as "
            "many, or a smaller max_len"
        )


def _worth(left: Sequence[int], bucket: tuple[int, int]) -> float:
    """Prompt tokens that a prefill call computes, by what it costs. left: of each prompt, in the order that they are served in."""
    size, chunk = bucket
    return _used(left, size, chunk) / (size * chunk + CALL_ROWS)


def _used(left: Sequence[int], size: int, chunk: int) -> int:
    return sum(min(chunk, n) for n in left[:size])
