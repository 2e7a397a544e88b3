"""DFlash2 against stored vectors, and against its formulas in NumPy over whole rounds.

The vectors in tests/golden were made with speculators.
"""

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any

import formulas
import jax
import jax.numpy as jnp
import kinds
import numpy as np
import pytest
import real_configs
import rounds
from formulas import check_round, close, greedy, guesses, write_checkpoint
from kinds import DFLASH2
from safetensors.numpy import load_file

from jaxspec import checkpoint, drafters
from jaxspec import released as shapes
from jaxspec.decode import Round
from jaxspec.drafters import dflash2
from jaxspec.drafters.dflash2 import DFlash2, DFlash2Config
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.layers import Linear
from jaxspec.sampling import logit_edits as edits
from jaxspec.sampling.filters import best_candidates

pytestmark = pytest.mark.usefixtures("unoptimised")


def scored(model, rows, unary, ids, previous):
    """The scores of a block's candidates where these tokens stand before each: [B, K, top_k]."""
    selector = model.candidate_selector
    following = selector.following(previous, selector.hidden_projection(rows))
    return unary + jnp.einsum("bkr,bkcr->bkc", following, selector.successors(ids))


def test_golden_rounds(tmp_path: Path) -> None:
    """The context of two rounds, both blocks, their candidates, the greedy walk, and the scores along the sampled one."""
    tensors, config, weights, target = formulas.golden("dflash2")
    model = drafters.load_drafter(write_checkpoint(tmp_path, config, weights), target.config, jnp.float32, progress=False)
    assert isinstance(model, DFlash2)
    # The head of this target is not its embedding.
    model = dataclasses.replace(model, page_size=5, lm_head=Linear(jnp.asarray(tensors["target.lm_head.weight"])))
    block, draft = rounds.compiled(DFlash2.block), rounds.compiled(DFlash2.draft, static_argnums=4)
    count = model.num_draft_tokens
    for number, state, view, block_ids in formulas.golden_rounds(tensors, model, target, count):

        def wanted(what: str, number: int = number) -> np.ndarray:
            return tensors[f"expected.round{number}.{what}"]

        rows = block(model, state, view, block_ids)
        close(rows[:1], wanted("hidden"))
        unary, ids = best_candidates(model.candidates(target, rows[:1, 1:])[0], model.config.selector_top_k)
        np.testing.assert_array_equal(ids, wanted("candidate_ids"))
        close(unary, wanted("unary_logits"))
        drafts, after = draft(model, state, view, greedy(2), count)
        np.testing.assert_array_equal(drafts.tokens[:1], wanted("greedy.draft_ids"))
        np.testing.assert_array_equal(drafts.ids[:1], wanted("candidate_ids"))
        close(drafts.logits[:1], wanted("greedy.scores"))
        formulas.same(state, after)
        tokens = wanted("sampled.draft_ids")
        previous = np.concatenate([block_ids[:1, :1], tokens[:, :-1]], axis=1)
        scores = np.asarray(scored(model, rows[:1, 1:], unary, ids, jnp.asarray(previous, jnp.int32)))
        close(scores, wanted("sampled.scores"))
        best = np.argmax(scores / 0.8 + tensors[f"input.round{number}.sampled.gumbel"], axis=-1)
        np.testing.assert_array_equal(np.take_along_axis(np.asarray(ids), best[..., None], axis=-1)[..., 0], tokens)


class Only:
    """A constraint that lets some tokens come, whatever came before."""

    def __init__(self, ids):
        self.ids, self.state = jnp.asarray(ids, jnp.int32), jnp.zeros(2, jnp.int32)

    def masked(self, logits, states, shard, ids=None):
        ids = jnp.arange(logits.shape[-1])[None, None] if ids is None else ids
        return jnp.where(jnp.isin(ids, self.ids), logits, -jnp.inf)

    def after(self, tokens):
        return self


