"""Calls of every sort, one after another and side by side, on engines with as little room as real plans leave: no slot or one for snapshots
of prompts, few pages, several data shards. Every request gets what it gets alone, and every call returns.

The target is tiny and its programs are few: engines of all settings share them.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from locks import free

from jaxspec import SamplingParams
from jaxspec.drafters.ngram import NGram
from jaxspec.engine import turn
from jaxspec.engine.accounts import Accounts
from jaxspec.engine.admission import init_state
from jaxspec.engine.buckets import Buckets
from jaxspec.engine.conversations import Conversations
from jaxspec.engine.llm import LLM
from jaxspec.engine.programs import Programs
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.settings import STEPS, Settings
from jaxspec.engine.shards import Shards, Turns
from jaxspec.engine.slots import Slots
from jaxspec.engine.stream import Stream
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.sampling.choice import PLAIN
from jaxspec.sampling.logprobs import ring_rows
from jaxspec.sharding.placement import ONE_DEVICE
from jaxspec.trees import nbytes

VOCAB, MAX_LEN, PAGE, CHUNK, K, TOTAL = 64, 96, 4, 16, 2, 4
CONFIG = {**tiny.TEXT, "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size": 16, "hidden_size_per_layer_input": 0}
PAGES = TOTAL * MAX_LEN // PAGE  # as many as all slots can fill
MOST_WORK = 3000  # more steps and device calls than any call here takes


@pytest.fixture(scope="module", autouse=True)
def few_programs(unoptimised):
    """Of one size each, whatever part of all slots may run."""
    with pytest.MonkeyPatch.context() as patch:
        for name, sizes in {"prefill": [(TOTAL, CHUNK)], "decode": [TOTAL], "admit": [TOTAL]}.items():
            patch.setattr(Buckets, name, sizes)
        patch.setattr(turn, "ENOUGH", 0.2)  # a long prompt alone fills a part of a call
        yield
    for cached in (programs, reference, answers, target):
        cached.cache_clear()


@functools.cache
def target():
    return jax.tree.map(jnp.asarray, tiny.random_weights(gemma4.abstract(Gemma4Config.from_hf(CONFIG), jnp.float32), 0))


@functools.cache
def programs():
    """Compiled for all engines here."""
    return {}


def llm_of(snapshots, shards=1):
    """An LLM whose TOTAL slots, on each of some data shards, have room for so many snapshots."""
    model, drafter, sizes = target(), NGram(), {"max_len": MAX_LEN, "num_draft_tokens": K, "page_size": PAGE}

    def size(slots):
        return nbytes(jax.eval_shape(lambda: init_state(model, drafter, slots=slots, full_pages=1, **sizes)))

    sizes |= {"kv_pages": PAGES, "prefix_bytes": snapshots * (size(2) - size(1)), "progress": False}
    settings = Settings(max_slots=TOTAL - snapshots, **sizes)
    llm = LLM(model, drafter, tiny.Letters(), settings)
    more = [Runner(model, drafter, settings, ONE_DEVICE, structures=llm._structures) for _ in range(shards - 1)]
    llm._shards = llm._serving._shards = Shards([llm._runner, *more])
    for runner in llm._shards.runners:
        assert runner.total_slots == TOTAL
        runner.programs.compiled = programs()
    return llm


def begin(llm, pages=PAGES):
    """The engine from its beginning, with so many pages on each shard."""
    for runner in llm._shards.runners:
        runner.programs.state = None
        runner.ready()
        cache = dataclasses.replace(runner.programs.state.cache, free_count=jnp.asarray(pages, jnp.int32))
        runner.programs.state = dataclasses.replace(runner.programs.state, cache=cache)
        runner._free = pages


@pytest.fixture(autouse=True)
def conversations_of_ids(monkeypatch):
    monkeypatch.setattr(Conversations, "ids", lambda self, messages, *_: messages[0]["ids"])


@pytest.fixture(autouse=True)
def work(monkeypatch):
    """Counts what calls make engines do. A call that would never return fails."""
    done = [0]

    def counted(real, *args):
        done[0] += 1
        assert done[0] < MOST_WORK, "this call does not return"
        return real(*args)

    for owner, name in ((Programs, "run"), (Runner, "ready")):
        monkeypatch.setattr(owner, name, functools.partialmethod(functools.partial(counted, getattr(owner, name))))
    return done


@functools.cache
def answers():
    return {}


@functools.cache
def reference():
    return llm_of(0)


def alone(prompt, params):
    """What a request gets by itself."""
    known, key = answers(), repr((prompt, params))
    if key not in known:
        begin(reference())
        known[key] = reference().generate(prompt, params)[0]
    return known[key]


def same(found, prompt, params):
    expected = alone(prompt, params)
    for name in ("prompt_token_ids", "token_ids", "text", "finish_reason", "stop_reason", "error"):
        assert getattr(found, name) == getattr(expected, name), name
    assert (found.prompt_logprobs is None) == (params.prompt_logprobs is None)
    for row, wanted in zip((found.prompt_logprobs or [None])[1:], (expected.prompt_logprobs or [None])[1:], strict=True):
        assert row.keys() == wanted.keys() and all(abs(row[i].logprob - wanted[i].logprob) < 1e-4 for i in row)


def params(max_tokens, seed, **changes):
    return SamplingParams(**{"max_tokens": max_tokens, "seed": seed, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **changes})


def ids(count, seed):
    return np.random.default_rng([count, seed]).integers(2, VOCAB, count).tolist()


P, Q, STREAMED = ids(40, 1), ids(20, 2), ids(9, 3)


@pytest.mark.parametrize("order", [[[*P, 13], Q], [Q, [*P, 13]], [[*P, 13], [*P, 14], Q, ids(7, 1)], [[*P, 13], Q, [*P, 14]]])
@pytest.mark.parametrize("place", [0, TOTAL - 1])
def test_a_prompt_waits_for_a_slot_that_another_is_copied_from(order, place):
    """Streams hold all slots but two, one of which has a snapshot. The prompt that begins like it gets the other one, so that the slot of
    the snapshot is the only one for a prompt that begins like none. place: the slot of a stream that would suffer."""
    llm = reference()
    expected = [alone(prompt, params(5, i)).token_ids for i, prompt in enumerate(order)]
    text = alone(STREAMED, params(40, 7)).token_ids
    begin(llm)
    streams = [llm.stream(STREAMED, params(40, 7)) for _ in range(TOTAL)]
    begun = [next(stream).token_ids for stream in streams]
    others = [i for i in range(TOTAL) if i != place]
    for i in others[-2:]:
        streams[i].close()
    for end in (1, 2):
        llm.generate([*P, end], params(2, 1))
    assert [kept.over for kept in llm._runner.held.kept.values()] == [False] and llm.free_slots == 2
    found = llm.generate(order, [params(5, i) for i in range(len(order))])
    assert [c.token_ids for c in found] == expected
    assert found[order.index([*P, 13])].num_cached_tokens == len(P) - 1 or order[0] == Q
    for i in (place, others[0]):
        assert begun[i] + sum((chunk.token_ids for chunk in streams[i]), []) == text
    assert llm.free_slots == TOTAL


@pytest.mark.parametrize("logprobs", [None, 5])
@pytest.mark.parametrize("most", [0, 1, 4, 15, 24, 63, 300])
def test_what_calls_tell_of_is_read_before_it_is_overwritten(most, logprobs):
    settings, needs = Settings(num_draft_tokens=most, max_slots=1, max_len=64), dataclasses.replace(PLAIN, logprobs=logprobs)
    one, two = (settings.steps_for(needs, STEPS, unread) for unread in (1, 2))
    room = one * (most + 1)  # of a call's report
    assert room <= STEPS * (most + 1) and 1 + 2 * two * (most + 1) <= room or two == 0
    assert logprobs is None or room <= ring_rows(most)
    assert 2 * two <= STEPS and (logprobs is not None or two == (STEPS - 1) // 2)
    assert settings.steps_for(needs, 3, 1) == min(3, one)


class Prompts:
    """Requests, and None where there is none for the moment; before the nth of all of these it does something."""

    def __init__(self, items, nth=0, does=None):
        self.items, self.nth, self.does = collections.deque(enumerate(items)), nth, does

    def __iter__(self):
        return self

    def __next__(self):
        number, item = self.items.popleft() if self.items else (-1, None)
        if self.does is not None and number == self.nth:
            self.does()
        if item is None:
            raise StopIteration
        return item


@pytest.mark.parametrize("over", [False, True])
def test_a_sequence_that_was_kept_without_its_pages_is_computed_again(over, monkeypatch):
    """As where the host took pages for free that were not. over: whether the slot itself goes on, or is copied from."""
    llm = llm_of(1 - over)
    prompt, more = ids(22, 9), params(1, 3)
    expected = alone([*prompt, 5], more)
    begin(llm)
    llm.chat([{"ids": prompt}], params(1, 2))
    runner = llm._runner
    slot, kept = next((slot, kept) for slot, kept in runner.held.kept.items() if len(kept.tokens) == len(prompt))
    runner._release(list(runner.held.kept), [])  # what a copy without a page leaves
    kept.over = over
    runner.held._holds[slot] = kept
    runner.programs.state = dataclasses.replace(runner.programs.state, computed=runner.programs.state.computed.at[slot].set(0))
    llm.generate(ids(60, 4), params(20, 4))  # which takes those pages
    found = llm.generate([*prompt, 5], more)[0]
    assert found.token_ids == expected.token_ids and found.num_cached_tokens == len(prompt) - 1


def test_the_newest_call_says_how_many_pages_are_free():
    """Rounds that were queued behind others may be read after a call that came later."""
    llm = llm_of(0)
    begin(llm)
    runner, requests = llm._runner, llm._requests([ids(9, 1)], params(60, 1))
    runner.admit(requests)
    runner.read([runner.prefill(requests, PLAIN)])
    earlier, later = (runner.decode(requests, steps, unread=2) for steps in (1, 20))
    runner.read([later._replace(requests=[None])])
    free = runner.free_pages
    runner.read([earlier])
    assert runner.free_pages == free == int(runner.programs.state.cache.free_count)
    runner.end(requests)


@pytest.mark.parametrize("nth", [2, 3])
def test_what_gives_prompts_may_take_the_room_of_those_before(nth):
    """It uses the LLM, whose pages are then too few for both."""
    llm, first, second = llm_of(0), (ids(20, 1), params(60, 1)), (ids(20, 2), params(60, 2))
    expected = alone(*second), alone(*first)
    begin(llm, 24)
    inner = []
    prompts = Prompts([first, None, None, None], nth, lambda: inner.extend(llm.generate(*second)))
    (outer,) = llm.as_completed(prompts)
    assert [c.token_ids for c in (*inner, outer)] == [c.token_ids for c in expected]
    assert llm._runner.preemptions


def test_no_slot_is_no_place():
    with pytest.raises(AssertionError, match="there is no slot for this request"):
        Slots(2).put(-1, Request.__new__(Request))


def test_texts_are_scored_where_there_is_a_slot(monkeypatch):
    """Both shards rest: the first one is full, the second one has ended requests that ask for log-probabilities of their prompts."""
    llm, wait = llm_of(0, shards=2), concurrent.futures.wait
    begin(llm)
    monkeypatch.setattr(concurrent.futures, "wait", lambda steps, **_: wait(steps))
    scored, score = [], llm._shards.runners[1].score
    monkeypatch.setattr(llm._shards.runners[1], "score", lambda *args: scored.append(llm._runner.free_slots) or score(*args))
    asked = [(ids(9, i), params(*((3, i) if i % 2 else (70, i)), prompt_logprobs=1, stop="?")) for i in range(2 * TOTAL)]
    for completion in llm.as_completed(asked):
        same(completion, *asked[completion.prompt_index])
    assert scored[:TOTAL] == [0] * TOTAL


@pytest.mark.parametrize("shards", [1, 2])
def test_prompts_that_stop_for_a_while_go_on(shards):
    """They are asked again after each step, so those that come while others are under way share the slots with them."""
    llm, waiting = llm_of(0, shards), collections.deque[int]([0, 1])
    begin(llm)
    asked = [(ids(9, i), params(3 + 4 * (i % 2), i)) for i in range(8)]

    class Prompts:
        def __iter__(self):
            return self

        def __next__(self):
            if not waiting:
                raise StopIteration
            return asked[waiting.popleft()]

    done = []
    for completion in llm.as_completed(Prompts()):
        same(completion, *asked[completion.prompt_index])
        done.append(completion.prompt_index)
        if len(done) + 1 < len(asked):
            waiting.append(len(done) + 1)
    assert sorted(done) == list(range(8))


@pytest.fixture
def stepping(monkeypatch):
    """The runners that step, one of them more slowly. None is stepped, or loses its requests, while it does."""
    inside, seconds, step, close = set(), {}, turn.Turn.step, turn.Turn.close

    def stepped(one, *args, **more):
        assert one._runner not in inside
        inside.add(one._runner)
        time.sleep(seconds.setdefault(one._runner, 0.01 * len(seconds)))
        try:
            return step(one, *args, **more)
        finally:
            inside.discard(one._runner)

    def closed(one):
        assert one._runner not in inside
        close(one)

    monkeypatch.setattr(turn.Turn, "step", stepped)
    monkeypatch.setattr(turn.Turn, "close", closed)
    return inside


def all_free(llm):
    return all(runner.free_slots == runner.settings.max_slots for runner in llm._shards.runners)


def test_what_gives_prompts_and_what_takes_texts_may_use_all_shards(stepping, monkeypatch):
    """Other calls wait for the steps of the call that has taken the shards."""
    llm, out = llm_of(0, shards=2), set()
    begin(llm)
    shards, submit = llm._shards, llm._shards.pool.submit

    def owned(*args):
        assert shards._owner is not None
        return submit(*args)

    monkeypatch.setattr(shards.pool, "submit", owned)
    asked = [(ids(9, i), params([1, 5, 20, 60][i % 4], i)) for i in range(20)]
    left = collections.deque(enumerate(asked))

    class Prompts:
        def __iter__(self):
            return self

        def __next__(self):
            if not left or len(out) >= 4:
                raise StopIteration
            number, request = left.popleft()
            out.add(number)
            same(llm.generate([9], params(2, number))[0], [9], params(2, number))
            return request

    for completion in llm.as_completed(Prompts()):
        same(completion, *asked[completion.prompt_index])
        out.discard(completion.prompt_index)
        llm.generate([[9]] * 4, params(30, 0))
    assert not left and not out and all_free(llm)


def test_a_shard_whose_slots_others_hold_passes_requests_on():
    llm, streams = llm_of(2, shards=2), []
    begin(llm)
    asked = [(ids(9, i), params(3 if i % 2 == 0 else 50, i, prompt_logprobs=1)) for i in range(12)]
    for completion in llm.as_completed(asked):
        same(completion, *asked[completion.prompt_index])
        if llm.free_slots and len(streams) < llm.max_slots - 1:
            streams.append(llm.stream([9], params(80, 0)))
            next(streams[-1])
    assert len(streams) == 3
    streams.append(llm.stream([9], params(80, 0)))
    next(streams[-1])
    with pytest.raises(RuntimeError, match="^all slots are held by open streams; close some, or load with more than 4 as max_slots"):
        llm.generate([9], params(1, 0))
    for stream in streams:
        stream.close()
    assert all_free(llm)


@pytest.mark.parametrize("shards", [1, 2])
def test_more_threads_than_slots_of_all_shards(shards):
    llm = llm_of(0, shards)
    begin(llm)
    asked = [(ids(9, i), params([1, 5, 20, 60][i % 4], i)) for i in range(2 * llm.max_slots)]
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda pair: llm.generate(*pair)[0], asked))
    for completion, pair in zip(found, asked, strict=True):
        same(completion, *pair)
    assert all_free(llm)


def test_pages_that_come_free_before_their_lack_is_known(monkeypatch):
    """Rounds are queued that lack pages, which another stream gives up before they are read."""
    monkeypatch.setattr(Runner, "companions", lambda *_: [])
    llm = llm_of(0)
    for pieces in range(1, 6):
        begin(llm, MAX_LEN // PAGE)
        streams = [llm.stream(prompt, params(60, 1), steps=1) for prompt in (ids(66, 1), Q)]
        next(streams[0])
        for _ in range(pieces):
            next(streams[1])
        streams[0].close()
        llm._runner.flush()  # as another call would that looks for pages
        last = list(streams[1])[-1].completion
        same(last, Q, params(60, 1))


@pytest.mark.parametrize("dropped", [False, True])
def test_streams_end_between_the_steps_of_other_calls(dropped, monkeypatch):
    """A completion comes while another shard is still stepping: what its thread works with stays as it is."""
    llm, step, close, inside = llm_of(0, shards=2), turn.Turn.step, turn.Turn.close, []
    asked = [(ids(9, i), params(3, i)) for i in range(8)]
    begin(llm)
    streams = [llm.stream([9], params(80, i)) for i in range(4)]
    for stream in streams:
        next(stream)
    del stream

    def stepped(one, *args, **more):
        if one._runner is llm._runner:
            return step(one, *args, **more)
        inside.append(one._runner)
        time.sleep(0.1)  # the other shard is done sooner
        going = step(one, *args, **more)
        inside.remove(one._runner)
        return going

    def closed(one):
        assert one._runner not in inside
        close(one)

    monkeypatch.setattr(turn.Turn, "step", stepped)
    monkeypatch.setattr(turn.Turn, "close", closed)
    for completion in llm.as_completed(asked):
        if streams and inside:
            stream = streams.pop()
            stream = None if dropped else stream.close()
        same(completion, *asked[completion.prompt_index])
    assert len(streams) < 4
    streams.clear()
    llm.generate([9], params(1, 0))
    assert all_free(llm)


def test_an_iterator_that_is_dropped_in_the_thread_of_its_shard(monkeypatch):
    """As where the garbage collector finds it there. The shard's step does not wait for itself."""
    llm, step, go, dropped = llm_of(0, shards=2), turn.Turn.step, threading.Event(), threading.Event()
    begin(llm)
    held = [llm.as_completed([(ids(9, i), params(2 if i % 2 else 60, i)) for i in range(2)])]

    def stepped(one, *args, **more):
        going = step(one, *args, **more)
        if held and any(request.params.max_tokens == 60 for request in one.active):
            assert go.wait(60)
            held.clear()
            dropped.set()
        return going

    monkeypatch.setattr(turn.Turn, "step", stepped)
    assert next(held[0]).prompt_index == 1
    go.set()
    assert dropped.wait(20)
    same(llm.generate([9], params(2, 0))[0], [9], params(2, 0))
    assert all_free(llm)


