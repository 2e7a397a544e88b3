"""Where weights and state lie on a mesh, and how the functions of `decode` run on it.

Axes of a mesh are "data" and "tensor". Every call is one `shard_map` over both: a device computes its slots with its part of the
weights, kernels see that part alone, and what communicates is in sight: sums after the projections whose inputs are spread, and the
vocabulary (see `parallel`). Over "tensor" lie KV heads with their query heads and their part of the cache, the inner width of gated
MLPs, experts, and vocabularies; over "data" lie slots, each shard of which has its own pages and its own free list.

KV heads that "tensor" does not divide are repeated until it does, and their query heads are dealt out to the copies, zero heads making
up the number: `spread` turns weights as a checkpoint has them into those. Whatever else an axis does not divide is replicated: a
vocabulary, experts, the inner width of an MLP.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxspec.decode.state import DecodeState
from jaxspec.drafters.assistant import Gemma4MTP
from jaxspec.drafters.blocks import SiluMLP
from jaxspec.drafters.dflash import DFlash, DFlashAttention
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.eagle3 import Eagle3, Eagle3Attention
from jaxspec.drafters.mtp_modules import Module, MTPModules
from jaxspec.model.config import LayerSpec
from jaxspec.model.gemma4 import Attention, Gemma4
from jaxspec.model.layers import Embedding, GatedMLP
from jaxspec.model.moe import Experts
from pallas_kernels import all_reduce

DATA, TENSOR = "data", "tensor"
WHOLE = PartitionSpec()
SPREAD = (Gemma4, Gemma4MTP, DFlash, Eagle3, MTPModules, DraftModel)  # any other drafter lies on every device
# A draft model whose layers take less, in bytes, is read by every device sooner than two sums a layer are made.
SMALL_LAYER = 2**27

# The first pattern found in a path rules; what no row names is replicated. Paths begin with the class of the whole tree. Fused layouts:
# see gemma4.py and drafters/.
WEIGHTS: tuple[tuple[str, PartitionSpec], ...] = (
    (r"^Gemma4MTP\b.*\bmlp\.", WHOLE),  # so narrow that a sum takes longer than reading it
    (r"^Gemma4MTP with centroids\.model\.embed_tokens\.", WHOLE),  # a few of whose rows are read, in any order
    (r"embed_tokens(_per_layer)?\.weight$", PartitionSpec(TENSOR, None)),
    (r"(lm_head|shared_head\.output)\.weight$", PartitionSpec(TENSOR, None)),
    (r"\b(fc|eh_proj)\.weight$", PartitionSpec(TENSOR, None)),
    (r"\b(qkv|q)_proj\.weight$", PartitionSpec(TENSOR, None, None, None)),
    (r"\bkv_proj\.weight$", PartitionSpec(None, None, TENSOR, None, None)),
    (r"\bo_proj\.weight$", PartitionSpec(None, TENSOR, None, None)),
    (r"experts\.gate_up_proj$", PartitionSpec(TENSOR, None, None, None)),
    (r"experts\.down_proj$", PartitionSpec(TENSOR, None, None)),
    (r"mlp\.gate_up_proj\.weight$", PartitionSpec(None, TENSOR, None)),
    (r"mlp\.down_proj\.weight$", PartitionSpec(None, TENSOR)),
)
STATE: tuple[tuple[str, PartitionSpec], ...] = (
    (r"^mail$", PartitionSpec(DATA, TENSOR)),
    (r"\bcache\.layers\.\d+\.[kv]$", PartitionSpec(DATA, None, TENSOR, None)),
    (r"\bcache\.layers\.\d+\.scales$", WHOLE),
    (r"", PartitionSpec(DATA)),
)
WHOLE_DRAFTER = ((r"^drafter\..*\.[kv]$", PartitionSpec(DATA)),)


def mesh(*, data: int = 1, tensor: int = 1) -> Mesh:
    """A mesh of the first data * tensor devices. Raises ValueError if there are fewer, and as `check` does."""
    devices = jax.devices()
    if data < 1 or tensor < 1 or data * tensor > len(devices):
        raise ValueError(f"a mesh of data={data} times tensor={tensor} devices was asked for; found {len(devices)} devices")
    made = Mesh(np.asarray(devices[: data * tensor]).reshape(data, tensor), (DATA, TENSOR))
    check(made)
    return made


def check(mesh: Mesh) -> None:
    """Raises TypeError for what is no mesh, ValueError for one of other axes or one that spreads data over processes."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is {mesh!r}, expected a Mesh, as jaxspec.mesh(data=2, tensor=4) makes it")
    if mesh.axis_names != (DATA, TENSOR):
        raise ValueError(f"mesh has axes {mesh.axis_names}, expected 'data' and 'tensor' in this order")
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
    sizes = {axis.strip(): int(size) for axis, _, size in pairs if size.strip().isdigit()}
    if len(sizes) != len(pairs) or set(sizes) - {DATA, TENSOR} or 0 in sizes.values():
        raise ValueError(f"the mesh is {text!r}; expected 'data=N', 'tensor=N' or both with a comma between them")
    return sizes


