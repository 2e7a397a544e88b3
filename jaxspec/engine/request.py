"""Request: one sequence as the host knows it, made from a checked prompt and checked parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec import decode
from jaxspec.engine.params import MAX_SEED, Defaults, Logprob, SamplingParams
from jaxspec.sampling.choice import Needs
from jaxspec.sampling.filters import CANDIDATES
from jaxspec.sampling.logit_edits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_IDS
from jaxspec.sampling.logprobs import MAX_LOGPROBS, Logprobs
from jaxspec.text import OutputText, Tokenizer

MAX_STOP_IDS = 16


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


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes requests for one target. eos_token_ids: what ends a sequence by default."""

    tokenizer: Tokenizer
    vocab_size: int
    max_len: int
    eos_token_ids: tuple[int, ...]
    defaults: Defaults

    def requests(self, index: int, prompt: Any, params: Any, draw_seed: Any) -> list[Request]:
        """The n samples of prompt `index` of a call. draw_seed: gives a seed where params names none.

        Raises TypeError or ValueError, with the prompt's index, for a prompt or params that cannot be served.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params of prompt {index} are of type {type(params).__name__}, expected SamplingParams")
        ids = self._prompt(index, prompt)
        self._check_ids(index, params)
        own_ends = () if params.ignore_eos else self.eos_token_ids
        stop_ids = tuple(dict.fromkeys((*own_ends, *params.stop_token_ids)))
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"prompt {index} has {len(stop_ids)} stop ids, the checkpoint's {len(self.eos_token_ids)} among them; "
                f"expected at most {MAX_STOP_IDS}"
            )
        chosen = {name: self._chosen(params, name) for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
        if params.n > 1 and not chosen["temperature"]:
            raise ValueError(f"n of prompt {index} is {params.n} with temperature 0, where all samples are the same; expected 1")
        tokens, room, bad_words = np.asarray(ids, np.int32), self.max_len - len(ids), self._bad_words(index, params)
        seed = draw_seed() if params.seed is None else params.seed
        return [
            Request(
                prompt=tokens[:],  # all samples share its memory
                limit=len(ids) + (room if params.max_tokens is None else min(params.max_tokens, room)),
                stop_ids=stop_ids,
                own_ends=frozenset(own_ends),
                seed=(seed + i) % MAX_SEED,
                **chosen,
                bad_words=bad_words,
                params=params,
                text=OutputText(self.tokenizer, params.stop, params.include_stop_str_in_output, params.min_tokens),
                index=i,
                prompt_index=index,
            )
            for i in range(params.n)
        ]

    def _chosen(self, params: SamplingParams, name: str) -> Any:
        value = getattr(params, name)
        return getattr(self.defaults, name) if value is None else value

    def _prompt(self, index: int, prompt: Any) -> Sequence[int]:
        if isinstance(prompt, str):
            ids: Any = self.tokenizer.encode(prompt) if prompt else []
        elif isinstance(prompt, list | tuple | range | np.ndarray):
            ids = prompt
        else:
            raise TypeError(f"prompt {index} is of type {type(prompt).__name__}, expected a str or a list of token ids")
        only = set(map(type, ids))  # much faster than to look at each of them
        at = None if only <= {int} else next((at for at, i in enumerate(ids) if not is_id(i)), None)
        if at is not None:
            raise TypeError(f"prompt {index} has {ids[at]!r} at position {at}; expected a token id, an integer")
        if not len(ids):
            raise ValueError(f"prompt {index} is empty; expected at least one token")
        if len(ids) > self.max_len - 1:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens; expected at most {self.max_len - 1}, max_len {self.max_len} less one to generate"
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            at = next(at for at, i in enumerate(ids) if not 0 <= i < self.vocab_size)
            raise ValueError(f"prompt {index} has id {ids[at]} at position {at}; expected 0 .. {self.vocab_size - 1}")
        return ids

    def _check_ids(self, index: int, params: SamplingParams) -> None:
        lists = {
            "stop_token_ids": params.stop_token_ids,
            "logit_bias": params.logit_bias,
            "allowed_token_ids": params.allowed_token_ids or (),
        }
        for name, ids in lists.items():
            outside = [i for i in ids if i >= self.vocab_size]
            if outside:
                raise ValueError(f"{name} of prompt {index} has id {outside[0]}; expected 0 .. {self.vocab_size - 1}")
            if name != "stop_token_ids" and len(ids) > MAX_IDS:
                raise ValueError(f"{name} of prompt {index} has {len(ids)} ids; expected at most {MAX_IDS}")
        allowed = params.allowed_token_ids
        if allowed is not None and not set(allowed) - set(self.defaults.suppress_tokens):
            raise ValueError(f"allowed_token_ids of prompt {index} names only tokens that the checkpoint suppresses")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(params, name)
            if count is not None and count > self.vocab_size:
                raise ValueError(f"{name} of prompt {index} is {count}; expected at most {self.vocab_size}, the vocabulary, or -1 for all")

    def _bad_words(self, index: int, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word's tokens at the beginning of a text and, where they are as many and begin with another, after a space."""
        found = []
        for word in params.bad_words:
            first, spaced = (tuple(self.tokenizer.encode_word(space + word.lstrip())) for space in ("", " "))
            if not first:
                raise ValueError(f"the bad word {word!r} of prompt {index} has no tokens")
            found += [first, spaced] if len(spaced) == len(first) and spaced[0] != first[0] else [first]
            if len(first) > MAX_BAD_WORD_TOKENS:
                raise ValueError(f"the bad word {word!r} of prompt {index} has {len(first)} tokens; expected at most {MAX_BAD_WORD_TOKENS}")
        if len(found) > MAX_BAD_WORDS:
            raise ValueError(
                f"prompt {index} has {len(found)} bad words, with a space before and without; expected at most {MAX_BAD_WORDS}"
            )
        return tuple(found)


def is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
