"""Five sequences of unlike lengths on a tiny random target, in draft/verify rounds: what the tests of a drafter run it in."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import tiny
from flax import struct

from jaxspec import decode
from jaxspec.drafters.base import Drafts, NoDraft, Target
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.sampling.choice import Sampling

VOCAB, WINDOW, PAGE, MAX_LEN, MAX_K, CHUNK = 64, 8, 3, 43, 7, 5
TEXT = {**tiny.THREE_LAYERS, "vocab_size": VOCAB, "sliding_window": WINDOW}
SLOTS, RING = 7, 15  # RING: positions that a window's pages hold
LENGTHS = np.array([1, 4, 9, 13, 22], np.int32)  # tokens of each prompt; a sequence's seed is its row
TEMPERATURE = np.array([0, 1, 0, 1, 0], np.float32)
SLOT_IDS = np.array([5, 2, 0, 6, 3, SLOTS + 1], np.int32)  # the last is nobody's

# Unoptimised code compiles in half the time, and computes the same.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
init_state = compiled(decode.init_state, static_argnames=("slots", "max_len", "num_draft_tokens", "page_size", "max_stop_ids"))
prefill = compiled(decode.prefill, static_argnames="chunk")
spec_step = compiled(decode.spec_step, static_argnames="round")
decode_loop = compiled(decode.decode_loop, static_argnames="round")
admit, release = compiled(decode.admit), compiled(decode.release)


def random_weights(abstract, seed):
    """Arrays, also where a function that is being traced is the first to ask for them."""
    with jax.ensure_compile_time_eval():
        return jax.tree.map(jnp.asarray, tiny.random_weights(abstract, seed))


@functools.cache
def target():
    return random_weights(gemma4.abstract(Gemma4Config.from_hf(TEXT), jnp.float32), 0)


@functools.cache
def prompts():
    """[5, MAX_LEN]"""
    return np.random.default_rng(1).integers(2, VOCAB, (len(LENGTHS), MAX_LEN)).astype(np.int32)


def started(drafter, model=None, chunk=CHUNK, ids=None, parts=False):
    """A state in which every prompt is computed and every first token chosen. ids: of other prompts than `prompts()`. parts: whether the
    first call computes all of a prompt's parts that a ring holds."""
    ids = prompts() if ids is None else ids
    model = target() if model is None else model
    state = init_state(model, drafter, slots=SLOTS, max_len=MAX_LEN, num_draft_tokens=MAX_K, page_size=PAGE, max_stop_ids=1)
    pad = ((0, 1),)
    seed = np.stack([np.arange(len(LENGTHS) + 1), np.zeros(len(LENGTHS) + 1)], axis=1).astype(np.uint32)
    requests = decode.Requests(
        tokens=np.pad(np.where(np.arange(MAX_LEN) < LENGTHS[:, None], ids, 0), (*pad, (0, 0))),
        length=np.pad(LENGTHS, pad),
        prompt=np.pad(LENGTHS, pad),
        limit=np.full(len(SLOT_IDS), MAX_LEN, np.int32),
        stop_ids=np.full((len(SLOT_IDS), 1), -1, np.int32),
        seed=seed,
        temperature=np.pad(TEMPERATURE, pad),
    )
    for slots in (np.roll(SLOT_IDS[:-1], 2), SLOT_IDS[:-1]):  # at first other sequences, of which nothing may be left
        slots = np.append(slots, SLOT_IDS[-1])
        state = admit(release(state, SLOT_IDS), slots, requests)
        if parts:
            entries = [(slot, at) for slot, n in zip(slots, requests.length, strict=True) for at in range(0, min(n, RING), chunk)]
            several, offset = np.array(entries, np.int32).T
            state = prefill(model, drafter, state, several, None, offset, chunk=chunk)
        for _ in range(-(-LENGTHS.max() // chunk)):
            state = prefill(model, drafter, state, slots, chunk=chunk)
    return state


def tokens(state):
    """[5, MAX_LEN]"""
    return np.asarray(state.tokens)[SLOT_IDS[:-1]]


def lengths(state):
    return np.asarray(state.length)[SLOT_IDS[:-1]]


@functools.cache
def texts():
    """Every sequence to its end, one token at a time. [5, MAX_LEN]"""
    return tokens(decode_loop(target(), NoDraft(), started(NoDraft()), SLOT_IDS, 1000, round=decode.Round(0)))


def ended(model, drafter, state, *ks):
    """The state in which every sequence has ended. ks: K of each call of one round in turn; of a single one, of all rounds."""
    calls = itertools.cycle(ks)
    while np.any(np.asarray(state.status) == decode.RUNNING):
        state = decode_loop(model, drafter, state, SLOT_IDS, 1 if len(ks) > 1 else MAX_LEN, round=decode.Round(next(calls)))
    return state


def finish(drafter, k):
    """The texts with a drafter, and how many rounds each took."""
    state = ended(target(), drafter, started(drafter), k)
    return tokens(state), np.asarray(state.rounds)[SLOT_IDS[:-1]]


@functools.partial(compiled, static_argnames="k")
def drafts(model, drafter, state, k) -> Drafts:
    """What the next round would guess."""
    slots = jnp.asarray(SLOT_IDS)
    at = jnp.minimum(slots, SLOTS - 1)
    length = state.computed[at]
    view = Target(model, state.cache, slots, state.tokens[at, length], length)
    return drafter.draft(state.drafter, view, Sampling(state.seed[at], state.temperature[at]), k)[0]


@struct.dataclass
class Wrapped:
    """A drafter that another one stands in for, but for how it drafts."""

    inner: object

    @property
    def taps(self):
        return self.inner.taps

    def init(self, slots, max_len, num_draft_tokens):
        return self.inner.init(slots, max_len, num_draft_tokens)

    def observe(self, state, rows):
        return self.inner.observe(state, rows)


@struct.dataclass
class Told(Wrapped):
    """A drafter whose guesses are replaced by others once it has made them."""

    guesses: jax.Array

    def draft(self, state, target, sampling, num_draft_tokens):
        _, state = self.inner.draft(state, target, sampling, num_draft_tokens)
        return Drafts(self.guesses[:, :num_draft_tokens]), state


def told(drafter, state, accepted, k=MAX_K):
    """The drafter, told to guess so that `accepted` ([5]) of k guesses are right in the next round."""
    at = lengths(state)[:, None] + np.arange(k)
    right = np.take_along_axis(texts(), np.minimum(at, MAX_LEN - 1), axis=1)
    guesses = np.where(np.arange(k) < np.asarray(accepted)[:, None], right, (right + 1) % VOCAB)
    return Told(drafter, jnp.asarray(np.pad(guesses, ((0, 1), (0, 0))), jnp.int32))
