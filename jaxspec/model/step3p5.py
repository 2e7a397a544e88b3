"""The Step-3.5 target: hidden states of a block of rows for each sequence, reading and extending a paged cache.

Facts: vLLM 0.33 `step3p5.py`, transformers 5.23 `modeling_step3p7.py`, technical report arXiv 2602.10604. Layers of sliding and full
attention with head counts of their own, a gate for every head, rotation of a part of a head; dense layers, then layers of many small
experts that a router of sigmoids with a bias chooses, beside one that every row uses; a head that is not tied.

In memory two things are otherwise than in a checkpoint. Norms have weights 1 + w, in float32: 1 + w would be rounded in bfloat16. And
where a part of a head rotates, the dims of queries and keys lie as `Step3p5LayerSpec.order` says, so that the pairs that rotate are
(d, d + D / 2).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxspec.checkpoint import layout
from jaxspec.checkpoint.layout import Part
from jaxspec.collectives import TENSOR, Shard, summed
from jaxspec.model import traffic
from jaxspec.model.attention import (
    Heads,
    KVScales,
    Normed,
    attend,
    check_taps,
    empty_cache,
    keys_for,
    keys_of,
    scales_by_layer,
    stored,
    with_own,
)
from jaxspec.model.layer_spec import LayerSpec
from jaxspec.model.layers import Embedding, GatedMLP, Linear, RMSNorm, Weight, head_logits, turned
from jaxspec.model.moe import Experts
from jaxspec.model.paged_kv import PagedKV
from jaxspec.model.rows import Hidden, Keys, Rows, take_row
from jaxspec.model.split import PARTITIONS, KVHeads
from jaxspec.model.step3p5_config import (
    MODULES_TYPES,
    TARGET_TYPES,
    Step3p5Config,
    Step3p5LayerSpec,
    draft_config,
    has_modules,
    modules_config,
    read_modules,
)
from jaxspec.model.target import Family, ModulesConfig, ModulesFamily, Shapes, Wanted, last_row_layer
from jaxspec.trees import nbytes, told, weight_count, weights_of
from pallas_kernels import moe
from pallas_kernels.activation import Activation
from pallas_kernels.add_norm import Addend, add_norm
from pallas_kernels.add_norm.reference import sum_parts
from pallas_kernels.all_reduce import Unsummed
from pallas_kernels.packed import Packed
from pallas_kernels.qkv import Pages, qkv

PAD_TOKEN = 1


@struct.dataclass
class Attention:
    """qkv_proj: [KV, G + 2, D, H], by KV head its G query heads, its key and its value. g_proj: [KV, G, H], the gate of every head.
    o_proj: [H, KV, G, D]. q_norm, k_norm: [D]."""

    qkv_proj: Linear
    g_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm
    spec: Step3p5LayerSpec = struct.field(pytree_node=False)

    sums: ClassVar[tuple[str, ...]] = ("o_proj",)  # see `split.py`
    key_weight: ClassVar[None] = None  # keys are stored whole

    @property
    def kv_heads(self) -> tuple[KVHeads, ...]:
        spec = self.spec
        return KVHeads("qkv_proj", 0, spec, spec.group), KVHeads("g_proj", 0, spec, spec.group), KVHeads("o_proj", 1, spec, spec.group)

    def heads(self, normed: Normed, positions: jax.Array, pages: Pages | None, implementation: str, read_by_kernel: bool) -> Heads:
        """See `AttentionWeights.heads`."""
        spec, parts = self.spec, self.qkv_proj.parts(normed, implementation)
        assert not isinstance(parts, Unsummed)
        weights = *turned(positions, spec.frequencies), self.q_norm.weight, self.k_norm.weight
        settings = {"group": spec.group, "key_dims": spec.head_dim, "eps": spec.eps, "value_norm": False, "dtype": normed.dtype}
        return qkv(parts, *weights, pages, **settings, launch_dependents=read_by_kernel, implementation=implementation)

    def __call__(
        self, normed: jax.Array, positions: jax.Array, keys: Keys, attention: str, row: jax.Array | None = None
    ) -> tuple[jax.Array | Unsummed, Keys]:
        """The output, or parts of it, and the keys that the rows attended to. row: see `attend`."""
        scale = self.spec.head_dim**-0.5
        heads, keys = attend(self, normed, positions, keys, attention, scale, row=row)
        gate = jax.nn.sigmoid(self.g_proj(normed if row is None else take_row(normed, row), dtype=jnp.float32))
        heads = (heads.astype(jnp.float32) * gate[..., None]).astype(heads.dtype)
        return self.o_proj.parts(heads, attention, over=3), keys


@struct.dataclass
class MixtureOfExperts:
    """gate: [E, H]; router_bias: [E] float32, which plays a part in the choice alone."""

    gate: Linear
    router_bias: Weight
    experts: Experts
    spec: Step3p5LayerSpec = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array, shared: GatedMLP, implementation: str) -> Addend:
        """The outputs of the chosen experts and of the shared one, to be added: x: [B, T, H]."""
        rows, experts, down = x.reshape(-1, x.shape[-1]), self.experts, shared.down_proj
        scores = self.gate(rows, dtype=jnp.float32)
        chosen = moe.route(scores, self.router_bias, self.spec.top_k_experts, scale=self.spec.routed_scale, implementation=implementation)
        if experts.axis is None or experts.axis != down.sum_over:
            return (shared.parts(x, implementation), None), (experts.parts(x, *chosen, implementation), None)
        # Each device adds up its own, and the devices add up once.
        own = dataclasses.replace(shared, down_proj=dataclasses.replace(down, sum_over=None))
        own = own.parts(x, implementation, read_by_kernel=False)
        assert not isinstance(own, Unsummed)
        routed = experts.own(rows, *chosen, implementation).reshape(x.shape)
        return summed(sum_parts(own, x) + routed, experts.axis, experts.mail)


@struct.dataclass
class DecoderLayer:
    """One layer. post_attention_layernorm is the norm before the feed-forward. mlp stands alone, or moe and share_expert together."""

    self_attn: Attention
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    mlp: GatedMLP | None
    moe: MixtureOfExperts | None
    share_expert: GatedMLP | None

    def __call__(self, x: jax.Array, positions: jax.Array, keys: Keys, attention: str = "auto") -> tuple[jax.Array, Keys]:
        """See `Block`."""
        x, _, keys = decoder_layer(self, x, self.input_layernorm(x), positions, keys, None, attention)
        return x, keys

    @property
    def experts(self) -> Experts | None:
        return None if self.moe is None else self.moe.experts

    def weights_read(self, rows: int) -> float:
        """See `Block`."""
        return nbytes(self) - traffic.experts_left_out(self.self_attn.spec, self.experts, rows)

    def weights_multiplied(self) -> int:
        """How many weights of matrices a row is multiplied with."""
        spec, experts = self.self_attn.spec, weight_count(self.experts)
        always = sum(weight.size for weight in weights_of(self) if len(weight.shape) > 1) - experts
        return always + experts * spec.top_k_experts // max(spec.num_experts, 1)


# Jitted by itself so that layers with equal specs are traced once; XLA inlines it.
@jax.jit(static_argnames="attention")
def decoder_layer(
    layer: DecoderLayer,
    x: jax.Array,
    normed: jax.Array,
    positions: jax.Array,
    keys: Keys,
    next_weight: jax.Array | None,
    attention: str,
    row: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, Keys]:
    """One layer. x: [B, T, H]; normed: [B, T, H], what input_layernorm makes of it; positions: [B, T]; next_weight: [H], of the norm
    that reads the output, or None. attention: implementation of attention and of the kernels around it. row: [B] int32, the row of each
    sequence that is wanted, of which then x is, [B, 1, H]; its keys have all rows. Returns x, that norm of it (or None), and the keys that
    the layer attended to."""
    add = functools.partial(add_norm, weight=None, eps=layer.post_attention_layernorm.eps, implementation=attention)
    with jax.named_scope(layer.self_attn.spec.kind):
        attended, keys = layer.self_attn(normed, positions, keys, attention, row)
    with jax.named_scope("feed_forward"):
        x, normed = add(x, attended, next_weights=(layer.post_attention_layernorm.weight,))
        if layer.moe is None:
            assert layer.mlp
            out = layer.mlp.parts(normed, attention)
        else:
            assert layer.share_expert
            out = layer.moe(normed, layer.share_expert, attention)
        x, *after = add(x, out, next_weights=() if next_weight is None else (next_weight,))
    return x, after[0] if after else None, keys


@struct.dataclass
class Decoder:
    """The layers, with the table of embeddings before them and the norm behind."""

    embed_tokens: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm


@struct.dataclass
class Step3p5:
    """The target's weights; paths of fields are Hugging Face keys. lm_head: [V, H]."""

    model: Decoder
    lm_head: Linear
    config: Step3p5Config = struct.field(pytree_node=False)
    kv_scales: KVScales = struct.field(pytree_node=False, default=())

    __repr__ = told

    partitions: ClassVar[tuple[tuple[str, PartitionSpec], ...]] = (
        (r"\blm_head\.weight$", PartitionSpec(TENSOR, None)),
        (r"\bg_proj\.weight$", PartitionSpec(TENSOR, None, None)),
        (r"\bshare_expert\.gate_up_proj\.weight$", PartitionSpec(None, TENSOR, None)),
        (r"\bshare_expert\.down_proj\.weight$", PartitionSpec(None, TENSOR)),
        *PARTITIONS,
    )

    def layouts(self, path: str, shapes: Shapes) -> list[list[Part]]:
        """How a checkpoint holds the leaf at a path."""
        return layouts(dict(enumerate(self.config.layers)), path, shapes)

    @property
    def embed_tokens(self) -> Embedding:
        return self.model.embed_tokens

    @property
    def layers(self) -> tuple[DecoderLayer, ...]:
        return self.model.layers

    @property
    def norm(self) -> RMSNorm:
        return self.model.norm

    @property
    def dtype(self) -> Any:
        return self.model.embed_tokens.weight.dtype

    def embed(self, ids: jax.Array, scale: float | jax.Array | None = None) -> jax.Array:
        """Token embeddings, by 1 unless a scale is given. ids: [...] int32 -> [..., H]."""
        table = self.embed_tokens if scale is None else dataclasses.replace(self.embed_tokens, scale=scale)
        return table(ids, self.dtype)

    def feature(self, hidden: jax.Array) -> jax.Array:
        """The last layer's output as it is: module 0 reads it before the final norm (vLLM `Step3p5Model.forward`)."""
        return hidden

    @property
    def shard(self) -> Shard | None:
        """The device's part of the vocabulary, the head's and the embeddings' alike."""
        return self.embed_tokens.shard

    @property
    def head(self) -> tuple[jax.Array | Packed, None]:
        return self.lm_head.weight, None

    def unembed(self, hidden: jax.Array, implementation: str = "xla") -> jax.Array:
        """Logits in float32 of hidden states after the final norm, of the device's part of the vocabulary. [..., H] -> [..., V]."""
        return head_logits(hidden, self.lm_head.weight, implementation)

    @property
    def head_guide(self) -> None:
        """Its head is no token embedding."""
        return None

    def weights_read(self, rows: int) -> float:
        """Bytes of the weights, or of their shapes, that a pass over so many rows reads. Embeddings are only gathered from."""
        others = nbytes(self) - nbytes(self.embed_tokens) - nbytes(self.layers)
        return others + sum(layer.weights_read(rows) for layer in self.layers)

    def weights_multiplied(self) -> tuple[int, tuple[int, ...]]:
        """How many weights of matrices a row is multiplied with: before the layers, and in each of them. The head is not counted."""
        return 0, tuple(layer.weights_multiplied() for layer in self.layers)

    def __call__(
        self, rows: Rows, cache: PagedKV | None, *, taps: tuple[int, ...] = (), wanted: Wanted = "all", attention: str = "auto"
    ) -> tuple[Hidden, PagedKV | None]:
        """See `TargetModel.__call__`."""
        count = self.config.num_hidden_layers
        check_taps(taps, count)
        with jax.named_scope("embed"):
            x = self.embed(rows.ids)
        last = jnp.maximum(rows.count - 1, 0)
        cut = count if wanted == "all" or rows.ids.shape[1] == 1 else last_row_layer(self.config, taps)
        fresh: dict[int, Keys] = {}
        tapped = {0: x}
        normed = self.layers[0].input_layernorm(x)
        next_weights = (*(layer.input_layernorm.weight for layer in self.layers[1:]), self.norm.weight)
        for i, (layer, next_weight) in enumerate(zip(self.layers, next_weights, strict=True)):
            keys, row = keys_for(cache, i, layer.self_attn.spec, rows, read_once=True), last if i == cut else None
            if row is not None:
                x = take_row(x, row)
            if row is not None and wanted == "none":
                _, fresh[i] = with_own(layer.self_attn, normed, rows.positions, keys, attention)
                break
            x, normed, fresh[i] = decoder_layer(layer, x, normed, rows.positions, keys, next_weight, attention, row)
            assert normed is not None
            tapped[i + 1] = x
        if wanted == "last" and cut == count:
            normed = take_row(normed, last)
        if cache is not None:
            cache = stored(cache, rows, fresh, attention)
        return Hidden(normed, tuple(tapped[i] for i in taps), fresh), cache

    def init_cache(self, **settings: Any) -> PagedKV:
        """An empty cache for this target; `settings` are those of `paged_kv.init`."""
        return empty_cache(self.config.layers, self.kv_scales, **settings)

    def with_kv_scales(self, scales: Mapping[int, tuple[float, float]]) -> Step3p5:
        """The model whose caches of float8 hold keys and values divided by these, by layer."""
        return dataclasses.replace(self, kv_scales=scales_by_layer(scales, len(self.layers)))

    def cached_keys(self, cache: PagedKV | None, owner: int, slots: jax.Array, length: jax.Array, count: jax.Array) -> Keys:
        """The cached positions of layer `owner` for these slots, with no fresh rows yet. slots, length, count: [B] int32."""
        return keys_of(cache, owner, slots, length, count)


