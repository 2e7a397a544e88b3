"""The image tower of E2B, E4B, 26B-A4B and 31B: an encoder of patches whose neighbours are averaged into soft tokens.

Facts: transformers `modeling_gemma4.py` 5.24 (Gemma4VisionModel, get_image_features).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.checkpoint.layout import Part
from jaxspec.media.layers import (
    ClippableLinear,
    Projection,
    abstract_clippable,
    abstract_projection,
    abstract_stack,
    stack_layouts,
    through,
)
from jaxspec.model.layers import Linear, RMSNorm, Weight, last_axis, rms, rope_frequencies, rotate, turned
from jaxspec.trees import told
from jaxspec.vision.config import TowerConfig, VisionConfig
from pallas_kernels import device
from pallas_kernels.dialect import HOPPER
from pallas_kernels.paged_attention import by_kernel, paged_attention

# Queries whose scores with all keys are held at a time. At the most patches that the releases take, 10,080, those are 102 MB of float32.
MOST_QUERIES = 2520
LEAST_WIDTH = 16  # of a head in a kernel


@struct.dataclass
class Attention:
    """Every patch sees every patch. A position is a column and a row: half of a head's numbers turn by the one, half by the other."""

    q_proj: ClippableLinear
    k_proj: ClippableLinear
    v_proj: ClippableLinear
    o_proj: ClippableLinear
    q_norm: RMSNorm
    k_norm: RMSNorm

    def __call__(self, x: jax.Array, angles: tuple[jax.Array, jax.Array], valid: jax.Array) -> jax.Array:
        """x: [B, N, H]; angles: cosine and sine [B * N, 2, head_dim / 4] float32; valid: [B, N] bool, which are seen -> [B, N, H]."""
        head_dim = self.q_norm.weight.shape[0]

        def heads(projection: ClippableLinear) -> jax.Array:
            return projection(x).reshape(*valid.shape, -1, head_dim)

        q, k = _turned(self.q_norm(heads(self.q_proj)), angles), _turned(self.k_norm(heads(self.k_proj)), angles)
        seen = _attended(q, k, rms(heads(self.v_proj), self.k_norm.eps), valid)
        return self.o_proj(seen.reshape(*valid.shape, -1))


