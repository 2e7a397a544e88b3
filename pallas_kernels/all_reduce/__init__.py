"""Sums and gathers of few rows over the devices of a mesh axis, inside `shard_map`.

If the GPUs of one host reach each other's memory, a kernel does it (`triton`). It can be part of a CUDA graph and takes little longer
than a message between two GPUs. Otherwise `jax.lax` does it. `add_norm` takes an `Unsummed`, so that one kernel sums and norms.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.all_reduce import triton
from pallas_kernels.all_reduce.mailboxes import mailbox_tables


@functools.partial(jax.tree_util.register_dataclass, data_fields=("parts", "mail"), meta_fields=())
@dataclasses.dataclass
class Unsummed:
    """An array that is yet to be summed, over its parts and over devices."""

    parts: jax.Array  # [S, ..., W] float32
    mail: jax.Array  # see `all_reduce`

    def summed(self, dtype: Any) -> jax.Array:
        """The sum, [..., W]. Each device first rounds the sum of its parts to the dtype, which must be bfloat16."""
        own = jnp.sum(self.parts, axis=0).astype(dtype)
        return triton.all_reduce(own.reshape(-1, own.shape[-1]), self.mail).reshape(own.shape)


def all_reduce(x: jax.Array, axis: str, mail: jax.Array | None) -> jax.Array:
    """The sum of x over all devices of the axis, like x. The kernel sums in float32, in the order of devices.

    x: [..., W]. mail: [D + 1, 2] int32, the device's table from `mailbox_tables`. `jax.lax.psum` serves if it is None, or if the kernel
    does not take such rows.
    """
    if not x.ndim or not serves(math.prod(x.shape[:-1]), x.shape[-1], x.dtype, mail):
        return jax.lax.psum(x, axis)
    return triton.all_reduce(x.reshape(-1, x.shape[-1]), mail).reshape(x.shape)


def all_gather(x: jax.Array, axis: str, mail: jax.Array | None) -> jax.Array:
    """x of all devices of the axis, in their order: [D, ...]. x: [...] int32, of few numbers. mail: as for `all_reduce`."""
    # The kernel sends 16-bit numbers, so each of x takes two.
    width = max(triton.LEAST_WIDTH, -(-2 * x.size // triton.ALIGNMENT) * triton.ALIGNMENT)
    if not serves(1, width, jnp.dtype(jnp.bfloat16), mail):
        # Each device adds its x to zeros in its own place. Between GPUs XLA sums a few bytes faster than NCCL gathers them.
        every = jnp.zeros((jax.lax.axis_size(axis), *x.shape), x.dtype)
        return jax.lax.psum(every.at[jax.lax.axis_index(axis)].set(x), axis)
    halves = jax.lax.bitcast_convert_type(x.reshape(-1), jnp.uint16).reshape(1, -1)
    every = triton.all_gather(jnp.pad(halves, ((0, 0), (0, width - halves.size))), mail)
    every = every[:, 0, : halves.size].reshape(-1, x.size, 2)
    return jax.lax.bitcast_convert_type(every, x.dtype).reshape(-1, *x.shape)


def serves(rows: int, width: int, dtype: jnp.dtype, mail: jax.Array | None) -> bool:
    """Whether the kernel serves rows of this number, width and dtype. mail: as for `all_reduce`."""
    return mail is not None and triton.unsupported(rows, width, dtype) is None


__all__ = ["Unsummed", "all_gather", "all_reduce", "mailbox_tables", "serves"]
