"""What a runner compiles: functions of weights, the state and more that give the state and what the host reads of it. `admit` takes no
weights, and a bare state."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from jaxspec import decode as loop
from jaxspec.state import DecodeState


def bare(state: DecodeState) -> DecodeState:
    """A state without the arrays that hold what was computed, which are many: each costs a microsecond or two in a call."""
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=()), drafter=None, logprobs=None)


def whole(bare: DecodeState, state: DecodeState) -> DecodeState:
    """A bare state with those arrays of another one."""
    cache = dataclasses.replace(bare.cache, layers=state.cache.layers)
    return dataclasses.replace(bare, cache=cache, drafter=state.drafter, logprobs=state.logprobs)


def admit(state: DecodeState, ended: jax.Array, slots: jax.Array, requests: Any) -> Any:
    state = loop.admit(loop.release(state, ended), slots, requests)
    return state, state.cache.free_count + 0  # a state's own arrays are given away with it


def fork(target: Any, drafter: Any, state: DecodeState, sources: jax.Array, slots: jax.Array, rows: jax.Array) -> Any:
    state = loop.fork(state, sources, slots, rows)
    return state, state.cache.free_count + 0


def prefill(target, drafter, state, slots, until, known, *, needs, **static) -> Any:
    state = loop.prefill(target, drafter, state, slots, until, needs=needs, **static)
    return state, loop.report(state, slots, known, 1, needs.logprobs is not None)


def decode(target, drafter, state, slots, known, steps, until_any, *, width, needs, **static) -> Any:
    state = loop.decode_loop(target, drafter, state, slots, steps, until_any, needs=needs, **static)
    return state, loop.report(state, slots, known, width, needs.logprobs is not None)


def score(target, drafter, state, slots, **static) -> Any:
    state, found = loop.score(target, state, slots, **static)
    return state, (found, state.starved | False)
