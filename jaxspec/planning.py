"""A target and a drafter for it: from their names to what has been checked of both, and to how a device's memory is used, before any
weights are read. `load` and `jaxspec info` decide here, so that neither plans what the other refuses."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxspec import checkpoint, drafters, released
from jaxspec.checkpoint.changes import Change
from jaxspec.checkpoint.hub import HUB, Hub
from jaxspec.checkpoint.quantisation import Quantisation
from jaxspec.checks import integer
from jaxspec.drafters.base import NoDraft, check_tree, fitted, num_draft_tokens_of
from jaxspec.drafters.checking import check, check_members
from jaxspec.drafters.registry import SAME
from jaxspec.engine.intake import MAX_STOP_IDS
from jaxspec.engine.memory import MemoryPlan, Sizes, fit, size, sizes_of
from jaxspec.engine.params import Defaults
from jaxspec.learning.settings import Learn
from jaxspec.model.draft_tree import DraftTree
from jaxspec.model.target import TargetConfig, TargetModel
from jaxspec.sharding.placement import ONE_DEVICE, Placement, abstract_placement_of
from jaxspec.targets import (
    DTYPES,
    abstract_target,
    adapter_changes,
    asked_quantisation,
    eos_token_ids,
    quantisation_of,
    read_quantisation,
    read_target,
)
from jaxspec.trees import bytes_per_device, weight_count

GUIDE_SHARE = 1 / 16  # of the memory that weights leave, at most so much is for guides of heads unless they were asked for
USED_SHARE = 1 / 16  # of the room; less of it in use does not explain why something does not fit
KV_DTYPES = {"auto": None, **DTYPES, "fp8": jnp.float8_e4m3fn}


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and a drafter that fits it, as trees of ShapeDtypeStructs that lie nowhere yet."""

    folder: Path | None  # of the target; None of a released shape, which has no weights
    config: TargetConfig
    generation: dict[str, Any]  # generation_config.json
    defaults: Defaults
    dtype: Any  # of the weights
    target: TargetModel
    quantisation: Quantisation | None
    changes: dict[str, Change]  # of an adapter
    drafter_folder: Path | None  # None of a drafter that is no checkpoint
    drafter: Any  # an object of the user's has its weights

    def num_draft_tokens(self, asked: int | None, max_len: int) -> int:
        """Drafts a round: what was asked for, by default what the drafter's generation config or its kind says. Raises TypeError or
        ValueError for a number that cannot be, and for a drafter of another's making that breaks the protocol with that many."""
        count = num_draft_tokens_for(self.drafter, self.drafter_folder, asked, max_len)
        self._check(num_draft_tokens=count)
        return count

    def check_tree(self, tree: DraftTree) -> None:
        """Raises as `drafters.base.check_tree`, and TypeError or ValueError for a drafter of another's making that breaks the protocol."""
        check_tree(self.drafter, tree, self.config)
        self._check(num_draft_tokens=tree.depth, tree=tree)

    def _check(self, **asked: Any) -> None:
        if not type(self.drafter).__module__.startswith("jaxspec."):  # ours have tests
            check(self.drafter, self.target, **asked)


def pair_of(
    target: str | os.PathLike[str],
    drafter: Any = None,
    hub: Hub = HUB,
    *,
    dtype: Callable[[str], Any] = lambda name: DTYPES.get(name, jnp.float32),
    adapter: str | os.PathLike[str] | None = None,
    quantize: str | None = None,
    quantize_embedding: str | None = None,
    quantize_activations: str | None = None,
    quantize_drafter: str | None = None,
) -> Pair:
    """The target and the drafter of these names, of which only configs and the drafter's weights are downloaded.

    hub: of the target; its revision is the target's alone. dtype: from the name of the checkpoint's to that of the weights, by default
    the same. All else is as for `load`, and so is what is raised.
    """
    folder = checkpoint.resolve(target, hub, weights=False)
    config, generation = read_target(folder)
    try:
        defaults = Defaults.of(generation)
        if (ends := len(eos_token_ids(config, generation))) > MAX_STOP_IDS:
            raise ValueError(f"eos_token_id has {ends} ids, expected at most {MAX_STOP_IDS}")
        if set(range(config.vocab_size)) <= set(defaults.suppress_tokens):
            raise ValueError(f"suppress_tokens has all {config.vocab_size} ids of the vocabulary, so no token could be chosen")
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'generation_config.json'} cannot be used: {error}") from error
    if ignored := Defaults.left_out(generation):
        names = ", ".join(ignored)
        warnings.warn(f"{folder / 'generation_config.json'} has {names}, which requests do not take from it", UserWarning, stacklevel=3)
    chosen = dtype(config.dtype)
    made = drafters.without_checkpoints()
    if isinstance(drafter, str) and drafter in made:
        drafter = made[drafter].made()
    if isinstance(drafter, str | os.PathLike):
        drafter_folder = drafters.resolve(drafter, folder, hub.of_others)
        planned = drafters.abstract_drafter(drafter_folder, config, chosen, quantize_drafter)
    else:
        drafter_folder, planned = None, _object(drafter, config)
        _check_no_quantising(quantize_drafter, planned)
    quantisation = quantisation_of(folder, config, chosen, quantize, quantize_embedding, quantize_activations)
    changes = {} if adapter is None else adapter_changes(adapter, hub, folder, config, read_quantisation(folder))
    tree = abstract_target(config, chosen, quantisation)
    return Pair(folder, config, generation, defaults, chosen, tree, quantisation, changes, drafter_folder, planned)


