"""Drafters that guess a block in one pass over the target's hidden states: what DFlash, DFlash2 and DSpark have in common.

Every committed position has a context row, hidden_norm(fc(taps)), from which each layer makes its own K and V: one product for all
layers, stored once. To draft, the block [anchor, mask, ..., mask] runs at the positions from the anchor's on, over that context and over
itself. Where the first row is of no use, the row at a position guesses the token there; else every row guesses the token after its own.
The block's K and V are never stored, so there is nothing to undo when guesses are rejected.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec import checkpoint
from jaxspec.checkpoint import layout
from jaxspec.drafters import blocks
from jaxspec.drafters.base import Observed, Target
from jaxspec.drafters.block_config import ANCHOR, SCALE, BlockConfig
from jaxspec.drafters.blocks import PlainDrafter, SiluMLP, check_target, head
from jaxspec.drafters.training import XLA, pick, whole_cache
from jaxspec.model import paged_kv as paged
from jaxspec.model import traffic
from jaxspec.model.layer_spec import LayerSpec
from jaxspec.model.layers import Linear, RMSNorm, Weight, rms, rope, softcap
from jaxspec.model.paged_kv import LayerKV, PagedKV
from jaxspec.model.rows import Hidden
from jaxspec.model.split import KVHeads
from jaxspec.model.target import TargetConfig, TargetModel
from jaxspec.trees import nbytes
from pallas_kernels.paged_attention import paged_attention


@struct.dataclass
class BlockAttention:
    """q_proj: [KV, G, D, H]; o_proj: [H, KV, G, D]; q_norm, k_norm: [D]. K and V projections are `BlockDrafter.kv_proj`. gemma: values
    are normed without a weight, and scores are not scaled."""

    q_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    spec: LayerSpec = struct.field(pytree_node=False)
    gemma: bool = struct.field(pytree_node=False, default=False)

    sums: ClassVar[tuple[str, ...]] = ("o_proj",)

    @property
    def kv_heads(self) -> tuple[KVHeads, ...]:
        return KVHeads("q_proj", 0, self.spec, self.spec.group), KVHeads("o_proj", 1, self.spec, self.spec.group)

    def rotated(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        return rope(x, positions, self.spec.rope_theta, self.spec.rotary_angles)

    def keys_values(self, projected: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
        """projected: [B, T, 2 (with k_eq_v 1), KV, D] -> K, normed and rotated, and V, each [B, T, KV, D]."""
        k, v = projected[:, :, 0], projected[:, :, -1]
        return self.rotated(self.k_norm(k), positions), rms(v, self.spec.eps) if self.gemma else v

    @property
    def scale(self) -> float:
        return 1.0 if self.gemma else self.spec.head_dim**-0.5


class BlockLayer(Protocol):
    """A decoder layer of a kind's own."""

    self_attn: BlockAttention

    def __call__(self, x: jax.Array, attend: Callable[[jax.Array], jax.Array], implementation: str) -> jax.Array:
        """The layer over a block's rows [B, T, h], with `attend` in it: attention and its output projection. implementation: of gated
        products that have one, and of products with packed weights."""
        ...


@struct.dataclass
class BlockState:
    """cache: K and V of every committed position, for every layer."""

    cache: PagedKV


