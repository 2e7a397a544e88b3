"""EAGLE-3: a small decoder over features made of several target layers and the embedding of the next token (arXiv 2503.01840).

The row at position p takes the feature fc(taps) of p and the embedding of token p + 1, and predicts token p + 2. `observe` runs all
committed rows and stores their K and V; the last one's output gives the first guess. Each further guess is one row at the next
position, whose feature is the row before it's own output. K and V of such rows are kept beside the cache for the round, never in it, so
there is nothing to undo when guesses are rejected. Facts: SafeAILab/EAGLE `cnets.py`, vLLM `llama_eagle3.py`, speculators
`models/eagle3`, DeepSpec `modeling/eagle3/gemma4`.
"""

from __future__ import annotations

import dataclasses
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
from jaxspec.drafters.branching import Branching
from jaxspec.drafters.eagle3_config import GEMMA, Eagle3Config, default_config, made_up
from jaxspec.drafters.kind import Kind
from jaxspec.drafters.training import XLA, Guess, Objective, pick, whole_cache
from jaxspec.model import paged_kv as paged
from jaxspec.model import traffic
from jaxspec.model.draft_tree import DraftTree
from jaxspec.model.gemma4_fresh import with_query_norms
from jaxspec.model.layer_spec import LayerSpec
from jaxspec.model.layers import Embedding, GatedMLP, Linear, RMSNorm, Weight, rms, rope, softcap
from jaxspec.model.paged_kv import LayerKV, PagedKV
from jaxspec.model.rows import Hidden, take_row
from jaxspec.model.split import KVHeads
from jaxspec.model.target import TargetConfig, TargetModel
from jaxspec.sampling.choice import Sampling, draw
from jaxspec.trees import nbytes, told
from pallas_kernels.paged_attention import paged_attention


@struct.dataclass
class Eagle3Attention:
    """qkv_proj: [KV, G + owned, D, in], by KV head its G query heads, then its key and (unless k_eq_v) its value; `in` is twice the
    width where a layer sees embedding and feature. o_proj: [H, KV, G, D]. q_norm, k_norm: [D] or None. gemma: values are normed
    without a weight, and scores are not scaled."""

    qkv_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    spec: LayerSpec = struct.field(pytree_node=False)
    gemma: bool = struct.field(pytree_node=False)

    sums: ClassVar[tuple[str, ...]] = ("o_proj",)

    @property
    def kv_heads(self) -> tuple[KVHeads, ...]:
        return KVHeads("qkv_proj", 0, self.spec, self.spec.group), KVHeads("o_proj", 1, self.spec, self.spec.group)

    def project(self, x: jax.Array, positions: jax.Array, implementation: str) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x: [B, T, in] -> queries [B, T, KV, G, D], and K and V as they are stored, [B, T, KV, D]. implementation: of the product with
        packed weights."""
        spec, projected = self.spec, self.qkv_proj(x, implementation=implementation)
        q, k, v = projected[..., : spec.group, :], projected[..., spec.group, :], projected[..., -1, :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = (rope(heads, positions, spec.rope_theta, spec.rotary_angles) for heads in (q, k))
        return q, k, rms(v, spec.eps) if self.gemma else v

    @property
    def scale(self) -> float:
        return 1.0 if self.gemma else self.spec.head_dim**-0.5


@struct.dataclass
class Eagle3Layer:
    """A decoder layer. hidden_norm: of the feature, in a layer that sees it beside the embedding. The fields after it are Gemma's."""

    self_attn: Eagle3Attention
    mlp: SiluMLP | GatedMLP
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    hidden_norm: RMSNorm | None
    pre_feedforward_layernorm: RMSNorm | None
    post_feedforward_layernorm: RMSNorm | None
    layer_scalar: Weight | None
    norm_before_residual: bool = struct.field(pytree_node=False, default=False)

    def inputs(self, embedded: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What attention takes, [B, T, in], and the residual that it is added to, [B, T, H]. embedded, x: [B, T, H]."""
        if self.hidden_norm is None:
            return self.input_layernorm(x), x
        normed = self.hidden_norm(x)
        both = jnp.concatenate([self.input_layernorm(embedded), normed], axis=-1)
        return both, normed if self.norm_before_residual else x

    def outputs(self, residual: jax.Array, attended: jax.Array, implementation: str) -> jax.Array:
        """The layer after attention. [B, T, H] each. implementation: of Gemma's gated product, and of products with packed weights."""
        if self.pre_feedforward_layernorm is None:
            x = residual + attended
            return x + self.mlp(self.post_attention_layernorm(x), implementation)
        assert self.post_feedforward_layernorm is not None and self.layer_scalar is not None and isinstance(self.mlp, GatedMLP)
        x = residual + self.post_attention_layernorm(attended)
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x), implementation))
        return x * self.layer_scalar.reshape(1, 1, 1)


