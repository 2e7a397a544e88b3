"""What every kind of drafter refuses when it is loaded, as a checkpoint or as an object, and how many tokens it guesses by default."""

import contextlib
import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import pytest
import rounds
import tiny
from kinds import DFLASH, DFLASH2, DSPARK, EAGLE3, modules_config
from real_configs import FULL, SLIDING
from safetensors.numpy import load_file, save_file

import jaxspec
from jaxspec import checkpoint, drafters, loading
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.drafters import dflash, dflash2, draft_model, dspark, eagle3
from jaxspec.drafters import mtp_modules as mtp
from jaxspec.drafters.base import NoDraft, num_draft_tokens_of
from jaxspec.drafters.ngram import NGram
from jaxspec.model.gemma4_config import AssistantConfig, Gemma4Config

TEXT = {**rounds.TEXT, "hidden_size_per_layer_input": 0}
CONFIG = Gemma4Config.from_hf(TEXT)
HEAD = ("lm_head.weight", "embed_tokens.weight")
ASSISTANT = {
    **tiny.ASSISTANT,
    "use_ordered_embeddings": False,
    "text_config": {
        **TEXT,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "layer_types": [SLIDING, FULL],
    },
}
OBJECTS = {
    "assistant": gemma4_mtp.abstract(gemma4_mtp.bind(AssistantConfig.from_hf(ASSISTANT), CONFIG)),
    "dflash": dflash.abstract(dflash.DFlashConfig.from_hf(DFLASH["z-lab"], CONFIG)),
    "dflash2": dflash2.abstract(dflash2.DFlash2Config.from_hf(DFLASH2["z-lab"], CONFIG)),
    "dspark": dspark.abstract(dspark.DSparkConfig.from_hf(DSPARK["gemma"], CONFIG)),
    "eagle3": eagle3.abstract(eagle3.Eagle3Config.from_hf({**EAGLE3["eagle"], "eagle_aux_hidden_state_layer_ids": [1, 3]}, CONFIG, HEAD)),
    "modules": mtp.abstract(mtp.read_config(modules_config(2, TEXT))),
    "draft model": draft_model.abstract(CONFIG),
    "taps": dataclasses.replace(NGram(), taps=(1, 3)),
}
WIDER, LONGER, SHORTER = {"hidden_size": 48}, {"vocab_size": 65}, {"vocab_size": 63}
DEEPER = {"num_hidden_layers": 4, "layer_types": [SLIDING, FULL, FULL, FULL]}
SHALLOWER = {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}


@pytest.fixture
def no_weights(monkeypatch):
    """A drafter is refused before weights are read; one that fits goes on to them."""

    def reached(*args, **kwargs):
        raise LookupError("weights")

    monkeypatch.setattr(loading, "load_tokenizer", lambda folder: None)
    monkeypatch.setattr(loading, "load_target", reached)


def refusal(tmp_path, drafter, changes, **settings):
    (tmp_path / "config.json").write_text(json.dumps({**TEXT, **changes}))
    with pytest.raises((ValueError, LookupError)) as caught:
        jaxspec.load(tmp_path, drafter, progress=False, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("assistant", WIDER, "Gemma4MTP cannot be used with this target: the assistant was made for a target of hidden_size 32, .* has 48"),
        ("assistant", SHORTER, "vocab_size 64, the target 63; expected at most as many"),
        ("assistant", LONGER, "weights"),
        ("assistant", {"num_key_value_heads": 4}, r"layer 0 \(sliding_attention\) has num_kv_heads 2, target layer 0, .* has 4"),
        ("assistant", {"global_head_dim": 32}, r"layer 1 \(full_attention\) has head_dim 16, target layer 2, .* has 32"),
        ("assistant", {"sliding_window": 9}, "window 8, target layer 0, .* has 9"),
        ("assistant", {"layer_types": [FULL] * 3}, "of type 'sliding_attention'; the target has no layer of that type"),
        ("assistant", DEEPER, "weights"),
        ("dflash", WIDER, "DFlash cannot be used with this target: .* hidden_size 32, for a target of 32; this target has 48"),
        ("dflash", SHORTER, "vocab_size 64, this target has 63; expected at most as many"),
        ("dflash", LONGER, "weights"),
        ("dflash", DEEPER, r"made for a target of 3 layers \(num_target_layers\), this target has 4"),
        ("dflash2", WIDER, "DFlash2 cannot be used with this target: .* hidden_size 32, for a target of 32; this target has 48"),
        ("dflash2", SHORTER, "vocab_size 64, this target has 63; expected at most as many"),
        ("dflash2", LONGER, "weights"),
        ("dspark", WIDER, "DSpark cannot be used with this target: .* hidden_size 32, for a target of 32; this target has 48"),
        ("dspark", DEEPER, r"made for a target of 3 layers \(num_target_layers\), this target has 4"),
        ("eagle3", WIDER, "Eagle3 cannot be used with this target: .* a target of hidden_size 32, this target has 48"),
        ("eagle3", SHORTER, "vocab_size 64, this target has 63; expected at most as many"),
        ("eagle3", LONGER, "weights"),
        ("eagle3", SHALLOWER, r"reads hidden states \[.*3\]; this target has 0 .. 2"),
        ("modules", WIDER, "MTPModules cannot be used with this target: .* hidden_size 32, this target has 48"),
        ("modules", LONGER, "vocab_size 64, this target has 65"),
        ("modules", DEEPER, "num_hidden_layers 3, this target has 4"),
        ("draft model", SHORTER, "DraftModel cannot be used with this target: the draft model has vocab_size 64, the target 63"),
        ("draft model", LONGER, "weights"),
        ("draft model", WIDER, "weights"),
        ("taps", SHALLOWER, r"NGram cannot be used with this target: the drafter reads hidden states \[1, 3\]; this target has 0 .. 2"),
        *((kind, {}, "weights") for kind in OBJECTS),
    ],
)
def test_an_object_of_another_target_is_refused(no_weights, tmp_path, kind, changes, message):
    found = refusal(tmp_path, OBJECTS[kind], changes)
    assert re.search(message, found), found
    assert ("cannot be used" in found) == (message != "weights")


