"""What a layer needs is derived from Hugging Face's fields, in both of the ways in which they are written; the rest is refused."""

import dataclasses
import json

import oracle
import pytest
from real_configs import ASSISTANTS, FULL, SLIDING, TARGETS

from jaxspec.model import families, gemma4
from jaxspec.model.gemma4_config import AssistantConfig, Gemma4Config

MODELS = list(TARGETS)


def test_layers_of_e2b() -> None:
    config = Gemma4Config.from_hf(TARGETS["E2B"])
    assert (config.num_hidden_layers, config.first_shared_layer, config.vocab_size_per_layer_input) == (35, 15, 262_144)
    assert config.kv_owners == tuple(range(15))
    assert (config.last_owner(SLIDING), config.last_owner(FULL)) == (13, 14)
    assert [spec.kind for spec in config.layers[:5]] == [SLIDING] * 4 + [FULL]
    assert {spec.kv_source for spec in config.layers[15:] if spec.kind == SLIDING} == {13}
    assert {spec.kv_source for spec in config.layers[15:] if spec.kind == FULL} == {14}
    assert [spec.intermediate_size for spec in config.layers] == [6144] * 15 + [12_288] * 20
    sliding, full = config.layers[0], config.layers[4]
    assert (sliding.window, sliding.head_dim, sliding.rope_theta, sliding.rotary_angles) == (512, 256, 1e4, 128)
    assert (full.window, full.head_dim, full.rope_theta, full.rotary_angles) == (None, 512, 1e6, 64)
    assert (sliding.num_kv_heads, full.num_kv_heads, sliding.group, full.group) == (1, 1, 8, 8)
    assert (config.eos_token_id, config.bos_token_id, config.pad_token_id, config.dtype) == ((1, 106), 2, 0, "bfloat16")


@pytest.mark.parametrize(
    ("name", "groups", "full_kv_heads"), [("E4B", (4, 4), 2), ("12B", (2, 16), 1), ("26B-A4B", (2, 8), 2), ("31B", (2, 8), 4)]
)
def test_heads(name: str, groups: tuple[int, int], full_kv_heads: int) -> None:
    config = Gemma4Config.from_hf(TARGETS[name])
    sliding, full = config.layers[0], config.layers[5]
    assert ((sliding.group, full.group), full.num_kv_heads) == (groups, full_kv_heads)
    assert (sliding.k_eq_v, full.k_eq_v) == (False, name != "E4B")


def test_experts() -> None:
    specs = Gemma4Config.from_hf(TARGETS["26B-A4B"]).layers
    assert {(s.num_experts, s.top_k_experts, s.moe_intermediate_size, s.intermediate_size) for s in specs} == {(128, 8, 704, 2112)}
    assert {s.num_experts for s in Gemma4Config.from_hf(TARGETS["31B"]).layers} == {0}


def test_equal_layers_have_equal_specs() -> None:
    """Two kinds of layer are two specs: what is traced once for each spec is not traced once for each layer."""
    assert len(set(Gemma4Config.from_hf(TARGETS["31B"]).layers)) == 2
    assert len(set(Gemma4Config.from_hf(TARGETS["E2B"]).layers)) == 4


@pytest.mark.parametrize("name", MODELS)
def test_text_only_and_conditional_generation_say_the_same(name: str) -> None:
    outer = TARGETS[name]
    alone = Gemma4Config.from_hf(outer["text_config"])
    assert dataclasses.replace(alone, eos_token_id=(1, 106)) == Gemma4Config.from_hf(outer)
    assert alone.eos_token_id == (1,)


@pytest.mark.parametrize("name", ["gemma4", "gemma4_text"])
def test_the_weights_say_whether_the_head_is_the_embedding(name: str) -> None:
    """Tools that store the head beside the embedding it equals write tie_word_embeddings=False."""
    text = oracle.text_config("31B", tie_word_embeddings=False)
    config = text if name == "gemma4_text" else {"model_type": name, "text_config": text, "tie_word_embeddings": False}
    assert Gemma4Config.from_hf(config) == Gemma4Config.from_hf(oracle.text_config("31B"))


