"""Where an LLM lies: on one device, or on a mesh of several. Who loads, counts or runs something asks a Placement which."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxspec.decode.state import DecodeState
from jaxspec.interrupts import compiled
from jaxspec.model.head_guides import guided
from jaxspec.sharding import meshes
from jaxspec.sharding.kv_heads import spread
from jaxspec.sharding.layout import Layout
from jaxspec.sharding.meshes import DATA, TENSOR
from jaxspec.sharding.specs import shard_tree


@dataclasses.dataclass(frozen=True)
class OneDeviceLayout:
    """A state on one device, with the members of a `Layout`."""

    init: Callable[[], DecodeState]  # makes the empty state

    def empty(self) -> DecodeState:
        """The empty state."""
        return compiled(self._made)()

    @property
    def shapes(self) -> DecodeState:
        """That state as ShapeDtypeStructs."""
        return jax.eval_shape(self.init)

    def on(self, function: Callable[..., Any], *more: PartitionSpec) -> Callable[..., Any]:
        """`function` itself."""
        return function

    @functools.cached_property
    def _made(self) -> Callable[[], DecodeState]:
        return jax.jit(self.init)


class Placement(abc.ABC):
    """The devices that hold a target, a drafter and their state."""

    head_guides: bool
    """Whether `spread` gives heads guides: see `model.head_guides`."""

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """How many devices there are."""

    @property
    @abc.abstractmethod
    def axes(self) -> dict[str, int]:
        """The sizes of the mesh's axes by name; {} for one device."""

    @property
    @abc.abstractmethod
    def devices(self) -> tuple[Any, ...]:
        """The devices themselves."""

    @property
    @abc.abstractmethod
    def shards(self) -> int:
        """How many data shards there are: parts that have slots and pages of their own."""

    @property
    @abc.abstractmethod
    def summing_devices(self) -> tuple[Any, ...]:
        """The devices that wait for each other because their programs exchange sums; () if none do."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises TypeError or ValueError for a mesh that an LLM cannot use, as `meshes.check` does."""

    @abc.abstractmethod
    def place(self, tree: Any) -> Any:
        """A target's or drafter's abstract weights with the shardings to load them with."""

    @abc.abstractmethod
    def put(self, tree: Any) -> Any:
        """A target's or drafter's weights, copied to where `place` says."""

    @abc.abstractmethod
    def spread(self, tree: Any) -> Any:
        """Placed weights, abstract or not, as programs compute with them: see `kv_heads.spread`, and `head_guides`."""

    @abc.abstractmethod
    def sharding(self, spec: PartitionSpec) -> NamedSharding | None:
        """How an array with this spec lies; None for one device, as `jax.device_put` takes it."""

    @abc.abstractmethod
    def split(self, weights: tuple[Any, Any]) -> list[tuple[tuple[Any, Any], Placement]]:
        """((target, drafter), placement) of each data shard. Nothing is copied."""

    @abc.abstractmethod
    def layout(self, drafter: Any, init: Callable[[], DecodeState]) -> Layout | OneDeviceLayout:
        """How the state lies and how functions of it run. init: makes the empty state of one data shard."""


@dataclasses.dataclass(frozen=True)
class OneDevice(Placement):
    """JAX's default device."""

    head_guides: bool = False

    @property
    def size(self) -> int:
        return 1

    @property
    def axes(self) -> dict[str, int]:
        return {}

    @property
    def devices(self) -> tuple[Any, ...]:
        return (jax.devices()[0],)

    @property
    def shards(self) -> int:
        return 1

    @property
    def summing_devices(self) -> tuple[Any, ...]:
        return ()

    def check(self) -> None:
        pass

    def place(self, tree: Any) -> Any:
        return tree

    def put(self, tree: Any) -> Any:
        (here,) = jnp.zeros(()).devices()

        def placed(x: Any) -> jax.Array:
            array = jnp.asarray(x)
            return array if array.devices() == {here} else jax.device_put(array, here)

        return jax.tree.map(placed, tree)

    def spread(self, tree: Any) -> Any:
        return guided(tree) if self.head_guides else tree

    def sharding(self, spec: PartitionSpec) -> None:
        return None

    def split(self, weights: tuple[Any, Any]) -> list[tuple[tuple[Any, Any], Placement]]:
        return [(weights, self)]

    def layout(self, drafter: Any, init: Callable[[], DecodeState]) -> OneDeviceLayout:
        return OneDeviceLayout(init)


ONE_DEVICE = OneDevice()


@dataclasses.dataclass(frozen=True)
class OnMesh(Placement):
    """The devices of a mesh."""

    mesh: Any  # a Mesh with the axes "data" and "tensor", or an AbstractMesh where only shapes are asked for
    head_guides: bool = False

    @property
    def size(self) -> int:
        return self.mesh.size

    @property
    def axes(self) -> dict[str, int]:
        return dict(self.mesh.shape)

    @property
    def devices(self) -> tuple[Any, ...]:
        return tuple(self.mesh.devices.flat)

    @property
    def shards(self) -> int:
        return self.mesh.shape[DATA]

    @property
    def summing_devices(self) -> tuple[Any, ...]:
        return self.devices if self.mesh.shape[TENSOR] > 1 else ()

    def check(self) -> None:
        meshes.check(self.mesh)

    def place(self, tree: Any) -> Any:
        return shard_tree(tree, self.mesh)

    def put(self, tree: Any) -> Any:
        return jax.tree.map(lambda x, to: jax.device_put(x, to.sharding), tree, self.place(tree))

    def spread(self, tree: Any) -> Any:
        found = spread(tree, self.mesh)
        return guided(found) if self.head_guides else found

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    def split(self, weights: tuple[Any, Any]) -> list[tuple[tuple[Any, Any], Placement]]:
        return [((target, drafter), dataclasses.replace(self, mesh=row)) for target, drafter, row in meshes.data_shards(weights, self.mesh)]

    def layout(self, drafter: Any, init: Callable[[], DecodeState]) -> Layout:
        return Layout.of(self.mesh, drafter, init)


def placement_of(mesh: Mesh | AbstractMesh | None) -> Placement:
    """The placement on a mesh, which is not checked yet; None for one device."""
    if isinstance(mesh, Mesh):
        # Our programs leave it to the compiler how results are spread; the axes of `jax.make_mesh`, of type Explicit, do not.
        mesh = Mesh(mesh.devices, mesh.axis_names)
    return ONE_DEVICE if mesh is None else OnMesh(mesh)


def abstract_placement_of(text: str | None) -> Placement:
    """The placement, without devices, on the mesh that a text like "data=2,tensor=4" asks for; None for one device. Raises ValueError."""
    return ONE_DEVICE if text is None else OnMesh(meshes.abstract_mesh_of(text))
