"""What config.json and the feature extractor's settings say about sounds, and what of it is refused; towers of the released sizes."""

import copy
import json
import shutil

import audio_oracle
import jax
import jax.numpy as jnp
import media_oracle
import pytest
from real_configs import TARGET_PARAMETERS, TARGETS, saved_again

from jaxspec.audio import Frames, Mel, Sounds, audio_config
from jaxspec.audio.config import EmbedderConfig, TowerConfig
from jaxspec.audio.sounds import LEAST_ROWS, SIZES
from jaxspec.released import AUDIO, sounds_of
from jaxspec.trees import weight_count

# The numbers of the releases' audio parts: what the hub counts, without text, the K and V weights (and norms of K) of layers that share
# those of others, and image towers. Its counts leave out the bounds of products, which are scalars: 4 for each of 10 products in 12 layers,
# and of 7 in 16 layers of an image tower.
BOUNDS, OF_IMAGES = 4 * 10 * 12, 4 * 7 * 16
NUMBERS = {
    "e2b": 5_123_178_051 - TARGET_PARAMETERS["E2B"] - (18_874_368 + 6_144) - (168_544_704 - OF_IMAGES) + BOUNDS,
    "e4b": 7_996_156_490 - TARGET_PARAMETERS["E4B"] - (55_050_240 + 5_376) - (169_331_136 - OF_IMAGES) + BOUNDS,
    "12b": 640 * 3840,
}


@pytest.mark.parametrize("kind", audio_oracle.KINDS)
def test_a_config_that_was_saved_again_says_what_it_said(kind):
    """transformers writes every default."""
    released = audio_oracle.config(kind)
    found = audio_config(released)
    assert found is not None and found == audio_config(saved_again(released))
    assert (found.text_hidden_size, isinstance(found.tower, TowerConfig)) == (audio_oracle.TEXT, kind != "unified")
    assert (found.audio_token_id, found.boa_token_id, found.eoa_token_index) == (258_881, 256_000, 258_883)


@pytest.mark.parametrize("name", TARGETS)
def test_released_configs_without_fields_have_the_published_ones(name):
    assert audio_config(TARGETS[name]) is None and audio_config({**TARGETS[name], "audio_config": None}) is None
    found = audio_config({**TARGETS[name], "audio_config": {}, "boa_token_id": 7})
    assert found is not None and found.boa_token_id == 7
    if name == "12B":
        assert found.tower == EmbedderConfig(640)
    else:
        assert found.tower == TowerConfig(1024, 12, 8, (128, 32), 5, 0.5, 12, 13, 0, 50.0, -1e9, True, 1e10, 1536)


@pytest.mark.parametrize(
    ("kind", "changes", "error"),
    [
        ("plain", {"model_type": "whisper"}, "config.json has model_type='whisper'; implemented: 'gemma4_audio'"),
        ("unified", {"model_type": "gemma4_audio"}, "has model_type='gemma4_audio'; implemented: 'gemma4_unified_audio'"),
        ("plain", {"hidden_act": "relu"}, "has hidden_act='relu'; implemented: 'silu'"),
        ("plain", {"num_attention_heads": 3}, "hidden_size is 32; expected a multiple of num_attention_heads, 3"),
        ("plain", {"subsampling_conv_channels": [128]}, r"subsampling_conv_channels are \[128\]; expected two integers"),
        ("plain", {"attention_logit_cap": 0}, "attention_logit_cap is 0"),
        ("plain", {"attention_context_left": 1}, "attention_context_left is 1; expected 2 at least, with which a row sees itself"),
        ("plain", {"attention_invalid_logits_value": -3.0}, "attention_invalid_logits_value is -3.0; expected -1000.0 at most"),
        ("plain", {"attention_invalid_logits_value": "low"}, "attention_invalid_logits_value is 'low' of type str, expected a number"),
        ("plain", {"conv_kernel_size": "5"}, "conv_kernel_size is '5' of type str, expected an integer"),
        ("plain", {"use_clipped_linears": 1}, "has use_clipped_linears=1; expected true or false"),
        ("unified", {"audio_embed_dim": -1}, "audio_embed_dim is -1, expected at least 0"),
    ],
)
def test_what_is_not_served_is_named(kind, changes, error):
    config = copy.deepcopy(audio_oracle.config(kind))
    config["audio_config"] |= changes
    with pytest.raises(ValueError, match=f"the audio tower cannot be read: .*{error}"):
        audio_config(config)


def test_a_score_that_is_null_is_the_published_one():
    config = copy.deepcopy(audio_oracle.config("plain"))
    config["audio_config"]["attention_invalid_logits_value"] = None
    assert audio_config(config) == audio_config(audio_oracle.config("plain"))


