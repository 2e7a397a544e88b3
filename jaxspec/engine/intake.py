"""From a prompt and params to checked requests."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from jaxspec.checks import same_kind, type_name
from jaxspec.engine.fetches import Fetches
from jaxspec.engine.inserts import Inserts, Placed, are_several
from jaxspec.engine.params import MAX_SEED, Defaults, SamplingParams
from jaxspec.engine.request import Request
from jaxspec.engine.structures import Structure, Structures
from jaxspec.foreign_names import PARAMS_HERE
from jaxspec.sampling.logit_edits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_IDS
from jaxspec.sampling.logprobs import MAX_LOGPROBS
from jaxspec.structured.params import StructuredOutputsParams
from jaxspec.text import MEDIA, OutputText, Tokenizer

MAX_STOP_IDS = 16
# Keys of a prompt that vLLM or transformers knows, and why they are refused.
UNREAD = {
    "multi_modal_data": "only text can be read; to read images, load with images=True, to hear sounds, with audio=True, and to see "
    "videos, with videos=True",
    "multi_modal_uuids": "images, sounds and videos are told apart by what they hold",
    "mm_processor_kwargs": "all images are prepared alike; load with images=1120 for up to so many tokens of each",
    "prompt_embeds": "a prompt is made of tokens",
    "encoder_prompt": "the model has no encoder",
    "cache_salt": "prompts that begin alike are always computed once",
    "input_ids": "token ids of one sequence, without padding, are called 'prompt_token_ids'",
}

Prompt = str | Sequence[int] | np.ndarray | jax.Array | Mapping[str, Any]
P = ParamSpec("P")
R = TypeVar("R")


def says_where_params_go(method: Callable[P, R]) -> Callable[P, R]:
    """Decorates a method that takes params: of one of their fields as a keyword, under its name here or elsewhere, it says where that
    goes."""

    @functools.wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name in SamplingParams.__dataclass_fields__:
                raise TypeError(f"{method.__name__} has no argument {name!r}; it belongs into params=SamplingParams({name}=...)")
            if name in PARAMS_HERE:
                where = f"in params=SamplingParams(...) it is called {PARAMS_HERE[name]}"
                raise TypeError(f"{method.__name__} has no argument {name!r}; {where}")
            if name in ("input_ids", "attention_mask"):  # what a tokenizer of transformers gives
                raise TypeError(f"{method.__name__} has no argument {name!r}; a prompt's token ids are given as the prompt")
        return method(*args, **kwargs)

    return checked


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes requests for one target."""

    tokenizer: Tokenizer
    vocab_size: int
    max_len: int  # tokens of the longest sequence
    eos_token_ids: tuple[int, ...]  # these end a sequence by default
    defaults: Defaults  # of params that say nothing
    structures: Structures  # makes automata of what texts must look like
    inserts: Inserts | None = None  # makes what stands in prompts for images, sounds and videos; None where prompts have neither

    def requests(self, index: int, prompt: Any, params: Any, draw_seed: Any, keep: int = 0) -> list[Request]:
        """The n samples of prompt `index` of a call. draw_seed: gives a seed where params names none. keep: see `Request`, of the tokens
        that are given.

        Raises TypeError or ValueError, with the prompt's index, for a prompt or params that cannot be served.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params of prompt {index} are of type {type_name(params)}, expected jaxspec.SamplingParams")
        prompt_text, placed = self._prompt(index, prompt)
        ids = placed.ids
        self._check_ids(index, params)
        if placed.inserts and (params.prompt_logprobs is not None or not -1 < (params.logprobs or 0) <= MAX_LOGPROBS):
            raise ValueError(
                f"prompt {index} has images, sounds or videos, of which prompt_logprobs and more than {MAX_LOGPROBS} logprobs cannot be "
                "served: these take a pass over its tokens alone"
            )
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
        structure = self._structure(index, params)
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
                prompt_text=prompt_text,
                structure=structure,
                index=i,
                prompt_index=index,
                tools=prompt.get("tools") if isinstance(prompt, Mapping) else None,
                keep=placed.length_of(keep),
                inserts=placed.inserts,
            )
            for i in range(params.n)
        ]

    def _structure(self, index: int, params: SamplingParams) -> Structure | None:
        if params.structured_outputs is None:
            return None
        try:
            return self.structures.of(StructuredOutputsParams.of(params.structured_outputs))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from error

    def _chosen(self, params: SamplingParams, name: str) -> Any:
        value = getattr(params, name)
        return getattr(self.defaults, name) if value is None else value

    def _prompt(self, index: int, prompt: Any) -> tuple[str | None, Placed]:
        """The text of a prompt, None where it was not given, and its tokens."""
        kinds = () if self.inserts is None else tuple(self.inserts.towers)
        text, given, media = _parts(index, prompt, kinds) if isinstance(prompt, Mapping) else (None, prompt, {})
        given = _on_host(given)
        if isinstance(given, str):
            try:
                text, ids = given, self.tokenizer.encode(given) if given else []
            except ValueError as error:
                raise ValueError(f"prompt {index}: {error}") from error
        elif isinstance(given, list | tuple | range | np.ndarray):
            ids: Any = given
        else:
            raise TypeError(f"prompt {index} is of type {type(given).__name__}, expected a str or a list of token ids")
        only = set(map(type, ids))  # much faster than a test of each
        at = None if only <= {int} else next((at for at, i in enumerate(ids) if not is_id(i)), None)
        if at is not None:
            raise TypeError(f"prompt {index} has {ids[at]!r} at position {at}; expected a token id, an integer")
        if not len(ids):
            raise ValueError(f"prompt {index} is empty; expected at least one token")
        placed = self._placed(index, ids, media)
        ids = placed.ids
        if len(ids) > self.max_len - 1:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens; expected at most {self.max_len - 1}, max_len {self.max_len} less one to generate"
            )
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            at = next(at for at, i in enumerate(ids) if not 0 <= i < self.vocab_size)
            raise ValueError(f"prompt {index} has id {ids[at]} at position {at}; expected 0 .. {self.vocab_size - 1}")
        return text, placed

    def _placed(self, index: int, ids: Any, media: Mapping[str, list[Any]]) -> Placed:
        """The prompt with its media. Without any it stays as it is; where it could have some, it may have no token of one
        then."""
        if self.inserts is None or not (any(media.values()) or self.inserts.are_in(ids)):
            return Placed(ids, (), [])
        try:
            with Fetches(media) as fetches:
                coming = {kind: fetches.begin_medium(given) for kind, given in media.items()}
                return self.inserts.placed([int(i) for i in ids], coming, self.max_len - 1)
        except (TypeError, ValueError) as error:
            raise same_kind(error, f"prompt {index}: {error}") from error

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
        """The tokens of each word, at the beginning of a text and after a space; the latter only if they are as many and begin with
        another token."""
        found = []
        for word in params.bad_words:
            stem = word.lstrip()  # a word of spaces and line breaks alone stands for itself
            first, spaced = (tuple(self.tokenizer.encode_word(text)) for text in (stem or word, f" {stem}" if stem else word))
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


class Requests(Iterator[Request]):
    """The requests of items, made when they are asked for. Where the items stop for a while, so does this. An item that is refused is the
    last one that is read."""

    def __init__(self, items: Iterable[Any], made: Callable[[int, Any], list[Request]]):
        """made: the requests of an item, from its index and itself."""
        self._items, self._made, self._ready = enumerate(items), made, collections.deque[Request]()
        self.refused = list[Exception]()  # the error of an item that cannot be served, to be raised after those before it

    def __next__(self) -> Request:
        while not self._ready:
            if self.refused:
                raise StopIteration
            index, item = next(self._items)
            try:
                self._ready.extend(self._made(index, item))
            except Exception as error:
                self.refused.append(error)
        return self._ready.popleft()


def prompts_of(given: Any) -> list[Any]:
    """The prompts of a call. A str, a list of token ids or a dict is one prompt; anything else that can be iterated over, or has a length
    and numbered items, holds several. Raises TypeError."""
    given = _on_host(given)
    single = getattr(given, "ndim", 1) == 0  # an array of one number has no length
    ids = not single and isinstance(given, list | tuple | range | np.ndarray) and len(given) > 0 and is_id(given[0])
    if isinstance(given, str | Mapping) or ids:
        return [given]
    numbered = hasattr(given, "__len__") and hasattr(given, "__getitem__")
    if isinstance(given, bytes) or hasattr(given, "columns") or single or not (hasattr(given, "__iter__") or numbered):
        raise TypeError(f"prompts are of type {type(given).__name__}, expected a str, a list of token ids, a dict, or a list of these")
    return list(given) if hasattr(given, "__iter__") else [given[i] for i in range(len(given))]


def _on_host(given: Any) -> Any:
    """A tensor of JAX, PyTorch or another library, on any device, as lists; NumPy's arrays and anything else as they are."""
    return given.tolist() if hasattr(given, "__dlpack__") and not isinstance(given, np.ndarray) else given