@pytest.mark.parametrize("by", ["constraint", "edits"])
def test_candidates_are_those_that_may_come(by: str, tmp_path: Path) -> None:
    """They are none of the best without the request's edits, or without what a structured text must be."""
    tensors, config, weights, target = formulas.golden("dflash2")
    model: Any = drafters.load_drafter(write_checkpoint(tmp_path, config, weights), target.config, jnp.float32, progress=False)
    model = dataclasses.replace(model, page_size=5, lm_head=Linear(jnp.asarray(tensors["target.lm_head.weight"])))
    count, vocab = model.num_draft_tokens, target.config.vocab_size
    _, state, view, _ = next(iter(formulas.golden_rounds(tensors, model, target, count)))
    free, _ = model.draft(state, view, greedy(2), count)
    few = [i for i in range(vocab) if i not in np.asarray(free.ids)][-3:]
    assert len(few) == 3
    constraint: Any = Only(few) if by == "constraint" else None
    asked = edits.defaults(2)
    asked = dataclasses.replace(asked, allowed=asked.allowed.at[:, :3].set(jnp.asarray(few)))
    known, stops = jnp.zeros((2, 4), jnp.int32), jnp.full((2, 1), -1)
    tables = edits.tables(asked, known, jnp.ones(2, jnp.int32), jnp.full(2, 4), stops, vocab) if by == "edits" else None
    drafts, _ = model.draft(state, view, dataclasses.replace(greedy(2), constraint=constraint, tables=tables), count)
    assert np.isin(drafts.tokens[0], few).all()


NAMES = {"speculators": "dflash2", "z-lab": "dflash2 z-lab"}
TAPS = {"speculators": (1, 2, 3), "z-lab": (1, 3)}
CAUSAL = {"speculators": (False, False, False), "z-lab": (True, False, True)}


