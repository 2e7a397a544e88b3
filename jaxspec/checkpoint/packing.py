"""From a quantised checkpoint's tensors to a `Packed` on devices, or to a small matrix unpacked. The host holds one leaf's codes, a byte a
weight, and of large leaves never the weights. Float arrays of JAX are quantised where they lie."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.checkpoint.from_floats import ON_DEVICES, FromFloats
from jaxspec.checkpoint.jobs import Job, compiled_once
from jaxspec.checkpoint.layout import Part
from jaxspec.checkpoint.onto_devices import MOST_PUT_TOGETHER, Placing, beside, filled, put_on_devices
from jaxspec.checkpoint.quantisation import Format, Scheme, group_within
from jaxspec.checkpoint.safetensors import Stored
from pallas_kernels import packed
from pallas_kernels.packed import BLOCK, Packed

_packing = threading.Lock()  # so that devices hold what comes up in packing one leaf


class Source(NamedTuple):
    """What holds a part of a leaf in the files."""

    key: str  # of the float matrix, with the prefix
    part: Part
    format: Format
    tensors: Mapping[str, Stored]


def packed_placing(leaf: Any, sources: Sequence[Source]) -> Placing:
    """How a leaf's matrix comes to its devices. leaf: a Packed of ShapeDtypeStructs, or a ShapeDtypeStruct of a matrix to be unpacked.
    sources: the parts that make it up, all of one scheme. The job raises ValueError for a file that ends early and for contents that do
    not fit."""
    nbytes = 2 * math.prod(leaf.shape)  # a byte a weight as codes, and about one as words
    if isinstance(leaf, Packed):
        if len(sources) <= MOST_PUT_TOGETHER and all(map(_is_on_devices, sources)):
            return Placing([Job(0, lambda update: _on_devices(leaf, sources, update))], lambda made: made[0])
        return Placing([Job(nbytes, lambda update: jax.tree.map(put_on_devices, _read(leaf, sources, update), leaf))], lambda made: made[0])
    scheme = sources[0].format.scheme
    settings = {"group": scheme.group, "zeros": scheme.zeros, "affine": scheme.affine}
    form = packed.abstract(leaf.shape, scheme.kind, scale_dtype=jnp.dtype(scheme.scale_dtype), **settings)
    nbytes += math.prod(leaf.shape) * leaf.dtype.itemsize

    def unpacked(update: Callable[[int], Any]) -> jax.Array:
        made = jax.tree.map(lambda x: jax.device_put(x, _host()), _read(form, sources, update))
        program = compiled_once(("unpack", leaf.shape, leaf.dtype, scheme), _unpack, made, dtype=leaf.dtype)
        return put_on_devices(np.asarray(program(made)), leaf)

    return Placing([Job(nbytes, unpacked)], lambda made: made[0])


def _read(leaf: Packed, sources: Sequence[Source], update: Callable[[int], Any]) -> Packed:
    """The matrix in host memory, packed."""
    scheme = sources[0].format.scheme
    group, scales = _scales_of(leaf, scheme)
    codes, scale = np.empty(leaf.shape, np.uint8), np.empty(scales, jnp.dtype(scheme.scale_dtype))
    zero = np.empty_like(scale) if scheme.zeros else None
    for source in sources:
        found = source.format.read(source.key, source.part.shape, source.tensors)
        if not np.isfinite(np.asarray(found.scale, np.float32)).all():
            raise ValueError(f"{source.key}: its scales are not all finite numbers")
        _fill(codes, source.part, found.codes)
        for numbers, part in ((scale, found.scale), (zero, found.zero)):
            if numbers is not None:
                assert part is not None
                _fill(numbers, source.part, _of_groups(part, leaf, scheme))
        update(sum(tensor.nbytes for tensor in source.tensors.values()))
    settings = {"kind": scheme.kind, "over": leaf.over, "group": group, "affine": scheme.affine}
    return dataclasses.replace(_packed(codes, scale, zero, **settings), inputs=leaf.inputs)


def _scales_of(leaf: Packed, scheme: Scheme) -> tuple[int | None, tuple[int, ...]]:
    """How many inputs of a leaf share a scale, and the shape of its scales as `packed.pack` takes them."""
    split, shape = leaf.ndim - leaf.over, leaf.shape
    group = group_within(shape, leaf.over, scheme.group)
    return group, (*shape[:split], *((1,) * leaf.over if group is None else (*shape[split:-1], -(-shape[-1] // group))))


def _of_groups(numbers: Any, leaf: Packed, scheme: Scheme) -> Any:
    """Scales or zeros of a file, for each group of the leaf: one stands for several where the leaf's last axis ends inside its group."""
    group, shape = _scales_of(leaf, scheme)
    again = scheme.group // group if scheme.group and group else 1
    return numbers if again == 1 else numbers.repeat(again, axis=-1)[..., : math.prod(shape[leaf.ndim - leaf.over :])]


