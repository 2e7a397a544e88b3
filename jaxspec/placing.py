"""Leaves of a tree of weights, from tensors in files to their devices: whole by way of host memory, or a chunk at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxspec.checkpoint import Part, Stored

CHUNK = 1 << 26
LARGE = 1 << 28  # bytes above which a tensor is not held whole


def placed(leaf: Any, parts: Sequence[tuple[Part, Stored]], update: Callable[[int], Any]) -> jax.Array:
    """The leaf, a ShapeDtypeStruct, on its devices in its dtype. parts: the tensors that make it up. update: is told of bytes read."""
    if len(parts) == 1 and parts[0][1].nbytes > LARGE:
        return _stream(leaf, *parts[0], update)
    return _place(_assemble(leaf, parts, update), leaf)


def _read(leaf: Any, part: Part, tensor: Stored) -> np.ndarray:
    """A tensor whose values the leaf's dtype can hold."""
    value = tensor.read()
    if value.dtype.kind == "i" and value.size and not 0 <= value.min() <= value.max() <= np.iinfo(leaf.dtype).max:
        raise ValueError(f"{part.key} of {tensor.file} has values {value.min()} .. {value.max()}, which do not fit {leaf.dtype}")
    return value


def _assemble(leaf: Any, parts: Sequence[tuple[Part, Stored]], update: Callable[[int], Any]) -> np.ndarray:
    """A leaf in host memory, in its dtype."""
    out = None if len(parts) == 1 else np.empty(leaf.shape, leaf.dtype)
    for part, tensor in parts:
        value = _read(leaf, part, tensor)
        if out is None:
            out = value.astype(leaf.dtype, copy=False).reshape(leaf.shape)
        else:
            out[part.index] = value.reshape(out[part.index].shape)
        update(tensor.nbytes)
    assert out is not None
    return out


def _place(value: np.ndarray, leaf: Any) -> jax.Array:
    """The leaf on its devices. Waits, so that the host's copy can go before the next is made."""
    if leaf.sharding is None:
        return jax.block_until_ready(jax.device_put(value))
    # Each process fills its own devices: device_put would first compare the whole array among all processes.
    return jax.block_until_ready(jax.make_array_from_callback(value.shape, leaf.sharding, value.__getitem__))


class Rows:
    """A leaf on its devices, filled by rows of its first axis, so that the host never holds it whole."""

    def __init__(self, leaf: Any):
        self.leaf = leaf
        # A CPU writes rows of 16-bit floats by going through the whole array, rows of integers in place.
        self.bits = np.dtype(np.uint16) if leaf.dtype.itemsize == 2 and jax.default_backend() == "cpu" else leaf.dtype
        indices: Any = {None: ()} if leaf.sharding is None else leaf.sharding.addressable_devices_indices_map(leaf.shape)
        self.held: dict[Any, tuple[slice, ...]] = {}
        for device, index in indices.items():
            cuts = (*index, *[slice(None)] * (len(leaf.shape) - len(index)))
            self.held[device] = tuple(slice(*cut.indices(size)[:2]) for cut, size in zip(cuts, leaf.shape, strict=True))
        shapes = {device: [cut.stop - cut.start for cut in index] for device, index in self.held.items()}
        self.arrays = {device: jnp.zeros(shape, self.bits, device=device) for device, shape in shapes.items()}

    def ranges(self) -> list[tuple[int, int]]:
        """The rows that devices hold: disjoint ranges, each held by one device or more."""
        return sorted({(index[0].start, index[0].stop) for index in self.held.values()})

    def put(self, start: int, value: np.ndarray) -> None:
        """Writes rows from `start` on where they are held. Waits, so that the host's copy can go."""
        value = value.astype(self.leaf.dtype, copy=False).view(self.bits)
        for device, (rows, *others) in self.held.items():
            first, last = max(start, rows.start), min(start + len(value), rows.stop)
            if first < last:
                piece = jax.device_put(value[first - start : last - start, *others], device)
                self.arrays[device] = jax.block_until_ready(_put_rows(self.arrays[device], piece, np.int32(first - rows.start)))

    def array(self) -> jax.Array:
        """The leaf, once all its rows are there; the object is of no use after that."""
        arrays = [self._array(device) for device in self.held]
        if self.leaf.sharding is None:
            return arrays[0]
        return jax.make_array_from_single_device_arrays(self.leaf.shape, self.leaf.sharding, arrays)

    def _array(self, device: Any) -> jax.Array:
        held = self.arrays.pop(device)
        # By way of NumPy a CPU takes an array under another dtype as it lies there, where XLA would make a second one.
        return held if held.dtype == self.leaf.dtype else jax.device_put(np.asarray(held).view(self.leaf.dtype), device)


def _stream(leaf: Any, part: Part, tensor: Stored, update: Callable[[int], Any]) -> jax.Array:
    """A leaf that is one tensor, on its devices, by way of a chunk in host memory at a time."""
    out, row = Rows(leaf), tensor.nbytes // leaf.shape[0]
    for first, last in out.ranges():
        rows = min(last - first, max(1, CHUNK // row))
        for done in range(first, last, rows):
            start = min(done, last - rows)  # the last chunk is as long as the others, so that one program writes them all
            out.put(start, _read(leaf, part, tensor.part(leaf.shape, start, start + rows)))
            update((start + rows - done) * row)
    return out.array()


@functools.partial(jax.jit, donate_argnums=0)
def _put_rows(out: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(out, rows, start, axis=0)
