"""What a drafter's config.json leaves open, tried on the first rounds of an LLM: one reading is right by construction."""

import json
import shutil

import pytest
from quick import few_programs

import jaxspec
from jaxspec.checkpoint.hub import resolve
from jaxspec.decode.accept import synthetic
from jaxspec.engine.trials import Tally


@pytest.fixture(scope="module", autouse=True)
def quick_to_compile(unoptimised):
    with pytest.MonkeyPatch.context() as patch:
        few_programs(patch)
        yield


PROMPTS = ["def add(a, b):\n    return", "import os\n\n\nclass Reader:\n", "for i in range(10):\n    print(", "def main():\n    parser = "]
MIXED = [jaxspec.SamplingParams(max_tokens=60, temperature=0.7 * (i % 2), seed=i, ignore_eos=True) for i in range(28)]
LOADED = {"num_draft_tokens": 4, "max_slots": 2, "max_len": 128, "progress": False}
SCALED = "input_embedding_scale=16.0"  # sqrt(256)


def dflash(folder, config=lambda config: None):
    """pocket-dflash without input_embedding_scale."""
    shutil.copytree(resolve("pocket-dflash"), folder)
    raw = json.loads((folder / "config.json").read_text())
    del raw["dflash_config"]["input_embedding_scale"]
    config(raw)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def as_dspark(raw):
    """The same drafter in the words of a DSpark config without a Markov head, which leaves open which rows guess."""
    raw["architectures"] = ["DSparkDraftModel"]
    raw["aux_hidden_state_layer_ids"] = [i + 1 for i in raw["dflash_config"].pop("target_layer_ids")]


CASES = {
    "the first": ({}, "input_embedding_scale=1.0", SCALED),
    "the second": ({"config": as_dspark}, "sample_from_anchor=false", "sample_from_anchor=true"),
}


@pytest.fixture(scope="module")
def texts():
    """The first of those without drafts."""
    return [c.token_ids for c in jaxspec.load("pocket", **LOADED | {"num_draft_tokens": 0}).generate(PROMPTS, MIXED[:4])]


@pytest.mark.slow  # test_trials.py has such comparisons, tests/drafters/test_dspark.py what each reading guesses
@pytest.mark.parametrize("case", ["the first", "the second"])
def test_the_right_reading_is_kept(case, texts, tmp_path):
    """Texts are those without drafts. After the verdict acceptance is that of the right reading; nothing was compiled for the other."""
    made, right, wrong = CASES[case]
    llm = jaxspec.load("pocket", dflash(tmp_path / "drafter", **made), **LOADED)
    assert llm.stats.reading.verdict is None and "both are still tried" in str(llm.stats)
    assert [c.token_ids for c in llm.generate(PROMPTS * 7, MIXED)[:4]] == texts
    compiled, found = llm.stats.compilations, llm.stats.reading
    assert found.verdict == right and f"{right} is kept" in str(llm.stats)
    assert found.tallies[right].acceptance_length > found.tallies[wrong].acceptance_length + 0.5
    assert {tally.rounds >= 6 * 32 for tally in found.tallies.values()} == {True}
    before = llm.stats
    assert [c.token_ids for c in llm.generate(PROMPTS * 2, MIXED[:8])[:4]] == texts
    since = llm.stats - before
    assert since.reading == found and llm.stats.compilations == compiled
    assert since.acceptance_length == pytest.approx(found.tallies[right].acceptance_length, rel=0.1)


def test_other_rules_take_the_first_and_say_so(tmp_path):
    folder = dflash(tmp_path / "drafter")
    with pytest.warns(UserWarning, match=f"leaves open input_embedding_scale=1.0 or {SCALED}. Only with accept='coupled' .* is 'standard'"):
        llm = jaxspec.load("pocket", folder, **LOADED, accept="standard")
    assert llm.stats.reading is None and llm.drafter.embedding_scale == 1.0
    for more in ({"accept": synthetic((0.5,) * 4)}, {"num_draft_tokens": 0}):  # where it does not matter
        assert jaxspec.load("pocket", folder, **LOADED | more).stats.reading is None


def test_a_drafter_that_is_open_does_not_learn(tmp_path):
    llm = jaxspec.load("pocket", dflash(tmp_path / "drafter"), **LOADED)
    with pytest.raises(ValueError, match=f"leaves open input_embedding_scale=1.0 or {SCALED}; expected the one that it was trained with"):
        llm.learn(0.1)
    assert llm.stats.reading.tallies == {"input_embedding_scale=1.0": Tally(), SCALED: Tally()}


@pytest.mark.slow
def test_data_shards_find_it_out_together(texts, tmp_path):
    """Each takes its own turns, on two devices; one verdict holds for both."""
    folder, loaded = dflash(tmp_path / "drafter", as_dspark), LOADED | {"max_slots": 4}
    llm = jaxspec.load("pocket", folder, **loaded, mesh=jaxspec.mesh(data=2, tensor=2))
    assert [c.token_ids for c in llm.generate(PROMPTS * 7, MIXED)[:4]] == texts
    llm.generate(PROMPTS * 7, MIXED)  # a shard learns of the verdict when it has read its next call
    assert llm.stats.reading.verdict == "sample_from_anchor=false"
    assert [int(runner.drafting.drafter.reading) for runner in llm._shards.runners] == [1, 1]
    assert all(runner.drafting.trial is None for runner in llm._shards.runners)
