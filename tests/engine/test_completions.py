"""What a request may ask for and what comes back: filters, penalties, stop strings, log-probabilities and samples, beside each other.

The model is tiny and random; its drafter knows what will come, and is wrong about a third of it. The state holds the log-probabilities
of 16 tokens at a time, so that they wrap.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from quick import few_programs

import jaxspec
from jaxspec import SamplingParams
from jaxspec.engine.params import Defaults
from jaxspec.engine.program_kinds import DecodeRounds
from jaxspec.engine.programs import Programs
from jaxspec.engine.runner import Runner
from jaxspec.learning.losses import whole_rows
from jaxspec.sampling import logprobs as logprobs
from jaxspec.sampling.logit_edits import MAX_BAD_WORDS, MAX_IDS

MAX_LEN, K = 64, 3
NEAR = 5e-4  # of two float32 log-probabilities; at single positions of random weights, rounding alone moves one by 1e-4
PROMPTS = ["def f(n):\n", [300], "import os, sys\n", list(range(200, 230))]
EVERYTHING = {
    "temperature": 0.8,
    "top_k": 300,
    "top_p": 0.9,
    "min_p": 0.0005,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "logit_bias": {400: 5.0},
    "min_tokens": 7,
    "logprobs": 2,
}


def params(row, **changes):
    plain = {"temperature": 0.9, "top_k": 0, "top_p": 1.0, "seed": row, "ignore_eos": True}
    return SamplingParams(**{**plain, **changes})


@pytest.fixture(scope="module")
def load(folders, unoptimised):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logprobs, "RING_ROWS", 16)
        few_programs(patch)

        def made(drafter=None, **settings):
            return jaxspec.load(folders[0], drafter, max_len=MAX_LEN, max_slots=4, progress=False, **settings)

        yield made


@pytest.fixture(scope="module")
def texts(load):
    """Every prompt's text to the end, drawn one token at a time: completions."""
    return load().generate(PROMPTS, [params(row) for row in range(len(PROMPTS))])


@pytest.fixture(scope="module")
def llm(load, texts):
    answers = np.array([[*c.prompt_token_ids, *c.token_ids] for c in texts], np.int32)
    wrong = np.random.default_rng(0).random(answers.shape) < 0.33
    return load(tiny.Parrot(jnp.asarray(answers), jnp.asarray(wrong)), num_draft_tokens=K)


