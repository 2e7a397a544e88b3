"""DFlash against stored vectors, and against its formulas in NumPy over whole rounds.

The vectors in tests/golden were made with z-lab/dflash (all layers see both ways) and with SpecForge's training masks (sliding layers).
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
from kinds import DFLASH
from real_configs import FULL, SLIDING
from safetensors.numpy import load_file

from jaxspec import checkpoint, drafters
from jaxspec import released as shapes
from jaxspec.decode import Round
from jaxspec.drafters import dflash
from jaxspec.drafters.dflash import DFlash, DFlashConfig
from jaxspec.model.gemma4_config import Gemma4Config

pytestmark = pytest.mark.usefixtures("unoptimised")


@pytest.mark.parametrize("name", ["dflash_full", "dflash_sliding"])
def test_golden_rounds(name: str, tmp_path: Path) -> None:
    """The context of two rounds, observed in chunks with rejected rows of NaN behind them, what it leaves in the pages, and both blocks."""
    tensors, config, weights, target = formulas.golden(name)
    weights["lm_head.weight"] = tensors["target.lm_head.weight"]
    model = drafters.load_drafter(write_checkpoint(tmp_path, config, weights), target.config, jnp.float32, progress=False)
    assert isinstance(model, DFlash) and model.taps == (2, 5, 7)
    model = dataclasses.replace(model, page_size=5)
    block, draft = rounds.compiled(DFlash.block), rounds.compiled(DFlash.draft, static_argnums=4)
    for number, state, view, ids in formulas.golden_rounds(tensors, model, target, 7):
        close(block(model, state, view, ids)[:1], tensors[f"expected.round{number}.hidden"])
        drafts, after = draft(model, state, view, greedy(2), 7)
        np.testing.assert_array_equal(drafts.tokens[:1], tensors[f"expected.round{number}.draft_ids"])
        assert drafts.logits.shape == (2, 7, 128) and drafts.ids is None
        formulas.same(state, after)


NAMES = {"z-lab": "dflash", "speculators": "dflash speculators"}
TAPS = {"z-lab": (1, 3), "speculators": (1, 2, 3)}
CAUSAL = {"z-lab": (True, False, True), "speculators": (False, False, False)}


@functools.cache
def tensors(layout: str, folder: Path) -> dict[str, np.ndarray]:
    """The drafter's tensors under the checkpoint's keys."""
    checkpoint.save_weights(folder / layout, kinds.drafter(NAMES[layout]), DFLASH[layout])
    return load_file(folder / layout / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dflash")


def reference(layout: str, w: dict[str, np.ndarray], table: np.ndarray, taps: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The logits of all rows of a block behind a context, over the draft vocabulary, by the formulas of DFlash's paper and code.

    table: [V, H], unscaled; taps: [n, taps, H]; ids: [T]."""
    config = DFLASH[layout]
    x = table[ids].astype(np.float64)
    if "mask_embedding" in w:
        x[ids == config["mask_token_id"]] = w["mask_embedding"]
    rows = formulas.block_rows(w, {**config, **config.get("transformer_layer_config", {})}, CAUSAL[layout], taps, x)
    return formulas.softcap(rows @ w.get("lm_head.weight", table).T, config.get("final_logit_softcapping"))


ACCEPTED = [(0, 3, 7, 1, 5), (7, 0, 2, 4, 0), (6, 5, 0, 7, 2)]


