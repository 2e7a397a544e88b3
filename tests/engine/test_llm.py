"""The engine: whatever the drafter, the batch, the slots and the way of asking, the tokens are those of plain decoding."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

import ignored
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from interrupting import interrupted_compilation
from quick import few_programs, prompt_rows

import jaxspec
from jaxspec import SamplingParams, decode, engine
from jaxspec.decode import accept
from jaxspec.drafters.base import NoDraft
from jaxspec.engine import buckets, serving
from jaxspec.engine.conversations import Conversations
from jaxspec.engine.device_clock import Times
from jaxspec.engine.params import Defaults
from jaxspec.engine.program_kinds import Admit, DecodeRounds, Prefill
from jaxspec.engine.programs import Programs
from jaxspec.engine.runner import Runner
from jaxspec.sampling.choice import PLAIN, seed_words

MAX_LEN = 96
K = 4

# (prompt, temperature); the seed of each is its row. Lengths are uneven; the longest leaves one token to generate.
PROMPTS = [
    ("def fibonacci(n):\n", 0.0),
    ("class Stack:\n    def push(self, item):\n        self.items.append(item)\n", 0.9),
    ([300], 0.7),
    (list(range(200, 200 + MAX_LEN - 1)), 1.0),
    ("import os", 0.0),
    (list(range(500, 570)), 0.8),
    ("x = 1\n", 1.0),
    ("return", 0.5),
]
ALL = range(len(PROMPTS))


def params(row, **changes):
    return SamplingParams(**{"temperature": PROMPTS[row][1], "top_k": 0, "top_p": 1.0, "seed": row, "ignore_eos": True, **changes})


def generate(llm, rows=ALL, **changes):
    return llm.generate([PROMPTS[row][0] for row in rows], [params(row, **changes) for row in rows])


def tokens(completions):
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile(unoptimised):
    with pytest.MonkeyPatch.context() as patch:
        prompt_rows(patch, buckets.PREFILL_CHUNK)  # one program for prompts of every length
        yield


@pytest.fixture(scope="module")
def load(folders):
    return functools.partial(jaxspec.load, folders[0], max_len=MAX_LEN, progress=False)


@pytest.fixture(scope="module")
def llm(load, folders):
    """Three slots for eight prompts, with the MTP assistant."""
    return load(folders[1], max_slots=3)


@pytest.fixture(scope="module")
def expected(llm):
    """Every prompt's tokens up to max_len, by decoding one token at a time in a state driven by hand: [8] lists."""
    target, drafter = llm.target, NoDraft()
    ids = [llm.tokenizer.encode(p) if isinstance(p, str) else p for p, _ in PROMPTS]
    size = np.array([len(i) for i in ids], np.int32)
    padded = np.zeros((len(ids), MAX_LEN), np.int32)
    for row, i in enumerate(ids):
        padded[row, : len(i)] = i
    slots = jnp.arange(len(ids), dtype=jnp.int32)
    state = decode.init_state(target, drafter, slots=len(ids), max_len=MAX_LEN, num_draft_tokens=0)
    requests = decode.Requests(
        tokens=jnp.asarray(padded),
        length=jnp.asarray(size),
        prompt=jnp.asarray(size),
        limit=jnp.full(len(ids), MAX_LEN),
        stop_ids=jnp.full((len(ids), 16), -1),
        seed=jnp.asarray([seed_words(row) for row in ALL], jnp.uint32),
        temperature=jnp.asarray([t for _, t in PROMPTS], jnp.float32),
    )
    state = decode.admit(state, slots, requests)
    state = jax.jit(functools.partial(decode.prefill, chunk=MAX_LEN))(target, drafter, state, slots)
    state = jax.jit(functools.partial(decode.decode_loop, round=decode.Round(0)))(target, drafter, state, slots, MAX_LEN)
    return [row[n:].tolist() for row, n in zip(np.asarray(state.tokens), size, strict=True)]


@pytest.fixture(scope="module")
def parrot(llm, expected):
    """A drafter that guesses two of three tokens right, so that rounds of every length occur."""
    ids = [llm.tokenizer.encode(p) if isinstance(p, str) else p for p, _ in PROMPTS]
    answers = np.array([[*i, *e] for i, e in zip(ids, expected, strict=True)], np.int32)
    return tiny.Parrot(jnp.asarray(answers), jnp.asarray(np.random.RandomState(0).rand(*answers.shape) < 0.33))


@pytest.fixture(scope="module")
def speculative(load, parrot):
    """Eight slots and a drafter that is often right."""
    return load(parrot, num_draft_tokens=K, max_slots=8)


def rounds_of(parrot, row, start, k):
    """Accepted drafts of each round that the parrot must get: it is right until its first wrong guess."""
    right = ~np.asarray(parrot.wrong)[row]
    length, rounds = start + 1, []
    while length < MAX_LEN:
        accepted = 0
        while accepted < k and length + accepted < MAX_LEN and right[length + accepted]:
            accepted += 1
        rounds.append(accepted)
        length += accepted + 1
    return rounds


def test_a_batch_in_few_slots_equals_decoding_by_hand(llm, expected):
    completions = generate(llm)
    assert tokens(completions) == expected
    assert all(c.finish_reason == "length" and len(c.prompt_token_ids) + len(c.token_ids) == MAX_LEN for c in completions)
    assert len({tuple(e[:8]) for e in expected}) == len(expected)  # the prompts do lead to different texts
    assert completions[3].token_ids == expected[3] and len(expected[3]) == 1


@pytest.mark.parametrize("k", [4, *(pytest.param(k, marks=pytest.mark.slow) for k in (0, 7))])
def test_any_number_of_drafts_and_any_batch_gives_the_same_tokens(load, parrot, expected, speculative, k, monkeypatch):
    if k != K:  # that of K drafts has programs for one sequence and for eight, the others for eight
        few_programs(monkeypatch)
    llm = speculative if k == K else load(parrot if k else None, num_draft_tokens=k, max_slots=8)
    completions = generate(llm)
    assert tokens(completions) == expected
    assert [generate(llm, [row])[0].token_ids for row in (0, 1)] == expected[:2]
    for row, completion in enumerate(completions):
        rounds = rounds_of(parrot, row, len(completion.prompt_token_ids), k)
        stats = completion.stats
        assert stats.histogram == tuple(np.bincount(rounds, minlength=k + 1)), f"row {row}"
        starts = len(completion.prompt_token_ids) + 1 + np.cumsum([0, *(accepted + 1 for accepted in rounds[:-1])])
        assert (stats.steps, stats.drafted) == (len(rounds), sum(min(k, MAX_LEN - start) for start in starts if rounds))
    if k == K:
        assert completions[0].stats.acceptance_length > 1.5