def _parts(index: int, prompt: Mapping[str, Any], kinds: Sequence[str]) -> tuple[str | None, Any, dict[str, list[Any]]]:
    """(text, text or token ids, media by kind) of a prompt that is a dict, which may have "tools" too: see `Request`. kinds: of the media
    that it may have. Raises TypeError or ValueError, with the prompt's index."""
    known = ("prompt", "prompt_token_ids", *(("multi_modal_data",) if kinds else ()))
    refused = [key for key, value in prompt.items() if key not in (*known, "tools") and _says_something(value)]
    if refused:
        reason = f": {UNREAD[refused[0]]}" if refused[0] in UNREAD else ""
        raise ValueError(f"prompt {index} has {refused[0]!r}, which cannot be served{reason}; expected {' or '.join(map(repr, known))}")
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise ValueError(f"prompt {index} is a dict without 'prompt' and 'prompt_token_ids'")
    if not isinstance(text, str | None):
        raise TypeError(f"'prompt' of prompt {index} is of type {type(text).__name__}, expected a str")
    if isinstance(ids, str):
        raise TypeError(f"'prompt_token_ids' of prompt {index} are a str, expected a list of token ids")
    return text, text if ids is None else ids, _media(index, prompt.get("multi_modal_data"), kinds) if kinds else {}


