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

from jaxspec import cache as paged
from jaxspec import checkpoint
from jaxspec.cache import LayerKV, PagedKV
from jaxspec.config import FULL, SLIDING, Gemma4Config, LayerSpec, refuse_quantised
from jaxspec.drafters.base import Drafts, Observed, Target
from jaxspec.gemma4 import Gemma4
from jaxspec.layers import Linear, RMSNorm, Weight, rope, softcap
from jaxspec.sampling import Sampling, choose
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
    """Where a mask token's id may be, the first that is there counts."""
    return [("mask_token_id", dflash), *((f, config) for f in ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id"))]


def _taps(config: Mapping[str, Any], dflash: Mapping[str, Any], layers: int, depth: int) -> tuple[int, ...]:
    """Indices of hidden states, in the order in which the drafter's fc takes them."""
    indices = named_taps(dflash, config)
    if indices is not None:
        return indices
    made_for = config.get("num_target_layers")
    if made_for is None:
        raise ValueError(f"config.json has neither target_layer_ids nor num_target_layers, which this target's {depth} must equal")
    # As many as the drafter has layers, evenly from the second layer to the fourth from the end.
    ids = [made_for // 2] if layers == 1 else [round(1 + i * (made_for - 4) / (layers - 1)) for i in range(layers)]
    return tuple(i + 1 for i in ids)


def named_taps(*configs: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The indices of hidden states that (parts of) a config name, None where they name none. vLLM and speculators take `aux` ids as
    such; `target_layer_ids` count layers, whose outputs are one further on. Raises ValueError if two of them say different things."""
    fields = {"eagle_aux_hidden_state_layer_ids": 0, "aux_hidden_state_layer_ids": 0, "target_layer_ids": 1}
    found = [(field, config[field], offset) for config in configs for field, offset in fields.items() if config.get(field)]
    named = {tuple(int(i) + offset for i in ids) for _, ids, offset in found}
    if len(named) > 1:
        listed = ", ".join(f"{field} {list(ids)}" for field, ids, _ in found)
        raise ValueError(f"config.json names different layers: {listed}; expected target_layer_ids one below the others, or one of them")
    return next(iter(named), None)


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
    explicit = next((c for c in (config.get("is_causal"), dflash.get("causal")) if c is not None), None)
    both_ways = config.get("sliding_window_non_causal", False)
    causal = tuple(bool(explicit) if explicit is not None else kind == SLIDING and not both_ways for kind in kinds)
    if dflash.get("use_swa") and SLIDING not in kinds:
        kinds = [SLIDING] * count
    window = dflash.get("swa_window_size") or inner.get("sliding_window")
    if SLIDING in kinds and not window:
        raise ValueError(f"layer_types has {list(kinds).count(SLIDING)} sliding layers, and sliding_window is {window!r}")
    return tuple(plain_spec(inner, window if kind == SLIDING else None, rope_theta=1e6) for kind in kinds), causal


def plain_spec(config: Mapping[str, Any], window: int | None = None, *, rope_theta: float = 1e4) -> LayerSpec:
    """A decoder layer of Llama's or Qwen3's kind. rope_theta: where the config names none.

    Raises ValueError for what such a layer here does not have.
    """
    expect(config, "hidden_act", ("silu",))
    expect(config, "attention_bias", (False,))
    expect(config, "mlp_bias", (False,))
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    by_layer = any(isinstance(value, Mapping) for value in scaling.values())
    kind, part = scaling.get("rope_type", scaling.get("type", "default")), scaling.get("partial_rotary_factor", 1)
    if kind != "default" or part != 1 or by_layer:
        raise ValueError(f"the drafter's RoPE is {dict(scaling)}; implemented: rope_type 'default' over whole heads")
    heads = int(require(config, "num_attention_heads"))
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or config["hidden_size"] // heads)
    if heads % kv_heads or head_dim % 2:
        raise ValueError(
            f"the drafter has {heads} query heads and {kv_heads} KV heads of head_dim {head_dim}; the first must be a multiple of the "
            "second, and head_dim even"
        )
    return LayerSpec(
        kind=FULL if window is None else SLIDING,
        window=window,
        hidden_size=int(config["hidden_size"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rope_theta=float(scaling.get("rope_theta") or config.get("rope_theta") or rope_theta),
        rotary_angles=head_dim // 2,
        k_eq_v=False,
        kv_source=None,
        intermediate_size=int(require(config, "intermediate_size")),
        num_experts=0,
        top_k_experts=0,
        moe_intermediate_size=0,
        per_layer_input=0,
        eps=float(config.get("rms_norm_eps", 1e-6)),
    )


def require(config: Mapping[str, Any], field: str) -> Any:
    if config.get(field) is None:
        raise ValueError(f"config.json lacks {field!r}")
    return config[field]


def expect(config: Mapping[str, Any], field: str, allowed: tuple[Any, ...]) -> None:
    if config.get(field, allowed[0]) not in allowed:
        raise ValueError(f"config.json has {field}={config[field]!r}; implemented: {', '.join(map(repr, allowed))}")


def check_target(config: Any, target: Gemma4Config) -> None:
    """Raises ValueError if a drafter's config was made for a target of another depth or vocabulary."""
    made_for, depth = config.num_target_layers, target.num_hidden_layers
    if made_for is not None and made_for != depth:
        raise ValueError(f"the drafter was made for a target of {made_for} layers (num_target_layers), this target has {depth}")
    if config.vocab_size != target.vocab_size:
        raise ValueError(f"the drafter has vocab_size {config.vocab_size}, this target has {target.vocab_size}")


def unread_keys(speculators: bool, *, own_head: bool, own_embedding: bool, own_d2t: bool) -> tuple[str, ...]:
    """Beginnings of a checkpoint's keys that nothing reads: training's tables and, from speculators, copies of the target's weights."""
    keys = {"t2d": False, "d2t": own_d2t}
    if speculators:
        keys |= {"verifier_": False, "embed_tokens.": own_embedding, "lm_head.": own_head}
    return tuple(key for key, own in keys.items() if not own)


@struct.dataclass
class SiluMLP:
    """down(silu(gate x) * up x). gate_up_proj: [2, I, H], down_proj: [H, I]."""

    gate_up_proj: Linear
    down_proj: Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = self.gate_up_proj(x)
        return self.down_proj(jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :])


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
        cache = state.cache
        count = jnp.where(rows.slots < cache.slots, rows.committed, 0)
        pools = []
        for layer, pool, keys in zip(self.layers, cache.layers, self.context(rows.taps, rows.positions), strict=True):
            assert pool is not None
            table = jnp.take(cache.tables[layer.self_attn.spec.kind], rows.slots, axis=0, mode="clip")
            pools.append(paged.write(pool, table, rows.positions[:, 0], count, *keys))
        return DFlashState(dataclasses.replace(cache, layers=tuple(pools)))

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
        for i, (layer, pool) in enumerate(zip(self.layers, state.cache.layers, strict=True)):
            assert pool is not None
            table = jnp.take(state.cache.tables[layer.self_attn.spec.kind], target.slots, axis=0, mode="clip")
            kv_proj = Linear(jax.lax.index_in_dim(self.kv_proj.weight, i, keepdims=False))
            x = _layer(layer, kv_proj, x, positions, pool, table, target.length, self.config.causal[i], target.draft_attention)
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


def head(model: Gemma4, lm_head: Linear | None, d2t: jax.Array | None, out: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Float32 logits from a drafter's own head or the target's, and the candidates' token ids, i + d2t[i], where a head has d2t."""
    linear = Linear(model.embed_tokens.weight) if lm_head is None else lm_head
    logits = linear(out.astype(linear.weight.dtype), dtype=jnp.float32)
    if d2t is None:
        return logits, None
    return logits, jnp.broadcast_to((d2t + jnp.arange(d2t.shape[0], dtype=jnp.int32))[None, None, :], logits.shape)


@jax.jit(static_argnames=("causal", "attention"))
def _layer(
    layer: DFlashLayer,
    kv_proj: Linear,
    x: jax.Array,
    positions: jax.Array,
    pool: LayerKV,
    table: jax.Array,
    length: jax.Array,
    causal: bool,
    attention: str,
) -> jax.Array:
    """One layer over a block. x: [B, T, h]; positions: [B, T]; kv_proj: [2, KV, D, h]; pool, table, length: the cached context."""
    attn, spec = layer.self_attn, layer.self_attn.spec
    with jax.named_scope(spec.kind):
        normed = layer.input_layernorm(x)
        q = attn.rotated(attn.q_norm(attn.q_proj(normed)), positions)
        # Apart from the queries' product: XLA would merge the two, and copy this layer's part of kv_proj to do so.
        k, v = attn.keys_values(kv_proj(jax.lax.optimization_barrier(normed)), positions)
        heads = paged_attention(
            q,
            positions,
            (pool.k, pool.v),
            table,
            length,
            (k.astype(pool.k.dtype), v.astype(pool.v.dtype)),
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
