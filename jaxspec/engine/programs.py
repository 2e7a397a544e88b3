"""What a runner runs on a device: functions of weights, the state and more that give the state and what the host reads of it. `admit` takes
no weights, and a bare state."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from tqdm.auto import tqdm

from jaxspec import decode as loop
from jaxspec.decode.accept import Rule
from jaxspec.decode.state import DecodeState
from jaxspec.drafters.base import Drafter
from jaxspec.engine import cuda_graphs as graphs
from jaxspec.engine.admission import packed
from jaxspec.engine.buckets import padded
from jaxspec.engine.device_clock import Times
from jaxspec.model.target import TargetModel
from jaxspec.sampling.choice import Needs
from jaxspec.sampling.logprobs import ring_rows
from jaxspec.sharding.layout import Layout
from jaxspec.sharding.specs import WHOLE

STEPS = 64  # rounds of a decode call at most; it bounds how long an interrupt waits

Key = tuple[Any, ...]


def bare(state: DecodeState) -> DecodeState:
    """A state without the arrays that hold what was computed, which are many: each costs a microsecond or two in a call."""
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=()), drafter=None, logprobs=None)


def whole(bare: DecodeState, state: DecodeState) -> DecodeState:
    """A bare state with those arrays of another one."""
    cache = dataclasses.replace(bare.cache, layers=state.cache.layers)
    return dataclasses.replace(bare, cache=cache, drafter=state.drafter, logprobs=state.logprobs)


def admit(state: DecodeState, ended: jax.Array, slots: jax.Array, requests: Any) -> Any:
    state = loop.admit(loop.release(state, ended), slots, requests)
    return state, state.cache.free_count + 0  # a state's own arrays are given away with it


def fork(target: Any, drafter: Any, state: DecodeState, sources: jax.Array, slots: jax.Array, rows: jax.Array) -> Any:
    state = loop.fork(state, sources, slots, rows)
    return state, state.cache.free_count + 0


def prefill(target, drafter, state, slots, until, known, *, chunk, round) -> Any:
    state = loop.prefill(target, drafter, state, slots, until, chunk=chunk, round=round)
    return state, loop.report(state, slots, known, 1, round.needs.logprobs is not None)


def decode(target, drafter, state, slots, known, steps, until_any, *, width, round) -> Any:
    state = loop.decode_loop(target, drafter, state, slots, steps, until_any, round=round)
    return state, loop.report(state, slots, known, width, round.needs.logprobs is not None)


def score(target, drafter, state, slots, **static) -> Any:
    state, found = loop.score(target, state, slots, **static)
    return state, (found, state.starved | False)


class Programs:
    """Weights, one state of all slots, and the compiled programs that work on them, one for each static shape.

    They are called by key: ("admit", size), ("fork",), ("prefill", size, chunk, needs), ("decode", size, needs, num_draft_tokens) or
    ("score", size, chunk, count). size is a bucket, the static length of the list of slot ids that a program works on; shorter lists are
    padded with an id out of range. Programs are compiled ahead of their first use, so that nothing compiles behind anybody's back.

    init: makes the state of one data shard. slots, max_len, num_draft_tokens: what it was made for. mesh: as in `Runner`. times: learns
    when the device has something to do. limits: what to lower where a device runs out of memory, with the values that these settings have.
    progress: whether to say what is compiled while others wait for it.

    state: None once a call that failed has taken it along, until `begin`. compiled: programs by key; compile_seconds: the time that they
    took.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        init: Callable[[], DecodeState],
        *,
        slots: int,
        max_len: int,
        num_draft_tokens: int,
        accept: Rule,
        attention: str,
        draft_attention: str,
        mesh: jax.sharding.Mesh | None,
        times: Times,
        limits: Mapping[str, int],
        progress: bool = False,
    ):
        self.target, self.drafter = target, drafter
        self.slots, self.max_len, self.num_draft_tokens = slots, max_len, num_draft_tokens
        # Programs differ from this in what requests need, and in how many tokens are drafted.
        self._round = loop.Round(num_draft_tokens, accept, attention=attention, draft_attention=draft_attention)
        self._times, self._limits, self._progress = times, dict(limits), progress
        self.compiled: dict[Key, Callable[..., Any]] = {}
        self.compile_seconds = 0.0
        self._layout = None if mesh is None else Layout.of(mesh, drafter, init)
        self._init = jax.jit(init) if self._layout is None else self._layout.empty
        self.state: Any = None
        self._last: Any = None  # what the newest call gives
        self.begin()
        self._devices = jax.tree.leaves(self.state)[0].devices()
        self._gaps = graphs.keep_apart(self._devices)

    def begin(self) -> None:
        """Makes an empty state."""
        with self._explained():
            self.state = jax.block_until_ready(self._init())

    def steps_for(self, needs: Needs, steps: int) -> int:
        """How many of these rounds a call may run, lest log-probabilities are overwritten before they are read."""
        return min(steps, STEPS if needs.logprobs is None else ring_rows(self.num_draft_tokens) // (self.num_draft_tokens + 1))

    def compile(self, keys: Iterable[Key]) -> Iterator[str]:
        """Compiles what is missing of these programs, as many at a time as there are cores, and gives a line about each that is ready,
        those that were there first. XLA compiles without Python's lock; what leads to it does not."""
        missing = list[Key]()
        for key in keys:
            if key in self.compiled:
                yield _line(key)
            else:
                missing.append(key)
        begun = time.perf_counter()
        with self._explained(), concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            pending = {pool.submit(self._compiler(*key)): key for key in missing}
            for done in concurrent.futures.as_completed(pending):
                key = pending[done]
                self.compiled[key] = done.result()
                yield _line(key)
        self.compile_seconds += time.perf_counter() - begun

    def program(self, key: Key) -> Callable[..., Any]:
        """A compiled program; if need be it is compiled now, and somebody who waits is told."""
        if key not in self.compiled:
            begun = time.perf_counter()
            told = tqdm(desc=f"Compiling {_line(key)}", bar_format="{desc}", leave=False, disable=not self._progress)
            with self._explained(), told:
                self.compiled[key] = self._compiler(*key)()
            self.compile_seconds += time.perf_counter() - begun
        return self.compiled[key]

    def run(self, key: Key, *args: Any) -> Any:
        """Replaces the state by what a program makes of it, and gives what else it gives. A program that fails takes the state along."""
        program = self.program(key)
        state, self.state = self.state, None
        # Before the call: the device begins while the host still hands over, and where it asks the host whether to go on, as a loop
        # may on a GPU, the call returns only after its last round.
        self._times.handed(going=not all(x.is_ready() for x in jax.tree.leaves(self._last)))
        with self._explained():
            if key[0] == "admit":
                changed, found = program(bare(state), *args)
                self.state = whole(changed, state)
            else:
                self.state, found = program(self.target, self.drafter, state, *args)
        for array in jax.tree.leaves(found):
            array.copy_to_host_async()
        self._last = found
        return found

    def fetch(self, found: Any) -> Any:
        """Waits for what calls give: a tree of arrays, as the host has them."""
        try:
            with self._explained():
                return jax.device_get(found)
        except Exception:
            self.state = None  # what a failed program gives can never be read
            raise
        finally:
            self._times.waited()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Says what to lower where a device runs out of memory."""
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            settings = ", ".join(f"{name} ({value})" for name, value in self._limits.items())
            reason = str(error).splitlines()[0]
            raise MemoryError(f"the device ran out of memory; lower {settings} or memory_fraction: {reason}") from error

    def _compiler(self, name: str, *key: Any) -> Callable[[], Any]:
        """Lowers a program, and gives what compiles it."""
        lowered = getattr(self, f"_lower_{name}")(*key)
        return functools.partial(graphs.compiled, lowered, self._devices) if name == "decode" else lowered.compile

    def _lower(self, function: Callable[..., Any], *args: Any) -> Any:
        """(weights, state, *args) -> (state, more). The state is given away."""
        return jax.jit(self._placed(function), donate_argnums=2).lower(self.target, self.drafter, self.state, *args)

    def _placed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self._layout is None else self._layout.on(function, WHOLE)

    def _lower_admit(self, size: int) -> Any:
        args = self._nobody(self.slots), self._nobody(size), packed([], size, self.max_len)
        return jax.jit(self._placed(admit), donate_argnums=0).lower(bare(self.state), *args)

    def _lower_fork(self) -> Any:
        return self._lower(fork, *[self._nobody(1)] * 3)

    def _lower_prefill(self, size: int, chunk: int, needs: Needs) -> Any:
        function = functools.partial(prefill, chunk=chunk, round=dataclasses.replace(self._round, needs=needs))
        return self._lower(function, *[self._nobody(size)] * 3)

    def _lower_decode(self, size: int, needs: Needs, num_draft_tokens: int) -> Any:
        round = dataclasses.replace(self._round, num_draft_tokens=num_draft_tokens, needs=needs)
        function = functools.partial(decode, width=self.steps_for(needs, STEPS) * (self.num_draft_tokens + 1), round=round)
        return self._lower(function, *[self._nobody(size)] * 2, np.int32(0), np.bool_(False))

    def _lower_score(self, size: int, chunk: int, count: int) -> Any:
        function = functools.partial(score, chunk=chunk, count=count, attention=self._round.attention)
        return self._lower(function, self._nobody(size))

    def _nobody(self, size: int) -> np.ndarray:
        return padded([], size, self.slots)


def _line(key: Key) -> str:
    """What a progress bar shows of a program."""
    return " ".join(str(part) for part in key if isinstance(part, str | int))
