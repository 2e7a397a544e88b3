"""N-gram lookup against a search in plain Python, in rounds too."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rounds
import tiny
from quick import few_programs

import jaxspec
from jaxspec import decode
from jaxspec.decode import Round
from jaxspec.drafters import ngram
from jaxspec.drafters.base import Observed, Target
from jaxspec.drafters.ngram import NGram
from jaxspec.engine.round_shape import Adaptive, RoundShape
from jaxspec.sampling.choice import Sampling
from jaxspec.text import load_tokenizer
from jaxspec.vllm.v1.metrics.reader import counters

pytestmark = pytest.mark.usefixtures("unoptimised")


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def lookup(texts, length, count, longest, shortest):
    found, matched = ngram.lookup(texts, length, count, longest)
    return jnp.where(matched >= shortest, found, -1)


def searched(text, count, longest, shortest):
    """The longest suffix that occurs before, its latest occurrence, and what followed: on and on where that is short."""
    for n in range(min(longest, len(text) - 1), shortest - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[len(text) - n :]:
                after = text[start + n :]
                return [after[i % len(after)] for i in range(count)]
    return [-1] * count


@pytest.mark.parametrize(("longest", "shortest"), [(5, 1), (3, 2), (1, 1), (40, 3)])
def test_lookup_finds_what_a_search_finds(longest, shortest):
    """Every length of texts over 2, 3 and 30 tokens; what lies past a length is never seen."""
    rng = np.random.default_rng(0)
    texts = np.concatenate([rng.integers(0, n, (40, 24)) for n in (2, 3, 30)]).astype(np.int32)
    length = np.resize(np.arange(1, 25, dtype=np.int32), len(texts))
    found = np.asarray(lookup(texts, length, 7, longest, shortest))
    wanted = [searched(text[:n].tolist(), 7, longest, shortest) for text, n in zip(texts, length, strict=True)]
    assert {-1} < {row[0] for row in wanted}
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("text", "guess"),
    [
        ([7, 1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [9, 2, 3, 8]),  # three tokens win over a later match of two
        ([1, 2, 5, 1, 2, 6, 1, 2], [6, 1, 2, 6]),  # of two that match two, the later; then round again
        ([4, 4], [4, 4, 4, 4]),
        ([1, 2, 3], [-1, -1, -1, -1]),
        ([1], [-1, -1, -1, -1]),
    ],
)
def test_which_occurrence_wins(text, guess):
    padded = np.pad(np.asarray([text], np.int32), ((0, 0), (0, 12 - len(text))), constant_values=1)
    assert lookup(padded, np.asarray([len(text)], np.int32), 4, 5, 1)[0].tolist() == guess


def test_only_what_is_committed_is_remembered():
    drafter = NGram()
    state = jax.tree.map(lambda x: x - 1, drafter.init(3, 9, 4))
    ids = np.arange(10, 22, dtype=np.int32).reshape(3, 4)
    at = np.asarray([0, 2, 5], np.int32)[:, None] + np.arange(4, dtype=np.int32)
    rows = {"taps": (), "hidden": jnp.zeros((3, 1)), "anchor": np.asarray([91, 92, 93], np.int32), "model": rounds.target()}
    slots, committed = np.asarray([2, 0, 1], np.int32), np.asarray([2, 0, 4], np.int32)
    observed = Observed(slots=slots, ids=ids, positions=at, committed=committed, **rows)
    state = drafter.observe(state, observed)
    wanted = np.full((3, 9), -1)
    wanted[2, :3] = [10, 11, 91]
    wanted[1, 5:9] = [18, 19, 20, 21]  # its anchor lies past the end
    np.testing.assert_array_equal(state.tokens, wanted)
    nobody = np.asarray([3, 4, 7], np.int32)
    after = drafter.observe(state, Observed(slots=nobody, ids=ids, positions=at, committed=np.full(3, 4, np.int32), **rows))
    np.testing.assert_array_equal(after.tokens, wanted)


def test_the_loop_looks_up_what_a_search_finds():
    """After prompts in chunks of 5 and after each of three rounds; every guess that is found comes from the known tokens alone."""
    drafter = NGram(windows=0)
    state = rounds.started(drafter)
    for accepted in ([3, 0, 1, 2, 0], [0, 3, 2, 0, 1], [2, 1, 0, 3, 3]):
        state = rounds.spec_step(rounds.target(), rounds.told(drafter, state, accepted, 3), state, rounds.SLOT_IDS, round=Round(3))
        found = np.asarray(rounds.drafts(rounds.target(), drafter, state, k=7).tokens)
        for row, (text, n) in enumerate(zip(rounds.tokens(state), rounds.lengths(state), strict=True)):
            assert found[row].tolist() == searched(text[:n].tolist(), 7, 5, 1)
    np.testing.assert_array_equal(rounds.lengths(state), rounds.LENGTHS + 1 + [8, 7, 6, 8, 7])


def test_a_repetitive_prompt_is_guessed(monkeypatch):
    few_programs(monkeypatch)
    llm = jaxspec.load("pocket", drafter="ngram", num_draft_tokens=3, max_slots=1, max_len=64, progress=False)
    assert llm.drafter == NGram()
    out = llm.generate(["| 1 | 2 |\n" * 5], jaxspec.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))[0]
    assert out.stats.acceptance_length > 1.3


def found_by_round(completion, k):
    """How many tokens a search guesses in each round of a completion, by its tokens and by which of them were drafts."""
    prompt, output, flags = completion.prompt_token_ids, completion.token_ids, completion.stats.from_draft
    starts = [at for at in range(1, len(output)) if not flags[at - 1] or at == 1]
    guesses = [searched([*prompt, *output[:at]], k, 5, 1) for at in starts]
    return [0 if guess[0] < 0 else k for guess in guesses]


def check_counts(completions, k):
    """That what was drafted is what a search finds. Returns (rounds, rounds with a guess, guesses)."""
    counts = [(out.stats, found_by_round(out, k)) for out in completions]
    for stats, found in counts:
        guessed = sum(map(bool, found))
        assert (stats.steps, stats.drafted, stats.tried) == (len(found), sum(found), (guessed,) * k)
        assert stats.accepted <= stats.drafted
        assert not guessed or stats.acceptance_rates[0] == pytest.approx((stats.steps - stats.histogram[0]) / guessed)
    return tuple(sum(values) for values in zip(*((len(found), sum(map(bool, found)), sum(found)) for _, found in counts), strict=True))


@pytest.fixture(scope="module")
def looking():
    """An LLM with lookup in the sequence alone, and three slots with too few pages for three long texts."""
    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        sizes = {"num_draft_tokens": 3, "max_slots": 3, "max_len": 128, "kv_pages": 5, "progress": False}
        with jaxspec.load("pocket", drafter=NGram(windows=0), **sizes) as llm:
            yield llm


PROMPTS = ["def __repr__(self):\n    return", "| 1 | 2 |\n" * 4, "class Stack:\n    def __init__(self", "import", "    def test_"]


@pytest.mark.slow  # below sequences that are preempted keep their counts
def test_rounds_that_find_nothing_draft_nothing(looking):
    """A batch of requests of all kinds in few slots: greedy and sampled, of different lengths, with stop strings and stop tokens that end
    them within a block."""
    before, ask = looking.stats, functools.partial(jaxspec.SamplingParams, max_tokens=48, ignore_eos=True)
    whole = looking.generate(PROMPTS, [ask(temperature=0.7 * (i % 2), seed=i) for i in range(5)])
    ends = [ask(temperature=0.7 * (i % 2), seed=i, max_tokens=48 - 7 * i) for i in range(5)]
    drafts = [i for i, flag in enumerate(whole[1].stats.from_draft) if flag]
    ends[1] = ask(temperature=0.7, seed=1, stop_token_ids=[whole[1].token_ids[drafts[-1]]])
    ends[2] = ask(temperature=0.0, stop=[whole[2].text[40:43]])
    cut = looking.generate(PROMPTS, ends)
    assert [out.finish_reason for out in cut] == ["length", "stop", "stop", "length", "length"]
    assert all(out.token_ids == long.token_ids[: len(out.token_ids)] for out, long in zip(cut, whole, strict=True))
    rounds, guessed, guesses = check_counts([*whole, *cut], 3)
    assert 0 < guessed < rounds
    done = looking.stats - before
    assert (done.steps, done.drafted, done.rounds_by_draft) == (rounds, guesses, (guessed,) * 3)
    named = {metric.name: metric for metric in counters(done, 3)}
    assert named["vllm:spec_decode_num_drafts"].value == guessed and named["vllm:spec_decode_num_draft_tokens"].value == guesses


@pytest.mark.slow  # below the counts of sequences that give way
def test_streams_count_what_was_found_too(looking):
    asked = jaxspec.SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    before, (whole,) = looking.stats, looking.generate([PROMPTS[1]], asked)
    last = list(looking.stream(PROMPTS[1], asked, steps=1))[-1].completion
    assert (last.token_ids, last.stats.drafted) == (whole.token_ids, whole.stats.drafted)
    check_counts([last], 3)
    stream = looking.stream(PROMPTS[1], asked, steps=1)
    some = [next(stream) for _ in range(9)]
    stream.close()
    rest = (looking.stats - before).drafted - 2 * whole.stats.drafted
    known = len(sum((chunk.token_ids for chunk in some), []))
    flags = whole.stats.from_draft[:known]
    begun = dataclasses.replace(whole, token_ids=whole.token_ids[:known], stats=dataclasses.replace(whole.stats, from_draft=flags))
    assert rest == sum(found_by_round(begun, 3)) < 3 * 8


@pytest.mark.slow  # test_events.py has sequences that give way
def test_sequences_that_are_preempted_keep_their_counts(looking):
    asked = jaxspec.SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    before, outs = looking.stats, looking.generate(PROMPTS[::2], asked)
    assert (looking.stats - before).preemptions > 0
    check_counts(outs, 3)


@pytest.mark.slow  # it takes a program for each shape
def test_shapes_are_chosen_by_rows_and_not_by_guesses(looking, monkeypatch):
    """A round that finds nothing costs as much as another, so that it counts as one whose drafts were rejected."""
    seen = []
    monkeypatch.setattr(Adaptive, "see", lambda self, accepted, verified, *more: seen.extend(verified.tolist()))
    monkeypatch.setattr(Adaptive, "choose", lambda self, size, *more: RoundShape(3))
    monkeypatch.setattr(looking._runner.choice, "adaptive", Adaptive({(3, RoundShape(3)): 1.0}))
    outs = looking.generate(PROMPTS[:3], jaxspec.SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True))
    assert set(seen) == {3} and check_counts(outs, 3)[1] < len(seen)


@functools.partial(jax.jit, static_argnums=0)
def draft(drafter, state, slots, length):
    """What it guesses for sequences of which so many tokens are known: [B, K]."""
    view = Target(rounds.target(), None, slots, jnp.zeros_like(slots), length - 1)
    return drafter.draft(state, view, Sampling(jnp.zeros((len(slots), 2), jnp.uint32), jnp.zeros(len(slots))), K)[0].tokens


@functools.partial(jax.jit, static_argnums=0)
def observe(drafter, state, slots, ids, start, committed, anchor):
    positions = start[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    rows = {"taps": (), "hidden": jnp.zeros((len(slots), 1)), "model": rounds.target()}
    return drafter.observe(state, Observed(slots=slots, ids=ids, positions=positions, committed=committed, anchor=anchor, **rows))


K, SLOTS = 4, 4
TEMPLATE = """# Return {} of {}

