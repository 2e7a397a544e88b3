"""The draft/verify loop: whatever is drafted, in whatever calls, the tokens are those that the target chooses one at a time."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import struct

from jaxspec import decode
from jaxspec.decode import EMPTY, FAILED, FULL_LENGTH, RUNNING, STOPPED, accept
from jaxspec.decode.rows import sound_choices
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.drafters.base import Drafts, NoDraft
from jaxspec.learning.losses import whole_rows
from jaxspec.model import gemma4
from jaxspec.model import paged_kv as paged
from jaxspec.model.gemma4_config import AssistantConfig, Gemma4Config
from jaxspec.sampling import logit_edits as edits
from jaxspec.sampling.choice import Needs, choose
from jaxspec.sampling.filters import Filters
from pallas_kernels.noise import gumbel, row_keys

pytestmark = pytest.mark.usefixtures("unoptimised")

# Few enough tokens that a random assistant is right now and then.
VOCAB = 64
TEXT = {
    **tiny.TEXT,
    "vocab_size": VOCAB,
    "hidden_size_per_layer_input": 0,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
}
ASSISTANT = {
    **tiny.ASSISTANT,
    "num_centroids": 8,
    "centroid_intermediate_top_k": 2,
    "text_config": {**tiny.ASSISTANT["text_config"], "vocab_size": VOCAB},
}
# With 7 drafts and a window of 8, rings of three such pages hold not one position too many; full pages do not divide max_len.
SLOTS, MAX_LEN, MAX_K, PAGE = 7, 63, 7, 5
NOBODY = SLOTS + 2  # an id that stands for no sequence
PROMPT = np.array([5, 1, 13, 20, 33, 8], np.int32)  # tokens of each prompt; the seed of each is its row
TEMPERATURE = np.array([0, 1, 1, 0, 1, 0], np.float32)
ROWS = np.arange(len(PROMPT))

# Unoptimised code compiles in half the time, and computes the same.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
jit_prefill = compiled(decode.prefill, static_argnames=("chunk", "ends", "round"))
jit_loop = compiled(decode.decode_loop, static_argnames="round")
jit_admit, jit_release, jit_fork = compiled(decode.admit), compiled(decode.release), compiled(decode.fork)


@functools.cache
def target():
    abstract = gemma4.abstract(Gemma4Config.from_hf({**tiny.TARGET, "text_config": TEXT}), jnp.float32)
    return jax.tree.map(jnp.asarray, tiny.random_weights(abstract, 0))


@functools.cache
def assistant():
    config = gemma4_mtp.bind(AssistantConfig.from_hf(ASSISTANT), target().config)
    return jax.tree.map(jnp.asarray, tiny.random_weights(gemma4_mtp.abstract(config, jnp.float32), 1))


@functools.cache
def parrot(share=0.33):
    """A drafter that is wrong about this share of the tokens."""
    wrong = np.random.default_rng(0).random(texts().shape) < share
    return tiny.Parrot(jnp.asarray(texts()), jnp.asarray(wrong))


@functools.cache
def empty():
    """A state for the assistant; the drafters that need none leave it alone, so that all share the programs of prefill."""
    sizes = {"slots": SLOTS, "max_len": MAX_LEN, "num_draft_tokens": MAX_K, "page_size": PAGE, "max_stop_ids": 4}
    return jax.jit(functools.partial(decode.init_state, target(), assistant(), **sizes))()


@functools.cache
def prompts():
    return np.random.default_rng(1).integers(2, VOCAB, (len(PROMPT), MAX_LEN)).astype(np.int32)


def padded(slots, size=SLOTS):
    return np.asarray([*slots, *[NOBODY] * (size - len(slots))], np.int32)


def admit(state, slots, rows=ROWS, *, known=PROMPT, tokens=None, limit=MAX_LEN, stops=None, rounds=0, **more):
    """Puts `rows` into `slots`. known, limit, stops, rounds: by row of all prompts, or one for all. more: fields by row."""
    tokens = prompts() if tokens is None else tokens
    some = {
        "tokens": np.where(np.arange(MAX_LEN) < np.reshape(known, (-1, 1)), tokens, 0),
        "length": known,
        "prompt": PROMPT,
        "limit": np.broadcast_to(limit, PROMPT.shape),
        "stop_ids": np.full((len(PROMPT), 4), -1) if stops is None else stops,
        "seed": np.stack([ROWS, 0 * ROWS], axis=1).astype(np.uint32),
        "temperature": TEMPERATURE,
        "rounds": np.broadcast_to(rounds, PROMPT.shape),
    }
    rows = np.asarray([*rows, *[0] * (SLOTS - len(rows))])

    def put(x):
        x = np.asarray(x)[rows]
        return x.astype(np.int32) if x.dtype == np.int64 else x

    more = jax.tree.map(lambda x: np.asarray(x)[rows], more)
    return jit_admit(state, padded(slots), decode.Requests(**{name: put(x) for name, x in some.items()}, **more))


def prefill(state, slots, chunk=32, **static):
    for _ in range(-(-MAX_LEN // chunk)):
        state = jit_prefill(target(), assistant(), state, padded(slots), chunk=chunk, round=decode.Round(0, **static))
    return state


def loop(state, slots, drafter, k, steps=1000, until_ended=0, size=SLOTS, **static):
    return jit_loop(target(), drafter, state, padded(slots, size), steps, until_ended, round=decode.Round(k, **static))


def run(drafter, k, slots=ROWS, rows=ROWS, **requests):
    """Rows of prompts, from an empty state to their end."""
    return loop(prefill(admit(empty(), slots, rows, **requests), slots), slots, drafter, k)


def run_rounds(round, drafter, **requests):
    """The same with other rounds."""
    state = prefill(admit(empty(), ROWS, **requests), ROWS)
    return jit_loop(target(), drafter, state, padded(ROWS), 1000, 0, round=round)


def numbers(state, name, slots=ROWS):
    return np.asarray(getattr(state, name))[np.asarray(slots)]


@functools.cache
def texts():
    """Every row's text, one token at a time: the oracle. [6, MAX_LEN]"""
    return numbers(run(NoDraft(), 0), "tokens")


