"""The towers' numbers are those of transformers, in float32, and the released configs have the sizes of the releases."""

import dataclasses

import jax
import jax.numpy as jnp
import media_oracle
import ml_dtypes
import numpy as np
import pytest
import vision_oracle
from definitions import relative_error

from jaxspec.released import IMAGES
from jaxspec.trees import nbytes, weight_count
from jaxspec.vision import Images, VisionConfig, gemma4_tower, opened, unified_embedder, vision_config
from jaxspec.vision.config import TowerConfig

pytestmark = pytest.mark.usefixtures("unoptimised")
SIZES = [(30, 20), (9, 100), (400, 13), (60, 60)]  # width, height
LIMIT = 1e-4  # of the largest number

# The towers of the releases, in what a config says beside the defaults, and the numbers of each with its projection: those that a release
# holds beside the text model, without the 12B's projection of sounds, and for E2B those of transformers' model.
REAL = {
    "E2B": ("gemma4", 1536, IMAGES["e2b"], 168_544_704),
    "31B": ("gemma4", 5376, IMAGES["31b"], 31_273_088_876 - 30_697_345_340),
    "26B-A4B": ("gemma4", 2816, IMAGES["26b"], 25_805_936_206 - 25_233_141_790),
    "12B": ("gemma4_unified", 3840, IMAGES["12b"], 11_959_730_224 - 11_907_350_320 - 640 * 3840),
}


def picture(width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([width, height, seed]).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture(scope="module", params=list(vision_oracle.KINDS))
def loaded(request):
    return request.param, Images.load(vision_oracle.saved(request.param)[1], jnp.float32, 70)


def test_rows_are_those_of_transformers(loaded):
    """Of images that fill the patches and of others, so that padding is no part of them."""
    kind, images = loaded
    counts = set()
    for size in SIZES:
        image = picture(*size)
        found, count = np.asarray(images.rows(image)), images.count(image)
        patches, positions = images.preprocessing.patched(images.preprocessing.resized(opened(image)))
        expected = vision_oracle.rows(kind, images.preprocessing.levels[patches], positions)
        assert (found.dtype, found.shape, expected.shape) == (np.float32, (70, vision_oracle.TEXT), (count, vision_oracle.TEXT))
        assert relative_error(found[:count], expected) < LIMIT
        assert np.isfinite(found).all()
        counts.add(count)
    assert max(counts) <= 70 and len(counts) > 2


def test_queries_in_blocks_see_the_same(monkeypatch):
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 90, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    seen = jnp.arange(90)[None] < jnp.array([[70], [90]])
    whole = gemma4_tower._attended(q, k, v, seen)
    monkeypatch.setattr(gemma4_tower, "MOST_QUERIES", 40)
    assert relative_error(gemma4_tower._attended(q, k, v, seen), np.asarray(whole)) < 1e-6


def test_in_bfloat16_rows_are_near(loaded):
    kind, images = loaded
    half = Images.load(vision_oracle.saved(kind)[1], jnp.bfloat16, 70)
    assert {leaf.dtype for leaf in jax.tree.leaves(half.tower)} == {jnp.dtype(jnp.bfloat16)}
    assert half.nbytes * 2 == images.nbytes == nbytes(images.tower)
    image = picture(*SIZES[0])
    found = half.rows(image)
    assert found.dtype == ml_dtypes.bfloat16
    assert relative_error(found.astype(np.float32), images.rows(image)) < 0.1


def real_config(name: str) -> VisionConfig:
    kind, hidden, vision, _ = REAL[name]
    found = vision_config({"model_type": kind, "text_config": {"hidden_size": hidden}, "vision_config": vision})
    assert found is not None
    return found


@pytest.mark.parametrize("name", REAL)
def test_released_towers_have_the_released_sizes(name):
    _, hidden, _, numbers = REAL[name]
    config = real_config(name)
    family = gemma4_tower if isinstance(config.tower, TowerConfig) else unified_embedder
    tower = family.abstract(config)
    assert weight_count(tower) == numbers
    for most in (280, 1120):
        patches = most * config.pool**2
        pixels = jax.ShapeDtypeStruct((2, patches, 3 * config.patch**2), jnp.float32)
        rows = jax.eval_shape(lambda tower, *image: tower(*image), tower, pixels, jax.ShapeDtypeStruct((2, patches, 2), jnp.int32))
        assert (rows.shape, rows.dtype) == ((2, most, hidden), jnp.bfloat16)


def test_scores_of_the_largest_images_fit():
    """Those of all heads and of 10,080 patches would be 6.5 GB in float32, and a head's 406 MB, several times over."""
    config = real_config("31B")
    assert isinstance(config.tower, TowerConfig)
    config = dataclasses.replace(config, tower=dataclasses.replace(config.tower, num_hidden_layers=1))
    shapes = jax.ShapeDtypeStruct((1, 10_080, 768), jnp.float32), jax.ShapeDtypeStruct((1, 10_080, 2), jnp.int32)
    program = jax.jit(lambda tower, *image: tower(*image)).lower(gemma4_tower.abstract(config), *shapes)
    assert program.compile().memory_analysis().temp_size_in_bytes < 600_000_000


def test_leaves_are_named_as_in_the_releases():
    names = media_oracle.keys(gemma4_tower.abstract(real_config("E2B")))
    assert {
        "vision_tower.patch_embedder.input_proj.weight",
        "vision_tower.patch_embedder.position_embedding_table",
        "vision_tower.encoder.layers.15.self_attn.q_proj.linear.weight",
        "vision_tower.encoder.layers.15.self_attn.q_proj.input_min",
        "vision_tower.encoder.layers.15.mlp.down_proj.output_max",
        "embed_vision.embedding_projection.weight",
    } <= names
