"""Structured outputs of an LLM: texts that match and validate, beside others, with every setting that goes along, and what waits or fails.

The target and its assistant are tiny and random, so that hardly a token would be right without the automaton. Temperature is 1 throughout.
"""

import concurrent.futures
import dataclasses
import json
import random
import re
import string
import threading
import time

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxspec
from jaxspec import SamplingParams
from jaxspec.engine import automata_pool, structures
from jaxspec.engine.program_kinds import FillMasks, PlaceStates
from jaxspec.engine.programs import Programs
from jaxspec.structured import StructuredOutputsParams, automaton
from jaxspec.structured.builder import Builder

pytestmark = pytest.mark.usefixtures("quick_to_compile")

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["é", 'a"b', "\\"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def llm(folders):
    """Plain requests know no automata, and there is no pool before the first request that needs it."""
    target, drafter = folders
    llm = jaxspec.load(target, drafter, max_slots=3, max_len=128, progress=False)
    llm.generate([PROMPT], params())
    assert llm._runner.programs.automata is None and llm.stats.structured_bytes == {}
    assert not any(program.structured for program in llm._runner.programs.compiled)
    return llm


def params(seed=0, **structure):
    return SamplingParams(temperature=1.0, seed=seed, structured_outputs=structure or None, max_tokens=100)


def valid(completion, structure):
    """Whether the text is what was asked for."""
    assert completion.finish_reason == "stop", completion
    text = completion.text
    if "regex" in structure:
        return bool(re.fullmatch(structure["regex"], text, re.DOTALL))
    if "choice" in structure:
        return text in structure["choice"]
    jsonschema.validate(json.loads(text), structure["json"], jsonschema.Draft202012Validator)
    return True


# With every filter, edit and log-probability, so that one program serves all tests of these.
EVERYTHING = {"top_k": 200, "top_p": 0.99, "repetition_penalty": 1.3, "bad_words": ("aa",), "logprobs": 2}
MIXED = [
    {"json": RECORD},
    {},
    {"regex": "(ab|abc){1,4}é?"},
    {"choice": ["yes", "yes, please", "no"]},
    {"regex": ""},
    {"regex": '[^a-z]𝄞{1,2}漢|"\\\\n'},
    {},
    {"json": {"type": "array", "items": {"type": "boolean"}, "maxItems": 5}},
]


def test_texts_are_what_was_asked_for_beside_others(llm):
    asked = [params(i, **structure) for i, structure in enumerate(MIXED * 2)]
    found = llm.generate([PROMPT] * len(asked), asked)
    for completion, structure in zip(found, MIXED * 2, strict=True):
        assert not structure or valid(completion, structure)
    assert found[4].text == "" and len(found[4].token_ids) == 1
    # Those without a structure are what they are without the others.
    alone = llm.generate([PROMPT] * 2, [asked[1], asked[6]])
    assert [c.token_ids for c in alone] == [found[1].token_ids, found[6].token_ids]
    assert all(count > 0 for count in llm.stats.structured_bytes.values())
    assert 'choice ["yes", "yes, please", "no"]' in llm.stats.structured_bytes


def texts(llm, count=6, **changes):
    asked = [dataclasses.replace(params(i, **structure), **changes) for i, structure in enumerate(MIXED[:count])]
    return [c.token_ids for c in llm.generate([PROMPT] * count, asked)]


def test_the_seed_alone_makes_a_text(llm):
    """That drafts change nothing tests/drafters/test_structured_kinds.py looks at."""
    expected = texts(llm)
    one_by_one = [llm.generate([PROMPT], params(i, **structure))[0].token_ids for i, structure in enumerate(MIXED[:6])]
    assert one_by_one == expected


def test_a_preempted_text_goes_on_where_it_was(llm):
    """Each is preempted once, and resumes in the state of its tokens."""
    expected, runner, turns = texts(llm), llm._runner, []
    before = runner.preemptions
    step = jaxspec.engine.turn.Turn.step

    def preempting(turn, steps=2, meanwhile=lambda: None, spared=0):
        going = step(turn, 2, meanwhile, spared)
        for request in [r for r in turn.active if r.ready and not r.ended and len(r.output) > 1 and r not in turns][:1]:
            turns.append(request)
            turn._preempt(request)
        return going

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxspec.engine.turn.Turn, "step", preempting)
        assert texts(llm) == expected
    assert len(turns) >= 3 and runner.preemptions == before + len(turns)


