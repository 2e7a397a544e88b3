"""The audio tower of E2B and E4B: convolutions that leave a quarter of the frames, then an encoder (a conformer), in whose layers are
attention and a convolution along time.

Facts: transformers `modeling_gemma4.py` 5.24 (Gemma4AudioModel, get_audio_features); the encoder is that of the Universal Speech Model
(arXiv 2303.01037), its relative positions those of Transformer-XL (arXiv 1901.02860, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.audio.config import AudioConfig, TowerConfig
from jaxspec.checkpoint.layout import Part
from jaxspec.media.layers import (
    BiasedLinear,
    ClippableLinear,
    LayerNorm,
    Projection,
    abstract_clippable,
    abstract_projection,
    abstract_stack,
    stack_layouts,
    through,
)
from jaxspec.model.layers import Linear, RMSNorm, Weight, last_axis
from jaxspec.trees import told

EPS = 1e-6  # of norms for which no config names another
LONGEST_WAVE = 10_000.0  # of the relative positions' sines


@struct.dataclass
class Convolution:
    """weight: [out, in, 3, 3], with a stride of 2 and a border of zeros."""

    weight: Weight

    def __call__(self, x: jax.Array) -> jax.Array:
        """[T, F, in] -> [ceil(T / 2), ceil(F / 2), out]"""
        dimensions = ("NHWC", "OIHW", "NHWC")
        return jax.lax.conv_general_dilated(x[None], self.weight, (2, 2), ((1, 1), (1, 1)), dimension_numbers=dimensions)[0]


@struct.dataclass
class SubSampleLayer:
    """A convolution that halves frames and places, and a norm over channels."""

    conv: Convolution
    norm: LayerNorm

    def __call__(self, x: jax.Array, count: jax.Array) -> jax.Array:
        """x: [T, F, C] of which `count` frames are the sound's -> [ceil(T / 2), ceil(F / 2), C']."""
        within = jnp.arange(x.shape[0]) < count
        return jax.nn.relu(self.norm(self.conv(jnp.where(within[:, None, None], x, 0))))


@struct.dataclass
class SubSampleConvProjection:
    """Features to a quarter of the rows."""

    layer0: SubSampleLayer
    layer1: SubSampleLayer
    input_proj_linear: Linear

    def __call__(self, features: jax.Array, count: jax.Array) -> jax.Array:
        """features: [T, F] float32, of which `count` are the sound's -> [ceil(T / 4), H]."""
        x = self.layer0(features[:, :, None].astype(self.layer0.conv.weight.dtype), count)
        x = self.layer1(x, (count + 1) // 2)
        return self.input_proj_linear(x.reshape(x.shape[0], -1))


@struct.dataclass
class FeedForward:
    """A part of its outputs beside its inputs."""

    ffw_layer_1: ClippableLinear
    ffw_layer_2: ClippableLinear
    pre_layer_norm: RMSNorm
    post_layer_norm: RMSNorm
    bound: float = struct.field(pytree_node=False)
    part: float = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        inner = jax.nn.silu(self.ffw_layer_1(self.pre_layer_norm(_bounded(x, self.bound))))
        return x + self.post_layer_norm(_bounded(self.ffw_layer_2(inner), self.bound)) * self.part


@struct.dataclass
class Attention:
    """Attention within blocks of rows and to the rows before and after each, with scores for how far they are apart.

    per_dim_scale: [D]. chunk: rows of a block. left, right: how many rows a row sees before it, itself among them, and after it.
    """

    q_proj: ClippableLinear
    k_proj: ClippableLinear
    v_proj: ClippableLinear
    post: ClippableLinear
    relative_k_proj: Linear
    per_dim_scale: Weight
    chunk: int = struct.field(pytree_node=False)
    left: int = struct.field(pytree_node=False)
    right: int = struct.field(pytree_node=False)
    cap: float = struct.field(pytree_node=False)
    unseen: float = struct.field(pytree_node=False)  # a score

    def __call__(self, x: jax.Array, count: jax.Array) -> jax.Array:
        """x: [N, H], of which `count` rows are the sound's -> [N, H]."""
        rows, head_dim, chunk, context = x.shape[0], self.per_dim_scale.shape[0], self.chunk, self.chunk + self.left + self.right
        blocks = -(-rows // chunk)

        def heads(projection: ClippableLinear) -> jax.Array:
            return projection(x).astype(jnp.float32).reshape(rows, -1, head_dim)

        scale = head_dim**-0.5 / math.log(2) * jax.nn.softplus(self.per_dim_scale.astype(jnp.float32))
        q = jnp.pad(heads(self.q_proj) * last_axis(scale, 3), ((0, blocks * chunk - rows), (0, 0), (0, 0)))
        q = q.reshape(blocks, chunk, -1, head_dim)
        begin = jnp.arange(blocks)[:, None] * chunk
        at = begin + jnp.arange(context)[None, :] - self.left  # of a block's keys: [blocks, context]

        def around(y: jax.Array) -> jax.Array:
            return jnp.take(jnp.pad(y, ((self.left, self.right + chunk), (0, 0), (0, 0))), at + self.left, axis=0)

        k, v = around(heads(self.k_proj) * (math.log(1 + math.e) / math.log(2))), around(heads(self.v_proj))
        distances = self._distances(x.dtype).astype(jnp.float32).reshape(-1, q.shape[2], head_dim)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest")
        scores = scores + self._shifted(jnp.einsum("bqhd,phd->bhqp", q, distances, precision="highest"))
        scores = jnp.tanh(scores / self.cap) * self.cap
        before = (begin + jnp.arange(chunk)[None, :])[:, :, None] - at[:, None, :]  # [blocks, chunk, context]
        seen = ((before >= 0) & (before < self.left)) | ((before < 0) & (-before < self.right))
        seen &= ((at >= 0) & (at < count))[:, None, :]
        weights = jax.nn.softmax(jnp.where(seen[:, None], scores, self.unseen), axis=-1)
        found = jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest")
        return self.post(found.reshape(blocks * chunk, -1)[:rows].astype(x.dtype))

    def _distances(self, dtype: Any) -> jax.Array:
        """What stands for each distance, the farthest first and 0 last: [P, heads * D]."""
        width = self.relative_k_proj.weight.shape[1]
        count = (self.chunk + self.left + self.right) // 2
        waves = jnp.exp(jnp.arange(width // 2, dtype=jnp.float32) * -(math.log(LONGEST_WAVE) / max(width // 2 - 1, 1)))
        angles = jnp.arange(count, -1, -1, dtype=jnp.float32)[:, None] * waves[None, :]
        return self.relative_k_proj(jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1).astype(dtype))

    def _shifted(self, scores: jax.Array) -> jax.Array:
        """From scores by distance, [B, heads, chunk, P], to scores by key, [B, heads, chunk, context]: row i has those of row 0 i keys
        further."""
        context = self.chunk + self.left + self.right
        wide = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (0, context + 1 - scores.shape[-1])))
        flat = wide.reshape(*scores.shape[:2], -1)[..., : self.chunk * context]
        return flat.reshape(*scores.shape[:3], context)


@struct.dataclass
class DepthwiseConvolution:
    """Each channel with itself and the rows before. weight: [H, 1, W]; the last of W is for the row itself."""

    weight: Weight

    def __call__(self, x: jax.Array) -> jax.Array:
        """[N, H] -> [N, H], in float32, rounded once at the end."""
        width, weight = self.weight.shape[-1], self.weight[:, 0].astype(jnp.float32)
        wide = jnp.pad(x.astype(jnp.float32), ((width - 1, 0), (0, 0)))
        return jnp.sum(jnp.stack([wide[i : i + x.shape[0]] * last_axis(weight[:, i], 2) for i in range(width)]), axis=0).astype(x.dtype)


@struct.dataclass
class LightConvolution:
    """A convolution along time between two products, beside its inputs."""

    linear_start: ClippableLinear
    linear_end: ClippableLinear
    depthwise_conv1d: DepthwiseConvolution
    pre_layer_norm: RMSNorm
    conv_norm: RMSNorm
    bound: float = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array) -> jax.Array:
        value, gate = jnp.split(self.linear_start(self.pre_layer_norm(x)), 2, axis=-1)
        found = self.depthwise_conv1d(value * jax.nn.sigmoid(gate))
        return x + self.linear_end(jax.nn.silu(self.conv_norm(_bounded(found, self.bound))))


