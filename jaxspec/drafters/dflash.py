"""DFlash: a block of drafts in one pass, from hidden states of several target layers (arXiv 2602.06036).

Every committed position has a context row, hidden_norm(fc(taps)), from which each layer makes its own K and V: one product for all
layers, stored once. To draft, the block [anchor, mask, ..., mask] runs at positions length .. length + K over that context and over
itself; the row at a position guesses the token there. The block's K and V are never stored, so there is nothing to undo when guesses
are rejected. Full layers see the whole block, sliding layers only what lies before a row. Facts: z-lab/dflash `model.py`, SpecForge
`DFlashDraftModel`, vLLM `qwen3_dflash.py`, speculators `models/dflash`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec import checkpoint
from jaxspec.checkpoint import layout
from jaxspec.drafters import blocks
from jaxspec.drafters.base import Drafts, Observed, Target
from jaxspec.drafters.blocks import PlainDrafter, SiluMLP, check_target, head
from jaxspec.drafters.dflash_config import RELEASED, DFlashConfig, default_config
from jaxspec.drafters.kind import Kind
from jaxspec.drafters.training import XLA, Guess, Objective, pick, whole_cache
from jaxspec.model import paged_kv as paged
from jaxspec.model import traffic
from jaxspec.model.config import LayerSpec, refuse_quantised
from jaxspec.model.layers import Linear, RMSNorm, Weight, rope, softcap
from jaxspec.model.paged_kv import LayerKV, PagedKV
from jaxspec.model.rows import Hidden
from jaxspec.model.split import KVHeads
from jaxspec.model.target import TargetConfig, TargetModel
from jaxspec.sampling.choice import Sampling, choose
from jaxspec.trees import nbytes
from pallas_kernels.paged_attention import paged_attention


@struct.dataclass
class DFlashAttention:
    """q_proj: [KV, G, D, H]; o_proj: [H, KV, G, D]; q_norm, k_norm: [D]. K and V projections are `DFlash.kv_proj`."""

    q_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    spec: LayerSpec = struct.field(pytree_node=False)

    sums: ClassVar[tuple[str, ...]] = ("o_proj",)

    @property
    def kv_heads(self) -> tuple[KVHeads, ...]:
        return KVHeads("q_proj", 0, self.spec, self.spec.group), KVHeads("o_proj", 1, self.spec, self.spec.group)

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
class DFlash(PlainDrafter):
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
    def kv_heads(self) -> tuple[KVHeads, ...]:
        return (KVHeads("kv_proj", 2, self.config.layers[0], 0),)

    @staticmethod
    def layouts(path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[list[layout.Part]]:
        """`kv_proj` is two matrices of every layer in a checkpoint."""
        if path != "kv_proj.weight":
            return layout.layouts(path, shapes)
        layers, _, *heads, hidden = shapes[path]
        parts = [(i, j, f"layers.{i}.self_attn.{name}_proj.weight") for i in range(layers) for j, name in enumerate("kv")]
        return [[layout.Part(key, (math.prod(heads), hidden), (i, j)) for i, j, key in parts]]

    @property
    def num_draft_tokens(self) -> int:
        """All that a block holds beside the anchor."""
        return self.config.block_size - 1

    def bind(self, target: TargetConfig) -> DFlash:
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
        return DFlashState(paged.fixed(paged.init(self.config.layers, **sizes, dtype=dtype)))

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
        logits, ids = self.candidates(target.model, out[:, 1:], target.draft_attention)
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

    def embed(self, model: TargetModel, ids: jax.Array) -> jax.Array:
        """The block's embeddings. ids: [B, T] int32 -> [B, T, h]."""
        dtype, scale = self.fc.weight.dtype, self.config.input_embedding_scale
        x = model.embed(ids, scale).astype(dtype)
        if self.mask_embedding is None:
            return x
        mask = (self.mask_embedding * jnp.asarray(scale, dtype)).reshape(1, 1, -1)
        return jnp.where((ids == self.config.mask_token_id)[..., None], mask, x)

    def candidates(self, model: TargetModel, out: jax.Array, implementation: str = XLA) -> tuple[jax.Array, jax.Array | None]:
        """Float32 logits of outputs after the final norm, and the token ids that they belong to (None: candidate i is token i).

        out: [B, T, h] -> [B, T, C] each, C the draft vocabulary. implementation: see `blocks.head`.
        """
        logits, ids = head(model, self.lm_head, self.d2t, out, implementation)
        return softcap(logits * jnp.float32(self.config.output_multiplier), self.config.final_logit_softcapping), ids

    def bytes_read(self, target: TargetModel, *, batch: int, num_draft_tokens: int, context: float) -> tuple[float, float]:
        """One pass over the block; the head is the target's where the drafter has none."""
        head = 0 if self.lm_head is not None else nbytes(target.head[0])
        return nbytes(self) + head, batch * traffic.visible_kv(self.config.layers, self.fc.weight.dtype, context)

    def guesses(self, target: TargetModel, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
        batch, length = ids.shape
        cache = whole_cache(self.config.layers, self.context(out.taps, jnp.arange(length, dtype=jnp.int32)[None, :]))
        masks = jnp.full((batch, steps), self.config.mask_token_id, jnp.int32)

        def block(at: jax.Array) -> jax.Array:
            anchor = pick(ids, at[:, None] + 1)
            view = Target(target, cache, jnp.arange(batch, dtype=jnp.int32), anchor[:, 0], at + 1, XLA, XLA)
            return self.block(DFlashState(cache), view, jnp.concatenate([anchor, masks], axis=1))[:, 1:]

        outs = jax.vmap(block, in_axes=1, out_axes=1)(at)  # [B, A, K, h]
        for k in range(steps):
            logits, tokens = self.candidates(target, outs[:, :, k])
            yield Guess(logits, None if tokens is None else tokens[0, 0])

    def fresh(self, table: np.ndarray, norm: np.ndarray, tokens: np.ndarray, seed: int) -> DFlash:
        return blocks.with_the_targets_head(self, table, norm, tokens)


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


def from_checkpoint(folder: Path | None, config: Mapping[str, Any], target: TargetConfig, dtype: Any) -> DFlash:
    """The drafter in a checkpoint folder as a tree of ShapeDtypeStructs. Raises ValueError if it cannot be used with the target."""
    refuse_quantised(config)
    if folder is None:
        return abstract(DFlashConfig.from_hf(config, target), dtype)
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(
            "mask_embedding.pt is a pickle, which can run code when it is read; expected a tensor mask_embedding in model.safetensors. "
            'To add it, where you trust the file: python -c "import torch; from safetensors.torch import load_file, save_file; '
            "t = load_file('model.safetensors'); t['mask_embedding'] = torch.load('mask_embedding.pt', weights_only=True).flatten(); "
            "save_file(t, 'model.safetensors', {'format': 'pt'})\", and remove mask_embedding.pt"
        )
    return abstract(DFlashConfig.from_hf(config, target, checkpoint.read_headers(folder, DFlash.layouts)), dtype)


KIND = Kind(
    name="dflash",
    config_names=("DFlashDraftModel", "DFlashSpeculator", "dflash"),
    made=DFlash,
    from_checkpoint=from_checkpoint,
    released=lambda name, raw, target: RELEASED.get(name or ""),
    # The weights of a block of 8 fall by e every fourth place (arXiv 2602.06036, section 4.2).
    objective=Objective(steps=7, decay=0.78, hard=1.0),
    default_config=default_config,
)
