"""New weights for an LLM that runs: what may be given, what it must be like, and how it is read."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec import checkpoint, drafters
from jaxspec.checkpoint.given import GIVEN, stored_of
from jaxspec.checkpoint.hub import Hub
from jaxspec.checkpoint.layout import listed
from jaxspec.checkpoint.peft import read_adapter
from jaxspec.checkpoint.quantisation import Quantisation
from jaxspec.checks import path, type_name
from jaxspec.engine.learn import Learning, Origin
from jaxspec.engine.memory import memory_limit, memory_used
from jaxspec.engine.runner import Runner
from jaxspec.interrupts import undisturbed
from jaxspec.media.tower import Media
from jaxspec.model.target import TargetConfig
from jaxspec.sharding.kv_heads import unspread
from jaxspec.sharding.placement import Placement
from jaxspec.targets import abstract_target, adapter_changes, planned_target, quantisation_of, read_quantisation, read_target
from jaxspec.trees import bytes_per_device, leaves_by_path
from pallas_kernels.lm_head import Guide

NOT_COMPUTED_WITH = ("dtype", "eos_token_id", "bos_token_id")  # settings of a target that may differ
ON_HOST = "pinned_host"  # of JAX's names of memories: GPUs copy to it and from it several times as fast as to others of the host
UPDATED = " with new weights"  # of the name of a target to which some were given
EXPECTED = {  # in place of either
    "target": "a hub id, a folder, tensors by their names in a checkpoint, or a tree of weights such as llm.target",
    "drafter": "a hub id, a folder, or a tree of weights such as llm.drafter",
}


@dataclasses.dataclass(frozen=True)
class New:
    """Weights that may take the place of others. read: gives them as `Placement.place` lays them out, once. name: of their checkpoint."""

    read: Callable[[], Any]
    name: str | None = None
    folder: Path | None = None


@dataclasses.dataclass(frozen=True)
class Reader:
    """How `load` read an LLM's weights, and reads others in their place.

    name, config: of the target. dtype: of weights that are float. quantisation: of the target's. asked: those settings of `load` that say
    how float weights are quantised. quantize_drafter, hub: as `load` has them. towers: what makes rows of images and sounds, which stay.
    """

    name: str
    config: TargetConfig
    dtype: Any
    quantisation: Quantisation | None
    asked: Mapping[str, str | None]
    quantize_drafter: str | None
    placement: Placement
    hub: Hub
    towers: Collection[Media]
    progress: bool

    def target(self, given: Any, adapter: str | os.PathLike[str] | None) -> New:
        """A target's weights, checked as far as that needs no numbers. given: see `LLM.update_weights`; None: those that `load` read.
        Raises TypeError or ValueError for what is none, or is not like those that the LLM has."""
        if adapter is not None:
            path("adapter", adapter, "a folder or a hub id")
        if given is None or isinstance(given, str | os.PathLike):
            return self._checkpoint(self.name if given is None else os.fspath(given), adapter)
        if adapter is not None:
            raise TypeError(f"an adapter is given with {type_name(given)}; it can be merged into the weights of a checkpoint alone")
        if isinstance(given, Mapping):
            tensors = stored_of(given)
            abstract = self._abstract(self.quantisation)
            return New(planned_target(GIVEN, abstract, self.quantisation, progress=self.progress, given=tensors))
        return New(self._placed("target", given, self._abstract(self.quantisation)))

    def drafter(self, given: Any, like: Any) -> New:
        """The same of a drafter. like: the weights that the LLM has."""
        if not isinstance(given, str | os.PathLike):
            return New(self._placed("drafter", given, like))
        if given in drafters.without_checkpoints():
            raise ValueError(f"drafter is {given!r}, which has no weights to be taken; expected {EXPECTED['drafter']}")
        folder = drafters.resolve(given, checkpoint.resolve(self.name, self.hub, weights=False), self.hub.of_others)
        planned = drafters.abstract_drafter(folder, self.config, self.dtype, self.quantize_drafter)
        if _form(planned) != _form(like):
            raise ValueError(f"{os.fspath(given)} is another drafter, {planned!r}, than that of the LLM, {like!r}; load it instead")
        settings = {"quantize": self.quantize_drafter, "place": self.placement.place, "progress": self.progress}
        return New(lambda: drafters.load_drafter(folder, self.config, self.dtype, **settings), os.fspath(given), folder)

    def _abstract(self, quantisation: Quantisation | None) -> Any:
        return self.placement.place(abstract_target(self.config, self.dtype, quantisation))

    def _checkpoint(self, name: str, adapter: str | os.PathLike[str] | None) -> New:
        folder = checkpoint.resolve(name, self.hub if name == self.name else self.hub.of_others)
        config, _ = read_target(folder)
        own: Any = self.config
        keys = (field.name for field in dataclasses.fields(own) if field.name not in NOT_COMPUTED_WITH)
        pairs = {key: (getattr(config, key, None), getattr(own, key)) for key in keys}
        if told := [f"{key}: found {found!r}, expected {wanted!r}" for key, (found, wanted) in pairs.items() if found != wanted]:
            raise ValueError(f"{name} is another model than the LLM's target, which `load` reads, {listed(told)}")
        quantisation = quantisation_of(folder, self.config, self.dtype, **self.asked)
        abstract, like = self._abstract(quantisation), self._abstract(self.quantisation)
        if _form(abstract) != _form(like):
            raise ValueError(f"{name} holds {abstract!r}, and the LLM {like!r}; load it instead")
        changes = {} if adapter is None else self._changes(folder, adapter)
        told = name if adapter is None else f"{name} with {os.fspath(adapter)}"
        return New(planned_target(folder, abstract, quantisation, changes, progress=self.progress), told)

    def _changes(self, folder: Path, adapter: str | os.PathLike[str]) -> dict[str, Any]:
        for tower in self.towers:
            if tower.changes(read_adapter(adapter, self.hub)):
                raise ValueError(f"the adapter {os.fspath(adapter)!r} changes the {tower.noun}, which stays; load it instead")
        changes = adapter_changes(adapter, self.hub, folder, self.config, read_quantisation(folder))
        if not changes:
            raise ValueError(f"the adapter {os.fspath(adapter)!r} changes none of the target's text weights")
        return changes

    def _placed(self, what: str, given: Any, like: Any) -> Callable[[], Any]:
        """A tree, put to where those like it lie: as `Placement.place` lays them out, or as `Placement.spread` does, whose KV heads may be
        repeated, and which leaves a tree as it is that it has made."""
        tree, abstract = bare(given), jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), bare(like))
        spread = bare(self.placement.spread(abstract))
        like = spread if jax.tree.structure(tree) == jax.tree.structure(spread) else abstract
        if jax.tree.structure(tree) != jax.tree.structure(like):
            asked = what == "target" and any(self.asked.values())
            quantised = "; of weights that `load` has quantised, float tensors by their names" if asked else ""
            raise ValueError(f"the new {what} is {given!r:.200}, and the LLM's is {like!r}; expected {EXPECTED[what]}{quantised}")
        wanted, problems = leaves_by_path(like), list[str]()
        for where, leaf in leaves_by_path(tree).items():
            if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
                problems.append(f"{where}: found {type_name(leaf)}, expected an array of JAX or NumPy")
                continue
            if isinstance(leaf, jax.Array) and leaf.is_deleted():
                problems.append(f"{where}: found an array that was donated or deleted")
                continue
            floats = all(jnp.issubdtype(x.dtype, jnp.floating) for x in (leaf, wanted[where]))
            if leaf.shape != wanted[where].shape or not (floats or leaf.dtype == wanted[where].dtype):
                problems.append(
                    f"{where}: found {leaf.dtype} {list(leaf.shape)}, expected {wanted[where].dtype} {list(wanted[where].shape)}"
                )
        if problems:
            raise ValueError(f"the new {what} does not fit, {listed(problems)}")

        def own(x: Any, to: Any) -> jax.Array:  # NumPy's are copied, since a CPU would use their memory
            return jnp.asarray(x, to.dtype) if isinstance(x, jax.Array) else jnp.array(x, to.dtype)

        return lambda: self.placement.put(jax.tree.map(own, tree, like))


class Weights:
    """The weights of an LLM on all data shards, and those that take their place.

    target: as `placement` spreads it. origin: of the drafter that was loaded, or that learns or was given since. reader: None for an LLM
    whose weights stay."""

    def __init__(self, target: Any, origin: Origin, placement: Placement, reader: Reader | None):
        self.target: Any = target  # None while it is given up; this and the next also once the LLM is closed
        self.origin: Any = origin
        self._on_host: Any = None  # the target and its shardings, while the host has it
        self.placement, self._reader = placement, reader

    def close(self) -> None:
        """Gives up the weights."""
        self.target = self.origin = self._on_host = None

    def planned(self, target: Any, drafter: Any, adapter: Any) -> tuple[New | None, New | None]:
        """(target, drafter) as `LLM.update_weights` was given them, checked; None for one that stays."""
        if target is None and drafter is None and adapter is None:
            raise TypeError("no weights are given; expected a target, an adapter or a drafter")
        if self._reader is None:
            raise RuntimeError("only an LLM that `load` has made takes other weights")
        new = None if target is None and adapter is None else self._reader.target(target, adapter)
        return new, None if drafter is None else self._reader.drafter(drafter, self.origin.weights)

    def update(
        self,
        new: New | None,
        drafter: New | None,
        name: str,
        runners: Sequence[Runner],
        learning: Learning | None,
        close: Callable[[], None],
    ) -> str:
        """Reads these and computes with them from now on. Returns the target's name. name: that of before. learning: the LLM's last.
        close: closes the LLM, where a target was given up and there is no other. No shard is stepping. Raises what reading raises."""
        origin = None
        if drafter is not None:
            if learning is not None and learning.going:
                raise RuntimeError("the drafter learns, so that it takes no other weights; close its `learning` first")
            config = None if drafter.folder is None or self._reader is None else self._reader.config
            origin = Origin(drafter.read(), drafter.folder, config)
        if new is not None:
            self._read_target(new, name, runners, learning, close)
            name = new.name or f"{name.removesuffix(UPDATED)}{UPDATED}"
        if origin is not None:
            self._use_drafter(origin, runners, learning)
        return name

    def _read_target(self, new: New, name: str, runners: Sequence[Runner], learning: Learning | None, close: Callable[[], None]) -> None:
        """Reads a target and computes with it, see `update`."""
        if not (room := self._room()):
            self._use_target(None, runners, learning)
        try:
            weights = self.placement.spread(new.read())
        except BaseException as error:
            if not room:
                close()
                error.add_note(f"the old weights had been given up for the new ones, so the LLM of {name!r} is closed")
            raise
        self._use_target(weights, runners, learning)
        self._on_host = None

    def give_up(self, to_host: bool, runners: Sequence[Runner], learning: Learning | None) -> None:
        """Gives the memory of the target's weights back. to_host: whether the host keeps them for `take_back`. Raises JaxRuntimeError if
        it has no room, before anything has changed."""
        if self.target is None:
            self._on_host = self._on_host if to_host else None
            return
        self._on_host = _on_host(self.target) if to_host else None
        self._use_target(None, runners, learning)

    def take_back(self, runners: Sequence[Runner], learning: Learning | None) -> None:
        """Puts what the host keeps back where it was. Raises RuntimeError if that is nothing, and there is no target."""
        if self.target is not None:
            return
        if self._on_host is None:
            raise RuntimeError("the target's weights were dropped; update_weights takes others")
        self._use_target(jax.device_put(*self._on_host), runners, learning)
        self._on_host = None

    def _room(self) -> bool:
        """Whether there is room for another target's weights beside these, as far as the device says."""
        device = jax.local_devices()[0]
        limit = memory_limit(device)
        return limit is None or memory_used(device) + bytes_per_device(self.target) <= limit

    def _use_target(self, weights: Any, runners: Sequence[Runner], learning: Learning | None) -> None:
        parts = [(None, None)] * len(runners) if weights is None else [part for part, _ in self.placement.split((weights, ()))]

        def use() -> None:
            self.target = weights
            if learning is not None:
                learning.follow(weights)
            for (its, _), runner in zip(parts, runners, strict=True):
                runner.use_target(its)

        undisturbed(use, to_end=True)  # no shard is left with others than the rest, nor with what was kept of those before

    def _use_drafter(self, origin: Origin, runners: Sequence[Runner], learning: Learning | None) -> None:
        parts = self.placement.split(((), self.placement.spread(origin.weights)))

        def use() -> None:
            self.origin = origin
            for ((_, its), _), runner in zip(parts, runners, strict=True):
                runner.drafting.use(its)
            if learning is not None:
                learning.origin = origin

        undisturbed(use, to_end=True)


def _on_host(tree: Any) -> tuple[Any, Any]:
    """A copy in the host's memory, and where the tree itself lies."""
    shardings = jax.tree.map(lambda x: x.sharding, tree)
    there = jax.tree.map(lambda sharding: sharding.with_memory_kind(ON_HOST), shardings)
    return jax.block_until_ready(jax.device_put(tree, there)), shardings


def bare(tree: Any) -> Any:
    """A tree of weights without what is made of them where they lie: guides of heads, and over which axes modules add up."""
    return jax.tree.map(lambda x: None if isinstance(x, Guide) else x, unspread(tree), is_leaf=lambda x: isinstance(x, Guide))


def _form(tree: Any) -> tuple[Any, list[Any]]:
    leaves, structure = jax.tree.flatten(bare(tree))
    return structure, [(leaf.shape, leaf.dtype) for leaf in leaves]
