"""A tiny target and a drafter of every kind for it, with random weights that give texts some variety."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from jaxspec.drafters.base import fitted
from jaxspec.drafters.registry import trainable
from jaxspec.drafters.training import whole_rows
from jaxspec.model import gemma4
from jaxspec.model.gemma4_config import Gemma4Config
from jaxspec.model.layer_spec import FULL, SLIDING
from jaxspec.train.generate import generate

VOCAB = 32
STEPS = 4
KINDS = trainable()
TEXT = {**tiny.TEXT, "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 0}
TARGET = {**tiny.TARGET, "text_config": TEXT}
CONFIG = Gemma4Config.from_hf(TARGET)
PLAIN = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "num_target_layers": 2,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "mtp": {
        **tiny.ASSISTANT,
        "num_centroids": 8,
        "centroid_intermediate_top_k": 3,
        "text_config": {**tiny.ASSISTANT["text_config"], "vocab_size": VOCAB},
    },
    "dflash": {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **PLAIN,
        "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL],
        "sliding_window": 6,
        "block_size": 5,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 1], "final_logit_softcapping": 30.0},
    },
    "dflash2": {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "transformer_layer_config": {**PLAIN, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 6},
        "block_size": 5,
        "mask_token_id": 4,
        "aux_hidden_state_layer_ids": [1, 2],
        "sample_from_anchor": False,
        "conv_kernel_size": 2,
        "conv_group_size": 8,
        "selector_rank": 6,
        "selector_top_k": 5,
    },
    "dspark": {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {**PLAIN, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 6},
        "block_size": 4,
        "draft_vocab_size": 24,
        "mask_token_id": 4,
        "aux_hidden_state_layer_ids": [1, 2],
        "sample_from_anchor": True,
        "markov_rank": 6,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "eagle3": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **PLAIN,
        "num_hidden_layers": 2,
        "draft_vocab_size": 24,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    },
    "mtp-modules": {
        "model_type": "gemma4_mtp_modules",
        "num_nextn_predict_layers": 2,
        "text_config": {**TEXT, "layer_types": [*TEXT["layer_types"], SLIDING, FULL]},
    },
    "draft-model": {"model_type": "gemma4_text", **TEXT, "hidden_size": 16, "intermediate_size": 24},
}


@functools.cache
def target(seed: int = 6) -> gemma4.Gemma4:
    """Of seed 6 the greedy texts have variety, of seed 4 they repeat themselves here and there."""
    return jax.tree.map(jnp.asarray, tiny.random_weights(gemma4.abstract(CONFIG, jnp.float32), seed))


@functools.cache
def drafter(kind: str) -> Any:
    """Random weights, but for a draft vocabulary of ids that are sorted."""
    abstract = fitted(KINDS[kind].from_checkpoint(None, CONFIGS[kind], CONFIG, jnp.float32), CONFIG)
    weights = jax.tree.map(jnp.asarray, tiny.random_weights(abstract, 1))
    if kind in ("dspark", "eagle3"):
        chosen = np.sort(np.random.default_rng(2).permutation(VOCAB)[:24])
        weights = weights.replace(d2t=jnp.asarray(chosen - np.arange(24), jnp.int32))
    return weights


@functools.cache
def texts() -> np.ndarray:
    """What the random target writes greedily after one token: [6, 24] int32."""
    return np.asarray(jax.jit(generate, static_argnums=2)(target(), np.arange(3, 9, dtype=np.int32)[:, None], 23))


@jax.jit
def logits(ids: jax.Array) -> jax.Array:
    """Of the target, after every token. ids: [B, T] int32 -> [B, T, V]."""
    return target().unembed(target()(whole_rows(ids), None)[0].hidden)


def log_softmax(x: Any) -> np.ndarray:
    x = np.asarray(x, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
