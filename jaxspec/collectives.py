"""What the devices of a mesh axis do together inside `shard_map`: add up, gather, and choose from a vocabulary that lies on all of them.

An axis of None is one device, where all of this does nothing. `mail` is a device's table of `pallas_kernels.all_reduce`, or None.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.all_reduce import all_gather, all_reduce

DATA, TENSOR = "data", "tensor"  # the axes of a mesh


def summed(x: jax.Array, axis: str | None, mail: jax.Array | None = None) -> jax.Array:
    """The sum of all devices' x."""
    return x if axis is None else all_reduce(x, axis, mail)


def gathered(x: jax.Array, axis: str | None) -> jax.Array:
    """All devices' x, joined along the last axis."""
    return x if axis is None else jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)


def own(ids: jax.Array, size: int, axis: str, nobody: int) -> jax.Array:
    """Ids counted from this device's first, of `size` on each device; `nobody` for those of other devices. ids: [...] int32."""
    at = ids - size * jax.lax.axis_index(axis)
    return jnp.where((at >= 0) & (at < size), at, nobody)


@struct.dataclass
class Shard:
    """A device's part of a vocabulary that lies over a mesh axis in order: `size` tokens. Logits as wide as that, of no listed
    candidates, are those of a part; all others are the same on every device."""

    axis: str = struct.field(pytree_node=False)
    size: int = struct.field(pytree_node=False)
    mail: jax.Array | None = None

    @property
    def first(self) -> jax.Array:
        """The id of the part's first token: [] int32."""
        return self.size * jax.lax.axis_index(self.axis)

    def best(self, values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The ids with the largest value of all devices, of equal ones the lowest, and that value; a NaN of any device is the largest.
        values: float32, ids: int32, of one shape."""
        pair = jnp.stack([jax.lax.bitcast_convert_type(values, jnp.int32), ids])
        every = all_gather(pair, self.axis, self.mail)
        values, ids = jax.lax.bitcast_convert_type(every[:, 0], jnp.float32), every[:, 1]
        # Devices are in the order of their ids, and argmax takes the first of equals.
        first = jnp.argmax(values, axis=0)[None]
        return jnp.take_along_axis(ids, first, axis=0)[0], jnp.take_along_axis(values, first, axis=0)[0]


def part(logits: jax.Array, ids: jax.Array | None, shard: Shard | None) -> Shard | None:
    """The shard, if these logits are of one."""
    return shard if shard is not None and ids is None and logits.shape[-1] == shard.size else None


def without(logits: jax.Array, tokens: tuple[int, ...], shard: Shard | None) -> jax.Array:
    """Logits with -inf for these tokens. [..., C], of all tokens or of a shard."""
    at, shard = jnp.asarray(tokens, jnp.int32), part(logits, None, shard)
    at = at if shard is None else own(at, shard.size, shard.axis, shard.size)
    return logits.at[..., at].set(-jnp.inf, mode="drop")


def whole(logits: jax.Array, shard: Shard | None) -> jax.Array:
    """Logits of the whole vocabulary. [..., C] -> [..., V]"""
    shard = part(logits, None, shard)
    return logits if shard is None else gathered(logits, shard.axis)
