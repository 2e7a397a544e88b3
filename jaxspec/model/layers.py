"""The layers that target and drafters share: Linear, Embedding, RMSNorm, rotary position, gated MLP, softcap.

A module is a `flax.struct.dataclass`: its fields are weights, named so that the path is the Hugging Face key, and static settings.
Weights keep Hugging Face's [out, in] order. Matrices that are always used together are fused at load along new axes:
query, key and value heads by KV head, gate and up projections as a pair; see `checkpoint.layout` for the mapping.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.collectives import Shard, gathered, local_ids, summed
from jaxspec.model.head_guides import guide_for
from pallas_kernels import dialect
from pallas_kernels.activation import GELU, Activation
from pallas_kernels.add_norm import Float8
from pallas_kernels.all_reduce import Unsummed, serves
from pallas_kernels.float8_rows import Rounded
from pallas_kernels.linear import by_kernel, gated, linear, most_rows, partials, product, rounding, unpacked, xla_parts
from pallas_kernels.lm_head.guided import MOST_ROWS as MOST_GUIDED
from pallas_kernels.lm_head.guided import Guide
from pallas_kernels.lm_head.guided import unsupported as guide_obstacle
from pallas_kernels.packed import Packed, unpack_rows
from pallas_kernels.qkv.reference import rms_norm, rotate

# A weight: an array, a ShapeDtypeStruct in an abstract tree, or a sharding in a tree of shardings. Matrices may be a `Packed` of these.
Weight = Any


@struct.dataclass
class Linear:
    """y = x W^T. weight: [*out, in]; the output axes may be several, for fused matrices. sum_over, gather_over: the mesh axis over
    which the inputs or the last output axis lie, where the product is wanted whole. mail: what kernels that sum over devices need, or
    None; see `collectives`."""

    weight: Weight
    sum_over: str | None = struct.field(pytree_node=False, default=None)
    gather_over: str | None = struct.field(pytree_node=False, default=None)
    mail: jax.Array | None = None

    def __call__(self, x: jax.Array, *, dtype: Any = None, implementation: str = "xla") -> jax.Array:
        """x: [..., in] -> [..., *out], in x's dtype or in `dtype`; products are summed in float32 on GPU. implementation: of a packed
        weight's product, where there are few enough rows for it; only XLA's has a gradient."""
        return gathered(summed(_product(x, self.weight, 1, dtype, implementation), self.sum_over), self.gather_over)

    def of_heads(self, heads: jax.Array, *, implementation: str = "xla") -> jax.Array:
        """heads: [B, T, KV, G, D] -> [B, T, H], by a weight [H, KV, G, D]. implementation: as for a call."""
        return summed(_product(heads, self.weight, 3, None, implementation), self.sum_over)

    def by_kernel(self, rows: int, dtype: Any, implementation: str, over: int = 1) -> bool:
        """Whether in `parts` a kernel reads x, of so many rows and this dtype, and no operation of XLA does."""
        if self.gather_over is not None or (self.sum_over is not None and not self._summed_by_kernel(rows, dtype, implementation, over)):
            return False
        weight, cut = self.weight, len(self.weight.shape) - over
        width = math.prod(weight.shape[cut:])
        x = jax.ShapeDtypeStruct((rows, width), dtype)
        chosen = for_rows(implementation, x, weight)
        if chosen == "xla":
            return False
        if isinstance(weight, Packed):
            weight = weight.flat()
        else:
            weight = jax.ShapeDtypeStruct((math.prod(weight.shape[:cut]), width), weight.dtype)
        return by_kernel(x, weight, implementation=chosen)

    def _summed_by_kernel(self, rows: int, dtype: Any, implementation: str, over: int) -> bool:
        """Whether a kernel sums the product over devices."""
        width = math.prod(self.weight.shape[: len(self.weight.shape) - over])
        return self.sum_over is not None and implementation != "xla" and serves(rows, width, dtype, self.mail)

    def norm(self, weight: jax.Array, x: jax.Array, implementation: str) -> jax.Array | Float8:
        """The norm of this weight as `add_norm` takes it, whose result `parts` is given: of rows like x, [..., in]."""
        return norm_of(weight, self.rounding(x, implementation))

    def rounding(self, x: Any, implementation: str) -> str | None:
        """How a kernel before may round rows like x, [..., in], for `parts`: see `linear.rounding`."""
        return None if self.gather_over is not None or self.sum_over is not None else rounding_for(self.weight, x, implementation)

    def parts(self, x: jax.Array | Rounded, implementation: str, over: int = 1, *, read_by_kernel: bool = True) -> jax.Array | Unsummed:
        """The product for a kernel that takes it in parts (`add_norm`, `qkv`): float32 parts [S, ..., *out] whose sum it is, or whose sum
        over devices, where a kernel serves so few rows or XLA's product is better cut (`xla_parts`); else the product. x: [..., *in]; over:
        how many axes `in` are, 3 for heads. read_by_kernel: whether there is such a kernel, wherever there are kernels at all."""
        leading, out = x.shape[: len(x.shape) - over], self.weight.shape[: self.weight.ndim - over]
        rows: Any = x.flat() if isinstance(x, Rounded) else x.reshape(math.prod(leading), -1)
        weight, chosen = operand(implementation, rows, self.weight)
        spread = self.sum_over is not None
        in_kernel = self._summed_by_kernel(rows.shape[0], x.dtype, implementation, over)
        matrix = weight if isinstance(weight, Packed) else weight.reshape(math.prod(out), -1)
        whole = chosen == "xla" and not in_kernel and (spread or implementation == "xla" or xla_parts(rows.shape[0], matrix) == 1)
        if self.gather_over is not None or whole:
            assert not isinstance(x, Rounded)
            whole_product = dataclasses.replace(self, weight=weight)
            return whole_product(x) if over == 1 else whole_product.of_heads(x)
        weight = matrix.flat() if isinstance(matrix, Packed) else matrix
        if spread and not in_kernel:
            return summed(linear(rows, weight, splits=None, implementation=chosen).reshape(*leading, *out), self.sum_over)
        parts = partials(rows, weight, launch_dependents=read_by_kernel, implementation=chosen)
        parts = parts.reshape(-1, *leading, *out)
        return Unsummed(parts, self.mail) if in_kernel and self.mail is not None else parts


@struct.dataclass
class Embedding:
    """Rows of a table times a constant, which is rounded to their dtype first (Gemma: sqrt(hidden)). weight: [V, H], which may be packed
    as `unpack_rows` takes it. axis: the mesh axis over which the table's rows lie, or None. mail: as for `Linear`. guide: of a table that
    is a head too, or None: see `head_guides.py`."""

    weight: Weight
    scale: float = struct.field(pytree_node=False, default=1.0)
    axis: str | None = struct.field(pytree_node=False, default=None)
    mail: jax.Array | None = None
    guide: Guide | None = None

    split: ClassVar[str] = "weight"  # see `split.py`

    def with_guide(self) -> Embedding:
        """The same with the guide of its table, if that may have one."""
        return dataclasses.replace(self, guide=guide_for(self.weight))

    def weight_to_guess_by(self, hidden: jax.Array, implementation: str) -> Weight:
        """The head's weight for the logits of drafts: where a kernel serves, the guide's 8 bits, which are as good and half as much to
        read. hidden: [..., H]. implementation: of the product."""
        rows = jax.ShapeDtypeStruct((math.prod(hidden.shape[:-1]), hidden.shape[-1]), hidden.dtype)
        if self.guide is None or rows.shape[0] > MOST_GUIDED or dialect.select(implementation, guide_obstacle(rows, self.guide)) == "xla":
            return self.weight
        return self.guide.codes

    def __call__(self, ids: jax.Array, dtype: Any = None) -> jax.Array:
        """ids: [...] int32 -> [..., H]. dtype: by default the table's, or that of its scales."""
        rows = self._rows(ids)
        rows = rows if dtype is None else rows.astype(dtype)
        return rows * jnp.asarray(self.scale, rows.dtype)

    @property
    def shard(self) -> Shard | None:
        """The device's part of the vocabulary, inside `shard_map`; None where every device has the whole."""
        return None if self.axis is None else Shard(self.axis, self.weight.shape[0], self.mail)

    def _rows(self, ids: jax.Array) -> jax.Array:
        table, size = self.weight, self.weight.shape[0]
        packed = isinstance(table, Packed)
        if self.axis is None:
            return unpack_rows(table, jnp.clip(ids, 0, size - 1)) if packed else jnp.take(table, ids, axis=0, mode="clip")
        at = local_ids(jnp.clip(ids, 0, size * jax.lax.axis_size(self.axis) - 1), size, self.axis, size)
        if packed:
            rows = jnp.where((at < size)[..., None], unpack_rows(table, jnp.minimum(at, size - 1)), 0)
        else:
            rows = jnp.take(table, at, axis=0, mode="fill", fill_value=0)
        return summed(rows, self.axis, self.mail)


