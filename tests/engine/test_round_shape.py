"""The choice of rounds' shapes on made-up costs and acceptance, and of an LLM."""

import itertools
import types

import numpy as np
import pytest
from quick import few_programs

import jaxspec
from jaxspec.engine.buckets import Buckets
from jaxspec.engine.round_shape import HOPED_GAIN, Adaptive, RoundShape, round_shapes
from jaxspec.engine.settings import Settings
from jaxspec.engine.warmup import measured

CHEAP = {0: 1.0, 2: 1.1, 4: 1.2}  # a round's cost by K, where the target's weights are all that counts
DEAR = {0: 1.0, 2: 2.4, 4: 3.9}  # where every row costs


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile(unoptimised):
    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        yield


def costs(**sizes):
    return {(int(name[1:]), RoundShape(k)): cost for name, by_k in sizes.items() for k, cost in by_k.items()}


def adaptive(**sizes):
    return Adaptive(costs(**sizes))


def see(chooser, rng, shares, shape, count=64, size=1):
    """Rounds of which draft i is accepted after all before it with shares[i]; each sequence verifies as many, in all as many as there are
    rows."""
    k = shape.num_draft_tokens
    accepted = np.cumprod(rng.random((count, k)) < np.asarray(shares)[:k], axis=1).sum(1) if k else np.zeros(count, int)
    each = k if shape.rows is None else (shape.rows // size - 1)
    verified = np.full(count, each)
    chooser.see(np.minimum(accepted, verified), verified, size, shape, size)


def run(chooser, shares, size, calls, rng):
    """The K of each call."""
    return [shape.num_draft_tokens for shape in run_shapes(chooser, shares, size, calls, rng)]


def run_shapes(chooser, shares, size, calls, rng):
    """The shape of each call."""
    chosen = []
    for _ in range(calls):
        chosen.append(chooser.choose(size))
        see(chooser, rng, shares, chosen[-1], size=size)
    return chosen


def best(shares, by_k):
    """By definition: tokens a round over its cost."""
    return max(by_k, key=lambda k: (1 + sum(np.cumprod(shares)[:k])) / by_k[k])


@pytest.mark.parametrize("by_k", [CHEAP, DEAR])
@pytest.mark.parametrize("shares", [(0.9,) * 4, (0.7, 0.5, 0.2, 0.1), (0.3,) * 4, (0.05,) * 4, (0.9, 0.9, 0.1, 0.1)])
def test_it_settles_where_tokens_a_second_are_most(shares, by_k):
    """The last 100 calls, of which a few see whether another K has become better, are as fast as the best K but for 2 %."""
    chooser = adaptive(b1=by_k)
    chosen = run(chooser, shares, 1, 150, np.random.default_rng(0))
    speed = {k: (1 + sum(np.cumprod(shares)[:k])) / by_k[k] for k in by_k}
    assert np.mean([speed[k] for k in chosen[50:]]) >= 0.98 * max(speed.values())


def test_the_first_call_guesses_as_many_as_the_drafter_says():
    assert adaptive(b1=CHEAP).choose(1) == RoundShape(4)


def test_rates_are_those_of_the_rounds_that_tried():
    """Rounds of 2 drafts and of 4 together: each share is of all rounds that got so far."""
    chooser = adaptive(b1=CHEAP)
    count, rng, shares = 600, np.random.default_rng(1), (0.8, 0.6, 0.7, 0.5)
    for k in (2, 4, 0) * 3:
        see(chooser, rng, shares, RoundShape(k), count)
    np.testing.assert_allclose(chooser.rates, np.cumprod(shares), atol=0.05)


def test_batches_have_their_own_choice():
    """What acceptance makes of one batch size holds for all, each with its own costs."""
    chooser = adaptive(b1=CHEAP, b8=DEAR)
    run(chooser, (0.6,) * 4, 1, 30, np.random.default_rng(2))
    found = chooser.choose(1).num_draft_tokens, chooser.choose(8).num_draft_tokens
    assert found == (4, 0) == (best((0.6,) * 4, CHEAP), best((0.6,) * 4, DEAR))


def test_no_change_for_little():
    """A K that promises 1 % more is not taken, one that promises 3 % more is."""
    for gain, chosen in ((1.01, 4), (1.03, 2)):
        chooser = adaptive(b1=CHEAP)
        rates = chooser.rates
        even = CHEAP[4] * (1 + sum(rates[:2])) / (1 + sum(rates))
        chooser = adaptive(b1={0: 100.0, 2: even / gain, 4: CHEAP[4]})
        assert chooser.choose(1) == RoundShape(chosen)


def test_it_wakes_up_when_the_text_changes():
    """After a thousand calls at which drafts were hopeless, and K = 0 at most of them, drafts become good."""
    chooser, rng = adaptive(b1=CHEAP), np.random.default_rng(3)
    asleep = run(chooser, (0.02,) * 4, 1, 1000, rng)
    assert np.mean(np.asarray(asleep[20:]) == 0) > 0.85 and set(asleep[100:]) > {0}
    awake = run(chooser, (0.9,) * 4, 1, 200, rng)
    assert awake.index(4) < 150 and set(awake[-20:]) == {4}


def test_it_knows_nothing_of_rounds_without_drafts():
    chooser = adaptive(b1={0: 1.0, 3: 1.1})
    before = chooser.rates
    see(chooser, np.random.default_rng(0), (), RoundShape(0), 500)
    assert chooser.rates == before and chooser.choose(1) == RoundShape(3)


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize(("k", "chosen"), [(0, (0,)), (1, (0, 1)), (2, (0, 1, 2)), (4, (0, 2, 4)), (7, (0, 4, 7)), (15, (0, 8, 15))])
def test_few_sequences_choose_a_number_of_drafts(size, k, chosen):
    assert round_shapes(size, k) == tuple(RoundShape(count) for count in chosen)


@pytest.mark.parametrize(("k", "each"), [(3, (3,)), (4, (3,)), (7, (3, 5)), (15, (3, 5, 8))])
def test_many_sequences_choose_rows(k, each):
    shapes = round_shapes(64, k)
    assert [shape.num_draft_tokens for shape in shapes if shape.rows is None] == [0, *(n - 1 for n in each), k]
    shared = [shape for shape in shapes if shape.rows is not None]
    assert [shape.rows for shape in shared] == [64 * n for n in each]
    assert all(n - 1 < shape.num_draft_tokens <= k for n, shape in zip(each, shared, strict=True))


# Milliseconds of a round of 32 sequences of the 31B with DFlash on an H200, with a context of 512: of blocks by K, and of shared rows.
BLOCKS = {0: 19.52, 2: 24.85, 4: 27.73, 7: 36.22, 15: 65.72}
SHARED = {96: 25.46, 160: 29.35, 256: 41.32}


def of_31b(shape):
    return BLOCKS[shape.num_draft_tokens] if shape.rows is None else SHARED[shape.rows]


@pytest.mark.parametrize("share", [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.95])
def test_a_block_drafter_is_as_fast_as_with_the_best_number_of_drafts(share):
    """32 sequences alike, on the 31B with K = 15: whatever is accepted, the choice is as fast as the best of four numbers but for 3 %, and
    at 0.7 it is more than 1.2 times as fast as K = 15."""
    chooser = Adaptive({(32, shape): of_31b(shape) for shape in round_shapes(32, 15)})
    chosen = run_shapes(chooser, (share,) * 15, 32, 150, np.random.default_rng(0))[50:]

    def speed(shape):
        each = shape.num_draft_tokens + 1 if shape.rows is None else shape.rows // 32
        return sum(share**i for i in range(each)) / of_31b(shape)

    found = np.mean([speed(shape) for shape in chosen])
    assert found >= 0.97 * max(speed(RoundShape(k)) for k in (2, 4, 7, 15))
    assert share != 0.7 or found >= 1.2 * speed(RoundShape(15))


def test_what_a_shape_gave_counts_beside_what_was_promised():
    """Rounds whose rows go to the right drafts give more than rates of all drafts promise. A shape that turns out so is kept."""
    few, all_of_them = RoundShape(4, 64), RoundShape(4)
    table = {(32, few): 1.0, (32, all_of_them): 1.35}
    rng, alike, sorted_out = np.random.default_rng(0), Adaptive(table), Adaptive(table)
    for _ in range(40):
        for chooser in (alike, sorted_out):
            see(chooser, np.random.default_rng(rng.integers(99)), (0.8,) * 4, all_of_them, size=32)
        see(alike, np.random.default_rng(rng.integers(99)), (0.8,) * 4, few, size=32)
        # Half of the sequences get two rows more, and accept them all; the others get none.
        verified = np.where(np.arange(64) % 2, 2, 0)
        sorted_out.see(verified, verified, 32, few, 32)
    assert alike.speed(32, few) == pytest.approx(1 + 0.8, rel=0.05)
    assert sorted_out.speed(32, few) == pytest.approx(2, rel=0.05)
    assert sorted_out.speed(32, few) > 1.04 * (1 + sorted_out.rates[0])


def test_fewer_sequences_share_the_rows():
    shape = RoundShape(4, 64)
    chooser = Adaptive({(32, shape): 1.0, (32, RoundShape(4)): 1.0})
    assert chooser.speed(32, shape, 32) == pytest.approx(HOPED_GAIN * (1 + chooser.rates[0]))
    assert chooser.speed(32, shape, 16) == pytest.approx(HOPED_GAIN * (1 + sum(chooser.rates[:3])))
    assert chooser.speed(32, shape, 3) == pytest.approx(HOPED_GAIN * chooser.speed(32, RoundShape(4), 3))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({(1, RoundShape(0)): 1.0, (1, RoundShape(2)): 0.0}, "a round of 1 sequences with .*2.* costs 0.0; expected a number of seconds"),
        ({(1, RoundShape(0)): 1.0, (1, RoundShape(2)): float("nan")}, "costs nan; expected a number of seconds above 0"),
        ({(8, RoundShape(2, 16)): 1.0}, "no round of 8 sequences with rows=None has a cost"),
    ],
)
def test_costs_must_be_known(table, message):
    with pytest.raises(ValueError, match=message):
        Adaptive(table)