def test_rates_do_not_depend_on_where_a_text_ends(speculative, parrot, expected):
    """A text that ends within accepted drafts, by a limit, a stop id or a stop string, has the rounds of a longer one: what its last round
    accepted counts whole."""
    [first] = speculative.generate([PROMPTS[0][0]], params(0, max_tokens=1))
    prompt = first.prompt_token_ids
    rounds = rounds_of(parrot, 0, len(prompt), K)
    assert max(rounds) > 1
    ends = np.cumsum([1, *(accepted + 1 for accepted in rounds)])  # new tokens after each round
    stops = [(n, params(0, max_tokens=n)) for n in range(1, 16)]
    for n in range(2, 16):
        last = expected[0][n - 1]
        if last not in expected[0][: n - 1]:
            stops += [(n, params(0, stop_token_ids=[last]))]
            if (text := speculative.tokenizer.decode([last])) not in speculative.tokenizer.decode(expected[0][: n - 1]):
                stops += [(n, params(0, stop=[text]))]
    assert len(stops) > 20
    found = speculative.generate([prompt] * len(stops), [p for _, p in stops])
    for (n, p), completion in zip(stops, found, strict=True):
        assert p.stop or len(completion.token_ids) == n  # a stop string may be whole with a later token's bytes
        had = rounds[: int(np.searchsorted(ends, len(completion.token_ids)))]
        assert completion.stats.histogram == tuple(np.bincount(had, minlength=K + 1)), (n, completion.finish_reason)
        assert completion.stats.accepted == sum(completion.stats.from_draft)


def test_the_next_call_takes_the_weights_of_a_drafter_that_replaces_another(speculative, expected):
    programs = speculative._runner.programs
    before = programs.drafter
    programs.drafter = dataclasses.replace(before, wrong=jnp.ones_like(before.wrong))
    try:
        completions = generate(speculative, [0, 1])
    finally:
        programs.drafter = before
    assert tokens(completions) == expected[:2]
    assert [c.stats.acceptance_length for c in completions] == [1, 1]
    with pytest.raises(ValueError, match="NoDraft"):
        programs.drafter = NoDraft()
    assert programs.drafter is before
    assert generate(speculative, [0])[0].stats.acceptance_length > 1.5


def test_prompts_may_be_one_or_many_text_or_ids(speculative):
    text, short = "import os", SamplingParams(max_tokens=4, temperature=0)
    ids = speculative.tokenizer.encode(text)
    wanted = tokens(speculative.generate(text, short))
    for prompts in (ids, np.array(ids), tuple(ids), [text], [ids], [np.array(ids)]):
        assert tokens(speculative.generate(prompts, short)) == wanted
    assert tokens(speculative.generate([text, ids, [7]], short))[:2] == wanted * 2
    assert speculative.generate([], short) == []


def accepted_spot(parrot, completion, row):
    """(index among the new tokens, id) of a draft inside an accepted block, more of which follow, whose id did not occur before."""
    flags, new = completion.stats.from_draft, completion.token_ids
    for i in range(2, len(new) - 1):
        if flags[i] and flags[i + 1] and new[i] not in new[:i]:
            return i, new[i]
    raise AssertionError("the parrot got no block of two drafts right")