@struct.dataclass
class Eagle3State:
    """cache: K and V of every committed position. hidden: [slots, h], the last layer's output at each slot's last committed row."""

    cache: PagedKV
    hidden: jax.Array


@struct.dataclass
class DraftRows:
    """Rows to run: [B, T]. cache, slots, length ([B] int32): the stored positions 0 .. length - 1. fresh: K and V of each layer, of rows
    after them that are not stored, or None; count: [B] int32, how many real rows there are with the ones to run. ancestors: which of these
    rows each row to run sees, as in `paged_attention`; None for all before it. store: whether they are stored before they are attended to,
    so that a slot that is there several times sees all its rows."""

    positions: jax.Array
    cache: PagedKV
    slots: jax.Array
    length: jax.Array
    fresh: tuple[tuple[jax.Array, jax.Array], ...] | None
    count: jax.Array
    ancestors: tuple[int, ...] | None = struct.field(pytree_node=False, default=None)
    store: bool = struct.field(pytree_node=False, default=False)


@struct.dataclass
class Eagle3(PlainDrafter):
    """The drafter's weights; paths are the checkpoint's keys, with `layers.0` for `midlayer`. fc: [h, taps x H]; input_norm:
    [taps x H], fc_norm: [H] each, or None. embed_tokens: [V, h], lm_head: [draft vocabulary, h], or None for the target's. d2t: [draft
    vocabulary] int32 (draft id i is token i + d2t[i]), or None. page_size: positions in a page of its cache."""

    embed_tokens: Embedding | None
    input_norm: RMSNorm | None
    fc_norm: tuple[RMSNorm, ...] | None
    fc: Linear
    layers: tuple[Eagle3Layer, ...]
    norm: RMSNorm
    lm_head: Linear | None
    d2t: Weight | None
    config: Eagle3Config = struct.field(pytree_node=False)
    page_size: int = struct.field(pytree_node=False, default=64)

    __repr__ = told

    unquantised: ClassVar[tuple[str, ...]] = (r"\bembed_tokens$",)
    takes_parts: ClassVar[bool] = True

    @staticmethod
    def layouts(path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[list[layout.Part]]:
        """EAGLE has another name for its only layer."""
        ways = layout.layouts(path, shapes)
        # The last way has the names of modules by which a config says what is quantised.
        return [*ways, *layout.renamed(ways, "layers.0.", "midlayer."), *ways] if path.startswith("layers.0.") else ways

    @property
    def num_draft_tokens(self) -> int | None:
        return self.config.num_draft_tokens

    def bind(self, target: TargetConfig) -> Eagle3:
        made_for = self.config.target_hidden_size
        if made_for != target.hidden_size:
            raise ValueError(f"the drafter was made for a target of hidden_size {made_for}, this target has {target.hidden_size}")
        check_target(self.config, target, own_logits=self.own_logits)
        return self

    def init(self, slots: int, max_len: int, num_draft_tokens: int) -> Eagle3State:
        dtype = self.dtype
        sizes = {"slots": slots, "max_len": max_len, "num_draft_tokens": 0, "page_size": self.page_size}
        cache = paged.fixed(paged.init(blocks.stored(self.config.layers), **sizes, dtype=dtype))
        return Eagle3State(cache, jnp.zeros((slots, self.config.hidden_size), dtype))

    def observe(self, state: Eagle3State, rows: Observed) -> Eagle3State:
        cache = state.cache
        count = jnp.where(rows.slots < cache.slots, rows.committed, 0)
        # Each row takes the next row's token, and the last one the anchor.
        last = jnp.arange(rows.ids.shape[1], dtype=jnp.int32)[None, :] == count[:, None] - 1
        ids = jnp.where(last, rows.anchor[:, None], jnp.roll(rows.ids, -1, axis=1))
        start, store = rows.positions[:, 0], rows.last is not None
        block = DraftRows(rows.positions, cache, rows.slots, start, None, count, store=store)
        features = self.features(rows.taps, rows.draft_attention)
        x, keys = self.run(self.embed(rows.model, ids), features, block, rows.draft_attention)
        newest = count > 0 if rows.last is None else (count > 0) & rows.last
        slots = jnp.where(newest, rows.slots, cache.slots)
        hidden = take_row(x, jnp.maximum(count - 1, 0))[:, 0]
        if store:
            cache = dataclasses.replace(cache, layers=keys)
        else:
            cache = paged.write_all(cache, rows.slots, start, count, keys, after=x)
        return Eagle3State(cache, state.hidden.at[slots].set(hidden, mode="drop"))

    def draft(self, state: Eagle3State, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, Eagle3State]:
        x = jnp.take(state.hidden, target.slots, axis=0, mode="clip")[:, None]
        fresh, steps = None, []
        for k in range(1, num_draft_tokens + 1):
            logits, ids = self.candidates(target.model, x, target.draft_attention)
            token, logits, sampling = draw(logits, target.length[:, None] + k, sampling, ids)
            steps.append((token, logits, ids))
            if k < num_draft_tokens:
                feature = self.norm(x) if self.config.norm_output else x
                count = jnp.full_like(target.length, k)
                row = DraftRows(target.length[:, None] + k - 1, state.cache, target.slots, target.length, fresh, count)
                x, fresh = self.run(self.embed(target.model, token), feature, row, target.draft_attention)
        return Drafts.joined(steps, target.slots.shape[0]), state

    def draft_tree(self, state: Eagle3State, target: Target, sampling: Sampling, tree: DraftTree) -> tuple[Drafts, Eagle3State]:
        """See `Drafter`. Nodes with children have rows, those of one depth at one position, each of which sees those on its path."""
        x = jnp.take(state.hidden, target.slots, axis=0, mode="clip")[:, None]
        fresh, nodes, branching = None, [], Branching.begun(sampling)
        kept = list[int]()  # rows of the tree that have K and V
        for depth, level in enumerate(tree.levels, start=1):
            logits, ids = self.candidates(target.model, x, target.draft_attention)
            token, branching = branching.choose(logits, target.length + depth, level, ids)
            nodes.append(token)
            if depth < tree.depth:
                inner, first = tree.levels[depth].inner, tree.depths.index(depth)
                kept += [first + i for i in inner]
                seen = tuple(sum(1 << j for j, other in enumerate(kept) if tree.seen[first + i, other]) for i in inner)
                feature = (self.norm(x) if self.config.norm_output else x)[:, level.parent][:, inner]
                at = jnp.broadcast_to(target.length[:, None] + depth - 1, (token.shape[0], len(inner)))
                count = jnp.full_like(target.length, len(kept))
                rows = DraftRows(at, state.cache, target.slots, target.length, fresh, count, seen)
                x, fresh = self.run(self.embed(target.model, token[:, inner]), feature, rows, target.draft_attention)
        return Drafts(jnp.concatenate(nodes, axis=1)), state

    def run(self, embedded: jax.Array, x: jax.Array, rows: DraftRows, attention: str) -> tuple[jax.Array, tuple[Any, ...]]:
        """Rows through all layers. embedded: [B, T, h], of each row's next token; x: [B, T, h], its feature. Returns the last layer's
        output [B, T, h] and, for each layer, its pools if the rows are stored, else the fresh K and V with the rows' own behind them."""
        after = []
        for i, layer in enumerate(self.layers):
            pages = rows.cache.pages_of(i, rows.slots)
            fresh = None if rows.fresh is None else rows.fresh[i]
            static = {"ancestors": rows.ancestors, "store": rows.store, "attention": attention}
            x, keys = _layer(layer, embedded, x, rows.positions, *pages, rows.length, fresh, rows.count, **static)
            after.append(keys)
        return x, tuple(after)

    def features(self, taps: tuple[jax.Array, ...], implementation: str = XLA) -> jax.Array:
        """What the drafter makes of the target's hidden states. taps: [B, T, H] each -> [B, T, h]. implementation: of the product with
        packed weights."""
        parts = [tap.astype(self.dtype) for tap in taps]
        if self.input_norm is not None:
            parts = [self.input_norm(jnp.concatenate(parts, axis=-1))]
            parts = jnp.split(parts[0], len(taps), axis=-1)
        if self.fc_norm is not None:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        return self.fc(jnp.concatenate(parts, axis=-1), implementation=implementation)

    def embed(self, model: TargetModel, ids: jax.Array) -> jax.Array:
        """Embeddings of tokens: the drafter's own, or rows of the target's table. ids: [B, T] int32 -> [B, T, h]."""
        scale = math.sqrt(self.config.hidden_size) if self.config.gemma else 1.0
        embedded = model.embed(ids, scale) if self.embed_tokens is None else self.embed_tokens(ids)
        return embedded.astype(self.dtype)

    def candidates(self, model: TargetModel, x: jax.Array, implementation: str = XLA) -> tuple[jax.Array, jax.Array | None]:
        """Float32 logits of the last layer's outputs, and the token ids that they belong to (None: candidate i is token i).

        x: [B, T, h] -> [B, T, C] each, C the draft vocabulary. implementation: see `blocks.head`.
        """
        logits, ids = head(model, self.lm_head, self.d2t, self.norm(x), implementation)
        return softcap(logits * jnp.float32(self.config.logit_scale), self.config.final_logit_softcapping), ids

    def bytes_read(self, target: TargetModel, *, batch: int, num_draft_tokens: int, context: float) -> tuple[float, float]:
        """The features' projection once; layers and head for every draft."""
        head = 0 if self.lm_head is not None else nbytes(target.head[0])
        once = nbytes((self.fc, self.input_norm, self.fc_norm))
        each = nbytes(self) - once - nbytes(self.embed_tokens) + head
        kv = traffic.visible_kv(blocks.stored(self.config.layers), self.dtype, context)
        return once + num_draft_tokens * each, num_draft_tokens * batch * kv

    def guesses(self, target: TargetModel, out: Hidden, ids: jax.Array, at: jax.Array, steps: int) -> Iterator[Guess]:
        """The training-time test: a first pass over all rows, then rows of their own for every place, which see the first pass's keys up
        to the place and their own after it."""
        batch, length = ids.shape
        slots, zero = jnp.arange(batch, dtype=jnp.int32), jnp.zeros((batch,), jnp.int32)
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], ids.shape)
        dtype, layers = self.dtype, self.config.layers
        none = whole_cache(layers, [(jnp.zeros((batch, 1, spec.num_kv_heads, spec.head_dim), dtype),) * 2 for spec in layers])
        following = self.embed(target, jnp.roll(ids, -1, axis=1))
        x, keys = self.run(following, self.features(out.taps), DraftRows(positions, none, slots, zero, None, zero + length), XLA)
        cache, x, fresh = whole_cache(layers, keys), pick(x, at), None
        for k in range(1, steps + 1):
            logits, tokens = self.candidates(target, x)
            yield Guess(logits, None if tokens is None else tokens[0, 0])
            if k == steps:
                return

            def row(at: jax.Array, x: jax.Array, fresh: Any, k: int = k) -> tuple[jax.Array, Any]:
                feature = x[:, None] if not self.config.norm_output else self.norm(x[:, None])
                rows = DraftRows(at[:, None] + k, cache, slots, at + 1, fresh, zero + k)
                x, fresh = self.run(self.embed(target, pick(ids, at[:, None] + k + 1)), feature, rows, XLA)
                return x[:, 0], fresh

            x, fresh = jax.vmap(row, in_axes=1, out_axes=1)(at, x, fresh)

    def fresh(self, table: np.ndarray, norm: np.ndarray, tokens: np.ndarray, seed: int) -> Eagle3:
        return blocks.with_the_targets_head(with_query_norms(self), table, norm, tokens)


