"""Drafters of every kind and layout, as config.json lays them out and as tiny random weights, for the target of `rounds`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import rounds
import tiny

from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.drafters import dflash, dflash2, draft_model, dspark, eagle3
from jaxspec.drafters import mtp_modules as mtp
from jaxspec.drafters.ngram import NGram
from jaxspec.model.gemma4_config import AssistantConfig, Gemma4Config
from jaxspec.model.layer_spec import FULL, SLIDING

CONFIG = Gemma4Config.from_hf(rounds.TEXT)
HEAD = ("lm_head.weight",)

SMALL = {**rounds.TEXT, "hidden_size": 16, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
ASSISTANT = {
    **tiny.ASSISTANT,
    "num_centroids": 16,
    "centroid_intermediate_top_k": 8,
    "text_config": {**SMALL, "num_kv_shared_layers": 2},
}

# As z-lab and as speculators lay DFlash out.
BLOCK = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, FULL, SLIDING],
    "sliding_window": 7,
    "rms_norm_eps": 1e-6,
    "vocab_size": rounds.VOCAB,
}
DFLASH = {
    "z-lab": {
        **BLOCK,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "rope_theta": 1e4,
        "block_size": 16,
        "num_target_layers": 3,
        "final_logit_softcapping": 2.0,
        "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2], "input_embedding_scale": 1.0},
    },
    "speculators": {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": {**BLOCK, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}},
        "block_size": 8,
        "draft_vocab_size": 40,
        "mask_token_id": 60,
        "aux_hidden_state_layer_ids": [1, 2, 3],
        "sliding_window_non_causal": True,
    },
}

# As speculators lays DFlash2 out, and with its fields where z-lab has DFlash's.
DFLASH2 = {
    "speculators": {
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "transformer_layer_config": {**BLOCK, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}},
        "block_size": 8,
        "draft_vocab_size": rounds.VOCAB,
        "mask_token_id": 60,
        "aux_hidden_state_layer_ids": [1, 2, 3],
        "sample_from_anchor": False,
        "conv_kernel_size": 3,
        "conv_group_size": 4,
        "selector_rank": 6,
        "selector_top_k": 5,
    },
    "z-lab": {
        **BLOCK,
        "architectures": ["DFlash2DraftModel"],
        "model_type": "qwen3",
        "rope_theta": 1e4,
        "block_size": 16,
        "num_target_layers": 3,
        "sliding_window_non_causal": False,
        "dflash_config": {
            "mask_token_id": 4,
            "target_layer_ids": [0, 2],
            "input_embedding_scale": 3.0,
            "output_multiplier": 0.5,
            "final_logit_softcapping": 2.0,
            "conv_kernel_size": 2,
            "conv_group_size": 32,
            "selector_rank": 3,
            "selector_top_k": rounds.VOCAB,
        },
    },
}

# As speculators and DeepSpec lay DSpark out, with each of its Markov heads.
DSPARK = {
    "speculators": {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {**BLOCK, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}},
        "block_size": 7,
        "draft_vocab_size": 40,
        "mask_token_id": 60,
        "aux_hidden_state_layer_ids": [1, 2, 3],
        "sliding_window_non_causal": True,
        "sample_from_anchor": True,
        "markov_rank": 6,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    "rnn": {
        "architectures": ["DSparkSpeculator"],
        "speculators_model_type": "dspark",
        "transformer_layer_config": {**BLOCK, "rope_theta": 1e4},
        "block_size": 8,
        "mask_token_id": 4,
        "aux_hidden_state_layer_ids": [1, 3],
        "sample_from_anchor": False,
        "markov_rank": 6,
        "markov_head_type": "rnn",
        "enable_confidence_head": True,
        "confidence_head_with_markov": False,
    },
    "gemma": {
        **rounds.TEXT,
        "architectures": ["Gemma4DSparkModel"],
        "num_hidden_layers": 2,
        "layer_types": [FULL] * 2,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 16,
        "tie_word_embeddings": False,
        "num_target_layers": 3,
        "target_layer_ids": [0, 2],
        "final_logit_softcapping": 2.0,
        "block_size": 7,
        "mask_token_id": 4,
        "markov_rank": 6,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}

# As EAGLE, speculators and DeepSpec lay EAGLE-3 out.
LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "intermediate_size": 40,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": rounds.VOCAB,
}
EAGLE3 = {
    "eagle": {
        **LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 32,
        "head_dim": 8,
        "num_hidden_layers": 1,
        "rope_theta": 5e3,
        "draft_vocab_size": 40,
        "logit_scale": 0.5,
    },
    "speculators": {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {**LLAMA, "hidden_size": 24, "head_dim": 6, "num_hidden_layers": 2},
        "target_hidden_size": 32,
        "eagle_aux_hidden_state_layer_ids": [3, 1],
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
    },
    "gemma": {
        **rounds.TEXT,
        "architectures": ["Gemma4Eagle3Model"],
        "num_hidden_layers": 1,
        "layer_types": [FULL],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "global_head_dim": 16,
        "tie_word_embeddings": False,
        "num_target_layers": 3,
        "target_layer_ids": [0, 1, 2],
        "final_logit_softcapping": 2.0,
    },
}
# The tensors of each layout of EAGLE-3 that say what it has of its own.
EAGLE3_KEYS = {"eagle": HEAD, "speculators": (*HEAD, "embed_tokens.weight", "layers.0.self_attn.q_norm.weight"), "gemma": HEAD}

# Of the family what is least like the target of `rounds`: per-layer inputs, shared KV, other head sizes and another window.
LIKE_E2B = {
    **rounds.TEXT,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "num_key_value_heads": 1,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": rounds.VOCAB,
    "use_double_wide_mlp": True,
    "sliding_window": 6,
}


def modules_config(count, text=rounds.TEXT, **changes):
    """config.json of this many modules for a target with this text config."""
    kinds = [*text["layer_types"], *((SLIDING, FULL, SLIDING)[i % 3] for i in range(count))]
    return {
        "model_type": "gemma4_mtp_modules",
        "num_nextn_predict_layers": count,
        "text_config": {**text, "layer_types": kinds, **changes},
    }


def assistant():
    return gemma4_mtp.abstract(gemma4_mtp.bind(AssistantConfig.from_hf(ASSISTANT), CONFIG), jnp.float32)


def block(layout):
    config = dflash.DFlashConfig.from_hf(DFLASH[layout], CONFIG, HEAD if layout == "speculators" else ())
    return dflash.abstract(dataclasses.replace(config, own_mask=layout == "speculators"), jnp.float32)


def block2(layout):
    return dflash2.abstract(dflash2.DFlash2Config.from_hf(DFLASH2[layout], CONFIG), jnp.float32)


def spark(layout):
    return dspark.abstract(dspark.DSparkConfig.from_hf(DSPARK[layout], CONFIG, (*HEAD, dspark.CONFIDENCE)), jnp.float32)


def eagle(layout):
    return eagle3.abstract(eagle3.Eagle3Config.from_hf(EAGLE3[layout], CONFIG, EAGLE3_KEYS[layout]), jnp.float32)


def modules(count):
    return mtp.abstract(mtp.bind(mtp.read_config(modules_config(count)), CONFIG), jnp.float32)


def small_model(text):
    return draft_model.abstract(Gemma4Config.from_hf(text), jnp.float32)


# Each makes a drafter as a tree of shapes.
KINDS = {
    "assistant": assistant,
    "dflash": functools.partial(block, "z-lab"),
    "dflash2": functools.partial(block2, "speculators"),
    "dspark": functools.partial(spark, "speculators"),
    "eagle3": functools.partial(eagle, "eagle"),
    "modules": functools.partial(modules, 2),
    "draft model": functools.partial(small_model, SMALL),
    "ngram": functools.partial(NGram, windows=32),
}
LAYOUTS = {
    **KINDS,
    "dflash speculators": functools.partial(block, "speculators"),
    "dflash2 z-lab": functools.partial(block2, "z-lab"),
    "dspark rnn": functools.partial(spark, "rnn"),
    "dspark gemma": functools.partial(spark, "gemma"),
    "eagle3 speculators": functools.partial(eagle, "speculators"),
    "eagle3 gemma": functools.partial(eagle, "gemma"),
    "draft model like E2B": functools.partial(small_model, LIKE_E2B),
    "modules 1": functools.partial(modules, 1),
    "modules 3": functools.partial(modules, 3),
}


def weights(abstract, seed, page_size=rounds.PAGE):
    """Random weights of a drafter, with a draft vocabulary of tokens from all over."""
    made = tiny.random_weights(abstract, seed)
    if getattr(made, "d2t", None) is not None:
        size = made.d2t.size
        ids = np.sort(np.random.default_rng(4).permutation(rounds.VOCAB)[:size])
        made = dataclasses.replace(made, d2t=(ids - np.arange(size)).astype(np.int32))
    made = jax.tree.map(jnp.asarray, made)
    return dataclasses.replace(made, page_size=page_size) if hasattr(made, "page_size") else made


@functools.cache
def drafter(name):
    """Of a layout, with the same weights everywhere."""
    return weights(LAYOUTS[name](), 3)
