"""One MTP module a step against a plain NumPy model of the same facts.

The reference knows no pages, no chunks and no rounds: from whole texts it computes every step at once.
"""

import functools
import json
import math

import jax
import jax.numpy as jnp
import kinds
import numpy as np
import pytest
import real_configs
import rounds
from definitions import relative_error
from flax import struct
from kinds import modules_config

from jaxspec import checkpoint, decode, drafters
from jaxspec.drafters import mtp_modules as mtp
from jaxspec.drafters.mtp_modules import MTPModules
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.layer_spec import FULL
from jaxspec.model.rows import Rows
from jaxspec.sampling import choice as sampling

pytestmark = pytest.mark.usefixtures("unoptimised")
LIMIT = 1e-4
NAMES = {1: "modules 1", 2: "modules", 3: "modules 3"}  # by count


def modules(count) -> MTPModules:
    return kinds.drafter(NAMES[count])


def norm(x, weight=1.0):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight


def rotated(x, at, spec):
    """x: [T, heads, D], at: [T]."""
    half = x.shape[-1] // 2
    angles = np.zeros((len(at), 1, half))
    turning = np.arange(spec.rotary_angles)
    angles[..., : spec.rotary_angles] = at[:, None, None] / spec.rope_theta ** (2 * turning / x.shape[-1])
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], axis=-1)


def layer(weights, x, at, past):
    """One Gemma 4 layer over rows x [T, H] at positions `at`, which see the keys of `past` and their own. Returns x and K, V of both."""
    attn, spec = weights.self_attn, weights.self_attn.spec
    heads = np.einsum("kgdh,th->tkgd", attn.qkv_proj.weight, norm(x, weights.input_layernorm.weight))
    group, value = spec.num_heads // spec.num_kv_heads, norm(heads[:, :, -1])
    query = rotated(norm(heads[:, :, :group], attn.q_norm.weight).reshape(len(at), -1, spec.head_dim), at, spec)
    key = rotated(norm(heads[:, :, group], attn.k_norm.weight), at, spec)
    if past is not None:
        key, value = np.concatenate([past[0], key]), np.concatenate([past[1], value])
    scores = np.einsum("tkgd,skd->kgts", query.reshape(len(at), spec.num_kv_heads, group, -1), key)
    key_at = at[-1] + 1 - len(key) + np.arange(len(key))
    distance = at[:, None] - key_at[None, :]
    scores = np.where((distance >= 0) & (distance < (spec.window or 1000)), scores, -np.inf)
    share = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("kgts,skd->tkgd", share / share.sum(-1, keepdims=True), value)
    x = x + norm(np.einsum("hkgd,tkgd->th", attn.o_proj.weight, out), weights.post_attention_layernorm.weight)
    gate, up = np.einsum("eih,th->eti", weights.mlp.gate_up_proj.weight, norm(x, weights.pre_feedforward_layernorm.weight))
    gate = 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    x = x + norm((gate * up) @ weights.mlp.down_proj.weight.T, weights.post_feedforward_layernorm.weight)
    return x * weights.layer_scalar, (key, value)


@jax.jit
def chosen(logits, at, row):
    seed, temperature = jnp.stack([row, jnp.zeros_like(row)]).astype(jnp.uint32), jnp.asarray(rounds.TEMPERATURE)[row]
    return sampling.choose(logits[None, None], at[None, None], sampling.Sampling(seed[None], temperature[None]))[0, 0]


@functools.cache
def target_hidden():
    """The target's hidden states of the whole texts after its final norm, without a cache. [5, MAX_LEN, H]"""
    ids = jnp.asarray(rounds.texts())
    rows = Rows(ids, jnp.zeros(len(ids), jnp.int32), jnp.full(len(ids), rounds.MAX_LEN, jnp.int32), jnp.arange(len(ids), dtype=jnp.int32))
    return np.asarray(jax.jit(lambda target: target(rows, None)[0].hidden)(rounds.target()), np.float64)


