"""Meshes of devices with the axes "data" and "tensor", and the parts of one."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxspec import checks
from jaxspec.collectives import DATA, TENSOR


def mesh(*, data: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of the first data * tensor devices. Raises TypeError for what is no integer, ValueError for one below 1 or if there are fewer
    devices, and as `check` does."""
    data, tensor = checks.integer(DATA, data, 1), checks.integer(TENSOR, tensor, 1)
    devices = jax.devices()
    if data * tensor > len(devices):
        raise ValueError(f"a mesh of data={data} times tensor={tensor} devices was asked for; found {len(devices)}")
    made = Mesh(np.asarray(devices[: data * tensor]).reshape(data, tensor), (DATA, TENSOR))
    check(made)
    return made


def check(mesh: Mesh) -> None:
    """Raises TypeError for what is no mesh, ValueError for one of other axes, one that names a device twice, or one that
    spreads data over processes."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is {mesh!r}, expected a Mesh, as jaxspec.mesh(data=2, tensor=4) makes it")
    if mesh.axis_names != (DATA, TENSOR):
        raise ValueError(f"mesh has axes {mesh.axis_names}, expected 'data' and 'tensor' in this order")
    if len(set(mesh.devices.flat)) < mesh.size:
        raise ValueError(f"the mesh of {mesh.size} devices names one of them twice: found {[str(device) for device in mesh.devices.flat]}")
    data, processes = mesh.shape[DATA], _processes(mesh)
    if data > 1 and processes > 1:
        raise ValueError(
            f"the mesh has data={data} and lies in {processes} processes; expected tensor alone over processes, and for data processes "
            f"that know nothing of each other, each with its share of the requests: jaxspec batch --shard i/{data}"
        )


def _processes(mesh: Mesh) -> int:
    """How many processes a mesh spans."""
    return len({device.process_index for device in mesh.devices.flat})


def mesh_of(text: str) -> Mesh:
    """The mesh that a text like "tensor=4" or "data=2,tensor=4" asks for. Raises ValueError."""
    return mesh(**axes_of(text))


def abstract_mesh_of(text: str) -> AbstractMesh:
    """The same without devices, for shapes alone."""
    sizes = axes_of(text)
    return AbstractMesh((sizes.get(DATA, 1), sizes.get(TENSOR, 1)), (DATA, TENSOR))


def axes_of(text: str) -> dict[str, int]:
    """The axes of a mesh that a text asks for, at least 1 long. Raises ValueError."""
    pairs = [part.partition("=") for part in text.split(",")]
    sizes = {axis.strip(): int(size) for axis, _, size in pairs if size.strip().isdecimal()}
    if len(sizes) != len(pairs) or set(sizes) - {DATA, TENSOR} or 0 in sizes.values():
        raise ValueError(f"the mesh is {text!r}; expected 'data=N', 'tensor=N' or both with a comma between them")
    return sizes


def data_shards(weights: tuple[Any, Any], mesh: Mesh) -> list[tuple[Any, Any, Mesh]]:
    """(target, drafter, mesh) of each data shard: the devices of one entry of "data", and the arrays that lie on them, which are not
    copied."""
    if mesh.shape[DATA] == 1:
        return [(*weights, mesh)]

    def of_row(row: Mesh, x: jax.Array) -> jax.Array:
        parts = {shard.device: shard.data for shard in x.addressable_shards}
        sharding = NamedSharding(row, x.sharding.spec)  # pyright: ignore[reportAttributeAccessIssue]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, [parts[device] for device in row.devices.flat])

    rows = [Mesh(mesh.devices[i : i + 1], mesh.axis_names) for i in range(mesh.shape[DATA])]
    return [(*jax.tree.map(functools.partial(of_row, row), weights), row) for row in rows]