@pytest.mark.parametrize("layout", DFLASH)
def test_drafts_of_whole_rounds(layout: str, folder: Path) -> None:
    """After prompts in chunks that end anywhere, and after rounds in which 0 to 7 drafts are accepted, the drafts are the formulas'."""
    model, w = kinds.drafter(NAMES[layout]), tensors(layout, folder)
    table = np.asarray(rounds.target().embed_tokens.weight)
    ids = np.arange(40) + w["d2t"] if "d2t" in w else np.arange(rounds.VOCAB)
    state = rounds.started(model)
    for accepted in [*ACCEPTED, None]:
        (found, after), known = guesses(rounds.target(), model, state, 7), rounds.lengths(state)
        formulas.same(state.drafter, after)
        for row, length in enumerate(known):
            text = rounds.tokens(state)[row]
            np.testing.assert_array_equal(text[:length], rounds.texts()[row, :length])
            taps = formulas.hidden_states()[row, list(TAPS[layout]), : length - 1].transpose(1, 0, 2)
            block = np.array([text[length - 1], *[model.config.mask_token_id] * 7])
            wanted = reference(layout, w, table, taps, block)[1:]
            close(found.logits[row], wanted)
            np.testing.assert_array_equal(found.ids[row, 0] if "d2t" in w else ids, ids)
            np.testing.assert_array_equal(found.tokens[row], formulas.chosen(wanted, ids, row, length))
        if accepted is not None:
            told = rounds.told(model, state, accepted)
            state = rounds.spec_step(rounds.target(), told, state, rounds.SLOT_IDS, round=Round(7))
            np.testing.assert_array_equal(rounds.lengths(state), np.minimum(known + np.asarray(accepted) + 1, rounds.MAX_LEN))


def test_a_rejected_round_leaves_no_trace() -> None:
    formulas.check_rejection(kinds.drafter("dflash speculators"))


@pytest.mark.slow
def test_the_longest_block_gives_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MAX_K", 15)
    texts, taken = rounds.finish(kinds.drafter("dflash"), 15)
    np.testing.assert_array_equal(texts, rounds.texts())
    assert (taken <= rounds.MAX_LEN - rounds.LENGTHS).all()