@functools.cache
def doubled(count):
    """The modules and the target's table, in float64."""
    model = jax.tree.map(lambda x: np.asarray(x, np.float64), modules(count))
    return model, np.asarray(rounds.target().embed_tokens.weight, np.float64)


def reference(count, row, length, steps):
    """Logits and choice of each step after the first `length` tokens of a text.

    Step s of the first M runs module s over every row, at row p on token p + s + 1. A later one runs the last M rows again, over what
    the same module stored of the rows before them.
    """
    drafter, table = doubled(count)
    ids, last = rounds.texts()[row, :length].tolist(), length - 2
    at, x, stored, out = np.arange(last + 1), target_hidden()[row, : last + 1], {}, []
    for s in range(steps):
        module, past = drafter.modules[s % count], None
        if s >= count:
            past = stored[s % count]
            if s == count:
                at, x = at[-count:], x[-count:]
        embedded = table[np.asarray(ids)[at + s + 1]]
        both = np.concatenate([norm(embedded, module.enorm.weight), norm(x, module.hnorm.weight)], axis=-1)
        x, keys = layer(module.mtp_block, both @ module.eh_proj.weight.T, at, past)
        if s < count:
            stored[s] = tuple(part[: max(last + 1 - count, 0)] for part in keys)
        logits = 30 * np.tanh(norm(x[-1], module.shared_head.norm.weight) @ module.shared_head.output.weight.T / 30)
        ids.append(int(chosen(logits.astype(np.float32), np.int32(len(ids)), np.int32(row))))
        out.append((logits, ids[-1]))
    return out


def check(count, state, k=rounds.MAX_K):
    """The next guesses are what the reference says, from its logits."""
    found = rounds.drafts(rounds.target(), modules(count), state, k=k)
    for row, length in enumerate(rounds.lengths(state)):
        np.testing.assert_array_equal(rounds.tokens(state)[row, :length], rounds.texts()[row, :length])
        for s, (logits, token) in enumerate(reference(count, row, length, k)):
            assert relative_error(found.logits[row, s], logits) <= LIMIT, (row, s, length)
            assert found.tokens[row, s] == token


CHUNKS = {1: 5, 2: 5, 3: 2}  # by count: more than the window of modules, and less
# (K, accepted of each sequence): every count from 0 to 7; of three modules also a round of fewer guesses, and one of none.
ROUNDS = ((7, [0, 7, 3, 1, 2]), (7, [5, 0, 6, 4, 0]), (0, [0] * 5), (1, [1, 0, 1, 0, 1]), (7, [2, 4, 0, 7, 5]))


@pytest.mark.slow  # test_step3p5_modules.py has the guesses of whole texts
@pytest.mark.parametrize("count", [1, 2, 3])
def test_guesses_of_whole_rounds(count):
    """After prompts of 1 to 22 tokens in chunks, and after every round, past the window."""
    state = rounds.started(modules(count), chunk=CHUNKS[count])
    check(count, state)
    known = rounds.lengths(state)
    for k, accepted in ROUNDS:
        if k == 7 or count == 3:
            drafter = rounds.told(modules(count), state, accepted) if k else modules(count)
            state = rounds.spec_step(rounds.target(), drafter, state, rounds.SLOT_IDS, round=decode.Round(k))
            known = known + accepted + 1
            np.testing.assert_array_equal(rounds.lengths(state), known)
            check(count, state)
    assert max(known) > rounds.LENGTHS.max() + rounds.WINDOW


def test_a_round_of_wrong_guesses_leaves_what_no_guesses_leave():
    """The state afterwards, pages and all, but for what a later call writes first."""
    state = rounds.started(modules(3), chunk=CHUNKS[3])
    wrong = rounds.told(modules(3), state, [0] * 5)
    after = [
        rounds.spec_step(rounds.target(), drafter, state, rounds.SLOT_IDS, round=decode.Round(k))
        for drafter, k in ((wrong, 7), (modules(3), 0))
    ]
    guesses = [rounds.drafts(rounds.target(), modules(3), x, k=7) for x in after]
    np.testing.assert_array_equal(guesses[0].tokens[:-1], guesses[1].tokens[:-1])
    np.testing.assert_allclose(guesses[0].logits[:-1], guesses[1].logits[:-1], rtol=1e-5, atol=1e-5)