@jax.jit(static_argnames=("ancestors", "store", "attention"))
def _layer(
    layer: Eagle3Layer,
    embedded: jax.Array,
    x: jax.Array,
    positions: jax.Array,
    pools: LayerKV,
    table: jax.Array,
    length: jax.Array,
    fresh: tuple[jax.Array, jax.Array] | None,
    count: jax.Array,
    *,
    ancestors: tuple[int, ...] | None,
    store: bool,
    attention: str,
) -> tuple[jax.Array, Any]:
    """One layer over rows; see `Eagle3.run`."""
    attn = layer.self_attn
    with jax.named_scope("attention"):
        inputs, residual = layer.inputs(embedded, x)
        q, *own = attn.project(inputs, positions, attention)
        k, v = (new.astype(pools.k.dtype) for new in own)
        if store:
            pools, length = paged.write(pools, table, length, count, k, v), length + count
        elif fresh is not None:
            k, v = (jnp.concatenate(pair, axis=1) for pair in zip(fresh, (k, v), strict=True))
        settings = {"scale": attn.scale, "ancestors": ancestors, "implementation": attention}
        heads = paged_attention(q, positions, (pools.k, pools.v), table, length, None if store else (k, v), count, **settings)
        attended = attn.o_proj.of_heads(heads, implementation=attention)
    with jax.named_scope("feed_forward"):
        return layer.outputs(residual, attended, attention), pools if store else (k, v)


