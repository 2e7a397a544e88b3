"""DFlash against stored vectors, and against its formulas in NumPy over whole rounds.

The vectors in tests/golden were made with z-lab/dflash (all layers see both ways) and with SpecForge's training masks (sliding layers).
"""

import dataclasses
import functools
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import real_configs
import rounds
import tiny
from real_configs import FULL, SLIDING
from safetensors.numpy import load_file, save_file

from jaxspec import checkpoint, drafters, gemma4
from jaxspec.config import Gemma4Config
from jaxspec.drafters import dflash
from jaxspec.drafters.base import Observed, Target
from jaxspec.drafters.dflash import DFlash, DFlashConfig
from jaxspec.layers import Embedding
from jaxspec.sampling import Sampling

GOLDEN = Path(__file__).parent.parent / "golden"
LIMIT = 1e-4


def close(found, wanted) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), rtol=LIMIT, atol=LIMIT)


def greedy(batch: int) -> Sampling:
    return Sampling(jnp.zeros((batch, 2), jnp.uint32), jnp.zeros(batch, jnp.float32))


def write_checkpoint(folder: Path, config: dict, tensors: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def stub_target(layers: int, table: np.ndarray) -> gemma4.Gemma4:
    """A target of which only the table is there."""
    text = {
        **tiny.TEXT,
        "vocab_size": len(table),
        "hidden_size": table.shape[1],
        "num_hidden_layers": layers,
        "layer_types": [FULL] * layers,
    }
    config = Gemma4Config.from_hf({**text, "hidden_size_per_layer_input": 0})
    empty = dataclasses.replace(gemma4.abstract(config, jnp.float32), layers=())
    target = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), empty)
    return dataclasses.replace(target, embed_tokens=Embedding(jnp.asarray(table), table.shape[1] ** 0.5))


@pytest.mark.parametrize("name", ["dflash_full", "dflash_sliding"])
def test_golden_rounds(name: str, tmp_path: Path) -> None:
    """The context of two rounds, observed in chunks with rejected rows of NaN behind them, what it leaves in the pages, and both blocks."""
    tensors, meta = load_file(GOLDEN / f"{name}.safetensors"), json.loads((GOLDEN / f"{name}.json").read_text())
    weights = {key.removeprefix("checkpoint."): value for key, value in tensors.items() if key.startswith("checkpoint.")}
    weights["lm_head.weight"] = tensors["target.lm_head.weight"]
    target = stub_target(8, tensors["target.embed_tokens.weight"])
    drafter = drafters.load_drafter(write_checkpoint(tmp_path, meta["config"], weights), target.config, jnp.float32, progress=False)
    assert isinstance(drafter, DFlash) and drafter.taps == (2, 5, 7)
    drafter = dataclasses.replace(drafter, page_size=5)
    state = jax.jit(lambda: drafter.init(3, 40, 7))()
    state = dataclasses.replace(
        state, cache=dataclasses.replace(state.cache, layers=jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.cache.layers))
    )
    observe, block = rounds.compiled(DFlash.observe), rounds.compiled(DFlash.block)
    draft = rounds.compiled(DFlash.draft, static_argnums=4)
    slots, at, chunk = jnp.asarray([2, 3], jnp.int32), 0, 4  # the second row is nobody's
    for number in (1, 2):
        hidden = tensors[f"input.round{number}.target_hidden_states"]
        for first in range(0, hidden.shape[1], chunk):
            taps = hidden[list(drafter.taps), first : first + chunk]
            count = taps.shape[1]
            taps = np.pad(taps, ((0, 0), (0, chunk - count), (0, 0)), constant_values=np.nan)
            positions = jnp.asarray(at + np.arange(chunk)[None] + np.zeros((2, 1)), jnp.int32)
            rows = Observed(
                target, slots, jnp.zeros_like(positions), positions, jnp.zeros((2, 64)), tuple(jnp.stack([tap] * 2) for tap in taps),
                jnp.asarray([count, count], jnp.int32), jnp.zeros(2, jnp.int32),
            )  # fmt: skip
            state, at = observe(drafter, state, rows), at + count
        ids = jnp.asarray(np.repeat(tensors[f"input.round{number}.block_token_ids"], 2, axis=0), jnp.int32)
        view = Target(target, None, slots, ids[:, 0], jnp.asarray([at, 0], jnp.int32))
        close(block(drafter, state, view, ids)[:1], tensors[f"expected.round{number}.hidden"])
        drafts, after = draft(drafter, state, view, greedy(2), 7)
        np.testing.assert_array_equal(drafts.tokens[:1], tensors[f"expected.round{number}.draft_ids"])
        assert drafts.logits.shape == (2, 7, 128) and drafts.ids is None
        for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            assert np.asarray(old).tobytes() == np.asarray(new).tobytes()
    for layer, (spec, pool) in enumerate(zip(drafter.config.layers, state.cache.layers, strict=True)):
        table = np.asarray(state.cache.tables[spec.kind])[2]
        for pages, kind in ((pool.k, "key"), (pool.v, "value")):
            ring = np.asarray(pages)[table].reshape(-1, 2, 16)
            wanted = tensors[f"debug.cache.layers.{layer}.{kind}"][0].transpose(1, 0, 2)
            first = max(at - len(ring), 0)
            close(ring[np.arange(first, at) % len(ring)], wanted[first:])
            used = np.isin(np.arange(len(pages)), table)
            assert np.isnan(np.asarray(pages)[~used]).all() and np.isnan(ring).sum() == max(len(ring) - at, 0) * 2 * 16


