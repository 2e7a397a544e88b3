"""EAGLE-3 against stored vectors, and against its formulas in NumPy over whole rounds.

The vectors in tests/golden were made with SafeAILab/EAGLE `cnets.py` and with SpecForge's layer of speculators' kind.
"""

import dataclasses
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
from formulas import attend, check_round, close, greedy, guesses, rms, rotate, write_checkpoint
from kinds import EAGLE3, EAGLE3_KEYS, HEAD, LLAMA
from real_configs import FULL, SLIDING
from safetensors.numpy import load_file

from jaxspec import checkpoint, drafters
from jaxspec.decode import Round
from jaxspec.drafters import eagle3
from jaxspec.drafters.base import Target
from jaxspec.drafters.eagle3 import Eagle3, Eagle3Config
from jaxspec.model.gemma4_config import Gemma4Config

pytestmark = pytest.mark.usefixtures("unoptimised")


@pytest.mark.parametrize("name", ["eagle3", "eagle3_norm_before_residual"])
def test_golden_rounds(name: str, tmp_path: Path) -> None:
    """Rows of two rounds, observed in chunks with rejected rows of NaN behind them, the drafts after each, and what is in the pages."""
    tensors, config, weights, target = formulas.golden(name)
    model = drafters.load_drafter(write_checkpoint(tmp_path, config, weights), target.config, jnp.float32, progress=False)
    assert isinstance(model, Eagle3) and model.taps == (2, 4, 5)
    model = dataclasses.replace(model, page_size=3)
    state = formulas.nan_state(model, 3, 18, 4)
    observe, draft = rounds.compiled(Eagle3.observe), rounds.compiled(Eagle3.draft, static_argnums=4)
    slots, at, chunk = jnp.asarray([1, 3], jnp.int32), 0, 4  # the second row is nobody's
    text, features = tensors["input.token_ids"][0], tensors["input.target_features"][0]
    taps = features.reshape(len(features), 3, -1).transpose(1, 0, 2)
    for number in (1, 2):
        first = tensors[f"expected.round{number}.first.hidden"][0]
        end = at + len(first)
        for start in range(at, end, chunk):
            stop = min(start + chunk, end)
            rows = formulas.observed(target, slots, start, text[start:stop], taps[:, start:stop], text[stop], chunk)
            state = observe(model, state, rows)
            close(state.hidden[1], first[stop - at - 1])
        at = end
        view = Target(target, None, slots, jnp.asarray(text[[at, at]], jnp.int32), jnp.asarray([at, 0], jnp.int32))
        drafts, after = draft(model, state, view, greedy(2), 4)
        np.testing.assert_array_equal(drafts.tokens[:1], tensors[f"expected.round{number}.draft_target_ids"])
        np.testing.assert_array_equal(drafts.ids[0, 0], np.arange(len(weights["d2t"])) + weights["d2t"])
        close(drafts.logits[0, 0], tensors[f"expected.round{number}.first.logits"][0, -1])
        for step in (1, 2, 3):
            close(drafts.logits[0, step], tensors[f"expected.round{number}.step{step}.logits"][0, 0])
        formulas.same(state, after)
    # The stored cache goes on with the rows of the last drafts.
    key, value = (tensors.get(f"debug.cache.{kind}") for kind in ("key", "value"))
    key, value = (x if x is None else x[0].transpose(1, 0, 2)[:at] for x in (key, value))
    formulas.check_pages(state.cache, 1, 0, model.config.layers[0], at, key, value)


