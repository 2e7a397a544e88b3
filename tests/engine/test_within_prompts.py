"""Calls for rows of long prompts before their ends: they leave out what comes after the last K and V, and the head."""

import numpy as np
import pytest
import tiny
from quick import few_programs, prompt_rows

import jaxspec
from jaxspec import SamplingParams
from jaxspec.engine.program_kinds import Prefill
from jaxspec.engine.programs import Programs
from jaxspec.sampling.choice import PLAIN

pytestmark = pytest.mark.usefixtures("unoptimised", "shared_programs")
SHARING = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ROWS = 128  # of a call
PROMPTS = [np.random.default_rng(n).integers(3, 60, n).tolist() for n in (300, ROWS, ROWS + 1, 90, 2 * ROWS + 1)]


@pytest.fixture(scope="module", autouse=True)
def sizes_of_prompts():
    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        prompt_rows(patch, ROWS)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target whose last layers share K and V, its assistant, and a target of which every layer has its own."""
    root = tmp_path_factory.mktemp("models")
    targets = (tiny.tiny_target(root / f"target{i}", max_position_embeddings=512, **text) for i, text in enumerate((SHARING, {})))
    sharing, owning = targets
    return sharing, tiny.tiny_assistant(root / "assistant"), owning


def ran(monkeypatch):
    """A list that every call for prompts adds to: whether prompts could end in it."""
    found, run = [], Programs.run

    def noted(self, program, *args):
        if isinstance(program, Prefill):
            found.append(program.ends)
        return run(self, program, *args)

    monkeypatch.setattr(Programs, "run", noted)
    return found


SLOW = [pytest.param(*case, marks=pytest.mark.slow) for case in ((0, None), (2, "assistant"), (0, "ngram"))]


@pytest.mark.parametrize(("target", "drafter"), [(0, "assistant"), *SLOW])
def test_a_prompt_is_computed_without_what_only_its_end_needs(target, drafter, models, monkeypatch):
    """By a program that is compiled ahead of its use alone: nobody waits for it."""
    settings = {"max_len": 400, "max_slots": 2, "progress": False}
    target, drafter = models[target], models[1] if drafter == "assistant" else drafter
    found, cold, llm = ran(monkeypatch), *(jaxspec.load(target, drafter, **settings) for _ in range(2))
    expected = [cold.generate(prompt, GREEDY)[0] for prompt in PROMPTS]
    assert all(found)
    llm.warmup(GREEDY)
    found.clear()
    for prompt, before in zip(PROMPTS, expected, strict=True):
        (answer,) = llm.generate(prompt, GREEDY)
        before_its_end = (len(prompt) - 1) // ROWS
        assert found[:before_its_end] == [False] * before_its_end and all(found[before_its_end:]) and len(found) > before_its_end
        assert (answer.token_ids, answer.stats.accepted, answer.stats.steps) == (
            before.token_ids,
            before.stats.accepted,
            before.stats.steps,
        )
        found.clear()
    together = llm.generate(PROMPTS, GREEDY)
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in expected] and not all(found)


def test_where_prompts_are_short_or_a_drafter_needs_all_there_is_no_such_program(models, tmp_path_factory):
    draft_model = tiny.tiny_target(tmp_path_factory.mktemp("draft"), seed=1)
    for drafter, max_len in ((draft_model, 400), (models[1], ROWS)):
        llm = jaxspec.load(models[0], drafter, max_len=max_len, max_slots=2, progress=False)
        programs = llm._runner.choice.all_for(PLAIN)
        assert all(program.ends for program in programs if isinstance(program, Prefill))