def shard_tree(tree: Any, mesh: Mesh) -> Any:
    """A target's or a drafter's weights as ShapeDtypeStructs, with the sharding that WEIGHTS gives each."""
    specs = weight_specs(tree, mesh)
    return jax.tree.map(lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree, specs)


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


def weight_specs(tree: Any, mesh: Mesh) -> Any:
    """The PartitionSpec of every weight of a target or a drafter, in whose place it stands."""
    root = _root(tree)
    return jax.tree_util.tree_map_with_path(lambda path, x: _weight_spec(f"{root}.{_name(path)}", x.shape, mesh, is_whole(tree)), tree)


def nbytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, over all devices a replica counted once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def bytes_per_device(tree: Any) -> int:
    """Bytes that each device holds of a tree of arrays or ShapeDtypeStructs, all of it where they have no sharding."""

    def local(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        return math.prod(x.shape if sharding is None else sharding.shard_shape(x.shape)) * x.dtype.itemsize

    return sum(map(local, jax.tree.leaves(tree)))


def is_whole(tree: Any) -> bool:
    """Whether a target or drafter lies on every device of "tensor", and with it a drafter's part of the state."""
    if not isinstance(tree, DraftModel):
        return not isinstance(tree, SPREAD)
    layers = tree.model.layers
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layers)) < len(layers) * SMALL_LAYER


def spread(tree: Any, mesh: Mesh) -> Any:
    """A target or a drafter as a device of the mesh computes with it inside `Layout.on`: KV heads repeated as often as "tensor" needs,
    and every module told over which axis its part of a sum or of a vocabulary lies.

    tree: weights, or ShapeDtypeStructs, that lie as `shard_tree` says. Returns the same, of the new shapes."""
    return tree if is_whole(tree) or mesh.shape[TENSOR] == 1 else _spread(tree, _root(tree), mesh)