def folder_with(tmp_path, kind, settings, file="processor_config.json"):
    shutil.copy(audio_oracle.saved(kind)[1] / "config.json", tmp_path)
    (tmp_path / file).write_text(json.dumps({"feature_extractor": settings} if file == "processor_config.json" else settings))
    return tmp_path


@pytest.mark.parametrize("file", ["processor_config.json", "preprocessor_config.json"])
def test_settings_of_an_extractor_are_those_that_transformers_saved(tmp_path, file):
    settings = {"min_frequency": 60.0, "max_frequency": 7000.0, "fft_overdrive": True, "mel_floor": 0.1, "input_scale_factor": 2.0}
    means = [0.5] * 128
    saved = json.loads(audio_oracle.extractor("plain", **settings, per_bin_mean=means).to_json_string())
    saved["per_bin_mean"] = means  # transformers cannot save it again
    found = Sounds.read(folder_with(tmp_path, "plain", saved, file), jnp.float32)
    assert found.features == Mel(**settings, per_bin_mean=tuple(means))
    saved = json.loads(audio_oracle.extractor("unified").to_json_string())
    assert Sounds.read(folder_with(tmp_path, "unified", saved, file), jnp.float32).features == Frames(640)


def test_settings_of_images_alone_are_none_of_sounds(tmp_path):
    folder = folder_with(tmp_path, "plain", {"image_processor_type": "Gemma4ImageProcessor", "feature_size": 3}, "preprocessor_config.json")
    assert Sounds.read(folder, jnp.float32).features == Mel()


@pytest.mark.parametrize(
    ("kind", "settings", "error"),
    [
        ("plain", {"sampling_rate": 8000}, "sampling_rate of the feature extractor is 8000; expected 16000"),
        ("plain", {"frame_length": 400}, "frame_length of the feature extractor is 400; expected 320"),
        ("plain", {"preemphasis": 0.97}, "preemphasis of the feature extractor is 0.97; expected 0.0"),
        ("plain", {"feature_size": 80}, "feature_size is 80, of which convolutions leave 20; expected 32"),
        ("plain", {"per_bin_mean": [1.0]}, r"per_bin_mean is \[1.0\]; expected a list of 128 numbers"),
        ("plain", {"mel_floor": "x"}, "mel_floor is 'x' of type str"),
        ("unified", {"feature_size": 128}, "feature_size of the feature extractor is 128; expected 640"),
    ],
)
def test_settings_that_are_not_served_are_named(tmp_path, kind, settings, error):
    with pytest.raises(ValueError, match=f"{error}"):
        Sounds.read(folder_with(tmp_path, kind, settings), jnp.float32)


@pytest.mark.parametrize("name", AUDIO)
def test_released_towers_have_the_released_sizes(name):
    found = sounds_of(name, jnp.bfloat16)
    assert weight_count(found.tower) == NUMBERS[name]
    frames = LEAST_ROWS * found.features.frames_a_row
    shapes = jax.ShapeDtypeStruct((frames, found.features.feature_size), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    rows = jax.eval_shape(lambda tower, *sound: tower(*sound), found.tower, *shapes)
    assert (rows.shape, rows.dtype) == ((LEAST_ROWS, found.config.text_hidden_size), jnp.bfloat16)


def test_leaves_are_named_as_in_the_releases():
    names = media_oracle.keys(sounds_of("e2b", jnp.bfloat16).tower)
    assert {
        "audio_tower.subsample_conv_projection.layer0.conv.weight",
        "audio_tower.subsample_conv_projection.layer1.norm.weight",
        "audio_tower.subsample_conv_projection.input_proj_linear.weight",
        "audio_tower.layers.11.feed_forward1.ffw_layer_1.linear.weight",
        "audio_tower.layers.11.self_attn.q_proj.output_max",
        "audio_tower.layers.11.self_attn.relative_k_proj.weight",
        "audio_tower.layers.11.self_attn.per_dim_scale",
        "audio_tower.layers.11.lconv1d.depthwise_conv1d.weight",
        "audio_tower.output_proj.bias",
        "embed_audio.embedding_projection.weight",
    } <= names


def test_what_a_tower_computes_fits_into_what_is_planned():
    """In float32."""
    found = sounds_of("e2b", jnp.float32)
    shapes = jax.ShapeDtypeStruct((4 * (LEAST_ROWS << SIZES - 1), 128), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
    taken = jax.jit(lambda tower, *sound: tower(*sound)).lower(found.tower, *shapes).compile().memory_analysis().temp_size_in_bytes
    rows = 24 * 768 * 1536 * 4  # of other sounds
    assert taken < found.bytes_needed(True) - found.nbytes - rows < 4 * taken
