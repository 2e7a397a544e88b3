"""Tiny random models as checkpoint folders, with the pocket tokenizer: what the tests of the engine and the command line run on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

import jaxspec
from jaxspec import checkpoint
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.drafters.base import Drafts
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import AssistantConfig, Gemma4Config

POCKET = Path(jaxspec.__file__).parent / "pocket" / "target"
VOCAB = 4096
EOS = (1, 106, 50)  # of the pocket generation config

TEXT = {
    "model_type": "gemma4_text",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "attention_k_eq_v": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 4,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "dtype": "bfloat16",
}
# Three layers of two KV heads, and none of the per-layer embeddings.
THREE_LAYERS = {
    **TEXT,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
}
TARGET = {"model_type": "gemma4", "text_config": TEXT}
ASSISTANT = {
    "model_type": "gemma4_assistant",
    "backbone_hidden_size": 32,
    "use_ordered_embeddings": True,
    "num_centroids": 64,
    "centroid_intermediate_top_k": 4,
    "text_config": {
        **TEXT,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": None,
    },
}


def random_weights(abstract: Any, seed: int) -> Any:
    """Normal weights with deviation 0.3, norms around one, a shuffled token ordering, and a draft vocabulary of every other token; by
    NumPy, which compiles nothing."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            ids = rng.permutation(leaf.size).astype(leaf.dtype)
            return np.sort(ids) if "d2t" in jax.tree_util.keystr(path) else ids
        return (float("norm" in jax.tree_util.keystr(path)) + 0.3 * rng.standard_normal(leaf.shape)).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, abstract)


def tiny_target(folder: Path, **changes: Any) -> Path:
    """A target's folder. changes: to its text config, before the weights are drawn."""
    config = {**TARGET, "text_config": {**TEXT, **changes}}
    weights = random_weights(gemma4.abstract(Gemma4Config.from_hf(config), jnp.float32), seed=0)
    checkpoint.save_weights(folder, weights, config, prefix="model.language_model.")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(POCKET / name, folder / name)
    return folder


def tiny_assistant(folder: Path, *, backbone_hidden_size: int = 32, **changes: Any) -> Path:
    """An assistant's folder, fit for `tiny_target` without changes."""
    text = {**ASSISTANT["text_config"], **changes}
    config = {**ASSISTANT, "backbone_hidden_size": backbone_hidden_size, "text_config": text}
    weights = random_weights(gemma4_mtp.abstract(AssistantConfig.from_hf(config), jnp.float32), seed=1)
    checkpoint.save_weights(folder, weights, config)
    (folder / "generation_config.json").write_text(json.dumps({"num_assistant_tokens": 3}))
    return folder


class Letters:
    """A tokenizer whose tokens are letters."""

    byte_ids: frozenset[int] = frozenset()

    def decode(self, ids, *, special=False):
        return "".join(chr(0x4E00 + i) for i in ids)

    def token_text(self, token_id):
        return self.decode([token_id])

    def has_text(self, token_id):
        return True

    def encode_word(self, text):
        return [ord(letter) - 0x4E00 for letter in text]


@struct.dataclass
class Parrot:
    """A drafter that knows what will come: it guesses right except at positions whose entry in `wrong` is set.

    answers: [N, L] int32, whole sequences; a request is known by its seed, which is its row. wrong: [N, L] bool.
    """

    answers: jax.Array
    wrong: jax.Array
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def init(self, slots, max_len, num_draft_tokens):
        return ()

    def observe(self, state, rows):
        return state

    def draft(self, state, target, sampling, num_draft_tokens):
        at = target.length[:, None] + 1 + jnp.arange(num_draft_tokens, dtype=jnp.int32)[None, :]
        row = sampling.seed[:, :1].astype(jnp.int32)
        right = self.answers.at[row, at].get(mode="clip")
        return Drafts(jnp.where(self.wrong.at[row, at].get(mode="clip"), (right + 1) % VOCAB, right)), state
