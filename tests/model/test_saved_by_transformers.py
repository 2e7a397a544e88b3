"""Targets as transformers saves them, such as a fine-tune: at the depths of the releases, every class, way of writing and kind of layer.

The texts are transformers' own, in float32, from tiny widths."""

import copy
import itertools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import torch
import transformers
from definitions import relative_error
from real_configs import ASSISTANTS, TARGETS, saved_again

from jaxspec import checkpoint, gemma4, targets
from jaxspec.model.gemma4_config import AssistantConfig, Gemma4Config

pytestmark = pytest.mark.usefixtures("unoptimised")
VOCAB, PROMPT, LENGTH = 131, 11, 24  # longer than the window
LIMIT = 1e-3  # of the largest logit, after up to 60 layers
TEXT, WHOLE = "text", "conditional generation"
ONE, SEVERAL = "5GB", "60KB"  # max_shard_size

WAYS = list(itertools.product(TARGETS, (TEXT, WHOLE), (ONE, SEVERAL), (False, True)))
# Of which these are always tried: every depth, and of everything else both.
OFTEN = [
    ("E2B", WHOLE, SEVERAL, False),
    ("E4B", TEXT, ONE, True),
    ("12B", WHOLE, SEVERAL, True),
    ("26B-A4B", WHOLE, ONE, False),
    ("31B", TEXT, SEVERAL, False),
]


def narrow(name: str) -> dict:
    """A release's config with its depth and kinds of layer, at tiny widths that all share, so that their operations are compiled once."""
    config = copy.deepcopy({**TARGETS[name], "dtype": "float32"})
    text = config["text_config"]
    text |= {
        "dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "sliding_window": 8,
    }
    small = {
        "num_global_key_value_heads": 1,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 4,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
    }
    text |= {field: size for field, size in small.items() if text.get(field)}
    if name == "12B":
        vision = {"patch_size": 2, "pooling_kernel_size": 1, "mm_embed_dim": 8, "mm_posemb_size": 4, "output_proj_dims": 8}
        return {**config, "vision_config": vision, "audio_config": {"audio_embed_dim": 8}}
    tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {**tower, "intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 2, "position_embedding_size": 16}
    return {**config, "vision_config": vision, "audio_config": {**tower, "output_proj_dims": 16}}


@torch.no_grad()
def save(name: str, kind: str, size: str, head: bool, folder: Path) -> tuple[list[int], np.ndarray]:
    """Saves a target with random weights. Returns its greedy text after a prompt, both together, and the logits of all but the last."""
    config = transformers.CONFIG_MAPPING[TARGETS[name]["model_type"]].from_dict(narrow(name))
    family = type(config).__name__.removesuffix("Config")
    config = config.text_config if kind == TEXT else config
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}{'ForCausalLM' if kind == TEXT else 'ForConditionalGeneration'}")(config).eval()
    oracle.randomise(model.model if kind == TEXT else model.model.language_model, 0)
    model.generation_config.eos_token_id = None
    prompt = torch.tensor(np.random.default_rng(1).integers(3, VOCAB, (1, PROMPT)))
    tokens = model.generate(prompt, max_new_tokens=LENGTH - PROMPT, do_sample=False)
    state = model.state_dict()
    if head:
        state["lm_head.weight"] = state["lm_head.weight"].clone()
    model.save_pretrained(folder, max_shard_size=size, state_dict=state)
    return tokens[0].tolist(), model(tokens[:, :-1], use_cache=False).logits[0].numpy()


@pytest.mark.parametrize(
    ("name", "kind", "size", "head"), [pytest.param(*way, marks=[] if way in OFTEN else pytest.mark.slow) for way in WAYS]
)
def test_the_text_is_that_of_transformers(name, kind, size, head, tmp_path):
    tokens, logits = save(name, kind, size, head, tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert ("model.safetensors" in names) == (size == ONE) and len(names) > 4 * (size == SEVERAL)
    assert ("lm_head.weight" in checkpoint.read_headers(tmp_path)) == head
    config, _ = targets.read_target(tmp_path)
    assert config.layers == Gemma4Config.from_hf(narrow(name)).layers
    target = targets.load_target(tmp_path, gemma4.abstract(config, jnp.float32), progress=False)

    def score(ids: list[int]) -> np.ndarray:
        zero, padded = jnp.zeros(1, jnp.int32), ids + [0] * (LENGTH - 1 - len(ids))
        rows = gemma4.Rows(jnp.asarray([padded], jnp.int32), zero, zero + LENGTH - 1, zero)
        return np.asarray(target.unembed(target(rows, None)[0].hidden))[0]

    assert relative_error(score(tokens[:-1]), logits) < LIMIT
    found = tokens[:PROMPT]
    while len(found) < LENGTH:
        found.append(int(np.argmax(score(found)[len(found) - 1])))
    assert found == tokens


@pytest.mark.parametrize("name", TARGETS)
def test_a_config_that_was_saved_again_says_what_it_said(name):
    """transformers leaves sizes of full layers out, and writes them by layer."""
    for released, read in ((TARGETS[name], Gemma4Config), (ASSISTANTS[name], AssistantConfig)):
        again = saved_again(released)
        assert "per_layer_config" in again["text_config"] and "global_head_dim" not in again["text_config"]
        assert read.from_hf(again) == read.from_hf(released)
    alone = TARGETS[name]["text_config"]
    assert Gemma4Config.from_hf(saved_again(alone)) == Gemma4Config.from_hf(alone)
