"""The bundled pocket models on code that they have not seen: the same tokens with any K and batch, acceptance, variety, and the card."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pocket_pair import assert_same, drafter_of, put, target, texts

import jaxspec
from jaxspec import decode
from jaxspec.checkpoint.hub import bundled, resolve
from jaxspec.drafters import NoDraft
from jaxspec.model.draft_tree import DraftTree
from jaxspec.model.rows import Rows
from jaxspec.train.pocket.corpus import BOS

PROMPT_TOKENS = 160
NEW_TOKENS = 128

# All tests share one shape of state, and so its programs.
SLOTS, MAX_LEN, CHUNK, K = 24, 288, 80, 4


def compiled(level, function, **options):
    """Jitted, with so much optimisation: more of it takes longer than what these programs compute."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": level}, **options)


init_state = compiled(0, decode.init_state, static_argnames=("slots", "max_len", "num_draft_tokens", "page_size"))
prefill = compiled(1, decode.prefill, static_argnames="chunk", donate_argnums=2)
all_loop, some_loop = (compiled(level, decode.decode_loop, static_argnames="round") for level in (1, 0))


def prefilled(drafter, sequences, limits, prompts=None, temperature=0.0):
    """A state whose sequences, in slots 0, 1, ..., are ready to decode."""
    state = init_state(target(), drafter, slots=SLOTS, max_len=MAX_LEN, num_draft_tokens=7, page_size=32)
    state = put(state, sequences, limits, prompts, temperature)
    for _ in range(-(-max(map(len, sequences)) // CHUNK)):
        state = prefill(target(), drafter, state, jnp.arange(SLOTS, dtype=jnp.int32), chunk=CHUNK)
    return state


def decoded(drafter, state, count=SLOTS, num_draft_tokens=K, rounds=10_000):
    """The first `count` sequences, to their end or as far as so many rounds take them, and the state."""
    loop = all_loop if count == SLOTS else some_loop
    state = loop(target(), drafter, state, jnp.arange(count, dtype=jnp.int32), rounds, round=decode.Round(num_draft_tokens))
    tokens, length = np.asarray(state.tokens), np.asarray(state.length)
    return [row[:n] for row, n in zip(tokens[:count], length, strict=False)], state


ALL = (K, SLOTS)


@pytest.mark.slow  # tests/decode/test_decode_loop.py and tests/engine/test_llm.py have the same of tiny models
@pytest.mark.parametrize(("temperature", "ways"), [((0.0, 0.8), (ALL,)), ((0.8, 0.0), (ALL, (1, 3)))], ids=["few", "more"])
def test_the_same_tokens_for_any_k_and_batch(temperature, ways):
    """Greedy and sampled in turn, past the window of 128, the longer ones up to exactly max_len, from prompts of 1 to 220 tokens."""
    sequences = [ids[:n] for ids, n in zip(texts(), [1, 3, 40, 63, 64, 127, 129, 220], strict=False)]
    limits = [MAX_LEN if len(ids) > 100 else 160 for ids in sequences]
    # The assistant's part of the prompts is nothing to a loop without drafts, so that all three go on from one state.
    ready = prefilled(drafter_of("mtp"), sequences, limits, temperature=temperature)
    expected, state = decoded(NoDraft(), ready, len(sequences), 0)
    full, length = (np.asarray(x)[: len(limits)] for x in (state.status == decode.FULL_LENGTH, state.length))
    assert (length[full] == np.asarray(limits)[full]).all() and MAX_LEN in length[full]
    compared, ties = 0, 0
    for k, batch in ways:
        found, _ = decoded(drafter_of("mtp"), ready, batch, k)
        for seed, (f, e) in enumerate(zip(found, expected[:batch], strict=False)):
            ties += assert_same(f, e, temperature[seed % 2], seed)
            compared += len(e)
    assert ties <= 1 + compared // 10_000


@pytest.fixture(scope="module")
def written():
    """Greedy continuations of a place in each held-out module, K = 4: [(prompt length, tokens)], and the state."""
    sequences = [
        np.concatenate([[BOS], ids[at + 1 : at + PROMPT_TOKENS]]) for ids, at in zip(texts(), itertools.cycle([0, 400]), strict=False)
    ]
    ready = prefilled(drafter_of("mtp"), sequences, [len(ids) + NEW_TOKENS for ids in sequences])
    tokens, state = decoded(drafter_of("mtp"), ready)
    return [(len(ids), row) for ids, row in zip(sequences, tokens, strict=True)], state


def test_acceptance_on_unseen_code(written):
    """Tokens a round, the bonus counted. An assistant that reads the wrong cache, row or position falls to about 1."""
    sequences, state = written
    new = sum(len(row) - prompt - 1 for prompt, row in sequences)  # the first token comes from the prefill
    assert new / int(state.rounds.sum()) >= 2.6


@pytest.mark.parametrize("name", sorted(set(bundled()) - {"pocket"}))
def test_every_bundled_drafter_fits_the_target(name):
    drafter = drafter_of(name.removeprefix("pocket-"))
    assert {x.dtype for x in jax.tree.leaves(drafter)} <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}
    assert max(drafter.taps, default=0) <= len(target().layers)


@pytest.mark.slow  # the assistant's acceptance is looked at above
@pytest.mark.parametrize(
    ("name", "least"), [("dflash", 2.25), ("dflash2", 2.4), ("dspark", 2.4), ("eagle3", 2.3), ("modules", 2.4), ("draft", 2.45)]
)
def test_every_drafter_guesses_the_same_text(written, name, least):
    """The assistant's tokens, which are those without a drafter, and how many of them a round gives."""
    sequences, _ = written
    ready = prefilled(drafter_of(name), [row[:prompt] for prompt, row in sequences], [prompt + NEW_TOKENS for prompt, _ in sequences])
    tokens, state = decoded(drafter_of(name), ready)
    ties = sum(assert_same(found, row, 0.0, 0) for found, (_, row) in zip(tokens, sequences, strict=True))
    assert ties <= 1
    new = sum(len(row) - prompt - 1 for prompt, row in sequences)
    assert new / int(state.rounds.sum()) >= least


@pytest.mark.slow
def test_a_tree_gives_as_many_tokens_as_the_ranks_of_its_candidates_say(written):
    """The same text, in fewer rounds: 3.46 tokens a step where every place of 48 such texts counts (`python benchmarks/trees.py pocket-mtp
    --served 15`), and 3.0 with as many drafts in a row."""
    sequences, state = written
    ready = prefilled(drafter_of("mtp"), [row[:prompt] for prompt, row in sequences], [prompt + NEW_TOKENS for prompt, _ in sequences])
    grown = DraftTree.default(15)
    round, slots = decode.Round(grown.depth, tree=grown), jnp.arange(SLOTS, dtype=jnp.int32)
    tree = all_loop(target(), drafter_of("mtp"), ready, slots, 10_000, round=round)
    found = [row[:n] for row, n in zip(np.asarray(tree.tokens), np.asarray(tree.length), strict=True)]
    assert sum(assert_same(one, row, 0.0, 0) for one, (_, row) in zip(found, sequences, strict=True)) <= 1
    given = sum(len(row) - prompt - 1 for prompt, row in sequences) / int(tree.rounds.sum())
    assert 3.46 * 0.95 < given < 3.46 * 1.05


@pytest.mark.slow  # of the same pair
def test_acceptance_along_the_real_text():
    """One round from each of many places of the real text, so that repetitive output cannot flatter the figure."""
    places = np.random.default_rng(0).integers(60, 240, (len(texts()), 4))
    sequences = [ids[: at + 1] for ids, row in zip(texts(), places, strict=True) for at in row]
    gained = []
    for some in (sequences[first : first + SLOTS] for first in range(0, len(sequences), SLOTS)):
        # More tokens known than prompted: the last is taken as the anchor, though the target may have chosen another.
        prompts, limits = [len(ids) - 1 for ids in some], [len(ids) + 8 for ids in some]
        state = prefilled(drafter_of("mtp"), some, limits, prompts)
        before = np.asarray(state.length)[: len(some)]
        np.testing.assert_array_equal(before, [len(ids) for ids in some])
        gained.extend(np.asarray(decoded(drafter_of("mtp"), state, rounds=1)[1].length)[: len(some)] - before)
    assert np.mean(gained) >= 2.3


@pytest.mark.slow  # of the same texts
def test_what_it_writes_does_not_loop(written):
    grams = [tuple(row[i : i + 8]) for prompt, row in written[0] for i in range(prompt, len(row) - 7)]
    assert len(set(grams)) / len(grams) >= 0.7


@pytest.mark.slow  # model/test_saved_by_transformers.py compares such models
def test_transformers_loads_the_target_with_the_same_logits():
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(resolve("pocket"), dtype=torch.float32, attn_implementation="eager")
    ids = texts()[0][:300]
    with torch.no_grad():
        expected = model(torch.from_numpy(ids[None].astype(np.int64))).logits[0].numpy()
    rows = Rows(jnp.asarray(ids[None]), jnp.zeros(1, jnp.int32), jnp.full(1, len(ids)), jnp.zeros(1, jnp.int32))
    found = np.asarray(jax.jit(lambda target, rows: target.unembed(target(rows, None)[0].hidden))(target(), rows)[0])
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())


def test_every_feature_of_a_release_but_experts_is_there():
    config = target().config
    assert config.hidden_size_per_layer_input and config.num_kv_shared_layers and 64 <= config.sliding_window <= 128
    assert any(spec.k_eq_v for spec in config.layers) and config.final_logit_softcapping == 30.0
    assert len({spec.head_dim for spec in config.layers}) == 2 and len({spec.intermediate_size for spec in config.layers}) == 2


def test_the_bundle_is_small():
    folders = [path.parent for path in Path(jaxspec.__file__).parent.glob("pocket/*/config.json")]
    sizes = {folder.name: sum(f.stat().st_size for f in folder.iterdir()) for folder in folders}
    assert max(sizes.values()) <= 16 * 2**20 and sum(sizes.values()) < 58e6, sizes
    for folder in folders:
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