@functools.cache
def tensors(layout: str, folder: Path) -> dict[str, np.ndarray]:
    """The drafter's tensors under the checkpoint's keys."""
    checkpoint.save_weights(folder / layout, kinds.drafter(NAMES[layout]), DFLASH2[layout])
    return load_file(folder / layout / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dflash2")


def reference(layout: str, w: dict[str, np.ndarray], table: np.ndarray, taps: np.ndarray, anchor: int, choose):
    """A walk's candidates, best first, and their scores, by the formulas of speculators. choose: (scores, ids, how many before) -> id."""
    config = DFLASH2[layout]
    own = {"mask_token_id": config.get("mask_token_id"), **config.get("dflash_config", {})}
    inner = {**config, **config.get("transformer_layer_config", {})}
    ids = np.array([anchor, *[own["mask_token_id"]] * 7])
    rows = formulas.block_rows(w, inner, CAUSAL[layout], taps, table[ids] * own.get("input_embedding_scale", 1.0))[1:]
    logits = formulas.softcap(rows @ table.T * own.get("output_multiplier", 1.0), own.get("final_logit_softcapping"))
    first, second = (w[f"candidate_selector.{name}_codebook"] for name in ("predecessor", "successor"))
    previous, candidates, scores = anchor, [], []
    for row, of_row in zip(rows, logits, strict=True):
        among = np.argsort(-of_row, kind="stable")[: {**config, **own}["selector_top_k"]]
        edge = first[previous] * (w["candidate_selector.hidden_projection.weight"] @ row)
        candidates.append(among)
        scores.append(of_row[among] + second[among] @ edge)
        previous = choose(scores[-1], among, len(scores) - 1)
    return np.stack(candidates), np.stack(scores)


@pytest.mark.slow  # the golden rounds above are of the reference
@pytest.mark.parametrize("layout", DFLASH2)
def test_drafts_of_whole_rounds(layout: str, folder: Path) -> None:
    """After prompts in chunks that end anywhere, and after rounds in which 0 to 7 drafts are accepted, the drafts are the formulas'."""
    model, w = kinds.drafter(NAMES[layout]), tensors(layout, folder)
    table = np.asarray(rounds.target().embed_tokens.weight)
    state = rounds.started(model)
    for accepted in [(0, 3, 7, 1, 5), (6, 5, 0, 7, 2), None]:
        (found, after), known = guesses(rounds.target(), model, state, 7), rounds.lengths(state)
        formulas.same(state.drafter, after)
        for row, length in enumerate(known):
            text, tokens = rounds.tokens(state)[row], []

            def choose(scores, ids, k, row=row, length=length, tokens=tokens):
                tokens.append(formulas.chosen(scores[None], ids, row, length + k)[0])
                return tokens[-1]

            taps = formulas.hidden_states()[row, list(TAPS[layout]), : length - 1].transpose(1, 0, 2)
            ids, scores = reference(layout, w, table, taps, text[length - 1], choose)
            np.testing.assert_array_equal(found.ids[row], ids)
            # What float32 rounds: up to 9e-5 apart with JAX 0.10 and 1.5e-4 with 0.12.
            np.testing.assert_allclose(found.logits[row], scores, rtol=5e-4, atol=5e-4)
            np.testing.assert_array_equal(found.tokens[row], tokens)
        if accepted is not None:
            state = rounds.spec_step(rounds.target(), rounds.told(model, state, accepted), state, rounds.SLOT_IDS, round=Round(7))
            np.testing.assert_array_equal(rounds.lengths(state), np.minimum(known + np.asarray(accepted) + 1, rounds.MAX_LEN))


def test_a_rejected_round_leaves_no_trace() -> None:
    formulas.check_rejection(kinds.drafter("dflash2"))


@pytest.mark.parametrize("layout", DFLASH2)
def test_save_and_load(layout: str, folder: Path) -> None:
    """What is saved has the checkpoint's keys, and comes back the same; copies of the target's tensors may lie beside speculators'."""
    model, stored = kinds.drafter(NAMES[layout]), tensors(layout, folder)
    taps, groups = (3, 8) if layout == "speculators" else (2, 1)
    assert stored["layers.1.mlp_conv.base_kernel"].shape == (2, taps, 32)
    assert stored["layers.1.attention_conv.kernel_projection.weight"].shape == (2 * taps * groups, 32)
    assert {"predecessor_codebook", "successor_codebook", "hidden_projection.weight"} == {
        key.removeprefix("candidate_selector.") for key in stored if key.startswith("candidate_selector.")
    }
    table = np.ones((rounds.VOCAB, 32), np.float32)
    extra = {"embed_tokens.weight": table, "lm_head.weight": table, "verifier_lm_head.weight": table} if layout == "speculators" else {}
    path = write_checkpoint(folder / f"{layout}-more", DFLASH2[layout], {**stored, **extra})
    loaded = drafters.load_drafter(path, rounds.target().config, jnp.float32, progress=False)
    assert isinstance(loaded, DFlash2) and loaded.config == model.config
    for old, new in zip(jax.tree.leaves(model), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(old, new)


def changed(**changes) -> dict:
    return {**DFLASH2["speculators"], **changes}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed(target_hidden_size=64), "hidden_size 32, for a target of 64; this target has 32"),
        (changed(num_target_layers=4), r"made for a target of 4 layers \(num_target_layers\), this target has 3"),
        (changed(aux_hidden_state_layer_ids=[1, 9]), r"hidden states \[1, 9\]; this target has 0 .. 3"),
        (
            changed(aux_hidden_state_layer_ids=None),
            "names no layers of the target; expected aux_hidden_state_layer_ids or target_layer_ids",
        ),
        (changed(sample_from_anchor=True), "sample_from_anchor=True; implemented: False"),
        (changed(draft_vocab_size=40), "draft_vocab_size is 40 of 64 tokens; DFlash2 drafts from all"),
        (changed(conv_kernel_size=None), "config.json lacks 'conv_kernel_size'"),
        (changed(conv_kernel_size=0), "conv_kernel_size is 0, expected at least 1"),
        (changed(conv_group_size=5), "conv_group_size 5 does not divide hidden_size 32"),
        (changed(selector_rank=0), "selector_rank is 0, expected at least 1"),
        (changed(selector_top_k=65), "selector_top_k is 65 of 64 tokens"),
        (changed(quantization_config={"quant_method": "fp8"}), "quant_method 'fp8' with weight_block_size None .* served"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:30],
)
def test_a_drafter_of_another_target(config: dict, message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config, {"lm_head.weight": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=f"the drafter .* cannot be used with this target: .*{message}"):
        drafters.abstract_drafter(tmp_path, rounds.target().config, jnp.float32)


def test_sliding_layers_see_both_ways_unless_the_config_says_otherwise() -> None:
    for said, causal in ((None, False), (True, False), (False, True)):
        config = {key: x for key, x in changed(sliding_window_non_causal=said).items() if x is not None}
        assert DFlash2Config.from_hf(config, rounds.target().config).causal == (causal, False, causal)


def test_a_released_drafter() -> None:
    """Parameters, keys, taps and the shapes of a round, in the sizes that are benchmarked."""
    target = Gemma4Config.from_hf(real_configs.TARGETS["31B"])
    model = shapes.abstract_drafter("dflash2", "31b", target, jnp.bfloat16)
    assert isinstance(model, DFlash2) and model.num_draft_tokens == 15 and dflash2.KIND.released("e2b", None, target) is None
    keys = formulas.checkpoint_shapes(model)
    assert keys["layers.4.mlp_conv.kernel_projection.weight"] == (2 * 2 * 336, 5376) and len(keys) == 3 + 5 * 15 + 3
    # z-lab's DFlash with five taps in place of six, ten convolutions and the selector.
    convolutions, selector = 10 * (4 * 5376 + 1344 * 5376), 2 * 262_144 * 256 + 256 * 5376
    assert sum(math.prod(shape) for shape in keys.values()) == 1_535_967_488 - 5376 * 5376 + convolutions + selector
    check_round(model, target, 15)
