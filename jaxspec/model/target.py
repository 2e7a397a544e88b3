"""What a target is: the model that decides every token. Whatever works with targets asks of one what stands here, and no more.

A family of models is a file like `gemma4.py`: a config, a model, and a `Family` row, which `families.py` lists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Protocol, Self

import jax
from jax.sharding import PartitionSpec

from jaxspec.checkpoint.layout import Part
from jaxspec.collectives import Shard
from jaxspec.model.layer_spec import LayerSpec
from jaxspec.model.layers import Embedding, RMSNorm
from jaxspec.model.paged_kv import PagedKV
from jaxspec.model.rows import Hidden, Keys, Rows
from pallas_kernels.lm_head import Guide
from pallas_kernels.packed import Packed


class TargetConfig(Protocol):
    """A target's config.json as far as others than its family read it. Fields are named as Hugging Face names them. Hashable."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int:
        """H, the width of hidden states and embeddings."""
        ...

    @property
    def intermediate_size(self) -> int:
        """The inner width of a layer's MLP; layers may differ, see `layers`."""
        ...

    @property
    def num_hidden_layers(self) -> int:
        """How many layers; hidden states are numbered 0 .. num_hidden_layers."""
        ...

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """What each layer is. Cache, sharding, memory plan and drafters are made after it."""
        ...

    @property
    def max_position_embeddings(self) -> int:
        """The longest sequence, in tokens."""
        ...

    @property
    def eos_token_id(self) -> tuple[int, ...]:
        """Ids that end a text where the generation config names none."""
        ...

    @property
    def dtype(self) -> str:
        """The name of the checkpoint's dtype, such as "bfloat16"."""
        ...

    @property
    def num_attention_heads(self) -> int:
        """Query heads; layers may differ, see `layers`. So may the next three: they are what a fresh drafter's config takes over."""
        ...

    @property
    def num_key_value_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def layer_types(self) -> tuple[str, ...]: ...

    @property
    def rms_norm_eps(self) -> float: ...

    @property
    def final_logit_softcapping(self) -> float | None:
        """The cap of logits, None where there is none."""
        ...

    @property
    def first_shared_layer(self) -> int:
        """The first layer that reads another layer's K and V; num_hidden_layers if none does."""
        ...

    @property
    def kv_owners(self) -> tuple[int, ...]:
        """The layers that own K and V, of which there is at least one."""
        ...

    def last_owner(self, kind: str) -> int | None:
        """The last layer of a kind (`LayerSpec.kind`) that owns K and V, or None: what a drafter of that kind of layer may read."""
        ...


Wanted = Literal["all", "last", "none"]  # of a sequence's real rows


def last_row_layer(config: TargetConfig, taps: tuple[int, ...]) -> int:
    """The layer whose rows' K and V are the last that are computed: where of hidden states the last row's alone is wanted, only that row
    goes on from there. num_hidden_layers if one of the taps lies above the layer's input."""
    layer = config.first_shared_layer - 1
    return layer if max(taps, default=0) <= layer else config.num_hidden_layers


class TargetModel(Protocol):
    """A target's weights: an immutable pytree, made of arrays, ShapeDtypeStructs or shardings.

    Paths of leaves are the checkpoint's keys without a prefix, but for the fused matrices of `checkpoint.layout`; by them
    `sharding.specs` says where each lies. Inside `shard_map` the weights are a device's part.
    """

    # Where weights lie on a mesh: see `split`.
    partitions: ClassVar[tuple[tuple[str, PartitionSpec], ...]]

    @property
    def config(self) -> TargetConfig: ...

    @property
    def dtype(self) -> Any:
        """Of the float weights; by default the cache has it too."""
        ...

    @property
    def embed_tokens(self) -> Embedding:
        """The table of token embeddings [V, H], float or packed."""
        ...

    @property
    def layers(self) -> tuple[Any, ...]:
        """The weights of each layer."""
        ...

    @property
    def norm(self) -> RMSNorm:
        """The norm before the head."""
        ...

    @property
    def head(self) -> tuple[jax.Array | Packed, float | None]:
        """What `unembed` makes logits with: the weight [V, H], or the device's part of it, and the cap of the logits, or None."""
        ...

    @property
    def head_guide(self) -> Guide | None:
        """The guide of the head's weight, or None: see `head_guides`."""
        ...

    def feature(self, hidden: jax.Array) -> jax.Array:
        """What an MTP module reads of the last layer's output, which is tap num_hidden_layers. [..., H] -> [..., H]."""
        ...

    @property
    def shard(self) -> Shard | None:
        """The device's part of the vocabulary, None where it has all of it."""
        ...

    def weights_read(self, rows: int) -> float:
        """Bytes of the weights, or of their shapes, that a pass over so many rows reads."""
        ...

    def weights_multiplied(self) -> tuple[int, tuple[int, ...]]:
        """How many weights of matrices a row is multiplied with: before the layers, and in each of them. The head is not counted."""
        ...

    def embed(self, ids: jax.Array, scale: float | jax.Array | None = None) -> jax.Array:
        """Token embeddings as the first layer reads them: tap 0. ids: [...] int32 -> [..., H], in `dtype`. scale: what the table's rows
        are multiplied by instead, for a drafter without a table of its own."""
        ...

    def unembed(self, hidden: jax.Array, implementation: str = "xla") -> jax.Array:
        """Logits of hidden states after `norm`, capped, float32, of the device's part of the vocabulary. [..., H] -> [..., V].

        implementation: of a packed head's product, for a step of decoding; only XLA's has a gradient."""
        ...

    def init_cache(
        self, *, slots: int, max_len: int, num_draft_tokens: int, page_size: int = 64, dtype: Any, full_pages: int | None = None
    ) -> PagedKV:
        """An empty cache for the layers that own K and V; the arguments are those of `paged_kv.init`."""
        ...

    def cached_keys(self, cache: PagedKV | None, owner: int, slots: jax.Array, length: jax.Array, count: jax.Array) -> Keys:
        """The first `length` cached positions of layer `owner`, for a drafter that attends to them. slots, length, count: [B] int32."""
        ...

    def with_kv_scales(self, scales: Mapping[int, tuple[float, float]]) -> Self:
        """The model whose caches of float8 hold keys and values divided by these, by layer; those of other layers are held as they are."""
        ...

    def __call__(
        self, rows: Rows, cache: PagedKV | None, *, taps: tuple[int, ...] = (), wanted: Wanted = "all", attention: str = "auto"
    ) -> tuple[Hidden, PagedKV | None]:
        """Runs B blocks of T rows, and stores their K and V in the cache.

        A row sees its sequence's cached positions and the rows before it, or those of `Rows.tree`, which are not stored: the caller
        stores a path of `Hidden.keys`, with `attention.store_path`. cache: None runs whole sequences and stores nothing. taps:
        indices of hidden states to return, 0 .. num_hidden_layers; ValueError for others. wanted: of which rows
        `Hidden.hidden` is returned; for "none" it may be anything. attention: the implementation of attention and the kernels around it.
        """
        ...


