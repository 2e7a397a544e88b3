"""Where weights and state lie on a mesh, and how the functions of `decode` run on it.

Axes of a mesh are "data" and "tensor". Every call is one `shard_map` over both: a device computes its slots with its part of the
weights, kernels see that part alone, and what communicates is in sight: sums after the projections whose inputs are spread, and the
vocabulary (see `collectives`). Over "tensor" lie KV heads with their query heads and their part of the cache, the inner width of gated
MLPs, experts, and vocabularies; over "data" lie slots, each shard of which has its own pages and its own free list.

KV heads that "tensor" does not divide are repeated until it does, and their query heads are dealt out to the copies, zero heads making
up the number: `spread` turns weights as a checkpoint has them into those. Whatever else an axis does not divide is replicated: a
vocabulary, experts, the inner width of an MLP.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxspec.decode.state import DecodeState
from jaxspec.interrupts import compiled
from jaxspec.sharding.meshes import DATA, TENSOR
from jaxspec.sharding.specs import WHOLE, dotted, first_match, is_whole, weight_specs
from pallas_kernels import all_reduce

STATE_SPECS: tuple[tuple[str, PartitionSpec], ...] = (
    (r"^mail$", PartitionSpec(DATA, TENSOR)),
    (r"\bcache\.layers\.\d+\.[kv]$", PartitionSpec(DATA, None, TENSOR, None)),
    (r"\bcache\.layers\.\d+\.scales$", WHOLE),
    (r"", PartitionSpec(DATA)),
)
WHOLE_DRAFTER_SPECS = ((r"^drafter\..*\.[kv]$", PartitionSpec(DATA)),)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the state of one target and drafter lies on a mesh, and how functions of it run there.

    A state's arrays hold the slots of all data shards one after the other; page ids and slot ids count from a shard's own first. What
    is one number for a shard (`scalars`, by path) is an array of them. init: see `of`. whole_drafter: the drafter's K and V lie on
    every device of "tensor".
    """

    mesh: Mesh
    init: Callable[[], DecodeState]
    scalars: frozenset[str]
    whole_drafter: bool

    @classmethod
    def of(cls, mesh: Mesh, drafter: Any, init: Callable[[], DecodeState]) -> Layout:
        """init: makes the empty state of one data shard, with all KV heads."""
        leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(init))
        return cls(mesh, init, frozenset(dotted(path) for path, x in leaves if not x.ndim), is_whole(drafter))

    def empty(self) -> DecodeState:
        """The empty state of all data shards, on their devices."""
        return compiled(self._made)()

    @functools.cached_property
    def _made(self) -> Callable[[], DecodeState]:
        return jax.jit(self._joined(), out_shardings=self.shardings)

    @property
    def shapes(self) -> DecodeState:
        """That state as ShapeDtypeStructs with shardings."""
        put = functools.partial(jax.tree.map, lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to))
        return put(jax.eval_shape(self._joined()), self.shardings)

    @property
    def shardings(self) -> DecodeState:
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self._specs(jax.eval_shape(self._joined())))

    def _joined(self) -> Callable[[], DecodeState]:
        """What makes the empty state of all data shards."""
        # Addresses are others in each process, so that programs take them along with the state, and can be kept.
        mail = _tables(self.mesh)

        def join(path: Any, x: jax.Array) -> jax.Array:
            if DATA not in self._state_spec(path, x):
                return x
            x = jnp.atleast_1d(x)
            return jnp.tile(x, (self.mesh.shape[DATA], *[1] * (x.ndim - 1)))

        return lambda: dataclasses.replace(jax.tree_util.tree_map_with_path(join, self.init()), mail=mail)

    def on(self, function: Callable[..., Any], *more: PartitionSpec) -> Callable[..., Any]:
        """`function` with every device computing its part.

        Its arguments are weights, if it takes any; the state; then arrays with an entry for each slot of a call, those of the first data
        shard first, and scalars. It gives the state, or a tuple of the state and what lies as `more` says.
        """

        def run(*args: Any) -> Any:
            weights, state, arrays = _parts(args)
            specs = [weight_specs(tree, self.mesh) for tree in weights]
            state_specs = self._specs(state)
            array_specs = jax.tree.map(lambda x: PartitionSpec(DATA) if np.ndim(x) else WHOLE, arrays)
            outputs = (state_specs, *more) if more else state_specs
            in_specs = (*specs, state_specs, *array_specs)
            return jax.shard_map(local, mesh=self.mesh, in_specs=in_specs, out_specs=outputs, check_vma=False)(*args)

        def local(*args: Any) -> Any:
            weights, state, arrays = _parts(args)
            mail = state.mail
            if mail is not None:
                weights = tuple(_with_mail(tree, mail[0, 0]) for tree in weights)
            out = function(*weights, dataclasses.replace(self._of_shard(state, lambda x: x[0]), mail=None), *arrays)
            state, *rest = out if more else (out,)
            state = dataclasses.replace(self._of_shard(state, lambda x: x[None]), mail=mail)
            return (state, *rest) if more else state

        return run

    def _of_shard(self, state: DecodeState, change: Callable[[jax.Array], jax.Array]) -> DecodeState:
        return jax.tree_util.tree_map_with_path(lambda path, x: change(x) if dotted(path) in self.scalars else x, state)

    def _specs(self, state: DecodeState) -> DecodeState:
        return jax.tree_util.tree_map_with_path(self._state_spec, state)

    def _state_spec(self, path: Any, x: Any) -> PartitionSpec:
        name = dotted(path)
        return first_match(name, (WHOLE_DRAFTER_SPECS if self.whole_drafter else ()) + STATE_SPECS)


def _tables(mesh: Mesh | AbstractMesh) -> np.ndarray | None:
    """What kernels that sum over "tensor" have to know, or None where `jax.lax` sums: see `pallas_kernels.all_reduce`."""
    off = os.environ.get("JAXSPEC_ALL_REDUCE") == "xla"
    return None if off or isinstance(mesh, AbstractMesh) else all_reduce.mailbox_tables(mesh.devices)


def _parts(args: tuple[Any, ...]) -> tuple[tuple[Any, ...], DecodeState, tuple[Any, ...]]:
    """The arguments of a function of states: weights, which stand before the state, the state, and what stands after it."""
    at = next(i for i, arg in enumerate(args) if isinstance(arg, DecodeState))
    return args[:at], args[at], args[at + 1 :]


def _with_mail(tree: Any, mail: jax.Array) -> Any:
    """The weights with what kernels that sum over "tensor" need, in every module that has such a sum or a part of a vocabulary."""

    def spread(x: Any) -> bool:
        return getattr(x, "sum_over", None) is not None or getattr(x, "axis", None) is not None

    def with_mail(x: Any) -> Any:
        return dataclasses.replace(x, mail=mail) if spread(x) else x

    return jax.tree.map(with_mail, tree, is_leaf=spread)