def test_a_stop_id_inside_an_accepted_block_ends_the_sequence_there(speculative, parrot, expected):
    whole = generate(speculative, [0])[0]
    at, stop = accepted_spot(parrot, whole, 0)
    completion = generate(speculative, [0], stop_token_ids=[stop])[0]
    assert completion.token_ids == expected[0][: at + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert completion.text == speculative.tokenizer.decode(expected[0][:at])
    assert completion.stats.from_draft == whole.stats.from_draft[: at + 1]
    assert completion.stats.steps == completion.stats.drafted // K


def test_the_checkpoints_own_end_tokens_stop_unless_ignored(speculative, parrot, expected, monkeypatch):
    at, end = accepted_spot(parrot, generate(speculative, [1])[0], 1)
    monkeypatch.setattr(speculative, "eos_token_ids", (end,))
    stopped = generate(speculative, [1], ignore_eos=False)[0]
    assert stopped.token_ids == expected[1][: at + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", None)
    ignored = generate(speculative, [1])[0]
    assert (ignored.token_ids, ignored.finish_reason) == (expected[1], "length")
    asked = generate(speculative, [1], stop_token_ids=[end])[0]
    assert (asked.token_ids, asked.stop_reason) == (stopped.token_ids, end)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_max_tokens_counts_new_tokens_inside_blocks_too(speculative, expected, count):
    completions = generate(speculative, max_tokens=count)
    assert tokens(completions) == [e[:count] for e in expected]
    assert {c.finish_reason for c in completions} == {"length"}


def test_a_first_token_that_stops(speculative, expected):
    completion = generate(speculative, [2], stop_token_ids=[expected[2][0]])[0]
    assert (completion.token_ids, completion.text, completion.finish_reason) == (expected[2][:1], "", "stop")
    assert completion.stats.steps == 0


@pytest.mark.parametrize("steps", [1, 5])
def test_a_stream_gives_what_generate_gives(speculative, expected, steps):
    for row in (0, 1, 3):
        whole = generate(speculative, [row])[0]
        chunks = list(speculative.stream(PROMPTS[row][0], params(row), steps=steps))
        assert sum((c.token_ids for c in chunks), []) == expected[row]
        assert "".join(c.text for c in chunks) == whole.text
        assert [c.finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
        assert chunks[-1].completion == whole
        # The first token comes at once, then no chunk holds more than its rounds can give.
        assert len(chunks[0].token_ids) == 1
        assert all(len(c.token_ids) <= steps * (K + 1) for c in chunks[1:])


@pytest.mark.parametrize(("returns", "changes", "queued"), [(True, {}, True), (False, {}, False), (True, {"stop": "no such text"}, True)])
def test_rounds_are_queued_where_a_call_returns_before_they_are_over(llm, expected, monkeypatch, returns, changes, queued):
    events, run, fetch = [], Programs.run, Programs.fetch

    def running(self, program, *args):
        events.append(type(program))
        return run(self, program, *args)

    def fetching(self, found):
        events.extend(["read"] * bool(found))
        return fetch(self, found)

    llm._runner.flush()
    monkeypatch.setattr(llm._runner.programs, "loops_return", returns)
    monkeypatch.setattr(Programs, "run", running)
    monkeypatch.setattr(Programs, "fetch", fetching)
    first, *chunks = llm.stream(PROMPTS[2][0], params(2, logprobs=2, **changes), steps=2)
    assert first.token_ids + sum((c.token_ids for c in chunks), []) == expected[2]
    assert [p for chunk in [first, *chunks] for p in chunk.logprobs] == chunks[-1].completion.logprobs
    assert events[:2] == [Admit, Prefill]
    each = [DecodeRounds, "read"]
    assert events[2:] == (each * (1 + len(chunks)) if queued else ["read"] + each * len(chunks)) and len(chunks) > 3


def test_a_stream_leaves_out_the_stop_tokens_text(speculative, parrot, expected):
    at, stop = accepted_spot(parrot, generate(speculative, [0])[0], 0)
    chunks = list(speculative.stream(PROMPTS[0][0], params(0, stop_token_ids=[stop])))
    assert sum((c.token_ids for c in chunks), []) == expected[0][: at + 1]
    assert "".join(c.text for c in chunks) == speculative.tokenizer.decode(expected[0][:at])


def test_closing_a_stream_frees_its_slot(llm, expected):
    streams = [llm.stream(PROMPTS[row][0], params(row)) for row in (0, 1, 2)]
    begun = [next(stream).token_ids for stream in streams]
    full = "all slots are held by open streams; close some, or load with more than 3 as max_slots"
    with pytest.raises(RuntimeError, match=full):
        generate(llm, [4])
    with pytest.raises(RuntimeError, match=full):
        next(llm.stream("x"))
    streams[1].close()
    assert tokens(generate(llm, [4, 5])) == [expected[4], expected[5]]  # in the one slot that is free, one after the other
    for row in (0, 2):
        assert begun[row] + sum((c.token_ids for c in streams[row]), []) == expected[row]
    assert tokens(generate(llm)) == expected


def test_open_streams_have_their_rounds_together(llm, expected, monkeypatch):
    """Once the program for three is compiled. One that is not read does not get far ahead, and goes on from where it is."""
    generate(llm, [0, 1, 2], max_tokens=9)
    together, decode_ = [], Runner.decode

    def noted(self, requests, *args, **more):
        together.append(len(requests))
        return decode_(self, requests, *args, **more)

    monkeypatch.setattr(Runner, "decode", noted)
    streams = [llm.stream(PROMPTS[row][0], params(row), steps=2) for row in (0, 1, 2)]
    found = [next(stream).token_ids for stream in streams]
    for _ in range(6):
        for tokens_, stream in zip(found, streams, strict=True):
            tokens_ += next(stream).token_ids
    assert together.count(3) >= 5 and len(together) <= 10
    (unread,) = (r for r in llm._runner.held.running if r.prompt.tolist() == PROMPTS[2][0])
    for row in (0, 1):
        found[row] += sum((c.token_ids for c in streams[row]), [])
    assert len(unread.output) - unread.taken < 4 * (llm.num_draft_tokens + 1)
    found[2] += sum((c.token_ids for c in streams[2]), [])
    assert found == expected[:3]


def test_a_stream_that_nobody_starts_takes_no_slot(llm, expected):
    unread = [llm.stream("x") for _ in range(9)]
    assert tokens(generate(llm, [0])) == [expected[0]]
    del unread


def fill(llm):
    """Runs long prompts in all slots, whose pages those of kept prompts must make room for."""
    llm.generate([list(range(n, n + 80)) for n in range(1000, 1000 + 100 * llm.max_slots, 100)], params(1, max_tokens=2))


def test_nothing_compiles_after_warmup(load, parrot, expected, monkeypatch, capsys):
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: compiled.append(event) if "compile" in event else None)
    llm = load(parrot, num_draft_tokens=2, max_slots=8)
    llm.warmup(params(0), params(1))
    made = llm.stats.compilations
    assert made <= 8
    monkeypatch.setattr(llm, "progress", True)
    with monkeypatch.context() as patch:
        patch.setattr(llm, "_draw_seed", lambda: pytest.fail("later requests would have other seeds"))
        llm.warmup(params(0), params(1, seed=None))
    assert f"{made}/{made} " in capsys.readouterr().err  # a bar runs to its end though nothing is missing
    assert compiled  # the listener hears what JAX does
    compiled.clear()
    assert tokens(generate(llm)) == expected
    assert sum((c.token_ids for c in llm.stream(PROMPTS[0][0], params(0))), []) == expected[0]
    llm.chat([{"role": "user", "content": "Hi"}], params(1, max_tokens=3))
    long, short = list(range(300, 370)), params(1, max_tokens=2)
    assert llm.generate(long, dataclasses.replace(short, n=2))[1].num_cached_tokens == 69
    fill(llm)
    assert llm.generate(long, short)[0].num_cached_tokens == 0
    assert compiled == []
    assert llm.stats.compilations == made


@pytest.mark.slow  # test_nothing_compiles_after_warmup has them together
def test_requests_of_each_params_alone_are_warm_too(load, parrot):
    llm = load(parrot, num_draft_tokens=2, max_slots=2)
    each = [params(1, top_k=5), params(0, prompt_logprobs=1)]
    llm.warmup(*each)
    made = llm.stats.compilations
    for several in (each[:1], each[1:], each):
        llm.generate([PROMPTS[0][0]] * len(several), several)
    assert llm.stats.compilations == made


def test_free_pages_that_a_call_told_of_are_not_waited_for_again(llm, monkeypatch):
    """A wait counts as time in which the device had something to do. Whether there are pages for a second prompt is asked for each."""
    generate(llm, [0, 2], max_tokens=4)
    seen = []
    for owner, name in ((Runner, "read"), (Programs, "fetch")):
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, real=real, name=name: seen.append(name) or real(*args))
    generate(llm, [0, 2], max_tokens=4)
    assert seen.count("fetch") >= 2 and all(a == "read" for a, b in itertools.pairwise(["", *seen]) if b == "fetch")


def test_what_load_was_told_reaches_every_program(load, parrot, monkeypatch):
    rule = accept.synthetic([0.5, 0.5])
    llm = load(parrot, num_draft_tokens=2, accept=rule, attention="xla", draft_attention="xla")
    seen = {}

    def spy(name):
        def function(*args, **static):
            seen[name] = static
            raise InterruptedError

        return function

    for name in ("decode_loop", "prefill"):
        monkeypatch.setattr(decode, name, spy(name))
        with pytest.raises(InterruptedError):
            llm.warmup(params(0))
        monkeypatch.setattr(buckets.Buckets, "decode", [])  # the first program of the next warm-up computes prompts
    told = decode.Round(2, rule, PLAIN, "xla", "xla")
    free = {"round": told, "automata": None}  # of texts that follow no automaton
    assert seen == {"prefill": {"chunk": 64, "ends": True, **free}, "decode_loop": free}


def test_an_interrupted_warmup_begins_no_more_programs(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    begun = []

    def compiler(program, pool):
        return lambda: begun.append(program) or time.sleep(0.05)

    programs = types.SimpleNamespace(compiled={}, _times=Times(time.perf_counter), _explained=contextlib.nullcontext, _compiler=compiler)
    making = Programs.compile(programs, range(20))
    next(making)
    with pytest.raises(KeyboardInterrupt):
        making.throw(KeyboardInterrupt)
    assert len(begun) < 5


def test_programs_are_compiled_though_pools_take_no_more_work(monkeypatch):
    """As in a thread that goes on when the main one has ended."""
    told = types.SimpleNamespace(compiled={}, _times=Times(time.perf_counter), _explained=contextlib.nullcontext)
    told._compiler = lambda program, pool: lambda: program + 1
    monkeypatch.setattr("concurrent.futures.thread._shutdown", True)
    assert sorted(Programs.compile(told, range(3))) == ["0", "1", "2"] and told.compiled == {0: 1, 1: 2, 2: 3}


def test_an_interrupt_leaves_the_compiler_to_end_its_work(load, expected, monkeypatch):
    llm = load(None, max_slots=1)
    with interrupted_compilation(monkeypatch):
        generate(llm, [0], max_tokens=3)
    assert tokens(generate(llm, [0], max_tokens=3)) == [expected[0][:3]]


def test_seeds_beyond_32_bits_are_different_seeds(speculative):
    def text(seed):
        return tuple(speculative.generate([300], SamplingParams(temperature=1.0, max_tokens=12, seed=seed))[0].token_ids)

    seeds = [1, 1 + 2**32, 1 + 2**40, 2**63 - 1]
    assert len({text(seed) for seed in seeds}) == len(seeds)
    assert text(1 + 2**40) == text(1 + 2**40)


def test_a_seed_that_nobody_gave_is_drawn_and_told(load, speculative):
    wild = SamplingParams(temperature=1.0, max_tokens=6)
    first, second = speculative.generate([[300], [300]], wild)
    assert first.seed != second.seed and first.token_ids != second.token_ids
    again = speculative.generate([300], SamplingParams(temperature=1.0, max_tokens=6, seed=first.seed))[0]
    assert again.token_ids == first.token_ids


def test_what_is_not_given_comes_from_the_checkpoint(speculative, monkeypatch):
    def text(**given):
        return tokens(speculative.generate([300], SamplingParams(max_tokens=12, seed=3, ignore_eos=True, **given)))

    # The pocket generation config: do_sample, temperature 1, top_k 64, top_p 0.95.
    assert speculative.defaults == Defaults(1.0, 64, 0.95)
    assert text() == text(temperature=1.0, top_k=64, top_p=0.95) != text(top_k=0, top_p=1.0)
    assert text(temperature=0) not in (text(), text(top_k=0, top_p=1.0))
    banned = tuple(text(temperature=0)[0])
    monkeypatch.setattr(speculative, "defaults", Defaults(suppress_tokens=banned))
    assert not set(text()[0]) & set(banned)


def test_chat_generates_from_the_template(speculative):
    messages = [{"role": "user", "content": "Hi"}]
    greedy = SamplingParams(max_tokens=6, temperature=0)
    ids = speculative.tokenizer.apply_chat_template(messages)
    answer = speculative.chat(messages, greedy)
    assert answer.prompt_token_ids == ids
    assert answer.token_ids == speculative.generate(ids, greedy)[0].token_ids
    thinking = speculative.chat([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], greedy, enable_thinking=True)
    assert thinking.prompt_token_ids == speculative.tokenizer.apply_chat_template(messages, enable_thinking=True) != ids
    both = speculative.chat([messages, [*messages, {"role": "model", "content": "A"}, {"role": "user", "content": "B"}]], greedy)
    assert both[0].token_ids == answer.token_ids and len(both[1].prompt_token_ids) > len(ids)


def test_a_conversation_goes_on_with_the_message_of_an_answer(speculative):
    """The template is what was said last, so that the model's turn is open where the test wants it."""
    asked = {"params": SamplingParams(max_tokens=6, temperature=0, ignore_eos=True), "chat_template": "{{ messages[-1]['content'] }}"}
    messages = [{"role": "user", "content": "<bos><|turn>user\nHi<turn|>\n<|turn>model\n<|channel>thought\nI"}]
    answer = speculative.chat(messages, **asked)
    chunks = list(speculative.stream_chat(messages, **asked))
    assert answer.message == {"role": "assistant", "content": "", "reasoning_content": f"I{answer.text}".strip()}
    assert chunks[-1].completion.message == answer.message and all(chunk.delta.keys() <= {"reasoning_content"} for chunk in chunks)
    assert "".join(chunk.delta.get("reasoning_content", "") for chunk in chunks) == answer.text
    assert [each.message for each in speculative.chat([messages, messages], **asked)] == [answer.message] * 2
    (alone,) = speculative.generate(speculative.chat_input(messages, chat_template=asked["chat_template"]), asked["params"])
    assert alone.message == answer.message
    assert all(chunk.delta == {} for chunk in speculative.stream("fox", asked["params"]))
    later = speculative.chat_prompt([{"role": "user", "content": "Hi"}, answer.message, {"role": "user", "content": "Bye"}])
    assert answer.text.strip() not in speculative.tokenizer.decode(later)
    tools = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]
    given = speculative.chat_input(messages, chat_template="{{ tools[0].function.name }}", tools=tools)
    assert speculative.tokenizer.decode(given["prompt_token_ids"]) == "look" and given["tools"] == tools
    assert speculative.generate([given], asked["params"])[0].message["content"]
    stream = speculative.stream_chat(messages, **asked)
    next(stream)
    stream.close()
    assert speculative.free_slots == speculative.max_slots


def test_a_conversation_goes_on_from_what_its_earlier_turns_computed(llm, monkeypatch):
    monkeypatch.setattr(Conversations, "ids", lambda self, messages, *_: messages[0]["ids"])

    def chat(ids, **changes):
        (found,) = [llm.chat([{"ids": list(ids)}], params(1, **{"max_tokens": 12, **changes}))]
        cached = found.num_cached_tokens
        assert found.token_ids == llm.generate([list(ids)], params(1, **{"max_tokens": 12, **changes}))[0].token_ids
        return cached, [*ids, *found.token_ids]

    cached, known = chat(range(300, 330))
    assert cached == 0
    cached, known = chat([*known, 400, 401])
    assert cached == 41  # all but the last token, whose K and V did not exist yet
    assert chat([*known[:50], 402])[0] == 0
    chunks = list(llm.stream_chat([{"ids": [*known, 404]}], sampling_params=params(1, max_tokens=3), steps=1))
    assert chunks[-1].completion.num_cached_tokens == len(known) - 1
    # A longer prompt is kept at its end too, for a history that leaves parts of an answer out.
    cached, long = chat(range(600, 670), max_tokens=20)
    assert cached == 0
    assert chat([*long[:70], 700, 701])[0] == 69
    assert chat([*long, 3], max_tokens=3)[0] == 89
    cached, known = chat(range(800, 810), max_tokens=4)
    assert chat([*known, 3])[0] == len(known) - 1
    assert llm.free_slots == 3
    fill(llm)
    assert chat([*known, 3])[0] == 0


@pytest.mark.parametrize("thinking", [False, True])
def test_what_is_kept_of_a_chat_is_what_its_next_turn_begins_with(llm, thinking):
    """Without thinking the template writes an empty thought before an answer, which the next turn does not have."""
    messages = [{"role": "user", "content": "hi"}]
    prompt, keep = llm._conversations.turn(messages, thinking, {})
    later = [*messages, {"role": "assistant", "content": "So"}, {"role": "user", "content": "on"}]
    told, ids = llm.chat_prompt(later, enable_thinking=thinking), prompt["prompt_token_ids"]
    assert told[:keep] == ids[:keep] and (keep == len(ids)) == thinking and (thinking or told[keep] != ids[keep])
    assert 0 < keep and llm._conversations.turn(messages, thinking, {"add_generation_prompt": False})[1] <= keep


@pytest.mark.parametrize(
    ("prompts", "changes", "error", "message"),
    [
        ([[5], []], {}, ValueError, "prompt 1 is empty; expected at least one token"),
        ([""], {}, ValueError, "prompt 0 is empty"),
        ([[5] * MAX_LEN], {}, ValueError, f"prompt 0 has {MAX_LEN} tokens; expected at most {MAX_LEN - 1}, max_len {MAX_LEN} less one"),
        ([[5], [7, 4096]], {}, ValueError, "prompt 1 has id 4096 at position 1; expected 0 .. 4095"),
        ([[-1]], {}, ValueError, "prompt 0 has id -1 at position 0; expected 0 .. 4095"),
        ([[2**70]], {}, ValueError, f"prompt 0 has id {2**70} at position 0"),
        ([[5, 1.5]], {}, TypeError, "prompt 0 has 1.5 at position 1; expected a token id, an integer"),
        ([[True]], {}, TypeError, "prompt 0 has True at position 0"),
        ([None], {}, TypeError, "prompt 0 is of type NoneType, expected a str or a list of token ids"),
        ([{"a": 1}], {}, ValueError, "prompt 0 has 'a', which cannot be served; expected 'prompt' or 'prompt_token_ids'"),
        ([{"prompt": "x", "multi_modal_data": 1}], {}, ValueError, "prompt 0 has 'multi_modal_data', .* served: only text can be read"),
        ([{"prompt": None}], {}, ValueError, "prompt 0 is a dict without 'prompt' and 'prompt_token_ids'"),
        ([{"prompt": [5]}], {}, TypeError, "'prompt' of prompt 0 is of type list, expected a str"),
        ([{"prompt_token_ids": "x"}], {}, TypeError, "'prompt_token_ids' of prompt 0 are a str, expected a list of token ids"),
        ([[5]], {"stop_token_ids": [4096]}, ValueError, "stop_token_ids of prompt 0 has id 4096; expected 0 .. 4095"),
        ([[5]], {"stop_token_ids": range(200, 214)}, ValueError, "prompt 0 has 17 stop ids, .* 3 among them; expected at most 16"),
    ],
)
def test_a_bad_request_is_refused_before_anything_is_computed(speculative, monkeypatch, prompts, changes, error, message):
    monkeypatch.setattr(Runner, "admit", lambda *_: pytest.fail("a bad request reached the device"))
    with pytest.raises(error, match=message):
        speculative.generate(prompts, SamplingParams(**changes))
    with pytest.raises(error, match=message.replace("prompt 1", "prompt 0")):
        speculative.stream(prompts[-1], SamplingParams(**changes))


def test_bad_arguments_of_calls(speculative):
    with pytest.raises(ValueError, match="params is a list of length 2; expected 1, one for each prompt"):
        speculative.generate(["x"], [SamplingParams()] * 2)
    with pytest.raises(TypeError, match="params of prompt 0 are of type dict, expected jaxspec.SamplingParams"):
        speculative.generate(["x"], [{"max_tokens": 3}])
    with pytest.raises(TypeError, match="params is dict, expected jaxspec.SamplingParams, a list of them or None"):
        speculative.generate(["x"], {"max_tokens": 3})
    with pytest.raises(TypeError, match="prompt 0 has 2.5 at position 1; expected a token id, an integer"):
        speculative.generate([1, 2.5])
    for prompts in (b"x", None, 5, np.array(3), types.SimpleNamespace(columns=["prompt"])):
        with pytest.raises(TypeError, match=f"prompts are of type {type(prompts).__name__}, expected a str, a list of token ids, a dict"):
            speculative.generate(prompts)
    with pytest.raises(ValueError, match="chat takes a list of at least one message, such as .*, found None"):
        speculative.chat(None)
    with pytest.raises(TypeError, match="params is list, expected jaxspec.SamplingParams or None"):
        speculative.stream("x", [SamplingParams()])
    with pytest.raises(ValueError, match="steps is 0, expected at least 1"):
        speculative.stream("x", steps=0)
    with pytest.raises(ValueError, match="message 0 holds content of type 'image'; only text can be read"):
        speculative.chat([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}])
    with pytest.raises(ValueError, match="chat takes a list of at least one message"):
        speculative.chat([])