@pytest.mark.parametrize(("max_len", "found"), [(4096, {(1, 0): 1.0, (1, 2): 2.0, (1, 3): 2.5}), (40, None)])
def test_a_round_costs_what_it_adds_to_a_call(monkeypatch, max_len, found):
    """Not what a call takes beside its rounds, nor what the first ones take; None where a sequence ends before enough were timed."""
    now, calls = [0.0], []
    request = types.SimpleNamespace(rounds=0, ready=True)

    def decode(active, rounds, *, needs, shape):
        now[0] += 7.0 + 100.0 * (len(calls) < 2) + rounds * (1.0 + 0.5 * shape.num_draft_tokens)
        request.rounds += rounds
        return calls.append(rounds)

    runner = types.SimpleNamespace(
        settings=Settings(num_draft_tokens=3, max_slots=1, max_len=max_len),
        free_slots=1,
        drafting=types.SimpleNamespace(watched=0),
        choice=types.SimpleNamespace(chain_sizes=Buckets(1, max_len).decode),
        admit=lambda active: None,
        end=lambda active: None,
        decode=decode,
        read=lambda calls: False,
    )
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    costs = measured(runner, None, lambda count: [request] * count)
    assert (costs and {(size, shape.num_draft_tokens): cost for (size, shape), cost in costs.items()}) == (found and pytest.approx(found))


