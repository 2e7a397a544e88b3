"""Leaves of a tree of weights, from tensors in files to their devices: whole by way of host memory, or a chunk at a time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.layout import Part
from jaxspec.checkpoint.safetensors import Stored

Box = tuple[tuple[int, int], ...]  # a part of an array: along each axis its start, and where it stops

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


class Pieces:
    """A leaf on its devices, filled a piece at a time, so that the host never holds a large one whole."""

    def __init__(self, leaf: Any):
        self.leaf = leaf
        # A CPU writes rows of 16-bit floats by going through the whole array, rows of integers in place.
        self.bits = np.dtype(np.uint16) if leaf.dtype.itemsize == 2 and jax.default_backend() == "cpu" else leaf.dtype
        indices: Any = {None: ()} if leaf.sharding is None else leaf.sharding.addressable_devices_indices_map(leaf.shape)
        self.held: dict[Any, Box] = {}
        for device, index in indices.items():
            cuts = (*index, *[slice(None)] * (len(leaf.shape) - len(index)))
            self.held[device] = tuple(cut.indices(size)[:2] for cut, size in zip(cuts, leaf.shape, strict=True))
        self.arrays: dict[Any, jax.Array] = {}

    def needed(self) -> list[Box]:
        """What its devices hold, each part once, and parts above LARGE bytes by rows."""
        boxes = list(dict.fromkeys(self.held.values()))
        if jax.default_backend() == "cpu":  # where the host's copy is the array
            return boxes
        return [piece for box in boxes for piece in split(box, self.leaf.dtype.itemsize)]

    def put(self, box: Box, value: np.ndarray) -> None:
        """Writes a piece of the leaf where it is held: all that a device holds, or rows of that. Waits, so that the host's copy can go."""
        value = value.astype(self.leaf.dtype, copy=False)
        for device, held in self.held.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, held, strict=True))
            if any(start >= stop for start, stop in common):
                continue
            piece = value[tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(common, box, strict=True))]
            if common == held:
                self.arrays[device] = jax.device_put(piece, device)
                continue
            out = self.arrays[device] if device in self.arrays else jnp.zeros(sizes(held), self.bits, device=device)
            rows = jax.device_put(piece.view(self.bits), device)
            self.arrays[device] = _put_rows(out, rows, np.int32(common[0][0] - held[0][0]))
        jax.block_until_ready(list(self.arrays.values()))

    def array(self) -> jax.Array:
        """The leaf, once all of it is there; the object is of no use after that."""
        arrays = [self._array(device) for device in self.held]
        if self.leaf.sharding is None:
            return arrays[0]
        return jax.make_array_from_single_device_arrays(self.leaf.shape, self.leaf.sharding, arrays)

    def _array(self, device: Any) -> jax.Array:
        held = self.arrays.pop(device)
        # By way of NumPy a CPU takes an array under another dtype as it lies there, where XLA would make a second one.
        return held if held.dtype == self.leaf.dtype else jax.device_put(np.asarray(held).view(self.leaf.dtype), device)


def sizes(box: Box) -> tuple[int, ...]:
    """The shape of what lies in a box."""
    return tuple(stop - start for start, stop in box)


def split(box: Box, itemsize: int) -> list[Box]:
    """A box as it is, or above LARGE bytes as rows of its first axis, CHUNK bytes or one row at a time."""
    nbytes = math.prod(sizes(box)) * itemsize
    if nbytes <= LARGE:
        return [box]
    (first, last), *others = box
    rows = min(last - first, max(1, CHUNK * (last - first) // nbytes))
    # The last rows are as many as the others, so that one program writes them all.
    starts = (min(start, last - rows) for start in range(first, last, rows))
    return [((start, start + rows), *others) for start in starts]


def _stream(leaf: Any, part: Part, tensor: Stored, update: Callable[[int], Any]) -> jax.Array:
    """A leaf that is one tensor, on its devices, by way of a chunk in host memory at a time."""
    out, row, done = Pieces(leaf), tensor.nbytes // leaf.shape[0], 0
    for rows in sorted({held[0] for held in out.held.values()}):
        for box in split((rows, *((0, size) for size in leaf.shape[1:])), tensor.nbytes // math.prod(leaf.shape)):
            start, stop = box[0]
            out.put(box, _read(leaf, part, tensor.part(leaf.shape, start, stop)))
            update((stop - max(start, done)) * row)
            done = stop
    return out.array()


@functools.partial(jax.jit, donate_argnums=0)
def _put_rows(out: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(out, rows, start, axis=0)
