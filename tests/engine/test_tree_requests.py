"""Trees of drafts through `load`: the same texts, counts of what was drafted, and who gets a chain."""

import jax
import pytest
from quick import prompt_rows

import jaxspec
from jaxspec.decode.accept import synthetic
from jaxspec.engine import buckets
from jaxspec.engine.buckets import Buckets
from jaxspec.engine.round_shape import RoundShape
from jaxspec.engine.runner import Runner
from jaxspec.engine.settings import Settings
from jaxspec.model.draft_tree import DraftTree

pytestmark = pytest.mark.usefixtures("unoptimised")
TREE = DraftTree.default(6)
PROMPTS = [[5 + i, 6, 7 + i, 8] for i in range(6)]


def params(seed):
    return jaxspec.SamplingParams(max_tokens=20 + 5 * seed, temperature=float(seed % 2), seed=seed, ignore_eos=True, top_k=0, top_p=1.0)


@pytest.fixture
def calls(monkeypatch):
    """[(sequences, bucket, shape of the rounds)] of every decode call, of three rounds."""
    real, seen = Runner.decode, []

    def noted(self, requests, *args, **kwargs):
        call = real(self, requests, *args, **kwargs)
        seen.append((len(requests), call.size, call.shape))
        return call

    monkeypatch.setattr(Runner, "decode", noted)
    monkeypatch.setattr(Settings, "steps_for", lambda self, needs, steps, unread=1: min(steps, 3 // unread))
    return seen


@pytest.mark.slow  # tests/decode/test_trees.py has chains and trees in turn
def test_few_sequences_have_trees_and_more_have_chains(folders, calls, monkeypatch):
    """Six requests that end one after the other: chains while more than four decode, then trees, and texts as without drafts."""
    prompt_rows(monkeypatch, buckets.PREFILL_CHUNK)  # one program for prompts of every length
    each = [params(i) for i in range(6)]
    sizes = {"max_len": 64, "max_slots": 6, "kv_pages": 12, "progress": False}
    with jaxspec.load(folders[0], None, **sizes) as alone:
        wanted = [out.token_ids for out in alone.generate(PROMPTS, each)]
    calls.clear()
    with jaxspec.load(*folders, num_draft_tokens=2, tree=TREE.paths, **sizes) as llm:
        outs = llm.generate(PROMPTS, each)
        assert [out.token_ids for out in outs] == wanted
        tree = RoundShape(TREE.depth, tree=TREE)
        wanted_shapes = {(True, 6, RoundShape(2)), (False, 4, tree), (False, 1, tree)}
        assert {(count > 4, size, shape) for count, size, shape in calls} == wanted_shapes
        for out in outs:
            assert len(out.stats.histogram) == TREE.depth + 1 and out.stats.accepted <= out.stats.drafted
            assert 2 * out.stats.steps <= out.stats.drafted <= 6 * out.stats.steps
        assert llm.stats.drafted == sum(out.stats.drafted for out in outs)
        calls.clear()
        single = llm.generate(PROMPTS[1], each[1])
        assert single[0].token_ids == wanted[1] and {call[1:] for call in calls} == {(1, tree)}
        assert single[0].stats.drafted == 6 * single[0].stats.steps and single[0].stats.tried[0] == single[0].stats.steps
        chunks = [chunk.text for chunk in llm.stream(PROMPTS[1], each[1])]
        assert "".join(chunks) == single[0].text


@pytest.mark.slow
def test_warm_up_compiles_trees_and_times_chains_of_more(folders):
    with jaxspec.load(*folders, num_draft_tokens=2, tree=6, adaptive_verification=True, max_len=64, max_slots=6, progress=False) as llm:
        llm.warmup(params(1))
        choice, made = llm._runner.choice, llm.stats.compilations
        assert set(choice.adaptive.sizes) == {6} == {*choice.chain_sizes} and Buckets(6, 64).trees == [1, 4]
        llm.generate(PROMPTS[:3], [params(1)] * 3)
        assert llm.stats.compilations == made and choice.adaptive.rates == choice.adaptive.rates


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"accept": "standard"}, ValueError, "the acceptance rule is 'standard', which keeps drafts of a chain; with a tree"),
        ({"accept": synthetic([0.5] * 4)}, ValueError, "the acceptance rule is 'synthetic', which keeps drafts of a chain"),
        ({"drafter": "ngram"}, ValueError, "the drafter NGram drafts one token after the other and no tree; expected no tree"),
        ({"drafter": None}, ValueError, "the drafter NoDraft drafts one token after the other and no tree; expected no tree"),
        ({"num_draft_tokens": 0}, ValueError, "tree is given and num_draft_tokens is 0; expected drafts"),
        ({"tensor": 2}, ValueError, "tree is given and there are 2 devices; expected one"),
        ({"tree": 40}, ValueError, "the tree has 40 nodes; expected 2 .. 31"),
        ({"tree": "16"}, TypeError, "a tree is '16'; expected a list of paths of ranks"),
        ({"tree": [[0] * n for n in range(1, 9)]}, ValueError, "the tree is 8 deep, the target has a window of 8 tokens"),
    ],
)  # fmt: skip
def test_what_a_tree_does_not_go_with(folders, settings, error, message):
    assert len(jax.devices()) > 1
    settings = {"tree": 4, "drafter": folders[1], **settings}
    with pytest.raises(error, match=message):
        jaxspec.load(folders[0], max_slots=1, max_len=64, progress=False, **settings)
