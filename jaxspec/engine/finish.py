"""From a request to what its caller gets: tokens and text as they come, log-probabilities by token, and the Completion at its end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax

from jaxspec.engine.completion import Completion, Logprob
from jaxspec.engine.request import Request
from jaxspec.engine.stats import RoundStats
from jaxspec.sampling.logprobs import Logprobs
from jaxspec.text import Tokenizer

LEAST_SCORED = 32  # another pass over a text names at least so many of the most likely tokens

Named = list[dict[int, Logprob]]


def look(request: Request, tokenizer: Tokenizer) -> tuple[list[int], str]:
    """Takes in what came since the last time, and returns the new tokens and their text. A stop string ends the request here."""
    for some in request.scored:
        known = len(request.logprobs)
        request.logprobs += named(request.output[known:], some, request.params.logprobs or 0, tokenizer)
    request.scored.clear()
    return request.take()


def final_logprobs(
    request: Request, tokenizer: Tokenizer, vocab_size: int, score: Callable[[Request, int], Logprobs]
) -> tuple[Named | None, list[dict[int, Logprob] | None] | None]:
    """(of its output, of its prompt): the log-probabilities of a request that has ended. None for what it did not ask for, or where it
    failed first. score: see `Turn.score`; called for those that the loop does not give."""
    params, of_output, of_prompt = request.params, request.logprobs if request.in_loop else None, None
    if request.failed or not request.rescored:
        return of_output, of_prompt
    count, prompt_count = _counts(request, vocab_size)
    found = score(request, likely_scored(request, vocab_size))
    if not request.in_loop and params.logprobs is not None:
        of_output = named(request.output, jax.tree.map(lambda x: x[len(request.prompt) - 1 :], found), count, tokenizer)
    if params.prompt_logprobs is not None:
        of_prompt = [None, *named(request.prompt[1:].tolist(), found, prompt_count, tokenizer)]
    return of_output, of_prompt


def likely_scored(request: Request, vocab_size: int) -> int:
    """How many likely tokens another pass over a text gives at each row: the next power of two, so that few programs serve all requests."""
    most = max(LEAST_SCORED, 1 << (max(_counts(request, vocab_size)) - 1).bit_length())
    return min(most, vocab_size)


def _counts(request: Request, vocab_size: int) -> tuple[int, int]:
    """How many likely tokens of its output, if the decode loop does not give them, and of its prompt a request asks for."""
    of_output = None if request.in_loop else request.params.logprobs
    count, prompt_count = (vocab_size if n == -1 else n or 0 for n in (of_output, request.params.prompt_logprobs))
    return count, prompt_count


def named(tokens: Sequence[int], found: Logprobs, count: int, tokenizer: Tokenizer) -> Named:
    """For each token a dict of itself and of the `count` most likely tokens."""
    rows = []
    for token, chosen, rank, top, ids in zip(tokens, found.chosen, found.rank, found.top, found.ids, strict=False):
        row = {token: Logprob(float(chosen), int(rank), tokenizer.token_text(token))}
        for i, (other, value) in enumerate(zip(ids[:count].tolist(), top[:count].tolist(), strict=True), start=1):
            row.setdefault(other, Logprob(value, i, tokenizer.token_text(other)))
        rows.append(row)
    return rows


def completion_of(
    request: Request,
    tokenizer: Tokenizer,
    stats: RoundStats,
    logprobs: Named | None,
    prompt_logprobs: list[dict[int, Logprob] | None] | None,
) -> Completion:
    """The Completion of a request that has ended, and that `look` has seen since."""
    failed, found, output = request.failed, request.text.found, request.output
    by_id = request.stopped and found is None
    return Completion(
        text=request.text.text,
        token_ids=output,
        finish_reason="error" if failed else "stop" if by_id or found is not None else "length",
        stop_reason=output[-1] if by_id and output[-1] not in request.own_ends else found,
        prompt_token_ids=request.prompt.tolist(),
        seed=request.seed,
        stats=stats,
        index=request.index,
        prompt_index=request.prompt_index,
        num_cached_tokens=request.shared,
        prompt=request.prompt_text,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        error=_failure(request) if failed else None,
        tokenizer=tokenizer,
        tools=request.tools,
    )


def _failure(request: Request) -> str:
    """What failed and where, for `Completion.error`."""
    if request.refusal is not None:
        return request.refusal
    where = f"step {request.rounds}" if request.output else "the pass over the prompt"
    what = f"the target's logits at position {request.length}, of new token {len(request.output) + 1}, are not finite"
    what += ", or the request allows none" if request.edited or request.structure else ""
    return f"{what}; it failed in {where}"
