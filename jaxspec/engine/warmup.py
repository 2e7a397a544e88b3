"""Warm-up: everything is compiled, and then rounds are timed, for the choice of what they guess and verify."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from tqdm.auto import tqdm

from jaxspec.engine.request import Request
from jaxspec.engine.round_shape import Adaptive, RoundShape, round_shapes
from jaxspec.engine.runner import Runner
from jaxspec.sampling.choice import Needs

# A round's time is what TIMED more rounds add to a call of one round, divided by TIMED: a call takes time beside its rounds. Each call is
# made CALLS times, and the fastest counts. WARM rounds come first, since a CUDA graph is recorded in the second run of a loop or its body.
WARM, TIMED, CALLS = 3, 4, 3


def warm_up(
    runners: Sequence[Runner],
    needs: Sequence[Needs],
    scores: Collection[int],
    adaptive: bool,
    requests: Callable[[int], list[Request]],
    progress: bool,
) -> None:
    """Compiles all programs that requests with some needs use, with a progress bar. If calls are to choose the shape of rounds, it then
    times rounds of each with the first needs, if that is not done yet, and the runners choose from then on.

    runners: of all data shards. scores: numbers of likely tokens, of texts that are scored. requests: makes so many requests, as `measured`
    takes them.
    """
    programs = list(dict.fromkeys(p for some in needs for p in runners[0].choice.all_for(some, scores, adaptive)))
    with tqdm(total=len(runners) * len(programs), desc="Compiling", disable=not progress) as bar:
        for runner in runners:
            for line in runner.warmup(programs, structured=any(some.structured for some in needs)):
                bar.set_postfix_str(line)
                bar.update()
        if adaptive and runners[0].choice.adaptive is None:
            costs = measured(runners[0], needs[0], requests)
            for runner in runners:
                runner.choice.adaptive = Adaptive(costs) if costs else None


def measured(runner: Runner, needs: Needs, requests: Callable[[int], list[Request]]) -> dict[tuple[int, RoundShape], float] | None:
    """Seconds of a round for each batch size and shape, from a few rounds of short sequences; None if there is no room for them.

    Everything must be compiled. requests: makes so many requests with short prompts, which end at max_len only.
    """
    costs, settings, watched = {}, runner.settings, runner.drafting.watched
    rounds = min(TIMED, ((settings.max_len - 2) // (settings.most_accepted + 1) - WARM) // CALLS - 2)
    if rounds < 1 or runner.free_slots < settings.max_slots:
        return None
    try:
        for size in runner.choice.chain_sizes:
            for shape in round_shapes(size, settings.num_draft_tokens):
                cost = _cost(runner, requests(size), rounds, needs, shape)
                if cost is None:
                    return None
                costs[size, shape] = cost
    finally:
        runner.drafting.watched = watched  # these texts are nobody's
    return costs


def _cost(runner: Runner, active: list[Request], rounds: int, needs: Needs, shape: RoundShape) -> float | None:
    """Seconds of a round of these requests, None where a call did less than it was asked for."""
    fastest = dict.fromkeys((WARM, 1, 1 + rounds), float("inf"))
    try:
        runner.admit(active)
        while waiting := [r for r in active if not r.ready]:
            if runner.read([runner.prefill(waiting, needs)]):
                return None
        for count in (WARM, *[1] * CALLS, *[1 + rounds] * CALLS):
            before, begun = active[0].rounds, time.perf_counter()
            runner.read([runner.decode(active, count, needs=needs, shape=shape)])
            fastest[count] = min(fastest[count], time.perf_counter() - begun)
            if active[0].rounds - before < count:
                return None
    finally:
        runner.end(active)
    short, long = fastest[1], fastest[1 + rounds]
    return (long - short) / rounds if long > short else long / (1 + rounds)
