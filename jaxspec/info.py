"""`jaxspec info`: what a checkpoint is and what it needs, as lines of text. It reads only configs, and asks no device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import checkpoint, drafters
from jaxspec.drafters.base import NoDraft
from jaxspec.engine.memory import Sizes, check_limits, fit, most_slots, size, sizes_of
from jaxspec.engine.settings import PAGE
from jaxspec.loading import MAX_SLOTS, num_draft_tokens_for
from jaxspec.model.config import FULL, SLIDING
from jaxspec.model.target import TargetConfig
from jaxspec.sharding.placement import abstract_placement_of
from jaxspec.targets import DTYPES, abstract_target, max_len_of, quantisation_of, read_target
from jaxspec.trees import bytes_per_device, leaves_by_path, nbytes, packed_kinds, weight_count

LENGTHS = tuple(1024 * 4**i for i in range(6))
UNITS = {"MB": 10**6, "GB": 10**9, "TB": 10**12, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def describe(
    folder: Path, drafter: Path | None = None, *, quantize: str | None = None, quantize_embedding: str | None = None
) -> Iterator[str]:
    """Yields lines about the target in a checkpoint folder, and about a drafter for it. quantize, quantize_embedding: as in `jaxspec.load`.

    Sizes are of the text model in the checkpoint's dtype. Raises as `jaxspec.load` does for a checkpoint that cannot be used and for a
    drafter that does not fit.
    """
    config, generation = read_target(folder)
    dtype = DTYPES.get(config.dtype, jnp.float32)
    quantisation = quantisation_of(folder, config, dtype, quantize, quantize_embedding)
    tree = abstract_target(config, dtype, quantisation)
    sliding, full = (sum(layer.kind == kind for layer in config.layers) for kind in (SLIDING, FULL))
    window = max(layer.window or 0 for layer in config.layers)
    shared = config.num_hidden_layers - len(config.kv_owners)
    experts = max(layer.num_experts for layer in config.layers)
    yield f"target      {folder}"
    yield f"layers      {sliding} sliding (window {window}), {full} full" + (f"; {shared} share K and V" if shared else "")
    yield f"width       hidden {config.hidden_size}, feed-forward {config.intermediate_size}" + (f", {experts} experts" if experts else "")
    for kind in (SLIDING, FULL):
        spec = next((layer for layer in config.layers if layer.kind == kind), None)
        if spec is not None:
            name = kind.removesuffix("_attention")
            equal = ", K = V" if spec.k_eq_v else ""
            yield f"{name:<11} {spec.num_heads} heads, {spec.num_kv_heads} KV heads of {spec.head_dim}{equal}"
    yield f"vocabulary  {config.vocab_size}; positions {config.max_position_embeddings}; generation {generation or 'unset'}"
    inputs = _embeddings(tree)
    yield f"parameters  {weight_count(tree):,}" + (f", of which {inputs:,} are per-layer embeddings" if inputs else "")
    yield f"weights     {size(nbytes(tree))} in {' and '.join([*packed_kinds(tree), jnp.dtype(dtype).name])}"
    if quantisation is not None and quantize is None:
        yield f"quantised   {quantisation.name}"
    per_token = {kind: kv_bytes_per_token(config, kind, jnp.dtype(dtype).itemsize) for kind in (SLIDING, FULL)}
    yield f"KV cache    sliding {per_token[SLIDING]:,} bytes a token, for the window; full {per_token[FULL]:,} bytes a token"
    if drafter is not None:
        draft: Any = drafters.abstract_drafter(drafter, config, dtype)
        count = checkpoint.read_generation_config(drafter).get("num_assistant_tokens", "unset")
        yield f"drafter     {drafter}"
        kind = type(draft).__name__
        yield f"            {kind}, fits; {weight_count(draft):,} parameters, {size(nbytes(draft))}; num_assistant_tokens {count}"


def describe_plan(
    folder: Path,
    drafter: Path | None = None,
    *,
    memory: int | None = None,
    jax_fraction: float = 1.0,
    memory_fraction: float = 0.9,
    num_draft_tokens: int | None = None,
    max_len: int | None = None,
    max_slots: int | None = None,
    quantize: str | None = None,
    quantize_embedding: str | None = None,
    mesh: str | None = None,
) -> Iterator[str]:
    """Yields lines about how `jaxspec.load` would use a device's memory, in the checkpoint's dtype, with kernels.

    memory: bytes of a device, of which JAX takes jax_fraction; None shows only what each part takes. mesh: such as "data=2,tensor=4";
    the lines are about one of its devices. All else is as in `jaxspec.load`, errors too.
    """
    check_limits(memory_fraction, max_slots)
    config, _ = read_target(folder)
    dtype = DTYPES.get(config.dtype, jnp.float32)
    draft: Any = NoDraft() if drafter is None else drafters.abstract_drafter(drafter, config, dtype)
    max_len = max_len_of(config, max_len)
    count = num_draft_tokens_for(draft, drafter, num_draft_tokens, max_len)
    target = abstract_target(config, dtype, quantisation_of(folder, config, dtype, quantize, quantize_embedding))
    placement = abstract_placement_of(mesh)

    def sizes_at(length: int) -> Sizes:
        return sizes_of(target, draft, max_len=length, num_draft_tokens=count, placement=placement)

    sizes = sizes_at(max_len)
    room = None if memory is None else int(memory_fraction * jax_fraction * memory)
    chosen = fit(sizes, room, max_slots, default_slots=MAX_SLOTS)
    slots, pages = chosen.slots, chosen.pages
    snapshots = min(chosen.prefix_bytes // sizes.slot, slots)  # as Runner takes them
    kept = sizes.kept(slots, pages) + snapshots * sizes.slot
    if memory is not None and room is not None:
        taken = f", of which JAX takes {jax_fraction} (XLA_CLIENT_MEM_FRACTION)" if jax_fraction < 1 else ""
        yield f"memory      {size(memory)}{taken}; memory_fraction {memory_fraction} of it is {size(room)}"
    yield f"weights     {size(sizes.target)} target, {size(sizes.drafter)} drafter"
    yield f"slot        {size(sizes.slot)}: sliding rings {size(sizes.rings)}; all else {size(sizes.slot - sizes.rings)}"
    yield f"page        {size(sizes.page)}: {PAGE} positions of full layers; {sizes.width} pages for max_len {max_len}"
    yield f"calls       about {size(sizes.work(slots))} for activations and logits, K = {count}"
    each = "" if placement.shards == 1 else f" for each of {placement.shards} data shards"
    yield f"plan        {slots} slots, {pages} pages, snapshots of {snapshots} prompts{each}"
    yield f"            {size(kept)} kept, {size(kept + sizes.work(slots))} with calls"
    if room is None:
        return
    yield "lengths     slots that can all grow to a max_len"
    for length in LENGTHS:
        if length <= config.max_position_embeddings:
            yield f"            {length:>7} {most_slots(sizes_at(length), room, 10**6):>6}"


def describe_mesh(
    folder: Path, drafter: Path | None, text: str, *, quantize: str | None = None, quantize_embedding: str | None = None
) -> Iterator[str]:
    """Yields lines about how the weights of a target and a drafter lie on a mesh such as "data=2,tensor=4", in the checkpoint's dtype or
    quantised as in `jaxspec.load`.

    Weights that differ only in their layer share a line: how many they are, their PartitionSpec, and what a device holds of them. Raises
    as `meshes.mesh_of` does.
    """
    placement = abstract_placement_of(text)
    config, _ = read_target(folder)
    dtype = DTYPES.get(config.dtype, jnp.float32)
    trees: dict[str, Any] = {"target": abstract_target(config, dtype, quantisation_of(folder, config, dtype, quantize, quantize_embedding))}
    if drafter is not None:
        trees["drafter"] = drafters.abstract_drafter(drafter, config, dtype)
    axes = ", ".join(f"{axis}={count}" for axis, count in placement.axes.items())
    yield f"mesh        {axes}: {placement.size} devices"
    for name, tree in trees.items():
        placed = placement.spread(placement.place(tree))
        groups: dict[tuple[str, Any], list[Any]] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(placed):
            group = re.sub(r"\.\d+\.", ".*.", jax.tree_util.keystr(path, simple=True, separator="."))
            groups.setdefault((group, leaf.sharding.spec), []).append(leaf)
        whole = [group for group in groups if all(axis is None for axis in group[1])]
        replicated, repeated = (nbytes([groups[group] for group in whole]), nbytes(placed) - nbytes(tree))
        more = f"; {size(repeated)} more than on one device, for repeated KV heads" if repeated else ""
        yield f"{name:<11} {size(bytes_per_device(placed))} a device, {size(replicated)} of it replicated{more}"
        for group in [*(group for group in groups if group not in whole), *whole]:
            leaves = groups[group]
            spec = "replicated" if group in whole else f"P({', '.join(map(repr, group[1]))})"
            yield f"            {size(bytes_per_device(leaves)):>12}  {len(leaves):>3} x {group[0]}  {spec}"


def bytes_of(text: str) -> int:
    """The bytes in a number with a unit, such as 80GB or 24GiB. Raises ValueError for any other text."""
    found = re.fullmatch(rf"(\d+(?:\.\d+)?) ?({'|'.join(UNITS)})", text, re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is not an amount of memory; expected a number and one of {', '.join(UNITS)}, such as 80GB")
    return int(float(found[1]) * next(count for unit, count in UNITS.items() if unit.lower() == found[2].lower()))


def kv_bytes_per_token(config: TargetConfig, kind: str, itemsize: int) -> int:
    """Bytes that a token adds to the cache, over all layers of `kind` that own K and V. itemsize: bytes of an element."""
    owners = (config.layers[i] for i in config.kv_owners)
    return sum(spec.num_kv_heads * (spec.key_dims + spec.head_dim) * itemsize for spec in owners if spec.kind == kind)


def _embeddings(tree: Any) -> int:
    return sum(leaf.size for path, leaf in leaves_by_path(tree).items() if path.startswith("embed_tokens_per_layer."))