def params(seed):
    return jaxspec.SamplingParams(max_tokens=40, temperature=float(seed % 2), seed=seed, ignore_eos=True, top_k=0, top_p=1.0)


@pytest.mark.slow  # above is how it chooses
def test_an_llm_chooses_once_it_is_warm(folders, monkeypatch):
    """Its tokens are those of a fixed K, its counts those of the rounds as they were, and nothing is compiled on the way."""
    llm = jaxspec.load(*folders, max_slots=1, max_len=128, progress=False)
    prompts, each = [[5, 6, 7], [8, 9], [10]], [params(0), params(1), params(2)]
    fixed = llm.generate(prompts, each)  # K = 3, as the drafter says: nothing is known of costs yet
    assert {out.stats.drafted for out in fixed} == {3 * out.stats.steps for out in fixed}
    choice, drafting = llm._runner.choice, llm._runner.drafting
    drafting.watching = True
    llm.warmup(each[1])
    made = llm.stats.compilations
    assert not drafting.watched.any()
    assert set(choice.adaptive.costs) == {(1, RoundShape(k)) for k in (0, 2, 3)} and all(c > 0 for c in choice.adaptive.costs.values())
    assert llm.stats.steps == sum(out.stats.steps for out in fixed)  # what was timed counts nowhere

    turns, begun = itertools.cycle(map(RoundShape, [3, 0, 2])), llm.stats
    monkeypatch.setattr(Adaptive, "choose", lambda self, size, sequences, among: next(turns))
    monkeypatch.setattr(Settings, "steps_for", lambda self, needs, steps, unread=1: min(steps, 3 // unread))
    outs = llm.generate(prompts, each)
    assert [out.token_ids for out in outs] == [out.token_ids for out in fixed] and llm.stats.compilations == made
    part = llm.stats - begun
    assert part.rounds_by_draft[0] < part.steps and part.rounds_by_draft[2] < part.rounds_by_draft[0]
    assert part.drafted == sum(part.rounds_by_draft) == sum(out.stats.drafted for out in outs)
    assert part.stepped_tokens == part.steps + part.accepted == 3 * 39
    monkeypatch.undo()

    for _ in range(3):  # of a drafter that guesses nothing right
        assert [out.token_ids for out in llm.generate(prompts, each)] == [out.token_ids for out in fixed]
    assert choice.adaptive.rates[0] < 0.5


@pytest.mark.parametrize(
    ("settings", "adaptive"),
    [
        ({"num_draft_tokens": 3}, False),
        ({"num_draft_tokens": 3, "adaptive_verification": True}, True),
        ({"adaptive_verification": False}, False),
        ({"accept": "standard"}, False),
        ({}, True),
    ],
)
def test_a_number_that_was_asked_for_stays(folders, settings, adaptive):
    llm = jaxspec.load(*folders, max_slots=1, max_len=64, progress=False, **settings)
    assert llm.adaptive == adaptive


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"accept": "block"}, ValueError, "adaptive_verification is True and accept is 'block', with which the text would depend on it"),
        ({"num_draft_tokens": 0}, ValueError, "adaptive_verification is True and no tokens are drafted; expected a drafter"),
        ({"adaptive_verification": "yes"}, TypeError, "adaptive_verification is 'yes', expected True, False or None"),
    ],
)
def test_what_cannot_adapt_is_refused(folders, settings, error, message):
    with pytest.raises(error, match=message):
        jaxspec.load(*folders, **{"adaptive_verification": True, "progress": False, **settings})