@pytest.mark.parametrize("member", list(oracle.MEMBERS))
def test_as_transformers_writes_it(member: str) -> None:
    """transformers gives full layers their sizes in per_layer_config, which releases do not have."""
    folder = oracle.target(member)[1]
    written = json.loads((folder / "config.json").read_text())
    assert "per_layer_config" in written and "global_head_dim" not in written
    released = Gemma4Config.from_hf(oracle.text_config(member, dtype="float32"))
    assert Gemma4Config.from_hf(written) == released


@pytest.mark.parametrize("keys", [("0", "3"), ("00", "03"), ("000", "3"), (0, 3)])
def test_the_index_of_a_layer_may_be_padded(keys) -> None:
    own = {"head_dim": 16, "num_key_value_heads": 1}
    text = {**oracle.text_config("12B"), "global_head_dim": None, "num_global_key_value_heads": None}
    layers = Gemma4Config.from_hf({**text, "per_layer_config": dict.fromkeys(keys, own)}).layers
    assert [(spec.head_dim, spec.num_kv_heads) for spec in layers] == [(16, 1), (8, 4), (8, 4), (16, 1)]


def test_rope_types_have_an_older_name() -> None:
    text = oracle.text_config("31B")
    older = {
        kind: {("type" if name == "rope_type" else name): value for name, value in rope.items()}
        for kind, rope in text["rope_parameters"].items()
    }
    assert older != text["rope_parameters"]
    assert Gemma4Config.from_hf({**text, "rope_parameters": older}) == Gemma4Config.from_hf(text)


def test_defaults() -> None:
    """Without layer_types, five sliding layers to a full one; the last layer is full whatever is said."""
    text = oracle.text_config("31B", num_hidden_layers=8, layer_types=None, rope_parameters=None, eos_token_id=None)
    config = Gemma4Config.from_hf(text)
    assert [spec.kind for spec in config.layers] == [SLIDING] * 5 + [FULL, SLIDING, FULL]
    assert {spec.rope_theta for spec in config.layers} == {1e4, 1e6}
    assert config.eos_token_id == ()
    assert Gemma4Config.from_hf(oracle.text_config("31B", layer_types=[SLIDING] * 6)).layer_types[-1] == FULL


@pytest.mark.parametrize(("outer", "inner", "ids"), [(0, 1, (0,)), (None, 1, (1,)), ([1, 106], 1, (1, 106)), (None, 0, (0,))])
def test_eos(outer, inner, ids: tuple[int, ...]) -> None:
    config = {"model_type": "gemma4", "text_config": oracle.text_config("31B", eos_token_id=inner), "eos_token_id": outer}
    assert Gemma4Config.from_hf(config).eos_token_id == ids