NAMES = {"eagle": "eagle3", "speculators": "eagle3 speculators", "gemma": "eagle3 gemma"}
TAPS = {"eagle": (0, 1, 2), "speculators": (1, 3), "gemma": (1, 2, 3)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eagle3")


def tensors(layout: str, folder: Path) -> dict[str, np.ndarray]:
    """The drafter's tensors under the checkpoint's keys."""
    if not (folder / layout).exists():
        checkpoint.save_weights(folder / layout, kinds.drafter(NAMES[layout]), EAGLE3[layout])
    return load_file(folder / layout / "model.safetensors")


class Reference:
    """A drafter row by row: every row's K and V are kept, those of drafts too. table: the target's [V, H], unscaled."""

    def __init__(self, layout: str, w: dict[str, np.ndarray], table: np.ndarray):
        self.layout, self.w = layout, {key: value.astype(np.float64) for key, value in w.items()}
        config = EAGLE3[layout]
        self.inner = {**config, **config.get("transformer_layer_config", {})}
        self.gemma = layout == "gemma"
        self.eps = self.inner.get("rms_norm_eps", 1e-6)
        self.table = self.w.get("embed_tokens.weight", table * (math.sqrt(table.shape[1]) if self.gemma else 1))
        self.head = self.w.get("lm_head.weight", table)
        self.keys: list[list] = [[] for _ in range(self.inner["num_hidden_layers"])]

    def feature(self, taps: np.ndarray) -> np.ndarray:
        """taps: [taps, H] -> [h]"""
        if "input_norm.weight" in self.w:
            taps = rms(taps.reshape(-1), self.w["input_norm.weight"], self.eps).reshape(taps.shape)
        if "fc_norm.0.weight" in self.w:
            taps = np.stack([rms(tap, self.w[f"fc_norm.{i}.weight"], self.eps) for i, tap in enumerate(taps)])
        return self.w["fc.weight"] @ taps.reshape(-1)

    def row(self, at: int, token: int, feature: np.ndarray) -> np.ndarray:
        """Runs the row at position `at`, with the embedding of the next token: the last layer's output [h]."""

        def norm(x, name, own):
            return rms(x, own[f"{name}.weight"], self.eps)

        dim = 16 if self.gemma else self.inner["head_dim"]
        theta, angles = (1e6, 2) if self.gemma else (self.inner.get("rope_theta", 1e4), None)
        embedded, x = self.table[token], feature
        for layer, keys in enumerate(self.keys):
            own = formulas.layer_tensors(self.w, layer)
            residual, inputs = x, norm(x, "input_layernorm", own)
            if "hidden_norm.weight" in own:
                normed = norm(x, "hidden_norm", own)
                inputs = np.concatenate([norm(embedded, "input_layernorm", own), normed])
                residual = normed if self.layout == "speculators" else x

            def heads(name, own=own, inputs=inputs):
                return (own[f"self_attn.{name}_proj.weight"] @ inputs).reshape(1, -1, dim)

            q, k, v = heads("q"), heads("k"), heads("k" if self.gemma else "v")
            if "self_attn.q_norm.weight" in own:
                q, k = norm(q, "self_attn.q_norm", own), norm(k, "self_attn.k_norm", own)
            v = rms(v, 1, self.eps) if self.gemma else v
            q, k = (rotate(part, np.array([at]), theta, angles) for part in (q, k))
            keys.append((k, v))
            k, v = (np.concatenate(part) for part in zip(*keys, strict=True))
            scale = 1.0 if self.gemma else dim**-0.5
            out = own["self_attn.o_proj.weight"] @ attend(q, k, v, np.ones((1, len(k)), bool), scale)[0]
            if self.gemma:
                x = residual + norm(out, "post_attention_layernorm", own)
                out = formulas.mlp(own, norm(x, "pre_feedforward_layernorm", own), formulas.gelu)
                x = (x + norm(out, "post_feedforward_layernorm", own)) * own["layer_scalar"]
            else:
                x = residual + out
                x = x + formulas.mlp(own, norm(x, "post_attention_layernorm", own), formulas.silu)
        return x

    def drafts(self, text: np.ndarray, taps: np.ndarray, guessed: np.ndarray) -> np.ndarray:
        """The logits of len(guessed) drafts behind a text, each draft but the last being fed back.

        text: [n + 1]; taps: [n, taps, H], of all but its last token."""
        for at, tap in enumerate(taps):
            x = self.row(at, text[at + 1], self.feature(tap))
        logits = []
        for step, token in enumerate(guessed):
            normed = rms(x, self.w["norm.weight"], self.eps)
            logits.append(self.head @ normed * self.inner.get("logit_scale", 1.0))
            x = self.row(len(taps) + step, token, normed if self.layout == "speculators" else x)
        cap = self.inner.get("final_logit_softcapping")
        return cap * np.tanh(np.stack(logits) / cap) if cap else np.stack(logits)


ACCEPTED = [(0, 3, 7, 1, 5), (7, 0, 2, 4, 0), (6, 5, 0, 7, 2)]


@pytest.mark.slow  # the golden rounds above are those of the first layout
@pytest.mark.parametrize("layout", ["speculators", "eagle", "gemma"])
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
            np.testing.assert_array_equal(rounds.tokens(state)[row, :length], rounds.texts()[row, :length])
            taps = formulas.hidden_states()[row, list(TAPS[layout]), : length - 1].transpose(1, 0, 2)
            wanted = Reference(layout, w, table).drafts(rounds.tokens(state)[row, :length], taps, np.asarray(found.tokens[row]))
            close(found.logits[row, 0], wanted[0])
            # Seven steps make more of float32's rounding; a mistake costs a hundred times this.
            np.testing.assert_allclose(found.logits[row], wanted, rtol=1e-3, atol=1e-3)
            np.testing.assert_array_equal(found.ids[row, 0] if "d2t" in w else ids, ids)
            np.testing.assert_array_equal(found.tokens[row], formulas.chosen(wanted, ids, row, length))
        if accepted is not None:
            told = rounds.told(model, state, accepted)
            state = rounds.spec_step(rounds.target(), told, state, rounds.SLOT_IDS, round=Round(7))
            np.testing.assert_array_equal(rounds.lengths(state), np.minimum(known + np.asarray(accepted) + 1, rounds.MAX_LEN))


@pytest.mark.parametrize("layout", EAGLE3)
def test_save_and_load(layout: str, folder: Path) -> None:
    """What is saved has the checkpoint's keys, and comes back the same, under EAGLE's own names too, and beside copies of the target's."""
    model, stored = kinds.drafter(NAMES[layout]), tensors(layout, folder)
    queries, width = {"eagle": (48, 64), "speculators": (36, 48), "gemma": (64, 64)}[layout]
    assert stored["layers.0.self_attn.q_proj.weight"].shape == (queries, width)
    extra = {"t2d": np.zeros(rounds.VOCAB, bool)}
    if layout == "gemma":
        assert "layers.0.self_attn.v_proj.weight" not in stored and not {"embed_tokens.weight", "lm_head.weight"} & set(stored)
        extra |= {name: np.ones((rounds.VOCAB, 32), np.float32) for name in ("embed_tokens.weight", "lm_head.weight")}
    if layout == "eagle":
        stored = {key.replace("layers.0.", "midlayer."): value for key, value in stored.items()}
        assert any(key.startswith("midlayer.") for key in stored)
    path = write_checkpoint(folder / f"{layout}-more", EAGLE3[layout], {**stored, **extra})
    loaded = drafters.load_drafter(path, rounds.target().config, jnp.float32, progress=False)
    assert isinstance(loaded, Eagle3) and loaded.config == model.config
    for old, new in zip(jax.tree.leaves(model), jax.tree.leaves(loaded), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("layout", "changes", "own"),
    [
        ("eagle", {}, True),
        ("speculators", {}, True),  # of another width than the target's
        ("speculators", {"transformer_layer_config": {**LLAMA, "hidden_size": 32, "head_dim": 8}}, False),
        ("speculators", {"transformer_layer_config": {**LLAMA, "hidden_size": 32, "head_dim": 8}, "embed_requires_grad": True}, True),
        ("gemma", {}, False),
    ],
)
def test_a_copy_of_the_targets_table_is_dropped(layout: str, changes: dict, own: bool) -> None:
    keys = ("embed_tokens.weight", "lm_head.weight", "d2t")
    read = Eagle3Config.from_hf({**EAGLE3[layout], **changes}, rounds.target().config, keys)
    assert read.own_embedding == own == ("embed_tokens." not in read.unread)


@pytest.mark.parametrize("layout", EAGLE3)
def test_embeddings(layout: str) -> None:
    """Rows of the target's table as they are, rows of an own table, or the target's scaled embeddings."""
    ids, raw = jnp.asarray([[3, 60]], jnp.int32), np.asarray(rounds.target().embed_tokens.weight)
    own = kinds.drafter(NAMES[layout]).embed_tokens
    table = {"eagle": raw, "speculators": None if own is None else own.weight, "gemma": raw * math.sqrt(32)}[layout]
    close(kinds.drafter(NAMES[layout]).embed(rounds.target(), ids)[0], np.asarray(table)[[3, 60]])


@pytest.mark.parametrize(
    ("layout", "changes", "residual"),
    [("eagle", {}, False), ("eagle", {"norm_before_residual": True}, True), ("speculators", {}, True)]
    + [("speculators", {"norm_before_residual": False}, False), ("gemma", {}, False)],
)
def test_the_residual_depends_on_the_format(layout: str, changes: dict, residual: bool) -> None:
    read = Eagle3Config.from_hf({**EAGLE3[layout], **changes}, rounds.target().config, EAGLE3_KEYS[layout])
    assert read.norm_before_residual == residual == eagle3.abstract(read).layers[0].norm_before_residual


@pytest.mark.parametrize(
    ("changes", "taps"),
    [
        ({}, (2, 30, 57)),
        ({"eagle_aux_hidden_state_layer_ids": [57, 2, 30]}, (2, 30, 57)),
        ({"target_layer_ids": [5, 17, 29, 41, 46]}, (6, 18, 30, 42, 47)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 29, 56]}}, (2, 30, 57)),
        ({"eagle_aux_hidden_state_layer_ids": [3, 60], "target_layer_ids": [2, 59]}, (3, 60)),
        ({"eagle_aux_hidden_state_layer_ids": None}, (2, 30, 57)),
    ],
)
def test_taps(changes: dict, taps: tuple[int, ...]) -> None:
    target = Gemma4Config.from_hf(real_configs.TARGETS["31B"])
    assert Eagle3Config.from_hf({**REAL, **changes}, target, HEAD).taps == taps


