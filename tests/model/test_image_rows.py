"""Rows of an image in a prompt against transformers, in float32: they stand in place of embeddings, and see one another where the config
says so."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch
import transformers
from definitions import relative_error

from jaxspec import checkpoint
from jaxspec.model import gemma4
from jaxspec.model import paged_kv as paged
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.rows import Inserted, Rows

pytestmark = pytest.mark.usefixtures("unoptimised")
LIMIT = 1e-4  # of the largest expected value
IMAGE = 130  # the token that stands for a row of an image
CHUNK, SLOTS, PAGE = 8, 2, 4
# Where images begin, and how many rows they have: the window is 8 positions, and a ring has more places than one of the images has rows.
IMAGES = ((3, 5), (10, 7), (21, 20))
LENGTH = 46
CLASSES = {"gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified"}


@functools.cache
def prompt() -> tuple[np.ndarray, list[np.ndarray]]:
    """Token ids [LENGTH] and the rows of each image."""
    rng = np.random.default_rng(3)
    ids = rng.integers(0, IMAGE, LENGTH)
    for begin, count in IMAGES:
        ids[begin : begin + count] = IMAGE
    return ids, [rng.normal(size=(count, oracle.BASE["hidden_size"])).astype(np.float32) for _, count in IMAGES]


@torch.no_grad()
def expected(member: str) -> np.ndarray:
    """The reference's logits after each token: [LENGTH, V]."""
    text, _ = oracle.target(member)
    config = oracle.outer_config(oracle.text_config(member))
    name = CLASSES[config.pop("model_type")]
    inner = {field: value for field, value in config.pop("text_config").items() if field != "model_type"}
    if name == "Gemma4Unified":
        inner = {
            k: v for k, v in inner.items() if k not in ("enable_moe_block", "hidden_size_per_layer_input", "vocab_size_per_layer_input")
        }
    made = getattr(transformers, f"{name}Config")(
        text_config=getattr(transformers, f"{name}TextConfig")(**inner),
        vision_config={"num_hidden_layers": 1} if name == "Gemma4" else {},
        image_token_id=IMAGE,
        video_token_id=None,
        audio_token_id=None,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForConditionalGeneration")(made)
    model.model.language_model, model.lm_head = text.model, text.lm_head
    ids, rows = prompt()
    found = types.SimpleNamespace(pooler_output=[torch.tensor(each) for each in rows])
    model.model.get_image_features = lambda *_, **__: found
    ids = torch.tensor(ids, dtype=torch.long)[None]
    # The masks as `generate` makes them: `forward` by itself lets the 12B's images see themselves whole in full layers too (5.24).
    embeds = torch.zeros(1, LENGTH, text.config.hidden_size)
    masks = model.create_masks_for_generate(made, embeds, None, None, torch.arange(LENGTH)[None], mm_token_type_ids=(ids == IMAGE).long())
    return model(ids, pixel_values=torch.zeros(1), attention_mask=masks, use_cache=False).logits[0].numpy()


@jax.jit
def call(target, cache, ids, start, count, inserted):
    """The logits after each row of one sequence, [1, T, V], and the cache."""
    slots = jnp.asarray([1], jnp.int32)
    cache, ok = paged.reserve(cache, slots, start + count, ids.shape[1])
    out, cache = target(Rows(ids, start, count, slots, inserted=inserted), cache)
    return target.unembed(out.hidden), cache, ok


# Where calls end: each image in a call of its own, or with the tokens beside it.
CUTS = {"alone": (3, 8, 10, 17, 21, 41, LENGTH), "with text": (8, 19, 45, LENGTH)}


SLOW = [
    pytest.param(*case, marks=pytest.mark.slow) for case in (("E2B", "with text"), ("12B", "alone"), ("26B", "with text"), ("26B", "alone"))
]


@pytest.mark.parametrize(("member", "cuts"), [("E2B", "alone"), ("12B", "with text"), *SLOW])
def test_logits_after_images_are_transformers_own(member, cuts):
    """In calls that are wider than they need be. One image has more rows than the window, and more than a ring has places beside what they
    see."""
    _, folder = oracle.target(member)
    config = Gemma4Config.from_hf(checkpoint.read_config(folder))
    abstract = gemma4.abstract(config, jnp.float32)
    target = checkpoint.load_weights(folder, abstract, prefixes=gemma4.CHECKPOINT_PREFIXES, skip=gemma4.TOWERS, progress=False)
    cache = gemma4.init_cache(config, slots=SLOTS, max_len=LENGTH + 1, num_draft_tokens=CHUNK - 1, page_size=PAGE, dtype=jnp.float32)
    (ids, images), found, at = prompt(), [], 0
    for end in CUTS[cuts]:
        width = CHUNK if end - at <= CHUNK else 28
        inserted, first = None, next((i for i, (begin, _) in enumerate(IMAGES) if at <= begin < end), None)
        if first is not None:
            (begin, count), rows = IMAGES[first], np.full((1, 22, config.hidden_size), 9.0, np.float32)
            rows[0, :count] = images[first]
            inserted = Inserted(rows, np.asarray([[begin]], np.int32), np.asarray([[count]], np.int32), np.ones((1, 1), bool))
        block = np.full((1, width), 7, np.int32)
        block[0, : end - at] = ids[at:end]
        logits, cache, ok = call(target, cache, block, np.asarray([at], np.int32), np.asarray([end - at], np.int32), inserted)
        assert ok
        found.append(logits[0, : end - at])
        at = end
    assert relative_error(np.concatenate(found), expected(member)) <= LIMIT


def test_rows_of_an_image_see_those_after_them_only_where_the_config_says_so():
    """The 12B's first image: its first row depends on its last."""
    (ids, images), (begin, count) = prompt(), IMAGES[0]
    for member, sees in (("12B", True), ("E2B", False)):
        _, folder = oracle.target(member)
        config = Gemma4Config.from_hf(checkpoint.read_config(folder))
        abstract = gemma4.abstract(config, jnp.float32)
        target = checkpoint.load_weights(folder, abstract, prefixes=gemma4.CHECKPOINT_PREFIXES, skip=gemma4.TOWERS, progress=False)
        hidden = []
        for last in (0.0, 1.0):
            shown = images[0].copy()[None]
            shown[0, -1] = last
            one = jnp.ones(1, jnp.int32)
            inserted = Inserted(shown, 0 * one[:, None], count * one[:, None], one[:, None] != 0)
            rows = Rows(jnp.asarray(ids[None, begin : begin + count], jnp.int32), 0 * one, count * one, 0 * one, inserted=inserted)
            hidden.append(target(rows, None)[0].hidden[0])
        assert (np.abs(hidden[0][0] - hidden[1][0]).max() > 1e-3) == sees
