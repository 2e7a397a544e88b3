"""DSpark against stored vectors, and against its formulas in NumPy over whole rounds.

The vectors in tests/golden were made with deepseek-ai/DeepSpec (Gemma 4's layers) and with speculators (Qwen3's layers and each head).
"""

import dataclasses
import functools
import math
from pathlib import Path

import formulas
import jax
import jax.numpy as jnp
import kinds
import numpy as np
import pytest
import real_configs
import rounds
from formulas import check_round, close, greedy, guesses, write_checkpoint
from kinds import DSPARK
from safetensors.numpy import load_file

from jaxspec import checkpoint, drafters
from jaxspec import released as shapes
from jaxspec.decode import Round
from jaxspec.drafters import dspark
from jaxspec.drafters.dspark import CONFIDENCE, DSpark, DSparkConfig
from jaxspec.drafters.training import whole_rows
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.layer_spec import SLIDING
from jaxspec.model.layers import Linear

pytestmark = pytest.mark.usefixtures("unoptimised")
KEYS = ("lm_head.weight", CONFIDENCE)


def walk(model, rows, base, previous):
    """Logits and confidences of a block's guesses, where these tokens stand before each: [B, K]."""
    memory, logits, confidences = model.begin(rows, previous[:, 0]), [], []
    for k in range(previous.shape[1]):
        hidden = rows[:, model.config.first_row + k]
        found, memory = model.follow(base[:, k], previous[:, k], hidden, memory)
        logits.append(found)
        confidences.append(model.confidence(previous[:, k], hidden))
    return jnp.stack(logits, axis=1), jnp.stack(confidences, axis=1)


@pytest.mark.parametrize("name", ["dspark_gemma4", "dspark_speculators", "dspark_speculators_gated", "dspark_speculators_rnn"])
def test_golden_rounds(name: str, tmp_path: Path) -> None:
    """The context of two rounds, both blocks, the greedy walk, and the logits and confidences along the sampled one."""
    tensors, config, weights, target = formulas.golden(name)
    model = drafters.load_drafter(write_checkpoint(tmp_path, config, weights), target.config, jnp.float32, progress=False)
    assert isinstance(model, DSpark)
    model = dataclasses.replace(model, page_size=5)
    block, draft = rounds.compiled(DSpark.block), rounds.compiled(DSpark.draft, static_argnums=4)
    count, follow = model.num_draft_tokens, rounds.compiled(walk)
    d2t = weights.get("d2t", np.zeros(model.config.draft_vocab_size, int))
    ids = np.arange(len(d2t)) + d2t
    for number, state, view, block_ids in formulas.golden_rounds(tensors, model, target, count):

        def wanted(what: str, number: int = number) -> np.ndarray:
            return tensors[f"expected.round{number}.{what}"]

        rows = block(model, state, view, block_ids)
        close(rows[:1], wanted("hidden"))
        base, _ = model.candidates(target, rows[:, model.config.first_row :])
        close(base[:1], wanted("base_logits"))
        drafts, after = draft(model, state, view, greedy(2), count)
        np.testing.assert_array_equal(drafts.tokens[:1], wanted("greedy.draft_ids"))
        close(drafts.logits[:1], wanted("greedy.logits"))
        np.testing.assert_array_equal(np.arange(len(ids)) if drafts.ids is None else drafts.ids[0, 0], ids)
        formulas.same(state, after)
        for way in ("greedy", "sampled"):
            tokens = wanted(f"{way}.draft_ids")
            previous = np.concatenate([block_ids[:1, :1], tokens[:, :-1]], axis=1)
            logits, confidences = follow(model, rows[:1], base[:1], jnp.asarray(previous, jnp.int32))
            close(logits, wanted(f"{way}.logits"))
            close(confidences, wanted(f"{way}.confidence_logits"))
        noise = tensors[f"input.round{number}.sampled.gumbel"]
        np.testing.assert_array_equal(ids[np.argmax(np.asarray(logits) / 0.8 + noise, axis=-1)], tokens)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


TAPS = {"speculators": (1, 2, 3), "rnn": (1, 3), "gemma": (1, 3)}
CAUSAL = {"speculators": (False,) * 3, "rnn": (True, False, True), "gemma": (False,) * 2}
COUNT = 7


