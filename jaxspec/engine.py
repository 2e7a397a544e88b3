"""LLM: what `jaxspec.load` returns. Requests are put into slots as these come free, and turned into text."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tqdm.auto import tqdm

from jaxspec.accept import COUPLED, Rule
from jaxspec.drafters.base import Drafter
from jaxspec.gemma4 import Gemma4
from jaxspec.logprobs import Logprobs
from jaxspec.params import Chunk, Completion, Defaults, Logprob, SamplingParams, integer
from jaxspec.request import Maker, Request, is_id, needs_of
from jaxspec.runner import Runner
from jaxspec.sampling import Needs
from jaxspec.stats import RoundStats, Stats
from jaxspec.text import Tokenizer
from jaxspec.watch import Watch

STEPS = 64  # rounds of a call; it bounds how long an interrupt waits
WATCHED_STEPS = 8  # where text is looked at for stop strings between calls
STREAM_STEPS = 4
AHEAD = 4  # requests that are read before there is a slot for them
FULL = "all {} slots are held by open streams; close some, or load with more max_slots"

Prompt = str | Sequence[int] | np.ndarray


class LLM:
    """A target with a drafter, ready to generate.

    Several threads may use one LLM; their calls take turns. A stream holds a slot until it is read to its end or closed.

    target, drafter: weights on their devices. eos_token_ids: what ends a sequence by default. defaults: of requests that say nothing.
    The other settings are those of `jaxspec.load`; shardings is as in `Runner`.
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
        defaults: Defaults | None = None,
        accept: Rule = COUPLED,
        attention: str = "auto",
        draft_attention: str = "auto",
        kv_dtype: Any = None,
        shardings: Any = None,
        seed: int = 0,
        progress: bool = True,
        name: str = "",
    ):
        self.tokenizer = tokenizer
        self.config = target.config
        self.eos_token_ids, self.defaults = tuple(eos_token_ids), defaults or Defaults()
        self._runner = Runner(
            target,
            drafter,
            slots=max_slots,
            max_len=max_len,
            num_draft_tokens=num_draft_tokens,
            accept=accept,
            attention=attention,
            draft_attention=draft_attention,
            kv_dtype=kv_dtype,
            shardings=shardings,
        )
        self._watch = Watch(drafter, accept)
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
        """Totals since the LLM was loaded. The difference of two is what happened in between."""
        runner = self._runner
        compiled = {"compilations": runner.compilations, "compile_seconds": runner.compile_seconds}
        return dataclasses.replace(self._totals, **compiled, peak_bytes=runner.peak_bytes)

    def __repr__(self) -> str:
        return (
            f"LLM({self._name!r}, drafter={type(self.drafter).__name__}, num_draft_tokens={self.num_draft_tokens}, "
            f"max_slots={self.max_slots}, max_len={self.max_len}, dtype={self.target.dtype}, on {jax.default_backend()})"
        )

    def _repr_html_(self) -> str:
        from jaxspec.display import llm_html

        return llm_html(self, self._name)

    def warmup(self, *params: SamplingParams) -> None:
        """Compiles everything that a run with requests of these params can use, with a progress bar; with none, requests that say
        nothing. Requests that need more of what SamplingParams offers (filters; penalties and the like; logprobs) compile it when
        they come."""
        requests = [r for p in params or [SamplingParams()] for r in self._requests([[0]], p)]
        total = len(self._runner.decode_buckets) + len(self._runner.prefill_buckets)
        with self._lock, tqdm(total=total, desc="Compiling", disable=not self._progress) as bar:
            for line in self._runner.warmup(self._needs(requests)):
                bar.set_postfix_str(line)
                bar.update()

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Completes prompts, any number of them, and returns one Completion for each, in order; where params ask for n of a prompt,
        its n one after the other.

        prompts: a str, a list of token ids, or a list of either. params: one for all, or one for each prompt.
        Raises ValueError or TypeError, before anything is computed, for a prompt that is empty, longer than max_len - 1 or has ids
        out of range, and for params that do not fit.
        """
        listed = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
        return self._generate(self._requests(listed, params))

    def as_completed(
        self, prompts: Iterable[Prompt | tuple[Prompt, SamplingParams]], params: SamplingParams | None = None
    ) -> Iterator[Completion]:
        """Completes prompts and yields each Completion as it is ready, in whatever order: its prompt_index says which item it belongs to.

        prompts: any iterable, read as slots come free and never far ahead. An item is a prompt, or a tuple of a prompt and its own
        SamplingParams. params: for the items that bring none.
        An item that is not valid raises what `generate` raises, with its number, when it is read; `check` tells beforehand. That, an
        exception in `prompts` or in the consumer, and closing the iterator end all that is unfinished and free the slots.
        """
        if isinstance(prompts, str) or not hasattr(prompts, "__iter__"):
            raise TypeError(f"prompts is of type {type(prompts).__name__}, expected an iterable of prompts")
        if params is not None and not isinstance(params, SamplingParams):
            raise TypeError(f"params is {type(params).__name__}, expected SamplingParams or None")
        return self._as_completed(self._read(prompts, params or SamplingParams()))

    def _as_completed(self, requests: Iterator[Request]) -> Iterator[Completion]:
        running = self._complete(requests)
        try:
            while True:
                with self._lock, self._timed():
                    found = next(running, None)
                if found is None:
                    return
                yield found[1]
        finally:
            running.close()

    def check(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Raises what `generate` would raise for this prompt with these params; computes nothing."""
        self._maker.requests(0, prompt, SamplingParams() if params is None else params, lambda: 0)

    def _read(self, items: Iterable[Any], params: SamplingParams) -> Iterator[Request]:
        """Checked requests for each item, when it is asked for."""
        for i, item in enumerate(items):
            own = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], SamplingParams)
            prompt, asked = item if own else (item, params)
            yield from self._maker.requests(i, prompt, asked, self._draw_seed)

    def _generate(self, requests: Sequence[Request]) -> list[Completion]:
        done: dict[Request, Completion] = {}
        show = self._progress and len(requests) > 1
        with self._lock, self._timed(), tqdm(total=len(requests), desc="Generating", unit="prompt", disable=not show) as bar:
            for request, completion in self._complete(iter(requests), {r.profile: r for r in requests}):
                done[request] = completion
                bar.update()
        return [done[request] for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, steps: int = STREAM_STEPS) -> Iterator[Chunk]:
        """Completes one prompt and gives the text as it comes: the first token, then what each `steps` rounds add.

        The tokens are those of `generate`. Closing the iterator frees its slot. Raises what `generate` raises, at once.
        """
        return self._begin(prompt, params, steps)

    def _begin(self, prompt: Any, params: Any, steps: int, *, keep: bool = False) -> Iterator[Chunk]:
        if params is not None and not isinstance(params, SamplingParams):
            raise TypeError(f"params is {type(params).__name__}, expected SamplingParams or None")
        if params is not None and params.n > 1:
            raise ValueError(f"n is {params.n}; a stream is one completion, expected 1")
        return self._stream(self._requests([prompt], params, keep=keep)[0], integer("steps", steps, 1))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        enable_thinking: bool = False,
    ) -> Any:
        """Answers a conversation: a Completion; or a list of conversations, or several samples of one: a list of Completions.

        messages: dicts with "role" and "content", by the checkpoint's chat template. enable_thinking goes to the template.
        A conversation that has ended keeps its slot until it is needed; one that begins like it computes only what is different, as
        long as sliding layers still hold the window before that. Raises what `generate` raises, and ValueError for images and other
        content that is not text.
        """
        several = isinstance(messages, list | tuple) and len(messages) > 0 and isinstance(messages[0], list | tuple)
        conversations: Any = messages if several else [messages]
        prompts = [self.chat_prompt(m, enable_thinking=enable_thinking) for m in conversations]
        completions = self._generate(self._requests(prompts, params, keep=True))
        return completions if several or len(completions) > 1 else completions[0]

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        enable_thinking: bool = False,
        steps: int = STREAM_STEPS,
    ) -> Iterator[Chunk]:
        """Answers one conversation and gives the text as it comes, as `stream` does. The rest as in `chat`."""
        return self._begin(self.chat_prompt(messages, enable_thinking=enable_thinking), params, steps, keep=True)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], *, enable_thinking: bool = False) -> list[int]:
        """The token ids of a conversation up to the model's turn: what `chat` generates from."""
        for i, message in enumerate(messages):
            content = message.get("content") if isinstance(message, Mapping) else None
            for part in content if isinstance(content, list | tuple) else ():
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                if kind != "text":
                    raise ValueError(f"message {i} holds content of type {kind!r}; only text can be read")
        return self.tokenizer.apply_chat_template(messages, enable_thinking=enable_thinking)

    def _requests(self, prompts: Sequence[Any], params: Any, *, keep: bool = False) -> list[Request]:
        """Checked requests for a list of prompts."""
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        else:
            each = list(params)
            if len(each) != len(prompts):
                raise ValueError(f"found {len(each)} params for {len(prompts)} prompts; expected one for each, or one for all")
        maker, pairs = self._maker, enumerate(zip(prompts, each, strict=True))
        made = [r for i, (prompt, p) in pairs for r in maker.requests(i, prompt, p, self._draw_seed)]
        return [dataclasses.replace(request, keep=keep) for request in made]

    @property
    def _maker(self) -> Maker:
        return Maker(self.tokenizer, self.config.vocab_size, self.max_len, self.eos_token_ids, self.defaults)

    def _draw_seed(self) -> int:
        return self._seeds.getrandbits(53)

    def _needs(self, requests: Sequence[Request]) -> Needs:
        return needs_of(requests, self.defaults.suppress_tokens)

    def _complete(
        self, requests: Iterator[Request], kinds: dict[tuple[Any, ...], Request] | None = None
    ) -> Generator[tuple[Request, Completion], None, None]:
        """Runs requests through the slots, and gives each as it ends. kinds: one request of each profile, where all are known; calls
        are compiled for what has come so far."""
        kinds = kinds or {}
        runner, waiting, active, begun = self._runner, collections.deque[Request](), list[Request](), self._clock()
        try:
            while True:
                waiting.extend(itertools.islice(requests, max(runner.free_slots + AHEAD - len(waiting), 0)))
                if not (waiting or active):
                    return
                fresh = [waiting.popleft() for _ in range(min(len(waiting), runner.free_slots))]
                kinds |= {r.profile: r for r in fresh}
                needs = self._needs(list(kinds.values()))
                steps = WATCHED_STEPS if any(r.params.stop for r in [*active, *fresh]) else STEPS
                if fresh:
                    runner.admit(fresh, needs)
                    active += fresh
                    for request in fresh:
                        request.first_token_seconds = self._clock() - begun
                    self._look([r for r in fresh if _watched(r)])
                elif not active:
                    raise RuntimeError(FULL.format(self.max_slots))
                ended = [r for r in active if not r.running]
                if not ended:
                    runner.decode(active, steps, until_any=bool(waiting), needs=needs)
                    self._look([r for r in active if _watched(r)])
                    ended = [r for r in active if not r.running]
                if ended:
                    runner.end(ended)
                    active = [r for r in active if r.running]
                    yield from ((request, self._completion(request)) for request in ended)
        finally:
            runner.end(active)

    def _stream(self, request: Request, steps: int) -> Iterator[Chunk]:
        runner, needs, known, finished = self._runner, self._needs([request]), 0, False
        try:
            with self._lock, self._timed():
                if not runner.free_slots:
                    raise RuntimeError(FULL.format(self.max_slots))
                begun = self._clock()
                runner.admit([request], needs)
                request.first_token_seconds = self._clock() - begun
                ((new, piece),) = self._look([request])
            while request.running:
                yield Chunk(piece, new, logprobs=request.logprobs[known:] if request.in_loop else None)
                known += len(new)
                with self._lock, self._timed():
                    runner.decode([request], steps, needs=needs)
                    ((new, piece),) = self._look([request])
            with self._lock, self._timed():
                runner.end([request])
                finished = True
                completion = self._completion(request)
            logprobs = request.logprobs[known:] if request.in_loop else None
            yield Chunk(piece, new, completion.finish_reason, completion, logprobs)
        finally:
            runner.end([request])
            if not finished and request.tokens.size:
                self._account(request)

    def _look(self, requests: Sequence[Request]) -> list[tuple[list[int], str]]:
        """Takes in what the last call gave: of each request its new tokens and text. Stop strings end a request here."""
        known = [max(len(r.tokens) - len(r.prompt), 0) for r in requests]
        self._runner.fetch(requests)
        for request, start in zip(requests, known, strict=True):
            if request.in_loop:
                some = self._runner.logprobs(request, len(request.prompt) + start)
                request.logprobs += self._named(request.output[start:], some, request.params.logprobs or 0)
        return [request.take(start) for request, start in zip(requests, known, strict=True)]

    def _completion(self, request: Request) -> Completion:
        found, params, prompt = request.text.found, request.params, len(request.prompt)
        new, logprobs, prompt_logprobs = request.output, request.logprobs if request.in_loop else None, None
        later = params.logprobs if logprobs is None else None
        if later is not None or params.prompt_logprobs is not None:
            vocab = self.config.vocab_size
            of_output, of_prompt = (vocab if n == -1 else n or 0 for n in (later, params.prompt_logprobs))
            # As many as the next power of two, so that few programs serve all.
            scored = self._runner.score(request, min(max(32, 1 << (max(of_output, of_prompt) - 1).bit_length()), vocab))
            if params.prompt_logprobs is not None:
                prompt_logprobs = [None, *self._named(request.prompt[1:].tolist(), scored, of_prompt)]
            if later is not None:
                logprobs = self._named(new, jax.tree.map(lambda x: x[prompt - 1 :], scored), of_output)
        by_id = request.stopped and found is None
        completion = Completion(
            text=request.text.text,
            token_ids=new,
            finish_reason="stop" if by_id or found is not None else "length",
            stop_reason=new[-1] if by_id and new[-1] not in request.own_ends else found,
            prompt_token_ids=request.prompt.tolist(),
            seed=request.seed,
            stats=self._account(request),
            index=request.index,
            prompt_index=request.prompt_index,
            num_cached_tokens=request.shared,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        object.__setattr__(completion, "_tokenizer", self.tokenizer)  # for notebooks; no field, so that == and asdict pass it by
        return completion

    def _named(self, tokens: Sequence[int], found: Logprobs, count: int) -> list[dict[int, Logprob]]:
        """Of each token a dict of itself and the `count` most likely tokens."""
        rows = []
        for token, chosen, rank, top, ids in zip(tokens, found.chosen, found.rank, found.top, found.ids, strict=False):
            named = {token: Logprob(float(chosen), int(rank), self.tokenizer.token_text(token))}
            for i, (other, value) in enumerate(zip(ids[:count].tolist(), top[:count].tolist(), strict=True), start=1):
                named.setdefault(other, Logprob(value, i, self.tokenizer.token_text(other)))
            rows.append(named)
        return rows

    def _account(self, request: Request) -> RoundStats:
        """The request's rounds, once they are added to the totals."""
        flags = request.from_draft[len(request.prompt) :]
        rounds = RoundStats.of(flags, request.drafted, self.num_draft_tokens, request.first_token_seconds)
        self._totals = self._totals.plus(len(request.prompt), rounds)
        if self.num_draft_tokens:
            self._watch.see(rounds.steps, rounds.steps - rounds.histogram[0], request.temperature)
        return rounds

    def _clock(self) -> float:
        """Seconds that stand still while programs are compiled."""
        return time.perf_counter() - self._runner.compile_seconds

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        begun = self._clock()
        try:
            yield
        finally:
            self._totals = dataclasses.replace(self._totals, seconds=self._totals.seconds + self._clock() - begun)


def _watched(request: Request) -> bool:
    """Whether the host must look at what a call gave it."""
    return not request.running or bool(request.params.stop) or request.in_loop


def _is_ids(prompts: Any) -> bool:
    """Whether this is one prompt of token ids rather than a list of prompts."""
    return isinstance(prompts, list | tuple | range | np.ndarray) and len(prompts) > 0 and all(map(is_id, prompts))
