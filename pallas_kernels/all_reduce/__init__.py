"""Sums and gathers of few rows over the devices of a mesh axis, inside `shard_map`.

Where the GPUs of one host reach each other's memory, a kernel does it (`triton`), which is part of a CUDA graph and takes little longer
than the way of a message. Everywhere else `jax.lax` does. `add_norm` takes what is still to be summed, so that one kernel does both.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.all_reduce import triton
from pallas_kernels.all_reduce.mailboxes import tables


@functools.partial(jax.tree_util.register_dataclass, data_fields=("parts", "mail"), meta_fields=())
@dataclasses.dataclass
class Unsummed:
    """An array that is the sum over devices of the sums of their parts. parts: float32 [S, ..., W]; mail: see `all_reduce`."""

    parts: jax.Array
    mail: jax.Array

    def summed(self, dtype: Any) -> jax.Array:
        """[..., W]; the parts' sum of each device is rounded to the dtype first, which is bfloat16."""
        own = jnp.sum(self.parts, axis=0).astype(dtype)
        return triton.all_reduce(own.reshape(-1, own.shape[-1]), self.mail).reshape(own.shape)


def all_reduce(x: jax.Array, axis: str, mail: jax.Array | None) -> jax.Array:
    """The sum of all devices' x, added up in float32 in the order of devices where a kernel does it.

    x: [..., W]. mail: the device's table as `tables` makes it, [D + 1, 2] int32, or None for `jax.lax.psum`, which serves as well where
    the kernel does not take such rows.
    """
    if not x.ndim or not serves(math.prod(x.shape[:-1]), x.shape[-1], x.dtype, mail):
        return jax.lax.psum(x, axis)
    return triton.all_reduce(x.reshape(-1, x.shape[-1]), mail).reshape(x.shape)


def all_gather(x: jax.Array, axis: str, mail: jax.Array | None) -> jax.Array:
    """All devices' x, in their order. x: [...] int32, few numbers -> [D, ...]. mail: as for `all_reduce`."""
    # The kernel takes numbers of which it keeps the upper half.
    width = max(triton.LEAST_WIDTH, -(-2 * x.size // triton.ALIGNMENT) * triton.ALIGNMENT)
    if not serves(1, width, jnp.dtype(jnp.bfloat16), mail):
        # A sum of arrays that are zero but for one device's place: between GPUs, XLA adds up a few bytes sooner than NCCL gathers them.
        every = jnp.zeros((jax.lax.axis_size(axis), *x.shape), x.dtype)
        return jax.lax.psum(every.at[jax.lax.axis_index(axis)].set(x), axis)
    halves = jax.lax.bitcast_convert_type(x.reshape(-1), jnp.uint16).reshape(1, -1)
    every = triton.all_gather(jnp.pad(halves, ((0, 0), (0, width - halves.size))), mail)
    every = every[:, 0, : halves.size].reshape(-1, x.size, 2)
    return jax.lax.bitcast_convert_type(every, x.dtype).reshape(-1, *x.shape)


def serves(rows: int, width: int, dtype: jnp.dtype, mail: jax.Array | None) -> bool:
    """Whether the kernel serves so many rows."""
    return mail is not None and triton.unsupported(rows, width, dtype) is None


__all__ = ["Unsummed", "all_gather", "all_reduce", "serves", "tables"]
