"""The Gemma 4 target: hidden states of a block of rows for each sequence, reading and extending a paged cache.

Facts: transformers `modeling_gemma4.py` 5.23, vLLM `gemma4.py`, google-deepmind/gemma. The text path of the whole family:
sliding and full layers with their own head_dim and KV heads, K = V projections, proportional RoPE, per-layer embeddings,
layers that share KV, mixture of experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from jaxspec.checkpoint import layout
from jaxspec.collectives import Shard
from jaxspec.model import gemma4_modules
from jaxspec.model.attention import KVScales, check_taps, empty_cache, keys_for, keys_of, scales_by_layer, stored, with_own
from jaxspec.model.gemma4_config import TARGET_TYPES, Gemma4Config
from jaxspec.model.gemma4_fresh import MASK_TOKEN, draft_config, with_query_norms
from jaxspec.model.gemma4_layer import DecoderLayer, PerLayerInput, abstract_layer, decoder_layer, next_weights
from jaxspec.model.head_guides import head_bytes
from jaxspec.model.layer_spec import LayerSpec
from jaxspec.model.layers import Embedding, Linear, RMSNorm, head_logits, softcap, times
from jaxspec.model.paged_kv import PagedKV
from jaxspec.model.rows import Hidden, Keys, Rows, take_row
from jaxspec.model.split import PARTITIONS
from jaxspec.model.target import Family, ModulesFamily, Shapes, Wanted, last_row_layer
from jaxspec.trees import nbytes, told, weight_count, weights_of
from pallas_kernels.lm_head import Guide
from pallas_kernels.packed import Packed

CHECKPOINT_PREFIXES = ("model.language_model.", "model.")  # conditional generation; text only
# The image and audio parts of a target's checkpoint, which the text path does without.
_PARTS = ("vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder.")
TOWERS = (*(f"model.{part}" for part in _PARTS), *_PARTS)  # the latter of a model that was saved without its head


@struct.dataclass
class Gemma4:
    """The target's weights; the path of a field is its Hugging Face key without the `model.` prefix. The head is tied to embed_tokens."""

    embed_tokens: Embedding
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    embed_tokens_per_layer: Embedding | None
    per_layer_model_projection: Linear | None
    per_layer_projection_norm: RMSNorm | None
    config: Gemma4Config = struct.field(pytree_node=False)
    kv_scales: KVScales = struct.field(pytree_node=False, default=())

    __repr__ = told

    partitions: ClassVar[tuple[tuple[str, PartitionSpec], ...]] = PARTITIONS

    @property
    def dtype(self) -> Any:
        return self.norm.weight.dtype

    def embed(self, ids: jax.Array, scale: float | jax.Array | None = None) -> jax.Array:
        """Token embeddings by a scale, the model's own by default. ids: [...] int32 -> [..., H]."""
        table = self.embed_tokens if scale is None else dataclasses.replace(self.embed_tokens, scale=scale)
        return table(ids, self.dtype)

    def feature(self, hidden: jax.Array) -> jax.Array:
        """The last layer's output after the final norm."""
        return self.norm(hidden)

    @property
    def shard(self) -> Shard | None:
        """The device's part of the vocabulary: see `Embedding.shard`."""
        return self.embed_tokens.shard

    @property
    def head(self) -> tuple[jax.Array | Packed, float | None]:
        """What `unembed` makes logits with: the head's weight [V, H], or the device's part of it, and the cap of the logits or None."""
        return self.embed_tokens.weight, self.config.final_logit_softcapping

    @property
    def head_guide(self) -> Guide | None:
        """The head's guide, or None."""
        return self.embed_tokens.guide

    def with_head_guide(self) -> Gemma4:
        """The same with a guide for its head: see `head_guides`."""
        return dataclasses.replace(self, embed_tokens=self.embed_tokens.with_guide())

    def unembed(self, hidden: jax.Array, implementation: str = "xla") -> jax.Array:
        """Soft-capped logits in float32 of hidden states after the final norm, of the device's part of the vocabulary.
        [..., H] -> [..., V]. implementation: of a packed head's product, for a step of decoding; only XLA's has a gradient."""
        weight, cap = self.head
        return softcap(head_logits(hidden, weight, implementation), cap)

    def weights_read(self, rows: int) -> float:
        """Bytes of the weights, or of their shapes, that a pass over so many rows reads. The tied embedding counts as the head;
        per-layer embeddings are only gathered from."""
        others = nbytes(self) - nbytes((self.embed_tokens, self.embed_tokens_per_layer, self.layers))
        return others + head_bytes(self, rows) + sum(layer.weights_read(rows) for layer in self.layers)

    def weights_multiplied(self) -> tuple[int, tuple[int, ...]]:
        """How many weights of matrices a row is multiplied with: before the layers, and in each of them. The head is not counted."""

        def of(layer: DecoderLayer) -> int:
            spec, experts = layer.self_attn.spec, weight_count(layer.experts)
            always = sum(weight.size for weight in weights_of(layer) if len(weight.shape) > 1) - experts
            return always + experts * spec.top_k_experts // max(spec.num_experts, 1)

        projection = self.per_layer_model_projection
        return 0 if projection is None else projection.weight.size, tuple(map(of, self.layers))

    def per_layer_inputs(self, ids: jax.Array, embedded: jax.Array, implementation: str = "xla") -> jax.Array | None:
        """Per-layer embeddings of every row: [B, T, layers, P], or None where the model has none. implementation: see `Linear`."""
        if self.embed_tokens_per_layer is None:
            return None
        assert self.per_layer_model_projection and self.per_layer_projection_norm
        shape = (*ids.shape, self.config.num_hidden_layers, self.config.hidden_size_per_layer_input)
        context = times(self.per_layer_model_projection(embedded, implementation=implementation), self.config.hidden_size**-0.5)
        context = self.per_layer_projection_norm(context.reshape(shape))
        return times(context + self.embed_tokens_per_layer(ids, context.dtype).reshape(shape), 2.0**-0.5)

    def __call__(
        self, rows: Rows, cache: PagedKV | None, *, taps: tuple[int, ...] = (), wanted: Wanted = "all", attention: str = "auto"
    ) -> tuple[Hidden, PagedKV | None]:
        """Runs a block of rows and stores their K and V. A row sees its sequence's cached positions and the rows before it.

        cache: None runs the rows as whole sequences from position `start` (0, as a rule) and stores nothing. taps: indices of
        hidden states to return. wanted: of which rows the hidden state is: for "last", layers run that row alone once all K and V are there
        (unless a tap lies above the layer that makes the last of them), and for "none" they are left out. attention: implementation of
        `decoder_layer`'s kernels.
        """
        config = self.config
        check_taps(taps, config.num_hidden_layers)
        with jax.named_scope("embed"):
            ids, positions, last = rows.ids, rows.positions, jnp.maximum(rows.count - 1, 0)
            x, through = self.embed(ids), None  # up to which position a row sees keys of sliding layers, if not its own
            if rows.inserted is not None:
                among, inserted = rows.inserted.at(positions)
                x = jnp.where(among[:, :, None], inserted.astype(x.dtype), x)
                ids = jnp.where(among, config.pad_token_id or 0, ids)  # per-layer embeddings do not know the token of such a row
                if config.use_bidirectional_attention == "vision":
                    through = rows.inserted.through(positions)
            per_layer = self.per_layer_inputs(ids, x, attention)
        cut = config.num_hidden_layers if wanted == "all" or rows.ids.shape[1] == 1 else last_row_layer(config, taps)
        shared = {layer.kv_source for layer in config.layers}
        fresh: dict[int, Keys] = {}
        tapped: dict[int, jax.Array] = {}
        normed = self.layers[0].input_layernorm(x)
        for i, (layer, next_weight) in enumerate(zip(self.layers, next_weights(self.layers, self.norm), strict=True)):
            if i in taps:
                tapped[i] = x
            if i == cut:
                x = take_row(x, last)
                per_layer = None if per_layer is None else take_row(per_layer, last)
                if through is not None:  # an image is among the rows as a whole: the last of them sees none behind it
                    through, fresh = None, {source: dataclasses.replace(keys, through=None) for source, keys in fresh.items()}
            spec = layer.self_attn.spec
            source = i if spec.kv_source is None else spec.kv_source
            inputs = None if per_layer is None else PerLayerInput(per_layer, jnp.asarray(i, jnp.int32))
            if source in fresh:
                keys = fresh[source]
            else:
                weight, once = self.layers[source].self_attn.key_weight, source not in shared
                ahead = None if spec.window is None else through
                keys = keys_for(cache, source, spec, rows, weight, read_once=once, through=ahead)
            if i == cut and wanted == "none":
                _, fresh[source] = with_own(layer.self_attn, normed, positions, keys, attention)
                break
            goes_on = i + 1 < len(self.layers) and i + 1 not in (cut, *taps)  # into the next layer alone
            read_by_kernel = goes_on and self.layers[i + 1].enters_kernel(x, attention)
            if goes_on:
                next_weight = self.layers[i + 1].self_attn.qkv_proj.norm(next_weight, x, attention)
            others = inputs, next_weight, attention, read_by_kernel, last if i == cut else None
            x, normed, fresh[source] = decoder_layer(layer, x, normed, positions, keys, *others)
            if i == cut:
                positions = take_row(positions, last)
        if config.num_hidden_layers in taps:
            tapped[config.num_hidden_layers] = x
        if wanted == "last" and cut == config.num_hidden_layers:
            normed = take_row(normed, last)
        if cache is not None:
            cache = stored(cache, rows, fresh, attention)
        return Hidden(normed, tuple(tapped[i] for i in taps), fresh), cache

    def init_cache(self, **settings: Any) -> PagedKV:
        """An empty cache for this target; `settings` are those of `paged_kv.init`."""
        return empty_cache(self.config.layers, self.kv_scales, **settings)

    def with_kv_scales(self, scales: Mapping[int, tuple[float, float]]) -> Gemma4:
        """The model whose caches of float8 hold keys and values divided by these, by layer."""
        return dataclasses.replace(self, kv_scales=scales_by_layer(scales, len(self.layers)))

    def cached_keys(self, cache: PagedKV | None, owner: int, slots: jax.Array, length: jax.Array, count: jax.Array) -> Keys:
        """The cached positions of layer `owner` for these slots, with no fresh rows yet. slots, length, count: [B] int32."""
        return keys_of(cache, owner, slots, length, count, self.layers[owner].self_attn.key_weight)