# Two drafters of the target of `rounds`, as z-lab and as speculators lay them out.
BASE = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, SLIDING],
    "sliding_window": 7,
    "rms_norm_eps": 1e-6,
    "vocab_size": rounds.VOCAB,
}
CONFIGS = {
    "z-lab": {
        **BASE,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "rope_theta": 1e4,
        "block_size": 16,
        "num_target_layers": 3,
        "final_logit_softcapping": 2.0,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2]},
    },
    "speculators": {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {**BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}},
        "block_size": 8,
        "draft_vocab_size": 40,
        "mask_token_id": 60,
        "aux_hidden_state_layer_ids": [1, 2, 3],
        "sliding_window_non_causal": True,
    },
}
TAPS = {"z-lab": (1, 3), "speculators": (1, 2, 3)}
CAUSAL = {"z-lab": (True, False, True), "speculators": (False, False, False)}


@functools.cache
def drafter(layout: str) -> DFlash:
    config = DFlashConfig.from_hf(CONFIGS[layout], rounds.target().config, ("lm_head.weight",) if layout == "speculators" else ())
    weights = tiny.random_weights(dflash.abstract(dataclasses.replace(config, own_mask=layout == "speculators"), jnp.float32), 3)
    if weights.d2t is not None:
        weights = dataclasses.replace(weights, d2t=np.sort(np.random.default_rng(4).permutation(rounds.VOCAB)[:40]) - np.arange(40))
        weights = dataclasses.replace(weights, d2t=weights.d2t.astype(np.int32))
    return dataclasses.replace(jax.tree.map(jnp.asarray, weights), page_size=rounds.PAGE)


@functools.cache
def tensors(layout: str, folder: Path) -> dict[str, np.ndarray]:
    """The drafter's tensors under the checkpoint's keys."""
    checkpoint.save_weights(folder / layout, drafter(layout), CONFIGS[layout])
    return load_file(folder / layout / "model.safetensors")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dflash")


def rms(x: np.ndarray, weight: np.ndarray, eps: float = 1e-6) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: np.ndarray, at: np.ndarray, theta: float) -> np.ndarray:
    """x: [T, heads, D]"""
    half = x.shape[-1] // 2
    angle = at[:, None, None] * theta ** (-np.arange(half) / half)
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * np.cos(angle) - high * np.sin(angle), high * np.cos(angle) + low * np.sin(angle)], axis=-1)