def test_what_gives_prompts_may_take_the_slot_of_what_it_gave():
    """It goes to another shard."""
    llm, streams = llm_of(2, shards=2), []
    begin(llm)

    def asked():
        for i in range(4):
            yield ids(9, i), params(5, i)
            if i < 3:
                streams.append(llm.stream([9], params(80, i)))
                next(streams[-1])

    for completion in llm.as_completed(asked()):
        same(completion, ids(9, completion.prompt_index), params(5, completion.prompt_index))
    assert len(streams) == 3 and llm.free_slots == 1
    for stream in streams:
        stream.close()
    assert all_free(llm)


def test_an_interrupt_as_a_prompt_is_kept_loses_no_page(monkeypatch):
    """The copy holds pages by then, of which the slot's next prompts know nothing."""
    llm, fork = llm_of(1), Runner._fork
    begin(llm)

    def interrupted(*args):
        fork(*args)
        raise KeyboardInterrupt

    asked = [([*P, end], params(5, end)) for end in (13, 14)]
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_fork", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(*map(list, zip(*asked, strict=True)))
    llm._runner.flush()
    assert llm._runner.free_pages == PAGES
    for found, one in zip(llm.generate(*map(list, zip(*asked, strict=True))), asked, strict=True):
        same(found, *one)