@struct.dataclass
class RMSNorm:
    """x / rms(x) * weight, in float32, rounded once at the end. weight: [H], not offset by one."""

    weight: Weight
    eps: float = struct.field(pytree_node=False, default=1e-6)

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight, self.eps)


def rms(x: jax.Array, eps: float) -> jax.Array:
    """RMS norm without a weight."""
    return rms_norm(x, None, eps)


def last_axis(vector: jax.Array, ndim: int) -> jax.Array:
    """A vector shaped to broadcast along the last of `ndim` axes."""
    return vector.reshape((1,) * (ndim - 1) + vector.shape)


@struct.dataclass
class GatedMLP:
    """down(act(gate x) * up x). gate_up_proj: [2, I, H], down_proj: [H, I]."""

    gate_up_proj: Linear
    down_proj: Linear
    activation: Activation = struct.field(pytree_node=False, default=GELU)

    sums: ClassVar[tuple[str, ...]] = ("down_proj",)  # see `split.py`

    def __call__(self, x: jax.Array, implementation: str = "auto") -> jax.Array:
        """implementation: of the gated product, where there are few enough rows for it."""
        return self.down_proj(self._hidden(x, implementation, False), implementation=implementation)

    def by_kernel(self, x: jax.Array, implementation: str) -> bool:
        """Whether in `parts` a kernel reads x, [..., H], and no operation of XLA does."""
        rows, weight = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype), self.gate_up_proj.weight
        return by_kernel(rows, weight, splits=1, implementation=for_rows(implementation, rows, weight, gated=True))

    def norm(self, weight: jax.Array, x: jax.Array, implementation: str) -> jax.Array | Float8:
        """See `Linear.norm`."""
        return norm_of(weight, rounding_for(self.gate_up_proj.weight, x, implementation, gated=True))

    def parts(self, x: jax.Array | Rounded, implementation: str, *, read_by_kernel: bool = True) -> jax.Array | Unsummed:
        """The output as `Linear.parts` gives it."""
        down = self.down_proj
        inner = jax.ShapeDtypeStruct((*x.shape[:-1], down.weight.shape[-1]), x.dtype)
        read = down.by_kernel(math.prod(x.shape[:-1]), x.dtype, implementation)
        hidden = self._hidden(x, implementation, read, down.rounding(inner, implementation) == "codes")
        return down.parts(hidden, implementation, read_by_kernel=read_by_kernel)

    def _hidden(self, x: jax.Array | Rounded, implementation: str, read_by_kernel: bool, codes: bool = False) -> Any:
        rows: Any = x.flat() if isinstance(x, Rounded) else x.reshape(-1, x.shape[-1])
        weight, chosen = operand(implementation, rows, self.gate_up_proj.weight, gated=True)
        settings = {"activation": self.activation, "codes": codes, "launch_dependents": read_by_kernel}
        hidden = gated(rows, weight, **settings, implementation=chosen)
        if isinstance(hidden, Rounded):
            return dataclasses.replace(hidden, leading=x.shape[:-1])
        return hidden.reshape(*x.shape[:-1], -1)