def test_a_rounds_rows_are_computed_by_its_next_draft():
    """Of a block that was drafted `observe` keeps the rows and computes none; of a prompt it computes all but the last."""
    passes = []

    @struct.dataclass
    class Counting(MTPModules):
        def _run(self, *args):
            passes.append(args[2].shape[1])
            return super()._run(*args)

    drafter = Counting(modules(2).model, modules(2).config)
    state = jax.eval_shape(lambda: decode.init_state(rounds.target(), drafter, slots=7, max_len=32, num_draft_tokens=3))
    slots = jax.ShapeDtypeStruct((6,), jnp.int32)
    for call, rows in (
        (functools.partial(decode.prefill, chunk=9), [9 + 4, 9 + 4]),
        (functools.partial(decode.spec_step, round=decode.Round(3)), [6, 6, 2]),
        (functools.partial(decode.spec_step, round=decode.Round(1)), [6, 6]),
        (functools.partial(decode.spec_step, round=decode.Round(0)), [1 + 4, 1 + 4]),
    ):
        passes.clear()
        jax.eval_shape(call, rounds.target(), drafter, state, slots)
        assert passes == rows


@pytest.mark.slow  # texts of ragged batches would differ
def test_slots_that_do_not_run_stay_as_they_are():
    """Of six ids in the call two run, one is of an empty slot and the others are nobody's; the last slot is not named."""
    drafter = modules(2)
    before = rounds.started(drafter, chunk=CHUNKS[2])
    slots = np.asarray([2, 1, 5, *[rounds.SLOTS + 2] * 3], np.int32)
    after = rounds.decode_loop(rounds.target(), drafter, before, slots, 1, round=decode.Round(7)).drafter
    others, before = np.asarray([0, 1, 3, 4, 6]), before.drafter
    jax.tree.map(lambda old, new: np.testing.assert_array_equal(old[others], new[others]), before.kept, after.kept)
    for spec, old, new in zip(drafter.config.layers, before.cache.layers, after.cache.layers, strict=True):
        pages = np.asarray(before.cache.tables[spec.kind])[others]
        np.testing.assert_array_equal(old.k[pages], new.k[pages])
        np.testing.assert_array_equal(old.v[pages], new.v[pages])


def test_saving_and_loading(tmp_path):
    """Layers go on from 9 to 10, and a module's layer lies beside what is its own."""
    text = {**rounds.TEXT, "num_hidden_layers": 9, "layer_types": [FULL] * 9}
    target = Gemma4Config.from_hf(text)
    abstract = mtp.abstract(mtp.bind(mtp.read_config(modules_config(2, text)), target), jnp.float32)
    weights = rounds.random_weights(abstract, 3)
    checkpoint.save_weights(tmp_path, weights, modules_config(2, text))
    stored = {key.removeprefix("model.layers."): tensor.shape for key, tensor in checkpoint.read_headers(tmp_path).items()}
    assert stored["9.eh_proj.weight"] == (32, 64)
    assert stored["10.shared_head.output.weight"] == (rounds.VOCAB, 32)
    assert stored["9.self_attn.v_proj.weight"] == (2 * 8, 32)  # sliding: with values of its own
    assert "10.self_attn.k_proj.weight" in stored and "10.self_attn.v_proj.weight" not in stored  # full: K = V
    assert {key.partition(".")[2] for key in stored if key.startswith("10.")} == {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "shared_head.output.weight",
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm.weight",
        "layer_scalar",
        *(f"self_attn.{name}.weight" for name in ("q_proj", "k_proj", "o_proj", "q_norm", "k_norm")),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }
    loaded = drafters.load_drafter(tmp_path, target, jnp.float32, progress=False)
    assert isinstance(loaded, MTPModules) and loaded.taps == (9,)
    jax.tree.map(np.testing.assert_array_equal, loaded, weights)


