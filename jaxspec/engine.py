"""LLM: what `jaxspec.load` returns. Requests are checked here, put into slots as these come free, and turned into text."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tqdm.auto import tqdm

from jaxspec.accept import COUPLED, Rule
from jaxspec.decode import STOPPED
from jaxspec.drafters.base import Drafter
from jaxspec.gemma4 import Gemma4
from jaxspec.params import Chunk, Completion, SamplingParams, integer
from jaxspec.runner import MAX_STOP_IDS, Request, Runner
from jaxspec.stats import RoundStats, Stats
from jaxspec.text import IncrementalDetokenizer, Tokenizer

STEPS = 64  # rounds of a call; it bounds how long an interrupt waits
STREAM_STEPS = 4

Prompt = str | Sequence[int] | np.ndarray


class LLM:
    """A target with a drafter, ready to generate.

    Several threads may use one LLM; their calls take turns. A stream holds a slot until it is read to its end or closed.

    target, drafter: weights on their devices. eos_token_ids: what ends a sequence by default. temperature: of requests that name
    none. The other settings are those of `jaxspec.load`; shardings is as in `Runner`.
    """

    def __init__(
        self,
        target: Gemma4,
        drafter: Drafter,
        tokenizer: Tokenizer,
        *,
        num_draft_tokens: int,
        max_slots: int,
        max_len: int,
        eos_token_ids: Sequence[int] = (),
        temperature: float = 0.0,
        accept: Rule = COUPLED,
        attention: str = "auto",
        draft_attention: str = "auto",
        shardings: Any = None,
        seed: int = 0,
        progress: bool = True,
        name: str = "",
    ):
        self.tokenizer = tokenizer
        self.config = target.config
        self.eos_token_ids, self.default_temperature = tuple(eos_token_ids), temperature
        self._runner = Runner(
            target,
            drafter,
            slots=max_slots,
            max_len=max_len,
            num_draft_tokens=num_draft_tokens,
            accept=accept,
            attention=attention,
            draft_attention=draft_attention,
            shardings=shardings,
        )
        self._seeds = random.Random(seed)
        self._progress, self._name = progress, name
        self._lock = threading.RLock()
        self._totals = Stats(weight_bytes=self._runner.weight_bytes, state_bytes=self._runner.state_bytes)

    @property
    def target(self) -> Gemma4:
        return self._runner.target

    @property
    def drafter(self) -> Drafter:
        return self._runner.drafter

    @property
    def num_draft_tokens(self) -> int:
        return self._runner.num_draft_tokens

    @property
    def max_slots(self) -> int:
        return self._runner.slots

    @property
    def max_len(self) -> int:
        return self._runner.max_len

    @property
    def stats(self) -> Stats:
        """Totals since the LLM was loaded."""
        return dataclasses.replace(self._totals, compilations=self._runner.compilations, compile_seconds=self._runner.compile_seconds)

    def __repr__(self) -> str:
        return (
            f"LLM({self._name!r}, drafter={type(self.drafter).__name__}, num_draft_tokens={self.num_draft_tokens}, "
            f"max_slots={self.max_slots}, max_len={self.max_len}, dtype={self.target.dtype}, on {jax.default_backend()})"
        )

    def warmup(self) -> None:
        """Compiles everything that a run can use, with a progress bar."""
        total = len(self._runner.decode_buckets) + len(self._runner.prefill_buckets)
        with self._lock, tqdm(total=total, desc="Compiling", disable=not self._progress) as bar:
            for line in self._runner.warmup():
                bar.set_postfix_str(line)
                bar.update()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Completes prompts, any number of them, and returns one Completion for each, in order.

        prompts: a str, a list of token ids, or a list of either. params: one for all, or one for each prompt.
        Raises ValueError or TypeError, before anything is computed, for a prompt that is empty, longer than max_len - 1 or has ids
        out of range, and for params that do not fit.
        """
        listed = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
        requests = self._requests(listed, params)
        done: dict[Request, Completion] = {}
        show = self._progress and len(requests) > 1
        with self._lock, self._timed(), tqdm(total=len(requests), desc="Generating", unit="prompt", disable=not show) as bar:
            for request, completion in self._complete(requests):
                done[request] = completion
                bar.update()
        return [done[request] for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, steps: int = STREAM_STEPS) -> Iterator[Chunk]:
        """Completes one prompt and gives the text as it comes: the first token, then what each `steps` rounds add.

        The tokens are those of `generate`. Closing the iterator frees its slot. Raises what `generate` raises, at once.
        """
        if params is not None and not isinstance(params, SamplingParams):
            raise TypeError(f"params is {type(params).__name__}, expected SamplingParams or None")
        return self._stream(self._requests([prompt], params)[0], integer("steps", steps, 1))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        enable_thinking: bool = False,
    ) -> Any:
        """Answers a conversation: a Completion; or a list of conversations: a list of Completions.

        messages: dicts with "role" and "content", by the checkpoint's chat template. enable_thinking goes to the template.
        Raises what `generate` raises, and ValueError for images and other content that is not text.
        """
        several = isinstance(messages, list | tuple) and len(messages) > 0 and isinstance(messages[0], list | tuple)
        conversations: Any = messages if several else [messages]
        completions = self.generate([self.chat_prompt(m, enable_thinking=enable_thinking) for m in conversations], params)
        return completions if several else completions[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], *, enable_thinking: bool = False) -> list[int]:
        """The token ids of a conversation up to the model's turn: what `chat` generates from."""
        for i, message in enumerate(messages):
            content = message.get("content") if isinstance(message, Mapping) else None
            for part in content if isinstance(content, list | tuple) else ():
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                if kind != "text":
                    raise ValueError(f"message {i} holds content of type {kind!r}; only text can be read")
        return self.tokenizer.apply_chat_template(messages, enable_thinking=enable_thinking)

    def _requests(self, prompts: Sequence[Any], params: Any) -> list[Request]:
        """Checked requests for a list of prompts."""
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        else:
            each = list(params)
            if len(each) != len(prompts):
                raise ValueError(f"found {len(each)} params for {len(prompts)} prompts; expected one for each, or one for all")
        return [self._request(i, prompt, p) for i, (prompt, p) in enumerate(zip(prompts, each, strict=True))]

    def _request(self, index: int, prompt: Any, params: Any) -> Request:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params of prompt {index} are of type {type(params).__name__}, expected SamplingParams")
        ids = self._ids(index, prompt)
        vocab = self.config.vocab_size
        if not len(ids):
            raise ValueError(f"prompt {index} is empty; expected at least one token")
        if len(ids) > self.max_len - 1:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens; expected at most {self.max_len - 1}, max_len {self.max_len} less one to generate"
            )
        at = next((at for at, i in enumerate(ids) if not 0 <= i < vocab), None)
        if at is not None:
            raise ValueError(f"prompt {index} has id {ids[at]} at position {at}; expected 0 .. {vocab - 1}")
        outside = [i for i in params.stop_token_ids if i >= vocab]
        if outside:
            raise ValueError(f"stop_token_ids of prompt {index} has id {outside[0]}; expected 0 .. {vocab - 1}")
        stop_ids = tuple(dict.fromkeys((*(() if params.ignore_eos else self.eos_token_ids), *params.stop_token_ids)))
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"prompt {index} has {len(stop_ids)} stop ids, the checkpoint's {len(self.eos_token_ids)} among them; "
                f"expected at most {MAX_STOP_IDS}"
            )
        room = self.max_len - len(ids)
        return Request(
            prompt=np.asarray(ids, np.int32),
            limit=len(ids) + (room if params.max_tokens is None else min(params.max_tokens, room)),
            stop_ids=stop_ids,
            seed=self._seeds.getrandbits(53) if params.seed is None else params.seed,
            temperature=self.default_temperature if params.temperature is None else params.temperature,
            ignore_eos=params.ignore_eos,
        )

    def _ids(self, index: int, prompt: Any) -> Sequence[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt) if prompt else []
        if not isinstance(prompt, list | tuple | range | np.ndarray):
            raise TypeError(f"prompt {index} is of type {type(prompt).__name__}, expected a str or a list of token ids")
        at = next((at for at, i in enumerate(prompt) if not _is_id(i)), None)
        if at is not None:
            raise TypeError(f"prompt {index} has {prompt[at]!r} at position {at}; expected a token id, an integer")
        return prompt  # pyright: ignore[reportReturnType]

    def _complete(self, requests: Sequence[Request]) -> Iterator[tuple[Request, Completion]]:
        """Runs requests through the slots, and gives each as it ends."""
        runner, waiting, active = self._runner, collections.deque(requests), list[Request]()
        try:
            while waiting or active:
                fresh = [waiting.popleft() for _ in range(min(len(waiting), runner.free_slots))]
                if fresh:
                    runner.admit(fresh)
                    active += fresh
                elif not active:
                    raise RuntimeError(f"all {self.max_slots} slots are held by open streams; close some, or load with more max_slots")
                ended = [r for r in active if not r.running]
                if not ended:
                    runner.decode(active, STEPS, until_any=bool(waiting))
                    ended = [r for r in active if not r.running]
                if ended:
                    runner.fetch(ended)
                    runner.end(ended)
                    active = [r for r in active if r.running]
                    yield from ((request, self._completion(request)) for request in ended)
        finally:
            runner.end(active)

    def _stream(self, request: Request, steps: int) -> Iterator[Chunk]:
        runner, text = self._runner, IncrementalDetokenizer(self.tokenizer)
        known, finished = len(request.prompt), False
        try:
            with self._lock, self._timed():
                if not runner.free_slots:
                    raise RuntimeError(f"all {self.max_slots} slots are held by open streams; close some, or load with more max_slots")
                runner.admit([request])
                runner.fetch([request])
            while request.running:
                new = request.tokens[known:].tolist()
                known = request.length
                yield Chunk(text.push(new), new)
                with self._lock, self._timed():
                    runner.decode([request], steps)
                    runner.fetch([request])
            runner.end([request])
            finished = True
            completion = self._completion(request)
            new = request.tokens[known:].tolist()
            shown = new[:-1] if request.status == STOPPED else new
            yield Chunk(text.push(shown) + text.flush(), new, completion.finish_reason, completion)
        finally:
            runner.end([request])
            if not finished and request.tokens.size:
                self._account(request)

    def _completion(self, request: Request) -> Completion:
        stopped, prompt = request.status == STOPPED, len(request.prompt)
        new = request.tokens[prompt:].tolist()
        own = () if request.ignore_eos else self.eos_token_ids
        return Completion(
            text=self.tokenizer.decode(new[:-1] if stopped else new),
            token_ids=new,
            finish_reason="stop" if stopped else "length",
            stop_reason=new[-1] if stopped and new[-1] not in own else None,
            prompt_token_ids=request.prompt.tolist(),
            seed=request.seed,
            stats=self._account(request),
        )

    def _account(self, request: Request) -> RoundStats:
        """The request's rounds, once they are added to the totals."""
        rounds = RoundStats.of(request.from_draft[len(request.prompt) :], request.drafted, self.num_draft_tokens)
        self._totals = self._totals.plus(len(request.prompt), rounds)
        return rounds

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begun, compiled = time.perf_counter(), self._runner.compile_seconds
        try:
            yield
        finally:
            spent = time.perf_counter() - begun - (self._runner.compile_seconds - compiled)
            self._totals = dataclasses.replace(self._totals, seconds=self._totals.seconds + spent)


def _is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _is_ids(prompts: Any) -> bool:
    """Whether this is one prompt of token ids rather than a list of prompts."""
    return isinstance(prompts, list | tuple | range | np.ndarray) and len(prompts) > 0 and all(map(_is_id, prompts))
