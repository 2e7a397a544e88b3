"""Patches and their places are exactly those of transformers' processor on Pillow, and what a checkpoint sets is what holds."""

import json

import numpy as np
import pytest
import vision_oracle
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from jaxspec.vision import opened, vision_config
from jaxspec.vision.preprocessing import IDENTITY, SOFT_TOKENS, Preprocessing, read_preprocessing

SIZES = [(1, 1), (2, 1), (1, 3), (5, 4000), (4000, 5), (70 * 48, 48), (71 * 48, 48), (640, 480), (800, 801), (336, 336), (1000, 47)]


def picture(width: int, height: int, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng([width, height]).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


@pytest.mark.parametrize("most", SOFT_TOKENS)
def test_patches_are_those_of_transformers(most):
    """Among the sizes are some that fit already, and some that are so long that a side would have no patch."""
    theirs, ours = Gemma4ImageProcessorPil(max_soft_tokens=most), Preprocessing(16, 3, most)
    cases = [picture(*size) for size in SIZES] + [picture(90, 60, mode) for mode in ("L", "P", "RGBA", "CMYK", "1", "I;16")]
    for image in cases if most == 70 else cases[5:9]:
        expected = theirs(images=[opened(image)], return_tensors="np")
        patches, positions = ours.patched(ours.resized(opened(image)))
        patches = ours.levels[patches]
        assert (patches.dtype, positions.dtype) == (np.float32, np.int32)
        np.testing.assert_array_equal(patches, expected["pixel_values"][0])
        np.testing.assert_array_equal(positions, expected["image_position_ids"][0])
        assert [ours.count(*image.size)] == list(expected["num_soft_tokens_per_image"])


@pytest.mark.parametrize("size", SIZES)
def test_the_larger_patches_of_the_unified_model_hold_the_same_pixels(size):
    image = opened(picture(*size))
    small, large = Preprocessing(16, 3, 70), Preprocessing(48, 1, 70)
    patches, positions = small.patched(small.resized(image))
    merged, places = large.patched(large.resized(image))
    assert large.count(*size) == small.count(*size) == (places[:, 0] >= 0).sum()
    assert merged.shape == (70, 48 * 48 * 3) and (merged[large.count(*size) :] == 0).all() and (places[large.count(*size) :] == -1).all()
    blocks = merged.reshape(70, 3, 16, 3, 16, 3).swapaxes(2, 3)  # [soft token, row of patches, column of patches, ...]
    where = {tuple(place): number for number, place in enumerate(places)}
    for patch, (column, row) in zip(patches, positions, strict=True):
        if column >= 0:
            np.testing.assert_array_equal(blocks[where[column // 3, row // 3], row % 3, column % 3].ravel(), patch)


@pytest.fixture
def read(tmp_path):
    """Reads settings that a file in a checkpoint's folder holds."""

    def settings(found: dict | None, most: int | None = None, file: str = "processor_config.json", kind: str = "plain") -> Preprocessing:
        config = vision_config(vision_oracle.config(kind))
        assert config is not None
        if found is not None:
            found = {"patch_size": 4, **found}
            (tmp_path / file).write_text(json.dumps({"image_processor": found} if file == "processor_config.json" else found))
        return read_preprocessing(tmp_path, config, most)

    return settings


def test_settings_are_the_published_ones_where_a_checkpoint_says_nothing(read):
    with pytest.raises(ValueError, match="max_soft_tokens is 280, for images 840 patches long; the tower has 512 positions"):
        read(None)
    assert read(None, 70) == Preprocessing(4, 3, 70, resample=3, rescale_factor=1 / 255)
    assert read(None, 70, kind="unified") == Preprocessing(12, 1, 70)
    of_sounds = {"feature_extractor_type": "Gemma4AudioFeatureExtractor", "resample": 1}
    assert read(of_sounds, 70, "preprocessor_config.json") == Preprocessing(4, 3, 70)


@pytest.mark.parametrize("file", ["processor_config.json", "preprocessor_config.json"])
def test_settings_are_those_of_the_checkpoint(read, file):
    found = read({"max_soft_tokens": 70, "resample": 2, "rescale_factor": 0.5, "do_normalize": True, **IDENTITY}, file=file)
    assert found == Preprocessing(4, 3, 70, 2, 0.5)
    assert read({"max_soft_tokens": 1120}, 70, file).max_soft_tokens == 70


@pytest.mark.parametrize(
    ("found", "error"),
    [
        ({"patch_size": 14}, "processor_config.json: patch_size is 14, but that of vision_config is 4"),
        ({"pooling_kernel_size": 2}, "pooling_kernel_size is 2, but that of vision_config is 3"),
        ({"do_resize": False}, "do_resize is False; expected true"),
        ({"do_rescale": False}, "do_rescale is False; expected true"),
        ({"do_normalize": True, "image_mean": [0.5, 0.5, 0.5]}, r"image_mean is \[0.5, 0.5, 0.5\]; expected \[0.0, 0.0, 0.0\]"),
        ({"max_soft_tokens": 100}, "max_soft_tokens is 100; expected one of 70, 140, 280, 560, 1120"),
        ({"resample": 9}, "resample is 9, expected 0 .. 5"),
        ({"rescale_factor": 0}, "rescale_factor is 0.0, expected"),
    ],
)
def test_settings_that_are_not_served_are_named(read, found, error):
    with pytest.raises(ValueError, match=error):
        read({"max_soft_tokens": 70, **found})
