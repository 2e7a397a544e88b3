"""The device side of an engine: weights, one state of all slots, and one compiled program for each static shape.

A bucket is the static length of the list of slot ids that a program works on; shorter lists are padded with an id out of range.
Programs are compiled ahead of their first use and called by key, so that nothing compiles behind anybody's back.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec import decode
from jaxspec.accept import COUPLED, Rule
from jaxspec.drafters.base import Drafter
from jaxspec.gemma4 import Gemma4
from jaxspec.sampling import seed_words

MAX_STOP_IDS = 16
BUCKET_RATIO = 8
PREFILL_ROWS = 512  # rows of the largest prefill call; enough that reading the weights is not what it waits for
PREFILL_CHUNK = 64  # rows for each sequence where several, or short ones, are prefilled
CALL_ROWS = 256  # what a prefill call costs beside its rows, in rows: reading the weights


@dataclasses.dataclass(eq=False)
class Request:
    """One sequence as the host knows it. prompt: [n] int32. limit: the length at which it ends. temperature 0 is greedy.

    slot: -1 until it is admitted and again after it has ended. length, status, drafted: as of the last call. tokens: [length] int32
    and from_draft: [length] bool, as of the last `Runner.fetch`.
    """

    prompt: np.ndarray
    limit: int
    stop_ids: tuple[int, ...]
    seed: int
    temperature: float
    ignore_eos: bool = False
    slot: int = -1
    epoch: int = -1
    length: int = 0
    status: int = decode.EMPTY
    drafted: int = 0
    tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    from_draft: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, bool))

    @property
    def running(self) -> bool:
        return self.status == decode.RUNNING


class Runner:
    """Puts requests into slots, computes their prompts and decodes them. One call at a time: the caller holds a lock.

    target, drafter: weights. accept: the acceptance rule. attention, draft_attention: implementations for the target's and the
    drafter's attention. shardings: from the shapes of a state to its
    shardings, or None for one device. compilations, compile_seconds: programs made ready so far, and the time that took.
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
        shardings: Callable[[Any], Any] | None = None,
    ):
        self.target, self.drafter = target, drafter
        self.slots, self.max_len, self.num_draft_tokens = slots, max_len, num_draft_tokens
        self.compilations, self.compile_seconds = 0, 0.0
        accept.check(num_draft_tokens)
        self.accept = accept
        self._attention = {"attention": attention, "draft_attention": draft_attention}
        self._programs: dict[tuple[str, int, int], Callable[..., Any]] = {}
        init = functools.partial(self.init_state, target, drafter, slots=slots, max_len=max_len, num_draft_tokens=num_draft_tokens)
        self._shardings = None if shardings is None else shardings(jax.eval_shape(init))
        self._init = jax.jit(init, out_shardings=self._shardings)
        self._epoch = -1
        self._state: Any = None
        self._ready()
        self.weight_bytes, self.state_bytes = nbytes((target, drafter)), nbytes(self._state)

    @staticmethod
    def init_state(target: Gemma4, drafter: Drafter, **sizes: int) -> decode.DecodeState:
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
        return sorted({(1, short), (1, long), (min(self.slots, PREFILL_ROWS // PREFILL_CHUNK), short)})

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def warmup(self) -> Iterable[str]:
        """Compiles every program, and gives a line about each before it does."""
        for size in self.decode_buckets:
            yield f"decode {size}"
            self._program("admit", size)
            self._program("decode", size)
        for size, chunk in self.prefill_buckets:
            yield f"prefill {size} x {chunk}"
            self._program("prefill", size, chunk)
        self._program("read", 1)

    def admit(self, requests: Sequence[Request]) -> None:
        """Takes a slot for each request, computes the prompts and chooses the first tokens."""
        self._ready()
        taken, ended = [], []
        try:
            for request in requests:
                request.slot, request.epoch = self._free.popleft(), self._epoch
                taken.append(request)
            size = self._bucket(len(taken))
            slots = self._ids([r.slot for r in taken], size)
            self._program("admit", size)
            while self._ended:
                ended.append(self._ended.popleft())
            self._run("admit", size, 0, self._ids(ended, self.slots), slots, self._pack(taken, size))
            self._prefill(taken)
            self._refresh(taken)
        except BaseException:
            self.end(taken)
            raise
        stuck = [r for r in taken if r.length <= len(r.prompt)]
        if stuck:
            self.end(taken)
            raise RuntimeError(f"{len(stuck)} prompts found no free pages; fewer slots or a smaller max_len need fewer")

    def decode(self, requests: Sequence[Request], steps: int, until_any: bool = False) -> None:
        """Runs up to `steps` rounds of the requests; with until_any, ends as soon as one of them has."""
        self._ready()
        for request in requests:
            if request.epoch != self._epoch:
                raise RuntimeError("this sequence was lost when another call failed; ask for it again")
        size = self._bucket(len(requests))
        self._run("decode", size, 0, self._ids([r.slot for r in requests], size), np.int32(steps), np.bool_(until_any))
        self._refresh(requests)
        if self._get(self._state.starved):
            raise RuntimeError("the cache ran out of pages; fewer slots or a smaller max_len need fewer")

    def fetch(self, requests: Sequence[Request]) -> None:
        """Copies the requests' tokens and flags to the host."""
        read = self._program("read", 1)
        rows = [read(self._state.tokens, self._state.from_draft, np.int32(r.slot)) for r in requests]
        for request, (tokens, from_draft) in zip(requests, self._get(rows), strict=True):
            request.tokens, request.from_draft = tokens[: request.length], from_draft[: request.length]

    def end(self, requests: Iterable[Request]) -> None:
        """Gives the requests' slots back. Touches nothing on the device, so it may be called at any time, twice too."""
        for request in requests:
            slot, request.slot = request.slot, -1
            if slot >= 0 and request.epoch == self._epoch:
                self._ended.append(slot)
                self._free.append(slot)

    def _ready(self) -> None:
        """Makes the state, at the beginning and after a call that failed has taken it along."""
        if self._state is None:
            self._state = jax.block_until_ready(self._init())
            self._epoch += 1
            self._free = collections.deque(range(self.slots))
            self._ended: collections.deque[int] = collections.deque()  # slots whose pages are still to be released

    def _bucket(self, count: int) -> int:
        return next(size for size in self.decode_buckets if size >= count)

    def _ids(self, slots: Sequence[int], size: int) -> np.ndarray:
        return np.asarray([*slots, *[self.slots] * (size - len(slots))], np.int32)

    def _pack(self, requests: Sequence[Request], size: int) -> decode.Requests:
        tokens = np.zeros((size, self.max_len), np.int32)
        stop_ids = np.full((size, MAX_STOP_IDS), -1, np.int32)
        seed = np.zeros((size, 2), np.uint32)
        numbers = np.zeros((2, size), np.int32)
        temperature = np.zeros(size, np.float32)
        for i, r in enumerate(requests):
            tokens[i, : len(r.prompt)] = r.prompt
            stop_ids[i, : len(r.stop_ids)] = r.stop_ids
            seed[i] = seed_words(r.seed)
            numbers[:, i] = len(r.prompt), r.limit
            temperature[i] = r.temperature
        length, limit = numbers
        fields: Any = dict(tokens=tokens, length=length, prompt=length, limit=limit, stop_ids=stop_ids, seed=seed, temperature=temperature)
        return decode.Requests(**fields)

    def _prefill(self, requests: Sequence[Request]) -> None:
        left = {request.slot: len(request.prompt) for request in requests}
        while left:
            longest = sorted(left, key=lambda slot: -left[slot])
            size, chunk = max(self.prefill_buckets, key=functools.partial(_worth, [left[slot] for slot in longest]))
            self._run("prefill", size, chunk, self._ids(longest[:size], size))
            left.update({slot: left[slot] - chunk for slot in longest[:size]})
            left = {slot: n for slot, n in left.items() if n > 0}

    def _refresh(self, requests: Sequence[Request]) -> None:
        lengths, statuses, drafted = self._get((self._state.length, self._state.status, self._state.drafted))
        for r in requests:
            r.length, r.status, r.drafted = int(lengths[r.slot]), int(statuses[r.slot]), int(drafted[r.slot])

    def _run(self, name: str, size: int, chunk: int, *args: Any) -> None:
        """Replaces the state by what a program makes of it. A program that fails takes the state along."""
        program = self._program(name, size, chunk)
        state, self._state = self._state, None
        if name == "admit":
            self._state = program(state, *args)
        else:
            self._state = program(self.target, self.drafter, state, *args)

    def _get(self, tree: Any) -> Any:
        try:
            return jax.device_get(tree)
        except Exception:
            self._state = None  # what a failed program gives can never be read
            raise

    def _program(self, name: str, size: int, chunk: int = 0) -> Callable[..., Any]:
        key = (name, size, chunk)
        if key not in self._programs:
            begun = time.perf_counter()
            self._programs[key] = self._compile(name, size, chunk)
            self.compilations += 1
            self.compile_seconds += time.perf_counter() - begun
        return self._programs[key]

    def _compile(self, name: str, size: int, chunk: int) -> Callable[..., Any]:
        slots = self._ids([], size)
        if name == "read":
            return jax.jit(_read).lower(self._state.tokens, self._state.from_draft, np.int32(0)).compile()
        if name == "admit":
            jitted = jax.jit(_admit, donate_argnums=0, out_shardings=self._shardings)
            return jitted.lower(self._state, self._ids([], self.slots), slots, self._pack([], size)).compile()
        weights = (self.target, self.drafter, self._state)
        if name == "prefill":
            function = functools.partial(decode.prefill, chunk=chunk, **self._attention)
            args: tuple[Any, ...] = (slots,)
        else:
            function = functools.partial(decode.decode_loop, num_draft_tokens=self.num_draft_tokens, accept=self.accept, **self._attention)
            args = (slots, np.int32(0), np.bool_(False))
        return jax.jit(function, donate_argnums=2, out_shardings=self._shardings).lower(*weights, *args).compile()


def _worth(left: Sequence[int], bucket: tuple[int, int]) -> float:
    """Prompt tokens that a prefill call computes, by what it costs. left: of each prompt, longest first."""
    size, chunk = bucket
    return sum(min(chunk, n) for n in left[:size]) / (size * chunk + CALL_ROWS)


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, over all devices a replica counted once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _admit(state: decode.DecodeState, ended: jax.Array, slots: jax.Array, requests: decode.Requests) -> decode.DecodeState:
    return decode.admit(decode.release(state, ended), slots, requests)


def _read(tokens: jax.Array, from_draft: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tokens[slot], from_draft[slot]