@pytest.mark.slow  # tests/decode/test_verification.py has such rounds
def test_rounds_of_few_rows_change_no_text(folders, monkeypatch):
    """Five requests in three slots, which have too few pages for all three, with rounds of ever other shapes: the texts are those without
    drafts, and what was verified counts, of sequences that were preempted too."""
    prompts, each = [[*range(5 + i, 45 + i)] for i in range(5)], [params(i) for i in range(5)]
    sizes = {"max_len": 96, "progress": False, "max_slots": 3}
    with jaxspec.load(folders[0], None, **sizes) as alone:
        wanted = [out.token_ids for out in alone.generate(prompts, each)]
    llm = jaxspec.load(*folders, num_draft_tokens=3, adaptive_verification=True, kv_pages=5, **sizes)
    shapes = [RoundShape(3, 3), RoundShape(3, 8), RoundShape(3)]
    turns, seen = itertools.cycle(shapes), set()

    def choose(self, size, sequences, among):
        seen.add(chosen := next(turns))
        return chosen

    monkeypatch.setattr(Adaptive, "choose", choose)
    monkeypatch.setattr(Settings, "steps_for", lambda self, needs, steps, unread=1: min(steps, 3 // unread))
    llm._runner.choice.adaptive = Adaptive({(3, shape): 1.0 for shape in shapes})
    outs = llm.generate(prompts, each)
    assert [out.token_ids for out in outs] == wanted and seen == set(shapes)
    assert llm.stats.preemptions > 0
    for out in outs:
        assert out.stats.drafted == sum(out.stats.tried) < 3 * out.stats.steps
        assert list(out.stats.tried) == sorted(out.stats.tried, reverse=True) and out.stats.accepted <= out.stats.drafted