def abstract(config: Eagle3Config, dtype: Any = jnp.bfloat16) -> Eagle3:
    """The drafter as a tree of ShapeDtypeStructs."""

    def leaf(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def norm(width: int) -> RMSNorm:
        return RMSNorm(leaf(width), config.eps)

    hidden, count, gemma = config.hidden_size, len(config.taps), config.gemma

    def layer(i: int, spec: LayerSpec) -> Eagle3Layer:
        both = gemma or i == 0
        owned = 1 if spec.k_eq_v else 2
        gate_up, down = Linear(leaf(2, spec.intermediate_size, hidden)), Linear(leaf(hidden, spec.intermediate_size))
        return Eagle3Layer(
            self_attn=Eagle3Attention(
                qkv_proj=Linear(leaf(spec.num_kv_heads, spec.group + owned, spec.head_dim, hidden * (2 if both else 1))),
                o_proj=Linear(leaf(hidden, spec.num_kv_heads, spec.group, spec.head_dim)),
                q_norm=norm(spec.head_dim) if config.head_norms else None,
                k_norm=norm(spec.head_dim) if config.head_norms else None,
                spec=spec,
                gemma=gemma,
            ),
            mlp=GatedMLP(gate_up, down) if gemma else SiluMLP(gate_up, down),
            input_layernorm=norm(hidden),
            post_attention_layernorm=norm(hidden),
            hidden_norm=norm(hidden) if both else None,
            pre_feedforward_layernorm=norm(hidden) if gemma else None,
            post_feedforward_layernorm=norm(hidden) if gemma else None,
            layer_scalar=leaf(1) if gemma else None,
            norm_before_residual=config.norm_before_residual,
        )

    return Eagle3(
        embed_tokens=Embedding(leaf(config.vocab_size, hidden)) if config.own_embedding else None,
        input_norm=norm(count * config.target_hidden_size) if config.norm_before_fc else None,
        fc_norm=tuple(norm(config.target_hidden_size) for _ in config.taps) if config.fc_norm else None,
        fc=Linear(leaf(hidden, count * config.target_hidden_size)),
        layers=tuple(layer(i, spec) for i, spec in enumerate(config.layers)),
        norm=norm(hidden),
        lm_head=Linear(leaf(config.draft_vocab_size, hidden)) if config.own_head else None,
        d2t=leaf(config.draft_vocab_size, dtype=jnp.int32) if config.draft_vocab_size != config.vocab_size else None,
        config=config,
    )


def from_checkpoint(folder: Path | None, config: Mapping[str, Any], target: TargetConfig, dtype: Any) -> Eagle3:
    """The drafter in a checkpoint folder as a tree of ShapeDtypeStructs. Raises ValueError if it cannot be used with the target."""
    keys = ("lm_head.weight",) if folder is None else checkpoint.weight_keys(folder)
    return abstract(Eagle3Config.from_hf(config, target, keys), dtype)


KIND = Kind(
    name="eagle3",
    config_names=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel", "eagle3", GEMMA),
    made=Eagle3,
    from_checkpoint=from_checkpoint,
    released=made_up,
    # SpecForge unrolls seven steps and weighs each 0.8 of the one before.
    objective=Objective(steps=5, decay=0.8, hard=1.0),
    default_config=default_config,
)