@pytest.mark.parametrize(
    ("changes", "text", "message"),
    [
        ({"num_nextn_predict_layers": 0}, {}, "num_nextn_predict_layers is 0; expected at least 1"),
        ({"num_nextn_predict_layers": None}, {}, "num_nextn_predict_layers is None; expected at least 1"),
        ({"num_nextn_predict_layers": 3}, {}, "layer_types has 5 entries; expected 3 of num_hidden_layers and 3 of the modules"),
        ({"text_config": None}, {}, "text_config must be the target's, with a model_type of 'gemma4_text', 'gemma4_unified_text'"),
        ({}, {"model_type": "gemma4"}, "text_config must be the target's"),
        ({}, {"attention_bias": True}, "config.json has attention_bias=True"),
        ({"quantization_config": {"quant_method": "hqq"}}, {}, "the checkpoint's weights are quantised with quant_method 'hqq'; served"),
        ({}, {"hidden_size": 48}, "the modules were made for a target of hidden_size 48, this target has 32"),
        ({}, {"vocab_size": 60}, "the modules were made for a target of vocab_size 60, this target has 64"),
        ({"num_nextn_predict_layers": 1}, {"num_hidden_layers": 4}, "for a target of num_hidden_layers 4, this target has 3"),
    ],
)
def test_modules_that_do_not_fit_are_refused(tmp_path, changes, text, message):
    (tmp_path / "config.json").write_text(json.dumps({**modules_config(2, **text), **changes}))
    with pytest.raises(ValueError, match=f"the drafter .* cannot be used with this target: .*{message}"):
        drafters.load_drafter(tmp_path, rounds.target().config, jnp.float32, progress=False)


def test_another_model_type_is_refused():
    with pytest.raises(ValueError, match="model_type is 'qwen3'; MTP modules have one of 'gemma4_mtp_modules', 'step3p5_mtp'"):
        mtp.read_config({**modules_config(1), "model_type": "qwen3"})
    with pytest.raises(ValueError, match="model_type is 'gemma4_text'; MTP modules of Gemma 4 layers have 'gemma4_mtp_modules'"):
        mtp.read_config({**modules_config(1), "model_type": "gemma4_text"})


def test_modules_of_the_released_31b():
    """By shape alone: three modules with K and V of both kinds, and a round that leaves the state as it found it."""
    text = real_configs.TARGETS["31B"]["text_config"]
    target = gemma4.abstract(Gemma4Config.from_hf(text))
    drafter = mtp.abstract(mtp.bind(mtp.read_config(modules_config(3, text)), target.config))
    block, head = 5376 * 5376 * 2, 262_144 * 5376
    sliding, full = (sum(x.size for x in jax.tree.leaves(target.layers[i])) for i in (0, 5))
    assert sum(x.size for x in jax.tree.leaves(drafter)) == 2 * sliding + full + 3 * (block + head + 3 * 5376)
    state = jax.eval_shape(functools.partial(decode.init_state, slots=4, max_len=8192, num_draft_tokens=5), target, drafter)
    pools = [layer.v.shape for layer in state.drafter.cache.layers]
    assert pools == [(4 * 17, 64, 16, 256), (4 * 128, 64, 4, 512), (4 * 17, 64, 16, 256)]
    assert state.drafter.kept.hidden.shape == (4, 3 + 5 + 1, 5376)
    slots = jax.ShapeDtypeStruct((4,), jnp.int32)
    after = jax.eval_shape(functools.partial(decode.spec_step, round=decode.Round(5)), target, drafter, state, slots)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(after)] == [(x.shape, x.dtype) for x in jax.tree.leaves(state)]


def test_no_more_modules_are_kept_than_guesses():
    state = jax.eval_shape(lambda: modules(3).init(4, 32, 2))
    assert len(state.cache.layers) == 2 and state.kept.ids.shape == (4, 5)