def _spread(tree: Any, path: str, mesh: Mesh) -> Any:
    if isinstance(tree, tuple):
        return tuple(_spread(x, f"{path}.{i}", mesh) for i, x in enumerate(tree))
    if isinstance(tree, dict):
        return {name: _spread(x, f"{path}.{name}", mesh) for name, x in tree.items()}
    if not dataclasses.is_dataclass(tree):
        return tree
    weights = [field.name for field in dataclasses.fields(tree) if field.metadata.get("pytree_node", True)]
    parts = {name: _spread(getattr(tree, name), f"{path}.{name}", mesh) for name in weights}
    module: Any = dataclasses.replace(tree, **parts)  # pyright: ignore[reportArgumentType]
    changes: dict[str, Any] = {}

    def on_tensor(weight: str, leaf: Any) -> bool:
        return TENSOR in _weight_spec(f"{path}.{weight}", leaf.shape, mesh)

    def gathered(name: str) -> None:
        linear = getattr(module, name)
        if linear is not None and on_tensor(f"{name}.weight", linear.weight):
            changes[name] = dataclasses.replace(linear, gather_over=TENSOR)

    if isinstance(module, Attention | DFlashAttention | Eagle3Attention):
        changes["spec"], queries = _repeated(module.spec, mesh), "q_proj" if isinstance(module, DFlashAttention) else "qkv_proj"
        for name, axis in ((queries, 0), ("o_proj", 1)):
            linear = getattr(module, name)
            weight = _dealt(linear.weight, f"{path}.{name}.weight", axis, module.spec.group, module.spec, mesh)
            changes[name] = dataclasses.replace(linear, weight=weight, sum_over=TENSOR if name == "o_proj" else None)
    elif isinstance(module, GatedMLP | SiluMLP) and on_tensor("down_proj.weight", module.down_proj.weight):
        changes["down_proj"] = dataclasses.replace(module.down_proj, sum_over=TENSOR)
    elif (isinstance(module, Embedding) and on_tensor("weight", module.weight)) or (
        isinstance(module, Experts) and on_tensor("down_proj", module.down_proj)
    ):
        changes["axis"] = TENSOR
    elif isinstance(module, Module):
        gathered("eh_proj")
    elif isinstance(module, DFlash | Eagle3):
        gathered("fc")
        if module.d2t is not None:
            gathered("lm_head")
    if isinstance(module, DFlash):
        weight = _dealt(module.kv_proj.weight, f"{path}.kv_proj.weight", 2, 0, module.config.layers[0], mesh)
        changes["kv_proj"] = dataclasses.replace(module.kv_proj, weight=weight)
    if (config := getattr(module, "config", None)) is not None:
        changes["config"] = _repeated_config(config, mesh)
    return dataclasses.replace(module, **changes)