def test_who_waits_for_a_program_is_told(llm, monkeypatch, capsys):
    programs, program = llm._runner.programs, DecodeRounds(7, PLAIN, 0)
    monkeypatch.setattr(programs, "_compiler", lambda program, pool: lambda: print("compiles", file=sys.stderr) or program)
    monkeypatch.setattr(programs, "compiled", dict(programs.compiled))
    for progress in (True, False):
        monkeypatch.setattr(programs, "settings", dataclasses.replace(programs.settings, progress=progress))
        assert programs.ready(program) == program
        assert ("Compiling decode 7" in capsys.readouterr().err.partition("compiles")[0]) == progress
        del programs.compiled[program]


def interrupted(function, at):
    """Calls a function, and raises KeyboardInterrupt before the line that is the at-th to run in the engine's own files. Returns how
    many lines ran."""
    names = ("finish", "llm", "programs", "request", "runner", "slots", "turn")
    ours = {str(Path(engine.__file__).with_name(f"{name}.py")) for name in names}
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if frame.f_code.co_filename not in ours:
            return None
        if event == "line":
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
    return count


def test_an_interrupt_anywhere_leaves_the_llm_usable(llm, expected):
    short = functools.partial(generate, llm, max_tokens=12)
    short()
    lines = interrupted(short, -1)
    stream = llm.stream(PROMPTS[0][0], params(0))
    begun = next(stream).token_ids
    caught = 0
    for at in np.random.default_rng(0).integers(1, lines, 25).tolist():
        try:
            interrupted(short, at)  # which may end before: what earlier ones have computed need not be computed again
        except KeyboardInterrupt:
            caught += 1
        assert llm.free_slots >= 2, f"at line {at} of {lines}"  # the stream's may be lost; it is computed again
    assert caught > 20
    assert tokens(short([1, 2, 5, 7])) == [expected[row][:12] for row in (1, 2, 5, 7)]
    assert begun + sum((c.token_ids for c in stream), []) == expected[0]
    assert tokens(generate(llm)) == expected