def test_streams_samples_and_prompts_that_are_kept(llm):
    stream = list(llm.stream(PROMPT, params(3, json=RECORD)))
    assert "".join(chunk.text for chunk in stream) == stream[-1].completion.text and valid(stream[-1].completion, {"json": RECORD})
    several = llm.generate([PROMPT], dataclasses.replace(params(5, json=RECORD), n=3))
    assert all(valid(c, {"json": RECORD}) for c in several) and len({c.text for c in several}) > 1
    answers = [llm.chat([{"role": "user", "content": "Hi"}], params(1, choice=["yes", "no"])) for _ in range(2)]
    assert answers[0].text == answers[1].text and answers[0].text in ("yes", "no")


@pytest.mark.slow  # the loop's own tests have each of these
def test_filters_penalties_biases_and_log_probabilities_go_along(llm):
    word = llm.tokenizer.encode_word("b")[0]
    for seed in range(3):
        asked = dataclasses.replace(params(seed, regex="[ab]{3,9}"), **EVERYTHING, logit_bias={word: 5.0})
        found = llm.generate([PROMPT], asked)[0]
        assert valid(found, {"regex": "[ab]{3,9}"})
        assert len(found.logprobs) == len(found.token_ids)


def test_a_text_that_is_cut_says_so(llm):
    found = llm.generate([PROMPT], dataclasses.replace(params(0, regex="(ab)+"), max_tokens=3, ignore_eos=True))[0]
    assert found.finish_reason == "length" and re.match("a|b", found.text)
    long = llm.generate([PROMPT], dataclasses.replace(params(0, regex="a{50,}"), max_tokens=4))[0]
    assert long.finish_reason == "length" and set(long.text) == {"a"}


def test_what_leaves_no_token_ends_in_words(llm):
    asked = [
        dataclasses.replace(params(0, choice=["a"]), ignore_eos=True),
        dataclasses.replace(params(0, choice=["a"]), min_tokens=5),
        dataclasses.replace(params(0, regex="[0-9]+"), allowed_token_ids=(llm.tokenizer.encode_word("b")[0],)),
    ]
    for found in llm.generate([PROMPT] * 3, [dataclasses.replace(p, **EVERYTHING) for p in asked]):
        assert found.finish_reason == "error" and "or the request allows none" in found.error
    stop = llm.tokenizer.encode_word("b")[0]
    found = llm.generate([PROMPT], dataclasses.replace(params(0, regex="a+"), ignore_eos=True, stop_token_ids=(stop,)))[0]
    assert found.finish_reason == "stop" and found.stop_reason == stop and set(found.text) == {"a"}


@pytest.mark.slow  # test_completions.py has stop strings of other texts
def test_what_fails_past_a_stop_string_does_not_count(llm):
    """A call of several rounds goes on behind the stop string until no token is left; the host reads both at once."""
    asked = dataclasses.replace(params(0, choice=["é漢𝄞"]), ignore_eos=True, stop="漢", max_tokens=20)
    for more in ({}, {"logprobs": 2}, {"prompt_logprobs": 2}, {"logprobs": 30}):
        found = llm.generate([PROMPT], dataclasses.replace(asked, **more))[0]
        assert (found.finish_reason, found.stop_reason, found.text, found.error) == ("stop", "漢", "é", None)
        assert more.get("logprobs") is None or len(found.logprobs) == len(found.token_ids)
        assert ("prompt_logprobs" in more) == (found.prompt_logprobs is not None)
    stream = list(llm.stream(PROMPT, asked, steps=20))
    assert stream[-1].finish_reason == "stop" and "".join(chunk.text for chunk in stream) == "é"


def test_thoughts_are_free(llm):
    """A text that begins within a thought is free until that ends, and has no end before; one that may begin with a thought may not."""
    opening, closing, think = llm.tokenizer.thought_ids
    free = {"temperature": 1.0, "max_tokens": 100, "structured_outputs": {"choice": ["yes", "no"]}, **EVERYTHING}
    inside = SamplingParams(**free, seed=2, logit_bias={closing: 60.0})
    found = llm.generate([[5, opening, 6]], inside)[0]
    at = found.token_ids.index(closing)
    assert llm.tokenizer.decode(found.token_ids[at + 1 :]) in ("yes", "no")
    some = llm.generate(
        [[think, 5, 6]] * 2, [SamplingParams(**free, seed=2, logit_bias={opening: bias, closing: 60.0}) for bias in (40.0, -40.0)]
    )
    assert some[0].token_ids[0] == opening and some[1].text in ("yes", "no")
    at = some[0].token_ids.index(closing)
    assert llm.tokenizer.decode(some[0].token_ids[at + 1 :]) in ("yes", "no")


