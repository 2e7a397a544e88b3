"""Step-3.5's config.json: the ways in which it is written, and what is refused by name."""

import pytest
import step3p5_files as files

from jaxspec.model.families import family_named
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.model.step3p5_config import Step3p5Config, modules_config, read_modules

LISTS = ("layer_types", "rope_theta", "partial_rotary_factors", "swiglu_limits", "swiglu_limits_shared")


def read(**changes):
    return Step3p5Config.from_hf(files.tiny_config(**changes))


def cut(count):
    """The lists by layer with so many entries."""
    whole = files.tiny_config()
    return {name: whole[name][:count] for name in LISTS}


def test_what_is_read():
    config = read()
    assert family_named("step3p5").read(files.tiny_config()) == config
    assert [spec.num_heads for spec in config.layers] == [4, 6, 6, 6, 4] and config.kv_owners == (0, 1, 2, 3, 4)
    assert [spec.num_experts for spec in config.layers] == [0, 0, 0, 8, 8] and [spec.window for spec in config.layers][:2] == [None, 8]
    assert [spec.limit for spec in config.layers] == [None, None, None, None, 0.9]
    assert [spec.shared_limit for spec in config.layers] == [None, 0.7, None, None, 1.1]
    assert [spec.rope_scaling is None for spec in config.layers] == [False, True, True, True, False]
    assert config.last_owner(FULL) == 4 and config.last_owner(SLIDING) == 3 and config.last_owner("none") is None
    assert config.eos_token_id == (1, 2) and config.dtype == "bfloat16" and hash(config) == hash(read())
    assert config.modules == read_modules(files.tiny_config()).layers and {spec.num_experts for spec in config.modules} == {0}


def test_lists_may_leave_the_modules_out():
    """With the modules' entries, without any, and with lists of their own."""
    assert read(**cut(5)) == read(**cut(6)) == read()
    own = read(**cut(5), mtp_layer_types=[FULL] * 3, mtp_rope_theta=[7.0] * 3, mtp_partial_rotary_factors=[0.5] * 3)
    assert own.layers == read().layers and {(spec.kind, spec.rope_theta, spec.rotary_angles) for spec in own.modules} == {(FULL, 7.0, 2)}
    assert read(moe_layers_enum=[3, 4]) == read(moe_layers_enum="3, 4") == read()
    assert read(moe_layers_enum=None, mlp_layer_types=["dense"] * 3 + ["sparse"] * 2) == read()


def test_one_theta_and_no_scaling():
    config = read(rope_theta=500.0, rope_scaling=None)
    assert {spec.rope_theta for spec in config.layers} == {500.0} and {spec.rope_scaling for spec in config.layers} == {None}
    assert {spec.rope_theta for spec in config.modules} == {500.0}
    assert {spec.rope_theta for spec in read(rope_theta=None).layers + read(rope_theta=None).modules} == {10_000.0}


def test_fresh_modules():
    raw = files.tiny_config(quantization_config={"quant_method": "fp8"}, auto_map={})
    made = modules_config(raw, read(), 2)
    found = read_modules(made)
    assert found.layers == read().modules[:2] and found.num_hidden_layers == 5 and "quantization_config" not in made


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({name: False}, f"config.json has {name}=False") for name in ("zero_centered", "use_qk_norm", "use_head_wise_attn_gate")),
        *(({name: False}, f"config.json has {name}=False") for name in ("use_moe_router_bias", "norm_expert_weight", "need_fp32_gate")),
        ({"sink": True}, "config.json has sink=True"),
        ({"use_rope_layers": [1]}, r"use_rope_layers=\[1\]"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"moe_every_n_layer": 2}, "moe_every_n_layer=2"),
        ({"moe_router_activation": "softmax"}, "moe_router_activation='softmax'"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config="),
        ({"mtp_mlp_layer_types": ["sparse"]}, "mtp_mlp_layer_types="),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling is .*'yarn'.*; implemented: rope_type 'llama3'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "config.json lacks 'low_freq_factor'"),
        ({"partial_rotary_factors": 0.4}, "partial_rotary_factors has 0.4, so that 3 of 8 dims rotate; expected an even number"),
        ({"partial_rotary_factors": 0.0}, "partial_rotary_factors has 0.0, so that 0 of 8 dims rotate"),
        ({"layer_types": [FULL] * 4}, "layer_types has 4 entries; expected 5 of num_hidden_layers, or those of the MTP layers too"),
        ({"layer_types": ["linear"] * 8}, "layer_types has .*linear"),
        ({"layer_types": None}, "config.json lacks 'layer_types'"),
        ({"moe_layers_enum": "3,5"}, r"moe_layers_enum names the layers \[5\]; expected indices of layers, 0 .. 4"),
        ({"moe_layers_enum": "3,x"}, "moe_layers_enum is '3,x'; expected the indices of layers"),
        ({"moe_layers_enum": None}, "config.json lacks 'moe_layers_enum'"),
        ({"num_attention_heads": 5}, "full_attention has 5 query heads, which 2 KV heads do not divide"),
        ({"attention_other_setting": {"attention_type": "full_attention"}}, "attention_type='full_attention'"),
        ({"hidden_size": None}, "config.json lacks 'hidden_size'"),
        ({"model_type": "step3p7"}, "model_type is 'step3p7'; a Step-3.5 target has step3p5"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        read(**changes)