@pytest.mark.parametrize(("owner", "name"), [(Runner, "read"), (jaxspec.LLM, "_requests")])
def test_an_interrupt_that_python_ignores_ends_a_call(llm, expected, monkeypatch, owner, name):
    """While the device computes, and while prompts are read."""

    def interrupted(*args, **more):
        ignored.interrupt()
        time.sleep(60)

    for call in (llm.generate, llm.chat):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            call([{"role": "user", "content": "x"}] if call == llm.chat else "x", params(0, max_tokens=12))
    assert tokens(generate(llm)) == expected


@pytest.mark.parametrize("asked", ["stream", "as_completed"])
def test_an_interrupt_that_python_ignores_ends_an_iterator(llm, expected, monkeypatch, asked):
    """And between two items, unraisable exceptions are the caller's."""

    def read(self, calls):
        ignored.interrupt()
        time.sleep(60)

    rows = [(PROMPTS[row][0], params(row, max_tokens=5 + 9 * row)) for row in (0, 1, 2, 4, 5)]
    iterator = llm.stream(*rows[-1]) if asked == "stream" else llm.as_completed(rows)
    before = sys.unraisablehook
    next(iterator)
    assert sys.unraisablehook is before and llm.free_slots < 3
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Runner, "read", read)
        next(iterator)
    assert sys.unraisablehook is before and llm.free_slots == 3
    assert next(iterator, None) is None and tokens(generate(llm)) == expected