@functools.cache
def logits_and_noise():
    """At each position after the first, from whole texts at once without a cache. [6, MAX_LEN - 1, V] each"""

    @compiled
    def forward(model, ids, seeds):
        logits = model.unembed(model(whole_rows(ids), None)[0].hidden)[:, :-1]
        at = jnp.broadcast_to(jnp.arange(1, MAX_LEN, dtype=jnp.int32)[None, :], logits.shape[:2])
        keys = row_keys(jnp.broadcast_to(seeds[:, None, :], (*at.shape, 2)), at)
        return logits, gumbel(keys, jnp.broadcast_to(jnp.arange(VOCAB, dtype=jnp.int32)[None, None, :], logits.shape))

    return forward(target(), texts(), np.stack([ROWS, 0 * ROWS], axis=1).astype(np.uint32))


@functools.cache
def values():
    """What the target chooses by at each position after the first."""
    logits, noise = logits_and_noise()
    return np.asarray(logits) + (TEMPERATURE > 0)[:, None, None] * np.asarray(noise)


def assert_same(found, length=MAX_LEN, rows=ROWS, margins=None):
    """The tokens are the oracle's, row by row up to `length`, or first differ where it had no reason to prefer one to the other."""
    for text, n, row in zip(found, np.broadcast_to(length, len(rows)), rows, strict=True):
        differ = np.flatnonzero(text[:n] != texts()[row, :n])
        if len(differ):
            at = differ[0]
            assert at >= PROMPT[row], f"row {row}: the prompt changed at {at}"
            by = (values() if margins is None else margins)[row, at - 1]
            margin = by[texts()[row, at]] - by[text[at]]
            assert margin < 1e-4, f"row {row}: token {at} is {text[at]}, not {texts()[row, at]}, which is better by {margin}"


def assert_equal(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)


def right(row):
    """Where `parrot()` is right. [MAX_LEN] bool"""
    return ~np.asarray(parrot().wrong)[row]


def rounds(right, start, k, limit=MAX_LEN):
    """(rounds, from_draft [MAX_LEN]) of a drafter that knows the tokens where `right` is set. start: tokens known at first."""
    flags, count, length = np.zeros(MAX_LEN, bool), 0, start
    while length < limit:
        accepted = 0
        while accepted < k and length + accepted < limit and right[length + accepted]:
            accepted += 1
        flags[length : length + accepted] = True
        count, length = count + 1, length + accepted + 1
    return count, flags


def test_the_oracle_agrees_with_whole_texts():
    """No cache, no pages, no loop: each token is the best by the logits of one pass over the whole text."""
    taken = np.take_along_axis(values(), texts()[:, 1:, None], axis=-1)[..., 0]
    generated = np.arange(1, MAX_LEN) >= PROMPT[:, None]
    assert (values().max(-1) - taken)[generated].max() < 1e-4
    assert all(np.array_equal(texts()[row, :n], prompts()[row, :n]) for row, n in enumerate(PROMPT))
    news = [text[n:] for text, n in zip(texts(), PROMPT, strict=True)]
    assert len({tuple(new[:8]) for new in news}) == len(news) and min(len(set(new)) for new in news) > 4  # texts worth comparing


def test_a_text_with_another_token_is_not_the_same():
    for row in (0, 1):
        wrong = texts().copy()
        wrong[row, 40] = (wrong[row, 40] + 1) % VOCAB
        with pytest.raises(AssertionError, match=f"row {row}: token 40 is"):
            assert_same(wrong)
        assert_same(wrong, length=40)
        assert_same(wrong, margins=np.zeros_like(values()))  # a tie, after which the text may go its own way
        wrong[row, 0] += 1
        with pytest.raises(AssertionError, match=f"row {row}: the prompt changed"):
            assert_same(wrong, margins=np.zeros_like(values()))


