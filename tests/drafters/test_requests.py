"""Requests through the engine with every kind of drafter: slots that are refilled, pages that run out, prompts that begin alike.

Whatever comes together, every request gets what it gets alone, one token at a time. Models are tiny and random, the vocabulary so small
that drafts are accepted now and then and stop ids come anywhere, the shapes such that prompts cross pages, chunks and windows.
"""

import dataclasses

import engines
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounds
import tiny
from engines import PAGE, PLAIN, K, fixed, llm_of, only
from hypothesis import given, settings
from hypothesis import strategies as st
from kinds import KINDS

from jaxspec import SamplingParams
from jaxspec.decode.accept import rule_of
from jaxspec.engine.runner import Runner
from jaxspec.engine.settings import Settings
from jaxspec.engine.trials import Comparison, Trial
from jaxspec.model.draft_tree import DraftTree
from jaxspec.model.layer_spec import FULL


@pytest.fixture(scope="module", autouse=True)
def small(unoptimised):
    with engines.few_programs():
        yield


LONGEST, MOST = 340, 55  # tokens of a prompt, and new ones


def alone(prompt, params):
    """What a request gets by itself, one token at a time."""
    llm = llm_of(None, prefix_bytes=0)
    (found,) = llm.generate([prompt], params)
    return found


def same(found, expected):
    assert (found.token_ids, found.finish_reason, found.stop_reason) == (expected.token_ids, expected.finish_reason, expected.stop_reason)
    assert (found.text, found.seed, found.prompt_token_ids) == (expected.text, expected.seed, expected.prompt_token_ids)
    assert len(found.stats.from_draft) == len(found.token_ids)
    assert (found.logprobs is None) == (expected.logprobs is None)
    for row, wanted in zip(found.logprobs or (), expected.logprobs or (), strict=True):
        assert row.keys() == wanted.keys() and all(abs(row[i].logprob - wanted[i].logprob) < 1e-4 for i in row)


def prompts(rng, count, longest):
    """Of 1 to `longest` tokens, short ones as likely as long ones. Some of them begin alike."""
    stems = [rng.integers(2, rounds.VOCAB, longest).tolist() for _ in range(2)]
    made = []
    for _ in range(count):
        size = int(np.exp(rng.uniform(0, np.log(longest + 1))))
        shared = int(rng.integers(0, size + 1)) if rng.random() < 0.6 else 0
        made.append([*stems[rng.integers(2)][:shared], *rng.integers(2, rounds.VOCAB, size - shared).tolist()])
    return made


def some_params(rng, seed):
    changes = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 0.5},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 3},
        {"temperature": 1.0, "logit_bias": {5: 2.0}, "allowed_token_ids": range(3, 30)},
    ][rng.integers(6)]
    stops = {"stop_token_ids": rng.integers(2, rounds.VOCAB, 2).tolist()} if rng.random() < 0.4 else {}
    if rng.random() < 0.2:
        stops["stop"] = tiny.Letters().decode(rng.integers(3, rounds.VOCAB, 1))
    ends = {"ignore_eos": bool(rng.random() < 0.7), "max_tokens": int(rng.integers(3, MOST + 1)) if rng.random() < 0.5 else MOST}
    return SamplingParams(seed=seed, logprobs=[None, 2][rng.integers(2)], **{**changes, **stops, **ends})


