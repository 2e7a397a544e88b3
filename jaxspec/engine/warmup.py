"""What rounds cost: measured once everything is compiled, for the choice of how many tokens rounds guess."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.sampling.choice import Needs

# Rounds at warm-up: one takes what TIMED more of them add to a call, by the fastest of CALLS calls, since a call takes time beside its
# rounds, and most run many. A CUDA graph is recorded in the second run of a loop or of its body.
WARM, TIMED, CALLS = 3, 4, 3


def measured(
    runner: Runner, choices: Iterable[int], needs: Needs, requests: Callable[[int], list[Request]]
) -> dict[tuple[int, int], float] | None:
    """Seconds of a round for each batch size and number of drafts, from a few rounds of short sequences; None if they find no room.

    Everything is compiled. requests: gives that many, of short prompts, which nothing ends early.
    """
    counts, costs = sorted(choices), {}
    rounds = min(TIMED, ((runner.max_len - 2) // sum(k + 1 for k in counts) - WARM) // CALLS - 2)
    if rounds < 1 or runner.free_slots < runner.slots:
        return None
    for size in runner.decode_buckets:
        active = requests(size)
        try:
            runner.admit(active)
            while waiting := [r for r in active if not r.ready]:
                if runner.read([runner.prefill(waiting, needs)]):
                    return None
            for k in counts:
                fastest = dict.fromkeys((WARM, 1, 1 + rounds), float("inf"))
                for count in (WARM, *[1] * CALLS, *[1 + rounds] * CALLS):
                    before, begun = active[0].rounds, time.perf_counter()
                    runner.read([runner.decode(active, count, needs=needs, num_draft_tokens=k)])
                    fastest[count] = min(fastest[count], time.perf_counter() - begun)
                    if active[0].rounds - before < count:
                        return None
                short, long = fastest[1], fastest[1 + rounds]
                costs[size, k] = (long - short) / rounds if long > short else long / (1 + rounds)
        finally:
            runner.end(active)
    return costs
