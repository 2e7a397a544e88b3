"""Warm-up: everything is compiled, and then rounds are timed, for the choice of how many tokens they guess."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from tqdm.auto import tqdm

from jaxspec.engine.draft_count import Adaptive
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.sampling.choice import Needs

# A round's time is what TIMED more rounds add to a call of one round, divided by TIMED: a call takes time beside its rounds. Each call is
# made CALLS times, and the fastest counts. WARM rounds come first, since a CUDA graph is recorded in the second run of a loop or its body.
WARM, TIMED, CALLS = 3, 4, 3


def warm_up(
    runners: Sequence[Runner], needs: Needs, draft_counts: Sequence[int], requests: Callable[[int], list[Request]], progress: bool
) -> None:
    """Compiles all programs that requests with these needs use, with a progress bar. Where there are draft counts to choose among, it then
    times rounds of each, if that is not done yet, and the runners choose from then on.

    runners: of all data shards. requests: makes so many requests, as `measured` takes them.
    """
    total = len(runners) * len(runners[0].programs_for(needs, draft_counts))
    with tqdm(total=total, desc="Compiling", disable=not progress) as bar:
        for runner in runners:
            for line in runner.warmup(needs, draft_counts):
                bar.set_postfix_str(line)
                bar.update()
        if draft_counts and runners[0].adaptive is None:
            costs = measured(runners[0], draft_counts, needs, requests)
            for runner in runners:
                runner.adaptive = Adaptive(draft_counts, costs) if costs else None


def measured(
    runner: Runner, draft_counts: Iterable[int], needs: Needs, requests: Callable[[int], list[Request]]
) -> dict[tuple[int, int], float] | None:
    """Seconds of a round for each (batch size, number of drafts), from a few rounds of short sequences; None if there is no room for them.

    Everything must be compiled. requests: makes so many requests with short prompts, which end at max_len only.
    """
    counts, costs, settings = sorted(draft_counts), {}, runner.settings
    rounds = min(TIMED, ((settings.max_len - 2) // sum(k + 1 for k in counts) - WARM) // CALLS - 2)
    if rounds < 1 or runner.free_slots < settings.max_slots:
        return None
    for size in runner.buckets.decode:
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
