"""DFlash: a block of drafts in one pass, from hidden states of several target layers (arXiv 2602.06036).

Every committed position has a context row, hidden_norm(fc(taps)), from which each layer makes its own K and V: one product for all
layers, stored once. To draft, the block [anchor, mask, ..., mask] runs at positions length .. length + K over that context and over
itself; the row at a position guesses the token there. The block's K and V are never stored, so there is nothing to undo when guesses
are rejected. Full layers see the whole block, sliding layers only what lies before a row. Facts: z-lab/dflash `model.py`, SpecForge
`DFlashDraftModel`, vLLM `qwen3_dflash.py`, speculators `models/dflash`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec import checkpoint
from jaxspec.drafters.base import Drafts, Observed, Target
from jaxspec.drafters.blocks import SiluMLP, check_target, head, named_taps, plain_spec, unread_keys
from jaxspec.model import paged_kv as paged
from jaxspec.model.config import FULL, SLIDING, Gemma4Config, LayerSpec, expect, refuse_quantised, require
from jaxspec.model.gemma4 import Gemma4
from jaxspec.model.layers import Linear, RMSNorm, Weight, rope, softcap
from jaxspec.model.paged_kv import LayerKV, PagedKV
from jaxspec.sampling.choice import Sampling, choose
from pallas_kernels.paged_attention import paged_attention

NAMES = ("DFlashDraftModel", "DFlashSpeculator", "dflash")


@dataclasses.dataclass(frozen=True)
class DFlashConfig:
    """layers, causal: of each layer its spec, and whether a row of the block sees only the block's rows up to its own. taps: indices of
    the target's hidden states. target_hidden_size, num_target_layers: of the target that the drafter was made for, the latter None where
    the config does not say. block_size: rows of the longest block, the anchor's among them. draft_vocab_size: rows of the head; a
    head of fewer rows than the target has tokens comes with d2t. own_head, own_mask: whether the checkpoint has a head and a mask
    embedding; else they are the target's. unread: beginnings of the checkpoint's other keys. input_embedding_scale: of the block's
    embeddings; 1 takes the rows of the target's table as they are, hidden_size ** 0.5 is what some ports use."""

    layers: tuple[LayerSpec, ...]
    causal: tuple[bool, ...]
    taps: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    block_size: int
    mask_token_id: int
    eps: float
    target_hidden_size: int
    num_target_layers: int | None = None
    own_head: bool = False
    own_mask: bool = False
    unread: tuple[str, ...] = ()
    final_logit_softcapping: float | None = None
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: Gemma4Config, keys: Collection[str] = ()) -> DFlashConfig:
        """Reads config.json, as z-lab or speculators write it. keys: of the checkpoint's tensors.

        Raises ValueError, naming what was found, for a drafter that this implementation does not have or that leaves open what it reads.
        """
        inner = {**config, **(config.get("transformer_layer_config") or {})}
        dflash = config.get("dflash_config") or {}
        speculators = "speculators_model_type" in config
        for field in ("attention_sink_bias", "attention_value_scale", "add_swa_attention_sink_bias"):
            if dflash.get(field) or config.get(field):
                raise ValueError(f"config.json has {field}={dflash.get(field) or config.get(field)!r}; implemented: none")
        expect(config, "is_neox_style", (True,))
        expect(config, "sample_from_anchor", (False, None))
        expect(config, "shift_label", (False, None))
        expect(config, "projector_type", ("dflash",))
        hidden, vocab = int(require(inner, "hidden_size")), int(require(inner, "vocab_size"))
        layers, causal = _layers(inner, config, dflash)
        mask = next((c[name] for name, c in _mask_places(dflash, config) if c.get(name) is not None), None)
        if mask is None or not 0 <= mask < vocab:
            raise ValueError(f"mask_token_id is {mask}; expected an id below vocab_size {vocab}")
        draft_vocab = int(config.get("draft_vocab_size") or vocab)
        # A head that covers the whole vocabulary is a frozen copy of the target's in speculators' checkpoints.
        own_head = "lm_head.weight" in keys and not (speculators and draft_vocab == vocab)
        if draft_vocab != vocab and not own_head:
            raise ValueError(f"draft_vocab_size is {draft_vocab} of {vocab} tokens, and the checkpoint has no lm_head.weight")
        return cls(
            layers=layers,
            causal=causal,
            taps=_taps(config, dflash, len(layers), target.num_hidden_layers),
            hidden_size=hidden,
            vocab_size=vocab,
            draft_vocab_size=draft_vocab,
            block_size=int(dflash.get("block_size") or require(config, "block_size")),
            mask_token_id=int(mask),
            eps=float(inner.get("rms_norm_eps", 1e-6)),
            target_hidden_size=int(config.get("target_hidden_size") or hidden),
            num_target_layers=config.get("num_target_layers"),
            own_head=own_head,
            own_mask="mask_embedding" in keys,
            unread=unread_keys(speculators, own_head=own_head, own_embedding=False, own_d2t=draft_vocab != vocab),
            final_logit_softcapping=dflash.get("final_logit_softcapping", inner.get("final_logit_softcapping")),
            input_embedding_scale=float(dflash.get("input_embedding_scale", config.get("input_embedding_scale", 1.0))),
            output_multiplier=float(dflash.get("output_multiplier", config.get("output_multiplier", 1.0))),
        )


