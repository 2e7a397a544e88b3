"""What the device is told of requests: one array for each field, a row for each request. And the state that takes them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec import decode
from jaxspec.engine.buckets import padded
from jaxspec.engine.intake import MAX_STOP_IDS
from jaxspec.engine.request import Request
from jaxspec.sampling.choice import seed_words
from jaxspec.sampling.filters import Filters
from jaxspec.sampling.logit_edits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_IDS, NOBODY, Edits

FILTERS = (("top_k", np.int32, 0), ("top_p", np.float32, 1), ("min_p", np.float32, 0))  # the last entry is a value that changes nothing


def init_state(target: Any, drafter: Any, **sizes: Any) -> decode.DecodeState:
    """An empty state with room for the stop ids of every request. The arguments are those of `decode.init_state`."""
    return decode.init_state(target, drafter, max_stop_ids=MAX_STOP_IDS, **sizes)


def arrays_of(requests: Sequence[Request], size: int, max_len: int) -> decode.Requests:
    """Requests, with all their known tokens, as `decode.admit` takes them: arrays of `size` rows, where the rows that are left hold
    values that change nothing. Tokens are [size, max_len]."""

    def array(values: Sequence[Any], dtype: Any, *shape: int, fill: Any = 0) -> Any:
        out = np.full((size, *shape), fill, dtype)
        for row, value in zip(out, values, strict=False):
            row[: len(value)] = value
        return out

    def column(values: Sequence[Any], dtype: Any, fill: Any = 0) -> Any:
        return padded(values, size, fill, dtype)

    params = [r.params for r in requests]
    words: Any = np.full((size, MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS), -1, np.int32)
    for row, request in zip(words, requests, strict=False):
        for slot, word in zip(row, request.bad_words, strict=False):
            slot[-len(word) :] = word
    return decode.Requests(
        tokens=array([r.tokens for r in requests], np.int32, max_len),
        length=column([r.length for r in requests], np.int32),
        prompt=column([len(r.prompt) for r in requests], np.int32),
        limit=column([r.limit for r in requests], np.int32),
        stop_ids=array([r.stop_ids for r in requests], np.int32, MAX_STOP_IDS, fill=-1),
        seed=array([seed_words(r.seed) for r in requests], np.uint32, 2),
        temperature=column([r.temperature for r in requests], np.float32),
        automaton=column([r.automaton[0] for r in requests], np.int32),
        automaton_start=column([r.automaton[1] for r in requests], np.int32),
        rounds=column([r.rounds for r in requests], np.int32),
        drafted=column([r.drafted for r in requests], np.int32),
        computed=column([r.computed for r in requests], np.int32),
        filters=Filters(*(column([getattr(r, name) for r in requests], dtype, fill) for name, dtype, fill in FILTERS)),
        edits=Edits(
            repetition=column([r.repetition_penalty for r in requests], np.float32, 1),
            frequency=column([p.frequency_penalty for p in params], np.float32),
            presence=column([p.presence_penalty for p in params], np.float32),
            min_tokens=column([p.min_tokens for p in params], np.int32),
            bias_ids=array([list(p.logit_bias) for p in params], np.int32, MAX_IDS, fill=NOBODY),
            bias=array([list(p.logit_bias.values()) for p in params], np.float32, MAX_IDS),
            allowed=array([p.allowed_token_ids or () for p in params], np.int32, MAX_IDS, fill=NOBODY),
            bad_words=words,
        ),
    )


def packed(arrays: Any) -> np.ndarray:
    """A tree of arrays of 32-bit numbers as one array of their bits, since handing over each array has its cost: [n] int32."""
    return np.concatenate([np.ravel(array).view(np.int32) for array in jax.tree.leaves(arrays)])


def unpacked(bits: jax.Array, like: Any) -> Any:
    """The tree of arrays that `packed` was given. like: a tree of arrays of their shapes and dtypes."""
    leaves, form = jax.tree.flatten(like)
    ends = np.cumsum([leaf.size for leaf in leaves])
    pieces = (bits[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True))
    return form.unflatten([jax.lax.bitcast_convert_type(piece, leaf.dtype) for piece, leaf in zip(pieces, leaves, strict=True)])
