"""A layer of the Gemma 4 family, as the target and its assistants have it: attention, then the feed-forward with its norms, experts and
per-layer inputs."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar

import jax
from flax import struct

from jaxspec.model import traffic
from jaxspec.model.attention import Heads, Normed, attend
from jaxspec.model.layer_spec import LayerSpec
from jaxspec.model.layers import GatedMLP, Linear, RMSNorm, Weight, operand, rope_angles
from jaxspec.model.moe import Experts, Router
from jaxspec.model.rows import Keys
from jaxspec.model.split import KVHeads
from jaxspec.trees import nbytes
from pallas_kernels.add_norm import Float8, add_norm
from pallas_kernels.all_reduce import Unsummed
from pallas_kernels.layer_end import layer_end, serves
from pallas_kernels.linear import by_kernel, gated_by
from pallas_kernels.qkv import Pages, projected, qkv
from pallas_kernels.qkv import serves as serves_heads


@struct.dataclass
class PerLayerInput:
    """all: [B, T, layers, P], what each layer's gate of the per-layer embeddings lets through or not. layer: [] int32, which is meant."""

    all: jax.Array
    layer: jax.Array


@struct.dataclass
class Attention:
    """qkv_proj: [KV, G + owned, D, H], by KV head its G query heads, then its key and (unless k_eq_v) its value; a layer that
    shares KV has the query heads alone and no k_norm. o_proj: [H, KV, G, D]."""

    qkv_proj: Linear
    o_proj: Linear
    q_norm: RMSNorm
    k_norm: RMSNorm | None
    spec: LayerSpec = struct.field(pytree_node=False)

    sums: ClassVar[tuple[str, ...]] = ("o_proj",)  # see `split.py`

    @property
    def kv_heads(self) -> tuple[KVHeads, ...]:
        return KVHeads("qkv_proj", 0, self.spec, self.spec.group), KVHeads("o_proj", 1, self.spec, self.spec.group)

    def heads(self, normed: Normed, positions: jax.Array, pages: Pages | None, implementation: str, read_by_kernel: bool) -> Heads:
        """See `AttentionWeights.heads`."""
        spec, k_weight = self.spec, None if self.k_norm is None else self.k_norm.weight
        cos, sin = rope_angles(positions, spec.head_dim, spec.rope_theta, spec.rotary_angles)
        others = cos, sin, self.q_norm.weight, k_weight, pages
        settings: dict[str, Any] = {"group": spec.group, "key_dims": spec.key_dims, "eps": spec.eps, "dtype": normed.dtype}
        settings |= {"launch_dependents": read_by_kernel, "implementation": implementation}
        proj, shape = self.qkv_proj, {"key_dims": spec.key_dims, "implementation": implementation}
        alone = proj.sum_over is None and proj.gather_over is None
        if alone and isinstance(normed, jax.Array) and serves_heads(normed, proj.weight, k_weight, pages, **shape):
            return projected(normed, proj.weight, *others, **settings)
        parts = proj.parts(normed, implementation)
        assert not isinstance(parts, Unsummed)
        return qkv(parts, *others, **settings)

    @property
    def key_weight(self) -> jax.Array | None:
        """What turns a stored value into the part of its key that is not stored: [D], or None where keys are stored whole."""
        return self.k_norm.weight if self.k_norm is not None and self.spec.key_dims < self.spec.head_dim else None


