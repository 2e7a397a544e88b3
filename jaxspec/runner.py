"""The device side of an engine: weights, one state of all slots, and one compiled program for each static shape.

A bucket is the static length of the list of slot ids that a program works on; shorter lists are padded with an id out of range.
Programs are compiled ahead of their first use and called by key, so that nothing compiles behind anybody's back.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec import decode, graphs, programs
from jaxspec.accept import COUPLED, Rule
from jaxspec.adaptive import Adaptive
from jaxspec.drafters.base import Drafter
from jaxspec.gemma4 import Gemma4
from jaxspec.logprobs import ROWS, Logprobs
from jaxspec.packing import packed
from jaxspec.request import MAX_STOP_IDS, Request
from jaxspec.sampling import PLAIN, Needs
from jaxspec.sharding import WHOLE, Layout
from jaxspec.slots import Slots
from jaxspec.stats import Times, accepted_by_call, histogram_of

BUCKET_RATIO = 8
PREFILL_ROWS = 512  # rows of the largest prefill call; enough that reading the weights is not what it waits for
PREFILL_CHUNK = 64  # rows for each sequence where several, or short ones, are prefilled
CALL_ROWS = 256  # what a prefill call costs beside its rows, in rows: reading the weights
STEPS = 64  # rounds of a decode call at most; it bounds how long an interrupt waits
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
    over which the weights lie as `sharding.spread` gives them, or None for one device. clock: what `times` go by.

    adaptive: chooses how many tokens rounds guess, None where all guess num_draft_tokens. compilations, compile_seconds: programs made
    ready so far, and the time that took. times: where the device's time went. preemptions: sequences that made room and were computed
    again.
    Raises ValueError for fewer pages than one sequence can need.
    """

    def __init__(
        self,
        target: Gemma4,
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
    ):
        self.target, self.drafter = target, drafter
        self.slots, self.max_len, self.num_draft_tokens, self.page_size = slots, max_len, num_draft_tokens, page_size
        self.compilations, self.compile_seconds, self.preemptions, self.times = 0, 0.0, 0, Times(clock)
        accept.check(num_draft_tokens)
        self.accept = accept
        self.adaptive: Adaptive | None = None
        self.kv_pages = slots * self.pages_for(max_len) if kv_pages is None else kv_pages
        check_pages(self.kv_pages, max_len, page_size)
        self._attention = {"attention": attention, "draft_attention": draft_attention}
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._orders = itertools.count()
        sizes = {
            "max_len": max_len,
            "num_draft_tokens": num_draft_tokens,
            "kv_dtype": kv_dtype,
            "page_size": page_size,
            "full_pages": self.kv_pages,
        }
        init = functools.partial(self.init_state, target, drafter, **sizes)
        one, two = (nbytes(jax.eval_shape(functools.partial(init, slots=n))) for n in (1, 2))
        self.total_slots = slots + min(prefix_bytes // (two - one), slots)
        init = functools.partial(init, slots=self.total_slots)
        self._layout = None if mesh is None else Layout.of(mesh, drafter, init)
        self._init = jax.jit(init) if self._layout is None else self._layout.empty
        self.held = Slots(self.total_slots)
        self._state: Any = None
        self._last: Any = None  # what the newest call gives
        self.ready()
        self._devices = jax.tree.leaves(self._state)[0].devices()
        self._gaps = graphs.keep_apart(self._devices)
        self.weight_bytes, self.state_bytes = nbytes((target, drafter)), nbytes(self._state)

    @staticmethod
    def init_state(target: Gemma4, drafter: Drafter, **sizes: Any) -> decode.DecodeState:
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
            self._free = int(self._get(self._free))
        return self._free

    def pages_for(self, rows: int) -> int:
        """Full-attention pages of a sequence with so many rows, the drafts of its next round among them."""
        return math.ceil(min(rows, self.max_len) / self.page_size)

    def programs(self, needs: Needs, choices: Sequence[int] = ()) -> list[tuple[Any, ...]]:
        """Keys of all programs that requests with these needs use. choices: numbers of drafts beside the runner's own."""
        counts = sorted({self.num_draft_tokens, *choices})
        return [
            *(("decode", size, needs, count) for size in self.decode_buckets for count in counts),
            *(("prefill", size, chunk, needs) for size, chunk in self.prefill_buckets),
            *(("admit", size) for size in self.admit_buckets),
            ("fork",),
        ]

    def warmup(self, needs: Needs, choices: Sequence[int] = ()) -> Iterator[str]:
        """Compiles every program that requests with these needs use, as many at a time as there are cores, and gives a line about each
        that is ready. XLA compiles without Python's lock; what leads to it does not."""
        self.ready()
        begun, missing = time.perf_counter(), [key for key in self.programs(needs, choices) if key not in self._programs]
        with self._explained(), concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            pending = {pool.submit(self._compiled(name, *key)): (name, *key) for name, *key in missing}
            for done in concurrent.futures.as_completed(pending):
                key = pending[done]
                self._programs[key] = done.result()
                self.compilations += 1
                yield " ".join(str(part) for part in key if isinstance(part, str | int))
        self.compile_seconds += time.perf_counter() - begun

    def steps_for(self, needs: Needs, steps: int) -> int:
        """How many of these rounds a call may run, lest log-probabilities are overwritten before they are read."""
        return min(steps, STEPS if needs.logprobs is None else max(ROWS // (self.num_draft_tokens + 1), 1))

    def admit(self, requests: Sequence[Request]) -> None:
        """Puts requests into slots, which there must be, with what others have computed of their tokens. `prefill` computes the rest."""
        self.ready()
        size, forks = max(self.admit_buckets), list[tuple[int, int, int]]()
        for group in (requests[i : i + size] for i in range(0, len(requests), size)):
            ended = self.held.ended
            for request in group:
                source, rows = self.held.find(request.tokens)
                slot = self.held.idle([source, *(other for other, _, _ in forks)])
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
        until, known = (np.asarray([*values, *[0] * (size - len(some))], np.int32) for values in (goals[:size], [r.length for r in some]))
        return some, 0, self._run(self._program("prefill", size, chunk, needs), self._ids(some, size), until, known)

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
        count = self.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
        if num_draft_tokens is None and self.adaptive is not None:
            count = self.adaptive.choose(size, [k for k in self.adaptive.choices if ("decode", size, needs, k) in self._programs])
        known = np.asarray([*(r.length for r in requests), *[0] * (size - len(requests))], np.int32)
        steps = self.steps_for(needs, steps)
        program = self._program("decode", size, needs, count)
        return requests, count, self._run(program, self._ids(requests, size), known, np.int32(steps), np.bool_(until_any))

    def read(self, calls: Sequence[Call]) -> bool:
        """Waits for calls and tells their requests. Whether one of them lacked pages, and left its requests as they were."""
        reports = self._get([report for *_, report in calls])
        for (requests, count, _), report in zip(calls, reports, strict=True):
            self._free = report.free_pages
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
            program, found = self._program("score", size, chunk, count), list[Logprobs]()
            while len(found) < math.ceil(reader.length / chunk):
                some, starved = self._get(self._run(program, self._ids([reader], size)))
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
        """Makes the state, at the beginning and after a call that failed has taken it along."""
        if self._state is None:
            self.held.clear()
            with self._explained():
                self._state = jax.block_until_ready(self._init())
            self._free = self.kv_pages

    def _ids(self, requests: Sequence[Request], size: int) -> np.ndarray:
        return self._padded([request.slot for request in requests], size)

    def _padded(self, slots: Sequence[int], size: int) -> np.ndarray:
        return np.asarray([*slots, *[self.total_slots] * (size - len(slots))], np.int32)

    def _release(self, ended: Sequence[int], requests: Sequence[Request]) -> None:
        """Releases slots, then puts requests into theirs."""
        size = next(size for size in self.admit_buckets if size >= len(requests))
        program, rows = self._program("admit", size), packed(requests, size, self.max_len)
        free = self._run(program, self._padded(ended, self.total_slots), self._ids(requests, size), rows, bare=True)
        self.held.released(ended)
        self._free = free

    def _fork(self, source: int, slot: int, rows: int) -> None:
        self._free = self._run(self._program("fork"), *(np.asarray([n], np.int32) for n in (source, slot, rows)))

    def _run(self, program: Callable[..., Any], *args: Any, bare: bool = False) -> Any:
        """Replaces the state by what a program makes of it, and gives what else it gives. A program that fails takes the state along.
        bare: the program takes no weights, and of the state what `programs.bare` leaves."""
        state, self._state = self._state, None
        # Before the call: the device begins while the host still hands over, and where it asks the host whether to go on, as a loop
        # may on a GPU, the call returns only after its last round.
        self.times.handed(going=not all(x.is_ready() for x in jax.tree.leaves(self._last)))
        with self._explained():
            if bare:
                changed, found = program(programs.bare(state), *args)
                self._state = programs.whole(changed, state)
            else:
                self._state, found = program(self.target, self.drafter, state, *args)
        for array in jax.tree.leaves(found):
            array.copy_to_host_async()
        self._last = found
        return found

    def _get(self, tree: Any) -> Any:
        try:
            with self._explained():
                return jax.device_get(tree)
        except Exception:
            self._state = None  # what a failed program gives can never be read
            raise
        finally:
            self.times.waited()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Says what to lower where a device runs out of memory."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise MemoryError(
                f"the device ran out of memory; lower max_slots ({self.slots}), max_len ({self.max_len}), kv_pages ({self.kv_pages}) or "
                f"memory_fraction: {str(error).splitlines()[0]}"
            ) from error

    def _program(self, name: str, *key: Any) -> Callable[..., Any]:
        """A compiled program: ("admit", size), ("fork",), ("prefill", size, chunk, needs), ("decode", size, needs, num_draft_tokens) or
        ("score", size, chunk, count)."""
        if (name, *key) not in self._programs:
            begun = time.perf_counter()
            with self._explained():
                self._programs[name, *key] = self._compiled(name, *key)()
            self.compilations += 1
            self.compile_seconds += time.perf_counter() - begun
        return self._programs[name, *key]

    def _compiled(self, name: str, *key: Any) -> Callable[[], Any]:
        """Lowers a program, and gives what compiles it."""
        lowered = getattr(self, f"_lower_{name}")(*key)
        return functools.partial(graphs.compiled, lowered, self._devices) if name == "decode" else lowered.compile

    def _lower(self, function: Callable[..., Any], *args: Any) -> Any:
        """(weights, state, *args) -> (state, more). The state is given away."""
        return jax.jit(self._placed(function), donate_argnums=2).lower(self.target, self.drafter, self._state, *args)

    def _placed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self._layout is None else self._layout.on(function, WHOLE)

    def _lower_admit(self, size: int) -> Any:
        args = self._padded([], self.total_slots), self._padded([], size), packed([], size, self.max_len)
        return jax.jit(self._placed(programs.admit), donate_argnums=0).lower(programs.bare(self._state), *args)

    def _lower_fork(self) -> Any:
        return self._lower(programs.fork, *[self._padded([], 1)] * 3)

    def _lower_prefill(self, size: int, chunk: int, needs: Needs) -> Any:
        function = functools.partial(programs.prefill, chunk=chunk, needs=needs, **self._attention)
        return self._lower(function, *[self._padded([], size)] * 3)

    def _lower_decode(self, size: int, needs: Needs, num_draft_tokens: int) -> Any:
        static = {"num_draft_tokens": num_draft_tokens, "accept": self.accept, "needs": needs, **self._attention}
        function = functools.partial(programs.decode, width=self.steps_for(needs, STEPS) * (self.num_draft_tokens + 1), **static)
        return self._lower(function, *[self._padded([], size)] * 2, np.int32(0), np.bool_(False))

    def _lower_score(self, size: int, chunk: int, count: int) -> Any:
        function = functools.partial(programs.score, chunk=chunk, count=count, attention=self._attention["attention"])
        return self._lower(function, self._padded([], size))


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


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, over all devices a replica counted once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