@pytest.mark.parametrize("name", MODELS)
def test_assistant(name: str) -> None:
    config = AssistantConfig.from_hf(ASSISTANTS[name])
    assert (config.text.num_hidden_layers, config.text.kv_owners, config.text.layer_types) == (4, (), (SLIDING,) * 3 + (FULL,))
    assert config.backbone_hidden_size == TARGETS[name]["text_config"]["hidden_size"]
    assert config.use_ordered_embeddings == (name in ("E2B", "E4B"))
    target = Gemma4Config.from_hf(TARGETS[name])
    for spec in config.text.layers:
        theirs = target.layers[target.last_owner(spec.kind) or 0]
        assert (spec.num_kv_heads, spec.head_dim, spec.window) == (theirs.num_kv_heads, theirs.head_dim, theirs.window)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "silu"}, "hidden_activation='silu'; implemented: 'gelu_pytorch_tanh'"),
        ({"attention_bias": True}, "attention_bias=True; implemented: False"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all'; implemented: None, 'vision'"),
        ({"hidden_act": "silu"}, "hidden_act='silu'; implemented: None, 'gelu_pytorch_tanh'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0; implemented: None"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_scaling={.*}; implemented: None"),
        ({"layer_types": None, "sliding_window_pattern": 4}, "sliding_window_pattern=4; implemented: 6, None"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "64"}, "wrong value: hidden_size is '64' of type str, expected an integer"),
        ({"sliding_window": 0}, "sliding_window is 0, expected at least 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0, expected at least 1"),
        ({"rope_parameters": "default"}, "rope_parameters='default'; expected an object"),
        ({"rope_parameters": {SLIDING: 1e4}}, "sliding_attention=10000.0; expected an object"),
        ({"layer_types": [SLIDING, FULL]}, "layer_types has 2 entries of .*; expected 6 of"),
        ({"layer_types": ["linear_attention"] * 6}, r"6 entries of \['linear_attention'\]; expected 6 of"),
        (
            {"layer_types": [SLIDING] * 6, "num_kv_shared_layers": 2},
            "shared_layers is 2, but no layer before 4 is of type 'full_attention'",
        ),
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6; a target of 6 layers shares fewer"),
        ({"num_kv_shared_layers": 9}, "num_kv_shared_layers is 9; a target of 6 layers shares fewer"),
        ({"num_key_value_heads": 3}, "layer 0 has 8 query heads, which 3 KV heads do not divide"),
        ({"num_global_key_value_heads": 3}, "layer 2 has 8 query heads, which 3 KV heads do not divide"),
        (
            {"per_layer_config": {"2": {"sliding_window": 4}}},
            r"per_layer_config of layer 2 sets \['sliding_window'\]; implemented: head_dim",
        ),
        ({"per_layer_config": {"2": {}, "02": {}}}, "per_layer_config has layer 2 twice, as '2' and as '02'"),
        ({"per_layer_config": {"06": {}}}, "per_layer_config has the key '06'; expected the index of a layer, 0 .. 5"),
        ({"per_layer_config": {FULL: {}}}, "per_layer_config has the key 'full_attention'; expected the index of a layer, 0 .. 5"),
        ({"per_layer_config": {"-1": {}}}, "per_layer_config has the key '-1'; expected the index of a layer"),
        ({"per_layer_config": {"2": 16}}, "per_layer_config of layer 2 is 16; expected an object"),
        ({"per_layer_config": [{}] * 6}, "per_layer_config is a list; expected an object of layer index to settings"),
        ({"rope_parameters": {SLIDING: {"rope_theta": 1e4}}}, "lacks 'full_attention'"),
        ({"rope_parameters": {SLIDING: {"rope_type": "yarn", "rope_theta": 1e4}}}, "implemented: rope_type 'default' over whole heads"),
        (
            {"rope_parameters": {SLIDING: {"partial_rotary_factor": 0.5, "rope_theta": 1e4}}},
            "implemented: rope_type 'default' over whole heads",
        ),
        (
            {"rope_parameters": {SLIDING: {"partial_rotary_factor": -1, "rope_theta": 1e4}}},
            "partial_rotary_factor is -1.0",
        ),
        ({"rope_parameters": {SLIDING: {"factor": "x", "rope_theta": 1e4}}}, "factor is 'x' of type str, expected a number"),
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100},
            "vocab_size_per_layer_input is 100; expected at least vocab_size, ",
        ),
        ({"rope_parameters": {SLIDING: {"rope_theta": 0}}}, "rope_theta is 0.0, expected a finite number of more than 0"),
        ({"initializer_range": "x"}, "wrong value: initializer_range is 'x' of type str, expected a number"),
        ({"rope_parameters": {SLIDING: {"factor": 8.0, "rope_theta": 1e4}}}, "with factor 1"),
        ({"enable_moe_block": True}, "lacks 'num_experts'"),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 8}, r"top_k_experts is 8, expected 1 \.\. 4, which num_experts is"),
        ({"enable_moe_block": "yes"}, "enable_moe_block='yes'; expected true or false"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers is -1, expected at least 0"),
        ({"global_head_dim": -2}, "global_head_dim is -2, expected at least 0"),
        ({"num_global_key_value_heads": "2"}, "wrong value: num_global_key_value_heads is '2' of type str, expected an integer"),
        ({"layer_types": 5}, r"layer_types has 1 entries of \['5'\]; expected 6 of"),
        ({"layer_types": [SLIDING, FULL, [], 4, SLIDING, FULL]}, "layer_types has 6 entries of .*'4'.*; expected 6 of"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0.0, expected a finite number of more than 0"),
        ({"final_logit_softcapping": "30"}, "wrong value: final_logit_softcapping is '30' of type str, expected a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a finite number of more than 0"),
        ({"eos_token_id": [1, "a"]}, "wrong value: eos_token_id is 'a' of type str, expected an integer"),
    ],
)
def test_refused(changes: dict, message: str) -> None:
    text = oracle.text_config("31B", **changes)
    with pytest.raises(ValueError, match=message):
        Gemma4Config.from_hf(text)
    with pytest.raises(ValueError, match=message):
        Gemma4Config.from_hf({"model_type": "gemma4", "text_config": text})