@struct.dataclass
class DecoderLayer:
    """One Gemma 4 layer: sandwich norms around attention and feed-forward, per-layer input, then the whole stream x layer_scalar.

    The fields past layer_scalar are None unless the config has per-layer embeddings or experts.
    """

    self_attn: Attention
    mlp: GatedMLP
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    pre_feedforward_layernorm: RMSNorm
    post_feedforward_layernorm: RMSNorm
    layer_scalar: Weight
    per_layer_input_gate: Linear | None
    per_layer_projection: Linear | None
    post_per_layer_input_norm: RMSNorm | None
    router: Router | None
    experts: Experts | None
    post_feedforward_layernorm_1: RMSNorm | None
    post_feedforward_layernorm_2: RMSNorm | None
    pre_feedforward_layernorm_2: RMSNorm | None

    def __call__(self, x: jax.Array, positions: jax.Array, keys: Keys, attention: str = "auto") -> tuple[jax.Array, Keys]:
        """See `Block`."""
        x, _, keys = decoder_layer(self, x, self.input_layernorm(x), positions, keys, None, None, attention, False)
        return x, keys

    def weights_read(self, rows: int) -> float:
        """See `Block`."""
        return nbytes(self) - traffic.experts_left_out(self.self_attn.spec, self.experts, rows)

    def enters_kernel(self, x: jax.Array, implementation: str) -> bool:
        """Whether the norm of the layer's input x, [B, T, H], is read by a kernel, and by no operation of XLA."""
        return self.self_attn.qkv_proj.by_kernel(math.prod(x.shape[:-1]), x.dtype, implementation)

    def feed_forward(
        self,
        x: jax.Array,
        attended: jax.Array | Unsummed,
        per_layer_input: PerLayerInput | None,
        next_weight: jax.Array | Float8 | None,
        implementation: str,
        read_by_kernel: bool,
    ) -> tuple[jax.Array, Normed | None]:
        """The layer after attention, whose output it adds first. x: [B, T, H]; attended: the same, or parts of it. read_by_kernel: whether
        kernels read the results, and no operation of XLA does. Returns the stream and its norm with next_weight (None without),
        [B, T, H] each."""
        add = functools.partial(add_norm, eps=self.post_attention_layernorm.eps, implementation=implementation)
        norm = self.mlp.norm(self.pre_feedforward_layernorm.weight, x, implementation)
        if self.router is None:
            entering, first = (norm,), self.mlp.by_kernel(x, implementation)
            x, normed = add(x, attended, self.post_attention_layernorm.weight, next_weights=entering, launch_dependents=first)
            out = self.mlp.parts(normed, implementation)
        else:
            assert self.experts and self.post_feedforward_layernorm_1
            assert self.pre_feedforward_layernorm_2 and self.post_feedforward_layernorm_2
            entering = (norm, self.pre_feedforward_layernorm_2.weight, self.router.norm)
            chosen = self.experts.by_kernel(x, self.router.top_k, implementation)
            first = chosen and self.router.by_kernel(x, implementation) and self.mlp.by_kernel(x, implementation)
            x, normed, tokens, scored = add(
                x, attended, self.post_attention_layernorm.weight, next_weights=entering, launch_dependents=first
            )
            choice = self.router(scored.reshape(-1, x.shape[-1]), implementation, read_by_kernel=chosen)
            routed = self.experts.parts(tokens, *choice, implementation)
            norms = (self.post_feedforward_layernorm_1.weight, self.post_feedforward_layernorm_2.weight)
            alone = self.mlp.down_proj.sum_over is None  # else XLA adds up the parts of one of several outputs
            out = ((self.mlp.parts(normed, implementation, read_by_kernel=alone), norms[0]), (routed, norms[1]))
        weight = self.post_feedforward_layernorm.weight
        if per_layer_input is not None:
            assert self.per_layer_input_gate and self.per_layer_projection and self.post_per_layer_input_norm
            gate, projection, inputs = self.per_layer_input_gate.weight, self.per_layer_projection, per_layer_input.all
            own = self.post_per_layer_input_norm.weight
            as_one = serves(x, gate, projection.weight, inputs, implementation)
            if as_one and isinstance(out, jax.Array) and not isinstance(next_weight, Float8):
                arrays = (gate, inputs, per_layer_input.layer, projection.weight, own, self.layer_scalar, next_weight)
                return layer_end(x, out, weight, *arrays, eps=self.post_attention_layernorm.eps, launch_dependents=read_by_kernel)
            inputs = inputs.reshape(-1, *inputs.shape[-2:])
            rows = x.reshape(len(inputs), -1)
            gate, chosen = operand(implementation, rows, gate)
            (x,) = add(x, out, weight, launch_dependents=by_kernel(rows, gate, inputs, splits=1, implementation=chosen))
            settings = {"launch_dependents": projection.by_kernel(len(rows), x.dtype, implementation), "implementation": chosen}
            gated = gated_by(x.reshape(rows.shape), gate, inputs, per_layer_input.layer, **settings)
            out = projection.parts(gated.reshape(*x.shape[:-1], -1), implementation)
            weight = own
        after = () if next_weight is None else (next_weight,)
        x, *normed = add(x, out, weight, scalar=self.layer_scalar, next_weights=after, launch_dependents=read_by_kernel)
        return x, normed[0] if normed else None