def _product(x: jax.Array, weight: Weight, over: int, dtype: Any, implementation: str) -> jax.Array:
    """`linear.product` by a kernel, where the weight is packed and one serves so few rows. implementation: the one asked for."""
    rows = x.reshape(-1, math.prod(x.shape[x.ndim - over :]))
    weight, chosen = operand(implementation, rows, weight) if isinstance(weight, Packed) else (weight, "xla")
    if chosen == "xla":
        return product(x, weight, over=over, dtype=dtype)
    total = jnp.sum(partials(rows, weight.flat(), implementation=chosen), axis=0).astype(dtype or x.dtype)
    return total.reshape(*x.shape[: x.ndim - over], *weight.shape[: weight.ndim - over])


def head_logits(hidden: jax.Array, weight: Weight, implementation: str) -> jax.Array:
    """The products of a head's weight [V, H] with hidden states, in float32. hidden: [..., H] -> [..., V].

    implementation: of a packed weight's product, where there are few enough rows for it; else it is XLA's."""
    if not isinstance(weight, Packed):
        return Linear(weight)(hidden, dtype=jnp.float32)
    rows = hidden.reshape(-1, hidden.shape[-1])
    (logits,) = partials(rows, weight, splits=1, implementation=for_rows(implementation, rows, weight))
    return logits.reshape(*hidden.shape[:-1], -1)


