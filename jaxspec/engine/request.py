"""Request: one sequence as the host knows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxspec import decode
from jaxspec.engine.completion import Logprob
from jaxspec.engine.params import SamplingParams
from jaxspec.sampling.choice import Needs
from jaxspec.sampling.filters import CANDIDATES
from jaxspec.sampling.logprobs import MAX_LOGPROBS, Logprobs
from jaxspec.text import OutputText


@dataclasses.dataclass(eq=False)
class Request:
    """One sequence. prompt: [n] int32. limit: the length at which it ends. own_ends: the checkpoint's end tokens, none if ignored.
    params: what was asked for; temperature .. repetition_penalty are params' or the checkpoint's. bad_words: by their token ids. index:
    which of the prompt's samples. prompt_index: which of the call's prompts.

    status, computed, rounds, drafted: as of the last call, see DecodeState. guessed: how many tokens each round guessed. output,
    from_draft: the new tokens so far, without what follows a stop string, and whether each was an accepted draft. text: the output's.
    logprobs: of each new token that was looked at, if the loop gives them; scored: those of tokens that were not. taken: how many tokens
    `take` has given. slot: -1 while it has
    none. order: requests that were begun before. goals: rows at which its prompt is to be kept for others. shared: rows of its prompt
    that others had computed. keep: whether its slot may go on from an earlier turn, and be kept for the next. asked: when it was asked
    for; first_token_seconds: until its first token. accounted: whether the totals have it.
    """

    prompt: np.ndarray
    limit: int
    stop_ids: tuple[int, ...]
    own_ends: frozenset[int]
    seed: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    bad_words: tuple[tuple[int, ...], ...]
    params: SamplingParams
    text: OutputText
    index: int = 0
    prompt_index: int = 0
    keep: bool = False
    slot: int = -1
    order: int = -1
    status: int = decode.EMPTY
    computed: int = 0
    rounds: int = 0
    drafted: int = 0
    guessed: list[int] = dataclasses.field(default_factory=list)
    output: list[int] = dataclasses.field(default_factory=list)
    from_draft: list[bool] = dataclasses.field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    scored: list[Logprobs] = dataclasses.field(default_factory=list)
    taken: int = 0
    goals: list[int] = dataclasses.field(default_factory=list)
    shared: int = 0
    asked: float = 0.0
    first_token_seconds: float = 0.0
    accounted: bool = False

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def tokens(self) -> np.ndarray:
        """All that are known. [length] int32"""
        return np.concatenate([self.prompt, np.asarray(self.output, np.int32)])

    @property
    def goal(self) -> int:
        """How many rows are to be computed before it decodes: all but the anchor."""
        return self.length - 1 if self.output else self.length

    @property
    def ready(self) -> bool:
        """Whether it decodes."""
        return bool(self.output) and self.computed == self.length - 1

    @property
    def ended(self) -> bool:
        return self.status in (decode.STOPPED, decode.FULL_LENGTH, decode.FAILED) or self.text.found is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop id ended it."""
        return self.status == decode.STOPPED

    @property
    def edited(self) -> bool:
        p = self.params
        penalised = self.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
        return bool(penalised or p.logit_bias or p.allowed_token_ids or self.bad_words or p.min_tokens)

    @property
    def in_loop(self) -> bool:
        """Whether the loop gives its log-probabilities."""
        return self.params.logprobs is not None and 0 <= self.params.logprobs <= MAX_LOGPROBS

    @property
    def rescored(self) -> bool:
        """Whether its log-probabilities take another pass over its text."""
        return self.params.prompt_logprobs is not None or (self.params.logprobs is not None and not self.in_loop)

    @property
    def profile(self) -> tuple[Any, ...]:
        """Requests of one profile need the same of a call."""
        top_k = 0 if not self.top_k else 1 if self.top_k <= CANDIDATES else 2
        return self.temperature > 0, top_k, self.top_p < 1, self.min_p > 0, self.edited, self.in_loop

    def lose(self) -> None:
        """Its slot is another's: what was computed is gone, what is known stays."""
        self.slot, self.computed = -1, 0
        self.goals.clear()

    def advance(self, report: decode.Report, row: int, num_draft_tokens: int) -> None:
        """Takes in what a call whose rounds guessed so many tokens reports about it in this row."""
        length, self.computed, self.status, rounds, self.drafted = report.rows[row, :5].tolist()
        self.guessed += [num_draft_tokens] * (rounds - self.rounds)
        self.rounds, new = rounds, length - self.length
        tokens = report.rows[row, 7 : 7 + new]
        self.output += np.where(tokens < 0, ~tokens, tokens).tolist()
        self.from_draft += (tokens < 0).tolist()
        if report.logprobs is not None and self.in_loop and new:
            self.scored.append(jax.tree.map(lambda x: x[row, :new], report.logprobs))

    def take(self) -> tuple[list[int], str]:
        """(tokens, text) since the last time. A stop string ends the sequence here, and what comes after it is dropped. A stop token
        has no text unless include_stop_str_in_output."""
        new = self.output[self.taken :]
        ended = self.stopped and not self.params.include_stop_str_in_output
        piece = self.text.push(new[:-1] if ended else new)
        if self.ended:
            piece += self.text.finish()
        if self.text.found is not None:
            kept = self.text.tokens
            self.output, self.from_draft, self.logprobs = self.output[:kept], self.from_draft[:kept], self.logprobs[:kept]
        new, self.taken = self.output[self.taken :], len(self.output)
        return new, piece


def needs_of(requests: Iterable[Request], suppress_tokens: tuple[int, ...] = ()) -> Needs:
    """What a call that works on these requests must be compiled with."""
    listed = list(requests)
    sampled = [r for r in listed if r.temperature > 0]
    whole = [r for r in sampled if not 1 <= r.top_k <= CANDIDATES]
    scope = "plain"
    if any(r.top_k or r.top_p < 1 or r.min_p for r in sampled):
        scope = "top" if not whole else "search" if any(r.top_k or r.top_p < 1 for r in whole) else "whole"
    logprobs = MAX_LOGPROBS if any(r.in_loop for r in listed) else None
    return Needs(scope, any(r.edited for r in listed), logprobs, suppress_tokens)