@struct.dataclass
class ConformerLayer:
    """Attention and a convolution between two halves of a feed-forward."""

    feed_forward1: FeedForward
    feed_forward2: FeedForward
    self_attn: Attention
    lconv1d: LightConvolution
    norm_pre_attn: RMSNorm
    norm_post_attn: RMSNorm
    norm_out: RMSNorm
    bound: float = struct.field(pytree_node=False)

    def __call__(self, x: jax.Array, count: jax.Array) -> jax.Array:
        """x: [N, H], of which `count` rows are the sound's -> [N, H]."""
        x = self.feed_forward1(x)
        attended = self.self_attn(self.norm_pre_attn(_bounded(x, self.bound)), count)
        x = x + self.norm_post_attn(_bounded(attended, self.bound))
        return self.norm_out(_bounded(self.feed_forward2(self.lconv1d(x)), self.bound))


def _bounded(x: jax.Array, bound: float) -> jax.Array:
    bound = min(bound, float(jnp.finfo(x.dtype).max))
    return jnp.clip(x, -bound, bound)


@struct.dataclass
class AudioTower:
    """Features to soft tokens. layers: all of them, each of its arrays [layers, ...]."""

    subsample_conv_projection: SubSampleConvProjection
    layers: ConformerLayer
    output_proj: BiasedLinear

    def __call__(self, features: jax.Array, count: jax.Array) -> jax.Array:
        """Arguments are those of `Gemma4Audio` -> [ceil(T / 4), output_proj_dims]."""
        with jax.named_scope("subsample"):
            x = self.subsample_conv_projection(features, count)
        with jax.named_scope("layers"):
            x = through(self.layers, x, (count + 3) // 4)
        return self.output_proj(x)


@struct.dataclass
class Gemma4Audio:
    """The tower and the projection of what it gives; the path of a field is its Hugging Face key without the `model.` prefix and the
    numbers of layers."""

    audio_tower: AudioTower
    embed_audio: Projection

    __repr__ = told

    @staticmethod
    def layouts(path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[list[Part]]:
        """How a checkpoint holds a leaf: see `layout.layouts`."""
        return stack_layouts("audio_tower.layers.", path, shapes)

    def __call__(self, features: jax.Array, count: jax.Array) -> jax.Array:
        """One sound. features: [T, F] float32; count: int32, how many of the T frames are the sound's -> [ceil(T / 4), text hidden] in the
        weights' dtype; rows past the sound's own are finite."""
        return self.embed_audio(self.audio_tower(features, count))


def abstract(config: AudioConfig, dtype: Any = jnp.bfloat16) -> Gemma4Audio:
    """The model as a tree of ShapeDtypeStructs."""
    tower = config.tower
    assert isinstance(tower, TowerConfig)
    hidden, bound = tower.hidden_size, tower.gradient_clipping

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def linear(inputs: int, outputs: int) -> ClippableLinear:
        return abstract_clippable(inputs, outputs, tower.use_clipped_linears, dtype)

    def norm(eps: float = EPS) -> RMSNorm:
        return RMSNorm(leaf(hidden), eps)

    def subsample(inputs: int, outputs: int) -> SubSampleLayer:
        return SubSampleLayer(Convolution(leaf(outputs, inputs, 3, 3)), LayerNorm(leaf(outputs), None, config.rms_norm_eps))

    feed_forward = FeedForward(linear(hidden, 4 * hidden), linear(4 * hidden, hidden), norm(), norm(), bound, tower.residual_weight)
    layer = ConformerLayer(
        feed_forward1=feed_forward,
        feed_forward2=feed_forward,
        self_attn=Attention(
            q_proj=linear(hidden, hidden),
            k_proj=linear(hidden, hidden),
            v_proj=linear(hidden, hidden),
            post=linear(hidden, hidden),
            relative_k_proj=Linear(leaf(hidden, hidden)),
            per_dim_scale=leaf(hidden // tower.num_attention_heads),
            chunk=tower.attention_chunk_size,
            left=tower.attention_context_left - 1,
            right=tower.attention_context_right,
            cap=tower.attention_logit_cap,
            unseen=tower.attention_invalid_logits_value,
        ),
        lconv1d=LightConvolution(
            linear_start=linear(hidden, 2 * hidden),
            linear_end=linear(hidden, hidden),
            depthwise_conv1d=DepthwiseConvolution(leaf(hidden, 1, tower.conv_kernel_size)),
            pre_layer_norm=norm(config.rms_norm_eps),
            conv_norm=norm(config.rms_norm_eps),
            bound=bound,
        ),
        norm_pre_attn=norm(),
        norm_post_attn=norm(),
        norm_out=norm(),
        bound=bound,
    )
    first, second = tower.subsampling_conv_channels
    return Gemma4Audio(
        audio_tower=AudioTower(
            subsample_conv_projection=SubSampleConvProjection(
                layer0=subsample(1, first),
                layer1=subsample(first, second),
                input_proj_linear=Linear(leaf(hidden, tower.num_places * second)),
            ),
            layers=abstract_stack(layer, tower.num_hidden_layers),
            output_proj=BiasedLinear(leaf(tower.output_proj_dims, hidden), leaf(tower.output_proj_dims)),
        ),
        embed_audio=abstract_projection(tower.output_proj_dims, config.text_hidden_size, config.rms_norm_eps, dtype),
    )