def released_pair(
    target: str,
    drafter: str | None = None,
    hub: Hub = HUB,
    *,
    quantize: str | None = None,
    quantize_embedding: str | None = None,
    quantize_activations: str | None = None,
    quantize_drafter: str | None = None,
) -> Pair:
    """The released target of a name such as "e4b", of which there need be no checkpoint, and a drafter, of which neither.

    drafter: a name of `released.drafter_names`, "same" for the MTP modules that a target's checkpoint holds, a kind without checkpoints
    such as "ngram", or a checkpoint's name. Raises ValueError or FileNotFoundError for what is none of these.
    """
    config = released.target_config(target)
    dtype = DTYPES[config.dtype]
    folder, made = None, drafters.without_checkpoints()
    if drafter is None or drafter in made:
        planned = NoDraft() if drafter is None else made[drafter].made()
        _check_no_quantising(quantize_drafter, planned)
    elif drafter == SAME or drafter in released.drafter_names():
        planned = released.abstract_drafter(drafter, target, config, dtype, quantize_drafter)
    else:
        folder = released.resolve(drafter, hub.of_others)
        planned = drafters.abstract_drafter(folder, config, dtype, quantize_drafter)
    quantisation = asked_quantisation(config, dtype, quantize, quantize_embedding, quantize_activations)
    return Pair(None, config, {}, Defaults(), dtype, abstract_target(config, dtype, quantisation), quantisation, {}, folder, planned)


def _check_no_quantising(quantize_drafter: str | None, drafter: Any) -> None:
    """Raises ValueError if a drafter that is no checkpoint is to be quantised."""
    if quantize_drafter is not None:
        raise ValueError(
            f"quantize_drafter is {quantize_drafter!r}, but the drafter, {type(drafter).__name__}, is no checkpoint, and weights are "
            "quantised as they are read from one; expected None"
        )


def num_draft_tokens_for(drafter: Any, folder: Path | None, asked: int | None, max_len: int) -> int:
    """See `Pair.num_draft_tokens`. folder: None for a drafter that is no checkpoint."""
    if asked is None:
        named = None if folder is None else checkpoint.read_generation_config(folder).get("num_assistant_tokens")
        if isinstance(named, float) and named.is_integer():  # transformers leaves one there after texts that it wrote with the drafter
            named = int(named)
        try:
            named = None if named is None else integer("num_assistant_tokens", named, 0)
        except (TypeError, ValueError) as error:
            raise ValueError(f"generation_config.json in {folder}: {error}") from error
        return min(named or num_draft_tokens_of(drafter), max_len - 1)
    count = integer("num_draft_tokens", asked, 0, max_len - 1)
    if count and num_draft_tokens_of(drafter) == 0:
        raise ValueError(f"num_draft_tokens is {count} but there is no drafter; expected 0, or a drafter")
    return count