class Block(Protocol):
    """The weights of a decoder layer that stands by itself, as that of an MTP module: a pytree. It owns its K and V."""

    @property
    def self_attn(self) -> Any:
        """Its attention, with `spec` (a LayerSpec) and `key_weight` (see `Keys`)."""
        ...

    def weights_read(self, rows: int) -> float:
        """Bytes of the weights, or of their shapes, that a pass over so many rows reads."""
        ...

    def __call__(self, x: jax.Array, positions: jax.Array, keys: Keys, attention: str = "auto") -> tuple[jax.Array, Keys]:
        """x: [B, T, H]; positions: [B, T] int32; keys: those before the rows; attention: the implementation of attention and the kernels
        around it. Returns the layer's output, [B, T, H], and the keys with the rows' own."""
        ...


@dataclasses.dataclass(frozen=True)
class ModulesConfig:
    """MTP modules: what they were made for, and a LayerSpec for each. num_hidden_layers: the target's. model_type: what the config.json
    named, by which `families.family_of_modules` finds them."""

    layers: tuple[LayerSpec, ...]
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    eps: float
    final_logit_softcapping: float | None
    model_type: str


# Shapes of all leaves of a tree, by path.
Shapes = Mapping[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class ModulesFamily:
    """MTP modules made of a family's decoder layers: see `drafters.mtp_modules`."""

    # What the config.json of modules alone names as `model_type`.
    model_types: tuple[str, ...]
    # Whether a target's own config.json tells of modules, which then lie in its checkpoint.
    within: Callable[[Mapping[str, Any]], bool]
    # From a config.json to the config. Raises ValueError for what the family does not have.
    read: Callable[[Mapping[str, Any]], ModulesConfig]
    # (spec, dtype) -> a module's decoder layer as a tree of ShapeDtypeStructs.
    block: Callable[[LayerSpec, Any], Block]
    # (width, eps, dtype) -> the norms of modules: of [width].
    norm: Callable[[int, float, Any], RMSNorm]
    # (the modules' specs by their index in the checkpoint, path of a leaf, shapes) -> how a checkpoint holds the leaf, whose path has
    # "mtp_block." before the layer's tensors: see `checkpoint.layout`.
    layouts: Callable[[Mapping[int, LayerSpec], str, Shapes], list[list[Part]]]
    # Beginnings of keys of a target's checkpoint that are not the modules'.
    unread: Callable[[ModulesConfig], tuple[str, ...]]
    # (a target's config.json, its config, how many) -> config.json of fresh modules.
    default_config: Callable[[Mapping[str, Any], Any, int], dict[str, Any]]
    # A released target's config.json -> that of modules for it, its own or made-up ones.
    released: Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclasses.dataclass(frozen=True)
class Family:
    """What there is to know of a family of targets before one is there: how to read its checkpoints."""

    # What config.json names as `model_type`.
    model_types: tuple[str, ...]
    # The classes of its configs and its models.
    config: type
    model: type
    # From config.json to the config. Raises ValueError for what the family does not have.
    read: Callable[[Mapping[str, Any]], TargetConfig]
    # From a config of the family and a dtype to the model as a tree of ShapeDtypeStructs.
    abstract: Callable[[Any, Any], TargetModel]
    # What a checkpoint's keys may have before the paths of the tree; the first that occurs is taken.
    prefixes: tuple[str, ...]
    # From a config to beginnings of keys that nothing reads: parts of the checkpoint that are not the target.
    unread: Callable[[Any], tuple[str, ...]]
    # (a target's config.json, its config) -> config.json of a fresh, smaller model, to be trained as the target's draft model.
    draft_config: Callable[[Mapping[str, Any], Any], dict[str, Any]]
    # From a model with random matrices, whose norms are one, to what training begins with.
    fresh: Callable[[Any], Any]
    # The id of a token that stands for unknown ones and that no text has.
    mask_token: int
    # Whether it multiplies rows of its embedding table by sqrt(hidden_size).
    scales_embeddings: bool
    # MTP modules of its layers.
    modules: ModulesFamily