def abstract(config: Step3p5Config, dtype: Any = jnp.bfloat16) -> Step3p5:
    """The model as a tree of ShapeDtypeStructs: what loading, random init and sharding are maps over."""
    table, head = (jax.ShapeDtypeStruct((config.vocab_size, config.hidden_size), dtype) for _ in range(2))
    layers = tuple(abstract_layer(spec, dtype) for spec in config.layers)
    decoder = Decoder(Embedding(table), layers, abstract_norm(config.hidden_size, config.rms_norm_eps, dtype))
    return Step3p5(decoder, Linear(head), config)


def abstract_norm(width: int, eps: float, dtype: Any) -> RMSNorm:
    """A norm, whose weight is float32 whatever the dtype of others."""
    return RMSNorm(jax.ShapeDtypeStruct((width,), jnp.float32), eps)


def abstract_layer(spec: LayerSpec, dtype: Any) -> DecoderLayer:
    """One layer as a tree of ShapeDtypeStructs."""
    assert isinstance(spec, Step3p5LayerSpec)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def mlp(inner: int) -> GatedMLP:
        return GatedMLP(Linear(leaf(2, inner, hidden)), Linear(leaf(hidden, inner)), Activation("silu", spec.shared_limit))

    norm = functools.partial(abstract_norm, eps=spec.eps, dtype=dtype)
    hidden, kv, group, dim, count, inner = (
        spec.hidden_size, spec.num_kv_heads, spec.group, spec.head_dim, spec.num_experts, spec.moe_intermediate_size,
    )  # fmt: skip
    bias = jax.ShapeDtypeStruct((count,), jnp.float32)
    experts = Experts(leaf(count, 2, inner, hidden), leaf(count, hidden, inner), Activation("silu", spec.limit))
    return DecoderLayer(
        self_attn=Attention(
            qkv_proj=Linear(leaf(kv, group + 2, dim, hidden)),
            g_proj=Linear(leaf(kv, group, hidden)),
            o_proj=Linear(leaf(hidden, kv, group, dim)),
            q_norm=norm(dim),
            k_norm=norm(dim),
            spec=spec,
        ),
        input_layernorm=norm(hidden),
        post_attention_layernorm=norm(hidden),
        mlp=None if count else mlp(spec.intermediate_size),
        moe=MixtureOfExperts(Linear(leaf(count, hidden)), bias, experts, spec) if count else None,
        share_expert=mlp(spec.shared_intermediate_size) if count else None,
    )


