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
from jaxspec.model.config import FULL, Gemma4Config, LayerSpec, refuse_quantised, require
from jaxspec.model.gemma4 import Gemma4
from jaxspec.model.layers import Embedding, GatedMLP, Linear, RMSNorm, Weight, rms, rope, softcap
from jaxspec.model.paged_kv import LayerKV, PagedKV
from jaxspec.model.rows import take_row
from jaxspec.sampling.choice import Sampling, choose
from pallas_kernels.paged_attention import paged_attention

GEMMA = "Gemma4Eagle3Model"
NAMES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel", "eagle3", GEMMA)


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """layers: of each its spec. gemma: layers of Gemma 4's kind, with sandwich norms and layer_scalar, all of which see embedding and
    feature; else Llama's, of which the first does. taps: indices of the target's hidden states. target_hidden_size, num_target_layers:
    of the target that the drafter was made for, the latter None where the config does not say. num_draft_tokens: what it was trained or
    published to guess, None where the config does not say. head_norms: queries and keys are
    normed. norm_before_residual: the first layer adds to the normed feature. norm_before_fc: one norm over all taps; fc_norm: one for
    each. norm_output: what is fed back has passed the final norm (vLLM's meaning). draft_vocab_size: rows of the head; a head of fewer
    rows than the target has tokens comes with d2t. own_head, own_embedding: whether the checkpoint has them; else they are the
    target's. unread: beginnings of the checkpoint's other keys."""

    layers: tuple[LayerSpec, ...]
    taps: tuple[int, ...]
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    eps: float
    num_target_layers: int | None = None
    num_draft_tokens: int | None = None
    gemma: bool = False
    head_norms: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_head: bool = False
    own_embedding: bool = False
    unread: tuple[str, ...] = ()
    final_logit_softcapping: float | None = None
    logit_scale: float = 1.0

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], target: Gemma4Config, keys: Collection[str] = ()) -> Eagle3Config:
        """Reads config.json, as EAGLE, SpecForge, speculators or DeepSpec write it. keys: of the checkpoint's tensors.

        Raises ValueError, naming what was found, for a drafter that this implementation does not have or that leaves open what it reads.
        """
        inner = {**config, **(config.get("transformer_layer_config") or {})}
        gemma, speculators = GEMMA in (config.get("architectures") or ()), "speculators_model_type" in config
        hidden, vocab = int(require(inner, "hidden_size")), int(require(inner, "vocab_size"))
        theirs = int(config.get("target_hidden_size") or hidden)
        own_embedding, own_head = ("embed_tokens.weight" in keys, "lm_head.weight" in keys) if not gemma else (False, False)
        if speculators and hidden == theirs and not config.get("embed_requires_grad"):
            own_embedding = False  # a frozen copy of the target's
        draft_vocab = int(config.get("draft_vocab_size") or vocab)
        for name, own in (("embed_tokens", own_embedding), ("lm_head", own_head)):
            if hidden != theirs and not own:
                raise ValueError(f"the drafter has hidden_size {hidden} and no {name} of its own; this target's has {theirs}")
        if draft_vocab != vocab and not own_head:
            raise ValueError(f"draft_vocab_size is {draft_vocab} of {vocab} tokens, and the checkpoint has no lm_head.weight")
        layers = _gemma_layers(config) if gemma else _plain_layers(inner)
        kept = unread_keys(speculators or gemma, own_head=own_head, own_embedding=own_embedding, own_d2t=draft_vocab != vocab)
        return cls(
            layers=layers,
            taps=_taps(config, target.num_hidden_layers),
            hidden_size=hidden,
            target_hidden_size=theirs,
            vocab_size=vocab,
            draft_vocab_size=draft_vocab,
            eps=layers[0].eps,
            num_target_layers=config.get("num_target_layers"),
            num_draft_tokens=_proposed(config),
            gemma=gemma,
            head_norms=gemma or any(key.endswith("self_attn.q_norm.weight") for key in keys),
            norm_before_residual=not gemma and bool(config.get("norm_before_residual", speculators)),
            norm_before_fc=bool(config.get("norm_before_fc")),
            fc_norm=bool(config.get("fc_norm")),
            norm_output=bool(config.get("norm_output")),
            own_head=own_head,
            own_embedding=own_embedding,
            unread=kept,
            final_logit_softcapping=inner.get("final_logit_softcapping"),
            logit_scale=float(config.get("logit_scale") or 1.0),
        )


