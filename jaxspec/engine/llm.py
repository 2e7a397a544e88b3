"""LLM: what `jaxspec.load` returns. It puts requests into slots as these come free, and turns their tokens into text."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn, Self, Unpack

import jax
import jax.numpy as jnp
from tqdm.auto import tqdm

from jaxspec.checks import among, integer
from jaxspec.drafters.base import Drafter
from jaxspec.engine import readings
from jaxspec.engine.acceptance_watch import Watch
from jaxspec.engine.accounts import Accounts
from jaxspec.engine.completion import Chunk, Completion, with_deltas
from jaxspec.engine.conversations import Conversations, Messages, are_several
from jaxspec.engine.device_lock import DeviceLock
from jaxspec.engine.fetches import Fetches, read_ahead
from jaxspec.engine.finish import likely_scored
from jaxspec.engine.html import llm_html
from jaxspec.engine.inserts import Inserts, Tower
from jaxspec.engine.intake import Maker, Prompt, Requests, either, params_of, params_or_default, prompts_of, says_where_params_go
from jaxspec.engine.learn import Learning, Origin, check, check_out, check_room, learner_of
from jaxspec.engine.new_weights import Reader, Weights
from jaxspec.engine.params import Defaults, SamplingParams
from jaxspec.engine.request import Request, needs_of
from jaxspec.engine.runner import Runner
from jaxspec.engine.serving import Serving
from jaxspec.engine.settings import Settings, adaptive_obstacle
from jaxspec.engine.shards import Shards
from jaxspec.engine.stats import Stats
from jaxspec.engine.stream import Stream
from jaxspec.engine.structures import Structures
from jaxspec.engine.warmup import warm_up
from jaxspec.interrupts import heeded
from jaxspec.learning.settings import Learn
from jaxspec.model.target import TargetModel
from jaxspec.sampling.choice import Needs
from jaxspec.sharding.placement import ONE_DEVICE, Placement
from jaxspec.text import TemplateOptions, Tokenizer
from jaxspec.trees import packed_kinds, rounded_inputs

STREAM_STEPS = 4  # rounds between two chunks of a stream
WEIGHTS = ("keep", "host", "drop")  # what becomes of a target's while an LLM sleeps

Bar = bool | Callable[..., Any] | None


class LLM:
    """A target with a drafter, ready to generate.

    Several threads may use one LLM. Their calls, and streams that are open at the same time, have their rounds together; the program for
    so many sequences is compiled after some hundred rounds, if `warmup` has not done it. Calls take turns with those of other LLMs whose
    weights are spread over the same devices.
    A stream holds a slot until it is read to its end or closed, and an iterator of `as_completed` holds as many as it has use for. Where
    no slot is left, calls wait in line as long as other threads are at work on what holds them. RuntimeError is raised where these are
    streams and iterators of which none was read in the last five seconds, and at once where the main thread calls and has read them all
    itself. `with load(...) as llm:` closes it at its end.

    target, drafter: weights, as `placement` spreads them. settings: see `Settings`. eos_token_ids: these end a sequence by default.
    defaults: of requests that say nothing. placement: where the weights lie. name: of the target, to be shown.
    origin: where the drafter comes from; by default it is a checkpoint's no more, and no heads of it are repeated. towers: what makes rows
    of images ("image"), sounds ("audio") and videos ("video") in prompts; none where they have none. reader: of new weights, if there may
    be any.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if len(args) < 4 and "settings" not in kwargs:
            raise TypeError("jaxspec.load(target, drafter=...) makes an LLM; the LLM with vLLM's arguments is jaxspec.vllm.LLM")
        return super().__new__(cls)

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        tokenizer: Tokenizer,
        settings: Settings,
        *,
        eos_token_ids: Sequence[int] = (),
        defaults: Defaults | None = None,
        placement: Placement = ONE_DEVICE,
        name: str = "",
        origin: Origin | None = None,
        towers: Mapping[str, Tower] = MappingProxyType({}),
        reader: Reader | None = None,
    ):
        self.tokenizer, self.config, self.settings, self.name = tokenizer, target.config, settings, name
        self.progress = settings.progress
        self.eos_token_ids, self.defaults = tuple(eos_token_ids), defaults or Defaults()
        self._lock = DeviceLock(placement.summing_devices)
        vocab_size = self.config.vocab_size
        self._structures = Structures(tokenizer, vocab_size, settings.structured_blocks, settings.structured_rows, self._check_open)
        runners = list[Runner]()
        reading = readings.comparison_of(drafter, settings)
        self._accounts = Accounts(runners, settings, Watch(drafter, settings.accept), reading)
        with self._lock():
            own, more = settings.of_shard(placement.shards), {"structures": self._structures, "clock": lambda: self._accounts.seconds}
            more |= {"compiling": self._accounts.compiling}
            for (theirs, its), part in placement.split((target, drafter)):
                trial = None if reading is None else readings.trial_of(its, part, reading)
                runners.append(Runner(theirs, its if trial is None else trial.weights, own, part, **more))
                if trial is not None:
                    runners[-1].drafting.begin_trial(trial)
            self._shards = Shards(runners)
        self._lock.settle = functools.partial(self._shards.take, None)
        self._runner = self._shards.runners[0]
        self._whole = Weights(target, origin or Origin(drafter), placement, reader)
        # Whether calls choose what rounds guess and verify once the LLM is warm.
        self.adaptive = settings.adaptive and adaptive_obstacle(settings.accept, settings.num_draft_tokens) is None
        self._serving = Serving(
            self._shards, self._accounts, self._lock, tokenizer, vocab_size, lambda requests: self._needs(requests), self._check_open
        )
        self.media = tuple(towers)  # what prompts may have beside text: "image", "audio"
        self._inserts = Inserts(towers, settings.insert_rows, tokenizer) if towers else None
        self._seeds = random.Random(settings.seed)
        self._closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"the LLM of {self.name!r} lies on devices, and is neither pickled nor copied; load it in the process that uses it, as "
            "jaxspec.Generator does in each"
        )

    def close(self) -> None:
        """Gives back the devices' memory: that of the cache and, unless somebody else holds them, of the weights. `stats` stay; calls and
        streams that are open raise RuntimeError from now on. A second call does nothing, nor does one in a fork of the process, where no
        devices are."""
        if self._lock.forked:
            return
        with self._lock():
            if not self._closed:
                failed = None
                try:
                    if self._serving.learning is not None:
                        self._serving.learning.close()
                except Exception as error:  # the drafter could not be written
                    failed = error
                self._closed = True
                self._whole.close()
                self._shards.close()
                self._structures.close()
                if self._inserts is not None:
                    self._inserts.close()
                    self._inserts = None
                if failed is not None:
                    raise failed

    def _check_open(self, awake: bool = True) -> None:
        """awake: whether it must have a target's weights."""
        if self._closed:
            raise RuntimeError(f"the LLM of {self.name!r} is closed; load it again")
        if awake and self._whole.target is None:
            raise RuntimeError(f"the LLM of {self.name!r} sleeps, and has no weights; call wake_up() or update_weights(...)")

    @property
    def target(self) -> TargetModel:
        self._check_open()
        return self._runner.target

    @property
    def drafter(self) -> Drafter:
        self._check_open()
        return self._runner.drafting.drafter

    @property
    def num_draft_tokens(self) -> int:
        return self.settings.num_draft_tokens

    @property
    def max_slots(self) -> int:
        return sum(runner.settings.max_slots for runner in self._shards.runners)

    @property
    def free_slots(self) -> int:
        """Slots that no call and no stream holds."""
        self._serving.settle(waits=False)
        return sum(runner.free_slots for runner in self._shards.runners)

    @property
    def max_len(self) -> int:
        return self.settings.max_len

    @property
    def text_settings(self) -> dict[str, Any]:
        """By name, what texts depend on beside requests and, with rules other than "coupled", the drafter."""
        dtype, kv_dtype = self.target.dtype.name, self.settings.kv_dtype
        kv_name = dtype if kv_dtype is None else jnp.dtype(kv_dtype).name
        quantised = [*packed_kinds(self.target.layers), *(f"{kind} embedding" for kind in packed_kinds(self.target.embed_tokens))]
        quantised += [f"{kind} activations" for kind in rounded_inputs(self.target)]
        names = {"model": self.name, "dtype": dtype, "quantised": " and ".join(quantised) or None}
        for tower in self._towers.values():
            names |= tower.text_settings
        return names | {"max_len": self.max_len, "kv_dtype": kv_name, "accept": self.settings.accept.name}

    @property
    def stats(self) -> Stats:
        """Totals since the LLM was loaded. The difference of two is what happened in between."""
        self._serving.settle(waits=False)
        learning = self._serving.learning
        return self._accounts.stats(learning=None if learning is None else learning.stats)

    @property
    def learning(self) -> Learning | None:
        """What `learn`, or `load` with `learn`, began last; None if the drafter was never to learn."""
        return self._serving.learning

    def __repr__(self) -> str:
        if self._whole.target is None:
            return f"LLM({self.name!r}, {'closed' if self._closed else 'asleep'})"
        return (
            f"LLM({self.name!r}, drafter={type(self.drafter).__name__}, num_draft_tokens={self.num_draft_tokens}, "
            f"max_slots={self.max_slots}, max_len={self.max_len}, dtype={self.target.dtype}, on {jax.default_backend()})"
        )

    def _repr_html_(self) -> str | None:
        return None if self._whole.target is None else llm_html(self, self.name)  # None: a notebook shows `repr`

    @heeded()
    def warmup(self, *params: SamplingParams) -> None:
        """Compiles everything that requests of these params can use, those of each by themselves and all beside each other, with a progress
        bar, and what reads images, sounds and videos. Without params: what requests that say nothing use. Requests that need more (filters;
        penalties and the like; logprobs) compile it when they come.

        With adaptive verification, see `load`, this also compiles and times rounds that guess fewer tokens or none, and rounds that verify
        some of their guesses. From then on calls take those that acceptance and these times make fastest. The tokens are the same."""
        self._check_open()
        seeded = [p if p.seed is not None else p.replace(seed=0) for p in params or [SamplingParams()]]  # none of the LLM's seeds is drawn
        asked = [r for p in seeded for r in self._requests([[0]], p)]
        needs = list(dict.fromkeys((self._needs(asked), *(self._needs([r]) for r in asked))))
        scores = {likely_scored(r, self.config.vocab_size) for r in asked if r.rescored}

        def requests(count: int) -> list[Request]:
            return self._requests([[0]] * count, SamplingParams(max_tokens=self.max_len, ignore_eos=True, seed=0))

        with self._lock():
            self._shards.take(None)
            if self._inserts is not None:
                self._inserts.warmup()
            warm_up(self._shards.runners, needs, scores, self.adaptive, requests, self.progress)

    @heeded()
    def update_weights(self, target: Any = None, drafter: Any = None, *, adapter: str | os.PathLike[str] | None = None) -> None:
        """Goes on with other weights of the same model, such as those after a step of reinforcement learning. Nothing is compiled.

        target: a hub id or a checkpoint folder, whose float weights are quantised as `load` was told to; all of its tensors by their names
        in a checkpoint, arrays of NumPy, JAX or PyTorch; or a tree of weights such as `target`. Arrays of JAX that have the right shape,
        dtype and place are taken as they are, so they must not be donated to anything. adapter: of PEFT, which is merged into the weights
        of the checkpoint that target names; without a target, of the one that `load` read. drafter: a hub id, a folder or a tree such as
        `drafter`; by default it stays, and so do towers of images and sounds.

        Prompts that come are computed anew. Texts that are under way in other threads or in open streams go on with the new weights, over
        what the old ones have computed. Where a device has no room for both, the old weights are given up once the new ones are known to
        fit; should they fail to be read then, the LLM is closed.

        Raises TypeError or ValueError for what is none of these, or not like the weights that the LLM has, before anything has changed;
        RuntimeError for a drafter while one learns; and what reading a checkpoint raises, see `load`."""
        self._check_open(awake=False)
        news = self._whole.planned(target, drafter, adapter)
        with self._lock():
            self._check_open(awake=False)
            self._shards.take(None)
            self.name = self._whole.update(*news, self.name, self._shards.runners, self._serving.learning, self.close)

    @heeded()
    def sleep(self, weights: str = "keep") -> None:
        """Gives memory of the devices back while there is nothing to generate, such as to a trainer on the same devices: that of the cache,
        which the next call makes anew.

        weights: "keep" leaves the target's where they are. "host" moves them to the host's memory until `wake_up`, and "drop" gives them up
        until `update_weights`; calls raise RuntimeError meanwhile. The memory of arrays that somebody else holds stays taken.

        Raises ValueError for other weights, RuntimeError while texts are under way, and JaxRuntimeError where the host has no room."""
        if not among(weights, WEIGHTS):
            raise ValueError(f"weights is {weights!r}; available: {', '.join(map(repr, WEIGHTS))}")
        with self._lock():
            self._check_open(awake=False)
            self._shards.take(None)
            if any(runner.held.running for runner in self._shards.runners):
                raise RuntimeError("texts are under way; read or close open streams before the LLM sleeps")
            for runner in self._shards.runners:
                runner.sleep()
            if weights != "keep":
                self._whole.give_up(weights == "host", self._shards.runners, self._serving.learning)

    @heeded()
    def wake_up(self) -> None:
        """Puts weights that `sleep` moved to the host back onto the devices. Raises RuntimeError if it dropped them."""
        with self._lock():
            self._check_open(awake=False)
            self._whole.take_back(self._shards.runners, self._serving.learning)

    def reset_prefix_cache(self) -> None:
        """Forgets what was computed of prompts, so that those to come share nothing with those before."""
        with self._lock():
            self._check_open(awake=False)
            self._shards.take(None)
            for runner in self._shards.runners:
                runner.forget()

    def learn(self, share: float | Learn = 0.05, out: str | os.PathLike[str] | None = None, **settings: Any) -> Learning:
        """Lets the drafter learn from the texts that are written from now on, between calls of the device. Texts stay the same.

        share: of the time spent generating that may go into it, or all settings as a `Learn`. out: a folder for the learnt drafter, a
        checkpoint that `load` takes; it is written every two minutes of generating and at the end. settings: other fields of `Learn`.
        Returns a Learning, which has `stats` and ends when it is closed: `with llm.learn(0.1): ...`. What was learnt stays in use.

        Newer weights are taken once a trial on live traffic finds that they are accepted at least as much as those in use. After some
        trials in a row that gained nothing, learning ends; so it does, with a warning, if a loss is not finite.

        Raises ValueError for a drafter that has nothing to learn ("ngram", none), an acceptance rule other than "coupled", or settings out
        of range; TypeError for other settings beside a `Learn`; FileExistsError if `out` holds a checkpoint, such as a drafter that learnt
        before, and `resume` is not set; RuntimeError while the LLM learns already, ImportError without optax, MemoryError if a device lacks
        the room: `load` with `learn` plans it."""
        given = settings if out is None else {"out": out, **settings}
        if isinstance(share, Learn) and given:
            raise TypeError(f"{', '.join(given)} and a Learn are given; expected all settings in the Learn, or the share and these")
        learn = share if isinstance(share, Learn) else Learn(share=share, **given)
        with self._lock():
            self._check_open()
            before = self._serving.learning
            if before is not None and before.going:
                raise RuntimeError("the drafter of this LLM learns already; close that first")
            target, placement = self._whole.target, self._whole.placement
            origin = self._whole.origin if before is None else before.origin
            check(learn, origin.weights, self.settings.accept.name, self.num_draft_tokens)
            check_out(learn, origin.folder)
            if before is not None:  # where it ended by itself, for its memory
                before.close()
            check_room(self.target, origin.weights, learn, self.num_draft_tokens, self.max_len, placement)
            self._shards.take(None)
            sizes = {"num_draft_tokens": self.num_draft_tokens, "max_len": self.max_len}
            learner = learner_of(target, origin.weights, learn, placement=placement, **sizes)
            learning = self._serving.learning = Learning(learner, origin, self._shards, self._accounts, placement, self._lock)
        return learning

    @says_where_params_go
    @heeded()
    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Bar = None,
    ) -> list[Completion]:
        """Completes any number of prompts and returns a Completion for each, in order; where params ask for n of a prompt, its n one after
        the other.

        prompts: a str, a list or an array of token ids (of NumPy, JAX or PyTorch), a dict with "prompt" or "prompt_token_ids", or several
        of these: a list, an array of two axes, a column of a dataset, any iterable. A dict may have images, sounds and videos beside, if
        `load` was told of them: {"prompt": "<|image|>What is this?", "multi_modal_data": {"image": image}}, with as many image tokens as
        images, each a Pillow image, an array [height, width, 3] of uint8, a path, a URL or the bytes of a file; with an audio token for
        each sound, under "audio": an array of samples, (samples, rate), or a file as of an image; and with a video token for each video,
        under "video": an array of frames, (frames, {"fps": rate}), or a file. params: one for all, or one for each prompt;
        sampling_params is another name for it. use_tqdm: whether to show a progress bar, or what makes one; by default one is shown for
        several prompts, if `load` was told to show progress.
        Raises ValueError or TypeError, before anything is computed, for a prompt that is empty, longer than max_len - 1 or has ids
        out of range, and for params that do not fit.
        """
        return self._generate(self._requests(prompts_of(prompts), either(params, sampling_params)), use_tqdm)

    @says_where_params_go
    def as_completed(
        self, prompts: Iterable[Prompt | tuple[Prompt, SamplingParams]], params: SamplingParams | None = None
    ) -> Stream[Completion]:
        """Completes prompts and yields each Completion as soon as it is ready, in any order: its prompt_index says which item it is for.
        `for` reads them, and `async for` does so while other tasks go on; then `prompts` are read on another thread.

        prompts: any iterable, read as slots come free and never far ahead. An item is a prompt, or a tuple of a prompt and its own
        SamplingParams. An iterator that has no more is asked again as long as sequences are under way, so it may have more by then.
        params: for the items that bring none.
        When an item is read that is not valid, no more are read, and once those before it have come this raises what `generate` raises,
        with the item's number; `check` tells beforehand. An exception in `prompts` or in the consumer, or closing the iterator ends all
        unfinished requests and frees the slots. What had ended before an exception in `prompts` comes before it.
        While it waits for `prompts`, other threads' calls wait. Between two completions it computes nothing but keeps its slots: other
        calls run in the slots that are left, if there are any: see `LLM`. So read it to its end or close it.
        """
        if isinstance(prompts, str) or not hasattr(prompts, "__iter__"):
            raise TypeError(f"prompts is of type {type(prompts).__name__}, expected an iterable of prompts")
        closing = threading.Event()
        return Stream(self._serving.apart(self._read(prompts, params_or_default(params)), closing), self._serving.settle, closing)

    def check(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Raises what `generate` would raise for this prompt with these params; computes nothing."""
        self._check_open()
        self._maker.requests(0, prompt, SamplingParams() if params is None else params, lambda: 0)

    def _read(self, items: Iterable[Any], params: SamplingParams) -> Requests:
        """Checked requests for each item, when it is asked for."""

        def made(index: int, item: Any) -> list[Request]:
            own = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], SamplingParams)
            prompt, given = item if own else (item, params)
            requests = self._maker.requests(index, prompt, given, self._draw_seed)
            for request in requests:
                request.asked = self._accounts.clock()
            return requests

        return Requests(read_ahead(items, self._towers), made)

    def _generate(self, requests: list[Request], use_tqdm: Bar = None) -> list[Completion]:
        done = dict[tuple[int, int], Completion]()
        show = self.progress and len(requests) > 1 if use_tqdm is None else bool(use_tqdm)
        made = use_tqdm if callable(use_tqdm) else functools.partial(tqdm, disable=not show)
        parts = contextlib.closing(self._serving.together(requests))  # pyright: ignore[reportArgumentType]
        try:
            with contextlib.closing(made(total=len(requests), desc="Generating", unit="prompt")) as bar, parts as parts:
                for some in parts:
                    done |= {(c.prompt_index, c.index): c for c in some}
                    bar.update(len(some))
        finally:
            self._serving.settle()
        return [done[request.prompt_index, request.index] for request in requests]

    @says_where_params_go
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        steps: int = STREAM_STEPS,
    ) -> Stream[Chunk]:
        """Completes one prompt and yields the text as it comes, for `for` or `async for`: the first token, then what each `steps` rounds
        add.

        prompt: as for `generate`. params: with n = 1; sampling_params is another name for it. The tokens are those of `generate`. Closing
        the stream frees its slot. Raises what `generate` raises, at once, and ValueError for n above 1 or steps below 1.
        """
        return self._begin(prompt, either(params, sampling_params), steps)

    def _begin(self, prompt: Any, params: Any, steps: int, *, told: str | None = None, keep: int = 0) -> Stream[Chunk]:
        """told: the text of a conversation."""
        params = params_or_default(params)
        if params.n > 1:
            raise ValueError(f"n is {params.n}; a stream is one completion, expected 1")
        closing = threading.Event()
        chunks = self._serving.stream(self._requests([prompt], params, keep=[keep])[0], integer("steps", steps, 1), closing)
        chunks = chunks if told is None else with_deltas(chunks, self.tokenizer, told)
        return Stream(chunks, self._serving.settle, closing)

    @says_where_params_go
    @heeded()
    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Bar = None,
        enable_thinking: bool = False,
        **template: Unpack[TemplateOptions],
    ) -> Any:
        """Answers a conversation: a Completion; or a list of conversations, or several samples of one: a list of Completions.

        messages: dicts with "role" and "content", by the checkpoint's chat template. params, sampling_params, use_tqdm: as for `generate`,
        params one for all conversations or one for each. enable_thinking goes to the template.
        template: tools, the functions that the model may call, each as itself, with types and a docstring of Google's style, or as a schema
        in the form of OpenAI's API; chat_template, a template in place of the checkpoint's; chat_template_kwargs, a dict of more names that
        the template knows; add_generation_prompt, False to leave out the opening of the model's turn; with that,
        continue_final_message=True to go on with the last message.
        A completion's `message` has the model's thoughts, its text and its tool calls apart, to be appended to the messages.
        What was computed of a conversation is kept until its memory is needed. If the conversation goes on from there, only what is new is
        computed. Without thinking, Gemma 4's template writes an empty thought before an answer and leaves it out of the next prompt; then
        the last answer is computed again too. If `load` was told of images, sounds or videos, content may have some as parts, in the
        forms of transformers, {"type": "image", "image": image} and the like for "audio" and "video", and of OpenAI and vLLM, {"type":
        "image_url", "image_url": {"url": url}} and the like; what each may be, `generate` says. Raises what `generate` raises, and
        ValueError for content that cannot be read.
        """
        prompts, keep = self._conversations.turns(messages, enable_thinking, template)
        completions = self._generate(self._requests(prompts, either(params, sampling_params), keep=keep), use_tqdm)
        return completions if are_several(messages) or len(completions) > 1 else completions[0]

    @says_where_params_go
    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        sampling_params: SamplingParams | None = None,
        enable_thinking: bool = False,
        steps: int = STREAM_STEPS,
        **template: Unpack[TemplateOptions],
    ) -> Stream[Chunk]:
        """Answers one conversation and yields the text as it comes, as `stream` does: a chunk's `delta` has thoughts and the answer apart.
        params, steps: as there. All else, and errors: as for `chat`."""
        prompt, keep = self._conversations.turn(messages, enable_thinking, template)
        return self._begin(prompt, either(params, sampling_params), steps, told=prompt["prompt"], keep=keep)

    def chat_prompt(self, messages: Messages, *, enable_thinking: bool = False, **template: Unpack[TemplateOptions]) -> list[int]:
        """The token ids of a conversation up to the model's turn: what `chat` generates from. An image or a sound is one token there;
        in the `prompt_token_ids` of a completion it has all of its own."""
        return self._conversations.ids(messages, enable_thinking, template)

    def chat_input(self, messages: Messages, *, enable_thinking: bool = False, **template: Unpack[TemplateOptions]) -> Prompt:
        """A conversation as a prompt for `generate`, with its media and tools. Raises what `chat` raises for messages and these."""
        return self._conversations.prompt(messages, enable_thinking, template)

    def _requests(self, prompts: Sequence[Any], params: Any, *, keep: Sequence[int] = ()) -> list[Request]:
        """Checked requests for a list of prompts. keep: see `Request`, for each prompt; all 0 by default."""
        self._check_open()
        maker, each = self._maker, params_of(params, len(prompts))
        with Fetches(self._towers) as fetches:
            pairs = enumerate(zip(fetches.ahead(prompts), each, strict=True))
            return [r for i, (prompt, p) in pairs for r in maker.requests(i, prompt, p, self._draw_seed, keep[i] if keep else 0)]

    @property
    def _maker(self) -> Maker:
        of_target = self.tokenizer, self.config.vocab_size, self.max_len, self.eos_token_ids, self.defaults
        return Maker(*of_target, self._structures, self._inserts)

    @property
    def _conversations(self) -> Conversations:
        return Conversations(self.tokenizer, self.media, self._towers)

    @property
    def _towers(self) -> Mapping[str, Tower]:
        return {} if self._inserts is None else self._inserts.towers

    def _draw_seed(self) -> int:
        return self._seeds.getrandbits(53)

    def _needs(self, requests: Sequence[Request]) -> Needs:
        return needs_of(requests, self.defaults.suppress_tokens)