def attend(q, k, v, visible) -> np.ndarray:
    """q: [T, heads, D]; k, v: [S, KV heads, D]; visible: [T, S] -> [T, heads * D]"""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.where(visible[None], np.einsum("thd,shd->hts", q, k) / math.sqrt(q.shape[-1]), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, v).reshape(len(q), -1)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def reference(layout: str, w: dict[str, np.ndarray], table: np.ndarray, taps: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The logits of all rows of a block behind a context, over the draft vocabulary, by the formulas of DFlash's paper and code.

    table: [V, H], unscaled; taps: [n, taps, H]; ids: [T]."""
    config = CONFIGS[layout]
    inner = {**config, **config.get("transformer_layer_config", {})}
    theta, dim = inner.get("rope_theta") or inner["rope_parameters"]["rope_theta"], inner["head_dim"]
    n, t = len(taps), len(ids)
    context = rms(taps.reshape(n, -1) @ w["fc.weight"].T, w["hidden_norm.weight"])
    x = table[ids].astype(np.float64)
    if "mask_embedding" in w:
        x[ids == config["mask_token_id"]] = w["mask_embedding"]
    at, key_at = n + np.arange(t), np.arange(n + t)
    for layer, kind in enumerate(inner["layer_types"]):
        own = {k.removeprefix(f"layers.{layer}."): v for k, v in w.items() if k.startswith(f"layers.{layer}.")}

        def heads(rows, name, own=own):
            return (rows @ own[f"self_attn.{name}_proj.weight"].T).reshape(len(rows), -1, dim)

        normed = rms(x, own["input_layernorm.weight"])
        both = np.concatenate([context, normed])
        q = rotate(rms(heads(normed, "q"), own["self_attn.q_norm.weight"]), at, theta)
        k = rotate(rms(heads(both, "k"), own["self_attn.k_norm.weight"]), key_at, theta)
        visible = np.ones((t, n + t), bool)
        if kind == SLIDING:
            visible &= at[:, None] - key_at[None] < inner["sliding_window"]
        if CAUSAL[layout][layer]:
            visible &= key_at[None] <= at[:, None]
        x = x + attend(q, k, heads(both, "v"), visible) @ own["self_attn.o_proj.weight"].T
        normed = rms(x, own["post_attention_layernorm.weight"])
        gated = silu(normed @ own["mlp.gate_proj.weight"].T) * (normed @ own["mlp.up_proj.weight"].T)
        x = x + gated @ own["mlp.down_proj.weight"].T
    logits = rms(x, w["norm.weight"]) @ w.get("lm_head.weight", table).T
    cap = config.get("final_logit_softcapping")
    return cap * np.tanh(logits / cap) if cap else logits


@functools.cache
def hidden_states() -> np.ndarray:
    """The target's hidden states over all texts: [5, layers + 1, MAX_LEN, H]."""
    ids = jnp.asarray(rounds.texts())
    rows = gemma4.Rows(ids, *(jnp.full(len(ids), value, jnp.int32) for value in (0, ids.shape[1], 0)))
    out = rounds.compiled(functools.partial(gemma4.Gemma4.__call__, taps=(0, 1, 2, 3)))(rounds.target(), rows, None)[0]
    return np.stack(out.taps, axis=1)


@functools.partial(rounds.compiled, static_argnames="k")
def guesses(target, model, state, k):
    """What the next round would draft."""
    slots = jnp.asarray(rounds.SLOT_IDS)
    length, seed, temperature = (x.at[slots].get(mode="clip") for x in (state.computed, state.seed, state.temperature))
    view = Target(target, state.cache, slots, state.tokens.at[slots, length].get(mode="clip"), length)
    return model.draft(state.drafter, view, Sampling(seed, temperature), k)[0]


ACCEPTED = [(0, 3, 7, 1, 5), (7, 0, 2, 4, 0), (6, 5, 0, 7, 2)]


@pytest.mark.parametrize("layout", CONFIGS)
def test_drafts_of_whole_rounds(layout: str, folder: Path) -> None:
    """After prompts in chunks that end anywhere, and after rounds in which 0 to 7 drafts are accepted, the drafts are the formulas'."""
    model, w = drafter(layout), tensors(layout, folder)
    table = np.asarray(rounds.target().embed_tokens.weight)
    ids = np.arange(40) + w["d2t"] if "d2t" in w else np.arange(rounds.VOCAB)
    state = rounds.started(model)
    for accepted in [*ACCEPTED, None]:
        found, known = guesses(rounds.target(), model, state, 7), rounds.lengths(state)
        for row, length in enumerate(known):
            text = rounds.tokens(state)[row]
            taps = hidden_states()[row, list(TAPS[layout]), : length - 1].transpose(1, 0, 2)
            block = np.array([text[length - 1], *[model.config.mask_token_id] * 7])
            wanted = reference(layout, w, table, taps, block)[1:]
            close(found.logits[row], wanted)
            np.testing.assert_array_equal(found.ids[row, 0] if "d2t" in w else ids, ids)
            if rounds.TEMPERATURE[row] == 0:
                np.testing.assert_array_equal(found.tokens[row], ids[np.argmax(wanted, axis=1)])
        if accepted is not None:
            told = rounds.told(model, state, accepted)
            state = rounds.spec_step(rounds.target(), told, state, rounds.SLOT_IDS, num_draft_tokens=7)
            np.testing.assert_array_equal(rounds.lengths(state), np.minimum(known + np.asarray(accepted) + 1, rounds.MAX_LEN))


@pytest.mark.parametrize(("layout", "k"), [("z-lab", 1), ("z-lab", 7), ("speculators", 3)])
def test_texts_are_those_of_the_target(layout: str, k: int) -> None:
    texts, _ = rounds.finish(drafter(layout), k)
    np.testing.assert_array_equal(texts, rounds.texts())


@pytest.mark.slow
def test_the_longest_block_gives_the_same_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MAX_K", 15)
    texts, taken = rounds.finish(drafter("z-lab"), 15)
    np.testing.assert_array_equal(texts, rounds.texts())
    assert (taken <= rounds.MAX_LEN - rounds.LENGTHS).all()


@pytest.mark.parametrize("layout", CONFIGS)
def test_save_and_load(layout: str, folder: Path) -> None:
    """What is saved has the checkpoint's keys, and comes back the same; tensors that nobody reads may lie beside it."""
    model, stored = drafter(layout), tensors(layout, folder)
    assert stored["layers.1.self_attn.q_proj.weight"].shape == (48, 32) and stored["layers.1.self_attn.v_proj.weight"].shape == (16, 32)
    np.testing.assert_array_equal(stored["layers.2.self_attn.v_proj.weight"], np.asarray(model.kv_proj.weight)[2, 1].reshape(16, 32))
    extra = {"t2d": np.zeros(rounds.VOCAB, bool)}
    if layout == "speculators":
        extra |= {"embed_tokens.weight": np.ones((rounds.VOCAB, 32), np.float32), "verifier_norm.weight": np.ones(32, np.float32)}
    path = write_checkpoint(folder / f"{layout}-more", CONFIGS[layout], {**stored, **extra})
    loaded = drafters.load_drafter(path, rounds.target().config, jnp.float32, progress=False)
    assert isinstance(loaded, DFlash) and loaded.config == model.config
    for old, new in zip(jax.tree.leaves(model), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_copy_of_the_targets_head_is_dropped() -> None:
    config = {**CONFIGS["speculators"], "draft_vocab_size": rounds.VOCAB}
    read = DFlashConfig.from_hf(config, rounds.target().config, ("lm_head.weight", "d2t"))
    assert not read.own_head and {"lm_head.", "d2t"} <= set(read.unread) and dflash.abstract(read).d2t is None
    kept = DFlashConfig.from_hf(CONFIGS["z-lab"], rounds.target().config, ("lm_head.weight",))
    assert kept.own_head and "lm_head." not in kept.unread


def changed(layout: str, changes: dict, dflash_config: dict | None = None) -> dict:
    config = {**CONFIGS[layout], **changes}
    return {**config, "dflash_config": dflash_config} if dflash_config is not None else config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (changed("z-lab", {"hidden_size": 48}), "hidden_size 48, for a target of 48; this target has 32"),
        (changed("speculators", {"target_hidden_size": 64}), "hidden_size 32, for a target of 64; this target has 32"),
        (changed("z-lab", {"vocab_size": 62}), "vocab_size 62, this target has 61"),
        (changed("z-lab", {"num_target_layers": 4}), r"made for a target of 4 layers \(num_target_layers\), this target has 3"),
        (changed("z-lab", {}, {"mask_token_id": 4, "target_layer_ids": [0, 3]}), r"hidden states \[1, 4\]; this target has 0 .. 3"),
        (changed("speculators", {"aux_hidden_state_layer_ids": [1, 9]}), r"hidden states \[1, 9\]; this target has 0 .. 3"),
        (changed("z-lab", {"num_target_layers": None}, {"mask_token_id": 4}), "neither target_layer_ids nor num_target_layers, .* 3 must"),
        (changed("z-lab", {}, {"target_layer_ids": [0]}), "mask_token_id is None; expected an id below vocab_size 61"),
        (changed("z-lab", {}, {"target_layer_ids": [0], "mask_token_id": 61}), "mask_token_id is 61; expected an id below vocab_size 61"),
        (changed("z-lab", {"num_key_value_heads": 4}), "6 query heads and 4 KV heads of head_dim 8"),
        (changed("z-lab", {"sliding_window": None}), "2 sliding layers, and sliding_window is None"),
        (changed("z-lab", {"layer_types": [FULL]}), "layer_types has 1 entries of .*; expected 3 of"),
        (changed("z-lab", {"hidden_act": "gelu"}), "hidden_act='gelu'; implemented: 'silu'"),
        (changed("z-lab", {"attention_bias": True}), "attention_bias=True; implemented: False"),
        (changed("z-lab", {"is_neox_style": False}), "is_neox_style=False; implemented: True"),
        (changed("z-lab", {"sample_from_anchor": True}), "sample_from_anchor=True; implemented: False"),
        (changed("z-lab", {"projector_type": "domino"}), "projector_type='domino'; implemented: 'dflash'"),
        (changed("z-lab", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}), "RoPE is .*'yarn'.*; implemented: rope_type 'default'"),
        (changed("z-lab", {}, {"attention_sink_bias": True}), "attention_sink_bias=True; implemented: none"),
        (changed("z-lab", {"block_size": None}), "config.json lacks 'block_size'"),
        (changed("z-lab", {"draft_vocab_size": 40}), "draft_vocab_size is 40 of 61 tokens, and the checkpoint has no lm_head.weight"),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[:30],
)
def test_a_drafter_of_another_target(config: dict, message: str, tmp_path: Path) -> None:
    head = "lm_head.weight" if "speculators_model_type" in config else "fc.weight"
    write_checkpoint(tmp_path, config, {head: np.zeros(1, np.float32)})
    with pytest.raises(ValueError, match=f"the drafter .* cannot be used with this target: .*{message}"):
        drafters.abstract_drafter(tmp_path, rounds.target().config, jnp.float32)