@pytest.mark.parametrize("shards", [1, 2])
def test_an_interrupt_as_slots_are_freed_loses_none(shards, monkeypatch):
    """The next call frees them."""
    llm, kind = llm_of(0, shards), turn.Turn if shards == 1 else Turns
    begin(llm)
    iterator, close, interrupts = llm.as_completed([(ids(9, i), params(40, i)) for i in range(9)]), kind.close, [KeyboardInterrupt]
    next(iterator)

    def interrupted(one):
        if interrupts:
            raise interrupts.pop()
        close(one)

    monkeypatch.setattr(kind, "close", interrupted)
    with pytest.raises(KeyboardInterrupt):
        iterator.close()
    assert not all_free(llm)
    same(llm.generate([9], params(2, 0))[0], [9], params(2, 0))
    assert all_free(llm)


@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_an_interrupt_as_a_step_is_handed_over(queued, nth, stepping, monkeypatch):
    """queued: whether the shard's thread will do it."""
    llm, handed = llm_of(0, shards=2), []
    begin(llm)
    submit, asked = llm._shards.pool.submit, [(ids(9, i), params(10, i)) for i in range(9)]

    def interrupted(*args):
        handed.append(args)
        if len(handed) == nth:
            if queued:
                submit(*args)
            raise KeyboardInterrupt
        return submit(*args)

    monkeypatch.setattr(llm._shards.pool, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(llm.as_completed(asked))
    assert all_free(llm)
    for completion in llm.as_completed(asked):
        same(completion, *asked[completion.prompt_index])
    assert not stepping and all_free(llm)


def test_what_requests_leave_behind_does_not_grow(work):
    """With one beginning for all, which is kept once and serves them all."""
    few_and_many(work, 20, 200)


@pytest.mark.slow
def test_what_requests_leave_behind_does_not_grow_more(work):
    few_and_many(work, 100, 10_000)


def few_and_many(work, few, many):
    """How many requests live after some, and after many more."""
    llm, asked = llm_of(1), params(1, 0)
    begin(llm)

    def living(count):
        iterator = llm.as_completed(([*P, i % 7 + 2, i % 61 + 2], asked) for i in range(count))
        for _ in range(count):
            next(iterator)
            work[0] = 0
        assert next(iterator, None) is None
        gc.collect()
        return sum(type(found) is Request for found in gc.get_objects())  # isinstance would ask lazy modules of other packages

    assert living(few) == living(many)
    assert [(kept.over, kept.needed) for kept in llm._runner.held.kept.values()] == [(False, False)]


@pytest.mark.parametrize("shards", [1, 2])
def test_a_call_that_is_over_keeps_neither_requests_nor_what_they_were_read_from(shards):
    """A file that the caller's generator reads from is closed with the iterator, and not at the next call."""
    llm, over = llm_of(1, shards), []

    def asked():
        try:
            yield from ([*P, i + 2] for i in range(20))
        finally:
            over.append(True)

    begin(llm)
    iterator = llm.as_completed(asked(), params(1, 0))
    next(iterator)
    iterator.close()
    gc.collect()
    assert over and not [found for found in gc.get_objects() if type(found) is Request]


def test_a_stream_that_is_closed_is_counted_while_nobody_else_computes(monkeypatch):
    llm, account, others = reference(), Accounts.add, []
    monkeypatch.setattr(Accounts, "add", lambda *args: others.append(free(llm._lock)) or account(*args))
    begin(llm)
    stream = llm.stream(STREAMED, params(40, 7))
    next(stream)
    assert free(llm._lock)
    before = llm.stats.requests
    stream.close()
    assert others == [False] and llm.stats.requests == before + 1


@pytest.mark.parametrize("shards", [1, 2])
def test_a_stream_that_nobody_has_any_more_waits_for_nobody(shards):
    """The garbage collector may come to it while its thread, or another one, computes. Who computes next frees its slot and counts it."""
    llm = llm_of(0, shards)
    begin(llm)
    requests = llm.stats.requests

    def begun():
        stream = llm.stream(STREAMED, params(40, 7))
        next(stream)
        return stream

    inside, over = threading.Event(), threading.Event()

    def compute():
        with llm._lock():
            inside.set()
            over.wait(60)

    stream, thread = begun(), threading.Thread(target=compute)
    thread.start()
    inside.wait(60)
    del stream
    gc.collect()
    assert not all_free(llm) and llm.free_slots < llm.max_slots
    over.set()
    thread.join()
    assert llm.free_slots == llm.max_slots and llm.stats.requests == requests + 1
    stream = begun()
    with llm._lock():
        del stream
        gc.collect()
        assert llm.free_slots < llm.max_slots
    same(llm.generate([9], params(2, 0))[0], [9], params(2, 0))
    assert all_free(llm) and llm.stats.requests == requests + 3


def test_a_stream_does_not_wait_for_itself():
    def chunks():
        yield stream.close()

    stream = Stream(chunks(), lambda: None)
    with pytest.raises(ValueError, match="generator already executing"):
        next(stream)


def test_what_is_done_comes_before_an_error():
    """It comes as slots come free, those of sequences that have ended then. An item that is not valid waits for all before it."""
    llm, ended, end = llm_of(0), [], turn.Turn.end
    begin(llm)
    asked = [(ids(9, i), params(5 + i, i)) for i in range(TOTAL + turn.AHEAD + 4)]
    expected = [alone(*each).token_ids for each in asked]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(turn.Turn, "end", lambda self: (found := end(self), ended.extend(r.prompt_index for r in found))[0])

        def gone():
            yield from asked
            raise OSError("gone")

        for prompts, error in ((gone(), "gone"), ([*asked, ([], params(1, 0)), *asked], f"prompt {len(asked)} is empty")):
            ended.clear()
            done = []
            with pytest.raises((OSError, ValueError), match=error):
                for completion in llm.as_completed(prompts):
                    assert completion.token_ids == expected[completion.prompt_index]
                    done.append(completion.prompt_index)
            assert sorted(done) == sorted(ended) and ended
            assert all_free(llm)
    assert sorted(done) == list(range(len(asked)))


def test_time_counts_once_where_calls_are_within_calls():
    accounts = llm_of(0)._accounts
    with accounts.timed():
        time.sleep(0.02)
        with accounts.timed():
            time.sleep(0.01)
        assert accounts.seconds > 0.03
        time.sleep(0.01)
    assert 0.04 < accounts.seconds == accounts.seconds


def test_a_step_without_calls_waits_for_none(monkeypatch):
    """The wait would count as the device's work."""
    runner = llm_of(0)._runner
    monkeypatch.setattr(runner.programs, "fetch", lambda _: pytest.fail("there is nothing to wait for"))
    assert not runner.read([])


class Load:
    """Random calls on one engine. Some streams and an iterator stay open over others."""

    def __init__(self, llm, seed, work):
        self.llm, self.rng, self.work = llm, random.Random(seed), work
        self.calls, self.streams, self.iterator, self.talks = 0, [], None, []
        self.stems = [ids(30, seed), ids(22, seed + 1)]

    def request(self):
        """A prompt, one of two in three with a beginning that others have, and params."""
        rng = self.rng
        stem = rng.choice([*self.stems, []])
        prompt = [*stem[: rng.choice([len(stem), len(stem), 14])], *ids(rng.randint(1, 3 if stem else 40), rng.randint(0, 9))]
        ends = [{"stop_token_ids": (5, 9, 23)}, {"stop": tiny.Letters().decode([12])}]
        changes = rng.choice([{}, {}, {"temperature": 0.0}, {"prompt_logprobs": 1}, *ends])
        return prompt, params(rng.choice([1, 4, 9, 16]), rng.randint(0, 3), **changes)

    def requests(self):
        return [self.request() for _ in range(self.rng.choice([1, 2, 3, 6]))]

    def call(self, function):
        """Counts a call, and has it return. Where an open iterator has all slots, it is ended and the call made again."""
        self.calls += 1
        for again in (False, True):
            self.work[0] = 0
            try:
                return function()
            except RuntimeError as error:
                if again or self.iterator is None or "are held by open streams" not in str(error):
                    raise
                self.finish()

    def generate(self):
        asked = self.requests()
        prompts, each = map(list, zip(*asked, strict=True))
        for completion, pair in zip(self.call(lambda: self.llm.generate(prompts, each)), asked, strict=True):
            same(completion, *pair)

    def chat(self):
        talk = self.rng.choice(self.talks) if self.talks and self.rng.random() < 0.7 else ids(self.rng.randint(4, 30), self.calls)
        prompt, p = [*talk, *ids(2, self.calls)], params(self.rng.choice([3, 12]), 1)
        completion = self.call(lambda: self.llm.chat([{"ids": prompt}], p))
        same(completion, prompt, p)
        talk = [*prompt, *completion.token_ids]
        self.talks = [t for t in [*self.talks[-2:], talk] if len(t) < 50]

    def stream(self):
        if len(self.streams) < min(self.llm.max_slots - 2, 3):
            prompt, p = self.request()
            p = dataclasses.replace(p, max_tokens=30)

            def begun():
                stream = self.llm.stream(prompt, p, steps=2)
                return stream, prompt, p, [next(stream)]

            self.streams.append(self.call(begun))
        else:
            self.read()

    def read(self):
        """A bit of a stream, or its rest; or it is closed."""
        if self.streams:
            entry = self.rng.choice(self.streams)
            stream, prompt, p, chunks = entry
            many = self.rng.choice([0, 1, 100])
            self.work[0] = 0
            if many and chunks[-1].completion is None:
                chunks += itertools.islice(stream, many)
            if chunks[-1].completion is not None:
                same(chunks[-1].completion, prompt, p)
                assert sum((c.token_ids for c in chunks), []) == chunks[-1].completion.token_ids
            if not many or chunks[-1].completion is not None:
                stream.close()
                self.streams.remove(entry)

    def as_completed(self):
        self.finish()
        asked = self.requests()
        begun = asked, self.llm.as_completed(iter(asked)), []
        self.call(lambda: self.some(self.rng.choice([1, 2, 100]), *begun))
        self.iterator = begun

    def some(self, count, asked, iterator, done):
        for completion in itertools.islice(iterator, count):
            same(completion, *asked[completion.prompt_index])
            done.append(completion.prompt_index)

    def finish(self):
        """Reads or closes what is left of the iterator."""
        if self.iterator is not None:
            self.work[0] = 0
            if self.rng.random() < 0.7:
                self.some(100, *self.iterator)
                asked, _, done = self.iterator
                assert sorted(done) == list(range(len(asked)))
            self.iterator[1].close()
            self.iterator = None

    def run(self, calls):
        operations = [self.generate, self.generate, self.chat, self.stream, self.read, self.as_completed, self.finish]
        while self.calls < calls:
            self.rng.choice(operations)()
        self.finish()
        while self.streams:
            self.read()
        for runner in self.llm._shards.runners:
            assert runner.free_slots == runner.settings.max_slots
            runner.flush()
            while runner.evict():
                pass
            runner.flush()


# Snapshots that there is room for, pages of a shard, data shards.
SETTINGS = [(0, PAGES, 1), (0, 22, 1), (1, PAGES, 1), (1, 22, 1), (0, PAGES, 2), (1, 20, 2)]


def random_calls(work, snapshots, pages, shards, seed, calls):
    llm = llm_of(snapshots, shards)
    begin(llm, pages)
    load = Load(llm, seed, work)
    load.run(calls)
    assert all(runner.free_pages == pages for runner in llm._shards.runners)
    return llm.stats


# Among them is every value of each setting.
@pytest.mark.parametrize(("snapshots", "pages", "shards"), [pytest.param(0, PAGES, 1, marks=pytest.mark.slow), (1, 20, 2)])
def test_calls_of_every_sort_give_what_each_request_gets_alone(work, snapshots, pages, shards):
    stats = random_calls(work, snapshots, pages, shards, 0, 36)
    assert stats.cached_tokens > 100 and (pages == PAGES or stats.preemptions > 0)


@pytest.mark.slow
@pytest.mark.parametrize(("snapshots", "pages", "shards"), SETTINGS)
@pytest.mark.parametrize("seed", range(11))
def test_calls_of_every_sort_give_what_each_request_gets_alone_more(work, snapshots, pages, shards, seed):
    random_calls(work, snapshots, pages, shards, seed, 170)