def _repeated(spec: LayerSpec, mesh: Mesh) -> LayerSpec:
    """The layer with each KV head as often as "tensor" needs, and as many query heads for each copy as all of them need."""
    copies = _copies(spec, mesh)
    kv_heads = spec.num_kv_heads * copies
    return dataclasses.replace(spec, num_kv_heads=kv_heads, num_heads=kv_heads * -(-spec.group // copies))


def _repeated_config(config: Any, mesh: Mesh) -> Any:
    if hasattr(config, "text"):
        return dataclasses.replace(config, text=_repeated_config(config.text, mesh))
    return dataclasses.replace(config, layers=tuple(_repeated(spec, mesh) for spec in config.layers))


def _copies(spec: LayerSpec, mesh: Mesh) -> int:
    return mesh.shape[TENSOR] // math.gcd(spec.num_kv_heads, mesh.shape[TENSOR])


def _dealt(weight: Any, path: str, axis: int, queries: int, spec: LayerSpec, mesh: Mesh) -> Any:
    """The weight with each KV head's `queries` query heads dealt out to its copies; see `_deal`."""
    copies = _copies(spec, mesh)
    if copies == 1:
        return weight
    settings = (axis, queries, -(-queries // copies), copies)
    shape = jax.eval_shape(functools.partial(_deal, axis=axis, queries=queries, group=settings[2], copies=copies), weight).shape
    sharding = NamedSharding(mesh, _weight_spec(path, shape, mesh))
    if isinstance(weight, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(shape, weight.dtype, sharding=sharding)
    return _deal_onto(sharding)(weight, *settings)


@functools.cache
def _deal_onto(sharding: NamedSharding) -> Callable[..., jax.Array]:
    return jax.jit(_deal, static_argnums=(1, 2, 3, 4), out_shardings=sharding)


def _deal(weight: jax.Array, axis: int, queries: int, group: int, copies: int) -> jax.Array:
    """weight: KV heads on `axis`, of which the first `queries` entries of the next axis are dealt out, `group` to each of `copies`
    copies and zeros where there are no more; all other entries are repeated."""
    own, shared = jnp.split(weight, [queries], axis=axis + 1)
    ends = [(0, 0)] * weight.ndim
    ends[axis + 1] = (0, copies * group - queries)
    own = jnp.pad(own, ends).reshape(*weight.shape[: axis + 1], copies, group, *weight.shape[axis + 2 :])
    shared = jnp.broadcast_to(jnp.expand_dims(shared, axis + 1), (*own.shape[: axis + 2], *shared.shape[axis + 1 :]))
    both = jnp.concatenate([own, shared], axis=axis + 2)
    return both.reshape(*weight.shape[:axis], -1, *both.shape[axis + 2 :])


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
        return cls(mesh, init, frozenset(_name(path) for path, x in leaves if not x.ndim), is_whole(drafter))

    def empty(self) -> DecodeState:
        """The empty state of all data shards, on their devices."""
        return jax.jit(self._joined(), out_shardings=self.shardings)()

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

        It takes weights, the state, arrays with an entry for each slot of a call, those of the first data shard first, and scalars; it
        gives the state, or a tuple of the state and what lies as `more` says.
        """

        def run(*args: Any) -> Any:
            specs = tuple(self._specs(arg) for arg in args)
            state = next(spec for spec in specs if isinstance(spec, DecodeState))
            outputs = (state, *more) if more else state
            return jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=outputs, check_vma=False)(*args)

        def local(*args: Any) -> Any:
            mail = next(arg for arg in args if isinstance(arg, DecodeState)).mail
            out = function(*(self._local(arg, mail) for arg in args))
            state, *rest = out if more else (out,)
            state = dataclasses.replace(self._of_shard(state, lambda x: x[None]), mail=mail)
            return (state, *rest) if more else state

        return run

    def _local(self, arg: Any, mail: jax.Array | None) -> Any:
        """An argument as a device's function takes it."""
        if isinstance(arg, DecodeState):
            return dataclasses.replace(self._of_shard(arg, lambda x: x[0]), mail=None)
        return arg if mail is None or not _is_weights(arg) else _with_mail(arg, mail[0, 0])

    def _of_shard(self, state: DecodeState, change: Callable[[jax.Array], jax.Array]) -> DecodeState:
        return jax.tree_util.tree_map_with_path(lambda path, x: change(x) if _name(path) in self.scalars else x, state)

    def _specs(self, arg: Any) -> Any:
        if isinstance(arg, DecodeState):
            return jax.tree_util.tree_map_with_path(self._state_spec, arg)
        if _is_weights(arg):
            return weight_specs(arg, self.mesh)
        return jax.tree.map(lambda x: PartitionSpec(DATA) if np.ndim(x) else WHOLE, arg)

    def _state_spec(self, path: Any, x: Any) -> PartitionSpec:
        name = _name(path)
        return _found(name, (WHOLE_DRAFTER if self.whole_drafter else ()) + STATE)


def _tables(mesh: Mesh | AbstractMesh) -> np.ndarray | None:
    """What kernels that sum over "tensor" have to know, or None where `jax.lax` sums: see `pallas_kernels.all_reduce`."""
    off = os.environ.get("JAXSPEC_ALL_REDUCE") == "xla"
    return None if off or isinstance(mesh, AbstractMesh) else all_reduce.tables(mesh.devices)


def _is_weights(arg: Any) -> bool:
    """Whether this is a target or a drafter."""
    return isinstance(arg, Gemma4) or hasattr(arg, "taps")


def _with_mail(tree: Any, mail: jax.Array) -> Any:
    """The weights with what kernels that sum over "tensor" need, in every module that has such a sum or a part of a vocabulary."""

    def spread(x: Any) -> bool:
        return getattr(x, "sum_over", None) is not None or getattr(x, "axis", None) is not None

    def with_mail(x: Any) -> Any:
        return dataclasses.replace(x, mail=mail) if spread(x) else x

    return jax.tree.map(with_mail, tree, is_leaf=spread)


def _weight_spec(name: str, shape: tuple[int, ...], mesh: Mesh, whole: bool = False) -> PartitionSpec:
    spec = WHOLE if whole else _found(name, WEIGHTS)
    fits = (axis if axis is None or size % mesh.shape[axis] == 0 else None for axis, size in zip(spec, shape, strict=False))
    return PartitionSpec(*fits)


def _found(name: str, rows: tuple[tuple[str, PartitionSpec], ...]) -> PartitionSpec:
    return next((spec for pattern, spec in rows if re.search(pattern, name)), WHOLE)


def _root(tree: Any) -> str:
    with_centroids = isinstance(tree, Gemma4MTP) and tree.masked_embedding is not None
    return type(tree).__name__ + (" with centroids" if with_centroids else "")


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
