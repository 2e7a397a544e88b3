"""From tensors in files to arrays on devices: a small leaf goes through host memory whole, a large one in chunks. See `jobs` for how many
do at a time."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxspec.checkpoint.jobs import Job
from jaxspec.checkpoint.layout import Part
from jaxspec.checkpoint.safetensors import FLOATS, NUMPY_DTYPES, Stored

Box = tuple[tuple[int, int], ...]  # a rectangular part of an array: start and stop along each axis

LARGE_BYTES = 1 << 28  # the host never holds a larger tensor whole
COPIED_BYTES = 1 << 25  # how much of a large one it holds at a time
MOST_PUT_TOGETHER = 4  # tensors that are put together on a device, where each copies the whole


class Placing(NamedTuple):
    """How a leaf comes to its devices."""

    jobs: list[Job]
    array: Callable[[list[Any]], Any]  # from what the jobs return, to the leaf's array


def placing(leaf: Any, parts: Sequence[tuple[Part, Stored]]) -> Placing:
    """How a leaf's array comes to its devices.

    leaf: a ShapeDtypeStruct. parts: the tensors that make it up. The jobs raise ValueError for a file that ends early and for integers
    that the leaf's dtype cannot hold.
    """
    if len(parts) <= MOST_PUT_TOGETHER and all(tensor.on_devices is not None and tensor.dtype in FLOATS for _, tensor in parts):
        return Placing([Job(0, lambda update: _from_devices(leaf, parts, update))], lambda made: made[0])
    if len(parts) == 1 and parts[0][0].as_it_is and parts[0][1].nbytes > LARGE_BYTES:
        return _by_chunks(leaf, *parts[0])
    # The leaf, and of tensors that are cast one beside it.
    cast = [tensor.nbytes for _, tensor in parts if NUMPY_DTYPES[tensor.dtype] != leaf.dtype]
    nbytes = math.prod(leaf.shape) * leaf.dtype.itemsize + max(cast, default=0)
    return Placing([Job(nbytes, lambda update: put_on_devices(_assemble(leaf, parts, update), leaf))], lambda made: made[0])


def _from_devices(leaf: Any, parts: Sequence[tuple[Part, Stored]], update: Callable[[int], Any]) -> jax.Array:
    """A leaf of float tensors that lie on devices. If it is one of them as it is, and lies where the leaf is to, nothing is copied."""
    out: Any = None
    for part, tensor in parts:
        value = beside(leaf, tensor.on_devices) if part.index else tensor.on_devices
        value = value.astype(jnp.float32) + part.plus if part.plus else value
        out = filled(out, leaf.shape, part, value.astype(leaf.dtype))
        update(tensor.nbytes)
    return jax.block_until_ready(jax.device_put(out, leaf.sharding or jax.devices()[0]))


def filled(whole: jax.Array | None, shape: tuple[int, ...], part: Part, value: jax.Array) -> jax.Array:
    """An array of this shape with a part's numbers in their place. whole: with those of other parts, None if there are none yet."""
    if not part.index:
        return value.reshape(shape)
    place = np.broadcast_to(np.uint8(0), shape)[part.index]
    return (jnp.zeros(shape, value.dtype) if whole is None else whole).at[part.index].set(value.reshape(place.shape))


def beside(leaf: Any, value: jax.Array) -> jax.Array:
    """A tensor on the devices that a leaf is to lie on, so that it can be put together with others."""
    if leaf.sharding is None:
        return jax.device_put(value, jax.devices()[0])
    if value.devices() == leaf.sharding.device_set:
        return value
    return jax.device_put(value, NamedSharding(leaf.sharding.mesh, PartitionSpec()))


def _read(leaf: Any, part: Part, tensor: Stored, into: np.ndarray | None = None) -> np.ndarray:
    """A tensor's values. Raises ValueError if the leaf's dtype cannot hold them. into: see `Stored.read`."""
    value = tensor.read(into)
    if value.dtype.kind == "i" and value.size and not 0 <= value.min() <= value.max() <= np.iinfo(leaf.dtype).max:
        raise ValueError(f"{part.key} of {tensor.file} has values {value.min()} .. {value.max()}, which do not fit {leaf.dtype}")
    return value


def _assemble(leaf: Any, parts: Sequence[tuple[Part, Stored]], update: Callable[[int], Any]) -> np.ndarray:
    """A leaf's values in host memory, in its dtype."""
    out = None if len(parts) == 1 and parts[0][0].as_it_is else np.empty(leaf.shape, leaf.dtype)
    for part, tensor in parts:
        place = None if out is None else _place(out, part, tensor)
        value = _read(leaf, part, tensor, place)
        if out is None:
            out = value.astype(leaf.dtype, copy=False).reshape(leaf.shape)
        elif value is not place:
            value = value.astype(np.float32) + np.float32(part.plus) if part.plus else value
            out[part.index] = value.reshape(out[part.index].shape)
        update(tensor.nbytes)
    assert out is not None
    return out


def _place(out: np.ndarray, part: Part, tensor: Stored) -> np.ndarray | None:
    """Where in a leaf a tensor can be read to as it is, or None."""
    place = out[part.index]
    same = not part.plus and place.dtype == NUMPY_DTYPES[tensor.dtype] and place.flags.c_contiguous
    return place if same and np.may_share_memory(place, out) else None