def layouts(layers: Mapping[int, LayerSpec], path: str, shapes: Shapes) -> list[list[Part]]:
    """How a checkpoint holds the leaf at a path: see `checkpoint.layout.layouts`. layers: by their index in the checkpoint. What MTP
    modules have beside a layer's tensors may stand with "transformer." before it, as StepFun writes it."""
    shape, (stem, _, name) = shapes[path], path.rpartition("self_attn.")
    index = path.partition("layers.")[2].partition(".")[0]
    spec = layers[int(index)] if index else None
    order = spec.order if isinstance(spec, Step3p5LayerSpec) else None
    if name == "g_proj.weight":  # [KV, G, H]
        return [[Part(path, (math.prod(shape[:-1]), shape[-1]))]]
    if name == "qkv_proj.weight" and order is not None:
        return [[_turned(part, order) for part in parts] for parts in layout.layouts(path, shapes)]
    if name in ("q_norm.weight", "k_norm.weight"):
        return [[Part(path, shape, () if order is None else (order,), plus=1.0)]]
    if path.endswith("norm.weight"):
        parts = [Part(path, shape, plus=1.0)]
    elif path.endswith("moe.experts.gate_up_proj"):  # [E, 2, I, H]
        stem, (count, _, inner, hidden) = path.removesuffix("experts.gate_up_proj"), shape
        return [[Part(f"{stem}{name}.weight", (count, inner, hidden), (slice(None), i)) for i, name in enumerate(("gate_proj", "up_proj"))]]
    elif path.endswith("moe.experts.down_proj"):  # [E, H, I]
        return [[Part(f"{path.removesuffix('experts.down_proj')}down_proj.weight", shape)]]
    else:
        return layout.layouts(path, shapes)
    return [parts]


