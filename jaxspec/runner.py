"""The device side of an engine: weights, one state of all slots, and one compiled program for each static shape.

A bucket is the static length of the list of slot ids that a program works on; shorter lists are padded with an id out of range.
Programs are compiled ahead of their first use and called by key, so that nothing compiles behind anybody's back.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxspec import decode
from jaxspec.accept import COUPLED, Rule
from jaxspec.cache import page_size_of
from jaxspec.config import SLIDING
from jaxspec.drafters.base import Drafter
from jaxspec.edits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_IDS, NOBODY, Edits
from jaxspec.filters import Filters
from jaxspec.gemma4 import Gemma4
from jaxspec.logprobs import ROWS, Logprobs
from jaxspec.request import MAX_STOP_IDS, Request
from jaxspec.sampling import PLAIN, Needs, seed_words

BUCKET_RATIO = 8
PREFILL_ROWS = 512  # rows of the largest prefill call; enough that reading the weights is not what it waits for
PREFILL_CHUNK = 64  # rows for each sequence where several, or short ones, are prefilled
FILTERS = (("top_k", np.int32, 0), ("top_p", np.float32, 1), ("min_p", np.float32, 0))  # with what changes nothing
LOOK_AHEAD = 8  # tokens after a row that a drafter's view of it may depend on, and more
CALL_ROWS = 256  # what a prefill call costs beside its rows, in rows: reading the weights


class Runner:
    """Puts requests into slots, computes their prompts and decodes them. One call at a time: the caller holds a lock.

    target, drafter: weights. accept: the acceptance rule. attention, draft_attention: implementations for the target's and the
    drafter's attention. kv_dtype: of the target's cache, None for that of its weights. shardings: from the shapes of a state to its
    shardings, or None for one device. compilations, compile_seconds: programs made ready so far, and the time that took.
    """

    def __init__(
        self,
        target: Gemma4,
        drafter: Drafter,
        *,
        slots: int,
        max_len: int,
        num_draft_tokens: int,
        accept: Rule = COUPLED,
        attention: str = "auto",
        draft_attention: str = "auto",
        kv_dtype: Any = None,
        shardings: Callable[[Any], Any] | None = None,
    ):
        self.target, self.drafter = target, drafter
        self.slots, self.max_len, self.num_draft_tokens = slots, max_len, num_draft_tokens
        self.compilations, self.compile_seconds = 0, 0.0
        accept.check(num_draft_tokens)
        self.accept = accept
        self._attention = {"attention": attention, "draft_attention": draft_attention}
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}
        sizes = {"slots": slots, "max_len": max_len, "num_draft_tokens": num_draft_tokens, "kv_dtype": kv_dtype}
        init = functools.partial(self.init_state, target, drafter, **sizes)
        self._shardings = None if shardings is None else shardings(jax.eval_shape(init))
        self._init = jax.jit(init, out_shardings=self._shardings)
        self._epoch = -1
        self._state: Any = None
        self._ready()
        self.weight_bytes, self.state_bytes = nbytes((target, drafter)), nbytes(self._state)

    @staticmethod
    def init_state(target: Gemma4, drafter: Drafter, **sizes: Any) -> decode.DecodeState:
        """A state as `decode.init_state` makes it, with room for the stop ids of a request."""
        return decode.init_state(target, drafter, max_stop_ids=MAX_STOP_IDS, **sizes)

    @property
    def decode_buckets(self) -> list[int]:
        """1, 8, 64, ... and the number of slots."""
        sizes = [1]
        while sizes[-1] < self.slots:
            sizes.append(min(sizes[-1] * BUCKET_RATIO, self.slots))
        return sizes

    @property
    def prefill_buckets(self) -> list[tuple[int, int]]:
        """(sequences, rows for each of them)."""
        short, long = min(PREFILL_CHUNK, self.max_len), min(PREFILL_ROWS, self.max_len)
        return sorted({(1, short), (1, long), (min(self.slots, PREFILL_ROWS // PREFILL_CHUNK), short)})

    @property
    def free_slots(self) -> int:
        return len(self._free) + len(self._kept)

    @property
    def peak_bytes(self) -> int | None:
        """The most memory that was in use on the first device, or None where it does not say (a CPU)."""
        return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    def warmup(self, needs: Needs) -> Iterable[str]:
        """Compiles every program that requests with these needs use, and gives a line about each before it does."""
        for size in self.decode_buckets:
            yield f"decode {size}"
            self._program("admit", size, needs.edits)
            self._program("decode", size, needs)
        for size, chunk in self.prefill_buckets:
            yield f"prefill {size} x {chunk}"
            self._program("prefill", size, chunk, needs)
        self._program("read")
        if needs.logprobs is not None:
            self._program("logprobs")

    def steps_for(self, needs: Needs, steps: int) -> int:
        """How many of these rounds a call may run, lest log-probabilities are overwritten before they are read."""
        return steps if needs.logprobs is None else max(min(steps, ROWS // (self.num_draft_tokens + 1)), 1)

    def admit(self, requests: Sequence[Request], needs: Needs = PLAIN) -> None:
        """Takes a slot for each request, computes the prompts and chooses the first tokens."""
        taken = list(requests)
        try:
            self._put(taken, [r.prompt for r in taken], needs)
            self._prefill(taken, needs)
            self._refresh(taken)
        except BaseException:
            self.end(taken)
            raise
        stuck = [r for r in taken if r.length <= len(r.prompt)]
        if stuck:
            self.end(taken)
            raise RuntimeError(f"{len(stuck)} prompts found no free pages; fewer slots or a smaller max_len need fewer")

    def decode(self, requests: Sequence[Request], steps: int, until_any: bool = False, needs: Needs = PLAIN) -> None:
        """Runs up to `steps` rounds of the requests; with until_any, ends as soon as one of them has."""
        self._ready()
        for request in requests:
            if request.epoch != self._epoch:
                raise RuntimeError("this sequence was lost when another call failed; ask for it again")
        size = self._bucket(len(requests))
        slots = self._ids([r.slot for r in requests], size)
        self._run(self._program("decode", size, needs), slots, np.int32(self.steps_for(needs, steps)), np.bool_(until_any))
        self._refresh(requests)
        if self._get(self._state.starved):
            raise RuntimeError("the cache ran out of pages; fewer slots or a smaller max_len need fewer")

    def fetch(self, requests: Sequence[Request]) -> None:
        """Copies the requests' tokens and flags to the host."""
        read = self._program("read")
        rows = [read(self._state.tokens, self._state.from_draft, np.int32(r.slot)) for r in requests]
        for request, (tokens, from_draft) in zip(requests, self._get(rows), strict=True):
            request.tokens, request.from_draft = tokens[: request.length], from_draft[: request.length]

    def logprobs(self, request: Request, start: int) -> Logprobs:
        """Those of a request's tokens from position `start` on, as the loop's last calls reported them: at most 256."""
        ring = self._get(self._program("logprobs")(self._state.logprobs, np.int32(request.slot)))
        at = np.arange(start, request.length) % ROWS
        return jax.tree.map(lambda x: x[at], ring)

    def score(self, request: Request, count: int) -> Logprobs:
        """Those of a whole text, by another pass over it in a free slot: of token i + 1 at entry i, with `count` most likely tokens."""
        size, chunk = self.prefill_buckets[0]
        request = dataclasses.replace(request, keep=False, shared=0)
        slot, text = [request], request.tokens
        self._put(slot, [text], PLAIN)
        try:
            program, found = self._program("score", size, chunk, count), []
            for _ in range(0, len(text), chunk):
                state, self._state = self._state, None
                self._state, some = program(self.target, state, self._ids([request.slot], size))
                found.append(self._get(jax.tree.map(lambda x: x[0], some)))
                if self._get(self._state.starved):
                    raise RuntimeError("the cache ran out of pages; fewer slots or a smaller max_len need fewer")
        finally:
            self.end(slot)
        return jax.tree.map(lambda *x: np.concatenate(x)[: len(text) - 1], *found)

    def end(self, requests: Iterable[Request]) -> None:
        """Gives the requests' slots back. Touches nothing on the device, so it may be called at any time, twice too."""
        for request in requests:
            slot, request.slot = request.slot, -1
            if slot < 0 or request.epoch != self._epoch:
                continue
            whole = request.status in (decode.STOPPED, decode.FULL_LENGTH) and request.text.found is None
            if request.keep and whole and len(request.tokens) == request.length:
                self._kept[slot] = request.tokens
            else:
                self._ended.append(slot)
                self._free.append(slot)

    def _ready(self) -> None:
        """Makes the state, at the beginning and after a call that failed has taken it along."""
        if self._state is None:
            self._state = jax.block_until_ready(self._init())
            self._epoch += 1
            self._free = collections.deque(range(self.slots))
            self._ended: collections.deque[int] = collections.deque()  # slots whose pages are still to be released
            self._kept: dict[int, np.ndarray] = {}  # slots that hold a finished conversation: its tokens, oldest first

    def _take(self, request: Request) -> int:
        """A slot: the one that holds most of the request's conversation, else an empty one, else the oldest kept one."""
        rows = {slot: self._shared(tokens, request.prompt) for slot, tokens in self._kept.items()} if request.keep else {}
        slot = max(rows, key=lambda slot: rows[slot], default=-1)
        request.shared = rows.get(slot, 0)
        if request.shared:
            del self._kept[slot]
            return slot
        if not self._free:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._ended.append(oldest)
            return oldest
        return self._free.popleft()

    def _shared(self, tokens: np.ndarray, prompt: np.ndarray) -> int:
        """How many rows of a kept sequence, all but whose last token have K and V, serve a prompt."""
        size = min(len(tokens), len(prompt))
        same = int(np.argmin(np.append(tokens[:size] == prompt[:size], False)))
        if same == len(tokens):
            return same - 1
        # Going back, drafters that look ahead see a few rows again, and sliding layers must still hold the window before the first.
        rows = max(same - LOOK_AHEAD, 0)
        cache = self._state.cache
        ring = cache.tables[SLIDING].shape[1] * page_size_of(cache)
        overwritten = len(tokens) + self.num_draft_tokens - ring
        window = max((spec.window or 0 for spec in self.target.config.layers), default=0)
        return rows if not window or overwritten <= 0 or rows - window >= overwritten else 0

    def _bucket(self, count: int) -> int:
        return next(size for size in self.decode_buckets if size >= count)

    def _ids(self, slots: Sequence[int], size: int) -> np.ndarray:
        return np.asarray([*slots, *[self.slots] * (size - len(slots))], np.int32)

    def _put(self, requests: Sequence[Request], tokens: Sequence[np.ndarray], needs: Needs) -> None:
        """Takes slots, and puts sequences that know these tokens into them."""
        self._ready()
        taken, ended = [], []
        try:
            for request in requests:
                request.slot, request.epoch = self._take(request), self._epoch
                taken.append(request)
            size = self._bucket(len(taken))
            program = self._program("admit", size, needs.edits)
            while self._ended:
                ended.append(self._ended.popleft())
            packed = _pack(requests, tokens, size, self.max_len, needs.edits)
            self._run(program, self._ids(ended, self.slots), self._ids([r.slot for r in taken], size), packed)
        except BaseException:
            self.end(taken)
            raise

    def _prefill(self, requests: Sequence[Request], needs: Needs) -> None:
        left = {request.slot: len(request.prompt) - request.shared for request in requests}
        while left:
            longest = sorted(left, key=lambda slot: -left[slot])
            size, chunk = max(self.prefill_buckets, key=functools.partial(_worth, [left[slot] for slot in longest]))
            self._run(self._program("prefill", size, chunk, needs), self._ids(longest[:size], size))
            left.update({slot: left[slot] - chunk for slot in longest[:size]})
            left = {slot: n for slot, n in left.items() if n > 0}

    def _refresh(self, requests: Sequence[Request]) -> None:
        lengths, statuses, drafted = self._get((self._state.length, self._state.status, self._state.drafted))
        for r in requests:
            r.length, r.status, r.drafted = int(lengths[r.slot]), int(statuses[r.slot]), int(drafted[r.slot])

    def _run(self, program: Callable[..., Any], *args: Any) -> None:
        """Replaces the state by what a program makes of it. A program that fails takes the state along."""
        state, self._state = self._state, None
        self._state = program(self.target, self.drafter, state, *args)

    def _get(self, tree: Any) -> Any:
        try:
            return jax.device_get(tree)
        except Exception:
            self._state = None  # what a failed program gives can never be read
            raise

    def _program(self, name: str, *key: Any) -> Callable[..., Any]:
        """A compiled program: ("admit", size, edits), ("prefill", size, chunk, needs), ("decode", size, needs), ("score", size, chunk,
        count), ("read",) or ("logprobs",)."""
        if (name, *key) not in self._programs:
            begun = time.perf_counter()
            self._programs[name, *key] = getattr(self, f"_compile_{name}")(*key)
            self.compilations += 1
            self.compile_seconds += time.perf_counter() - begun
        return self._programs[name, *key]

    def _compile(self, function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
        """(weights, state, *args) -> state. The state is given away."""
        jitted = jax.jit(function, donate_argnums=2, out_shardings=self._shardings)
        return jitted.lower(self.target, self.drafter, self._state, *args).compile()

    def _compile_admit(self, size: int, edits: bool) -> Callable[..., Any]:
        packed = _pack([], [], size, self.max_len, edits)
        return self._compile(_admit, self._ids([], self.slots), self._ids([], size), packed)

    def _compile_prefill(self, size: int, chunk: int, needs: Needs) -> Callable[..., Any]:
        return self._compile(functools.partial(decode.prefill, chunk=chunk, needs=needs, **self._attention), self._ids([], size))

    def _compile_decode(self, size: int, needs: Needs) -> Callable[..., Any]:
        static = {"num_draft_tokens": self.num_draft_tokens, "accept": self.accept, "needs": needs, **self._attention}
        return self._compile(functools.partial(decode.decode_loop, **static), self._ids([], size), np.int32(0), np.bool_(False))

    def _compile_score(self, size: int, chunk: int, count: int) -> Callable[..., Any]:
        function = functools.partial(decode.score, chunk=chunk, count=count, attention=self._attention["attention"])
        shardings = None if self._shardings is None else (self._shardings, None)
        return jax.jit(function, donate_argnums=1, out_shardings=shardings).lower(self.target, self._state, self._ids([], size)).compile()

    def _compile_read(self) -> Callable[..., Any]:
        return jax.jit(_read).lower(self._state.tokens, self._state.from_draft, np.int32(0)).compile()

    def _compile_logprobs(self) -> Callable[..., Any]:
        return jax.jit(_ring).lower(self._state.logprobs, np.int32(0)).compile()


def _pack(requests: Sequence[Request], tokens: Sequence[np.ndarray], size: int, max_len: int, edits: bool) -> decode.Requests:
    """What the device knows of requests. tokens: those that are known of each. edits: whether to send what changes their logits."""

    def array(values: Sequence[Any], dtype: Any, *shape: int, fill: Any = 0) -> Any:
        out = np.full((size, *shape), fill, dtype)
        for row, value in zip(out, values, strict=False):
            row[: len(value)] = value
        return out

    def column(values: Sequence[Any], dtype: Any, fill: Any = 0) -> Any:
        return np.asarray([*values, *[fill] * (size - len(values))], dtype)

    params = [r.params for r in requests]
    length = column([len(t) for t in tokens], np.int32)
    words: Any = np.full((size, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    for row, request in zip(words, requests, strict=False):
        for slot, word in zip(row, request.bad_words, strict=False):
            slot[-len(word) :] = word
    fields: dict[str, Any] = {
        "tokens": array(tokens, np.int32, max_len),
        "length": length,
        "prompt": length,
        "computed": column([r.shared for r in requests], np.int32),
        "limit": column([r.limit for r in requests], np.int32),
        "stop_ids": array([r.stop_ids for r in requests], np.int32, MAX_STOP_IDS, fill=-1),
        "seed": array([seed_words(r.seed) for r in requests], np.uint32, 2),
        "temperature": column([r.temperature for r in requests], np.float32),
        "filters": Filters(*(column([getattr(r, name) for r in requests], dtype, fill) for name, dtype, fill in FILTERS)),
    }
    if edits:
        fields["edits"] = Edits(
            repetition=column([r.repetition_penalty for r in requests], np.float32, 1),
            frequency=column([p.frequency_penalty for p in params], np.float32),
            presence=column([p.presence_penalty for p in params], np.float32),
            min_tokens=column([p.min_tokens for p in params], np.int32),
            bias_ids=array([list(p.logit_bias) for p in params], np.int32, MAX_IDS, fill=NOBODY),
            bias=array([list(p.logit_bias.values()) for p in params], np.float32, MAX_IDS),
            allowed=array([p.allowed_token_ids or () for p in params], np.int32, MAX_IDS, fill=NOBODY),
            bad_words=words,
        )
    return decode.Requests(**fields)


def _worth(left: Sequence[int], bucket: tuple[int, int]) -> float:
    """Prompt tokens that a prefill call computes, by what it costs. left: of each prompt, longest first."""
    size, chunk = bucket
    return sum(min(chunk, n) for n in left[:size]) / (size * chunk + CALL_ROWS)


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, over all devices a replica counted once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _admit(target: Any, drafter: Any, state: decode.DecodeState, ended: jax.Array, slots: jax.Array, requests: Any) -> decode.DecodeState:
    return decode.admit(decode.release(state, ended), slots, requests)


def _read(tokens: jax.Array, from_draft: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    return tokens[slot], from_draft[slot]


def _ring(logprobs: Logprobs, slot: jax.Array) -> Logprobs:
    return jax.tree.map(lambda x: x[slot], logprobs)
