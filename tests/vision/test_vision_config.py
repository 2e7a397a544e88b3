"""What config.json says about images, and what of it is refused."""

import copy

import pytest
import vision_oracle
from real_configs import TARGETS, saved_again

from jaxspec.vision import vision_config
from jaxspec.vision.config import EmbedderConfig, TowerConfig


@pytest.mark.parametrize("kind", vision_oracle.KINDS)
def test_a_config_that_was_saved_again_says_what_it_said(kind):
    """transformers writes every default, and another name of the rotation."""
    released = vision_oracle.config(kind)
    found = vision_config(released)
    assert found is not None and found == vision_config(saved_again(released))
    assert (found.text_hidden_size, found.patch, found.pool) == (vision_oracle.TEXT, *((12, 1) if kind == "unified" else (4, 3)))
    assert (found.image_token_id, found.boi_token_id, found.eoi_token_id) == (258_880, 255_999, 258_882)


@pytest.mark.parametrize("name", TARGETS)
def test_released_configs_without_fields_have_the_published_ones(name):
    assert vision_config(TARGETS[name]) is None and vision_config({**TARGETS[name], "vision_config": None}) is None
    assert vision_config(TARGETS[name]["text_config"]) is None
    found = vision_config({**TARGETS[name], "vision_config": {}, "boi_token_id": 7})
    assert found is not None
    assert (found.text_hidden_size, found.boi_token_id) == (TARGETS[name]["text_config"]["hidden_size"], 7)
    if name == "12B":
        assert (found.tower, found.patch, found.pool) == (EmbedderConfig(3840, 1120), 48, 1)
    else:
        assert found.tower == TowerConfig(768, 3072, 16, 12, 12, 64, 100.0, 10_240, False, False)
        assert (found.patch, found.pool, found.rms_norm_eps) == (16, 3, 1e-6)


@pytest.mark.parametrize(
    ("kind", "changes", "error"),
    [
        ("plain", {"model_type": "siglip"}, "config.json has model_type='siglip'; implemented: 'gemma4_vision'"),
        ("unified", {"model_type": "gemma4_vision"}, "has model_type='gemma4_vision'; implemented: 'gemma4_unified_vision'"),
        ("plain", {"hidden_activation": "relu"}, "has hidden_activation='relu'; implemented: 'gelu_pytorch_tanh'"),
        ("plain", {"rope_parameters": {"rope_type": "yarn"}}, "has rope_type='yarn'; implemented: 'axial', 'default'"),
        ("plain", {"num_key_value_heads": 3}, "num_attention_heads is 4; expected a multiple of num_key_value_heads, 3"),
        ("plain", {"head_dim": 6}, "head_dim is 6; expected a multiple of 4"),
        ("plain", {"hidden_size": -1}, "hidden_size is -1, expected at least 0"),
        ("plain", {"patch_size": "16"}, "patch_size is '16' of type str, expected an integer"),
        ("plain", {"standardize": 1}, "has standardize=1; expected true or false"),
        ("unified", {"output_proj_dims": 8}, "has output_proj_dims=8; implemented: 24"),
    ],
)
def test_what_is_not_served_is_named(kind, changes, error):
    config = copy.deepcopy(vision_oracle.config(kind))
    config["vision_config"] |= changes
    with pytest.raises(ValueError, match=f"the image tower cannot be read: .*{error}"):
        vision_config(config)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model_type": "llava"}, "config.json has model_type='llava'; implemented: 'gemma4', 'gemma4_unified'"),
        ({"text_config": None}, "config.json lacks 'text_config'"),
        ({"vision_config": []}, r"config.json has vision_config=\[\]; expected an object"),
        ({"text_config": {}}, "config.json lacks 'hidden_size'"),
        ({"eoi_token_id": "x"}, "eoi_token_id is 'x' of type str, expected an integer"),
    ],
)
def test_a_config_that_is_none_of_the_family_is_refused(changes, error):
    with pytest.raises(ValueError, match=f"the image tower cannot be read: .*{error}"):
        vision_config(vision_oracle.config("plain") | changes)