@pytest.mark.parametrize("layout", DFLASH)
def test_save_and_load(layout: str, folder: Path) -> None:
    """What is saved has the checkpoint's keys, and comes back the same; tensors that nobody reads may lie beside it."""
    model, stored = kinds.drafter(NAMES[layout]), tensors(layout, folder)
    assert stored["layers.1.self_attn.q_proj.weight"].shape == (48, 32) and stored["layers.1.self_attn.v_proj.weight"].shape == (16, 32)
    np.testing.assert_array_equal(stored["layers.2.self_attn.v_proj.weight"], np.asarray(model.kv_proj.weight)[2, 1].reshape(16, 32))
    extra = {"t2d": np.zeros(rounds.VOCAB, bool)}
    if layout == "speculators":
        extra |= {"embed_tokens.weight": np.ones((rounds.VOCAB, 32), np.float32), "verifier_norm.weight": np.ones(32, np.float32)}
    path = write_checkpoint(folder / f"{layout}-more", DFLASH[layout], {**stored, **extra})
    loaded = drafters.load_drafter(path, rounds.target().config, jnp.float32, progress=False)
    assert isinstance(loaded, DFlash) and loaded.config == model.config
    for old, new in zip(jax.tree.leaves(model), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_copy_of_the_targets_head_is_dropped() -> None:
    config = {**DFLASH["speculators"], "draft_vocab_size": rounds.VOCAB}
    read = DFlashConfig.from_hf(config, rounds.target().config, ("lm_head.weight", "d2t"))
    assert not read.own_head and {"lm_head.", "d2t"} <= set(read.unread) and dflash.abstract(read).d2t is None
    kept = DFlashConfig.from_hf(DFLASH["z-lab"], rounds.target().config, ("lm_head.weight",))
    assert kept.own_head and "lm_head." not in kept.unread


def changed(layout: str, changes: dict, dflash_config: dict | None = None) -> dict:
    config = {**DFLASH[layout], **changes}
    return {**config, "dflash_config": dflash_config} if dflash_config is not None else config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("z-lab", {"hidden_size": 48}), "hidden_size 48, for a target of 48; this target has 32"),
        (changed("speculators", {"target_hidden_size": 64}), "hidden_size 32, for a target of 64; this target has 32"),
        (changed("z-lab", {"vocab_size": 65}), "vocab_size 65, this target has 64"),
        (changed("z-lab", {"num_target_layers": 4}), r"made for a target of 4 layers \(num_target_layers\), this target has 3"),
        (changed("z-lab", {}, {"mask_token_id": 4, "target_layer_ids": [0, 3]}), r"hidden states \[1, 4\]; this target has 0 .. 3"),
        (changed("speculators", {"aux_hidden_state_layer_ids": [1, 9]}), r"hidden states \[1, 9\]; this target has 0 .. 3"),
        (changed("speculators", {"target_layer_ids": [1, 2, 3]}), r"aux_hidden_state_layer_ids \[1, 2, 3\], target_layer_ids \[1, 2, 3\];"),
        (changed("z-lab", {"aux_hidden_state_layer_ids": [0, 2]}), r"target_layer_ids \[0, 2\], aux_hidden_state_layer_ids \[0, 2\]; exp"),
        (changed("z-lab", {"num_target_layers": None}, {"mask_token_id": 4}), "neither target_layer_ids nor num_target_layers, .* 3 must"),
        (changed("z-lab", {}, {"target_layer_ids": [0]}), "mask_token_id is None; expected an id below vocab_size 64"),
        (changed("z-lab", {}, {"target_layer_ids": [0], "mask_token_id": 64}), "mask_token_id is 64; expected an id below vocab_size 64"),
        (changed("z-lab", {"num_key_value_heads": 4}), "6 query heads and 4 KV heads of head_dim 8"),
        (changed("z-lab", {"sliding_window": None}), "2 sliding layers, and there is no sliding_window"),
        (changed("z-lab", {"layer_types": [FULL]}), "layer_types has 1 entries of .*; expected 3 of"),
        (changed("z-lab", {"hidden_act": "gelu"}), "hidden_act='gelu'; implemented: 'silu'"),
        (changed("z-lab", {"attention_bias": True}), "attention_bias=True; implemented: False"),
        (changed("z-lab", {"is_neox_style": False}), "is_neox_style=False; implemented: True"),
        (changed("z-lab", {"sample_from_anchor": True}), "sample_from_anchor=True; implemented: False"),
        (changed("speculators", {"shift_label": True}), "shift_label=True; implemented: False"),
        (changed("z-lab", {"projector_type": "domino"}), "projector_type='domino'; implemented: 'dflash'"),
        (changed("z-lab", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}), "RoPE is .*'yarn'.*; implemented: rope_type 'default'"),
        (
            changed("z-lab", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}),
            "RoPE is .*'llama3'.*; implemented: rope_type 'default'",
        ),
        (changed("z-lab", {"rope_parameters": {FULL: {"rope_theta": 1e4}}}), "RoPE is .*'full_attention'.*; implemented"),
        (changed("z-lab", {}, {"attention_sink_bias": True}), "attention_sink_bias=True; implemented: none"),
        (changed("z-lab", {"block_size": None}), "config.json lacks 'block_size'"),
        (changed("z-lab", {"block_size": 1}), "block_size is 1, of which 1 guess nothing; expected more"),
        (changed("z-lab", {"sliding_window": 1e20}), "sliding_window is 1e.20 of type float, expected an integer"),
        (changed("z-lab", {"sliding_window": -1}), "sliding_window is -1, expected at least 0"),
        (changed("z-lab", {"sliding_window_non_causal": "yes"}), "sliding_window_non_causal='yes'; expected true or false"),
        (changed("z-lab", {}, {"target_layer_ids": [0], "mask_token_id": True}), "mask_token_id is True; expected an id below"),
        (changed("z-lab", {}, {"target_layer_ids": [0.5], "mask_token_id": 4}), "target_layer_ids is 0.5 .*expected an integer"),
        (changed("z-lab", {"dflash_config": True}), "dflash_config=True; expected an object"),
        (changed("z-lab", {"rope_parameters": 1}), "rope_parameters=1; expected an object"),
        (changed("z-lab", {"rope_theta": -1}), "rope_theta is -1.0, expected a finite number of more than 0"),
        (changed("z-lab", {"rms_norm_eps": float("nan")}), "rms_norm_eps is nan, expected a finite number"),
        (changed("z-lab", {"output_multiplier": "x"}), "output_multiplier is 'x' of type str, expected a number"),
        (changed("z-lab", {"draft_vocab_size": 40}), "draft_vocab_size is 40 of 64 tokens, and the checkpoint has no lm_head.weight"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:30],
)
def test_a_drafter_of_another_target(config: dict, message: str, tmp_path: Path) -> None:
    head = "lm_head.weight" if "speculators_model_type" in config else "fc.weight"
    write_checkpoint(tmp_path, config, {head: np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=f"the drafter .* cannot be used with this target: .*{message}"):
        drafters.abstract_drafter(tmp_path, rounds.target().config, jnp.float32)


def test_a_pickled_mask_embedding_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, DFLASH["z-lab"], {"fc.weight": np.zeros(1, np.float32)})
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"mask_embedding.pt is a pickle.*expected a tensor mask_embedding in model.safetensors.*python -c"
    ):
        drafters.abstract_drafter(tmp_path, rounds.target().config, jnp.float32)