Dear {}, thank you for your message about the {} that you bought from us on {}. We are sorry to hear that it {}. You can send it back
within thirty days, and we pay the postage. Please put the {} and this letter into the box. As soon as it has reached us, we return {} to
your account. If you would rather have another {}, tell us before {}.

With kind regards, {}
"""
WORDS = """amber anchor basket bottle bronze candle canvas carpet copper cotton desk drawer engine fabric garden glass hammer handle jacket
kettle ladder lamp leather marble mirror needle oven paper pencil pillow radio ribbon rope saddle silver spoon stove table timber towel
umbrella velvet violin wagon wheel window yarn zipper""".split()


@functools.cache
def answers(seed):
    """Texts of one form, and the share of their tokens that are in all of them."""
    rng, tokenizer, texts = np.random.default_rng(seed), load_tokenizer(tiny.POCKET), []
    same = [tokenizer.encode(part) for part in TEMPLATE.split("{}")]
    for _ in range(24):
        own = [tokenizer.encode(" ".join([*rng.choice(WORDS, 2), str(rng.integers(100, 999))])) for _ in same[1:]]
        texts.append([token for pair in zip(same, [*own, []], strict=True) for part in pair for token in part])
    return texts, 24 * sum(map(len, same)) / sum(map(len, texts))


def served(drafter, texts):
    """Accepted drafts a round, while four slots write these texts one after the other, as a job does. A text's first 4 tokens are its
    prompt."""
    longest = max(map(len, texts))
    state, waiting, running, known = drafter.init(SLOTS + 1, longest, K), list(texts), [None] * SLOTS, np.zeros(SLOTS, np.int32)
    slots, accepted, rounds_run = np.array([3, 0, 2, 4], np.int32), 0, 0
    while waiting or any(running):
        for i in range(SLOTS):
            if running[i] is None and waiting:
                text, known[i] = waiting.pop(0), 5
                running[i], zero = text, np.zeros(1, np.int32)
                state = observe(drafter, state, slots[i : i + 1], np.asarray([text[:4]]), zero, zero + 4, zero + text[4])
        found, start = np.asarray(draft(drafter, state, slots, known)), known - 1
        ids, committed, anchor = np.zeros((SLOTS, K + 1), np.int32), np.zeros(SLOTS, np.int32), np.zeros(SLOTS, np.int32)
        for i, text in enumerate(running):
            if text is None:
                continue
            right = text[known[i] : known[i] + K]
            kept = int(np.cumprod(found[i, : len(right)] == right).sum())
            accepted, rounds_run = accepted + kept, rounds_run + 1
            ids[i] = [text[start[i]], *found[i]]
            known[i] = min(known[i] + kept + 1, len(text))
            committed[i], anchor[i] = known[i] - 1 - start[i], text[known[i] - 1]
            if known[i] == len(text):
                running[i] = None
        state = observe(drafter, state, slots, ids, start, committed, anchor)
    return accepted / rounds_run


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_answers_of_one_form_are_guessed_from_each_other(seed):
    """Most of every answer is in all of them. Lookup in the sequence alone finds what recurs within an answer."""
    texts, share = answers(seed)
    assert 0.5 < share < 0.6
    alone, shared = (1 + served(NGram(windows=windows), texts) for windows in (0, 8192))
    assert shared > 1.5 * alone and alone > 1.05, (alone, shared)


def test_an_index_finds_what_a_search_finds():
    """In rings that begin anywhere, whose windows begin before their texts; texts over few tokens, so that most matches have rivals."""
    rng, (number, longest, stride, count) = np.random.default_rng(0), (7, 4, 8, 3)
    search = jax.jit(ngram.lookup_windows, static_argnums=(4, 5, 6))
    for oldest in (0, 3, 6):
        windows = rng.integers(0, 3, (number, longest + stride + count)).astype(np.int32)
        windows[2, :5], windows[4] = -1, -1
        texts, length = rng.integers(0, 3, (20, 12)).astype(np.int32), np.resize(np.arange(1, 13, dtype=np.int32), 20)
        found, matched = search(windows, np.array([oldest], np.int32), texts, length, count, longest, stride)
        order = [(oldest + i) % number for i in range(number)]  # from the oldest to the newest
        for row, (text, n) in enumerate(zip(texts, length, strict=True)):
            best, wanted = 0, None
            for window in (windows[i] for i in order):
                for at in range(longest, longest + stride):
                    same = next((i for i in range(longest) if i >= n or window[at - 1 - i] != text[n - 1 - i]), longest)
                    if same >= best:
                        best, wanted = same, window[at : at + count]
            assert matched[row, 0] == best
            if best:
                np.testing.assert_array_equal(found[row], wanted)


@pytest.mark.parametrize("k", [4, 9])
def test_every_place_of_a_text_is_in_one_window(k):
    """A text that one slot has written in steps of 1 to K + 1 tokens is guessed by another from any place, but for its end; a ring of two
    windows holds the newest two; slots that hold nothing add none."""
    text, drafter, rng = np.arange(100, 160, dtype=np.int32), NGram(windows=9), np.random.default_rng(0)
    state, short = drafter.init(3, 80, k), NGram(windows=2).init(3, 80, k)
    at = 0
    while at < len(text) - 1:
        step = min(int(rng.integers(1, k + 2)), len(text) - 1 - at)
        ids = np.resize(text[at : at + step], (1, k + 1))
        one = [np.array([x], np.int32) for x in (at, step, text[at + step])]
        state = observe(drafter, state, np.array([1], np.int32), ids, *one)
        state = observe(drafter, state, np.array([3], np.int32), ids, *one)  # nobody's
        short = observe(NGram(windows=2), short, np.array([1], np.int32), ids, *one)
        at += step
    stride = state.stride
    assert stride == max(8, k + 1) and state.oldest.tolist() == [(60 // stride) % 9]
    ends = [window[window >= 0][-1] for window in np.asarray(state.windows[0]) if window.max() >= 0]
    assert ends == [100 + stride * i - 1 for i in range(1, 60 // stride + 1)]
    assert sorted(np.asarray(short.windows[0])[:, -1]) == ends[-2:]
    for place in range(1, 60 - stride - k):
        known = np.zeros((3, 80), np.int32)
        known[0, :3] = [7, 8, text[place - 1]]
        other = dataclasses.replace(state, tokens=jnp.asarray(known))
        found = draft(drafter, other, np.array([0], np.int32), np.array([3], np.int32))[0]
        assert found.tolist() == text[place : place + K].tolist()


def test_a_rule_with_noise_of_its_own_judges_no_guess_of_another_text():
    """A text of the same seed tells of that noise. What samples looks in itself alone, what is greedy in the index too."""
    drafter, text = NGram(windows=9), np.arange(100, 120, dtype=np.int32)
    state = drafter.init(3, 40, K)
    for at in (0, 8):
        one = [np.array([x], np.int32) for x in (at, 8, text[at + 8])]
        state = observe(drafter, state, np.array([1], np.int32), text[None, at : at + 8], *one)
    known = np.zeros((3, 40), np.int32)
    known[0, :3], known[2, :6] = [7, 8, 104], [104, 8, 9, 7, 8, 104]
    state = dataclasses.replace(state, tokens=jnp.asarray(known))
    slots = jnp.asarray([0, 0, 2], jnp.int32)
    view = Target(rounds.target(), None, slots, jnp.zeros_like(slots), jnp.asarray([2, 2, 5], jnp.int32))
    for weighed, alone in ((False, text[5:9]), (True, np.full(K, -1))):
        sampling = Sampling(jnp.zeros((3, 2), jnp.uint32), jnp.asarray([0.0, 1.0, 1.0]), weighed=weighed)
        found = drafter.draft(state, view, sampling, K)[0].tokens
        np.testing.assert_array_equal(found, [text[5:9], alone, [8, 9, 7, 8]])


@pytest.mark.slow  # tests/engine/test_completions.py has such rules
def test_with_a_rule_with_noise_of_its_own_a_seed_gives_its_text_again(monkeypatch):
    few_programs(monkeypatch)
    asked = jaxspec.SamplingParams(max_tokens=24, temperature=0.8, seed=3, ignore_eos=True)
    sizes = {"num_draft_tokens": 3, "max_slots": 1, "max_len": 64, "progress": False}
    with jaxspec.load("pocket", drafter="ngram", accept="standard", **sizes) as llm:
        first, second = (llm.generate(["| 1 | 2 |\n" * 4], asked)[0] for _ in range(2))
    assert first.token_ids == second.token_ids and any(first.stats.from_draft)


def test_an_index_belongs_to_no_slot():
    """A slot that takes over another's rows takes its tokens; the index stays."""
    sizes = {"slots": 7, "max_len": 43, "num_draft_tokens": 3}
    state = rounds.init_state(rounds.target(), NGram(windows=9), **sizes, page_size=3, max_stop_ids=1)
    rng = np.random.default_rng(0)
    before = jax.tree.map(lambda x: rng.integers(0, 9, x.shape).astype(np.int32), state.drafter)
    state = dataclasses.replace(state, drafter=before)
    slots, source = np.array([0], np.int32), np.array([5], np.int32)
    after = jax.jit(decode.fork)(decode.release(state, slots), source, slots, np.array([1], np.int32))
    np.testing.assert_array_equal(after.drafter.windows, before.windows)
    np.testing.assert_array_equal(after.drafter.oldest, before.oldest)
    np.testing.assert_array_equal(after.drafter.tokens[0], before.tokens[5])


def test_an_index_of_no_size():
    with pytest.raises(ValueError, match="an index of -1 windows was asked for; expected at least 0"):
        NGram(windows=-1)


@pytest.mark.parametrize("wrong", [{"longest": "4"}, {"shortest": 2.5}, {"windows": True}])
def test_sizes_that_are_no_integers(wrong):
    [(name, value)] = wrong.items()
    with pytest.raises(TypeError, match=f"{name} of n-gram lookup is {value!r} of type {type(value).__name__}, expected an integer"):
        NGram(**wrong)


@pytest.mark.parametrize("sizes", [(3, 4), (2, 0), (0, 0)])
def test_sizes_that_make_no_sense(sizes):
    with pytest.raises(ValueError, match=f"n-grams of {sizes[1]} to {sizes[0]} tokens were asked for; expected 1 <= shortest <= longest"):
        NGram(*sizes)
