"""Request: one sequence as the host knows it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import jax
import numpy as np

from jaxspec import decode
from jaxspec.engine.completion import Logprob
from jaxspec.engine.inserts import TOGETHER, Insert
from jaxspec.engine.params import SamplingParams
from jaxspec.engine.round_shape import RoundShape
from jaxspec.engine.structures import Structure
from jaxspec.sampling.choice import Needs
from jaxspec.sampling.filters import CANDIDATES
from jaxspec.sampling.logprobs import MAX_LOGPROBS, Logprobs
from jaxspec.text import OutputText

UNWRITTEN = object()  # see `Request.writer`


@dataclasses.dataclass(eq=False)
class Request:
    """One sequence, as the host knows it."""

    # What was asked for.
    prompt: np.ndarray  # [n] int32
    limit: int  # the length, prompt included, at which it ends
    stop_ids: tuple[int, ...]  # tokens that end it
    own_ends: frozenset[int]  # those of them that are the checkpoint's own end tokens
    seed: int
    temperature: float  # this and the next four: of the params, or the checkpoint's defaults
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    bad_words: tuple[tuple[int, ...], ...]  # each by its token ids
    params: SamplingParams
    text: OutputText  # of the new tokens, with the stop string if one was found
    prompt_text: str | None = None  # the prompt's text; None where token ids were given
    structure: Structure | None = None  # what its text must look like
    index: int = 0  # which of the prompt's n samples it is
    prompt_index: int = 0  # which of the call's prompts it belongs to
    tools: Any = None  # the functions that the model may call
    keep: int = 0  # how many tokens of its prompt the next turn of its conversation begins with; 0 where none is to come
    inserts: tuple[Insert, ...] = ()  # the images, sounds and videos of its prompt, in order, until it has a completion

    # Where it is. The host gives it a slot, and calls on the device report what became of it.
    slot: int = -1  # -1 while it has none
    automaton: tuple[int, int] = (0, 0)  # of a structured text: its state when it got its slot, and the one in which it begins
    refusal: str | None = None  # why it failed before it got a slot
    order: int = -1  # its number in the order in which requests got their first slot; -1 before
    status: int = decode.EMPTY  # this and the next three: as in DecodeState, after the last call
    computed: int = 0
    rounds: int = 0
    drafted: int = 0
    beyond: int = 0  # drafts that its last round accepted past its end
    verified: list[int] = dataclasses.field(default_factory=list)  # how many drafts each round verified, one after the other
    guessed: list[int] = dataclasses.field(default_factory=list)  # how many of them were guesses
    nodes: list[int] = dataclasses.field(default_factory=list)  # the same on all paths of a tree
    goals: list[int] = dataclasses.field(default_factory=list)  # rows at which its prompt is to be kept for others, ascending
    shared: int = 0  # rows of its prompt that had been computed for others
    # What stands for the weights that alone have computed what its slot holds: a target's, and those of a drafter with K and V of its own.
    # None if several have, and as long as an LLM has its first ones and its drafter no K and V; UNWRITTEN before the first call.
    writer: object = None

    under_way: set[int] = dataclasses.field(default_factory=set)  # numbers of the calls that run rounds of it and have not been read

    # What it has.
    output: list[int] = dataclasses.field(default_factory=list)  # the new tokens, without what follows a stop string
    from_draft: list[bool] = dataclasses.field(default_factory=list)  # for each of them, whether it was an accepted draft
    logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)  # of the new tokens that `look` has seen, by the loop
    scored: list[Logprobs] = dataclasses.field(default_factory=list)  # of the new tokens that it has not seen, as calls reported them
    taken: int = 0  # how many new tokens `take` has returned
    asked: float = 0.0  # the time at which it was asked for, in seconds by the LLM's clock
    first_token_seconds: float = 0.0  # from then until its first token was known
    accounted: bool = False  # whether the LLM's totals include it

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    @property
    def tokens(self) -> np.ndarray:
        """The prompt and the new tokens: [length] int32."""
        return np.concatenate([self.prompt, np.asarray(self.output, np.int32)])

    @property
    def key(self) -> np.ndarray:
        """The same with its media told apart: what prompts are compared by. Two sequences with equal keys have equal K and
        V."""
        return self._told_apart(self.tokens)

    @functools.cached_property
    def prompt_key(self) -> np.ndarray:
        """The key of the prompt."""
        return self._told_apart(self.prompt)

    def _told_apart(self, tokens: np.ndarray) -> np.ndarray:
        if self.inserts:
            tokens = tokens.copy()
            for insert in self.inserts:
                tokens[insert.begin : insert.end] = insert.key
        return tokens

    @property
    def seen(self) -> bool:
        """Whether its images, sounds and videos are all decoded, so that it has a key."""
        return all(insert.decoded and insert.failure is None for insert in self.inserts)

    def inserts_within(self, rows: int, chunk: Callable[[int], int]) -> list[Insert]:
        """The inserts that a call computes with the next rows, once so many are: those that are next, as far as they fit, and as its prompt
        is not to be kept before them. chunk: how many rows a call computes, by for how many rows of inserts it has room."""
        found, left = list[Insert](), 0
        for insert in itertools.islice((insert for insert in self.inserts if insert.begin >= rows), TOGETHER):
            left = left if found else insert.room
            kept = any(rows < goal <= insert.begin for goal in self.goals)
            if kept or insert.count > left or insert.end > rows + chunk((found or [insert])[0].room):
                break
            found.append(insert)
            left -= insert.count
        return found

    def next_stop(self, least: int, own: Collection[Insert] = ()) -> int:
        """Up to which row it is computed next, `least` at least: to where its prompt is kept, an insert begins which is none of its own, or
        all is computed."""
        stops = [*self.goals, *(insert.begin for insert in self.inserts if insert not in own)]
        return min((stop for stop in stops if stop >= least), default=self.goal)

    def outside(self, row: int) -> int:
        """The row itself, or that at which an insert begins which it is within."""
        return next((insert.begin for insert in self.inserts if insert.begin < row < insert.end), row)

    @property
    def goal(self) -> int:
        """How many rows must be computed before it decodes: those of all tokens but the anchor, the newest of them. A prompt is computed
        whole, since its last row chooses the first token."""
        return self.length - 1 if self.output else self.length

    @property
    def ready(self) -> bool:
        """Whether it has a first token and all its rows, so that it can decode."""
        return bool(self.output) and self.computed == self.length - 1

    @property
    def ended(self) -> bool:
        return self.status in (decode.STOPPED, decode.FULL_LENGTH, decode.FAILED) or self.text.found is not None

    @property
    def stopped(self) -> bool:
        """Whether a stop id ended it."""
        return self.status == decode.STOPPED

    @property
    def failed(self) -> bool:
        """Whether it failed before its text ended. What a call computes past a stop string does not count."""
        return self.status == decode.FAILED and self.text.found is None

    @property
    def edited(self) -> bool:
        p = self.params
        penalised = self.repetition_penalty != 1 or p.presence_penalty or p.frequency_penalty
        return bool(penalised or p.logit_bias or p.allowed_token_ids or self.bad_words or p.min_tokens)

    @property
    def in_loop(self) -> bool:
        """Whether the decode loop gives its log-probabilities."""
        return self.params.logprobs is not None and 0 <= self.params.logprobs <= MAX_LOGPROBS

    @property
    def rescored(self) -> bool:
        """Whether its log-probabilities take another pass over its text."""
        return self.params.prompt_logprobs is not None or (self.params.logprobs is not None and not self.in_loop)

    @property
    def profile(self) -> tuple[Any, ...]:
        """Requests with equal profiles need the same from a call."""
        top_k = 0 if not self.top_k else 1 if self.top_k <= CANDIDATES else 2
        return self.temperature > 0, top_k, self.top_p < 1, self.min_p > 0, self.edited, self.in_loop, self.structure is not None

    def lose(self) -> None:
        """Takes note that its slot is gone, and with it what was computed. Its tokens stay."""
        self.slot, self.computed = -1, 0
        self.goals.clear()
        self.under_way.clear()

    def advance(self, report: decode.Report, row: int, known: int, shape: RoundShape) -> None:
        """Takes in what a call reports about it. row: its row of the report, which tells of the tokens after the first `known`. shape: of
        each of the call's rounds."""
        length, self.computed, self.status, rounds, self.drafted, self.beyond = report.rows[row, :6].tolist()
        told, k = report.verified_by(row, self.rounds, rounds), shape.num_draft_tokens
        each = [(k, k, shape.drafts)] * (rounds - self.rounds) if told is None else [(checked, real, real) for checked, real in told]
        self.verified += [checked for checked, _, _ in each]
        self.guessed += [guessed for _, guessed, _ in each]
        self.nodes += [nodes for _, _, nodes in each]
        self.rounds, new = rounds, slice(self.length - known, length - known)
        tokens = report.rows[row, 8:][new]
        self.output += np.where(tokens < 0, ~tokens, tokens).tolist()
        self.from_draft += (tokens < 0).tolist()
        assert self.length == length, f"a call tells of {len(tokens)} tokens; {length - self.length} more are needed"
        if report.logprobs is not None and self.in_loop and len(tokens):
            self.scored.append(jax.tree.map(lambda x: x[row, new], report.logprobs))

    def take(self) -> tuple[list[int], str]:
        """(tokens, text) since the last call of this. A stop string ends the sequence here, and what follows it is dropped. A stop token
        has no text unless the params include_stop_str_in_output."""
        new = self.output[self.taken :]
        ended = self.stopped and not self.params.include_stop_str_in_output
        piece = self.text.push(new[:-1] if ended else new)
        if self.ended:
            piece += self.text.finish()
        if self.text.found is not None:
            self._drop(self.text.tokens)
        new, self.taken = self.output[self.taken :], len(self.output)
        return new, piece

    def _drop(self, kept: int) -> None:
        """Drops the new tokens after the first `kept`. Drafts among them that belong to the last kept token's round were accepted all the
        same."""
        flags = self.from_draft[kept - 1 :]
        run = next((i for i, draft in enumerate(flags) if not draft), len(flags))
        self.beyond = max(run - 1, 0) + (self.beyond if run == len(flags) else 0)
        self.output, self.from_draft, self.logprobs = self.output[:kept], self.from_draft[:kept], self.logprobs[:kept]


def needs_of(requests: Iterable[Request], suppress_tokens: tuple[int, ...] = ()) -> Needs:
    """What a call that works on these requests must be compiled for. suppress_tokens: ids that are never chosen."""
    listed = list(requests)
    sampled = [r for r in listed if r.temperature > 0]
    unbounded = [r for r in sampled if not 1 <= r.top_k <= CANDIDATES]
    scope = "plain"
    if any(r.top_k or r.top_p < 1 or r.min_p for r in sampled):
        scope = "top" if not unbounded else "search" if any(r.top_k or r.top_p < 1 for r in unbounded) else "whole"
    logprobs = MAX_LOGPROBS if any(r.in_loop for r in listed) else None
    return Needs(scope, any(r.edited for r in listed), logprobs, suppress_tokens, any(r.structure is not None for r in listed))
