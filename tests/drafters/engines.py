"""Engines of few slots and programs with every kind of drafter, whose pages are counted after every call."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import kinds
import numpy as np
import pytest
import rounds
import tiny
from kinds import KINDS

from jaxspec.drafters.base import NoDraft
from jaxspec.engine import turn
from jaxspec.engine.buckets import Buckets
from jaxspec.engine.llm import LLM
from jaxspec.engine.runner import Runner
from jaxspec.engine.settings import Settings
from jaxspec.engine.slots import KeptSequence, Slots
from jaxspec.model.layer_spec import FULL
from jaxspec.sampling.choice import Needs
from jaxspec.sampling.logprobs import MAX_LOGPROBS

MAX_LEN, PAGE, CHUNK, SLOTS, K = 400, 8, 16, 3, 3
NEEDS = Needs("search", edits=True, logprobs=MAX_LOGPROBS)  # one program for every request here
EOS = (7, 11)


@contextlib.contextmanager
def few_programs():
    """One of each sort, for every engine here."""
    with pytest.MonkeyPatch.context() as patch:
        for name, sizes in {"prefill": [(SLOTS, CHUNK)], "decode": [SLOTS], "trees": [SLOTS], "admit": [SLOTS]}.items():
            patch.setattr(Buckets, name, sizes)
        patch.setattr(turn, "ENOUGH", 0.2)  # a long prompt alone fills a third of a call
        yield


@functools.cache
def llm_of(kind, **changes):
    drafter = NoDraft() if kind is None else kinds.weights(KINDS[kind](), 3, PAGE - 3)
    sizes = {"max_slots": SLOTS, "max_len": MAX_LEN, "page_size": PAGE, "num_draft_tokens": 0 if kind is None else K, "progress": False}
    llm = LLM(rounds.target(), drafter, tiny.Letters(), Settings(**{**sizes, **changes}), eos_token_ids=EOS)
    llm._needs = lambda requests: NEEDS
    return llm


def check(runner):
    """No page is held twice by a slot or lost, each knows how many slots hold it, and the host knows which slots those are."""
    state = jax.device_get(runner.programs.state.cache)
    owned = [state.tables[FULL][slot, : state.held[slot]].tolist() for slot in range(runner.total_slots)]
    assert all(len(set(pages)) == len(pages) for pages in owned)
    holders = np.bincount(np.asarray(sum(owned, []), int), minlength=len(state.refs))
    assert state.refs.tolist() == holders.tolist()
    free = state.free[: state.free_count].tolist()
    hidden = len(state.refs) - getattr(runner, "pages", runner.settings.kv_pages)
    assert len(set(free)) == len(free) and set(free) <= set(np.flatnonzero(holders == 0))
    assert len(free) == np.sum(holders == 0) - hidden
    for slot, held in enumerate(runner.held._holds):
        assert held is not None or not owned[slot]
        if isinstance(held, KeptSequence):
            assert state.held[slot] >= (len(held.tokens) - 1) // PAGE


@contextlib.contextmanager
def only(llm, pages=None, prefixes=True):
    """The engine from its beginning with so many full pages, and with or without keeping prompts; checked after every call."""
    runner = llm._runner
    runner.programs.state = None
    runner.ready()
    runner.pages = runner.settings.kv_pages if pages is None else pages
    shrunk = dataclasses.replace(runner.programs.state.cache, free_count=jnp.asarray(runner.pages, jnp.int32))
    runner.programs.state = dataclasses.replace(runner.programs.state, cache=shrunk)
    runner._free, read = runner.pages, Runner.read

    def checked(self, calls):
        starved = read(self, calls)
        check(self)
        return starved

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "read", checked)
        if not prefixes:
            patch.setattr(Slots, "find", lambda *_: (-1, 0))
            patch.setattr("jaxspec.engine.turn.boundary", lambda *_: 0)
        yield
    assert runner.free_slots == SLOTS
    runner.flush()
    while runner.evict():
        pass
    check(runner)
    assert runner.free_pages == runner.pages


PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "ignore_eos": True}


def fixed(count, length, shared=0):
    """Prompts of one length, the first `shared` tokens of which are the same. Those of other sizes are others."""
    ids = np.random.default_rng([count, length, shared]).integers(2, rounds.VOCAB, (count, length))
    ids[:, :shared] = ids[0, :shared]
    return ids.tolist()