def test_a_call_that_fails_costs_neither_the_llm_nor_open_streams(llm, expected, monkeypatch):
    stream = llm.stream(PROMPTS[0][0], params(0))
    begun = next(stream).token_ids
    ready = Programs.ready

    def failing(*args):
        raise jax.errors.JaxRuntimeError(f"{reason}: 3 bytes more\nand a lot of detail")

    monkeypatch.setattr(Programs, "ready", lambda self, program: failing if isinstance(program, DecodeRounds) else ready(self, program))
    reason = "RESOURCE_EXHAUSTED"
    lower = r"lower max_slots \(3\), max_len \(96\), kv_pages \(6\) or memory_fraction: RESOURCE_EXHAUSTED: 3 bytes more$"
    with pytest.raises(MemoryError, match=lower):
        generate(llm, [0, 1])
    reason = "INTERNAL"
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        generate(llm, [0, 1])
    reason = "INTERNAL: NCCL operation ncclGetPeerDevicePointer(win_, 0, peer.value(), &peer_addr) failed: unhandled system error"
    with pytest.raises(
        RuntimeError, match="^XLA's kernels cannot sum over these GPUs; with XLA_FLAGS=--xla_gpu_experimental_use_collective_kernels= in"
    ):
        generate(llm, [0, 1])
    monkeypatch.undo()
    assert tokens(generate(llm, [0, 1])) == expected[:2]
    assert begun + sum((c.token_ids for c in stream), []) == expected[0]  # it is computed again up to where it was
    assert llm.free_slots == 3
    assert tokens(generate(llm)) == expected


def begun_beside(llm, monkeypatch, work):
    """(a thread that does `work`, begun at the first round and going on once it waits for the lock; how many sequences each call has)."""
    thread, decode_, sizes = threading.Thread(target=work), Runner.decode, []

    def noted(self, requests, *args, **more):
        sizes.append(len(requests))
        if thread.ident is None:
            thread.start()
            while not llm._lock.wanted:
                time.sleep(1e-3)
        return decode_(self, requests, *args, **more)

    monkeypatch.setattr(Runner, "decode", noted)
    for name in ("STEPS", "TOGETHER"):  # rounds of a call, so that no text is over before the thread has begun
        monkeypatch.setattr(serving, name, 2)
    return thread, sizes


