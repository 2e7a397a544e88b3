"""What `get_metrics` returns, in vLLM's shape."""

from __future__ import annotations

import dataclasses
import itertools

from jaxspec.engine.stats import Stats


@dataclasses.dataclass(frozen=True)
class Metric:
    """What all metrics have."""

    name: str
    labels: dict[str, str] = dataclasses.field(default_factory=dict, kw_only=True)


@dataclasses.dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclasses.dataclass(frozen=True)
class Vector(Metric):
    """Numbers that only grow."""

    values: list[int]


@dataclasses.dataclass(frozen=True)
class Gauge(Metric):
    """A number that goes up and down. There is none here; scripts ask for the type."""

    value: float


@dataclasses.dataclass(frozen=True)
class Histogram(Metric):
    """How often values were seen. There is none here; scripts ask for the type."""

    count: int
    sum: float
    buckets: dict[str, int]


def counters(stats: Stats, most_accepted: int) -> list[Counter | Vector]:
    """Totals under vLLM's names. A draft there is a round that guessed anything. As there, drafts that were accepted past the end of a text
    count. most_accepted: drafts that a round can accept at most."""
    by_round = list(itertools.accumulate(reversed(stats.histogram[1:])))  # rounds that accepted at least K, K - 1, .. 1 tokens
    by_round = by_round or [0] * most_accepted
    values = {
        "request_success": stats.requests,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.tokens,
        "num_preemptions": stats.preemptions,
        "prefix_cache_queries": stats.prompt_tokens,
        "prefix_cache_hits": stats.cached_tokens,
        "spec_decode_num_drafts": drafts(stats.rounds_by_draft),
        "spec_decode_num_draft_tokens": stats.drafted,
        "spec_decode_num_accepted_tokens": accepted(stats.histogram),
    }
    found = [Counter(f"vllm:{name}", value) for name, value in values.items()]
    return [*found, Vector("vllm:spec_decode_num_accepted_tokens_per_pos", by_round[::-1])]


def drafts(rounds_by_draft: tuple[int, ...]) -> int:
    """Rounds that guessed anything."""
    return rounds_by_draft[0] if rounds_by_draft else 0


def accepted(histogram: tuple[int, ...]) -> int:
    """Drafts that rounds accepted, whether or not a text ended before them."""
    return sum(i * rounds for i, rounds in enumerate(histogram))
