"""Tiny models of every member of the family and drafters of every kind, and their texts on one device and on meshes of fake ones."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import step3p5_files
import tiny

from jaxspec import checkpoint, decode, sharding, targets
from jaxspec.decode import accept
from jaxspec.drafters import assistant as gemma4_mtp
from jaxspec.drafters import dflash, draft_model, eagle3, registry
from jaxspec.drafters import mtp_modules as mtp
from jaxspec.drafters.base import NoDraft
from jaxspec.drafters.ngram import NGram
from jaxspec.drafters.registry import load_drafter
from jaxspec.model import gemma4, step3p5
from jaxspec.model.gemma4_config import AssistantConfig, Gemma4Config
from jaxspec.model.layer_spec import FULL, SLIDING

VOCAB, SLOTS, MAX_LEN, MAX_K, PAGE, CHUNK = 64, 8, 40, 3, 4, 16
TEXT = {**tiny.THREE_LAYERS, "vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB}
# Of the released models what a mesh meets: KV heads of both kinds that 2, 4 or 8 devices divide or not, experts, per-layer embeddings
# and shared K and V. Nothing of "odd" divides, and its query heads are fewer than four devices.
MEMBERS = {
    "31B": {},
    "12B": {"num_attention_heads": 8, "num_key_value_heads": 4},
    "26B": {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 16},
    "E2B": {
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 4,
        "attention_k_eq_v": False,
        "num_global_key_value_heads": None,
    },
    "odd": {
        "vocab_size": 61,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "intermediate_size": 45,
        "enable_moe_block": True,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 15,
    },
}
LENGTHS = np.array([1, 4, 9, 13, 22, 6, 2, 17], np.int32)  # of prompts; a sequence's seed is its row
TEMPERATURE = np.array([0, 1, 0, 1, 0, 0.7, 0, 1], np.float32)

# Unoptimised code compiles in half the time, and computes the same.
compiled = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def weights(abstract, seed):
    return tiny.random_weights(abstract, seed)


@functools.cache
def target(member: str) -> gemma4.Gemma4:
    if member == "pocket":
        config = targets.read_target(tiny.POCKET)[0]
        return targets.load_target(tiny.POCKET, gemma4.abstract(config, jnp.float32), progress=False)
    if member == "step":
        return weights(step3p5.abstract(step3p5.Step3p5Config.from_hf(step3p5_files.tiny_config()), jnp.float32), 0)
    text = {**TEXT, **MEMBERS[member]}
    if member == "12B":
        text["model_type"] = "gemma4_unified_text"
    return weights(gemma4.abstract(Gemma4Config.from_hf(text), jnp.float32), 0)


@functools.cache
def drafter(member: str, kind: str):
    config = target(member).config
    vocab, hidden = config.vocab_size, config.hidden_size
    plain = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 40, "num_attention_heads": 6, "head_dim": 8}
    plain |= {"num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6}
    if kind.startswith("pocket"):
        return load_drafter(checkpoint.resolve(kind), config, jnp.float32, progress=False)
    if kind == "none":
        return NoDraft()
    if kind == "ngram":
        return NGram()
    if kind.startswith("mtp"):
        text = {**TEXT, **MEMBERS[member], **{f: 0 for f in ("hidden_size_per_layer_input", "num_experts")}, "enable_moe_block": False}
        text |= {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
        text |= {"num_kv_shared_layers": 2, "use_double_wide_mlp": False, "final_logit_softcapping": None}
        raw = {**tiny.ASSISTANT, "num_centroids": 8, "centroid_intermediate_top_k": 3, "text_config": text}
        raw["use_ordered_embeddings"] = kind == "mtp centroids"
        bound = gemma4_mtp.bind(AssistantConfig.from_hf(raw), config)
        return weights(gemma4_mtp.abstract(bound, jnp.float32, suppress_tokens=(3,)), 1)
    if kind == "dflash2" or kind.startswith("dspark"):
        decoder = {**plain, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 7}
        raw = {**decoder, "block_size": 8, "mask_token_id": 5, "aux_hidden_state_layer_ids": [1, 3]}
        raw |= {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 5}
        raw |= {"sample_from_anchor": kind != "dflash2", "markov_rank": 6, "markov_head_type": "rnn"}
        raw |= {"draft_vocab_size": 32, "markov_head_type": "gated"} if kind == "dspark d2t" else {}
        if kind == "dspark gemma":
            raw = {**TEXT, **MEMBERS[member], "layer_types": [FULL] * 2, "num_hidden_layers": 2, "hidden_size_per_layer_input": 0}
            raw |= {"enable_moe_block": False, "num_experts": 0, "num_kv_shared_layers": 0, "architectures": ["Gemma4DSparkModel"]}
            raw |= {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "use_double_wide_mlp": False, "model_type": "gemma4_text"}
            raw |= {"block_size": 7, "mask_token_id": 5, "target_layer_ids": [0, 2], "markov_rank": 6}
        made = registry.KINDS[kind.split()[0]].from_checkpoint(None, raw, config, jnp.float32)
        made = dataclasses.replace(weights(made, 6), page_size=PAGE)
        return dataclasses.replace(made, d2t=np.arange(32, dtype=np.int32)) if made.d2t is not None else made
    if kind.startswith("dflash"):
        raw = {**plain, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL], "sliding_window": 7, "block_size": 8}
        raw |= {"architectures": ["DFlashDraftModel"], "dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 2]}}
        raw |= {"draft_vocab_size": 32} if kind == "dflash d2t" else {}
        keys = ("lm_head.weight", "d2t") if kind == "dflash d2t" else ()
        made = dataclasses.replace(weights(dflash.abstract(dflash.DFlashConfig.from_hf(raw, config, keys), jnp.float32), 2), page_size=PAGE)
        return dataclasses.replace(made, d2t=np.arange(32, dtype=np.int32)) if kind == "dflash d2t" else made
    if kind.startswith("eagle3"):
        raw = {**plain, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32, "num_key_value_heads": 3}
        made = weights(eagle3.abstract(eagle3.Eagle3Config.from_hf(raw, config, ("lm_head.weight", "d2t")), jnp.float32), 3)
        return dataclasses.replace(made, d2t=np.arange(32, dtype=np.int32), page_size=PAGE)
    if kind == "modules" and member == "step":
        made = mtp.from_checkpoint(None, step3p5_files.tiny_config(), config, jnp.float32)
        return dataclasses.replace(weights(made, 4), page_size=PAGE)
    if kind == "modules":
        text = {**TEXT, **MEMBERS[member]}
        raw = {"model_type": "gemma4_mtp_modules", "num_nextn_predict_layers": 2, "text_config": text}
        text["layer_types"] = [*text["layer_types"], SLIDING, FULL]
        bound = mtp.bind(mtp.read_config(raw), config)
        return dataclasses.replace(weights(mtp.abstract(bound, jnp.float32), 4), page_size=PAGE)
    assert kind == "draft model"
    text = {**TEXT, "vocab_size": vocab, "num_hidden_layers": 2, "layer_types": [SLIDING, FULL]}
    return dataclasses.replace(weights(draft_model.abstract(Gemma4Config.from_hf(text), jnp.float32), 5), page_size=PAGE)


def prompts(vocab: int) -> np.ndarray:
    return np.random.default_rng(1).integers(6, vocab, (SLOTS, MAX_LEN)).astype(np.int32)


def requests(vocab: int, rows: np.ndarray) -> decode.Requests:
    """Of these sequences, in this order."""
    tokens = np.where(np.arange(MAX_LEN) < LENGTHS[:, None], prompts(vocab), 0)
    fields = {
        "tokens": tokens,
        "length": LENGTHS,
        "prompt": LENGTHS,
        "limit": np.full(SLOTS, MAX_LEN, np.int32),
        "stop_ids": np.full((SLOTS, 1), -1, np.int32),
        "seed": np.stack([np.arange(SLOTS), np.zeros(SLOTS)], axis=1).astype(np.uint32),
        "temperature": TEMPERATURE,
    }
    return decode.Requests(**{name: value[rows] for name, value in fields.items()})


def sizes(slots: int) -> dict:
    return {"slots": slots, "max_len": MAX_LEN, "num_draft_tokens": MAX_K, "page_size": PAGE, "max_stop_ids": 1}


@functools.cache
def texts(member: str, kind: str = "none", k: int = 0, rule: accept.Rule = accept.COUPLED) -> np.ndarray:
    """Every sequence to its end on one device, by default one token at a time. [SLOTS, MAX_LEN]"""
    model, drafts = jax.tree.map(jnp.asarray, (target(member), drafter(member, kind)))
    slots = np.arange(SLOTS, dtype=np.int32)
    state = jax.jit(functools.partial(decode.init_state, model, drafts, **sizes(SLOTS)))()
    state = compiled(decode.admit)(state, slots, requests(model.config.vocab_size, slots))
    prefill = compiled(functools.partial(decode.prefill, chunk=CHUNK))
    for _ in range(-(-LENGTHS.max() // CHUNK)):
        state = prefill(model, drafts, state, slots)
    loop = compiled(functools.partial(decode.decode_loop, round=decode.Round(k, rule)))
    return np.asarray(loop(model, drafts, state, slots, 1000).tokens)


class Placed:
    """A target and a drafter on a mesh, and an empty state for them."""

    def __init__(self, member: str, kind: str, mesh: jax.sharding.Mesh):
        self.mesh, self.shards = mesh, mesh.shape["data"]
        canonical = target(member), drafter(member, kind)
        self.target, self.drafter = (
            sharding.spread(jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), tree, sharding.shard_tree(tree, mesh)), mesh)
            for tree in canonical
        )
        init = functools.partial(decode.init_state, self.target, self.drafter, **sizes(SLOTS // self.shards))
        self.layout = sharding.Layout.of(mesh, self.drafter, init)
        self.shardings, self.state = self.layout.shardings, self.layout.empty()

    @property
    def slots(self) -> np.ndarray:
        """Each shard's own slots and one that is nobody's."""
        local = np.arange(SLOTS // self.shards + 1, dtype=np.int32)
        return np.tile(local, self.shards)

    def run(self, function, **static):
        """Compiled: (target, drafter, state, ...) -> state."""
        return compiled(self.layout.on(functools.partial(function, **static)), out_shardings=self.shardings, donate_argnums=2)

    def texts(self, k: int, rule: accept.Rule = accept.COUPLED, rows: int | None = None) -> tuple[np.ndarray, decode.DecodeState]:
        """Every sequence to its end. rows: of a data shard's rounds. [SLOTS, MAX_LEN]"""
        each = np.arange(SLOTS).reshape(self.shards, -1)
        order = np.concatenate([each, each[:, :1]], axis=1).reshape(-1)
        admit = compiled(self.layout.on(decode.admit), out_shardings=self.shardings)
        state = admit(self.state, self.slots, requests(self.target.config.vocab_size, order))
        prefill = self.run(decode.prefill, chunk=CHUNK)
        for _ in range(-(-LENGTHS.max() // CHUNK)):
            state = prefill(self.target, self.drafter, state, self.slots)
        loop = self.run(decode.decode_loop, round=decode.Round(k, rule, rows=rows))
        state = loop(self.target, self.drafter, state, self.slots, np.int32(1000), np.int32(0))
        return np.asarray(state.tokens), state