def test_calls_of_several_threads_have_their_rounds_together(llm, expected, monkeypatch):
    generate(llm, [0, 1, 2], max_tokens=9)  # compiles the program for three
    events = []

    def work():
        stream = llm.stream(PROMPTS[2][0], params(2), steps=2)
        found = list(next(stream).token_ids)
        events.append("first tokens")
        stream.close()
        events.append((found, tokens(generate(llm, [4, 5]))))

    thread, sizes = begun_beside(llm, monkeypatch, work)
    assert tokens(generate(llm, [0, 1])) == [expected[0], expected[1]]
    events.append("the longer call")
    thread.join()
    assert events.index("first tokens") < events.index("the longer call")
    assert 3 in sizes
    ((found, others),) = (event for event in events if isinstance(event, tuple))
    assert found and found == expected[2][: len(found)] and others == [expected[4], expected[5]]


@pytest.mark.parametrize("taken", (0, 2))
def test_a_call_gets_the_first_slot_that_another_threads_call_gives_up(llm, expected, monkeypatch, taken):
    """Though that has requests which came before, and if its only slot is the one that comes free."""
    monkeypatch.setattr(serving, "SHARING", 0.0)  # as if each text took long
    events = []
    with contextlib.ExitStack() as streams:
        for row in range(taken):
            assert next(streams.enter_context(contextlib.closing(llm.stream(PROMPTS[row][0], params(row)))))
        thread, _ = begun_beside(llm, monkeypatch, lambda: events.append(tokens(generate(llm, [4]))))
        assert tokens(generate(llm)) == expected
        events.append("the longer call")
        thread.join()
    assert events == [[expected[4]], "the longer call"]


def waiting(llm, work):
    """A thread that does `work`, once a call waits for slots."""
    thread = threading.Thread(target=work)
    thread.start()
    while thread.is_alive() and not any(call.lacks < math.inf for call in list(llm._serving._calls)):
        time.sleep(1e-3)
    return thread


def test_waits_for_streams_that_a_thread_read_which_is_over(llm, expected):
    """The next thread may have its number. A read that waits ends when its stream is closed."""
    streams = [llm.stream(PROMPTS[row][0], params(row)) for row in (0, 1, 2, 4)]
    reader = threading.Thread(target=lambda: [next(stream) for stream in streams[:3]])
    reader.start()
    reader.join()
    found = []
    thread = waiting(llm, lambda: found.append(next(streams[3], "closed")))
    streams[3].close()
    thread.join()
    thread = waiting(llm, lambda: found.append(tokens(generate(llm, [4]))))
    for stream in streams:
        stream.close()
    thread.join()
    assert found == ["closed", [expected[4]]]
    assert llm.free_slots == 3


def test_an_interrupt_leaves_nothing_under_way_that_another_call_began(llm, expected, monkeypatch):
    """Such a sequence would have its rounds alone from then on."""
    generate(llm, [0, 1], max_tokens=9)  # compiles the program for two
    streams, read, lost = [llm.stream(PROMPTS[row][0], params(row), steps=2) for row in (0, 1)], Runner.read, set()
    found = [list(next(stream).token_ids) for stream in streams][1]
    other = next(r for r in llm._runner.held.running if r.seed == 1)

    def interrupted(self, calls):
        if not lost and any(other in call.requests for call in calls):
            lost.update(other.under_way)
            raise KeyboardInterrupt
        return read(self, calls)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Runner, "read", interrupted)
        for _ in streams[0]:
            pass
    found += next(streams[1]).token_ids
    assert lost and not lost & other.under_way
    assert found + sum((chunk.token_ids for chunk in streams[1]), []) == expected[1]


def test_a_stream_that_is_dropped_wakes_nobody(llm):
    """Garbage may be collected in a thread that is about to wait, and holds the lock that this takes."""
    freed = llm._serving._freed
    stream = llm.stream(PROMPTS[0][0], params(0))
    assert next(stream)
    del stream
    assert not freed.done() and llm.free_slots == 3
    with contextlib.closing(llm.stream(PROMPTS[0][0], params(0))) as stream:
        assert next(stream)
    assert freed.done()


def test_more_threads_than_slots_wait_for_each_other(llm, expected):
    def read(row):
        return sum((chunk.token_ids for chunk in llm.stream(PROMPTS[row][0], params(row))), [])

    def ask(row):
        return generate(llm, [row])[0].token_ids

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = [[*pool.map(work, ALL)] for work in (read, ask)]
        both = [pool.submit(work, row) for row in ALL for work in (read, ask)]
        assert [future.result() for future in both[::2]] == [future.result() for future in both[1::2]] == expected
    assert found == [expected, expected]
    assert llm.free_slots == 3


def test_more_tasks_than_slots_and_threads_wait_for_each_other(llm, expected):
    async def read(row):
        return sum([chunk.token_ids async for chunk in llm.stream(PROMPTS[row][0], params(row))], [])

    async def read_all():
        asyncio.get_running_loop().set_default_executor(concurrent.futures.ThreadPoolExecutor(1))
        return await asyncio.gather(*map(read, ALL))

    assert asyncio.run(read_all()) == expected


def test_a_worker_waits_for_streams_that_it_read_last(llm, expected, monkeypatch):
    """Another of its pool may read them on. If nobody does, it does not wait for ever."""
    streams = [llm.stream(PROMPTS[row][0], params(row)) for row in (0, 1, 2)]
    with concurrent.futures.ThreadPoolExecutor(1) as worker:
        begun = [worker.submit(next, stream).result().token_ids for stream in streams]
        asked = worker.submit(generate, llm, [4])
        concurrent.futures.wait([asked], 0.3)
        for row, stream in enumerate(streams):
            assert begun[row] + sum((chunk.token_ids for chunk in stream), []) == expected[row]
        assert tokens(asked.result()) == [expected[4]]
        monkeypatch.setattr(serving, "IDLE", 0.01)
        streams = [llm.stream(PROMPTS[row][0], params(row)) for row in (0, 1, 2)]
        assert all(worker.map(next, streams))
        with pytest.raises(RuntimeError, match="all slots are held by open streams"):
            worker.submit(generate, llm, [4]).result()
    for stream in streams:
        stream.close()