@pytest.mark.parametrize("k", [4, 7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_drafter_that_is_often_right_changes_nothing_but_the_rounds(k):
    state = run(parrot(), k)
    assert_same(numbers(state, "tokens"))
    assert (numbers(state, "length") == MAX_LEN).all() and (numbers(state, "computed") == MAX_LEN - 1).all()
    assert (numbers(state, "status") == FULL_LENGTH).all() and not state.starved
    for row in ROWS:
        count, flags = rounds(right(row), PROMPT[row] + 1, k)
        assert numbers(state, "rounds")[row] == count and numbers(state, "drafted")[row] == k * count, row
        assert np.array_equal(numbers(state, "from_draft")[row], flags), row
    assert numbers(state, "from_draft").any()
    # Rows past max_len take no page, and the slot that nobody uses is untouched.
    assert np.array_equal(state.cache.held, [*[-(-MAX_LEN // PAGE)] * len(ROWS), 0])
    assert numbers(state, "status", [6]) == EMPTY and not numbers(state, "rounds", [6]) and not numbers(state, "tokens", [6]).any()


@pytest.mark.parametrize("k", [1, 7, pytest.param(2, marks=pytest.mark.slow)])
def test_the_assistant_changes_nothing_but_the_rounds(k):
    state = run(assistant(), k)
    assert_same(numbers(state, "tokens"))
    assert (numbers(state, "length") == MAX_LEN).all() and (numbers(state, "status") == FULL_LENGTH).all()
    flags, count = numbers(state, "from_draft"), numbers(state, "rounds")
    assert flags[TEMPERATURE > 0].any() and flags[TEMPERATURE == 0].any()
    assert np.array_equal(numbers(state, "drafted"), k * count)
    for row, n in enumerate(PROMPT):
        # After the first token each round gives its accepted drafts and a token of the target's own, which the limit may cut off.
        assert not flags[row, : n + 1].any()
        assert MAX_LEN - (n + 1) - flags[row].sum() in (count[row], count[row] - 1)


@struct.dataclass
class Shadow:
    """A drafter whose logits are the target's own; it draws from them as every drafter does. logits: [6, MAX_LEN - 1, V]."""

    logits: jax.Array
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def observe(self, state, rows):
        return state

    def draft(self, state, target, sampling, num_draft_tokens):
        at = target.length[:, None] + 1 + jnp.arange(num_draft_tokens, dtype=jnp.int32)[None, :]
        logits = self.logits.at[sampling.seed[:, :1].astype(jnp.int32), at - 1].get(mode="clip")
        return Drafts(choose(logits, at, sampling), logits), state


def test_a_drafter_with_the_targets_logits_draws_the_targets_tokens():
    """Sampled or greedy, all its drafts are accepted: both put the same noise at the same position."""
    state = run(Shadow(logits_and_noise()[0]), 2)
    assert_same(numbers(state, "tokens"))
    assert np.array_equal(numbers(state, "rounds"), -(-(MAX_LEN - PROMPT - 1) // 3))


def test_drafts_that_nobody_chooses_are_all_rejected():
    state = run(tiny.Parrot(jnp.full_like(parrot().answers, -1), parrot(0.0).wrong), 4)
    assert_same(numbers(state, "tokens"))
    assert np.array_equal(numbers(state, "rounds"), MAX_LEN - PROMPT - 1) and not numbers(state, "from_draft").any()


@pytest.mark.parametrize("chunk", [1, 7])
def test_prompts_may_be_computed_in_chunks_of_any_size(chunk):
    """Chunks within a page, across pages and (32, everywhere else) longer than the ring of 15."""
    state, slots = admit(empty(), ROWS), padded(ROWS)
    for call in range(1, -(-PROMPT.max() // chunk) + 1):
        state = jit_prefill(target(), assistant(), state, slots, chunk=chunk)
        computed = np.minimum(call * chunk, PROMPT)
        assert np.array_equal(numbers(state, "computed"), computed)
        assert np.array_equal(numbers(state, "length"), PROMPT + (computed == PROMPT))
    whole = prefill(admit(empty(), ROWS), ROWS)
    np.testing.assert_allclose(state.drafter.hidden[: len(ROWS)], whole.drafter.hidden[: len(ROWS)], atol=2e-4)
    assert_same(numbers(state, "tokens"), PROMPT + 1)
    assert_same(numbers(loop(state, ROWS, assistant(), 2), "tokens"))


def test_slots_in_any_order_beside_ids_of_nobody():
    order = [4, 6, 0, 2, 5, 1]
    state = run(parrot(), 4, slots=order)
    assert_same(numbers(state, "tokens", order))
    lists = [NOBODY, 6, SLOTS, 4], [NOBODY, 0, SLOTS, 1, 2], [5]
    state = admit(empty(), order)
    for slots in lists:
        state = prefill(state, slots)
    for steps in (1, 3, 1000):  # a call works on those it is given, and on nobody else
        for slots in lists:
            state = loop(state, slots, parrot(), 4, steps)
    assert_same(numbers(state, "tokens", order))


def test_one_sequence_alone():
    for slot, row in ((6, 2), (0, 3)):
        state = loop(prefill(admit(empty(), [slot], [row]), [slot]), [slot], parrot(), 2, size=1)
        assert_same(numbers(state, "tokens", [slot]), rows=[row])
        assert numbers(state, "rounds", [slot]) == rounds(right(row), PROMPT[row] + 1, 2)[0]


def choosing(scope):
    """Filters and edits of every row, all different, with which texts go their own way and nothing comes without end."""
    rng = np.random.default_rng(5)
    top_k = rng.integers(5, 40, len(ROWS)) if scope == "top" else rng.choice([0, 7, 30], len(ROWS))
    filters = Filters(top_k.astype(np.int32), np.linspace(0.7, 1, 6, dtype=np.float32), np.linspace(0, 0.02, 6, dtype=np.float32))
    asked = jax.tree.map(np.array, edits.defaults(len(ROWS)))
    asked.repetition[:], asked.frequency[:], asked.presence[:] = 1.2, 0.4, np.linspace(-0.5, 0.5, 6)
    asked.min_tokens[:] = 6 * ROWS
    asked.allowed[::2, : VOCAB - 9] = np.arange(9, VOCAB)
    asked.bias_ids[:, 0], asked.bias[:, 0] = 30 + ROWS, 3.0
    asked.bad_words[:, 0, -1], asked.bad_words[:, 1, -2:] = 20 + ROWS, [31, 31]
    return {"filters": filters, "edits": asked}


@pytest.mark.parametrize("scope", ["top", pytest.param("whole", marks=pytest.mark.slow)])
def test_filters_and_edits_hold_whatever_is_drafted(scope):
    """Every draft is checked with all filters and penalties as if the drafts before it had been decoded one by one."""
    stops = np.tile(np.arange(40, 44), (len(ROWS), 1))
    static = {"needs": Needs(scope, edits=True, suppress_tokens=(11, 50))}
    begun = prefill(admit(empty(), ROWS, stops=stops, **choosing(scope)), ROWS, **static)
    alone = loop(begun, ROWS, NoDraft(), 0, **static)
    answers, lengths = numbers(alone, "tokens"), numbers(alone, "length")
    wrong = np.random.default_rng(0).random(answers.shape) < 0.33
    drafters = [(tiny.Parrot(jnp.asarray(answers), jnp.asarray(wrong)), 4), (assistant(), 2)]
    for drafter, k in drafters[: 2 if scope == "top" else 1]:
        state = loop(begun, ROWS, drafter, k, **static)
        assert k == 2 or numbers(state, "from_draft").sum() > 50
        for name in ("tokens", "length", "status"):
            assert np.array_equal(numbers(state, name), numbers(alone, name)), name
    assert (lengths - PROMPT > 6 * ROWS).all() and STOPPED in numbers(alone, "status")
    for row, (text, n) in enumerate(zip(answers, lengths, strict=True)):
        new = text[PROMPT[row] : n]
        assert not {11, 50, 20 + row} & set(new) and not ((new[1:] == 31) & (new[:-1] == 31)).any()
        assert row % 2 or (new >= 9).all()
    plain = prefill(admit(empty(), ROWS, stops=stops, **choosing(scope)), ROWS)
    assert_same(numbers(loop(plain, ROWS, NoDraft(), 0), "tokens"), numbers(loop(plain, ROWS, NoDraft(), 0), "length"))  # left out


def test_a_slots_next_sequence_has_none_of_its_filters_and_edits():
    state = jit_release(admit(empty(), [2], [4], **choosing("top")), padded([2]))
    assert_equal(admit(state, [2], [4]).edits, empty().edits)
    assert_equal(admit(state, [2], [4]).filters, empty().filters)


def first_at(row, offset, k):
    """The first place, at `offset` of a block of k + 1 tokens, that holds an id which is new to the row's output."""
    new = texts()[row, PROMPT[row] :]
    for i in range(1 + offset, len(new), k + 1):
        if new[i] not in new[:i]:
            return PROMPT[row] + i
    raise AssertionError(f"no new id at offset {offset} of row {row}")


def test_a_stop_id_ends_a_block_wherever_it_stands():
    """A drafter that is always right makes blocks of five: row r stops at its token r, and the last row at the prefill's own."""
    at = np.array([*[first_at(row, row, 4) for row in range(5)], PROMPT[5]])
    stops = np.full((len(ROWS), 4), -1)
    stops[ROWS, ROWS % 4] = texts()[ROWS, at]
    always = parrot(0.0)
    state = run(always, 4, stops=stops)
    assert (numbers(state, "status") == STOPPED).all()
    assert np.array_equal(numbers(state, "length"), at + 1) and np.array_equal(numbers(state, "computed"), at)
    assert_same(numbers(state, "tokens"), at + 1)
    flags = [rounds(np.ones(MAX_LEN, bool), n + 1, 4, a + 1)[1] for n, a in zip(PROMPT, at, strict=True)]
    assert np.array_equal(numbers(state, "from_draft"), flags)
    assert not flags[4][at[4]] and flags[3][at[3]]  # the fifth of a block is the target's own
    assert np.array_equal(numbers(state, "rounds"), -(-(at - PROMPT) // 5))
    assert not any(numbers(state, "tokens")[row, a + 1 :].any() for row, a in enumerate(at))  # nothing of the rest is kept

    # A limit behind the stop id changes nothing; one at it, that it stopped; one before it comes first.
    for limit, status in ((at + 2, STOPPED), (at + 1, STOPPED), (np.maximum(at, PROMPT + 1), FULL_LENGTH)):
        state = run(always, 4, stops=stops, limit=limit)
        length = np.minimum(limit, at + 1)
        assert np.array_equal(numbers(state, "length"), length) and np.array_equal(numbers(state, "computed"), length - 1)
        assert numbers(state, "status").tolist() == [status] * 5 + [STOPPED]
        assert_same(numbers(state, "tokens"), length)


def test_a_limit_ends_a_block_wherever_it_stands():
    limit = PROMPT + 1 + ROWS  # the first ends with the prefill's token, the others after 1 .. 5 tokens of a block of five
    state = run(parrot(0.0), 4, limit=limit)
    assert np.array_equal(numbers(state, "length"), limit) and np.array_equal(numbers(state, "computed"), limit - 1)
    assert (numbers(state, "status") == FULL_LENGTH).all()
    assert numbers(state, "rounds").tolist() == [0, 1, 1, 1, 1, 1]
    assert_same(numbers(state, "tokens"), limit)
    for row, flags in enumerate(numbers(state, "from_draft")):
        assert np.array_equal(np.flatnonzero(flags), PROMPT[row] + 1 + np.arange(min(row, 4))), row


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_stop_ids_in_rejected_rows_stop_nothing(seed):
    """Ids that stop often turn up behind a rejected draft; where a text ends does not depend on them."""
    stops = np.random.default_rng(seed).integers(0, VOCAB, (len(ROWS), 4))
    alone, together = run(NoDraft(), 0, stops=stops), run(parrot(), 7, stops=stops)
    for name in ("tokens", "length", "computed", "status"):
        assert np.array_equal(numbers(alone, name), numbers(together, name)), name
    for row, (n, length) in enumerate(zip(PROMPT, numbers(alone, "length"), strict=True)):
        stopping = np.flatnonzero(np.isin(texts()[row, n:], stops[row]))
        assert length == (n + stopping[0] + 1 if len(stopping) else MAX_LEN)
    assert STOPPED in numbers(alone, "status")


def test_a_resumed_sequence_goes_on_with_the_same_tokens():
    known = PROMPT + np.array([1, 2, 9, 17, 29, 54])  # the last two have one token to go
    state = admit(empty(), ROWS, known=known, tokens=texts())
    assert not numbers(state, "computed").any() and (numbers(state, "status") == RUNNING).all()
    state = prefill(state, ROWS, 7)
    assert np.array_equal(numbers(state, "length"), known) and np.array_equal(numbers(state, "computed"), known - 1)
    assert not any(numbers(state, "tokens")[row, n:].any() for row, n in enumerate(known))  # prefill chose nothing
    assert_equal(prefill(state, ROWS, 7), state)  # nor does it when there is nothing left to compute
    for drafter, k in ((assistant(), 2), (parrot(), 4)):
        done = loop(state, ROWS, drafter, k)
        assert_same(numbers(done, "tokens"))
        assert (numbers(done, "length") == MAX_LEN).all() and np.array_equal(numbers(done, "prompt"), PROMPT)
    assert numbers(done, "rounds").tolist() == [rounds(right(row), n, 4)[0] for row, n in enumerate(known)]


def test_a_sequence_that_has_its_limit_already_has_ended():
    """There is nothing to choose, and no loop waits for it."""
    state = admit(empty(), ROWS, known=np.full(len(ROWS), MAX_LEN), tokens=texts())
    assert (numbers(state, "status") == FULL_LENGTH).all() and (numbers(state, "length") == MAX_LEN).all()
    assert_equal(loop(prefill(state, ROWS), ROWS, parrot(), 4), state)


def test_the_loop_ends_after_the_steps_asked_for():
    state = prefill(admit(empty(), ROWS), ROWS)
    assert_equal(loop(state, ROWS, parrot(), 4, 0), state)
    for steps in (1, 2):
        state = loop(state, ROWS, parrot(), 4, steps)
    assert (numbers(state, "rounds") == 3).all() and (numbers(state, "status") == RUNNING).all()
    assert np.array_equal(numbers(state, "computed"), numbers(state, "length") - 1)
    assert_same(numbers(state, "tokens"), numbers(state, "length"))
    assert numbers(loop(state, [1, 3], parrot(), 4, 2), "rounds").tolist() == [3, 5, 3, 5, 3, 3]


def test_the_loop_ends_with_the_last_sequence_or_with_some():
    limit = np.array([20, 40, 30, MAX_LEN, 60, 20])
    start = prefill(admit(empty(), ROWS, limit=limit), ROWS)
    needed = [rounds(right(row), PROMPT[row] + 1, 4, limit[row])[0] for row in ROWS]
    done = loop(start, ROWS, parrot(), 4)
    assert numbers(done, "rounds").tolist() == needed and (numbers(done, "status") == FULL_LENGTH).all()
    assert_equal(loop(done, ROWS, parrot(), 4), done)
    state, ended = start, 0
    while ended < len(ROWS):
        state = loop(state, ROWS, parrot(), 4, until_ended=1)
        now = np.sum(numbers(state, "status") == FULL_LENGTH)
        assert now > ended and numbers(state, "rounds").max() == sorted(needed)[now - 1]  # at once when the next one ends
        ended = now
    assert_equal(state, done)
    others = loop(start, [1, 2, 3], parrot(), 4, until_ended=1)  # of its own list
    assert numbers(others, "rounds").max() == min(needed[1:4])
    for ends in (2, 3, 7):
        some = loop(start, ROWS, parrot(), 4, until_ended=ends)
        assert numbers(some, "rounds").max() == sorted(needed)[min(ends, len(ROWS)) - 1]


def test_sequences_that_cannot_decode_stay_as_they_are():
    """In one list: sequences whose prompts are half computed, some that ended, an empty slot, nobody, and one that decodes."""
    state = prefill(admit(empty(), [0, 1, 5], [0, 1, 5], limit=np.where(ROWS < 5, PROMPT + 2, MAX_LEN)), [0, 1, 5])
    state = loop(state, [0, 1], parrot(), 4)
    state = jit_prefill(target(), assistant(), admit(state, [3, 4], [3, 4]), padded([3, 4]), chunk=7)
    assert numbers(state, "computed", [3, 4]).tolist() == [7, 7] and (numbers(state, "status", [0, 1]) == FULL_LENGTH).all()
    idle = [4, 1, 6, 3, 0]
    step = loop(state, [*idle, 5, NOBODY], parrot(), 4, 1)
    assert_equal(step, loop(state, [*[NOBODY] * 5, 5, NOBODY], parrot(), 4, 1))
    assert numbers(step, "rounds", [5]) == 1
    assert_equal(loop(state, idle, parrot(), 4, 2**31 - 1), state)  # the loop does not wait for what only a prefill can do
    assert_equal(jit_prefill(target(), assistant(), state, padded([0, 1, 6, 2]), chunk=7), state)
    state = prefill(state, [3, 4])
    assert_same(numbers(loop(state, [3, 6, 4, 1], parrot(), 4), "tokens", [3, 4]), rows=[3, 4])


def short_of_pages(state, pages):
    """The state with so many full pages left."""
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, free_count=jnp.asarray(pages, jnp.int32)))


def test_a_loop_without_pages_leaves_every_sequence_as_it_was_and_goes_on_when_there_are_some():
    rows = [1, 3, 4]  # each needs 13 pages at the end
    state = prefill(admit(short_of_pages(empty(), 27), rows, rows), rows)
    assert not state.starved
    state = loop(state, rows, parrot(), 4)
    assert state.starved and RUNNING in numbers(state, "status", rows)
    lengths = numbers(state, "length", rows)
    assert_same(numbers(state, "tokens", rows), lengths, rows)
    assert np.array_equal(numbers(state, "computed", rows), lengths - 1)
    assert_equal(loop(state, rows, parrot(), 4), state)

    known, kept = np.where(ROWS == 4, numbers(state, "length"), PROMPT), numbers(state, "tokens")
    state = jit_release(state, padded([4]))
    assert not state.starved and numbers(state, "status", [4]) == EMPTY
    state = loop(state, rows, parrot(), 4)
    assert not state.starved
    assert_same(numbers(state, "tokens", [1, 3]), rows=[1, 3])

    # The one that gave way goes on where it was, in another slot, once another has made room.
    state = admit(jit_release(state, padded([1])), [0], [4], known=known, tokens=kept)
    state = loop(prefill(state, [0]), [0, 1, 3], parrot(), 4)
    assert_same(numbers(state, "tokens", [0]), rows=[4])
    assert jit_release(state, padded([3, 0])).cache.free_count == 27


def test_a_prefill_without_pages_computes_nothing():
    state = admit(short_of_pages(empty(), 8), ROWS)
    state = jit_prefill(target(), assistant(), state, padded([4]), chunk=32)  # 32 rows of 33: 7 pages, with room for the last
    assert not state.starved and numbers(state, "computed", [4]) == 32
    after = jit_prefill(target(), assistant(), state, padded([4, 1, 0]), chunk=32)
    assert after.starved
    assert_equal(dataclasses.replace(after, starved=state.starved), state)
    fewer = jit_prefill(target(), assistant(), after, padded([4, 1]), chunk=32)
    assert not fewer.starved and numbers(fewer, "length", [4, 1]).tolist() == [34, 2]


def test_logits_that_are_no_numbers_fail_their_sequence_alone():
    """Layers are made to see a NaN once a token comes that only some texts have; the head is that of the sound target."""
    bad = next(t for t in range(2, VOCAB) if any(t in texts()[r, PROMPT[r] + 6 :] for r in ROWS) and t not in texts()[[1, 4]])
    ends = [int(np.argmax(np.append(texts()[r] == bad, True))) for r in ROWS]  # where it stands; the token after it has no logits
    assert sum(end < MAX_LEN for end in ends) >= 1 and ends[1] == ends[4] == MAX_LEN

    @struct.dataclass
    class Poisoned(gemma4.Gemma4):
        def embed(self, ids):
            return jnp.where((ids == bad)[..., None], jnp.nan, super().embed(ids))

    model = Poisoned(**{f.name: getattr(target(), f.name) for f in dataclasses.fields(target())})
    state = admit(empty(), ROWS)
    for _ in range(2):
        state = jit_prefill(model, assistant(), state, padded(ROWS), chunk=32)
    for k in (0, 4):
        after = jit_loop(model, NoDraft(), state, padded(ROWS), 1000, round=decode.Round(k))
        for row in ROWS:
            length, failed = int(after.length[row]), int(after.status[row]) == FAILED
            assert failed == (ends[row] < MAX_LEN - 1), f"row {row} with {k} drafts"
            assert length == (max(ends[row] + 1, PROMPT[row]) if failed else MAX_LEN)  # what comes before is kept, and the token itself
            assert np.array_equal(after.tokens[row, :length], texts()[row, :length])
    # A slot that failed serves another sequence.
    row = int(np.argmin(ends))
    after = prefill(admit(jit_release(after, padded([row])), [row], [4]), [row])
    assert_same(numbers(loop(after, [row], parrot(), 4), "tokens", [row]), rows=[4])


def test_hidden_states_tell_where_a_fused_head_misses_a_nan():
    most = jnp.asarray([[1.0, 2.0, jnp.nan, jnp.inf, -jnp.inf]], jnp.float32)
    hidden = jnp.zeros((1, 5, 3), jnp.float32).at[0, 1, 2].set(jnp.nan)
    assert sound_choices(most, None).tolist() == [[True, True, False, False, False]]
    assert sound_choices(most, None, hidden).tolist() == [[True, False, False, False, False]]


def test_a_fork_goes_on_as_if_it_had_computed_what_it_shares():
    """A slot at row 18 of a prompt of 33 gives what it has to two others: the same prompt, and one that is different from there on."""
    state = admit(empty(), [2], [4])
    state = jit_prefill(target(), assistant(), state, padded([2]), padded([18]), chunk=32)
    assert numbers(state, "computed", [2]) == 18
    other = prompts().copy()
    other[4, 19:] = prompts()[5, 19:]
    plain = prefill(admit(empty(), [6], [4], tokens=other), [6])
    free = int(state.cache.free_count)
    state = jit_fork(state, padded([2, 2]), padded([0, 5]), padded([18, 18]))
    assert int(state.cache.free_count) == free - 2 and numbers(state, "computed", [0, 5]).tolist() == [18, 18]  # three pages are shared
    same = np.broadcast_to(np.int32(18), PROMPT.shape)
    state = admit(admit(state, [0], [4], computed=same), [5], [4], tokens=other, computed=same)
    state = prefill(state, [0, 2, 5])
    for drafter, k in ((NoDraft(), 0), (assistant(), 3)):
        found = loop(state, [0, 2, 5], drafter, k)
        assert_same(numbers(found, "tokens", [0, 2]), rows=[4, 4])
        assert_equal(numbers(found, "tokens", [5]), numbers(loop(plain, [6], drafter, k), "tokens", [6]))
    assert jit_release(found, padded([5, 2, 0])).cache.free_count == state.cache.free.shape[0]


def test_a_call_may_compute_several_parts_of_a_prompt():
    """As one call with a part of each does, to the end or not. The ring holds all of these prompts."""
    some, start = [0, 1, 2, 5], admit(empty(), ROWS)
    parts = [(0, 0), (1, 0), (2, 0), (5, 0), (2, 4), (2, 8), (2, 12), (0, 4), (5, 4), (NOBODY, 4), (NOBODY, 0)]

    def computed(state, parts, until=MAX_LEN):
        slots, offset = (np.asarray(of, np.int32) for of in zip(*parts, strict=True))
        until = np.full(len(parts), until, np.int32)
        return jit_prefill(target(), assistant(), state, slots, until, offset, chunk=4, round=decode.Round(0))

    plain, packed = prefill(start, some), computed(start, parts)
    half = computed(start, parts, until=6)
    assert numbers(half, "computed", some).tolist() == [5, 1, 6, 6] and numbers(half, "length", some).tolist() == [6, 2, 13, 8]
    for found in (packed, computed(half, parts)):
        for name in ("tokens", "length", "computed", "status"):
            assert_equal(getattr(found, name), getattr(plain, name))
        assert found.cache.free_count == plain.cache.free_count and not found.starved
        np.testing.assert_allclose(found.drafter.hidden[jnp.asarray(some)], plain.drafter.hidden[jnp.asarray(some)], rtol=1e-4, atol=1e-5)
        assert_same(numbers(loop(found, some, assistant(), 3), "tokens", some), rows=some)
    lacking = dataclasses.replace(start, cache=dataclasses.replace(start.cache, free_count=jnp.int32(6)))
    starved = computed(lacking, parts)  # the prompts take seven pages
    assert starved.starved and not numbers(starved, "computed", some).any() and starved.cache.free_count == 6


@pytest.mark.parametrize("parts", [False, True])
def test_calls_in_which_no_prompt_ends(parts):
    """Followed by one in which they do, they leave what calls leave that compute all."""
    long, goals = [2, 3, 4], {2: 4, 3: 8, 4: 4}
    state = admit(empty(), long, long)
    plain = prefill(state, long, chunk=4)
    some = [(2, 0), (3, 0), (4, 0), *([(3, 4)] if parts else [])]
    slots, offset = (np.asarray(of, np.int32) for of in zip(*some, strict=True))
    until = np.asarray([goals[slot] for slot, _ in some], np.int32)
    for _ in range(1 if parts else 2):
        state = jit_prefill(target(), assistant(), state, slots, until, offset, chunk=4, ends=False, round=decode.Round(0))
    assert numbers(state, "computed", long).tolist() == [4, 8, 4]
    assert_equal(numbers(state, "length", long), PROMPT[long])
    state = prefill(state, long, chunk=4)
    for name in ("tokens", "length", "computed", "status"):
        assert_equal(getattr(state, name), getattr(plain, name))
    np.testing.assert_allclose(state.drafter.hidden[jnp.asarray(long)], plain.drafter.hidden[jnp.asarray(long)], rtol=1e-4, atol=1e-5)
    assert_same(numbers(loop(state, long, assistant(), 3), "tokens", long), rows=long)


def test_a_released_slot_serves_another_sequence():
    state = run(parrot(), 4, slots=[2], rows=[4])
    assert numbers(state, "from_draft", [2]).any()
    state = jit_release(state, padded([2]))
    assert numbers(state, "status", [2]) == EMPTY and state.cache.free_count == state.cache.free.shape[0]
    state = prefill(admit(state, [2], [5]), [2])
    assert not numbers(state, "rounds", [2]) and not numbers(state, "drafted", [2]) and not numbers(state, "from_draft", [2]).any()
    assert_same(numbers(loop(state, [2], parrot(), 4), "tokens", [2]), rows=[5])


def test_a_rule_may_make_tokens_of_drafts_that_the_target_would_not_choose():
    """Half of the rounds keep the one draft: what was kept is the draft, and the target goes on from there as from any prompt."""
    wrong = (texts() + 1) % VOCAB
    always_wrong = tiny.Parrot(jnp.asarray(wrong), jnp.zeros(texts().shape, bool))
    rule = {"accept": accept.synthetic([0.5])}
    begun = prefill(admit(empty(), ROWS, rounds=ROWS), ROWS)
    state = loop(begun, ROWS, always_wrong, 1, **rule)
    tokens, flags = numbers(state, "tokens"), numbers(state, "from_draft")
    assert np.array_equal(tokens[flags], wrong[flags]) and 60 < flags.sum() < 140
    assert (numbers(state, "length") == MAX_LEN).all() and numbers(state, "rounds").min() > ROWS.max()
    # Cut at any round and resumed with its round number, a sequence goes on as it would have.
    part = loop(begun, ROWS, always_wrong, 1, 9, **rule)
    known = numbers(part, "length")
    again = prefill(admit(empty(), ROWS, known=known, tokens=numbers(part, "tokens"), rounds=numbers(part, "rounds")), ROWS)
    assert_equal(numbers(loop(again, ROWS, always_wrong, 1, **rule), "tokens"), tokens)
    assert_equal(numbers(loop(again, ROWS, always_wrong, 1, **rule), "rounds"), numbers(state, "rounds"))


@pytest.mark.slow  # tests/drafters/test_every_kind.py has texts over such a cache
def test_any_number_of_drafts_over_a_float8_cache():
    """With scales, and the assistant reading what the target stored: the tokens of one at a time, but not those of a float32 cache."""

    def halved(pools):
        k, v = (pool.astype(jnp.float8_e4m3fn) for pool in (pools.k, pools.v))
        return paged.LayerKV(k, v, jnp.asarray([0.5, 0.25], jnp.float32))

    layers = tuple(None if pools is None else halved(pools) for pools in empty().cache.layers)
    begun = dataclasses.replace(empty(), cache=dataclasses.replace(empty().cache, layers=layers))
    begun = prefill(admit(begun, ROWS), ROWS)
    expected = numbers(loop(begun, ROWS, NoDraft(), 0), "tokens")
    found = loop(begun, ROWS, assistant(), 3)
    np.testing.assert_array_equal(numbers(found, "tokens"), expected)
    assert np.any(expected != texts())
    stored = [pools for pools in found.cache.layers if pools is not None]
    assert all(pools.k.dtype == jnp.float8_e4m3fn and pools.scales.tolist() == [0.5, 0.25] for pools in stored)


def test_ids_below_zero_stand_for_no_sequence_too():
    """The last slot, which such an index would mean, holds a sequence."""
    some, others = [0, 1, 2], [3, 4, SLOTS - 1]
    state = prefill(admit(empty(), [*some, *others]), [*some, *others])
    before = jax.tree.map(np.asarray, state)
    nobody = np.asarray([*some, *[-1] * (SLOTS - len(some))], np.int32)
    state = jit_loop(target(), parrot(), state, nobody, 1000, 0, round=decode.Round(4))
    assert_same(numbers(state, "tokens", some), rows=some)
    for name in ("tokens", "length", "computed", "rounds", "status"):
        assert np.array_equal(numbers(state, name, others), numbers(before, name, others))
    state = jit_release(state, np.where(padded([]) >= SLOTS, -3, 0).astype(np.int32))
    assert (numbers(state, "status", others) == RUNNING).all()
    state = loop(state, others, parrot(), 4)
    assert_same(numbers(state, "tokens", others), rows=[3, 4, 5])


def test_a_limit_past_the_end_is_the_end():
    state = run(parrot(), 4, limit=MAX_LEN + 20)
    assert_same(numbers(state, "tokens"))
    assert (numbers(state, "length") == MAX_LEN).all() and (numbers(state, "status") == FULL_LENGTH).all()


@struct.dataclass
class OwnNumber(NoDraft):
    """A drafter that always guesses as many tokens, whatever it is asked for."""

    tokens: jax.Array | None = None

    def draft(self, state, target, sampling, num_draft_tokens):
        return Drafts(jnp.broadcast_to(self.tokens, (len(target.slots), len(self.tokens)))), state


def test_what_does_not_fit_a_round_is_told_when_it_is_traced():
    def traced(drafter, k, slots=SLOTS):
        state = dataclasses.replace(empty(), drafter=())
        jax.eval_shape(functools.partial(decode.spec_step, round=decode.Round(k)), target(), drafter, state, np.zeros(slots, np.int32))

    two = OwnNumber(tokens=jnp.zeros(2, jnp.int32))
    for k in (0, 2):  # a round without drafts asks for none
        traced(two, k)
    for drafter, k, found in ((two, 1, "int32 [7, 2]"), (two, 4, "int32 [7, 2]"), (OwnNumber(tokens=jnp.zeros(2)), 2, "float32 [7, 2]")):
        with pytest.raises(ValueError, match=re.escape(f"the drafter OwnNumber gives tokens {found}; expected int32 [7, {k}]")):
            traced(drafter, k)
    with pytest.raises(ValueError, match="the round has 8 draft tokens; the state was made for fewer"):
        traced(NoDraft(), MAX_K + 1)
    with pytest.raises(ValueError, match="chunk is 0, expected at least 1"):
        decode.prefill(target(), NoDraft(), empty(), padded([]), chunk=0)


def test_a_call_for_no_slots_changes_nothing():
    state, none = dataclasses.replace(empty(), drafter=()), np.zeros(0, np.int32)
    assert decode.prefill(target(), NoDraft(), state, none, chunk=4) is state
    assert decode.decode_loop(target(), NoDraft(), state, none, 5, round=decode.Round(0)) is state