def _mask_places(dflash: Mapping[str, Any], config: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """(field, part of the config) where the mask token's id may be; the first that is there counts."""
    return [("mask_token_id", dflash), *((f, config) for f in ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"))]


def _taps(config: Mapping[str, Any], dflash: Mapping[str, Any], layers: int, depth: int) -> tuple[int, ...]:
    """Indices of hidden states, in the order in which the drafter's fc takes them."""
    indices = named_taps(dflash, config)
    if indices is not None:
        return indices
    made_for = config.get("num_target_layers")
    if made_for is None:
        raise ValueError(f"config.json has neither target_layer_ids nor num_target_layers, which this target's {depth} must equal")
    # As many as the drafter has layers, evenly from the second layer to the third from the end.
    ids = [made_for // 2] if layers == 1 else [round(1 + i * (made_for - 4) / (layers - 1)) for i in range(layers)]
    return tuple(i + 1 for i in ids)


def _layers(
    inner: Mapping[str, Any], config: Mapping[str, Any], dflash: Mapping[str, Any]
) -> tuple[tuple[LayerSpec, ...], tuple[bool, ...]]:
    """The spec of every layer, and whether it is causal inside the block."""
    count = int(require(inner, "num_hidden_layers"))
    kinds = inner.get("layer_types")
    if kinds is None:
        first = int(inner.get("max_window_layers") or 0) if inner.get("use_sliding_window") else count
        kinds = [FULL if i < first else SLIDING for i in range(count)]
    if len(kinds) != count or set(kinds) - {SLIDING, FULL}:
        raise ValueError(f"layer_types has {len(kinds)} entries of {sorted(set(kinds))}; expected {count} of {SLIDING!r} and {FULL!r}")
    places = config.get("is_causal"), dflash.get("is_causal"), dflash.get("causal")
    explicit = next((place for place in places if place is not None), None)
    both_ways = config.get("sliding_window_non_causal", False)
    causal = tuple(bool(explicit) if explicit is not None else kind == SLIDING and not both_ways for kind in kinds)
    if dflash.get("use_swa") and SLIDING not in kinds:
        kinds = [SLIDING] * count
    window = dflash.get("swa_window_size") or inner.get("sliding_window")
    if SLIDING in kinds and not window:
        raise ValueError(f"layer_types has {list(kinds).count(SLIDING)} sliding layers, and sliding_window is {window!r}")
    return tuple(plain_spec(inner, window if kind == SLIDING else None, rope_theta=1e6) for kind in kinds), causal


@struct.dataclass
class DFlashAttention:
    """q_proj: [KV, G, D, H]; o_proj: [H, KV, G, D]; q_norm, k_norm: [D]. K and V projections are `DFlash.kv_proj`."""

    q_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    spec: LayerSpec = struct.field(pytree_node=False)

    def rotated(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return rope(x, positions, self.spec.rope_theta, self.spec.rotary_angles)

    def keys_values(self, projected: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """projected: [B, T, 2, KV, D] -> K, normed and rotated, and V, each [B, T, KV, D]."""
        return self.rotated(self.k_norm(projected[:, :, 0]), positions), projected[:, :, 1]


@struct.dataclass
class DFlashLayer:
    """A pre-norm decoder layer (Qwen3's)."""

    self_attn: DFlashAttention
    mlp: SiluMLP
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm


@struct.dataclass
class DFlashState:
    """cache: K and V of every committed position, for every layer."""

    cache: PagedKV


@struct.dataclass
class DFlash:
    """The drafter's weights; paths are the checkpoint's keys. fc: [h, taps x h]. kv_proj: [layers, 2, KV, D, h], every layer's K and V.
    lm_head: [draft vocabulary, h] and d2t: [draft vocabulary] int32 (draft id i is token i + d2t[i]), where the checkpoint has its own.
    mask_embedding: [h], or None for a row of the target's table. page_size: positions in a page of its cache."""

    fc: Linear
    hidden_norm: RMSNorm
    kv_proj: Linear
    layers: tuple[DFlashLayer, ...]
    norm: RMSNorm
    lm_head: Linear | None
    d2t: Weight | None
    mask_embedding: Weight | None
    config: DFlashConfig = struct.field(pytree_node=False)
    page_size: int = struct.field(pytree_node=False, default=64)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def num_draft_tokens(self) -> int:
        """All that a block holds beside the anchor."""
        return self.config.block_size - 1

    def bind(self, target: Gemma4Config) -> DFlash:
        config, theirs = self.config, target.hidden_size
        if config.hidden_size != theirs or config.target_hidden_size != theirs:
            made_for = f"hidden_size {config.hidden_size}, for a target of {config.target_hidden_size}"
            raise ValueError(f"the drafter has {made_for}; this target has {theirs}")
        check_target(config, target)
        return self

    def init(self, slots: int, max_len: int, num_draft_tokens: int) -> DFlashState:
        if num_draft_tokens >= self.config.block_size:
            raise ValueError(
                f"num_draft_tokens is {num_draft_tokens}; the drafter's block_size of {self.config.block_size} holds the anchor and "
                f"{self.config.block_size - 1} drafts"
            )
        dtype = self.fc.weight.dtype
        # Only committed rows are stored, so that a sliding ring needs no room for drafts.
        sizes = {"slots": slots, "max_len": max_len, "num_draft_tokens": 0, "page_size": self.page_size}
        return DFlashState(paged.fixed(self.config.layers, **sizes, dtype=dtype))

    def observe(self, state: DFlashState, rows: Observed) -> DFlashState:
        count = jnp.where(rows.slots < state.cache.slots, rows.committed, 0)
        keys = self.context(rows.taps, rows.positions)
        return DFlashState(paged.write_all(state.cache, rows.slots, rows.positions[:, 0], count, keys))

    def context(self, taps: tuple[jax.Array, ...], positions: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """Each layer's K and V of rows. taps: [B, T, h] each; positions: [B, T] int32 -> [B, T, KV, D] each."""
        dtype = self.fc.weight.dtype
        with jax.named_scope("context"):
            projected = self.kv_proj(self.hidden_norm(self.fc(jnp.concatenate([tap.astype(dtype) for tap in taps], axis=-1))))
        return [layer.self_attn.keys_values(projected[:, :, i], positions) for i, layer in enumerate(self.layers)]

    def draft(self, state: DFlashState, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, DFlashState]:
        if num_draft_tokens == 0:
            return Drafts.joined([], target.slots.shape[0]), state
        masks = jnp.full((target.slots.shape[0], num_draft_tokens), self.config.mask_token_id, jnp.int32)
        out = self.block(state, target, jnp.concatenate([target.anchor[:, None], masks], axis=1))
        logits, ids = self.candidates(target.model, out[:, 1:])
        positions = target.length[:, None] + jnp.arange(1, num_draft_tokens + 1, dtype=jnp.int32)[None, :]
        return Drafts(choose(logits, positions, sampling, ids), logits, ids), state

    def block(self, state: DFlashState, target: Target, ids: jax.Array) -> jax.Array:
        """A block's outputs after the final norm. ids: [B, T] int32, at positions length .. length + T - 1 -> [B, T, h]."""
        x = self.embed(target.model, ids)
        positions = target.length[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
        for i, layer in enumerate(self.layers):
            pools, table = state.cache.pages_of(i, target.slots)
            kv_proj = Linear(jax.lax.index_in_dim(self.kv_proj.weight, i, keepdims=False))
            x = _layer(layer, kv_proj, x, positions, pools, table, target.length, self.config.causal[i], target.draft_attention)
        return self.norm(x)

    def embed(self, model: Gemma4, ids: jax.Array) -> jax.Array:
        """The block's embeddings. ids: [B, T] int32 -> [B, T, h]."""
        dtype, scale = self.fc.weight.dtype, self.config.input_embedding_scale
        x = dataclasses.replace(model.embed_tokens, scale=scale)(ids).astype(dtype)
        if self.mask_embedding is None:
            return x
        mask = (self.mask_embedding * jnp.asarray(scale, dtype)).reshape(1, 1, -1)
        return jnp.where((ids == self.config.mask_token_id)[..., None], mask, x)

    def candidates(self, model: Gemma4, out: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Float32 logits of outputs after the final norm, and the token ids that they belong to (None: candidate i is token i).

        out: [B, T, h] -> [B, T, C] each, C the draft vocabulary.
        """
        logits, ids = head(model, self.lm_head, self.d2t, out)
        return softcap(logits * jnp.float32(self.config.output_multiplier), self.config.final_logit_softcapping), ids


@jax.jit(static_argnames=("causal", "attention"))
def _layer(
    layer: DFlashLayer,
    kv_proj: Linear,
    x: jax.Array,
    positions: jax.Array,
    pools: LayerKV,
    table: jax.Array,
    length: jax.Array,
    causal: bool,
    attention: str,
) -> jax.Array:
    """One layer over a block. x: [B, T, h]; positions: [B, T]; kv_proj: [2, KV, D, h]; pools, table, length: the cached context."""
    attn, spec = layer.self_attn, layer.self_attn.spec
    with jax.named_scope(spec.kind):
        normed = layer.input_layernorm(x)
        q = attn.rotated(attn.q_norm(attn.q_proj(normed)), positions)
        # Apart from the queries' product: XLA would merge the two, and copy this layer's part of kv_proj to do so.
        k, v = attn.keys_values(kv_proj(jax.lax.optimization_barrier(normed)), positions)
        heads = paged_attention(
            q,
            positions,
            (pools.k, pools.v),
            table,
            length,
            (k.astype(pools.k.dtype), v.astype(pools.v.dtype)),
            jnp.full_like(length, x.shape[1]),
            causal=causal,
            window=spec.window,
            scale=spec.head_dim**-0.5,
            implementation=attention,
        )
        x = x + attn.o_proj.of_heads(heads)
    with jax.named_scope("feed_forward"):
        return x + layer.mlp(layer.post_attention_layernorm(x))


def abstract(config: DFlashConfig, dtype: Any = jnp.bfloat16) -> DFlash:
    """The drafter as a tree of ShapeDtypeStructs."""

    def leaf(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    hidden, spec = config.hidden_size, config.layers[0]

    def layer(spec: LayerSpec) -> DFlashLayer:
        heads = (spec.num_kv_heads, spec.group, spec.head_dim)
        head_norm = RMSNorm(leaf(spec.head_dim), spec.eps)
        mlp = SiluMLP(Linear(leaf(2, spec.intermediate_size, hidden)), Linear(leaf(hidden, spec.intermediate_size)))
        attn = DFlashAttention(Linear(leaf(*heads, hidden)), Linear(leaf(hidden, *heads)), head_norm, head_norm, spec)
        return DFlashLayer(attn, mlp, RMSNorm(leaf(hidden), spec.eps), RMSNorm(leaf(hidden), spec.eps))

    return DFlash(
        fc=Linear(leaf(hidden, len(config.taps) * hidden)),
        hidden_norm=RMSNorm(leaf(hidden), config.eps),
        kv_proj=Linear(leaf(len(config.layers), 2, spec.num_kv_heads, spec.head_dim, hidden)),
        layers=tuple(layer(spec) for spec in config.layers),
        norm=RMSNorm(leaf(hidden), config.eps),
        lm_head=Linear(leaf(config.draft_vocab_size, hidden)) if config.own_head else None,
        d2t=leaf(config.draft_vocab_size, dtype=jnp.int32) if config.draft_vocab_size != config.vocab_size else None,
        mask_embedding=leaf(hidden) if config.own_mask else None,
        config=config,
    )


def from_checkpoint(folder: Path, config: Mapping[str, Any], target: Gemma4Config, dtype: Any) -> DFlash:
    """The drafter in a checkpoint folder as a tree of ShapeDtypeStructs. Raises ValueError if it cannot be used with the target."""
    refuse_quantised(config)
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(
            "mask_embedding.pt is a pickle, which can run code when it is read; expected a tensor mask_embedding in model.safetensors. "
            'To add it, where you trust the file: python -c "import torch; from safetensors.torch import load_file, save_file; '
            "t = load_file('model.safetensors'); t['mask_embedding'] = torch.load('mask_embedding.pt', weights_only=True).flatten(); "
            "save_file(t, 'model.safetensors', {'format': 'pt'})\", and remove mask_embedding.pt"
        )
    return abstract(DFlashConfig.from_hf(config, target, checkpoint.read_headers(folder)), dtype)