def abstract(config: Gemma4Config, dtype: Any = jnp.bfloat16) -> Gemma4:
    """The model as a tree of ShapeDtypeStructs: what loading, random init and sharding are maps over."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    hidden, ple, count = config.hidden_size, config.hidden_size_per_layer_input, config.num_hidden_layers
    return Gemma4(
        embed_tokens=Embedding(leaf(config.vocab_size, hidden), hidden**0.5),
        layers=tuple(abstract_layer(spec, dtype) for spec in config.layers),
        norm=RMSNorm(leaf(hidden), config.rms_norm_eps),
        embed_tokens_per_layer=Embedding(leaf(config.vocab_size_per_layer_input, count * ple), ple**0.5) if ple else None,
        per_layer_model_projection=Linear(leaf(count * ple, hidden)) if ple else None,
        per_layer_projection_norm=RMSNorm(leaf(ple), config.rms_norm_eps) if ple else None,
        config=config,
    )


def init_cache(config: Gemma4Config, **settings: Any) -> PagedKV:
    """An empty cache for a target of this config; `settings` are those of `paged_kv.init`."""
    return empty_cache(config.layers, (), **settings)


def _module_norm(width: int, eps: float, dtype: Any) -> RMSNorm:
    return RMSNorm(jax.ShapeDtypeStruct((width,), dtype), eps)


def _module_layouts(layers: Mapping[int, LayerSpec], path: str, shapes: Shapes) -> list[list[layout.Part]]:
    """The tensors of a module's decoder layer lie beside its own."""
    return layout.renamed(layout.layouts(path, shapes), ".mtp_block.", ".")


FAMILY = Family(
    model_types=TARGET_TYPES,
    config=Gemma4Config,
    model=Gemma4,
    read=Gemma4Config.from_hf,
    abstract=abstract,
    prefixes=CHECKPOINT_PREFIXES,
    unread=lambda config: TOWERS,
    draft_config=draft_config,
    fresh=with_query_norms,
    mask_token=MASK_TOKEN,
    scales_embeddings=True,
    modules=ModulesFamily(
        model_types=(gemma4_modules.MODEL_TYPE,),
        within=lambda config: False,
        read=gemma4_modules.read_modules,
        block=abstract_layer,
        norm=_module_norm,
        layouts=_module_layouts,
        unread=lambda config: (),
        default_config=gemma4_modules.default_config,
        released=gemma4_modules.made_up,
    ),
)