@pytest.fixture(scope="module")
def logprobs_of(llm):
    """(a completion, -> its text's log-probabilities by one pass over the whole of it): [tokens - 1, V]."""
    jitted = jax.jit(lambda model, ids: jax.nn.log_softmax(model.unembed(model(whole_rows(ids), None)[0].hidden)))

    def of(completion):
        ids = [*completion.prompt_token_ids, *completion.token_ids]
        padded = np.zeros((1, MAX_LEN), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(jitted(llm.target, padded))[0, : len(ids) - 1]

    return of


def generate(llm, **changes):
    return llm.generate(PROMPTS, [params(row, **changes) for row in range(len(PROMPTS))])


def assert_logprobs(found, tokens, expected, count):
    """found: dicts of `tokens`; expected: [tokens, V]."""
    assert len(found) == len(tokens) == len(expected)
    for named, token, row in zip(found, tokens, expected, strict=True):
        assert abs(named[token].logprob - row[token]) < NEAR
        assert abs(named[token].rank - (row >= row[token]).sum()) <= (np.abs(row - row[token]) < NEAR).sum() - 1
        best = np.sort(row)[::-1][:count]
        top = sorted((entry for entry in named.values() if entry.rank <= count), key=lambda entry: entry.rank)
        assert [entry.rank for entry in top] == list(range(1, count + 1)) and len(named) in (count, count + 1)
        np.testing.assert_allclose([entry.logprob for entry in top], best, atol=NEAR)
        assert all(abs(entry.logprob - row[i]) < NEAR for i, entry in named.items())


@pytest.mark.parametrize("count", [0, 1, 20])
def test_logprobs_are_the_models_own_whatever_was_drafted(llm, texts, logprobs_of, count):
    completions = generate(llm, logprobs=count)
    assert [c.token_ids for c in completions] == [c.token_ids for c in texts]
    assert sum(c.stats.accepted for c in completions) > 20
    for completion in completions:
        rows = logprobs_of(completion)[len(completion.prompt_token_ids) - 1 :]
        assert_logprobs(completion.logprobs, completion.token_ids, rows, count)
    token, named = next(iter(completions[0].logprobs[0].items()))
    assert named.decoded_token == llm.tokenizer.token_text(token) and completions[0].prompt_logprobs is None


def test_logprobs_of_a_block_that_is_longer_than_what_is_held_otherwise(load, texts, logprobs_of):
    """All tokens of a round must be held until they are read."""
    answers = jnp.asarray([[*c.prompt_token_ids, *c.token_ids] for c in texts], jnp.int32)
    drafter = tiny.Parrot(answers, jnp.zeros(answers.shape, bool))
    (completion,) = load(drafter, num_draft_tokens=20).generate([PROMPTS[1]], params(1, logprobs=2))
    assert completion.token_ids == texts[1].token_ids and completion.stats.steps == 3
    assert_logprobs(completion.logprobs, completion.token_ids, logprobs_of(completion)[len(completion.prompt_token_ids) - 1 :], 2)


def test_logprobs_stay_raw_beside_filters_and_penalties(llm, logprobs_of):
    completion = llm.generate(PROMPTS[0], params(0, **EVERYTHING, max_tokens=20))[0]
    rows = logprobs_of(completion)[len(completion.prompt_token_ids) - 1 :]
    assert_logprobs(completion.logprobs, completion.token_ids, rows, 2)


def test_more_logprobs_and_those_of_the_prompt_take_another_pass(llm, texts, logprobs_of):
    completions = generate(llm, logprobs=21, prompt_logprobs=3)
    for completion, plain in zip(completions, texts, strict=True):
        assert completion.token_ids == plain.token_ids
        rows, prompt = logprobs_of(completion), completion.prompt_token_ids
        assert_logprobs(completion.logprobs, completion.token_ids, rows[len(prompt) - 1 :], 21)
        assert completion.prompt_logprobs[0] is None
        assert_logprobs(completion.prompt_logprobs[1:], prompt[1:], rows[: len(prompt) - 1], 3)
    short = llm.generate([300, 301], params(1, max_tokens=2, logprobs=-1, prompt_logprobs=0))[0]
    assert [len(named) for named in short.logprobs] == [tiny.VOCAB] * 2 and [len(n) for n in short.prompt_logprobs[1:]] == [1]
    assert llm.free_slots == 4


@pytest.mark.parametrize("steps", [1, 5])
def test_a_stream_gives_logprobs_with_its_tokens(llm, texts, steps):
    whole = llm.generate(PROMPTS[2], params(2, logprobs=2))[0]
    chunks = list(llm.stream(PROMPTS[2], params(2, logprobs=2), steps=steps))
    assert sum((c.logprobs for c in chunks), []) == chunks[-1].completion.logprobs == whole.logprobs
    assert sum((c.token_ids for c in chunks), []) == texts[2].token_ids and all(len(c.logprobs) == len(c.token_ids) for c in chunks)
    assert [c.logprobs for c in llm.stream([300], params(1, max_tokens=3))][0] is None


def places(completion, tokenizer):
    """Texts that end in an accepted block, at its end and in the target's own choice, each with the tokens up to where it is whole."""
    new, found = completion.token_ids, {}
    for count in range(3, len(new) - 4):
        before, after = tokenizer.decode(new[: count - 2]), tokenizer.decode(new[:count])
        piece = after[len(before) :]
        tail = tokenizer.decode(new[: count + 3])
        plain = all(tokenizer.decode([i]).isascii() and tokenizer.decode([i]) for i in new[count - 3 : count + 3])
        if plain and not set(new[: count + 3]) & tokenizer.byte_ids and tail.startswith(after) and after.index(piece) == len(before):
            kind = (completion.stats.from_draft[count - 1], completion.stats.from_draft[count])
            found.setdefault(kind, (piece, before, after, count))
    return found


@pytest.mark.parametrize("include", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stop_string_ends_a_text_inside_a_block_and_across_tokens_and_calls(llm, include):
    whole = generate(llm)
    kinds = set()
    for row, completion in enumerate(whole):
        for kind, (stop, before, after, count) in places(completion, llm.tokenizer).items():
            kinds.add(kind)
            asked = params(row, stop=[stop, "never seen"], include_stop_str_in_output=include)
            (found,) = llm.generate([PROMPTS[row]], asked)
            assert found.token_ids == completion.token_ids[:count]
            assert (found.text, found.finish_reason, found.stop_reason) == (after if include else before, "stop", stop)
            assert found.stats.from_draft == completion.stats.from_draft[:count]
            for steps in (1, 32):
                chunks = list(llm.stream(PROMPTS[row], asked, steps=steps))
                assert "".join(c.text for c in chunks) == found.text and chunks[-1].completion == found
                assert sum((c.token_ids for c in chunks), []) == found.token_ids
    assert {(True, True), (True, False), (False, True)} <= kinds
    assert llm.free_slots == 4


def test_stop_strings_of_one_request_leave_the_others_alone(llm, texts):
    stop, before, _, count = next(iter(places(generate(llm)[0], llm.tokenizer).values()))
    asked = [params(row, **({"stop": stop} if row == 0 else {})) for row in range(len(PROMPTS))]
    found = llm.generate(PROMPTS, asked)
    assert found[0].text == before and [c.token_ids for c in found[1:]] == [c.token_ids for c in texts[1:]]
    late = llm.generate(PROMPTS[0], params(0, stop=stop, min_tokens=count))[0]
    assert late.text.startswith(before + stop) or late.token_ids[:count] != found[0].token_ids


def test_min_tokens_comes_before_any_stop_id(llm, texts):
    own = texts[0].token_ids
    stops = [own[0], own[2], own[5]]
    assert len(llm.generate(PROMPTS[0], params(0, stop_token_ids=stops))[0].token_ids) == 1
    for least in (1, 4, 12):
        (found,) = llm.generate([PROMPTS[0]], params(0, stop_token_ids=stops, min_tokens=least))
        assert len(found.token_ids) > least and not set(found.token_ids[:least]) & set(stops)
    shown = llm.generate(PROMPTS[0], params(0, stop_token_ids=[own[5]], include_stop_str_in_output=True))[0]
    cut = own.index(own[5])
    assert (shown.token_ids, shown.text) == (own[: cut + 1], llm.tokenizer.decode(own[: cut + 1]))
    assert (shown.finish_reason, shown.stop_reason) == ("stop", own[5])


def test_requests_of_every_kind_share_a_batch_and_keep_their_texts(llm, texts, monkeypatch):
    """A request's text depends on nothing beside it in the batch, whatever filters the call as a whole must be compiled with."""
    run, ran = Programs.run, []
    monkeypatch.setattr(Programs, "run", lambda self, program, *args: ran.append(program) or run(self, program, *args))
    kinds = [{}, {"top_k": 40, "top_p": 0.8}, {"temperature": 0}, EVERYTHING]
    asked = [params(row, **kind) for row, kind in enumerate(kinds)]
    together = llm.generate(PROMPTS, asked)
    alone = [llm.generate(prompt, p)[0] for prompt, p in zip(PROMPTS, asked, strict=True)]
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert together[0].token_ids == texts[0].token_ids and all(together[i].token_ids != texts[i].token_ids for i in (1, 2, 3))
    assert {program.needs.scope for program in ran if isinstance(program, DecodeRounds)} == {"plain", "top", "search"}


def test_allowed_ids_bad_words_and_biases(llm, texts):
    base = texts[2]
    allowed = llm.generate(PROMPTS[2], params(2, allowed_token_ids=[400, 401, 402], max_tokens=12))[0]
    assert set(allowed.token_ids) == {400, 401, 402}
    forced = llm.generate(PROMPTS[2], params(2, logit_bias={"77": 100}, max_tokens=5))[0]
    assert forced.token_ids == [77] * 5
    word = next(text for i in base.token_ids if (text := llm.tokenizer.decode([i])).strip().isalpha() and len(text.strip()) > 1)
    without = llm.generate(PROMPTS[2], params(2, bad_words=[word]))[0]
    first, spaced = (tuple(llm.tokenizer.encode_word(space + word.lstrip())) for space in ("", " "))
    for bad in {first, spaced} if len(first) == len(spaced) else {first}:
        assert not any(tuple(without.token_ids[i : i + len(bad)]) == bad for i in range(len(without.token_ids)))
    lines = params(2, logit_bias={i: 100.0 for i in llm.tokenizer.encode_word("\n")}, max_tokens=4)
    assert "\n" in llm.generate(PROMPTS[2], lines)[0].text
    assert "\n" not in llm.generate(PROMPTS[2], lines.replace(bad_words=["\n"]))[0].text


def test_n_samples_have_the_seeds_that_follow(llm):
    two = [[300], PROMPTS[0]]
    found = llm.generate(two, params(5, n=3, max_tokens=6))
    assert [(c.seed, c.index) for c in found] == [(5, 0), (6, 1), (7, 2)] * 2
    single = [llm.generate(prompt, params(5 + i, max_tokens=6))[0].token_ids for prompt in two for i in range(3)]
    assert [c.token_ids for c in found] == single and len(set(map(tuple, single))) == 6
    assert len(llm.chat([{"role": "user", "content": "Hi"}], params(5, n=2, max_tokens=2))) == 2
    drawn = llm.generate([300], params(0, n=2, seed=None, max_tokens=2))
    assert drawn[1].seed == drawn[0].seed + 1


@pytest.mark.slow  # tests/decode/test_lossless.py has what each rule draws
@pytest.mark.parametrize("rule", ["standard", "block"])
def test_other_rules_draw_texts_of_their_own(llm, load, rule):
    """The seed decides the text with them too, and greedy ones are those of every rule; a lookup's guesses have no distribution."""
    other = load(llm.drafter, num_draft_tokens=K, accept=rule)
    asked = [params(row, temperature=0.9 * (row < 2)) for row in range(len(PROMPTS))]
    found, coupled = ([c.token_ids for c in engine.generate(PROMPTS, asked)] for engine in (other, llm))
    assert found[2:] == coupled[2:] and found[0] != coupled[0] and found[1] != coupled[1]
    assert [c.token_ids for c in other.generate(PROMPTS, asked)] == found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logit_bias": {4096: 1.0}}, "logit_bias of prompt 0 has id 4096; expected 0 .. 4095"),
        ({"allowed_token_ids": [5000]}, "allowed_token_ids of prompt 0 has id 5000; expected 0 .. 4095"),
        ({"allowed_token_ids": range(1025)}, f"allowed_token_ids of prompt 0 has 1025 ids; expected at most {MAX_IDS}"),
        ({"logit_bias": {i: 1 for i in range(1030)}}, f"logit_bias of prompt 0 has 1030 ids; expected at most {MAX_IDS}"),
        ({"bad_words": ["x" + "y" * 40]}, "the bad word 'xy+' of prompt 0 has .* tokens; expected at most 16"),
        ({"bad_words": [f"w{i}" for i in range(70)]}, f"prompt 0 has .* bad words, with .*; expected at most {MAX_BAD_WORDS}"),
        ({"logprobs": 4097}, "logprobs of prompt 0 is 4097; expected at most 4096, the vocabulary, or -1 for all"),
        ({"prompt_logprobs": 5000}, "prompt_logprobs of prompt 0 is 5000; expected at most 4096"),
        ({"n": 2, "temperature": 0}, "n of prompt 0 is 2 with temperature 0, where all samples are the same; expected 1"),
        ({"allowed_token_ids": [9]}, "allowed_token_ids of prompt 0 names only tokens that the checkpoint suppresses"),
    ],
)
def test_what_cannot_be_served_is_refused_before_anything_is_computed(llm, monkeypatch, changes, message):
    monkeypatch.setattr(Runner, "admit", lambda *_: pytest.fail("a bad request reached the device"))
    monkeypatch.setattr(llm, "defaults", Defaults(temperature=1.0, suppress_tokens=(9,)))
    with pytest.raises(ValueError, match=message):
        llm.generate([[5]], SamplingParams(**changes))


def test_a_stream_is_one_completion(llm):
    with pytest.raises(ValueError, match="n is 2; a stream is one completion, expected 1"):
        llm.stream("x", SamplingParams(n=2))
