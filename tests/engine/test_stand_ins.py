"""Which programs are compiled for calls of several sizes: a larger one that is ready runs a while in place of a smaller one that is not."""

import pytest
from quick import prompt_rows

import jaxspec
from jaxspec import SamplingParams
from jaxspec.engine import buckets, program_choice
from jaxspec.engine.program_kinds import DecodeRounds, Prefill
from jaxspec.engine.programs import Programs

pytestmark = pytest.mark.usefixtures("unoptimised")
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


def params(**settings):
    return SamplingParams(**{"temperature": 0.8, "seed": 3, "ignore_eos": True, "max_tokens": 6, **settings})


def texts(llm, prompts, **settings):
    return [done.token_ids for done in llm.generate(prompts, params(**settings))]


@pytest.fixture(scope="module", autouse=True)
def sizes_of_prompts():
    with pytest.MonkeyPatch.context() as patch:
        prompt_rows(patch, 2 * buckets.PREFILL_CHUNK)
        yield


@pytest.fixture(scope="module")
def alone(folders):
    """The texts of WORDS, each by itself, by programs of one sequence, without drafts."""
    llm = jaxspec.load(folders[0], max_len=256, max_slots=1, progress=False)
    return [texts(llm, [word])[0] for word in WORDS]


@pytest.fixture(scope="module")
def served(folders, alone):
    """An LLM of nine slots that has served WORDS, the texts that it gave, and the lists of programs that it compiled, those that are
    compiled at a time together."""
    llm, made = jaxspec.load(*folders, max_len=256, max_slots=9, progress=False), []
    compile = Programs.compile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "compile", lambda self, programs: made.append(list(programs)) or compile(self, made[-1]))
        found = texts(llm, WORDS)  # some decode while others' prompts are computed, and some end first
        yield llm, found, made


@pytest.fixture
def llm(served):
    """The LLM with the programs that it had then; its list of programs is empty."""
    llm, _, made = served
    programs, before = llm._runner.programs, dict(llm._runner.programs.compiled)
    made.clear()
    yield llm
    programs.compiled = before


def sizes(made, kind):
    return [program.size for programs in made for program in programs if isinstance(program, kind)]


def test_a_call_compiles_one_loop_for_all_its_sequences_beside_what_computes_prompts(served, alone):
    _, found, made = served
    assert found == alone
    assert sizes(made, DecodeRounds) == [9]
    (both,) = [programs for programs in made if len(programs) > 1]
    assert sorted(map(type, both), key=str) == [DecodeRounds, Prefill]


def test_a_smaller_loop_is_compiled_once_that_is_worth_it(llm, served, alone, monkeypatch):
    made = served[-1]
    llm._runner.choice._stood_in.clear()
    monkeypatch.setattr(program_choice, "STANDS_IN", 9)
    found = []
    for chunk in llm.stream(WORDS[2], params(max_tokens=40), steps=4):
        found += chunk.token_ids
        made.append([])  # a mark
    assert found[:6] == alone[2]
    assert sizes(made, DecodeRounds) == [1] and [bool(programs) for programs in made].index(True) == 3  # 12 rounds came before
    assert texts(llm, WORDS[:1]) == alone[:1]


def test_a_loop_for_open_streams_is_compiled_once_that_is_worth_it(llm, served, alone, monkeypatch):
    made, compiled = served[-1], llm._runner.programs.compiled
    for program in [program for program in compiled if isinstance(program, DecodeRounds)]:
        del compiled[program]
    llm._runner.choice._stood_in.clear()
    monkeypatch.setattr(program_choice, "STANDS_IN", 12)
    streams = [llm.stream(word, params(max_tokens=60), steps=4) for word in WORDS[:2]]
    found = [list(next(stream).token_ids) for stream in streams]
    found[0] += next(streams[0]).token_ids
    assert sizes(made, DecodeRounds) == [1]
    for _ in range(4):
        for stream, tokens in zip(streams, found, strict=True):
            tokens += next(stream).token_ids
    assert sizes(made, DecodeRounds) == [1, llm._runner.buckets.decode[1]]
    for stream, tokens in zip(streams, found, strict=True):
        tokens += sum((chunk.token_ids for chunk in stream), [])
    assert [tokens[:6] for tokens in found] == alone[:2]


def test_what_was_kept_is_read_rather_than_replaced(llm, served, alone, monkeypatch):
    monkeypatch.setattr(Programs, "at_hand", lambda self, program: True)  # as where all programs were kept on a disk
    assert texts(llm, WORDS[:1]) == alone[:1]
    assert sizes(served[-1], DecodeRounds) == [1]


def test_a_larger_call_for_prompts_stands_in_where_it_does_all_the_rows(llm, served, alone, monkeypatch):
    made, compiled = served[-1], llm._runner.programs.compiled
    for program in [program for program in compiled if isinstance(program, Prefill)]:
        del compiled[program]
    texts(llm, [list(range(300, 500))], max_tokens=1)
    assert sizes(made, Prefill) == [1] and not sizes(made, DecodeRounds)  # the rest of the prompt has no program of its own
    assert texts(llm, WORDS[:1]) == alone[:1]
    assert sizes(made, Prefill) == [1]
    monkeypatch.setattr(program_choice, "STANDS_IN", 0)
    assert texts(llm, WORDS[1:2]) == alone[1:2]
    assert [program.chunk for programs in made for program in programs if isinstance(program, Prefill)] == [128, 64]