def next_weights(layers: tuple[DecoderLayer, ...], norm: RMSNorm) -> tuple[Weight, ...]:
    """For each layer the weight of the norm that reads its output: the next layer's, and `norm` after the last. All have one eps."""
    return (*(layer.input_layernorm.weight for layer in layers[1:]), norm.weight)


# Jitted by itself so that layers with equal specs are traced once; XLA inlines it.
@jax.jit(static_argnames=("attention", "read_by_kernel"))
def decoder_layer(
    layer: DecoderLayer,
    x: jax.Array,
    normed: Normed,
    positions: jax.Array,
    keys: Keys,
    per_layer_input: PerLayerInput | None,
    next_weight: jax.Array | Float8 | None,
    attention: str,
    read_by_kernel: bool,
    row: jax.Array | None = None,
) -> tuple[jax.Array, Normed | None, Keys]:
    """One layer. x: [B, T, H]; normed: [B, T, H], what input_layernorm makes of it; positions: [B, T]; next_weight: [H], of the norm
    that reads the output, as `Linear.norm` has it, or None. attention: implementation of attention and of the kernels around it.
    read_by_kernel: whether kernels read the first two results, and no operation of XLA does: see `pallas_kernels.dialect.launching`.
    row: [B] int32, the row of each sequence that is wanted, of which then x, [B, 1, H], and per_layer_input are; its keys have all rows.
    Returns x, that norm of it (or None), and the keys that the layer attended to: those given, with its own fresh K and V if it owns
    any."""
    attn = layer.self_attn
    with jax.named_scope(attn.spec.kind):
        first = attn.o_proj.by_kernel(math.prod(x.shape[:-1]), x.dtype, attention, over=3)
        heads, keys = attend(attn, normed, positions, keys, attention, read_by_kernel=first, row=row)
        attended = attn.o_proj.parts(heads, attention, over=3)
    with jax.named_scope("feed_forward"):
        return *layer.feed_forward(x, attended, per_layer_input, next_weight, attention, read_by_kernel), keys


def abstract_layer(spec: LayerSpec, dtype: Any) -> DecoderLayer:
    """One layer as a tree of ShapeDtypeStructs."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def norm(width: int) -> RMSNorm:
        return RMSNorm(leaf(width), spec.eps)

    hidden, ple, experts = spec.hidden_size, spec.per_layer_input, spec.num_experts
    owned = 0 if not spec.owns_kv else 1 if spec.k_eq_v else 2
    return DecoderLayer(
        self_attn=Attention(
            qkv_proj=Linear(leaf(spec.num_kv_heads, spec.group + owned, spec.head_dim, hidden)),
            o_proj=Linear(leaf(hidden, spec.num_kv_heads, spec.group, spec.head_dim)),
            q_norm=norm(spec.head_dim),
            k_norm=norm(spec.head_dim) if spec.owns_kv else None,
            spec=spec,
        ),
        mlp=GatedMLP(Linear(leaf(2, spec.intermediate_size, hidden)), Linear(leaf(hidden, spec.intermediate_size))),
        input_layernorm=norm(hidden),
        post_attention_layernorm=norm(hidden),
        pre_feedforward_layernorm=norm(hidden),
        post_feedforward_layernorm=norm(hidden),
        layer_scalar=leaf(1),
        per_layer_input_gate=Linear(leaf(ple, hidden)) if ple else None,
        per_layer_projection=Linear(leaf(hidden, ple)) if ple else None,
        post_per_layer_input_norm=norm(hidden) if ple else None,
        router=Router(Linear(leaf(experts, hidden)), leaf(hidden), leaf(experts), spec.top_k_experts) if experts else None,
        experts=Experts(leaf(experts, 2, spec.moe_intermediate_size, hidden), leaf(experts, hidden, spec.moe_intermediate_size))
        if experts
        else None,
        post_feedforward_layernorm_1=norm(hidden) if experts else None,
        post_feedforward_layernorm_2=norm(hidden) if experts else None,
        pre_feedforward_layernorm_2=norm(hidden) if experts else None,
    )