def test_a_block_holds_block_size_rows() -> None:
    with pytest.raises(ValueError, match="num_draft_tokens is 8; the drafter's block_size of 8 holds the anchor and 7 drafts"):
        jax.eval_shape(lambda: kinds.drafter("dflash speculators").init(2, 16, 8))
    assert jax.eval_shape(lambda: kinds.drafter("dflash speculators").init(2, 16, 7)).cache.slots == 2


def test_taps_that_the_checkpoint_leaves_out() -> None:
    """As many as the drafter has layers, evenly spaced, if it was made for a target as deep as this one."""
    target = Gemma4Config.from_hf(real_configs.TARGETS["31B"])
    config = {**REAL["31B"], "num_hidden_layers": 6, "layer_types": [FULL] * 6, "dflash_config": {"mask_token_id": 4}}
    assert DFlashConfig.from_hf(config, target).taps == (2, 13, 24, 36, 47, 58)  # those of the released one, which names them


@pytest.mark.parametrize(
    ("changes", "causal", "windows"),
    [
        ({}, (True, False), (7, None)),
        ({"is_causal": True}, (True, True), (7, None)),
        ({"dflash_config": {"causal": False}}, (False, False), (7, None)),
        ({"dflash_config": {"is_causal": False}}, (False, False), (7, None)),
        ({"is_causal": True, "dflash_config": {"causal": False}}, (True, True), (7, None)),
        ({"layer_types": [FULL] * 2, "dflash_config": {"use_swa": True, "swa_window_size": 5}}, (False, False), (5, 5)),
        ({"layer_types": None, "use_sliding_window": True, "max_window_layers": 1}, (False, True), (None, 7)),
        ({"layer_types": None}, (False, False), (None, None)),
    ],
)
def test_masks(changes: dict, causal: tuple, windows: tuple) -> None:
    changes = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], **changes}
    own = {"mask_token_id": 4, "target_layer_ids": [0], **changes.pop("dflash_config", {})}
    read = DFlashConfig.from_hf({**DFLASH["z-lab"], **changes, "dflash_config": own}, rounds.target().config)
    assert (read.causal, tuple(spec.window for spec in read.layers)) == (causal, windows)


@pytest.mark.parametrize(
    ("changes", "theta"), [({}, 1e4), ({"rope_theta": None}, 1e6), ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, 5.0)]
)
def test_rope_theta(changes: dict, theta: float) -> None:
    read = DFlashConfig.from_hf({**DFLASH["z-lab"], **changes}, rounds.target().config)
    assert {spec.rope_theta for spec in read.layers} == {theta}


@pytest.mark.parametrize(
    ("outer", "inner", "mask"),
    [
        ({"mask_token_id": 5}, {"mask_token_id": 4}, 4),
        ({"mask_token_id": 5, "pard_token": 6}, {}, 5),
        ({"dspark_noise_token_id": 7, "ptd_token_id": 8}, {}, 7),
        ({"pard_token": 6, "ptd_token_id": 8}, {}, 6),
        ({"ptd_token_id": 8}, {}, 8),
    ],
)
def test_where_the_mask_token_is_named(outer: dict, inner: dict, mask: int) -> None:
    own = {"target_layer_ids": [0], **inner}
    read = DFlashConfig.from_hf({**DFLASH["z-lab"], **outer, "dflash_config": own}, rounds.target().config)
    assert read.mask_token_id == mask