def job(seed, count):
    """Prompts, params and few pages: what one sequence may need, and at most half as many more. Short prompts begin together and outgrow
    them."""
    rng = np.random.default_rng(seed)
    asked, params = prompts(rng, count, (10, 10, 90, LONGEST)[rng.integers(4)]), [some_params(rng, i) for i in range(count)]
    least = max(-(-(len(prompt) + p.max_tokens + K) // PAGE) for prompt, p in zip(asked, params, strict=True))
    return rng, asked, params, int(rng.integers(least, least + least // 2 + 1))


def run(kind, seed, count=9, **changes):
    """One random job, in one of the ways of asking for it. changes: of the settings. Returns how many sequences gave way."""
    rng, asked, params, pages = job(seed, count)
    llm = llm_of(kind, **changes)
    before = llm.stats
    with only(llm, pages=pages, prefixes=rng.random() < 0.7):
        match rng.integers(3):
            case 0:
                found = llm.generate(asked, params)
            case 1:
                found = sorted(llm.as_completed(zip(asked, params, strict=True)), key=lambda c: c.prompt_index)
            case _:
                streams = [llm.stream(asked[i], params[i], steps=2) for i in (0, 1)]
                begun = [next(stream) for stream in streams]
                found = llm.generate(asked[2:], params[2:])
                chunks = [[first, *stream] for first, stream in zip(begun, streams, strict=True)]
                assert ["".join(c.text for c in some) for some in chunks] == [some[-1].completion.text for some in chunks]
                found = [*(some[-1].completion for some in chunks), *found]
    for prompt, p, completion in zip(asked, params, found, strict=True):
        same(completion, alone(prompt, p))
    return (llm.stats - before).preemptions


@pytest.mark.slow  # test_events.py has sequences that give way
@pytest.mark.parametrize("accept", ["block", "coupled"])
def test_a_sequence_that_gave_way_goes_on_where_it_was(accept):
    """With whatever rule, down to the rounds it took: it keeps its tokens and anchor, its flags, log-probabilities and noise."""
    asked = fixed(5, 17)
    params = [SamplingParams(seed=i, max_tokens=45, logprobs=1 if i == 4 else None, **PLAIN) for i in range(5)]
    llm = llm_of("modules", accept=rule_of(accept))
    with only(llm):
        before = llm.stats
        expected = llm.generate(asked, params)
        assert (llm.stats - before).preemptions == 0
    with only(llm, pages=9):
        found = llm.generate(asked, params)
        assert (llm.stats - before).preemptions >= 2
    assert found[:4] == expected[:4] and found[4].stats == expected[4].stats and len(found[4].logprobs) == 45
    same(found[4], expected[4])
    assert sum(c.stats.accepted for c in found) > 10


@pytest.mark.slow  # tests/engine/test_calls.py has such prompts
def test_what_prompts_begin_with_is_computed_once():
    llm = llm_of("modules")
    short = SamplingParams(seed=3, max_tokens=9, **PLAIN)
    with only(llm):
        samples = llm.generate(fixed(1, 43), dataclasses.replace(short, n=6))
        assert [c.num_cached_tokens for c in samples] == [0, 42, 42, 42, 42, 42]
        for i, c in enumerate(samples):
            same(c, alone(fixed(1, 43)[0], dataclasses.replace(short, seed=3 + i)))
    with only(llm):
        before, asked = llm.stats, fixed(7, 50, shared=37)
        found = llm.generate(asked, short)
        assert [c.num_cached_tokens for c in found] == [0, 36, 36, 36, 36, 36, 36]
        assert (llm.stats - before).cached_tokens == 6 * 36
        for prompt, c in zip(asked, found, strict=True):
            same(c, alone(prompt, short))
        # A prompt seen before is found out to be shared when it comes again, and is kept from then on.
        assert [llm.generate(asked[0], short)[0].num_cached_tokens for _ in range(3)] == [36, 49, 49]
    with only(llm):
        assert all(c.num_cached_tokens == 0 for c in llm.generate(fixed(4, 50, shared=6), short))  # less than a page is not kept


@pytest.mark.slow  # random jobs below have such sequences
def test_pages_that_running_sequences_share_are_given_up_last():
    llm = llm_of("modules")
    with only(llm, pages=14):
        found = llm.generate(fixed(6, 50, shared=41), SamplingParams(seed=1, max_tokens=20, **PLAIN))
        assert [c.num_cached_tokens for c in found] == [0, 40, 40, 40, 40, 40]
    for prompt, c in zip(fixed(6, 50, shared=41), found, strict=True):
        same(c, alone(prompt, SamplingParams(seed=1, max_tokens=20, **PLAIN)))


def test_what_other_weights_have_computed_serves_no_prompt():
    """The drafter has K and V of its own. Those of other weights would cost acceptance as long as a prompt is kept."""
    llm, short = llm_of("modules"), SamplingParams(seed=3, max_tokens=3, **PLAIN)
    drafting, mine = llm._runner.drafting, llm.drafter

    def cached():
        return [c.num_cached_tokens for c in llm.generate(fixed(2, 50, shared=37), short)]

    with only(llm):
        assert cached() == [0, 36]
        drafting.use(mine)
        assert min(cached()) >= 36
        trial = Trial({"mine": mine, "new": jax.tree.map(jnp.copy, mine)}, Comparison("new", "mine"), apart=True, turn=10**6)
        drafting.begin_trial(trial)
        assert cached() == [0, 36]
        trial.comparison.verdict = "mine"
        drafting.settle()
        assert drafting.drafter is mine and min(cached()) >= 36  # of those from before the trial
        drafting.use(trial.variants["new"])
        assert cached() == [0, 36]
        drafting.use(mine)


def test_a_long_prompt_lets_others_decode_between_its_chunks(monkeypatch):
    calls = []
    for name in ("prefill", "decode"):
        real = getattr(Runner, name)

        def noted(self, requests, *args, name=name, real=real, **kwargs):
            calls.append((name, len(requests)))
            return real(self, requests, *args, **kwargs)

        monkeypatch.setattr(Runner, name, noted)
    llm = llm_of("modules")
    with only(llm):
        iterator = llm.as_completed(
            [(fixed(1, 3)[0], SamplingParams(seed=0, max_tokens=60, **PLAIN)), (fixed(1, 70)[0], SamplingParams(max_tokens=2, **PLAIN))]
        )
        assert sum(1 for _ in iterator) == 2
    first = calls.index(("decode", 1))
    last = max(i for i, call in enumerate(calls) if call[0] == "prefill")
    between = [name for name, _ in calls[first : last + 1]]
    assert between == ["decode", "prefill"] * (len(between) // 2) and len(between) >= 6


@pytest.mark.slow  # tests/decode/test_decode_loop.py has such logits
def test_logits_that_are_no_numbers_fail_their_request_alone(monkeypatch):
    """The values of one request become NaN behind its 5th token."""
    llm, real = llm_of("modules"), Runner.decode

    def poisoning(self, requests, *args, **kwargs):
        for request in requests:
            if request.seed == 2 and len(request.output) >= 5:
                cache = self.programs.state.cache
                page, layer, layers = int(cache.tables[FULL][request.slot, 0]), cache.kinds.index(FULL), list(cache.layers)
                layers[layer] = dataclasses.replace(layers[layer], v=layers[layer].v.at[page].set(jnp.nan))
                poisoned = dataclasses.replace(cache, layers=tuple(layers))
                self.programs.state = dataclasses.replace(self.programs.state, cache=poisoned)
        return real(self, requests, 1, *args[1:], **kwargs)

    monkeypatch.setattr(Runner, "decode", poisoning)
    asked, params = fixed(5, 20), [SamplingParams(seed=i, max_tokens=30, **PLAIN) for i in range(5)]
    with only(llm):
        found = llm.generate(asked, params)
        monkeypatch.undo()
        again = llm.generate(asked, params)
    for i, (prompt, c) in enumerate(zip(asked, found, strict=True)):
        expected = alone(prompt, params[i])
        same(again[i], expected)  # in slots and pages that the one that failed had
        if i != 2:
            same(c, expected)
            assert c.error is None
        else:
            assert c.finish_reason == "error" and c.stop_reason is None and 5 <= len(c.token_ids) < 30
            assert c.token_ids == expected.token_ids[: len(c.token_ids)]
            place = f"position {20 + len(c.token_ids)}, of new token {len(c.token_ids) + 1}, are not finite; it failed in step "
            assert place in c.error and c.text == expected.text[: len(c.text)]


def test_fewer_pages_than_one_sequence_takes_are_refused():
    with pytest.raises(ValueError, match="kv_pages is 8; one sequence of max_len 72 takes 9 pages of 8 tokens: expected at least as many"):
        Settings(num_draft_tokens=0, max_slots=2, max_len=72, page_size=PAGE, kv_pages=8)


def test_every_request_gets_what_it_gets_alone():
    gave_way = []

    @settings(max_examples=5)
    @given(seed=st.integers(0, 2**32 - 1))
    def check(seed):
        gave_way.append(run("modules", seed))

    check()
    assert sum(gave_way) > 5


@pytest.mark.slow
def test_every_request_gets_what_it_gets_alone_with_trees():
    gave_way = []

    @settings(max_examples=25)
    @given(seed=st.integers(0, 2**32 - 1))
    def check(seed):
        gave_way.append(run("assistant", seed, tree=DraftTree.default(9)))

    check()
    assert sum(gave_way) > 25


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(KINDS))
def test_every_request_gets_what_it_gets_alone_more(kind):
    gave_way = []

    @settings(max_examples=25)
    @given(seed=st.integers(0, 2**32 - 1))
    def check(seed):
        gave_way.append(run(kind, seed, count=30))

    check()
    assert sum(gave_way) > 25


@pytest.mark.slow
@pytest.mark.parametrize("accept", ["standard", "block"])
@pytest.mark.parametrize("kind", ["assistant", "eagle3"])
def test_a_draw_is_the_same_whoever_gives_way(kind, accept):
    """The rules whose texts depend on the drafter: with few pages and shared beginnings as with neither."""
    llm = llm_of(kind, accept=rule_of(accept))
    before = llm.stats

    @settings(max_examples=10)
    @given(seed=st.integers(0, 2**32 - 1))
    def check(seed):
        _, asked, params, pages = job(seed, 20)
        with only(llm, prefixes=False):
            expected = llm.generate(asked, params)
        with only(llm, pages=pages):
            found = llm.generate(asked, params)
        for one, other in zip(found, expected, strict=True):
            same(one, other)
            assert one.stats == other.stats

    check()
    assert (llm.stats - before).preemptions > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["assistant", "draft model"])
def test_shared_beginnings_over_a_float8_cache(kind):
    llm = llm_of(kind, kv_dtype=jnp.float8_e4m3fn)
    params = [SamplingParams(seed=i, max_tokens=15, **PLAIN) for i in range(6)]
    with only(llm, prefixes=False):
        expected = llm.generate(fixed(6, 50, shared=37), params)
    with only(llm, pages=12):
        found = llm.generate(fixed(6, 50, shared=37), params)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert found[1].num_cached_tokens == 36 and expected[1].num_cached_tokens == 0