def _turned(part: Part, order: tuple[int, ...]) -> Part:
    """A part of a fused projection whose heads have their dims in this order; values keep theirs."""
    return part if part.key.endswith("v_proj.weight") else dataclasses.replace(part, index=(*part.index, order))


def module_layouts(layers: Mapping[int, LayerSpec], path: str, shapes: Shapes) -> list[list[Part]]:
    """See `ModulesFamily.layouts`. A module's own head and its norm have "transformer." before them in StepFun's files."""
    ways = layout.renamed(layouts(layers, path, shapes), ".mtp_block.", ".")
    return [*layout.renamed(ways, ".shared_head.", ".transformer.shared_head."), *ways] if ".shared_head." in path else ways


def unread_by_target(config: Step3p5Config) -> tuple[str, ...]:
    """The MTP layers, however many the file has."""
    return tuple(f"model.layers.{config.num_hidden_layers + i}." for i in range(max(len(config.modules), 1)))


def unread_by_modules(config: ModulesConfig) -> tuple[str, ...]:
    """What is the target's in its own checkpoint."""
    layers = (f"model.layers.{i}." for i in range(config.num_hidden_layers))
    return "model.embed_tokens.", "model.norm.", "lm_head.", *layers


FAMILY = Family(
    model_types=TARGET_TYPES,
    config=Step3p5Config,
    model=Step3p5,
    read=Step3p5Config.from_hf,
    abstract=abstract,
    prefixes=("",),
    unread=unread_by_target,
    draft_config=draft_config,
    fresh=lambda tree: tree,
    mask_token=PAD_TOKEN,
    scales_embeddings=False,
    modules=ModulesFamily(
        model_types=MODULES_TYPES,
        within=has_modules,
        read=read_modules,
        block=abstract_layer,
        norm=abstract_norm,
        layouts=module_layouts,
        unread=unread_by_modules,
        default_config=modules_config,
        released=lambda raw: raw,
    ),
)