def test_a_pickled_mask_embedding_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CONFIGS["z-lab"], {"fc.weight": np.zeros(1, np.float32)})
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(
        ValueError, match=r"mask_embedding.pt is a pickle.*expected a tensor mask_embedding in model.safetensors.*python -c"
    ):
        drafters.abstract_drafter(tmp_path, rounds.target().config, jnp.float32)


def test_a_block_holds_block_size_rows() -> None:
    with pytest.raises(ValueError, match="num_draft_tokens is 8; the drafter's block_size of 8 holds the anchor and 7 drafts"):
        jax.eval_shape(lambda: drafter("speculators").init(2, 16, 8))
    assert jax.eval_shape(lambda: drafter("speculators").init(2, 16, 7)).cache.slots == 2


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
        ({"is_causal": True, "dflash_config": {"causal": False}}, (True, True), (7, None)),
        ({"layer_types": [FULL] * 2, "dflash_config": {"use_swa": True, "swa_window_size": 5}}, (False, False), (5, 5)),
        ({"layer_types": None, "use_sliding_window": True, "max_window_layers": 1}, (False, True), (None, 7)),
        ({"layer_types": None}, (False, False), (None, None)),
    ],
)
def test_masks(changes: dict, causal: tuple, windows: tuple) -> None:
    changes = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL], **changes}
    own = {"mask_token_id": 4, "target_layer_ids": [0], **changes.pop("dflash_config", {})}
    read = DFlashConfig.from_hf({**CONFIGS["z-lab"], **changes, "dflash_config": own}, rounds.target().config)
    assert (read.causal, tuple(spec.window for spec in read.layers)) == (causal, windows)


