"""What speculation achieved: rounds, drafts and acceptance, from the flags that a sequence's tokens carry. NumPy and plain Python."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from jaxspec.engine.device_clock import OCTAVE, SHORTEST
from jaxspec.engine.trials import Findings


def accepted_by_round(from_draft: np.ndarray) -> np.ndarray:
    """Accepted drafts of every draft/verify round of one sequence: [rounds] int64.

    from_draft: [N] bool, for each new token whether it was a draft. The first token comes from the prompt's own pass and belongs to
    no round. Then each round is a run of drafts, maybe empty, and the target's own choice; the last may have been cut by a stop or a
    limit before that choice.
    """
    return accepted_by_call(np.asarray(from_draft, bool)[1:])


def accepted_by_call(from_draft: np.ndarray) -> np.ndarray:
    """The same of the tokens that some rounds gave, from the first of one to the last of one."""
    flags = np.asarray(from_draft, bool)
    own = np.flatnonzero(~flags)
    starts = np.concatenate([[0], own + 1])
    ends = np.concatenate([own, [flags.size]])
    counts = ends - starts
    # What follows the last own choice is a round only if it holds something.
    return counts if counts[-1] else counts[:-1]


def histogram_of(accepted: np.ndarray, num_draft_tokens: int) -> tuple[int, ...]:
    """Rounds by how many drafts they accepted: entry i counts rounds that accepted i, i = 0 .. K."""
    return tuple(int(n) for n in np.bincount(accepted, minlength=num_draft_tokens + 1))


def rates_of(histogram: Iterable[int], tried: Iterable[int] | None = None) -> tuple[float, ...]:
    """Unconditional acceptance of each draft position: the share of rounds that accepted draft i and all before it, i = 1 .. K. tried:
    rounds that verified draft i; by default all did."""
    counts = np.asarray(tuple(histogram), np.int64)
    at_least = counts[::-1].cumsum()[::-1][1:]
    rounds = [int(counts.sum())] * len(at_least) if tried is None else tried
    return tuple(float(n) / float(of) if of else 0.0 for n, of in zip(at_least, rounds, strict=True))


@dataclasses.dataclass(frozen=True)
class RoundStats:
    """The rounds of one sequence."""

    drafted: int
    """Tokens that the drafter guessed and the target verified."""
    histogram: tuple[int, ...]
    """Rounds by how many drafts they accepted, 0 .. K. Drafts that the last one accepted past a stop or a limit count, though they became
    no tokens."""
    from_draft: tuple[bool, ...] = dataclasses.field(repr=False)
    """For each new token, whether it was an accepted draft."""
    first_token_seconds: float = dataclasses.field(default=0.0, compare=False)
    """From the call until the first token was known. Waiting for a slot counts, compiling does not."""
    tried: tuple[int, ...] | None = None
    """Rounds that verified at least i guesses, i = 1 .. K; None where all verified K."""

    @classmethod
    def of(
        cls,
        from_draft: np.ndarray,
        drafted: int,
        num_draft_tokens: int,
        first_token_seconds: float = 0.0,
        by_round: Sequence[int] | None = None,
        nodes: Sequence[int] | None = None,
        beyond: int = 0,
        room: int | None = None,
    ) -> RoundStats:
        """From the flags of a sequence's new tokens [N] and the state's count of drafted tokens, of which those of rounds that left no
        token are not counted. num_draft_tokens: the most that a round can accept. by_round: how many guesses each round verified one after
        the other, where it was not always num_draft_tokens; nodes: the same on all paths of a tree, where there are trees. beyond: drafts
        that the last round accepted past the end. room: the most new tokens that the sequence can have, past which no draft is verified."""
        accepted, tried = accepted_by_round(from_draft), None
        before = 1 + np.cumsum(accepted + 1) - (accepted + 1)  # new tokens that each round found
        if len(accepted):
            accepted[-1] += beyond
        drafted = min(int(drafted), len(accepted) * num_draft_tokens)
        if by_round is not None:
            said = np.asarray(by_round, np.int64)[: len(accepted)]
            counts = said if room is None else np.minimum(said, room - before)
            drafted = int((said if nodes is None else np.asarray(nodes, np.int64)[: len(accepted)]).sum() - (said - counts).sum())
            tried = tuple(int((counts > i).sum()) for i in range(num_draft_tokens))
        flags = tuple(bool(flag) for flag in from_draft)
        return cls(drafted, histogram_of(accepted, num_draft_tokens), flags, first_token_seconds, tried)

    @property
    def rounds_by_draft(self) -> tuple[int, ...]:
        """Rounds that verified draft i, i = 1 .. K."""
        return (self.steps,) * (len(self.histogram) - 1) if self.tried is None else self.tried

    @property
    def steps(self) -> int:
        """Draft/verify rounds; the pass over the prompt, which gives the first token, is none."""
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        """Drafts that became tokens."""
        return sum(self.from_draft)

    @property
    def acceptance_length(self) -> float:
        """Tokens a step, the target's own choice counted; 1.0 before the first step."""
        return (len(self.from_draft) - 1) / self.steps if self.steps else 1.0

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Of the steps that verified draft i the share that accepted it and all before it, for i = 1 .. K."""
        return rates_of(self.histogram, self.rounds_by_draft)


@dataclasses.dataclass(frozen=True)
class LearningStats:
    """What came of a drafter that learns while its LLM works."""

    share: float
    """The share of the time spent generating that may go into learning."""
    spent: float
    """The share that did."""
    seconds: float
    """The time that it took."""
    updates: int
    """Updates of the weights."""
    loss: float
    """Of the last update; NaN before the first."""
    tried: int
    """Trials of newer weights against those in use."""
    taken: int
    """Trials whose newer weights were taken."""
    start: float | None
    """Tokens a step before any newer weights were taken; None before the first round. Rounds without drafts do not count."""
    now: float | None
    """Tokens a step lately, with the weights in use."""
    ended: str | None = None
    """Why learning ended; None while it goes on."""

    @property
    def lengths(self) -> str:
        """Tokens a step at the start and now, in words."""
        return " -> ".join("?" if length is None else f"{length:.2f}" for length in (self.start, self.now))

    def __str__(self) -> str:
        told = (
            f"{self.lengths} tokens a step, {self.spent:.1%} of the time, {self.updates} updates, {self.taken} of {self.tried} trials won"
        )
        return told if self.ended is None else f"{told}; ended: {self.ended}"


@dataclasses.dataclass(frozen=True)
class Stats:
    """Totals of an engine since it was loaded, or of a part of its life: a later one less an earlier one.

    Where there are several data shards, times are those of the busiest.
    """

    requests: int = 0
    """Requests that were served. A stream that was closed early counts, with what it gave."""
    prompt_tokens: int = 0
    """Tokens of their prompts."""
    tokens: int = 0
    """New tokens."""
    steps: int = 0
    """Draft/verify rounds, summed over requests, as are the next two, histogram and rounds_by_draft."""
    drafted: int = 0
    """Tokens that the drafter guessed and the target verified."""
    accepted: int = 0
    """Drafts that became tokens."""
    stepped_tokens: int = 0
    """New tokens less the first of each request, which no step gives."""
    histogram: tuple[int, ...] = ()
    """Steps by how many drafts they accepted, 0 .. K, also past the end of a text."""
    rounds_by_draft: tuple[int, ...] = ()
    """Steps that verified at least i guesses, i = 1 .. K; empty where all verified K."""
    cached_tokens: int = 0
    """Prompt tokens that had been computed for other requests."""
    preemptions: int = 0
    """Sequences that made room for others and were computed again."""
    seconds: float = 0.0
    """Time spent generating, compiling excluded."""
    times: tuple[tuple[float, tuple[int, ...]], ...] = ()
    """The `busy_seconds` and `host_times` of each data shard."""
    first_token_seconds: float = 0.0
    """Time until the first token was known, summed over requests."""
    begun: int = 0
    """Requests that had a first token; the others failed before, or were stopped."""
    compilations: int = 0
    """Programs that were made ready, by compiling or from the persistent cache."""
    compile_seconds: float = 0.0
    """The time that this took."""
    weight_bytes: int = 0
    """Memory of the target's and the drafter's weights."""
    state_bytes: int = 0
    """Memory of the cache and of all slots."""
    structured_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Memory that the structured outputs take on the device, by a short form of each."""
    peak_bytes: int | None = None
    """The most memory that a device has had in use; None where it does not say."""
    reading: Findings | None = None
    """How the drafter's checkpoint is read, where its config leaves that open and both readings are or were tried; else None."""
    learning: LearningStats | None = None
    """What came of learning, since that began; None where the drafter does not learn."""

    def plus(self, prompt_tokens: int, rounds: RoundStats, cached_tokens: int = 0) -> Stats:
        """With one more request."""
        return dataclasses.replace(
            self,
            requests=self.requests + 1,
            prompt_tokens=self.prompt_tokens + prompt_tokens,
            cached_tokens=self.cached_tokens + cached_tokens,
            tokens=self.tokens + len(rounds.from_draft),
            steps=self.steps + rounds.steps,
            drafted=self.drafted + rounds.drafted,
            accepted=self.accepted + rounds.accepted,
            stepped_tokens=self.stepped_tokens + max(len(rounds.from_draft) - 1, 0),
            histogram=_added(self.histogram, rounds.histogram),
            rounds_by_draft=_added(self.rounds_by_draft, rounds.rounds_by_draft),
            first_token_seconds=self.first_token_seconds + rounds.first_token_seconds,
            begun=self.begun + bool(len(rounds.from_draft)),
        )

    def __sub__(self, earlier: Stats) -> Stats:
        """What happened since. Memory, reading and learning are as they are now."""
        memory = ("weight_bytes", "state_bytes", "structured_bytes", "peak_bytes", "reading", "learning")
        lists = ("histogram", "rounds_by_draft")
        names = [field.name for field in dataclasses.fields(self) if field.name not in (*memory, *lists, "times")]
        less = {name: getattr(self, name) - getattr(earlier, name) for name in names}
        less |= {name: _less(getattr(self, name), getattr(earlier, name)) for name in lists}
        shards = itertools.zip_longest(self.times, earlier.times, fillvalue=(0.0, ()))
        times = tuple((busy - before, _less(host, other)) for (busy, host), (before, other) in shards)
        return dataclasses.replace(self, **less, times=times)

    @property
    def busy_seconds(self) -> float:
        """Of `seconds`, the time in which the device had a call to work on: from when the host began to hand it over until its results were
        known. Of several data shards' that of the busiest."""
        return max((busy for busy, _ in self.times), default=0.0)

    @property
    def host_times(self) -> tuple[int, ...]:
        """Turns that computed prompts, steps or both, by the time that the host took for one while the device had nothing to do: entry i
        counts times up to 10 us * 2^(i/4). Of the busiest data shard. See `host_seconds`."""
        return max(self.times, default=(0.0, ()))[1]

    @property
    def acceptance_length(self) -> float:
        """Tokens a step, the target's own choice counted; 1.0 before the first step."""
        return self.stepped_tokens / self.steps if self.steps else 1.0

    @property
    def acceptance_rates(self) -> tuple[float, ...]:
        """Of the steps that verified draft i the share that accepted it and all before it, for i = 1 .. K."""
        return rates_of(self.histogram, self.rounds_by_draft or None)

    @property
    def tokens_per_second(self) -> float:
        """Without the time for compiling."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_second_with_compiling(self) -> float:
        spent = self.seconds + self.compile_seconds
        return self.tokens / spent if spent else 0.0

    @property
    def time_to_first_token(self) -> float:
        """Seconds from a call until a request's first token was known, on average; waiting for a slot included, compiling not."""
        return self.first_token_seconds / self.begun if self.begun else 0.0

    def host_seconds(self, share: float = 0.5) -> float:
        """What the host took at most, in this share of turns, between two calls of the device; to about a tenth. 0.0 before the first."""
        seen, wanted = 0, share * sum(self.host_times)
        for i, count in enumerate(self.host_times):
            if count and seen + count >= wanted:
                return SHORTEST * 2.0 ** ((i - 1 + (wanted - seen) / count) / OCTAVE)
            seen += count
        return 0.0

    def __str__(self) -> str:
        most = max(len(self.histogram) - 1, 0)
        rates = ", ".join(f"{rate:.2f}" for rate in self.acceptance_rates)
        peak = "" if self.peak_bytes is None else f", peak {self.peak_bytes / 2**20:.1f} MiB"
        return "\n".join(
            [
                f"tokens             {self.tokens} of {self.requests} requests, prompts {self.prompt_tokens}"
                + (f", {self.cached_tokens} of them cached" if self.cached_tokens else "")
                + (f", {self.preemptions} preemptions" if self.preemptions else ""),
                f"speed              {self.tokens_per_second:.1f} tokens/s ({self.seconds:.2f} s), "
                f"{self.tokens_per_second_with_compiling:.1f} with compiling",
                f"device             busy {self.busy_seconds / self.seconds if self.seconds else 0.0:.1%} of the time; between two calls "
                f"the host took {1000 * self.host_seconds():.2f} ms (median)",
                f"first token        {1000 * self.time_to_first_token:.1f} ms after the call, waiting for a slot included",
                f"acceptance length  {self.acceptance_length:.2f} tokens a step ({self.steps} steps)",
                f"drafts             {self.accepted} of {self.drafted} accepted",
                f"by position        {rates or 'nothing drafted'}",
                f"histogram          {', '.join(map(str, self.histogram))} steps with 0 .. {most} drafts accepted",
                *([] if self.reading is None else [f"reading            {self.reading}"]),
                f"compiling          {self.compile_seconds:.1f} s, {self.compilations} programs",
                f"memory             weights {self.weight_bytes / 2**20:.1f} MiB, state {self.state_bytes / 2**20:.1f} MiB{peak}",
                *([] if self.learning is None else [f"learning           {self.learning}"]),
            ]
        )


def _added(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """Histograms entry by entry; the shorter one has nothing beyond its end."""
    return tuple(a + b for a, b in itertools.zip_longest(first, second, fillvalue=0))


def _less(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
    """The first histogram without the second one."""
    return _added(first, tuple(-n for n in second))