def test_a_block_must_hold_all_drafts(no_weights, tmp_path):
    message = "num_draft_tokens is 16; the drafter's block_size of 16 holds the anchor and 15 drafts"
    assert refusal(tmp_path, OBJECTS["dflash"], {}, num_draft_tokens=16) == message
    checkpoint = tmp_path / "drafter"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(DFLASH["z-lab"]))
    (checkpoint / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert refusal(tmp_path, checkpoint, {}, num_draft_tokens=16) == message
    assert refusal(tmp_path, checkpoint, {}) == refusal(tmp_path, checkpoint, {}, num_draft_tokens=15) == "weights"
    (checkpoint / "generation_config.json").write_text('{"num_assistant_tokens": 17}')
    assert refusal(tmp_path, checkpoint, {}) == message.replace("16;", "17;")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([3, 8, 62], "d2t of the drafter .* gives 3 tokens, 3 .. 64; expected 3 different ones below 64"),  # ids, not offsets
        ([3, 2, 5], "d2t of the drafter .* gives 2 tokens, 3 .. 7; expected 3 different ones below 64"),
        ([3, 4, 58], None),
    ],
)
def test_a_draft_vocabulary_is_one_of_tokens(tmp_path, found, message):
    config = {**EAGLE3["eagle"], "draft_vocab_size": 3}
    drafter = tiny.random_weights(eagle3.abstract(eagle3.Eagle3Config.from_hf(config, CONFIG, HEAD[:1]), jnp.float32), 0)
    checkpoint.save_weights(tmp_path, dataclasses.replace(drafter, d2t=np.array(found, np.int32)), config)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        drafters.load_drafter(tmp_path, CONFIG, jnp.float32, progress=False)


def test_an_ordering_of_tokens_is_of_tokens(tmp_path):
    assistant = tiny.tiny_assistant(tmp_path)
    tensors = load_file(assistant / "model.safetensors")
    tensors["masked_embedding.token_ordering"][7] = tiny.VOCAB
    save_file(tensors, assistant / "model.safetensors")
    with pytest.raises(ValueError, match=r"token_ordering of the drafter .* has ids 0 \.\. 4096; expected 0 \.\. 4095"):
        drafters.load_drafter(assistant, Gemma4Config.from_hf(tiny.TARGET), jnp.float32, progress=False)
    tensors["masked_embedding.token_ordering"][:8] = 9
    save_file(tensors, assistant / "model.safetensors")
    with pytest.raises(ValueError, match=r"token_ordering of the drafter .* has 40[89]\d different ids; expected all 4096"):
        drafters.load_drafter(assistant, Gemma4Config.from_hf(tiny.TARGET), jnp.float32, progress=False)


def test_the_error_for_no_drafter_names_the_config_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": [1], "model_type": "other"}')
    with pytest.raises(ValueError, match="has model_type 'other'; expected one of 'gemma4_assistant'"):
        drafters.abstract_drafter(tmp_path, CONFIG, jnp.float32)


def proposing(number):
    methods = [{"proposal_type": "greedy", "speculative_tokens": number}]
    config = {**EAGLE3["eagle"], "speculators_config": {"proposal_methods": methods}}
    return eagle3.abstract(eagle3.Eagle3Config.from_hf(config, CONFIG, HEAD), jnp.float32)


@pytest.mark.parametrize(
    ("drafter", "number"),
    [
        (NoDraft(), 0),
        (NGram(), 4),
        (OBJECTS["assistant"], 4),
        (OBJECTS["dflash"], 15),
        (OBJECTS["dflash2"], 15),
        (OBJECTS["dspark"], 7),
        (OBJECTS["eagle3"], 4),
        (proposing(3), 3),
        (proposing(None), 4),
        (OBJECTS["modules"], 2),
        (OBJECTS["draft model"], 4),
        (tiny.Parrot(jnp.zeros((1, 1)), jnp.zeros((1, 1))), 4),
    ],
    ids=lambda value: type(value).__name__,
)
def test_drafts_a_round_where_nobody_asked(drafter, number):
    assert num_draft_tokens_of(drafter) == number
