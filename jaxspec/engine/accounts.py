"""What an LLM has done so far, and the clock that this is measured by."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from jaxspec.engine.acceptance_watch import Watch
from jaxspec.engine.device_clock import Compiling
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.settings import Settings
from jaxspec.engine.stats import RoundStats, Stats
from jaxspec.engine.trials import Comparison


class Accounts:
    """The totals of an LLM. They stay when it is closed.

    runners: of all data shards. settings: of the LLM. watch: warns of drafts that are hardly ever accepted. reading: the comparison of the
    drafter's two readings, if it has them. While that is open nothing is watched, since the wrong one may accept nothing.
    """

    def __init__(self, runners: Sequence[Runner], settings: Settings, watch: Watch, reading: Comparison | None):
        self._runners, self._settings, self._watch, self._reading = runners, settings, watch, reading
        self._totals = Stats()  # of requests that have ended
        self.compiling = Compiling()  # of all runners and of what else compiles
        self._begun: float | None = None  # since when a call has been computing, by `clock`

    def clock(self) -> float:
        """A clock, in seconds, that stands still while programs are compiled."""
        return time.perf_counter() - self.compiling.seconds

    @property
    def seconds(self) -> float:
        """What `Stats.seconds` is at this moment."""
        return self._totals.seconds + (0.0 if self._begun is None else self.clock() - self._begun)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """The time of this context is spent generating."""
        if self._begun is not None:  # what gives the requests may use the LLM
            yield
            return
        self._begun = self.clock()
        try:
            yield
        finally:
            self._totals, self._begun = dataclasses.replace(self._totals, seconds=self.seconds), None

    def add(self, request: Request) -> RoundStats:
        """Adds a request's rounds to the totals, and returns them."""
        request.accounted = True
        flags, most, room = np.asarray(request.from_draft, bool), self._settings.most_accepted, self._settings.max_len - len(request.prompt)
        told = {"by_round": request.guessed, "nodes": request.nodes, "beyond": request.beyond, "room": room}
        rounds = RoundStats.of(flags, request.drafted, most, request.first_token_seconds, **told)
        self._totals = self._totals.plus(len(request.prompt), rounds, request.shared)
        if most and (self._reading is None or self._reading.verdict is not None):
            self._watch.see(rounds.rounds_by_draft[0], rounds.steps - rounds.histogram[0], request.temperature)
        return rounds

    def stats(self, **more: Any) -> Stats:
        """The totals at this moment. more: fields that others know."""
        runners = self._runners
        return dataclasses.replace(
            self._totals,
            times=tuple((runner.times.busy_seconds, tuple(runner.times.host_times)) for runner in runners),
            compilations=sum(len(runner.programs.compiled) for runner in runners),
            compile_seconds=self.compiling.seconds,
            preemptions=sum(runner.preemptions for runner in runners),
            state_bytes=sum(runner.state_bytes for runner in runners),
            weight_bytes=runners[0].weight_bytes,
            peak_bytes=runners[0].peak_bytes,
            structured_bytes=dict(sum((collections.Counter(runner.pool.bytes_by_label) for runner in runners), collections.Counter())),
            reading=None if self._reading is None else self._reading.findings,
            **more,
        )