def test_refused_targets() -> None:
    with pytest.raises(ValueError, match="model_type is 'llama'; a Gemma 4 target has one of gemma4, gemma4_unified, gemma4_text"):
        Gemma4Config.from_hf({"model_type": "llama"})
    with pytest.raises(ValueError, match="lacks 'text_config'"):
        Gemma4Config.from_hf({"model_type": "gemma4"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma4"}, "model_type is 'gemma4'; a Gemma 4 assistant has one of gemma4_assistant, gemma4_unified_assistant"),
        ({"text_config": None}, "lacks 'text_config'"),
        ({"text_config": "x"}, "text_config='x'; expected an object"),
        ({"num_centroids": 0}, "num_centroids is 0, expected at least 1"),
        ({"backbone_hidden_size": None}, "lacks 'backbone_hidden_size'"),
        ({"num_centroids": 1000}, "divides vocab_size .* found num_centroids 1000, vocab_size 262144, centroid_intermediate_top_k 32"),
        ({"centroid_intermediate_top_k": 4096}, "found num_centroids 2048, vocab_size 262144, centroid_intermediate_top_k 4096"),
    ],
)
def test_refused_assistants(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AssistantConfig.from_hf({**ASSISTANTS["E2B"], **changes})


@pytest.mark.parametrize(("field", "value"), [("hidden_size_per_layer_input", 256), ("use_double_wide_mlp", True)])
def test_assistants_have_no_such_part(field: str, value: object) -> None:
    text = {**ASSISTANTS["E2B"]["text_config"], field: value}
    with pytest.raises(ValueError, match=f"the assistant's text_config has {field}={value}; an assistant has none"):
        AssistantConfig.from_hf({**ASSISTANTS["E2B"], "text_config": text})


def test_families_are_found_by_model_type_and_by_config():
    config = families.family_named("gemma4").read(TARGETS["31B"])
    assert families.family_of(config) is families.family_named("gemma4_text") is gemma4.FAMILY
    with pytest.raises(ValueError, match="model_type is 'llama'; a target has one of gemma4, gemma4_unified, gemma4_text"):
        families.family_named("llama")
    with pytest.raises(TypeError, match="config is of type dict; expected one of Gemma4Config"):
        families.family_of({})


def test_in_which_targets_the_rows_of_an_image_see_one_another():
    for name, raw in TARGETS.items():
        text = raw["text_config"]
        expected = None if name in ("E2B", "E4B") else "vision"
        assert Gemma4Config.from_hf(raw).use_bidirectional_attention == expected
        left_out = {**raw, "text_config": {field: x for field, x in text.items() if field != "use_bidirectional_attention"}}
        assert Gemma4Config.from_hf(left_out).use_bidirectional_attention == ("vision" if name == "12B" else None)
