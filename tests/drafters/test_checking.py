"""`drafters.check`: every kind passes, a drafter that breaks the protocol is told how, and ids that are none are never accepted."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import struct
from quick import few_programs

import jaxspec
from jaxspec import drafters, loading, released
from jaxspec.decode import accept
from jaxspec.drafters.base import Drafts
from jaxspec.model import gemma4
from jaxspec.model.draft_tree import DraftTree
from jaxspec.model.gemma4_config import Gemma4Config

TARGET = gemma4.abstract(Gemma4Config.from_hf(tiny.TARGET), jnp.float32)
KINDS = {"none": "31b", "ngram": "31b", "mtp": "e2b", "eagle3": "31b", "dflash": "31b", "modules": "12b", "e2b": "26b"}
KINDS |= {"dflash2": "31b", "dspark": "12b"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_passes(kind):
    target = gemma4.abstract(released.target_config(KINDS[kind]), jnp.bfloat16)
    drafters.check(released.abstract_drafter(kind, KINDS[kind], target.config, jnp.bfloat16), target)


@struct.dataclass
class Steady:
    """Guesses the anchor again and again. Its state counts rows."""

    bias: jax.Array
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=(1,))

    def init(self, slots, max_len, num_draft_tokens):
        return {"rows": jnp.zeros((slots,), jnp.int32)}

    def observe(self, state, rows):
        return {"rows": state["rows"].at[rows.slots].add(rows.committed, mode="drop")}

    def draft(self, state, target, sampling, num_draft_tokens):
        return Drafts(jnp.tile(target.anchor[:, None], (1, num_draft_tokens))), state


def broken(**members):
    """A class like Steady with other methods."""
    return struct.dataclass(type("Broken", (Steady,), {**members, "__annotations__": {}}))(jnp.zeros(3))


def draft_with(change):
    def draft(self, state, target, sampling, num_draft_tokens):
        found, state = Steady.draft(self, state, target, sampling, num_draft_tokens)
        return change(found, state)

    return broken(draft=draft)


class Plain:
    taps = ()
    init, observe, draft = Steady.init, Steady.observe, Steady.draft


WRONG = {
    "plain class": (Plain(), TypeError, "the drafter Plain is a plain class, .* expected a pytree: decorate the class with flax.struct"),
    "class": (Steady, TypeError, "drafter is the class Steady itself; expected an object of it"),
    "members": (3, TypeError, "drafter is of type int without taps, init, observe, draft; expected a checkpoint's name, a Drafter"),
    "array": (draft_with(lambda d, s: d.tokens), TypeError, r"draft .* gives int32 \[2, 4\]; expected the pair \(Drafts, state\)"),
    "arrays": (draft_with(lambda d, s: (d.tokens, s)), TypeError, r"gives a tuple of \w+, dict; expected the pair \(Drafts, state\)"),
    "drafts alone": (draft_with(lambda d, s: d), TypeError, r"gives a Drafts; expected the pair \(Drafts, state\)"),
    "float ids": (
        draft_with(lambda d, s: (Drafts(d.tokens.astype(jnp.float32)), s)),
        ValueError,
        r"gives tokens float32 \[2, 4\]; expected int32 \[2, 4\] for 2 sequences and K = 4",
    ),
    "K - 1": (draft_with(lambda d, s: (Drafts(d.tokens[:, 1:]), s)), ValueError, r"gives tokens int32 \[2, 3\]; expected int32 \[2, 4\]"),
    "its own K": (
        broken(draft=lambda self, s, target, how, k: (Drafts(jnp.tile(target.anchor[:, None], (1, 4))), s)),
        ValueError,
        r"gives tokens int32 \[2, 4\]; expected int32 \[2, 1\] for 2 sequences and K = 1",
    ),
    "a text for K": (broken(num_draft_tokens="3"), TypeError, "num_draft_tokens of the drafter Broken is '3' of type str, expected an int"),
    "no tokens": (draft_with(lambda d, s: (Drafts(None), s)), ValueError, r"gives tokens missing; expected int32 \[2, 4\]"),
    "logits": (
        draft_with(lambda d, s: (dataclasses.replace(d, logits=jnp.zeros((2, 4, 7))), s)),
        ValueError,
        "gives logits of 7 candidates; expected 4096, as the vocabulary has",
    ),
    "flat logits": (
        draft_with(lambda d, s: (dataclasses.replace(d, logits=jnp.zeros((2, 4))), s)),
        ValueError,
        r"gives logits float32 \[2, 4\]; expected float32 \[2, 4, C\]",
    ),
    "confidence": (
        draft_with(lambda d, s: (dataclasses.replace(d, confidence=jnp.zeros((2, 4, 1))), s)),
        ValueError,
        r"gives confidence float32 \[2, 4, 1\]; expected float32 \[2, 4\]",
    ),
    "another state": (draft_with(lambda d, s: (d, {**s, "more": s["rows"]})), None, None),  # which observe drops again
    "dtype of a state": (
        broken(observe=lambda self, state, rows: {"rows": state["rows"].astype(jnp.float32)}),
        ValueError,
        r"observe .* gives a state of another structure: rows is float32 \[3\], expected int32 \[3\] as init gives it",
    ),
    "lost state": (broken(observe=lambda self, state, rows: {}), ValueError, "rows is missing, expected int32"),
    "state after drafts": (
        broken(draft=lambda self, s, *more: (Steady.draft(self, s, *more)[0], {"rows": s["rows"][:, None]}), observe=lambda self, s, r: s),
        ValueError,
        r"draft, then observe, of the drafter Broken gives a state of another structure: rows is int32 \[3, 1\], expected int32 \[3\]",
    ),
    "kind of a state": (
        broken(observe=lambda self, s, r: tuple(s.values())),
        ValueError,
        "another structure: rows is missing",
    ),
    "axis of slots": (
        broken(init=lambda self, slots, max_len, k: {"rows": jnp.zeros((), jnp.int32)}),
        ValueError,
        r"init of the drafter Broken gives a state of which rows is \[\]; expected a leading axis of slots, \[3, ...\] for 3 slots, or",
    ),
    "a failure": (
        broken(observe=lambda self, state, rows: {"rows": state["rows"] + rows.taps[1]}),
        IndexError,
        "observe of the drafter Broken failed where its shapes were checked: tuple index out of range",
    ),
    "a value": (
        broken(draft=lambda self, state, target, *more: int(target.anchor[0])),
        TypeError,
        r"draft of the drafter Broken failed where its shapes were checked: (.|\n)*int32\[\]",
    ),
}


@pytest.mark.parametrize("way", WRONG)
def test_what_breaks_the_protocol_is_told(way):
    drafter, error, message = WRONG[way]
    if error is None:
        return drafters.check(drafter, TARGET)
    with pytest.raises(error, match=message):
        drafters.check(drafter, TARGET)


@pytest.mark.parametrize(
    ("guessed", "error", "message"),
    [
        (lambda anchor: Drafts(jnp.tile(anchor[:, None], (1, 7))), None, ""),
        (
            lambda anchor: Drafts(jnp.tile(anchor[:, None], (1, 3))),
            ValueError,
            r"draft_tree .* int32 \[2, 7\] for .* a tree of 7 nodes",
        ),
        (lambda anchor: jnp.zeros(3), TypeError, r"draft_tree .* gives .*; expected the pair \(Drafts, state\)"),
    ],
)
def test_trees_are_checked_too(guessed, error, message, folders, monkeypatch):
    drafter = broken(draft_tree=lambda self, s, target, how, tree: (guessed(target.anchor), s)[: 2 if error is not TypeError else 1])
    if error is None:
        return drafters.check(drafter, TARGET, tree=DraftTree.default(7))
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(error, match=message):
        jaxspec.load(folders[0], drafter, tree=7, progress=False)


def test_load_checks_an_object_before_weights_are_read(folders, monkeypatch):
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: pytest.fail("weights were read"))
    for way in ("plain class", "class", "members", "K - 1", "float ids", "array"):
        drafter, error, message = WRONG[way]
        with pytest.raises(error, match=re.sub(r"2, 4|2, 3", r"\\d, \\d", message)):
            jaxspec.load(folders[0], drafter, progress=False)


@struct.dataclass
class Wild:
    """Guesses ids that are none, of either side, and gives each all of its probability."""

    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def init(self, slots, max_len, num_draft_tokens):
        return ()

    def observe(self, state, rows):
        return state

    def draft(self, state, target, sampling, num_draft_tokens):
        ids = jnp.asarray([tiny.VOCAB, -7, 2**31 - 1], jnp.int32)[:num_draft_tokens]
        return Drafts(jnp.broadcast_to(ids, (target.slots.shape[0], num_draft_tokens))), state


@pytest.mark.parametrize(
    "rule", ["coupled", *(pytest.param(r, marks=pytest.mark.slow) for r in ("standard", "block", accept.synthetic([1.0] * 3)))], ids=str
)
def test_ids_out_of_range_count_as_rejected(rule, folders, monkeypatch, unoptimised):
    few_programs(monkeypatch)
    settings = {"max_slots": 1, "max_len": 40, "progress": False}
    # The last id of the vocabulary is made likely: what lies past it must not be taken for it.
    params = jaxspec.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logit_bias={tiny.VOCAB - 1: 100}, min_p=0.1)
    llm = jaxspec.load(folders[0], Wild(), num_draft_tokens=3, accept=rule, **settings)
    (found,) = llm.generate(["def f(x):"], params)
    assert np.all(np.asarray(found.token_ids) == tiny.VOCAB - 1) and found.stats.accepted == 0