def _media(index: int, given: Any, kinds: Sequence[str]) -> dict[str, list[Any]]:
    """What vLLM calls multi_modal_data: {"image": one or a list of them, "audio" and "video": the same}. Raises TypeError or ValueError."""
    expected = " and ".join(map(repr, kinds))
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"'multi_modal_data' of prompt {index} is of type {type(given).__name__}, expected a dict with {expected}")
    others = [key for key, value in given.items() if key not in kinds and _says_something(value)]
    if others:
        _, hint = MEDIA.get(others[0], ("", ""))
        raise ValueError(f"'multi_modal_data' of prompt {index} has {others[0]!r}, expected {expected} alone{hint}")
    found = {kind: given[kind] for kind in kinds if given.get(kind) is not None}
    return {kind: list(media) if are_several(media, kind) else [media] for kind, media in found.items()}


def _says_something(value: Any) -> bool:
    return bool(len(value)) if hasattr(value, "__len__") else bool(value)  # an array of several numbers is neither true nor false


def either(params: Any, sampling_params: Any) -> Any:
    """The params of a call, which takes them under both names. Raises TypeError where it was given both."""
    if params is not None and sampling_params is not None:
        raise TypeError("both params and sampling_params were given; expected one of them")
    return params if sampling_params is None else sampling_params


def params_of(given: Any, count: int) -> list[Any]:
    """The params of each of so many prompts: `given` is None, SamplingParams for all of them, or a list. Raises TypeError or ValueError."""
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    if not isinstance(given, list | tuple):
        raise TypeError(f"params is {type_name(given)}, expected jaxspec.SamplingParams, a list of them or None")
    if len(given) != count:
        raise ValueError(f"params is a list of length {len(given)}; expected {count}, one for each prompt, or one alone for all")
    return list(given)


def params_or_default(given: Any) -> SamplingParams:
    """The params of a call that takes one for all prompts. Raises TypeError for anything but SamplingParams or None."""
    if given is not None and not isinstance(given, SamplingParams):
        raise TypeError(f"params is {type_name(given)}, expected jaxspec.SamplingParams or None")
    return given or SamplingParams()


def is_id(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