@pytest.mark.parametrize("scale", [1.0, 32**0.5])
def test_the_embedding_scale_is_a_setting(scale: float) -> None:
    own = {"mask_token_id": 4, "target_layer_ids": [0], "input_embedding_scale": scale, "output_multiplier": 2.0}
    read = DFlashConfig.from_hf({**DFLASH["z-lab"], "dflash_config": own}, rounds.target().config)
    assert read.output_multiplier == 2.0
    model = dataclasses.replace(kinds.drafter("dflash"), config=read)
    found = model.embed(rounds.target(), jnp.asarray([[3, 4]], jnp.int32))
    close(found[0], np.asarray(rounds.target().embed_tokens.weight)[[3, 4]] * scale)


def test_a_config_for_gemma_that_names_no_scale_has_two_readings(tmp_path: Path) -> None:
    """By each the embeddings are those of a config that names it, and what is saved names it."""
    config = {**DFLASH["z-lab"], "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2]}}
    model = dataclasses.replace(kinds.drafter("dflash"), config=DFlashConfig.from_hf(config, rounds.target().config))
    assert kinds.drafter("dflash").readings == () and model.readings == ("input_embedding_scale=1.0", "input_embedding_scale=5.6569")
    table = np.asarray(rounds.target().embed_tokens.weight)[[3, 4]]
    for which, scale in enumerate((1.0, 32**0.5)):
        taken = model.read_as(jnp.int32(which))
        close(jax.jit(lambda model: model.embed(rounds.target(), jnp.asarray([[3, 4]], jnp.int32)))(taken)[0], table * scale)
        drafters.save_drafter(tmp_path / str(which), taken, config)
        saved = drafters.load_drafter(tmp_path / str(which), rounds.target().config, jnp.float32, progress=False)
        assert isinstance(saved, DFlash) and saved.readings == () and saved.config.input_embedding_scale == scale
    # speculators does not scale them, and neither do targets of other families.
    assert DFlashConfig.from_hf(DFLASH["speculators"], rounds.target().config, ("lm_head.weight",)).undecided is None
    assert DFlashConfig.from_hf(config, shapes.target_config("step3p5")).undecided is None


REAL = {"31B": shapes.drafter_config("dflash", "31b"), "26B-A4B": shapes.drafter_config("dflash", "26b")}
# RedHatAI's drafter for 31B (facts: its config.json).
REAL_SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [1, 17, 29, 47, 58],
    "block_size": 8,
    "draft_vocab_size": 32_000,
    "mask_token_id": 4,
    "transformer_layer_config": {
        **{key: REAL["31B"][key] for key in ("hidden_size", "num_hidden_layers", "hidden_act", "rms_norm_eps", "vocab_size")},
        "intermediate_size": 21_504,
        "layer_types": [FULL] * 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "rope_theta": 10_000,
    },
}


@pytest.mark.parametrize("name", REAL)
def test_released_drafters(name: str) -> None:
    """Parameters, keys, taps and the shapes of a round."""
    target = Gemma4Config.from_hf(real_configs.TARGETS[name])
    config = DFlashConfig.from_hf(REAL[name], target)
    model = dflash.abstract(config)
    hidden, keys = target.hidden_size, formulas.checkpoint_shapes(model)
    parameters = sum(math.prod(shape) for shape in keys.values())
    assert parameters == {"31B": 1_535_967_488, "26B-A4B": 429_689_088}[name]
    assert keys["fc.weight"] == (hidden, 6 * hidden) and keys["layers.4.self_attn.k_proj.weight"] == (1024, hidden)
    assert len(keys) == 3 + 5 * 11 and {key.split(".")[0] for key in keys} == {"fc", "hidden_norm", "norm", "layers"}
    check_round(model, target, 15)


def test_the_released_speculators_drafter() -> None:
    target = Gemma4Config.from_hf(real_configs.TARGETS["31B"])
    config = DFlashConfig.from_hf(REAL_SPECULATORS, target, ("lm_head.weight", "d2t", "t2d", "embed_tokens.weight"))
    assert config.taps == (1, 17, 29, 47, 58) and config.own_head
    check_round(dflash.abstract(config), target, 7)


def test_no_drafts() -> None:
    model = kinds.drafter("dflash")
    state = rounds.started(model)
    found, _ = guesses(rounds.target(), model, state, 0)
    assert found.tokens.shape == (6, 0) and found.logits is None