def for_rows(implementation: str, rows: Any, weight: Weight, *, gated: bool = False) -> str:
    """The implementation asked for if it serves that many rows of products with this weight, or gated pair, else XLA. rows: [N, H]."""
    return implementation if rows.shape[0] <= most_rows(weight, implementation, gated=gated) else "xla"


def operand(implementation: str, rows: jax.Array | Rounded, weight: Weight, *, gated: bool = False) -> tuple[Weight, str]:
    """The weight and the implementation with which to multiply so many rows: as `for_rows` says, and a packed weight unpacked by a kernel
    if it is XLA's product that serves, unless only XLA was asked for. rows: [N, H]."""
    chosen = for_rows(implementation, rows, weight, gated=gated)
    if isinstance(weight, Packed) and chosen == "xla" != implementation:
        assert isinstance(rows, jax.Array)  # `rounding_for` asks for others where a kernel multiplies
        weight = unpacked(weight, rows, implementation=implementation)
    return weight, chosen


def rounding_for(matrix: Weight, x: Any, implementation: str, *, gated: bool = False) -> str | None:
    """How rows like x, [..., H], may be rounded before a product with a matrix [..., H] or a gated pair: see `linear.rounding`."""
    if not isinstance(matrix, Packed):
        return None
    rows = jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype)
    chosen = for_rows(implementation, rows, matrix, gated=gated)
    if chosen == "xla":
        return None
    return rounding(rows, matrix if gated else matrix.flat(), splits=1 if gated else None, implementation=chosen)


def norm_of(weight: jax.Array, form: str | None) -> jax.Array | Float8:
    """A norm as `add_norm` takes it, which rounds its rows in this form of `linear.rounding`."""
    return weight if form is None else Float8(weight, form == "codes")


def times(x: jax.Array, number: float) -> jax.Array:
    """x by a number that is not rounded to x's dtype first, as transformers multiplies: 2816 ** -0.5 is a quarter of a percent less in
    bfloat16."""
    return (x.astype(jnp.float32) * number).astype(x.dtype)


def softcap(logits: jax.Array, cap: float | None) -> jax.Array:
    """cap * tanh(logits / cap), or the logits where there is no cap."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def rope_frequencies(head_dim: int, theta: float, rotary_angles: int) -> np.ndarray:
    """Radians a position for each of head_dim / 2 pairs, float32 [head_dim / 2].

    The first `rotary_angles` pairs rotate and the rest stand still ("proportional" RoPE); exponents run over the whole head_dim.
    """
    exponent = np.arange(0, 2 * rotary_angles, 2) / head_dim
    return np.concatenate([theta**-exponent, np.zeros(head_dim // 2 - rotary_angles)]).astype(np.float32)


def rope_angles(positions: jax.Array, head_dim: int, theta: float, rotary_angles: int) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the angles by which pairs turn. positions: [B, T] int32 -> [B, T, head_dim / 2] float32 each."""
    return turned(positions, rope_frequencies(head_dim, theta, rotary_angles))


def turned(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of the angles of pairs with these frequencies, in radians a position. positions: [B, T] int32; frequencies: [P]
    -> [B, T, P] float32 each."""
    angles = positions[..., None].astype(jnp.float32) * last_axis(jnp.asarray(frequencies), 3)
    return jnp.cos(angles), jnp.sin(angles)


def rope(x: jax.Array, positions: jax.Array, theta: float, rotary_angles: int) -> jax.Array:
    """Rotates pairs (d, d + D/2) of the last axis by position. x: [B, T, ..., D], positions: [B, T] int32. Angles in float32."""
    return rotate(x, *rope_angles(positions, x.shape[-1], theta, rotary_angles))