def _taps(config: Mapping[str, Any], depth: int) -> tuple[int, ...]:
    """Indices of hidden states. The ids that SpecForge writes into `eagle_config` count layers, unlike those of the same name outside."""
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    named = named_taps(config, {"target_layer_ids": nested})
    return tuple(sorted(set(named or (2, depth // 2, depth - 3))))


def _proposed(config: Mapping[str, Any]) -> int | None:
    """How many tokens a round a speculators config proposes."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return methods[0].get("speculative_tokens")


def _plain_layers(config: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """Layers of Llama's kind, which all see everything before them."""
    kinds, count = config.get("layer_types") or (), int(config.get("num_hidden_layers") or 1)
    if config.get("use_sliding_window") or set(kinds[:count]) - {FULL}:
        raise ValueError(
            f"the drafter's layers have layer_types {list(kinds)} and use_sliding_window {config.get('use_sliding_window')}; "
            f"implemented: {FULL!r} without"
        )
    return (plain_spec(config),) * count


def _gemma_layers(config: Mapping[str, Any]) -> tuple[LayerSpec, ...]:
    """Layers of Gemma 4's kind, of which DeepSpec writes the whole text config."""
    read = Gemma4Config.from_hf({**config, "tie_word_embeddings": True, "num_kv_shared_layers": 0})
    for field in ("num_experts", "per_layer_input", "window"):
        if getattr(read.layers[0], field):
            raise ValueError(f"the drafter's layers have {field} {getattr(read.layers[0], field)}; implemented: none")
    return read.layers


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

    def project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x: [B, T, in] -> queries [B, T, KV, G, D], and K and V as they are stored, [B, T, KV, D]."""
        spec, projected = self.spec, self.qkv_proj(x)
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
        """The layer after attention. [B, T, H] each. implementation: of Gemma's gated product."""
        if self.pre_feedforward_layernorm is None:
            x = residual + attended
            return x + self.mlp(self.post_attention_layernorm(x))
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
class Rows:
    """Rows to run: [B, T]. cache, slots, length ([B] int32): the stored positions 0 .. length - 1. fresh: K and V of each layer, of rows
    after them that are not stored, or None; count: [B] int32, how many real rows there are with the ones to run."""

    positions: jax.Array
    cache: PagedKV
    slots: jax.Array
    length: jax.Array
    fresh: tuple[tuple[jax.Array, jax.Array], ...] | None
    count: jax.Array


@struct.dataclass
class Eagle3:
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

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @property
    def num_draft_tokens(self) -> int | None:
        return self.config.num_draft_tokens

    def bind(self, target: Gemma4Config) -> Eagle3:
        made_for = self.config.target_hidden_size
        if made_for != target.hidden_size:
            raise ValueError(f"the drafter was made for a target of hidden_size {made_for}, this target has {target.hidden_size}")
        check_target(self.config, target)
        return self

    def init(self, slots: int, max_len: int, num_draft_tokens: int) -> Eagle3State:
        dtype = self.fc.weight.dtype
        layers = tuple(dataclasses.replace(spec, k_eq_v=False) for spec in self.config.layers)  # keys are stored whole
        sizes = {"slots": slots, "max_len": max_len, "num_draft_tokens": 0, "page_size": self.page_size}
        return Eagle3State(paged.fixed(layers, **sizes, dtype=dtype), jnp.zeros((slots, self.config.hidden_size), dtype))

    def observe(self, state: Eagle3State, rows: Observed) -> Eagle3State:
        cache = state.cache
        count = jnp.where(rows.slots < cache.slots, rows.committed, 0)
        # Each row takes the next row's token, and the last one the anchor.
        last = jnp.arange(rows.ids.shape[1], dtype=jnp.int32)[None, :] == count[:, None] - 1
        ids = jnp.where(last, rows.anchor[:, None], jnp.roll(rows.ids, -1, axis=1))
        start = rows.positions[:, 0]
        block = Rows(rows.positions, cache, rows.slots, start, None, count)
        x, fresh = self.run(self.embed(rows.model, ids), self.features(rows.taps), block, rows.draft_attention)
        slots = jnp.where(count > 0, rows.slots, cache.slots)
        hidden = take_row(x, jnp.maximum(count - 1, 0))[:, 0]
        cache = paged.write_all(cache, rows.slots, start, count, fresh)
        return Eagle3State(cache, state.hidden.at[slots].set(hidden, mode="drop"))

    def draft(self, state: Eagle3State, target: Target, sampling: Sampling, num_draft_tokens: int) -> tuple[Drafts, Eagle3State]:
        x = jnp.take(state.hidden, target.slots, axis=0, mode="clip")[:, None]
        fresh, steps = None, []
        for k in range(1, num_draft_tokens + 1):
            logits, ids = self.candidates(target.model, x)
            token = choose(logits, target.length[:, None] + k, sampling, ids)
            steps.append((token, logits, ids))
            if k < num_draft_tokens:
                feature = self.norm(x) if self.config.norm_output else x
                count = jnp.full_like(target.length, k)
                row = Rows(target.length[:, None] + k - 1, state.cache, target.slots, target.length, fresh, count)
                x, fresh = self.run(self.embed(target.model, token), feature, row, target.draft_attention)
        return Drafts.joined(steps, target.slots.shape[0]), state

    def run(self, embedded: jax.Array, x: jax.Array, rows: Rows, attention: str) -> tuple[jax.Array, tuple[Any, ...]]:
        """Rows through all layers. embedded: [B, T, h], of each row's next token; x: [B, T, h], its feature. Returns the last layer's
        output [B, T, h] and, for each layer, the fresh K and V with the rows' own behind them."""
        after = []
        for i, layer in enumerate(self.layers):
            pools, table = rows.cache.pages_of(i, rows.slots)
            fresh = None if rows.fresh is None else rows.fresh[i]
            x, keys = _layer(layer, embedded, x, rows.positions, pools, table, rows.length, fresh, rows.count, attention)
            after.append(keys)
        return x, tuple(after)

    def features(self, taps: tuple[jax.Array, ...]) -> jax.Array:
        """What the drafter makes of the target's hidden states. taps: [B, T, H] each -> [B, T, h]."""
        dtype = self.fc.weight.dtype
        parts = [tap.astype(dtype) for tap in taps]
        if self.input_norm is not None:
            parts = [self.input_norm(jnp.concatenate(parts, axis=-1))]
            parts = jnp.split(parts[0], len(taps), axis=-1)
        if self.fc_norm is not None:
            parts = [norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)]
        return self.fc(jnp.concatenate(parts, axis=-1))

    def embed(self, model: Gemma4, ids: jax.Array) -> jax.Array:
        """Embeddings of tokens: the drafter's own, or rows of the target's table. ids: [B, T] int32 -> [B, T, h]."""
        scale = math.sqrt(self.config.hidden_size) if self.config.gemma else 1.0
        table = dataclasses.replace(model.embed_tokens, scale=scale) if self.embed_tokens is None else self.embed_tokens
        return table(ids).astype(self.fc.weight.dtype)

    def candidates(self, model: Gemma4, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Float32 logits of the last layer's outputs, and the token ids that they belong to (None: candidate i is token i).

        x: [B, T, h] -> [B, T, C] each, C the draft vocabulary.
        """
        logits, ids = head(model, self.lm_head, self.d2t, self.norm(x))
        return softcap(logits * jnp.float32(self.config.logit_scale), self.config.final_logit_softcapping), ids


@jax.jit(static_argnames="attention")
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
    attention: str,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer over rows; see `Eagle3.run`."""
    attn = layer.self_attn
    with jax.named_scope("attention"):
        inputs, residual = layer.inputs(embedded, x)
        q, *own = attn.project(inputs, positions)
        k, v = (new.astype(pools.k.dtype) for new in own)
        if fresh is not None:
            k, v = (jnp.concatenate(pair, axis=1) for pair in zip(fresh, (k, v), strict=True))
        heads = paged_attention(q, positions, (pools.k, pools.v), table, length, (k, v), count, scale=attn.scale, implementation=attention)
        attended = attn.o_proj.of_heads(heads)
    with jax.named_scope("feed_forward"):
        return layer.outputs(residual, attended, attention), (k, v)


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


def from_checkpoint(folder: Path, config: Mapping[str, Any], target: Gemma4Config, dtype: Any) -> Eagle3:
    """The drafter in a checkpoint folder as a tree of ShapeDtypeStructs. Raises ValueError if it cannot be used with the target."""
    refuse_quantised(config)
    return abstract(Eagle3Config.from_hf(config, target, checkpoint.read_headers(folder)), dtype)