def changed(layout: str, **changes) -> dict:
    return {**EAGLE3[layout], **changes}


def proposing(tokens) -> dict:
    return {"proposal_methods": [{"speculative_tokens": tokens}]}


@pytest.mark.parametrize(
    ("config", "keys", "message"),
    [
        (changed("eagle", hidden_size=48), HEAD, "for a target of hidden_size 48, this target has 32"),
        (
            changed("speculators", target_hidden_size=64),
            ("embed_tokens.weight", *HEAD),
            "for a target of hidden_size 64, this target has 32",
        ),
        (EAGLE3["speculators"], HEAD, "hidden_size 24 and no embed_tokens of its own; this target's has 32"),
        (EAGLE3["speculators"], ("embed_tokens.weight",), "hidden_size 24 and no lm_head of its own; this target's has 32"),
        (changed("eagle", vocab_size=65), HEAD, "vocab_size 65, this target has 64"),
        (EAGLE3["eagle"], ("fc.weight",), "draft_vocab_size is 40 of 64 tokens, and the checkpoint has no lm_head.weight"),
        (changed("gemma", num_target_layers=48), HEAD, r"made for a target of 48 layers \(num_target_layers\), this target has 3"),
        (
            changed("eagle", eagle_aux_hidden_state_layer_ids=[1, 3], target_layer_ids=[1]),
            HEAD,
            r"different layers: eagle_aux_hidden_state_layer_ids \[1, 3\], target_layer_ids \[1\]; expected target_layer_ids one below",
        ),
        (changed("gemma", target_layer_ids=[1, 3]), HEAD, r"hidden states \[2, 4\]; this target has 0 .. 3"),
        (changed("eagle", eagle_aux_hidden_state_layer_ids=[2, 9]), HEAD, r"hidden states \[2, 9\]; this target has 0 .. 3"),
        (changed("eagle", num_key_value_heads=4), HEAD, "6 query heads and 4 KV heads of head_dim 8"),
        (changed("eagle", head_dim=7), HEAD, "6 query heads and 2 KV heads of head_dim 7"),
        (changed("eagle", attention_bias=True), HEAD, "attention_bias=True; implemented: False"),
        (changed("eagle", hidden_act="gelu"), HEAD, "hidden_act='gelu'; implemented: 'silu'"),
        (changed("eagle", rope_scaling={"rope_type": "llama3", "factor": 8.0}), HEAD, "RoPE is .*'llama3'.*; implemented"),
        (changed("eagle", partial_rotary_factor=0.5), HEAD, "partial_rotary_factor=0.5; implemented: None, 1"),
        (changed("eagle", layer_types=[SLIDING]), HEAD, r"layers have layer_types \['sliding_attention'\] and use_sliding_window None"),
        (changed("eagle", use_sliding_window=True), HEAD, r"layers have layer_types \[\] and use_sliding_window True"),
        (changed("eagle", intermediate_size=None), HEAD, "config.json lacks 'intermediate_size'"),
        (changed("eagle", final_logit_softcapping=0), HEAD, "final_logit_softcapping is 0.0, expected a finite number of more than 0"),
        (changed("eagle", logit_scale=-1), HEAD, "logit_scale is -1.0, expected a finite number of more than 0"),
        (changed("eagle", eagle_aux_hidden_state_layer_ids="258"), HEAD, "layer_ids='258'; expected a list of whole numbers"),
        (changed("eagle", eagle_config=[1]), HEAD, r"eagle_config=\[1\]; expected an object"),
        (changed("eagle", rope_scaling="x"), HEAD, "rope_scaling='x'; expected an object"),
        (changed("eagle", speculators_config={"proposal_methods": 5}), HEAD, "proposal_methods=5; expected a list of objects"),
        (changed("eagle", speculators_config=proposing(-3)), HEAD, "speculative_tokens is -3, expected at least 0"),
        (changed("eagle", speculators_config=proposing(2.5)), HEAD, "speculative_tokens is 2.5 of type float, expected an integer"),
        (changed("gemma", hidden_size_per_layer_input=4), HEAD, "layers have per_layer_input 4; implemented: none"),
        (changed("gemma", num_hidden_layers=2, layer_types=[SLIDING, FULL]), HEAD, "layers have window 8; implemented: none"),
        (changed("eagle", quantization_config={"quant_method": "fp8"}), HEAD, "quant_method 'fp8' with weight_block_size None .* served"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_drafter_of_another_target(config: dict, keys: tuple[str, ...], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, config, {key: np.zeros(1, np.float32) for key in keys})
    with pytest.raises(ValueError, match=f"the drafter .* cannot be used with this target: .*{message}"):
        drafters.abstract_drafter(tmp_path, rounds.target().config, jnp.float32)


# RedHatAI's speculator for 31B, flat, and DeepSpec's for 12B (facts: their config.json).
REAL = {
    **LLAMA,
    "architectures": ["Eagle3LlamaForCausalLM"],
    "hidden_size": 5376,
    "intermediate_size": 21_504,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "num_hidden_layers": 1,
    "vocab_size": 262_144,
    "draft_vocab_size": 32_000,
}


def test_released_speculator() -> None:
    target = Gemma4Config.from_hf(real_configs.TARGETS["31B"])
    model = eagle3.abstract(Eagle3Config.from_hf(REAL, target, HEAD))
    keys = formulas.checkpoint_shapes(model)
    assert keys["fc.weight"] == (5376, 3 * 5376) and keys["layers.0.self_attn.k_proj.weight"] == (4096, 2 * 5376)
    attention, feed_forward, features, head = 2 * 5376 * (8192 + 2 * 4096) + 8192 * 5376, 3 * 5376 * 21_504, 3 * 5376**2, 32_000 * 5376
    parameters = sum(math.prod(shape) for key, shape in keys.items() if key != "d2t")
    assert parameters == attention + feed_forward + features + head + 4 * 5376
    assert set(keys) == {"fc.weight", "norm.weight", "lm_head.weight", "d2t"} | {
        f"layers.0.{name}.weight"
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        + tuple(f"self_attn.{kind}_proj" for kind in "qkvo")
        + tuple(f"mlp.{kind}_proj" for kind in ("gate", "up", "down"))
    }
    check_round(model, target, 7)


def test_released_gemma_drafter() -> None:
    """Five taps, one KV head of 512 for K and V alike, and no copy of the target's table."""
    text = real_configs.TARGETS["12B"]["text_config"]
    own = {"architectures": ["Gemma4Eagle3Model"], "num_hidden_layers": 1, "layer_types": [FULL], "target_layer_ids": [5, 17, 29, 41, 46]}
    target = Gemma4Config.from_hf(real_configs.TARGETS["12B"])
    model = eagle3.abstract(Eagle3Config.from_hf({**text, **own, "tie_word_embeddings": False}, target, HEAD))
    assert model.taps == (6, 18, 30, 42, 47)
    keys, hidden = formulas.checkpoint_shapes(model), 3840
    attention, feed_forward = 2 * hidden * (16 + 1) * 512 + 16 * 512 * hidden + 2 * 512, 3 * hidden * 15_360
    assert sum(math.prod(shape) for shape in keys.values()) == attention + feed_forward + 5 * hidden**2 + 6 * hidden + 1
    assert keys["layers.0.self_attn.k_proj.weight"] == (512, 2 * hidden) and "lm_head.weight" not in keys
    check_round(model, target, 4)


def test_a_rejected_round_leaves_no_trace() -> None:
    formulas.check_rejection(kinds.drafter("eagle3 speculators"))