@functools.cache
def tensors(layout: str, folder: Path) -> dict[str, np.ndarray]:
    """The drafter's tensors under the checkpoint's keys."""
    name = "dspark" if layout == "speculators" else f"dspark {layout}"
    checkpoint.save_weights(folder / layout, kinds.drafter(name), DSPARK[layout])
    return load_file(folder / layout / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dspark")


def reference(layout: str, w: dict[str, np.ndarray], table: np.ndarray, taps: np.ndarray, anchor: int, choose) -> np.ndarray:
    """The tokens of a walk and their logits, by the formulas of DeepSpec and speculators. choose: (logits, how many before) -> token."""
    config = DSPARK[layout]
    first = 0 if config.get("sample_from_anchor", True) else 1
    inner = {**config, **config.get("transformer_layer_config", {})}
    ids = np.array([anchor, *[config["mask_token_id"]] * (COUNT - 1 + first)])
    scale = config["hidden_size"] ** 0.5 if layout == "gemma" else 1.0
    rows = formulas.block_rows(w, inner, CAUSAL[layout], taps, table[ids] * scale)
    base = formulas.softcap(rows @ w.get("lm_head.weight", table).T, config.get("final_logit_softcapping"))
    w1, w2 = (w[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
    previous, memory, logits = anchor, np.zeros(w1.shape[1]), []
    for row in range(len(rows)):
        e, h = w1[previous], rows[row]
        if layout == "speculators":
            e = sigmoid(w["markov_head.gate_proj.weight"] @ np.concatenate([h, e]) + w["markov_head.gate_proj.bias"]) * e
        if layout == "rnn":
            joint = w["markov_head.joint_proj.weight"] @ np.concatenate([memory, e, h]) + w["markov_head.joint_proj.bias"]
            keep, new, out = np.split(joint, 3)
            memory, e = sigmoid(keep) * memory + (1 - sigmoid(keep)) * np.tanh(new), np.tanh(out)
        if row >= first:
            logits.append(base[row] + w2 @ e)
            previous = choose(logits[-1], len(logits) - 1)
    return np.stack(logits)


@pytest.mark.parametrize("layout", ["gemma", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("speculators", "rnn"))])
def test_drafts_of_whole_rounds(layout: str, folder: Path) -> None:
    """After prompts in chunks that end anywhere, and after rounds in which 0 to 7 drafts are accepted, the drafts are the formulas'."""
    model, w = kinds.drafter("dspark" if layout == "speculators" else f"dspark {layout}"), tensors(layout, folder)
    table = np.asarray(rounds.target().embed_tokens.weight)
    ids = np.arange(40) + w["d2t"] if "d2t" in w else np.arange(rounds.VOCAB)
    state = rounds.started(model)
    for accepted in [(0, 3, 7, 1, 5), (6, 5, 0, 7, 2), None]:
        (found, after), known = guesses(rounds.target(), model, state, COUNT), rounds.lengths(state)
        formulas.same(state.drafter, after)
        for row, length in enumerate(known):
            text, tokens = rounds.tokens(state)[row], []

            def choose(logits, k, row=row, length=length, tokens=tokens):
                tokens.append(formulas.chosen(logits[None], ids, row, length + k)[0])
                return tokens[-1]

            taps = formulas.hidden_states()[row, list(TAPS[layout]), : length - 1].transpose(1, 0, 2)
            close(found.logits[row], reference(layout, w, table, taps, text[length - 1], choose))
            np.testing.assert_array_equal(found.tokens[row], tokens)
        if accepted is not None:
            state = rounds.spec_step(rounds.target(), rounds.told(model, state, accepted), state, rounds.SLOT_IDS, round=Round(7))
            np.testing.assert_array_equal(rounds.lengths(state), np.minimum(known + np.asarray(accepted) + 1, rounds.MAX_LEN))


def test_a_rejected_round_leaves_no_trace() -> None:
    formulas.check_rejection(kinds.drafter("dspark gemma"))


@pytest.mark.parametrize("layout", DSPARK)
def test_save_and_load(layout: str, folder: Path) -> None:
    """What is saved has the checkpoint's keys, and comes back the same; copies of the target's tensors may lie beside it."""
    model, stored = kinds.drafter("dspark" if layout == "speculators" else f"dspark {layout}"), tensors(layout, folder)
    assert ("layers.0.self_attn.v_proj.weight" in stored) == (layout != "gemma") and CONFIDENCE in stored
    heads = {"gemma": set(), "speculators": {"gate_proj.weight", "gate_proj.bias"}, "rnn": {"joint_proj.weight", "joint_proj.bias"}}
    assert {key.removeprefix("markov_head.") for key in stored if key.startswith("markov_head.")} == {
        "markov_w1.weight",
        "markov_w2.weight",
        *heads[layout],
    }
    extra = {"t2d": np.zeros(rounds.VOCAB, bool), "embed_tokens.weight": np.ones((rounds.VOCAB, 32), np.float32)}
    if layout != "speculators":
        extra["lm_head.weight"] = np.ones((rounds.VOCAB, 32), np.float32)
    path = write_checkpoint(folder / f"{layout}-more", DSPARK[layout], {**stored, **extra})
    loaded = drafters.load_drafter(path, rounds.target().config, jnp.float32, progress=False)
    assert isinstance(loaded, DSpark) and loaded.config == model.config
    for old, new in zip(jax.tree.leaves(model), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(old, new)


def test_heads_that_a_checkpoint_lacks(tmp_path: Path, folder: Path) -> None:
    """Without a confidence head, or without its weights, nothing says how sure a guess is; with markov_rank 0 all come from the block."""
    stored = {key: x for key, x in tensors("gemma", folder).items() if not key.startswith("confidence_head.")}
    path = write_checkpoint(tmp_path / "a", DSPARK["gemma"], stored)
    loaded = drafters.load_drafter(path, rounds.target().config, jnp.float32, progress=False)
    assert isinstance(loaded, DSpark) and loaded.confidence_head is None and loaded.markov_head is not None
    assert loaded.confidence(jnp.zeros(1, jnp.int32), jnp.zeros((1, 32))) is None
    off = {**DSPARK["gemma"], "enable_confidence_head": False}
    read = DSparkConfig.from_hf(off, rounds.target().config, KEYS)
    assert not read.confidence and "confidence_head." in read.unread
    plain = DSparkConfig.from_hf({**DSPARK["gemma"], "markov_rank": 0}, rounds.target().config, KEYS)
    assert dspark.abstract(plain).markov_head is None and not plain.confidence_with_markov
    full = kinds.drafter("dspark gemma")
    markov = dataclasses.replace(full.markov_head, markov_w2=Linear(jnp.zeros_like(full.markov_head.markov_w2.weight)))
    without = dataclasses.replace(full, markov_head=None, confidence_head=None)
    silent = dataclasses.replace(full, markov_head=markov)
    found, wanted = (guesses(rounds.target(), model, rounds.started(model), 2)[0] for model in (without, silent))
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    close(found.logits, wanted.logits)


def changed(layout: str, **changes) -> dict:
    return {**DSPARK[layout], **changes}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("gemma", hidden_size=48), "hidden_size 48, for a target of 48; this target has 32"),
        (changed("gemma", vocab_size=65), "vocab_size 65, this target has 64"),
        (changed("gemma", num_target_layers=4), r"made for a target of 4 layers \(num_target_layers\), this target has 3"),
        (changed("gemma", target_layer_ids=[0, 3]), r"hidden states \[1, 4\]; this target has 0 .. 3"),
        (changed("gemma", target_layer_ids=None), "names no layers of the target; expected aux_hidden_state_layer_ids or target_layer_ids"),
        (changed("gemma", block_size=None), "config.json lacks 'block_size'"),
        (changed("gemma", mask_token_id=None), "mask_token_id is None; expected an id below vocab_size 64"),
        (changed("gemma", layer_types=[SLIDING, "full_attention"]), "the drafter's layers have window 8; implemented: none"),
        (changed("gemma", sample_from_anchor=False), "sample_from_anchor=False; implemented: True, None"),
        (changed("speculators", sample_from_anchor="yes"), "sample_from_anchor='yes'; implemented: True, False"),
        (changed("speculators", markov_head_type="mlp"), "markov_head_type is 'mlp'; implemented: 'vanilla', 'gated', 'rnn'"),
        (changed("speculators", aux_hidden_state_layer_ids=[1, 9]), r"hidden states \[1, 9\]; this target has 0 .. 3"),
        (changed("speculators", quantization_config={"quant_method": "fp8"}), "quant_method 'fp8' with weight_block_size None .* served"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:30],
)
def test_a_drafter_of_another_target(config: dict, message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config, {"lm_head.weight": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=f"the drafter .* cannot be used with this target: .*{message}"):
        drafters.abstract_drafter(tmp_path, rounds.target().config, jnp.float32)


@pytest.mark.parametrize(("layout", "most", "holds"), [("gemma", 7, "7 drafts"), ("rnn", 7, "the anchor and 7 drafts")])
def test_a_block_holds_block_size_rows(layout: str, most: int, holds: str) -> None:
    model = kinds.LAYOUTS[f"dspark {layout}"]()
    with pytest.raises(
        ValueError, match=f"num_draft_tokens is {most + 1}; the drafter's block_size of {7 if layout == 'gemma' else 8} holds {holds}"
    ):
        model.init(2, 16, most + 1)
    assert model.num_draft_tokens == most


def test_rope_of_the_target() -> None:
    """Of parameters by kind of layer, which speculators may copy from the target, those of sliding layers count, for all layers."""
    decoder = DSPARK["speculators"]["transformer_layer_config"]
    rope = {SLIDING: {"rope_type": "default", "rope_theta": 7e3}, "full_attention": {"rope_type": "proportional", "rope_theta": 1e6}}
    config = changed("speculators", transformer_layer_config={**decoder, "rope_parameters": rope})
    read = DSparkConfig.from_hf(config, rounds.target().config, KEYS)
    assert {(spec.rope_theta, spec.rotary_angles) for spec in read.layers} == {(7e3, 4)}


def test_a_draft_vocabulary_needs_a_head(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, DSPARK["speculators"], {"fc.weight": np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match="draft_vocab_size is 40 of 64 tokens, and the checkpoint has no lm_head.weight"):
        drafters.abstract_drafter(tmp_path, rounds.target().config, jnp.float32)


@pytest.mark.parametrize(("name", "target", "parameters"), [("12b", "12B", 1_417_178_630), ("31b", "31B", 2_786_629_889)])
def test_released_drafters(name: str, target: str, parameters: int) -> None:
    """Parameters, keys, taps and the shapes of a round."""
    config = Gemma4Config.from_hf(real_configs.TARGETS[target])
    model = shapes.abstract_drafter("dspark", name, config, jnp.bfloat16)
    keys, hidden = formulas.checkpoint_shapes(model), config.hidden_size
    assert sum(math.prod(shape) for shape in keys.values()) == parameters
    assert keys["fc.weight"] == (hidden, 5 * hidden) and keys[CONFIDENCE] == (1, hidden + 256)
    assert keys["markov_head.markov_w1.weight"] == (262_144, 256)
    if name == "12b":  # k_proj is K and V
        assert model.taps == (6, 18, 30, 42, 47) and keys["layers.4.self_attn.k_proj.weight"] == (512, hidden)
        assert "layers.0.self_attn.v_proj.weight" not in keys and not {"lm_head.weight", "embed_tokens.weight"} & keys.keys()
    else:
        assert model.taps == (1, 17, 29, 47, 58) and keys["lm_head.weight"] == (32_000, hidden)
        assert keys["markov_head.markov_w2.weight"] == (32_000, 256)
    check_round(model, config, model.num_draft_tokens)


def read(config: dict, **changes) -> DSparkConfig:
    return DSparkConfig.from_hf({**config, **changes}, rounds.target().config, KEYS)


@pytest.mark.parametrize("layout", ["speculators", pytest.param("rnn", marks=pytest.mark.slow)])
def test_a_config_that_does_not_say_which_rows_guess_has_two_readings(layout: str) -> None:
    """Each drafts and trains as by a config that says it; a block then has room for one draft less."""
    model = kinds.drafter("dspark" if layout == "speculators" else f"dspark {layout}")
    config = {k: v for k, v in DSPARK[layout].items() if k != "sample_from_anchor"}
    either = dataclasses.replace(model, config=read(config))
    assert either.readings == ("sample_from_anchor=true", "sample_from_anchor=false") and model.readings == ()
    assert either.num_draft_tokens == config["block_size"] - 1
    with pytest.raises(ValueError, match=f"block_size of {config['block_size']} holds the anchor and {config['block_size'] - 1} drafts"):
        either.init(2, 16, config["block_size"])
    state, target = rounds.started(model), rounds.target()
    rows, at = whole_rows(jnp.asarray(rounds.texts()[:2])), jnp.asarray([[3, 11], [5, 20]], jnp.int32)
    out, _ = target(rows, None, taps=model.taps, attention="xla")
    for which, anchor in enumerate((True, False)):
        said, taken = dataclasses.replace(model, config=read(config, sample_from_anchor=anchor)), either.read_as(jnp.int32(which))
        wanted, found = (guesses(target, drafter, state, 5)[0] for drafter in (said, taken))
        close(found.logits, wanted.logits)
        np.testing.assert_array_equal(found.tokens, wanted.tokens)
        training = rounds.compiled(lambda drafter: [guess.logits for guess in drafter.guesses(target, out, rows.ids, at, 4)])
        close(np.stack(training(taken)), np.stack(training(said)))
        drafter, written = taken.decided(config)
        assert drafter.reading is None and written == {**config, "sample_from_anchor": anchor}
        assert read(written) == said.config
    as_it_is, first = (guesses(target, drafter, state, 5)[0] for drafter in (either, either.read_as(jnp.int32(0))))
    np.testing.assert_array_equal(as_it_is.tokens, first.tokens)