@pytest.fixture(scope="module")
def small(folders):
    """With room for three blocks of states, and rows for 60 sets of tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jaxspec.engine.settings.Settings, "structured_blocks", 4)
        made = jaxspec.engine.settings.Settings.__init__
        patch.setattr(
            jaxspec.engine.settings.Settings,
            "__init__",
            lambda self, **given: made(self, **{"structured_blocks": 4, "structured_rows": 60, **given}),
        )
        return jaxspec.load(folders[0], max_slots=3, max_len=128, progress=False)


def test_a_full_pool_makes_requests_wait(small):
    """Of nine structures three have room, and a text of 40 sets of tokens beside no other."""
    several = [{"choice": [f"{a}{b}{c}" for c in "xyz"]} for a, b in ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op")]
    several.insert(4, {"regex": "[ab]{45}"})
    for _ in range(2):
        found = small.generate([PROMPT] * 9, [params(i, **structure) for i, structure in enumerate(several)])
        assert all(valid(c, structure) for c, structure in zip(found, several, strict=True))
    held = small._runner.pool._held.values()
    assert len(held) <= 3
    blocks, rows = sum((h.blocks for h in held), []), sum((h.rows for h in held), [])
    assert len(set(blocks)) == len(blocks) and set(blocks) <= {1, 2, 3}
    assert len(set(rows)) == len(rows) and set(rows) <= set(range(1, 60))


def test_a_stream_that_gave_way_comes_before_one_that_took_its_room(small):
    """Each of the texts fills the pool. Whoever is read goes on, and the other one waits."""
    first, second = ((PROMPT, params(i, regex=f"[{letters}]{{45}}")) for i, letters in enumerate(("ab", "cd")))
    expected = [small.generate(*asked)[0].text for asked in (first, second)]
    streams = [small.stream(*first, steps=2)]
    texts = [next(streams[0]).text]
    small._runner.preempt(small._runner.held.running[-1])  # as where pages are lacking
    streams.append(small.stream(*second, steps=2))
    texts.append(next(streams[1]).text)
    for i in (0, 1, 0):
        texts[i] += next(streams[i]).text
    for i, stream in enumerate(streams):
        assert texts[i] + "".join(chunk.text for chunk in stream) == expected[i]


def test_other_calls_do_not_wait_for_an_automaton(llm, monkeypatch):
    go, begun = threading.Event(), threading.Event()
    build = structures.automaton_of

    def slow(expression):
        begun.set()
        assert go.wait(60)
        return build(expression)

    monkeypatch.setattr(structures, "automaton_of", slow)
    monkeypatch.setattr(structures, "WAIT", 0.01)
    found = []
    readers = [
        lambda: found.append(next(llm.as_completed([(PROMPT, params(1, regex="wait(a|b)"))]))),
        lambda: found.extend(chunk.completion for chunk in llm.stream(PROMPT, params(2, regex="wait(c|d)")) if chunk.completion),
    ]
    threads = [threading.Thread(target=reader) for reader in readers]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    assert len(llm.generate([PROMPT] * 3, params(0))) == 3  # in all slots
    go.set()
    for thread in threads:
        thread.join(60)
    assert sorted(completion.text[:4] for completion in found) == ["wait", "wait"]


def test_a_call_that_waits_as_the_llm_is_closed_says_so(folders, monkeypatch):
    closed, build = threading.Event(), structures.automaton_of
    monkeypatch.setattr(structures, "automaton_of", lambda expression: closed.wait(60) and build(expression))
    monkeypatch.setattr(structures, "WAIT", 60)
    with jaxspec.load(folders[0], max_slots=1, max_len=32, progress=False) as llm:
        told = []

        def ask(letter):
            with pytest.raises(RuntimeError, match="^the LLM of .* is closed; load it again"):
                llm.generate([PROMPT], params(0, regex=letter))
            told.append(letter)

        threads = [threading.Thread(target=ask, args=(letter,)) for letter in "abc"]
        for thread in threads:
            thread.start()
        while len(llm._structures._known) < len(threads):
            time.sleep(0.01)
    closed.set()
    for thread in threads:
        thread.join(60)
    assert sorted(told) == ["a", "b", "c"]
    for ask in (llm.check, llm.generate):
        with pytest.raises(RuntimeError, match="^the LLM of .* is closed; load it again"):
            ask(PROMPT, params(0, regex="d"))


@pytest.mark.parametrize("threads", [1, 2])
def test_automata_that_have_no_room_beside_each_other_come_one_after_the_other(small, monkeypatch, threads):
    """Each fills the pool, and takes two steps to be put there. None is driven out again and again by the others."""
    programs = small._runner.programs
    change, placed = programs.change_automata, []

    def counted(program, *args):
        placed.append(isinstance(program, PlaceStates))
        assert sum(placed) < 200, "requests drive each other out"
        change(program, *args)

    monkeypatch.setattr(structures, "WAIT", 60)
    monkeypatch.setattr(automata_pool, "BESIDE", 1)
    monkeypatch.setattr(programs, "change_automata", counted)
    asked = [[{"regex": f"[{a}{b}]{{45}}"} for a, b in pairs] for pairs in (("ab", "bc", "cd"), ("xy", "yz", "zx"))]

    def found(several):
        return small.generate([PROMPT] * 3, [params(i, **structure) for i, structure in enumerate(several)])

    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        texts = list(pool.map(found, asked))
    assert all(valid(c, structure) for some, of in zip(texts, asked, strict=True) for c, structure in zip(some, of, strict=True))


def test_a_structure_larger_than_the_pool_is_refused(small, monkeypatch):
    monkeypatch.setattr(structures, "WAIT", 60)
    with pytest.raises(ValueError, match=r"prompt 0: structured_outputs: regex .* takes 501 states with .* expected at most 384 and 59"):
        small.generate([PROMPT], params(0, regex="[ab]{500}"))


def test_streams_may_hold_the_whole_pool(small):
    stream = small.stream(PROMPT, params(0, regex="[ab]{45}"), steps=1)
    next(stream)
    with pytest.raises(RuntimeError, match="the memory of structured outputs is held by open streams"):
        small.generate([PROMPT], params(0, regex="[cd]{45}"))
    stream.close()
    assert len(small.generate([PROMPT], params(0, regex="[cd]{45}"))[0].text) == 45


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["place states", "fill masks"])
def test_an_interrupt_while_automata_are_put_on_the_device(small, monkeypatch, name, when):
    """The call that is interrupted may take the pool along. Texts of open streams go on as they should, and no room is lost."""
    asked, large = params(0, regex="[ab]{20}c"), params(0, regex="[ab]{45}")
    alone, ready = small.generate([PROMPT], asked)[0].text, Programs.ready

    def interrupted(programs, program):
        made = ready(programs, program)

        def call(*args):
            if when == "after":
                made(*args)
            raise KeyboardInterrupt

        return call if str(program) == name else made

    stream = small.stream(PROMPT, asked, steps=1)
    text = next(stream).text
    for i in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(Programs, "ready", interrupted)
            with pytest.raises(KeyboardInterrupt):
                small.generate([PROMPT], params(0, choice=[f"{name} {when} {i}"]))
        text += next(stream).text
    assert text + "".join(chunk.text for chunk in stream) == alone
    assert len(small.generate([PROMPT], large)[0].text) == 45


def test_automata_are_built_beside_the_device(llm, monkeypatch):
    """One that takes long holds up nobody else; one that fails then is said in its completion."""
    begun, go, build = threading.Event(), threading.Event(), structures.automaton_of

    def slow(expression):
        if "slow" in expression:
            begun.set()
            assert go.wait(30)
        return build(expression)

    monkeypatch.setattr(structures, "automaton_of", slow)
    monkeypatch.setattr(structures, "WAIT", 0.01)
    asked = [(PROMPT, params(0, regex="slow(a|b)")), (PROMPT, params(1, regex="slow[^\\s\\S]")), (PROMPT, params(2))]
    ready = llm.as_completed(asked)
    assert next(ready).prompt_index == 2 and begun.is_set()
    go.set()
    rest = {c.prompt_index: c for c in ready}
    assert valid(rest[0], {"regex": "slow(a|b)"})
    assert rest[1].finish_reason == "error" and "a part of it matches no text" in rest[1].error
    with pytest.raises(ValueError, match="prompt 0: structured_outputs: .* a part of it matches no text"):
        llm.generate([PROMPT], params(1, regex="slow[^\\s\\S]"))


def test_what_has_failed_takes_no_place_of_a_call(llm, monkeypatch):
    """However many fail as others begin: programs are compiled for those that decode."""
    go, build, futures = threading.Event(), structures.automaton_of, []

    def slow(expression):
        assert go.wait(30)
        return build(expression)

    def asked():
        for i in range(4):
            yield PROMPT, params(i, regex=f"broken{i}[^\\s\\S]")
        go.set()
        concurrent.futures.wait(futures)
        yield from ((PROMPT, dataclasses.replace(params(i), max_tokens=3)) for i in range(3))

    of = structures.Structures.of
    monkeypatch.setattr(structures, "automaton_of", slow)
    monkeypatch.setattr(structures, "WAIT", 0.01)
    monkeypatch.setattr(structures.Structures, "of", lambda self, params: futures.append((made := of(self, params)).future) or made)
    found = {c.prompt_index: c.finish_reason for c in llm.as_completed(asked())}
    assert found == {**dict.fromkeys(range(4), "error"), **dict.fromkeys(range(4, 7), "length")}


def test_the_thread_that_asks_takes_no_lock_of_who_builds(llm, monkeypatch):
    """An interrupt there would leave it taken."""
    began = []
    monkeypatch.setattr(structures, "begin", lambda: began.append(threading.current_thread().name))
    made = structures.Structures(llm.tokenizer, llm.target.config.vocab_size, 1000, 1000)
    for word in ("one", "two"):
        assert made.of(StructuredOutputsParams(choice=(word, "else"))).future.result(30).automaton.states > 3
    assert began == ["jaxspec-automata_0"]
    made.close()


def test_an_expression_without_a_small_automaton_fails_alone(llm, monkeypatch):
    builder = Builder(seconds=0.5)
    monkeypatch.setattr(automaton, "BUILDER", builder)
    monkeypatch.setattr(structures, "WAIT", 0.01)  # so that it is not refused at once
    wanted, asked = {"regex": "[ab]{20}"}, [params(0, regex="(a|b)*a(a|b){25}"), params(1, regex="[ab]{20}")]
    found = {c.prompt_index: c for c in llm.as_completed([(PROMPT, each) for each in asked])}
    assert valid(found[1], wanted)
    assert found[0].finish_reason == "error" and "takes more than 0.5 seconds to build" in found[0].error
    builder.close()


def test_a_large_automaton_holds_up_nobody(llm, monkeypatch):
    """Which tokens its states allow is computed a part at a time, also where it comes first of all."""
    programs, filled = llm._runner.programs, []
    change = programs.change_automata

    def counted(program, *args):
        filled.append(isinstance(program, FillMasks))
        change(program, *args)

    monkeypatch.setattr(structures, "WAIT", 60)
    monkeypatch.setattr(automata_pool, "BESIDE", 1)
    monkeypatch.setattr(programs, "change_automata", counted)
    word = "".join(random.Random(0).choices(string.ascii_lowercase, k=400))
    asked = [(PROMPT, params(0, regex=word)), *[(PROMPT, dataclasses.replace(params(i), max_tokens=1)) for i in range(1, 9)]]
    at = {completion.prompt_index: sum(filled) for completion in llm.as_completed(asked)}
    assert at[0] == max(at.values()) > 4 and min(at.values()) <= 2
    text = llm.generate([PROMPT], params(0, regex=word))[0].text
    assert len(text) > 90 and word.startswith(text)


def test_params_take_dicts_objects_and_nothing_else():
    given = StructuredOutputsParams(choice=["a", "b"])
    assert SamplingParams(structured_outputs=given) == SamplingParams(structured_outputs={"choice": ["a", "b"]})
    assert SamplingParams(structured_outputs=given).clone().replace(seed=1).structured_outputs == given
    with pytest.raises(TypeError, match="structured_outputs is of type str"):
        SamplingParams(structured_outputs="a")
    with pytest.raises(ValueError, match="the schema has 'not'"):
        SamplingParams(structured_outputs={"json": {"not": {}}})


@given(st.lists(st.sampled_from(["a", "é", "𝄞", '"', "\\", "\n", " ", "the", "漢"]), max_size=4), st.integers(0, 2), st.integers(0, 9))
@settings(max_examples=15)
def test_texts_of_random_expressions_match(llm, parts, least, seed):
    expression = "".join(f"(?:{re.escape(part)}){{{least},{least + i}}}" for i, part in enumerate(parts))
    found = llm.generate([PROMPT], params(seed, regex=expression))[0]
    assert valid(found, {"regex": expression})


@pytest.mark.parametrize(("limit", "value", "kept"), [("KNOWN", 2, 2), ("KNOWN_BYTES", 0, 1)])
def test_automata_that_were_asked_for_longest_ago_are_forgotten(llm, limit, value, kept, monkeypatch):
    monkeypatch.setattr(structures, limit, value)
    made = structures.Structures(llm.tokenizer, llm.target.config.vocab_size, 1000, 1000)
    try:
        for word in ("one", "two", "three", "three"):
            found = made.of(StructuredOutputsParams(choice=[word]))
            assert found.future.result().automaton.states > 0
            assert found in made._known.values()
        assert len(made._known) == kept
    finally:
        made.close()