def put_on_devices(value: np.ndarray, leaf: Any) -> jax.Array:
    """Copies a leaf's values to its devices, and waits, so that the host frees its copy before it makes the next."""
    if leaf.sharding is None:
        return jax.block_until_ready(jax.device_put(value))
    # Each process fills its own devices. device_put would first compare the whole array between all processes.
    return jax.block_until_ready(jax.make_array_from_callback(value.shape, leaf.sharding, value.__getitem__))


class Pieces:
    """A leaf's array on its devices, filled piece by piece, so that the host never holds a large leaf whole. Several threads may do it."""

    def __init__(self, leaf: Any):
        """leaf: a ShapeDtypeStruct; without a sharding its array lies on the default device."""
        self.leaf = leaf
        # The dtype to write in: to write rows of 16-bit floats a CPU copies the whole array, but it writes integers in place.
        self.bits = np.dtype(np.uint16) if leaf.dtype.itemsize == 2 and jax.default_backend() == "cpu" else leaf.dtype
        indices: Any = {None: ()} if leaf.sharding is None else leaf.sharding.addressable_devices_indices_map(leaf.shape)
        self.held: dict[Any, Box] = {}  # the part that each device holds
        for device, index in indices.items():
            cuts = (*index, *[slice(None)] * (len(leaf.shape) - len(index)))
            self.held[device] = tuple(cut.indices(size)[:2] for cut, size in zip(cuts, leaf.shape, strict=True))
        self.arrays: dict[Any, jax.Array] = {}  # what has been written, in `bits`
        self.writing = threading.Lock()

    def needed(self) -> list[Box]:
        """The pieces to write: each part that some device holds once, in rows if it is larger than LARGE_BYTES."""
        boxes = list(dict.fromkeys(self.held.values()))
        if jax.default_backend() == "cpu":  # there the host's copy becomes the array
            return boxes
        return [piece for box in boxes for piece in split(box, self.leaf.dtype.itemsize)]

    def put(self, box: Box, value: np.ndarray) -> None:
        """Writes a piece of the leaf to the devices that hold it, and waits, so that the host can free its copy.

        box: all that a device holds, or rows of that. value: what lies in it.
        """
        value = value.astype(self.leaf.dtype, copy=False)
        for device, held in self.held.items():
            common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(box, held, strict=True))
            if any(start >= stop for start, stop in common):
                continue
            piece = value[tuple(slice(start - first, stop - first) for (start, stop), (first, _) in zip(common, box, strict=True))]
            if common == held:
                self.arrays[device] = jax.block_until_ready(jax.device_put(piece, device))
                continue
            rows = jax.block_until_ready(jax.device_put(piece.view(self.bits), device))
            with self.writing:
                out = self.arrays.pop(device) if device in self.arrays else jnp.zeros(sizes(held), self.bits, device=device)
                self.arrays[device] = jax.block_until_ready(_put_rows(out, rows, np.int32(common[0][0] - held[0][0])))

    def array(self) -> jax.Array:
        """The leaf's array. Call it once, after every piece has been put."""
        arrays = [self._array(device) for device in self.held]
        if self.leaf.sharding is None:
            return arrays[0]
        return jax.make_array_from_single_device_arrays(self.leaf.shape, self.leaf.sharding, arrays)

    def _array(self, device: Any) -> jax.Array:
        held = self.arrays.pop(device)
        # Through NumPy, because a CPU then keeps the same memory under another dtype. XLA would make a second array.
        return held if held.dtype == self.leaf.dtype else jax.device_put(np.asarray(held).view(self.leaf.dtype), device)


def sizes(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def split(box: Box, itemsize: int) -> list[Box]:
    """[box], or if it is larger than LARGE_BYTES, boxes of rows of its first axis, each of at most COPIED_BYTES or one row.

    itemsize: bytes of an element. All boxes have the same number of rows, so the last may overlap the one before.
    """
    nbytes = math.prod(sizes(box)) * itemsize
    if nbytes <= LARGE_BYTES:
        return [box]
    (first, last), *others = box
    rows = min(last - first, max(1, COPIED_BYTES * (last - first) // nbytes))
    # One size, so that one program writes them all.
    starts = (min(start, last - rows) for start in range(first, last, rows))
    return [((start, start + rows), *others) for start in starts]


def _by_chunks(leaf: Any, part: Part, tensor: Stored) -> Placing:
    """How a leaf that is one tensor is copied through host memory chunk by chunk."""
    out, row = Pieces(leaf), tensor.nbytes // leaf.shape[0]

    def job(box: Box, new: int) -> Job:
        chunk = tensor.rows(leaf.shape, *box[0])

        def copy(update: Callable[[int], Any]) -> None:
            out.put(box, _read(leaf, part, chunk))
            update(new * row)

        return Job(chunk.nbytes, copy)

    jobs, done = list[Job](), 0
    for rows in sorted({held[0] for held in out.held.values()}):
        for box in split((rows, *((0, size) for size in leaf.shape[1:])), tensor.nbytes // math.prod(leaf.shape)):
            stop = box[0][1]
            jobs.append(job(box, stop - max(box[0][0], done)))
            done = stop
    return Placing(jobs, lambda _: out.array())


@functools.partial(jax.jit, donate_argnums=0)
def _put_rows(out: jax.Array, rows: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(out, rows, start, axis=0)