def _is_on_devices(source: Source) -> bool:
    """Whether a part is a float matrix of arrays of JAX."""
    return isinstance(source.format, FromFloats) and all(tensor.on_devices is not None for tensor in source.tensors.values())


def _on_devices(leaf: Packed, sources: Sequence[Source], update: Callable[[int], Any]) -> Packed:
    """The matrix of float ones that lie on devices, quantised and packed there."""
    scheme = sources[0].format.scheme
    group, scales = _scales_of(leaf, scheme)
    codes: Any = None
    scale: Any = None
    with _packing:
        for source in sources:
            assert isinstance(source.format, FromFloats)
            floats = source.tensors[source.key].on_devices.reshape(source.part.shape)
            its, their = source.format.of_array(beside(leaf.words, floats))
            if not jnp.isfinite(their).all():
                raise ValueError(f"{source.key}: its scales are not all finite numbers")
            codes = filled(codes, leaf.shape, source.part, its)
            scale = filled(scale, scales, source.part, _of_groups(their, leaf, scheme))
            update(sum(tensor.nbytes for tensor in source.tensors.values()))
        whole = BLOCK if leaf.ndim - leaf.over == 1 else 1  # the last axis of outputs is packed in blocks
        at_once = whole * max(1, ON_DEVICES // (whole * math.prod(leaf.shape[1:])))
        settings = {"kind": scheme.kind, "over": leaf.over, "group": group}
        parts = [_jitted(codes[i : i + at_once], scale[i : i + at_once], **settings) for i in range(0, leaf.shape[0], at_once)]
        words, scale = (jnp.concatenate(part) for part in ([part.words for part in parts], [part.scale for part in parts]))
        made = dataclasses.replace(parts[-1], words=words, scale=scale, inputs=leaf.inputs)
        return jax.block_until_ready(jax.tree.map(lambda x, to: jax.device_put(x, to.sharding or jax.devices()[0]), made, leaf))


def _fill(whole: np.ndarray, part: Part, values: np.ndarray) -> None:
    """Puts a part's numbers in its place of the leaf. Its inputs are one axis; the leaf's may be several."""
    place = whole[part.index]
    whole[part.index] = values.reshape(place.shape)


def _packed(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray | None, **settings: Any) -> Packed:
    """packed.pack on the host. Returns NumPy arrays."""
    host = _host()
    arguments = [None if x is None else jax.device_put(x, host) for x in (codes, scale, zero)]
    key = "pack", *sorted(settings.items()), *((x.shape, x.dtype) for x in arguments if x is not None)
    program = compiled_once(key, _jitted, *arguments, **settings)
    return jax.tree.map(np.asarray, program(*arguments))


_jitted = jax.jit(packed.pack, static_argnames=("kind", "over", "group", "affine"))
_unpack = jax.jit(packed.unpack, static_argnames="dtype")


@functools.cache
def _host() -> Any:
    """The device to pack on: a CPU, or JAX's default device where it was told to use no CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