def test_a_call_within_a_call_does_not_wait_for_its_slots(llm, expected):
    """In the bar of a call whose next text has the only slot."""
    errors = []

    class Bar:
        def __init__(self, **_):
            pass

        def update(self, _):
            if not errors:
                with pytest.raises(RuntimeError) as error:
                    generate(llm, [4])
                errors.append(str(error.value))

        def close(self):
            pass

    streams = [llm.stream(PROMPTS[row][0], params(row)) for row in (0, 1)]
    assert all(map(next, streams))
    found = llm.generate([PROMPTS[row][0] for row in (6, 7)], [params(row) for row in (6, 7)], use_tqdm=Bar)
    assert tokens(found) == [expected[6], expected[7]]
    assert errors == ["all slots are held by open streams; close some, or load with more than 3 as max_slots"]
    for stream in streams:
        stream.close()


def test_between_two_completions_other_threads_have_the_slots_that_are_left(llm, expected, monkeypatch):
    monkeypatch.setattr(serving, "IDLE", 0.01)
    found = []

    def other():
        try:
            found.append(tokens(generate(llm, [4])))
        except RuntimeError as error:
            found.append(str(error))

    def from_another_thread():
        thread = threading.Thread(target=other, daemon=True)
        thread.start()
        thread.join(300)  # one that waited for the iterator would wait for ever
        return found.pop()

    short, long = (PROMPTS[0][0], params(0, max_tokens=5)), (PROMPTS[5][0], params(5))
    iterator = llm.as_completed([short, long])
    assert next(iterator).token_ids == expected[0][:5]
    assert from_another_thread() == [expected[4]]
    assert [c.token_ids for c in iterator] == [expected[5]]
    iterator = llm.as_completed([short, *((PROMPTS[row][0], params(row)) for row in (1, 2, 5, 6, 7))])
    next(iterator)
    assert from_another_thread() == "all slots are held by open streams; close some, or load with more than 3 as max_slots"
    iterator.close()
    assert from_another_thread() == [expected[4]]


def test_totals_and_how_things_show_themselves(load, parrot, folders, monkeypatch):
    make_ready, took = Programs.make_ready, {}  # seconds until programs were ready for the first time

    def timed(programs, wanted):
        begun, missing = time.perf_counter(), [program for program in wanted if program not in programs.compiled]
        make_ready(programs, wanted)
        took.update(dict.fromkeys(missing, (time.perf_counter() - begun) / max(len(missing), 1)))

    monkeypatch.setattr(Programs, "make_ready", timed)
    llm = load(parrot, num_draft_tokens=K, max_slots=8)
    completions = generate(llm, [0, 1])
    stats = llm.stats
    assert (stats.requests, stats.tokens) == (2, sum(len(c.token_ids) for c in completions))
    assert stats.prompt_tokens == sum(len(c.prompt_token_ids) for c in completions)
    assert stats.steps == sum(c.stats.steps for c in completions)
    assert stats.histogram == tuple(sum(h) for h in zip(*(c.stats.histogram for c in completions), strict=True))
    assert stats.accepted == sum(c.stats.accepted for c in completions)
    assert 0 < stats.busy_seconds < stats.seconds and sum(stats.host_times) > 1 and 0 < stats.host_seconds() < stats.seconds
    assert stats.compilations == len(took) and stats.compile_seconds == pytest.approx(sum(took.values()), rel=0.05)
    assert stats.weight_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves((llm.target, llm.drafter)))
    assert stats.state_bytes > 8 * MAX_LEN * 5
    stream = llm.stream(PROMPTS[0][0], params(0))
    given = len(next(stream).token_ids) + len(next(stream).token_ids)
    stream.close()
    assert llm.stats.tokens >= stats.tokens + given and llm.stats.requests == 3
    assert repr(llm) == (f"LLM('{folders[0]}', drafter=Parrot, num_draft_tokens=4, max_slots=8, max_len={MAX_LEN}, dtype=float32, on cpu)")


def test_completions_come_as_they_are_ready_from_an_iterable_that_is_read_as_needed(llm, expected):
    read, lengths = [], [40, 3, 20, 5, 1, 12, 7, 2]

    def items():
        for row in ALL:
            read.append(row)
            yield PROMPTS[row][0], params(row, max_tokens=lengths[row])

    found, iterator = {}, llm.as_completed(items())
    assert read == []
    for completion in iterator:
        found[completion.prompt_index] = completion
        if len(found) == 1:
            assert len(read) <= 3 + 4 + 1  # the slots' and the ended one's, and a few ahead
    assert sorted(found) == list(ALL) and list(found) != list(ALL)
    assert all(found[row].token_ids == expected[row][: lengths[row]] for row in ALL)
    short = SamplingParams(max_tokens=3, temperature=0)
    assert [c.token_ids for c in llm.as_completed(["import os"], short)] == tokens(llm.generate(["import os"], short))
    with pytest.raises(TypeError, match="prompts is of type str, expected an iterable of prompts"):
        llm.as_completed("import os")
    with pytest.raises(TypeError, match="params is list, expected jaxspec.SamplingParams or None"):
        llm.as_completed(["import os"], [short])


def test_an_item_that_is_not_valid_is_named_and_costs_only_its_iterator(llm, expected):
    good, bad = (PROMPTS[0][0], params(0)), []
    done, asked = [], iter([good, bad, good])
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        done.extend(llm.as_completed(asked))
    assert tokens(done) == [expected[0]] and next(asked) == good
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        llm.check(bad)
    with pytest.raises(TypeError, match="params of prompt 0 are of type dict"):
        llm.check("x", {})
    llm.check(*good)
    assert llm.free_slots == 3

    def failing():
        yield from [good] * 4
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(llm.as_completed(failing()))
    with pytest.raises(ZeroDivisionError):
        for completion in llm.as_completed([good] * 4):
            completion.index / 0
    assert llm.free_slots == 3
    iterator = llm.as_completed([(PROMPTS[row][0], params(row, max_tokens=row + 1)) for row in (0, 1, 5, 6)])
    next(iterator)
    iterator.close()
    assert llm.free_slots == 3
    assert tokens(generate(llm, [0])) == [expected[0]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:RuntimeWarning", "ignore:.*fork.*:DeprecationWarning")
def test_a_fork_closes_nothing(llm):
    """As where it leaves its parent's `with` by an error, which the one of devices would hide."""
    child = os.fork()
    if not child:
        try:
            signal.alarm(20)
            llm.close()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert llm.generate("Hi", SamplingParams(max_tokens=1))