@pytest.mark.parametrize("scale", [1.0, 32**0.5])
def test_the_embedding_scale_is_a_setting(scale: float) -> None:
    own = {"mask_token_id": 4, "target_layer_ids": [0], "input_embedding_scale": scale, "output_multiplier": 2.0}
    read = DFlashConfig.from_hf({**CONFIGS["z-lab"], "dflash_config": own}, rounds.target().config)
    assert read.output_multiplier == 2.0
    model = dataclasses.replace(drafter("z-lab"), config=read)
    found = model.embed(rounds.target(), jnp.asarray([[3, 4]], jnp.int32))
    close(found[0], np.asarray(rounds.target().embed_tokens.weight)[[3, 4]] * scale)


# The released drafters (facts: their config.json).
REAL = {
    "31B": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 5376,
        "intermediate_size": 10_752,
        "num_hidden_layers": 5,
        "layer_types": [SLIDING] * 4 + [FULL],
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "sliding_window": 2048,
        "block_size": 16,
        "num_target_layers": 60,
        "final_logit_softcapping": 30.0,
        "vocab_size": 262_144,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 12, 23, 35, 46, 57]},
    },
}
REAL["26B-A4B"] = {
    **REAL["31B"],
    "hidden_size": 2816,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_target_layers": 30,
    "dflash_config": {"mask_token_id": 4, "target_layer_ids": [1, 6, 11, 17, 22, 27]},
}
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
    hidden = target.hidden_size
    leaves = jax.tree_util.tree_leaves_with_path(model)
    shapes = {jax.tree_util.keystr(path, simple=True, separator="."): leaf.shape for path, leaf in leaves}
    keys = {part.key: part.shape for path in shapes for part in checkpoint.layouts(path, shapes)[0]}
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