class BlockDrafter(PlainDrafter):
    """The members that such drafters share: see `base.Drafter`. A drafter's own class has these fields; paths are the checkpoint's keys.

    fc: [h, taps x h]. kv_proj: [layers, 2, KV, D, h], every layer's K and V; with k_eq_v [layers, 1, KV, D, h]. lm_head: [draft
    vocabulary, h] and d2t: [draft vocabulary] int32 (draft id i is token i + d2t[i]), where the checkpoint has its own. mask_embedding:
    [h], or None for a row of the target's table. page_size: positions in a page of its cache. reading: [] int32, which of
    `config.undecided.values` is taken, None for the first: an array, so that both readings share compiled programs. What a drafter keeps
    of a sequence is the same in both.
    """

    takes_parts: ClassVar[bool] = True

    fc: Linear
    hidden_norm: RMSNorm
    kv_proj: Linear
    layers: tuple[Any, ...]
    norm: RMSNorm
    lm_head: Linear | None
    d2t: Weight | None
    mask_embedding: Weight | None
    config: BlockConfig
    page_size: int
    reading: jax.Array | None

    @property
    def readings(self) -> tuple[str, ...]:
        """See `base.Drafter`."""
        return () if self.config.undecided is None else self.config.undecided.readings

    def read_as(self, which: jax.Array) -> Self:
        """See `base.Drafter`."""
        return dataclasses.replace(self, reading=which)  # pyright: ignore[reportArgumentType]

    def decided(self, config: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """See `base.Drafter`."""
        if self.config.undecided is None or self.reading is None:
            return self, dict(config)
        undecided = self.config.undecided
        return dataclasses.replace(self, reading=None), {**config, undecided.key: undecided.values[int(self.reading)]}  # pyright: ignore

    @property
    def embedding_scale(self) -> float | jax.Array:
        """What the block's embeddings are multiplied by; an array where the reading decides."""
        undecided = self.config.undecided
        if self.reading is None or undecided is None or undecided.key != SCALE:
            return self.config.input_embedding_scale
        return jnp.where(self.reading == 0, *map(jnp.float32, undecided.values))

    @property
    def first_row(self) -> int | jax.Array:
        """The first row of a block that guesses; an array where the reading decides."""
        undecided = self.config.undecided
        return self.config.first_row if self.reading is None or undecided is None or undecided.key != ANCHOR else self.reading

    @property
    def kv_heads(self) -> tuple[KVHeads, ...]:
        return (KVHeads("kv_proj", 2, self.config.layers[0], 0),)

    @staticmethod
    def layouts(path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[list[layout.Part]]:
        """`kv_proj` is two matrices of every layer in a checkpoint, with k_eq_v one."""
        if path != "kv_proj.weight":
            return layout.layouts(path, shapes)
        layers, owned, *heads, hidden = shapes[path]
        parts = [(i, j, f"layers.{i}.self_attn.{name}_proj.weight") for i in range(layers) for j, name in enumerate("kv"[:owned])]
        return [[layout.Part(key, (math.prod(heads), hidden), (i, j)) for i, j, key in parts]]

    @property
    def num_draft_tokens(self) -> int:
        """As many as the rows of a block that guess."""
        return self.config.block_size - self.config.silent_rows

    def bind(self, target: TargetConfig) -> Any:
        config, theirs = self.config, target.hidden_size
        if config.hidden_size != theirs or config.target_hidden_size != theirs:
            made_for = f"hidden_size {config.hidden_size}, for a target of {config.target_hidden_size}"
            raise ValueError(f"the drafter has {made_for}; this target has {theirs}")
        check_target(config, target, own_logits=self.own_logits)
        return self

    def init(self, slots: int, max_len: int, num_draft_tokens: int) -> BlockState:
        if num_draft_tokens > self.num_draft_tokens:
            holds = f"{self.num_draft_tokens} drafts"
            raise ValueError(
                f"num_draft_tokens is {num_draft_tokens}; the drafter's block_size of {self.config.block_size} holds "
                f"{f'the anchor and {holds}' if self.config.silent_rows else holds}"
            )
        dtype = self.dtype
        # Only committed rows are stored, so that a sliding ring needs no room for drafts.
        sizes = {"slots": slots, "max_len": max_len, "num_draft_tokens": 0, "page_size": self.page_size}
        return BlockState(paged.fixed(paged.init(blocks.stored(self.config.layers), **sizes, dtype=dtype)))

    def observe(self, state: BlockState, rows: Observed) -> BlockState:
        count = jnp.where(rows.slots < state.cache.slots, rows.committed, 0)
        keys = self.context(rows.taps, rows.positions, rows.draft_attention)
        return BlockState(paged.write_all(state.cache, rows.slots, rows.positions[:, 0], count, keys))

    def context(self, taps: tuple[jax.Array, ...], positions: jax.Array, implementation: str = XLA) -> list[tuple[jax.Array, jax.Array]]:
        """Each layer's K and V of rows. taps: [B, T, h] each; positions: [B, T] int32 -> [B, T, KV, D] each. implementation: of products
        with packed weights."""
        with jax.named_scope("context"):
            features = self.fc(jnp.concatenate([tap.astype(self.dtype) for tap in taps], axis=-1), implementation=implementation)
            projected = self.kv_proj(self.hidden_norm(features), implementation=implementation)
        return [layer.self_attn.keys_values(projected[:, :, i], positions) for i, layer in enumerate(self.layers)]

    def rows(self, state: BlockState, target: Target, count: int) -> jax.Array:
        """Outputs after the final norm of a block with `count` rows that guess, which `guessing` picks: [B, T, h]. Where the reading
        decides which these are, a last row may be there that no other row sees."""
        batch, first = target.slots.shape[0], self.first_row
        silent = first if isinstance(first, int) else self.config.silent_rows
        masks = jnp.full((batch, silent + count - 1), self.config.mask_token_id, jnp.int32)
        seen = None if isinstance(first, int) else jnp.broadcast_to(first + count, batch)
        return self.block(state, target, jnp.concatenate([target.anchor[:, None], masks], axis=1), seen)

    def guessing(self, rows: jax.Array, count: int) -> jax.Array:
        """Of a block's rows those that guess: [..., T, h] -> [..., count, h]."""
        first = self.first_row
        if isinstance(first, int):
            return rows[..., first : first + count, :]
        return jax.lax.dynamic_slice_in_dim(rows, first, count, axis=rows.ndim - 2)

    def block(self, state: BlockState, target: Target, ids: jax.Array, seen: jax.Array | None = None) -> jax.Array:
        """A block's outputs after the final norm. ids: [B, T] int32, at positions length .. length + T - 1 -> [B, T, h]. seen: [B] int32,
        how many of the rows are seen by others, by default all."""
        x = self.embed(target.model, ids)
        seen = jnp.full_like(target.length, x.shape[1]) if seen is None else seen
        positions = target.length[:, None] + jnp.arange(ids.shape[1], dtype=jnp.int32)[None, :]
        for i, layer in enumerate(self.layers):
            pools, table = state.cache.pages_of(i, target.slots)
            # All fields of a packed matrix have the axis of layers first.
            kv_proj = Linear(jax.tree.map(lambda field, i=i: jax.lax.index_in_dim(field, i, keepdims=False), self.kv_proj.weight))
            causal, attention = self.config.causal[i], target.draft_attention
            x = _layer(layer, kv_proj, x, positions, pools, table, target.length, seen, causal, attention)
        return self.norm(x)

    def embed(self, model: TargetModel, ids: jax.Array) -> jax.Array:
        """The block's embeddings. ids: [B, T] int32 -> [B, T, h]."""
        dtype, scale = self.dtype, self.embedding_scale
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

    def bytes_of_a_pass(self, target: TargetModel, *, batch: int, context: float) -> tuple[float, float]:
        """Bytes that one pass over the block reads: all weights, the head being the target's where the drafter has none, and K and V."""
        head = 0 if self.lm_head is not None else nbytes(target.head[0])
        kv = traffic.visible_kv(blocks.stored(self.config.layers), self.dtype, context)
        return nbytes(self) + head, batch * kv

    def rows_along(self, target: TargetModel, out: Hidden, ids: jax.Array, at: jax.Array, count: int) -> jax.Array:
        """What `rows` gives from every place of a text: see `base.Drafter.guesses`. [B, A, T, h]"""
        batch, length = ids.shape
        cache = whole_cache(self.config.layers, self.context(out.taps, jnp.arange(length, dtype=jnp.int32)[None, :]))

        def block(at: jax.Array) -> jax.Array:
            anchor = pick(ids, at[:, None] + 1)
            view = Target(target, cache, jnp.arange(batch, dtype=jnp.int32), anchor[:, 0], at + 1, XLA, XLA)
            return self.rows(BlockState(cache), view, count)

        return jax.vmap(block, in_axes=1, out_axes=1)(at)


@jax.jit(static_argnames=("causal", "attention"))
def _layer(
    layer: BlockLayer,
    kv_proj: Linear,
    x: jax.Array,
    positions: jax.Array,
    pools: LayerKV,
    table: jax.Array,
    length: jax.Array,
    seen: jax.Array,
    causal: bool,
    attention: str,
) -> jax.Array:
    """One layer over a block. x: [B, T, h]; positions: [B, T]; kv_proj: [2 or 1, KV, D, h]; pools, table, length: the cached context;
    seen: [B], rows that others see."""
    attn, spec = layer.self_attn, layer.self_attn.spec

    def attend(normed: jax.Array) -> jax.Array:
        with jax.named_scope(spec.kind):
            q = attn.rotated(attn.q_norm(attn.q_proj(normed, implementation=attention)), positions)
            # Apart from the queries' product: XLA would merge the two, and copy this layer's part of kv_proj to do so.
            k, v = attn.keys_values(kv_proj(jax.lax.optimization_barrier(normed), implementation=attention), positions)
            heads = paged_attention(
                q,
                positions,
                (pools.k, pools.v),
                table,
                length,
                (k.astype(pools.k.dtype), v.astype(pools.v.dtype)),
                seen,
                causal=causal,
                window=spec.window,
                scale=attn.scale,
                implementation=attention,
            )
            return attn.o_proj.of_heads(heads, implementation=attention)

    return layer(x, attend, attention)


class Leaves:
    """Makes a drafter's ShapeDtypeStructs. dtype: of its float weights."""

    def __init__(self, config: BlockConfig, dtype: Any):
        self.config, self.dtype = config, dtype

    def leaf(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def linear(self, *shape: int) -> Linear:
        return Linear(self.leaf(*shape))

    def norm(self, width: int | None = None) -> RMSNorm:
        return RMSNorm(self.leaf(self.config.hidden_size if width is None else width), self.config.eps)

    def attention(self, spec: LayerSpec, *, gemma: bool = False) -> BlockAttention:
        heads, hidden = (spec.num_kv_heads, spec.group, spec.head_dim), self.config.hidden_size
        norms = self.norm(spec.head_dim), self.norm(spec.head_dim)
        return BlockAttention(self.linear(*heads, hidden), self.linear(hidden, *heads), *norms, spec, gemma)

    def silu_mlp(self, spec: LayerSpec) -> SiluMLP:
        inner, hidden = spec.intermediate_size, self.config.hidden_size
        return SiluMLP(self.linear(2, inner, hidden), self.linear(hidden, inner))

    def shared(self) -> dict[str, Any]:
        """The fields of `BlockDrafter` but for the layers."""
        config = self.config
        hidden, spec, draft_vocab = config.hidden_size, config.layers[0], config.draft_vocab_size
        owned = 1 if spec.k_eq_v else 2
        return {
            "fc": self.linear(hidden, len(config.taps) * hidden),
            "hidden_norm": self.norm(),
            "kv_proj": self.linear(len(config.layers), owned, spec.num_kv_heads, spec.head_dim, hidden),
            "norm": self.norm(),
            "lm_head": self.linear(draft_vocab, hidden) if config.own_head else None,
            "d2t": jax.ShapeDtypeStruct((draft_vocab,), jnp.int32) if draft_vocab != config.vocab_size else None,
            "mask_embedding": self.leaf(hidden) if config.own_mask else None,
            "config": config,
        }


def keys_of(folder: Path | None) -> Collection[str]:
    """The keys of a checkpoint's weights, none without a folder. Raises ValueError for a mask embedding that cannot be read safely."""
    if folder is None:
        return ()
    if (folder / "mask_embedding.pt").exists():
        raise ValueError(
            "mask_embedding.pt is a pickle, which can run code when it is read; expected a tensor mask_embedding in model.safetensors. "
            'To add it, where you trust the file: python -c "import torch; from safetensors.torch import load_file, save_file; '
            "t = load_file('model.safetensors'); t['mask_embedding'] = torch.load('mask_embedding.pt', weights_only=True).flatten(); "
            "save_file(t, 'model.safetensors', {'format': 'pt'})\", and remove mask_embedding.pt"
        )
    return checkpoint.weight_keys(folder, BlockDrafter.layouts)
