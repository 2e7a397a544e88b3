"""LLM: what `jaxspec.load` returns. Requests are put into slots as these come free, and turned into text."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from jaxspec.checks import integer
from jaxspec.decode.accept import COUPLED, Rule
from jaxspec.drafters.base import Drafter
from jaxspec.engine import draft_count as adaptive_k
from jaxspec.engine.acceptance_watch import Watch
from jaxspec.engine.completion import Chunk, Completion
from jaxspec.engine.device_lock import Alone
from jaxspec.engine.finish import completion_of, logprobs_of, look
from jaxspec.engine.html import llm_html
from jaxspec.engine.intake import Maker, is_id
from jaxspec.engine.params import Defaults, SamplingParams
from jaxspec.engine.programs import STEPS
from jaxspec.engine.request import Request, needs_of
from jaxspec.engine.runner import PAGE, PREFIX_BYTES, Runner
from jaxspec.engine.shards import Shards, Turns
from jaxspec.engine.stats import RoundStats, Stats
from jaxspec.engine.turn import Turn
from jaxspec.engine.warmup import measured
from jaxspec.model.target import TargetModel
from jaxspec.sampling.choice import Needs
from jaxspec.sharding import TENSOR
from jaxspec.sharding.meshes import DATA, data_shards
from jaxspec.text import Tokenizer

WATCHED_STEPS = 8  # where text is looked at for stop strings between calls
STREAM_STEPS = 4

Prompt = str | Sequence[int] | np.ndarray


class LLM:
    """A target with a drafter, ready to generate.

    Several threads may use one LLM; their calls take turns, with those of other LLMs whose weights are spread over the same devices. A
    stream holds a slot until it is read to its end or closed, and an iterator
    of `as_completed` as many as it has use for: calls get by with the others, and raise RuntimeError where there are none.

    target, drafter: weights on their devices. eos_token_ids: what ends a sequence by default. defaults: of requests that say nothing.
    adaptive: whether `warmup` measures what rounds cost, and calls then choose how many tokens, up to num_draft_tokens, rounds guess;
    with the rule "coupled" and in one process only. The other settings are those of `jaxspec.load`; page_size and prefix_bytes are as in
    `Runner`. mesh: where the weights lie, as `sharding.spread` gives them; None for one device. kv_pages are those of a data shard.

    settings: by name, what texts depend on beside requests and, with rules other than "coupled", the drafter.
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        tokenizer: Tokenizer,
        *,
        num_draft_tokens: int,
        max_slots: int,
        max_len: int,
        eos_token_ids: Sequence[int] = (),
        defaults: Defaults | None = None,
        adaptive: bool = False,
        accept: Rule = COUPLED,
        attention: str = "auto",
        draft_attention: str = "auto",
        kv_dtype: Any = None,
        kv_pages: int | None = None,
        page_size: int = PAGE,
        prefix_bytes: int = PREFIX_BYTES,
        mesh: jax.sharding.Mesh | None = None,
        seed: int = 0,
        progress: bool = True,
        name: str = "",
    ):
        self.tokenizer = tokenizer
        self.config = target.config
        self.eos_token_ids, self.defaults = tuple(eos_token_ids), defaults or Defaults()
        settings = {
            "slots": -(-max_slots // (1 if mesh is None else mesh.shape[DATA])),
            "max_len": max_len,
            "num_draft_tokens": num_draft_tokens,
            "accept": accept,
            "attention": attention,
            "draft_attention": draft_attention,
            "kv_dtype": kv_dtype,
            "kv_pages": kv_pages,
            "page_size": page_size,
            "prefix_bytes": prefix_bytes,
            "progress": progress,
        }
        parts = [(target, drafter, None)] if mesh is None else data_shards((target, drafter), mesh)
        self._totals, self._begun = Stats(), None
        self._alone = Alone(() if mesh is None or mesh.shape[TENSOR] == 1 else mesh.devices.flat)
        with self._alone():
            self._shards = Shards([Runner(target, drafter, mesh=row, clock=self._worked, **settings) for target, drafter, row in parts])
        self._alone.settle = functools.partial(self._shards.take, None)
        self._runner = self._shards.runners[0]
        # Processes that compute together must choose alike, and each measures other times.
        adaptive = adaptive and num_draft_tokens > 0 and accept.name == "coupled" and jax.process_count() == 1
        self._choices = adaptive_k.choices(num_draft_tokens) if adaptive else ()
        self._watch = Watch(drafter, accept)
        self._seeds = random.Random(seed)
        self.progress, self.name = progress, name
        dtype = target.dtype.name
        kv_dtype = dtype if kv_dtype is None else jnp.dtype(kv_dtype).name
        self.settings = {"model": name, "max_len": max_len, "dtype": dtype, "kv_dtype": kv_dtype, "accept": accept.name}

    @property
    def target(self) -> TargetModel:
        return self._runner.target

    @property
    def drafter(self) -> Drafter:
        return self._runner.drafter

    @property
    def num_draft_tokens(self) -> int:
        return self._runner.num_draft_tokens

    @property
    def max_slots(self) -> int:
        return sum(runner.slots for runner in self._shards.runners)

    @property
    def max_len(self) -> int:
        return self._runner.max_len

    @property
    def stats(self) -> Stats:
        """Totals since the LLM was loaded. The difference of two is what happened in between."""
        runners = self._shards.runners
        times = max((runner.times for runner in runners), key=lambda times: times.busy_seconds)
        return dataclasses.replace(
            self._totals,
            busy_seconds=times.busy_seconds,
            host_times=tuple(times.host_times),
            compilations=sum(len(runner.programs.compiled) for runner in runners),
            compile_seconds=self._compile_seconds,
            preemptions=sum(runner.preemptions for runner in runners),
            state_bytes=sum(runner.state_bytes for runner in runners),
            weight_bytes=self._runner.weight_bytes,
            peak_bytes=self._runner.peak_bytes,
        )

    def __repr__(self) -> str:
        return (
            f"LLM({self.name!r}, drafter={type(self.drafter).__name__}, num_draft_tokens={self.num_draft_tokens}, "
            f"max_slots={self.max_slots}, max_len={self.max_len}, dtype={self.target.dtype}, on {jax.default_backend()})"
        )

    def _repr_html_(self) -> str:
        return llm_html(self, self.name)

    def warmup(self, *params: SamplingParams) -> None:
        """Compiles everything that a run with requests of these params can use, with a progress bar; with none, requests that say
        nothing. Requests that need more of what SamplingParams offers (filters; penalties and the like; logprobs) compile it when
        they come.

        Where load was left to choose num_draft_tokens, rounds of fewer drafts and of none are compiled and timed too, and from then on
        calls guess as many tokens as acceptance and these times make fastest. The tokens are the same."""
        needs = self._needs([r for p in params or [SamplingParams()] for r in self._requests([[0]], p)])
        runners = self._shards.runners
        total = len(runners) * len(self._runner.programs_for(needs, self._choices))
        with self._alone(), tqdm(total=total, desc="Compiling", disable=not self.progress) as bar:
            self._shards.take(None)
            for runner in runners:
                for line in runner.warmup(needs, self._choices):
                    bar.set_postfix_str(line)
                    bar.update()
            if self._choices and self._runner.adaptive is None:
                endless = SamplingParams(max_tokens=self.max_len, ignore_eos=True, seed=0)
                costs = measured(self._runner, self._choices, needs, lambda n: self._requests([[0]] * n, endless))
                for runner in runners:
                    runner.adaptive = adaptive_k.Adaptive(self._choices, costs) if costs else None

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Completion]:
        """Completes prompts, any number of them, and returns one Completion for each, in order; where params ask for n of a prompt,
        its n one after the other.

        prompts: a str, a list of token ids, or a list of either. params: one for all, or one for each prompt.
        Raises ValueError or TypeError, before anything is computed, for a prompt that is empty, longer than max_len - 1 or has ids
        out of range, and for params that do not fit.
        """
        one = isinstance(prompts, str) or _is_ids(prompts)
        if not one and (isinstance(prompts, bytes | Mapping) or hasattr(prompts, "columns") or not hasattr(prompts, "__iter__")):
            raise TypeError(f"prompts are of type {type(prompts).__name__}, expected a str, a list of token ids, or a list of either")
        listed = [prompts] if one else list(prompts)
        return self._generate(self._requests(listed, params))

    def as_completed(
        self, prompts: Iterable[Prompt | tuple[Prompt, SamplingParams]], params: SamplingParams | None = None
    ) -> Iterator[Completion]:
        """Completes prompts and yields each Completion as it is ready, in whatever order: its prompt_index says which item it belongs to.

        prompts: any iterable, read as slots come free and never far ahead. An item is a prompt, or a tuple of a prompt and its own
        SamplingParams. params: for the items that bring none.
        An item that is not valid raises what `generate` raises, with its number, when it is read; `check` tells beforehand. That, an
        exception in `prompts` or in the consumer, and closing the iterator end all that is unfinished and free the slots.
        While it computes, and while it waits for `prompts`, other threads' calls wait. Between two completions it stands still and keeps
        its slots: other calls run, in slots that it has no use for, or raise RuntimeError. So read it to its end or close it.
        """
        if isinstance(prompts, str) or not hasattr(prompts, "__iter__"):
            raise TypeError(f"prompts is of type {type(prompts).__name__}, expected an iterable of prompts")
        if params is not None and not isinstance(params, SamplingParams):
            raise TypeError(f"params is {type(params).__name__}, expected SamplingParams or None")
        return self._as_completed(self._read(prompts, params or SamplingParams()))

    def _as_completed(self, requests: Iterator[Request]) -> Iterator[Completion]:
        ended: list[Request] = []
        with self._turn(requests) as turn:
            while True:
                with self._alone(), self._timed():
                    completions = self._advance(turn, ended)
                if not completions:
                    return
                yield from completions

    def check(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Raises what `generate` would raise for this prompt with these params; computes nothing."""
        self._maker.requests(0, prompt, SamplingParams() if params is None else params, lambda: 0)

    def _read(self, items: Iterable[Any], params: SamplingParams) -> Iterator[Request]:
        """Checked requests for each item, when it is asked for."""
        for i, item in enumerate(items):
            own = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], SamplingParams)
            prompt, given = item if own else (item, params)
            for request in self._maker.requests(i, prompt, given, self._draw_seed):
                request.asked = self._clock()
                yield request

    def _generate(self, requests: list[Request]) -> list[Completion]:
        done, ended = dict[tuple[int, int], Completion](), list[Request]()
        show = self.progress and len(requests) > 1
        with self._alone(), self._timed(), tqdm(total=len(requests), desc="Generating", unit="prompt", disable=not show) as bar:
            with self._turn(requests) as turn:
                while some := self._advance(turn, ended):
                    done |= {(c.prompt_index, c.index): c for c in some}
                    bar.update(len(some))
        return [done[request.prompt_index, request.index] for request in requests]

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
        What was computed of a conversation is kept until its memory is needed: one that goes on from there, or from the end of its
        last prompt, computes only what is new. Raises what `generate` raises, and ValueError for images and other
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
        return self.tokenizer.apply_chat_template(messages, enable_thinking=enable_thinking)

    def _requests(self, prompts: Sequence[Any], params: Any, *, keep: bool = False) -> list[Request]:
        """Checked requests for a list of prompts."""
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        else:
            if not isinstance(params, list | tuple):
                raise TypeError(f"params is {type(params).__name__}, expected SamplingParams, a list of them or None")
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

    @contextlib.contextmanager
    def _turn(self, requests: Iterable[Request]) -> Iterator[Turn | Turns]:
        """A turn of requests, which ends with the context."""
        known = requests if isinstance(requests, list) else []
        for request in known:
            request.asked = self._clock()
        turn = self._shards.turn(iter(requests), self._needs, {r.profile: r for r in known})
        try:
            yield turn
        finally:
            with self._alone():
                turn.close()

    def _step(self, turn: Turn | Turns, steps: int = STEPS, meanwhile: Callable[[], None] = lambda: None) -> bool:
        """One step of a turn. False once nothing is left to do."""
        going = turn.step(min([steps, *(WATCHED_STEPS for r in turn.active if r.params.stop)]), meanwhile)
        for request in turn.active:
            if request.output and not request.first_token_seconds:
                request.first_token_seconds = self._clock() - request.asked
        return going

    def _advance(self, turn: Turn | Turns, ended: list[Request]) -> list[Completion]:
        """Runs a turn until there are completions; nothing is left of it if there are none. ended: requests between two calls of this that
        have ended and whose completions are still to be made, which is done while the device computes prompts for others."""
        completions: list[Completion] = []

        def complete() -> None:
            while ended:
                request = ended.pop(0)
                if not request.params.stop:
                    look(request, self.tokenizer)
                completions.append(self._completion(request, turn))

        going = True
        while going and not completions:
            going = self._step(turn, meanwhile=complete)
            for request in turn.active:
                if request.params.stop:
                    look(request, self.tokenizer)
            ended += turn.end()
            # Another pass over a text is made of calls, which have no place in the middle of a step.
            if not turn.waiting or any(request.rescored for request in ended):
                complete()
        return completions

    def _stream(self, request: Request, steps: int) -> Iterator[Chunk]:
        known = 0
        try:
            with self._turn([request]) as turn:
                while True:
                    with self._alone(), self._timed():
                        while len(request.output) == known and not request.ended:
                            self._step(turn, steps)
                        new, piece = look(request, self.tokenizer)
                        completion = self._completion(request, turn) if turn.end() else None
                    logprobs = request.logprobs[known:] if request.in_loop else None
                    known = len(request.output)
                    if completion is not None:
                        yield Chunk(piece, new, completion.finish_reason, completion, logprobs)
                        return
                    yield Chunk(piece, new, logprobs=logprobs)
        finally:
            if request.output and not sys.is_finalizing():
                with self._alone():
                    if not request.accounted:
                        self._account(request)

    def _completion(self, request: Request, turn: Turn | Turns) -> Completion:
        logprobs = logprobs_of(request, self.tokenizer, self.config.vocab_size, turn.score)
        return completion_of(request, self.tokenizer, self._account(request), *logprobs)

    def _account(self, request: Request) -> RoundStats:
        """The request's rounds, once they are added to the totals."""
        request.accounted = True
        flags, first = np.asarray(request.from_draft, bool), request.first_token_seconds
        rounds = RoundStats.of(flags, request.drafted, self.num_draft_tokens, first, request.guessed)
        self._totals = self._totals.plus(len(request.prompt), rounds, request.shared)
        if self.num_draft_tokens:
            self._watch.see(rounds.rounds_by_draft[0], rounds.steps - rounds.histogram[0], request.temperature)
        return rounds

    def _clock(self) -> float:
        """Seconds that stand still while programs are compiled."""
        return time.perf_counter() - self._compile_seconds

    @property
    def _compile_seconds(self) -> float:
        return max(runner.programs.compile_seconds for runner in self._shards.runners)

    def _worked(self) -> float:
        """What `stats.seconds` is at this moment."""
        return self._totals.seconds + (0.0 if self._begun is None else self._clock() - self._begun)

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        self._begun = self._clock()
        try:
            yield
        finally:
            self._totals, self._begun = dataclasses.replace(self._totals, seconds=self._worked()), None


def _is_ids(prompts: Any) -> bool:
    """Whether this is one prompt of token ids rather than a list of prompts."""
    return isinstance(prompts, list | tuple | range | np.ndarray) and len(prompts) > 0 and all(map(is_id, prompts))
