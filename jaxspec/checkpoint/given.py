"""Tensors that somebody has in memory, read as those of a file are: arrays of NumPy, JAX or PyTorch, by their names in a checkpoint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxspec.checkpoint.safetensors import NUMPY_DTYPES, Stored, without_wrappers
from jaxspec.checks import type_name

GIVEN = Path("the given tensors")  # what errors call the checkpoint
NAMES = {str(dtype): name for name, dtype in NUMPY_DTYPES.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class _Given(Stored):
    """Such a tensor, which `read` copies to the host."""

    value: Any = None

    @property
    def on_devices(self) -> Any:
        return self.value if isinstance(self.value, jax.Array) else None

    def read(self, into: np.ndarray | None = None) -> np.ndarray:
        found = self._on_host()
        if into is None:
            return np.array(found)  # a copy, as what is read may become a device's own memory
        into[...] = found.reshape(into.shape)
        return into

    def rows(self, shape: tuple[int, ...], start: int, stop: int) -> Stored:
        row = self.nbytes // shape[0]
        own = {"shape": (stop - start, *shape[1:]), "nbytes": (stop - start) * row}
        return dataclasses.replace(self, **own, value=self.value.reshape(shape)[start:stop])

    def _on_host(self) -> np.ndarray:
        if not hasattr(self.value, "detach"):
            return np.asarray(self.value)
        import torch  # whose arrays these are: NumPy knows none of its bfloat16, but bytes

        flat = self.value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return flat.view(NUMPY_DTYPES[self.dtype]).reshape(self.shape)


def stored_of(tensors: Mapping[str, Any]) -> dict[str, Stored]:
    """The tensors, unread, by the names that a file would have them under: without those of wrappers, as `tensors.read_folder` gives
    them. Raises TypeError for what is no array of numbers that a checkpoint may hold, ValueError for one without its numbers."""
    found = dict[str, Stored]()
    for name, value in tensors.items():
        shape, dtype = getattr(value, "shape", None), str(getattr(value, "dtype", None)).removeprefix("torch.")
        if not isinstance(name, str) or shape is None or dtype not in NAMES:
            what = f"an array of {dtype}" if shape is not None else f"of type {type_name(value)}"
            raise TypeError(f"the tensor {name!r} is {what}; expected arrays of {', '.join(NAMES)} by name")
        if not _has_numbers(value):
            raise ValueError(f"the tensor {name!r} has no numbers: it is on torch's meta device, a ShapeDtypeStruct, donated or deleted")
        kind = NAMES[dtype]
        found[name] = _Given(GIVEN, kind, tuple(shape), 0, math.prod(shape) * NUMPY_DTYPES[kind].itemsize, _spread_by_xla(value))
    return without_wrappers(found)


def _has_numbers(value: Any) -> bool:
    if isinstance(value, jax.Array):
        return not value.is_deleted()
    return not isinstance(value, jax.ShapeDtypeStruct) and not getattr(value, "is_meta", False)


def _spread_by_xla(value: Any) -> Any:
    """An array of JAX on a mesh with axes of type Explicit, with which operations would have to say where their results lie, as one on a
    mesh without. Nothing is copied."""
    if not isinstance(value, jax.Array) or not isinstance(value.sharding, NamedSharding):
        return value
    mesh: Any = value.sharding.mesh
    return jax.device_put(value, NamedSharding(Mesh(mesh.devices, mesh.axis_names), value.sharding.spec))