def plan(
    pair: Pair,
    room: int | None,
    *,
    placement: Placement = ONE_DEVICE,
    max_len: int,
    num_draft_tokens: int,
    kv_dtype: str = "auto",
    kernels: bool = True,
    slots: int | None = None,
    pages: int | None = None,
    default_slots: int,
    show: Callable[[int], str] = size,
    learn: Learn | None = None,
    insert_rows: int = 0,
    used: int = 0,
) -> tuple[Sizes, MemoryPlan]:
    """What each device holds, and what a data shard makes of its memory. room: bytes of a device that may be taken, None where it does
    not say. slots, pages, default_slots: as for `memory.fit`. show: how bytes are told. learn, insert_rows: as for `memory.sizes_of`.
    used: bytes beside the room that this process has taken. Raises ValueError if it does not fit, with what would help."""
    sizes: dict[str, Any] = {"max_len": max_len, "num_draft_tokens": num_draft_tokens, "kv_dtype": KV_DTYPES[kv_dtype], "kernels": kernels}
    sizes |= {"learn": learn, "insert_rows": insert_rows}
    found = sizes_of(pair.target, pair.drafter, placement=placement, **sizes)
    try:
        return found, fit(found, room, slots, pages, default_slots=default_slots, show=show)
    except ValueError as error:
        helps = list(_what_helps(pair, room, placement, sizes)) if room is not None and slots is None and pages is None else []
        more = f". With {', or '.join(helps)}, it fits" if helps else ""
        if room is not None and used > max(USED_SHARE * room, 0):
            more += f". Another {show(used)} are in use by this process; an LLM's are given back by its close()"
        raise ValueError(f"{error}{more}") from error


def with_head_guides(placement: Placement, target: Any, drafter: Any, asked: bool | None, room: int | None, *, pays: bool) -> Placement:
    """The placement, which gives heads guides if that was asked for, or by default if it pays and they are small beside what is left.

    target, drafter: abstract weights. asked: as `load` takes it. room: bytes of a device that may be taken, None where it does not say.
    pays: whether heads with guides are faster on the device. Raises TypeError for anything else."""
    if asked not in (None, True, False):
        raise TypeError(f"head_guide is {asked!r}, expected True, False or None")
    guiding = dataclasses.replace(placement, head_guides=True)  # pyright: ignore[reportArgumentType]
    if asked is None and pays and room is not None:
        without, both = (sum(bytes_per_device(p.spread(p.place(tree))) for tree in (target, drafter)) for p in (placement, guiding))
        asked = both - without <= GUIDE_SHARE * (room - without)
    return guiding if asked else placement


def _what_helps(pair: Pair, room: int, placement: Placement, sizes: dict[str, Any]) -> Iterator[str]:
    """What would make room on a device, the least change first."""

    def fits(target: Any, drafter: Any, placement: Placement) -> bool:
        try:
            fit(sizes_of(target, drafter, placement=placement, **sizes), room)
        except ValueError:  # too large still, or a mesh that this target cannot lie on
            return False
        return True

    for matrices, embedding in _fewer_bits(pair.quantisation):
        try:
            packed = abstract_target(
                pair.config, pair.dtype, asked_quantisation(pair.config, pair.dtype, matrices, embedding, found=pair.quantisation)
            )
        except ValueError:  # an embedding that is no head
            continue
        if fits(packed, pair.drafter, placement):
            asked = {"quantize": matrices, "quantize_embedding": embedding}
            asked = {name: kind for name, kind in asked.items() if kind is not None}
            options = " ".join(f"--{name.replace('_', '-')} {kind}" for name, kind in asked.items())
            yield f"{' and '.join(f'{name}={kind!r}' for name, kind in asked.items())} ({options})"
            break
    tensor, data = placement.axes.get("tensor", 1), placement.shards
    for count in (2, 4, 8):
        if count > tensor and fits(pair.target, pair.drafter, abstract_placement_of(f"data={data},tensor={count}")):
            yield f"tensor={count} (--mesh tensor={count})"
            break
    for name, kinds in reversed(released.OFFERED.items()):
        config = released.target_config(name)
        for kind in kinds:
            smaller = abstract_target(config, pair.dtype, asked_quantisation(config, pair.dtype, kind))
            if weight_count(smaller) < weight_count(pair.target) and fits(smaller, NoDraft(), placement):
                yield f"a smaller target, such as {name.upper()}" + ("" if kind is None else f" in {kind}")
                return


def _fewer_bits(found: Quantisation | None) -> list[tuple[str | None, str | None]]:
    """`quantize` and `quantize_embedding` as they would make weights smaller, the least change first. found: how they are quantised."""
    if found is None or found.dense:
        return [(kind, embedding) for embedding in (None, "int8") for kind in ("int8", "int4")]
    return [(None, "int8")] if found.embedding is None else []


def _object(drafter: Any, config: TargetConfig) -> Any:
    """A drafter that is no checkpoint, bound to the target."""
    if drafter is None:
        return NoDraft()
    check_members(drafter)
    try:
        return fitted(drafter, config)
    except ValueError as error:
        raise ValueError(f"the drafter {type(drafter).__name__} cannot be used with this target: {error}") from error