def check_round(model: DFlash, target: Gemma4Config, k: int) -> None:
    """Shapes alone: drafts come out as a rule wants them, and every call gives back the state that it took."""
    batch, hidden = 8, target.hidden_size

    def array(*shape: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    state = jax.eval_shape(functools.partial(model.init, batch, 8192, k))
    each, rows = array(batch), array(batch, k + 1)
    taps = tuple(array(batch, k + 1, hidden, dtype=jnp.bfloat16) for _ in model.taps)
    verifier = gemma4.abstract(target)
    observed = Observed(verifier, each, rows, rows, array(batch, hidden, dtype=jnp.bfloat16), taps, each, each)
    sampling = jax.eval_shape(lambda: greedy(batch))
    drafts, drafted = jax.eval_shape(
        lambda d, s, t, g: d.draft(s, t, g, k), model, state, Target(verifier, None, each, each, each), sampling
    )
    size = model.config.draft_vocab_size
    assert (drafts.tokens.shape, drafts.logits.shape, drafts.logits.dtype) == ((batch, k), (batch, k, size), jnp.float32)
    assert (drafts.ids is None) == (size == target.vocab_size)
    for after in (jax.eval_shape(DFlash.observe, model, state, observed), drafted):
        assert jax.tree.structure(after) == jax.tree.structure(state)
        for old, new in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
            assert (old.shape, old.dtype, old.weak_type) == (new.shape, new.dtype, new.weak_type)


def test_no_drafts() -> None:
    model = drafter("z-lab")
    state = rounds.started(model)
    found = guesses(rounds.target(), model, state, 0)
    assert found.tokens.shape == (6, 0) and found.logits is None