def _turned(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """x: [B, N, heads, D] with pairs (d, d + D / 4) of each half of D rotated."""
    heads, head_dim = x.shape[-2:]
    halves = jnp.swapaxes(x.reshape(-1, heads, 2, head_dim // 2), 1, 2)
    return jnp.swapaxes(rotate(halves, *angles), 1, 2).reshape(x.shape)


def _attended(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    """Softmax attention with unscaled scores, in float32. q: [B, N, heads, D]; k, v: [B, N, KV heads, D]; valid: [B, N] bool, the first
    ones -> [B, N, heads, D]."""
    head_dim = q.shape[-1]
    width = max(1 << (head_dim - 1).bit_length(), LEAST_WIDTH)
    if not by_kernel(width, None):
        return jax.lax.map(lambda each: _by_xla(*each), (q, k, v, valid))
    # A kernel in Triton needs a power of two: with heads of 72 numbers it multiplies 128. cuDNN was timed on Hopper GPUs.
    by_cudnn = width > head_dim and head_dim % 8 == 0 and q.dtype == jnp.bfloat16 and device.capability() == HOPPER
    return _by_cudnn(q, k, v, valid) if by_cudnn else _by_kernel(q, k, v, valid, width)


def _by_cudnn(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    seen = jnp.sum(valid, axis=1, dtype=jnp.int32)
    return jax.nn.dot_product_attention(q, k, v, scale=1.0, key_value_seq_lengths=seen, implementation="cudnn")


def _by_kernel(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array, width: int) -> jax.Array:
    """In the kernel that serves prompts, where an image is a sequence whose rows see one another. width: of a head there, at least D."""
    several, count, heads, head_dim = q.shape

    def padded(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - head_dim)))

    queries = padded(q).reshape(several, count, k.shape[2], -1, width)
    at, none = jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), valid.shape), jnp.zeros(several, jnp.int32)
    fresh = jnp.sum(valid, axis=1, dtype=jnp.int32)
    seen = paged_attention(queries, at, None, None, none, (padded(k), padded(v)), fresh, causal=False)
    return seen.reshape(several, count, heads, width)[..., :head_dim]


def _by_xla(q: jax.Array, k: jax.Array, v: jax.Array, valid: jax.Array) -> jax.Array:
    """Of one image, for one head and MOST_QUERIES queries after the other. The arrays are those of `_attended` without B."""
    count, heads, head_dim = q.shape
    k, v = jnp.swapaxes(k, 0, 1), jnp.swapaxes(v, 0, 1)
    blocks = next(n for n in range(1, count + 1) if count % n == 0 and count // n <= MOST_QUERIES)
    kv_head = jnp.repeat(jnp.arange(k.shape[0]), heads // k.shape[0] * blocks)

    def block(inputs: tuple[jax.Array, jax.Array]) -> jax.Array:
        queries, i = inputs
        scores = jnp.einsum("qd,kd->qk", queries, k[i], preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(valid[None, :], scores, jnp.finfo(jnp.float32).min), axis=-1)
        return jnp.einsum("qk,kd->qd", weights.astype(v.dtype), v[i])

    queries = jnp.swapaxes(q, 0, 1).reshape(heads * blocks, count // blocks, head_dim)
    return jnp.swapaxes(jax.lax.map(block, (queries, kv_head)).reshape(heads, count, head_dim), 0, 1)


@struct.dataclass
class MLP:
    """down(gelu(gate x) * up x)."""

    gate_proj: ClippableLinear
    up_proj: ClippableLinear
    down_proj: ClippableLinear

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = jax.nn.gelu(self.gate_proj(x).astype(jnp.float32), approximate=True).astype(x.dtype)
        return self.down_proj(gate * self.up_proj(x))


@struct.dataclass
class EncoderLayer:
    """Attention and MLP, each between two norms."""

    self_attn: Attention
    mlp: MLP
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    pre_feedforward_layernorm: RMSNorm
    post_feedforward_layernorm: RMSNorm

    def __call__(self, x: jax.Array, angles: tuple[jax.Array, jax.Array], valid: jax.Array) -> jax.Array:
        """Arguments and result are those of `Attention`."""
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), angles, valid))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


@struct.dataclass
class PatchEmbedder:
    """Patches by a product, and an embedding of their columns and rows. position_embedding_table: [2, positions, H]."""

    input_proj: Linear
    position_embedding_table: Weight

    def __call__(self, pixels: jax.Array, positions: jax.Array, valid: jax.Array) -> jax.Array:
        """pixels: [B, N, P] float32 of 0 .. 1; positions: [B, N, 2] int32; valid: [B, N] bool, which are no padding -> [B, N, H]."""
        x = self.input_proj((2 * (pixels - 0.5)).astype(self.input_proj.weight.dtype))
        columns, rows = (jnp.take(self.position_embedding_table[i], positions[..., i], axis=0, mode="clip") for i in range(2))
        return x + jnp.where(valid[..., None], columns + rows, 0)


@struct.dataclass
class Encoder:
    """The layers, each of whose arrays is [layers, ...]."""

    layers: EncoderLayer


@struct.dataclass
class VisionTower:
    """Patches to soft tokens. std_bias, std_scale: [H], by which soft tokens are standardised, or None."""

    patch_embedder: PatchEmbedder
    encoder: Encoder
    std_bias: Weight | None
    std_scale: Weight | None
    theta: float = struct.field(pytree_node=False)
    pool: int = struct.field(pytree_node=False)

    def __call__(self, pixels: jax.Array, positions: jax.Array) -> jax.Array:
        """pixels: [B, N, P] float32; positions: [B, N, 2] int32, -1 for padding -> [B, N / pool**2, H]."""
        valid = jnp.any(positions != -1, axis=-1)
        with jax.named_scope("patches"):
            x = self.patch_embedder(pixels, positions, valid)
        half = self.encoder.layers.self_attn.q_norm.weight.shape[-1] // 2
        angles = turned(positions.reshape(-1, 2), rope_frequencies(half, self.theta, half // 2))
        with jax.named_scope("layers"):
            x = through(self.encoder.layers, x, angles, valid)
        with jax.named_scope("pool"):
            return jax.vmap(self._pooled)(x, positions, valid)

    def _pooled(self, x: jax.Array, positions: jax.Array, valid: jax.Array) -> jax.Array:
        """Of one image: the mean of each square of pool**2 patches by sqrt(H), in float32, rounded at the end. Squares count along rows."""
        count, k = x.shape[0] // self.pool**2, self.pool
        at = jnp.maximum(positions, 0)
        square = at[:, 0] // k + (jnp.max(at[:, 0]) + 1) // k * (at[:, 1] // k)
        members = (square[None, :] == jnp.arange(count, dtype=square.dtype)[:, None]) & valid[None, :]
        sums = jnp.matmul(members.astype(jnp.float32), x.astype(jnp.float32), precision="highest")
        pooled = (sums / k**2).astype(x.dtype).astype(jnp.float32) * x.shape[1] ** 0.5
        if self.std_bias is not None and self.std_scale is not None:
            pooled = pooled - last_axis(self.std_bias.astype(jnp.float32), 2)
            pooled = pooled * last_axis(self.std_scale.astype(jnp.float32), 2)
        return pooled.astype(x.dtype)


@struct.dataclass
class Gemma4Vision:
    """The tower and the projection of what it gives; the path of a field is its Hugging Face key without the `model.` prefix and the
    numbers of layers."""

    vision_tower: VisionTower
    embed_vision: Projection

    __repr__ = told

    @staticmethod
    def layouts(path: str, shapes: Mapping[str, tuple[int, ...]]) -> list[list[Part]]:
        """How a checkpoint holds a leaf: see `layout.layouts`."""
        return stack_layouts("vision_tower.encoder.layers.", path, shapes)

    def __call__(self, pixels: jax.Array, positions: jax.Array) -> jax.Array:
        """Images. pixels: [B, N, P] float32 of 0 .. 1, patches with channels last; positions: [B, N, 2] int32, their columns and rows,
        -1 for padding -> [B, N / pooling_kernel_size**2, text hidden] in the weights' dtype; rows past an image's own are finite."""
        return self.embed_vision(self.vision_tower(pixels, positions))


def abstract(config: VisionConfig, dtype: Any = jnp.bfloat16) -> Gemma4Vision:
    """The model as a tree of ShapeDtypeStructs."""
    tower = config.tower
    assert isinstance(tower, TowerConfig)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def linear(inputs: int, outputs: int) -> ClippableLinear:
        return abstract_clippable(inputs, outputs, tower.use_clipped_linears, dtype)

    def norm(width: int) -> RMSNorm:
        return RMSNorm(leaf(width), config.rms_norm_eps)

    hidden, inner = tower.hidden_size, tower.intermediate_size
    queries, keys = (heads * tower.head_dim for heads in (tower.num_attention_heads, tower.num_key_value_heads))
    layer = EncoderLayer(
        self_attn=Attention(
            q_proj=linear(hidden, queries),
            k_proj=linear(hidden, keys),
            v_proj=linear(hidden, keys),
            o_proj=linear(queries, hidden),
            q_norm=norm(tower.head_dim),
            k_norm=norm(tower.head_dim),
        ),
        mlp=MLP(linear(hidden, inner), linear(hidden, inner), linear(inner, hidden)),
        input_layernorm=norm(hidden),
        post_attention_layernorm=norm(hidden),
        pre_feedforward_layernorm=norm(hidden),
        post_feedforward_layernorm=norm(hidden),
    )
    embedder = PatchEmbedder(Linear(leaf(hidden, 3 * config.patch**2)), leaf(2, tower.position_embedding_size, hidden))
    return Gemma4Vision(
        vision_tower=VisionTower(
            patch_embedder=embedder,
            encoder=Encoder(abstract_stack(layer, tower.num_hidden_layers)),
            std_bias=leaf(hidden) if tower.standardize else None,
            std_scale=leaf(hidden) if tower.standardize else None,
            theta=tower.rope_theta,
            pool=config.pool,
        ),
        embed_vision=abstract_projection(hidden, config.text_hidden_size, config.rms_norm_eps, dtype),
    )
