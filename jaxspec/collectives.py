"""What the devices of a mesh axis do together inside `shard_map`: sum, gather, and choose from a vocabulary that is spread over them.

axis: the mesh axis, or None for a single device, where these functions return their input. mail: the device's table of mailboxes of
`pallas_kernels.all_reduce`; None lets XLA communicate.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels.all_reduce import all_gather, all_reduce

DATA, TENSOR = "data", "tensor"  # the axes of a mesh


def summed(x: jax.Array, axis: str | None, mail: jax.Array | None = None) -> jax.Array:
    """The sum of x over the devices of the axis. Shape and dtype stay."""
    return x if axis is None else all_reduce(x, axis, mail)


def gathered(x: jax.Array, axis: str | None) -> jax.Array:
    """x of all devices of the axis, concatenated along its last dimension."""
    return x if axis is None else jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)


def local_ids(ids: jax.Array, size: int, axis: str, missing: int) -> jax.Array:
    """Global ids as indices into this device's share, which is `size` long; `missing` for ids of other devices. [...] int32, both."""
    at = ids - size * jax.lax.axis_index(axis)
    return jnp.where((at >= 0) & (at < size), at, missing)


@struct.dataclass
class Shard:
    """A device's share of a vocabulary that is spread over a mesh axis, in order of ids.

    Logits over `size` tokens, without a list of candidates, belong to the share. All other logits are the same on every device.
    """

    axis: str = struct.field(pytree_node=False)  # the mesh axis
    size: int = struct.field(pytree_node=False)  # tokens on each device
    mail: jax.Array | None = None

    @property
    def first(self) -> jax.Array:
        """The id of the share's first token: [] int32."""
        return self.size * jax.lax.axis_index(self.axis)

    def best(self, values: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The largest value over all devices and its id: (ids, values), each [...]. Of equal values the lowest id wins; NaN is largest.

        values: [...] float32; ids: [...] int32, global.
        """
        pair = jnp.stack([jax.lax.bitcast_convert_type(values, jnp.int32), ids])
        every = all_gather(pair, self.axis, self.mail)
        values, ids = jax.lax.bitcast_convert_type(every[:, 0], jnp.float32), every[:, 1]
        # Devices are in the order of their ids, and argmax takes the first of equals.
        first = jnp.argmax(values, axis=0)[None]
        return jnp.take_along_axis(ids, first, axis=0)[0], jnp.take_along_axis(values, first, axis=0)[0]

    def any(self, x: jax.Array) -> jax.Array:
        """Whether x is true on any device, like x. x: [...] bool."""
        return jnp.any(all_gather(x.astype(jnp.int32), self.axis, self.mail) > 0, axis=0)


def shard_of(logits: jax.Array, ids: jax.Array | None, shard: Shard | None) -> Shard | None:
    """`shard` if these logits cover only its tokens, else None. logits: [..., C]; ids: the candidates' token ids, or None."""
    return shard if shard is not None and ids is None and logits.shape[-1] == shard.size else None


def suppress(logits: jax.Array, tokens: tuple[int, ...], shard: Shard | None) -> jax.Array:
    """Logits with -inf for these tokens. logits: [..., C], over the vocabulary or over the shard's tokens."""
    at, shard = jnp.asarray(tokens, jnp.int32), shard_of(logits, None, shard)
    at = at if shard is None else local_ids(at, shard.size, shard.axis, shard.size)
    return logits.at[..., at].set(-jnp.inf, mode="drop")


def over_vocabulary(logits: jax.Array, shard: Shard | None, size: int) -> jax.Array:
    """Logits over a vocabulary of `size` tokens, of those over its first tokens alone: -inf for the rest, on every device. Those over all
    of it stay as they are. [..., C] -> [..., V], or the shard's part of it as it came."""
    own = shard_of(logits, None, shard)
    if (missing := size - logits.shape[-1] * (1 if own is None else jax.lax.axis_size(own.axis))) == 0:
        return logits
    return jnp.pad(full_logits(logits, shard), [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)


def full_logits(logits: jax.Array, shard: Shard | None) -> jax.Array:
    """Logits over the whole vocabulary, on every device. [..., C] -> [..., V]"""
    shard = shard_of(logits, None, shard)
    return logits if shard is None else gathered(logits, shard.axis)
